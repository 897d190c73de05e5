// Decoding: one query (up to 16 with its group) against a long cache, the keys split over the chip.
//
// Source: Flash-Decoding (the merge of FlashAttention-2's state, over splits of the keys). The idea:
// with one query there is one block of Q for each head, far fewer than SMs, and every byte of K and V
// is used once: the time is that of reading the cache. So each block of threads takes a part of the
// keys, and the states (m, l, O) are merged three times, by the same function: those of the warps;
// those of the blocks of a cluster, who read each other's shared memory (Hopper; CLUSTER is 1 on other
// GPUs); and, if a head has more than one cluster, those of the clusters, through memory, by the last
// block to come. Each block of a cluster merges its own slice of the columns. One launch, and the
// order of the sums is that of the keys, whoever comes last. The queries of all heads that share K
// and V are the rows of one tile (GQA packing), so the cache is read once for the whole group.
// PAGED: K and V are (pages, kv heads, page_size, d), and a block table says whose pages they are.
// p.work: COUNTERS counters, all zero, and again so at the end; O in float (batch, kv heads, clusters,
// rows, d); m, l (batch, kv heads, clusters, CLUSTER, rows): each slice has its own.
// Here p.group is how many heads share K and V, and p.batch, p.heads are those of Q.

#include "common.cuh"
#include "ptx.cuh"

#ifndef PAGED
#define PAGED 0
#endif
#ifndef STAGES
#define STAGES (HEAD <= 64 ? 6 : 3)
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif

struct Splits {
    const int *table, *lengths;  // PAGED: (batch, pages of a sequence), and keys of each sequence
    int splits, table_row, page_size;
};

const int WARPS = 4, THREADS = 32 * WARPS, Bc = 16 * WARPS, ROWS = 16;  // 16 keys a warp and tile
const int STEPS = HEAD / 16, PIECES = HEAD / 8, PASS = THREADS / PIECES;
const int COUNTERS = 4096;

struct Shared {
    T Q[ROWS][HEAD], K[STAGES][Bc][HEAD], V[STAGES][Bc][HEAD];
};
struct Partials {  // states of the warps, once the tiles are no longer needed
    float O[WARPS][ROWS][HEAD];  // then that of the block in the first
    float2 ml[WARPS][ROWS], block[ROWS];
};
static_assert(HEAD % (4 * CLUSTER) == 0);
static_assert(sizeof(Shared) <= SHARED && sizeof(Partials) <= sizeof(Shared));

__device__ __forceinline__ u32 at(T (*tile)[HEAD], int r, int c) {
    return shared_address(&tile[r][c ^ (HEAD >= 64 ? r % 8 : r / 2 % 4) * 8]);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 4 columns of a row of a state, and m and l of that row.
struct Piece {
    float2 ml;
    float4 O;
};

// A piece of `size` states together; get(y): that of state y. AT_ONCE reads are under way: what is not
// there is read again, with factor 0, since a condition would make the reads wait in turn.
template <int AT_ONCE, class Get> __device__ __forceinline__ Piece merge(int size, float c, Get get) {
    Piece sum = {make_float2(-INFINITY, 0.f), make_float4(0.f, 0.f, 0.f, 0.f)};
    for (int y = 0; y < size; y += AT_ONCE) {
        Piece x[AT_ONCE];
        float most = sum.ml.x;
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) x[i] = get(min(y + i, size - 1));
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) most = fmaxf(most, x[i].ml.x);
        float rescale = exp2_fast((sum.ml.x - finite_or_zero(most)) * c);
        sum.ml = make_float2(most, sum.ml.y * rescale);
        sum.O.x *= rescale, sum.O.y *= rescale, sum.O.z *= rescale, sum.O.w *= rescale;
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float factor = y + i < size ? exp2_fast((x[i].ml.x - finite_or_zero(most)) * c) : 0.f;
            sum.ml.y += factor * x[i].ml.y;
            sum.O.x += factor * x[i].O.x, sum.O.y += factor * x[i].O.y;
            sum.O.z += factor * x[i].O.z, sum.O.w += factor * x[i].O.w;
        }
    }
    return sum;
}

#if CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
// Where block `rank` of this cluster keeps what this block keeps at p, in shared memory.
template <class X> __device__ __forceinline__ const X *of_block(const X *p, int rank) {
    const X *there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
    return there;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#else
#define OF_CLUSTER
#endif

// Row r of the tile is query r % Nq of head r / Nq of the group.
extern "C" __global__ void __launch_bounds__(THREADS, 2) OF_CLUSTER decode(const Params p, const Splits how) {
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
        if (t == 0) w.ml[warp][row] = make_float2(m[r], sum);
    }
    __syncthreads();

    // Three merges. x: a column in the line of all rows; this block's slice of them begins at `from`.
    int rank = part % CLUSTER, cluster = part / CLUSTER, clusters = how.splits / CLUSTER;
    int slice = rows * HEAD / CLUSTER, from = rank * slice;
    i64 own = (i64)kv_head * clusters * rows, all = (i64)p.batch * kv_heads * clusters * rows;
    float *O_parts = (float *)p.work + COUNTERS + own * HEAD;
    float2 *ml_parts = (float2 *)((float *)p.work + COUNTERS + all * HEAD) + own * CLUSTER;

    auto store = [&](int x, Piece sum) {
        int row = x / HEAD, col = x % HEAD, h = kv * p.group + row / p.Nq, i = row % p.Nq;
        float inverse = inverse_or_zero(sum.ml.y);
        *(uint2 *)(head_of(p.O, b, h) + i * p.O.row + col) = make_uint2(
            pack(sum.O.x * inverse, sum.O.y * inverse), pack(sum.O.z * inverse, sum.O.w * inverse));
        if (p.L && col == 0)
            p.L[(i64)(b * p.heads + h) * p.Nq + i] = sum.ml.x * p.scale + logf(sum.ml.y);
    };
    auto store_part = [&](int x, Piece sum) {
        if (clusters == 1) return store(x, sum);
        *(float4 *)(O_parts + (i64)cluster * rows * HEAD + x) = sum.O;
        if (x % HEAD == 0 || x == from) ml_parts[(cluster * CLUSTER + rank) * rows + x / HEAD] = sum.ml;
    };

    for (int x = 4 * threadIdx.x; x < rows * HEAD; x += 4 * THREADS) {
        Piece sum = merge<WARPS>(WARPS, c, [&](int y) {
            return Piece{w.ml[y][x / HEAD], *(float4 *)(w.O[y][0] + x)};
        });
        if (CLUSTER == 1) {
            store_part(x, sum);
        } else {
            *(float4 *)(w.O[0][0] + x) = sum.O;
            if (x % HEAD == 0) w.block[x / HEAD] = sum.ml;
        }
    }
#if CLUSTER > 1
    cluster_arrive(), cluster_wait();
    for (int x = from + 4 * threadIdx.x; x < from + slice; x += 4 * THREADS)
        store_part(x, merge<CLUSTER>(CLUSTER, c, [&](int y) {
            return Piece{*of_block(&w.block[x / HEAD], y), *of_block((float4 *)(w.O[0][0] + x), y)};
        }));
    cluster_arrive();
#endif
    if (clusters > 1) {
        u32 *counter = (u32 *)p.work + kv_head * CLUSTER + rank;
        __threadfence();
        __syncthreads();  // atomicInc wraps to 0 after clusters - 1
        bool last = threadIdx.x == 0 && atomicInc(counter, clusters - 1) == clusters - 1;
        if (__syncthreads_or(last)) {
            __threadfence();
            for (int x = from + 4 * threadIdx.x; x < from + slice; x += 4 * THREADS)
                store(x, merge<8>(clusters, c, [&](int y) {
                    return Piece{__ldcg(ml_parts + (y * CLUSTER + rank) * rows + x / HEAD),
                                 __ldcg((float4 *)(O_parts + (i64)y * rows * HEAD + x))};
                }));
        }
    }
#if CLUSTER > 1
    cluster_wait();  // until all have read this block's memory
#endif
}
