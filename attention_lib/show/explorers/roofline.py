"""Roofline: what limits attention on a GPU, for each way of moving its arrays."""

from attention_lib.hardware import GPUS, find_gpu, peak, ridge, roofline, time_bound
from attention_lib.show.explorers.chart import WIDTH, Axis, mark, short, ticks_below, ticks_left
from attention_lib.show.svg import line, path, picture, rect, text
from attention_lib.show.widgets import Control, Picture, frames_of
from attention_lib.traffic import flash_traffic, general_traffic, q_outer_traffic, standard_traffic

B = 128  # Br and Bc of the tiled loops
ELEMENTS = {
    "standard": standard_traffic,
    "K/V outside": lambda N, d: flash_traffic(N, d, B, B),
    "Q outside": lambda N, d: q_outer_traffic(N, d, B, B),
    "each array once": general_traffic,
}
LOOKS = {
    "standard": ("standard", "square"),
    "K/V outside": ("flash", "circle"),
    "Q outside": ("q_outer", "triangle"),
    "each array once": ("hbm", "diamond"),
}
DTYPES = {"fp16 or bf16, tensor cores": (2, "tensor"), "fp32, ordinary cores": (4, "fp32")}
CONTROLS = (
    Control("gpu", "GPU", tuple(GPUS), "A100-80"),
    Control("N", "N", tuple(2**k for k in range(8, 18)), 4096),
    Control("d", "d", (32, 64, 128, 256), 64),
    Control("dtype", "Numbers", tuple(DTYPES), "fp16 or bf16, tensor cores"),
    Control("algorithm", "Algorithm", tuple(ELEMENTS), "Q outside"),
)


def work(algorithm, N, d, dtype):
    """FLOPs of both products, and bytes moved, of one head."""
    return 4 * N * N * d, ELEMENTS[algorithm](N, d) * DTYPES[dtype][0]


def draw(gpu, N, d, dtype, algorithm):
    """The picture. gpu: a key of GPUS. dtype: of DTYPES. algorithm: of ELEMENTS."""
    unit, card = DTYPES[dtype][1], find_gpu(gpu)
    X, Y = Axis(4, 2**17, 62, 470), Axis(1, 4000, 392, 50)
    corner, top = ridge(card, unit), peak(card, unit)
    roof = [(x, roofline(card, x, unit) / 1e12) for x in (4, corner, 2**17)]
    parts = [
        text(14, 24, f"{card.name}, {dtype}", 15, bold=True),
        *ticks_below(X, X.powers(4), 392, 50, said=lambda v: f"{v:,}"),
        *ticks_left(Y, Y.powers(10), 62, 470, said=lambda v: f"{v:,}"),
        text(266, 428, "FLOP per byte, log scale", 13, anchor="middle"),
        text(16, 222, "TFLOP/s, log scale", 13, anchor="middle", turn=-90),
        path([(X(x), Y(y)) for x, y in roof], "ink", 2.6),
        text(466, Y(top / 1e12) - 8, f"peak {short(top / 1e12)}", 12, anchor="end"),
        line(X(corner), Y(top / 1e12), X(corner), 392, "edge", 1, "5 4"),
        text(X(corner) + 5, 386, f"ridge {corner:.4g}", 12),
    ]
    chosen, alt = None, ""
    order = [name for name in ELEMENTS if name != algorithm] + [algorithm]  # the chosen on top
    for name in order:
        flops, moved = work(name, N, d, dtype)
        reach = roofline(card, flops / moved, unit)
        colour, shape = LOOKS[name]
        x, y = X(flops / moved), Y(reach / 1e12)
        if name == algorithm:
            parts.append(line(x, y, x, 392, "ink", 1.6, "2 3"))
            chosen = flops, moved, reach
        parts.append(mark(shape, x, y, colour, 9 if name == algorithm else 5.5))
        row = 70 + 46 * list(ELEMENTS).index(name)
        if name == algorithm:
            parts.insert(0, rect(488, row - 20, 262, 44, "faint", "edge", 0.8))
        parts += [
            mark(shape, 504, row, colour, 7),
            text(520, row, name, 13, bold=name == algorithm),
            text(
                520,
                row + 17,
                f"{short(flops / moved)} FLOP/byte, {short(reach / 1e12)} TFLOP/s",
                12,
            ),
        ]
    flops, moved, reach = chosen
    bound = time_bound(card, flops, moved, unit)
    limit = "arithmetic" if bound.limit == "compute" else "memory traffic"
    facts = [
        f"{algorithm}, one head",
        f"{short(flops / 1e9)} GFLOP take {short(1e6 * bound.compute)} µs or more",
        f"{short(moved / 1e6)} MB take {short(1e6 * bound.memory)} µs or more",
        f"The limit is {limit}.",
    ]
    for k, words in enumerate(facts):
        parts.append(text(492, 276 + 24 * k, words, 13, bold=k in (0, 3)))
    parts.append(text(492, 392, f"Tiled loops: blocks of {B} rows.", 12))
    alt = (
        f"Roofline of the {card.name} for {dtype}: peak {short(top / 1e12)} TFLOP/s, ridge at "
        f"{corner:.4g} FLOP per byte. At N = {N:,}, d = {d}, {algorithm} does "
        f"{short(flops / moved)} FLOP per byte, which allows {short(reach / 1e12)} TFLOP/s. "
        f"The limit is {limit}."
    )
    return Picture(picture(parts, alt, WIDTH, 440, f"Roofline of the {card.name}"), alt)


def frames():
    """Three GPUs, three lengths, four algorithms."""
    grid = dict(gpu=("A100-80", "H200", "RTX4090"), N=(1024, 4096, 65_536))
    return frames_of(draw, CONTROLS, **grid, algorithm=tuple(ELEMENTS)[::-1])
