// Rung 5: keep the tensor cores fed.
//
// Source: FlashAttention-2, arXiv 2307.08691, Algorithm 1 and section 3. Four ideas:
// - wider warp tiles: a warp takes 32 rows, so each piece of K and V that it reads from shared
//   memory feeds two instructions, not one;
// - pipeline: while a tile is computed the next K and V are on their way into a second buffer, and
//   one barrier a tile is enough;
// - exp2 with the scale folded in: exp(scale (s - m)) = 2^(c s - c m) with c = scale log2(e), one
//   multiply-add and one instruction of the special function unit. Any m serves as long as
//   nothing overflows, so O is rescaled only when the maximum has grown by more than 2^8;
// - causal: tiles above the diagonal are skipped, only tiles on it are masked, and the longest rows
//   of tiles start first.

#include "common.cuh"
#include "ptx.cuh"

const int WARPS = 4, THREADS = 32 * WARPS;
const int WIDE = HEAD > 128 ? 1 : 2;  // a warp's rows, in sixteens: O of 32 x 256 is too much
const int Br = 16 * WIDE * WARPS, Bc = HEAD <= 64 ? 64 : HEAD <= 128 ? 48 : 32;
const bool KEEP_Q = HEAD <= 64;  // in registers; else it is read again for each tile
const int STEPS = HEAD / 16;     // of 16 columns of d
const int PIECE = 16 * HEAD * sizeof(T), TILE = Bc * HEAD * sizeof(T);  // bytes

struct Shared {
    T Q[Br][HEAD], K[2][Bc][HEAD], V[2][Bc][HEAD];
};
static_assert(sizeof(Shared) == SHARED);  // what the launch asks for

// Where columns c to c + 7 of row r lie (c a multiple of 8). A row of d = 32 is half of 128 bytes.
// For even k, at(tile, r, c + 8 k) is at(tile, r, c) ^ 16 k: a tile starts at a multiple of a row.
__device__ __forceinline__ u32 at(T (*tile)[HEAD], int r, int c) {
    return shared_address(&tile[r][c ^ (HEAD >= 64 ? r % 8 : r / 2 % 4) * 8]);
}

const int PIECES = HEAD / 8, PASS = THREADS / PIECES;  // 16-byte pieces a row, rows at a time

// `from` is this thread's first piece. Rows from n on become zeros, and are not read.
template <int rows>
__device__ __forceinline__ void load(T (*tile)[HEAD], const T *from, i64 stride, int n) {
    int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES * 8;
    #pragma unroll
    for (int i = 0; i < rows; i += PASS)
        copy_async(at(tile, r + i, c), from + i * stride, r + i < n);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD > 128 ? 1 : 2) attention(const Params p) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    int blocks = (p.Nq + Br - 1) / Br, head = blockIdx.x / blocks, block = blockIdx.x % blocks;
    if (CAUSAL) block = blocks - 1 - block;
    int b = head / p.heads, h = head % p.heads;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int row0 = block * Br, top = row0 + 16 * WIDE * warp;  // the warp's first row
    int r0 = threadIdx.x / PIECES, c0 = threadIdx.x % PIECES * 8;  // what this thread copies first
    const T *Q_from = head_of(p.Q, b, h) + (row0 + r0) * p.Q.row + c0;
    const T *K_from = head_of(p.K, b, h / p.group) + r0 * p.K.row + c0;
    const T *V_from = head_of(p.V, b, h / p.group) + r0 * p.V.row + c0;
    int end = CAUSAL ? min(p.Nk, row0 + Br + p.offset) : p.Nk;  // the block sees no later key

    load<Br>(s.Q, Q_from, p.Q.row, p.Nq - row0);
    if (end > 0) load<Bc>(s.K[0], K_from, p.K.row, p.Nk), load<Bc>(s.V[0], V_from, p.V.row, p.Nk);
    commit();

    float O[WIDE][2 * STEPS][4] = {};  // 2 x (16 x d), as pieces of 16 x 8
    float m[WIDE][2], l[WIDE][2] = {};    // of rows g, g + 8, g + 16, g + 24; m without the scale
    #pragma unroll
    for (int i = 0; i < 2 * WIDE; i++) m[i / 2][i % 2] = -INFINITY;
    float c = p.scale * 1.4426950408889634f;

    // Where this lane's row of the first fragment lies.
    u32 Q_lane = at(s.Q, 16 * WIDE * warp + lane % 16, lane / 16 * 8);
    u32 K_lane = at(s.K[0], lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    u32 V_lane = at(s.V[0], lane % 16, lane / 16 * 8);

    u32 Q[KEEP_Q ? STEPS : 1][WIDE][4];
    if (KEEP_Q) {
        wait<0>();
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < STEPS; k++)
            #pragma unroll
            for (int i = 0; i < WIDE; i++) ldmatrix(Q[k][i], (Q_lane ^ 32 * k) + i * PIECE);
    }

    for (int col0 = 0, now = 0; col0 < end; col0 += Bc, now ^= 1) {
        wait<0>();        // this thread's part of the tile is there
        __syncthreads();  // everybody's is, and nobody reads the tile before any more
        if (col0 + Bc < end) {
            K_from += Bc * p.K.row, V_from += Bc * p.V.row;
            load<Bc>(s.K[now ^ 1], K_from, p.K.row, p.Nk - col0 - Bc);
            load<Bc>(s.V[now ^ 1], V_from, p.V.row, p.Nk - col0 - Bc);
            commit();
        }
        if (CAUSAL && col0 > top + 16 * WIDE - 1 + p.offset) continue;  // hidden from this warp

        float S[WIDE][Bc / 8][4] = {};  // score
        #pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 (*A)[4] = Q[KEEP_Q ? k : 0];
            #pragma unroll
            for (int i = 0; i < WIDE && !KEEP_Q; i++) ldmatrix(A[i], (Q_lane ^ 32 * k) + i * PIECE);
            #pragma unroll
            for (int n = 0; n < Bc / 16; n++) {
                u32 B[4];
                ldmatrix(B, (K_lane + now * TILE ^ 32 * k) + n * PIECE);
                #pragma unroll
                for (int i = 0; i < WIDE; i++)
                    mma(S[i][2 * n], A[i], B), mma(S[i][2 * n + 1], A[i], B + 2);
            }
        }

        if (col0 + Bc > p.Nk || (CAUSAL && col0 + Bc - 1 > top + p.offset))
            #pragma unroll
            for (int i = 0; i < WIDE; i++)
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    int last = p.Nk - 1;  // the last key that the row sees
                    if (CAUSAL) last = min(last, top + 16 * i + 8 * r + g + p.offset);
                    last -= col0 + 2 * t;
                    #pragma unroll
                    for (int n = 0; n < Bc / 8; n++) {
                        if (8 * n > last) S[i][n][2 * r] = -INFINITY;
                        if (8 * n + 1 > last) S[i][n][2 * r + 1] = -INFINITY;
                    }
                }

        #pragma unroll
        for (int i = 0; i < WIDE; i++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {  // rescale
                float m_new = m[i][r], l_tile = 0.f;
                #pragma unroll
                for (int n = 0; n < Bc / 8; n++)
                    m_new = fmaxf(m_new, fmaxf(S[i][n][2 * r], S[i][n][2 * r + 1]));
                m_new = row_max(m_new);
                bool grew = m[i][r] == -INFINITY || (m_new - m[i][r]) * c > 8.f;
                if (__any_sync(~0u, grew)) {
                    float rescale = exp2_fast((m[i][r] - finite_or_zero(m_new)) * c);
                    l[i][r] *= rescale;
                    m[i][r] = m_new;
                    #pragma unroll
                    for (int n = 0; n < 2 * STEPS; n++)
                        O[i][n][2 * r] *= rescale, O[i][n][2 * r + 1] *= rescale;
                }
                float shift = finite_or_zero(m[i][r]) * c;
                #pragma unroll
                for (int n = 0; n < Bc / 8; n++)
                    #pragma unroll
                    for (int x = 2 * r; x < 2 * r + 2; x++)
                        l_tile += S[i][n][x] = exp2_fast(S[i][n][x] * c - shift);
                l[i][r] += l_tile;
            }

        #pragma unroll
        for (int k = 0; k < Bc / 16; k++) {  // accumulate
            u32 P[WIDE][4];
            #pragma unroll
            for (int i = 0; i < WIDE; i++)
                #pragma unroll
                for (int x = 0; x < 4; x++) {
                    float *two = &S[i][2 * k + x / 2][x % 2 * 2];
                    P[i][x] = pack(two[0], two[1]);
                }
            #pragma unroll
            for (int n = 0; n < STEPS; n++) {
                u32 B[4];
                ldmatrix_transposed(B, (V_lane + now * TILE ^ 32 * n) + k * PIECE);
                #pragma unroll
                for (int i = 0; i < WIDE; i++)
                    mma(O[i][2 * n], P[i], B), mma(O[i][2 * n + 1], P[i], B + 2);
            }
        }
    }

    T *out = head_of(p.O, b, h);  // store
    #pragma unroll
    for (int i = 0; i < WIDE; i++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = top + 16 * i + 8 * r + g;
            float sum = row_sum(l[i][r]), inverse = inverse_or_zero(sum);
            if (row >= p.Nq) continue;
            #pragma unroll
            for (int n = 0; n < 2 * STEPS; n++)
                *(u32 *)&out[row * p.O.row + 8 * n + 2 * t] =
                    pack(O[i][n][2 * r] * inverse, O[i][n][2 * r + 1] * inverse);
            if (p.L && t == 0) p.L[(i64)head * p.Nq + row] = m[i][r] * p.scale + logf(sum);
        }
}
