"""The backward pass: dQ, dK and dV from dO, by the definition and in tiles.

With S = Q K^T / sqrt(d), P = softmax(S), O = P V, and dO the gradient of a loss with respect to O:

    dV = P^T dO      dP = dO V^T      dS = P * (dP - D)      dQ = dS K / sqrt(d)
                                                             dK = dS^T Q / sqrt(d)
    D = rowsum(P * dP), which is rowsum(dO * O): one number a row.

The tiled versions keep O and L of the forward pass, never P: a tile of it is exp(S - L), made again
on chip. All loops read and write HBM only through `attention_lib.memory.HBM`, so the loop that
computes is the loop that counts.

Sources: FlashAttention, arXiv 2205.14135 (v2), Algorithms 3 and 4; FlashAttention-2,
arXiv 2307.08691, Algorithm 2. Comments give the papers' line numbers. The first has dropout as
well, which is left out here; the second leaves the scale out, which is put in.
"""

import functools
import inspect
import math

import numpy as np

from attention_lib.inputs import (
    ALIGN,
    check_bool,
    check_choice,
    check_float_array,
    check_mask,
    check_positive_int,
    check_qkv,
    compute_dtype,
)
from attention_lib.memory import HBM
from attention_lib.reference import causal_offset, finite_or_zero, hide, standard_attention
from attention_lib.tiled import blocks, load_mask, nothing_visible, place
from attention_lib.traffic import _check, _offset

SAVED = ("O", "dO", "P", "L", "l", "m")  # what comes beside Q, K, V; all have the heads of Q
VARIANTS = ("FlashAttention-2", "Algorithm 4")


# ---------------------------------------------------------------- any leading axes


def for_each_head_backward(algorithm):
    """Make a backward pass for one head accept any leading axes, after checking its arguments.

    The wrapped function takes Q, K, V and some of SAVED, and returns dQ, dK, dV in the dtype of the
    arithmetic. Query heads that share a K/V head (GQA) each have a part in its gradient: dK and dV
    are the sums over the group. The result has the dtype of Q.
    """
    signature = inspect.signature(algorithm)

    @functools.wraps(algorithm)
    def entry(*args, **kwargs):
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{algorithm.__name__}() got wrong arguments: {error}") from None
        call.apply_defaults()
        a = call.arguments
        _check_arguments(a)
        dtype = a["Q"].dtype
        # Far from the maximum exp is 0, as it should be; a gradient beyond float16 is inf there.
        with np.errstate(under="ignore"):
            gradients = _sum_over_heads(algorithm, call)
        with np.errstate(under="ignore", over="ignore"):
            return tuple(x.astype(dtype, copy=False) for x in gradients)

    return entry


def _check_arguments(a):
    Q, K = a["Q"], a["K"]
    check_qkv(Q, K, a["V"])
    if 0 in Q.shape[:-2]:
        raise ValueError(f"Q has shape {Q.shape}; accepted: leading axes of 1 or more")
    shapes = {"O": Q.shape, "dO": Q.shape, "P": (*Q.shape[:-1], K.shape[-2])}
    for name in [name for name in SAVED if name in a]:
        x, statistic = a[name], name in "Llm"
        check_float_array(name, x)
        dtype = compute_dtype(Q.dtype) if statistic else Q.dtype
        if x.dtype.name != dtype.name:
            why = "as the forward pass returns it" if statistic else "the dtype of Q"
            raise TypeError(f"{name} has dtype {x.dtype.name}; accepted: {dtype.name}, {why}")
        shape = shapes.get(name, Q.shape[:-1])
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; accepted: {shape}, for Q {Q.shape}")
        if not (np.isfinite(x) | (np.isneginf(x) & (name in "Lm"))).all():
            also = ", or -inf for a row that sees no key" if name in "Lm" else ""
            raise ValueError(f"{name} has NaN or infinity; accepted: finite numbers{also}")
        if name == "l" and (x < 0).any():
            raise ValueError("l has negative numbers; accepted: sums of exponentials, 0 or more")
    if "causal" in a:
        check_bool("causal", a["causal"])
        check_choice("align", a["align"], ALIGN)
        if a["mask"] is not None:
            check_mask(a["mask"], Q, K)
    for name in {"Br", "Bc"} & a.keys():
        a[name] = check_positive_int(name, a[name])
    if "hbm" in a:
        a["hbm"] = HBM() if a["hbm"] is None else a["hbm"]
        if not isinstance(a["hbm"], HBM):
            raise TypeError(f"hbm must be an HBM or None, got {type(a['hbm']).__name__}")


def _sum_over_heads(algorithm, call):
    a = call.arguments
    whole = {name: a[name] for name in ("Q", *SAVED) if name in a}
    K, V, mask = a["K"], a["V"], a.get("mask")
    lead, dtype = whole["Q"].shape[:-2], compute_dtype(K.dtype)
    group = lead[-1] // K.shape[-3] if lead else 1
    if mask is not None:
        mask = np.atleast_2d(mask)
        mask = np.broadcast_to(mask, lead + mask.shape[-2:])
    dQ = np.empty(whole["Q"].shape, dtype)
    dK, dV = np.zeros(K.shape, dtype), np.zeros(K.shape, dtype)
    for index in np.ndindex(lead):
        kv = (*index[:-1], index[-1] // group) if lead else ()
        a.update({name: x[index] for name, x in whole.items()}, K=K[kv], V=V[kv])
        if mask is not None:
            a["mask"] = mask[index]
        dQ[index], dK_part, dV_part = algorithm(*call.args, **call.kwargs)
        dK[kv] += dK_part
        dV[kv] += dV_part
    return dQ, dK, dV


# ---------------------------------------------------------------- the definition


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
