"""Questions of notebook 10, Block-sparse attention."""

import functools
import math

import numpy as np

from attention_lib import sparse
from attention_lib.checks.kinds import Choice, Number
from attention_lib.memory import HBM
from attention_lib.traffic import flash_traffic

N, D, B = 512, 64, 64
TOKENS, STRIDE = 1024, 128
LONG = 65_536
T_LONG = LONG // B
STACK = 64


@functools.cache
def _empty_run(attention=sparse.block_sparse_attention):
    """Elements moved by a run whose mask has no tile at all."""
    x, hbm = np.zeros((N, D), np.float32), HBM()
    attention(x, x, x, np.zeros((N // B, N // B), bool), B, B, hbm=hbm)
    return hbm.reads + hbm.writes


@functools.cache
def _layers_needed(T):
    """Layers of one stride each, until every block knows of every other."""
    knows, layers = np.eye(T, dtype=int), 0
    while not (knows > 0).all():
        layers += 1
        knows = sparse.butterfly_layer(T, layers).astype(int) @ knows
    return layers


@functools.cache
def _share(tile, heads=2):
    """Percent of the causal tiles in which the strided pattern sees a pair; tile 1: of pairs."""
    mask = np.logical_or.reduce(sparse.strided(TOKENS, STRIDE)[:heads])
    allowed = sparse.touched(sparse.causal(TOKENS), tile, tile)
    return 100 * sparse.touched(mask, tile, tile).sum() / allowed.sum()


def _times_less(tiles_in_a_row):
    dense = flash_traffic(LONG, D, B, B)
    return dense / (2 * LONG * D + tiles_in_a_row * (3 * D + 4) * LONG)


def _one_tile():
    whole = sparse.block_sparse_traffic(LONG, D, np.eye(T_LONG, dtype=bool), B, B)
    return whole / (2 * LONG * D) - 1


QUESTIONS = [
    Number(
        "p10-1",
        f"N = {N}, d = {D}, tiles of {B}. The mask has no True at all. How many elements does "
        "Algorithm 5 move?",
        "elements",
        truth=_empty_run,
        why="K_j and V_j are loaded before line 8 asks for the mask: 2Nd, whatever it says.",
        hint="Which loads come before the test, and which after it?",
        slips={
            "nothing-at-all": (
                lambda: 0,
                "Nothing is computed, but line 6 comes before line 8: K_j and V_j are on chip when "
                "the mask is asked.",
            ),
            "the-swapped-order": (
                lambda: _empty_run(sparse.block_sparse_attention_q_outer),
                "That is the other order: read Q, write O and L, and never load K or V.",
            ),
            "k-only": (lambda: N * D, "That is K alone. V is loaded on the same line."),
            "the-dense-run": (
                lambda: flash_traffic(N, D, B, B),
                "That is a run that skips nothing. Line 9 loads Q, O, l, m after the test.",
            ),
        },
        tolerance=0.001,
        slip_tolerance=0.001,
    ),
    Number(
        "p10-2",
        "The butterfly over T = 8 blocks: i sees j when i equals j, or i xor j is 1, 2 or 4. How "
        "many of the 64 tiles are computed?",
        "tiles",
        truth=lambda: int(sparse.butterfly(8).sum()),
        why="Each row has itself and one partner for each of its 3 binary digits: 8 x 4.",
        hint="Take row 5, which is 101 in binary. Flip one digit at a time. How many partners?",
        slips={
            "diagonal-forgotten": (
                lambda: int(sparse.butterfly(8).sum()) - 8,
                "You counted the partners. Each block sees itself too.",
            ),
            "distance-not-xor": (
                lambda: sum(abs(i - j) in (0, 1, 2, 4) for i in range(8) for j in range(8)),
                "You took i - j. Blocks 3 and 4 are neighbours, but 011 and 100 differ in three "
                "digits.",
            ),
            "one-layer": (
                lambda: int(sparse.butterfly_layer(8, 1).sum()),
                "That is one layer. Three of them lie on one another here.",
            ),
            "lower-half": (
                lambda: int((sparse.butterfly(8) & sparse.causal(8)).sum()),
                "That is the half below the diagonal. The butterfly alone is not causal.",
            ),
        },
        tolerance=0.001,
        slip_tolerance=0.001,
    ),
    Number(
        "p10-3",
        f"T = {STACK} blocks. Each layer uses one stride of the butterfly: 1, then 2, then 4, and "
        "so on, two tiles a row. After how many layers has every block heard of every other?",
        "layers",
        truth=lambda: _layers_needed(STACK),
        why="Each layer doubles what a block knows: 1, 2, 4, ..., 64.",
        hint="How many blocks does one block know of after the first layer? After the second?",
        slips={
            "one-step-a-layer": (
                lambda: STACK - 1,
                "So many it takes with one neighbour a layer. Here the stride doubles.",
            ),
            "root-of-T": (
                lambda: math.isqrt(STACK),
                "The square root is the run length of the strided pattern. Here what is known "
                "doubles in each layer.",
            ),
            "layers-and-diagonal": (
                lambda: _layers_needed(STACK) + 1,
                "That is the tiles in a row of the whole butterfly. The diagonal is no layer.",
            ),
        },
        tolerance=0.001,
        slip_tolerance=0.001,
    ),
    Number(
        "p10-4",
        f"The strided pattern with l = {STRIDE} over N = {TOKENS:,} tokens lets each query see 24% "
        f"of the keys that causality allows. Tiles of {STRIDE}: in how many percent of the tiles "
        "that causality allows is at least one pair visible?",
        "percent",
        truth=lambda: _share(STRIDE),
        why=f"Every query sees one key in every earlier run of {STRIDE}. One is enough for a tile.",
        hint=f"Take query 1,000. In which runs of {STRIDE} keys does it see somebody?",
        slips={
            "pairs-for-tiles": (
                lambda: _share(1),
                "That is the share of pairs. A tile counts as soon as it has one of them.",
            ),
            "local-part-only": (
                lambda: _share(STRIDE, heads=1),
                "You looked at A1. A2 sees one key in each of the earlier runs.",
            ),
            "tiles-of-64": (
                lambda: _share(64),
                "That is so for tiles of 64, half a stride. Every second distance stays empty.",
            ),
        },
    ),
    Number(
        "p10-5",
        f"N = {LONG:,}, d = {D}, tiles of {B}: T = {T_LONG:,} blocks. The butterfly with all its "
        "layers has 11 tiles a row, so 1/s is 93.1. How many times less than the dense run does "
        "Algorithm 5 move?",
        "times",
        truth=lambda: _times_less(11),
        why="K and V, 2Nd, are loaded in both runs. In the sparse one that is 6% of all.",
        hint="Only the second term of 2Nd + s Tc (3Nd + 4N) has s in it.",
        slips={
            "one-over-s": (
                lambda: T_LONG / 11,
                "That would hold if all traffic shrank with s. The 2Nd of K and V stays.",
            ),
            "diagonal-forgotten": (
                lambda: _times_less(10),
                "You took 10 tiles a row. A block sees itself too.",
            ),
            "tokens-not-blocks": (
                lambda: LONG / 17,
                "You took the butterfly of N tokens. A mask is over tiles, and there are T a row.",
            ),
        },
    ),
    Number(
        "p10-6",
        f"The sparsest mask in which every query sees something has one tile in each row of tiles. "
        f"d = {D}. The traffic of Algorithm 5 is 2Nd and the part of the tiles. How many times "
        "2Nd is that part?",
        "times 2Nd",
        truth=_one_tile,
        why="(3d + 4)N beside 2Nd, for every N and every tile: Q, O in, O out, and l, m.",
        hint="What is moved for each row of a tile? Each row has one.",
        slips={
            "shrinks-with-s": (
                lambda: _one_tile() / T_LONG,
                "You multiplied by s once more. s Tc is 1 here: one tile for each row.",
            ),
            "one-way-only": (
                lambda: (2 * D + 2) / (2 * D),
                "You counted what is read. O, l and m are written back as well.",
            ),
            "as-large-as-all-tiles": (
                lambda: _one_tile() * T_LONG,
                "That is the part of all tiles. One of them is left in each row.",
            ),
        },
        tolerance=0.025,
    ),
    Choice(
        "q25",
        "Half of the tiles are left out. The matrix products take exactly half of the FLOPs. Why "
        "does Algorithm 5 move more than half of the elements?",
        {
            "a": "The block mask has to be loaded, too.",
            "b": "The softmax still needs the scores of the tiles that are left out.",
            "c": "K_j and V_j are loaded once for each column, whatever the mask says.",
            "d": "Skipped tiles leave gaps, and a GPU loads these gaps with the rest.",
        },
        "c",
        {
            "a": "It has Tr x Tc booleans: 64 numbers in the table of this notebook. The count "
            "leaves it out, and it would not show.",
            "b": "A score that is left out is minus infinity: its weight is 0, in the sum as well. "
            "Nobody computes it.",
            "c": "2Nd has no s in it. The swapped order skips K_j and V_j, but reads Q and writes "
            "O once: 2Nd again.",
            "d": "A tile is contiguous, so there is nothing to load in between. That is why the "
            "mask is over tiles and not over single pairs.",
        },
    ),
    Choice(
        "q26",
        "A pattern shows each query every 128th key. With tiles of 128 no tile can be left out. "
        "What saves time?",
        {
            "a": "Larger tiles: there are fewer of them.",
            "b": "A token mask in each tile: what it hides costs nothing.",
            "c": "An online softmax that jumps over the hidden keys in a tile.",
            "d": "Another order of the tokens, in which the keys of a query are neighbours.",
        },
        "d",
        {
            "a": "Fewer tiles with the same area. A larger tile is even more likely to hold a "
            "visible pair.",
            "b": "Right numbers, and no time saved: the scores are computed, and then hidden.",
            "c": "The product of a tile is one operation. It has no cheaper version with holes.",
            "d": "Sorted by position modulo 128 the pattern is a block diagonal. Or choose a "
            "pattern over tiles from the start, as the butterfly does.",
        },
    ),
    Choice(
        "q27",
        "What does block-sparse FlashAttention compute?",
        {
            "a": "Exactly the attention of a mask that was fixed before any score was known.",
            "b": "Dense attention, without the tiles whose weights turn out to be small.",
            "c": "Dense attention, up to an error that shrinks as the tiles get smaller.",
            "d": "The butterfly transform of dense attention.",
        },
        "a",
        {
            "a": "Up to rounding it is standard attention with that mask. How far that is from "
            "dense attention depends on the data, and a model is trained with the mask.",
            "b": "To know that a weight is small one has to compute the score. There are methods "
            "that estimate it; this one does not look at the data.",
            "c": "Tiles do not approximate anything. A key in a tile that is left out has no part "
            "in the output, however small the tiles are.",
            "d": "The butterfly is one of many masks. The loop takes any.",
        },
    ),
]
