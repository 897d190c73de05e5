"""Hopper's own instructions: what TMA must know of a tensor, and a matrix product on wgmma.

A tensor that TMA copies travels as a tensor map: 128 bytes, made on the CPU, passed to the kernel
by value. `matmul` is the shortest way to see what the instructions do; the ladder's last rungs are
attention on them.
"""

import functools

from attention_lib.gpu import _require, ladder

MATMUL_SHARED = 4 * 2 * 128 * 64 * 2 + 64  # four stages of A and B, and the barriers


BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}  # of an element


@functools.lru_cache(maxsize=1024)
def tensor_map(pointer, dtype, shape, strides, rows, columns=64):
    """The map of a tensor (batch, heads, N, d): boxes of `rows` x `columns`, swizzled if their rows
    have 128 bytes. dtype: one of BYTES. strides: elements. Returns a NumPy array that CuPy passes
    by value. Raises ValueError.
    """
    import numpy as np
    from cuda.bindings import driver

    size = BYTES[dtype]
    swizzle = "128B" if columns * size == 128 else "NONE"
    error, made = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"),
        4,
        pointer,
        [driver.cuuint64_t(n) for n in reversed(shape)],
        # In bytes, without the innermost. That of an axis of 1 is never used, but it is checked.
        [
            driver.cuuint64_t(size * (s if n > 1 else shape[-1]))
            for s, n in zip(reversed(strides[:3]), reversed(shape[:3]), strict=True)
        ],
        [driver.cuuint32_t(n) for n in (columns, rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(f"no tensor map for shape {shape}, strides {strides}: {error.name}")
    return np.array([int(n) for n in made.opaque], np.uint64).view("V128")


@functools.cache
def compiled(dtype):
    """The matrix product for one dtype, compiled on first use."""
    import cupy as cp

    options = ("-arch=sm_90a", *ladder.options(64, dtype, False, MATMUL_SHARED))
    module = cp.RawModule(code=ladder.read("matmul.cu"), options=options)
    function = module.get_function("matmul")
    function.max_dynamic_shared_size_bytes = MATMUL_SHARED
    return function


def matmul(A, B):
    """A @ B.T on wgmma and TMA. A: (M, K), B: (N, K), CuPy arrays, float16 or bfloat16, contiguous,
    K a multiple of 8. Returns (M, N) in their dtype. Raises NoGPU, TypeError, ValueError."""
    _require()
    import cupy as cp
    import numpy as np

    for name, x in (("A", A), ("B", B)):
        if x.dtype.name not in ladder.DTYPES or x.dtype != A.dtype:
            raise TypeError(f"{name} has dtype {x.dtype.name}; accepted: float16 or bfloat16, both")
        if x.ndim != 2 or x.shape[1] != A.shape[1] or x.shape[1] % 8 or not x.flags.c_contiguous:
            raise ValueError(
                f"{name} has shape {x.shape}; accepted: (rows, K), K % 8 = 0, in order"
            )
    (M, K), N = A.shape, B.shape[0]
    C = cp.empty((M, N), A.dtype)
    if C.size:
        sizes = (np.int32(n) for n in (M, N, K))
        blocks = -(-M // 128) * -(-N // 128)
        boxes = [
            tensor_map(x.data.ptr, x.dtype.name, (1, 1, *x.shape), (x.size, x.size, K, 1), 128)
            for x in (A, B)
        ]
        compiled(A.dtype.name)((blocks,), (256,), (C, *sizes, *boxes), shared_mem=MATMUL_SHARED)
    return C
