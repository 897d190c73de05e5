"""The definition: softmax, attention as three steps on whole matrices, and its gradients.

    S = Q K^T / sqrt(d)      P = softmax(S), row by row      O = P V

With dO the gradient of a loss with respect to O:

    dV = P^T dO      dP = dO V^T      dS = P * (dP - D)      dQ = dS K / sqrt(d)
                                                             dK = dS^T Q / sqrt(d)
    D = rowsum(P * dP), one number a row

S and P are (Nq, Nk). This file is what every other version must equal, so it is as plain as the
formula (FlashAttention, arXiv 2205.14135, section 2.2, Algorithm 0, and Appendix B.2, with the
scale written out).
"""

import math

import numpy as np

from attention_lib.heads import for_each_head, for_each_head_backward
from attention_lib.inputs import check_float_array, check_int, compute_dtype


def finite_or_zero(m):
    """m with -inf replaced by 0: -inf - (-inf) is NaN, but exp(-inf - 0) is the 0 we want."""
    return np.where(np.isneginf(m), np.zeros_like(m), m)


def softmax(x, axis=-1):
    """exp(x) / sum(exp(x)) along an axis, computed from x - max(x) so that exp cannot overflow.

    x: any shape, float16, bfloat16, float32 or float64; the result has its shape and dtype.
    A slice that is -inf everywhere gives zeros (no weight anywhere), not NaN.
    Raises TypeError for other types, ValueError for an axis that x does not have.
    """
    check_float_array("x", x)
    axis = check_int("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis is {axis}; accepted: {-x.ndim} to {x.ndim - 1} for shape {x.shape}")
    with np.errstate(under="ignore"):
        z = x.astype(compute_dtype(x.dtype), copy=False)
        e = z - finite_or_zero(z.max(axis=axis, keepdims=True, initial=-math.inf))
        np.exp(e, out=e)
        l = e.sum(axis=axis, keepdims=True)
        e /= np.where(l == 0, np.ones_like(l), l)
        return e.astype(x.dtype, copy=False)


def causal_offset(Nq, Nk, align):
    """How far the diagonal is shifted: query i sees key j when j <= i + offset.

    "lower-right" puts the last query on the last key (flash-attn from 2.1; torch's
    causal_lower_right). "upper-left" puts the first query on the first key (torch's
    scaled_dot_product_attention with is_causal=True). With Nq = Nk they are the same.
    """
    return Nk - Nq if align == "lower-right" else 0


def hide(S, first_row, first_col, offset, mask_tile):
    """Set to -inf, in place, the scores that a query may not see; S is any tile of the scores.

    offset: the causal shift, or None for no causal mask. mask_tile: boolean (True: may see) or
    additive, broadcastable to S, or None.
    """
    if offset is not None:
        visible = np.tri(*S.shape, first_row + offset - first_col, dtype=bool)  # on and below
        np.copyto(S, -math.inf, where=~visible)
    if mask_tile is not None and mask_tile.dtype == bool:
        np.copyto(S, -math.inf, where=~mask_tile)
    elif mask_tile is not None:
        with np.errstate(over="ignore"):  # below the range of S: hidden
            bias = mask_tile.astype(S.dtype, copy=False)
        np.copyto(S, -math.inf, where=np.isneginf(bias))  # first: inf + -inf would be NaN
        S += bias


@for_each_head
def standard_attention(Q, K, V, *, causal=False, mask=None, align="lower-right"):
    """Attention by its definition; S and P are really made.

    Q: (..., Nq, d); K, V: (..., Nk, d), with the leading axes of Q, or fewer heads (GQA).
    causal: query i sees key j when j <= i + Nk - Nq; align="upper-left" drops the shift.
    mask: boolean (True: may see) or additive float, broadcastable to (..., Nq, Nk).
    Returns O (..., Nq, d), S and P (..., Nq, Nk), in the dtype of Q. A row that sees no key
    gives O = 0. 16-bit inputs are computed in float32.
    Raises TypeError and ValueError that name the argument.
    """
    dtype = compute_dtype(Q.dtype)
    Nq, d = Q.shape
    S = Q.astype(dtype, copy=False) @ K.T.astype(dtype, copy=False)
    S *= 1 / math.sqrt(d)  # math.sqrt: S * np.sqrt(d) would turn float32 into float64
    hide(S, 0, 0, causal_offset(Nq, K.shape[0], align) if causal else None, mask)
    P = softmax(S)
    O = P @ V.astype(dtype, copy=False)
    with np.errstate(over="ignore"):  # a score beyond float16's 65,504 is inf there
        return tuple(x.astype(Q.dtype, copy=False) for x in (O, S, P))


@for_each_head_backward
def standard_backward(Q, K, V, dO, *, causal=False, mask=None, align="lower-right"):
    """The gradients by their definition; P, dP and dS are really made.

    Q, K, V, causal, mask, align: as in standard_attention. dO: the gradient of the loss with
    respect to O, (..., Nq, d) in the dtype of Q.
    Returns dQ (..., Nq, d), dK and dV (shape of K), in the dtype of Q. A row that sees no key has
    a gradient of zero, and adds nothing to dK and dV. A mask is taken as fixed: no gradient for it.
    Raises TypeError and ValueError that name the argument.
    """
    scale, dtype = 1 / math.sqrt(Q.shape[1]), compute_dtype(Q.dtype)
    Q, K, V, dO = (x.astype(dtype, copy=False) for x in (Q, K, V, dO))
    P = standard_attention(Q, K, V, causal=causal, mask=mask, align=align)[2]
    dV = P.T @ dO
    dP = dO @ V.T
    D = (P * dP).sum(axis=1)
    dS = P * (dP - D[:, None])
    return scale * dS @ K, scale * dS.T @ Q, dV
