"""Split-KV, packed heads, pages, windows with sinks and the ring: right, and counted exactly."""

import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_lib import HBM, OnChipOverflow, flash_attention_q_outer, standard_traffic
from attention_lib.decode import (
    Links,
    OutOfPages,
    PagedKVCache,
    SinkCache,
    cut,
    packed_attention,
    paged_traffic,
    ring_attention,
    ring_link_traffic,
    ring_overlap,
    ring_traffic,
    split_kv_attention,
    split_kv_traffic,
    visible_keys,
    window_attention,
    window_traffic,
)
from tests.cases import DTYPES, bounds, oracle, problems

MiB = 2**20


def agrees(O, L, Q, K, V, **options):
    """O and L are the oracle's, to a bound on rounding; nothing visible gives 0 and -inf."""
    O_true, _, L_true = oracle(Q, K, V, **options)
    dO, dL = bounds(Q, K, V, options.get("mask"))
    assert O.dtype == Q.dtype and O.shape == Q.shape and L.shape == Q.shape[:-1]
    assert np.all(np.abs(O.astype(np.float64) - O_true) <= dO)
    unseen = np.isneginf(L_true)
    assert np.all(O[unseen] == 0) and np.array_equal(np.isneginf(L), unseen)
    assert np.all(np.abs(L[~unseen] - L_true[~unseen]) <= dL)


def moved(hbm, *, mask=False):
    """Reads and writes, less what the mask costs."""
    return hbm.reads + hbm.writes - (0 if mask else hbm.reads_by["mask"])


def unchanged(arrays, run):
    before = [x.copy() for x in arrays]
    result = run()
    for x, old in zip(arrays, before, strict=True):
        assert np.array_equal(x, old)
    return result


# ---------------------------------------------------------------- split-KV


@given(p=problems(), splits=st.integers(1, 40))
@settings(max_examples=200)
def test_split_kv_equals_the_oracle_and_its_closed_form(p, splits):
    hbm = HBM()
    O, L = unchanged(
        (p.Q, p.K, p.V),
        lambda: split_kv_attention(p.Q, p.K, p.V, splits, Bc=p.Bc, hbm=hbm, **p.options),
    )
    agrees(O, L, p.Q, p.K, p.V, **p.options)
    (Nq, d), Nk = p.Q.shape, len(p.K)
    options = {k: p.options[k] for k in ("causal", "align")}
    assert moved(hbm) == split_kv_traffic(Nk, d, splits, Nq=Nq, Bc=p.Bc, **options)


@given(st.integers(0, 300), st.integers(1, 400))
def test_cut_covers_everything_evenly(N, parts):
    lengths = [p.stop - p.start for p in cut(N, parts)]
    assert [i for p in cut(N, parts) for i in range(p.start, p.stop)] == list(range(N))
    assert len(lengths) == parts and max(lengths) - min(lengths) <= 1


def test_more_splits_than_keys_and_no_keys_at_all():
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((1, 4)), *rng.standard_normal((2, 3, 4))
    agrees(*split_kv_attention(Q, K, V, 50), Q, K, V)
    O, L = split_kv_attention(Q, K[:0], V[:0], 5)
    assert np.all(O == 0) and np.all(np.isneginf(L))


def test_splits_cost_what_the_partials_cost():
    one, many = (split_kv_traffic(65_536, 128, s) for s in (1, 64))
    assert many - one == 63 * (3 * 128 + 4)
    assert many / one < 1.002
    for N, s in ((8, 1), (100, 7)):  # the formula, by hand
        assert split_kv_traffic(N, 16, s) == 2 * N * 16 + s * 52 + 17


def test_a_split_holds_one_tile_however_long_the_cache():
    peaks = []
    for N in (256, 2048):
        hbm, (K, V) = HBM(), np.random.default_rng(0).standard_normal((2, N, 8))
        split_kv_attention(K[:1], K, V, 4, Bc=32, hbm=hbm)
        peaks.append(hbm.peak_on_chip)
    # K and V tile, Q and O, the scores, m and l
    assert peaks == [2 * 32 * 8 + 2 * 8 + 32 + 2] * 2
    with pytest.raises(OnChipOverflow, match="too many"):
        split_kv_attention(K[:1], K, V, 4, Bc=32, hbm=HBM(budget=peaks[0] - 1))


def test_one_query_leaves_nothing_for_tiling_to_save():
    N, d = 4096, 128
    rng = np.random.default_rng(0)
    Q, (K, V) = rng.standard_normal((1, d)), rng.standard_normal((2, N, d))
    hbm = HBM()
    flash_attention_q_outer(Q, K, V, 128, 128, hbm=hbm)
    assert hbm.reads + hbm.writes == 2 * N * d + 2 * d + 1
    assert standard_traffic(1, d, Nk=N) / (hbm.reads + hbm.writes) < 1.02
    assert hbm.matmul_flops == 4 * N * d  # about one FLOP for each byte of fp16
    assert 0.99 < hbm.matmul_flops / (2 * (hbm.reads + hbm.writes)) < 1


# ---------------------------------------------------------------- packed heads


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("align", ["lower-right", "upper-left"])
def test_packed_heads(dtype, kv_heads, causal, align):
    rng = np.random.default_rng(3)
    Q = rng.standard_normal((2, 6, 5, 4)).astype(dtype)
    K, V = rng.standard_normal((2, 2, kv_heads, 23, 4)).astype(dtype)
    for Nk in (23, 3, 0):
        hbm = HBM()
        options = dict(causal=causal, align=align)
        O, L = packed_attention(Q, K[:, :, :Nk], V[:, :, :Nk], 3, Bc=4, hbm=hbm, **options)
        for b in range(2):
            for h in range(6):
                kv = h // (6 // kv_heads)
                agrees(O[b, h], L[b, h], Q[b, h], K[b, kv, :Nk], V[b, kv, :Nk], **options)
        one = split_kv_traffic(Nk, 4, 3, Nq=5, group=6 // kv_heads, Bc=4, **options)
        assert moved(hbm) == 2 * kv_heads * one


@pytest.mark.parametrize("kv_heads, per_head, packed", [(32, 64, 64), (8, 64, 16), (1, 64, 2)])
def test_gqa_bytes_at_decode(kv_heads, per_head, packed):
    rng = np.random.default_rng(0)
    Q = rng.standard_normal((32, 1, 128)).astype(np.float16)
    K, V = rng.standard_normal((2, kv_heads, 4096, 128)).astype(np.float16)
    outputs = []
    for run, want in ((split_kv_attention, per_head), (packed_attention, packed)):
        hbm = HBM()
        outputs.append(run(Q, K, V, 1, Bc=1024, hbm=hbm)[0].astype(float))
        assert 2 * (hbm.reads_by["K"] + hbm.reads_by["V"]) == want * MiB
    assert np.all(np.abs(outputs[0] - outputs[1]) <= 2.0**-10)


# ---------------------------------------------------------------- pages


@given(
    seed=st.integers(0, 2**32 - 1), page_size=st.integers(1, 9), group=st.integers(1, 3),
    heads=st.sampled_from([None, 1, 2]), dtype=st.sampled_from(DTYPES), causal=st.booleans(),
)  # fmt: skip
@settings(max_examples=100)
def test_pages(seed, page_size, group, heads, dtype, causal):
    """Sequences that grow in turns and leave, so that their pages lie anywhere."""
    rng = np.random.default_rng(seed)
    lead, d = (() if heads is None else (heads,)), 4
    cache = PagedKVCache(60, page_size, d, heads=heads, dtype=dtype)
    held = {}
    for _ in range(12):
        seq, n = "abc"[rng.integers(3)], int(rng.integers(0, 8))
        if seq in held and rng.random() < 0.2:
            cache.release(seq)
            del held[seq]
            continue
        K, V = rng.standard_normal((2, *lead, n, d)).astype(dtype)
        try:
            cache.append(seq, K, V)
        except OutOfPages:
            continue
        old = held.get(seq, (K[..., :0, :], V[..., :0, :]))
        held[seq] = tuple(np.concatenate(x, axis=-2) for x in zip(old, (K, V), strict=True))
    pages = [p for table in cache.table.values() for p in table]
    assert sorted(pages + cache.free) == list(range(60))  # each page is somebody's, or free
    for seq, (K, V) in held.items():
        N = K.shape[-2]
        assert cache.length[seq] == N and len(cache.table[seq]) == -(-N // page_size)
        many = () if heads is None else (heads * group,)
        Q, hbm = rng.standard_normal((*many, 3, d)).astype(dtype), HBM()
        O, L = cache.attention(seq, Q, causal=causal, hbm=hbm)
        for h in np.ndindex(many):
            kv = tuple(x // group for x in h)
            agrees(O[h], L[h], Q[h], K[kv], V[kv], causal=causal)
        rows = 3 if heads is None else 3 * group
        assert moved(hbm) == (heads or 1) * paged_traffic(N, d, page_size, rows=rows)
        assert hbm.reads_by["table"] == (heads or 1) * len(cache.table[seq])


def test_out_of_pages_says_what_is_missing_and_changes_nothing():
    cache, x = PagedKVCache(4, 2, 3), np.ones((5, 3), np.float32)
    cache.append("a", x, x)
    before = (dict(cache.table), dict(cache.length), list(cache.free))
    for seq in ("a", "b"):
        with pytest.raises(OutOfPages, match=r"K has 5 tokens.*need [23] pages more; 1 of 4"):
            cache.append(seq, x, x)
        assert (cache.table, cache.length, cache.free) == before
    cache.release("a")
    cache.append("b", x, x)
    assert cache.length == {"b": 5} and issubclass(OutOfPages, ValueError)


def test_only_the_sequences_own_tokens_are_read():
    cache, x = PagedKVCache(3, 4, 2), np.ones((5, 2), np.float32)
    cache.append("a", x, x)
    cache.K[cache.free] = np.nan  # and the empty slots are NaN from the start
    assert np.isnan(cache.K[cache.table["a"][-1], 1:]).all()
    assert np.all(cache.attention("a", x)[0] == 1)


# ---------------------------------------------------------------- window and sinks


def window_mask(Nq, Nk, window, sinks, causal, align):
    shift = Nk - Nq if align == "lower-right" else 0
    mask = np.zeros((Nq, Nk), bool)
    for i in range(Nq):
        for j in range(Nk):
            back = i + shift - j
            near = 0 <= back < window if causal else abs(back) < window
            mask[i, j] = near or (j < sinks and (back >= 0 or not causal))
    return mask


@given(p=problems(), window=st.integers(1, 40), sinks=st.integers(0, 12))
@settings(max_examples=200)
def test_window_and_sinks(p, window, sinks):
    hbm, options = HBM(), p.options
    O, L = window_attention(p.Q, p.K, p.V, window, sinks, Br=p.Br, Bc=p.Bc, hbm=hbm, **options)
    (Nq, d), Nk = p.Q.shape, len(p.K)
    seen = window_mask(Nq, Nk, window, sinks, options["causal"], options["align"])
    mask = options["mask"]
    if mask is None or mask.dtype == bool:
        both = seen if mask is None else seen & mask
    else:
        both = np.where(seen, mask.astype(np.float64), -np.inf)
    agrees(O, L, p.Q, p.K, p.V, mask=both)
    size = dict(Br=p.Br, causal=options["causal"], Nk=Nk, align=options["align"])
    assert moved(hbm) == window_traffic(Nq, d, window, sinks, **size)


@given(
    st.integers(-9, 40), st.integers(0, 9), st.integers(0, 30), st.integers(1, 20),
    st.integers(0, 9), st.booleans(),
)  # fmt: skip
def test_the_keys_a_tile_loads_are_the_keys_it_sees(first, more, Nk, window, sinks, causal):
    want = set()
    for p in range(first, first + more + 1):
        for j in range(Nk):
            near = 0 <= p - j < window if causal else abs(p - j) < window
            if near or (j < sinks and (j <= p or not causal)):
                want.add(j)
    parts = visible_keys(first, first + more, Nk, window, sinks, causal)
    got = [j for part in parts for j in range(part.start, part.stop)]
    assert len(got) == len(set(got)) and want <= set(got)
    if causal or Nk <= first + more + window:  # an inner gap cannot arise
        assert set(got) == want


def test_window_by_hand():
    assert window_traffic(1, 128, 1024, 4, Nk=10**6) == 2 * 128 * 1028 + 257
    assert window_traffic(1, 128, 1024, 4, Nk=100) == 2 * 128 * 100 + 257
    assert visible_keys(9, 9, 10, 3, 2) == (slice(0, 2), slice(7, 10))
    assert visible_keys(2, 2, 10, 3, 2) == (slice(0, 2), slice(2, 3))


@pytest.mark.parametrize("window, sinks", [(5, 2), (5, 0), (1, 3), (40, 4)])
def test_sink_cache_is_window_attention_and_never_grows(window, sinks):
    rng = np.random.default_rng(1)
    Q, K, V = rng.standard_normal((3, 60, 4))
    O, L = window_attention(Q, K, V, window, sinks)
    cache = SinkCache(window, sinks, 4, dtype=np.float64)
    for t in range(60):
        cache.append(K[t : t + 1], V[t : t + 1])
        hbm = HBM()
        o, L_t = cache.attention(Q[t : t + 1], hbm=hbm)
        assert np.abs(o - O[t]).max() <= 1e-13 and abs(L_t[0] - L[t]) <= 1e-13
        assert hbm.reads_by["K"] == 4 * min(t + 1, window + sinks)
    assert cache.cache.K.shape == (1, window + sinks, 4)


# ---------------------------------------------------------------- ring


@given(p=problems(), devices=st.integers(1, 12), striped=st.booleans())
@settings(max_examples=200)
def test_ring(p, devices, striped):
    hbm, links, options = HBM(), Links(), p.options
    O, L = ring_attention(
        p.Q, p.K, p.V, devices, striped=striped, Bc=p.Bc, links=links, hbm=hbm, **options
    )
    agrees(O, L, p.Q, p.K, p.V, **options)
    (Nq, d), Nk = p.Q.shape, len(p.K)
    assert [links.sent[i] for i in range(devices)] == ring_link_traffic(
        Nk, d, devices, striped=striped
    )
    assert links.total == 2 * Nk * d * (devices - 1)
    size = dict(striped=striped, causal=options["causal"], Nk=Nk, align=options["align"])
    assert moved(hbm) == ring_traffic(Nq, d, devices, **size)
    shift = Nk - Nq if options["align"] == "lower-right" else 0
    pairs = [not options["causal"] or j <= i + shift for i in range(Nq) for j in range(Nk)]
    assert sum(links.work.values()) == sum(pairs)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_causal_ring_waits_for_its_busiest_device(devices):
    N, d, n = 64, 2, 64 // devices
    x = np.random.default_rng(0).standard_normal((N, d))
    slowest = []
    for striped in (False, True):
        links = Links()
        ring_attention(x, x, x, devices, striped=striped, causal=True, links=links)
        assert sum(links.work.values()) == N * (N + 1) // 2
        slowest.append(links.slowest())
    triangle = n * (n + 1) // 2
    assert slowest == [triangle + (devices - 1) * n * n, devices * triangle]


def test_ring_overlap():
    assert ring_overlap(312e12, 300e9) == 1040
    assert ring_overlap(312e12, 300e9, element_bytes=4) == 2080


# ---------------------------------------------------------------- all


def test_leading_axes_add_up():
    rng = np.random.default_rng(0)
    Q, (K, V) = rng.standard_normal((2, 6, 5, 4)), rng.standard_normal((2, 2, 3, 9, 4))
    for run, one in (
        (lambda h: split_kv_attention(Q, K, V, 4, hbm=h), split_kv_traffic(9, 4, 4, Nq=5)),
        (lambda h: window_attention(Q, K, V, 3, 1, hbm=h), window_traffic(5, 4, 3, 1, Nk=9)),
        (lambda h: ring_attention(Q, K, V, 3, hbm=h), ring_traffic(5, 4, 3, Nk=9)),
    ):
        hbm = HBM()
        O, L = run(hbm)
        assert O.shape == Q.shape and L.shape == Q.shape[:-1]
        assert hbm.reads + hbm.writes == 12 * one


@pytest.mark.parametrize(
    "run",
    [
        lambda x: split_kv_attention(x, x, x, 4, Bc=64),
        lambda x: window_attention(x, x, x, 100, 4, Br=64, Bc=64),
        lambda x: ring_attention(x, x, x, 1, Bc=64),
        lambda x: ring_attention(x, x, x, 4, Bc=64, causal=True, striped=True),
    ],
)
def test_no_n_by_n_array(run):
    x = np.random.default_rng(0).standard_normal((4096, 8), dtype=np.float32)
    tracemalloc.start()
    run(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 4096 / 4  # bytes: a quarter of one boolean matrix


@pytest.mark.parametrize(
    "run",
    [
        lambda Q, K, V: split_kv_attention(Q, K, V, 9),
        lambda Q, K, V: packed_attention(Q[None], K[None], V[None], 9),
        lambda Q, K, V: window_attention(Q, K, V, 2, 1),
        lambda Q, K, V: ring_attention(Q, K, V, 4, causal=True),
    ],
)
def test_no_floating_point_fault(run):
    x = np.ones((6, 2))
    with np.errstate(all="raise"):
        run(x * 100, np.linspace(-100, 100, 6)[:, None] * x, x)


x = np.ones((4, 2))
h = np.ones((4, 3, 2))
CACHE = PagedKVCache(4, 2, 2, dtype=np.float64)
CACHE.append("a", x, x)
BAD = [
    (lambda: split_kv_attention(x, x, x, 0), ValueError, "splits is 0"),
    (lambda: split_kv_attention(x, x, x, 1.5), TypeError, "splits must be an int"),
    (lambda: split_kv_attention(x, x, x, 2, group=3), ValueError, "group is 3.*4 rows"),
    (lambda: split_kv_attention(x, x, x, 2, Bc=0), ValueError, "Bc is 0"),
    (lambda: split_kv_attention(x, x[:, :1], x, 2), ValueError, "K has shape"),
    (lambda: split_kv_attention(x, x, x, 2, hbm=3), TypeError, "hbm must be an HBM"),
    (lambda: split_kv_attention(x * np.nan, x, x, 2), ValueError, "Q has NaN"),
    (lambda: split_kv_attention(x, x, x), TypeError, "splits"),
    (lambda: packed_attention(x, x, x), ValueError, r"Q has shape \(4, 2\)"),
    (lambda: packed_attention(h, h[:3], h[:3]), ValueError, "divisor of the 4 heads"),
    (lambda: packed_attention(h, h, h, -1), ValueError, "splits is -1"),
    (lambda: packed_attention(h[:0], h, h), ValueError, "Q has shape"),
    (lambda: window_attention(x, x, x, 0), ValueError, "window is 0"),
    (lambda: window_attention(x, x, x, 2, -1), ValueError, "sinks is -1"),
    (lambda: window_attention(x, x, x, 2, causal=1), TypeError, "causal must be"),
    (lambda: ring_attention(x, x, x, 0), ValueError, "devices is 0"),
    (lambda: ring_attention(x, x, x, 2, striped="yes"), TypeError, "striped must be"),
    (lambda: ring_attention(x, x, x, 2, links=[]), TypeError, "links must be a Links"),
    (lambda: ring_attention(x, x, x, 2, align="top"), ValueError, "align is 'top'"),
    (lambda: ring_overlap(0, 1), ValueError, "flops is 0"),
    (lambda: ring_overlap(1, math.nan), ValueError, "link_bandwidth is nan"),
    (lambda: PagedKVCache(0, 2, 2), ValueError, "pages is 0"),
    (lambda: PagedKVCache(2, 2, 2, heads=0), ValueError, "heads is 0"),
    (lambda: PagedKVCache(2, 2, 2, dtype=int), TypeError, "dtype is int64"),
    (lambda: CACHE.append("a", x, x[:2]), ValueError, "V has shape"),
    (lambda: CACHE.append("a", h, h), ValueError, r"K has shape \(4, 3, 2\); accepted: \(n, 2\)"),
    (lambda: CACHE.append("a", x.astype("f4"), x), TypeError, "K has dtype float32"),
    (lambda: CACHE.append("a", x * np.inf, x), ValueError, "K has NaN or infinity"),
    (lambda: CACHE.append("a", x.tolist(), x), TypeError, "K must be a numpy array"),
    (lambda: CACHE.attention("b", x), ValueError, "seq is 'b'.*'a'"),
    (lambda: CACHE.attention("a", x.astype("f4")), TypeError, "dtype"),
    (lambda: CACHE.attention("a", x[:, :1]), ValueError, "K has shape"),
    (lambda: CACHE.attention("a", x, causal=1), TypeError, "causal must be"),
    (lambda: CACHE.attention("a", x, hbm={}), TypeError, "hbm must be an HBM"),
    (lambda: CACHE.release("b"), ValueError, "seq is 'b'"),
    (lambda: SinkCache(0, 1, 2), ValueError, "window is 0"),
    (lambda: SinkCache(2, 1, 2).attention(x), ValueError, "empty"),
    (lambda: SinkCache(2, 1, 2).append(x, x), TypeError, "K has dtype float64"),
    (lambda: split_kv_traffic(-1, 2, 2), ValueError, "Nk is -1"),
    (lambda: window_traffic(4, 2, 0), ValueError, "window is 0"),
    (lambda: paged_traffic(4, 2, 0), ValueError, "page_size is 0"),
    (lambda: ring_traffic(4, 2, 2, causal=None), TypeError, "causal must be"),
    (lambda: ring_link_traffic(4, 2, 0), ValueError, "devices is 0"),
]


@pytest.mark.parametrize("call, error, says", BAD)
def test_bad_input(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_bfloat16_pages():
    y = np.ones((3, 2), ml_dtypes.bfloat16)
    cache = PagedKVCache(2, 2, 2, dtype=ml_dtypes.bfloat16)
    cache.append(7, y, y)
    O, L = cache.attention(7, y)
    assert O.dtype == ml_dtypes.bfloat16 and L.dtype == np.float32 and np.all(O == 1)
