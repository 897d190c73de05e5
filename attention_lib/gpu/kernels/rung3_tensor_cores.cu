// Rung 3: the matrix products on the tensor cores; S and P never leave the registers.
//
// Source: FlashAttention-2, arXiv 2307.08691, Algorithm 1 and section 3.3 (each warp takes rows
// of Q, so warps need not talk). The idea: mma.sync leaves S in registers in exactly the layout in
// which the next mma.sync wants P. 4 warps of 16 rows each; K and V tiles of 64 rows in shared
// memory, read with ldmatrix. The rows of a tile are 2 d bytes apart, so eight rows of a matrix
// start in the same bank: the next rung mends that.

#include "common.cuh"
#include "ptx.cuh"

const int WARPS = 4, Br = 16 * WARPS, Bc = 64, THREADS = 32 * WARPS;
const int STEPS = HEAD / 16;  // of 16 columns of d

struct Shared {
    T Q[Br][HEAD], K[Bc][HEAD], V[Bc][HEAD];
};
static_assert(sizeof(Shared) == SHARED);  // what the launch asks for

// Rows of 8 numbers at a time: 16 bytes a thread.
__device__ __forceinline__ void load(T (*tile)[HEAD], const T *from, i64 stride, int n) {
    for (int x = threadIdx.x; x < 64 * HEAD / 8; x += THREADS) {
        int r = x / (HEAD / 8), c = x % (HEAD / 8) * 8;
        uint4 zero = {};
        *(uint4 *)&tile[r][c] = r < n ? *(const uint4 *)&from[r * stride + c] : zero;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const Params p) {
    extern __shared__ __align__(16) char memory[];
    Shared &s = *(Shared *)memory;
    int blocks = (p.Nq + Br - 1) / Br, head = blockIdx.x / blocks;
    int b = head / p.heads, h = head % p.heads;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int row0 = blockIdx.x % blocks * Br, row = row0 + 16 * warp + g;  // and row + 8
    const T *K = head_of(p.K, b, h / p.group), *V = head_of(p.V, b, h / p.group);

    load(s.Q, head_of(p.Q, b, h) + row0 * p.Q.row, p.Q.row, p.Nq - row0);

    float O[2 * STEPS][4] = {};              // 16 x d, as d/8 pieces of 16 x 8
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // of rows g and g + 8

    for (int col0 = 0; col0 < p.Nk; col0 += Bc) {
        __syncthreads();
        load(s.K, K + col0 * p.K.row, p.K.row, p.Nk - col0);
        load(s.V, V + col0 * p.V.row, p.V.row, p.Nk - col0);
        __syncthreads();

        float S[Bc / 8][4] = {};  // score: 16 x 64
        #pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 Q[4];  // 16 rows, 16 columns of d
            ldmatrix(Q, shared_address(&s.Q[16 * warp + lane % 16][16 * k + lane / 16 * 8]));
            #pragma unroll
            for (int n = 0; n < Bc / 16; n++) {
                u32 B[4];  // 16 keys, 16 columns of d: B for two pieces of S
                int key = 16 * n + lane % 8 + lane / 16 * 8;
                ldmatrix(B, shared_address(&s.K[key][16 * k + lane / 8 % 2 * 8]));
                mma(S[2 * n], Q, B);
                mma(S[2 * n + 1], Q, B + 2);
            }
        }

        float m_tile[2] = {-INFINITY, -INFINITY};
        #pragma unroll
        for (int n = 0; n < Bc / 8; n++)
            #pragma unroll
            for (int x = 0; x < 4; x++) {
                bool see = visible(p, row + x / 2 * 8, col0 + 8 * n + 2 * t + x % 2);
                S[n][x] = see ? S[n][x] * p.scale : -INFINITY;
                m_tile[x / 2] = fmaxf(m_tile[x / 2], S[n][x]);
            }

        #pragma unroll
        for (int i = 0; i < 2; i++) {  // rescale
            float m_new = fmaxf(m[i], row_max(m_tile[i])), shift = finite_or_zero(m_new);
            float rescale = __expf(m[i] - shift), l_tile = 0.f;
            #pragma unroll
            for (int n = 0; n < Bc / 8; n++)
                #pragma unroll
                for (int x = 2 * i; x < 2 * i + 2; x++)
                    l_tile += S[n][x] = __expf(S[n][x] - shift);
            l[i] = l[i] * rescale + l_tile;  // this lane's keys only; added up at the end
            m[i] = m_new;
            #pragma unroll
            for (int n = 0; n < 2 * STEPS; n++) O[n][2 * i] *= rescale, O[n][2 * i + 1] *= rescale;
        }

        #pragma unroll
        for (int k = 0; k < Bc / 16; k++) {  // accumulate
            u32 P[4] = {pack(S[2 * k][0], S[2 * k][1]), pack(S[2 * k][2], S[2 * k][3]),
                        pack(S[2 * k + 1][0], S[2 * k + 1][1]),
                        pack(S[2 * k + 1][2], S[2 * k + 1][3])};
            #pragma unroll
            for (int n = 0; n < STEPS; n++) {
                u32 B[4];
                int key = 16 * k + lane % 16;
                ldmatrix_transposed(B, shared_address(&s.V[key][16 * n + lane / 16 * 8]));
                mma(O[2 * n], P, B);
                mma(O[2 * n + 1], P, B + 2);
            }
        }
    }

    T *out = head_of(p.O, b, h);  // store
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        int r = row + 8 * i;
        float sum = row_sum(l[i]), inverse = inverse_or_zero(sum);
        if (r >= p.Nq) continue;
        #pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
            *(u32 *)&out[r * p.O.row + 8 * n + 2 * t] =
                pack(O[n][2 * i] * inverse, O[n][2 * i + 1] * inverse);
        if (p.L && t == 0) p.L[(i64)head * p.Nq + r] = m[i] + logf(sum);
    }
}
