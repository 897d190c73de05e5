"""Softmax-weighted sums, one piece at a time: the state (m, l, O).

After some keys, a row of attention is known up to three things:
    m   the largest score so far
    l   the sum of exp(score - m) so far
    O   the sum of exp(score - m) * v so far, not yet divided by l
`update` takes in more keys, `merge` joins two states, `finish` divides. Every tiled, split or
paged attention in this library is these in some order.

Sources: Milakov and Gimelshein, arXiv 1805.02867, Algorithm 3 (m and l) and section 3.1 (the
merge); FlashAttention-2, arXiv 2307.08691, section 3.1.1 (O un-scaled, one division at the end).
"""

import math
from typing import NamedTuple

import numpy as np

from attention_lib.inputs import check_bool, check_float_array, check_positive_int
from attention_lib.reference import finite_or_zero


class State(NamedTuple):
    """Attention over the keys seen so far: m and l are (..., rows), O is (..., rows, d)."""

    m: np.ndarray
    l: np.ndarray
    O: np.ndarray


def start(rows, d, dtype=np.float64):
    """The state before any key: m = -inf, l = 0, O = 0. It is the identity of `merge`."""
    rows, d = check_positive_int("rows", rows, 0), check_positive_int("d", d, 0)
    if dtype not in (np.float32, np.float64, "float32", "float64"):
        raise TypeError(
            f"dtype is {getattr(dtype, '__name__', dtype)!r}; accepted: float32 or float64"
        )
    return State(np.full(rows, -math.inf, dtype), np.zeros(rows, dtype), np.zeros((rows, d), dtype))


def update(state, S, V, *, overwrite=False, matmul=np.matmul):
    """Take in one chunk of keys.

    S: (..., rows, chunk), its scores, -inf where hidden. V: (..., chunk, d), its values.
    overwrite: allow S to become the numerators exp(S - m), and state.O to be added to in place, as
    a kernel's registers are. matmul: the product to use (a counting one, say).
    Returns the new State. Unless you allow overwrite, state and S stay as they were.
    FlashAttention-2 (arXiv 2307.08691), Algorithm 1, lines 9 and 10. In print, line 10 divides O
    by the rescale factor; that is a misprint.
    """
    _check_state("state", state)
    check_float_array("S", S, ndim=2)
    check_float_array("V", V, ndim=2)
    check_bool("overwrite", overwrite)
    m, l, O = state
    for name, x in (("S", S), ("V", V)):
        if x.dtype != O.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype.name}; accepted: {O.dtype.name}, the dtype of state.O"
            )
    if S.shape[:-1] != m.shape:
        raise ValueError(f"S has shape {S.shape}; accepted: {m.shape} rows, then the chunk")
    if V.shape[-2:] != (S.shape[-1], O.shape[-1]):
        raise ValueError(
            f"V has shape {V.shape}; accepted: {S.shape[-1]} rows (the chunk of S) "
            f"and {O.shape[-1]} columns (the width of O)"
        )
    m_new = np.maximum(m, S.max(axis=-1, initial=-math.inf))
    m_safe = finite_or_zero(m_new)
    with np.errstate(under="ignore"):  # far below the maximum exp is 0, as it should be
        P = np.subtract(S, m_safe[..., None], out=S if overwrite else None)
        np.exp(P, out=P)
        alpha = np.exp(m - m_safe)  # 1 where the maximum stayed, less where it rose
        l = alpha * l + P.sum(axis=-1)
        O = np.multiply(alpha[..., None], O, out=O if overwrite else None)
        O += matmul(P, V)
    return State(m_new, l, O)


def merge(a, b):
    """The state over the keys of a and of b together. Associative and commutative, up to rounding.

    Both are brought to the common maximum, then added.
    Milakov and Gimelshein (arXiv 1805.02867), equation 4, with O treated as l is.
    """
    _check_state("a", a)
    _check_state("b", b)
    if a.O.shape != b.O.shape:
        raise ValueError(f"b has O of shape {b.O.shape}; accepted: the shape of a.O, {a.O.shape}")
    if a.O.dtype != b.O.dtype:
        raise TypeError(f"b has dtype {b.O.dtype.name}; accepted: {a.O.dtype.name}, as a")
    m = np.maximum(a.m, b.m)
    m_safe = finite_or_zero(m)
    with np.errstate(under="ignore"):
        wa, wb = np.exp(a.m - m_safe), np.exp(b.m - m_safe)
        return State(m, wa * a.l + wb * b.l, wa[..., None] * a.O + wb[..., None] * b.O)


def finish(state):
    """Divide once: returns O (..., rows, d) and L = m + log(l) (..., rows).

    A row that has seen no key gives O = 0 and L = -inf.
    FlashAttention-2 (arXiv 2307.08691), Algorithm 1, lines 12 and 13.
    """
    _check_state("state", state)
    m, l, O = state
    l_safe = np.where(l == 0, np.ones_like(l), l)
    return O / l_safe[..., None], m + np.log(l_safe)


def _check_state(name, state):
    if isinstance(state, State):
        if any(not isinstance(x, np.ndarray) for x in state) or not (
            state.m.shape == state.l.shape == state.O.shape[:-1]
        ):
            raise ValueError(f"{name} has parts that do not fit: m and l are (..., rows), O adds d")
    else:
        raise TypeError(
            f"{name} must be a State (from start, update or merge), got {type(state).__name__}"
        )
