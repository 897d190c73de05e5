// Hopper's instructions, each behind a function of a few lines. sm_90a only.
// Source: PTX ISA, "Asynchronous warpgroup level matrix instructions", "Tensor copy", "mbarrier".

typedef unsigned long long u64;

struct alignas(64) TensorMap { char bytes[128]; };  // cuTensorMapEncodeTiled fills it, on the CPU

__device__ __forceinline__ u32 shared_address(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}

// ---- mbarrier: a phase ends when all have arrived and all expected bytes have come.
typedef u64 Barrier;

__device__ __forceinline__ void init(Barrier *b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(b)), "r"(arrivals));
}

// After the last init: other threads and the copy engine see the barriers.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(b)) : "memory");
}

__device__ __forceinline__ void arrive_expecting(Barrier *b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
        :: "r"(shared_address(b)), "r"(bytes) : "memory");
}

// Wait until the phase of this parity has ended. Before the first phase, parity 1 has "ended".
__device__ __forceinline__ void wait(Barrier *b, int parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" :: "r"(shared_address(b)), "r"(parity) : "memory");
}

// ---- TMA: one thread asks for a box of a tensor. The copy engine swizzles rows of 128 bytes, fills
// what lies outside with zeros, and counts the bytes at the barrier.
__device__ __forceinline__ void tma_load(void *to, const TensorMap *map, Barrier *b, int column,
                                         int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];"
        :: "r"(shared_address(to)), "l"(map), "r"(shared_address(b)),
           "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

// And back, from swizzled shared memory: one thread, after a barrier before which each writer fenced.
// What lies outside the tensor is not written.
__device__ __forceinline__ void tma_store(const TensorMap *map, const void *from, int column, int row,
                                          int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
        "[%0, {%2, %3, %4, %5}], [%1];"
        :: "l"(map), "r"(shared_address(from)), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until this thread's stores have been read from shared memory.
__device__ __forceinline__ void tma_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// What this thread wrote to shared memory will be seen by the copy engine and by wgmma.
__device__ __forceinline__ void fence_for_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// to += from, float by float, added where the L2 cache keeps `to`. Fence and wait as for tma_store.
__device__ __forceinline__ void bulk_add(float *to, const void *from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
        :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Four 8 x 8 matrices to shared memory; lane k gives the address of row k % 8 of matrix k / 8.
__device__ __forceinline__ void stmatrix(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
        :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// ---- wgmma: the four warps of a warpgroup together, C (64 x N) += A (64 x 16) B (16 x N).
// How a matrix lies in shared memory: rows of 64 columns (128 bytes, swizzled), 8 rows a pattern of
// 1024 bytes. lead: bytes from 64 columns to the next 64, used where the columns are the N of B.
__device__ __forceinline__ u64 matrix(u32 address, int lead = 0) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(lead >> 4) << 16 | (u64)(1024 >> 4) << 32 |
           1ull << 62;
}

// Before the first wgmma that reads registers written by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most `pending` committed groups are still at work.
template <int pending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(pending) : "memory");
}

// The operands of C: 32 or 64 registers a thread, four for each 8 columns, laid out as for mma.sync.
#define C4(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define C16(c, i) C4(c, i), C4(c, i + 1), C4(c, i + 2), C4(c, i + 3)
#define R32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R64 R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
    "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." PTX_TYPE "." PTX_TYPE " "

// C += A B^T, A and B in shared memory, both with the 16 of the sum along their rows.
// `more` 0: C = A B^T.
__device__ __forceinline__ void wgmma_abt(float (&c)[16][4], u64 a, u64 b, int more) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
        WGMMA("128") "{" R64 "}, %64, %65, p, 1, 1, 0, 0;}"
        : C16(c, 0), C16(c, 4), C16(c, 8), C16(c, 12) : "l"(a), "l"(b), "r"(more));
}

__device__ __forceinline__ void wgmma_abt(float (&c)[8][4], u64 a, u64 b, int more) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
        WGMMA("64") "{" R32 "}, %32, %33, p, 1, 1, 0, 0;}"
        : C16(c, 0), C16(c, 4) : "l"(a), "l"(b), "r"(more));
}

// C += A^T B, A and B in shared memory, 16 rows of each: the columns of A are the 64 rows of C.
__device__ __forceinline__ void wgmma_atb(float (&c)[8][4], u64 a, u64 b, int more) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
        WGMMA("64") "{" R32 "}, %32, %33, p, 1, 1, 1, 1;}"
        : C16(c, 0), C16(c, 4) : "l"(a), "l"(b), "r"(more));
}

// C += A B, A in registers (16 columns, as for mma.sync), B in shared memory, 16 rows.
__device__ __forceinline__ void wgmma_ab(float (&c)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(WGMMA("64") "{" R32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : C16(c, 0), C16(c, 4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_ab(float (&c)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(WGMMA("128") "{" R64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : C16(c, 0), C16(c, 4), C16(c, 8), C16(c, 12)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// ---- registers and turns
template <int n> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(n));
}

template <int n> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(n));
}

// A barrier with a name: it opens when `threads` have come, whether they wait or only arrive.
__device__ __forceinline__ void named_wait(int name, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(name), "r"(threads) : "memory");
}
