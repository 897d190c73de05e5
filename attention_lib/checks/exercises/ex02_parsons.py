"""Exercise 2, Parsons problems: the running sum, and Algorithm 1's inner loop, out of order."""

import math
from dataclasses import replace

import numpy as np

from attention_lib.checks.exercises import ex02
from attention_lib.checks.kinds import Mistake, Probe, Program
from attention_lib.checks.parsons import Line, Parsons
from attention_lib.checks.programs import rounding
from attention_lib.tiled import blocks

# ---- warm-up: m and l of one row


def sum_probes(seed):
    rng = np.random.default_rng(seed)

    def probe(says, x, chunk, stage=0):
        _, L = rounding(float(np.abs(x).max()), len(x), np.zeros(1))
        return Probe(f"{len(x)} scores, chunks of {chunk}: {says}", {"x": x, "chunk": chunk},
                     (0.0, L * len(x)), stage)  # fmt: skip

    ramp = np.linspace(0, 6, 6) + rng.random(6)
    return [
        probe("the maximum rises", ramp, 2),
        probe("the maximum falls", ramp[::-1].copy(), 2),
        probe("the last chunk is short", rng.standard_normal(7), 3),
        probe("the maximum rises by 60", 10 * ramp, 2, 1),
        probe("all scores near -1000", ramp - 1000, 4, 1),
        probe("scores near 800: exp of them overflows", ramp + 800, 1, 1),
    ]


def _running(x, chunk, *order):
    """The three last lines of the warm-up in another order."""
    m, l = -math.inf, 0.0
    for k in range(0, len(x), chunk):
        s = x[k : k + chunk]
        m_new = max(m, s.max())
        for subgoal in order:
            if subgoal == "rescale":
                l = l * math.exp(m - m_new)
            elif subgoal == "accumulate":
                l = l + np.exp(s - m_new).sum()
            else:
                m = m_new
    return m, l


SUM = Program(
    id="ex02p-running-sum",
    text="",
    outputs=("m", "l"),
    right=lambda x, chunk: (x.max(), np.exp(x - x.max()).sum()),
    probes=sum_probes,
    mistakes=(
        Mistake(
            "rescaled-after-adding",
            lambda x, chunk: _running(x, chunk, "accumulate", "rescale", "store"),
            "you add the new chunk first, then rescale it with the old sum. It needs no rescale.",
            ex02.CARRY,
        ),
        Mistake(
            "nothing-rescaled",
            lambda x, chunk: _running(x, chunk, "store", "rescale", "accumulate"),
            "m is already the new one when you rescale, so the factor is e^0 = 1.",
            ex02.RESCALE,
        ),
        Mistake(
            "nothing-rescaled",
            lambda x, chunk: _running(x, chunk, "accumulate", "store", "rescale"),
            "m is already the new one when you rescale, so the factor is e^0 = 1.",
            ex02.RESCALE,
        ),
    ),
    read=ex02.CARRY,
)

RUNNING_SUM = Parsons(
    id="ex02p-running-sum",
    task="The running maximum m and sum l of one row, a chunk at a time.\n"
    "Five lines are needed, three are wrong.",
    before="""\
def running_sum(x, chunk):
    m, l = -math.inf, 0.0
    for k in range(0, len(x), chunk):""",
    lines=(
        Line("l = l + np.exp(s - m_new).sum()", "accumulate"),
        Line(
            "l = l * math.exp(m_new - m)",
            "rescale",
            "rescale-inverted",
            "the factor is upside down. It is e^(m_old - m_new), at most 1.",
            ex02.RESCALE,
        ),
        Line("m = m_new", "store"),
        Line("m_new = max(m, s.max())", "score"),
        Line(
            "l = l + np.exp(s - m).sum()",
            "accumulate",
            "chunk-relative-to-old-m",
            "l is relative to the new maximum by then, so the chunk must be as well.",
            ex02.CARRY,
        ),
        Line("s = x[k : k + chunk]", "load"),
        Line(
            "m_new = s.max()",
            "score",
            "max-of-this-tile",
            "this is the chunk's maximum alone. An earlier chunk may hold a larger score.",
            ex02.CARRY,
        ),
        Line("l = l * math.exp(m - m_new)", "rescale"),
    ),
    after="    return m, l",
    program=SUM,
    names={"math": math, "np": np},
)


# ---- the inner loop of Algorithm 1


def load(where, *arrays):
    """Copies of these rows, as a tile on chip is a copy of what is in HBM."""
    return [x[where].copy() for x in arrays]


def dense_probes(seed):
    """Exercise 2's probes without a causal mask; the parameter is gone as well."""
    return [
        replace(p, arguments={k: v for k, v in p.arguments.items() if k != "causal"})
        for p in ex02.probes(seed)
        if not p.arguments["causal"] and p.stage < 5
    ]


INNER_LOOP = Parsons(
    id="ex02p-inner-loop",
    task="Algorithm 1 without its inner loop. Eleven lines are needed, eight are wrong.\n"
    "load(rows, Q, ...) copies these rows of each array on chip.",
    before="""\
def flash_attention(Q, K, V, Br, Bc):
    O, l, m = np.zeros(Q.shape), np.zeros(len(Q)), np.full(len(Q), -math.inf)
    for cols in blocks(len(K), Bc):
        Kj, Vj = load(cols, K, V)
        for rows in blocks(len(Q), Br):""",
    lines=(
        Line("l_new = old * li + new * l_tile", "rescale"),
        Line(
            "O_sum = (old * li)[:, None] * Oi + P @ Vj",
            "accumulate",
            "tile-O-not-at-new-max",
            "P Vj is relative to m_tile. It needs the factor e^(m_tile - m_new).",
            ex02.LINES,
        ),
        Line("m_tile = S.max(axis=1)", "score"),
        Line(
            "O[rows] = O_sum",
            "store",
            "never-divided",
            "O is the plain sum here. Line 12 divides it by l_new.",
            ex02.LINES,
        ),
        Line(
            "old, new = np.exp(m_new - mi), np.exp(m_new - m_tile)",
            "rescale",
            "rescale-inverted",
            "both factors are upside down. They are e^(m_i - m_new) and e^(m_tile - m_new).",
            ex02.RESCALE,
        ),
        Line("S = Qi @ Kj.T / math.sqrt(Q.shape[1])", "score"),
        Line("O[rows] = O_sum / l_new[:, None]", "store"),
        Line(
            "m_new = m_tile",
            "rescale",
            "max-of-this-tile",
            "this is the tile's maximum alone. An earlier tile may hold a larger score.",
            ex02.CARRY,
        ),
        Line("l_tile = P.sum(axis=1)", "score"),
        Line(
            "O_sum = old[:, None] * Oi + new[:, None] * (P @ Vj)",
            "accumulate",
            "l-old-forgotten",
            "Oi arrives divided by li. Multiply it by li before you add.",
            ex02.SYMPTOMS,
        ),
        Line("Qi, Oi, li, mi = load(rows, Q, O, l, m)", "load"),
        Line(
            "P = np.exp(S)",
            "score",
            "no-max",
            "no maximum is subtracted, and exp of a large score overflows.",
            ex02.SUMS,
        ),
        Line("m_new = np.maximum(mi, m_tile)", "rescale"),
        Line(
            "l_new = li + new * l_tile",
            "rescale",
            "l-not-rescaled",
            "li is relative to the old maximum. It needs the factor e^(m_i - m_new).",
            ex02.RESCALE,
        ),
        Line("O_sum = (old * li)[:, None] * Oi + new[:, None] * (P @ Vj)", "accumulate"),
        Line("P = np.exp(S - m_tile[:, None])", "score"),
        Line(
            "S = Qi @ Kj.T / Q.shape[1]",
            "score",
            "scale-by-d",
            "this divides by d. The scale is 1 / sqrt(d).",
            ex02.LINES,
        ),
        Line("l[rows], m[rows] = l_new, m_new", "store"),
        Line("old, new = np.exp(mi - m_new), np.exp(m_tile - m_new)", "rescale"),
    ),
    after="    return O, l, m",
    program=replace(
        ex02.FLASH,
        id="ex02p-inner-loop",
        probes=dense_probes,
        mistakes=(),  # the wrong lines say what they are
        read=ex02.BY_HAND,
        library=ex02.MAY_CALL | {"load"},
        memory=None,
        big=None,
    ),
    names={"math": math, "np": np, "blocks": blocks, "load": load},
)

QUESTIONS = [RUNNING_SUM, INNER_LOOP]
