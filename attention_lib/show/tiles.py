"""The score matrix cut into tiles: the grid, the order of the visits, the two causal corners.

What is drawn is asked of the loop's own helpers (`blocks`, `nothing_visible` in
attention_lib.tiled), so that a picture cannot disagree with the code. The loop is FlashAttention's
Algorithm 1 (arXiv 2205.14135), or the swapped order of FlashAttention-2 (arXiv 2307.08691).
"""

import inspect
import math
import textwrap

import numpy as np
from matplotlib.patches import Patch, Rectangle

from attention_lib.reference import causal_offset
from attention_lib.show.style import COLOURS, new_figure
from attention_lib.tiled import blocks, nothing_visible

ORDERS = ("kv-outer", "q-outer")


def tile_visits(Nq, Nk, Br, Bc, causal=False, order="kv-outer", align="lower-right"):
    """The tiles (i, j) that the loop computes, in the order in which it does."""
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; accepted: {', '.join(map(repr, ORDERS))}")
    offset = causal_offset(Nq, Nk, align) if causal else None
    Q_blocks, K_blocks = list(enumerate(blocks(Nq, Br))), list(enumerate(blocks(Nk, Bc)))
    if order == "kv-outer":
        grid = [(i, j, rows, cols) for j, cols in K_blocks for i, rows in Q_blocks]
    else:
        grid = [(i, j, rows, cols) for i, rows in Q_blocks for j, cols in K_blocks]
    return [(i, j) for i, j, rows, cols in grid if not nothing_visible(rows, cols, offset)]


def tile_grid(
    Nq,
    Nk,
    Br,
    Bc,
    causal=False,
    order="kv-outer",
    current=None,
    *,
    align="lower-right",
    arrows=True,
    ax=None,
):
    """Draw the score matrix in tiles, to scale: Q blocks down, K/V blocks across.

    current: the tile (i, j) being computed, with its blocks, or None. order: "kv-outer" or
    "q-outer", shown by one numbered arrow for each outer step (arrows=False leaves them out).
    causal: tiles that the loop skips are hatched, tiles that it computes whole and then masks in
    part are dotted. ax: axes to draw on; without it a new figure is made. Returns the figure.
    """
    rows, cols = blocks(Nq, Br), blocks(Nk, Bc)
    visits = tile_visits(Nq, Nk, Br, Bc, causal, order, align)
    computed = set(visits)
    offset = causal_offset(Nq, Nk, align) if causal else None
    if ax is None:
        height = min(7.0, max(3.2, 5.6 * Nq / Nk + 1.0))
        _, ax = new_figure(6.4, height)
    size = max(Nq, Nk)
    for i, r in enumerate(rows):
        for j, c in enumerate(cols):
            kind = _kind((i, j), r, c, computed, offset, current)
            _tile(ax, r, c, kind)
            if len(rows) * len(cols) <= 36:
                style = {"weight": "bold"} if kind == "current" else {}
                x, y = c.start + 0.03 * size, r.start + 0.03 * size
                ax.text(x, y, f"S({i},{j})", ha="left", va="top", fontsize=9, zorder=5, **style)
    _bars(ax, rows, cols, size, current)
    if arrows:
        _arrows(ax, rows, cols, visits, order, size)
    if causal:  # the last visible key of each query
        x = [min(max(0, q + offset + 1), Nk) for q in range(Nq) for _ in (0, 1)]
        ax.plot(
            x, [q + step for q in range(Nq) for step in (0, 1)], color="black", lw=1.2, zorder=6
        )
    ax.set(xlim=(-0.16 * size, Nk + 0.02 * size), ylim=(Nq + 0.02 * size, -0.16 * size))
    ax.set_aspect("equal")
    ax.axis("off")
    _legend(ax, causal, current, order, arrows)
    return ax.figure


def _kind(place, r, c, computed, offset, current):
    if place not in computed:
        return "skipped"
    if place == current:
        return "current"
    if offset is not None and c.stop - 1 > r.start + offset:
        return "masked"
    return "computed"


LOOKS = {
    "computed": {"facecolor": "#EEF3F7", "hatch": ""},
    "masked": {"facecolor": "#EEF3F7", "hatch": "...."},
    "skipped": {"facecolor": "white", "hatch": "////"},
    "current": {"facecolor": COLOURS["sram"], "hatch": ""},
}


def _tile(ax, r, c, kind):
    look = LOOKS[kind]
    xy, w, h = (c.start, r.start), c.stop - c.start, r.stop - r.start
    ax.add_patch(Rectangle(xy, w, h, edgecolor="#B5BEC6", lw=0, **look))
    edge, width, top = ("black", 2.2, 4) if kind == "current" else ("#5B6770", 0.8, 3)
    ax.add_patch(Rectangle(xy, w, h, fill=False, edgecolor=edge, lw=width, zorder=top))


def _bars(ax, rows, cols, size, current):
    """Q down the left side, K and V along the top: in HBM, but for the blocks on chip."""
    near, thick = 0.015 * size, 0.045 * size
    for axis, parts, name in ((0, rows, "i"), (1, cols, "j")):
        every = max(1, math.ceil(len(parts) / 16))
        for k, part in enumerate(parts):
            here = current is not None and current[axis] == k
            start, length = part.start, part.stop - part.start
            xy, w, h = (-near - thick, start), thick, length
            if axis == 1:
                xy, w, h = (start, -near - thick), length, thick
            face = COLOURS["sram"] if here else COLOURS["hbm"]
            ax.add_patch(
                Rectangle(xy, w, h, facecolor=face, edgecolor="black", lw=2 if here else 0.6)
            )
            crowded = length < 0.03 * size and 0 < k < len(parts) - 1
            if (k % every or crowded) and not here:
                continue
            middle, text = start + length / 2, f"{name}={k}" if k == 0 or here else str(k)
            at = (-near - 1.2 * thick, middle) if axis == 0 else (middle, -near - 1.2 * thick)
            ha, va = ("right", "center") if axis == 0 else ("center", "bottom")
            ax.text(*at, text, ha=ha, va=va, fontsize=9, weight="bold" if here else "normal")
    ax.text(-0.02 * size, -0.13 * size, "Q", ha="right", va="center", fontsize=11, weight="bold")
    middle = (cols[0].start + cols[-1].stop) / 2
    ax.text(middle, -0.14 * size, "K, V", ha="center", va="center", fontsize=11, weight="bold")


def _arrows(ax, rows, cols, visits, order, size):
    outer, colour = (1, COLOURS["flash"]) if order == "kv-outer" else (0, COLOURS["q_outer"])
    steps = sorted({place[outer] for place in visits})
    every = max(1, math.ceil(len(steps) / 10))
    for number, step in enumerate(steps):
        inner = [place[1 - outer] for place in visits if place[outer] == step]
        line, along = (cols[step], rows) if outer == 1 else (rows[step], cols)
        across = line.start + 0.75 * (line.stop - line.start)  # beside the tiles' names
        start, stop = along[inner[0]].start, along[inner[-1]].stop
        a, b = start + 0.05 * size, stop - 0.015 * size
        if number % every:
            continue
        short = b <= a  # one small tile: a number, no arrow
        at = [(across, a), (across, b)] if outer == 1 else [(a, across), (b, across)]
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
        if short:  # beyond the block's name: a number on the tile would hide it
            at[0] = (across, -0.125 * size) if outer == 1 else (-0.125 * size, across)
        else:
            ax.annotate("", xy=at[1], xytext=at[0], arrowprops=arrow, zorder=7)
        circle = {"boxstyle": "circle,pad=0.18", "facecolor": "white", "edgecolor": colour}
        ax.text(
            *at[0], str(number + 1), ha="center", va="center", fontsize=8, bbox=circle, zorder=8
        )


def _legend(ax, causal, current, order, arrows):
    names = {"computed": "computed", "masked": "computed whole, then masked", "skipped": "skipped"}
    kinds = ["computed", "masked", "skipped"] if causal else ["computed"]
    if current is not None and not causal:
        names["computed"] = "not on chip: not yet made, or dropped"
    handles = [
        Patch(edgecolor="#5B6770", lw=0.8, label=names[kind], **LOOKS[kind]) for kind in kinds
    ]
    if current is not None:
        label = f"on chip now: S({current[0]},{current[1]}) and its blocks"
        handles.append(Patch(edgecolor="black", lw=2, label=label, **LOOKS["current"]))
    handles.append(Patch(facecolor=COLOURS["hbm"], edgecolor="black", lw=0.6, label="in HBM"))
    if arrows:
        first = "K/V" if order == "kv-outer" else "Q"
        colour = COLOURS["flash" if order == "kv-outer" else "q_outer"]
        label = f"visits, {first} block outside"
        handles.append(ax.plot([], [], color=colour, marker=">", label=label)[0])
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=2,
        fontsize=9,
        frameon=False,
    )


def causal_corners(shapes=((2, 5), (5, 2))):
    """Draw what each query may see under the two causal alignments, for each shape (Nq, Nk)."""
    fig, axes = new_figure(6.4, 4.6, nrows=2, ncols=len(shapes), squeeze=False)
    for line, align in zip(axes, ("lower-right", "upper-left"), strict=True):
        for ax, (Nq, Nk) in zip(line, shapes, strict=True):
            offset = causal_offset(Nq, Nk, align)
            for i in range(Nq):
                for j in range(Nk):
                    seen = j <= i + offset
                    look = LOOKS["current"] if seen else LOOKS["skipped"]
                    ax.add_patch(Rectangle((j, i), 1, 1, edgecolor="#5B6770", lw=0.8, **look))
                    if seen:
                        ax.plot(j + 0.5, i + 0.5, "o", color="black", ms=5)
                if i + offset < 0:
                    ax.text(Nk + 0.15, i + 0.5, "sees no key", va="center", fontsize=9)
            ax.set(xlim=(-0.1, max(6, Nk) + 0.1), ylim=(5.1, -0.1))
            ax.set_title(f"{align}: {Nq} queries, {Nk} keys", fontsize=10, loc="left")
            ax.set_aspect("equal")
            ax.axis("off")
    return fig


def hand_example():
    """Q, K, V of shape (4, 2) whose scores are whole multiples of ln 2.

    So exp(score - m) is a power of two, and every m, l and O can be found without a calculator.
    """
    unit = math.log(2) * math.sqrt(2)  # sqrt(2) meets the 1/sqrt(d) of the scores
    Q = unit * np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]])
    K = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    V = np.array([[9.0, 0.0], [0.0, 9.0], [9.0, 9.0], [0.0, 0.0]])
    return Q, K, V


def show_state(tile, rows, O, l, m):
    """Print the rows of a tile (i, j): m in units of ln 2, l, and O."""
    for r in range(rows.start, rows.stop):
        O_text = ", ".join(f"{x:.4g}" for x in O[r])
        top = f"{m[r] / math.log(2):.0f} ln 2"
        print(f"tile {tile}  row {r}: m = {top}   l = {l[r]:<8.6g} O = ({O_text})")


def source_part(function, first, last=None):
    """Print a function's source from the line with `first` to the line with `last` (or the end).

    For a function too long to read in one go; `show_source` prints a whole one.
    Raises ValueError if a marker is not there.
    """
    lines = inspect.getsource(inspect.unwrap(function)).rstrip().splitlines()

    def find(marker, start):
        for k in range(start, len(lines)):
            if marker in lines[k]:
                return k
        raise ValueError(f"{function.__name__} has no line with {marker!r}")

    start = find(first, 0)
    stop = len(lines) - 1 if last is None else find(last, start)
    print(textwrap.dedent("\n".join(lines[start : stop + 1])))
