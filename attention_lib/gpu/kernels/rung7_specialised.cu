// Rung 7: warps with different jobs. One warpgroup loads, the others compute.
//
// Source: FlashAttention-3, arXiv 2407.08608, section 3.1. The idea: a loader that runs ahead of its
// readers. K and V go through a ring of buffers with two barriers each: `full` (the bytes came) and
// `empty` (every reader is done). So no barrier stops all threads, and the warpgroups may drift
// apart: one multiplies while the other is at its softmax. The loader needs few registers and gives
// the rest away (setmaxnreg).

#include "common.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

const int READERS = 2, Br = 64 * READERS, THREADS = 128 * (READERS + 1), STAGES = 2;

struct Shared {
    T Q[READERS][HALVES][64][64], K[STAGES][HALVES][Bc][64], V[STAGES][HALVES][Bc][64];
    Barrier Q_full, K_full[STAGES], K_empty[STAGES], V_full[STAGES], V_empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention(const Params p, const __grid_constant__ TensorMap Q_map,
          const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    int blocks = (p.Nq + Br - 1) / Br, head = blockIdx.x / blocks, block = blockIdx.x % blocks;
    if (CAUSAL) block = blocks - 1 - block;
    int b = head / p.heads, h = head % p.heads, row0 = block * Br, tiles = tiles_of(p, row0, Br);

    if (threadIdx.x == 0) {
        init(&s.Q_full, 1);
        for (int i = 0; i < STAGES; i++) {
            init(&s.K_full[i], 1), init(&s.K_empty[i], READERS);
            init(&s.V_full[i], 1), init(&s.V_empty[i], READERS);
        }
        publish_barriers();
    }
    __syncthreads();

    if (threadIdx.x < 128) {  // the loader
        give_registers<40>();
        if (threadIdx.x > 0 || tiles == 0) return;
        arrive_expecting(&s.Q_full, sizeof(s.Q));
        for (int w = 0; w < READERS; w++)
            for (int x = 0; x < HALVES; x++)
                tma_load(s.Q[w][x], &Q_map, &s.Q_full, 64 * x, row0 + 64 * w, h, b);
        for (int j = 0; j < tiles; j++) {
            int i = j % STAGES, parity = j / STAGES % 2;
            wait(&s.K_empty[i], parity ^ 1);
            arrive_expecting(&s.K_full[i], TILE);
            for (int x = 0; x < HALVES; x++)
                tma_load(s.K[i][x], &K_map, &s.K_full[i], 64 * x, j * Bc, h / p.group, b);
            wait(&s.V_empty[i], parity ^ 1);
            arrive_expecting(&s.V_full[i], TILE);
            for (int x = 0; x < HALVES; x++)
                tma_load(s.V[i][x], &V_map, &s.V_full[i], 64 * x, j * Bc, h / p.group, b);
        }
    } else {  // a reader
        take_registers<232>();
        int w = threadIdx.x / 128 - 1, top = row0 + 64 * w;
        int row = top + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        bool leader = threadIdx.x % 128 == 0;
        u32 Q = shared_address(s.Q[w]), K = shared_address(s.K), V = shared_address(s.V);
        float O[HEAD / 8][4] = {}, S[Bc / 8][4], c = p.scale * 1.4426950408889634f;
        u32 P[Bc / 16][4];
        Rows rows(p, top, row);

        if (tiles > 0) wait(&s.Q_full, 0);
        for (int j = 0; j < tiles; j++) {
            int i = j % STAGES, parity = j / STAGES % 2;
            wait(&s.K_full[i], parity);
            wgmma_fence();
            score(S, Q, K + i * TILE);
            wgmma_commit();
            wgmma_wait<0>();
            if (leader) arrive(&s.K_empty[i]);
            rows.hide(S, j * Bc);
            rows.softmax(S, c);
            rows.rescale_O(O);
            as_weights(P, S);

            wait(&s.V_full[i], parity);
            wgmma_fence();
            accumulate(O, P, V + i * TILE);
            wgmma_commit();
            wgmma_wait<0>();
            if (leader) arrive(&s.V_empty[i]);
        }
        rows.store(p, O, b, h, row);
    }
}
