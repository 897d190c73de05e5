"""Exercise 2: FlashAttention's Algorithm 1 from the lines of the paper (arXiv 2205.14135v2)."""

import math

import numpy as np

from attention_lib import online
from attention_lib.checks.kinds import Mistake, Probe, Program
from attention_lib.checks.programs import rounding
from attention_lib.reference import finite_or_zero

SUMS = "notebook 02, 'A row needs its largest score and its sum'"
PER_TILE = "notebook 02, 'Softmax of each tile is a different function'"
CARRY = "notebook 02, 'Carry two numbers: m and l'"
RESCALE = "notebook 02, 'Leave the rescale out'"
OUTPUT = "notebook 02, 'The output is carried the same way'"
GUARDS = "notebook 02, 'A chunk in which nothing is visible'"
TILES = "notebook 03, 'The score matrix, cut into tiles'"
LINES = "notebook 03, 'Algorithm 1, line by line'"
BY_HAND = "notebook 03, 'One tile at a time, by hand'"
LOOP = "notebook 03, 'The library's loop'"
HIDDEN = "notebook 03, 'Causal: tiles that are never computed'"
CORNERS = "notebook 03, 'Two corners for one mask'"
SYMPTOMS = "notebook 03, 'Common mistakes'"

MEMORY_N = 1024
BIG_NEGATIVE = [-1e4, -1e5, -1e6, -1e8, -1e9, -1e10, -1e12, -1e20, -1e30,
                float(np.finfo(np.float32).min), float(np.finfo(np.float64).min)]  # fmt: skip


# ---- the loop, with a switch for each wrong idea


def _finite(m):
    return np.where(m == -math.inf, 0.0, m)


def step(Qi, Kj, Vj, Oi, li, mi, hidden=None, *, scale=lambda d: d**-0.5, fill=-math.inf,
         mask="set", max_of="all", own_max=True, l_power=1, O_power=1, new_power=1, swapped=False,
         new_in_l=True, new_in_O=True, normalised="", times_l=True, divide=True, guards="m l",
         first_guard=False):  # fmt: skip
    """Lines 9 to 13 for one tile. Returns Oi, li, mi."""
    S = Qi @ Kj.T * scale(Qi.shape[1])
    if hidden is not None and mask in ("set", "add"):
        S = np.where(hidden, fill if mask == "set" else S + fill, S)
    m_tile = S.max(axis=1)
    m_new = {
        "all": np.maximum(mi, m_tile),
        "this tile": m_tile,
        "first tile": np.where(np.isneginf(mi), m_tile, mi),
        "whole tile": np.maximum(mi, S.max()) if S.size else mi,
        "nothing": np.maximum(mi, m_tile),
        "nothing, m kept": mi,
    }[max_of]
    fix = _finite if "m" in guards else np.asarray
    if max_of.startswith("nothing"):
        P, old, new = np.exp(S), np.ones_like(mi), np.ones_like(mi)
    else:
        top = fix(m_new)
        P = np.exp(S - (fix(m_tile) if own_max else top)[:, None])
        old = np.exp(mi - top)
        new = np.exp(m_tile - top) if own_max else np.ones_like(mi)
    if swapped:
        old, new = new, old
    if hidden is not None and mask == "after exp":
        P = np.where(hidden, 0.0, P)
    l_tile = P.sum(axis=1)
    if hidden is not None and mask == "after the sum":
        P = np.where(hidden, 0.0, P)
    if normalised:
        P = P / l_tile[:, None]
        l_tile = P.sum(axis=1) if normalised == "P and l" else l_tile

    def powered(x, power):
        return np.where(li == 0, 0.0, x**power) if first_guard else x**power

    new = new**new_power
    l_new = powered(old, l_power) * li + (new if new_in_l else 1.0) * l_tile
    was = powered(old, O_power) * (li if times_l else 1.0)
    O_sum = was[:, None] * Oi + (new[:, None] if new_in_O else 1.0) * (P @ Vj)
    l_safe = np.where(l_new == 0, 1.0, l_new) if "l" in guards else l_new
    return (O_sum / l_safe[:, None] if divide else O_sum), l_new, m_new


def sees(i, j, shift):
    """Lower right: query i sees key j."""
    return j <= i + shift


def tiled(Q, K, V, Br, Bc, causal=False, *, start=(0.0, -math.inf), ragged_k="short",
          lost_q=False, both_N="", by_q="", stored=True, reset=False, rule=sees, shift=None,
          local=False, skip="", row_by_row=False, at_the_end=None, **wrong):  # fmt: skip
    """Algorithm 1 with the wrong ideas that are about tiles. Returns O, l, m."""
    (Nq, d), Nk = Q.shape, len(K)
    shift = Nk - Nq if shift is None else shift
    O, l, m = np.zeros((Nq, d)), np.full(Nq, start[0]), np.full(Nq, start[1])
    Br = 1 if row_by_row else Br
    Nq, Nk = {"q": (Nq, Nq), "k": (Nk, Nk)}.get(both_N[:1], (Nq, Nk))
    end_k = Nk - Nk % Bc if ragged_k == "lost" else Nk
    end_q = Nq - Nq % Br if lost_q else Nq
    cut = "cut" in both_N
    for j0 in range(0, end_k, Bc):
        cols = slice(max(0, min(j0, Nk - Bc)) if ragged_k == "overlaps" else j0, j0 + Bc)
        cols = slice(cols.start, min(cols.stop, Nk)) if cut else cols
        Kj, Vj = K[cols], V[cols]
        if ragged_k == "padded":
            more = ((0, Bc - len(Kj)), (0, 0))
            Kj, Vj = np.pad(Kj, more), np.pad(Vj, more)
        if reset:
            O[:], l[:], m[:] = 0.0, start[0], start[1]
        for i0 in range(0, end_q, Br):
            rows = slice(i0, min(i0 + Br, Nq) if cut else i0 + Br)
            if causal and skip == "rest" and j0 > min(i0 + Br, Nq) - 1 + shift:
                break
            if causal and j0 > {"hidden": min(i0 + Br, Nq) - 1 + shift, "first row": i0 + shift,
                                "first row, no shift": i0}.get(skip, math.inf):  # fmt: skip
                continue
            if by_q == "K and V":
                Kj = K[rows]
            if by_q:
                Vj = V[rows]
            hidden = None
            if causal:
                i, j = np.arange(len(Q[rows]))[:, None], np.arange(len(Kj))[None]
                i, j = (i, j) if local else (i + i0, j + cols.start)
                hidden = ~rule(i, j, shift)
            Oi, li, mi = step(Q[rows], Kj, Vj, O[rows], l[rows], m[rows], hidden, **wrong)
            if stored:
                O[rows] = Oi
            if stored is True:
                l[rows], m[rows] = li, mi
    return at_the_end(O, l, m) if at_the_end else (O, l, m)


def by_parts(Q, K, V, Br, Bc, causal=False, *, O="right", l="right"):
    """Each K/V tile's own softmax; O is their sum or mean, l one of the wrong sums."""
    O_right, l_right, m = right(Q, K, V, Br, Bc, causal)
    shift = len(K) - len(Q)
    parts = [
        right(Q, K[j : j + Bc], V[j : j + Bc], Br, Bc, causal, shift - j)
        for j in range(0, len(K), Bc)
    ]
    total = sum((p[0] for p in parts), np.zeros_like(Q))
    O = {"right": O_right, "sum": total, "mean": total / max(1, len(parts))}[O]
    l_of = np.array([p[1] for p in parts]).reshape(len(parts), len(Q))
    sums = {"right": l_right, "added": l_of.sum(axis=0), "last": l_of[-1:].sum(axis=0),
            "tiles": (l_of > 0).sum(axis=0), "one": l_of.any(axis=0) * 1.0}  # fmt: skip
    return O, sums[l], m


# ---- what is right


def right(Q, K, V, Br, Bc, causal=False, shift=None):
    """The definition, on whole matrices: O, and each row's sum and maximum."""
    shift = len(K) - len(Q) if shift is None else shift
    S = Q @ K.T / math.sqrt(Q.shape[1])
    if causal:
        i, j = np.arange(len(Q))[:, None], np.arange(len(K))[None]
        S = np.where(sees(i, j, shift), S, -math.inf)
    m = S.max(axis=1, initial=-math.inf)
    P = np.exp(S - finite_or_zero(m)[:, None])
    l = P.sum(axis=1)
    return P @ V / np.where(l == 0, 1.0, l)[:, None], l, m


def right_step(Qi, Kj, Vj, Oi, li, mi):
    """The library's update on the plain sum l O, divided again."""
    S = Qi @ Kj.T / math.sqrt(Qi.shape[1])
    m, l, O_sum = online.update(online.State(mi, li, li[:, None] * Oi), S, Vj)
    return O_sum / l[:, None], l, m


# ---- the inputs


def scored(rng, Nq, Nk, d, levels, noise=1.0):
    """Q, K, V whose scores are about levels[j] for key j, and differ from row to row."""
    Q, K, V = (
        rng.standard_normal((Nq, d)),
        rng.standard_normal((Nk, d)),
        rng.standard_normal((Nk, d)),
    )
    Q, K = noise * Q, noise * K
    Q[:, 0] = 1 + 0.1 * rng.random(Nq)
    K[:, 0] = math.sqrt(d) * (np.asarray(levels) + 0.3 * rng.random(Nk))
    return Q, K, V


def tolerances(Q, K, V, m=None):
    """What rounding may do to O, l and m. A dot product rounds by its terms, not by its sum."""
    d = Q.shape[1]
    size = float((np.abs(Q) @ np.abs(K).T).max(initial=0.0)) / math.sqrt(d) * (d + 4) / 4
    if m is not None:
        size += float(np.abs(m[np.isfinite(m)]).max(initial=0.0))
    O, L = rounding(size, len(K), V)
    return O, L * max(1, len(K)), 3 * float(np.finfo(np.float64).eps) * size


def probes(seed):
    """Stage 0: square. 1: ragged. 2: hostile scores, more queries than keys. 3: causal, one K/V
    block. 4: causal. 5: rows that see no key. 6: no key at all."""
    rng = np.random.default_rng(seed)

    def probe(says, Nq, Nk, Br, Bc, levels=0.0, stage=0, causal=False, d=3):
        Q, K, V = scored(rng, Nq, Nk, d, levels)
        where = f"Nq = {Nq}, Nk = {Nk}, d = {d}, Br = {Br}, Bc = {Bc}"
        arguments = {"Q": Q, "K": K, "V": V, "Br": Br, "Bc": Bc, "causal": causal}
        return Probe(f"{where}: {says}", arguments, tolerances(Q, K, V), stage)

    def ramp(N, low, high):
        return np.linspace(low, high, N)

    return [
        probe("four tiles", 4, 4, 2, 2),
        probe("nine tiles, the maximum rises", 6, 6, 2, 2, ramp(6, 0, 4)),
        probe("nine tiles, the maximum falls", 6, 6, 2, 2, ramp(6, 4, 0)),
        probe("all scores below 0", 4, 4, 2, 2, -6.0, d=4),
        probe("the last K/V block is short", 4, 7, 2, 3, ramp(7, 2, -4), 1),
        probe("the last Q block is short", 5, 6, 2, 3, ramp(6, -3, 0), 1),
        probe("both are short", 7, 8, 4, 3, ramp(8, -6, -4), 1),
        probe("blocks larger than N", 3, 5, 8, 8, 1.0, 1),
        probe("blocks of one", 2, 3, 1, 1, ramp(3, 0, 3), 1),
        probe("the maximum rises by 60", 5, 6, 4, 2, ramp(6, 0, 60), 2),
        probe("the maximum falls by 60", 5, 6, 4, 2, ramp(6, 60, 0), 2),
        probe("all scores near -1000", 4, 5, 2, 3, -1000.0, 2),
        probe("scores near 800: exp of them overflows", 4, 5, 2, 3, 800.0, 2),
        probe("more queries than keys", 7, 4, 4, 2, 1.0, 2),
        probe("causal, all keys in one block", 4, 7, 2, 7, ramp(7, 0, 2), 3, True),
        probe("causal, all keys in one block", 5, 6, 2, 8, ramp(6, 2, 0), 3, True),
        probe("causal, Nq = Nk", 6, 6, 4, 2, ramp(6, 0, 3), 4, True),
        probe("causal, more keys than queries", 4, 7, 3, 2, ramp(7, 4, 0), 4, True),
        probe("causal, large blocks of Q", 8, 9, 4, 3, ramp(9, 0, 30), 4, True),
        probe("causal, one query", 1, 6, 4, 2, 0.0, 4, True),
        probe("causal: rows 0 to 2 see no key", 7, 4, 4, 2, 1.0, 5, True),
        probe("causal: rows 0 to 4 see no key", 8, 3, 4, 2, ramp(3, -900, -840), 5, True),
        probe("no key at all", 3, 0, 2, 2, np.zeros(0), 6),
    ]


def step_probes(seed):
    """Stage 0: moderate scores. Stage 1: hostile ones."""
    rng = np.random.default_rng(seed)

    def probe(says, rows, keys, before, level, was, stage=0, d=3):
        Q, K, V = scored(rng, rows, before + keys, d, [was] * before + [level] * keys)
        Oi, li, mi = right(Q, K[:before], V[:before], rows, 1)
        arguments = {"Qi": Q, "Kj": K[before:], "Vj": V[before:], "Oi": Oi, "li": li, "mi": mi}
        return Probe(f"{rows} rows, {keys} keys: {says}", arguments, tolerances(Q, K, V, mi), stage)

    return [
        probe("a second tile, larger scores", 2, 3, 2, 3.0, 0.0),
        probe("a second tile, smaller scores", 3, 2, 3, 0.0, 3.0),
        probe("the first tile (m = -inf, l = 0)", 2, 3, 0, 0.5, 0.0),
        probe("all scores below 0", 3, 4, 4, -5.0, -6.0, d=4),
        probe("one row, one key", 1, 1, 3, 1.0, 0.0),
        probe("the maximum rises by 60", 3, 4, 5, 60.0, 0.0, 1),
        probe("the maximum was 60 higher", 3, 4, 5, 0.0, 60.0, 1),
        probe("all scores near -1000", 3, 4, 4, -1000.0, -1002.0, 1),
        probe("scores near 800: exp of them overflows", 3, 4, 4, 800.0, 799.0, 1),
    ]


def big(seed):
    """Long enough that an N x N array stands out: 1 MiB even if it holds only True and False."""
    Q, K, V = scored(np.random.default_rng(seed), MEMORY_N, MEMORY_N, 8, np.zeros(MEMORY_N))
    return {"Q": Q, "K": K, "V": V, "Br": 32, "Bc": 16, "causal": True}


def allowed_memory(arguments):
    """Bytes: nine tenths of one byte for each score; several times what the plain loop holds."""
    return 9 * len(arguments["Q"]) * len(arguments["K"]) // 10


# ---- the wrong ideas: id, what is wrong, where to read, and its switches (one dict a variant)

IN_THE_STEP = [
    (
        "no-max",
        "you take exp of the bare scores: no maximum is subtracted.",
        SUMS,
        [{"max_of": "nothing"}, {"max_of": "nothing, m kept"}],
    ),
    (
        "max-of-this-tile",
        "your new maximum is this tile's alone. Take the larger of it and the old m.",
        CARRY,
        [{"max_of": "this tile"}],
    ),
    (
        "max-of-first-tile",
        "your maximum is the first tile's for ever. A later tile may hold a larger score.",
        CARRY,
        [{"max_of": "first tile"}],
    ),
    (
        "max-of-the-whole-tile",
        "one maximum for the whole tile. Each row has its own: S.max(axis=1).",
        LINES,
        [{"max_of": "whole tile"}],
    ),
    (
        "nothing-rescaled",
        "neither l nor O is rescaled when the maximum rises.",
        RESCALE,
        [{"l_power": 0, "O_power": 0}],
    ),
    (
        "O-not-rescaled",
        "l is rescaled when the maximum rises, O is not. Both hold old exponentials.",
        OUTPUT,
        [{"O_power": 0}],
    ),
    (
        "l-not-rescaled",
        "O is rescaled when the maximum rises, l is not. Both hold old exponentials.",
        OUTPUT,
        [{"l_power": 0}],
    ),
    (
        "rescale-inverted",
        "your rescale factor is upside down: it is e^(m_old - m_new), at most 1.",
        RESCALE,
        [
            {"l_power": -1, "O_power": -1, "first_guard": g, "new_power": new}
            for g in (False, True)
            for new in (1, -1)
        ],
    ),
    (
        "O-rescale-inverted",
        "you divide the old O by e^(m_old - m_new). Multiply by it, as you do with l.",
        OUTPUT,
        [{"O_power": -1}, {"O_power": -1, "first_guard": True}],
    ),
    (
        "factors-swapped",
        "the two factors of line 11 are swapped: e^(m_old - m_new) goes with the old l and O.",
        LINES,
        [{"swapped": True, "guards": g} for g in ("m l", "m")],
    ),
    (
        "l-old-forgotten",
        "O arrives divided by the old l. Multiply it by l_old before you add (line 12).",
        SYMPTOMS,
        [{"times_l": False}],
    ),
    (
        "never-divided",
        "O is the plain sum: it is not divided by l_new (line 12).",
        LINES,
        [{"divide": False}, {"divide": False, "times_l": False}],
    ),
    (
        "tile-not-at-new-max",
        "the tile's own P and l are relative to m_tile: multiply both by e^(m_tile - m_new).",
        LINES,
        [{"new_in_l": False, "new_in_O": False}],
    ),
    (
        "tile-O-not-at-new-max",
        "P V is still relative to m_tile: multiply it by e^(m_tile - m_new), as you do with l.",
        LINES,
        [{"new_in_O": False}],
    ),
    (
        "tile-l-not-at-new-max",
        "l of the tile is still relative to m_tile: multiply it by e^(m_tile - m_new).",
        LINES,
        [{"new_in_l": False}],
    ),
    (
        "normalised-in-each-tile",
        "you divide P by its sum within the tile. The sum of a row goes over all tiles.",
        PER_TILE,
        [{"normalised": "P"}, {"normalised": "P and l"}],
    ),
    (
        "scale-forgotten",
        "the scores are not scaled: S = Q K^T / sqrt(d).",
        LINES,
        [{"scale": lambda d: 1.0}],
    ),
    (
        "scale-by-d",
        "the scores are divided by d. The scale is 1 / sqrt(d).",
        LINES,
        [{"scale": lambda d: 1 / d}],
    ),
    (
        "scale-by-d-plus-1",
        "your d is one too large: the scale is 1 / sqrt(d), with d the width of Q.",
        LINES,
        [{"scale": lambda d: (d + 1) ** -0.5}],
    ),
    (
        "scale-multiplied",
        "the scores are multiplied by sqrt(d). Divide by it.",
        LINES,
        [{"scale": lambda d: d**0.5}],
    ),
]


def _out(order):
    """The outputs in a wrong order, or a wrong thing in their place."""

    def give(O, l, m):
        l_safe = np.where(l == 0, 1.0, l)
        L = m + np.log(l_safe)
        return {"O m l": (O, m, l), "O l L": (O, l, L), "O L m": (O, L, m),
                "twice": (O / l_safe[:, None], l, m)}[order]  # fmt: skip

    return give


IN_THE_LOOP = [
    (
        "l-and-m-swapped",
        "l and m are in each other's place: return O, l, m.",
        LINES,
        [{"at_the_end": _out("O m l")}],
    ),
    (
        "L-instead-of-m",
        "you return L = m + log(l) where m belongs. L is FlashAttention-2's; here: O, l, m.",
        LINES,
        [{"at_the_end": _out("O l L")}],
    ),
    (
        "L-instead-of-l",
        "you return L = m + log(l) where l belongs. L is FlashAttention-2's; here: O, l, m.",
        LINES,
        [{"at_the_end": _out("O L m")}],
    ),
    (
        "divided-twice",
        "O is divided by l once more at the end. Line 12 has divided it already.",
        LINES,
        [{"at_the_end": _out("twice")}],
    ),
    (
        "plain-sum-times-l",
        "your O is a plain sum, divided at the end: then do not multiply it by l_old as well.",
        OUTPUT,
        [{"divide": False, "at_the_end": _out("twice")}],
    ),
    (
        "max-starts-at-0",
        "your m starts at 0, a score that the row may never have. It starts at -inf (line 2).",
        CARRY,
        [{"start": (0.0, 0.0)}],
    ),
    (
        "l-starts-at-1",
        "your l starts at 1, as if each row had seen a key. It starts at 0 (line 2).",
        LINES,
        [{"start": (1.0, -math.inf)}]
        + [{"start": (1.0, -math.inf), "skip": "hidden", "row_by_row": x} for x in (True, False)],
    ),
    (
        "l-and-m-not-stored",
        "l and m are not written back (line 13), so each tile thinks it is the first.",
        LINES,
        [{"stored": "O"}],
    ),
    (
        "nothing-stored",
        "nothing is written back to O, l and m (lines 12 and 13).",
        LINES,
        [{"stored": False}],
    ),
    (
        "reset-in-each-block",
        "O, l and m start anew for each K/V block. Line 2 stands before both loops.",
        LINES,
        [{"reset": True}],
    ),
    (
        "V-by-the-Q-block",
        "you take V from the rows of the Q block. V goes with K: block j.",
        TILES,
        [{"by_q": "V"}],
    ),
    (
        "K-and-V-by-the-Q-block",
        "you take K and V from the rows of the Q block. They are block j, O and Q are block i.",
        TILES,
        [{"by_q": "K and V"}],
    ),
    (
        "padding-scored-0",
        "the short K tile is filled up with zeros, and these score 0: they count as keys.",
        TILES,
        [{"ragged_k": "padded"}],
    ),
    (
        "last-K-tile-lost",
        "the last, shorter K/V block is never visited. Tc is rounded up.",
        SYMPTOMS,
        [{"ragged_k": "lost"}],
    ),
    (
        "last-Q-tile-lost",
        "the last, shorter Q block is never visited. Tr is rounded up.",
        SYMPTOMS,
        [{"lost_q": True}],
    ),
    (
        "last-tiles-lost",
        "the last, shorter blocks are never visited, of Q and of K/V. Tr and Tc are rounded up.",
        SYMPTOMS,
        [{"lost_q": True, "ragged_k": "lost"}],
    ),
    (
        "last-K-tile-overlaps",
        "the last K/V block is moved back to be full, so some keys are counted twice.",
        TILES,
        [{"ragged_k": "overlaps"}],
    ),
    (
        "one-N-for-both",
        "you use one length for both loops. There are Nq queries and Nk keys.",
        TILES,
        [{"both_N": x} for x in ("q", "q, cut", "k", "k, cut")],
    ),
    (
        "no-max",
        "you take exp of the bare scores: no maximum is subtracted.",
        SUMS,
        [{"max_of": "nothing, m kept", "start": (0.0, 0.0)}]
        + [  # m is only tracked, and l brought to it at the end: wrong where exp overflows
            {"max_of": "nothing", "guards": g, "at_the_end": lambda O, l, m: (O, l * np.exp(-m), m)}
            for g in ("m l", "")
        ],
    ),
    (
        "causal-off-by-one",
        "your causal mask hides a query's own key: j < i where j <= i belongs.",
        HIDDEN,
        [{"rule": lambda i, j, shift: j < i + shift}],
    ),
    (
        "causal-one-too-many",
        "your causal mask shows one key too many: the next one, j = i + 1, is hidden.",
        HIDDEN,
        [{"rule": lambda i, j, shift: j <= i + shift + 1}],
    ),
    (
        "causal-reversed",
        "your causal mask shows the later keys and hides the earlier ones.",
        HIDDEN,
        [{"rule": lambda i, j, shift: j >= i + shift}, {"rule": lambda i, j, shift: j >= i}],
    ),
    (
        "causal-upper-left",
        "your diagonal starts upper left. Put the last query on the last key: j <= i + Nk - Nq.",
        CORNERS,
        [{"shift": 0}, {"shift": 0, "skip": "hidden"}],
    ),
    (
        "causal-shift-reversed",
        "your diagonal is shifted the wrong way: j <= i + Nk - Nq, not i + Nq - Nk.",
        CORNERS,
        [{"rule": lambda i, j, shift: j <= i - shift, "guards": g, "own_max": own}
         for g in ("m l", "m", "") for own in (True, False)],
    ),
    (
        "causal-inside-each-tile",
        "your causal mask counts i and j inside the tile. Add the tile's first row and column.",
        HIDDEN,
        [{"local": True}, {"local": True, "rule": lambda i, j, shift: j <= i}],
    ),
    (
        "causal-on-whole-tiles-only",
        "no score inside a tile is hidden. A tile that the diagonal crosses needs the mask.",
        HIDDEN,
        [{"rule": lambda i, j, shift: j < j + 1, "skip": s} for s in ("", "hidden")],
    ),
    (
        "mask-after-exp",
        "you hide keys in P, after exp: m may be the score of a key that is hidden.",
        HIDDEN,
        [{"mask": "after exp"}],
    ),
    (
        "hidden-keys-in-l",
        "you hide keys in P after its sum was taken, so l counts the hidden ones.",
        HIDDEN,
        [{"mask": "after the sum"}],
    ),
    (
        "hidden-scores-0",
        "hidden scores are set to 0, and e^0 is 1: they still count. Set them to -inf.",
        HIDDEN,
        [{"fill": 0.0}],
    ),
    (
        "skips-a-tile-it-needs",
        "you skip a tile of which a later row still sees a key. Ask its last row, not its first.",
        HIDDEN,
        [{"skip": s} for s in ("first row", "first row, no shift")],
    ),
    (
        "hidden-tile-ends-the-loop",
        "a hidden tile ends your loop over Q (break). Later Q blocks see it: continue.",
        HIDDEN,
        [{"skip": "rest"}],
    ),
    (
        "no-guard",
        "-inf - (-inf) is NaN: a row to which the tile shows no key needs a guard for its maximum.",
        GUARDS,
        [{"guards": g, "own_max": own, "skip": s} for s in ("", "hidden")
         for g, own in (("", True), ("l", True), ("", False), ("l", False))],
    ),
    (
        "no-guard-for-l",
        "the maximum is guarded, the division is not: a row that sees no key divides 0 by 0.",
        GUARDS,
        [{"guards": "m", "skip": s} for s in ("", "hidden")],
    ),
    (
        "hidden-by-a-finite-number",
        "a large negative number instead of -inf: a row that sees no key averages hidden ones.",
        GUARDS,
        [{"fill": x, "skip": s, "mask": how, "start": (0.0, m)} for x in BIG_NEGATIVE
         for how in (("set", "add") if x >= -1e12 else ("set",))
         for s, m in (("", -math.inf), ("", x), ("hidden", -math.inf), ("hidden", x))],
    ),
    (
        "max-starts-finite",
        "your m starts at a finite number. It starts at -inf, and a row that sees no key keeps it.",
        GUARDS,
        [{"start": (0.0, x), "guards": g, "skip": s} for x in BIG_NEGATIVE
         for g, s in (("m l", ""), ("m", ""), ("m", "hidden"))],
    ),
]  # fmt: skip

# The same ideas and two more, where only the outputs show them.
BY_PARTS = [
    (
        "normalised-in-each-tile",
        "you divide P by its sum within the tile. The sum of a row goes over all tiles.",
        PER_TILE,
        [{"O": O, "l": l} for O in ("sum", "mean")
         for l in ("right", "added", "last", "tiles", "one")],
    ),
    (
        "l-not-rescaled",
        "your l adds up the tiles' sums as they are. They are relative to different maxima.",
        CARRY,
        [{"l": "added"}],
    ),
    (
        "l-of-the-last-tile",
        "your l is the last tile's alone. It is the sum over all tiles, brought to one maximum.",
        CARRY,
        [{"l": "last"}],
    ),
]  # fmt: skip


def _step_out(order):
    def program(Qi, Kj, Vj, Oi, li, mi):
        O, l, m = step(Qi, Kj, Vj, Oi, li, mi)
        return {"O m l": (O, m, l), "m l O": (m, l, O), "old m": (O, l, mi), "old l": (O, li, m)}[
            order
        ]

    return program


def _program(function, switches, with_hidden):
    if with_hidden:
        return lambda Q, K, V, Br, Bc, causal=False: function(Q, K, V, Br, Bc, causal, **switches)
    return lambda Qi, Kj, Vj, Oi, li, mi: function(Qi, Kj, Vj, Oi, li, mi, **switches)


def _mistakes(function, table, with_hidden=True):
    return tuple(
        Mistake(id, _program(function, switches, with_hidden), says, read)
        for id, says, read, variants in table
        for switches in variants
    )


STEP_MISTAKES = _mistakes(step, IN_THE_STEP, with_hidden=False) + (
    Mistake("l-and-m-swapped", _step_out("O m l"), "l and m are in each other's place: return "
            "Oi, li, mi.", LINES),
    Mistake("m-not-renewed", _step_out("old m"), "you return the old m: line 13 puts m_new in its "
            "place.", LINES),
    Mistake("l-not-renewed", _step_out("old l"), "you return the old l: line 13 puts l_new in its "
            "place.", LINES),
)  # fmt: skip
LOOP_MISTAKES = (
    _mistakes(tiled, IN_THE_STEP) + _mistakes(by_parts, BY_PARTS) + _mistakes(tiled, IN_THE_LOOP)
)
MAY_CALL = frozenset({"blocks", "finite_or_zero"})

INNER_STEP = Program(
    id="ex02-inner-step",
    text="Write inner_step(Qi, Kj, Vj, Oi, li, mi) -> Oi, li, mi.\n"
    "Lines 9 to 13 of Algorithm 1 for one tile, with the scale 1/sqrt(d).\n"
    "Oi arrives divided by li, and leaves divided by the new l.",
    outputs=("Oi", "li", "mi"),
    right=right_step,
    probes=step_probes,
    mistakes=STEP_MISTAKES,
    read=BY_HAND,
    library=MAY_CALL,
)

FLASH = Program(
    id="ex02-flash-attention",
    text="Write flash_attention(Q, K, V, Br, Bc, causal=False) -> O, l, m.\n"
    "Algorithm 1, K/V blocks outside, for any Nq, Nk, Br and Bc. No N x N array.\n"
    "causal: the last query sees the last key. A row that sees no key: O = l = 0, m = -inf.",
    outputs=("O", "l", "m"),
    right=right,
    probes=probes,
    mistakes=LOOP_MISTAKES,
    read=LOOP,
    library=MAY_CALL,
    big=big,
    memory=allowed_memory,
)

QUESTIONS = [INNER_STEP, FLASH]
