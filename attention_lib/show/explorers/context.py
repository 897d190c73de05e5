"""Context-window calculator: the longest N whose arrays fit in a memory, for both methods."""

from attention_lib.hardware import GiB
from attention_lib.show.explorers.chart import (
    WIDTH,
    Axis,
    amount,
    mark,
    short,
    ticks_below,
    ticks_left,
)
from attention_lib.show.svg import line, path, picture, text
from attention_lib.show.widgets import Control, Picture, frames_of
from attention_lib.traffic import attention_memory, largest_context

BUDGETS = (1, 2, 4, 8, 16, 20, 24, 40, 80, 141, 180)  # GiB
DTYPES = {"fp16 or bf16": 2, "fp32": 4}
METHODS = {"standard": ("standard", "square", "6 4"), "flash": ("flash", "circle", None)}
CONTROLS = (
    Control("memory", "Memory, GiB", BUDGETS, 20),
    Control("d", "d", (32, 64, 128, 256), 128),
    Control("heads", "Heads", (8, 16, 32, 64, 128), 32),
    Control("dtype", "Numbers", tuple(DTYPES), "fp16 or bf16"),
)


def longest(memory, d, heads, dtype, method):
    """Tokens that fit in `memory` GiB, every array of the layer counted."""
    size = DTYPES[dtype]
    return largest_context(memory * GiB, d, heads, method=method, element_bytes=size)


def draw(memory, d, heads, dtype):
    """The picture. memory: GiB for the arrays of one attention layer. dtype: of DTYPES."""
    X, Y = Axis(1, 192, 96, 500), Axis(2**9, 2**27, 380, 50)
    parts = [
        text(14, 24, f"One layer: {heads} heads, d = {d}, {dtype}", 15, bold=True),
        *ticks_below(X, X.powers(4), 380, 50),
        *ticks_left(Y, Y.powers(8), 96, 500, said=lambda v: f"{v:,}"),
        text(298, 416, "memory, GiB, log scale", 13, anchor="middle"),
        text(16, 215, "longest N, log scale", 13, anchor="middle", turn=-90),
        line(X(memory), 50, X(memory), 380, "ink", 1.4, "2 3"),
    ]
    found = {}
    for name, (colour, shape, dash) in METHODS.items():
        curve = [(g, longest(g, d, heads, dtype, name)) for g in BUDGETS]
        N = found[name] = longest(memory, d, heads, dtype, name)
        parts += [
            path([(X(g), Y(n)) for g, n in curve], colour, 2.4, dash=dash),
            mark(shape, X(memory), Y(N), colour, 7),
        ]
    ratio = found["flash"] / found["standard"]
    size = dict(d=d, heads=heads, element_bytes=DTYPES[dtype])
    y = 76
    for name, title in (("standard", "standard: S and P stored"), ("flash", "tiled: l, m stored")):
        N = found[name]
        memories = attention_memory(N, method=name, **size)
        parts += [
            mark(METHODS[name][1], 524, y - 5, METHODS[name][0], 7),
            text(542, y, title, 14, bold=True),
            text(542, y + 22, f"{N:,} tokens", 14),
        ]
        for k, (part, taken) in enumerate(memories.items()):
            words = "all" if part == "total" else "Q, K, V, O" if part == "QKVO" else part
            parts += [
                text(542, y + 44 + 19 * k, words, 12.5),
                text(738, y + 44 + 19 * k, amount(taken), 12.5, anchor="end"),
            ]
        y += 150
    parts += [
        text(524, 356, f"{short(ratio)} times longer", 15, bold=True),
        text(524, 380, "One layer: no KV cache of others.", 12),
    ]
    alt = (
        f"Longest N that {memory} GiB can hold for one attention layer of {heads} heads, d = {d}, "
        f"{dtype}: standard {found['standard']:,} tokens, tiled {found['flash']:,}, "
        f"{short(ratio)} times longer. Standard grows as the square root of the memory, tiled as "
        "the memory."
    )
    return Picture(picture(parts, alt, WIDTH, 428, f"Context in {memory} GiB"), alt)


def frames():
    """Five memories, two d, three numbers of heads."""
    grid = dict(memory=(8, 20, 40, 80, 141), d=(64, 128), heads=(16, 32, 64))
    return frames_of(draw, CONTROLS, **grid)
