"""From arrays to a running kernel, through CuPy. Imported only where there is a GPU."""

import functools
import math
import sys

import cupy as cp
import numpy as np

from attention_lib.gpu import ladder
from attention_lib.inputs import ALIGN, check_bool, check_choice

VIEW = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")])
PARAMS = np.dtype(  # struct Params of kernels/common.cuh
    [(name, VIEW) for name in "QKVO"]
    + [("L", "u8"), ("work", "u8")]
    + [(name, "i4") for name in ("batch", "heads", "group", "Nq", "Nk", "offset")]
    + [("scale", "f4")],
    align=True,
)


@functools.cache
def compiled(name, d, dtype, causal):
    """The functions of a rung for one case, compiled on first use."""
    kernel = ladder.rung(name)
    module = cp.RawModule(
        code=ladder.source(name), options=ladder.options(d, dtype, causal, kernel.shared(d))
    )
    functions = [module.get_function(entry) for entry in kernel.entries]
    for function in functions:
        if kernel.shared(d):
            function.max_dynamic_shared_size_bytes = kernel.shared(d)
    return functions


def as_cupy(name, x):
    """x as a CuPy array over the same memory."""
    if isinstance(x, cp.ndarray):
        return x
    if not hasattr(x, "__dlpack__") or isinstance(x, np.ndarray):
        raise TypeError(f"{name} is a {type(x).__name__}; accepted: a CuPy array or a CUDA tensor")
    if getattr(x, "requires_grad", False):
        raise ValueError(f"{name} requires a gradient, and these kernels give none; pass .detach()")
    return cp.from_dlpack(x)


def check(Q, K, V):
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; accepted: (batch, heads, N, d)")
        if x.dtype.name not in ladder.DTYPES:
            raise TypeError(
                f"{name} has dtype {x.dtype.name}; accepted: {', '.join(ladder.DTYPES)}"
            )
        if x.dtype != Q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype.name}; accepted: {Q.dtype.name}, as in Q")
        if x.device != Q.device:
            raise ValueError(f"{name} is on {x.device}; accepted: {Q.device}, as Q")
    batch, heads, _, d = Q.shape
    if d not in ladder.HEAD_DIMENSIONS:
        accepted = ", ".join(map(str, ladder.HEAD_DIMENSIONS))
        raise ValueError(f"Q has shape {Q.shape}: d is {d}; accepted: {accepted}")
    if K.shape[0] != batch or K.shape[3] != d:
        raise ValueError(f"K has shape {K.shape}; accepted: ({batch}, heads, Nk, {d}), for Q")
    if V.shape != K.shape:
        raise ValueError(f"V has shape {V.shape}; accepted: the shape of K, {K.shape}")
    if heads and (K.shape[1] == 0 or heads % K.shape[1]):
        raise ValueError(f"K has {K.shape[1]} heads; accepted: a divisor of the {heads} of Q")


def readable(x):
    """x where the kernels can read it in 16-byte pieces, else a contiguous copy."""
    pieces = [x.data.ptr, *(s for s, n in zip(x.strides[:3], x.shape[:3], strict=True) if n > 1)]
    return x if x.strides[3] == 2 and not any(p % 16 for p in pieces) else x.copy(order="C")


def view(x):
    return (x.data.ptr, *(s // 2 for s in x.strides[:3]))


def attention(Q, K, V, causal, kernel, return_lse, align):
    """See attention_lib.gpu.attention."""
    return dispatch(run, Q, K, V, causal, kernel, return_lse, align)


def dispatch(run, Q, K, V, causal, kernel, return_lse, align):
    """Call `run` on the device and the current stream of the library that Q is from, and give its
    arrays back as that library's."""
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    check_choice("align", align, ALIGN)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(Q, torch.Tensor):
        if not Q.is_cuda:
            raise TypeError(f"Q is on {Q.device}; accepted: a CUDA tensor")
        stream = cp.cuda.Stream.from_external(torch.cuda.current_stream(Q.device))
        with cp.cuda.Device(Q.device.index), stream:
            out = run(Q, K, V, causal, kernel, return_lse, align)
            out = [torch.from_dlpack(x) for x in out]
    else:
        with cp.asarray(Q).device if isinstance(Q, cp.ndarray) else cp.cuda.Device():
            out = run(Q, K, V, causal, kernel, return_lse, align)
    return tuple(out) if return_lse else out[0]


def parameters(Q, K, V, O, L, work, align):
    """The struct Params of a call, as CuPy passes it by value. L and work may be None."""
    (batch, heads, Nq, d), (_, kv_heads, Nk, _) = Q.shape, K.shape
    params = np.zeros(1, PARAMS)
    for n, x in zip("QKVO", (Q, K, V, O), strict=True):
        params[n] = view(x)
    for n, x in (("L", L), ("work", work)):
        params[n] = 0 if x is None else x.data.ptr
    for n, x in (("batch", batch), ("heads", heads), ("group", heads // kv_heads)):
        params[n] = x
    params["Nq"], params["Nk"] = Nq, Nk
    params["offset"] = Nk - Nq if align == "lower-right" else 0
    params["scale"] = 1 / math.sqrt(d)
    return params.view(f"V{PARAMS.itemsize}")


def run(Q, K, V, causal, name, return_lse, align):
    Q, K, V = (as_cupy(n, x) for n, x in (("Q", Q), ("K", K), ("V", V)))
    check(Q, K, V)
    kernel = ladder.rung(name)
    (batch, heads, Nq, d), Nk = Q.shape, K.shape[2]
    O = cp.empty(Q.shape, Q.dtype)
    L = cp.empty(Q.shape[:3], cp.float32) if return_lse else None
    if Nk == 0 or O.size == 0:
        O.fill(0)
        if return_lse:
            L.fill(-math.inf)
        return [O, L] if return_lse else [O]
    Q, K, V = (readable(x) for x in (Q, K, V))
    blocks = batch * heads * -(-Nq // kernel.rows(d))
    work = None
    if name == "unfused":
        work = cp.empty(2 * batch * heads * Nq * Nk, cp.uint16)
        grids = (blocks * -(-Nk // kernel.rows(d)), batch * heads * Nq, blocks)
    elif name == "algorithm_1":
        work = cp.empty(batch * heads * Nq * (d + 2), cp.float32)
        grids = (batch * heads,)
    else:
        grids = (blocks,)
    if max(grids) >= 2**31:
        raise ValueError(f"Q has shape {Q.shape}: {max(grids)} blocks; accepted: fewer than 2**31")
    argument = parameters(Q, K, V, O, L, work, align)
    for function, grid in zip(compiled(name, d, Q.dtype.name, causal), grids, strict=True):
        function((grid,), (kernel.threads,), (argument,), shared_mem=kernel.shared(d))
    return [O, L] if return_lse else [O]
