"""Predictions and checkpoint questions of notebook 20, specialised warps."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.gpu import recordings

LAUNCH, LOADER = 168, 40  # registers of a thread: at the launch, and what the loader keeps


def _reader(launch=LAUNCH, loader=LOADER, readers=2):
    """Registers that each thread of a reader can have: what the launch gave, shared anew."""
    return ((readers + 1) * launch - loader) / readers // 8 * 8


def launched():
    """What NVRTC recorded for rung 7: registers of a thread."""
    rows = recordings.read("nvrtc")["rows"]
    return {r["registers"] for r in rows if r["kernel"] == "specialised"}


QUESTIONS = [
    Choice(
        id="p20-1",
        text=(
            "Two buffers. The loader forgets to wait for `empty`, and loading is faster than\n"
            "reading. What happens?"
        ),
        options={
            "a": "nothing: `full` is enough, it says when a tile is there",
            "b": "the loader and the reader wait for each other for ever",
            "c": "a tile is overwritten before or while it is read",
        },
        right="c",
        remarks={
            "a": "`full` tells the reader. What tells the loader that a buffer is free again?",
            "b": "The loader never waits now. Nothing stops it.",
            "c": "The third tile goes into the first buffer, whether or not it was read.",
        },
    ),
    Choice(
        id="p20-2",
        text=(
            "The loader waits for `empty` with `parity` in place of `parity ^ 1`, so with 0 in\n"
            "the first round. What happens?"
        ),
        options={
            "a": "it never starts: everybody waits",
            "b": "the first two tiles are right, the third is overwritten",
            "c": "nothing: parities repeat anyway",
        },
        right="a",
        remarks={
            "a": "It waits for a reader's first arrival. The reader waits for the first tile.",
            "b": "To overwrite, it would have to load. What must end before its first load?",
            "c": "They repeat with period two. Being off by one is being off by half of it.",
        },
    ),
    Choice(
        id="p20-3",
        text=(
            "Every load takes 2, every computation 3. With one buffer the reader waits 48 in all.\n"
            "With two buffers it waits 2. What do four buffers bring?"
        ),
        options={
            "a": "it waits 1",
            "b": "it waits 0",
            "c": "it waits 2, as before",
        },
        right="c",
        remarks={
            "a": "More buffers do not make the first load shorter.",
            "b": "The first tile must come before anything can be computed.",
            "c": "The first load is all that is left. Two buffers hide every other one.",
        },
    ),
    Number(
        id="p20-4",
        text=(
            "One reader's thread at d = 128 holds: its part of O, 64 x 128 floats; of S, 64 x 128\n"
            "floats; of P, 64 x 128 numbers of 16 bits, two in a register. A warpgroup has 128\n"
            "threads. How many registers is that?"
        ),
        unit="registers a thread",
        truth=lambda: 64 * 128 // 128 * 2 + 64 * 128 // 2 // 128,
        why="64 + 64 + 32. Addresses, m, l and the rest come on top.",
        hint="64 x 128 numbers over 128 threads, three times; then think of P's 16 bits.",
        slips={
            "P-in-floats": (lambda: 192, "Two numbers of 16 bits share a register."),
            "without-P": (lambda: 128, "You left out P: the A operand of the second product."),
            "one-warp": (
                lambda: 640,
                "You gave the 64 rows to 32 threads. A warpgroup is four warps.",
            ),
        },
        tolerance=1e-6,
    ),
    Number(
        id="p20-5",
        text=(
            "At the launch each thread of three warpgroups has 168 registers. The loader's\n"
            "warpgroup goes down to 40. How many can a thread of the two readers have?"
        ),
        unit="registers a thread",
        truth=_reader,
        why="128 are given up, and two warpgroups share them: 168 + 64.",
        hint="How many does a thread of the loader give up? How many warpgroups share them?",
        slips={
            "not-shared": (
                lambda: LAUNCH + LAUNCH - LOADER,
                "You gave all of them to one warpgroup. There are two readers.",
            ),
            "whole-file": (
                lambda: (65_536 - 128 * LOADER) / 256,
                "You shared the whole SM. The block gets what its launch asked for, and "
                "setmaxnreg takes multiples of 8.",
            ),
            "unchanged": (lambda: LAUNCH, "That is what they had at the launch."),
        },
        tolerance=1e-6,
        slip_tolerance=1e-6,
    ),
    Choice(
        id="p20-6",
        text=(
            "Take both setmaxnreg out of rung 7, d = 128. Each thread may then have 168. Rung 6\n"
            "used 196. Does the compiler spill registers to memory?"
        ),
        options={
            "a": "yes: 196 do not fit in 168",
            "b": "no: it finds an order of work that needs fewer",
            "c": "it refuses to compile",
        },
        right="b",
        remarks={
            "a": "196 is what it took where 255 were allowed. It is no lower limit.",
            "b": "O, S and P are 160. It gets by with hardly more. There is no room for new ideas.",
            "c": "It never refuses for registers. In the worst case it spills.",
        },
    ),
    Choice(
        id="p20-7",
        text="Rung 7 against rung 6, N = 16,384, no mask. How much faster?",
        options={
            "a": "not at all: the loads were hidden before",
            "b": "5 to 11%",
            "c": "about 1.5 times",
        },
        right="b",
        remarks={
            "a": "The loads were. But a barrier stopped both warpgroups after every tile.",
            "b": "The two may drift apart now, and one multiplies while the other is at softmax.",
            "c": "If they took turns perfectly. Nothing makes them do so in this rung.",
        },
    ),
    Choice(
        id="q58",
        text="What does `empty` protect?",
        options={
            "a": "the reader from a tile that has not come",
            "b": "shared memory from two readers at once",
            "c": "a tile from being overwritten while somebody still reads it",
        },
        right="c",
        remarks={
            "a": "That is the task of `full`.",
            "b": "Two readers of one tile do no harm.",
            "c": "So it needs an arrival of every reader, and `full` only one: the copy's.",
        },
    ),
    Choice(
        id="q59",
        text=("A ring of three stages. Which parity does a reader use for tile 7, counted from 0?"),
        options={"a": "0", "b": "1", "c": "either: it is the first time in buffer 1"},
        right="a",
        remarks={
            "a": "Tile 7 is in round 7 // 3 = 2 of its buffer; 2 % 2 = 0.",
            "b": "That is 7 % 2. The round counts, not the tile.",
            "c": "Tiles 1 and 4 have been in buffer 1 before.",
        },
    ),
    Choice(
        id="q60",
        text="Rung 7 has a loader. What does one of its readers still wait for, at every tile?",
        options={
            "a": "its own products: softmax needs S, and the next S is not started before",
            "b": "the copies of K and V",
            "c": "the other reader, at a barrier",
        },
        right="a",
        remarks={
            "a": "Inside a warpgroup nothing overlaps yet. The next rung starts S earlier.",
            "b": "They are a tile ahead, as in rung 6.",
            "c": "There is no common barrier in the loop any more. They meet at `empty` only.",
        },
    ),
]
