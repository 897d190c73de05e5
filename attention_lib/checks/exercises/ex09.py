"""Exercise 9: the tiled backward pass, from O and L, with D before the first tile.

FlashAttention-2 (arXiv 2307.08691), Algorithm 2. `loop` is the right program, or the right one with
one slip in it.
"""

import functools
import math

import numpy as np

from attention_lib.backward import flash_backward_traffic
from attention_lib.checks.exercises import ex02
from attention_lib.checks.judge import as_arrays, observe
from attention_lib.checks.kinds import Choice, Mistake, Number, Probe, Program
from attention_lib.reference import standard_backward
from attention_lib.tiled import blocks

STEPS = "notebook 08, 'Four steps back'"
WHY_D = "notebook 08, 'Why one number a row is enough'"
KEPT = "notebook 08, 'What is kept, what is made again'"
LOOP = "notebook 08, 'The loop'"
CROSSES = "notebook 08, 'What crosses'"
REBUILT = "notebook 05, 'P, rebuilt'"
CAUSAL = "notebook 03, 'Causal: tiles that are never computed'"
CORNERS = "notebook 03, 'Two corners for one mask'"
OUTPUTS = ("dQ", "dK", "dV")


def loop(Q, K, V, O, L, dO, Br, Bc, causal=False, *, slip=None, variant=0):
    """dQ, dK, dV in tiles, or with this slip. variant: a slip's other way to be written."""
    (Nq, d), Nk, scale = Q.shape, len(K), 1 / math.sqrt(Q.shape[1])
    S_scale = {"scores-not-scaled": 1.0, "scaled-by-d": 1 / d}.get(slip, scale)
    out_scale = {
        "gradients-not-scaled": 1.0,
        "scaled-twice": scale**2,
        "scaled-by-d": 1 / d,
    }.get(slip, scale)
    shift = 0 if slip == "upper-left" else Nk - Nq
    shift += {"own-key-hidden": -1, "next-key-seen": 1}.get(slip, 0)
    swapped = slip == "O-for-dO"
    for_dP, for_dV = (O if swapped and variant in (0, v) else dO for v in (1, 2))
    dQ, dK, dV = np.zeros((Nq, d)), np.zeros((Nk, d)), np.zeros((Nk, d))
    D = _before(Q, K, V, O, dO, slip, variant, S_scale)
    for cols in blocks(Nk, Bc):
        if slip == "last-kv-block-lost" and cols.stop - cols.start < Bc:
            continue
        for rows in blocks(Nq, Br):
            if slip == "last-q-block-lost" and rows.stop - rows.start < Br:
                continue
            skips = slip not in ("mask-forgotten", "no-guard") or variant == 0
            if causal and skips and cols.start > rows.stop - 1 + shift:
                continue
            Qi, Kj, Vj = Q[rows], K[cols], V[cols]
            S = Qi @ Kj.T * S_scale
            if causal and slip != "mask-forgotten":
                visible = np.arange(Nk)[cols] <= np.arange(Nq)[rows, None] + shift
                S = np.where(visible, S, -math.inf)
            P = _weights(S, L[rows], slip, variant)
            dP = for_dP[rows] @ (Kj if slip == "dP-with-K" else Vj).T
            dS = _scores(P, dP, D[rows], slip)
            left = {"dV-with-S": np.where(np.isneginf(S), 0.0, S), "dV-with-dS": dS}.get(slip, P)
            dV_part = left.T @ for_dV[rows]
            dQ_part = out_scale * dS @ (Vj if slip == "dQ-with-V" else Kj)
            right = {"dK-with-dO": dO[rows]}.get(slip, Qi)
            dK_part = out_scale * (P if slip == "dK-with-P" else dS).T @ right
            if slip == "dK-not-scaled":
                dK_part = dK_part / out_scale
            if slip == "dQ-not-scaled":
                dQ_part = dQ_part / out_scale
            dQ[rows] = dQ_part if slip == "dQ-overwritten" else dQ[rows] + dQ_part
            over = slip == "dK-dV-overwritten"
            dK[cols] = dK_part if over else dK[cols] + dK_part
            dV[cols] = dV_part if over and not variant else dV[cols] + dV_part
    return dQ, dK, dV


def _before(Q, K, V, O, dO, slip, variant, scale):
    """D, one number a row."""
    if slip == "D-of-a-wrong-pair":
        return ((O * O) if variant else (dO * dO)).sum(axis=1)
    if slip == "D-not-weighted" and variant in (1, 3):  # all keys at once, without P
        return (dO @ V.T).sum(axis=1) / (len(K) if variant == 3 else 1)
    D = (dO * O).sum(axis=1)
    if slip == "D-one-for-all":
        return np.full(len(Q), D.mean() if variant else D.sum())
    if slip == "D-scaled":
        return D * scale
    return D / Q.shape[1] if slip == "D-mean-over-d" else D


def _weights(S, L, slip, variant):
    """The tile of P."""
    if slip == "no-guard":
        return np.exp(S - L[:, None])
    L = np.where(np.isneginf(L), 0.0, L)
    if slip == "P-not-normalised":
        top = S.max(axis=1, keepdims=True) if variant else 0.0
        return np.exp(S - np.where(np.isneginf(top), 0.0, top))
    if slip == "P-normalised-in-the-tile":
        top = S.max(axis=1, keepdims=True)
        E = np.exp(S - np.where(np.isneginf(top), 0.0, top))
        l = E.sum(axis=1, keepdims=True)
        return E / np.where(l == 0, 1.0, l)
    if slip == "divided-by-L":
        return np.exp(S) / L[:, None]
    return np.exp(S + L[:, None] if slip == "L-added" else S - L[:, None])


def _scores(P, dP, D, slip):
    """The tile of dS, before the scale."""
    if slip == "D-in-the-tile":
        D = (P * dP).sum(axis=1)
    if slip == "D-not-weighted-in-the-tile":
        D = dP.sum(axis=1)
    if slip == "D-mean-in-the-tile":
        D = dP.mean(axis=1)
    D = D[:, None]
    return {
        "D-forgotten": lambda: P * dP,
        "D-added": lambda: P * (dP + D),
        "D-outside-P": lambda: P * dP - D,
        "P-forgotten-in-dS": lambda: dP - D,
        "P-times-one-minus-P": lambda: P * (1 - P) * dP,
    }.get(slip, lambda: P * (dP - D))()


def right(Q, K, V, O, L, dO, Br, Bc, causal=False):
    """The definition, whole matrices: the answer for any blocks."""
    return standard_backward(Q, K, V, dO, causal=causal)


def case(rng, Nq, Nk, d, Br, Bc, causal=False, scores="plain"):
    """The arguments of one call, with O and L from a forward pass."""
    Q, dO = rng.standard_normal((2, Nq, d))
    K, V = rng.standard_normal((2, Nk, d))
    if scores == "rising":  # the maximum of every row rises by 40 from the first key to the last
        Q = 1 + 0.1 * Q
        K = 0.5 * K + np.linspace(0, 40, Nk)[:, None] / math.sqrt(d)
    elif scores != "plain":  # all scores near this number
        Q = np.concatenate([np.full((Nq, 1), float(abs(scores))), Q[:, 1:]], axis=1)
        K = np.concatenate([np.full((Nk, 1), math.copysign(math.sqrt(d), scores)), K[:, 1:]], 1)
    O, l, m = ex02.right(Q, K, V, Br, Bc, causal)
    L = m + np.log(np.where(l == 0, 1.0, l))
    arguments = {"Q": Q, "K": K, "V": V, "O": O, "L": L, "dO": dO, "Br": Br, "Bc": Bc}
    return arguments | ({"causal": True} if causal else {})


def tolerances(a):
    """What rounding in float64 may do to dQ, dK and dV: first order, times three.

    A weight is off by eps * (4 size + 2 keys + 16) relative, for scores up to `size`; dP and D by
    as much as d terms of the largest product; a row's weights add up to 1, a column's to Nq at
    most.
    """
    Q, K, V, dO = (a[name] for name in ("Q", "K", "V", "dO"))
    (Nq, d), Nk, eps = Q.shape, len(K), float(np.finfo(np.float64).eps)
    q, k, v, g = (float(np.abs(x).max(initial=0.0)) for x in (Q, K, V, dO))
    size = float((np.abs(Q) @ np.abs(K).T).max(initial=0.0)) / math.sqrt(d)
    weight = eps * (4 * size + 2 * Nk + 16)
    dS = d * g * v * (3 * weight + 2 * eps * (d + Nk + Nq + 16))
    scale = 3 / math.sqrt(d)
    return scale * k * dS, scale * q * Nq * dS, 3 * Nq * g * (weight + eps * (Nq + 8))


def probes(seed):
    rng = np.random.default_rng(seed)

    def probe(says, *sizes, stage=0, **options):
        arguments = case(rng, *sizes, **options)
        return Probe(says, arguments, tolerances(arguments), stage)

    return [
        probe("8 queries, 8 keys, d = 4, Br = 3, Bc = 4", 8, 8, 4, 3, 4),
        probe("7 queries, 10 keys, Br = Bc = 4: the last blocks are short", 7, 10, 4, 4, 4),
        probe("the scores rise by 40 along each row, Br = 4, Bc = 3", 8, 9, 4, 4, 3,
              scores="rising"),
        probe("all scores near -1000, Br = 4, Bc = 5", 9, 10, 3, 4, 5, scores=-1000),
        probe("scores near 800: exp of them overflows", 9, 10, 3, 4, 5, scores=800),
        probe("one tile holds all, Br = Bc = 20", 7, 9, 5, 20, 20),
        probe("tiles of one element, Br = Bc = 1", 3, 4, 3, 1, 1),
        probe("causal, 9 queries, 9 keys, Br = 3, Bc = 5", 9, 9, 4, 3, 5, causal=True,
              stage=1),
        probe("causal, 7 queries, 12 keys, Br = 4, Bc = 3", 7, 12, 4, 4, 3, causal=True, stage=1),
        probe("causal, 10 queries, 5 keys: queries 0 to 4 see no key, L = -inf", 10, 5, 4, 4, 3,
              causal=True, stage=2),
    ]  # fmt: skip


def big(seed):
    return case(np.random.default_rng(seed), 1024, 1024, 8, 64, 64)


def _reads(answer, name):
    """Does the answer depend on this argument? Two runs on a small input tell."""
    arguments = case(np.random.default_rng(0), 8, 8, 3, 4, 4)
    other = arguments | {name: arguments[name] + 1.0}
    first, second = (
        as_arrays(observe(answer, a).value, 3) for a in (arguments, other)
    )  # fmt: skip
    return first is None or second is None or not all(map(np.allclose, first, second))


def starts_from_O(answer):
    """D comes from O: an answer that does not read O goes over all keys one time more."""
    if _reads(answer, "O"):
        return None
    text = "right numbers, but O is never used. D = rowsum(dO * O) needs no pass over the keys."
    return "D-from-a-second-pass", text, WHY_D


def starts_from_L(answer):
    """P comes from L: an answer that does not read L does the forward pass again."""
    if _reads(answer, "L"):
        return None
    text = "right numbers, but L is never used. exp(S - L) needs no maximum and no sum again."
    return "forward-pass-again", text, REBUILT


def _mistake(id, says, read, *variants):
    return [
        Mistake(id, functools.partial(loop, slip=id, variant=v), says, read)
        for v in variants or (0,)
    ]


def _named(id, slip, says, read):
    """A slip under the id of a wrong idea that has several forms."""
    return [Mistake(id, functools.partial(loop, slip=slip), says, read)]


NOT_WEIGHTED = (
    "your D adds up dP without weights. It is rowsum(P * dP), which is rowsum(dO * O)."
)  # fmt: skip

BACKWARD = Program(
    id="ex09-backward",
    text="Write backward(Q, K, V, O, L, dO, Br, Bc, causal=False) -> dQ, dK, dV: in tiles, K/V\n"
    "blocks outside, from O and L of the forward pass, with D = rowsum(dO * O).",
    outputs=OUTPUTS,
    right=right,
    probes=probes,
    read=LOOP,
    mistakes=(
        *_mistake("D-forgotten", "your dS is P * dP. The row's D has to be taken from dP first: "
                  "rows of dS add up to 0.", WHY_D),
        *_mistake("D-not-weighted", NOT_WEIGHTED, WHY_D, 1, 3),
        *_named("D-not-weighted", "D-not-weighted-in-the-tile", NOT_WEIGHTED, WHY_D),
        *_named("D-not-weighted", "D-mean-in-the-tile", NOT_WEIGHTED, WHY_D),
        *_mistake("D-in-the-tile", "your D is rowsum(P * dP) of one tile. It is a sum over all "
                  "keys: take rowsum(dO * O).", WHY_D),
        *_mistake("D-added", "you add D to dP. It is taken away: dS = P * (dP - D).", STEPS),
        *_mistake("D-outside-P", "you take D from P * dP. It is inside: dS = P * (dP - D).", STEPS),
        *_mistake("D-of-a-wrong-pair", "your D is not made of dO and O: one of them twice.", WHY_D,
                  0, 1),
        *_mistake("D-one-for-all", "you have one D for all rows. Each row has its own: sum along "
                  "d only.", WHY_D, 0, 1),
        *_mistake("D-mean-over-d", "your D is a mean along d. It is the sum.", WHY_D),
        *_mistake("D-scaled", "you scale D. dP and D have no scale: it belongs to S, and to dQ "
                  "and dK.", STEPS),
        *_mistake("P-forgotten-in-dS", "your dS is dP - D. Each element has its weight: "
                  "P * (dP - D).", STEPS),
        *_mistake("P-times-one-minus-P", "you take P(1 - P), the slope of one weight in its own "
                  "score. All weights of the row move.", STEPS),
        *_mistake("gradients-not-scaled", "dQ and dK lack the scale. S had 1/sqrt(d), so its "
                  "gradients have it.", STEPS),
        *_mistake("dQ-not-scaled", "dK has the scale, dQ lacks it.", STEPS),
        *_mistake("dK-not-scaled", "dQ has the scale, dK lacks it.", STEPS),
        *_mistake("scaled-twice", "dQ and dK are scaled twice, in dS and again. Once is right.",
                  STEPS),
        *_mistake("scores-not-scaled", "the rebuilt S lacks the scale; L was made with it.",
                  REBUILT),
        *_mistake("scaled-by-d", "you scale by 1/d. It is 1/sqrt(d).", STEPS),
        *_mistake("P-not-normalised", "your P is not normalised: exp(S), or exp(S - max). With L "
                  "it needs no division: exp(S - L).", REBUILT, 0, 1),
        *_mistake("P-normalised-in-the-tile", "you take the softmax of a tile. Its keys are not "
                  "all keys: exp(S - L).", REBUILT),
        *_mistake("divided-by-L", "you divide by L. It is a logarithm: exp(S - L).", REBUILT),
        *_mistake("L-added", "your exponent is S + L. It is S - L.", REBUILT),
        *_mistake("dV-with-S", "your dV is made of S. The weights of V are P: dV = P^T dO.", STEPS),
        *_mistake("dV-with-dS", "your dV is made of dS. That is for dQ and dK: dV = P^T dO.",
                  STEPS),
        *_mistake("dP-with-K", "your dP is dO K^T. P multiplied V: dP = dO V^T.", STEPS),
        *_mistake("dQ-with-V", "your dQ is dS V. S was made of Q and K: dQ = dS K.", STEPS),
        *_mistake("dK-with-dO", "your dK is dS^T dO. S was made of Q and K: dK = dS^T Q.", STEPS),
        *_mistake("dK-with-P", "your dK is made of P. That is for dV: dK = dS^T Q.", STEPS),
        *_mistake("O-for-dO", "you have O where dO belongs. O is needed in D only.", KEPT, 0, 1, 2),
        *_mistake("dQ-overwritten", "dQ is overwritten for each K/V block. Each of them has a part "
                  "in it: add.", LOOP),
        *_mistake("dK-dV-overwritten", "dK or dV is overwritten for each Q block. Each of them has "
                  "a part in it: add.", LOOP, 0, 1),
        *_mistake("last-kv-block-lost", "the last, shorter K/V block is never visited.", LOOP),
        *_mistake("last-q-block-lost", "the last, shorter Q block is never visited.", LOOP),
        *_mistake("mask-forgotten", "P is rebuilt without the causal mask. L does not hide a key: "
                  "mask S again.", CAUSAL, 0, 1),
        *_mistake("upper-left", "your mask has the first query on the first key. Here the last "
                  "ones meet: j <= i + Nk - Nq.", CORNERS),
        *_mistake("own-key-hidden", "your mask is off by one: the key j = i + Nk - Nq is visible.",
                  CAUSAL),
        *_mistake("next-key-seen", "your mask is off by one: the key after i + Nk - Nq is hidden.",
                  CAUSAL),
        *_mistake("no-guard", "-inf - (-inf) is NaN: where L is -inf, take 0 in the exponent.",
                  LOOP, 0, 1),
    ),
    library=frozenset(),
    big=big,
    memory=lambda a: len(a["Q"]) * len(a["K"]),  # one byte an entry: less than a boolean mask
    claims=(starts_from_O, starts_from_L),
)  # fmt: skip

N, D_HEAD, BR, BC = 4096, 64, 64, 128


def _saved(passes, before):
    """Elements saved: O in each pass, less what the loop over D costs before."""
    return passes * N * D_HEAD - before


QUESTIONS = [
    BACKWARD,
    Number(
        "ex09-before",
        f"N = {N:,}, d = {D_HEAD}, Br = {BR}, Bc = {BC}. Algorithm 4 loads O in every tile and\n"
        "makes D there. FlashAttention-2 makes D once, before the loop, and loads it in every\n"
        "tile, in place of one of l and m. How many elements less does it move?",
        "elements",
        truth=lambda: (
            flash_backward_traffic(N, D_HEAD, BR, BC, variant="Algorithm 4")
            - flash_backward_traffic(N, D_HEAD, BR, BC)
        ),
        why="O does not come in Tc passes any more. It and dO come once, and D goes out once.",
        hint="What falls away: O, once for each K/V block. What is new: one pass in which O and "
        "dO come in and D goes out.",
        tolerance=0.002,
        slips={
            "prepass-is-free": (
                lambda: _saved(N // BC, 0),
                "That is O in all passes. Making D before the loop is not free: O and dO come in.",
            ),
            "dO-forgotten": (
                lambda: _saved(N // BC, N * D_HEAD + N),
                "D is made of O and dO. Before the loop both come in.",
            ),
            "tr-for-tc": (
                lambda: _saved(N // BR, 2 * N * D_HEAD + N),
                "You took Tr passes. K/V is outside: Q, dO and O pass once for each K/V block.",
            ),
            "bytes": (
                lambda: 2 * _saved(N // BC, 2 * N * D_HEAD + N),
                "Twice: these are bytes in fp16. The question is about elements.",
            ),
        },
    ),
    Choice(
        "ex09-running",
        "A colleague does not trust O. He adds up rowsum(P * dP) from tile to tile, as l is\n"
        "added up in the forward pass, and takes what he has so far for D. What happens?",
        {
            "a": "All is right: the last tile brings D to its final value.",
            "b": "The tiles before the last one use a D that lacks keys, so their dS is wrong.",
            "c": "It is right if dQ and dK are rescaled whenever D changes, as O is when m rises.",
            "d": "It overflows: D needs a running maximum too.",
        },
        "b",
        {
            "a": "D gets there, too late. The dS of the first tiles is in dQ and dK by then.",
            "b": "D has to be there before the first tile. From O it is: the sum over all keys was "
            "done in the forward pass.",
            "c": "A late maximum is repaired by one factor for the row. A late D is not a factor: "
            "each element is short of P times the missing part.",
            "d": "P is at most 1 and dP is as large as the numbers in dO and V: nothing grows.",
        },
    ),
]
