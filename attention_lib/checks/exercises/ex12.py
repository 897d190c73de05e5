"""Exercise 12: a butterfly mask, and the loop that skips what a block mask leaves out.

FlashAttention (arXiv 2205.14135), Algorithm 5, with Q outside; the mask is Pixelated Butterfly's
(arXiv 2112.00029), flat and in blocks.
"""

import math

import numpy as np

from attention_lib import inputs, memory, online, sparse
from attention_lib.checks.exercises.ex08 import _functions
from attention_lib.checks.kinds import Choice, Mistake, Number, Probe, Program
from attention_lib.checks.programs import rounding
from attention_lib.memory import HBM
from attention_lib.tiled import blocks

BUTTERFLY = "notebook 10, 'The butterfly'"
TEST = "notebook 10, 'One test more in the loop'"
PATTERNS = "notebook 10, 'Strided and fixed'"
ERRORS = "notebook 10, 'Common mistakes'"
TILING = "notebook 10, 'When a pattern does not survive tiling'"

# ---------------------------------------------------------------- butterfly


def mask_probes(seed):
    rng = np.random.default_rng(seed)

    def probe(T, k, stage=0):
        return Probe(f"T = {T}, k = {k}", {"T": T, "k": k}, (0.0,), stage)

    return [
        probe(8, 1),
        probe(8, 2),
        probe(8, 3),
        probe(16, 2),
        probe(16, 4),
        probe(32, int(rng.integers(3, 5))),
        probe(2, 1),
        probe(8, 0, stage=1),
        probe(1, 0, stage=1),
    ]


def pattern(sees):
    """The T x T mask of a rule about i, j, k and T."""

    def program(T, k):
        i, j = np.indices((T, T))
        return np.asarray(sees(i, j, k, T)) & np.ones((T, T), bool)

    return program


def powers(k, first=0):
    return [2**n for n in range(first, k)]


def _pattern(id, says, read, *rules):
    return [Mistake(id, pattern(rule), says, read) for rule in rules]


def _flat(i, j, k, T):
    return (i == j) | np.isin(i ^ j, powers(k))


def _digits(T):
    return T.bit_length() - 1


MASK = Program(
    id="ex12-butterfly",
    text="Write butterfly(T, k) -> mask: boolean (T, T), True where i == j, or where i xor j is\n"
    "one of the k numbers 1, 2, 4, ..., 2^(k-1). T is a power of two, k at most log2 T.",
    outputs=("mask",),
    right=lambda T, k: sparse.butterfly(T, k),
    probes=mask_probes,
    read=BUTTERFLY,
    mistakes=(
        *_pattern(
            "diagonal-forgotten",
            "the diagonal is missing: each block sees itself, too.",
            BUTTERFLY,
            lambda i, j, k, T: np.isin(i ^ j, powers(k)),
        ),
        *_pattern(
            "below-not-power",
            "all numbers below 2^k are taken. That is what k layers reach together; one mask has "
            "the powers of two only.",
            BUTTERFLY,
            lambda i, j, k, T: (i ^ j) < 2**k,
            lambda i, j, k, T: (i ^ j) <= 2 ** max(k - 1, 0),
        ),
        *_pattern(
            "distance-not-xor",
            "you take the distance of i and j. Blocks 3 and 4 are neighbours, but 011 and 100 "
            "differ in three digits.",
            ERRORS,
            lambda i, j, k, T: (i == j) | np.isin(abs(i - j), powers(k)),
            lambda i, j, k, T: (i == j) | np.isin(i - j, powers(k)),
            lambda i, j, k, T: (i == j) | np.isin(j - i, powers(k)),
            lambda i, j, k, T: (i == j) | np.isin((i - j) % T, powers(k)),
            lambda i, j, k, T: (i == j) | np.isin((j - i) % T, powers(k)),
            lambda i, j, k, T: (i == j) | np.isin(i + j, powers(k)),
        ),
        *_pattern(
            "one-layer-too-many",
            "there are k + 1 strides. The k strides end at 2^(k-1).",
            BUTTERFLY,
            lambda i, j, k, T: _flat(i, j, k + 1, T),
        ),
        *_pattern(
            "one-layer-short",
            "the last stride, 2^(k-1), is missing: k - 1 strides are taken.",
            BUTTERFLY,
            lambda i, j, k, T: _flat(i, j, k - 1, T),
        ),
        *_pattern(
            "stride-1-forgotten",
            "the strides begin at 2. The first one is 2^0 = 1.",
            BUTTERFLY,
            lambda i, j, k, T: (i == j) | np.isin(i ^ j, powers(k, 1)),
            lambda i, j, k, T: (i == j) | np.isin(i ^ j, powers(k + 1, 1)),
        ),
        *_pattern(
            "only-one-layer",
            "only one stride is there. The mask holds all strides from 1 to 2^(k-1).",
            BUTTERFLY,
            lambda i, j, k, T: (i == j) | ((i ^ j) * 2 == 2**k),
            lambda i, j, k, T: (i == j) | ((i ^ j) == 2**k),
        ),
        *_pattern(
            "k-ignored",
            "all layers are there, whatever k is.",
            BUTTERFLY,
            lambda i, j, k, T: _flat(i, j, _digits(T), T),
        ),
        *_pattern(
            "longest-first",
            "you take the k longest strides. They count from 1: 1, 2, 4, ...",
            BUTTERFLY,
            lambda i, j, k, T: (i == j) | np.isin(i ^ j, powers(_digits(T), _digits(T) - k)),
        ),
        *_pattern(
            "one-half-only",
            "only one side of the diagonal is there. The butterfly is symmetric; causality is a "
            "mask of its own.",
            PATTERNS,
            lambda i, j, k, T: _flat(i, j, k, T) & (j <= i),
            lambda i, j, k, T: _flat(i, j, k, T) & (j >= i),
            lambda i, j, k, T: np.isin(i ^ j, powers(k)) & (j < i),
            lambda i, j, k, T: np.isin(i ^ j, powers(k)) & (j > i),
        ),
        *_pattern(
            "wrong-bit-operation",
            "i and j are joined by another operation. xor, ^ in Python, is 1 where they differ.",
            BUTTERFLY,
            lambda i, j, k, T: (i == j) | np.isin(i & j, powers(k)),
            lambda i, j, k, T: (i == j) | np.isin(i | j, powers(k)),
            lambda i, j, k, T: np.isin(i & j, powers(k)),
            lambda i, j, k, T: np.isin(i | j, powers(k)),
        ),
        *_pattern(
            "numbers-not-powers",
            "you take 1, 2, 3, ..., k. The strides are powers of two.",
            BUTTERFLY,
            lambda i, j, k, T: (i == j) | np.isin(i ^ j, range(1, k + 1)),
            lambda i, j, k, T: (i == j) | np.isin(i ^ j, range(1, k)),
            lambda i, j, k, T: (i == j) | np.isin(i ^ j, [2 * n for n in range(k)]),
        ),
        *_pattern(
            "caret-is-xor",
            "2 ^ n is xor in Python: 2, 3, 0, 1, ... The power is 2 ** n.",
            BUTTERFLY,
            lambda i, j, k, T: (i == j) | np.isin(i ^ j, [2 ^ n for n in range(k)]),
            lambda i, j, k, T: np.isin(i ^ j, [2 ^ n for n in range(k)]),
        ),
        *_pattern(
            "inverted",
            "True and False are exchanged: True is for tiles that are computed.",
            BUTTERFLY,
            lambda i, j, k, T: ~_flat(i, j, k, T),
        ),
    ),
)


# ---------------------------------------------------------------- the loop


def skipping(Q, K, V, mask, B, slip=None, variant=0):
    """O, L and the elements moved, or with this slip. variant: a slip's other way to be written."""
    hbm, (N, d) = HBM(), Q.shape
    O_out, L_out = np.zeros((N, d)), np.zeros(N)
    Q, K, V = (hbm.tensor(name, x) for name, x in zip("QKV", (Q, K, V), strict=True))
    O, L = hbm.tensor("O", O_out), hbm.tensor("L", L_out)
    seen, places = _seen(mask > 0, slip), blocks(N, B)
    if slip == "last-block-lost":
        places = places[: N // B]
    for i, rows in enumerate(places):
        if slip == "empty-row-not-stored" and variant == 0 and not seen[i].any():
            continue
        Qi = Q.load(rows)
        if slip == "empty-row-not-stored" and not seen[i].any():
            continue
        state = online.start(rows.stop - rows.start, d)
        for j, cols in enumerate(places):
            skip = not seen[i, j]
            if skip and slip == "stops-at-the-first":
                break
            before = slip == "loads-before-the-test"
            if skip and before:
                if variant in (0, 1):
                    K.load(cols)
                if variant in (0, 2):
                    V.load(cols)
            if skip and slip not in ("hides-not-skips", "skipped-score-is-0"):
                continue
            S = Qi @ K.load(cols).T / math.sqrt(d)
            Vj = V.load(cols)
            if skip and slip == "hides-not-skips":
                continue  # a tile of -inf changes nothing
            if skip:
                S, Vj = 0 * S, Vj * (variant == 0)
            state = online.update(state, S, Vj)
        Oi, Li = online.finish(state)
        if slip == "empty-row-gives-nan" and not seen[i].any():
            Oi, Li = Oi + math.nan, Li + math.nan
        O.store(Oi, rows)
        L.store(Li, rows)
    return O_out, L_out, _counted(hbm, slip, variant)


def _seen(mask, slip):
    """The tiles that the loop computes."""
    T = len(mask)
    if slip == "indices-swapped":
        return mask.T
    if slip == "inverted-test":
        return ~mask
    if slip == "whole-columns-only":
        return np.broadcast_to(mask.any(axis=0), (T, T))
    if slip == "causal-by-habit":
        return mask & np.tri(T, dtype=bool)
    if slip == "diagonal-by-habit":
        return mask | np.eye(T, dtype=bool)
    if slip == "mask-forgotten":
        return np.ones((T, T), bool)
    return mask


def _counted(hbm, slip, variant):
    if slip == "reads-only":
        return hbm.reads
    if slip == "k-or-v-not-counted":
        return hbm.reads + hbm.writes - hbm.reads_by["KV"[variant]]
    return hbm.reads + hbm.writes


def right_skipping(Q, K, V, mask, B):
    """The definition with the mask spread over the tokens, and the closed form of the traffic."""
    N, d = Q.shape
    mask = mask > 0
    S = np.where(sparse.expand(mask, N, N, B, B), Q @ K.T / math.sqrt(d), -math.inf)
    state = online.update(online.start(N, d), S, V)
    moved = sparse.block_sparse_q_outer_traffic(N, d, mask, B, B)
    return *online.finish(state), moved


def loop_probes(seed):
    rng = np.random.default_rng(seed)

    def probe(says, mask, N=None, B=3, d=3, stage=0, low=0.0, high=0.0):
        mask = np.array(mask, bool)
        N = B * len(mask) if N is None else N
        Q, K, V = rng.standard_normal((3, N, d))
        # Scores that rise along the keys, from about `low` to about `high`.
        K += np.linspace(low, high, N)[:, None] * math.sqrt(d) / d
        Q = 1 + 0.3 * Q
        size = 2 * float((np.abs(Q) @ np.abs(K).T).max()) / math.sqrt(d)
        arguments = {"Q": Q, "K": K, "V": V, "mask": mask, "B": B}
        return Probe(says, arguments, (*rounding(size, N, V), 0.0), stage)

    ragged = [[1, 0, 1], [0, 1, 0], [1, 1, 1]]
    lower = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]
    mixed = [[0, 1, 0, 1], [1, 0, 0, 0], [1, 0, 1, 1], [0, 0, 1, 0]]
    gap = [[1, 0, 1], [1, 0, 0], [0, 0, 1]]
    empty = [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    return [
        probe("12 tokens, B = 3, a mask of 4 x 4 that is not symmetric", mixed),
        probe("8 tokens, B = 2: the butterfly", sparse.butterfly(4), B=2),
        probe("12 tokens, B = 3: some tiles on and below the diagonal", lower),
        probe("7 tokens, B = 3: the last block is short", ragged, N=7),
        probe("9 tokens, B = 3: nobody sees the middle block of keys", gap),
        probe("12 tokens, B = 3: the scores rise by 60", mixed, low=0, high=60),
        probe("12 tokens, B = 3: all scores near -1000", mixed, low=-1000, high=-1000),
        probe("6 tokens, B = 2: the block in the middle sees nobody", empty, B=2, stage=1),
        probe("5 tokens, B = 2: nobody sees anybody", np.zeros((3, 3)), N=5, B=2, stage=1),
    ]


def _slip(id, says, read, *variants):
    def program(variant):
        return lambda Q, K, V, mask, B: skipping(Q, K, V, mask, B, id, variant)

    return [Mistake(id, program(v), says, read) for v in variants or (0,)]


SKIP = Program(
    id="ex12-skip",
    text="Write block_sparse(Q, K, V, mask, B) -> O, L, moved: the loop above, but the tile (i, j) "
    "is\nskipped where mask[i, j] is False. moved: the elements that crossed, reads and writes.",
    outputs=("O", "L", "moved"),
    right=right_skipping,
    probes=loop_probes,
    read=TEST,
    library=frozenset(_functions(memory, inputs, online) | {"blocks", "finite_or_zero"}),
    mistakes=(
        *_slip("mask-forgotten", "every tile is computed: the mask is not asked.", TEST),
        *_slip(
            "hides-not-skips",
            "O and L are right, but skipped tiles are loaded and then hidden. Nothing is saved: "
            "ask the mask before the loads.",
            TILING,
        ),
        *_slip(
            "loads-before-the-test",
            "right numbers, but K_j or V_j of skipped tiles is loaded. In this order the test "
            "comes before both loads.",
            TEST,
            1,
            2,
        ),
        *_slip(
            "indices-swapped",
            "you ask mask[j, i]. Rows are Q blocks: mask[i, j].",
            ERRORS,
        ),
        *_slip("inverted-test", "you skip where the mask is True. True is: computed.", TEST),
        *_slip(
            "stops-at-the-first",
            "the loop ends at the first tile that is skipped: continue, not break.",
            TEST,
        ),
        *_slip(
            "whole-columns-only",
            "a tile is skipped only where its whole column of the mask is empty. Ask for this "
            "tile: mask[i, j].",
            TEST,
        ),
        *_slip(
            "causal-by-habit",
            "tiles above the diagonal are never computed. This mask is not causal.",
            PATTERNS,
        ),
        *_slip(
            "diagonal-by-habit",
            "the diagonal is always computed. The mask decides that as well.",
            TEST,
        ),
        *_slip(
            "skipped-score-is-0",
            "a skipped tile counts as scores of 0. Then its keys have weight; they have none.",
            TEST,
            0,
            1,
        ),
        *_slip("last-block-lost", "N // B blocks: the short one at the end is lost.", TEST),
        *_slip("reads-only", "moved counts the reads. O and L are written: add the writes.", TEST),
        *_slip(
            "k-or-v-not-counted",
            "moved lacks the loads of K or of V. Load both through the HBM.",
            TEST,
            0,
            1,
        ),
        *_slip(
            "empty-row-not-stored",
            "a row of tiles without any True is passed over: its L stays 0. Store O = 0, L = -inf.",
            ERRORS,
            0,
            1,
        ),
        *_slip(
            "empty-row-gives-nan",
            "a row of tiles without any True gives NaN, from 0/0 or -inf - (-inf). There O = 0, "
            "L = -inf.",
            ERRORS,
        ),
    ),
)


# ---------------------------------------------------------------- numbers and letters

T_ASKED = 256


QUESTIONS = [
    MASK,
    Number(
        "ex12-density",
        f"T = {T_ASKED} blocks, the butterfly with all its layers. What fraction s of the tiles is "
        "computed?",
        "a fraction, such as 0.5",
        truth=lambda: sparse.density(sparse.butterfly(T_ASKED)),
        why="(1 + log2 T)/T: itself and one partner for each of 8 binary digits, of 256.",
        hint="Count the True entries of one row. Every row has as many.",
        slips={
            "diagonal-forgotten": (
                lambda: (int(sparse.butterfly(T_ASKED).sum()) - T_ASKED) / T_ASKED**2,
                "log2 T partners are right. Each block sees itself, too.",
            ),
            "one-layer": (
                lambda: sparse.density(sparse.butterfly_layer(T_ASKED, 1)),
                "That is one layer, two tiles a row.",
            ),
            "tiles-in-a-row": (
                lambda: int(sparse.butterfly(T_ASKED)[0].sum()),
                "That is the number of tiles in a row. Divide by the length of the row.",
            ),
            "percent-not-fraction": (
                lambda: 100 * sparse.density(sparse.butterfly(T_ASKED)),
                "That is in percent. The answer is a fraction.",
            ),
            "what-layers-reach": (
                lambda: 1.0,
                "All is what 8 layers reach together. One mask holds far less.",
            ),
        },
        tolerance=0.005,
    ),
    SKIP,
    Choice(
        "ex12-test",
        "Somebody tests block_sparse with butterfly masks alone, of all sizes and with all k, and "
        "finds no mistake. Which one may still be there?",
        {
            "a": "mask[j, i] is asked in place of mask[i, j].",
            "b": "Skipped tiles are loaded before they are skipped.",
            "c": "The loop stops at the first tile that is skipped.",
            "d": "Tiles above the diagonal are never computed.",
        },
        "a",
        {
            "a": "The butterfly is symmetric: i xor j is j xor i. A test needs a mask that is not, "
            "a causal one for example.",
            "b": "The count of a butterfly shows that: fewer tiles are counted than are loaded.",
            "c": "Row 0 over 8 blocks is 1 1 1 0 1 0 0 0: the fifth tile would be lost.",
            "d": "Block 0 sees block 1 in every butterfly, and that tile is above the diagonal.",
        },
    ),
]
