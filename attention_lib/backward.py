"""The backward pass: dQ, dK and dV from dO, in five kernels and in tiles.

The definition is `attention_lib.reference.standard_backward`. Two things make it fit into tiles:

    P = exp(S - L), made again on chip from the L that the forward pass kept;
    D = rowsum(P * dP) = rowsum(dO * O), one number a row, known before the first tile.

So the tiled versions keep O and L, never P. All loops read and write HBM only through
`attention_lib.memory.HBM`, so the loop that computes is the loop that counts.

Sources: FlashAttention, arXiv 2205.14135 (v2), Algorithms 3 and 4; FlashAttention-2,
arXiv 2307.08691, Algorithm 2. Comments give the papers' line numbers. The first has dropout as
well, which is left out here; the second leaves the scale out, which is put in.
"""

import math

import numpy as np

from attention_lib.heads import for_each_head_backward
from attention_lib.inputs import check_choice, compute_dtype
from attention_lib.reference import causal_offset, finite_or_zero, hide
from attention_lib.tiled import blocks, load_mask, nothing_visible, place
from attention_lib.traffic import _check, _offset

VARIANTS = ("FlashAttention-2", "Algorithm 4")

# ---------------------------------------------------------------- unfused


@for_each_head_backward
def unfused_backward(Q, K, V, P, dO, Br=128, *, hbm=None):
    """The standard backward pass as a GPU runs it: five kernels, with P, dP and dS in HBM.

    FlashAttention (arXiv 2205.14135), Algorithm 3. Each kernel walks over Br rows at a time and
    keeps its N x d operand or result on chip, so that this crosses once: the smallest count that
    any implementation of the five steps could have.
    P: (..., Nq, Nk), kept from the forward pass in the dtype of Q. It is 0 where a key was hidden,
    so no mask is needed. Returns dQ, dK, dV as standard_backward does.
    """
    scale, dtype, Nq, Nk = 1 / math.sqrt(Q.shape[1]), compute_dtype(Q.dtype), len(Q), len(K)
    Q, K, V, P, dO = place(hbm, Q=Q, K=K, V=V, P=P, dO=dO)
    dP, dS = (hbm.tensor(name, np.empty((Nq, Nk), dtype)) for name in ("dP", "dS"))
    dQ = hbm.tensor("dQ", np.empty(Q.shape, dtype))
    dK, dV = (hbm.tensor(name, np.empty(K.shape, dtype)) for name in ("dK", "dV"))

    hbm.launch()  # line 1: dV = P^T dO
    total = hbm.hold("dV", np.zeros(K.shape, dtype))
    for rows in blocks(Nq, Br):
        total += hbm.matmul(P.load(rows, dtype=dtype).T, dO.load(rows, dtype=dtype))
    dV.store(total)

    hbm.launch()  # line 2: dP = dO V^T
    V_all = V.load(dtype=dtype)
    for rows in blocks(Nq, Br):
        dP.store(hbm.hold("dP", hbm.matmul(dO.load(rows, dtype=dtype), V_all.T)), rows)

    hbm.launch()  # line 3: dS = P * (dP - rowsum(P * dP))
    for rows in blocks(Nq, Br):
        Pi, dPi = P.load(rows, dtype=dtype), dP.load(rows)
        Di = (Pi * dPi).sum(axis=1)
        dS.store(hbm.hold("dS", Pi * (dPi - Di[:, None])), rows)

    hbm.launch()  # line 4: dQ = dS K / sqrt(d)
    K_all = K.load(dtype=dtype)
    for rows in blocks(Nq, Br):
        dQ.store(hbm.hold("dQ", scale * hbm.matmul(dS.load(rows), K_all)), rows)

    hbm.launch()  # line 5: dK = dS^T Q / sqrt(d)
    total = hbm.hold("dK", np.zeros(K.shape, dtype))
    for rows in blocks(Nq, Br):
        total += scale * hbm.matmul(dS.load(rows).T, Q.load(rows, dtype=dtype))
    dK.store(total)
    return dQ.array, dK.array, dV.array


# ---------------------------------------------------------------- in tiles


@for_each_head_backward
def flash_backward(
    Q, K, V, O, L, dO, Br, Bc, *, causal=False, mask=None, hbm=None, align="lower-right"
):
    """FlashAttention-2's Algorithm 2: first D, then K/V blocks outside and Q blocks inside.

    Q, K, V, causal, mask, align: as in the forward pass. O, L: what flash_attention_q_outer
    returned (L in the dtype of the arithmetic, -inf for a row that sees no key). dO: the gradient
    of the loss with respect to O. Br, Bc: rows of a Q block, of a K/V block; they need not be those
    of the forward pass. hbm: an HBM that counts the run, or None.
    Returns dQ (..., Nq, d), dK and dV (shape of K), in the dtype of Q. 16-bit inputs are computed,
    and dQ accumulated in HBM, in float32. A row that sees no key has a gradient of zero.
    Filling dQ with zeros (line 3), casting the result, and adding up heads that share K and V are
    not counted.
    Raises TypeError and ValueError that name the argument; OnChipOverflow past the budget of hbm.
    """
    dtype = compute_dtype(Q.dtype)
    offset = causal_offset(len(Q), len(K), align) if causal else None
    Q, K, V, O, L, dO, mask = place(hbm, Q=Q, K=K, V=V, O=O, L=L, dO=dO, mask=mask)
    D = hbm.tensor("D", np.empty(L.shape, dtype))

    hbm.launch()
    for rows in blocks(D.shape[0], Br):  # line 4
        Oi, dOi = O.load(rows, dtype=dtype), dO.load(rows, dtype=dtype)
        D.store(hbm.hold("D", (dOi * Oi).sum(axis=1)), rows)

    def row_statistics(rows, dOi):
        return L.load(rows), D.load(rows)

    return backward_tiles(hbm, Q, K, V, dO, row_statistics, Br, Bc, dtype, offset, mask)


@for_each_head_backward
def flash_backward_algorithm_4(
    Q, K, V, O, l, m, dO, Br, Bc, *, causal=False, mask=None, hbm=None, align="lower-right"
):
    """FlashAttention's Algorithm 4: as flash_backward, but D is made again in every tile, from O.

    l, m: what flash_attention returned, two numbers a row. The other arguments and the result as
    in flash_backward.
    """
    dtype = compute_dtype(Q.dtype)
    offset = causal_offset(len(Q), len(K), align) if causal else None
    Q, K, V, O, l, m, dO, mask = place(hbm, Q=Q, K=K, V=V, O=O, l=l, m=m, dO=dO, mask=mask)

    def row_statistics(rows, dOi):
        li, mi = l.load(rows), m.load(rows)  # line 10
        Di = (dOi * O.load(rows, dtype=dtype)).sum(axis=1)  # line 19
        return mi + np.log(np.where(li == 0, np.ones_like(li), li)), hbm.hold("D", Di)

    return backward_tiles(hbm, Q, K, V, dO, row_statistics, Br, Bc, dtype, offset, mask)


def backward_tiles(hbm, Q, K, V, dO, row_statistics, Br, Bc, dtype, offset, mask):
    """The loop of both: Q, K, V, dO are in HBM; row_statistics(rows, dOi) loads or makes Li, Di.

    Line numbers: FlashAttention-2, Algorithm 2. In print, line 9 loads O_i too; with D made before,
    nothing uses it.
    """
    (Nq, d), Nk, scale = Q.shape, K.shape[0], 1 / math.sqrt(Q.shape[1])
    hbm.launch()
    dQ = hbm.tensor("dQ", np.zeros((Nq, d), dtype))  # line 3
    dK, dV = (hbm.tensor(name, np.empty((Nk, d), dtype)) for name in ("dK", "dV"))
    for cols in blocks(Nk, Bc):  # line 5
        Kj, Vj = K.load(cols, dtype=dtype), V.load(cols, dtype=dtype)  # line 6, load
        dKj = hbm.hold("dK", np.zeros_like(Kj))  # line 7
        dVj = hbm.hold("dV", np.zeros_like(Vj))
        for rows in blocks(Nq, Br):  # line 8
            if nothing_visible(rows, cols, offset):
                continue
            Qi, dOi = Q.load(rows, dtype=dtype), dO.load(rows, dtype=dtype)  # line 9, load
            Li, Di = row_statistics(rows, dOi)
            S = hbm.hold("S", hbm.matmul(Qi, Kj.T))  # line 10, score
            S *= scale
            hide(S, rows.start, cols.start, offset, load_mask(mask, rows, cols))
            S -= finite_or_zero(Li)[:, None]
            P = np.exp(S, out=S)  # line 11
            dVj += hbm.matmul(P.T, dOi)  # line 12, accumulate
            dS = hbm.hold("dP", hbm.matmul(dOi, Vj.T))  # line 13: dP; the same tile becomes dS
            dS -= Di[:, None]  # line 14
            dS *= P
            dS *= scale
            dQi = dQ.load(rows)  # line 15, accumulate in HBM
            dQi += hbm.matmul(dS, Kj)
            dQ.store(dQi, rows)
            dKj += hbm.matmul(dS.T, Qi)  # line 16, accumulate
            del S, P, dS  # or they would stand beside the next tiles
        dK.store(dKj, cols)  # line 18, store
        dV.store(dVj, cols)
    return dQ.array, dK.array, dV.array


# ---------------------------------------------------------------- closed forms


def standard_backward_traffic(N, d, *, Nk=None):
    """Elements that five kernels move; equals the count of `unfused_backward`.

    7N^2 + 8Nd for Nk = N: P is read twice, dP written and read, dS written and read twice; eight
    arrays of N x d, of which dO is one twice. N, Nk: queries, keys (default: N).
    """
    N, d, Nk = _check(N=N, d=d, Nk=N if Nk is None else Nk)
    return 7 * N * Nk + 4 * N * d + 4 * Nk * d


def flash_backward_traffic(
    N, d, Br, Bc, causal=False, *, Nk=None, align="lower-right", variant="FlashAttention-2"
):
    """Elements that the tiled backward pass moves; equals the count of the loop.

    variant "FlashAttention-2" (`flash_backward`): 6Nd + N + Tc(4Nd + 2N). K, V, dK, dV once; O and
    dO read and D written before the loop; then, for each K/V block, read Q, dO, dQ, L, D and write
    dQ. "Algorithm 4" (`flash_backward_algorithm_4`): 4Nd + Tc(5Nd + 2N). Nothing before the loop;
    O is read in each pass, and l, m in place of L, D.
    Causal: in place of Tc*N, the rows of the Q blocks that see some of each K/V block.
    """
    N, d, Br, Bc, Nk = _check(N=N, d=d, Br=Br, Bc=Bc, Nk=N if Nk is None else Nk)
    check_choice("variant", variant, VARIANTS)
    offset = _offset(N, Nk, causal, align)
    rows = N * math.ceil(Nk / Bc)
    if offset is not None:
        first_rows = (max(0, key - offset) for key in range(0, Nk, Bc))
        rows = sum(N - Br * (row // Br) for row in first_rows if row < N)
    if variant == "Algorithm 4":
        return 4 * Nk * d + (5 * d + 2) * rows
    return 4 * Nk * d + 2 * N * d + N + (4 * d + 2) * rows


def backward_tile_elements(Br, Bc, d):
    """On-chip elements of one step of `flash_backward`.

    Tiles K, V, dK, dV; Q, dO, dQ; P and dS; L and D of each row. S and P share a tile, so do dP
    and dS. Equals the peak_on_chip of a run with no mask whose N = Nk is at least Br and Bc.
    """
    Br, Bc, d = _check(Br=Br, Bc=Bc, d=d)
    return 4 * Bc * d + 3 * Br * d + 2 * Br * Bc + 2 * Br
