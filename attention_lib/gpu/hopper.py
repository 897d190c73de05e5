"""Hopper's own instructions: a matrix product, and three rungs of attention on wgmma and TMA.

They run, but no recording has them yet, so they are not in the ladder. `matmul` is the shortest way
to see what the instructions do. `attention(Q, K, V, kernel="wgmma" | "specialised" | "overlap")`
has the contract of gpu.attention, for d = 64 and 128 on an sm_90 device. A tensor that TMA copies
travels as a tensor map: 128 bytes, made on the CPU, passed by value.
"""

import functools
import math
from dataclasses import dataclass

from attention_lib.gpu import _require, ladder

HEAD_DIMENSIONS, KEYS = (64, 128), 128  # d; rows of a tile of K and V
ARCHITECTURE = "sm_90a"


@dataclass(frozen=True)
class Rung:
    """A rung on TMA. readers(d): warpgroups of 64 rows; loader: 1 if another one loads.
    persistent: one block an SM goes through all the work."""

    name: str
    idea: str
    file: str
    readers: dict[int, int]
    loader: int = 0
    persistent: bool = False

    def rows(self, d):
        return 64 * self.readers[d]

    def threads(self, d):
        return 128 * (self.readers[d] + self.loader)

    def shared(self, d):
        """Bytes: tiles of Q, and two of K and of V, and room for the barriers."""
        return 2 * d * (self.rows(d) + 4 * KEYS) + 256


TWO = {64: 2, 128: 2}
RUNGS = (
    Rung("wgmma", "wgmma, and TMA loads", "rung6_wgmma.cu", TWO),
    Rung("specialised", "one warpgroup loads, two compute", "rung7_specialised.cu", TWO, 1),
    Rung(
        "overlap",
        "softmax behind the next product; turns; blocks that stay",
        "rung8_overlap.cu",
        {64: 3, 128: 2},
        1,
        True,
    ),
)
MATMUL_SHARED = 4 * 2 * 128 * 64 * 2 + 64  # four stages of A and B, and the barriers


def rung(name):
    """The Rung with this name. Raises ValueError for another."""
    for kernel in RUNGS:
        if kernel.name == name:
            return kernel
    accepted = ", ".join(repr(k.name) for k in RUNGS)
    raise ValueError(f"kernel is {name!r}; accepted: {accepted}")


@functools.cache
def compiled(file, entry, d, dtype, causal, shared):
    """An entry of a file for one case, compiled on first use."""
    import cupy as cp

    module = cp.RawModule(
        code=ladder.read(file),
        options=(f"-arch={ARCHITECTURE}", *ladder.options(d, dtype, causal, shared)),
    )
    function = module.get_function(entry)
    function.max_dynamic_shared_size_bytes = shared
    return function


@functools.lru_cache(maxsize=1024)
def tensor_map(pointer, dtype, shape, strides, rows):
    """What TMA must know of a tensor (batch, heads, N, d): boxes of `rows` x 64, swizzled."""
    import numpy as np
    from cuda.bindings import driver

    kind = "BFLOAT16" if dtype == "bfloat16" else "FLOAT16"
    error, made = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        4,
        pointer,
        [driver.cuuint64_t(n) for n in reversed(shape)],
        [driver.cuuint64_t(n) for n in reversed(strides[:3])],  # bytes; the innermost is 2
        [driver.cuuint32_t(n) for n in (64, rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(f"no tensor map for shape {shape}, strides {strides} bytes: {error.name}")
    return np.array([int(n) for n in made.opaque], np.uint64).view("V128")


def map_of(x, rows):
    return tensor_map(x.data.ptr, x.dtype.name, x.shape, x.strides, rows)


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
        function = compiled("matmul.cu", "matmul", 64, A.dtype.name, False, MATMUL_SHARED)
        sizes = (np.int32(n) for n in (M, N, K))
        maps = (map_of(x[None, None], 128) for x in (A, B))
        blocks = -(-M // 128) * -(-N // 128)
        function((blocks,), (256,), (C, *sizes, *maps), shared_mem=MATMUL_SHARED)
    return C


def attention(Q, K, V, *, causal=False, kernel="overlap", return_lse=False, align="lower-right"):
    """Attention on one of the Hopper rungs: see gpu.attention. d is 64 or 128."""
    _require()
    from attention_lib.gpu import launch

    return launch.dispatch(run, Q, K, V, causal, kernel, return_lse, align)


def run(Q, K, V, causal, name, return_lse, align):
    import cupy as cp

    from attention_lib.gpu import launch

    Q, K, V = (launch.as_cupy(n, x) for n, x in (("Q", Q), ("K", K), ("V", V)))
    launch.check(Q, K, V)
    kernel = rung(name)
    (batch, heads, Nq, d), Nk = Q.shape, K.shape[2]
    if d not in HEAD_DIMENSIONS:
        raise ValueError(f"Q has shape {Q.shape}: d is {d}; accepted: 64, 128, for {name}")
    O = cp.empty(Q.shape, Q.dtype)
    L = cp.empty(Q.shape[:3], cp.float32) if return_lse else None
    if Nk == 0 or O.size == 0:
        O.fill(0)
        if return_lse:
            L.fill(-math.inf)
        return [O, L] if return_lse else [O]
    Q, K, V = (readable(x) for x in (Q, K, V))
    blocks = batch * heads * -(-Nq // kernel.rows(d))
    counter = cp.zeros(1, cp.int32)  # the number of the next block, drawn by the loaders
    argument = launch.parameters(Q, K, V, O, L, counter, align)
    maps = map_of(Q, 64), map_of(K, KEYS), map_of(V, KEYS)
    shared = kernel.shared(d)
    function = compiled(kernel.file, "attention", d, Q.dtype.name, causal, shared)
    sms = cp.cuda.Device().attributes["MultiProcessorCount"]
    grid = min(blocks, sms) if kernel.persistent else blocks
    function((grid,), (kernel.threads(d),), (argument, *maps), shared_mem=shared)
    return [O, L] if return_lse else [O]


def readable(x):
    """x where TMA can read it, else a contiguous copy: no stride may be 0."""
    from attention_lib.gpu import launch

    repeated = any(s == 0 for s, n in zip(x.strides, x.shape, strict=True) if n > 1)
    return x.copy(order="C") if repeated else launch.readable(x)
