// Rung 1: Algorithm 1 as printed. K/V blocks outside, Q blocks inside, one thread a row.
//
// Source: FlashAttention, arXiv 2205.14135 (v2), Algorithm 1; line numbers are the paper's.
// The idea: no N x N matrix. The price: one block a head, because O, l and m of a row are written
// and read again for each block of K and V, and nobody else may touch them meanwhile.
// p.work holds O (d, Nq), l and m (Nq) of each head in float: a 16-bit O would be rounded Tc times.

#include "common.cuh"

const int Br = 256, Bc = HEAD > 128 ? 16 : 32;  // one thread a row; two tiles in 48 KiB

extern "C" __global__ void __launch_bounds__(Br, 1) attention(const Params p) {
    __shared__ float Kj[Bc][HEAD], Vj[Bc][HEAD];
    int b = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
    const T *Q = head_of(p.Q, b, h);
    const T *K = head_of(p.K, b, h / p.group), *V = head_of(p.V, b, h / p.group);
    float *O = (float *)p.work + (i64)blockIdx.x * p.Nq * (HEAD + 2);
    float *l = O + (i64)HEAD * p.Nq, *m = l + p.Nq;
    for (i64 i = threadIdx.x; i < (i64)p.Nq * (HEAD + 1); i += Br) O[i] = 0.f;  // line 2: O and l
    for (int i = threadIdx.x; i < p.Nq; i += Br) m[i] = -INFINITY;

    for (int j0 = 0; j0 < p.Nk; j0 += Bc) {  // line 5
        __syncthreads();                     // nobody reads the last tile any more
        for (int x = threadIdx.x; x < Bc * HEAD; x += Br) {  // line 6
            int j = j0 + x / HEAD, c = x % HEAD;
            Kj[x / HEAD][c] = j < p.Nk ? to_float(K[j * p.K.row + c]) : 0.f;
            Vj[x / HEAD][c] = j < p.Nk ? to_float(V[j * p.V.row + c]) : 0.f;
        }
        __syncthreads();  // the tile is there
        for (int i = threadIdx.x; i < p.Nq; i += Br) {  // lines 7 and 8
            float S[Bc] = {}, m_tile = -INFINITY, l_tile = 0.f;
            for (int c = 0; c < HEAD; c++) {  // line 9
                float q = to_float(Q[i * p.Q.row + c]) * p.scale;
                #pragma unroll
                for (int j = 0; j < Bc; j++) S[j] += q * Kj[j][c];
            }
            #pragma unroll
            for (int j = 0; j < Bc; j++) {
                if (!visible(p, i, j0 + j)) S[j] = -INFINITY;
                m_tile = fmaxf(m_tile, S[j]);  // line 10
            }
            float m_new = fmaxf(m[i], m_tile), shift = finite_or_zero(m_new);  // line 11
            #pragma unroll
            for (int j = 0; j < Bc; j++) l_tile += S[j] = expf(S[j] - shift);
            float old = l[i] * expf(m[i] - shift), l_new = old + l_tile;
            float inverse = inverse_or_zero(l_new);
            for (int c = 0; c < HEAD; c++) {  // line 12
                float PV = 0.f;
                #pragma unroll
                for (int j = 0; j < Bc; j++) PV += S[j] * Vj[j][c];
                O[(i64)c * p.Nq + i] = (old * O[(i64)c * p.Nq + i] + PV) * inverse;
            }
            l[i] = l_new, m[i] = m_new;  // line 13
        }
    }
    for (int i = threadIdx.x; i < p.Nq; i += Br) {
        T *out = head_of(p.O, b, h) + i * p.O.row;
        for (int c = 0; c < HEAD; c++) out[c] = from_float(O[(i64)c * p.Nq + i]);
        if (p.L) p.L[(i64)blockIdx.x * p.Nq + i] = m[i] + logf(l[i]);
    }
}
