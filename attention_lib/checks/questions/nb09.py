"""Predictions and checkpoint questions of notebook 09, the loop order and FlashAttention-2."""

from math import ceil

from attention_lib.checks.kinds import Choice, Number
from attention_lib.hardware import GPUS
from attention_lib.traffic import flash_traffic, q_outer_traffic

N, D, B = 4096, 64, 128


def _tiles(N=1024, B=128):
    """Tiles of the causal square grid: (all visited, those that the diagonal crosses)."""
    T = ceil(N / B)
    return T * (T + 1) // 2, T


QUESTIONS = [
    Number(
        id="p09-1",
        text=(
            "N = 4096, d = 64, square blocks: Br = Bc = 128 in both loops. How many times what\n"
            "the first order (K/V outside) moves does the second (Q outside) move?"
        ),
        unit="a factor, 1 for equal",
        truth=lambda: q_outer_traffic(N, D, B, B) / flash_traffic(N, D, B, B),
        why="A pass of the second order moves two arrays, K and V; a pass of the first, three.",
        hint=(
            "For each N^2 the first moves (3d + 4)/Bc elements, the second 2d/Br. Here Br and Bc "
            "are equal."
        ),
        slips={
            "order-alone-changes-nothing": (
                lambda: 1.0,
                "The tiles are the same ones, but not what has to come along: Q, O in and O out in "
                "one order, K and V in the other.",
            ),
            "upside-down": (
                lambda: flash_traffic(N, D, B, B) / q_outer_traffic(N, D, B, B),
                "That is the first over the second.",
            ),
            "blocks-of-notebook-04": (
                lambda: q_outer_traffic(N, D, 64, 196) / flash_traffic(N, D, 64, 196),
                "That is for the blocks (64, 196). Here Br and Bc are both 128.",
            ),
            "O-not-written": (
                lambda: 2 * D / (2 * D + 4),
                "You let the first order only read Q and O. It also writes O in each pass.",
            ),
        },
    ),
    Number(
        id="p09-2",
        text=(
            "N = 1000 keys, Bc = 196. Algorithm 1 divides O by l in every tile. With O un-scaled\n"
            "there is one division for each element, at the end. How many times fewer divisions\n"
            "of O is that?"
        ),
        unit="a factor",
        truth=lambda: ceil(1000 / 196),
        why="Once for each K/V block against once in all: Tc, whatever d and Br.",
        hint="How many tiles does a row pass through? Each one divided all of O_i.",
        tolerance=0.01,
        slips={
            "rounded-down": (
                lambda: 1000 // 196,
                "You rounded down: the last block is short, and it divides as well.",
            ),
            "not-rounded": (
                lambda: 1000 / 196,
                "A ragged last block is a block: round up.",
            ),
            "once-a-key": (
                lambda: 1000,
                "That would be one division a key. There is one a tile.",
            ),
            "times-d": (
                lambda: ceil(1000 / 196) * D,
                "That is the number of divisions of a row. At the end there are d of them too.",
            ),
        },
    ),
    Number(
        id="p09-3",
        text=(
            "An A100 has 108 SMs. Batch 1, 16 heads, N = 8192. A kernel gives each head to one\n"
            "thread block, as the first FlashAttention did. What share of the SMs has work?"
        ),
        unit="a share, 0 to 1",
        truth=lambda: 16 / GPUS["A100-80"].sms,
        why="16 blocks keep 16 SMs busy. The length of the sequence does not help.",
        hint="How many thread blocks are there? A block runs on one SM.",
        slips={
            "N-counts": (
                lambda: 1.0,
                "You let the sequence be divided too. In this kernel a head is one block.",
            ),
            "one-head": (
                lambda: 1 / GPUS["A100-80"].sms,
                "That is one head. The heads are independent: there are 16 blocks.",
            ),
            "percent": (
                lambda: 1600 / GPUS["A100-80"].sms,
                "Right, in percent. The answer is wanted as a share.",
            ),
        },
    ),
    Number(
        id="p09-4",
        text=(
            "A causal run with N = 1024 and square blocks of 128: 8 x 8 tiles, of which the loop\n"
            "visits 36. In how many tiles of the 36 does the mask hide anything?"
        ),
        unit="tiles",
        truth=lambda: _tiles()[1],
        why="Only the diagonal ones. Below the diagonal every query sees every key.",
        hint="Draw the 8 x 8 grid and the diagonal. Which tiles does the diagonal cross?",
        tolerance=0.01,
        slips={
            "all-visited": (
                lambda: _tiles()[0],
                "You masked every visited tile. That is right, and mostly for nothing: 28 of them "
                "lie wholly below the diagonal.",
            ),
            "not-crossed": (
                lambda: _tiles()[0] - _tiles()[1],
                "So many tiles lie wholly below the diagonal, and as many wholly above it. The "
                "mask hides part of a tile only where the diagonal crosses.",
            ),
        },
    ),
    Choice(
        id="q28",
        text=(
            "You swap the loops and keep M. When does the order with Q outside move fewer\n"
            "elements?"
        ),
        options={
            "a": "Always: O is not read and written in every pass.",
            "b": "Never: K and V are read once for each Q block.",
            "c": "When Br is larger than about 2/3 of Bc.",
            "d": "When N is large enough.",
        },
        right="c",
        remarks={
            "a": (
                "O stays on chip, that is right. But K and V travel in its place, once for each Q "
                "block. With (64, 196) that is twice as much."
            ),
            "b": (
                "They are, but Q, O, l and m are not read again. With tall Q blocks there are few "
                "passes."
            ),
            "c": "2d/Br against (3d + 4)/Bc: the shape of the block decides.",
            "d": (
                "Both grow as N^2, so the ratio settles. Try N = 512 and 8192: the winner is the "
                "same."
            ),
        },
    ),
    Choice(
        id="q29",
        text=(
            "Why can the Q blocks of one head run on different SMs at the same time, and the K/V\n"
            "blocks of Algorithm 1 not?"
        ),
        options={
            "a": "A Q block owns its rows of O; K/V blocks share them.",
            "b": "Q blocks are smaller, so more of them fit in the L2 cache.",
            "c": "K/V blocks must be taken in order, since the maximum only rises.",
            "d": "Softmax needs all queries of a key, and a K/V block has only some.",
        },
        right="a",
        remarks={
            "a": "Two K/V blocks at once lose an update, unless each keeps a state of its own.",
            "b": "Their size has no part in it. Ask who writes to O.",
            "c": (
                "The order of the keys is free: the states merge in any order. What fails is two "
                "blocks that update one row at once."
            ),
            "d": "Softmax runs over the keys of a query. A row needs no other row.",
        },
    ),
    Choice(
        id="q30",
        text=(
            "In print, the update is O <- diag(exp(m_old - m_new))^(-1) O + P V. A program that\n"
            "does so gives ..."
        ),
        options={
            "a": "the right result: the last division repairs it.",
            "b": "a right result as long as the maximum of no row rises.",
            "c": "a result that is wrong by rounding only.",
            "d": "a right result when there are two K/V blocks.",
        },
        right="b",
        remarks={
            "a": (
                "The division by l is the same for all keys of a row. The old keys alone got the "
                "wrong factor."
            ),
            "b": (
                "Then the factor is 1, and 1/1 is 1. (For the first block it is 0 for a state that "
                "is 0: that needs a guard.) In real data some maximum rises."
            ),
            "c": "The old part is too large by exp(2(m_new - m_old)). That is no rounding.",
            "d": "Two blocks are enough to be wrong: the second one may raise the maximum.",
        },
    ),
]
