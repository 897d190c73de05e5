"""Questions of notebook 03: tiled attention. And the check of its one code task, `check_tile`."""

import math

import numpy as np

from attention_lib.checks.kinds import Choice, Number
from attention_lib.memory import HBM
from attention_lib.online import State, update
from attention_lib.reference import standard_attention
from attention_lib.tiled import block_sizes, blocks, flash_attention, nothing_visible

N, D, M = 1000, 64, 50_000  # the run that the notebook keeps coming back to


def _l_of_row_3():
    """l of row 3 of the hand-sized example: the state after one tile, then scores 4 and 1."""
    unit = math.log(2)
    before = State(np.array([2 * unit]), np.array([1.125]), np.zeros((1, 1)))
    after = update(before, unit * np.array([[4.0, 1.0]]), np.zeros((2, 1)))
    return float(after.l[0])


def _flops():
    Q, K, V = np.zeros((3, N, D))
    hbm = HBM()
    flash_attention(Q, K, V, *block_sizes(M, D), hbm=hbm)
    return hbm.matmul_flops


def _padded_flops():
    Br, Bc = block_sizes(M, D)
    return 4 * D * (Br * math.ceil(N / Br)) * (Bc * math.ceil(N / Bc))


def _skipped():
    Br, Bc = block_sizes(M, D)
    return sum(nothing_visible(r, c, 0) for r in blocks(N, Br) for c in blocks(N, Bc))


def _tiles():
    Br, Bc = block_sizes(M, D)
    return math.ceil(N / Br) * math.ceil(N / Bc)


def _above_by_number():
    """Tiles whose number j is above i, which says nothing unless Br = Bc."""
    Br, Bc = block_sizes(M, D)
    return sum(max(0, math.ceil(N / Bc) - 1 - i) for i in range(math.ceil(N / Br)))


QUESTIONS = [
    Number(
        "p03-1",
        "Row 3 of the small example, in units of ln 2:\n"
        "  after the first tile   m = 2, l = 1.125\n"
        "  the second tile        scores 4 and 1\n"
        "First find the new m. Then: what is l after the second tile?",
        unit="l, exactly or to three digits",
        truth=_l_of_row_3,
        why="m rises from 2 to 4, so the old l counts a quarter: 1.125/4 + (1 + 1/8) = 1.40625.",
        hint="m is the largest score so far. The old l is multiplied by 2^(old m - new m); "
        "each new score s adds 2^(s - new m).",
        tolerance=0.005,
        slips={
            "not-rescaled": (
                lambda: 1.125 + 1.125,
                "You added the two tiles' sums. The first is relative to m = 2, the second to "
                "m = 4: bring the old one to the new m first.",
            ),
            "m-not-raised": (
                lambda: _l_of_row_3() * 4,
                "A factor of 4 = 2^(4 - 2): you stayed with m = 2, or multiplied the old l by "
                "2^(new m - old m). m rises to 4, and the old part must shrink.",
            ),
            "tile-alone": (
                lambda: 1.125,
                "That is the second tile alone. What the first tile gave is still part of the row.",
            ),
            "one-score": (
                lambda: _l_of_row_3() - 0.125,
                "One score is missing: the tile has two, 4 and 1.",
            ),
        },
    ),
    Number(
        "p03-2",
        "N = 1000, d = 64, no mask. How many FLOPs do the matrix products of tiled attention\n"
        "take, all tiles together? A multiply and an add are two FLOPs.",
        unit="FLOPs",
        truth=_flops,
        why="Each tile costs 2*rows*cols*d for S and the same for P V. The tiles cover N x N once.",
        hint="An (a x b) by (b x c) product takes 2abc FLOPs. Which two products are there, and "
        "what do all tiles together cover?",
        tolerance=0.001,
        slips={
            "one-product-or-no-add": (
                lambda: _flops() / 2,
                "Half: either one of the two products is missing (Q K^T and P V), or an add with "
                "each multiply.",
            ),
            "both-halved": (
                lambda: _flops() / 4,
                "A quarter: that is N*N*d. There are two products, and an add with each multiply.",
            ),
            "ragged-tiles-padded": (
                _padded_flops,
                "You counted every tile as full. The last row and column of tiles are smaller, "
                "and together the tiles cover exactly N x N.",
            ),
            "in-millions": (
                lambda: _flops() / 1e6,
                "By a million: that is in MFLOP. The question asks for FLOPs.",
            ),
            "d-forgotten": (
                lambda: _flops() / D,
                "A factor of d = 64: each score is a sum of d products.",
            ),
        },
    ),
    Number(
        "p03-3",
        "The same run with a causal mask: N = 1000, Br = 64, Bc = 196, so 16 x 6 = 96 tiles.\n"
        "How many tiles does the loop skip, because no query in them may see any key in them?",
        unit="tiles",
        truth=_skipped,
        why="Q block i needs every K/V block up to the one that holds the key of its last query.",
        hint="For each Q block: which K/V block holds the key of its last query? All later "
        "blocks are skipped.",
        tolerance=0.0,
        slips={
            "computed-not-skipped": (
                lambda: _tiles() - _skipped(),
                "That is how many are computed. Subtract it from 96.",
            ),
            "half": (
                lambda: _tiles() / 2,
                "Half of the scores are hidden, but a tile that the diagonal crosses cannot be "
                "skipped.",
            ),
            "block-numbers": (
                _above_by_number,
                "You compared the block numbers, j > i. Blocks differ in height and width here: "
                "compare the first key of the tile with its last query.",
            ),
        },
    ),
    Choice(
        "q4",
        "Which two things does FlashAttention leave as they are, in the forward pass?",
        {
            "a": "The result (up to rounding) and the matmul FLOPs",
            "b": "The matmul FLOPs and the HBM traffic",
            "c": "The result, bit for bit, and the time",
            "d": "The result (up to rounding) and the extra memory it takes",
        },
        right="a",
        remarks={
            "a": "It is exact attention with the same products. Compute stays of order N^2 d, and "
            "at a fixed M even the traffic still grows with N^2, with a smaller constant.",
            "b": "The traffic is what it lowers: S and P no longer go to HBM and back. People say "
            "so because the traffic stays quadratic in N; its constant does not stay.",
            "c": "Sums in another order round differently, so the bits differ. And the time is "
            "what the whole effort is for.",
            "d": "The extra memory goes from N x N matrices to two numbers a row.",
        },
    ),
    Choice(
        "q9",
        "A colleague checks a tiled kernel against standard attention, with float32 inputs in\n"
        "NumPy 2, and reports: max difference 0.00e+00. What is the likely reason?",
        {
            "a": "The algorithm is exact, so the difference has to be zero",
            "b": "Both add up in the same order",
            "c": "Both computed in float64, and the last rounding hid it",
            "d": "float32 has too few digits to show a difference",
        },
        right="c",
        remarks={
            "a": "Exact means: no approximation. Two exact methods still round differently.",
            "b": "They do not: one sums a whole row, the other sums tiles and rescales in between.",
            "c": "A NumPy float64 scalar, such as 1/np.sqrt(d), turns the scores into float64. "
            "Print the dtype of S.",
            "d": "The other way round: fewer digits make rounding larger. Honest float32 shows "
            "some 1e-7, and a few 1e-6 where scores are large.",
        },
    ),
    Choice(
        "q10",
        "Which sentence about Bc = ceil(M / 4d) is right?",
        {
            "a": "4 is the number of bytes of a float32",
            "b": "It makes K_j, V_j, Q_i, O_i and S fit into M together, always",
            "c": "Four d-wide tiles get about M/4 each; S comes on top",
            "d": "4 comes from the four passes over S and P",
        },
        right="c",
        remarks={
            "a": "M counts elements, not bytes, so no byte size is in the formula.",
            "b": "The usual reading, and it fails for M below about 8d^2: five tiles of up to M/4 "
            "each are up to 5/4 M.",
            "c": "K_j, V_j, Q_i, O_i. With Br <= d the score tile stays within about M/4 too, so "
            "the total is within a constant of M, not within M.",
            "d": "Those passes belong to standard attention. In the tiled loop S never leaves the "
            "chip.",
        },
    ),
]


# The code task: one tile of Algorithm 1, with two gaps.


def _tile(old=None, O_sum=None):
    """one_tile of the notebook, with one of its two lines replaced by a known mistake."""

    def step(Qi, Kj, Vj, Oi, li, mi):
        S = Qi @ Kj.T / math.sqrt(Qi.shape[1])
        m_tile = S.max(axis=1)
        P = np.exp(S - m_tile[:, None])
        m_new = np.maximum(mi, m_tile)
        a = np.exp(mi - m_new) if old is None else old(mi, m_tile, m_new)
        b = np.exp(m_tile - m_new)
        l_new = a * li + b * P.sum(axis=1)
        x = {"a": a[:, None], "l": li[:, None], "O": Oi, "b": b[:, None], "PV": P @ Vj}
        total = x["a"] * x["l"] * x["O"] + x["b"] * x["PV"] if O_sum is None else O_sum(**x)
        return total / l_new[:, None], l_new, m_new

    return step


MISTAKES = {
    "no-exponential": (
        _tile(old=lambda mi, m_tile, m_new: mi - m_new),
        "the difference of the maxima belongs in an exponential (gap 1).",
    ),
    "not-rescaled": (
        _tile(old=lambda mi, m_tile, m_new: np.ones_like(mi)),
        "the old part is not rescaled. It is relative to m_i; bring it to m_new (gap 1).",
    ),
    "exponentials-apart": (
        _tile(old=lambda mi, m_tile, m_new: np.exp(mi) / np.exp(m_new)),
        "the two exponentials overflow or vanish when scores are large. Subtract the maxima "
        "first, then take one exponential (gap 1).",
    ),
    "rescale-inverted": (
        _tile(old=lambda mi, m_tile, m_new: np.exp(m_new - mi)),
        "the factor is upside down. A larger maximum makes the old part smaller (gap 1).",
    ),
    "rescale-to-tile": (
        _tile(old=lambda mi, m_tile, m_new: np.exp(mi - m_tile)),
        "the old part is brought to the tile's own maximum. The common one is m_new (gap 1).",
    ),
    "rescaled-by-new": (
        _tile(old=lambda mi, m_tile, m_new: np.exp(m_tile - m_new)),
        "that is the factor for the new part. The old part comes from m_i (gap 1).",
    ),
    "l-but-not-O": (
        _tile(O_sum=lambda a, l, O, b, PV: l * O + b * PV),
        "l is rescaled, but the old O is not: it needs the same factor, old (gap 2).",
    ),
    "O-without-l": (
        _tile(O_sum=lambda a, l, O, b, PV: a * O + b * PV),
        "O_i comes from HBM already divided by l_i. Multiply by l_i to undo that (gap 2).",
    ),
    "new-part-not-scaled": (
        _tile(O_sum=lambda a, l, O, b, PV: a * l * O + PV),
        "P @ V_j is relative to the tile's maximum. It needs the factor new (gap 2).",
    ),
    "old-part-lost": (
        _tile(O_sum=lambda a, l, O, b, PV: b * PV),
        "what earlier tiles gave is gone: the old O has to be added (gap 2).",
    ),
}


def _sweep(step, Q, K, V, Br, Bc):
    """The two loops of Algorithm 1 around a step."""
    O, l, m = np.zeros(Q.shape), np.zeros(len(Q)), np.full(len(Q), -math.inf)
    for cols in blocks(len(K), Bc):
        for rows in blocks(len(Q), Br):
            O[rows], l[rows], m[rows] = step(Q[rows], K[cols], V[cols], O[rows], l[rows], m[rows])
    return O, l, m


def _hostile_inputs():
    """Ragged. The maximum stays, rises by about 20 a block, or falls; or all is near -1000."""
    for seed, (trend, level) in enumerate(((0, 0), (2, 0), (-2, 0), (0, -1000))):
        Q, K, V = np.random.default_rng(seed).standard_normal((3, 37, 8))
        Q[:, 0], K[:, 0] = math.sqrt(8), level + trend * np.arange(37)
        yield Q, K, V


def _second_step(step, Q, K, V):
    """One step on rows that have seen ten keys: their state is right and finite."""
    O, S, _ = standard_attention(Q, K[:10], V[:10])
    m = S.max(axis=1)
    l = np.exp(S - m[:, None]).sum(axis=1)
    return step(Q, K[10:20], V[10:20], O, l, m), standard_attention(Q, K[:20], V[:20])


def _same(a, b):
    return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


def check_tile(one_tile):
    """Judge a function like the notebook's one_tile. Returns a Result; never raises."""
    from attention_lib.checks import NOT_ATTEMPTED, NOT_YET, PASSED, Result

    for Q, K, V in _hostile_inputs():
        with np.errstate(all="ignore"):
            try:
                O = _sweep(one_tile, Q, K, V, 8, 10)[0]
                (O_step, l_step, _), (right, S, _) = _second_step(one_tile, Q, K, V)
            except Exception as error:
                gaps = _open_gaps(error)
                if gaps:
                    return Result(NOT_ATTEMPTED, f"the gap at {' and '.join(gaps)} is still open.")
                return Result(NOT_YET, f"your function raised {type(error).__name__}: {error}")
            if _same(O, standard_attention(Q, K, V)[0]):
                continue
            first_tile = _same(O_step, right)  # then only the start can be wrong
            for name, (wrong, remark) in MISTAKES.items():
                if not first_tile and _same(O_step, _second_step(wrong, Q, K, V)[0][0]):
                    return Result(NOT_YET, remark, name)
            if first_tile:
                where = "right, but not in a row's first tile, where m_i is -inf and l_i is 0"
            elif _same(l_step, np.exp(S - S.max(axis=1, keepdims=True)).sum(axis=1)):
                where = "l is right, O is not: look at gap 2"
            else:
                where = "l is already off, so O cannot be right: look at gap 1"
            return Result(NOT_YET, f"not equal to standard attention: {where}.")
    return Result(
        PASSED, "equal to standard attention, also where the maximum rises by 20 a block."
    )


def _open_gaps(error):
    """Names that still hold the dots in the learner's frames, where the error came up."""
    names, trace = [], error.__traceback__
    while trace is not None:
        names += [k for k, v in trace.tb_frame.f_locals.items() if v is ... and k not in names]
        trace = trace.tb_next
    return names
