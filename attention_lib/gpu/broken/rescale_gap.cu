// Rung 2 in small: a block has Br rows of Q, thread (r, c) has O[r][c], and S, m and l are in shared
// memory. Not scaled. If causal is not 0, query i sees key j when j <= i + Nk - Nq.

const int Br = 4, Bc = 3, d = 2;  // Br * d threads

extern "C" __global__ void attention(const float *Q, const float *K, const float *V, float *O,
                                     float *L, int Nq, int Nk, int causal) {
    __shared__ float Kj[Bc][d], Vj[Bc][d], S[Br][Bc], m[Br], l[Br], rescale[Br];
    int row0 = blockIdx.x * Br, r = threadIdx.x / d, c = threadIdx.x % d;
    float o = 0.f;
    if (threadIdx.x < Br) m[threadIdx.x] = -INFINITY, l[threadIdx.x] = 0.f;

    for (int j0 = 0; j0 < Nk; j0 += Bc) {
        __syncthreads();
        for (int x = threadIdx.x; x < Bc * d; x += blockDim.x) {  // load
            Kj[x / d][x % d] = j0 + x / d < Nk ? K[j0 * d + x] : 0.f;
            Vj[x / d][x % d] = j0 + x / d < Nk ? V[j0 * d + x] : 0.f;
        }
        __syncthreads();
        for (int x = threadIdx.x; x < Br * Bc; x += blockDim.x) {  // score
            int i = row0 + x / Bc, j = j0 + x % Bc;
            float s = -INFINITY;
            if (i < Nq && j < Nk && (!causal || j <= i + Nk - Nq)) {
                s = 0.f;
                for (int k = 0; k < d; k++) s += Q[i * d + k] * Kj[x % Bc][k];
            }
            S[x / Bc][x % Bc] = s;
        }
        __syncthreads();
        if (threadIdx.x < Br) {  // rescale: one thread a row
            int row = threadIdx.x;
            // gap 1: from S[row][0], ..., S[row][Bc - 1], m[row] and l[row]
        }
        __syncthreads();
        // gap 2: what becomes of o?
        for (int j = 0; j < Bc; j++) o += S[r][j] * Vj[j][c];  // accumulate
    }
    __syncthreads();
    if (row0 + r < Nq) {  // store
        O[(row0 + r) * d + c] = l[r] == 0.f ? 0.f : o / l[r];
        if (c == 0) L[row0 + r] = m[r] + logf(l[r]);
    }
}
