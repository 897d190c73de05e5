"""Every version of attention in the library against an independent float64 oracle."""

import math

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
