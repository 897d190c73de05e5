// C = A B^T with TMA and wgmma: the shortest program that feeds Hopper's tensor cores.
//
// The idea: one thread asks the copy engine for tiles of A and B, four steps ahead. Two warpgroups
// wait for the bytes, multiply straight from shared memory, and say when a buffer is free again. A is
// (M, K), B is (N, K), C is (M, N), all 16 bits, rows contiguous; K is a multiple of 8. What lies
// outside a tensor arrives as zeros, so no tile needs a special case until the end.

#include "common.cuh"
#include "hopper.cuh"

const int TILE_M = 128, TILE_N = 128, TILE_K = 64, STAGES = 4, WARPGROUPS = 2;
const int THREADS = 128 * WARPGROUPS;

struct Shared {
    T A[STAGES][TILE_M][TILE_K], B[STAGES][TILE_N][TILE_K];
    Barrier full[STAGES];
};
static_assert(sizeof(Shared) <= SHARED);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul(T *C, int M, int N, int K, const __grid_constant__ TensorMap A_map,
       const __grid_constant__ TensorMap B_map) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *(Shared *)memory;
    int columns = (N + TILE_N - 1) / TILE_N, steps = (K + TILE_K - 1) / TILE_K;
    int row0 = blockIdx.x / columns * TILE_M, col0 = blockIdx.x % columns * TILE_N;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init(&s.full[i], 1);
        publish_barriers();
    }
    __syncthreads();

    auto load = [&](int k) {
        int i = k % STAGES;
        arrive_expecting(&s.full[i], sizeof(s.A[i]) + sizeof(s.B[i]));
        tma_load(s.A[i], &A_map, &s.full[i], k * TILE_K, row0, 0, 0);
        tma_load(s.B[i], &B_map, &s.full[i], k * TILE_K, col0, 0, 0);
    };
    if (threadIdx.x == 0)
        for (int k = 0; k < min(STAGES - 1, steps); k++) load(k);

    float c[TILE_N / 8][4];
    int w = threadIdx.x / 128;
    for (int k = 0; k < steps; k++) {
        int i = k % STAGES;
        wait(&s.full[i], k / STAGES % 2);
        u32 A = shared_address(s.A[i][64 * w]), B = shared_address(s.B[i]);
        wgmma_fence();
        #pragma unroll
        for (int x = 0; x < TILE_K / 16; x++)  // 16 columns are 32 bytes further on
            wgmma_abt(c, matrix(A + 32 * x), matrix(B + 32 * x), k + x > 0);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // both warpgroups are done with buffer i, and so with the one before
        if (threadIdx.x == 0 && k + STAGES - 1 < steps) load(k + STAGES - 1);
    }

    int row = row0 + 64 * w + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    int col = col0 + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int n = 0; n < TILE_N / 8; n++)
        #pragma unroll
        for (int x = 0; x < 4; x++) {
            int i = row + x / 2 * 8, j = col + 8 * n + x % 2;
            if (i < M && j < N) C[(i64)i * N + j] = from_float(c[n][x]);
        }
}
