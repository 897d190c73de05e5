"""Attention problems for the tests, and an oracle that shares no code with the library.

The oracle works in float64 with scipy's softmax and logsumexp. The error allowed to an answer is
not a round number: it is a bound on what rounding at its precision can do to this input.
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from scipy import special

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def compute_eps(dtype):
    return float(np.finfo(np.float32 if np.dtype(dtype).itemsize == 2 else dtype).eps)


def storage_eps(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


def visible(Nq, Nk, causal, align):
    """Which keys a query may see, from the definition, one pair at a time."""
    shift = Nk - Nq if align == "lower-right" else 0
    return np.array(
        [[not causal or j <= i + shift for j in range(Nk)] for i in range(Nq)], dtype=bool
    ).reshape(Nq, Nk)


def oracle(Q, K, V, *, causal=False, mask=None, align="lower-right"):
    """O, P, L of one head in float64; a row that sees no key has O = 0, P = 0, L = -inf."""
    Q, K, V = (np.asarray(x, dtype=np.float64) for x in (Q, K, V))
    (Nq, d), Nk = Q.shape, K.shape[0]
    S = np.einsum("id,jd->ij", Q, K) / math.sqrt(d)
    may_see = visible(Nq, Nk, causal, align)
    if mask is not None and mask.dtype == bool:
        may_see = may_see & mask
    elif mask is not None:
        S = S + mask.astype(np.float64)
    S = np.where(may_see, S, -np.inf)
    seen = ~np.isneginf(S).all(axis=1)
    P, L = np.zeros((Nq, Nk)), np.full(Nq, -np.inf)
    if seen.any():
        P[seen] = special.softmax(S[seen], axis=1)
        L[seen] = special.logsumexp(S[seen], axis=1)
    return P @ V, P, L


def bounds(Q, K, V, mask=None):
    """How far O and L may be off by rounding alone, for inputs of this dtype (first order, x2)."""
    eps, store = compute_eps(Q.dtype), storage_eps(Q.dtype)
    Q, K, V = (np.abs(np.asarray(x, dtype=np.float64)) for x in (Q, K, V))
    (_, d), Nk = Q.shape, K.shape[0]
    size = (Q @ K.T / math.sqrt(d)).max(initial=0.0)
    if mask is not None and mask.dtype != bool:
        size += np.abs(mask[np.isfinite(mask)].astype(np.float64)).max(initial=0.0)
    dS = (d + 4) * eps * size  # a dot product of d terms, the scale, the mask, minus the maximum
    relative = 2 * dS + (2 * Nk + 16) * eps  # of P, and of a sum over Nk terms of it
    largest_V = V.max(initial=0.0)
    dO = 2 * relative * largest_V + (store * largest_V if store > eps else 0)
    return dO + 1e-300, 2 * (relative + eps * (size + math.log(Nk + 1)))


@dataclass
class Problem:
    """One head, and the options of a call."""

    Q: np.ndarray
    K: np.ndarray
    V: np.ndarray
    Br: int
    Bc: int
    options: dict

    def __repr__(self):
        mask = self.options["mask"]
        shown = {k: v for k, v in self.options.items() if k != "mask"}
        return (
            f"Q{self.Q.shape} K{self.K.shape} {self.Q.dtype.name} Br={self.Br} Bc={self.Bc} "
            f"{shown} mask={None if mask is None else (mask.shape, mask.dtype.name)}"
        )


def as_view(x, kind):
    """The same numbers behind other strides."""
    if kind == "transposed":
        return np.ascontiguousarray(x.T).T
    if kind == "reversed":
        return np.ascontiguousarray(x[::-1])[::-1]
    if kind == "strided":
        wide = np.zeros((x.shape[0] * 2, x.shape[1] * 3), x.dtype)
        wide[::2, ::3] = x
        return wide[::2, ::3]
    return x


@st.composite
def problems(draw, dtypes=DTYPES, masks=True):
    """Problems of every size and kind: ragged, empty, causal, masked, strided, extreme."""
    Nq, Nk = draw(st.integers(0, 33)), draw(st.integers(0, 33))
    d = draw(st.sampled_from([1, 2, 3, 5, 8, 16]))
    Br, Bc = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(dtypes))
    Q, K, V = (rng.standard_normal((n, d)) for n in (Nq, Nk, Nk))
    scores = draw(st.sampled_from(["plain", "huge", "rising", "falling", "equal", "negative"]))
    if scores == "huge":  # |S| about 1e4
        Q, K = Q * 100, K * 100
    elif scores in ("rising", "falling"):  # the maximum moves by e^20 and more along the row
        ramp = np.linspace(0, 60, Nk)[:, None] if Nk else np.zeros((0, 1))
        Q, K = np.ones_like(Q), (ramp if scores == "rising" else -ramp) + 0.1 * K
    elif scores == "equal":
        K = np.ones_like(K)
    elif scores == "negative":
        Q, K = np.abs(Q) * 50, -np.abs(K) * 50
    kind = draw(st.sampled_from(["contiguous", "transposed", "reversed", "strided"]))
    Q, K, V = (as_view(x.astype(dtype), kind) for x in (Q, K, V))
    mask = None
    which = draw(st.sampled_from(["none", "bool", "additive"])) if masks else "none"
    if which != "none":
        rows, cols = draw(st.sampled_from([(Nq, Nk), (1, Nk), (Nq, 1), (1, 1)]))
        keep = rng.random((rows, cols)) < draw(st.sampled_from([0.0, 0.2, 0.8, 1.0]))
        additive = np.where(keep, rng.standard_normal((rows, cols)), -np.inf)
        mask = keep if which == "bool" else additive.astype(draw(st.sampled_from(dtypes)))
    options = {
        "causal": draw(st.booleans()),
        "align": draw(st.sampled_from(["lower-right", "upper-left"])),
        "mask": mask,
    }
    return Problem(Q, K, V, Br, Bc, options)
