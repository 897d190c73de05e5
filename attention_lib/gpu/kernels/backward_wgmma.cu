// The backward pass on Hopper's wgmma and TMA: dQ, dK, dV from Q, K, V, O, L and dO.
//
// Source: FlashAttention-2, arXiv 2307.08691, Algorithm 2, with the pipeline of FlashAttention-3,
// arXiv 2407.08608, section 3. A block of threads owns 128 keys, a reader (a warpgroup) 64 of them,
// with their dK and dV in registers. A loader brings the tiles of Q and dO through a ring. As in
// backward.cu a reader works on S transposed, 64 keys x Br queries, so that P^T and dS^T are at once
// the A operands of dV += P^T dO and dK += dS^T Q. Three ideas are new:
// - products are started early and waited for late: exp runs during dP^T, dS during dV, and the
//   next S^T starts before dK is complete;
// - dS^T is stored as it is. dQ = dS K wants it transposed, and wgmma can read A that way;
// - dQ is added up in HBM by the copy engine, 16 KB at a time, in the order in which the threads of a
//   warpgroup hold it. `finish` puts it in order, once.
// `DQ 0` leaves dQ out, for the deterministic mode: `queries` of backward.cu makes it then.
// p.work: see backward.cuh. dQ there: pieces of 64 queries x 64 columns, column pieces inside.

#include "common.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"
#include "backward.cuh"

#ifndef DQ
#define DQ 1
#endif

const int READERS = 2, THREADS = 128 * (READERS + 1), STAGES = 2, Br = HEAD == 64 ? 128 : 64;
const int PIECE = 64 * 64;  // floats of dQ that a reader adds for each tile of queries

struct Shared {
    T K[HALVES][Bc][64], V[HALVES][Bc][64], Q[STAGES][HALVES][Br][64], dO[STAGES][HALVES][Br][64];
    T dS[2][Br / 64][Bc][64];  // transposed: a row is a key, 64 queries long
    float4 dQ[READERS][8][128];
    float L2[STAGES][Br], D[STAGES][Br];
    Barrier K_full, V_full;
    Barrier Q_full[STAGES], Q_empty[STAGES], dO_full[STAGES], dO_empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED);

// C = A B^T, started: A 64 of the 128 rows of K or V, B the 8n rows of Q or dO.
template <int n> __device__ __forceinline__ void start_abt(float (&C)[n][4], u32 A, u32 B) {
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < HEAD / 16; k++)
        wgmma_abt(C, matrix(A + k / 4 * Bc * 128 + k % 4 * 32),
                  matrix(B + k / 4 * Br * 128 + k % 4 * 32), k > 0);
    wgmma_commit();
}

// C += A B, started: A 64 keys x Br queries in registers, B the tile of Q or dO.
__device__ __forceinline__ void start_ab(float (&C)[HEAD / 8][4], const u32 (&A)[Br / 16][4],
                                         u32 B) {
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < Br / 16; k++) wgmma_ab(C, A[k], matrix(B + k * 16 * 128, Br * 128));
    wgmma_commit();
}

// The tiles of queries that see a key of this block, of all heads of the group.
struct Tile {
    int h, row0, first;
    __device__ __forceinline__ void next(int Nq) {
        row0 += Br;
        if (row0 >= Nq) row0 = first, h++;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
keys(const Params p, const Gradients g, const __grid_constant__ TensorMap Q_map,
     const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
     const __grid_constant__ TensorMap dO_map, const __grid_constant__ TensorMap L2_D_map) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    int blocks = (p.Nk + Bc - 1) / Bc, kv_heads = p.heads / p.group;
    int kv_head = blockIdx.x / blocks, col0 = blockIdx.x % blocks * Bc;
    int b = kv_head / kv_heads, kv = kv_head % kv_heads;
    int first = CAUSAL ? max(0, col0 - p.offset) / Br * Br : 0;
    int tiles = first < p.Nq ? (p.Nq - first + Br - 1) / Br * p.group : 0;
    Tile x = {kv * p.group, first, first};

    if (threadIdx.x == 0) {
        init(&s.K_full, 1), init(&s.V_full, 1);
        for (int i = 0; i < STAGES; i++) {
            init(&s.Q_full[i], 1), init(&s.Q_empty[i], READERS);
            init(&s.dO_full[i], 1), init(&s.dO_empty[i], READERS);
        }
        publish_barriers();
    }
    __syncthreads();

    if (threadIdx.x < 128) {  // the loader
        give_registers<24>();
        if (threadIdx.x > 0 || tiles == 0) return;
        arrive_expecting(&s.K_full, TILE);
        arrive_expecting(&s.V_full, TILE);
        for (int y = 0; y < HALVES; y++) {
            tma_load(s.K[y], &K_map, &s.K_full, 64 * y, col0, kv, b);
            tma_load(s.V[y], &V_map, &s.V_full, 64 * y, col0, kv, b);
        }
        for (int j = 0; j < tiles; j++, x.next(p.Nq)) {
            int i = j % STAGES, parity = j / STAGES % 2;
            int L2_row = b * p.heads + x.h, D_row = p.batch * p.heads + L2_row;
            wait(&s.Q_empty[i], parity ^ 1);
            arrive_expecting(&s.Q_full[i], sizeof(s.Q[i]) + sizeof(s.L2[i]));
            for (int y = 0; y < HALVES; y++)
                tma_load(s.Q[i][y], &Q_map, &s.Q_full[i], 64 * y, x.row0, x.h, b);
            tma_load(s.L2[i], &L2_D_map, &s.Q_full[i], x.row0, L2_row, 0, 0);
            wait(&s.dO_empty[i], parity ^ 1);
            arrive_expecting(&s.dO_full[i], sizeof(s.dO[i]) + sizeof(s.D[i]));
            for (int y = 0; y < HALVES; y++)
                tma_load(s.dO[i][y], &dO_map, &s.dO_full[i], 64 * y, x.row0, x.h, b);
            tma_load(s.D[i], &L2_D_map, &s.dO_full[i], x.row0, D_row, 0, 0);
        }
        return;
    }

    take_registers<240>();  // a reader
    int w = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0), thread = threadIdx.x % 128;
    int lane = thread % 32, t = lane % 4, top = 64 * w + thread / 32 * 16;  // of this warp's keys
    int key = col0 + top + lane / 4;                                        // and key + 8
    bool leader = thread == 0;
    u32 K = shared_address(s.K) + 64 * w * 128, V = shared_address(s.V) + 64 * w * 128;
    // dQ of this reader: 64 of the queries and all of d, or all queries and 64 columns of d.
    u32 dQ_A = shared_address(s.dS[0][Br == 128 ? w : 0]);
    u32 dQ_B = shared_address(s.K[HEAD == 128 ? w : 0]);
    // Where this lane stores dS^T: a key's row, 8 queries; 16 queries further on is ^ 32.
    u32 dS_lane = shared_address(s.dS[0][0][top + lane % 16]) + (lane / 16 ^ lane % 8) * 16;

    // A key is seen by the queries from `sees` on; t is for this thread's columns. From row0 = whole
    // on, a tile hides nothing.
    int sees[2], whole = CAUSAL ? col0 + 64 * w + 63 - p.offset : 0;
    if (col0 + Bc > p.Nk) whole = 1 << 30;
    #pragma unroll
    for (int r = 0; r < 2; r++)
        sees[r] = (key + 8 * r >= p.Nk ? 1 << 30 : CAUSAL ? key + 8 * r - p.offset : 0) - 2 * t;

    float dK[HEAD / 8][4] = {}, dV[HEAD / 8][4] = {}, c = p.scale * 1.4426950408889634f;
    if (tiles > 0) wait(&s.K_full, 0), wait(&s.V_full, 0);

    for (int j = 0; j < tiles; j++, x.next(p.Nq)) {
        int i = j % STAGES, parity = j / STAGES % 2;
        u32 Q = shared_address(s.Q[i]), dO = shared_address(s.dO[i]);
        float S[Br / 8][4], dP[Br / 8][4];
        u32 P[Br / 16][4], dS[Br / 16][4];

        wait(&s.Q_full[i], parity);
        start_abt(S, K, Q);
        wgmma_wait<1>();  // dK of the tile before
        if (leader && j > 0) arrive(&s.Q_empty[i ^ 1]);
        wait(&s.dO_full[i], parity);
        start_abt(dP, V, dO);

        wgmma_wait<1>();  // S
        #pragma unroll
        for (int n = 0; n < Br / 8; n++) {
            float2 L2 = *(float2 *)&s.L2[i][8 * n + 2 * t];
            #pragma unroll
            for (int y = 0; y < 4; y++) S[n][y] = exp2_fast(S[n][y] * c - (y % 2 ? L2.y : L2.x));
        }
        if (x.row0 < whole) {
            #pragma unroll
            for (int n = 0; n < Br / 8; n++)
                #pragma unroll
                for (int y = 0; y < 4; y++)
                    if (x.row0 + 8 * n + y % 2 < sees[y / 2]) S[n][y] = 0.f;
        }
        #pragma unroll
        for (int n = 0; n < Br / 8; n++)
            #pragma unroll
            for (int r = 0; r < 2; r++)
                P[n / 2][n % 2 * 2 + r] = pack(S[n][2 * r], S[n][2 * r + 1]);
        start_ab(dV, P, dO);

        wgmma_wait<1>();  // dP
        #pragma unroll
        for (int n = 0; n < Br / 8; n++) {
            float2 D = *(float2 *)&s.D[i][8 * n + 2 * t];
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                float2 weight = unpack(P[n / 2][n % 2 * 2 + r]);  // in float it would spill
                dS[n / 2][n % 2 * 2 + r] = pack(weight.x * (dP[n][2 * r] - D.x),
                                                weight.y * (dP[n][2 * r + 1] - D.y));
            }
        }
        if (DQ) {
            #pragma unroll
            for (int k = 0; k < Br / 16; k++)
                stmatrix((dS_lane ^ k % 4 * 32) + k / 4 * Bc * 128 + i * (int)sizeof(s.dS[0]),
                         dS[k]);
            fence_for_async();
            if (leader) tma_stores_read();  // s.dQ is free again
        }
        named_wait(1, 128 * READERS);  // dS is complete, and all have read L2 and D
        float dQ[8][4];
        if (DQ) {
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < Bc / 16; k++)
                wgmma_atb(dQ, matrix(dQ_A + i * (int)sizeof(s.dS[0]) + k * 16 * 128),
                          matrix(dQ_B + k * 16 * 128), k > 0);
            wgmma_commit();
        }
        start_ab(dK, dS, Q);

        wgmma_wait<1>();  // dV, dQ
        if (leader) arrive(&s.dO_empty[i]);
        if (DQ) {
            #pragma unroll
            for (int n = 0; n < 8; n++)
                s.dQ[w][n][thread] = make_float4(dQ[n][0], dQ[n][1], dQ[n][2], dQ[n][3]);
            fence_for_async();
            named_wait(2 + w, 128);
            if (leader)
                bulk_add(dQ_of(p, b * p.heads + x.h) + (i64)x.row0 * HEAD + w * PIECE, s.dQ[w],
                         sizeof(s.dQ[w]));
        }
    }

    wgmma_wait<0>();
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = key + 8 * r;
        if (i >= p.Nk) continue;
        T *dK_out = head_of(g.dK, b, kv) + i * g.dK.row;
        T *dV_out = head_of(g.dV, b, kv) + i * g.dV.row;
        #pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
            *(u32 *)&dK_out[8 * n + 2 * t] =
                pack(dK[n][2 * r] * p.scale, dK[n][2 * r + 1] * p.scale);
            *(u32 *)&dV_out[8 * n + 2 * t] = pack(dV[n][2 * r], dV[n][2 * r + 1]);
        }
    }
    if (leader) tma_stores_read();  // or the block would end, and its shared memory with it
}

// dQ from the order of the readers' registers to rows, and to 16 bits. One block a piece; a thread
// takes what four neighbours held, 8 columns of two rows.
extern "C" __global__ void __launch_bounds__(256) finish(const Params p, const Gradients g) {
    int pieces = padded(p.Nq) / 64 * HALVES, head = blockIdx.x / pieces, piece = blockIdx.x % pieces;
    int n = threadIdx.x % 8, lane = threadIdx.x / 8 % 8 * 4, warp = threadIdx.x / 64;
    int row = piece / HALVES * 64 + 16 * warp + lane / 4, column = piece % HALVES * 64 + 8 * n;
    float4 *from = (float4 *)(dQ_of(p, head) + (i64)piece * PIECE) + n * 128 + 32 * warp + lane;
    u32 out[2][4];
    #pragma unroll
    for (int t = 0; t < 4; t++) {
        float4 y = from[t];
        out[0][t] = pack(y.x * p.scale, y.y * p.scale);
        out[1][t] = pack(y.z * p.scale, y.w * p.scale);
    }
    T *to = head_of(g.dQ, head / p.heads, head % p.heads) + column;
    #pragma unroll
    for (int r = 0; r < 2; r++)
        if (row + 8 * r < p.Nq) *(uint4 *)&to[(row + 8 * r) * g.dQ.row] = *(uint4 *)out[r];
}
