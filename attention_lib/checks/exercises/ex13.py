"""Exercise 13: a kernel without a barrier. Its faults are races, whatever the results are."""

import math

import numpy as np

from attention_lib.checks.cuda import make, single
from attention_lib.checks.kinds import Choice, Probe
from attention_lib.checks.programs import rounding
from attention_lib.gpu.broken import edited, source
from attention_lib.gpu.own import Launch
from attention_lib.gpu.standin import poisoned

BARRIER = "notebook 14, 'Shared memory and the barrier'"
LOOP = "notebook 14, 'The loop'"
ERRORS = "notebook 14, 'Common mistakes'"
GIVEN = source("missing_barrier")
BR, D = 4, 2


def probes(seed):
    rng = np.random.default_rng(seed)

    def probe(Nq, Nk, threads=8, says="", rise=0.0, level=0.0, order=None, stage=0):
        Q, K = (rng.standard_normal((n, D)) for n in (Nq, Nk))
        K[:, 0] += level + rise * np.linspace(0, 1, Nk)
        Q[:, 0] = 1 + 0.1 * Q[:, 0]
        Q, K = Q.astype(np.float32), K.astype(np.float32)
        size = 2 * float((np.abs(Q) @ np.abs(K).T).max())
        (for_L,) = single([rounding(size, Nk, K)[1]])
        given = {"Q": Q, "K": K, "threads": threads, "seed": order}
        tiles = -(-Nk // 3)
        says = f"{Nq} rows, {Nk} keys ({tiles} tile{'s' * (tiles > 1)}), {threads} threads{says}"
        return Probe(says, given, (0.0, for_L), stage)

    return [
        probe(4, 3),
        probe(6, 7),
        probe(5, 9, says=", in another order", order=int(rng.integers(1, 99))),
        probe(4, 6, threads=5, order=int(rng.integers(1, 99))),
        probe(6, 4, threads=16),
        probe(4, 7, says=": the scores rise by 60", rise=60),
        probe(4, 6, says=": all scores near -1000", level=-1000),
        probe(1, 1, stage=1),
    ]


def launch(Q, K, threads, seed):
    Nq, Nk = len(Q), len(K)
    args = (Q.ravel(), K.ravel(), poisoned(Nq), Nq, Nk)
    return Launch(-(-Nq // BR), threads, args, (2,), seed)


def right(Q, K, threads, seed):
    S = Q.astype(np.float64) @ K.astype(np.float64).T
    return (np.logaddexp.reduce(S, axis=1, initial=-math.inf),)


WAIT = "        __syncthreads();"

REPAIR = make(
    "ex13-barrier",
    "Repair the kernel: return its text with what is missing. The results must be right, and\n"
    "ensured to be: no race, in any order of the threads.",
    "missing_barrier",
    launch,
    right,
    probes,
    ("Q", "K", "L", "Kj", "S"),
    ("L",),
    BARRIER,
    (
        (
            "before-the-write",
            "the barrier stands before the scores are written. The readers must wait until they "
            "are there: after the loop.",
            [edited(GIVEN, after={14: WAIT}), edited(GIVEN, after={13: WAIT})],
            BARRIER,
        ),
        (
            "between-two-tiles",
            "your barriers keep K_j safe from the next tile. But S is read while other threads "
            "still write it, in one tile at least.",
            [
                edited(GIVEN, after={28: WAIT}),
                edited(GIVEN, after={11: WAIT}),
                edited(GIVEN, after={21: "        if (j0 + Bc < Nk) __syncthreads();"}),
            ],
            LOOP,
        ),
        (
            "not-all-threads-reach-it",
            "the barrier is in an if, or in a loop that some threads go through more often. All "
            "threads of the block must reach it.",
            [
                edited(GIVEN, after={22: WAIT}),
                edited(GIVEN, after={24: WAIT}),
                edited(GIVEN, after={27: WAIT}),
                edited(GIVEN, after={21: "        if (r < Br) __syncthreads();"}),
                edited(GIVEN, after={20: WAIT}),
                edited(GIVEN, after={19: WAIT}),
                edited(GIVEN, after={16: WAIT}),
            ],
            ERRORS,
        ),
        (
            "in-both-branches",
            "each branch has a barrier of its own. A barrier is one place that all threads reach.",
            [
                edited(GIVEN, after={22: WAIT}, replace={28: "        } else {\n" + WAIT + "\n }"}),
                edited(
                    GIVEN, after={21: "        if (r < Br) __syncthreads(); else __syncthreads();"}
                ),
            ],
            ERRORS,
        ),
        (
            "moved-not-added",
            "you moved the barrier that was there. K_j needs it: the tile is read by all threads.",
            [edited(GIVEN, replace={14: ""}, after={21: WAIT})],
            BARRIER,
        ),
        (
            "first-tile-only",
            "the barrier is there for some tiles only. Each tile is written, then read.",
            [edited(GIVEN, after={21: "        if (j0 == 0) __syncthreads();"})],
            LOOP,
        ),
    ),
)

QUESTIONS = [
    Choice(
        "ex13-tool",
        "This kernel gives right results in one run and wrong ones in another. Which checker "
        "finds the place, and what does it look at?",
        {
            "a": "memcheck: addresses outside every allocation",
            "b": "racecheck: accesses to shared memory by several threads, and no barrier between",
            "c": "initcheck: global memory that is read before anybody wrote it",
            "d": "synccheck: barriers that not all threads of the block reach",
        },
        "b",
        {
            "a": "Every address of this kernel is inside its array. Order is what is missing.",
            "b": "It needs no wrong result: it is enough that nothing keeps the accesses apart.",
            "c": "It looks at global memory. Q and K were written before the launch.",
            "d": "The one barrier in the text is reached by all threads. Another one is not there.",
        },
    ),
    REPAIR,
    Choice(
        "ex13-enough",
        "Rung 1 needs a barrier before it loads the next tile, too. The repaired kernel has none "
        "there. Why is the K_j of the last tile safe?",
        {
            "a": "The tile has fewer elements than the block has threads",
            "b": "Each thread reads only those elements of K_j that it has loaded",
            "c": "A load from HBM takes longer than the rest of the loop",
            "d": "K_j is last read before the new barrier, and no thread loads before it",
        },
        "d",
        {
            "a": "A thread that is late reads what another one loads. Their number is no matter.",
            "b": "A thread makes scores with keys that others have loaded. So the first barrier is "
            "needed.",
            "c": "Nothing promises that. A barrier is a promise, a usual time is none.",
            "d": "The scores are the only readers of K_j, and they come before it. In rung 1 each "
            "thread goes on reading the tile until its last row is done.",
        },
    ),
]
