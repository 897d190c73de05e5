"""Every version of attention in the library against an independent float64 oracle."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from attention_lib import (
    flash_attention,
    flash_attention_q_outer,
    online,
    softmax,
    standard_attention,
    unfused_attention,
)
from tests.cases import DTYPES, bounds, oracle, problems, storage_eps


def run(version, p):
    """O and L of one version; L is None where a version does not give it."""
    if version is standard_attention:
        return version(p.Q, p.K, p.V, **p.options)[0], None
    if version is unfused_attention:
        return version(p.Q, p.K, p.V, p.Br, **p.options)[0], None
    if version is flash_attention_q_outer:
        return version(p.Q, p.K, p.V, p.Br, p.Bc, **p.options)
    O, l, m = version(p.Q, p.K, p.V, p.Br, p.Bc, **p.options)
    with np.errstate(divide="ignore"):
        return O, m + np.log(l)


VERSIONS = (standard_attention, unfused_attention, flash_attention, flash_attention_q_outer)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda f: f.__name__)
@given(p=problems())
@settings(max_examples=300, deadline=None)
def test_equals_the_oracle(version, p):
    before = [x.copy() for x in (p.Q, p.K, p.V)]
    O, L = run(version, p)
    O_true, _, L_true = oracle(p.Q, p.K, p.V, **p.options)
    dO, dL = bounds(p.Q, p.K, p.V, p.options["mask"])
    assert O.dtype == p.Q.dtype and O.shape == p.Q.shape
    assert np.all(np.abs(O.astype(np.float64) - O_true) <= dO)
    unseen = np.isneginf(L_true)
    assert np.all(O[unseen] == 0)  # exactly, and not NaN
    if L is not None:
        assert np.array_equal(np.isneginf(L), unseen)
        assert np.all(np.abs(L[~unseen] - L_true[~unseen]) <= dL)
    for x, old in zip((p.Q, p.K, p.V), before, strict=True):
        assert np.array_equal(x, old)  # the inputs are as they were


@given(p=problems())
@settings(max_examples=200, deadline=None)
def test_standard_and_unfused_return_the_same_S_and_P(p):
    O, S, P = standard_attention(p.Q, p.K, p.V, **p.options)
    _, S2, P2 = unfused_attention(p.Q, p.K, p.V, p.Br, **p.options)
    _, P_true, _ = oracle(p.Q, p.K, p.V, **p.options)
    assert S.dtype == P.dtype == S2.dtype == P2.dtype == p.Q.dtype
    assert np.array_equal(np.isneginf(S), np.isneginf(S2))
    relative, _ = bounds(p.Q, p.K, np.ones_like(p.V), p.options["mask"])
    for got in (P, P2):
        assert np.all(np.abs(got.astype(np.float64) - P_true) <= relative)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("heads_kv", [6, 3, 2, 1])
def test_leading_axes_and_grouped_heads(dtype, heads_kv):
    rng = np.random.default_rng(7)
    Q = rng.standard_normal((2, 6, 17, 4)).astype(dtype)
    K, V = (rng.standard_normal((2, heads_kv, 23, 4)).astype(dtype) for _ in range(2))
    mask = rng.random((2, 1, 1, 23)) < 0.7  # padding: one row of keys for each sequence
    O, L = flash_attention_q_outer(Q, K, V, 5, 7, causal=True, mask=mask)
    assert O.shape == Q.shape and L.shape == Q.shape[:-1]
    assert O.dtype == dtype and L.dtype == (np.float64 if dtype is np.float64 else np.float32)
    for b in range(2):
        for h in range(6):
            kv = h // (6 // heads_kv)
            O_true, _, _ = oracle(Q[b, h], K[b, kv], V[b, kv], causal=True, mask=mask[b, 0])
            dO, _ = bounds(Q[b, h], K[b, kv], V[b, kv])
            assert np.all(np.abs(O[b, h].astype(np.float64) - O_true) <= dO)
    others = (
        standard_attention(Q, K, V, causal=True, mask=mask)[0],
        flash_attention(Q, K, V, 5, 7, causal=True, mask=mask)[0],
        unfused_attention(Q, K, V, 5, causal=True, mask=mask)[0],
    )
    for other in others:
        assert np.all(np.abs(other.astype(float) - O.astype(float)) <= 2 * dO)


def test_float32_stays_float32_where_a_numpy_scalar_would_promote():
    x = np.ones((4, 64), np.float32)
    assert (x / np.sqrt(64)).dtype == np.float64  # the trap, under NumPy 2
    for version in VERSIONS:
        blocks = {"Br": 2, "Bc": 2} if "Bc" in version.__wrapped__.__code__.co_varnames else {}
        assert all(out.dtype == np.float32 for out in version(x, x, x, **blocks))


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(DTYPES),
    st.sampled_from([(7,), (3, 5), (2, 3, 4)]),
    st.sampled_from([1.0, 1e4]),
)
@settings(max_examples=200, deadline=None)
def test_softmax_against_scipy(seed, dtype, shape, size):
    x = (np.random.default_rng(seed).standard_normal(shape) * size).astype(dtype)
    for axis in range(-len(shape), len(shape)):
        got = softmax(x, axis)
        want = special.softmax(x.astype(np.float64), axis)
        eps = max(storage_eps(dtype), 2**-23 if np.dtype(dtype).itemsize < 8 else 2**-52)
        assert got.dtype == x.dtype
        assert np.all(np.abs(got.astype(np.float64) - want) <= (x.shape[axis] + 16) * eps)


def test_softmax_of_16_bit_numbers_is_summed_in_32_bits():
    x = np.zeros((1, 5000), np.float16)  # a 16-bit sum of ones stops growing at 2048
    assert np.all(softmax(x) == np.float16(1 / 5000))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda f: f.__name__)
def test_no_floating_point_fault_is_raised_or_left(version):
    x = np.ones((6, 2))
    Q, K = x * 100, np.linspace(-100, 100, 6)[:, None] * x  # exp underflows far from the maximum
    blocks = (2, 2) if version in (flash_attention, flash_attention_q_outer) else ()
    with np.errstate(all="raise"):
        version(Q, K, x, *blocks, causal=True, mask=np.eye(6, dtype=bool))
        softmax(K[:, 0] * 100)
        states = [whole(K[:, :1].T * 1e4, x), whole(K[:, :1].T, x)]
        online.finish(online.merge(*states))


@pytest.mark.parametrize("version", [standard_attention, unfused_attention])
def test_a_score_beyond_float16_is_inf_there_and_no_warning(version):
    Q = np.full((2, 4), 300, np.float16)
    O, S, P = version(Q, Q, Q)
    assert np.isinf(S).all() and np.all(P == 0.5) and np.all(O == 300)


def test_half_precision_is_kept_on_chip_in_float32_between_tiles():
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((3, 256, 16)).astype(np.float16)
    true, _, _ = oracle(Q, K, V)
    errors = [
        np.abs(O.astype(float) - true).max()
        for O in (standard_attention(Q, K, V)[0], flash_attention(Q, K, V, 16, 1)[0])
    ]
    assert errors[1] <= 1.1 * errors[0]  # 256 tiles, and only the last store rounds


def test_mask_of_a_wider_type_or_beyond_the_range():
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((3, 9, 4), dtype=np.float32)
    wide = np.where(rng.random((9, 9)) < 0.5, -1e300, rng.standard_normal((9, 9)))
    wide[4] = np.finfo(np.float64).min  # this row sees nothing
    narrow = np.where(wide < -1e38, -np.inf, wide).astype(np.float32)
    O, _, _ = flash_attention(Q, K, V, 4, 4, mask=wide)
    assert O.dtype == np.float32 and np.all(O[4] == 0)
    assert np.array_equal(O, flash_attention(Q, K, V, 4, 4, mask=narrow)[0])


def test_masks_of_one_axis_or_none():
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((3, 9, 4))
    keys = rng.random(9) < 0.5
    for mask, same_as in ((keys, np.tile(keys, (9, 1))), (np.array(True), None)):
        want, _, _ = oracle(Q, K, V, mask=same_as)
        for x in (Q, Q[None]):
            got = flash_attention(x, K[None] if x.ndim == 3 else K, V[None] if x.ndim == 3 else V,
                                  4, 4, mask=mask)[0]  # fmt: skip
            assert np.allclose(got, want, rtol=1e-13, atol=1e-13)


def test_other_byte_orders():
    x = np.random.default_rng(0).standard_normal((5, 3))
    swapped = x.astype(x.dtype.newbyteorder())
    for version in VERSIONS:
        blocks = (2, 2) if version in (flash_attention, flash_attention_q_outer) else ()
        for a, b in zip(version(swapped, x, swapped, *blocks), version(x, x, x, *blocks),
                        strict=True):  # fmt: skip
            assert np.array_equal(a, b)


def test_a_hidden_score_stays_hidden_even_where_it_overflows():
    Q, K, V = np.full((2, 1), 1e25, np.float32), np.full((3, 1), 1e25, np.float32), np.eye(3, 1)
    K[:2] = 1
    hide_last = np.array([[0, 0, -np.inf]])
    with np.errstate(over="ignore"):
        O = standard_attention(Q, K, V.astype(np.float32), mask=hide_last)[0]
    assert np.all(O == 0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_of_the_q_outer_order(causal):
    """1/200 of standard attention's at N = 8192, whose two N x N arrays take 512 MiB."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, 8192, 64), dtype=np.float32)
    tracemalloc.start()
    flash_attention_q_outer(Q, K, V, 256, 256, causal=causal)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= (2 * 8192 * 8192 + 8192 * 64) * 4 / 200


def test_memory_with_a_mask_is_no_copy_of_it():
    Q, K, V = np.random.default_rng(0).standard_normal((3, 2048, 16), dtype=np.float32)
    mask = np.zeros((2048, 2048), np.float32)
    for loop in (flash_attention, flash_attention_q_outer):
        tracemalloc.start()
        loop(Q, K, V, 128, 128, mask=mask)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < mask.nbytes / 10


def test_the_wrapper_keeps_name_and_documentation():
    for version in VERSIONS:
        assert version.__name__.endswith(("attention", "q_outer")) and "Returns" in version.__doc__


def test_a_batched_state():
    rng = np.random.default_rng(0)
    S, V = rng.standard_normal((2, 3, 7)), rng.standard_normal((2, 7, 5))
    state = online.State(np.full((2, 3), -np.inf), np.zeros((2, 3)), np.zeros((2, 3, 5)))
    O, L = online.finish(online.update(online.update(state, S[..., :4], V[:, :4]), S[..., 4:],
                                       V[:, 4:]))  # fmt: skip
    assert np.allclose(O, special.softmax(S, axis=-1) @ V, atol=1e-14)
    assert np.allclose(L, special.logsumexp(S, axis=-1), atol=1e-14)


def test_softmax_of_a_row_of_minus_infinity_is_zero():
    x = np.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    assert np.array_equal(softmax(x), [[0, 0], [1, 0]])
    assert softmax(np.zeros((3, 0))).shape == (3, 0)


# ------------------------------------------------------------------ the online state


def whole(S, V):
    return online.update(online.start(S.shape[0], V.shape[1]), S, V)


def same(a, b, scale):
    return all(
        np.allclose(x, y, rtol=1e-13, atol=1e-13 * scale, equal_nan=False)
        for x, y in zip(online.finish(a), online.finish(b), strict=True)
    )


@st.composite
def scores_and_values(draw):
    rows, keys, d = draw(st.integers(1, 6)), draw(st.integers(0, 24)), draw(st.integers(0, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    S = rng.standard_normal((rows, keys)) * draw(st.sampled_from([1.0, 1e4]))
    S[rng.random((rows, keys)) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = -np.inf
    return (
        S,
        rng.standard_normal((keys, d)),
        sorted(draw(st.lists(st.integers(0, keys), max_size=4))),
    )


@given(scores_and_values())
@settings(max_examples=300, deadline=None)
def test_any_cut_into_chunks_gives_the_same_answer_and_scipy_agrees(case):
    S, V, cuts = case
    edges = [0, *cuts, S.shape[1]]
    state = online.start(S.shape[0], V.shape[1])
    parts = []
    for a, b in zip(edges, edges[1:], strict=False):
        chunk = S[:, a:b].copy()
        state = online.update(state, S[:, a:b], V[a:b])
        assert np.array_equal(S[:, a:b], chunk)
        parts.append(whole(S[:, a:b], V[a:b]))
    merged = parts[0]
    for part in parts[1:]:
        merged = online.merge(merged, part)
    right = parts[-1]
    for part in reversed(parts[:-1]):
        right = online.merge(part, right)
    for other in (merged, right, whole(S, V)):
        assert same(state, other, 1.0 + np.abs(S[np.isfinite(S)]).max(initial=0))
    O, L = online.finish(state)
    seen = ~np.isneginf(S).all(axis=1)
    assert np.array_equal(~np.isneginf(L), seen) and np.all(O[~seen] == 0)
    if seen.any():
        assert np.allclose(L[seen], special.logsumexp(S[seen], axis=1), rtol=1e-13, atol=1e-13)
        assert np.allclose(O[seen], special.softmax(S[seen], axis=1) @ V, rtol=1e-12, atol=1e-12)


def test_start_is_the_identity_of_merge_and_order_does_not_matter():
    rng = np.random.default_rng(1)
    S, V = rng.standard_normal((4, 9)), rng.standard_normal((9, 3))
    a, b, none = whole(S[:, :4], V[:4]), whole(S[:, 4:], V[4:]), online.start(4, 3)
    for x, y in ((online.merge(a, none), a), (online.merge(none, a), a)):
        assert all(np.array_equal(p, q) for p, q in zip(x, y, strict=True))
    forward, backward = online.merge(a, b), online.merge(b, a)
    assert all(np.array_equal(p, q) for p, q in zip(forward, backward, strict=True))


def test_overwrite_only_when_allowed():
    rng = np.random.default_rng(2)
    S, V = rng.standard_normal((4, 9)), rng.standard_normal((9, 3))
    state = whole(S, V)
    old = [x.copy() for x in (*state, S)]
    online.update(state, S, V)
    assert all(np.array_equal(a, b) for a, b in zip((*state, S), old, strict=True))
    after = online.update(state, S, V, overwrite=True)
    assert after.O is state.O and not np.array_equal(S, old[3])


def test_L_rebuilds_P_without_a_division():
    rng = np.random.default_rng(3)
    Q, K, V = (rng.standard_normal((50, 8)) for _ in range(3))
    _, S, P = standard_attention(Q, K, V, causal=True)
    _, L = flash_attention_q_outer(Q, K, V, 16, 8, causal=True)
    assert np.abs(np.exp(S - L[:, None]) - P).max() < 50 * np.finfo(float).eps


def test_the_two_orders_agree_on_L():
    rng = np.random.default_rng(4)
    Q, K, V = (rng.standard_normal((50, 8)) for _ in range(3))
    _, l, m = flash_attention(Q, K, V, 7, 9)
    _, L = flash_attention_q_outer(Q, K, V, 16, 8)
    assert np.allclose(m + np.log(l), L, rtol=1e-14, atol=1e-14)
    assert math.isclose(L[0], special.logsumexp(Q[0] @ K.T / math.sqrt(8)), rel_tol=1e-14)
