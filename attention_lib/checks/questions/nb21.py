"""Predictions and checkpoint questions of notebook 21, softmax behind the products."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.gpu import ladder
from attention_lib.hardware import GPUS
from attention_lib.show.gpu_overlap import (
    blocks_of,
    clocks,
    clocks_a_tile,
    deal,
    in_turn,
    loads,
    overlapped,
    reader_tiles,
    timeline,
)

SMS, N, HEADS = GPUS["H200"].sms, 16_384, 16
ROWS_64, ROWS_128 = (ladder.rung("overlap").rows(d) for d in (64, 128))


def _share(d):
    """Time of exp as a percentage of the products' time."""
    return 100 * clocks(d)["exp"] / clocks(d)["products"]


def _in_step(program=in_turn, warpgroups=2):
    """Clocks until each of the warpgroups has done one more tile, d = 64."""
    product, exp = clocks(64)["products"] / 2, clocks(64)["exp"]
    return warpgroups * clocks_a_tile(timeline(program, warpgroups, product, exp, tiles=8))


def _tiles_of_sm_0(step=SMS):
    """Tiles of SM 0, if it takes every `step`-th block, longest first in each head."""
    return loads(deal(blocks_of(HEADS, N, ROWS_128), step, draw=False), step)[0]


def _share_seen(N=1024):
    """Percent of the tiles of its block that a reader needs, d = 64."""
    loaded, seen = reader_tiles(N, ROWS_64)
    return 100 * seen / loaded


QUESTIONS = [
    Number(
        id="p21-1",
        text=(
            "At d = 128 exp takes half as long as the two products. Each score needs one exp,\n"
            "and 4d FLOP. At d = 64, how long does exp take, in percent of the products?"
        ),
        unit="%",
        truth=lambda: _share(64),
        why="The same exponentials, half the FLOPs. Both units have the same work.",
        hint="The number of scores does not depend on d. What does?",
        slips={
            "unchanged": (lambda: _share(128), "That is d = 128. Which of the two parts shrank?"),
            "the-wrong-way": (
                lambda: _share(256),
                "You halved exp. It is the products that shrink with d.",
            ),
            "one-product": (
                lambda: 2 * _share(64),
                "Twice too much: there are two products, S and P V.",
            ),
        },
        tolerance=0.01,
    ),
    Number(
        id="p21-2",
        text=(
            "d = 64. Alone, a warpgroup needs 256 clocks for S, 512 for softmax, 256 for P V, one\n"
            "after the other. Two warpgroups start together and share each unit evenly. After how\n"
            "many clocks have both done one tile?"
        ),
        unit="clocks",
        truth=_in_step,
        why="Both want the same unit at the same time, always. Each step takes twice as long.",
        hint="At time 0 both start S. When does each of them have it? What do both want next?",
        slips={
            "hidden": (
                lambda: _in_step() / 2,
                "That would be so if one computed softmax while the other multiplies. Who would "
                "bring them out of step?",
            ),
            "in-the-new-order": (
                lambda: _in_step(overlapped),
                "That is the order of rung 8. Here softmax waits for S, and P V for softmax.",
            ),
        },
        tolerance=0.005,
    ),
    Choice(
        id="p21-3",
        text=(
            "Rung 8 hides softmax behind the products. At N = 16,384, no mask: where does it gain\n"
            "more over rung 7, and how much?"
        ),
        options={
            "a": "d = 64: by about a third. d = 128: by less than a tenth",
            "b": "d = 64: by less than a tenth. d = 128: by about a third",
            "c": "twice as fast at both",
        },
        right="a",
        remarks={
            "a": "More of the time was softmax at d = 64. And d = 128 has another limit.",
            "b": "At d = 128 softmax is the smaller part. There is less to hide.",
            "c": "The model allows nearly that at d = 64. The kernel does not get there.",
        },
    ),
    Number(
        id="p21-4",
        text=(
            "Rung 7 has 128 rows in a block at d = 64. Rung 8 has 192: three warpgroups compute.\n"
            "N = 16,384. How often is K loaded for one head in rung 8?"
        ),
        unit="times",
        truth=lambda: -(-N // ladder.rung("overlap").rows(64)),
        why="Once for each block of Q. 16,384 / 192 is 85.3, and the last block is not full.",
        hint="How many blocks of 192 rows does it take to cover 16,384 rows?",
        slips={
            "rung-7": (lambda: N // 128, "That is rung 7, with 128 rows in a block."),
            "rounded-down": (lambda: N // 192, "Then the last 64 rows would belong to nobody."),
            "each-warpgroup": (
                lambda: N // 64,
                "The three warpgroups of a block read the same tile in shared memory.",
            ),
        },
        tolerance=0,
    ),
    Number(
        id="p21-5",
        text=(
            "Causal, d = 128, N = 16,384, 16 heads. A head has 128 blocks of Q with 128, 127, ...\n"
            "and 1 tiles, in this order; then comes the next head. 132 SMs, and the mean is 1001\n"
            "tiles for each. SM 0 takes blocks 0, 132, 264, ... How many tiles?"
        ),
        unit="tiles",
        truth=_tiles_of_sm_0,
        why="Each head its block comes 4 places later: 128, 124, 120, ... down to 68, 16 blocks.",
        hint="132 is one head and 4 blocks. Which block of the second head does SM 0 get?",
        slips={
            "all-equal": (
                lambda: sum(n for _, n in blocks_of(HEADS, N, ROWS_128)) / SMS,
                "That is the mean. SM 0 begins with a longest block, and then?",
            ),
            "step-128": (
                lambda: _tiles_of_sm_0(128),
                "With a step of 128 it would get the longest block of each head.",
            ),
        },
        tolerance=0.001,
    ),
    Number(
        id="p21-7",
        text=(
            "Causal, d = 64, N = 1024. A block has 192 rows, and three readers with 64 rows each.\n"
            "A tile has 128 keys. A block loads a tile if one of its rows sees a key of it. All\n"
            "three readers compute all of these tiles. Of all that they compute, in what share\n"
            "does one of the reader's own 64 rows see a key?"
        ),
        unit="percent",
        truth=_share_seen,
        why="72 of 96. The blocks load 2, 3, 5, 6, 8 and 8 tiles, three times; readers see 1 to 8.",
        hint="How many tiles does the block of rows 0 to 191 load? And its first 64 rows alone?",
        slips={
            "scores": (
                lambda: 100 * 1024 * 1025 / 2 / (reader_tiles(1024, ROWS_64)[0] * 64 * 128),
                "That is the share of the scores. A tile is computed as a whole, or not at all.",
            ),
            "rows-beyond-N": (
                lambda: 100 * (reader_tiles(1024, ROWS_64)[1] + 2 * 8) / (3 * 32),
                "The last block has rows beyond N, two readers of them. They see nothing.",
            ),
            "all-of-the-square": (
                lambda: 100 * reader_tiles(1024, ROWS_64)[1] / (16 * 8),
                "Of all tiles of the square. But a block leaves out what none of its rows sees.",
            ),
        },
        tolerance=0.01,
    ),
    Choice(
        id="p21-6",
        text=(
            "A factor that should be 1 is 1 + 1e-7, for every tile of a row, and the sum so far\n"
            "is multiplied by it. How does the error of L grow with the number of tiles?"
        ),
        options={
            "a": "not at all: errors cancel",
            "b": "like the square root of the number: rounding is random",
            "c": "in proportion to the number",
        },
        right="c",
        remarks={
            "a": "They would if their sign changed. It is one and the same factor each time.",
            "b": "So ordinary rounding does. But this error is the same at each tile.",
            "c": "The same small step, always in the same direction.",
        },
    ),
    Choice(
        id="q61",
        text=(
            "In rung 8 a warpgroup starts S of tile i, and then P V of tile i - 1. Why in this\n"
            "order?"
        ),
        options={
            "a": "S comes out first, so softmax can begin while the tensor cores are at P V",
            "b": "P V needs S of tile i",
            "c": "K arrives in shared memory before V",
        },
        right="a",
        remarks={
            "a": "wgmma_wait<1> waits for the first of the two only.",
            "b": "It needs the weights of tile i - 1, which are there.",
            "c": "It does, but tile i - 1 has been there for long.",
        },
    ),
    Choice(
        id="q62",
        text=(
            "Blocks of work differ in length. One block of threads stays on each SM. How should\n"
            "the next work be chosen?"
        ),
        options={
            "a": "by a fixed step: no counter, no waiting",
            "b": "drawn from a counter, the shortest first, to be done with many soon",
            "c": "drawn from a counter, the longest of a head first",
        },
        right="c",
        remarks={
            "a": "Then an SM may get one long block after another.",
            "b": "A long one that starts last keeps everybody waiting.",
            "c": "Who is free takes the next; short ones at the end fill the gaps.",
        },
    ),
    Choice(
        id="q63",
        text=("x = m * c - s in one multiply-add, where s is m * c rounded to float32. What is x?"),
        options={
            "a": "0: it is the same product",
            "b": "the rounding error of s",
            "c": "0 or one unit in the last place of m",
        },
        right="b",
        remarks={
            "a": "The product inside the multiply-add is not rounded; s is.",
            "b": "So one can compute a rounding error, or get one by accident.",
            "c": "The error belongs to the product, and is at most half of its last place.",
        },
    ),
]
