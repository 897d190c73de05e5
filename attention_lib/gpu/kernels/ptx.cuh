// The tensor cores' instructions, each behind a function of a few lines. sm_80 and later.
//
// A warp works on fragments: pieces of a matrix spread over its 32 lanes. Lane = 4 g + t.
//   A, 16 x 16:  a[0] = row g, columns 2t, 2t+1    a[2] = row g, columns 2t+8, 2t+9
//                a[1] = row g+8, columns 2t, 2t+1  a[3] = row g+8, columns 2t+8, 2t+9
//   B, 16 x 8:   b[0] = rows 2t, 2t+1, column g    b[1] = rows 2t+8, 2t+9, column g
//   C, 16 x 8:   c[0], c[1] = row g, columns 2t, 2t+1    c[2], c[3] = row g+8
// Source: PTX ISA, "Matrix fragments for mma.m16n8k16".

// C += A B
__device__ __forceinline__ void mma(float c[4], const u32 a[4], const u32 b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." PTX_TYPE "." PTX_TYPE ".f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ u32 shared_address(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}

// Four 8 x 8 matrices from shared memory; lane k gives the address of row k % 8 of matrix k / 8.
__device__ __forceinline__ void ldmatrix(u32 r[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// The same, each matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_transposed(u32 r[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// Two floats as two 16-bit numbers in one register, x in the lower half.
__device__ __forceinline__ u32 pack(float x, float y) {
    u32 r;
    asm("cvt.rn." PTX_TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    return r;
}

// 16 bytes from HBM to shared memory, past the registers; zeros where `there` is false.
__device__ __forceinline__ void copy_async(u32 to, const T *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `pending` groups of this thread's copies are still under way.
template <int pending> __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
}

// The largest (or the sum) of a row: its values are spread over the four lanes of a group.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
