"""Exercise 17: tiles for a given shared memory, in the layout of rung 2."""

import math

from attention_lib.checks.kinds import Choice, Mistake, Number, Probe, Program
from attention_lib.gpu import ladder
from attention_lib.gpu.occupancy import SYSTEM, room
from attention_lib.hardware import GPUS

FITS = "notebook 14, 'How many blocks fit'"
BYTES = "notebook 06, 'Elements are not bytes'"
FORGETS = "notebook 06, 'A calculator that forgets a tile'"
BUFFERS = "notebook 15, 'Copies that do not stop in registers'"
BANKS = "notebook 15, 'Banks'"
MAP = "notebook 06, 'Choosing blocks: a map'"
STEP, MOST = 16, 128  # Br and Bc are multiples of 16, at most 128
PAD = 2


def block_bytes(Br, Bc, d, buffers, *, q=True, kv=2, s=True, stats=3, pad=PAD, s_pad=1, of_s=4,
                of_tile=2, doubled="kv"):  # fmt: skip
    """Bytes of one block in rung 2's layout, or with something else in place of a part of it."""
    times = {"kv": (1, buffers), "all": (buffers, buffers), "none": (1, 1)}[doubled]
    rows = q * times[0] * Br + kv * times[1] * Bc
    floats = (Br * (Bc + s_pad) if s else 0) + stats * Br
    return of_tile * rows * (d + pad) + of_s * floats


def bytes_probes(seed):
    cases = [(64, 64, 64, 1), (64, 64, 128, 1), (32, 64, 64, 1), (64, 32, 64, 2), (16, 128, 32, 2)]
    cases += [(128, 48, 128, 3), (16, 16, 256, 2), (16 * (1 + seed % 8), 80, 96, 1 + seed % 2)]
    return [
        Probe(
            f"Br = {Br}, Bc = {Bc}, d = {d}, {n} buffer{'s' * (n > 1)} of K and V",
            {"Br": Br, "Bc": Bc, "d": d, "buffers": n},
            (0.0,),
        )
        for Br, Bc, d, n in cases
    ]


def _bytes(id, says, read, *others):
    def program(other):
        return lambda Br, Bc, d, buffers: block_bytes(Br, Bc, d, buffers, **other)

    return [Mistake(id, program(o), says, read) for o in others]


COUNT = Program(
    "ex17-bytes",
    "Write block_bytes(Br, Bc, d, buffers): the bytes of shared memory that one block takes in\n"
    "the layout above.",
    ("bytes",),
    lambda Br, Bc, d, buffers: block_bytes(Br, Bc, d, buffers),
    bytes_probes,
    mistakes=(
        *_bytes(
            "s-forgotten",
            "the tile of S is missing. In rung 2 it is in shared memory, in float.",
            FORGETS,
            {"s": False},
            {"s": False, "stats": 0},
        ),
        *_bytes(
            "v-forgotten",
            "there is one tile of Bc rows. K and V are two.",
            FORGETS,
            {"kv": 1},
        ),
        *_bytes(
            "q-forgotten",
            "the tile of Q is missing. It stays for the whole loop.",
            FORGETS,
            {"q": False},
        ),
        *_bytes(
            "buffers-forgotten",
            "K and V are counted once. Each has so many buffers.",
            BUFFERS,
            {"doubled": "none"},
        ),
        *_bytes(
            "q-doubled-too",
            "Q has been multiplied by the buffers as well. It is loaded once, before the loop.",
            BUFFERS,
            {"doubled": "all"},
        ),
        *_bytes(
            "padding-forgotten",
            "the columns of padding are missing: a row of a 16-bit tile has d + 2 numbers, a row "
            "of S has Bc + 1.",
            BANKS,
            {"pad": 0, "s_pad": 0},
            {"pad": 0},
        ),
        *_bytes(
            "one-float-a-row-missing",
            "one float for each row is missing: the padding of S, or one of m, l and rescale.",
            FORGETS,
            {"s_pad": 0},
        ),
        *_bytes(
            "statistics-forgotten",
            "m, l and rescale are missing: three floats for each row.",
            FORGETS,
            {"stats": 0},
        ),
        *_bytes(
            "s-in-16-bits",
            "S is counted with 2 bytes a number. It is float: 4.",
            BYTES,
            {"of_s": 2},
        ),
        *_bytes(
            "tiles-in-32-bits",
            "the tiles are counted with 4 bytes a number. Q, K and V have 16 bits: 2.",
            BYTES,
            {"of_tile": 4},
        ),
        *_bytes(
            "elements-not-bytes",
            "that is the number of elements. A 16-bit number is 2 bytes, a float 4.",
            BYTES,
            {"of_s": 1, "of_tile": 1},
        ),
    ),
    read=FITS,
)


def tiles(d, shared, buffers, *, taken=block_bytes, first="Br", system=SYSTEM, fits=None,
          step=STEP, most=MOST):  # fmt: skip
    """The tile that moves the fewest bytes and fits: (Br, Bc); (0, 0) if none does."""
    fits = fits or (lambda used: used + system <= shared)
    sizes = range(step, most + 1, step)
    found = [(a, b) for a in sizes for b in sizes if fits(taken(a, b, d, buffers))]
    keys = {"Br": lambda x: x, "Bc": lambda x: x[::-1], "area": lambda x: (x[0] * x[1], x[0])}
    keys["square"] = lambda x: (min(x), x[0] == x[1])
    return max(found, key=keys[first], default=(0, 0))


def tiles_probes(seed):
    del seed  # everything matters here but chance
    cases = [(64, 49_152, 1), (64, 65_536, 2), (128, 101_376, 1), (128, 101_376, 2)]
    cases += [(128, 167_936, 2), (256, 101_376, 1), (32, 49_152, 1), (64, 232_448, 2)]
    edge = block_bytes(128, 48, 64, 1) + SYSTEM  # to the last byte
    cases += [(64, edge, 1), (64, edge - 1, 1), (64, 27_136, 1), (256, 49_152, 2)]
    cases += [(128, block_bytes(128, 80, 128, 2) + SYSTEM - 2000, 2)]  # its padding is more
    probes = [(*case, 0) for case in cases] + [(256, 16_384, 1, 1)]
    return [
        Probe(
            f"d = {d}, {shared:,} bytes, {n} buffer{'s' * (n > 1)}",
            {"d": d, "shared": shared, "buffers": n},
            (0.0, 0.0),
            stage,
        )
        for d, shared, n, stage in probes
    ]


def _tiles(id, says, read, *others):
    def program(other):
        return lambda d, shared, buffers: tiles(d, shared, buffers, **other(shared))

    return [Mistake(id, program(o), says, read) for o in others]


def _with(**other):
    return lambda *shape: block_bytes(*shape, **other)


CHOOSE = Program(
    "ex17-tiles",
    "Write tiles(d, shared, buffers) -> Br, Bc: the tile with the fewest bytes moved that fits.",
    ("Br", "Bc"),
    lambda d, shared, buffers: tiles(d, shared, buffers),
    tiles_probes,
    mistakes=(
        *_tiles(
            "bc-first",
            "your Bc is as large as can be, and Br pays for it. K and V are read again for each "
            "block of Q: make Br large first.",
            MAP,
            lambda shared: {"first": "Bc"},
        ),
        *_tiles(
            "largest-area",
            "your tile has the largest area. The traffic counts blocks of Q only: Br matters, Bc "
            "does not.",
            MAP,
            lambda shared: {"first": "area"},
        ),
        *_tiles(
            "square-by-habit",
            "your tile is as square as can be. Nothing asks for that: Br large first.",
            MAP,
            lambda shared: {"first": "square"},
        ),
        *_tiles(
            "system-forgotten",
            "the block takes 1,024 bytes more, for the system. With them your tile does not fit.",
            FITS,
            lambda shared: {"system": 0},
        ),
        *_tiles(
            "not-to-the-last-byte",
            "a block that takes exactly what there is fits: <=, not <.",
            FITS,
            lambda shared: {"fits": lambda used: used + SYSTEM < shared},
        ),
        *_tiles(
            "buffers-forgotten",
            "your tile fits with one buffer of K and V. Count all of them.",
            BUFFERS,
            lambda shared: {"taken": lambda a, b, d, n: block_bytes(a, b, d, 1)},
        ),
        *_tiles(
            "s-forgotten",
            "your tile fits only if S takes nothing.",
            FORGETS,
            lambda shared: {"taken": _with(s=False)},
        ),
        *_tiles(
            "padding-forgotten",
            "your tile fits only without the padding.",
            BANKS,
            lambda shared: {"taken": _with(pad=0, s_pad=0)},
        ),
        *_tiles(
            "elements-not-bytes",
            "you compare elements with bytes. A 16-bit number is 2 bytes, a float 4.",
            BYTES,
            lambda shared: {"taken": _with(of_s=1, of_tile=1)},
        ),
        *_tiles(
            "powers-of-two-only",
            "only powers of two were tried. Multiples of 16 are allowed: 48, 80, 96, 112 too.",
            MAP,
            lambda shared: {
                "taken": lambda a, b, d, n: (
                    block_bytes(a, b, d, n) if a & (a - 1) == 0 and b & (b - 1) == 0 else math.inf
                )
            },
        ),
        *_tiles(
            "two-blocks-by-habit",
            "your tile leaves room for a second block. The task asks for one block an SM.",
            FITS,
            lambda shared: {"fits": lambda used: 2 * (used + SYSTEM) <= shared},
        ),
    ),
    read=MAP,
)

H200 = GPUS["H200"].sram_per_sm


def _rung2(d):
    return ladder.rung("q_outer").shared(d)


QUESTIONS = [
    COUNT,
    Number(
        "ex17-blocks",
        f"Rung 2 with d = 128 on an SM with {H200:,} bytes. How many blocks does shared memory\n"
        "allow at a time? (Each takes 1,024 bytes more for the system.)",
        "blocks",
        truth=lambda: room(96, 256, _rung2(128))["shared memory"],
        why="67,328 and 1,024 bytes a block: 3 fit, and 28,416 bytes are left over.",
        hint="What does one block take at d = 128? Your function of task 1 knows.",
        tolerance=0,
        slips={
            "d-64": (
                lambda: room(96, 256, _rung2(64))["shared memory"],
                "That is for d = 64. The tiles of 16-bit numbers are twice as wide here.",
            ),
            "rounded-up": (
                lambda: room(96, 256, _rung2(128))["shared memory"] + 1,
                "One too many: a block that does not fit as a whole does not run.",
            ),
            "registers": (
                lambda: room(96, 256, _rung2(128))["registers"],
                "That is what 96 registers a thread allow at d = 64. The question is what shared "
                "memory allows.",
            ),
        },
    ),
    CHOOSE,
    Choice(
        "ex17-next",
        "Rung 3 keeps S and P in registers. What does that do to the choice of tiles?",
        {
            "a": "Nothing: S had no part in what a block takes",
            "b": "Shared memory bounds the tiles no longer, registers do",
            "c": "A tile of the same shared memory can be larger, but S and O take registers of "
            "each thread",
            "d": "Bc can no longer be smaller than Br",
        },
        "c",
        {
            "a": "At Br = Bc = 128 S takes 66,048 of 167,424 bytes with d = 128.",
            "b": "Q, K and V are still tiles in shared memory. Both bounds hold.",
            "c": "The bytes of S are free for Q, K and V. What a warp holds of S and O is in its "
            "registers: 227 a thread in rung 5 (notebook 15).",
            "d": "No rung asks for that. Rung 5 has Br = 128 and Bc = 64 at d = 64.",
        },
    ),
]
