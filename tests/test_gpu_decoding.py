"""gpu.decode: the plan and the compiler without a GPU; the kernel against float64 on one.

Right: an error of at most three times that of the framework's own call in the same precision, or
one rounding of the output where the framework happens to be exact.
"""

import importlib
import math

import pytest

from attention_lib import gpu
from attention_lib.gpu import ladder, nvrtc
from tests import test_gpu

decoding = importlib.import_module("attention_lib.gpu.decoding")

H200 = {"block": 232_448, "sm": 233_472}
A100 = {"block": 166_912, "sm": 167_936}

needs_nvrtc = pytest.mark.skipif(
    not nvrtc.available(), reason="needs Linux: NVRTC has no package for this system"
)
needs_gpu = pytest.mark.skipif(not gpu.available(), reason=f"needs a GPU: {gpu.missing()}")


# ---------------------------------------------------------------- on any machine


@pytest.mark.parametrize("chip", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("d", ladder.HEAD_DIMENSIONS)
def test_as_many_tiles_as_fit(d, chip):
    """Two blocks an SM for d up to 128; each has at least two tiles, and one more would not fit."""
    ahead, blocks = decoding.stages(d, **chip)
    assert blocks == (2 if d <= 128 else 1) and 2 <= ahead <= 6
    assert decoding.shared(d, ahead) <= chip["block"]
    assert blocks * (decoding.shared(d, ahead) + 1024) <= chip["sm"]
    more = decoding.shared(d, ahead + 1)
    assert ahead == 6 or more > chip["block"] or blocks * (more + 1024) > chip["sm"]


def test_a_d_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="Q has d = 256: 139264 bytes .* accepted here: 101376"):
        decoding.stages(256, 101_376, 102_400)


REACH = (132, 132, 120, 120)  # SMs that clusters of 1, 2, 4, 8 fill on an H200
NONE = REACH[:1]  # a GPU without clusters


@pytest.mark.parametrize("reach", [NONE, REACH])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("heads", [1, 8, 32, 150, 1024, 5000])
@pytest.mark.parametrize("tiles", [1, 2, 5, 64, 1000, 4096, 40_000])
def test_a_cut_is_one_that_the_kernel_can_run(heads, tiles, rows, reach):
    splits, cluster = decoding.cut(heads, tiles, rows, reach)
    assert cluster in decoding.CLUSTERS[: len(reach)]
    assert splits % cluster == 0 and 1 <= splits <= tiles
    if splits > cluster:  # a counter for each slice of each head
        assert heads * cluster <= decoding.COUNTERS
    times = {
        way[1:]: decoding.duration(heads, tiles, rows, *way)
        for way in decoding.ways(heads, tiles, reach)
    }
    assert times[splits, cluster] == min(times.values())


def test_a_short_cache_is_not_split_and_a_long_one_fills_the_gpu():
    assert decoding.cut(8, 2, 4, REACH)[0] == 1
    assert decoding.cut(150, 4096, 4, REACH)[0] == 1  # the batch fills it
    for heads in (1, 2, 8, 16, 64):
        splits, _ = decoding.cut(heads, 4096, 4, REACH)
        assert 0.9 * 132 <= heads * splits <= 132
    # With 16 rows a merge through memory is dear: clusters make few states of many. They fill the
    # 120 SMs that they can.
    assert decoding.cut(1, 4096, 16, REACH) == (120, 8)
    assert decoding.cut(1, 4096, 16, NONE)[0] < 120


def test_the_model_of_a_step_by_hand():
    JOIN, MEET = decoding.JOIN, decoding.MEET
    # One head, 64 tiles, 16 rows. A cluster of 8 blocks: 8 tiles each, and a merge.
    assert decoding.duration(1, 64, 16, 120, 8, 8) == 8 + JOIN
    # 64 blocks: one tile each. Their 8 clusters merge through memory, in one trip.
    assert decoding.duration(1, 64, 16, 120, 64, 8) == 1 + JOIN + MEET
    # 16 clusters of 8 where 15 have room: one waits, or shares SMs with another; and two trips.
    assert decoding.duration(1, 256, 16, 120, 128, 8) == 2 * 2 + JOIN + 2 * MEET
    # Without clusters a thread has 16 columns of 64 states: 4 x 8 trips.
    assert decoding.duration(1, 64, 16, 132, 64, 1) == 1 + MEET * 4 * 8
    # 200 heads share 132 SMs: two rounds.
    assert decoding.duration(200, 64, 1, 132, 1, 1) == 2 * 64


@needs_gpu
def test_what_clusters_reach_is_what_the_driver_says():
    import cupy

    sms = cupy.cuda.Device().attributes["MultiProcessorCount"]
    found = decoding.reach(cupy.cuda.Device().id)
    assert found[0] == sms and list(found) == sorted(found, reverse=True)
    assert all(n % cluster == 0 for n, cluster in zip(found, decoding.CLUSTERS, strict=False))


def test_the_constants_are_those_of_the_kernel():
    text = ladder.read(decoding.FILE)
    assert f"COUNTERS = {decoding.COUNTERS};" in text
    assert f"ROWS = {decoding.ROWS};" in text
    fields = [x for x in decoding.SPLITS.names if decoding.SPLITS[x].itemsize == 4]
    assert f"int {', '.join(fields)};" in text


CASES = [
    (architecture, chip, d, dtype, causal, paged, cluster)
    for architecture, chip in (("sm_80", A100), ("sm_90", H200), ("sm_100", H200))
    for d in ladder.HEAD_DIMENSIONS
    for dtype in ladder.DTYPES
    for causal in (False, True)
    for paged in (0, 1)
    for cluster in (decoding.CLUSTERS if architecture != "sm_80" and dtype == "float16" else (1,))
    if architecture == "sm_90" or (dtype == "float16" and paged == causal)
]


@needs_nvrtc
@pytest.mark.parametrize("architecture, chip, d, dtype, causal, paged, cluster", CASES)
def test_it_compiles_without_a_spill(architecture, chip, d, dtype, causal, paged, cluster):
    ahead, blocks = decoding.stages(d, **chip)
    given = ladder.options(d, dtype, causal, decoding.shared(d, ahead))
    given += (f"-DPAGED={paged}", f"-DSTAGES={ahead}", f"-DCLUSTER={cluster}")
    _, log = nvrtc.compile_text(ladder.read(decoding.FILE), decoding.FILE, architecture, given)
    used = nvrtc.usage(log)
    assert set(used) == {"decode"} and used["decode"]["spill_bytes"] == 0
    assert blocks * decoding.THREADS * used["decode"]["registers"] <= 65_536


@pytest.mark.skipif(gpu.available(), reason="needs a GPU to be absent")
def test_without_a_gpu_it_says_so():
    with pytest.raises(gpu.NoGPU, match=r"no kernel can run.*attention_lib\.tiled"):
        gpu.decode(None, None, None)


# ---------------------------------------------------------------- on a GPU


def draw(Nq, Nk, d, dtype, kind="normal", batch=2, heads=4, kv_heads=2):
    return test_gpu.draw(Nq, Nk, d, dtype, kind, batch, heads, kv_heads)


def compare(Q, K, V, causal=False, align="lower-right"):
    torch = test_gpu.torch_()
    off = test_gpu.offset(Q.shape[2], K.shape[2], causal, align)
    test_gpu.poison()
    poison_torch()
    O, L = gpu.decode(Q, K, V, causal=causal, return_lse=True, align=align)
    true_O, true_L = test_gpu.exact(Q, K, V, off)
    peer_O, peer_L = test_gpu.peer("decode", Q, K, V, off)
    assert O.shape == Q.shape and O.dtype == Q.dtype and L.dtype == torch.float32
    assert torch.isfinite(O).all()
    none = torch.isinf(true_L)
    assert (torch.isneginf(L) == none).all() and (O[none] == 0).all()
    rounding = torch.finfo(Q.dtype).eps / 4 * true_O.norm().item()
    error, other = ((x.double() - true_O).norm().item() for x in (O, peer_O))
    assert error <= max(3 * other, rounding)
    if (~none).any():
        own, largest = (L.double() - true_L)[~none].abs().max().item(), true_L[~none].abs().max()
        # The tensor cores add 16 products at a time and cut off, d / 16 times; then scale, m, sum.
        roundings = Q.shape[3] / 16 + 3
        bound = torch.finfo(torch.float32).eps * (roundings * largest.item() + test_gpu.d_terms(Q))
        assert own <= bound


def poison_torch():
    """Leave NaN in the memory that torch's next outputs are made of."""
    torch = test_gpu.torch_()
    for size in (1 << 12, 1 << 18, 1 << 24):
        torch.full((size,), math.nan, device="cuda")


@needs_gpu
@pytest.mark.parametrize("causal, align", test_gpu.MASKS)
@pytest.mark.parametrize("Nk", [1, 2, 15, 63, 64, 65, 129, 1000, 4096, 20_011])
@pytest.mark.parametrize("d", ladder.HEAD_DIMENSIONS)
@pytest.mark.parametrize("dtype", ladder.DTYPES)
def test_error_against_float64(dtype, d, Nk, causal, align):
    compare(*draw(3, Nk, d, dtype), causal, align)


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Nk", [65_536, 300_007])
@pytest.mark.parametrize(
    "batch, heads, kv_heads, Nq",
    [(1, 32, 8, 1), (1, 16, 1, 1), (1, 1, 1, 16), (2, 6, 2, 5), (3, 8, 8, 1), (40, 8, 8, 2)],
)
def test_heads_of_all_kinds(batch, heads, kv_heads, Nq, Nk, causal):
    if batch * kv_heads > 16:
        Nk = Nk % 3000 + 100  # more heads than the GPU runs blocks: they are not split
    compare(*draw(Nq, Nk, 128, "float16", "normal", batch, heads, kv_heads), causal)


@needs_gpu
@pytest.mark.parametrize("Nq", range(1, 17))
def test_any_number_of_queries(Nq):
    compare(*draw(Nq, 3001, 64, "float16", "normal", 1, 2, 2), True)


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["huge", "equal keys", "rising"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", ladder.DTYPES)
def test_extreme_values(dtype, d, kind, causal):
    compare(*draw(4, 9001, d, dtype, kind), causal)


@needs_gpu
@pytest.mark.parametrize("shape", [(1, 32, 8, 1, 5000), (1, 16, 1, 1, 70_000), (4, 8, 8, 2, 300)])
def test_the_same_bits_every_time(shape):
    """Whichever block comes last, and with the counters that the calls before left behind."""
    torch = test_gpu.torch_()
    batch, heads, kv_heads, Nq, Nk = shape
    Q, K, V = draw(Nq, Nk, 128, "float16", "normal", batch, heads, kv_heads)
    first = gpu.decode(Q, K, V)
    for _ in range(50):
        gpu.decode(Q[:, :kv_heads], K[:, :, :999], V[:, :, :999])  # another cut, the same counters
        assert torch.equal(first, gpu.decode(Q, K, V))


@needs_gpu
def test_two_streams_at_once():
    torch = test_gpu.torch_()
    Q, K, V = draw(1, 50_000, 128, "float16")
    others = [draw(1, 50_000, 128, "float16") for _ in range(2)]
    alone = [gpu.decode(*x) for x in others]
    streams = [torch.cuda.Stream() for _ in others]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(30):
        for stream, given, out in zip(streams, others, found, strict=True):
            with torch.cuda.stream(stream):
                out.append(gpu.decode(*given))
    torch.cuda.synchronize()
    for first, out in zip(alone, found, strict=True):
        assert all(torch.equal(first, x) for x in out)


@needs_gpu
def test_two_threads_at_once():
    """Each thread has plans of its own: their structs are filled and launched in place."""
    torch = test_gpu.torch_()
    from concurrent.futures import ThreadPoolExecutor

    given = [draw(1, 3000, 64, "float16") for _ in range(2)]
    alone = [gpu.decode(*x) for x in given]
    torch.cuda.synchronize()

    def many(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            out = [gpu.decode(*given[i]) for _ in range(200)]
        stream.synchronize()
        return all(torch.equal(alone[i], x) for x in out)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(many, range(2))) == [True, True]


@needs_gpu
def test_a_captured_graph_gives_the_same_again_and_again():
    torch = test_gpu.torch_()
    Q, K, V = draw(1, 20_000, 128, "float16")
    first = gpu.decode(Q, K, V)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [gpu.decode(Q, K, V) for _ in range(3)]
        graphs.append((graph, out))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):  # both at once, and an ordinary call beside them
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        beside = gpu.decode(Q, K, V)
        torch.cuda.synchronize()
        assert torch.equal(first, beside)
        for _, out in graphs:
            assert all(torch.equal(first, x) for x in out)
            for x in out:
                x.fill_(math.nan)


@needs_gpu
def test_runs_on_the_current_stream():
    torch = test_gpu.torch_()
    Q, K, V = draw(1, 4096, 64, "float16")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = Q * 2  # ready only after the sleep
        O = gpu.decode(late, K, V)
    side.synchronize()
    assert torch.equal(O, gpu.decode(Q * 2, K, V))


def pages_of(K, V, page_size):
    """K and V cut into pages that lie in another order, between pages of NaN; and the table."""
    torch = test_gpu.torch_()
    batch, heads, Nk, d = K.shape
    each = -(-Nk // page_size)
    order = torch.randperm(batch * each + 5, device="cuda")[: batch * each].reshape(batch, each)
    out = []
    for x in (K, V):
        pool = x.new_full((batch * each + 5, heads, page_size, d), math.nan)
        for b in range(batch):
            for i in range(each):
                part = x[b, :, i * page_size : (i + 1) * page_size]
                pool[order[b, i], :, : part.shape[1]] = part
        out.append(pool)
    return *out, order.to(torch.int32)


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [64, 256])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", ladder.DTYPES)
def test_pages_are_the_same_as_one_piece(dtype, d, page_size, causal):
    torch = test_gpu.torch_()
    lengths = [1000, 64, 3, 0]
    Q, K, V = draw(3, max(lengths), d, dtype, "normal", len(lengths))
    K_pages, V_pages, table = pages_of(K, V, page_size)
    given = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    O, L = gpu.decode(
        Q, K_pages, V_pages, causal=causal, return_lse=True, block_table=table, lengths=given
    )
    assert torch.isfinite(O).all()
    for b, n in enumerate(lengths):
        alone = slice(b, b + 1)
        off = n - 3 if causal else None
        true_O, true_L = test_gpu.exact(Q[alone], K[alone, :, :n], V[alone, :, :n], off)
        none = torch.isinf(true_L[0])
        assert (torch.isneginf(L[b]) == none).all() and (O[b][none] == 0).all()
        bound = 2 * torch.finfo(Q.dtype).eps * true_O.norm().item()
        assert (O[b].double() - true_O[0]).norm().item() <= bound


@needs_gpu
def test_a_cache_with_room_is_read_in_place():
    torch = test_gpu.torch_()
    Q, K, V = draw(1, 5000, 128, "float16")
    before = torch.cuda.memory_allocated()
    gpu.decode(Q, K[:, :, :4000], V[:, :, :4000])  # compiles, and keeps work memory
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    O = gpu.decode(Q, K[:, :, :4000], V[:, :, :4000])
    assert torch.cuda.max_memory_allocated() - before < 4096 + O.nbytes
    compare(Q, K[:, :, :4000], V[:, :, :4000])


@needs_gpu
def test_rows_that_are_not_on_16_bytes_are_copied():
    torch = test_gpu.torch_()
    for view in (lambda x: x[..., 1:65], lambda x: x.mT[..., :64]):
        K = view(torch.randn(1, 2, 72, 72, device="cuda", dtype=torch.float16))
        compare(K[:, :, :4], K, K)


@needs_gpu
def test_cupy_arrays():
    import cupy

    Q, K = (cupy.random.standard_normal((1, 2, n, 64)).astype(cupy.float16) for n in (1, 3000))
    O, L = gpu.decode(Q, K, K, return_lse=True)
    assert isinstance(O, cupy.ndarray) and isinstance(L, cupy.ndarray)
    q, k = Q.astype(cupy.float64), K.astype(cupy.float64)
    P = cupy.exp(q @ k.swapaxes(-1, -2) / 8)
    true = P / P.sum(-1, keepdims=True) @ k
    assert float(abs(O - true).max()) < 4 * 2**-11 * float(abs(true).max())
    assert cupy.allclose(L, cupy.log(P.sum(-1)), rtol=1e-5)


@needs_gpu
def test_nothing_to_see_and_nothing_to_do():
    torch = test_gpu.torch_()
    Q, none = torch.randn(1, 2, 5, 64, device="cuda").half(), torch.empty(1, 2, 0, 64).half().cuda()
    O, L = gpu.decode(Q, none, none, return_lse=True)
    assert (O == 0).all() and torch.isneginf(L).all()
    assert gpu.decode(none, Q, Q).shape == (1, 2, 0, 64)


def table_of(Q, **more):
    torch = test_gpu.torch_()
    given = {
        "block_table": torch.zeros(1, 1, device="cuda", dtype=torch.int32),
        "lengths": torch.full((1,), 8, device="cuda", dtype=torch.int32),
    }
    return given | {name: change(given[name]) for name, change in more.items()}


BAD = [
    *((inputs, {}, *rest) for inputs, *rest in test_gpu.BAD if "gradient" not in rest[1]),
    (lambda Q: (Q, Q, Q.clone().requires_grad_()), {}, ValueError, "V requires a gradient"),
    (lambda Q: (Q.expand(1, 2, 8, 64).repeat(1, 2, 1, 1), Q[:, :1], Q[:, :1]), {}, ValueError,
     "32 rows for each head of K; accepted: at most 16"),
    (lambda Q: (Q, Q, Q), {"causal": 1}, TypeError, "causal must be True or False"),
    (lambda Q: (Q, Q, Q), {"align": "left"}, ValueError, "align is 'left'"),
    (lambda Q: (Q, Q, Q), {"lengths": lambda x: x}, ValueError, "block_table is None"),
]  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("inputs, more, kind, message", BAD)
def test_bad_input_is_refused(inputs, more, kind, message):
    torch = test_gpu.torch_()
    Q = torch.randn(1, 2, 8, 64, device="cuda").half()
    with pytest.raises(kind, match=message):
        gpu.decode(*inputs(Q), **more)


BAD_PAGES = [
    (
        {"block_table": lambda x: x.long()},
        TypeError,
        "block_table has dtype int64; accepted: int32",
    ),
    ({"lengths": lambda x: x.repeat(2)}, ValueError, r"lengths has shape \(2,\); accepted: \(1,\)"),
    ({"block_table": lambda x: x[0]}, ValueError, r"block_table has shape \(1,\)"),
    ({"block_table": lambda x: x.cpu()}, TypeError, "block_table is on cpu"),
]


@needs_gpu
@pytest.mark.parametrize("more, kind, message", BAD_PAGES)
def test_a_bad_table_is_refused(more, kind, message):
    torch = test_gpu.torch_()
    Q, K = (torch.randn(1, 2, n, 64, device="cuda").half() for n in (8, 64))
    with pytest.raises(kind, match=message):
        gpu.decode(Q, K, K, **table_of(Q, **more))
    with pytest.raises(ValueError, match=r"page_size, 64\), page_size a multiple of 64"):
        gpu.decode(Q, K[:, :, :60], K[:, :, :60], **table_of(Q))
    with pytest.raises(ValueError, match="accepted with a block_table: 'lower-right'"):
        gpu.decode(Q, K, K, align="upper-left", **table_of(Q))
