"""Block-sparse attention: right, counted exactly; patterns as the papers define them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_lib
from attention_lib import (
    HBM,
    OnChipOverflow,
    block_sparse_attention,
    block_sparse_attention_q_outer,
    flash_attention,
    flash_attention_q_outer,
    flash_traffic,
    q_outer_traffic,
    sparse,
    standard_attention,
    traffic,
)
from attention_lib.show.sparse import first_reached, gallery
from attention_lib.sparse import (
    block_sparse_flops,
    block_sparse_q_outer_traffic,
    block_sparse_traffic,
)
from tests.cases import DTYPES, bounds, oracle, problems

ORDERS = (block_sparse_attention, block_sparse_attention_q_outer)
CLOSED_FORMS = (block_sparse_traffic, block_sparse_q_outer_traffic)

# 8 x 8 tiles of 64 x 64, N = 512, d = 64. By hand: Algorithm 5 moves 2Nd + tiles * 64 (3d + 4),
# the swapped order 2Nd + N + tiles * 2 * 64 d; a tile is 4 * 64 * 64 * d FLOPs.
TABLE = """
dense                       64  1.0000     868,352   1.000   590,336   1.000     67.11
causal                      36  0.5625     517,120   0.596   360,960   0.611     37.75
butterfly k=1               16  0.2500     266,240   0.307   197,120   0.334     16.78
butterfly k=2               24  0.3750     366,592   0.422   262,656   0.445     25.17
butterfly k=3 (all)         32  0.5000     466,944   0.538   328,192   0.556     33.55
butterfly & causal          20  0.3125     316,416   0.364   229,888   0.389     20.97
strided l=2 A1              21  0.3281     328,960   0.379   238,080   0.403     22.02
strided l=2 A2              20  0.3125     316,416   0.364   229,888   0.389     20.97
strided l=2 union           27  0.4219     404,224   0.466   287,232   0.487     28.31
strided l=3 A1              26  0.4062     391,680   0.451   279,040   0.473     27.26
strided l=3 A2              15  0.2344     253,696   0.292   188,928   0.320     15.73
strided l=3 union           28  0.4375     416,768   0.480   295,424   0.500     29.36
strided l=4 A1              30  0.4688     441,856   0.509   311,808   0.528     31.46
strided l=4 A2              12  0.1875     216,064   0.249   164,352   0.278     12.58
strided l=4 union           30  0.4688     441,856   0.509   311,808   0.528     31.46
fixed l=2 c=1 A1            12  0.1875     216,064   0.249   164,352   0.278     12.58
fixed l=2 c=1 A2            16  0.2500     266,240   0.307   197,120   0.334     16.78
fixed l=2 c=1 union         24  0.3750     366,592   0.422   262,656   0.445     25.17
fixed l=4 c=1 A1            20  0.3125     316,416   0.364   229,888   0.389     20.97
fixed l=4 c=1 A2             6  0.0938     140,800   0.162   115,200   0.195      6.29
fixed l=4 c=1 union         24  0.3750     366,592   0.422   262,656   0.445     25.17
fixed l=4 c=2 A1            20  0.3125     316,416   0.364   229,888   0.389     20.97
fixed l=4 c=2 A2            14  0.2188     241,152   0.278   180,736   0.306     14.68
fixed l=4 c=2 union         28  0.4375     416,768   0.480   295,424   0.500     29.36
local window 1 (causal)     15  0.2344     253,696   0.292   188,928   0.320     15.73
"""
ROWS = {line[:24].strip(): line[24:].split() for line in TABLE.strip().splitlines()}

BUTTERFLIES = {
    1: "##......  ##......  ..##....  ..##....  ....##..  ....##..  ......##  ......##",
    2: "###.....  ##.#....  #.##....  .###....  ....###.  ....##.#  ....#.##  .....###",
    3: "###.#...  ##.#.#..  #.##..#.  .###...#  #...###.  .#..##.#  ..#.#.##  ...#.###",
}


@pytest.mark.parametrize("name", ROWS)
def test_worked_table(name):
    nnz, s, alg5, alg5_ratio, swapped, swapped_ratio, mf = (x.replace(",", "") for x in ROWS[name])
    mask, N, d, B = gallery(8)[name], 512, 64, 64
    assert int(mask.sum()) == int(nnz)
    assert f"{sparse.density(mask):.4f}" == s
    x = np.ones((N, d), np.float32)
    for attention, closed_form, want, ratio, dense in (
        (ORDERS[0], CLOSED_FORMS[0], alg5, alg5_ratio, flash_traffic(N, d, B, B)),
        (ORDERS[1], CLOSED_FORMS[1], swapped, swapped_ratio, q_outer_traffic(N, d, B, B)),
    ):
        hbm = HBM()
        attention(x, x, x, mask, B, B, hbm=hbm)
        assert hbm.reads + hbm.writes == closed_form(N, d, mask, B, B) == int(want)
        assert f"{int(want) / dense:.3f}" == ratio
        assert hbm.matmul_flops == block_sparse_flops(N, d, mask, B, B)
        assert f"{hbm.matmul_flops / 1e6:.2f}" == mf


def test_the_table_has_every_pattern_of_the_gallery():
    assert list(ROWS) == list(gallery(8)) and len(ROWS) == 25
    assert all(len(mask) == 16 for mask in gallery(16).values())


# ------------------------------------------------------------------ right


@st.composite
def sparse_problems(draw, **kind):
    """A problem, and a block mask for it: random, empty rows, empty columns, all, nothing."""
    p = draw(problems(**kind))
    Tr, Tc = math.ceil(len(p.Q) / p.Br), math.ceil(len(p.K) / p.Bc)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    block_mask = rng.random((Tr, Tc)) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    which = draw(st.sampled_from(["any", "empty row", "empty column"]))
    if which == "empty row" and Tr:
        block_mask[rng.integers(Tr)] = False
    if which == "empty column" and Tc:
        block_mask[:, rng.integers(Tc)] = False
    return p, block_mask


def by_hand(p, block_mask):
    """The token mask of a block mask, one pair at a time."""
    Nq, Nk = len(p.Q), len(p.K)
    seen = [[block_mask[i // p.Br, j // p.Bc] for j in range(Nk)] for i in range(Nq)]
    return np.array(seen, dtype=bool).reshape(Nq, Nk)


@given(case=sparse_problems())
@settings(max_examples=300, deadline=None)
def test_equals_the_oracle_with_the_expanded_mask(case):
    p, block_mask = case
    tokens = by_hand(p, block_mask)
    assert np.array_equal(sparse.expand(block_mask, len(p.Q), len(p.K), p.Br, p.Bc), tokens)
    mask, options = tokens, p.options
    if options["mask"] is not None and options["mask"].dtype == bool:
        mask = tokens & options["mask"]
    elif options["mask"] is not None:
        mask = np.where(tokens, options["mask"].astype(np.float64), -np.inf)
    O_true, _, L_true = oracle(p.Q, p.K, p.V, **(options | {"mask": mask}))
    dO, dL = bounds(p.Q, p.K, p.V, options["mask"])
    before = block_mask.copy()
    O1, l, m = block_sparse_attention(p.Q, p.K, p.V, block_mask, p.Br, p.Bc, **options)
    O2, L2 = block_sparse_attention_q_outer(p.Q, p.K, p.V, block_mask, p.Br, p.Bc, **options)
    with np.errstate(divide="ignore"):
        L1 = m + np.log(l)
    unseen = np.isneginf(L_true)
    for O, L in ((O1, L1), (O2, L2)):
        assert O.dtype == p.Q.dtype and O.shape == p.Q.shape
        assert np.all(np.abs(O.astype(np.float64) - O_true) <= dO)
        assert np.all(O[unseen] == 0) and np.array_equal(np.isneginf(L), unseen)
        assert np.all(np.abs(L[~unseen] - L_true[~unseen]) <= dL)
    assert np.array_equal(block_mask, before)


@given(case=sparse_problems(masks=False))
@settings(max_examples=300, deadline=None)
def test_counts_equal_closed_forms(case):
    p, block_mask = case
    (Nq, d), Nk = p.Q.shape, len(p.K)
    where = {k: v for k, v in p.options.items() if k != "mask"}
    sizes = (Nq, d, block_mask, p.Br, p.Bc)
    for attention, closed_form in zip(ORDERS, CLOSED_FORMS, strict=True):
        hbm = HBM()
        attention(p.Q, p.K, p.V, block_mask, p.Br, p.Bc, hbm=hbm, **where)
        assert hbm.reads + hbm.writes == closed_form(*sizes, Nk=Nk, **where)
        assert hbm.matmul_flops == block_sparse_flops(*sizes, Nk=Nk, **where)


@given(p=problems(masks=False))
@settings(max_examples=100, deadline=None)
def test_a_full_mask_is_the_dense_loop(p):
    Nq, d, Nk = *p.Q.shape, len(p.K)
    full = np.ones((math.ceil(Nq / p.Br), math.ceil(Nk / p.Bc)), bool)
    where = {k: v for k, v in p.options.items() if k != "mask"}
    dense = (flash_attention, flash_attention_q_outer)
    forms = (flash_traffic, q_outer_traffic)
    for sparse_run, dense_run, mine, theirs in zip(ORDERS, dense, CLOSED_FORMS, forms, strict=True):
        got = sparse_run(p.Q, p.K, p.V, full, p.Br, p.Bc, **where)
        want = dense_run(p.Q, p.K, p.V, p.Br, p.Bc, **where)
        assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))
        closed = mine(Nq, d, full, p.Br, p.Bc, Nk=Nk, **where)
        assert closed == theirs(Nq, d, p.Br, p.Bc, Nk=Nk, **where)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_heads_share_the_mask_and_add_up(dtype, heads_kv):
    rng = np.random.default_rng(3)
    Q = rng.standard_normal((2, 4, 17, 4)).astype(dtype)
    K, V = rng.standard_normal((2, 2, heads_kv, 23, 4)).astype(dtype)
    block_mask = rng.random((4, 4)) < 0.6
    tokens = sparse.expand(block_mask, 17, 23, 5, 6)
    for attention, closed_form in zip(ORDERS, CLOSED_FORMS, strict=True):
        hbm = HBM()
        O = attention(Q, K, V, block_mask, 5, 6, causal=True, hbm=hbm)[0]
        one = closed_form(17, 4, block_mask, 5, 6, causal=True, Nk=23)
        assert hbm.reads + hbm.writes == 8 * one
        for b in range(2):
            for h in range(4):
                kv = h // (4 // heads_kv)
                want, _, _ = oracle(Q[b, h], K[b, kv], V[b, kv], causal=True, mask=tokens)
                dO, _ = bounds(Q[b, h], K[b, kv], V[b, kv])
                assert np.all(np.abs(O[b, h].astype(np.float64) - want) <= dO)


def test_rows_that_see_no_block():
    Q, K, V = np.random.default_rng(0).standard_normal((3, 12, 4))
    block_mask = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool)
    O, l, m = block_sparse_attention(Q, K, V, block_mask, 4, 4)
    O2, L = block_sparse_attention_q_outer(Q, K, V, block_mask, 4, 4)
    for out in (O, O2):
        assert np.all(out[4:8] == 0) and np.all(out[:4] != 0)
    assert np.all(l[4:8] == 0) and np.all(np.isneginf(m[4:8])) and np.all(np.isneginf(L[4:8]))


def test_what_a_skipped_tile_holds_does_not_matter():
    """A key that only skipped tiles meet may be anything: it is not read into a score."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, 12, 4))
    block_mask = sparse.causal(3)
    block_mask[:, 1] = False
    other = [x.copy() for x in (K, V)]
    other[0][4:8], other[1][4:8] = 1e300, -1e300
    for attention in ORDERS:
        first, second = attention(Q, K, V, block_mask, 4, 4), attention(Q, *other, block_mask, 4, 4)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_empty_column_costs_its_loads_in_algorithm_5_only():
    x, nothing = np.ones((512, 64), np.float32), np.zeros((8, 8), bool)
    counted = []
    for attention in ORDERS:
        hbm = HBM()
        attention(x, x, x, nothing, 64, 64, hbm=hbm)
        assert hbm.matmul_flops == 0
        counted.append((hbm.reads, hbm.writes))
    assert counted == [(2 * 512 * 64, 0), (512 * 64, 512 * 64 + 512)]


def test_the_mask_array_is_loaded_for_computed_tiles_only():
    Q, K, V = np.random.default_rng(0).standard_normal((3, 12, 4))
    mask = np.ones((12, 12), bool)
    for attention in ORDERS:
        hbm = HBM()
        attention(Q, K, V, np.eye(3, dtype=bool), 4, 4, mask=mask, hbm=hbm)
        assert hbm.reads_by["mask"] == 3 * 16


def test_the_peak_on_chip_is_the_dense_loops_and_a_budget_holds():
    x, mask = np.ones((64, 8)), sparse.butterfly(8)
    need = traffic.tile_elements(8, 8, 8)
    for attention in ORDERS:
        hbm = HBM(budget=need)
        attention(x, x, x, mask, 8, 8, hbm=hbm)
        assert hbm.peak_on_chip == need
        with pytest.raises(OnChipOverflow, match="1 too many"):
            attention(x, x, x, mask, 8, 8, hbm=HBM(budget=need - 1))


def test_s_gives_the_papers_formula_where_blocks_fit():
    """2Nd + s Tc (3Nd + 4N), and with Br = Bc = M / 4d: 2Nd + s (12 N^2 d^2 + 16 N^2 d) / M."""
    M, d = 16_384, 64
    Br, Bc = attention_lib.block_sizes(M, d)
    assert (Br, Bc) == (64, 64)
    for T in (4, 16, 64):
        N, mask = 64 * T, sparse.butterfly(T)
        tiles = T * (1 + T.bit_length() - 1)
        assert sparse.density(mask) == tiles / T**2 == (1 + math.log2(T)) / T
        exact = block_sparse_traffic(N, d, mask, Br, Bc)
        assert exact * T == 2 * N * d * T + (1 + T.bit_length() - 1) * T * (3 * N * d + 4 * N)
        assert exact * M * T**2 == 2 * N * d * M * T**2 + tiles * (12 * N**2 * d**2 + 16 * N**2 * d)


# ------------------------------------------------------------------ patterns


@pytest.mark.parametrize("k", BUTTERFLIES)
def test_the_butterflies_of_eight_blocks(k):
    drawn = np.array([[c == "#" for c in row] for row in BUTTERFLIES[k].split()])
    assert np.array_equal(sparse.butterfly(8, k), drawn)


@pytest.mark.parametrize("T", [1, 2, 4, 8, 64])
def test_butterfly(T):
    layers = T.bit_length() - 1
    whole = sparse.butterfly(T)
    assert whole.sum() == T * (1 + layers) and np.array_equal(whole, whole.T)
    digits = [[bin(i ^ j).count("1") <= 1 for j in range(T)] for i in range(T)]
    assert np.array_equal(whole, digits)
    each = [sparse.butterfly_layer(T, n) for n in range(1, layers + 1)]
    for n, layer in enumerate(each, 1):
        assert (layer.sum(axis=1) == 2).all()
        assert np.array_equal(sparse.butterfly(T, n), np.logical_or.reduce(each[:n]))
    if each:
        first = first_reached(each)
        assert (first > 0).all() and (first == layers).sum() >= T  # all of them are needed
        for left_out in range(layers):
            rest = [x for n, x in enumerate(each) if n != left_out]
            assert not rest or (first_reached(rest) == 0).sum() == T * T / 2


def test_causal_and_local():
    assert sparse.causal(3).tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert np.array_equal(sparse.local(4, 0), np.eye(4, dtype=bool))
    assert sparse.local(4, 2).sum(axis=1).tolist() == [1, 2, 3, 3]
    assert np.array_equal(sparse.local(5, 99), sparse.causal(5))


@pytest.mark.parametrize("n, l", [(1, 1), (7, 3), (16, 4), (20, 6), (12, 40)])
def test_strided_is_the_papers_definition(n, l):
    A1, A2 = sparse.strided(n, l)
    for i in range(n):
        assert set(np.flatnonzero(A1[i])) == set(range(max(0, i - l), i + 1))
        assert set(np.flatnonzero(A2[i])) == {j for j in range(i + 1) if (i - j) % l == 0}
    assert np.array_equal(A2.astype(int) @ A1 > 0, sparse.causal(n))  # two steps reach all


@pytest.mark.parametrize("n, l, c", [(1, 1, 1), (7, 3, 1), (16, 4, 2), (20, 6, 6), (12, 40, 3)])
def test_fixed_is_the_papers_definition(n, l, c):
    A1, A2 = sparse.fixed(n, l, c)
    for i in range(n):
        assert set(np.flatnonzero(A1[i])) == {j for j in range(i + 1) if j // l == i // l}
        last = {j for j in range(i + 1) if j % l in range(l - c, l + 1)}  # l itself never comes
        assert set(np.flatnonzero(A2[i])) == last


def test_fixed_reaches_every_earlier_run_in_two_steps():
    A1, A2 = sparse.fixed(16, 4)
    both = (A2.astype(int) @ A1 > 0) | A1
    assert np.array_equal(both, sparse.causal(16))


def test_the_positions_of_the_example_are_eight_and_not_nine():
    _, A2 = sparse.fixed(512, 128, 8)
    assert np.flatnonzero(A2[300]).tolist() == [*range(120, 128), *range(248, 256)]


def test_a_token_pattern_may_not_survive_tiling():
    A1, A2 = sparse.strided(1024, 128)
    union, all_pairs = A1 | A2, sparse.causal(1024)
    # A1: 1 to 129 keys in a row; A2 adds the multiples of 128 beyond the first.
    pairs = sum(range(1, 129)) + 896 * 129 + 128 * sum(range(7))
    assert union.sum() == pairs and f"{pairs / (1024 * 1025 // 2):.3f}" == "0.241"
    shares = {}
    for B in (64, 128):
        tiles = sparse.touched(union, B, B)
        by_hand = [
            [union[i : i + B, j : j + B].any() for j in range(0, 1024, B)]
            for i in range(0, 1024, B)
        ]
        assert np.array_equal(tiles, by_hand)
        shares[B] = tiles.sum() / sparse.touched(all_pairs, B, B).sum()
    assert f"{shares[64]:.2f}" == "0.64" and shares[128] == 1
    # In the order of the positions modulo 128 the same A2 is a block diagonal: 8 keys in a group.
    order = np.argsort(np.arange(1024) % 128, kind="stable")
    assert sparse.touched(A2, 64, 64).sum() == sum(i // 2 + 1 for i in range(16))
    assert np.array_equal(sparse.touched(A2[order][:, order], 64, 64), np.eye(16, dtype=bool))


@given(
    st.integers(0, 20), st.integers(0, 20), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99)
)
@settings(max_examples=200, deadline=None)
def test_expand_and_touched_are_inverse(Nq, Nk, Br, Bc, seed):
    rng = np.random.default_rng(seed)
    block_mask = rng.random((math.ceil(Nq / Br), math.ceil(Nk / Bc))) < 0.5
    tokens = sparse.expand(block_mask, Nq, Nk, Br, Bc)
    assert tokens.shape == (Nq, Nk)
    assert np.array_equal(sparse.touched(tokens, Br, Bc), block_mask)


def test_masked_standard_attention_is_the_same_attention():
    Q, K, V = np.random.default_rng(1).standard_normal((3, 50, 8))
    for name, block_mask in gallery(8).items():
        tokens = sparse.expand(block_mask, 50, 50, 7, 7)
        want = standard_attention(Q, K, V, mask=tokens)[0]
        dO, _ = bounds(Q, K, V)
        for attention in ORDERS:
            assert np.abs(attention(Q, K, V, block_mask, 7, 7)[0] - want).max() <= 2 * dO, name


# ------------------------------------------------------------------ broken input

A, B8, M = np.zeros((6, 4)), np.zeros((8, 4)), np.ones((3, 2), bool)
REFUSED = [
    (lambda f: f(A, B8, B8, M.T, 2, 4), ValueError, r"block_mask has .*\(Tr, Tc\) = \(3, 2\)"),
    (lambda f: f(A, B8, B8, M[:2], 2, 4), ValueError, r"for Nq = 6, Br = 2, Nk = 8, Bc = 4"),
    (lambda f: f(A, B8, B8, np.ones((6, 8), bool), 2, 4), ValueError, r"shape \(6, 8\)"),
    (lambda f: f(A, B8, B8, M[None], 2, 4), ValueError, r"block_mask has shape \(1, 3, 2\)"),
    (lambda f: f(A, B8, B8, M.astype(int), 2, 4), TypeError, "block_mask has dtype int64.*bool"),
    (lambda f: f(A, B8, B8, M.tolist(), 2, 4), TypeError, "block_mask must be a numpy array"),
    (lambda f: f(A, B8, B8, None, 2, 4), TypeError, "block_mask must be a numpy array.*NoneType"),
    (lambda f: f(A, B8, B8, M, 0, 4), ValueError, "Br is 0; accepted: 1 or more"),
    (lambda f: f([[1.0]], B8, B8, M, 2, 4), TypeError, "Q must be a numpy array, got list"),
    (lambda f: f(A, B8, B8, M, 2, 4, causal=1), TypeError, "causal must be True or False"),
    (lambda f: f(A, B8, B8, M, 2, 4, hbm={}), TypeError, "hbm must be an HBM or None"),
]
OTHERS = [
    (lambda: sparse.causal(0), ValueError, "T is 0; accepted: 1 or more"),
    (lambda: sparse.local(4, -1), ValueError, "window is -1; accepted: 0 or more"),
    (lambda: sparse.butterfly(6), ValueError, "T is 6; accepted: a power of two"),
    (lambda: sparse.butterfly(8, 4), ValueError, "k is 4; accepted: at most log2 T = 3"),
    (lambda: sparse.butterfly(8.0), TypeError, "T must be an int, got float 8.0"),
    (lambda: sparse.butterfly_layer(8, 0), ValueError, "layer is 0; accepted: 1 or more"),
    (lambda: sparse.butterfly_layer(8, 4), ValueError, "layer is 4; accepted: at most log2 T = 3"),
    (lambda: sparse.strided(8, 0), ValueError, "l is 0; accepted: 1 or more"),
    (lambda: sparse.fixed(8, 2, 3), ValueError, "c is 3; accepted: at most l = 2"),
    (lambda: sparse.density([True]), TypeError, "mask must be a numpy array, got list"),
    (lambda: sparse.density(np.ones((2, 2))), TypeError, "mask has dtype float64; accepted: bool"),
    (lambda: sparse.touched(M[0], 2, 2), ValueError, r"mask has shape \(2,\); accepted: 2 axes"),
    (lambda: sparse.touched(M, 0, 2), ValueError, "Br is 0"),
    (lambda: sparse.expand(M, 6, 8, 3, 4), ValueError, r"\(Tr, Tc\) = \(2, 2\)"),
    (lambda: sparse.expand(None, 6, 8, 3, 4), TypeError, "block_mask must be a numpy array"),
    (lambda: block_sparse_traffic(6, 4, M.T, 2, 4, Nk=8), ValueError, r"\(Tr, Tc\) = \(3, 2\)"),
    (lambda: block_sparse_traffic(-1, 4, M, 2, 4), ValueError, "N is -1; accepted: 0 or more"),
    (lambda: block_sparse_q_outer_traffic(6, 4, None, 2, 4), TypeError, "block_mask must be"),
    (lambda: block_sparse_flops(6, 4, M, 2, 4, align="x", Nk=8), ValueError, "align is 'x'"),
]


@pytest.mark.parametrize("attention", ORDERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("call, kind, message", REFUSED)
def test_refused(attention, call, kind, message):
    with pytest.raises(kind, match=message):
        call(attention)


@pytest.mark.parametrize("call, kind, message", OTHERS)
def test_the_others_refuse(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
