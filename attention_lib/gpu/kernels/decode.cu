// Decoding: one query (up to 16 with its group) against a long cache, the keys split over the chip.
//
// Source: Flash-Decoding (the merge of FlashAttention-2's state, over splits of the keys). The idea:
// with one query there is one block of Q for each head, far fewer than SMs, and every byte of K and V
// is used once: the time is that of reading the cache. So each block of threads takes a part of the
// keys, and `merge` joins the partial results. The queries of all heads that share K and V are the
// rows of one tile (GQA packing), so the cache is read once for the whole group.
// p.work: O in float (batch, kv heads, splits, 16, d), then L in units of log2 (…, splits, 16).
// Here p.group is how many heads share K and V, and p.batch, p.heads are those of Q.

#include "common.cuh"
#include "ptx.cuh"

const int WARPS = 4, THREADS = 32 * WARPS, Bc = 16 * WARPS, ROWS = 16;  // 16 keys a warp and tile
const int STAGES = HEAD <= 64 ? 6 : HEAD <= 128 ? 4 : 3;
const int STEPS = HEAD / 16, PIECES = HEAD / 8, PASS = THREADS / PIECES;

struct Shared {
    T Q[ROWS][HEAD], K[STAGES][Bc][HEAD], V[STAGES][Bc][HEAD];
};
struct Partials {  // of the warps, once the tiles are no longer needed
    float O[WARPS][ROWS][HEAD], m[WARPS][ROWS], l[WARPS][ROWS];
};
static_assert(sizeof(Shared) <= SHARED && sizeof(Partials) <= sizeof(Shared));

__device__ __forceinline__ u32 at(T (*tile)[HEAD], int r, int c) {
    return shared_address(&tile[r][c ^ (HEAD >= 64 ? r % 8 : r / 2 % 4) * 8]);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Row r of the tile is query r % Nq of head r / Nq of the group.
extern "C" __global__ void __launch_bounds__(THREADS) split(const Params p, int splits, int length) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    int kv_heads = p.heads / p.group, kv_head = blockIdx.x / splits, part = blockIdx.x % splits;
    int b = kv_head / kv_heads, kv = kv_head % kv_heads, rows = p.group * p.Nq;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    int begin = part * length, end = min(p.Nk, begin + length), tiles = max(0, (end - begin + Bc - 1) / Bc);
    int r0 = threadIdx.x / PIECES, c0 = threadIdx.x % PIECES * 8;
    const T *K = head_of(p.K, b, kv) + (i64)(begin + r0) * p.K.row + c0;
    const T *V = head_of(p.V, b, kv) + (i64)(begin + r0) * p.V.row + c0;

    for (int r = r0; r < ROWS; r += PASS)
        copy_async(at(s.Q, r, c0), head_of(p.Q, b, kv * p.group + r / p.Nq) + r % p.Nq * p.Q.row + c0,
                   r < rows);
    auto fetch = [&](int j) {
        if (j < tiles)
            #pragma unroll
            for (int r = 0; r < Bc; r += PASS) {
                bool there = begin + j * Bc + r0 + r < end;
                copy_async(at(s.K[j % STAGES], r0 + r, c0), K + (i64)(j * Bc + r) * p.K.row, there);
                copy_async(at(s.V[j % STAGES], r0 + r, c0), V + (i64)(j * Bc + r) * p.V.row, there);
            }
        commit();  // an empty group where there is no tile, so that `wait` counts the same
    };
    for (int j = 0; j < STAGES - 1; j++) fetch(j);

    float O[2 * STEPS][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    float c = p.scale * 1.4426950408889634f;
    u32 Q_lane = at(s.Q, lane % 16, lane / 16 * 8);

    for (int j = 0; j < tiles; j++) {
        int now = j % STAGES;
        wait<STAGES - 2>();
        __syncthreads();
        fetch(j + STAGES - 1);

        float S[2][4] = {};  // 16 rows, this warp's 16 keys
        #pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 A[4], B[4];
            ldmatrix(A, Q_lane ^ 32 * k);
            ldmatrix(B, at(s.K[now], 16 * warp + lane % 8 + lane / 16 * 8, 16 * k + lane / 8 % 2 * 8));
            mma(S[0], A, B), mma(S[1], A, B + 2);
        }
        u32 P[4];
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = lane / 4 + 8 * r, last = end - 1;
            if (CAUSAL) last = min(last, row % p.Nq + p.offset);
            float m_new = m[r], l_tile = 0.f;
            #pragma unroll
            for (int x = 0; x < 4; x++) {
                int key = begin + j * Bc + 16 * warp + x / 2 * 8 + 2 * t + x % 2;
                float &y = S[x / 2][2 * r + x % 2];
                if (key > last) y = -INFINITY;
                m_new = fmaxf(m_new, y);
            }
            m_new = row_max(m_new);
            float shift = finite_or_zero(m_new) * c, rescale = exp2_fast(m[r] * c - shift);
            m[r] = m_new;
            #pragma unroll
            for (int x = 0; x < 4; x++) {
                float &y = S[x / 2][2 * r + x % 2];
                l_tile += y = exp2_fast(y * c - shift);
            }
            l[r] = l[r] * rescale + l_tile;
            #pragma unroll
            for (int n = 0; n < 2 * STEPS; n++) O[n][2 * r] *= rescale, O[n][2 * r + 1] *= rescale;
            P[r] = pack(S[0][2 * r], S[0][2 * r + 1]), P[2 + r] = pack(S[1][2 * r], S[1][2 * r + 1]);
        }
        #pragma unroll
        for (int n = 0; n < STEPS; n++) {
            u32 B[4];
            ldmatrix_transposed(B, at(s.V[now], 16 * warp + lane % 16, 16 * n + lane / 16 * 8));
            mma(O[2 * n], P, B), mma(O[2 * n + 1], P, B + 2);
        }
    }

    wait<0>();
    __syncthreads();  // the four warps saw different keys: merge them
    Partials &w = *(Partials *)memory;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = lane / 4 + 8 * r;
        float sum = row_sum(l[r]);
        #pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
            *(float2 *)&w.O[warp][row][8 * n + 2 * t] = make_float2(O[n][2 * r], O[n][2 * r + 1]);
        if (t == 0) w.m[warp][row] = m[r] * c, w.l[warp][row] = sum;
    }
    __syncthreads();
    i64 block = blockIdx.x;
    float *O_out = (float *)p.work + block * ROWS * HEAD;
    float *L_out = (float *)p.work + (i64)p.batch * kv_heads * splits * ROWS * HEAD + block * ROWS;
    for (int x = threadIdx.x; x < ROWS * HEAD; x += THREADS) {
        int row = x / HEAD, col = x % HEAD;
        float most = -INFINITY, sum = 0.f, O_sum = 0.f;
        #pragma unroll
        for (int i = 0; i < WARPS; i++) most = fmaxf(most, w.l[i][row] > 0.f ? w.m[i][row] : -INFINITY);
        #pragma unroll
        for (int i = 0; i < WARPS; i++) {
            float factor = w.l[i][row] > 0.f ? exp2_fast(w.m[i][row] - most) : 0.f;
            sum += factor * w.l[i][row], O_sum += factor * w.O[i][row][col];
        }
        O_out[x] = O_sum * inverse_or_zero(sum);
        if (col == 0) L_out[row] = sum > 0.f ? most + log2f(sum) : -INFINITY;
    }
}

// One block of threads for each row of O: the splits weigh in by 2^(L2 - largest L2).
extern "C" __global__ void __launch_bounds__(HEAD) merge(const Params p, int splits) {
    int kv_heads = p.heads / p.group, rows = p.group * p.Nq;
    int row = blockIdx.x % rows, kv_head = blockIdx.x / rows, b = kv_head / kv_heads;
    int h = kv_head % kv_heads * p.group + row / p.Nq, i = row % p.Nq;
    const float *O = (float *)p.work + ((i64)kv_head * splits * ROWS + row) * HEAD + threadIdx.x;
    const float *L = (float *)p.work + (i64)p.batch * kv_heads * splits * ROWS * HEAD +
                     (i64)kv_head * splits * ROWS + row;
    float most = -INFINITY, sum = 0.f, O_sum = 0.f;
    for (int x = 0; x < splits; x++) most = fmaxf(most, L[x * ROWS]);
    for (int x = 0; x < splits; x++) {
        float factor = exp2_fast(L[x * ROWS] - finite_or_zero(most));
        sum += factor, O_sum += factor * O[(i64)x * ROWS * HEAD];
    }
    head_of(p.O, b, h)[i * p.O.row + threadIdx.x] = from_float(O_sum * inverse_or_zero(sum));
    if (p.L && threadIdx.x == 0)
        p.L[(i64)(b * p.heads + h) * p.Nq + i] = (finite_or_zero(most) + log2f(sum)) * 0.6931471805599453f;
}
