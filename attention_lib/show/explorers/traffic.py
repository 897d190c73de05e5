"""Traffic: three accounts of one loop, and the two links where they hold."""

from attention_lib.hardware import GPUS
from attention_lib.show.explorers.chart import WIDTH, Axis, amount, rows, ticks_below
from attention_lib.show.svg import line, path, picture, rect, text
from attention_lib.show.widgets import Control, Picture, frames_of
from attention_lib.tiled import block_sizes
from attention_lib.traffic import ACCOUNTS, general_traffic

GPU = GPUS["A100-80"]
BYTES = 2
ORDERS = {"K/V outside": "Algorithm 1", "Q outside": "Q outside"}  # -> its account
LOOKS = {
    "standard": ("standard", "square"),
    "Algorithm 1": ("flash", "circle"),
    "Q outside": ("q_outer", "triangle"),
    "each once": ("hbm", "diamond"),
}
CONTROLS = (
    Control("M", "M (elements)", (6144, 12_288, 24_576, 50_000, 98_304), 50_000),
    Control("N", "N", tuple(2**k for k in range(9, 19)), 4096),
    Control("d", "d", (32, 64, 128, 256), 64),
    Control("order", "Order", tuple(ORDERS), "Q outside"),
    Control("L2", "L2 cache", (True, False), True),
)


def moved(M, N, d):
    """Account -> elements of one head, by `general_traffic`.

    Algorithm 1 has the blocks of `block_sizes`, Q outside the same mirrored, so both hold as much.
    """
    small, large = block_sizes(M, d)
    blocks = -(-N // large)  # K/V blocks of the one order, Q blocks of the other
    return {name: general_traffic(N, d, **ACCOUNTS[name](blocks, blocks)) for name in LOOKS}


def repeated(M, N, d, order):
    """Bytes that come again while they are in use: K and V, or Q and O, of all heads in flight.

    Q outside: a head keeps Tr SMs busy. K/V outside: one, so there are as many heads as SMs.
    """
    Tr = -(-N // block_sizes(M, d)[1])
    heads = GPU.sms if order == "K/V outside" else max(1, GPU.sms / Tr)
    return heads * 2 * N * d * BYTES


def draw(M, N, d, order, L2):
    """The picture. order: a key of ORDERS. L2: is there a cache between SM and DRAM?"""
    elements, again = moved(M, N, d), repeated(M, N, d, order)
    chosen = ORDERS[order]
    fits = L2 and again <= GPU.l2
    at_dram = "each once" if fits else chosen
    small, large = block_sizes(M, d)
    Br, Bc = (small, large) if order == "K/V outside" else (large, small)
    sizes = {name: BYTES * count for name, count in elements.items()}
    X = Axis(min(sizes.values()) / 2, max(sizes.values()) * 2, 150, 640)
    entries = [
        (name, sizes[name], amount(sizes[name]), *LOOKS[name], name in (chosen, at_dram))
        for name in LOOKS
    ]
    parts = [
        text(14, 24, f"One head: N = {N:,}, d = {d}, {order}, Br = {Br}, Bc = {Bc}", 15, bold=True),
        *ticks_below(X, X.powers(4, 7), 178, 38, said=amount),
        *rows(entries, X, 56, 32, 136),
        text(395, 212, "bytes moved by one head in 16 bits, log scale", 12, anchor="middle"),
        text(14, 246, "Where each account is counted", 15, bold=True),
        *_chain(chosen, at_dram, sizes, L2),
    ]
    if L2:
        keep = "stays in" if fits else "is too much for"
        what = "K and V" if order == "Q outside" else "Q and O"
        note = f"{what} of the heads in flight: {amount(again)}, {keep} L2 ({amount(GPU.l2)})"
    else:
        note = "Without a cache every load of the loop reaches DRAM."
    parts.append(text(14, 348, note, 13))
    alt = (
        f"Bytes moved by one head at N = {N:,}, d = {d}, M = {M:,}: "
        + ", ".join(f"{name} {amount(size)}" for name, size in sizes.items())
        + f". Between the SMs and {'L2' if L2 else 'DRAM'} the loop, {order}, moves "
        f"{amount(sizes[chosen])}. "
        + (f"Between L2 and DRAM: {amount(sizes[at_dram])}. " if L2 else "")
        + f"{note.rstrip('.')}."
    )
    title = f"Traffic of one head, {order}"
    return Picture(picture(parts, alt, WIDTH, 364, title), alt)


def _arrow(x1, x2, y):
    """A line with a head at both ends."""
    heads = [path([(x + dx, y - 5), (x, y), (x + dx, y + 5)], "ink", 2)
             for x, dx in ((x1, 8), (x2, -8))]  # fmt: skip
    return [line(x1, y, x2, y, "ink", 2), *heads]


def _chain(chosen, at_dram, sizes, L2):
    """SMs, L2 and DRAM in a row, with what crosses each link."""
    y, boxes = 286, [(14, "SMs", "sram"), (350, "L2", "pale"), (646, "DRAM (HBM)", "hbm")]
    if not L2:
        boxes.pop(1)
    parts = []
    for x, name, fill in boxes:
        parts += [
            rect(x, y - 24, 100, 52, fill, "ink", 1.2),
            text(x + 50, y + 7, name, 13, "ink" if fill == "pale" else "on", "middle", bold=True),
        ]
    accounts = [chosen, at_dram] if L2 else [chosen]
    for (x1, *_), (x2, *_), name in zip(boxes, boxes[1:], accounts, strict=False):
        middle = (x1 + 100 + x2) / 2
        parts += [
            *_arrow(x1 + 106, x2 - 6, y),
            text(middle, y - 10, amount(sizes[name]), 14, anchor="middle", bold=True),
            text(middle, y + 22, f"account: {name}", 13, anchor="middle"),
        ]
    return parts


def frames():
    """Two M, five N, both orders, with and without L2."""
    grid = dict(M=(12_288, 50_000), N=(1024, 2048, 4096, 65_536, 262_144))
    return frames_of(draw, CONTROLS, **grid, order=("Q outside", "K/V outside"), L2=(True, False))
