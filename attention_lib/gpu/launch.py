"""From arrays to a running kernel, through CuPy. Imported only where there is a GPU.

What follows from shapes, strides and dtypes is a `Plan`, made once; a call fills in the pointers.
"""

import functools
import math
from dataclasses import dataclass

import cupy as cp
import numpy as np

from attention_lib.gpu import arrays, autograd, choose, hopper, ladder
from attention_lib.inputs import ALIGN, check_bool, check_choice

VIEW = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")])
PARAMS = np.dtype(  # struct Params of kernels/common.cuh
    [(name, VIEW) for name in "QKVO"]
    + [("L", "u8"), ("work", "u8")]
    + [(name, "i4") for name in ("batch", "heads", "group", "Nq", "Nk", "offset")]
    + [("scale", "f4")],
    align=True,
)
POINTER = {"Q": 0, "K": 4, "V": 8, "O": 12, "L": 16, "work": 17}  # in words of 8 bytes


@functools.cache
def compiled(name, d, dtype, causal):
    """The functions of a rung for one case, compiled on first use."""
    kernel = ladder.rung(name)
    shared = kernel.shared(d)
    options = ladder.options(d, dtype, causal, shared) + kernel.architecture_option()
    module = cp.RawModule(code=ladder.source(name), options=options)
    functions = [module.get_function(entry) for entry in kernel.entries]
    for function in functions:
        if shared:
            function.max_dynamic_shared_size_bytes = shared
    return functions


def check(Q, K, V):
    """Raise unless these headers (see arrays.Header) belong together."""
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
            raise ValueError(f"{name} is on GPU {x.device}; accepted: {Q.device}, as Q")
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


def parameters(Q, K, V, align):
    """The struct Params of a call with these headers, without its pointers; O is in order."""
    (batch, heads, Nq, d), (_, kv_heads, Nk, _) = Q.shape, K.shape
    params = np.zeros(1, PARAMS)
    for name, x in zip("QKV", (Q, K, V), strict=True):
        params[name] = (0, *x.strides[:3])
    params["O"] = (0, heads * Nq * d, Nq * d, d)
    params["batch"], params["heads"], params["group"] = batch, heads, heads // kv_heads
    params["Nq"], params["Nk"] = Nq, Nk
    params["offset"] = Nk - Nq if align == "lower-right" else 0
    params["scale"] = 1 / math.sqrt(d)
    return params.view(f"V{PARAMS.itemsize}")


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a call that its layouts decide. No launches: there is nothing to compute."""

    device: object  # CuPy's, to be entered
    copied: tuple = ()  # which of Q, K, V the kernel cannot read as they are
    launches: tuple = ()  # (function, blocks)
    threads: int = 0
    shared: int = 0
    params: np.ndarray = None
    work: int = 0  # bytes
    cleared: bool = False  # work starts at zero
    boxes: tuple = ()  # of TMA: (name, dtype, shape, strides, rows)


def unreadable(x, tma):
    """True if the kernels cannot read an array with this header: they read 16 bytes at a time, and
    TMA wants no stride of 0."""
    repeated = any(s == 0 for s, n in zip(x.strides, x.shape, strict=True) if n > 1)
    return not x.readable() or (tma and repeated)


@functools.lru_cache(maxsize=4096)
def plan(lib, Q, K, V, causal, name, align):
    """The Plan for these layouts. Raises as gpu.attention does."""
    Q, K, V = (lib.header(n, x) for n, x in (("Q", Q), ("K", K), ("V", V)))
    check(Q, K, V)
    (batch, heads, Nq, d), Nk = Q.shape, K.shape[2]
    device = cp.cuda.Device(Q.device)
    with device:
        kernel = ladder.rung(name or choose(d)[0])
    if d not in kernel.heads_d:
        accepted = ", ".join(map(str, kernel.heads_d))
        raise ValueError(f"Q has shape {Q.shape}: d is {d}; accepted by {name}: {accepted}")
    if Nk == 0 or 0 in Q.shape:
        return Plan(device)
    copied = tuple(unreadable(x, tma=kernel.box > 0) for x in (Q, K, V))
    if any(copied):
        return Plan(device, copied)

    blocks, work = batch * heads * -(-Nq // kernel.rows(d)), 0
    if kernel.name == "unfused":  # S and P, in 16 bits
        work = 2 * 2 * batch * heads * Nq * Nk
        grids = (blocks * -(-Nk // kernel.rows(d)), batch * heads * Nq, blocks)
    elif kernel.name == "algorithm_1":  # O, l and m
        work = 4 * batch * heads * Nq * (d + 2)
        grids = (batch * heads,)
    elif kernel.stays:  # the number of the next part of the work
        work = 4
        grids = (min(blocks, device.attributes["MultiProcessorCount"]),)
    else:
        grids = (blocks,)
    if max(*grids, blocks) >= 2**31:
        raise ValueError(f"Q has shape {Q.shape}: {max(grids)} blocks; accepted: fewer than 2**31")

    tensors = []
    if kernel.box:
        tensors = [("Q", Q, 64), ("K", K, kernel.box), ("V", V, kernel.box)]
    if kernel.stays:  # there O leaves by TMA too
        O_strides = heads * Nq * d, Nq * d, d, 1
        tensors.append(("O", arrays.Header(Q.shape, O_strides, Q.dtype, Q.device), 64))
    with device:
        functions = compiled(kernel.name, d, Q.dtype.name, bool(causal))
    return Plan(
        device,
        copied,
        launches=tuple(zip(functions, grids, strict=True)),
        threads=kernel.threads(d),
        shared=kernel.shared(d),
        params=parameters(Q, K, V, align),
        work=work,
        cleared=kernel.stays,
        boxes=tuple((n, x.dtype.name, x.shape, x.strides, rows) for n, x, rows in tensors),
    )


def attention(Q, K, V, causal, name, return_lse, align):
    """See attention_lib.gpu.attention."""
    if autograd.needed(Q, K, V):
        return autograd.attention(Q, K, V, causal, name, return_lse, align)
    lib = arrays.library(Q)
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    check_choice("align", align, ALIGN)
    layouts = [lib.layout(n, x) for n, x in (("Q", Q), ("K", K), ("V", V))]
    made = plan(lib, *layouts, causal, name, align)
    shape, _, dtype, device = layouts[0]
    given = [lib.pointer(x) for x in (Q, K, V)]
    with made.device:
        copied = made.copied or (False,) * 3
        if any(copied) or any(pointer % 16 for pointer in given):
            odd = [c or p % 16 for c, p in zip(copied, given, strict=True)]
            Q, K, V = (lib.copy(x) if o else x for x, o in zip((Q, K, V), odd, strict=True))
            return attention(Q, K, V, causal, name, return_lse, align)
        O = lib.empty(shape, dtype, device)
        L = lib.empty(shape[:3], lib.dtype("float32"), device) if return_lse else None
        if not made.launches:
            lib.fill(O, 0)
            if return_lse:
                lib.fill(L, -math.inf)
            return (O, L) if return_lse else O

        stream, params = lib.stream(device), made.params.copy()
        words = params.view(np.uint64)
        words[POINTER["Q"]], words[POINTER["K"]], words[POINTER["V"]] = given
        words[POINTER["O"]] = lib.pointer(O)
        if return_lse:
            words[POINTER["L"]] = lib.pointer(L)
        if made.work:
            work = lib.empty((made.work,), lib.dtype("uint8"), device)
            words[POINTER["work"]] = lib.pointer(work)
            if made.cleared:
                cp.cuda.runtime.memsetAsync(lib.pointer(work), 0, made.work, stream.ptr)
        arguments = (
            params,
            *(hopper.tensor_map(int(words[POINTER[n]]), *about) for n, *about in made.boxes),
        )
        for function, blocks in made.launches:
            function.kernel((blocks,), (made.threads,), arguments, made.shared, stream)
    return (O, L) if return_lse else O
