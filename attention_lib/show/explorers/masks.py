"""Block masks: a pattern over tiles, its density, and what both loops move under it."""

import numpy as np

from attention_lib import sparse
from attention_lib.show.explorers.chart import WIDTH, Axis, amount, short
from attention_lib.show.svg import line, picture, rect, rects, text
from attention_lib.show.widgets import Control, Picture, frames_of

B, HEAD, BYTES = 64, 64, 2  # tiles of 64 x 64, d, bytes of an element
PATTERNS = {  # mask of T blocks and a size, and what the size means
    "all tiles": (lambda T, size: np.ones((T, T), bool), ""),
    "band": (sparse.local, "{} block{s} before"),
    "butterfly": (
        lambda T, size: sparse.butterfly(T, min(size, T.bit_length() - 1)),
        "{} layer{s}",
    ),
    "strided": (lambda T, size: np.logical_or(*sparse.strided(T, size)), "l = {}"),
    "fixed": (lambda T, size: np.logical_or(*sparse.fixed(T, size)), "l = {}, c = 1"),
}
CONTROLS = (
    Control("pattern", "Pattern", tuple(PATTERNS), "butterfly"),
    Control("size", "Size", (1, 2, 3, 4, 5, 6, 7, 8), 4),
    Control("T", "Blocks each way", (8, 16, 32, 64), 16),
    Control("causal", "Causal", (True, False), False),
)


def mask_of(pattern, size, T, causal):
    """The block mask, boolean (T, T)."""
    mask = PATTERNS[pattern][0](T, size)
    return mask & sparse.causal(T) if causal else mask


def counts(mask):
    """(what, this mask, all tiles) for the traffic of both loops in bytes, and FLOPs."""
    N, full = len(mask) * B, np.ones_like(mask)
    forms = {
        "K/V outside moves": (sparse.block_sparse_traffic, BYTES),
        "Q outside moves": (sparse.block_sparse_q_outer_traffic, BYTES),
        "both multiply": (sparse.block_sparse_flops, 1),
    }
    return [
        (name, *(unit * form(N, HEAD, m, B, B) for m in (mask, full)))
        for name, (form, unit) in forms.items()
    ]


def draw(pattern, size, T, causal):
    """The picture. pattern: a key of PATTERNS."""
    mask = mask_of(pattern, size, T, causal)
    tiles, s = int(mask.sum()), sparse.density(mask)
    if pattern == "butterfly":
        size = min(size, T.bit_length() - 1)
    meaning = PATTERNS[pattern][1].format(size, s="" if size == 1 else "s")
    name = ", ".join(x for x in (pattern, meaning, "causal" if causal else "") if x)
    side, left, top = 320 / T, 44, 62
    boxes = [(left + j * side, top + i * side, side, side) for i, j in np.argwhere(mask)]
    parts = [
        text(14, 24, f"{name}: {tiles:,} of {T * T:,} tiles, s = {s:.4g}", 15, bold=True),
        text(left + 160, 54, f"{T} K/V blocks of {B}", 12, anchor="middle"),
        text(30, top + 160, f"{T} Q blocks of {B}", 12, anchor="middle", turn=-90),
        rect(left, top, 320, 320, "faint", "edge", 1),
        rects(boxes, "sram", "ink", 0.6),
    ]
    X = Axis(0, 1, 400, 720, log=False)
    parts.append(text(400, 76, "Against all tiles", 14, bold=True))
    bars = (("flash", ""), ("q_outer", ".."), ("standard", "//"))
    shares = []
    for k, ((what, mine, full), (fill, hatch)) in enumerate(zip(counts(mask), bars, strict=True)):
        y, share = 112 + 82 * k, mine / full
        shares.append(share)
        if k < 2:
            amounts = f"{amount(mine)} of {amount(full)}"
        else:
            amounts = f"{short(mine / 1e6)} of {short(full / 1e6)} MFLOP"
        parts += [
            text(400, y, what, 13),
            text(720, y, f"{share:.1%}", 13, anchor="end", bold=True),
            rect(X.start, y + 8, X(1) - X.start, 22, "none", "edge", 1),
            rect(X.start, y + 8, X(share) - X.start, 22, fill, "ink", 0.8, hatch),
            line(X(s), y + 3, X(s), y + 35, "ink", 2, "4 3"),
            text(400, y + 48, amounts, 12),
        ]
    parts += [
        text(400, 356, f"dashed: s. One head, N = {T * B:,}, d = {HEAD}, 16 bits.", 12),
    ]
    alt = (
        f"A grid of {T} x {T} tiles; the {tiles:,} filled ones are computed: {name}, s = {s:.4g}. "
        f"Against all tiles K/V outside moves {shares[0]:.1%}, Q outside {shares[1]:.1%}, and both "
        f"multiply {shares[2]:.1%}."
    )
    return Picture(picture(parts, alt, WIDTH, 396, f"Block mask: {name}"), alt)


def frames():
    """Five patterns, four sizes, causal or not."""
    patterns = ("butterfly", "band", "strided", "fixed", "all tiles")
    grid = dict(pattern=patterns, size=(1, 2, 4, 8), causal=(False, True))
    return frames_of(draw, CONTROLS, **grid)
