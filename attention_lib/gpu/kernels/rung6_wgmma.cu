// Rung 6: Hopper's own instructions. A whole warpgroup multiplies, a copy engine loads.
//
// The idea: wgmma reads K and V (and Q) straight from shared memory, 128 threads at a time, so no
// ldmatrix, no fragments of B in registers; and TMA fills shared memory, swizzled and padded with
// zeros, at the word of one thread. Two warpgroups of 64 rows; K and V in two buffers, as in rung 5.
// Everything still waits: the products for the copies, softmax for the products.

#include "common.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

const int WARPGROUPS = 2, Br = 64 * WARPGROUPS, THREADS = 128 * WARPGROUPS;

struct Shared {
    T Q[WARPGROUPS][HALVES][64][64], K[2][HALVES][Bc][64], V[2][HALVES][Bc][64];
    Barrier Q_full, full[2];
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
        init(&s.Q_full, 1), init(&s.full[0], 1), init(&s.full[1], 1);
        publish_barriers();
    }
    __syncthreads();

    auto load = [&](int j) {  // tile j of K and V
        arrive_expecting(&s.full[j % 2], 2 * TILE);
        for (int x = 0; x < HALVES; x++) {
            tma_load(s.K[j % 2][x], &K_map, &s.full[j % 2], 64 * x, j * Bc, h / p.group, b);
            tma_load(s.V[j % 2][x], &V_map, &s.full[j % 2], 64 * x, j * Bc, h / p.group, b);
        }
    };
    if (threadIdx.x == 0 && tiles > 0) {
        arrive_expecting(&s.Q_full, sizeof(s.Q));
        for (int w = 0; w < WARPGROUPS; w++)
            for (int x = 0; x < HALVES; x++)
                tma_load(s.Q[w][x], &Q_map, &s.Q_full, 64 * x, row0 + 64 * w, h, b);
        load(0);
    }

    int w = threadIdx.x / 128, top = row0 + 64 * w;
    int row = top + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    u32 Q = shared_address(s.Q[w]), K = shared_address(s.K), V = shared_address(s.V);
    float O[HEAD / 8][4] = {}, S[Bc / 8][4], c = p.scale * 1.4426950408889634f;
    u32 P[Bc / 16][4];
    Rows rows(p, top, row);

    if (tiles > 0) wait(&s.Q_full, 0);
    for (int j = 0; j < tiles; j++) {
        if (threadIdx.x == 0 && j + 1 < tiles) load(j + 1);
        wait(&s.full[j % 2], j / 2 % 2);

        wgmma_fence();
        score(S, Q, K + j % 2 * TILE);
        wgmma_commit();
        wgmma_wait<0>();
        rows.hide(S, j * Bc);
        rows.softmax(S, c);
        rows.rescale_O(O);
        as_weights(P, S);

        wgmma_fence();
        accumulate(O, P, V + j % 2 * TILE);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // nobody reads the tile any more
    }
    rows.store(p, O, b, h, row);
}
