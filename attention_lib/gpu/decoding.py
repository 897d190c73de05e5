"""Decoding: few queries against a long cache, with the keys split over the GPU (decode.cu).

A call takes tens of microseconds on the GPU, so the way there is short: what follows from shapes,
strides and dtypes is a `Plan`, made once and kept.
"""

import functools
import math
import threading
from dataclasses import dataclass, replace

import numpy as np

from attention_lib.gpu import arrays, ladder
from attention_lib.inputs import ALIGN, check_bool, check_choice

FILE, THREADS, KEYS, ROWS = "decode.cu", 128, 64, 16  # keys of a tile; rows of Q in one
COUNTERS = 4096  # as in decode.cu
CLUSTERS = (1, 2, 4, 8)  # blocks that may read each other's shared memory
# A merge in a cluster, and one through memory, in the time of a tile of keys: from an H200.
JOIN, MEET = 1, 2.5
SPLITS = np.dtype(  # struct Splits of decode.cu
    [("table", "u8"), ("lengths", "u8")]
    + [(name, "i4") for name in ("splits", "table_row", "page_size")],
    align=True,
)


# ---------------------------------------------------------------- how the keys are cut


def shared(d, stages):
    """Bytes of shared memory: Q, and so many tiles of K and of V."""
    return 2 * d * (ROWS + 2 * KEYS * stages)


def stages(d, block, sm):
    """(tiles that a block holds, blocks an SM): two blocks, if each then has two tiles or more.

    block, sm: bytes of shared memory that a block may ask for, and that an SM has; a block takes
    1 KiB more than it asks for. Raises ValueError where not even one block fits.
    """
    for blocks in (2, 1):
        room = min(block, sm // blocks - 1024)
        fit = (room // (2 * d) - ROWS) // (2 * KEYS)
        if fit >= 2:
            return min(fit, 6), blocks
    need = shared(d, 2)
    raise ValueError(f"Q has d = {d}: {need} bytes of shared memory; accepted here: {block}")


def duration(heads, tiles, rows, sms, splits, cluster):
    """How long a call takes, in the time in which an SM reads a tile of keys: a model.

    heads: KV heads of the batch. tiles: of 64 keys. rows: of Q, for each. splits: parts of the keys
    of a head, each a block of threads. cluster: blocks that merge theirs in shared memory. sms: the
    SMs that such clusters can fill.
    """
    clusters = splits // cluster
    reading = -(-heads * splits // sms) * -(-tiles // splits)
    merging = JOIN * (cluster > 1)
    if clusters > 1:  # eight reads at a time, and 128 threads with 4 columns each
        merging += MEET * -(-clusters // 8) * -(-rows // (4 * cluster))
    return reading + merging


def ways(heads, tiles, reach):
    """Every (SMs, splits, cluster) that `cut` weighs."""
    for cluster, sms in zip(CLUSTERS, reach, strict=False):
        # Two blocks share an SM well; two large clusters do not.
        most = max(1, (2 if cluster <= 2 else 1) * sms // heads)
        for splits in range(cluster, min(most, tiles) + 1, cluster):
            yield sms, splits, cluster


@functools.lru_cache(maxsize=1024)
def cut(heads, tiles, rows, reach):
    """(splits, cluster) of the least duration; see there. reach: see the function.

    Many splits fill the GPU, few are quick to merge.
    """
    return min(
        ways(heads, tiles, reach),
        key=lambda way: (duration(heads, tiles, rows, *way), way[1:]),
    )[1:]


@functools.cache
def reach(index):
    """The SMs of the GPU with this index that clusters can fill, a block on each: by CLUSTERS.

    The driver says it. All SMs of a cluster lie in one part of the chip (a GPC), and where their
    number is no multiple of 8, clusters of 8 leave some out. A GPU without clusters has one number.
    """
    import cupy as cp

    about = cp.cuda.Device(index).attributes
    if int(cp.cuda.Device(index).compute_capability) < 90:
        return (about["MultiProcessorCount"],)
    from cuda.bindings import driver

    with cp.cuda.Device(index):
        alone = cp.RawKernel('extern "C" __global__ void alone() {}', "alone")
        alone.max_dynamic_shared_size_bytes = about["MaxSharedMemoryPerBlockOptin"]  # one an SM
        found = []
        for cluster in CLUSTERS:
            size = driver.CUlaunchAttribute()
            size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            grid = size.value.clusterDim
            grid.x, grid.y, grid.z = cluster, 1, 1
            launch = driver.CUlaunchConfig()
            launch.gridDimX, launch.gridDimY, launch.gridDimZ = cluster, 1, 1
            launch.blockDimX, launch.blockDimY, launch.blockDimZ = THREADS, 1, 1
            launch.sharedMemBytes = alone.max_dynamic_shared_size_bytes
            launch.attrs, launch.numAttrs = [size], 1
            function = driver.CUfunction(alone.kernel.ptr)
            error, clusters = driver.cuOccupancyMaxActiveClusters(function, launch)
            if error != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"clusters of {cluster} blocks: {error.name}")
            found.append(cluster * clusters)
    return tuple(found)


# ---------------------------------------------------------------- what a call needs


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a call that its shapes decide. function None: there is nothing to compute.

    A plan belongs to one thread, so that the structs can be filled and launched where they are.
    """

    copied: bool = False  # something must be copied first: decode.cu cannot read it
    function: object = None
    grid: tuple = ()
    shared: int = 0
    params: np.ndarray = None  # struct Params, in words of 8 bytes, with free pointers
    splits: np.ndarray = None  # struct Splits likewise
    arguments: tuple = ()  # where they lie
    work: int = 0  # floats of work memory behind the counters; 0: none is needed


@functools.cache
def compiled(index, d, dtype, causal, paged, stages, cluster):
    """The kernel for one case, on the GPU with this index, compiled on first use."""
    import cupy as cp

    given = ladder.options(d, dtype, causal, shared(d, stages))
    given += (f"-DPAGED={int(paged)}", f"-DSTAGES={stages}", f"-DCLUSTER={cluster}")
    function = cp.RawModule(code=ladder.read(FILE), options=given).get_function("decode")
    function.max_dynamic_shared_size_bytes = shared(d, stages)
    return function.kernel


def check_pages(Q, K, V, table, lengths, align):
    """Raise unless these headers belong together: a cache in pages, its table and its lengths."""
    for name, x, accepted in (
        ("block_table", table, f"({Q.shape[0]}, pages of a sequence)"),
        ("lengths", lengths, f"({Q.shape[0]},)"),
    ):
        if x.dtype.name != "int32":
            raise TypeError(f"{name} has dtype {x.dtype.name}; accepted: int32")
        if x.shape[:1] != Q.shape[:1] or x.ndim != (2 if name == "block_table" else 1):
            raise ValueError(f"{name} has shape {x.shape}; accepted: {accepted}")
        if x.shape[-1] > 1 and x.strides[-1] != 1:
            raise ValueError(f"{name} has strides {x.strides}; accepted: last axis contiguous")
        if x.device != Q.device:
            raise ValueError(f"{name} is on {x.device}; accepted: {Q.device}, as Q")
    if K.ndim != 4 or K.shape[3] != Q.shape[3] or K.shape[2] % KEYS or not K.shape[2]:
        raise ValueError(
            f"K has shape {K.shape}; accepted with a block_table: (pages, heads, page_size, "
            f"{Q.shape[3]}), page_size a multiple of {KEYS}"
        )
    if V.shape != K.shape:
        raise ValueError(f"V has shape {V.shape}; accepted: the shape of K, {K.shape}")
    if align != "lower-right":
        raise ValueError(f"align is {align!r}; accepted with a block_table: 'lower-right'")


@functools.lru_cache(maxsize=1024)
def plan(lib, Q, K, V, causal, align, table, lengths, thread):
    """The Plan for these layouts in this thread. Raises as gpu.decode does."""
    import cupy as cp

    from attention_lib.gpu import launch

    Q, K, V = (lib.header(name, x) for name, x in (("Q", Q), ("K", K), ("V", V)))
    launch.check(Q, Q, Q)
    (batch, heads, Nq, d), paged = Q.shape, table is not None
    if paged:
        table, lengths = lib.header("block_table", table), lib.header("lengths", lengths)
        check_pages(Q, K, V, table, lengths, align)
        launch.check(Q, *(replace(x, shape=(batch, *x.shape[1:])) for x in (K, V)))
    else:
        launch.check(Q, K, V)
    kv_heads, Nk = K.shape[1], table.shape[1] * K.shape[2] if paged else K.shape[2]
    rows = heads // max(kv_heads, 1) * Nq
    if rows > ROWS:
        raise ValueError(
            f"Q has shape {Q.shape}: {rows} rows for each head of K; accepted: at most {ROWS} "
            "(Nq times the heads of Q for each of K); gpu.attention takes more"
        )
    if Nk == 0 or 0 in Q.shape:
        return Plan()
    if not all(x.readable() for x in (Q, K, V)):
        return Plan(copied=True)

    about = cp.cuda.Device(Q.device).attributes
    # From `seen` on no query sees a key.
    seen = min(Nk, Nq) if causal and align == "upper-left" else Nk
    kv_all = batch * kv_heads
    parts, cluster = cut(kv_all, -(-seen // KEYS), rows, reach(Q.device))
    ahead, _ = stages(
        d, about["MaxSharedMemoryPerBlockOptin"], about["MaxSharedMemoryPerMultiprocessor"]
    )
    if kv_all * parts >= 2**31:
        raise ValueError(f"Q has shape {Q.shape}: {kv_all} KV heads; accepted: fewer than 2**31")

    splits = np.zeros(1, SPLITS)
    splits["splits"] = parts
    if paged:
        splits["table_row"], splits["page_size"] = table.strides[0], K.shape[2]
    whole = [replace(x, shape=(batch, kv_heads, Nk, d)) for x in (K, V)]  # without pages: as it is
    params = launch.parameters(Q, *whole, align)
    params, splits = params.view(np.uint64), splits.view(np.uint64)
    with cp.cuda.Device(Q.device):
        function = compiled(Q.device, d, Q.dtype.name, bool(causal), paged, ahead, cluster)
    return Plan(
        function=function,
        grid=(kv_all * parts,),
        shared=shared(d, ahead),
        params=params,
        splits=splits,
        arguments=tuple(cp.cuda.function.CPointer(x.ctypes.data) for x in (params, splits)),
        work=kv_all * rows * parts // cluster * (d + 2 * cluster) if parts > cluster else 0,
    )


KEPT = {}  # (library, GPU, stream) -> (capture, floats, memory, stream)


def work_memory(lib, device, stream, floats):
    """Memory for `floats` behind the counters, which are zero: decode.cu leaves them so.

    Launches on one stream come one after the other, so a stream keeps its memory and nothing is
    cleared between calls. A graph that is captured may later run beside its stream, so it gets
    memory of its own; that is cleared inside the graph, once.
    """
    capture = 0
    if lib.capturing():
        from cuda.bindings import driver

        capture = int(driver.cuStreamGetCaptureInfo(stream.ptr)[2])
    # 2 is "the default stream of this thread": as many streams as threads.
    key = lib, device, stream.ptr, threading.get_ident() if stream.ptr == 2 else 0
    kept = KEPT.get(key)
    if kept is None or kept[0] != capture or kept[1] < floats:
        floats = max(floats, 1 << 20)
        memory = lib.empty((COUNTERS + floats,), lib.dtype("float32"), device)
        lib.fill(memory[:COUNTERS], 0)
        while len(KEPT) >= 64:  # the streams of a long run; the memory goes back to its pool
            KEPT.pop(next(iter(KEPT)))
        # With the stream: while it is kept, its number cannot become another stream's.
        KEPT[key] = kept = capture, floats, memory, stream
    return kept[2]


def decode(
    Q, K, V, *, causal=False, return_lse=False, align="lower-right", block_table=None, lengths=None
):
    """Attention of a few queries against a long cache: a decoding step, in one launch.

    Q: (batch, heads, Nq, d); K, V: (batch, KV heads, Nk, d), where the KV heads divide the heads,
    and Nq times the heads of Q for each of K is at most 16. dtypes, d, strides, streams, causal,
    align, return_lse and what is returned: as in gpu.attention. The keys are split over the GPU;
    the order of all sums depends on the shapes alone, so a call gives the same bits every time.
    block_table: K and V are a cache in pages, (pages, KV heads, page_size, d), page_size a multiple
    of 64; int32 (batch, pages of a sequence) says which pages are whose, in order. lengths: int32
    (batch,), tokens of each sequence; what the table has no page for is left out. Queries are the
    last Nq tokens. Both lie on the GPU, and their numbers are not checked.
    Give the cache room and pass K[:, :, :n] as it grows: nothing is copied. A captured CUDA graph
    works if the same call was made before it, which compiles the kernel. There is no gradient.
    Raises NoGPU, TypeError and ValueError as gpu.attention does.
    Source: Flash-Decoding (see attention_lib.decode); GQA, arXiv 2305.13245.
    """
    lib = arrays.library(Q)
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    if align not in ALIGN:
        check_choice("align", align, ALIGN)
    if (block_table is None) != (lengths is None):
        absent = "lengths" if lengths is None else "block_table"
        raise ValueError(f"{absent} is None; accepted: block_table and lengths, or neither")
    table = rows = None
    if block_table is not None:
        table, rows = lib.layout("block_table", block_table), lib.layout("lengths", lengths)
    layout = lib.layout("Q", Q)
    made = plan(
        lib, layout, lib.layout("K", K), lib.layout("V", V), causal, align, table, rows,
        threading.get_ident(),
    )  # fmt: skip
    device, pointers = layout[3], (lib.pointer(Q), lib.pointer(K), lib.pointer(V))
    with lib.on(device):
        if made.copied or (pointers[0] | pointers[1] | pointers[2]) % 16:
            Q, K, V = (arrays.readable(lib, name, x) for name, x in (("Q", Q), ("K", K), ("V", V)))
            return decode(
                Q, K, V, causal=causal, return_lse=return_lse, align=align,
                block_table=block_table, lengths=lengths,
            )  # fmt: skip
        O = lib.like(Q)
        L = lib.empty(layout[0][:3], lib.dtype("float32"), device) if return_lse else None
        if made.function is None:
            lib.fill(O, 0)
            if return_lse:
                lib.fill(L, -math.inf)
            return (O, L) if return_lse else O
        stream, params = lib.stream(device), made.params
        params[0], params[4], params[8] = pointers  # a View is four words, its pointer the first
        params[12], params[16] = lib.pointer(O), lib.pointer(L) if return_lse else 0
        if made.work:
            memory = work_memory(lib, device, stream, made.work)
            params[17] = lib.pointer(memory)
        if table is not None:
            made.splits[:2] = lib.pointer(block_table), lib.pointer(lengths)
        made.function(made.grid, (THREADS,), made.arguments, made.shared, stream)
    return (O, L) if return_lse else O
