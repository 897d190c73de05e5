// The backward pass on the tensor cores: dQ, dK, dV from Q, K, V, O, L and dO.
//
// Source: FlashAttention-2, arXiv 2307.08691, Algorithm 2. K/V blocks outside, Q blocks inside: a
// block of threads owns 128 keys and keeps their dK and dV in registers. It works on S transposed:
// a warp has 16 keys and all queries of the tile, so that P^T and dS^T are at once the A operands of
// dV += P^T dO and dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K, which needs all
// keys: it is added up in float in HBM (`DQ 1`), in whatever order the blocks come.
// Deterministic: `DQ 0` leaves dQ out, and `queries` makes it with the loops swapped, Q outside.
// p.work: see backward.cuh.

#include "common.cuh"
#include "ptx.cuh"
#include "backward.cuh"

#ifndef DQ
#define DQ 1
#endif

const int WARPS = 8, THREADS = 32 * WARPS, Bc = 16 * WARPS, Br = HEAD == 64 ? 128 : 64;
const int STEPS = HEAD / 16, PIECES = HEAD / 8, PASS = THREADS / PIECES;

struct Shared {
    T K[Bc][HEAD], V[Bc][HEAD], Q[2][Br][HEAD], dO[2][Br][HEAD], dS[Bc][Br];
    float L2[2][Br], D[2][Br];
};
static_assert(sizeof(Shared) <= SHARED);

// dQ from float to 16 bits.
extern "C" __global__ void __launch_bounds__(256) finish(const Params p, const Gradients g) {
    i64 x = (blockIdx.x * 256ll + threadIdx.x) * 2, row = x / HEAD;
    if (row >= (i64)p.batch * p.heads * p.Nq) return;
    int head = row / p.Nq, i = row % p.Nq, c = x % HEAD;
    float2 y = *(float2 *)(dQ_of(p, head) + (i64)i * HEAD + c);
    T *out = head_of(g.dQ, head / p.heads, head % p.heads) + i * g.dQ.row + c;
    *(u32 *)out = pack(y.x * p.scale, y.y * p.scale);
}

template <int columns> __device__ __forceinline__ u32 at(T (*tile)[columns], int r, int c) {
    return shared_address(&tile[r][c ^ r % 8 * 8]);
}

// Rows from n on become zeros, and are not read.
template <int rows>
__device__ __forceinline__ void load(T (*tile)[HEAD], const T *from, i64 stride, int n) {
    int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES * 8;
    #pragma unroll
    for (int i = 0; i < rows; i += PASS)
        copy_async(at(tile, r + i, c), from + (r + i) * stride + c, r + i < n);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// C (16 x 8n) = A B^T: 16 rows of A from row a on, B of 8n rows, both with d along their rows.
template <int n>
__device__ __forceinline__ void product_abt(float (&C)[n][4], T (*A)[HEAD], int a, T (*B)[HEAD]) {
    int lane = threadIdx.x % 32;
    u32 A_lane = at(A, a + lane % 16, lane / 16 * 8);
    u32 B_lane = at(B, lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    #pragma unroll 2
    for (int k = 0; k < STEPS; k++) {
        u32 x[4];
        ldmatrix(x, A_lane ^ 32 * k);
        #pragma unroll
        for (int j = 0; j < n / 2; j++) {
            u32 y[4];
            ldmatrix(y, (B_lane ^ 32 * k) + j * 16 * HEAD * (int)sizeof(T));
            mma(C[2 * j], x, y), mma(C[2 * j + 1], x, y + 2);
        }
    }
}

// C (16 x d) += A B: A (16 x 8n) in registers as it was accumulated, B of 8n rows.
template <int n>
__device__ __forceinline__ void product_ab(float (&C)[2 * STEPS][4], const u32 (&A)[n][2],
                                           T (*B)[HEAD]) {
    int lane = threadIdx.x % 32;
    u32 B_lane = at(B, lane % 16, lane / 16 * 8);
    #pragma unroll
    for (int k = 0; k < n / 2; k++) {
        u32 x[4] = {A[2 * k][0], A[2 * k][1], A[2 * k + 1][0], A[2 * k + 1][1]};
        #pragma unroll
        for (int j = 0; j < STEPS; j++) {
            u32 y[4];
            ldmatrix_transposed(y, (B_lane ^ 32 * j) + k * 16 * HEAD * (int)sizeof(T));
            mma(C[2 * j], x, y), mma(C[2 * j + 1], x, y + 2);
        }
    }
}

__device__ __forceinline__ void add(float *to, float x, float y) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" :: "l"(to), "f"(x), "f"(y) : "memory");
#else
    atomicAdd(to, x), atomicAdd(to + 1, y);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) keys(const Params p, const Gradients g) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    int blocks = (p.Nk + Bc - 1) / Bc, kv_heads = p.heads / p.group;
    int kv_head = blockIdx.x / blocks, col0 = blockIdx.x % blocks * Bc;
    int b = kv_head / kv_heads, kv = kv_head % kv_heads;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    int key = col0 + 16 * warp + lane / 4;  // and key + 8

    load<Bc>(s.K, head_of(p.K, b, kv) + col0 * p.K.row, p.K.row, p.Nk - col0);
    load<Bc>(s.V, head_of(p.V, b, kv) + col0 * p.V.row, p.V.row, p.Nk - col0);

    float dK[2 * STEPS][4] = {}, dV[2 * STEPS][4] = {}, c = p.scale * 1.4426950408889634f;
    // Q blocks before the first one that sees a key of this block have nothing to add.
    int first = CAUSAL ? max(0, col0 - p.offset) / Br * Br : 0, h = kv * p.group, row0 = first;
    int end = first < p.Nq ? h + p.group : h;  // all heads of the group, one after the other

    auto fetch = [&](int h, int row0, int buffer) {
        int i = threadIdx.x % (Br / 4) * 4, head = b * p.heads + h;
        load<Br>(s.Q[buffer], head_of(p.Q, b, h) + row0 * p.Q.row, p.Q.row, p.Nq - row0);
        load<Br>(s.dO[buffer], head_of(g.dO, b, h) + row0 * g.dO.row, g.dO.row, p.Nq - row0);
        if (threadIdx.x < Br / 4)
            copy_async(shared_address(&s.L2[buffer][i]), (T *)(L2_of(p, head) + row0 + i), true);
        else if (threadIdx.x < Br / 2)
            copy_async(shared_address(&s.D[buffer][i]), (T *)(D_of(p, head) + row0 + i), true);
        commit();
    };
    if (h < end) fetch(h, row0, 0);

    for (int now = 0; h < end; now ^= 1) {
        wait<0>();
        __syncthreads();
        int next_row = row0 + Br < p.Nq ? row0 + Br : first, next_h = next_row == first ? h + 1 : h;
        if (next_h < end) fetch(next_h, next_row, now ^ 1);

        u32 P[Br / 8][2], dS[Br / 8][2];
        {
            float S[Br / 8][4] = {};
            product_abt(S, s.K, 16 * warp, s.Q[now]);
            bool some_hidden = CAUSAL && col0 + Bc - 1 > row0 + p.offset;
            #pragma unroll
            for (int n = 0; n < Br / 8; n++) {
                float2 L2 = *(float2 *)&s.L2[now][8 * n + 2 * t];
                #pragma unroll
                for (int y = 0; y < 4; y++) {
                    S[n][y] = exp2_fast(S[n][y] * c - (y % 2 ? L2.y : L2.x));
                    int i = row0 + 8 * n + 2 * t + y % 2;
                    if (some_hidden && key + y / 2 * 8 > i + p.offset) S[n][y] = 0.f;
                }
                P[n][0] = pack(S[n][0], S[n][1]), P[n][1] = pack(S[n][2], S[n][3]);
            }
        }
        product_ab(dV, P, s.dO[now]);
        {
            float dP[Br / 8][4] = {};
            product_abt(dP, s.V, 16 * warp, s.dO[now]);
            #pragma unroll
            for (int n = 0; n < Br / 8; n++) {
                float2 D = *(float2 *)&s.D[now][8 * n + 2 * t];
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    float2 weight = unpack(P[n][r]);
                    dS[n][r] = pack(weight.x * (dP[n][2 * r] - D.x),
                                    weight.y * (dP[n][2 * r + 1] - D.y));
                    if (DQ) {
                        int i = 16 * warp + lane / 4 + 8 * r;
                        u32 x = col0 + i < p.Nk ? dS[n][r] : 0;  // no key: 2^-L2 may be infinite
                        *(u32 *)&s.dS[i][(8 * n ^ i % 8 * 8) + 2 * t] = x;
                    }
                }
            }
        }
        product_ab(dK, dS, s.Q[now]);

        if (DQ) {  // 16 queries and a part of d a warp
            __syncthreads();
            const int PARTS = WARPS * 16 / Br, N = STEPS / PARTS;  // parts of d; 16 columns each
            int q = warp / PARTS * 16, d0 = warp % PARTS * N * 16;
            float dQ[2 * N][4] = {};
            u32 A_lane = at(s.dS, lane % 8 + lane / 16 * 8, q + lane / 8 % 2 * 8);
            u32 B_lane = at(s.K, lane % 16, d0 + lane / 16 * 8);
            #pragma unroll
            for (int k = 0; k < Bc / 16; k++) {
                u32 A[4];
                ldmatrix_transposed(A, A_lane + k * 16 * Br * (int)sizeof(T));
                #pragma unroll
                for (int n = 0; n < N; n++) {
                    u32 B[4];
                    ldmatrix_transposed(B, (B_lane ^ 32 * n) + k * 16 * HEAD * (int)sizeof(T));
                    mma(dQ[2 * n], A, B), mma(dQ[2 * n + 1], A, B + 2);
                }
            }
            float *out = dQ_of(p, b * p.heads + h) + d0 + 2 * t;
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                int i = row0 + q + lane / 4 + 8 * r;
                if (i >= p.Nq) continue;
                #pragma unroll
                for (int n = 0; n < 2 * N; n++)
                    add(out + (i64)i * HEAD + 8 * n, dQ[n][2 * r], dQ[n][2 * r + 1]);
            }
        }
        h = next_h, row0 = next_row;
    }

    #pragma unroll
    for (int r = 0; r < 2; r++) {
        int j = key + 8 * r;
        if (j >= p.Nk) continue;
        T *dK_out = head_of(g.dK, b, kv) + j * g.dK.row, *dV_out = head_of(g.dV, b, kv) + j * g.dV.row;
        #pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) {
            *(u32 *)&dK_out[8 * n + 2 * t] =
                pack(dK[n][2 * r] * p.scale, dK[n][2 * r + 1] * p.scale);
            *(u32 *)&dV_out[8 * n + 2 * t] = pack(dV[n][2 * r], dV[n][2 * r + 1]);
        }
    }
}

// dQ alone, loops swapped: a block of threads owns 128 queries, a warp 16, and goes through the keys.
const int KEYS = 64;

struct SharedQ {
    T Q[16 * WARPS][HEAD], dO[16 * WARPS][HEAD], K[2][KEYS][HEAD], V[2][KEYS][HEAD];
};
static_assert(sizeof(SharedQ) <= SHARED);

extern "C" __global__ void __launch_bounds__(THREADS, 1) queries(const Params p, const Gradients g) {
    extern __shared__ __align__(1024) char memory[];
    SharedQ &s = *(SharedQ *)memory;
    const int Br = 16 * WARPS;
    int blocks = (p.Nq + Br - 1) / Br, head = blockIdx.x / blocks, row0 = blockIdx.x % blocks * Br;
    int b = head / p.heads, h = head % p.heads;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    int row = row0 + 16 * warp + lane / 4;  // and row + 8
    const T *K = head_of(p.K, b, h / p.group), *V = head_of(p.V, b, h / p.group);
    int end = CAUSAL ? min(p.Nk, row0 + Br + p.offset) : p.Nk;

    auto fetch = [&](int col0, int buffer) {
        load<KEYS>(s.K[buffer], K + col0 * p.K.row, p.K.row, p.Nk - col0);
        load<KEYS>(s.V[buffer], V + col0 * p.V.row, p.V.row, p.Nk - col0);
        commit();
    };
    load<Br>(s.Q, head_of(p.Q, b, h) + row0 * p.Q.row, p.Q.row, p.Nq - row0);
    load<Br>(s.dO, head_of(g.dO, b, h) + row0 * g.dO.row, g.dO.row, p.Nq - row0);
    if (end > 0) fetch(0, 0);

    float dQ[2 * STEPS][4] = {}, c = p.scale * 1.4426950408889634f;
    float L2[2] = {L2_of(p, head)[row], L2_of(p, head)[row + 8]};
    float D[2] = {D_of(p, head)[row], D_of(p, head)[row + 8]};

    for (int col0 = 0, now = 0; col0 < end; col0 += KEYS, now ^= 1) {
        wait<0>();
        __syncthreads();
        if (col0 + KEYS < end) fetch(col0 + KEYS, now ^ 1);

        float S[KEYS / 8][4] = {}, dP[KEYS / 8][4] = {};
        u32 dS[KEYS / 8][2];
        product_abt(S, s.Q, 16 * warp, s.K[now]);
        product_abt(dP, s.dO, 16 * warp, s.V[now]);
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            #pragma unroll
            for (int y = 0; y < 4; y++) {
                bool see = visible(p, row + y / 2 * 8, col0 + 8 * n + 2 * t + y % 2);
                float P = see ? exp2_fast(S[n][y] * c - L2[y / 2]) : 0.f;
                S[n][y] = P * (dP[n][y] - D[y / 2]);
            }
            dS[n][0] = pack(S[n][0], S[n][1]), dS[n][1] = pack(S[n][2], S[n][3]);
        }
        product_ab(dQ, dS, s.K[now]);
    }

    #pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = row + 8 * r;
        if (i >= p.Nq) continue;
        T *out = head_of(g.dQ, b, h) + i * g.dQ.row;
        #pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
            *(u32 *)&out[8 * n + 2 * t] =
                pack(dQ[n][2 * r] * p.scale, dQ[n][2 * r + 1] * p.scale);
    }
}
