// Rung 0: standard attention as three kernels. S and P are written to HBM and read back.
//
// Source: FlashAttention, arXiv 2205.14135 (v2), Algorithm 0. The idea: this is what the others
// avoid. S and P are 16-bit, in p.work: (batch * heads, Nq, Nk) each. A block of 256 threads
// makes a tile of 64 rows; thread (ty, tx) holds rows ty, ty + 16, ... and columns tx, tx + 16, ...

#include "common.cuh"

const int TILE = 64, STEP = 32;  // rows and columns of a tile; how much of the sum at a time

__device__ __forceinline__ T *scores_of(const Params &p, int head) {
    return (T *)p.work + (i64)head * p.Nq * p.Nk;
}

__device__ __forceinline__ T *weights_of(const Params &p, int head) {
    return scores_of(p, p.batch * p.heads + head);
}

// S = scale * Q K^T, with -inf where the query may not see the key.
extern "C" __global__ void __launch_bounds__(256) scores(const Params p) {
    __shared__ float Qs[TILE][STEP + 1], Ks[TILE][STEP + 1];  // + 1: no two rows in one bank
    int rows = (p.Nq + TILE - 1) / TILE, cols = (p.Nk + TILE - 1) / TILE;
    int col0 = blockIdx.x % cols * TILE, row0 = blockIdx.x / cols % rows * TILE;
    int head = blockIdx.x / cols / rows, b = head / p.heads, h = head % p.heads;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const T *Q = head_of(p.Q, b, h), *K = head_of(p.K, b, h / p.group);
    float sum[4][4] = {};
    for (int c0 = 0; c0 < HEAD; c0 += STEP) {
        for (int x = threadIdx.x; x < TILE * STEP; x += 256) {
            int r = x / STEP, c = x % STEP;
            Qs[r][c] = row0 + r < p.Nq ? to_float(Q[(row0 + r) * p.Q.row + c0 + c]) : 0.f;
            Ks[r][c] = col0 + r < p.Nk ? to_float(K[(col0 + r) * p.K.row + c0 + c]) : 0.f;
        }
        __syncthreads();
        for (int c = 0; c < STEP; c++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sum[i][j] += Qs[ty + 16 * i][c] * Ks[tx + 16 * j][c];
        __syncthreads();
    }
    T *S = scores_of(p, head);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int row = row0 + ty + 16 * i, col = col0 + tx + 16 * j;
            if (row < p.Nq && col < p.Nk)
                S[(i64)row * p.Nk + col] =
                    from_float(visible(p, row, col) ? sum[i][j] * p.scale : -INFINITY);
        }
}

// One block of 256 threads: the value of all threads, combined.
__device__ __forceinline__ float block_max(float x) {
    __shared__ float all[256];
    all[threadIdx.x] = x;
    __syncthreads();
    for (int n = 128; n > 0; n /= 2) {
        if (threadIdx.x < n) all[threadIdx.x] = fmaxf(all[threadIdx.x], all[threadIdx.x + n]);
        __syncthreads();
    }
    return all[0];
}

__device__ __forceinline__ float block_sum(float x) {
    __shared__ float all[256];
    all[threadIdx.x] = x;
    __syncthreads();
    for (int n = 128; n > 0; n /= 2) {
        if (threadIdx.x < n) all[threadIdx.x] += all[threadIdx.x + n];
        __syncthreads();
    }
    return all[0];
}

// P = softmax(S), one block a row. The row is read once: a thread keeps its part in registers
// where it fits (Nk <= 256 * KEEP), and reads it again where it does not.
const int KEEP = 64;

extern "C" __global__ void __launch_bounds__(256) softmax(const Params p) {
    i64 row = blockIdx.x;
    const T *S = scores_of(p, 0) + row * p.Nk;
    T *P = weights_of(p, 0) + row * p.Nk;
    float kept[KEEP], m = -INFINITY, l = 0.f;
    #pragma unroll
    for (int k = 0; k < KEEP; k++) {
        int j = threadIdx.x + 256 * k;
        kept[k] = j < p.Nk ? to_float(S[j]) : -INFINITY;
        m = fmaxf(m, kept[k]);
    }
    for (int j = threadIdx.x + 256 * KEEP; j < p.Nk; j += 256) m = fmaxf(m, to_float(S[j]));
    m = block_max(m);
    float shift = finite_or_zero(m);
    #pragma unroll
    for (int k = 0; k < KEEP; k++) l += kept[k] = expf(kept[k] - shift);
    for (int j = threadIdx.x + 256 * KEEP; j < p.Nk; j += 256) l += expf(to_float(S[j]) - shift);
    l = block_sum(l);
    float inverse = inverse_or_zero(l);
    #pragma unroll
    for (int k = 0; k < KEEP; k++) {
        int j = threadIdx.x + 256 * k;
        if (j < p.Nk) P[j] = from_float(kept[k] * inverse);
    }
    for (int j = threadIdx.x + 256 * KEEP; j < p.Nk; j += 256)
        P[j] = from_float(expf(to_float(S[j]) - shift) * inverse);
    if (p.L && threadIdx.x == 0) p.L[row] = m + logf(l);  // a row without keys: -inf + -inf
}

// O = P V. A block makes 64 rows of O, all columns, so that P is read once.
extern "C" __global__ void __launch_bounds__(256) outputs(const Params p) {
    __shared__ float Ps[TILE][STEP + 1], Vs[STEP][HEAD];
    const int COLS = HEAD / 16;
    int rows = (p.Nq + TILE - 1) / TILE, head = blockIdx.x / rows;
    int b = head / p.heads, h = head % p.heads, row0 = blockIdx.x % rows * TILE;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const T *P = weights_of(p, head), *V = head_of(p.V, b, h / p.group);
    float sum[4][COLS] = {};
    for (int j0 = 0; j0 < p.Nk; j0 += STEP) {
        for (int x = threadIdx.x; x < TILE * STEP; x += 256) {
            int r = x / STEP, j = j0 + x % STEP;
            Ps[r][x % STEP] = row0 + r < p.Nq && j < p.Nk
                ? to_float(P[(i64)(row0 + r) * p.Nk + j]) : 0.f;
        }
        for (int x = threadIdx.x; x < STEP * HEAD; x += 256) {
            int j = j0 + x / HEAD;
            Vs[x / HEAD][x % HEAD] = j < p.Nk ? to_float(V[j * p.V.row + x % HEAD]) : 0.f;
        }
        __syncthreads();
        for (int j = 0; j < STEP; j++)
            for (int i = 0; i < 4; i++)
                for (int c = 0; c < COLS; c++) sum[i][c] += Ps[ty + 16 * i][j] * Vs[j][tx + 16 * c];
        __syncthreads();
    }
    T *O = head_of(p.O, b, h);
    for (int i = 0; i < 4; i++)
        for (int c = 0; c < COLS; c++) {
            int row = row0 + ty + 16 * i;
            if (row < p.Nq) O[row * p.O.row + tx + 16 * c] = from_float(sum[i][c]);
        }
}
