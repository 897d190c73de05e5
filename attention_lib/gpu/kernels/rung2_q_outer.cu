// Rung 2: the loops swapped. One block of threads for each block of Q; O never leaves the chip.
//
// Source: FlashAttention-2, arXiv 2307.08691, Algorithm 1. The idea: a block of Q needs nobody
// else, so there are Nq / 64 times as many blocks as before, and O, m, l stay in registers and
// shared memory until the end. 256 threads; thread (ty, tx) holds a 4 x 4 piece of S and a
// 4 x d/16 piece of O: each value read from shared memory is used four times or more.

#include "common.cuh"

const int Br = 64, Bc = 64, THREADS = 256, COLS = HEAD / 16, PAD = 2;

struct Shared {
    T Q[Br][HEAD + PAD], K[Bc][HEAD + PAD], V[Bc][HEAD + PAD];
    float S[Br][Bc + 1], m[Br], l[Br], rescale[Br];
};
static_assert(sizeof(Shared) == SHARED);  // what the launch asks for

__device__ __forceinline__ void load(T (*tile)[HEAD + PAD], const T *from, i64 stride, int n) {
    for (int x = threadIdx.x; x < 64 * HEAD; x += THREADS) {
        int r = x / HEAD, c = x % HEAD;
        tile[r][c] = r < n ? from[r * stride + c] : from_float(0.f);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const Params p) {
    extern __shared__ char memory[];
    Shared &s = *(Shared *)memory;
    int blocks = (p.Nq + Br - 1) / Br, head = blockIdx.x / blocks;
    int b = head / p.heads, h = head % p.heads, row0 = blockIdx.x % blocks * Br;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const T *K = head_of(p.K, b, h / p.group), *V = head_of(p.V, b, h / p.group);

    load(s.Q, head_of(p.Q, b, h) + row0 * p.Q.row, p.Q.row, p.Nq - row0);
    if (threadIdx.x < Br) s.m[threadIdx.x] = -INFINITY, s.l[threadIdx.x] = 0.f;
    float O[4][COLS] = {};

    for (int col0 = 0; col0 < p.Nk; col0 += Bc) {
        __syncthreads();
        load(s.K, K + col0 * p.K.row, p.K.row, p.Nk - col0);
        load(s.V, V + col0 * p.V.row, p.V.row, p.Nk - col0);
        __syncthreads();

        float S[4][4] = {};  // score
        for (int c = 0; c < HEAD; c++)
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int j = 0; j < 4; j++)
                    S[i][j] += to_float(s.Q[ty + 16 * i][c]) * to_float(s.K[tx + 16 * j][c]);
        #pragma unroll
        for (int i = 0; i < 4; i++)
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                int row = ty + 16 * i, col = tx + 16 * j;
                s.S[row][col] = visible(p, row0 + row, col0 + col) ? S[i][j] * p.scale : -INFINITY;
            }
        __syncthreads();

        if (threadIdx.x < Br) {  // rescale: one thread a row
            int r = threadIdx.x;
            float m_new = s.m[r], l_tile = 0.f;
            for (int j = 0; j < Bc; j++) m_new = fmaxf(m_new, s.S[r][j]);
            float shift = finite_or_zero(m_new);
            for (int j = 0; j < Bc; j++) l_tile += s.S[r][j] = expf(s.S[r][j] - shift);
            s.rescale[r] = expf(s.m[r] - shift);
            s.l[r] = s.l[r] * s.rescale[r] + l_tile;
            s.m[r] = m_new;
        }
        __syncthreads();

        #pragma unroll
        for (int i = 0; i < 4; i++)
            #pragma unroll
            for (int c = 0; c < COLS; c++) O[i][c] *= s.rescale[ty + 16 * i];
        for (int j = 0; j < Bc; j++)  // accumulate
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int c = 0; c < COLS; c++)
                    O[i][c] += s.S[ty + 16 * i][j] * to_float(s.V[j][tx + 16 * c]);
    }
    __syncthreads();  // store
    T *out = head_of(p.O, b, h);
    for (int i = 0; i < 4; i++) {
        int r = ty + 16 * i;
        if (row0 + r >= p.Nq) continue;
        float inverse = inverse_or_zero(s.l[r]);
        for (int c = 0; c < COLS; c++)
            out[(row0 + r) * p.O.row + tx + 16 * c] = from_float(O[i][c] * inverse);
        if (p.L && tx == 0) p.L[(i64)head * p.Nq + row0 + r] = s.m[r] + logf(s.l[r]);
    }
}
