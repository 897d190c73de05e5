"""Predictions and checkpoint questions of notebook 15, the tensor cores, and its open task."""

import numpy as np

from attention_lib.checks.kinds import Choice, Number
from attention_lib.gpu import fragments, ladder

N, D = 1024, 64
LANE = np.arange(32)


def _plain_passes():
    """Of the ldmatrix that reads 16 rows and 16 columns of Q, d = 64, without a swizzle."""
    return fragments.ldmatrix_passes(LANE % 16, LANE // 16 * 8, D, fragments.plain)


def _rises(blocks=64):
    """Expected rises of a running maximum after the first of so many blocks of random numbers:
    the k-th block holds the largest so far with probability 1 / k."""
    return sum(1 / k for k in range(2, blocks + 1))


def _causal():
    """Tiles that the blocks of a causal launch go through, one head."""
    Br, Bc = ladder.rung("pipeline").rows(D), 64
    return sum(-(-min(first + Br, N) // Bc) for first in range(0, N, Br))


QUESTIONS = [
    Number(
        id="p15-1",
        text=(
            "One ldmatrix reads four 8 x 8 matrices. A row of a matrix is 16 bytes; the rows of\n"
            "the tile are 128 bytes apart (d = 64). One pass through shared memory gives each of\n"
            "the 32 banks of 4 bytes one address. How many passes does the ldmatrix take?"
        ),
        unit="passes",
        truth=_plain_passes,
        tolerance=0,
        why="Eight rows that all begin in the same bank, four times.",
        hint="128 bytes are 32 banks. In which banks do the eight rows of a matrix lie?",
        slips={
            "no-conflict": (
                lambda: 4,
                "That is one pass a matrix, the best case. Here all eight rows begin in the same "
                "bank.",
            ),
            "one-matrix": (
                lambda: 8,
                "That is one matrix. The instruction reads four, each on its own.",
            ),
            "d-32": (
                lambda: fragments.ldmatrix_passes(LANE % 16, LANE // 16 * 8, 32, fragments.plain),
                "That is for d = 32, where rows are 64 bytes apart and four of them meet. Here all "
                "eight do.",
            ),
            "every-number": (
                lambda: 256,
                "That counts numbers. A row of 8 numbers, 16 bytes, comes in one piece.",
            ),
        },
    ),
    Number(
        id="p15-2",
        text=(
            "One ldmatrix brings 512 bytes of K. In rung 4 a warp has 16 rows of Q, and these\n"
            "bytes feed two mma. In rung 5 a warp has 32 rows (d = 64). How many bytes of K does\n"
            "it read for each mma?"
        ),
        unit="bytes",
        truth=lambda: fragments.bytes_per_mma("pipeline", D),
        tolerance=0,
        why="The same fragment of K serves both halves of the rows: four mma for 512 bytes.",
        hint="Which mma can use a fragment of K again before it is given up?",
        slips={
            "sixteen-rows": (
                lambda: fragments.bytes_per_mma("swizzle", D),
                "That is rung 4. With 32 rows the same fragment is used for a second half.",
            ),
            "one-use": (
                lambda: 512,
                "That is for one mma. 512 bytes are B for two pieces of S, and there are 32 rows.",
            ),
            "eight-uses": (
                lambda: 64,
                "Twice too good. Two pieces of 8 keys, times two halves of 16 rows, is four mma.",
            ),
        },
    ),
    Number(
        id="p15-3",
        text=(
            "Scores at random, 64 blocks of keys. In how many of the 63 blocks after the first\n"
            "does the running maximum of a row rise, on average?"
        ),
        unit="blocks",
        truth=_rises,
        tolerance=0.1,
        slip_tolerance=0.03,
        why="1/2 + 1/3 + ... + 1/64: the k-th block has the largest so far once in k times.",
        hint=(
            "After k blocks the largest score so far lies in any of them, with equal chances. How "
            "likely is it the last one? Add that up."
        ),
        slips={
            "every-block": (
                lambda: 63,
                "The maximum does not rise in every block: the more you have seen, the rarer.",
            ),
            "half": (
                lambda: 31.5,
                "A half holds for the second block. For the tenth it is one in ten.",
            ),
            "log-2": (
                lambda: 6,
                "The logarithm is a good idea, but it is the natural one: about ln 64, less a bit.",
            ),
        },
    ),
    Number(
        id="p15-4",
        text=(
            "Causal, N = 1024, d = 64. Rung 5 has blocks of 128 rows of Q and 64 keys: 8 x 16 =\n"
            "128 tiles. A block of rows stops after the last key that any of its rows sees. How\n"
            "many tiles are left?"
        ),
        unit="tiles",
        truth=_causal,
        tolerance=0,
        why="2 + 4 + ... + 16: a little more than half, because of the diagonal.",
        hint="The first 128 rows see 128 keys at most. How many blocks of 64 keys are that?",
        slips={
            "half": (
                lambda: 64,
                "Half of the scores are hidden, but a tile on the diagonal is computed whole.",
            ),
            "all": (
                lambda: 128,
                "That is without skipping, as rungs 0 to 4 do it.",
            ),
            "without-diagonal": (
                lambda: _causal() - 2 * N // 128,
                "You left out the tiles on the diagonal. They are needed, and masked.",
            ),
            "square-tiles": (
                lambda: 136,
                "That is for 64 x 64 tiles, of which there are 256.",
            ),
        },
    ),
    Choice(
        id="q43",
        text="Why does S not go through shared memory from rung 3 on?",
        options={
            "a": "Each lane already holds the numbers that it must give to the next mma.",
            "b": "It is too large: 64 x 64 floats do not fit beside K and V.",
            "c": "The tensor cores write their result to HBM, where all lanes can read it.",
            "d": "The lanes exchange S with shuffles, which is faster.",
        },
        right="a",
        remarks={
            "a": (
                "The C fragments of two pieces of S are, lane by lane and in order, the A fragment "
                "of P. Rounding to 16 bits is all that happens."
            ),
            "b": "Rung 2 keeps exactly that tile there, and 64 x 65 floats are 16 KiB.",
            "c": "Their result is in registers. Nothing goes to HBM before the end.",
            "d": (
                "The shuffles carry the maximum and the sum of a row, one number each. The scores "
                "stay where they are."
            ),
        },
    ),
    Choice(
        id="q44",
        text="What does the XOR swizzle change?",
        options={
            "a": "The order of the additions in Q K^T, so the result may differ in the last bit.",
            "b": "The number of bytes in shared memory: a little more, for padding.",
            "c": "Which lane holds which element of a fragment.",
            "d": "Where in its row a 16-byte piece lies; reader and writer use the same formula.",
        },
        right="d",
        remarks={
            "a": "The same numbers reach the same lanes, so the additions are the same.",
            "b": "That is padding, the other cure. The swizzle takes no extra byte.",
            "c": "The fragment's layout is fixed by the instruction.",
            "d": "A permutation inside each row. No piece moves to another row.",
        },
    ),
    Choice(
        id="q45",
        text=(
            "Rung 5 leaves m at an old maximum if the new one is larger by no more than 8 (as a\n"
            "power of 2). Why is O still right?"
        ),
        options={
            "a": "O and l carry the same factor, and it cancels.",
            "b": "The skipped factors are multiplied in at the end.",
            "c": "It is an approximation; the error is below that of 16 bits.",
            "d": "m is used for L only.",
        },
        right="a",
        remarks={
            "a": (
                "exp(s - m) = exp(s) exp(-m). The factor exp(-m) cancels. m is there to keep "
                "numbers in range, and 2^8 is in range."
            ),
            "b": "There is nothing to make up for: O and l were both formed with the old m.",
            "c": "In exact arithmetic there is no error at all, for any m.",
            "d": "Every weight is computed with m. L uses it too.",
        },
    ),
]


def check_swizzle(piece):
    """Judge piece(r, c): where piece c of row r goes, eight pieces a row. Returns a Result."""
    from attention_lib.checks import NOT_ATTEMPTED, NOT_YET, PASSED, Result

    try:
        order = [[int(piece(r, c)) for c in range(8)] for r in range(64)]
    except Exception as error:
        return Result(NOT_YET, f"your function raised {type(error).__name__}: {error}")
    if all(row == list(range(8)) for row in order):
        return Result(NOT_ATTEMPTED, "piece(r, c) is c: every piece stays where it is.")
    for r, row in enumerate(order):
        if sorted(row) != list(range(8)):
            return Result(
                NOT_YET,
                f"row {r}: its pieces go to {row}. Each of the places 0 to 7 must be taken once.",
                "pieces-collide",
            )
    for r in range(0, 64, 8):
        for c in range(8):
            n = fragments.passes([128 * k + 16 * order[k][c] for k in range(r, r + 8)])
            if n > 1:
                return Result(
                    NOT_YET, f"rows {r} to {r + 7}, piece {c}: {n} passes. Aim at one.", "conflict"
                )
    return Result(PASSED, "each matrix takes one pass, and no piece is lost.")
