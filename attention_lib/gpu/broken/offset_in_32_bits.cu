// D, the dot product of each row of dO with the same row of O, as the backward pass needs it. The
// rows of one head of an (N, heads, d) tensor lie a stride apart. One launch does `rows` rows, from
// row `first` on: D[0] is of row `first`.

extern "C" __global__ void row_dot(const float *dO, const float *O, float *D, int first, int rows,
                                   int dO_stride, int O_stride, int d) {
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= rows) return;
    int row = first + k;
    float sum = 0.f;
    for (int c = 0; c < d; c++)
        sum += dO[row * dO_stride + c] * O[row * O_stride + c];
    D[k] = sum;
}
