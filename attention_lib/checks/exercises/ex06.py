"""Exercise 6: count Algorithm 1 with a causal mask, where hidden tiles are skipped.

The truth is counted: the library's loop runs on an HBM. `traffic` and `flops` are the closed form
as a sum over tiles, with a switch for each wrong idea of what is moved.
"""

import functools
import math

import numpy as np

from attention_lib.checks.kinds import Choice, Mistake, Number, Probe, Program
from attention_lib.memory import HBM
from attention_lib.tiled import blocks, flash_attention

FORMULA = "notebook 04, 'The formula, term by term'"
CAUSAL = "notebook 04, 'Causal: skipped tiles'"
TILES = "notebook 03, 'Causal: tiles that are never computed'"
FLOPS = "notebook 03, 'The same matmul FLOPs'"
OTHER = "notebook 04, 'The other order'"

N0, D0, BR0, BC0 = 512, 64, 128, 196  # the run of the prediction


def counted(N, d, Br, Bc, causal=True):
    """Algorithm 1, really run: elements moved, and matmul FLOPs."""
    return _counted(N, d, Br, Bc, causal)  # a call of a cached function is not seen by the checks


@functools.cache
def _counted(N, d, Br, Bc, causal):
    hbm = HBM()
    x = np.zeros((N, d), np.float32)
    flash_attention(x, x, x, Br, Bc, causal=causal, hbm=hbm)
    return hbm.reads + hbm.writes, hbm.matmul_flops


def tiles(N, Br, Bc, visited="reached"):
    """The tiles (rows, cols) that are computed; `visited` picks the rule, or a wrong one."""
    rules = {
        "reached": lambda rows, cols: rows.stop - 1 >= cols.start,
        "all": lambda rows, cols: True,
        "seen-whole": lambda rows, cols: rows.start >= cols.stop - 1,
        "first-row-reaches": lambda rows, cols: rows.start >= cols.start,
        "last-key-reached": lambda rows, cols: rows.stop - 1 >= cols.stop - 1,
        "by-number": lambda rows, cols: rows.start // Br >= cols.start // Bc,
    }
    rule = rules[visited]
    return [(r, c) for c in blocks(N, Bc) for r in blocks(N, Br) if rule(r, c)]


def _length(part):
    return part.stop - part.start


def traffic(N, d, Br, Bc, visited="reached", width=None, kv=None, keys=None, whole=True,
            full=False, drop_last=False, factor=1):  # fmt: skip
    """Elements that Algorithm 1 moves, or what a wrong idea takes them to be.

    width: elements a row and pass (3d + 4). kv: how many N x d arrays K and V make (2). keys:
    "again" loads K and V for every tile. whole: whole Q blocks, not rows from the first key on.
    full: every Q block has Br rows. drop_last: only full K/V blocks count. factor: on the result.
    """
    passes = tiles(N, Br, Bc, visited)
    if drop_last:
        passes = [(r, c) for r, c in passes if _length(c) == Bc]
    if whole:
        rows = sum(Br if full else _length(r) for r, _ in passes)
    else:
        rows = sum(N - first for first in range(0, N, Bc))
    moved_kv = (2 if kv is None else kv) * N * d
    if keys == "again":
        moved_kv = sum(2 * d * _length(c) for _, c in passes)
    if keys == "full":
        moved_kv = 2 * d * Bc * math.ceil(N / Bc)
    return factor * (moved_kv + (3 * d + 4 if width is None else width) * rows)


def _wrong(id, says, read=CAUSAL, program=None, **switches):
    return Mistake(id, program or functools.partial(traffic, **switches), says, read)


def _half_of_the_passes(N, d, Br, Bc):
    return 2 * N * d + (traffic(N, d, Br, Bc, "all") - 2 * N * d) / 2


def _half_of_the_passes_down(N, d, Br, Bc):
    return math.floor(_half_of_the_passes(N, d, Br, Bc))


def _half(N, d, Br, Bc):
    return traffic(N, d, Br, Bc, "all") / 2


def _half_down(N, d, Br, Bc):
    return traffic(N, d, Br, Bc, "all") // 2


def _q_outer(N, d, Br, Bc, statistics=1):
    swapped = sum(2 * d * _length(c) for _, c in tiles(N, Br, Bc))
    return 2 * N * d + statistics * N + swapped


def _multiples_only(N, d, Br, Bc):
    """The form for Br | Bc | N, with Tc rounded up."""
    return 2 * N * d + (3 * d + 4) * N * (math.ceil(N / Bc) + 1) / 2


SIZES = [(24, 4, 4, 8), (48, 2, 8, 8), (60, 4, 7, 13), (50, 2, 13, 7), (41, 4, 10, 6),
         (30, 8, 30, 10), (33, 2, 5, 40), (9, 4, 2, 3), (100, 2, 1, 9), (64, 2, 9, 1),
         (1, 2, 1, 1), (1000, 64, 64, 196), (512, 64, 64, 196)]  # fmt: skip


def size_probes(seed):
    """Some sizes for everyone, then drawn ones. d is even: half of a count is a whole number."""
    rng = np.random.default_rng(seed)
    drawn = [tuple(map(int, rng.integers((2, 1, 1, 1), (60, 9, 30, 30)))) for _ in range(6)]
    sizes = SIZES + [(N, 2 * d, Br, Bc) for N, d, Br, Bc in drawn]
    return [
        Probe(
            f"N = {N}, d = {d}, Br = {Br}, Bc = {Bc}",
            {"N": N, "d": d, "Br": Br, "Bc": Bc},
            (0.0,),
        )
        for N, d, Br, Bc in sizes
    ]


HALF = "more than half is left: a tile that the diagonal cuts is moved whole"
TRAFFIC = Program(
    id="ex06-traffic",
    text="Write flash_causal_traffic(N, d, Br, Bc): the elements that Algorithm 1 moves with a\n"
    "causal mask, loads and stores together, exactly.",
    outputs=("elements",),
    right=lambda N, d, Br, Bc: counted(N, d, Br, Bc)[0],
    probes=size_probes,
    read=CAUSAL,
    mistakes=(
        _wrong("nothing-skipped", "that is the count without a mask: no tile is skipped.",
               TILES, visited="all"),
        _wrong("half-of-the-dense", f"you halved the dense count. {HALF}, and K and V stay.",
               program=_half),
        _wrong("half-of-the-dense", f"you halved the dense count. {HALF}, and K and V stay.",
               program=_half_down),
        _wrong("half-of-the-passes", f"you halved the passes over Q and O. {HALF}.",
               program=_half_of_the_passes),
        _wrong("half-of-the-passes", f"you halved the passes over Q and O. {HALF}.",
               program=_half_of_the_passes_down),
        _wrong("multiples-only",
               "(Tc + 1)/2 passes hold where Br divides Bc and Bc divides N. This N is ragged.",
               program=_multiples_only),
        _wrong("k-and-v-halved",
               "you halved K and V too. Every K/V block is seen by some row, and loaded once.",
               FORMULA, kv=1),
        _wrong("k-and-v-forgotten", "K and V are missing: 2Nd, each of their blocks once.",
               FORMULA, kv=0),
        _wrong("k-and-v-again",
               "you load K and V for each tile. In this order they are outside: once a block.",
               FORMULA, keys="again"),
        _wrong("k-and-v-padded",
               "you counted the last K/V block as full. It has the keys that are left.",
               FORMULA, keys="full"),
        _wrong("rows-not-blocks",
               "you counted rows from the block's first key on. A Q block moves whole, or not.",
               whole=False),
        _wrong("diagonal-tiles-skipped",
               "you skip the tiles that the diagonal cuts. They are computed whole, then masked.",
               TILES, visited="seen-whole"),
        _wrong("rounded-up",
               "you start at the first Q block after the key. The one that holds it counts too: "
               "round down.", visited="first-row-reaches"),
        _wrong("last-key-for-first",
               "you start at the Q block of a K/V block's last key. Its first key decides.",
               visited="last-key-reached"),
        _wrong("block-numbers-compared",
               "you compared block numbers, i >= j. They are rows and keys only after times Br "
               "and Bc.", visited="by-number"),
        _wrong("q-blocks-full", "you counted the last Q block as full. It has the rows left over.",
               full=True),
        _wrong("last-pass-lost", "the last, short K/V block needs its pass too: round Tc up.",
               FORMULA, drop_last=True),
        _wrong("l-and-m-forgotten", "l and m are missing: loaded and stored, four numbers a row.",
               FORMULA, program=lambda N, d, Br, Bc: traffic(N, d, Br, Bc, width=3 * d)),
        _wrong("l-and-m-one-way",
               "l and m cross twice in a pass, loaded and stored: 4 numbers a row, not 2.",
               FORMULA, program=lambda N, d, Br, Bc: traffic(N, d, Br, Bc, width=3 * d + 2)),
        _wrong("o-one-way", "O crosses twice in a pass, loaded and stored. You counted it once.",
               FORMULA, program=lambda N, d, Br, Bc: traffic(N, d, Br, Bc, width=2 * d + 4)),
        _wrong("loads-only", "these are the loads. O, l and m are stored in every pass as well.",
               FORMULA, program=lambda N, d, Br, Bc: traffic(N, d, Br, Bc, width=2 * d + 2)),
        *(
            _wrong("the-other-order",
                   "that is the swapped order, with Q outside. Algorithm 1 has K and V outside.",
                   OTHER, program=functools.partial(_q_outer, statistics=s))
            for s in (0, 1, 2)
        ),
        _wrong("bytes", "these are bytes in fp16. The question is about elements.", FORMULA,
               factor=2),
    ),
)  # fmt: skip


def flops(N, d, Br, Bc, visited="reached", full=False, factor=4):
    """Matmul FLOPs of the tiles, or a wrong count of them."""
    area = sum(Br * Bc if full else _length(r) * _length(c) for r, c in tiles(N, Br, Bc, visited))
    return factor * d * area


def _wrong_flops(id, says, read=TILES, program=None, **switches):
    return Mistake(id, program or functools.partial(flops, **switches), says, read)


MATMUL = Program(
    id="ex06-flops",
    text="Write causal_matmul_flops(N, d, Br, Bc): the FLOPs of the matrix products in the tiles\n"
    "that Algorithm 1 computes with a causal mask. A multiply and an add are two.",
    outputs=("FLOPs",),
    right=lambda N, d, Br, Bc: counted(N, d, Br, Bc)[1],
    probes=size_probes,
    read=TILES,
    mistakes=(
        _wrong_flops("nothing-skipped", "that is the dense count, 4N^2 d: no tile is skipped.",
                     visited="all"),
        _wrong_flops("half-of-the-dense",
                     "you halved the dense count. A tile that the diagonal cuts costs all of it.",
                     program=lambda N, d, Br, Bc: 2 * N * N * d),
        _wrong_flops("visible-scores-only",
                     "N(N + 1)/2 scores are visible. The tiles compute more: hidden ones too.",
                     program=lambda N, d, Br, Bc: 2 * N * (N + 1) * d),
        _wrong_flops("half-is-missing",
                     "half: one of the two products (Q K^T, P V), or the adds, are missing.",
                     FLOPS, factor=2),
        _wrong_flops("three-quarters-missing",
                     "a quarter: there are two products, and an add goes with each multiply.",
                     FLOPS, factor=1),
        _wrong_flops("d-forgotten", "a factor d is missing: each score is a sum of d products.",
                     FLOPS, program=lambda N, d, Br, Bc: flops(N, 1, Br, Bc)),
        _wrong_flops("tiles-full",
                     "you counted each tile as Br x Bc. Those at the end of N are smaller.",
                     full=True),
        _wrong_flops("diagonal-tiles-skipped",
                     "you skip the tiles that the diagonal cuts. They are computed whole.",
                     visited="seen-whole"),
        _wrong_flops("rounded-up",
                     "you lost the Q block that holds the K/V block's first key: round down.",
                     visited="first-row-reaches"),
        _wrong_flops("last-key-for-first",
                     "you start at the Q block of a K/V block's last key. Its first key decides.",
                     visited="last-key-reached"),
        _wrong_flops("block-numbers-compared",
                     "you compared block numbers, i >= j. They are rows and keys only after "
                     "times Br and Bc.", visited="by-number"),
    ),
)  # fmt: skip

QUESTIONS = [
    Number(
        "ex06-guess",
        f"Algorithm 1, N = {N0}, d = {D0}, Br = {BR0}, Bc = {BC0}. Without a mask it moves "
        f"{traffic(N0, D0, BR0, BC0, 'all'):,}\nelements. How many with a causal mask, where "
        "hidden tiles are skipped?",
        "elements",
        truth=lambda: counted(N0, D0, BR0, BC0)[0],
        why="The three passes cover 512, 384 and 128 rows of Q: 1,024 in all, not 1,536. K and V "
        "come whole.",
        hint="There are three K/V blocks, from keys 0, 196 and 392 on. For each: which Q blocks "
        "have a row that reaches its first key?",
        tolerance=0.002,
        slips={
            "half-of-the-dense": (
                lambda: _half(N0, D0, BR0, BC0),
                "You took one half. Tiles that the diagonal cuts are moved whole, and with three "
                "passes there are many of them.",
            ),
            "half-of-the-passes": (
                lambda: _half_of_the_passes(N0, D0, BR0, BC0),
                "You kept K and V, rightly, and halved the rest. Count the rows of each pass.",
            ),
            "nothing-skipped": (
                lambda: traffic(N0, D0, BR0, BC0, "all"),
                "That is the dense count. The first pass needs all Q blocks, the others do not.",
            ),
            "rows-not-blocks": (
                lambda: traffic(N0, D0, BR0, BC0, whole=False),
                "You counted the rows from the first key on: 512, 316, 120. A Q block moves whole.",
            ),
            "diagonal-tiles-skipped": (
                lambda: traffic(N0, D0, BR0, BC0, "seen-whole"),
                "You left out the tiles that the diagonal cuts. They are computed whole, then "
                "masked.",
            ),
            "k-and-v-halved": (
                lambda: traffic(N0, D0, BR0, BC0, kv=1),
                "You halved K and V too. Every K/V block is seen by some row.",
            ),
            "l-and-m-forgotten": (
                lambda: traffic(N0, D0, BR0, BC0, width=3 * D0),
                "Close. l and m are missing: loaded and stored, four numbers a row.",
            ),
        },
    ),
    TRAFFIC,
    MATMUL,
    Choice(
        "ex06-limit",
        "Br and Bc stay, and N grows. Where does the ratio causal count / dense count go?",
        {
            "a": "It is one half at every N",
            "b": "To one half, from below: the skipped tiles save more than half of the passes",
            "c": "To one half, from above: the share of tiles on the diagonal shrinks",
            "d": "To one: the traffic is quadratic with or without a mask",
        },
        "c",
        {
            "a": "For N of a few blocks it is far from it: count N = 512 again.",
            "b": "A tile with one visible score is computed, so at least half of the passes stay. "
            "It cannot come from below.",
            "c": "The diagonal cuts about N/Br + N/Bc of the (N/Br)(N/Bc) tiles. K and V, 2Nd, "
            "shrink against N squared as well.",
            "d": "Both are quadratic, with different factors. Half of the N squared is skipped.",
        },
    ),
]
