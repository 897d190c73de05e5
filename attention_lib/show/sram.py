"""Drawings of notebook 06: what a tile step holds on chip, and which tiles fit.

Pure functions from numbers to a figure; the numbers come from `traffic` and `hardware`.
"""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from attention_lib.hardware import KiB, find_gpu, fits, sram_use
from attention_lib.show.style import COLOURS, new_figure
from attention_lib.traffic import flash_traffic, q_outer_traffic

MiB = 1024**2

# What a tile is drawn in: the colour, and a hatch for those who do not see the colour.
TILES = {
    "Q": ("#E69F00", ""),
    "K": ("#56B4E9", ""),
    "V": ("#56B4E9", "\\\\"),
    "O": ("#009E73", ".."),
    "S": ("#D55E00", "//"),
    "stats": ("#999999", "xx"),
}


def tile_picture(Br, Bc, d):
    """The tiles of one step, drawn to scale: an element is a unit of area. Returns fig."""
    gap = 0.12 * max(Br, Bc, d)
    left, right = d + gap, d + gap + Bc + gap  # where S starts, where O starts
    low, high = d + gap, d + gap + Br + gap  # V^T below S, K^T above it
    places = {
        "Q": (0, low, d, Br, f"Q\n{Br} x {d}"),
        "S": (left, low, Bc, Br, f"S (then P)\n{Br} x {Bc}"),
        "O": (right, low, d, Br, f"O\n{Br} x {d}"),
        "K": (left, high, Bc, d, f"K, transposed\n{d} x {Bc}"),
        "V": (left, 0, Bc, d, f"V, transposed\n{d} x {Bc}"),
    }
    fig, ax = new_figure(7, 4.4)
    for name, (x, y, width, height, text) in places.items():
        _box(ax, name, x, y, width, height)
        label = f"{text}\n= {width * height:,}"
        ax.text(
            x + width / 2,
            y + height / 2,
            label,
            ha="center",
            va="center",
            fontsize=10,
            bbox=dict(facecolor="white", edgecolor="none", pad=1.5),
        )
    stats = right + d + gap / 3
    thin = max(Br, Bc, d) / 50  # two columns of one element would be too thin to see
    for k in range(2):
        _box(ax, "stats", stats + k * 2 * thin, low, thin, Br)
    ax.text(
        stats + 1.5 * thin,
        low - gap / 4,
        f"m, l\n2 x {Br}\n= {2 * Br:,}",
        ha="center",
        va="top",
        fontsize=10,
    )
    ax.set(xlim=(-gap / 4, stats + gap), ylim=(-gap / 4, high + d + gap / 4))
    ax.set_aspect("equal")
    ax.axis("off")
    return fig


def _box(ax, name, x, y, width, height):
    colour, hatch = TILES[name]
    style = dict(facecolor=colour, edgecolor="black", linewidth=1, hatch=hatch, alpha=0.75)
    ax.add_patch(Rectangle((x, y), width, height, **style))


def need_curves(curves):
    """need / M against M, a line for each head dimension. curves: d -> (Ms, needs). Returns fig."""
    fig, ax = new_figure(7, 3.8)
    for (d, (budgets, needs)), colour, dash in zip(
        curves.items(), (COLOURS["flash"], COLOURS["standard"]), ("-", "--"), strict=False
    ):
        ratio = [need / M for need, M in zip(needs, budgets, strict=True)]
        ax.plot(budgets, ratio, dash, color=colour, label=f"d = {d}")
        for M, marker, at in ((4 * d * d, "s", 1.25), (8 * d * d, "o", 1.0)):
            ax.plot(M, at, marker, color=colour, markersize=8)
            name = f"{'4' if at > 1 else '8'}d² = {M:,}"
            ax.annotate(name, (M, at), xytext=(8, 9), textcoords="offset points", fontsize=10)
    ax.axhline(1, color=COLOURS["limit"], linewidth=1)
    ax.text(60_000, 0.985, "below this line the tiles fit", va="top", fontsize=10)
    ax.set(xlabel="M, elements on chip", ylabel="five tiles / M", ylim=(0.78, 1.36))
    ax.xaxis.set_major_formatter(lambda M, _: f"{M:,.0f}")
    ax.legend(loc="upper right")
    return fig


def stacks(uses, limits):
    """Bars of tiles end to end, in KiB. uses: label -> a dict of sram_use; limits: label -> bytes.

    Returns fig. A limit is a vertical line with its label above it.
    """
    fig, ax = new_figure(7.6, 1.8 + 0.62 * len(uses))
    for row, use in enumerate(uses.values()):
        start = 0
        for name, (colour, hatch) in TILES.items():
            size = use[name] / KiB
            if size == 0:
                continue
            style = dict(color=colour, hatch=hatch, edgecolor="black", alpha=0.75, height=0.6)
            ax.barh(row, size, left=start, **style)
            if size > 6:
                ax.text(
                    start + size / 2,
                    row,
                    f"{name} {size:g}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    bbox=dict(facecolor="white", edgecolor="none", pad=1),
                )
            start += size
        ax.text(start + 6, row, f"{start:g} KiB", va="center", fontweight="bold")
    for label, size in limits.items():
        ax.axvline(size / KiB, color=COLOURS["limit"], linestyle="--", linewidth=1.2, zorder=0)
        name = f"{label}\n{size / KiB:g} KiB"
        ax.text(size / KiB, -0.78, name, ha="center", va="bottom", fontsize=9)
    ax.set_yticks(range(len(uses)), list(uses))
    longest = max(max(use["total"] for use in uses.values()), *limits.values()) / KiB
    ax.set(xlabel="KiB of shared memory", xlim=(0, longest + 28), ylim=(len(uses) - 0.5, -0.75))
    ax.grid(visible=False)
    return fig


def block_map(gpu, d, N, *, rule="real", sizes=(16, 32, 64, 96, 128, 192, 256)):
    """Which Br x Bc fit on a GPU, and what each moves: Q outside (left), K/V outside (right).

    A cell that fits shows MiB in fp16, darker for less; one that does not is hatched and shows the
    KiB that it asks for. The best of each panel has a frame. Returns fig.
    """
    gpu = find_gpu(gpu)
    fig, axes = new_figure(10.5, 4.6, ncols=2, sharey=True)
    panels = (
        ("Q outside: only Br matters", q_outer_traffic),
        ("K/V outside: only Bc matters", flash_traffic),
    )
    can = [(Br, Bc) for Br in sizes for Bc in sizes if fits(gpu, Br, Bc, d, rule=rule)]
    for ax, (title, traffic) in zip(axes, panels, strict=True):
        moved = {pair: traffic(N, d, *pair) * 2 / MiB for pair in can}
        most, least = max(moved.values()), min(moved.values())
        shade = plt.Normalize(least, least + 1.25 * (most - least) + 1e-9)
        for y, Br in enumerate(sizes):
            for x, Bc in enumerate(sizes):
                if (Br, Bc) in moved:
                    value = moved[Br, Bc]
                    level = 1 - shade(value)
                    ink = "white" if level > 0.55 else "black"
                    text, style = f"{value:.3g}", dict(fontsize=11, fontweight="bold")
                    patch = dict(facecolor=plt.cm.Blues(0.1 + 0.75 * level), edgecolor="white")
                else:
                    need = sram_use(Br, Bc, d, rule=rule)["total"] / KiB
                    back = dict(facecolor="white", edgecolor="none", pad=0.5)
                    text, ink, style = f"{need:.0f}\nKiB", "#444444", dict(fontsize=8, bbox=back)
                    patch = dict(facecolor="white", edgecolor="#cccccc", hatch="//", linewidth=0)
                ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **patch))
                ax.text(x, y, text, ha="center", va="center", color=ink, **style)
        best = min(moved, key=lambda pair: (moved[pair], -pair[0] * pair[1]))
        at = sizes.index(best[1]) - 0.5, sizes.index(best[0]) - 0.5
        ax.add_patch(Rectangle(at, 1, 1, fill=False, edgecolor=COLOURS["standard"], linewidth=3))
        end = len(sizes) - 0.5
        ax.set(title=title, xlabel="Bc", xlim=(-0.5, end), ylim=(end, -0.5))
        ax.set_xticks(range(len(sizes)), sizes)
        ax.set_yticks(range(len(sizes)), sizes)
        ax.grid(visible=False)
    axes[0].set_ylabel("Br")
    return fig
