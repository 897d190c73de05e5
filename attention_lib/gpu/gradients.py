"""The backward pass on a GPU: which kernel, and its launches.

Three in a row: `prepare` makes D and clears dQ; `keys` makes dK and dV, and adds to dQ in float;
`finish` rounds dQ. The deterministic mode lets `keys` leave dQ out, and `queries` makes it, with
the loops swapped, so that no sum depends on which block comes first.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attention_lib.gpu import NoGPU, arrays, ladder
from attention_lib.inputs import ALIGN, check_bool, check_choice

HEAD_DIMENSIONS, KEYS = (64, 128), 128  # d; keys that a block of `keys` owns, queries of `queries`


@dataclass(frozen=True)
class Kernel(ladder.Target):
    """A file with the entries `prepare`, `keys` and `finish`; `queries` is in the first file.

    threads: of a block of `keys`. shared(d): its bytes of shared memory. finish(heads, Nq, d): the
    blocks of `finish`, of 256 threads; heads: of the whole batch. box(d): rows of Q and dO that TMA
    copies at once, on Hopper alone; None for a kernel without tensor maps.
    """

    name: str
    file: str
    threads: int
    shared: Callable[[int], int]
    finish: Callable[[int, int, int], int]
    box: Callable[[int], int] | None = None


def _rows(d):
    """Queries of a tile in `keys`."""
    return 128 if d == 64 else 64


def padded(Nq):
    """Rows of dQ, L2 and D in work memory."""
    return -(-Nq // 128) * 128


KERNELS = (
    Kernel(
        "mma",
        "backward.cu",
        256,
        # K, V, and two tiles of Q and of dO; dS; two of L2 and D
        lambda d: 2 * d * (2 * KEYS + 4 * _rows(d)) + 2 * KEYS * _rows(d) + 16 * _rows(d),
        lambda heads, Nq, d: -(-heads * Nq * d // 512),
    ),
    Kernel(
        "wgmma",
        "backward_wgmma.cu",
        384,
        # besides: two of dS, the floats of dQ of two readers, and the barriers
        lambda d: 2 * d * (2 * KEYS + 4 * _rows(d)) + (4 * KEYS + 16) * _rows(d) + 2 * 16_384 + 80,
        lambda heads, Nq, d: heads * padded(Nq) // 64 * (d // 64),
        box=_rows,
    ),
)


def queries_shared(d):
    """Bytes of shared memory of `queries`: 128 rows of Q and dO, two tiles of K and of V."""
    return 2 * d * (2 * KEYS + 4 * 64)


def kernels():
    """The names of the backward kernels, the fastest last."""
    return [k.name for k in KERNELS]


def choose(name, capability):
    """The Kernel with this name, or for None the last that the GPU can run."""
    named = [k for k in KERNELS if name in (None, k.name)]
    if not named:
        accepted = ", ".join(repr(k) for k in kernels())
        raise ValueError(f"kernel is {name!r}; accepted: {accepted}, or None for the best")
    able = [k for k in named if k.runs_on(capability)]
    if not able:
        raise NoGPU(f"the GPU has compute capability {capability}; {named[-1].name} needs another")
    return able[-1]


def options(kernel, d, dtype, causal, deterministic):
    """The compiler's definitions for one case."""
    shared = kernel.shared(d)
    if kernel is KERNELS[0]:
        shared = max(shared, queries_shared(d))
    return (*ladder.options(d, dtype, causal, shared), f"-DDQ={int(not deterministic)}")


@functools.cache
def compiled(index, kernel, entry, d, dtype, causal, deterministic):
    """An entry of a kernel for one case, on the GPU with this index, compiled on first use."""
    import cupy as cp

    given = options(kernel, d, dtype, causal, deterministic) + kernel.architecture_option()
    function = cp.RawModule(code=ladder.read(kernel.file), options=given).get_function(entry)
    shared = {"keys": kernel.shared, "queries": queries_shared}.get(entry)
    if shared is not None:
        room = cp.cuda.Device(index).attributes["MaxSharedMemoryPerBlockOptin"]
        if shared(d) > room:
            raise NoGPU(
                f"{kernel.name}'s {entry!r} needs {shared(d)} bytes of shared memory for d = {d}; "
                f"a block of this GPU has {room}"
            )
        function.max_dynamic_shared_size_bytes = shared(d)
    return function.kernel


def check(Q, K, V, O, L, dO):
    """Raise unless these headers belong together."""
    from attention_lib.gpu import launch

    launch.check(Q, K, V)
    if Q.shape[3] not in HEAD_DIMENSIONS:
        raise ValueError(f"Q has shape {Q.shape}: d is {Q.shape[3]}; with a gradient: 64, 128")
    for name, x, shape, dtype in (
        ("O", O, Q.shape, Q.dtype.name),
        ("dO", dO, Q.shape, Q.dtype.name),
        ("L", L, Q.shape[:3], "float32"),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; accepted: {shape}, for Q")
        if x.dtype.name != dtype:
            raise TypeError(f"{name} has dtype {x.dtype.name}; accepted: {dtype}")
        if x.device != Q.device:
            raise ValueError(f"{name} is on {x.device}; accepted: {Q.device}, as Q")


def backward(
    Q, K, V, O, L, dO, *, causal=False, deterministic=False, align="lower-right", kernel=None
):
    """The gradients dQ, dK, dV of gpu.attention, on the GPU.

    Q, K, V, causal, align: what gpu.attention got, with d = 64 or 128; O, L: what it returned with
    return_lse=True. dO: the gradient of O, of its shape and dtype. Strides, copies and streams: as
    in gpu.attention. deterministic: dQ has the same bits every time; otherwise it is added up in
    whatever order the blocks come. kernel: a name of attention_lib.gpu.gradients.kernels(), or None
    for the fastest that the GPU can run. Sums are float32.
    Returns dQ, dK, dV, with the shapes of Q, K, V and their dtype. A key that no row sees, and a
    row that sees no key, get zeros. Raises NoGPU, TypeError and ValueError as gpu.attention does.
    Source: FlashAttention-2, arXiv 2307.08691, Algorithm 2.
    """
    lib = arrays.library(Q)
    check_bool("causal", causal)
    check_bool("deterministic", deterministic)
    check_choice("align", align, ALIGN)
    device = lib.layout("Q", Q)[3]
    with lib.on(device):
        return run(lib, device, (Q, K, V, O, L, dO), causal, deterministic, align, kernel)


def run(lib, device, given, causal, deterministic, align, name):
    import cupy as cp

    from attention_lib.gpu import hopper, launch

    names = ("Q", "K", "V", "O", "L", "dO")

    def headers(tensors):
        return [
            lib.header(name, lib.layout(name, x)) for name, x in zip(names, tensors, strict=True)
        ]

    about = headers(given)
    check(*about)
    index, dtype = about[0].device, about[0].dtype.name
    (batch, heads, Nq, d), (_, kv_heads, Nk, _) = about[0].shape, about[1].shape
    kernel = choose(name, int(cp.cuda.Device(index).compute_capability))
    dQ, dK, dV = results = [lib.like(x) for x in given[:3]]
    if 0 in about[0].shape or 0 in about[1].shape:
        for x in results:
            lib.fill(x, 0)
        return tuple(results)

    def usable(name, x, header):
        if name == "L":
            copied = header.strides != arrays.contiguous(header.shape)
        else:
            copied = launch.unreadable(header, tma=kernel.box is not None) or lib.pointer(x) % 16
        return lib.copy(x) if copied else x

    given = [usable(*x) for x in zip(names, given, about, strict=True)]
    about = headers(given)
    Q, K, V, O, L, dO = given
    rows = batch * heads * padded(Nq)
    work = lib.empty((rows * (d + 2),), lib.dtype("float32"), device)

    params = launch.parameters(*about[:3], align)
    words = params.view(np.uint64)
    words[[0, 4, 8, 12, 16, 17]] = [lib.pointer(x) for x in (Q, K, V, O, L, work)]
    words[13:16] = about[3].strides[:3]
    gradients = np.zeros(1, [(x, launch.VIEW) for x in ("dO", "dQ", "dK", "dV")])
    gradients["dO"] = (lib.pointer(dO), *about[5].strides[:3])
    for x, array, like in zip(("dQ", "dK", "dV"), results, about, strict=False):
        gradients[x] = (lib.pointer(array), *arrays.contiguous(like.shape)[:3])
    arguments, maps = (params, gradients.view(f"V{gradients.itemsize}")), ()
    if kernel.box:
        boxes = (0, kernel.box(d)), (1, KEYS), (2, KEYS), (5, kernel.box(d))  # Q, K, V, dO
        maps = tuple(
            hopper.tensor_map(lib.pointer(given[i]), dtype, about[i].shape, about[i].strides, box)
            for i, box in boxes
        )
        # L2 of each head is a row, then D of each; TMA copies a tile's part of a row.
        shape, at = (1, 1, 2 * batch * heads, padded(Nq)), lib.pointer(work) + 4 * rows * d
        strides = arrays.contiguous(shape)
        maps += (hopper.tensor_map(at, "float32", shape, strides, 1, kernel.box(d)),)

    stream = lib.stream(device)
    case = d, dtype, bool(causal), bool(deterministic)
    steps = [
        (kernel, "prepare", rows * d // 2048, 256, 0, arguments),
        (kernel, "keys", batch * kv_heads * -(-Nk // KEYS), kernel.threads, kernel.shared(d),
         arguments + maps),
        (KERNELS[0], "queries", batch * heads * -(-Nq // KEYS), 256, queries_shared(d), arguments)
        if deterministic
        else (kernel, "finish", kernel.finish(batch * heads, Nq, d), 256, 0, arguments),
    ]  # fmt: skip
    if max(step[2] for step in steps) >= 2**31:
        raise ValueError(f"Q has shape {about[0].shape}: more than 2**31 blocks of threads")
    for which, entry, blocks, threads, shared, passed in steps:
        function = compiled(index, which, entry, *case)
        function((blocks,), (threads,), passed, shared, stream)
    return dQ, dK, dV
