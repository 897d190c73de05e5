"""Questions of notebook 06, What fits in SRAM."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.hardware import GPUS, KiB, optimal_block, sram_use
from attention_lib.tiled import block_sizes
from attention_lib.traffic import arithmetic_intensity, q_outer_traffic, tile_elements


def _five_tiles(M, d):
    Br, Bc = block_sizes(M, d)
    return tile_elements(Br, Bc, d) - 2 * Br  # without l and m


def _kib(**options):
    return sram_use(128, 128, 128, **options)["total"] / KiB


def _square(d):
    """The largest square block on an A100, everything counted."""
    return optimal_block(GPUS["A100-80"].sram_per_block, d)


def _growth(Br_64, Br_128, N=4096):
    return q_outer_traffic(N, 128, Br_128, Br_128) / q_outer_traffic(N, 64, Br_64, Br_64)


QUESTIONS = [
    Number(
        id="p06-1",
        text=(
            "d = 64, Br = 64, Bc = 196. One step has on chip a K and a V tile, a Q and an O tile,\n"
            "the score tile S, and one l and one m for each row of Q. P takes the place of S.\n"
            "How many elements is that?"
        ),
        unit="elements",
        truth=lambda: tile_elements(64, 196, 64),
        why="Four d-wide tiles, one Br x Bc tile, and two numbers for each row.",
        hint="K and V: Bc rows of d each. Q and O: Br rows of d. S: Br x Bc. l and m: Br each.",
        tolerance=0.001,
        slip_tolerance=0.0005,
        slips={
            "no-l-and-m": (
                lambda: tile_elements(64, 196, 64) - 2 * 64,
                "All five tiles are there. Each row of Q also keeps its l and its m: 2 Br more.",
            ),
            "no-score-tile": (
                lambda: tile_elements(64, 196, 64) - 64 * 196,
                "You probably left S out. It never reaches HBM, but it has to stand somewhere: "
                "Br x Bc elements on chip.",
            ),
            "S-and-P-apart": (
                lambda: tile_elements(64, 196, 64) + 64 * 196,
                "You probably gave S and P a tile each. P is written over S, element by element.",
            ),
            "keys-only": (
                lambda: 2 * 196 * 64,
                "Those are K and V. The step also needs Q, O, S and the row numbers.",
            ),
        },
    ),
    Number(
        id="p06-2",
        text=(
            "M = 25,000 elements and d = 64. The paper's rule gives Bc = 98 and Br = 64.\n"
            "How many elements do the five tiles K, V, Q, O, S need? (Leave l and m out.)"
        ),
        unit="elements",
        truth=lambda: _five_tiles(25_000, 64),
        why="More than M: the rule shares M among four tiles, and S comes on top.",
        hint="2 Bc d for K and V, 2 Br d for Q and O, Br Bc for S.",
        tolerance=0.002,
        slip_tolerance=0.0005,
        slips={
            "four-tiles-only": (
                lambda: _five_tiles(25_000, 64) - 64 * 98,
                "That is K, V, Q and O, which do stay below M. The fifth tile, S, is missing.",
            ),
            "keeps-to-M": (
                lambda: 25_000,
                "That is M itself. The rule divides M by 4d, so four tiles are at most about M; "
                "now add S.",
            ),
            "five-quarters": (
                lambda: 5 * 25_000 / 4,
                "You took M/4 for each of the five. That is the most each can be; Q and O have "
                "64 rows here, not 98.",
            ),
            "with-l-and-m": (
                lambda: _five_tiles(25_000, 64) + 2 * 64,
                "That includes l and m. Right in life; the question asked for the five tiles.",
            ),
        },
    ),
    Number(
        id="p06-3",
        text=(
            "Br = Bc = d = 128. Q, K and V tiles are fp16. The score tile S and the accumulator O\n"
            "are fp32, and so are m and l. All of it is kept in shared memory.\n"
            "How many KiB is that?"
        ),
        unit="KiB",
        truth=lambda: _kib(rule="real"),
        why="Three fp16 tiles of 32, two fp32 tiles of 64, and 1 for m and l.",
        hint="A tile of 128 x 128 is 32 KiB in fp16 and 64 KiB in fp32.",
        tolerance=0.005,
        slips={
            "no-score-tile-and-fp16-accumulator": (
                lambda: _kib(rule="article"),
                "That is Q, K, V and O at 2 bytes, without S: the account of the article below.",
            ),
            "fp16-accumulator": (
                lambda: _kib(rule="real", O_bytes=2),
                "S is in. O is counted at 2 bytes, but while it is summed up it is fp32: 4 bytes.",
            ),
            "no-score-tile": (
                lambda: _kib(rule="real") - 64,
                "O is fp32 as it should be. S, 128 x 128 at 4 bytes, is missing.",
            ),
            "all-in-fp32": (
                lambda: _kib(rule="real", element_bytes=4),
                "You took 4 bytes for everything. Q, K and V stay as they came from HBM: 2 bytes.",
            ),
        },
    ),
    Number(
        id="p06-4",
        text=(
            "Q outside, N = 4,096, d = 128, Br = 128, fp16. One inner step does 128 FLOP for each\n"
            "byte of K and V. Now take the whole forward pass: 4 N^2 d FLOP, over all bytes that\n"
            "the loop moves. How many FLOP per byte?"
        ),
        unit="FLOP/byte",
        truth=lambda: arithmetic_intensity(4096, 128, 128),
        why="Reading Q and writing O and L is about 1/33 of the traffic here.",
        hint="K and V pass once for each block of Q: N/Br = 32 times. Q, O and L pass once. Count "
        "the elements, at 2 bytes each.",
        tolerance=0.005,
        slip_tolerance=0.035,  # 64 is 62.06 in round numbers
        slips={
            "one-step-only": (
                lambda: 128,
                "That is the inner step. Q is read and O and L are written too, so the whole pass "
                "has a little less.",
            ),
            "each-touched-once": (
                lambda: 4 * 4096**2 * 128 / (2 * 4 * 4096 * 128),
                "You read K and V once. The loop reads them for each block of Q: Tr = 32 times.",
            ),
            "K-without-V": (
                lambda: 4 * 4096**2 * 128 / (2 * (2 * 4096 * 128 + 4096 + 4096 * 128 * 32)),
                "Each step reads K and V, not one of them.",
            ),
            "half-the-work-or-twice-the-bytes": (
                lambda: arithmetic_intensity(4096, 128, 128) / 2,
                "Either one matrix product is missing (there are two, of 2 N^2 d FLOP each), or "
                "you took 4 bytes for an element: fp16 has 2.",
            ),
        },
    ),
    Number(
        id="p06-5",
        text=(
            "A100, N = 4,096, Q outside, square blocks, all in shared memory. At d = 64 the\n"
            "largest block that fits is 128. Now d = 128; find the block again (a multiple of 16,\n"
            "at most 163 KiB: optimal_block(163 * KiB, 128) tells you).\n"
            "By what factor does the traffic of one head grow?"
        ),
        unit="times",
        truth=lambda: _growth(_square(64), _square(128)),
        why="Twice as many elements in each row of K and V, and more passes over them.",
        hint="Traffic is about 2Nd * N/Br. d doubles; what does Br do?",
        slip_tolerance=0.03,
        slips={
            "block-stays": (
                lambda: _growth(_square(64), _square(64)),
                "You doubled d and kept the block. The same block of rows, twice as wide, "
                "does not fit any more.",
            ),
            "block-halves": (
                lambda: _growth(_square(64), _square(64) // 2),
                "You halved the block. S does not grow with d, so the block shrinks by less.",
            ),
            "blocks-only": (
                lambda: _square(64) / _square(128),
                "That is the change of Br alone. Each pass over K and V is also twice as long.",
            ),
        },
    ),
    Choice(
        id="q16",
        text=(
            "Algorithm 1 takes Bc = ceil(M/4d) and Br = min(Bc, d). With M = 50,000 elements and\n"
            "d = 128, do its tiles fit in M?"
        ),
        options={
            "a": "Yes: M is divided by 4, one part for each of K, V, Q and O.",
            "b": "No: K, V, Q and O already fill M, and the score tile comes on top.",
            "c": "Yes: the score tile never reaches HBM, so it takes no place.",
            "d": "No: a larger d always needs more than M.",
        },
        right="b",
        remarks={
            "a": "Four parts for four tiles leave nothing for the fifth. Here Br = Bc = 98, so "
            "all four are full.",
            "b": "The rule keeps the sum within 5/4 of M (and a little by rounding), not in M.",
            "c": "Not reaching HBM is the point of the algorithm. It means the tile is on chip, "
            "where it takes Br x Bc elements.",
            "d": "The same d fits once M is 8d^2 or a little more: Br stops at d, and K, V and S "
            "take less than all of it.",
        },
    ),
    Choice(
        id="q17",
        text=(
            "A kernel asks for 258 KiB of shared memory for one thread block on an A100,\n"
            "where a block may have 163 KiB. What happens?"
        ),
        options={
            "a": "It runs, and the part that does not fit spills to the L2 cache.",
            "b": "It runs with half a block on each of two SMs.",
            "c": "It does not run: the launch fails.",
            "d": "It runs, with one block per SM in place of two.",
        },
        right="c",
        remarks={
            "a": "A common belief, because spilling is real, for registers: the compiler moves "
            "them to local memory, which L1 and L2 cache. Shared memory is given whole or not "
            "at all.",
            "b": "A thread block lives on one SM. That is what lets its threads share memory.",
            "c": "Shared memory is a request, not a cache. Too large a request is an error, not a "
            "slow run.",
            "d": "That is what happens between half of an SM's memory and all that a block may "
            "have. 258 KiB is above both.",
        },
    ),
    Choice(
        id="q18",
        text=(
            "d = 128, Q outside, S and O in registers. Tiles of Br x Bc = 128 x 32 and 64 x 64\n"
            "both ask for 48 KiB. Which moves fewer bytes between HBM and the chip, if N is long?"
        ),
        options={
            "a": "Neither: the same memory on chip gives the same traffic.",
            "b": "64 x 64: a square tile has the best ratio of work to edge.",
            "c": "128 x 32, by about a quarter.",
            "d": "128 x 32, by about half.",
        },
        right="d",
        remarks={
            "a": "True of the order of growth in M; the exact count has Br in it, not Bc.",
            "b": "True of a matrix product whose two inputs are both read again. Here Q is read "
            "once; only K and V are read again, once for each block of Br rows.",
            "c": "The direction is right. K and V are read N/Br times, and Br is twice as large.",
            "d": "K and V are read N/Br times: half as often. FlashAttention-2 takes this tile "
            "where a block may have 99 KiB (and no causal mask is set).",
        },
    ),
]
