// Decoding: one query (up to 16 with its group) against a long cache, the keys split over the chip.
//
// Source: Flash-Decoding (the merge of FlashAttention-2's state, over splits of the keys). The idea:
// with one query there is one block of Q for each head, far fewer than SMs, and every byte of K and V
// is used once: the time is that of reading the cache. So each block of threads takes a part of the
// keys. The last block of a head to finish merges the states (m, l, O) of all; many splits merge in
// two levels, each group of `radix` by its last block. One launch, and the order of the sums is that
// of the splits, whoever comes last. The queries of all heads that share K and V are the rows of one
// tile (GQA packing), so the cache is read once for the whole group.
// PAGED: K and V are (pages, kv heads, page_size, d), and a block table says whose pages they are.
// p.work: COUNTERS counters, all zero, and again so at the end; O in float (batch, kv heads, slots,
// rows, d); m, l (..., slots, rows). Slots: the splits, then the groups of each level.
// Here p.group is how many heads share K and V, and p.batch, p.heads are those of Q.

#include "common.cuh"
#include "ptx.cuh"

#ifndef PAGED
#define PAGED 0
#endif
#ifndef STAGES
#define STAGES (HEAD <= 64 ? 6 : 3)
#endif

struct Splits {
    const int *table, *lengths;  // PAGED: (batch, pages of a sequence), and keys of each sequence
    int splits, radix, slots, table_row, page_size;
};

const int WARPS = 4, THREADS = 32 * WARPS, Bc = 16 * WARPS, ROWS = 16;  // 16 keys a warp and tile
const int STEPS = HEAD / 16, PIECES = HEAD / 8, PASS = THREADS / PIECES;
const int COUNTERS = 4096, MERGED = 2048;  // rows of O, of all splits, that a block merges at once

struct Shared {
    T Q[ROWS][HEAD], K[STAGES][Bc][HEAD], V[STAGES][Bc][HEAD];
};
struct Partials {  // states of the warps, once the tiles are no longer needed
    float O[WARPS][ROWS][HEAD], m[WARPS][ROWS], l[WARPS][ROWS];
    float2 others[MERGED];  // m and l of other blocks; m turns into the factor
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
extern "C" __global__ void __launch_bounds__(THREADS, 2) decode(const Params p, const Splits how) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    int kv_heads = p.heads / p.group, kv_head = blockIdx.x / how.splits, part = blockIdx.x % how.splits;
    int b = kv_head / kv_heads, kv = kv_head % kv_heads, rows = p.group * p.Nq;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    int Nk = PAGED ? min(how.lengths[b], p.Nk) : p.Nk, offset = PAGED ? Nk - p.Nq : p.offset;
    int seen = max(0, CAUSAL ? min(Nk, p.Nq + offset) : Nk);  // from there on no row sees a key
    int length = ((seen + Bc - 1) / Bc + how.splits - 1) / how.splits * Bc;
    int begin = part * length, end = min(seen, begin + length), tiles = max(0, (end - begin + Bc - 1) / Bc);
    int r0 = threadIdx.x / PIECES, c0 = threadIdx.x % PIECES * 8;

    for (int r = r0; r < ROWS; r += PASS)
        copy_async(at(s.Q, r, c0), head_of(p.Q, b, kv * p.group + r / p.Nq) + r % p.Nq * p.Q.row + c0,
                   r < rows);
    auto fetch = [&](int j) {
        if (j < tiles) {
            int key = begin + j * Bc;  // a tile lies in one page
            int page = PAGED ? how.table[(i64)b * how.table_row + key / how.page_size] : b;
            i64 row = (PAGED ? key % how.page_size : key) + r0;
            const T *K = head_of(p.K, page, kv) + row * p.K.row + c0;
            const T *V = head_of(p.V, page, kv) + row * p.V.row + c0;
            #pragma unroll
            for (int r = 0; r < Bc; r += PASS) {
                bool there = key + r0 + r < end;
                copy_async(at(s.K[j % STAGES], r0 + r, c0), K + r * p.K.row, there);
                copy_async(at(s.V[j % STAGES], r0 + r, c0), V + r * p.V.row, there);
            }
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
            if (CAUSAL) last = min(last, row % p.Nq + offset);
            float m_new = m[r], l_tile = 0.f;
            #pragma unroll
            for (int x = 0; x < 4; x++) {
                int key = begin + j * Bc + 16 * warp + x / 2 * 8 + 2 * t + x % 2;
                float &y = S[x / 2][2 * r + x % 2];
                if (key > last) y = -INFINITY;
                m_new = fmaxf(m_new, y);
            }
            m_new = row_max(m_new);
            float most = finite_or_zero(m_new), shift = most * c;
            float rescale = exp2_fast((m[r] - most) * c);
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
    __syncthreads();
    Partials &w = *(Partials *)memory;  // the four warps saw different keys
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = lane / 4 + 8 * r;
        float sum = row_sum(l[r]);
        #pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
            *(float2 *)&w.O[warp][row][8 * n + 2 * t] = make_float2(O[n][2 * r], O[n][2 * r + 1]);
        if (t == 0) w.m[warp][row] = m[r], w.l[warp][row] = sum;
    }

    i64 all = (i64)p.batch * kv_heads * how.slots * rows, own = (i64)kv_head * how.slots * rows;
    float *O_slots = (float *)p.work + COUNTERS + own * HEAD;
    float2 *slots = (float2 *)((float *)p.work + COUNTERS + all * HEAD) + own;
    u32 *counters = (u32 *)p.work + kv_head * how.slots;

    // A level: n states of this head, in slots from `base` on; this block has the one in `slot`.
    for (int base = 0, slot = part, n = how.splits;;) {
        __syncthreads();
        for (int x = threadIdx.x; x < rows * HEAD; x += THREADS) {
            int row = x / HEAD, col = x % HEAD;
            float most = -INFINITY, sum = 0.f, O_sum = 0.f;
            #pragma unroll
            for (int i = 0; i < WARPS; i++) most = fmaxf(most, w.m[i][row]);
            #pragma unroll
            for (int i = 0; i < WARPS; i++) {
                float factor = exp2_fast((w.m[i][row] - finite_or_zero(most)) * c);
                sum += factor * w.l[i][row], O_sum += factor * w.O[i][row][col];
            }
            if (n == 1) {
                int h = kv * p.group + row / p.Nq, i = row % p.Nq;
                head_of(p.O, b, h)[i * p.O.row + col] = from_float(O_sum * inverse_or_zero(sum));
                if (p.L && col == 0)
                    p.L[(i64)(b * p.heads + h) * p.Nq + i] = most * p.scale + logf(sum);
            } else {
                O_slots[slot * rows * HEAD + x] = O_sum;
                if (col == 0) slots[slot * rows + row] = make_float2(most, sum);
            }
        }
        if (n == 1) return;

        int group = (slot - base) / how.radix, first = base + group * how.radix;
        int size = min(how.radix, base + n - first);
        base += n, slot = base + group, n = (n + how.radix - 1) / how.radix;
        __threadfence();
        __syncthreads();  // atomicInc wraps to 0 after size - 1
        bool last = threadIdx.x == 0 && atomicInc(counters + slot, size - 1) == size - 1;
        if (!__syncthreads_or(last)) return;
        __threadfence();

        for (int x = threadIdx.x; x < size * rows; x += THREADS)
            w.others[x] = __ldcg(slots + first * rows + x);
        __syncthreads();
        for (int row = warp; row < rows; row += WARPS) {
            float most = -INFINITY, sum = 0.f;
            for (int x = lane; x < size; x += 32) most = fmaxf(most, w.others[x * rows + row].x);
            for (int y = 16; y > 0; y /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, y));
            for (int x = lane; x < size; x += 32) {
                float2 &other = w.others[x * rows + row];
                sum += other.y * (other.x = exp2_fast((other.x - finite_or_zero(most)) * c));
            }
            for (int y = 16; y >= WARPS; y /= 2) sum += __shfl_xor_sync(~0u, sum, y);
            if (lane < WARPS) w.m[lane][row] = most, w.l[lane][row] = sum;  // of every fourth state
        }
        __syncthreads();
        // Reads wait long and registers are many: 4 columns of 4 states at a time, all under way. What
        // is out of range is read again with factor 0: a condition would make the reads wait in turn.
        const float *O_others = O_slots + (i64)first * rows * HEAD;
        for (int x0 = 4 * lane; x0 < rows * HEAD; x0 += 4 * 128) {
            float4 sum[4] = {};
            for (int y0 = warp; y0 < size; y0 += 4 * WARPS) {
                float4 other[4][4];
                #pragma unroll
                for (int i = 0; i < 16; i++) {
                    int x = min(x0 + i % 4 * 128, rows * HEAD - 4), y = min(y0 + i / 4 * WARPS, size - 1);
                    other[i / 4][i % 4] = __ldcg((const float4 *)(O_others + y * rows * HEAD + x));
                }
                #pragma unroll
                for (int i = 0; i < 16; i++) {
                    int x = min(x0 + i % 4 * 128, rows * HEAD - 4), y = y0 + i / 4 * WARPS;
                    float factor = y < size ? w.others[y * rows + x / HEAD].x : 0.f;
                    float4 &to = sum[i % 4], z = other[i / 4][i % 4];
                    to.x += factor * z.x, to.y += factor * z.y, to.z += factor * z.z, to.w += factor * z.w;
                }
            }
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                int x = x0 + i * 128;
                if (x < rows * HEAD) *(float4 *)(&w.O[warp][0][0] + x) = sum[i];
            }
        }
    }
}
