"""Predictions and checkpoint questions of notebook 14, the first kernel, and its open task."""

import math

import numpy as np

from attention_lib.checks.kinds import Choice, Number
from attention_lib.gpu import ladder, recordings
from attention_lib.gpu.occupancy import blocks_per_sm, room
from attention_lib.gpu.standin import poisoned, run_block
from attention_lib.hardware import GPUS

TOKENS, HIDDEN, N, D = 16_384, 2048, 16_384, 64
SMS = GPUS["H200"].sms


def reverse_without_barrier(t, x, y):
    """The notebook's kernel that turns a row round, as if its barrier were not there."""
    s = t.shared("s", t.blockDim)
    s[t.threadIdx] = x[t.threadIdx]
    y[t.threadIdx] = s[t.blockDim - 1 - t.threadIdx]


def _wrong_results(n=8):
    x, y = np.arange(n, dtype=np.float32), poisoned(n)
    run_block(reverse_without_barrier, n, x, y)
    return int((y != x[::-1]).sum())


def sectors(addresses):
    """Pieces of 32 bytes that these byte addresses lie in."""
    return len({a // 32 for a in addresses})


def q_outer_usage():
    """(registers, threads, bytes of shared memory) of rung 2, d = 64, as NVRTC reported them."""
    (row,) = (
        r
        for r in recordings.read("nvrtc")["rows"]
        if (r["kernel"], r["d"], r["dtype"]) == ("q_outer", D, "float16")
        and (r["architecture"], r["causal"]) == ("sm_90", False)
    )
    return row["registers"], ladder.rung("q_outer").threads(64), row["shared"]


QUESTIONS = [
    Number(
        id="p14-1",
        text=(
            "Eight threads turn a row of 8 numbers round, through shared memory. The barrier is\n"
            "gone, and the stand-in runs thread 0 to its end, then thread 1, and so on. How many\n"
            "of the 8 results are wrong?"
        ),
        unit="results",
        truth=_wrong_results,
        tolerance=0,
        why="Thread k reads element 7 - k. Threads 0 to 3 do so before its owner has run.",
        hint=(
            "Thread k reads what thread 7 - k writes. Go through them in order: who has written "
            "before it is asked for?"
        ),
        slips={
            "all": (
                lambda: 8,
                "Not all. Thread 7 runs last: everything that it may read has been written.",
            ),
            "none": (
                lambda: 0,
                "Thread 0 runs first and reads element 7. Who has written it by then?",
            ),
            "all-but-the-last": (
                lambda: 7,
                "Thread 6 reads element 1. Thread 1 has run by then. So thread 6 is right too.",
            ),
        },
    ),
    Number(
        id="p14-2",
        text=(
            "An H200 has 132 SMs. Rung 1 launches one block a head. 16,384 tokens are one\n"
            "sequence of N = 16,384; hidden size 2048, d = 64. How many SMs have nothing to do?"
        ),
        unit="SMs",
        truth=lambda: SMS - TOKENS // N * HIDDEN // D,
        tolerance=0,
        why="One sequence has 2048 / 64 = 32 heads, so 32 blocks.",
        hint="How many heads are there? A block cannot be split between SMs.",
        slips={
            "the-busy-ones": (
                lambda: HIDDEN // D,
                "That many SMs are at work. How many are not?",
            ),
            "none": (
                lambda: 0,
                "Count the blocks of the launch. There are fewer than SMs.",
            ),
            "d-128": (
                lambda: SMS - HIDDEN // 128,
                "That is for d = 128. With d = 64 there are twice as many heads.",
            ),
            "threads-spread": (
                lambda: SMS - HIDDEN // D * 2,
                "A block stays on one SM, and 32 blocks need no more than 32 SMs.",
            ),
        },
    ),
    Number(
        id="p14-3",
        text=(
            "An SM has 65,536 registers, 228 KiB of shared memory and room for 2048 threads.\n"
            "Rung 2 at d = 64 takes 96 registers a thread, 256 threads and 42,752 bytes (plus\n"
            "1,024 for the system) a block. How many blocks does one SM hold at a time?"
        ),
        unit="blocks",
        truth=lambda: blocks_per_sm(*q_outer_usage()),
        tolerance=0,
        why="65,536 / (96 x 256) is 2.67, and a third of a block does not run.",
        hint="Work out each of the three limits. The smallest counts, rounded down.",
        slips={
            "shared-memory-only": (
                lambda: room(*q_outer_usage())["shared memory"],
                "That is what shared memory allows. What do the registers allow?",
            ),
            "threads-only": (
                lambda: room(*q_outer_usage())["threads"],
                "That is what the number of threads allows. What do the registers allow?",
            ),
            "rounded-up": (
                lambda: 3,
                "2.67 rounded up. The third block would need 24,576 registers, and 16,384 are "
                "left.",
            ),
        },
    ),
    Choice(
        id="q40",
        text="What does __syncthreads() promise?",
        options={
            "a": "All threads of the grid have come this far.",
            "b": "The 32 threads of the warp have come this far.",
            "c": "From here on the threads of the block run in the order of their numbers.",
            "d": "All threads of the block have come this far, and see what the others wrote.",
        },
        right="d",
        remarks={
            "a": (
                "Blocks cannot wait for each other this way: some may not have started yet. The "
                "end of the kernel is the point where all blocks are done."
            ),
            "b": (
                "A warp is only a part of the block. Rung 1 has 8 warps, and each loads a part of "
                "the tile that all of them read."
            ),
            "c": "It gives no order. After the barrier the threads run on in any order.",
            "d": "The whole block, and only the block. Its writes to memory are visible after it.",
        },
    ),
    Choice(
        id="q41",
        text=(
            "In rung 1 several blocks a head would fill the idle SMs. Which split of the work\n"
            "needs no change to what a row of O, l and m may be written by?"
        ),
        options={
            "a": "Each block takes some of the rows of Q, and all K/V blocks.",
            "b": "Each block takes some of the K/V blocks, and all rows of Q.",
            "c": "Each block takes some of the columns of the head dimension d.",
            "d": "None: O, l and m lie in HBM, so only one block may run.",
        },
        right="a",
        remarks={
            "a": "A row then has one owner. That is rung 2, and FlashAttention-2's loop order.",
            "b": (
                "Then two blocks load, rescale and store the same row of O: the stand-in reports a "
                "race of blocks. (It can be done with a merge at the end: notebook 12.)"
            ),
            "c": (
                "A score is a sum over all of d. The blocks would have to add up their parts of S "
                "before any of them could go on."
            ),
            "d": "HBM can be shared. What matters is that each row is written by one block only.",
        },
    ),
    Choice(
        id="q42",
        text=(
            "A kernel's results are right in a hundred runs. The stand-in reports a race all the\n"
            "same. What does that mean?"
        ),
        options={
            "a": "A false alarm: a race would have shown in a hundred runs.",
            "b": "A wrong guard at the end of the data.",
            "c": "Two threads read the same element.",
            "d": "Nothing in the kernel ensures the order that it needs.",
        },
        right="d",
        remarks={
            "a": (
                "A race is about what may happen. Another GPU, another compiler or another load "
                "may give another order."
            ),
            "b": "That is reported as out of bounds. It has nothing to do with order.",
            "c": "Reading together is no race. One of the two must write.",
            "d": "The report looks at who used what between two barriers, not at the numbers.",
        },
    ),
]


def check_block_max(kernel):
    """Judge a stand-in kernel like the notebook's block_max(t, x, n, out). Returns a Result."""
    from attention_lib.checks import NOT_YET, PASSED, Result

    for threads, n, seed in ((8, 8, None), (8, 5, 0), (16, 16, 1), (1, 1, None), (64, 40, 2)):
        x = np.random.default_rng(n).permutation(n).astype(np.float32) - 100  # all below zero
        out = poisoned(1)
        try:
            report = run_block(kernel, threads, x, n, out, seed=seed)
        except Exception as error:
            return Result(NOT_YET, f"your kernel raised {type(error).__name__}: {error}")
        case = f"{threads} threads, n = {n}"
        if report.out_of_bounds or report.uneven:
            return Result(NOT_YET, f"{case}: {(report.out_of_bounds + report.uneven)[0]}")
        if report.races or report.unwritten:
            return Result(
                NOT_YET,
                f"{case}: {(report.races + report.unwritten)[0]}. Which barrier is missing?",
                "missing-barrier",
            )
        if out[0] != x.max():
            said = "nothing" if math.isnan(out[0]) else f"{out[0]:g}"
            return Result(NOT_YET, f"{case}: out[0] is {said}, the largest is {x.max():g}.")
    return Result(PASSED, "the largest number, in any order of the threads, and no race.")
