"""The backward pass: against finite differences, an oracle, torch; counts against closed forms."""

import inspect
import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_lib import (
    HBM,
    OnChipOverflow,
    flash_attention,
    flash_attention_q_outer,
    standard_attention,
    standard_backward,
)
from attention_lib.backward import (
    backward_tile_elements,
    flash_backward,
    flash_backward_algorithm_4,
    flash_backward_traffic,
    standard_backward_traffic,
    unfused_backward,
)
from tests.cases import DTYPES, as_view, compute_eps, oracle, problems, storage_eps, visible


def gradients(version, p, dO, hbm=None):
    """dQ, dK, dV of one version, from a forward pass of its own kind and with other blocks."""
    if version is standard_backward:
        return version(p.Q, p.K, p.V, dO, **p.options)
    if version is unfused_backward:
        P = standard_attention(p.Q, p.K, p.V, **p.options)[2]
        return version(p.Q, p.K, p.V, P, dO, p.Br, hbm=hbm)
    if version is flash_backward:
        O, L = flash_attention_q_outer(p.Q, p.K, p.V, p.Bc, p.Br, **p.options)
        saved = (O, L)
    else:
        saved = flash_attention(p.Q, p.K, p.V, p.Bc, p.Br, **p.options)
    return version(p.Q, p.K, p.V, *saved, dO, p.Br, p.Bc, **p.options, hbm=hbm)


VERSIONS = (standard_backward, unfused_backward, flash_backward, flash_backward_algorithm_4)
VIEWS = ("contiguous", "transposed", "reversed", "strided")


def with_dO(p, seed=0, kind="contiguous"):
    dO = np.random.default_rng(seed).standard_normal(p.Q.shape).astype(p.Q.dtype)
    return as_view(dO, kind)


def oracle_backward(Q, K, V, dO, *, causal=False, mask=None, align="lower-right"):
    """The three gradients in float64, one row at a time, through the Jacobian of softmax."""
    Q, K, V, dO = (np.asarray(x, dtype=np.float64) for x in (Q, K, V, dO))
    P = oracle(Q, K, V, causal=causal, mask=mask, align=align)[1]
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    for i, p in enumerate(P):
        jacobian = np.diag(p) - np.outer(p, p)
        ds = jacobian @ (V @ dO[i]) / math.sqrt(Q.shape[1])
        dQ[i] = ds @ K
        dK += np.outer(ds, Q[i])
        dV += np.outer(p, dO[i])
    return dQ, dK, dV


def bounds(Q, K, V, dO, mask=None, saved=0.0):
    """How far dQ, dK, dV may be off by rounding alone (first order, x2). Sizes are the largest
    elements; saved: the rounding of what the forward pass left (O or P) in its storage dtype."""
    eps, (Nq, d), Nk = compute_eps(Q.dtype), Q.shape, len(K)
    scale = 1 / math.sqrt(d)
    q, k, v, g = (float(np.abs(x.astype(np.float64)).max(initial=0.0)) for x in (Q, K, V, dO))
    size = (np.abs(Q.astype(np.float64)) @ np.abs(K.astype(np.float64)).T * scale).max(initial=0.0)
    if mask is not None and mask.dtype != bool:
        size += np.abs(mask[np.isfinite(mask)].astype(np.float64)).max(initial=0.0)
    # P: from S twice (once for L, or the maximum, and once to rebuild), and a sum over Nk.
    P = 2 * (d + 4) * eps * size + (2 * Nk + 16) * eps + eps * (size + math.log(Nk + 1)) + saved
    dP = d * g * v  # the largest |dP|; D is a mean of dP, so it is no larger
    dS = dP * (2 * P + 2 * (d + Nk + 8) * eps + P + saved)  # times P_ij
    dQ = scale * k * (dS + (Nk + 8) * eps * 2 * dP)  # the weights of a row add up to 1
    dK = scale * q * Nq * (dS + (Nq + 8) * eps * 2 * dP)
    dV = Nq * g * (P + (Nq + 8) * eps)
    return [2 * x + 1e-300 for x in (dQ, dK, dV)]


def close(got, want, bound, dtype):
    store = storage_eps(dtype) if np.dtype(dtype).itemsize == 2 else 0.0
    tiny = 2.0**-24 if dtype == np.float16 else 0.0  # its subnormal numbers
    for g, w, b in zip(got, want, bound, strict=True):
        assert g.dtype == dtype and g.shape == w.shape
        assert np.all(np.abs(g.astype(np.float64) - w) <= b + store * (np.abs(w) + b) + tiny)


# ------------------------------------------------------------------ right


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda f: f.__name__)
def test_against_central_differences(version, causal):
    """(f(x + h) - f(x - h)) / 2h is off by h^2/6 |f'''| and by the rounding of f over h.

    As a function of one element of Q, a row's loss is the mean of c under weights that are
    exponentials of a linear function with slopes b: its derivatives are joint cumulants, and the
    third one is at most 64 C B^3, with C = max |dP| and B = max |slope|. One element of K moves
    all Nq rows. V is linear. h = eps^(1/3) balances the two errors.
    """
    rng = np.random.default_rng(1)
    Q, K, V = rng.standard_normal((5, 3)), *rng.standard_normal((2, 7, 3))
    dO = rng.standard_normal((5, 3))
    eps = float(np.finfo(float).eps)
    h = eps ** (1 / 3)

    def loss(Q, K, V):
        return float((oracle(Q, K, V, causal=causal)[0] * dO).sum())

    O, L = flash_attention_q_outer(Q, K, V, 2, 3, causal=causal)
    _, l, m = flash_attention(Q, K, V, 2, 3, causal=causal)
    call = {
        standard_backward: lambda: version(Q, K, V, dO, causal=causal),
        unfused_backward: lambda: version(
            Q, K, V, standard_attention(Q, K, V, causal=causal)[2], dO
        ),
        flash_backward: lambda: version(Q, K, V, O, L, dO, 3, 2, causal=causal),
        flash_backward_algorithm_4: lambda: version(Q, K, V, O, l, m, dO, 3, 2, causal=causal),
    }
    got = call[version]()
    C = np.abs(dO @ V.T).max()
    slopes = [np.abs(x).max() / math.sqrt(3) for x in (K, Q)] + [0.0]
    rows = (1, 5, 5)
    rounding = 5 * C * eps * 100  # of f: 5 rows, each within 100 eps of a mean of C
    for which, gradient in enumerate(got):
        tolerance = rows[which] * 64 * C * slopes[which] ** 3 * h**2 / 6 + rounding / h
        assert tolerance < 1e-5  # small beside the gradients, which are about 1
        for at in np.ndindex(gradient.shape):
            ends = []
            for step in (h, -h):
                x = [Q.copy(), K.copy(), V.copy()]
                x[which][at] += step
                ends.append(loss(*x))
            assert abs((ends[0] - ends[1]) / (2 * h) - gradient[at]) <= tolerance


@pytest.mark.parametrize("version", VERSIONS, ids=lambda f: f.__name__)
@given(p=problems(), seed=st.integers(0, 99), kind=st.sampled_from(VIEWS))
@settings(max_examples=200, deadline=None)
def test_equals_the_oracle(version, p, seed, kind):
    dO = with_dO(p, seed, kind)
    before = [x.copy() for x in (p.Q, p.K, p.V, dO)]
    got = gradients(version, p, dO)
    want = oracle_backward(p.Q, p.K, p.V, dO, **p.options)
    # The standard pass keeps P in 16 bits, the tiled one O; the definition keeps neither.
    saved = 0.0 if version is standard_backward else storage_eps(p.Q.dtype)
    bound = bounds(p.Q, p.K, p.V, dO, p.options["mask"], saved)
    close(got, want, bound, p.Q.dtype)
    for x, old in zip((p.Q, p.K, p.V, dO), before, strict=True):
        assert np.array_equal(x, old)


@given(p=problems(dtypes=(np.float64,)))
@settings(max_examples=200, deadline=None)
def test_rows_that_see_no_key_and_keys_that_nobody_sees_have_zero_gradients(p):
    options, (Nq, Nk) = p.options, (len(p.Q), len(p.K))
    may_see = visible(Nq, Nk, options["causal"], options["align"])
    mask = options["mask"]
    if mask is not None:
        may_see = may_see & (mask if mask.dtype == bool else ~np.isneginf(mask.astype(float)))
    for version in VERSIONS:
        dQ, dK, dV = gradients(version, p, with_dO(p))
        assert np.all(dQ[~may_see.any(axis=1)] == 0)
        assert np.all(dK[~may_see.any(axis=0)] == 0) and np.all(dV[~may_see.any(axis=0)] == 0)


@given(p=problems(dtypes=(np.float64,)), Br=st.integers(1, 40), Bc=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_the_blocks_do_not_matter(p, Br, Bc):
    dO = with_dO(p)
    O, L = flash_attention_q_outer(p.Q, p.K, p.V, 8, 8, **p.options)
    one, other = (
        flash_backward(p.Q, p.K, p.V, O, L, dO, *blocks, **p.options)
        for blocks in ((p.Br, p.Bc), (Br, Bc))
    )
    for a, b, bound in zip(one, other, bounds(p.Q, p.K, p.V, dO, p.options["mask"]), strict=True):
        assert np.all(np.abs(a - b) <= 2 * bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("heads_kv", [6, 3, 2, 1])
def test_leading_axes_and_the_sum_over_a_group(dtype, heads_kv):
    rng = np.random.default_rng(7)
    Q, dO = rng.standard_normal((2, 2, 6, 17, 4)).astype(dtype)
    K, V = rng.standard_normal((2, 2, heads_kv, 23, 4)).astype(dtype)
    mask = rng.random((2, 1, 1, 23)) < 0.7
    options = {"causal": True, "mask": mask}
    O, L = flash_attention_q_outer(Q, K, V, 5, 7, **options)
    _, l, m = flash_attention(Q, K, V, 5, 7, **options)
    P = standard_attention(Q, K, V, **options)[2]
    results = (
        standard_backward(Q, K, V, dO, **options),
        unfused_backward(Q, K, V, P, dO, 5),
        flash_backward(Q, K, V, O, L, dO, 6, 4, **options),
        flash_backward_algorithm_4(Q, K, V, O, l, m, dO, 6, 4, **options),
    )
    group = 6 // heads_kv
    for b in range(2):
        for kv in range(heads_kv):
            want_K, want_V = np.zeros((2, 23, 4))
            bound_K = bound_V = 0.0
            for h in range(kv * group, (kv + 1) * group):
                head = (Q[b, h], K[b, kv], V[b, kv], dO[b, h])
                dQ, dK, dV = oracle_backward(*head, causal=True, mask=mask[b, 0])
                bQ, bK, bV = bounds(*head, saved=storage_eps(dtype))
                want_K, want_V = want_K + dK, want_V + dV
                bound_K, bound_V = bound_K + bK, bound_V + bV
                for result in results:
                    close([result[0][b, h]], [dQ], [bQ], dtype)
            for result in results:
                close([x[b, kv] for x in result[1:]], (want_K, want_V), (bound_K, bound_V), dtype)
    for result in results:
        assert [x.shape for x in result] == [Q.shape, K.shape, V.shape]


@pytest.mark.parametrize("align", ["lower-right", "upper-left"])
@pytest.mark.parametrize("Nq, Nk", [(0, 5), (5, 0), (0, 0), (1, 1), (9, 4), (4, 9)])
def test_odd_sizes(Nq, Nk, align):
    rng = np.random.default_rng(0)
    Q, dO = rng.standard_normal((2, Nq, 3))
    K, V = rng.standard_normal((2, Nk, 3))
    O, L = flash_attention_q_outer(Q, K, V, 4, 4, causal=True, align=align)
    got = flash_backward(Q, K, V, O, L, dO, 2, 3, causal=True, align=align)
    want = oracle_backward(Q, K, V, dO, causal=True, align=align)
    close(got, want, bounds(Q, K, V, dO), np.float64)


def test_float32_stays_float32_and_nothing_n_by_n_is_made():
    N, d = 1024, 16
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, N, d), dtype=np.float32)
    O, L = flash_attention_q_outer(Q, K, V, 64, 64, causal=True)
    tracemalloc.start()
    result = flash_backward(Q, K, V, O, L, dO, 64, 64, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(x.dtype == np.float32 for x in result)
    assert peak < N * N * 4 / 4
    assert all(x.dtype == np.float32 for x in standard_backward(Q, K, V, dO))


def test_no_floating_point_fault_is_raised_or_left():
    x = np.ones((6, 2))
    Q, K = x * 100, np.linspace(-100, 100, 6)[:, None] * x
    with np.errstate(all="raise"):
        O, L = flash_attention_q_outer(Q, K, x, 2, 2, causal=True)
        flash_backward(Q, K, x, O, L, x, 2, 2, causal=True)
        standard_backward(Q, K, x, x, causal=True)
    big = np.full((4, 4), 300, np.float16)
    V = np.arange(16, dtype=np.float16).reshape(4, 4) * 100
    K = np.arange(16, dtype=np.float16)[::-1].reshape(4, 4)
    dQ, _, dV = standard_backward(K, K, V, big)
    assert dQ.dtype == dV.dtype == np.float16  # a value beyond 65,504 is inf there: no warning


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_rows_of_dS_add_up_to_zero(seed):
    """So a shift of a whole row of K.Q changes nothing: with equal keys, dQ is zero."""
    rng = np.random.default_rng(seed)
    Q, V, dO = rng.standard_normal((3, 9, 4))
    K = np.ones((9, 4)) * rng.standard_normal()
    O, L = flash_attention_q_outer(Q, K, V, 4, 4)
    dQ = flash_backward(Q, K, V, O, L, dO, 4, 4)[0]
    assert np.all(np.abs(dQ) <= bounds(Q, K, V, dO)[0])


# ------------------------------------------------------------------ torch


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [6, 2])
def test_torch_autograd_agrees(causal, heads_kv):
    torch = pytest.importorskip("torch", reason="needs torch")
    rng = np.random.default_rng(0)
    Q, dO = rng.standard_normal((2, 2, 6, 21, 8))
    K, V = rng.standard_normal((2, 2, heads_kv, 21, 8))
    leaves = [torch.tensor(x, requires_grad=True) for x in (Q, K, V)]
    wide = [x.repeat_interleave(6 // heads_kv, dim=1) for x in leaves[1:]]
    out = torch.nn.functional.scaled_dot_product_attention(leaves[0], *wide, is_causal=causal)
    out.backward(torch.tensor(dO))
    O, L = flash_attention_q_outer(Q, K, V, 8, 8, causal=causal)
    got = flash_backward(Q, K, V, O, L, dO, 8, 4, causal=causal)
    for leaf, g in zip(leaves, got, strict=True):
        assert np.abs(leaf.grad.numpy() - g).max() < 1e-12


# ------------------------------------------------------------------ counts


@given(p=problems())
@settings(max_examples=300, deadline=None)
def test_counts_equal_closed_forms(p):
    (Nq, d), Nk, dO = p.Q.shape, len(p.K), with_dO(p)
    sizes = {k: v for k, v in p.options.items() if k != "mask"} | {"Nk": Nk}
    expected = {
        unfused_backward: standard_backward_traffic(Nq, d, Nk=Nk),
        flash_backward: flash_backward_traffic(Nq, d, p.Br, p.Bc, **sizes),
        flash_backward_algorithm_4: flash_backward_traffic(
            Nq, d, p.Br, p.Bc, **sizes, variant="Algorithm 4"
        ),
    }
    may_see = visible(Nq, Nk, p.options["causal"], p.options["align"])
    starts = [(r, c) for r in range(0, Nq, p.Br) for c in range(0, Nk, p.Bc)]
    tiles = [may_see[r : r + p.Br, c : c + p.Bc] for r, c in starts]
    scores = sum(tile.size for tile in tiles if tile.any())
    for version, closed_form in expected.items():
        hbm = HBM()
        gradients(version, p, dO, hbm)
        assert hbm.reads + hbm.writes - hbm.reads_by["mask"] == closed_form
        flops = 8 * Nq * Nk * d if version is unfused_backward else 10 * d * scores
        assert hbm.matmul_flops == flops


def test_what_crosses_how_often():
    N, d, Br, Bc = 60, 4, 8, 16  # Tc = 4
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, N, d))
    O, L = flash_attention_q_outer(Q, K, V, Br, Bc)
    hbm = HBM()
    flash_backward(Q, K, V, O, L, dO, Br, Bc, hbm=hbm)
    Nd = N * d
    assert hbm.reads_by == {"K": Nd, "V": Nd, "O": Nd, "dO": 5 * Nd, "Q": 4 * Nd, "dQ": 4 * Nd,
                            "L": 4 * N, "D": 4 * N}  # fmt: skip
    assert hbm.writes_by == {"D": N, "dQ": 4 * Nd, "dK": Nd, "dV": Nd}
    hbm = HBM()
    unfused_backward(Q, K, V, standard_attention(Q, K, V)[2], dO, Br, hbm=hbm)
    assert hbm.reads_by == {"P": 2 * N * N, "dP": N * N, "dS": 2 * N * N, "dO": 2 * Nd, "V": Nd,
                            "K": Nd, "Q": Nd}  # fmt: skip
    assert hbm.writes_by == {"dP": N * N, "dS": N * N, "dQ": Nd, "dK": Nd, "dV": Nd}


def test_worked_numbers():
    def algorithm_4(N, Bc):
        return flash_backward_traffic(N, 64, 64, Bc, variant="Algorithm 4")

    assert standard_backward_traffic(4096, 64) == 119_537_664 == 7 * 4096**2 + 8 * 4096 * 64
    assert algorithm_4(4096, 196) == 28_745_728
    assert round(119_537_664 / 28_745_728, 2) == 4.16
    assert flash_backward_traffic(4096, 64, 128, 128) == 35_393_536
    assert standard_backward_traffic(1024, 64) == 7_864_320
    assert (algorithm_4(1024, 196), algorithm_4(1024, 384)) == (2_240_512, 1_251_328)
    N, d, B = 4096, 64, 128  # causal, B | N: half of the tiles and half of the diagonal
    assert flash_backward_traffic(N, d, B, B, True) == (
        6 * N * d + N + (4 * d + 2) * N * (N // B + 1) // 2
    )


def test_a_long_sequence_takes_no_time():
    N = 10**9
    want = 6 * N * 64 + N + math.ceil(N / 196) * (4 * 64 + 2) * N
    assert flash_backward_traffic(N, 64, 64, 196) == want


@given(p=problems(masks=False))
@settings(max_examples=100, deadline=None)
def test_peak_on_chip(p):
    (Nq, d), Nk = p.Q.shape, len(p.K)
    if not Nq or not Nk or p.options["causal"]:
        return
    Br, Bc = min(p.Br, Nq), min(p.Bc, Nk)
    hbm = HBM()
    gradients(flash_backward, p, with_dO(p), hbm)
    assert hbm.peak_on_chip == backward_tile_elements(Br, Bc, d)
    assert hbm.peak_tiles["S"] == hbm.peak_tiles["dP"] == Br * Bc
    hbm = HBM()
    gradients(flash_backward_algorithm_4, p, with_dO(p), hbm)  # O as well, and l, m, D
    assert hbm.peak_on_chip == backward_tile_elements(Br, Bc, d) + Br * d + Br


def test_budget_says_by_how_much():
    x = np.zeros((200, 16))
    O, L = flash_attention_q_outer(x, x, x, 64, 64)
    need = backward_tile_elements(32, 64, 16)
    fits = HBM(budget=need)
    flash_backward(x, x, x, O, L, x, 32, 64, hbm=fits)
    assert fits.peak_on_chip == need
    with pytest.raises(OnChipOverflow, match="1 too many"):
        flash_backward(x, x, x, O, L, x, 32, 64, hbm=HBM(budget=need - 1))


def test_heads_add_up_in_the_count():
    rng = np.random.default_rng(0)
    Q, dO = rng.standard_normal((2, 2, 6, 20, 4))
    K, V = rng.standard_normal((2, 2, 2, 20, 4))
    O, L = flash_attention_q_outer(Q, K, V, 8, 8)
    hbm = HBM()
    flash_backward(Q, K, V, O, L, dO, 8, 8, hbm=hbm)
    assert hbm.reads + hbm.writes == 2 * 6 * flash_backward_traffic(20, 4, 8, 8)


# ------------------------------------------------------------------ bad input

A, B, ROW = np.zeros((6, 4)), np.zeros((8, 4)), np.zeros(6)
GOOD = {"Q": A, "K": B, "V": B, "O": A, "L": ROW, "l": ROW, "m": ROW, "dO": A,
        "P": np.zeros((6, 8)), "Br": 4, "Bc": 4}  # fmt: skip
TAKES = {
    standard_backward: ("Q", "K", "V", "dO"),
    unfused_backward: ("Q", "K", "V", "P", "dO", "Br"),
    flash_backward: ("Q", "K", "V", "O", "L", "dO", "Br", "Bc"),
    flash_backward_algorithm_4: ("Q", "K", "V", "O", "l", "m", "dO", "Br", "Bc"),
}
BAD = [
    ("Q", [[1.0]], TypeError, "Q must be a numpy array, got list"),
    ("K", B[:, :3], ValueError, r"K has shape \(8, 3\); accepted: last axis d = 4"),
    ("V", B + np.nan, ValueError, "V has NaN or infinity"),
    ("dO", None, TypeError, "dO must be a numpy array, got NoneType"),
    ("dO", A.astype(int), TypeError, "dO has dtype int64; accepted: float16, bfloat16"),
    ("dO", A.astype(np.float32), TypeError, "dO has dtype float32; accepted: float64, the dtype"),
    ("dO", A[:5], ValueError, r"dO has shape \(5, 4\); accepted: \(6, 4\), for Q \(6, 4\)"),
    ("dO", A[None], ValueError, r"dO has shape \(1, 6, 4\); accepted: \(6, 4\)"),
    ("dO", A + np.inf, ValueError, "dO has NaN or infinity; accepted: finite numbers$"),
    ("dO", np.ma.array(A), TypeError, "dO must be a numpy array, got MaskedArray"),
    ("O", B, ValueError, r"O has shape \(8, 4\); accepted: \(6, 4\)"),
    ("O", A * np.nan, ValueError, "O has NaN or infinity"),
    ("P", np.zeros((8, 6)), ValueError, r"P has shape \(8, 6\); accepted: \(6, 8\)"),
    ("L", ROW[:, None], ValueError, r"L has shape \(6, 1\); accepted: \(6,\)"),
    ("L", ROW.astype(np.float16), TypeError, "L has dtype float16; accepted: float64, as the for"),
    ("L", ROW + np.inf, ValueError, "L has NaN or infinity; accepted: finite numbers, or -inf"),
    ("m", ROW * np.nan, ValueError, "m has NaN or infinity; accepted: finite numbers, or -inf"),
    ("l", ROW - np.inf, ValueError, "l has NaN or infinity; accepted: finite numbers$"),
    ("l", ROW - 1, ValueError, "l has negative numbers"),
    ("Br", 0, ValueError, "Br is 0; accepted: 1 or more"),
    ("Bc", 4.0, TypeError, "Bc must be an int, got float 4.0"),
    ("causal", 1, TypeError, "causal must be True or False, got int 1"),
    ("align", "left", ValueError, "align is 'left'; accepted: 'lower-right'"),
    ("mask", np.ones((8, 6), bool), ValueError, r"mask has shape \(8, 6\)"),
    ("mask", np.ones((6, 8), int), TypeError, "mask has dtype int64"),
    ("hbm", {}, TypeError, "hbm must be an HBM or None, got dict"),
    ("heads", 4, TypeError, r"_backward.*\(\) got wrong arguments: .*'heads'"),
]


@pytest.mark.parametrize("version", VERSIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name, value, kind, message", BAD)
def test_refuses(version, name, value, kind, message):
    good = {key: GOOD[key] for key in TAKES[version]}
    version(**good)
    if name in GOOD and name not in good:
        return
    if name not in inspect.signature(version).parameters:
        message = f"{version.__name__}.*got wrong arguments: .*'{name}'"
        kind = TypeError
    with pytest.raises(kind, match=message):
        version(**good | {name: value})


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: standard_backward(A, B, B), TypeError, r"standard_backward\(\) got wrong"),
        (lambda: standard_backward(A[None][:0], B[None], B[None], A), ValueError, "leading axes"),
        (lambda: standard_backward_traffic(-1, 4), ValueError, "N is -1; accepted: 0 or more"),
        (lambda: standard_backward_traffic(4, 0), ValueError, "d is 0"),
        (lambda: flash_backward_traffic(4, 4, 0, 4), ValueError, "Br is 0"),
        (lambda: flash_backward_traffic(4, 4, 4, 4, 1), TypeError, "causal must be True"),
        (lambda: flash_backward_traffic(4, 4, 4, 4, align="x"), ValueError, "align is 'x'"),
        (lambda: flash_backward_traffic(4, 4, 4, 4, variant="4"), ValueError, "variant is '4'"),
        (lambda: backward_tile_elements(4, 4, 0), ValueError, "d is 0"),
    ],
)
def test_the_others_refuse(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_every_float_is_accepted_and_kept():
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        x = np.ones((3, 2), dtype)
        O, L = flash_attention_q_outer(x, x, x, 2, 2)
        result = flash_backward(x, x, x, O, L, x, np.int64(2), np.int32(2), causal=np.False_)
        assert all(g.dtype == dtype for g in result)
        assert np.allclose(result[2].astype(float), 1, rtol=1e-6)
    swapped = np.ones((3, 2)).astype(">f8")
    O, L = flash_attention_q_outer(swapped, swapped, swapped, 2, 2)
    assert np.allclose(flash_backward(swapped, swapped, swapped, O, L, swapped, 2, 2)[2], 1)
