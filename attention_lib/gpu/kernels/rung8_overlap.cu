// Rung 8: softmax hides behind the next product, and the end of one block behind the start of the next.
//
// Source: FlashAttention-3, arXiv 2407.08608, section 3.2 and Algorithm 2. Three ideas:
// - inside a warpgroup: S of tile i is started before the weights of tile i - 1 have been multiplied,
//   so softmax of tile i runs while the tensor cores are at O += P V of tile i - 1;
// - between warpgroups: they take turns at starting products, so that one is at its softmax while
//   another multiplies;
// - one block of threads an SM works through many blocks of Q. The loader runs ahead into the next
//   one, and O leaves through the copy engine. If causal, blocks differ in length: each loader
//   draws its next number from a counter.
// Tiles go from the last to the first, so that the masked ones come first.

#include "common.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

const int READERS = HEAD == 64 ? 3 : 2, Br = 64 * READERS, THREADS = 128 * (READERS + 1), STAGES = 2;

struct Shared {
    T Q[READERS][HALVES][64][64], K[STAGES][HALVES][Bc][64], V[STAGES][HALVES][Bc][64];
    T O[READERS][HALVES][64][64];
    Barrier Q_full[READERS], Q_empty[READERS];
    Barrier K_full[STAGES], K_empty[STAGES], V_full[STAGES], V_empty[STAGES];
    int work;  // the block of Q in s.Q; -1: no more
};
static_assert(sizeof(Shared) <= SHARED);

struct Work {
    int b, h, row0, tiles;
};

// Block number `work`: head by head, so that K and V of few heads are in L2; if causal, the longest
// rows of tiles of a head first.
__device__ __forceinline__ Work block_of_Q(const Params &p, int work) {
    int blocks = (p.Nq + Br - 1) / Br, head = work / blocks, block = work % blocks;
    int row0 = (CAUSAL ? blocks - 1 - block : block) * Br;
    return {head / p.heads, head % p.heads, row0, tiles_of(p, row0, Br)};
}

// *x, or 0 where nothing is taken. In PTX: after a branch in C++ ptxas would not know any more which
// values all lanes of a warp have in common, and move each address of wgmma across, in every tile.
__device__ __forceinline__ int load_if(bool take, const int *x) {
    int y = 0;
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %1, 0;\n@p ld.shared.s32 %0, [%2];\n}"
                 : "+r"(y) : "r"((int)take), "r"(shared_address(x)) : "memory");
    return y;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention(const Params p, const __grid_constant__ TensorMap Q_map,
          const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
          const __grid_constant__ TensorMap O_map) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    int total = (p.Nq + Br - 1) / Br * p.batch * p.heads;

    if (threadIdx.x == 0) {
        for (int w = 0; w < READERS; w++) init(&s.Q_full[w], 1), init(&s.Q_empty[w], 4);
        for (int i = 0; i < STAGES; i++) {
            init(&s.K_full[i], 1), init(&s.K_empty[i], READERS);
            init(&s.V_full[i], 1), init(&s.V_empty[i], READERS);
        }
        publish_barriers();
    }
    __syncthreads();

    if (threadIdx.x < 128) {  // the loader
        give_registers<(READERS == 2 ? 40 : 32)>();
        if (threadIdx.x > 0) return;
        for (int work = blockIdx.x, n = 0, i = 0; CAUSAL || work < total; n++) {
            for (int w = 0; w < READERS; w++) wait(&s.Q_empty[w], n % 2 ^ 1);
            s.work = work < total ? work : -1;
            Work x = block_of_Q(p, work);
            if (work >= total) x.tiles = 0;
            for (int w = 0; w < READERS; w++) {
                if (x.tiles == 0) {
                    arrive(&s.Q_full[w]);
                    continue;
                }
                arrive_expecting(&s.Q_full[w], sizeof(s.Q[w]));
                for (int y = 0; y < HALVES; y++)
                    tma_load(s.Q[w][y], &Q_map, &s.Q_full[w], 64 * y, x.row0 + 64 * w, x.h, x.b);
            }
            if (work >= total) return;
            work = gridDim.x + (CAUSAL ? atomicAdd((int *)p.work, 1) : work);
            x.h /= p.group;  // the head of K and V
            #pragma unroll 1  // the loader has few registers
            for (int j = x.tiles - 1; j >= 0; j--, i++) {
                int stage = i % STAGES, parity = i / STAGES % 2;
                wait(&s.K_empty[stage], parity ^ 1);
                arrive_expecting(&s.K_full[stage], TILE);
                for (int y = 0; y < HALVES; y++)
                    tma_load(s.K[stage][y], &K_map, &s.K_full[stage], 64 * y, j * Bc, x.h, x.b);
                wait(&s.V_empty[stage], parity ^ 1);
                arrive_expecting(&s.V_full[stage], TILE);
                for (int y = 0; y < HALVES; y++)
                    tma_load(s.V[stage][y], &V_map, &s.V_full[stage], 64 * y, j * Bc, x.h, x.b);
            }
        }
        return;
    }

    take_registers<(READERS == 2 ? 232 : 160)>();  // a reader
    int w = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
    bool leader = threadIdx.x % 128 == 0;
    bool first = threadIdx.x % 32 == 0;  // of its warp: it reads s.work for all, and says when it has
    u32 Q = shared_address(s.Q[w]), K = shared_address(s.K), V = shared_address(s.V);
    float c = p.scale * 1.4426950408889634f;
    if (w == READERS - 1) named_arrive(1, 256);  // the first turn is that of reader 0

    for (int work = blockIdx.x, n = 0, i = 0; CAUSAL || work < total; n++, work += gridDim.x) {
        wait(&s.Q_full[w], n % 2);
        if (CAUSAL) work = __shfl_sync(~0u, load_if(first, &s.work), 0);
        if (CAUSAL && work < 0) break;
        Work x = block_of_Q(p, work);
        int top = x.row0 + 64 * w, row = top + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        float O[HEAD / 8][4] = {}, S[Bc / 8][4];
        u32 P[Bc / 16][4];
        Rows rows(p, top, row);

        int mine = x.tiles;
        if (CAUSAL && Br > Bc) {  // tiles that this reader's 64 rows do not see: it lets them pass
            mine = top < p.Nq ? min(mine, tiles_of(p, top, 64)) : 0;
            for (int skip = x.tiles - mine; skip > 0; skip--, i++) {
                wait(&s.K_full[i % STAGES], i / STAGES % 2);
                wait(&s.V_full[i % STAGES], i / STAGES % 2);
                if (mine > 0 || skip > 1)  // a block of n tiles has n - 1 turns
                    named_wait(1 + w, 256), named_arrive(1 + (w + 1) % READERS, 256);
                else
                    named_wait(1 + READERS + w, 128);
                if (leader) arrive(&s.K_empty[i % STAGES]), arrive(&s.V_empty[i % STAGES]);
            }
        }

        if (mine > 0) {
            int col0 = (mine - 1) * Bc;
            wait(&s.K_full[i % STAGES], i / STAGES % 2);
            wgmma_fence();
            score(S, Q, K + i % STAGES * TILE);
            wgmma_commit();
            wgmma_wait<0>();
            if (leader) arrive(&s.K_empty[i % STAGES]);
            if (first && col0 == 0) arrive(&s.Q_empty[w]);
            rows.hide(S, col0);
            rows.softmax(S, c);
            as_weights(P, S);

            for (col0 -= Bc; col0 >= 0; col0 -= Bc, i++) {
                int now = (i + 1) % STAGES, before = i % STAGES;
                wait(&s.K_full[now], (i + 1) / STAGES % 2);
                named_wait(1 + w, 256);  // my turn
                wgmma_fence();
                score(S, Q, K + now * TILE);
                wgmma_commit();
                wait(&s.V_full[before], i / STAGES % 2);
                wgmma_fence();
                accumulate(O, P, V + before * TILE);
                wgmma_commit();
                named_arrive(1 + (w + 1) % READERS, 256);  // the next reader's turn
                wgmma_wait<1>();                           // S is there; O is not
                if (leader) arrive(&s.K_empty[now]);
                if (first && col0 == 0) arrive(&s.Q_empty[w]);
                rows.hide(S, col0);
                rows.softmax(S, c);
                wgmma_wait<0>();
                if (leader) arrive(&s.V_empty[before]);
                as_weights(P, S);
                rows.rescale_O(O);
            }
            wait(&s.V_full[i % STAGES], i / STAGES % 2);
            wgmma_fence();
            accumulate(O, P, V + i % STAGES * TILE);
            wgmma_commit();
            wgmma_wait<0>();
            if (leader) arrive(&s.V_empty[i % STAGES]);
            i++;
        } else if (first) {
            arrive(&s.Q_empty[w]);
        }

        // store: O through shared memory, so that the next block can begin while it is copied.
        if (leader) tma_stores_read();
        named_wait(1 + READERS + w, 128);  // the last O has left the buffer
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float inverse = rows.end(p, x.b, x.h, row, r);
            #pragma unroll
            for (int n = 0; n < HEAD / 8; n++)
                *(u32 *)&s.O[w][n / 8][row % 64 + 8 * r][(n ^ row) % 8 * 8 + threadIdx.x % 4 * 2] =
                    pack(O[n][2 * r] * inverse, O[n][2 * r + 1] * inverse);
        }
        fence_for_async();
        named_wait(1 + READERS + w, 128);
        if (leader)
            for (int y = 0; y < HALVES; y++) tma_store(&O_map, s.O[w][y], 64 * y, top, x.h, x.b);
    }
    if (leader) tma_stores_read();  // or the block would end, and its shared memory with it
    if (w == 0) named_wait(1, 256);  // the turn that is left over
}
