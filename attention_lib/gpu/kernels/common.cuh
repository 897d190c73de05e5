// What every rung shares: the arguments, the two 16-bit types, and one-line wrappers of PTX.
//
// Compiled with -D HEAD=64 (the head dimension d), -D BF16=0 or 1, -D CAUSAL=0 or 1.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#undef INFINITY
#define INFINITY __int_as_float(0x7f800000)  // NVRTC has no <math.h>

typedef long long i64;
typedef unsigned u32;

#if BF16
typedef __nv_bfloat16 T;
#define PTX_TYPE "bf16"
__device__ __forceinline__ float to_float(T x) { return __bfloat162float(x); }
__device__ __forceinline__ T from_float(float x) { return __float2bfloat16_rn(x); }
#else
typedef __half T;
#define PTX_TYPE "f16"
__device__ __forceinline__ float to_float(T x) { return __half2float(x); }
__device__ __forceinline__ T from_float(float x) { return __float2half_rn(x); }
#endif

// A tensor of shape (batch, heads, N, d). Strides count elements; d is contiguous.
struct View {
    T *data;
    i64 batch, head, row;
};

struct Params {
    View Q, K, V, O;
    float *L;              // (batch, heads, Nq), or null: log-sum-exp of each row's scores
    void *work;            // scratch memory of the rungs that need it
    int batch, heads, group, Nq, Nk;  // group: heads of Q for each head of K and V
    int offset;            // causal: query i sees key j when j <= i + offset
    float scale;           // 1 / sqrt(d)
};

__device__ __forceinline__ T *head_of(const View &x, int b, int h) {
    return x.data + b * x.batch + h * x.head;
}

__device__ __forceinline__ bool visible(const Params &p, int i, int j) {
    return j < p.Nk && (!CAUSAL || j <= i + p.offset);
}

// A row that has seen no key has m = -inf: subtract 0 there, or -inf - -inf gives NaN.
__device__ __forceinline__ float finite_or_zero(float m) { return m == -INFINITY ? 0.f : m; }

__device__ __forceinline__ float inverse_or_zero(float l) { return l == 0.f ? 0.f : 1.f / l; }
