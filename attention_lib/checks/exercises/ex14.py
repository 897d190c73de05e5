"""Exercise 14: a kernel whose guards are wrong where the last tile is not full."""

import numpy as np

from attention_lib.checks.cuda import make, single
from attention_lib.checks.kinds import Choice, Number, Probe
from attention_lib.checks.programs import rounding
from attention_lib.gpu.broken import edited, source
from attention_lib.gpu.own import Launch
from attention_lib.gpu.standin import poisoned

LAUNCH = "notebook 14, 'Threads, blocks, a launch'"
MODEL = "notebook 14, 'A GPU made of Python'"
BARRIER = "notebook 14, 'Shared memory and the barrier'"
LOOP = "notebook 14, 'The loop'"
ERRORS = "notebook 14, 'Common mistakes'"
TILES = "notebook 03, 'Edges, masks and rows that see nothing'"
GIVEN = source("wrong_tail_guard")
D, THREADS, BC = 2, 4, 4


def probes(seed):
    rng = np.random.default_rng(seed)

    def probe(Nq, Nk, says="", rise=0.0, level=0.0, order=None, stage=0, same=False):
        Q, K, V = (rng.standard_normal((n, D)) for n in (Nq, Nk, Nk))
        K[:, 0] += level + rise * np.linspace(0, 1, Nk)
        Q[:, 0] = 1 + 0.1 * Q[:, 0]
        size = 2 * float((np.abs(Q) @ np.abs(K).T).max())
        if same:  # each score is exactly -2^32
            Q[:], K[:], size = (1, 0), (-(2.0**32), 0), 0.0
        Q, K, V = (x.astype(np.float32) for x in (Q, K, V))
        (for_O,) = single([rounding(size, Nk, V)[0]])
        given = {"Q": Q, "K": K, "V": V, "seed": order}
        return Probe(f"{Nq} rows, {Nk} keys{says}", given, (0.0, for_O), stage)

    return [
        probe(4, 6),
        probe(6, 4),
        probe(7, 7, order=int(rng.integers(1, 99))),
        probe(3, 1),
        probe(8, 9, order=int(rng.integers(1, 99))),
        probe(5, 6, ": all scores near 20", level=20),
        probe(5, 6, ": all scores near -300", level=-300),
        probe(4, 7, ": the scores rise by 60", rise=60),
        probe(4, 4),
        probe(4, 5, ": each score is -2^32", same=True, stage=1),
    ]


def launch(Q, K, V, seed):
    Nq, Nk = len(Q), len(K)
    args = (Q.ravel(), K.ravel(), V.ravel(), poisoned(Nq * D), Nq, Nk)
    return Launch(-(-Nq // THREADS), THREADS, args, (3,), seed)


def right(Q, K, V, seed):
    Q, K, V = (x.astype(np.float64) for x in (Q, K, V))
    S = Q @ K.T
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return ((P @ V / P.sum(axis=1, keepdims=True)).ravel(),)


# The three repairs, and what people write in place of each.
LOAD = {n: f"            {x}j[x / d][x % d] = j0 + x / d < Nk ? {x}[j0 * d + x] : 0.f;"
        for n, x in ((16, "K"), (17, "V"))}  # fmt: skip
HIDE = {24: "            S[j] = j0 + j < Nk ? s : -INFINITY;"}
STORE = {37: "    if (i < Nq)"}


def with_lines(*lines, after=None):
    return edited(GIVEN, {k: v for some in lines for k, v in some.items()}, after)


def score(text):
    return with_lines(LOAD, STORE, {24: text})


def unfilled(otherwise):
    """The load with an if around it, so that the rest of the tile is not written."""
    lines = (x.replace("j0 + x / d < Nk ? ", "").replace(" : 0.f", "") for x in LOAD.values())
    k, v = (x.replace("            ", "            if (j0 + x / d < Nk) ") for x in lines)
    return with_lines({16: k, 17: v}, STORE, otherwise)


TAIL = make(
    "ex14-guards",
    "Repair the kernel: return its text, with guards that hold for any Nq and Nk.",
    "wrong_tail_guard",
    launch,
    right,
    probes,
    ("Q", "K", "V", "O", "Kj", "Vj"),
    ("O",),
    MODEL,
    (
        (
            "rows-only",
            "the rows have their guard, the keys have none: the last tile reads behind K and V.",
            [with_lines(STORE), with_lines(STORE, HIDE)],
            LOOP,
        ),
        (
            "store-forgotten",
            "the loads are guarded, and the store is not right yet: row Nq does not exist.",
            [with_lines(LOAD, HIDE), with_lines(LOAD, HIDE, {37: ""})],
            MODEL,
        ),
        (
            "k-or-v-only",
            "one of the two loads has no guard. K and V end at the same key.",
            [
                with_lines({16: LOAD[16]}, HIDE, STORE),
                with_lines({17: LOAD[17]}, HIDE, STORE),
            ],
            LOOP,
        ),
        (
            "load-guarded-one-too-far",
            "key Nk is let in. The keys are 0 to Nk - 1: <, not <=.",
            [
                with_lines({n: x.replace("<", "<=") for n, x in LOAD.items()}, HIDE, STORE),
                with_lines({n: x.replace("<", "<=") for n, x in (LOAD | HIDE).items()}, STORE),
            ],
            LAUNCH,
        ),
        (
            "padding-scored-0",
            "keys behind the last one are zeros now, and so is their score. exp(0 - m) is a "
            "weight: hide them with -inf.",
            [
                with_lines(LOAD, STORE),
                score("            S[j] = j0 + j < Nk ? s : 0.f;"),
                score("            S[j] = s * (j0 + j < Nk);"),
            ],
            LOOP,
        ),
        (
            "score-hidden-one-too-late",
            "the first key behind the last one still counts: j0 + j < Nk, not <=.",
            [score("            S[j] = j0 + j <= Nk ? s : -INFINITY;")],
            LOOP,
        ),
        (
            "tail-dropped",
            "the last tile is left out where it is not full. Its keys are keys like the others.",
            [
                edited(GIVEN, {13: "    for (int j0 = 0; j0 + Bc <= Nk; j0 += Bc) {"} | STORE),
                edited(GIVEN, {13: "    for (int j0 = 0; j0 < Nk / Bc * Bc; j0 += Bc) {"} | STORE),
            ],
            LOOP,
        ),
        (
            "returns-early",
            "threads without a row have left before the barriers. They must stay: they load, and "
            "the others wait for them.",
            [
                with_lines(LOAD, HIDE, STORE, after={9: "    if (i >= Nq) return;"}),
                with_lines(LOAD, HIDE, after={9: "    if (i >= Nq) return;"}),
            ],
            ERRORS,
        ),
        (
            "last-key-repeated",
            "the last key is loaded again for those behind it, and counts more than once.",
            [
                with_lines(
                    {
                        n: f"{x}j[x / d][x % d] = {x}[min(j0 + x / d, Nk - 1) * d + x % d];"
                        for n, x in ((16, "K"), (17, "V"))
                    },
                    STORE,
                )
            ],
            LOOP,
        ),
        (
            "padding-in-the-maximum",
            "hidden keys have no weight, but their score of 0 goes into the maximum. Where all "
            "scores are far below 0, nothing is left.",
            [
                with_lines(
                    LOAD,
                    STORE,
                    {31: "            float p = j0 + j < Nk ? expf(S[j] - m_new) : 0.f;"},
                )
            ],
            TILES,
        ),
        (
            "padding-left-unwritten",
            "where there is no key the tile is not written, but it is read: 0 times what lies "
            "there may be NaN.",
            [unfilled(HIDE), unfilled({})],
            BARRIER,
        ),
        (
            "last-row-lost",
            "one row too few is stored. Rows are 0 to Nq - 1.",
            [with_lines(LOAD, HIDE, {37: "    if (i < Nq - 1)"})],
            LAUNCH,
        ),
        (
            "finite-in-place-of-minus-infinity",
            "a large negative number hides a key only while the real scores are larger. -INFINITY "
            "always does.",
            [
                score(f"            S[j] = j0 + j < Nk ? s : {x};")
                for x in ("-1e9f", "-1e6f", "-10000.f")
            ],
            TILES,
        ),
    ),
)

N_ASKED, BLOCK = 1000, 64

QUESTIONS = [
    Number(
        "ex14-threads",
        f"Nq = {N_ASKED:,} rows, blocks of {BLOCK} threads, a thread a row. How many threads "
        "of the launch have no row?",
        "threads",
        truth=lambda: -N_ASKED % BLOCK,
        why="16 blocks, 1,024 threads. They load keys like all the others, and store nothing.",
        hint="How many blocks are launched? How many threads are that?",
        tolerance=0,
        slips={
            "rows-of-the-last-block": (
                lambda: N_ASKED % BLOCK,
                "That many threads of the last block do have a row.",
            ),
            "none": (lambda: 0, "Blocks are whole: 15 of them would leave rows without a thread."),
            "one-block-too-many": (
                lambda: -N_ASKED % BLOCK + BLOCK,
                "One block too many. 16 are enough for 1,000 rows.",
            ),
        },
    ),
    TAIL,
    Choice(
        "ex14-tool",
        "The guard of the store becomes i < Nq - 1, so the last row of O is never written. Which "
        "checker speaks up, and when?",
        {
            "a": "initcheck, when another kernel reads that row of O",
            "b": "memcheck, when the kernel ends",
            "c": "racecheck, when two threads skip the row",
            "d": "memcheck, when another kernel reads that row of O",
        },
        "a",
        {
            "a": "A missing write is no access. It shows when somebody reads what nobody wrote.",
            "b": "memcheck looks at addresses that are used. This row is not used at all.",
            "c": "racecheck looks at accesses that nothing keeps in order. There is none here.",
            "d": "The address is inside O, so memcheck has nothing to say. The content is missing.",
        },
    ),
]
