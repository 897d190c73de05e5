"""Questions of notebook 04, Counting HBM traffic."""

import functools
import math

import numpy as np

from attention_lib.checks.kinds import Choice, Number
from attention_lib.memory import HBM
from attention_lib.tiled import block_sizes, flash_attention
from attention_lib.traffic import flash_traffic, standard_traffic

D, M = 64, 50_000
BR, BC = block_sizes(M, D)
N1, N2 = 512, 4096  # the run that is counted, and the size that is predicted
PASSES = math.ceil(N2 / BC)
MIB_ELEMENTS = 2**19  # elements of 2 bytes in a MiB


@functools.cache
def _counted(N):
    """Algorithm 1, run once on random arrays, and what it moved."""
    hbm = HBM()
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, D), dtype=np.float32)
    flash_attention(Q, K, V, BR, BC, hbm=hbm)
    return hbm


def _growth():
    return flash_traffic(2 * N2, D, BR, BC) / flash_traffic(N2, D, BR, BC)


def _mib(M):
    return flash_traffic(N2, D, *block_sizes(M, D)) / MIB_ELEMENTS


QUESTIONS = [
    Number(
        "p04-1",
        f"Algorithm 1 runs with N = {N1}, d = {D} and the paper's blocks for M = {M:,}:\n"
        f"Br = {BR}, Bc = {BC}. How many elements of Q does the run load from HBM, in all?",
        "elements",
        truth=lambda: _counted(N1).reads_by["Q"],
        why="All of Q, once for each K/V block. The last block is short and costs a whole pass.",
        hint="Count passes: how many K/V blocks are there, and how much of Q does each one need?",
        slips={
            "q-read-once": (
                lambda: N1 * D,
                "You read Q once. In this order Q is in the inner loop: it comes again for each "
                "K/V block.",
            ),
            "once-for-each-q-block": (
                lambda: math.ceil(N1 / BR) * N1 * D,
                "You read all of Q once for each Q block. The number of passes is the trip count "
                "of the outer loop, which walks over K/V blocks.",
            ),
            "passes-not-rounded-up": (
                lambda: N1 / BC * N1 * D,
                "You took N/Bc as it is. There is no part of a pass: round up.",
            ),
            "passes-rounded-down": (
                lambda: N1 // BC * N1 * D,
                "You rounded N/Bc down. The last, short block needs its pass too.",
            ),
            "rows-not-elements": (
                lambda: math.ceil(N1 / BC) * N1,
                "These are rows. A row of Q has d elements.",
            ),
            "passes-not-elements": (
                lambda: math.ceil(N1 / BC),
                "These are the passes, and their number is right. Now the elements: each pass "
                "loads N rows of d.",
            ),
            "q-and-o-together": (
                lambda: 2 * math.ceil(N1 / BC) * N1 * D,
                "That is Q and O together. O is loaded as often as Q; the question is about Q.",
            ),
        },
        tolerance=0.001,
        slip_tolerance=0.0005,
    ),
    Number(
        "p04-2",
        f"The same blocks (Br = {BR}, Bc = {BC}), d = {D}, and now N = {N2}.\n"
        "How many elements does the whole run move, loads and stores together?",
        "elements",
        truth=lambda: flash_traffic(N2, D, BR, BC),
        why="2Nd for K and V, then Tc passes of 3Nd + 4N.",
        hint="Write one line for each tensor: how often loaded, how often stored, how large. "
        "Then add the lines.",
        slips={
            "touched-once": (
                lambda: 4 * N2 * D,
                "You touched Q, K, V and O once each. Q and O come again in every pass.",
            ),
            "standard": (
                lambda: standard_traffic(N2, D),
                "That is the traffic of standard attention, with S and P in HBM.",
            ),
            "passes-not-rounded-up": (
                lambda: 2 * N2 * D + N2 / BC * (3 * N2 * D + 4 * N2),
                "You took N/Bc as it is. There is no part of a pass: round up.",
            ),
            "passes-rounded-down": (
                lambda: 2 * N2 * D + (PASSES - 1) * (3 * N2 * D + 4 * N2),
                "You rounded N/Bc down. The last, short block needs its pass too.",
            ),
            "statistics-forgotten": (
                lambda: 2 * N2 * D + PASSES * 3 * N2 * D,
                "Close. You left out l and m, which are loaded and stored in every pass: four "
                "numbers a row.",
            ),
            "loads-only": (
                lambda: 2 * N2 * D + PASSES * (2 * N2 * D + 2 * N2),
                "These are the loads. O, l and m are also stored, in every pass.",
            ),
            "k-and-v-in-the-inner-loop": (
                lambda: math.ceil(N2 / BR) * 2 * N2 * D + PASSES * (3 * N2 * D + 4 * N2),
                "You loaded K and V once for each Q block. In this order they are in the outer "
                "loop: each block comes once.",
            ),
            "bytes-not-elements": (
                lambda: 2 * flash_traffic(N2, D, BR, BC),
                "These are bytes in fp16. The question is about elements.",
            ),
        },
        tolerance=0.002,
        slip_tolerance=0.00005,  # a count: 17.3e6 is not the slip of 17,301,504
    ),
    Number(
        "p04-3",
        f"M stays the same. N doubles, from {N2} to {2 * N2}.\n"
        "By which factor does the traffic of Algorithm 1 grow?",
        "a factor; 1 means no growth",
        truth=_growth,
        why="Twice the rows in each pass, and almost exactly twice the passes.",
        hint="Two things in Tc(3Nd + 4N) depend on N. Which, and how?",
        slips={
            "linear": (
                lambda: 2,
                "That would be linear growth. The rows double, and the number of passes over them "
                "doubles as well.",
            ),
            "cubic": (
                lambda: 8,
                "That would be N cubed. Two quantities double, the rows and the passes; d and Bc "
                "stay.",
            ),
            "no-growth": (
                lambda: 1,
                "The traffic cannot stay: Q alone is twice as large.",
            ),
        },
        tolerance=0.03,
    ),
    Number(
        "p04-4",
        f"N = {N2}, d = {D}. With M = {M:,} elements on chip, Algorithm 1 moves "
        f"{_mib(M):.1f} MiB (fp16).\nHow many MiB with twice the memory, M = {2 * M:,}?",
        "MiB",
        truth=lambda: _mib(2 * M),
        why="Bc doubles, so the passes go from 21 to 11. What K and V need does not shrink.",
        hint="How does Bc follow from M? Then count the passes, and round up.",
        slips={
            "all-of-it-halves": (
                lambda: _mib(M) / 2,
                "Close. The passes halve only nearly (a whole number of them), and K and V are "
                "still loaded once.",
            ),
            "quarter": (
                lambda: _mib(M) / 4,
                "You divided twice. Only Bc enters the number of passes; Br does not.",
            ),
            "unchanged": (
                lambda: _mib(M),
                "More memory means larger K/V blocks, so fewer passes over Q and O.",
            ),
            "square-root": (
                lambda: _mib(M) / math.sqrt(2),
                "That would be so if both sides of a tile grew like the root of M. In this rule "
                "Br stays at d, and Bc takes all of the gain.",
            ),
        },
        tolerance=0.045,
    ),
    Choice(
        "q11",
        "M stays the same and N grows. Which loads and stores make the traffic of Algorithm 1 "
        "grow like N squared?",
        {
            "a": "K and V, loaded again for every Q block",
            "b": "S and P, the N x N matrices",
            "c": "Q and O (with l and m), moved again for every K/V block",
            "d": "None: every tensor has N rows, so the traffic grows like N",
        },
        "c",
        {
            "a": "This is the swapped order. In Algorithm 1, K and V are in the outer loop: each "
            "of their blocks is loaded once. See the section on the other order.",
            "b": "S and P are the N x N of standard attention. Here they exist one tile at a time, "
            "on chip, and never cross to HBM. The counts by name have no S and no P.",
            "c": "Each pass moves N rows of them, and the number of passes, N/Bc, grows with N.",
            "d": "That is what the arrays need in HBM, not what is moved. Count how often each "
            "array crosses.",
        },
    ),
    Choice(
        "q12",
        "A profiler shows 130 MB between DRAM and L2 for a fused attention kernel at N = 16,384: "
        "about 4Nd. A colleague concludes that the loop asks for each of Q, K, V and O once.\n"
        "What do you answer?",
        {
            "a": "You counted below the L2 cache: the loop asks again and again, and L2 answers",
            "b": "Right: that is what tiling is for, each tensor is loaded once",
            "c": "The profiler is wrong: a closed form that equals the counters cannot be beaten",
            "d": "The kernel keeps all of K and V in the shared memory of an SM",
        },
        "a",
        {
            "a": "Two places to count, two numbers, both right. Between the SMs and L2 the same "
            "kernel moved about 75 times as much.",
            "b": "Tiling removes S and P from HBM. It does not stop one operand from coming again "
            "in every step of the outer loop.",
            "c": "The closed form counts what crosses into the chip's SRAM. The profiler's number "
            "is for another place. Neither is wrong.",
            "d": "K and V of one head take 4 MiB at this N. An SM has some 200 KB.",
        },
    ),
    Choice(
        "q13",
        f"The head dimension goes from 64 to 128. M stays at {M:,} elements, N at {N2}, and the "
        "blocks follow the paper's rule.\nWhat happens to the advantage of Algorithm 1 over "
        "standard attention?",
        {
            "a": "It stays: both have an N squared, and d is small against N",
            "b": "It halves: each row is twice as long",
            "c": "It grows: standard attention moves twice as much",
            "d": "Almost none of it is left: longer rows, and more passes",
        },
        "d",
        {
            "a": "d enters Algorithm 1 twice: in the length of a row and, through Bc, in the "
            "number of passes.",
            "b": "That is one of two effects. Bc = M/4d also halves.",
            "c": "Standard attention moves mostly S and P, which do not depend on d.",
            "d": "Rows and passes both double: four times the traffic for Algorithm 1, and nearly "
            "the same for standard. The ratio falls from 3.9 to 1.02.",
        },
    ),
]
