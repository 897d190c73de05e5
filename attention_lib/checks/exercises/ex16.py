"""Exercise 16: the rescale of rung 2, written into a kernel that lacks it."""

import math

import numpy as np

from attention_lib.checks.cuda import make, single
from attention_lib.checks.kinds import Choice, Probe
from attention_lib.checks.programs import rounding
from attention_lib.gpu.broken import edited, source
from attention_lib.gpu.own import Launch
from attention_lib.gpu.standin import poisoned
from attention_lib.reference import standard_attention

CARRY = "notebook 02, 'Carry two numbers: m and l'"
OUTPUT = "notebook 02, 'The output is carried the same way'"
LEFT_OUT = "notebook 02, 'Leave the rescale out'"
HIDDEN = "notebook 02, 'A chunk in which nothing is visible'"
RUNG = "notebook 14, 'Rung 2: each row has one owner'"
BARRIER = "notebook 14, 'Shared memory and the barrier'"
GIVEN = source("rescale_gap")
BR, D = 4, 2


def probes(seed):
    rng = np.random.default_rng(seed)

    def probe(Nq, Nk, says="", rise=0.0, level=0.0, causal=0, order=None, stage=0):
        Q, K, V = (rng.standard_normal((n, D)) for n in (Nq, Nk, Nk))
        K[:, 0] += level + rise * np.linspace(0, 1, Nk)
        Q[:, 0] = 1 + 0.1 * Q[:, 0]
        Q, K, V = (x.astype(np.float32) for x in (Q, K, V))
        size = 2 * float((np.abs(Q) @ np.abs(K).T).max())
        given = {"Q": Q, "K": K, "V": V, "causal": causal, "seed": order}
        says = f"{Nq} rows, {Nk} keys{', causal' if causal else ''}{says}"
        return Probe(says, given, (0.0, *single(rounding(size, Nk, V))), stage)

    order = int(rng.integers(1, 99))
    return [
        probe(4, 9, ": the scores rise by 9", rise=9),
        probe(5, 7, ": the scores fall by 9", rise=-9),
        probe(4, 6, ": the scores rise by 40", rise=40, order=order),
        probe(6, 6, causal=1),
        probe(1, 1),
        probe(4, 6, ": all scores near -1000", level=-1000),
        probe(4, 6, ": all scores near 1000", level=1000),
        probe(4, 7, ": the scores fall by 200", rise=-200, stage=1),
        probe(6, 3, ": 3 rows see no key", causal=1, stage=2, order=order),
    ]


def launch(Q, K, V, causal, seed):
    Nq, Nk = len(Q), len(K)
    args = (Q.ravel(), K.ravel(), V.ravel(), poisoned(Nq * D), poisoned(Nq), Nq, Nk, causal)
    return Launch(-(-Nq // BR), BR * D, args, (3, 4), seed)


def right(Q, K, V, causal, seed):
    Q, K, V = (x.astype(np.float64) for x in (Q, K, V))
    Q = Q * math.sqrt(D)  # the kernel does not scale
    O, S, _ = standard_attention(Q, K, V, causal=bool(causal))
    return O.ravel(), np.logaddexp.reduce(S, axis=1, initial=-math.inf)


NEW_MAX = "for (int j = 0; j < Bc; j++) m_new = fmaxf(m_new, S[row][j]);"
SHIFT = "float shift = m_new == -INFINITY ? 0.f : m_new;"
WEIGHTS = "for (int j = 0; j < Bc; j++) l_tile += S[row][j] = expf(S[row][j] - shift);"
FACTOR = "rescale[row] = expf(m[row] - shift);"
SUM = "l[row] = l[row] * rescale[row] + l_tile;"
TAKE = "o *= rescale[r];"


def filled(*, start="m[row]", new_max=NEW_MAX, shift=SHIFT, weights=WEIGHTS, factor=FACTOR, sum=SUM,
           keep="m[row] = m_new;", early="", take=TAKE, late=""):  # fmt: skip
    """The kernel with both gaps filled; each part may be another one."""
    first = f"float m_new = {start}, l_tile = 0.f;"
    lines = [first, new_max, shift, weights, early, factor, sum, keep]
    gap = "\n".join(" " * 12 + x for x in lines if x)
    return edited(GIVEN, {32: gap, 35: " " * 8 + take}, {36: " " * 8 + late})


RESCALE = make(
    "ex16-rescale",
    "Fill the two gaps: return the text of the whole kernel. O and L must be right whatever the\n"
    "order in which large scores come.",
    "rescale_gap",
    launch,
    right,
    probes,
    ("Q", "K", "V", "O", "L", "Kj", "Vj", "S", "m", "l", "rescale"),
    ("O", "L"),
    RUNG,
    (
        (
            "rescale-inverted",
            "the factor is upside down. It is exp(m_old - m_new), at most 1: what was summed up "
            "shrinks when the maximum rises.",
            [filled(factor="rescale[row] = expf(m_new - m[row]);")],
            CARRY,
        ),
        (
            "l-rescaled-not-O",
            "l is rescaled, O is not. Both were summed up with the old maximum.",
            [filled(take="")],
            OUTPUT,
        ),
        (
            "O-rescaled-not-l",
            "O is rescaled, l is not. Both were summed up with the old maximum.",
            [filled(sum="l[row] += l_tile;")],
            LEFT_OUT,
        ),
        (
            "factor-is-1",
            "nothing is rescaled. Is m overwritten before the factor is computed? Then it is "
            "exp(0) = 1.",
            [
                filled(sum="l[row] += l_tile;", take=""),
                filled(early="m[row] = m_new;"),
            ],
            LEFT_OUT,
        ),
        (
            "m-not-updated",
            "m is never stored: in the next tile the old maximum is still -inf, and all that was "
            "summed up counts nothing.",
            [filled(keep="")],
            CARRY,
        ),
        (
            "rescaled-after-the-sum",
            "O is rescaled after this tile was added. Its weights have the new maximum already.",
            [filled(take="", late=TAKE)],
            OUTPUT,
        ),
        (
            "new-part-rescaled-too",
            "the new part of l is rescaled as well. Only the old part was made with the old "
            "maximum.",
            [filled(sum="l[row] = (l[row] + l_tile) * rescale[row];")],
            CARRY,
        ),
        (
            "l-overwritten",
            "l holds this tile's sum only. The old one, rescaled, belongs to it.",
            [filled(sum="l[row] = l_tile;"), filled(sum="l[row] = l_tile * rescale[row];")],
            CARRY,
        ),
        (
            "weights-not-stored",
            "S still holds scores when O is summed up. Put the weights in their place.",
            [filled(weights=WEIGHTS.replace("S[row][j] = ", ""))],
            RUNG,
        ),
        (
            "no-maximum-subtracted",
            "the weights are exp of the score alone. It overflows, or it is 0 for every key.",
            [
                filled(
                    shift="float shift = 0.f;", keep="m[row] = 0.f;", factor="rescale[row] = 1.f;"
                ),
            ],
            "notebook 02, 'A row needs its largest score and its sum'",
        ),
        (
            "divided-in-each-tile",
            "O is divided by l in the loop, and again at the end. This kernel divides once.",
            [filled(late="o /= l[r];")],
            OUTPUT,
        ),
        (
            "maximum-of-this-tile-only",
            "the maximum is this tile's own, so it can fall. Then the factor is larger than 1, and "
            "overflows.",
            [filled(start="-INFINITY")],
            CARRY,
        ),
        (
            "nothing-seen-gives-nan",
            "a row that has seen no key has m = -inf, and -inf - (-inf) is NaN. Subtract 0 there.",
            [
                filled(shift="float shift = m_new;"),
                filled(
                    shift="float shift = m_new;", take="if (rescale[r] >= 0.f) o *= rescale[r];"
                ),
            ],
            HIDDEN,
        ),
        (
            "factor-of-another-row",
            "thread (r, c) takes the factor of another row. Its own is rescale[r].",
            [
                filled(take="o *= rescale[c];"),
                filled(take="o *= rescale[threadIdx.x % Br];"),
            ],
            RUNG,
        ),
        (
            "factor-never-written",
            "rescale is read, and nobody has written it in this block.",
            [
                filled(
                    factor="float factor = expf(m[row] - shift);",
                    sum=SUM.replace("rescale[row]", "factor"),
                )
            ],
            BARRIER,
        ),
    ),
)

QUESTIONS = [
    Choice(
        "ex16-owner",
        "In rung 2 one thread computes the factor of a row, and 16 threads multiply their part of "
        "O by it. What makes sure that they read the new factor, not the old one?",
        {
            "a": "The 16 threads are in the same warp as the one that writes it",
            "b": "The factor is a float, which is written in one piece",
            "c": "Each thread computes the factor again, for itself",
            "d": "The barrier between the rescale and the loop over O",
        },
        "d",
        {
            "a": "Thread r writes the factor of row r; row r of O belongs to threads of another "
            "warp, in general.",
            "b": "So nobody reads half of it. It may still be the old one.",
            "c": "It could. Rung 2 does not: it would need the whole row of scores 16 times.",
            "d": "And the barriers around the load keep the next factor from being written too "
            "early.",
        },
    ),
    RESCALE,
    Choice(
        "ex16-order",
        "A test has scores that fall along the row, so the first tile has the maximum. Which "
        "wrong rescale passes it?",
        {
            "a": "l is overwritten by each tile's sum",
            "b": "O is rescaled and l is not",
            "c": "The maximum is taken of each tile alone",
            "d": "S still holds scores when O is summed up",
        },
        "b",
        {
            "a": "The first tile has nearly all of the weight, and its sum is lost.",
            "b": "The factor is exp(0) = 1 in each tile after the first. No rescale is missed "
            "where none is needed: let the scores rise.",
            "c": "Later tiles then have a smaller maximum: if it falls far, the factor overflows.",
            "d": "Scores are no weights, whatever their order.",
        },
    ),
]
