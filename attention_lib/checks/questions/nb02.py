"""Questions of notebook 02: softmax one piece at a time."""

import math

import numpy as np

from attention_lib.checks.kinds import Choice, Number
from attention_lib.online import State, merge
from attention_lib.reference import softmax


def _row():
    """The notebook's row: twelve scores."""
    return np.random.default_rng(0).standard_normal(12) * 3


def _maxima():
    """The running maximum after the first and after the second chunk of four."""
    x = _row()
    return float(x[:4].max()), float(x[:8].max())


def _state(m, l):
    return State(np.array([float(m)]), np.array([float(l)]), np.zeros((1, 0)))


QUESTIONS = [
    Number(
        "p02-1",
        "A row of 12 scores is cut into 3 tiles of 4. Softmax is taken of each tile on its own.\n"
        "What do the 12 numbers add up to?",
        unit="the sum of all 12",
        truth=lambda: float(softmax(_row().reshape(3, 4)).sum()),
        why="Each tile is divided by its own sum, so each adds up to 1.",
        hint="What does one softmax add up to, and how many did we take?",
        slips={
            "one-denominator": (
                lambda: float(softmax(_row()).sum()),
                "That is the sum when all 12 share one denominator. Count the denominators here.",
            ),
            "tile-length": (
                lambda: 4.0,
                "That is how many scores a tile has. What does the softmax of one tile add up to?",
            ),
            "one-for-each-score": (
                lambda: 12.0,
                "That gives each score a weight of 1. The scores of a tile share a weight of 1.",
            ),
        },
    ),
    Number(
        "p02-2",
        "After the first chunk of the row, m = 1.9213 and l = 1.5126.\n"
        "The second chunk brings a score of 3.9120, the largest so far.\n"
        "By which factor must the old l be multiplied?",
        unit="the factor, to two or three digits",
        truth=lambda: math.exp(_maxima()[0] - _maxima()[1]),
        why="Every old term e^(x - m_old) becomes e^(x - m_new): times e^(m_old - m_new), below 1.",
        hint="Each old term is e^(x - 1.9213). It should be e^(x - 3.9120). Divide the two.",
        tolerance=0.03,
        slips={
            "inverted": (
                lambda: math.exp(_maxima()[1] - _maxima()[0]),
                "That is 1 over the right factor. A larger maximum makes the old terms smaller.",
            ),
            "no-exponential": (
                lambda: _maxima()[1] - _maxima()[0],
                "That is how far the maximum moved. The terms are e to the power of scores.",
            ),
            "ratio-of-maxima": (
                lambda: _maxima()[0] / _maxima()[1],
                "That is the ratio of the two maxima. Their difference is what ends up in e^(...).",
            ),
            "not-rescaled": (
                lambda: 1.0,
                "A factor of 1 leaves the old sum relative to the old maximum.",
            ),
            "power-of-two": (
                lambda: 2 ** (_maxima()[0] - _maxima()[1]),
                "The right exponent on the wrong base: 2 in place of e.",
            ),
        },
    ),
    Number(
        "p02-3",
        "Two halves of a row have been processed apart.\n"
        "One has m = 1 and l = 2, the other m = 3 and l = 5. What is l of the whole row?",
        unit="l, to three digits",
        truth=lambda: float(merge(_state(1, 2), _state(3, 5)).l[0]),
        why="Both sums are put on the scale of the larger m: 2 e^(1-3) + 5 e^(3-3).",
        hint="Choose m of the whole row first. Then put each l on that scale and add.",
        tolerance=0.01,
        slips={
            "added": (
                lambda: 2.0 + 5.0,
                "You added sums that are on two scales: 2 is relative to e^1, 5 to e^3.",
            ),
            "inverted": (
                lambda: 2 * math.exp(2) + 5,
                "You scaled the first half up. Its maximum rises from 1 to 3, so its sum shrinks.",
            ),
            "wrong-half-rescaled": (
                lambda: 2 + 5 * math.exp(-2),
                "You rescaled the half that holds the maximum. The other one has to move.",
            ),
            "smaller-maximum": (
                lambda: 2 + 5 * math.exp(2),
                "That is the sum relative to m = 1, the smaller one. The whole row has m = 3.",
            ),
            "one-half-lost": (
                lambda: 5.0,
                "That is the second half alone. The first half is small on this scale, but not 0.",
            ),
        },
    ),
    Number(
        "p02-4",
        "512 scores that have nothing to do with each other come in 8 chunks of 64.\n"
        "The first chunk sets m. How often do the other 7 raise it, on average over many rows?",
        unit="rises for each row, from 0 to 7",
        truth=lambda: sum(1 / k for k in range(2, 9)),
        why="Chunk k holds the largest score so far with probability 1/k: 1/2 + 1/3 + ... + 1/8.",
        hint="How likely does the 2nd chunk beat the 1st? And the 8th all 7 before it?",
        tolerance=0.22,
        slips={
            "every-chunk": (
                lambda: 7.0,
                "You let every chunk bring a new maximum. A late chunk must beat all before it.",
            ),
            "coin-toss": (
                lambda: 3.5,
                "You gave each chunk one chance in two. True for the 2nd, but the 8th must beat 7.",
            ),
            "first-chunk-counted": (
                lambda: sum(1 / k for k in range(1, 9)),
                "You counted the first chunk too. It sets m, and there is nothing to rescale yet.",
            ),
        },
    ),
    Choice(
        "q2",
        "Why can't you compute the softmax tile by tile, by applying it to each tile separately?",
        {
            "a": "A tile does not know the row's maximum, so its exponentials can overflow.",
            "b": "Each tile is divided by its own sum, so each gets a total weight of 1.",
            "c": "Each tile rounds a little differently, and the rounding errors add up.",
            "d": "exp is not linear, so exp of a tile is not a tile of exp.",
        },
        right="b",
        remarks={
            "a": "It sounds right because the maximum is there against overflow. But a tile that "
            "subtracts its own maximum cannot overflow. What goes wrong comes after exp.",
            "b": "A tile of tiny scores gets as much weight as the tile that holds the maximum.",
            "c": "Rounding is the first suspect in numerical code. Here the error is as large as "
            "the weights themselves, and it would be there in exact arithmetic.",
            "d": "exp is taken score by score, so tiles change nothing about it. Look for the "
            "step that needs all scores of the row at once.",
        },
    ),
    Choice(
        "q3",
        "Which two quantities does the online softmax carry for each row?\n"
        "And what happens to the sums so far when a larger maximum shows up?",
        {
            "a": "m and l; l and O are multiplied by e^(m_new - m_old).",
            "b": "m and l; l is multiplied by e^(m_old - m_new), O waits for the last division.",
            "c": "The mean and the variance of the scores; both are updated with the new chunk.",
            "d": "m and l; l and O are multiplied by e^(m_old - m_new).",
        },
        right="d",
        remarks={
            "a": "The right pair, the wrong way round: this factor is above 1. When the maximum "
            "rises, old terms must shrink. The printed formula in one paper invites this slip.",
            "b": "O is a sum of the same terms as l, each times a row of V. If one moves to the "
            "new scale and the other does not, their ratio is wrong.",
            "c": "That pair belongs to normalisation layers. Softmax divides by a sum "
            "of exponentials, so it needs that sum and the maximum that keeps it finite.",
            "d": "The factor is 1 where the maximum stays, and below 1 where it rises.",
        },
    ),
    Choice(
        "q8",
        "Four workers hold a quarter of a row's keys each.\n"
        "Each returns m, l and its own normalised output O / l.\n"
        "How do the four outputs become the output of the row?",
        {
            "a": "As their plain average, because each worker saw the same number of keys.",
            "b": "As their average weighted by l.",
            "c": "As their average weighted by l e^m.",
            "d": "Not at all: a worker needs the m of the one before it before it can start.",
        },
        right="c",
        remarks={
            "a": "The number of keys does not decide how much a quarter counts; its scores do. "
            "This is softmax of each tile again.",
            "b": "Close: l is a sum of exponentials, but each worker's is relative to its own m. "
            "Put them on one scale first.",
            "c": "l e^m is the sum of e^score over that quarter. In practice all four m are "
            "first lowered by the largest, so that nothing overflows. The order does not matter.",
            "d": "The loop over chunks looks sequential, and that is why people think so. The "
            "merge is associative: the quarters can be made apart and joined in any order.",
        },
    ),
]
