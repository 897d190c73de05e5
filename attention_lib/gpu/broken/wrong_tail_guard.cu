// Attention, one thread a row of Q. K and V come through shared memory, in tiles of Bc keys.
// Neither Nq nor Nk need be a multiple of anything. Not scaled.

const int Bc = 4, d = 2;

extern "C" __global__ void attention(const float *Q, const float *K, const float *V, float *O,
                                     int Nq, int Nk) {
    __shared__ float Kj[Bc][d], Vj[Bc][d];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float m = -INFINITY, l = 0.f, q[d], o[d] = {};
    for (int c = 0; c < d; c++) q[c] = i < Nq ? Q[i * d + c] : 0.f;

    for (int j0 = 0; j0 < Nk; j0 += Bc) {
        __syncthreads();
        for (int x = threadIdx.x; x < Bc * d; x += blockDim.x) {  // load
            Kj[x / d][x % d] = K[j0 * d + x];
            Vj[x / d][x % d] = V[j0 * d + x];
        }
        __syncthreads();
        float S[Bc], m_new = m;
        for (int j = 0; j < Bc; j++) {  // score
            float s = 0.f;
            for (int c = 0; c < d; c++) s += q[c] * Kj[j][c];
            S[j] = s;
            m_new = fmaxf(m_new, S[j]);
        }
        float rescale = expf(m - m_new);  // rescale
        l *= rescale;
        for (int c = 0; c < d; c++) o[c] *= rescale;
        for (int j = 0; j < Bc; j++) {  // accumulate
            float p = expf(S[j] - m_new);
            l += p;
            for (int c = 0; c < d; c++) o[c] += p * Vj[j][c];
        }
        m = m_new;
    }
    if (i <= Nq)  // store
        for (int c = 0; c < d; c++) O[i * d + c] = o[c] / l;
}
