"""Pictures of notebook 10: block masks, what layers of them reach, tokens against tiles."""

import numpy as np
from matplotlib.patches import Patch, Rectangle

from attention_lib import sparse
from attention_lib.show.style import COLOURS, new_figure


def gallery(T=8):
    """The patterns of notebook 10 over T blocks (a power of two, 8 or more): name -> mask."""
    masks = {"dense": np.ones((T, T), bool), "causal": sparse.causal(T)}
    layers = T.bit_length() - 1
    for k in range(1, layers + 1):
        masks[f"butterfly k={k}" + " (all)" * (k == layers)] = sparse.butterfly(T, k)
    masks["butterfly & causal"] = sparse.butterfly(T) & sparse.causal(T)
    heads = {f"strided l={l}": sparse.strided(T, l) for l in (2, 3, 4)}
    heads |= {f"fixed l={l} c={c}": sparse.fixed(T, l, c) for l, c in ((2, 1), (4, 1), (4, 2))}
    for name, (A1, A2) in heads.items():
        masks |= {f"{name} A1": A1, f"{name} A2": A2, f"{name} union": A1 | A2}
    masks["local window 1 (causal)"] = sparse.local(T, 1)
    return masks


def _cells(ax, mask, **style):
    for i, j in np.argwhere(mask):
        ax.add_patch(Rectangle((j, i), 1, 1, **style))


def _frame(ax, T, title=""):
    ax.set(xlim=(0, T), ylim=(T, 0), xticks=range(T + 1), yticks=range(T + 1))
    ax.tick_params(labelbottom=False, labelleft=False, length=0)
    ax.set_title(title, size=10)
    ax.set_aspect("equal")
    for side in ("top", "right", "bottom", "left"):
        ax.spines[side].set_visible(True)


def draw_masks(masks, columns=4):
    """Small pictures of block masks, name -> mask: rows are Q blocks, columns K/V blocks."""
    lines = -(-len(masks) // columns)
    fig, axes = new_figure(1.9 * columns, 2.2 * lines, nrows=lines, ncols=columns, squeeze=False)
    for ax in axes.flat[len(masks) :]:
        ax.set_visible(False)
    for ax, (name, mask) in zip(axes.flat, masks.items(), strict=False):
        _cells(ax, mask, facecolor=COLOURS["flash"], edgecolor="white", lw=0.6)
        _frame(ax, len(mask), f"{name}\n{int(mask.sum())} of {mask.size}")
    return fig


def first_reached(layers):
    """For each cell the layer after which row i knows of column j: 1, 2, ..., or 0 for never.

    layers: boolean (T, T) masks, the first one applied first.
    """
    knows = np.eye(len(layers[0]), dtype=bool)
    first = np.zeros(knows.shape, int)
    for n, layer in enumerate(layers, 1):
        knows = layer.astype(int) @ knows.astype(int) > 0
        first[knows & (first == 0)] = n
    return first


def draw_reach(stacks):
    """Which blocks each block knows of, and since which layer. stacks: title -> list of masks."""
    fig, axes = new_figure(2.6 * len(stacks), 2.9, ncols=len(stacks), squeeze=False)
    for ax, (title, layers) in zip(axes.flat, stacks.items(), strict=True):
        first = first_reached(layers)
        for (i, j), n in np.ndenumerate(first):
            if n:
                grey = 0.6 + 0.33 * n / len(layers)
                ax.add_patch(
                    Rectangle((j, i), 1, 1, facecolor=(grey, grey, 1.0), edgecolor="white", lw=0.6)
                )
                ax.text(j + 0.5, i + 0.5, str(n), ha="center", va="center", size=8)
        _frame(ax, len(first), title)
    return fig


def draw_tokens_and_tiles(mask, sizes):
    """A token mask, and the tiles of each size in which it lets somebody see something.

    A visible pair is drawn as large as a pixel, which may be more than a pair.
    """
    N = len(mask)
    fig, axes = new_figure(3.2 * len(sizes), 3.7, ncols=len(sizes), squeeze=False)
    allowed, pool = sparse.causal(N), max(1, N // 200)  # a line of single pairs must be seen
    for ax, B in zip(axes.flat, sizes, strict=True):
        tiles = sparse.touched(mask, B, B)
        for i, j in np.argwhere(tiles):
            ax.add_patch(
                Rectangle(
                    (j * B, i * B), B, B, facecolor=COLOURS["sram"], edgecolor="white", lw=0.5
                )
            )
        shown = np.where(sparse.touched(mask, pool, pool), 0.0, np.nan)
        ax.imshow(
            shown, cmap="gray", vmin=0, vmax=1, extent=(0, N, N, 0), zorder=3,
            interpolation="nearest",
        )  # fmt: skip
        share = tiles.sum() / sparse.touched(allowed, B, B).sum()
        ax.set(xlim=(0, N), ylim=(N, 0), xlabel="key", ylabel="query")
        ax.set_title(f"tiles of {B}: {100 * share:.0f}%", size=10)
        ax.set_xticks(range(0, N + 1, N // 4))
        ax.set_yticks(range(0, N + 1, N // 4))
        ax.set_aspect("equal")
        ax.grid(False)
    handles = [
        Patch(facecolor="black", label="visible pairs"),
        Patch(facecolor=COLOURS["sram"], label="tiles that are computed"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return fig


def draw_growth(lengths, series, floor):
    """Elements moved per token, against N. series: label -> values; floor: what a mask leaves."""
    fig, ax = new_figure(7.2, 4.0)
    styles = zip(("standard", "hbm", "q_outer", "flash"), ("s", "D", "^", "o"), strict=True)
    for (colour, marker), (label, values) in zip(styles, series.items(), strict=False):
        ax.plot(lengths, values, color=COLOURS[colour], marker=marker, label=label)
    ax.axhline(floor, color=COLOURS["limit"], ls="--", lw=1.2)
    ax.text(lengths[-1], floor * 0.92, "K and V alone: 2d", va="top", ha="right", size=9)
    ax.set(xscale="log", yscale="log", xlabel="N", ylabel="elements moved per token")
    ax.set_ylim(floor * 0.6, None)
    ax.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    ax.minorticks_off()
    ax.legend(frameon=False)
    return fig
