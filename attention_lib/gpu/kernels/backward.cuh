// What both backward kernels share: the arguments, the scratch memory, and what comes first.
//
// p.work, in floats: dQ (batch, heads, rows, d), then L2 and D (batch, heads, rows); rows is Nq
// rounded up to 128, so that no tile of queries needs a special case.

struct Gradients {
    View dO, dQ, dK, dV;
};

__device__ __forceinline__ int padded(int Nq) { return (Nq + 127) / 128 * 128; }

__device__ __forceinline__ float *dQ_of(const Params &p, int head) {
    return (float *)p.work + (i64)head * padded(p.Nq) * HEAD;
}

__device__ __forceinline__ float *L2_of(const Params &p, int head) {
    return dQ_of(p, p.batch * p.heads) + (i64)head * padded(p.Nq);
}

__device__ __forceinline__ float *D_of(const Params &p, int head) {
    return L2_of(p, p.batch * p.heads + head);
}

// The two numbers of `pack`.
__device__ __forceinline__ float2 unpack(u32 r) {
    T *two = (T *)&r;
    return {to_float(two[0]), to_float(two[1])};
}

// D = rowsum(dO * O), L in units of log2; and dQ starts at zero. 8 columns of a row a thread. A row
// that sees no key, or is none, gets L2 = +inf: its weights are 2^(s - inf) = 0.
extern "C" __global__ void __launch_bounds__(256) prepare(const Params p, const Gradients g) {
    const int LANES = HEAD / 8;
    struct alignas(16) Part { T x[8]; };
    i64 index = (blockIdx.x * 256ll + threadIdx.x) / LANES;
    int head = index / padded(p.Nq), i = index % padded(p.Nq), lane = threadIdx.x % LANES;
    int b = head / p.heads, h = head % p.heads;
    float D = 0.f, L2 = INFINITY;
    float4 *dQ = (float4 *)(dQ_of(p, head) + (i64)i * HEAD) + 2 * lane;
    dQ[0] = dQ[1] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (i < p.Nq) {
        Part O = ((Part *)(head_of(p.O, b, h) + i * p.O.row))[lane];
        Part dO = ((Part *)(head_of(g.dO, b, h) + i * g.dO.row))[lane];
        for (int c = 0; c < 8; c++) D += to_float(O.x[c]) * to_float(dO.x[c]);
        float L = p.L[(i64)head * p.Nq + i];
        if (L != -INFINITY) L2 = L * 1.4426950408889634f;
    }
    for (int n = LANES / 2; n > 0; n /= 2) D += __shfl_xor_sync(~0u, D, n);
    if (lane == 0) L2_of(p, head)[i] = L2, D_of(p, head)[i] = D;
}
