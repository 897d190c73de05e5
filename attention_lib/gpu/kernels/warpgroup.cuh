// What a warpgroup does with its 64 rows, the same in every Hopper rung. Thread (warp, g, t) holds of
// a tile of n columns: C[n / 8][4], rows 16 warp + g and + 8, columns 8 k + 2 t and + 1.

const int Bc = 128, HALVES = HEAD / 64;     // keys a tile; a row of d is stored 64 columns at a time
const int TILE = Bc * HEAD * sizeof(T);     // bytes of a tile of K or V

__device__ __forceinline__ u32 pack(float x, float y) {
    u32 r;
    asm("cvt.rn." PTX_TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    return r;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// score: S = Q K^T, started. Q: this warpgroup's 64 rows; 16 columns are 32 bytes further on.
__device__ __forceinline__ void score(float (&S)[Bc / 8][4], u32 Q, u32 K) {
    #pragma unroll
    for (int k = 0; k < HEAD / 16; k++)
        wgmma_abt(S, matrix(Q + k / 4 * 64 * 128 + k % 4 * 32),
                  matrix(K + k / 4 * Bc * 128 + k % 4 * 32), k > 0);
}

// accumulate: O += P V, started. 16 keys are 16 rows of 128 bytes further on.
__device__ __forceinline__ void accumulate(float (&O)[HEAD / 8][4], const u32 (&P)[Bc / 16][4],
                                           u32 V) {
    #pragma unroll
    for (int k = 0; k < Bc / 16; k++) wgmma_ab(O, P[k], matrix(V + k * 16 * 128, Bc * 128));
}

// What a thread knows of its two rows, row and row + 8.
struct Rows {
    float m[2], l[2], rescale[2];  // m without the scale; l of this thread's keys only
    int last[2], whole;            // the last key that each sees, from 2 t on; keys that all rows see

    __device__ __forceinline__ Rows(const Params &p, int top, int row) {
        whole = CAUSAL ? min(p.Nk, top + p.offset + 1) : p.Nk;
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            m[r] = -INFINITY, l[r] = 0.f;
            last[r] = CAUSAL ? min(p.Nk - 1, row + 8 * r + p.offset) : p.Nk - 1;
            last[r] -= threadIdx.x % 4 * 2;
        }
    }

    __device__ __forceinline__ void hide(float (&S)[Bc / 8][4], int col0) const {
        if (col0 + Bc <= whole) return;
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            int seen = last[r] - col0;
            #pragma unroll
            for (int n = 0; n < Bc / 8; n++) {
                if (8 * n > seen) S[n][2 * r] = -INFINITY;
                if (8 * n + 1 > seen) S[n][2 * r + 1] = -INFINITY;
            }
        }
    }

    // rescale: S becomes exp(scale (S - m)) with the new m. c = scale log2(e).
    __device__ __forceinline__ void softmax(float (&S)[Bc / 8][4], float c) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float m_new = m[r], l_tile = 0.f;
            #pragma unroll
            for (int n = 0; n < Bc / 8; n++)
                m_new = fmaxf(m_new, fmaxf(S[n][2 * r], S[n][2 * r + 1]));
            m_new = row_max(m_new);
            float most = finite_or_zero(m_new), shift = most * c;
            // Not m * c - shift: one rounding less there, and 2^0 would not be 1, tile after tile.
            rescale[r] = exp2_fast((m[r] - most) * c);
            m[r] = m_new;
            #pragma unroll
            for (int n = 0; n < Bc / 8; n++)
                #pragma unroll
                for (int x = 2 * r; x < 2 * r + 2; x++)
                    l_tile += S[n][x] = exp2_fast(S[n][x] * c - shift);
            l[r] = l[r] * rescale[r] + l_tile;
        }
    }

    __device__ __forceinline__ void rescale_O(float (&O)[HEAD / 8][4]) const {
        #pragma unroll
        for (int n = 0; n < HEAD / 8; n++)
            #pragma unroll
            for (int x = 0; x < 4; x++) O[n][x] *= rescale[x / 2];
    }

    // The end of row r: L is stored. Returns 1 / l.
    __device__ __forceinline__ float end(const Params &p, int b, int h, int row, int r) const {
        int i = row + 8 * r;
        float sum = row_sum(l[r]);
        if (p.L && threadIdx.x % 4 == 0 && i < p.Nq)
            p.L[(i64)(b * p.heads + h) * p.Nq + i] = m[r] * p.scale + logf(sum);
        return inverse_or_zero(sum);
    }

    // store: O divided by l, and L.
    __device__ __forceinline__ void store(const Params &p, float (&O)[HEAD / 8][4], int b, int h,
                                          int row) const {
        T *out = head_of(p.O, b, h) + threadIdx.x % 4 * 2;
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            int i = row + 8 * r;
            float inverse = end(p, b, h, row, r);
            if (i >= p.Nq) continue;
            #pragma unroll
            for (int n = 0; n < HEAD / 8; n++)
                *(u32 *)&out[i * p.O.row + 8 * n] =
                    pack(O[n][2 * r] * inverse, O[n][2 * r + 1] * inverse);
        }
    }
};

// S rounded to 16 bits, as the A operand of the next product.
__device__ __forceinline__ void as_weights(u32 (&P)[Bc / 16][4], const float (&S)[Bc / 8][4]) {
    #pragma unroll
    for (int k = 0; k < Bc / 16; k++)
        #pragma unroll
        for (int x = 0; x < 4; x++)
            P[k][x] = pack(S[2 * k + x / 2][x % 2 * 2], S[2 * k + x / 2][x % 2 * 2 + 1]);
}

// Tiles of K and V that a block of Br rows from row0 on sees.
__device__ __forceinline__ int tiles_of(const Params &p, int row0, int Br) {
    int end = CAUSAL ? min(p.Nk, row0 + Br + p.offset) : p.Nk;
    return max(0, (end + Bc - 1) / Bc);
}
