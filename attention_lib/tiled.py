"""Attention in tiles: the unfused loop, and FlashAttention's two loop orders.

All three read and write HBM only through `attention_lib.memory.HBM`, so the loop that computes is
the loop that counts. N x N exists in `unfused_attention` alone.

Sources: FlashAttention, arXiv 2205.14135 (v2), Algorithms 0, 1, and 5 (tiles left out);
FlashAttention-2, arXiv 2307.08691, Algorithm 1. Comments give the papers' line numbers (those of
Algorithm 1).
"""

import math

import numpy as np

from attention_lib import online
from attention_lib.heads import for_each_head
from attention_lib.inputs import check_array, check_positive_int, compute_dtype
from attention_lib.reference import causal_offset, finite_or_zero, hide, softmax


def block_sizes(M, d):
    """The paper's rule for an on-chip memory of M elements: Bc = ceil(M / 4d), Br = min(Bc, d).

    Returns Br, Bc. FlashAttention (arXiv 2205.14135), Algorithm 1, line 1. Four tiles of M/4
    elements, and a score tile on top: the rule keeps the total within a constant of M, not within
    M (see notebook 06). Raises TypeError or ValueError unless M and d are ints of 1 or more.
    """
    M, d = check_positive_int("M", M), check_positive_int("d", d)
    Bc = -(-M // (4 * d))
    return min(Bc, d), Bc


def blocks(N, B):
    """The slices of length B that cover 0..N; the last one may be shorter."""
    return [slice(start, min(start + B, N)) for start in range(0, N, B)]


def nothing_visible(rows, cols, offset):
    """True if causality hides the whole tile: its last query ends before its first key."""
    return offset is not None and cols.start > rows.stop - 1 + offset


def which_tiles(block_mask, Nq, Nk, Br, Bc):
    """The block mask, checked: boolean (Tr, Tc), True where a tile is computed; None: all of them.

    Raises TypeError or ValueError that names Tr and Tc.
    """
    Tr, Tc = -(-Nq // Br), -(-Nk // Bc)
    if block_mask is None:
        return np.broadcast_to(True, (Tr, Tc))  # a view of one element
    check_array("block_mask", block_mask)
    if block_mask.dtype != bool:
        raise TypeError(
            f"block_mask has dtype {block_mask.dtype.name}; accepted: bool (True: computed)"
        )
    if block_mask.shape != (Tr, Tc):
        raise ValueError(
            f"block_mask has shape {block_mask.shape}; accepted: (Tr, Tc) = ({Tr}, {Tc}), "
            f"for Nq = {Nq}, Br = {Br}, Nk = {Nk}, Bc = {Bc}"
        )
    return block_mask


def place(hbm, **arrays):
    """The named arrays as tensors in HBM; None stays None."""
    return [x if x is None else hbm.tensor(name, x) for name, x in arrays.items()]


def load_mask(mask, rows, cols):
    """The tile of the mask; an axis of length 1 is the same for all rows (or columns)."""
    if mask is None:
        return None
    every = slice(None)
    return mask.load(rows if mask.shape[0] > 1 else every, cols if mask.shape[1] > 1 else every)


@for_each_head
def flash_attention(
    Q, K, V, Br, Bc, *, causal=False, mask=None, hbm=None, align="lower-right", block_mask=None
):
    """FlashAttention's Algorithm 1: K/V blocks outside, Q blocks inside.

    Q: (..., Nq, d); K, V: (..., Nk, d), with the leading axes of Q, or fewer heads (GQA).
    Br, Bc: rows of a Q block, rows of a K/V block. causal, mask, align: as in standard_attention.
    hbm: an HBM that counts the run, or None. block_mask: boolean (Tr, Tc), the tiles to compute, or
    None for all (Algorithm 5; see attention_lib.sparse).
    Returns O (..., Nq, d) in the dtype of Q, and l, m (..., Nq): each row's sum and maximum, in
    the dtype of the arithmetic (float32 for 16-bit inputs). A row that sees no key: O = 0, l = 0,
    m = -inf. Filling O, l, m at the start (line 2) is not counted, as in the paper.
    Raises TypeError and ValueError that name the argument; OnChipOverflow past the budget of hbm.
    """
    dtype, (Nq, d), Nk = compute_dtype(Q.dtype), Q.shape, K.shape[0]
    out_dtype, scale = Q.dtype, 1 / math.sqrt(d)
    offset = causal_offset(Nq, Nk, align) if causal else None
    block_mask = which_tiles(block_mask, Nq, Nk, Br, Bc)
    hbm.launch()
    Q, K, V, mask = place(hbm, Q=Q, K=K, V=V, mask=mask)
    O = hbm.tensor("O", np.zeros((Nq, d), dtype))  # line 2
    l = hbm.tensor("l", np.zeros(Nq, dtype))
    m = hbm.tensor("m", np.full(Nq, -math.inf, dtype))
    for j, cols in enumerate(blocks(Nk, Bc)):  # line 5
        Kj, Vj = K.load(cols, dtype=dtype), V.load(cols, dtype=dtype)  # line 6
        for i, rows in enumerate(blocks(Nq, Br)):  # line 7
            if nothing_visible(rows, cols, offset) or not block_mask[i, j]:
                continue
            Qi, Oi = Q.load(rows, dtype=dtype), O.load(rows)  # line 8
            li, mi = l.load(rows), m.load(rows)
            S = hbm.hold("S", hbm.matmul(Qi, Kj.T))  # line 9
            S *= scale
            hide(S, rows.start, cols.start, offset, load_mask(mask, rows, cols))
            m_tile = S.max(axis=1)  # line 10
            P = np.exp(np.subtract(S, finite_or_zero(m_tile)[:, None], out=S), out=S)
            l_tile = P.sum(axis=1)
            m_new = np.maximum(mi, m_tile)  # line 11
            old = np.exp(mi - finite_or_zero(m_new))
            new = np.exp(m_tile - finite_or_zero(m_new))
            l_new = old * li + new * l_tile
            l_safe = np.where(l_new == 0, np.ones_like(l_new), l_new)
            Oi = (old * li)[:, None] * Oi + new[:, None] * hbm.matmul(P, Vj)  # line 12
            O.store(Oi / l_safe[:, None], rows)
            l.store(l_new, rows)  # line 13
            m.store(m_new, rows)
            del S, P  # or they would stand beside the next tile
    return O.array.astype(out_dtype, copy=False), l.array, m.array


@for_each_head
def flash_attention_q_outer(
    Q, K, V, Br, Bc, *, causal=False, mask=None, hbm=None, align="lower-right", block_mask=None
):
    """FlashAttention-2's Algorithm 1: Q blocks outside, K/V blocks inside, one division per row.

    Arguments as in flash_attention. Returns O (..., Nq, d) in the dtype of Q, and
    L = m + log(l) (..., Nq), the log-sum-exp of each row's scores, in the dtype of the arithmetic.
    A row that sees no key: O = 0, L = -inf.
    """
    dtype, (Nq, d), Nk = compute_dtype(Q.dtype), Q.shape, K.shape[0]
    out_dtype, scale = Q.dtype, 1 / math.sqrt(d)
    offset = causal_offset(Nq, Nk, align) if causal else None
    block_mask = which_tiles(block_mask, Nq, Nk, Br, Bc)
    hbm.launch()
    Q, K, V, mask = place(hbm, Q=Q, K=K, V=V, mask=mask)
    O = hbm.tensor("O", np.empty((Nq, d), out_dtype))
    L = hbm.tensor("L", np.empty(Nq, dtype))
    for i, rows in enumerate(blocks(Nq, Br)):  # line 3
        Qi = Q.load(rows, dtype=dtype)  # line 4
        state = online.start(rows.stop - rows.start, d, dtype)  # line 5
        for name, tile in zip(("m", "l", "O"), state, strict=True):
            hbm.hold(name, tile)
        for j, cols in enumerate(blocks(Nk, Bc)):  # line 6
            if nothing_visible(rows, cols, offset):
                break  # the later blocks are hidden too
            if not block_mask[i, j]:
                continue
            S = hbm.hold("S", hbm.matmul(Qi, K.load(cols, dtype=dtype).T))  # lines 7, 8
            S *= scale
            hide(S, rows.start, cols.start, offset, load_mask(mask, rows, cols))
            Vj = V.load(cols, dtype=dtype)  # line 7
            state = online.update(state, S, Vj, overwrite=True, matmul=hbm.matmul)  # lines 9, 10
            del S, Vj  # or they would stand beside the next tiles
        for tensor, tile in zip((O, L), online.finish(state), strict=True):  # lines 12, 13
            tensor.store(tile, rows)  # lines 14, 15
    return O.array, L.array


@for_each_head
def unfused_attention(Q, K, V, Br=128, *, causal=False, mask=None, hbm=None, align="lower-right"):
    """Standard attention as a GPU runs it: three kernels, with S and P in HBM between them.

    FlashAttention (arXiv 2205.14135), Algorithm 0. Each kernel walks over Br rows at a time. The
    first and the third keep all of K, or V, on chip, so that these are read once: the smallest
    count that any implementation of the three steps could have.
    Arguments as in standard_attention; Br: rows at a time; hbm: an HBM that counts, or None.
    Returns O, S, P as standard_attention does.
    """
    dtype, (Nq, d), Nk = compute_dtype(Q.dtype), Q.shape, K.shape[0]
    out_dtype, scale = Q.dtype, 1 / math.sqrt(d)
    offset = causal_offset(Nq, Nk, align) if causal else None
    Q, K, V, mask = place(hbm, Q=Q, K=K, V=V, mask=mask)
    S, P = (hbm.tensor(name, np.empty((Nq, Nk), dtype)) for name in "SP")
    O = hbm.tensor("O", np.empty((Nq, d), out_dtype))

    hbm.launch()  # kernel 1: S = Q K^T / sqrt(d)
    K_all = K.load(dtype=dtype)
    for rows in blocks(Nq, Br):
        Si = hbm.hold("S", hbm.matmul(Q.load(rows, dtype=dtype), K_all.T))
        Si *= scale
        hide(Si, rows.start, 0, offset, load_mask(mask, rows, slice(None)))
        S.store(Si, rows)

    hbm.launch()  # kernel 2: P = softmax(S)
    for rows in blocks(Nq, Br):
        P.store(hbm.hold("P", softmax(S.load(rows))), rows)

    hbm.launch()  # kernel 3: O = P V
    V_all = V.load(dtype=dtype)
    for rows in blocks(Nq, Br):
        Oi = hbm.hold("O", hbm.matmul(P.load(rows), V_all))
        O.store(Oi, rows)

    with np.errstate(over="ignore"):  # a score beyond float16's 65,504 is inf there
        return O.array, S.array.astype(out_dtype, copy=False), P.array.astype(out_dtype, copy=False)
