"""SRAM budget: the tiles of one thread block against what each GPU gives a block."""

from attention_lib.hardware import GPUS, KiB, blocks_per_sm, sram_use
from attention_lib.show.explorers.chart import WIDTH, Axis, short
from attention_lib.show.svg import line, picture, rect, text
from attention_lib.show.widgets import Control, Picture, frames_of

COUNTED = {
    "all tiles, S and O in fp32": "real",
    "S and O in registers (FlashAttention-2)": "registers",
    "without S (a slip)": "article",
}
DTYPES = {"fp16 or bf16": 2, "fp32": 4}
LOOKS = {  # fill and hatch of each part; S stands out
    "Q": ("hbm", ""), "K": ("sram", ""), "V": ("sram", ".."), "O": ("hbm", ".."),
    "S": ("standard", "//"), "stats": ("quiet", ""),
}  # fmt: skip
SIZES = tuple(range(16, 257, 16))
CONTROLS = (
    Control("Br", "Br", SIZES, 128),
    Control("Bc", "Bc", SIZES, 64),
    Control("d", "d", (32, 64, 128, 256), 128),
    Control("dtype", "Numbers", tuple(DTYPES), "fp16 or bf16"),
    Control("counted", "On chip", tuple(COUNTED), "all tiles, S and O in fp32"),
)


def draw(Br, Bc, d, dtype, counted):
    """The picture. dtype: a key of DTYPES. counted: a key of COUNTED."""
    options = dict(rule=COUNTED[counted], element_bytes=DTYPES[dtype])
    use = sram_use(Br, Bc, d, **options)
    total = use["total"]
    most = max(total, *(gpu.sram_per_block for gpu in GPUS.values()))
    X = Axis(0, 1.02 * most / KiB, 130, 560, log=False)
    heading = f"Br = {Br}, Bc = {Bc}, d = {d}: {short(total / KiB)} KiB"
    parts, x = [text(14, 24, heading, 15, bold=True)], X.start
    for name, (fill, hatch) in LOOKS.items():
        wide = X(use[name] / KiB) - X.start
        tip = f"{name}: {use[name] / KiB:.4g} KiB"
        if wide:
            parts.append(rect(x, 40, wide, 34, fill, "ink", 1, hatch, tip=tip))
        if wide > 16 and name != "stats":
            parts += [
                rect(x + wide / 2 - 8, 48, 16, 18, "paper"),
                text(x + wide / 2, 62, name, 13, anchor="middle", bold=True),
            ]
        x += wide
    parts.append(text(14, 62, "the tiles", 13, bold=True))
    for k, (name, (fill, hatch)) in enumerate(LOOKS.items()):
        left = 14 + 122 * k
        parts += [
            rect(left, 90, 14, 14, fill, "ink", 0.8, hatch),
            text(left + 20, 102, f"{'m, l' if name == 'stats' else name} "
                 f"{short(use[name] / KiB)} KiB", 12.5),
        ]  # fmt: skip
    parts.append(line(X(total / KiB), 148, X(total / KiB), 356, "ink", 1.6, "5 4"))
    parts.append(text(14, 140, "What one thread block may have", 13, bold=True))
    said = []
    for k, (name, gpu) in enumerate(GPUS.items()):
        y, held = 152 + 34 * k, blocks_per_sm(gpu, Br, Bc, d, **options)
        wide = X(gpu.sram_per_block / KiB) - X.start
        verdict = f"fits, {held} on an SM" if held else "does not launch"
        parts += [
            text(14, y + 17, name, 13),
            rect(X.start, y, wide, 24, "pale" if held else "none", "ink", 1.2,
                 "" if held else "xx"),
            rect(X.start + 5, y + 3, 62, 18, "paper"),
            text(X.start + 8, y + 17, f"{gpu.sram_per_block / KiB:.0f} KiB", 13),
            text(572, y + 17, verdict, 13, bold=True),
        ]  # fmt: skip
        said.append(f"{name} {verdict}")
    parts.append(text(X(total / KiB), 374, "the tiles end here", 12, anchor="middle"))
    alt = (
        f"Tiles of one thread block, {counted}: Br = {Br}, Bc = {Bc}, d = {d}, {dtype}. They take "
        f"{short(total / KiB)} KiB, of which S {short(use['S'] / KiB)}. " + "; ".join(said) + "."
    )
    return Picture(picture(parts, alt, WIDTH, 384, f"Shared memory: {heading}"), alt)


def frames():
    """Two Br, two Bc, two d, and the three counts."""
    grid = dict(Br=(64, 128), Bc=(64, 128), d=(64, 128))
    return frames_of(draw, CONTROLS, **grid, counted=tuple(COUNTED))
