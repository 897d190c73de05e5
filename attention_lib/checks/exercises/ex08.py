"""Exercise 8, the project: the loop-swapped variant from nothing.

FlashAttention-2 (arXiv 2307.08691, Algorithm 1): Q blocks outside, K/V blocks inside, O un-scaled
until one division. Two sets of wrong ideas, and what each gives:
  `loop`    the values: the right loop, or the loop with one slip in it
  `moved`   the traffic: the right closed form, or the form with one slip in it
and `SUSPECTS`, the counts of loops that people write in place of this one.
"""

import functools
import math

import numpy as np

from attention_lib import inputs, memory, traffic
from attention_lib.checks.exercises import ex02
from attention_lib.checks.judge import as_arrays, observe, same
from attention_lib.checks.kinds import Choice, Mistake, Number, Probe, Program
from attention_lib.checks.programs import rounding
from attention_lib.memory import HBM
from attention_lib.tiled import blocks
from attention_lib.traffic import flash_traffic, q_outer_traffic, tile_elements

SOFTMAX = "notebook 02, 'A row needs its largest score and its sum'"
EACH_TILE = "notebook 02, 'Softmax of each tile is a different function'"
RESCALE = "notebook 02, 'Carry two numbers: m and l'"
OUTPUT = "notebook 02, 'The output is carried the same way'"
GUARDS = "notebook 02, 'A chunk in which nothing is visible'"
MERGE = "notebook 02, 'Merge: one operation behind all of it'"
TILES = "notebook 03, 'The score matrix, cut into tiles'"
LINES = "notebook 03, 'Algorithm 1, line by line'"
CAUSAL = "notebook 03, 'Causal: tiles that are never computed'"
CORNERS = "notebook 03, 'Two corners for one mask'"
WHOSE = "notebook 03, 'Whose loop is it'"
COUNTS = "notebook 04, 'A memory that counts'"
FORMULA = "notebook 04, 'The formula, term by term'"
OTHER = "notebook 04, 'The other order'"
SKIPPED = "notebook 04, 'Causal: skipped tiles'"
HELD = "notebook 06, 'What a tile step holds'"

# ================================================================ deliverable 1: the values

POWERS = {  # of the rescale factor: for l, for O
    "nothing-rescaled": (0, 0),
    "l-not-rescaled": (0, 1),
    "O-not-rescaled": (1, 0),
    "rescale-inverted": (-1, -1),
    "printed-inverse": (1, -1),
}


def loop(Q, K, V, Br, Bc, causal=False, hbm=None, *, slip=None, hidden_score=-math.inf,
         first_apart=False, variant=False):  # fmt: skip
    """The right loop, or the one with this slip in it; returns O and L. hbm is not used.

    first_apart: the first block is not rescaled. variant: a slip's other way to be written.
    """
    (Nq, d), Nk = Q.shape, len(K)
    scale = {
        "not-scaled": 1.0,
        "scaled-by-d": 1 / d,
        "scaled-up": math.sqrt(d),
        "scaled-by-keys": 1 / math.sqrt(Nk),
    }.get(slip, 1 / math.sqrt(d))
    shift = 0 if slip == "upper-left" else Nk - Nq
    shift += {"own-key-hidden": -1, "next-key-seen": 1}.get(slip, 0)
    causal = causal and slip != "mask-ignored"
    O, L = np.zeros((Nq, d)), np.zeros(Nq)
    state = None
    for i, rows in enumerate(blocks(Nq, Br)):
        n = rows.stop - rows.start
        if slip == "last-q-block-lost" and n < Br:
            L[rows] = -math.inf if variant else 0.0
            continue
        if state is None or slip != "state-not-reset":
            state = _start(n, d, slip)
        state = [x[:n] for x in state]
        visited = 0
        for j, cols in enumerate(blocks(Nk, Bc)):
            if causal and _skips(i, j, rows, cols, shift, slip):
                continue
            if slip == "last-kv-block-lost" and cols.stop - cols.start < Bc:
                continue
            S, Vj = Q[rows] @ K[cols].T * scale, V[cols]
            hidden = np.zeros((n, len(Vj)), bool)
            if causal:
                hidden = _hidden(rows, cols, shift, slip, variant)
            if slip == "padding-scored-0":
                short = ((0, 0), (0, Bc - len(Vj)))
                S, hidden, Vj = np.pad(S, short), np.pad(hidden, short), np.pad(Vj, short[::-1])
            if slip == "restarted-in-each-block":
                state = _start(n, d, slip)
            *state, m_tile = _update(state, S, hidden, Vj, slip, hidden_score, visited == 0,
                                     first_apart)  # fmt: skip
            visited += 1
        if slip == "skipped-rows-not-written" and not visited:
            continue
        last = rows.stop == Nq
        O[rows], L[rows] = _finish(state, m_tile if visited else state[0], slip, last, variant)
    return O, L


def _start(n, d, slip):
    m = np.full(n, 0.0 if slip == "max-starts-at-0" else -math.inf)
    return [m, np.zeros(n), np.zeros((n, d))]


def _skips(i, j, rows, cols, shift, slip):
    if slip == "cut-tiles-skipped":
        return cols.stop - 1 > rows.start + shift
    if slip == "first-row-decides":
        return cols.start > rows.start + shift
    if slip == "block-numbers-compared":
        return j > i
    return cols.start > rows.stop - 1 + shift


def _hidden(rows, cols, shift, slip, variant):
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)[None, :]
    if slip == "tile-not-masked":
        return np.zeros((i.size, j.size), bool)
    if slip == "mask-upside-down":
        return j < i + shift
    cut = variant or cols.stop - 1 > rows.start + shift
    if slip == "positions-in-the-tile":
        return (j - cols.start > i - rows.start) & cut
    return j > i + shift


def _update(state, S, hidden, V, slip, hidden_score, first, first_apart):
    m, l, o = state
    bare, S = S, np.where(hidden, hidden_score, S)
    late = slip == "l-counts-hidden"  # hidden scores leave P, after l and m were taken
    m_tile = (bare if late else S).max(axis=1)
    m_new = {
        "no-max": 0 * l,
        "max-of-this-block": m_tile,
        "max-of-first-block": m_tile if first else m,
    }.get(slip, np.maximum(m, m_tile))
    safe = m_new if slip == "no-guard" else np.where(np.isneginf(m_new), 0.0, m_new)
    P = np.exp((bare if late else S) - safe[:, None])
    alpha = np.exp((m_tile if slip == "factor-of-the-tile" else m) - safe)
    if slip == "no-max":
        alpha = np.ones(len(m))
    for_l, for_O = (1, 1) if first and first_apart else POWERS.get(slip, (1, 1))
    l_old, l = l, alpha**for_l * l + P.sum(axis=1)
    part = (np.where(hidden, 0.0, P) if late else P) @ V
    factor = alpha**for_O * (l_old if slip == "line-12-half-copied" else 1.0)
    if slip == "softmax-of-each-block":
        factor, part = np.ones(len(m)), part / P.sum(axis=1)[:, None]
    if slip == "O-overwritten":
        factor = np.zeros(len(m))
    o = factor[:, None] * o + part
    if slip == "divided-in-each-block":
        o = o / l[:, None]
    if slip == "l-of-the-last-block":
        l = P.sum(axis=1)
    return m_new, l, o, m_tile


def _finish(state, m_tile, slip, last, variant):
    m, l, o = state
    l_safe = l if slip == "no-guard" else np.where(l == 0, 1.0, l)
    divide = {
        "never-divided": False,
        "softmax-of-each-block": False,
        "divided-in-each-block": variant,
        "last-q-block-not-divided": not last,
    }.get(slip, True)
    L = {
        "L-without-m": np.log(l_safe),
        "L-with-last-max": m_tile + np.log(l_safe),
        "L-minus-log": m - np.log(l_safe),
        "L-is-l": l,
        "L-is-m": m,
        "L-of-nothing-is-0": np.where(l == 0, 0.0, m + np.log(l_safe)),
    }.get(slip, m + np.log(l_safe))
    return o / l_safe[:, None] if divide else o, L


def right(Q, K, V, Br, Bc, causal=False):
    """By the definition, all keys at once."""
    O, l, m = ex02.right(Q, K, V, Br, Bc, causal)
    return O, m + np.log(np.where(l == 0, 1.0, l))


def probes(seed):
    """Stages: plain, hostile scores and shapes, causal, Nq < Nk, rows that see no key."""
    rng = np.random.default_rng(seed)

    def probe(says, Nq, Nk, Br, Bc, stage, causal=False, rise=0.0, level=0.0, d=4):
        Q, K, V = (rng.standard_normal((n, d)) for n in (Nq, Nk, Nk))
        K[:, 0] = (level + rise * np.linspace(0, 1, Nk)) * math.sqrt(d) + K[:, 0]
        if rise or level:
            Q[:, 0] = 1 + 0.1 * rng.random(Nq)
        size = float((np.abs(Q) @ np.abs(K).T).max()) / math.sqrt(d)
        tolerance = rounding((d + 4) / 4 * size, Nk, V)  # a score is itself a sum of d products
        shape = f"N = {Nq}" if Nq == Nk else f"{Nq} rows, {Nk} keys"
        words = f"{shape}, d = {d}, Br = {Br}, Bc = {Bc}{', causal' if causal else ''}{says}"
        arguments = {"Q": Q, "K": K, "V": V, "Br": Br, "Bc": Bc}
        return Probe(words, arguments | ({"causal": True} if causal else {}), tolerance, stage)

    return [
        probe("", 8, 8, 4, 3, 0),
        probe("", 9, 9, 4, 6, 0),
        probe("", 11, 11, 6, 4, 0, d=3),
        probe(": scores rise by 40", 11, 11, 4, 5, 1, rise=40),
        probe(": scores fall by 40", 11, 11, 5, 4, 1, rise=-40),
        probe(": all scores near -1000", 8, 8, 4, 4, 1, level=-1000),
        probe(": scores near 800, exp overflows", 8, 8, 4, 4, 1, level=800),
        probe(": scores rise by 2000", 8, 8, 4, 4, 1, rise=2000),
        probe("", 5, 12, 2, 5, 1),
        probe("", 9, 4, 4, 3, 1),
        probe("", 7, 7, 20, 30, 1),
        probe("", 4, 4, 1, 1, 1, rise=30),
        probe("", 1, 1, 4, 4, 1),
        probe("", 12, 12, 4, 4, 2, causal=True),
        probe("", 10, 10, 4, 6, 2, causal=True),
        probe("", 10, 10, 5, 3, 2, causal=True),
        probe(": scores rise by 40", 11, 11, 4, 5, 2, causal=True, rise=40),
        probe(": scores fall by 40", 11, 11, 5, 4, 2, causal=True, rise=-40),
        probe("", 5, 12, 2, 5, 3, causal=True),
        probe("", 1, 9, 1, 4, 3, causal=True),
        probe(": 3 rows see no key", 7, 4, 4, 3, 4, causal=True),
        probe(": 6 rows see no key, a whole block", 10, 4, 4, 3, 5, causal=True),
    ]


def _mistake(id, says, read, **switches):
    return Mistake(id, functools.partial(loop, slip=id, **switches), says, read)


def _mistakes():
    """Those that show late come first: an early one may do the same to a row that sees no key.

    Some ideas have two entries: what they give depends on how they are written.
    """
    inverted = "your rescale factor is upside down: it is e^(m_old - m_new), at most 1."
    printed = (
        "O is rescaled by the inverse of its factor, as FlashAttention-2 prints it in line 10. "
        "Leave the ^-1 out."
    )
    each = "you divide by l in each block, so O no longer is the sum that l belongs to."
    own = "each block has its own softmax here, and the results are added. All keys share one l."
    lost = "the last, shorter block of Q is never visited: its rows are not written."
    local = "you mask by positions inside the tile. Compare positions in the whole matrix."
    many = (
        "a large negative score hides a key only beside a visible one. This row sees none: O "
        "became a mean of V."
    )
    return (
        # rows that see no key
        _mistake("no-guard", "-inf - (-inf), or 0/0, is NaN: guard the maximum, and the division, "
                 "of a row that sees nothing.", GUARDS),
        *(
            Mistake("finite-mask", functools.partial(loop, hidden_score=low), many, GUARDS)
            for low in (-1e4, -1e5, -1e6, -1e8, -1e9, -1e10, -1e12, -1e20, -1e30, -1e38,
                        float(np.finfo(np.float32).min), float(np.finfo(np.float64).min))
        ),
        _mistake("L-of-nothing-is-0", "a row that sees no key has L = -inf, the log of an empty "
                 "sum. 0 would be a sum of 1.", GUARDS),
        _mistake("skipped-rows-not-written", "a Q block in which nothing is visible is never "
                 "written: O = 0, L = -inf.", GUARDS),
        # causal
        _mistake("mask-ignored", "causal=True changes nothing in your loop.", CAUSAL),
        _mistake("tile-not-masked", "hidden tiles are skipped, but inside a tile that the diagonal "
                 "cuts every key counts.", CAUSAL),
        _mistake("cut-tiles-skipped", "you skip the tiles that the diagonal cuts. They hold "
                 "visible scores: mask them.", CAUSAL),
        _mistake("first-row-decides", "you skip a tile because its block's first row sees none of "
                 "it. The last row decides.", CAUSAL),
        _mistake("block-numbers-compared", "you skip where j > i, by block numbers. They are keys "
                 "and rows only after times Bc and Br.", CAUSAL),
        _mistake("positions-in-the-tile", local, CAUSAL),
        _mistake("positions-in-the-tile", local, CAUSAL, variant=True),
        _mistake("own-key-hidden", "query i does not see key i. Only j > i + Nk - Nq is hidden.",
                 CORNERS),
        _mistake("next-key-seen", "query i sees key i + 1. Only j <= i + Nk - Nq is visible.",
                 CORNERS),
        _mistake("mask-upside-down", "your mask hides the past and shows the future.", CORNERS),
        Mistake("hidden-scores-0", functools.partial(loop, hidden_score=0.0),
                "hidden scores are 0 in your loop, and exp(0 - m) is a weight. Hidden means -inf.",
                GUARDS),
        _mistake("l-counts-hidden", "hidden keys leave P, but l and m were taken with them. Hide "
                 "the scores first.", CAUSAL),
        _mistake("upper-left", "with Nq and Nk different, the last query belongs to the last key: "
                 "j <= i + Nk - Nq.", CORNERS),
        # dense
        _mistake("not-scaled", "the scores are not divided by sqrt(d).", LINES),
        _mistake("scaled-by-d", "the scores are divided by d (or twice by sqrt(d)). Once by "
                 "sqrt(d).", LINES),
        _mistake("scaled-up", "the scores are multiplied by sqrt(d): divide.", LINES),
        _mistake("scaled-by-keys", "the scores are divided by the root of the number of keys. It "
                 "is the root of d.", LINES),
        _mistake("no-max", "you take exp of the bare scores: no maximum is subtracted.", SOFTMAX),
        _mistake("max-starts-at-0", "your running maximum starts at 0, a score that the row may "
                 "never have. Start at -inf.", RESCALE),
        _mistake("max-of-first-block", "your maximum is the first block's for ever; later blocks "
                 "may be larger.", RESCALE),
        _mistake("max-of-this-block", "your new maximum is this block's alone. Take the larger of "
                 "it and the old one.", RESCALE),
        _mistake("nothing-rescaled", "neither l nor O is rescaled when the maximum rises.",
                 RESCALE),
        _mistake("O-not-rescaled", "l is rescaled when the maximum rises, O is not. Un-scaled O "
                 "holds old exponentials too.", OUTPUT),
        _mistake("l-not-rescaled", "O is rescaled when the maximum rises, l is not. Both hold old "
                 "exponentials.", OUTPUT),
        _mistake("rescale-inverted", inverted, RESCALE),
        _mistake("rescale-inverted", inverted, RESCALE, first_apart=True),
        _mistake("printed-inverse", printed, OUTPUT),
        _mistake("printed-inverse", printed, OUTPUT, first_apart=True),
        _mistake("factor-of-the-tile", "the old part takes the old maximum's factor, "
                 "e^(m_old - m_new). Yours is the tile's.", RESCALE),
        _mistake("line-12-half-copied", "you multiply O by l, as Algorithm 1's line 12 does, and "
                 "do not divide there. Un-scaled O needs neither.", WHOSE),
        _mistake("divided-in-each-block", each, OUTPUT),
        _mistake("divided-in-each-block", each, OUTPUT, variant=True),
        _mistake("softmax-of-each-block", own, EACH_TILE),
        _mistake("O-overwritten", "O holds the last block's part only: add to what is there.",
                 OUTPUT),
        _mistake("l-of-the-last-block", "l holds the last block's sum only: add to what is there.",
                 RESCALE),
        _mistake("restarted-in-each-block", "m, l and O start anew in each K/V block. Start them "
                 "once for each Q block.", WHOSE),
        _mistake("state-not-reset", "m, l and O are carried from one Q block into the next. Start "
                 "them anew for each.", WHOSE),
        _mistake("never-divided", "O is the un-scaled sum: divide by l once, at the end.", OUTPUT),
        _mistake("last-q-block-not-divided", "the last Q block is stored un-divided. Divide after "
                 "the inner loop, for every Q block.", OUTPUT),
        _mistake("last-kv-block-lost", "the last, shorter block of K and V is never visited.",
                 TILES),
        _mistake("last-q-block-lost", lost, TILES),
        _mistake("last-q-block-lost", lost, TILES, variant=True),
        _mistake("padding-scored-0", "the short K/V block is padded, and the padding has score 0, "
                 "so it takes weight.", TILES),
        _mistake("L-without-m", "L is log(l) alone. The sum was taken relative to m, so "
                 "L = m + log(l).", MERGE),
        _mistake("L-with-last-max", "the m in your L is the last block's maximum. Take the running "
                 "one.", MERGE),
        _mistake("L-minus-log", "a sign: L = m + log(l), the log of l e^m.", MERGE),
        _mistake("L-is-l", "you return l. L is the log-sum-exp, m + log(l).", MERGE),
        _mistake("L-is-m", "you return m. L is the log-sum-exp, m + log(l).", MERGE),
    )  # fmt: skip


def big(seed):
    Q, K, V = np.random.default_rng(seed).standard_normal((3, 1024, 8))
    return {"Q": Q, "K": K, "V": V, "Br": 64, "Bc": 16}


def _functions(*modules):
    """The qualified names of all functions in these modules, properties and inner ones too."""
    found = set()

    def walk(code):
        found.add(code.co_qualname)
        for inner in code.co_consts:
            if hasattr(inner, "co_qualname"):
                walk(inner)

    for module in modules:
        for thing in list(vars(module).values()):
            parts = vars(thing).values() if isinstance(thing, type) else [thing]
            for part in parts:
                part = getattr(part, "fget", part)
                if hasattr(part, "__code__"):
                    walk(part.__code__)
    return found


COUNTER = frozenset(_functions(memory, inputs) | {"blocks"})

FORWARD = Program(
    id="ex08-forward",
    text="Write q_outer(Q, K, V, Br, Bc, causal=False, hbm=None) -> O, L: attention in tiles, Q\n"
    "blocks outside, K/V blocks inside, one division per row.",
    outputs=("O", "L"),
    right=right,
    probes=probes,
    read=WHOSE,
    library=COUNTER,
    big=big,
    memory=lambda a: len(a["Q"]) * len(a["K"]),  # one byte an entry: less than a boolean mask
    mistakes=_mistakes(),
)

# ================================================================ deliverable 2: the counts


def tiles(N, Br, Bc, causal):
    """(rows, keys) of every tile that the order visits."""
    return [
        (r.stop - r.start, c.stop - c.start)
        for r in blocks(N, Br)
        for c in blocks(N, Bc)
        if not causal or c.start < r.stop
    ]


# N, d, Br, Bc: ragged, square, mirrored, and one block that holds all rows.
SHAPES = [(12, 2, 4, 3), (50, 4, 8, 16), (50, 4, 16, 8), (41, 3, 7, 7), (30, 2, 30, 4)]
RUNS = [(*shape, causal) for shape in SHAPES for causal in (False, True)]


def run(answer, N, d, Br, Bc, causal, hbm=None):
    """Run the learner's loop on an HBM. Returns the HBM, what was seen, and the inputs."""
    Q, K, V = np.random.default_rng(N + d).standard_normal((3, N, d))
    hbm = HBM() if hbm is None else hbm
    arguments = {"Q": Q, "K": K, "V": V, "Br": Br, "Bc": Bc, "causal": causal}
    return hbm, observe(answer, arguments | {"hbm": hbm}), arguments


def _words(N, d, Br, Bc, causal=False):
    return f"N = {N}, d = {d}, Br = {Br}, Bc = {Bc}{', causal' if causal else ''}"


def _needed(N, d, Br, Bc, causal, s=1):
    """Reads and writes of the order, with s statistics written for each row."""
    loads = sum(2 * keys * d for _, keys in tiles(N, Br, Bc, causal))
    return N * d + loads, N * d + s * N


def _kv_outer(N, d, Br, Bc, causal, s):
    rows = sum(r for r, _ in tiles(N, Br, Bc, causal))
    return 2 * N * d + rows * (2 * d + s), rows * (d + s)


def _kv_outer_whole_o(N, d, Br, Bc, causal, s):
    rows = sum(r for r, _ in tiles(N, Br, Bc, causal))
    return 2 * N * d + rows * d, N * d + s * N


def _q_inside(N, d, Br, Bc, causal, s, outside=0):
    reads, writes = _needed(N, d, Br, Bc, causal, s)
    again = d * sum(r for r, _ in tiles(N, Br, Bc, causal))
    return reads - N * d + again + outside * N * d, writes


def _o_round_trips(N, d, Br, Bc, causal, s, extra_reads=0, extra_writes=0):
    reads, _ = _needed(N, d, Br, Bc, causal)
    trips = (d + s) * sum(r for r, _ in tiles(N, Br, Bc, causal))
    return reads + trips + extra_reads * N * d, trips + extra_writes * N * d


def _o_final_store(N, d, Br, Bc, causal, s):
    reads, writes = _o_round_trips(N, d, Br, Bc, causal, s, extra_writes=1)
    return reads, writes + N


def _part(q=1, kv=1, o=1):
    """The counts of a loop that leaves something out: how much of each it counts."""

    def counts(N, d, Br, Bc, causal, s):
        reads, writes = _needed(N, d, Br, Bc, causal, s)
        return q * N * d + int(kv * (reads - N * d)), writes - (1 - o) * N * d

    return counts


def _k_and_v_once(N, d, Br, Bc, causal, s):
    return 3 * N * d, N * d + s * N


def _dense(N, d, Br, Bc, causal, s):
    return _needed(N, d, Br, Bc, False, s)


SUSPECTS = [  # id, what to say, where to read, its counts
    (
        "loops-not-swapped",
        "right numbers, but K and V are outside: Q comes again for every K/V block. Swap the "
        "loops.",
        WHOSE,
        (_kv_outer, _kv_outer_whole_o),
    ),
    (
        "q-loaded-for-each-tile",
        "you load the Q block again in the inner loop. It stays on chip: load it once, outside.",
        OTHER,
        (_q_inside, functools.partial(_q_inside, outside=1)),
    ),
    (
        "o-moved-in-each-step",
        "O goes to HBM and back in the inner loop. Keep it on chip, un-scaled, and store it once.",
        OTHER,
        (
            _o_round_trips,
            functools.partial(_o_round_trips, extra_writes=1),
            functools.partial(_o_round_trips, extra_reads=1, extra_writes=1),
            functools.partial(_o_round_trips, extra_reads=-1),
            _o_final_store,
        ),
    ),
    (
        "k-and-v-loaded-once",
        "you load all of K and V once. On chip there is room for one block of each: load it in "
        "the inner loop.",
        HELD,
        (_k_and_v_once,),
    ),
    (
        "hidden-tiles-loaded",
        "the causal run moves as much as the dense one: hidden tiles are loaded too. Skip them.",
        SKIPPED,
        (_dense,),
    ),
    (
        "k-or-v-not-loaded",
        "one of K and V never passes the counter: load both.",
        COUNTS,
        (_part(kv=0.5),),
    ),
    (
        "q-not-loaded",
        "Q never passes the counter: load its block too.",
        COUNTS,
        (_part(q=0),),
    ),
    (
        "o-not-stored",
        "O never passes the counter on its way out: store it.",
        COUNTS,
        (_part(o=0),),
    ),
    (
        "nothing-counted",
        "your loop takes hbm and moves nothing through it. Place the arrays with hbm.tensor, then "
        "load and store.",
        COUNTS,
        (lambda *shape: (0, 0),),
    ),
]


def _is(counts, seen):
    """Do these counts explain every run, for one s?"""
    return any(all(counts(*shape, s) == got for shape, got in seen.items()) for s in (0, 1, 2))


def right_counts(answer):
    """The loop moves what the order moves: Q once, K and V once for each Q block, O once."""
    seen = {}
    for shape in RUNS:
        hbm, call, _ = run(answer, *shape)
        if call.error or call.timed_out:
            problem = call.error or "it did not end in time"
            return "fails-with-an-hbm", f"with an HBM your loop fails: {problem}", COUNTS
        seen[shape] = (hbm.reads, hbm.writes)
    if _is(_needed, seen):
        return None
    for id, says, read, suspects in SUSPECTS:
        if any(_is(counts, seen) for counts in suspects):
            return id, says, read
    at = next((s for s in RUNS if seen[s] not in [_needed(*s, k) for k in (0, 1, 2)]), RUNS[0])
    reads, writes = _needed(*at, 0)
    text = (
        f"{_words(*at)}: your loop reads {seen[at][0]:,} and writes {seen[at][1]:,}.\n"
        f"The order reads {reads:,} and writes {writes:,}, and 0, 1 or 2 numbers a row."
    )
    return None, text, OTHER


class Changed(HBM):
    """An HBM in which one of the inputs is twice as large as what was handed over."""

    def __init__(self, array):
        super().__init__()
        self.changed = array

    def tensor(self, name, array):
        for x in (array, array.T):
            if x.shape == self.changed.shape and np.array_equal(x, self.changed):
                return super().tensor(name, 2 * array)
        return super().tensor(name, array)


def computes_on_loaded(answer):
    """What was loaded decides: change an input in HBM alone, and O must follow."""
    shape = (13, 4, 5, 3, False)
    _, _, given = run(answer, *shape)
    for name in "QKV":
        _, call, _ = run(answer, *shape, hbm=Changed(given[name]))
        arrays = {x: given[x] * (2 if x == name else 1) for x in "QKV"}
        want = as_arrays(right(**arrays, Br=5, Bc=3), 2)
        if not same(as_arrays(call.value, 2), want, 1e-9):
            text = f"you compute on {name} itself. Compute on what its load() returned."
            return "computes-in-hbm", text, COUNTS
    return None


def all_products_counted(answer):
    """Both products of every visited tile, and no hidden tile, go through hbm.matmul."""
    for shape in RUNS:
        N, d, Br, Bc, causal = shape
        got = run(answer, *shape)[0].matmul_flops
        want = 4 * d * sum(r * c for r, c in tiles(N, Br, Bc, causal))
        if got != want:
            names = {0: "no-product-counted", want // 2: "one-product-counted"}
            text = (
                f"{_words(*shape)}: {got:,} matmul FLOPs counted, its tiles need {want:,}. Both "
                "products of a tile go through hbm.matmul."
            )
            return names.get(got, "products-miscounted"), text, COUNTS
    return None


def one_tile_on_chip(answer):
    """K, V, Q, O and S tiles are held; little more, and nothing as long as N."""
    N, d, Br, Bc = 60, 4, 6, 10
    held = run(answer, N, d, Br, Bc, False)[0].peak_on_chip
    least = 2 * (Br + Bc) * d + Br * Bc
    most = tile_elements(Br, Bc, d) + 2 * Br * Bc + 2 * Br * d + 4 * Br  # room for P, P V, ...
    text = f"{_words(N, d, Br, Bc)}: {held:,} elements on chip; K, V, Q, O, S tiles: {least:,}."
    if held > most:
        says = "Load a block at a time, and use a tile's name again for the next."
        return "more-than-tiles-on-chip", f"{text}\n{says}", HELD
    if held < least:
        return "tiles-not-held", f"{text}\nNote S and O, too: hbm.hold(name, tile).", HELD
    return None


COUNTERS = Program(
    id="ex08-counters",
    text="Let q_outer load, store, multiply and hold through hbm, an attention_lib.HBM, so that\n"
    "a run counts what it moves.",
    outputs=("O", "L"),
    right=right,
    probes=probes,
    read=COUNTS,
    library=COUNTER,
    mistakes=FORWARD.mistakes,
    claims=(right_counts, one_tile_on_chip, all_products_counted, computes_on_loaded),
)


def moved(N, d, Br, Bc, causal=False, *, slip=None, s=1):
    """Elements that the order moves, s of them for each row's statistics; or a wrong idea of it."""
    Tr, Tc = math.ceil(N / Br), math.ceil(N / Bc)
    Nd = N * d
    if slip == "tr-not-rounded":
        Tr = N / Br
    if slip == "tr-rounded-down":
        Tr = N // Br
    keys = N * Tr  # loaded in all, by K or by V
    if causal and slip != "nothing-skipped":
        keys = 0
        for first in range(0, N, Br):
            last = first if slip == "first-row-decides" else min(first + Br, N) - 1
            full = Bc * (last // Bc + 1)
            if slip == "keys-not-blocks":
                full = last + 1
            if slip == "block-numbers-compared":
                full = Bc * (first // Br + 1)
            if slip == "cut-tiles-skipped":
                full = (first + 1) // Bc * Bc
            keys += full if slip == "last-block-full" else min(N, full)
        if slip == "half-of-the-dense":
            keys = N * Tr / 2
    if slip in ("q-in-each-tile", "o-in-each-tile", "algorithm-1"):
        rows = sum(r for r, _ in tiles(N, Br, Bc, causal))  # of Q, over all tiles
        if slip == "algorithm-1":
            return 2 * Nd + (3 * d + 2 * s) * rows
        return Nd + s * N + 2 * d * keys + (d if slip == "q-in-each-tile" else 2 * d) * rows
    total = {
        "k-and-v-once": 4 * Nd,
        "tc-for-tr": 2 * Nd + 2 * d * N * Tc,
        "one-of-k-and-v": 2 * Nd + d * keys,
        "q-or-o-forgotten": Nd + 2 * d * keys,
        "q-and-o-forgotten": 2 * d * keys,
        "tiles-full": 2 * Nd + 2 * d * Bc * Tc * Tr,
        "d-forgotten": 2 * Nd + 2 * keys,
    }.get(slip, 2 * Nd + 2 * d * keys) + s * N
    return total * (2 if slip == "bytes" else 1)


def _forms(id, says, read):
    """One wrong idea, with no, one and two statistics a row: all three are fine by themselves."""
    return [Mistake(id, functools.partial(moved, slip=id, s=s), says, read) for s in (1, 0, 2)]


class Both:
    """A closed form together with the loop that it is about. Calling it calls the form."""

    def __init__(self, formula, loop):
        self.formula, self.loop = formula, loop

    def __call__(self, N, d, Br, Bc, causal=False):
        return self.formula(N, d, Br, Bc, causal)


def both(formula, loop):
    """For check("ex08-traffic", ...): your formula, and your loop, which is run against it."""
    return Both(formula, loop)


def formula_is_the_counter(answer):
    """Formula, the learner's counter and the true count agree, for their own statistics."""
    if not isinstance(answer, Both):
        text = "the check needs your loop too: both(q_outer_traffic, q_outer)."
        return "loop-missing", text, OTHER
    statistics = set()
    for shape in RUNS:
        N, where, least = shape[0], _words(*shape), sum(_needed(*shape, 0))
        names = dict(zip(("N", "d", "Br", "Bc", "causal"), shape, strict=True))
        form = as_arrays(observe(answer, names).value, 1)
        if form is None or form[0].ndim:
            return None, f"{where}: your formula gives no number.", FORMULA
        formula = form[0].item()
        hbm, call, _ = run(answer.loop, *shape)
        counted = hbm.reads + hbm.writes
        if call.value is None or call.error or call.timed_out or not counted:
            text = f"no count to compare with. {FIRST}"
            return "loop-missing", text, COUNTS
        if counted - least not in (0, N, 2 * N):
            return "counter-is-off", f"{where}: your loop moves {counted:,}.\n{FIRST}", OTHER
        if formula != counted:
            text = f"{where}:\nyour formula says {formula:,.10g}, your loop moves {counted:,}."
            if formula - least not in (0, N, 2 * N):
                return None, f"{text} It must be exact.", FORMULA
            name = "statistics-forgotten" if formula < counted else "statistics-too-many"
            more = "more" if formula < counted else "fewer"
            return name, f"{text}\nYour loop stores {more} numbers for each row.", FORMULA
        statistics.add((counted - least) // N)
    if len(statistics) > 1:
        return None, "your loop does not store the same numbers in every run.", OTHER
    return None


FIRST = 'First make check("ex08-counters", q_outer) pass.'
TR = "K and V come once for each Q block: Tr = ceil(N/Br) times."


def form_probes(seed):
    """Stage 0 without a mask, stage 1 with. The tolerance of N leaves the statistics open (s)."""
    rng = np.random.default_rng(seed)
    drawn = [tuple(map(int, rng.integers((2, 1, 1, 1), (150, 9, 40, 40)))) for _ in range(6)]
    sizes = [(24, 4, 8, 4), (50, 4, 8, 16), (60, 4, 13, 7), (41, 3, 5, 9), (33, 8, 6, 10),
             (9, 2, 20, 4), (1000, 64, 64, 196), (1, 2, 1, 1)]  # fmt: skip
    return [
        Probe(
            _words(N, d, Br, Bc, causal),
            {"N": N, "d": d, "Br": Br, "Bc": Bc} | ({"causal": True} if causal else {}),
            (float(N),),
            int(causal),
        )
        for causal in (False, True)
        for N, d, Br, Bc in sizes + drawn
    ]


TRAFFIC = Program(
    id="ex08-traffic",
    text="Write q_outer_traffic(N, d, Br, Bc, causal=False): the elements that your loop moves,\n"
    "loads and stores together, exactly. Hand over both: both(q_outer_traffic, q_outer).",
    outputs=("elements",),
    right=q_outer_traffic,
    probes=form_probes,
    read=OTHER,
    library=frozenset({"Both.__call__"}),
    claims=(formula_is_the_counter,),
    mistakes=(
        *_forms("k-and-v-once", f"you counted K and V once, 4Nd in all. {TR}", OTHER),
        *_forms("tc-for-tr", f"you took Tc for Tr. {TR}", OTHER),
        *_forms("tr-not-rounded", "you took N/Br as it is. The last, short Q block needs all K "
                "and V too: round up.", FORMULA),
        *_forms("tr-rounded-down", "you rounded N/Br down. The last, short Q block needs K and V "
                "too: round up.", FORMULA),
        *_forms("one-of-k-and-v", "you counted one of K and V. Both are loaded in each step.",
                OTHER),
        *_forms("q-or-o-forgotten", "Q is read once and O written once, 2Nd. One of them is "
                "missing.", OTHER),
        *_forms("q-and-o-forgotten", "Q is read once and O written once, 2Nd. Both are missing.",
                OTHER),
        *_forms("q-in-each-tile", "you load Q for each tile. It is in the outer loop: once.",
                OTHER),
        *_forms("o-in-each-tile", "you move O in each step, as Algorithm 1 does. Here it stays on "
                "chip and is stored once.", OTHER),
        *_forms("algorithm-1", "that is Algorithm 1's count, with K and V outside.", OTHER),
        *_forms("tiles-full", "you counted the last K/V block as full. It has the keys that are "
                "left.", FORMULA),
        *_forms("d-forgotten", "a factor d is missing: a key is a row of d elements.", OTHER),
        *_forms("bytes", "these are bytes in fp16. The question is about elements.", FORMULA),
        *_forms("nothing-skipped", "causal changes nothing in your count. Hidden tiles are "
                "skipped.", SKIPPED),
        *_forms("half-of-the-dense", "you halved the loads of K and V. Tiles that the diagonal "
                "cuts are loaded whole.", SKIPPED),
        *_forms("keys-not-blocks", "you counted the visible keys. A K/V block is loaded whole, or "
                "not.", SKIPPED),
        *_forms("last-block-full", "the last K/V block may be short: no more than N keys are "
                "loaded.", SKIPPED),
        *_forms("first-row-decides", "you let the block's first row decide what is loaded. Its "
                "last row sees most.", SKIPPED),
        *_forms("block-numbers-compared", "you compared block numbers. They are rows and keys "
                "only after times Br and Bc.", SKIPPED),
        *_forms("cut-tiles-skipped", "you left out the tiles that the diagonal cuts. They are "
                "loaded whole.", SKIPPED),
    ),
)  # fmt: skip

# ================================================================ deliverable 3: the table

M, D = 50_000, 64
COLUMNS = ((64, 196), (196, 64), (128, 128))  # of the swapped order; the first is Algorithm 1's too


def compare(N, d=D, *, slip=None, s=1):
    """Elements: Algorithm 1 with (64, 196), then the swapped order with each of the three blocks.

    Or the table with a wrong idea in it.
    """
    form = functools.partial(moved, N, d, s=s)
    swapped = [form(*shape) for shape in COLUMNS]
    first = flash_traffic(N, d, *COLUMNS[0])
    if slip == "br-and-bc-swapped":
        swapped = [form(Bc, Br) for Br, Bc in COLUMNS]
        if s == 1:
            first = flash_traffic(N, d, *COLUMNS[0][::-1])
    if slip == "algorithm-1-everywhere":
        swapped = [flash_traffic(N, d, *shape) for shape in COLUMNS]
    if slip == "swapped-everywhere":
        first = form(*COLUMNS[0])
    if slip == "causal":
        first = flash_traffic(N, d, *COLUMNS[0], True)
        swapped = [form(*shape, True) for shape in COLUMNS]
    if slip == "first-and-second-exchanged":
        first, swapped[0] = swapped[0], first
    unit = {"bytes": 2, "mib": 1 / 2**19, "ratios": 1 / first}.get(slip, 1)
    return tuple(x * unit for x in (first, *swapped))


def _tables(id, says, read):
    return [Mistake(id, functools.partial(compare, slip=id, s=s), says, read) for s in (1, 0, 2)]


TABLE = Program(
    id="ex08-table",
    text="Write comparison(N, d=64) -> four counts in elements: Algorithm 1 with (Br, Bc) =\n"
    "(64, 196); the swapped order with (64, 196), with (196, 64) and with (128, 128).",
    outputs=(
        "Algorithm 1 (64, 196)",
        "swapped (64, 196)",
        "swapped (196, 64)",
        "swapped (128, 128)",
    ),
    right=compare,
    probes=lambda seed: [
        Probe(f"N = {N:,}", {"N": N}, (0.0, float(N), float(N), float(N)))
        for N in (512, 1000, 1024, 4096, 8192)
    ],
    read=OTHER,
    library=frozenset(_functions(traffic, inputs) - {"q_outer_traffic", "layer_traffic"})
    | {"causal_offset"},
    mistakes=(
        *_tables("br-and-bc-swapped", "Br and Bc changed places in your calls. Br is the block of "
                 "Q.", TILES),
        *_tables("algorithm-1-everywhere", "all four are Algorithm 1's count. Three of them are "
                 "the swapped order's.", OTHER),
        *_tables("swapped-everywhere", "all four are the swapped order's count. The first is "
                 "Algorithm 1's.", OTHER),
        *_tables("first-and-second-exchanged", "the first two changed places: Algorithm 1 comes "
                 "first.", OTHER),
        *_tables("causal", "these are the counts with a causal mask. The table is without.",
                 SKIPPED),
        *_tables("bytes", "these are bytes in fp16. The table is in elements.", FORMULA),
        *_tables("mib", "these are MiB in fp16. The table is in elements.", FORMULA),
        *_tables("ratios", "these are ratios to Algorithm 1. The table is in elements.", OTHER),
    ),
)  # fmt: skip


def threshold(d=D, Bc=196):
    """The Br from which the swapped order moves less: 2d/Br < (3d + 4)/Bc."""
    return 2 * d * Bc / (3 * d + 4)


def best(form, d=D, N=4096, smallest=16):
    """The fewest elements that an order moves with tiles within M and no side below `smallest`."""
    found = []
    for side in range(smallest, N):
        shape = (side, smallest) if form is q_outer_traffic else (smallest, side)
        if tile_elements(*shape, d) > M:
            return min(found)
        found.append(form(N, d, *shape))


QUESTIONS = [
    FORWARD,
    COUNTERS,
    TRAFFIC,
    TABLE,
    Number(
        "ex08-flip",
        f"d = {D}, no mask, N large. Algorithm 1 has Bc = 196. From which Br on does the swapped\n"
        "order move less than that, whatever its Bc?",
        "rows",
        truth=threshold,
        why="For each N^2 the orders move 2d/Br and (3d + 4)/Bc. They are equal at "
        "Br = 2d Bc/(3d + 4), about two thirds of Bc.",
        hint="For large N keep the terms with N^2 of both formulas, and set them equal.",
        tolerance=0.025,
        slips={
            "square": (
                lambda: 196,
                "That is Br = Bc, where the swapped order is ahead already: it moves two arrays "
                "in each pass, Algorithm 1 moves three.",
            ),
            "upside-down": (
                lambda: 196 * (3 * D + 4) / (2 * D),
                "The ratio is upside down: three arrays a pass against two, so the swapped order "
                "needs fewer rows, not more.",
            ),
            "o-once": (
                lambda: 2 * D * 196 / (2 * D + 4),
                "Almost Br = Bc: you counted two d-wide passes for Algorithm 1. It reads Q, reads "
                "O and writes O.",
            ),
            "one-pass-of-k-and-v": (
                lambda: D * 196 / (3 * D + 4),
                "Half: you counted one of K and V. Both are loaded for each Q block.",
            ),
        },
    ),
    Number(
        "ex08-capacity",
        f"Now both orders choose their own blocks: M = {M:,} elements on chip for the tiles K, V,\n"
        f"Q, O, S and l, m; no side below 16; N = 4,096, d = {D}. How many times as much does\n"
        "Algorithm 1 move, each at its best?",
        "a factor; 2 means twice as much",
        truth=lambda: best(flash_traffic) / best(q_outer_traffic),
        why="The blocks are mirror images, 16 in the direction that does not matter. A pass of "
        "Algorithm 1 moves three d-wide arrays, one of the swapped order two.",
        hint="Each order wants one side large; the other side is 16. How many d-wide arrays "
        "cross in one pass of each order?",
        tolerance=0.03,
        slips={
            "equal": (
                lambda: 1.0,
                "The blocks are mirror images, the passes are not: three arrays cross in one "
                "order, two in the other.",
            ),
            "upside-down": (
                lambda: best(q_outer_traffic) / best(flash_traffic),
                "Upside down: with free blocks Algorithm 1 moves more.",
            ),
            "the-tables-blocks": (
                lambda: flash_traffic(4096, D, 64, 196) / q_outer_traffic(4096, D, 64, 196),
                "That is the table's first row of blocks, which suit Algorithm 1. Here each order "
                "has its own.",
            ),
            "one-side-kept": (
                lambda: flash_traffic(4096, D, 64, 196) / best(q_outer_traffic),
                "Only the swapped order got its best blocks. Algorithm 1 may shrink Br to 16 too.",
            ),
        },
    ),
    Choice(
        "ex08-why",
        "From (64, 196) to (196, 64) the tiles take as much room, and the swapped order falls from "
        "1.96x of Algorithm 1's traffic to 0.66x. What makes it flip?",
        {
            "a": "The swapped order always moves less once O stays on chip, and (64, 196) is the "
            "one exception to it",
            "b": "Smaller K/V blocks make fewer loads of K and V",
            "c": "Larger Q blocks compute fewer tiles",
            "d": "Re-reads come once per outer block, so its size alone counts: Br here, Bc in "
            "Algorithm 1",
        },
        "d",
        {
            "a": "Keeping O on chip saves its passes, but K and V make Tr passes in return. Which "
            "is more depends on Br.",
            "b": "Bc is not in the formula. The loads are smaller and more, with the same sum.",
            "c": "The tiles cover N x N in every case, and the products cost the same FLOPs.",
            "d": "2Nd Tr against (3Nd + 4N) Tc: the paper's rule makes Bc the long side, which is "
            "the outer one of Algorithm 1 only.",
        },
    ),
    Choice(
        "ex08-gpu",
        "With the blocks (64, 196) the swapped order moves about twice as much. Why may a GPU "
        "still prefer it?",
        {
            "a": "It computes fewer scores",
            "b": "Its Q blocks do not need each other: each SM writes its own rows of O, once",
            "c": "Its tiles take less on-chip memory",
            "d": "It needs no running maximum and no rescale, since each row is finished in one go",
        },
        "b",
        {
            "a": "Both compute the same tiles, with the same matmul FLOPs.",
            "b": "There are Tr x heads x batch of them to spread over the SMs. In Algorithm 1 all "
            "K/V blocks read and rewrite the same O, l and m, so they must wait for each other.",
            "c": "Both hold K, V, Q, O and S tiles, with m and l: the same sum.",
            "d": "The row still comes in Tc pieces, so m and l still run along.",
        },
    ),
]
