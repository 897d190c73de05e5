// L, the log-sum-exp of the scores of each row, in rung 2's way: all threads of a block make a tile
// of S in shared memory, then one thread a row goes over it. A block has Br rows. Not scaled.

const int Br = 4, Bc = 3, d = 2;

extern "C" __global__ void row_lse(const float *Q, const float *K, float *L, int Nq, int Nk) {
    __shared__ float Kj[Bc][d], S[Br][Bc];
    int row0 = blockIdx.x * Br, r = threadIdx.x;
    float m = -INFINITY, l = 0.f;  // of row r: thread r has them, if r < Br

    for (int j0 = 0; j0 < Nk; j0 += Bc) {
        for (int x = threadIdx.x; x < Bc * d; x += blockDim.x)  // load
            Kj[x / d][x % d] = j0 + x / d < Nk ? K[j0 * d + x] : 0.f;
        __syncthreads();
        for (int x = threadIdx.x; x < Br * Bc; x += blockDim.x) {  // score
            int i = x / Bc, j = x % Bc;
            float s = 0.f;
            for (int c = 0; c < d; c++)
                s += row0 + i < Nq ? Q[(row0 + i) * d + c] * Kj[j][c] : 0.f;
            S[i][j] = j0 + j < Nk ? s : -INFINITY;
        }
        if (r < Br) {  // rescale
            float m_new = m, l_tile = 0.f;
            for (int j = 0; j < Bc; j++) m_new = fmaxf(m_new, S[r][j]);
            for (int j = 0; j < Bc; j++) l_tile += expf(S[r][j] - m_new);
            l = l * expf(m - m_new) + l_tile;
            m = m_new;
        }
    }
    if (r < Br && row0 + r < Nq) L[row0 + r] = m + logf(l);
}
