"""Pictures of notebook 12: splits, pages, windows, rings."""

import numpy as np
from matplotlib.patches import Rectangle

from attention_lib.decode import cut, visible_keys
from attention_lib.hardware import GPUS, ridge
from attention_lib.show.style import COLOURS, MARKERS, new_figure

SEQUENCE_HATCHES = ("", "//", "..", "xx")


def draw_intensity(rows, series):
    """FLOPs per byte against the queries in a tile, with the ridges of two GPUs.

    rows: the numbers of queries. series: label -> FLOPs per byte for each of them.
    """
    fig, ax = new_figure(7.2, 3.8)
    styles = zip(("flash", "standard"), series.items(), strict=False)
    for key, (label, values) in styles:
        ax.plot(rows, values, marker=MARKERS[key], color=COLOURS[key], label=label)
    for name, line in (("A100-80", "--"), ("H200", ":")):
        y = ridge(name)
        ax.axhline(y, color=COLOURS["limit"], ls=line, lw=1.2)
        va = "top" if y < 180 else "bottom"
        ax.text(rows[0], y, f"ridge of {GPUS[name].name}: {y:.0f}", va=va, size=9)
    ax.set(xscale="log", yscale="log", xlabel="queries, all against the same keys")
    ax.set(ylabel="FLOPs per byte (fp16)")
    ax.set_xticks(rows, [f"{n:,}" for n in rows])
    ax.minorticks_off()
    ax.legend(frameon=False, loc="lower right")
    return fig


def draw_splits(splits, Bc=1):
    """One worker for the whole cache, and `splits` workers with the merge after them: steps."""
    tiles = 16
    fig, axes = new_figure(7.4, 3.4, ncols=2, width_ratios=[tiles + 1, tiles // splits + 4])
    whole = [slice(0, tiles)]
    for ax, parts, title in zip(
        axes, (whole, cut(tiles, splits)), ("one block", f"{splits} splits"), strict=True
    ):
        for row, part in enumerate(parts):
            for step, tile in enumerate(range(part.start, part.stop)):
                ax.add_patch(
                    Rectangle((step, row), 1, 0.8, facecolor=COLOURS["sram"], edgecolor="black")
                )
                ax.text(step + 0.5, row + 0.4, str(tile), ha="center", va="center", size=9)
        end = max(p.stop - p.start for p in parts)
        if len(parts) > 1:
            ax.add_patch(
                Rectangle((end + 0.5, 0), 1.4, len(parts) - 0.2, facecolor="white",
                          edgecolor=COLOURS["limit"], hatch="//")
            )  # fmt: skip
            ax.text(end + 2.1, (len(parts) - 0.2) / 2, "merge", rotation=90, va="center")
            end += 3
        ax.set(xlim=(0, end + 0.2), ylim=(splits, -0.3), title=title, xlabel="step")
        ax.set_yticks([r + 0.4 for r in range(len(parts))], [f"SM {r}" for r in range(len(parts))])
        ax.grid(False)
    return fig


def draw_pages(cache):
    """The pool of pages of a PagedKVCache without heads: who owns each slot, and what is empty."""
    owner = {page: (seq, i) for seq, table in cache.table.items() for i, page in enumerate(table)}
    fig, ax = new_figure(7.4, 2.6)
    palette = [COLOURS[c] for c in ("sram", "hbm", "q_outer", "quiet")]
    order = list(cache.table)
    for page in range(len(cache.K)):
        seq, i = owner.get(page, (None, 0))
        used = 0 if seq is None else min(cache.page_size, cache.length[seq] - i * cache.page_size)
        for slot in range(cache.page_size):
            full, k = slot < used, order.index(seq) if seq is not None else 0
            ax.add_patch(
                Rectangle(
                    (page * 1.3, slot), 1.1, 0.95, edgecolor="black", lw=0.8,
                    facecolor=palette[k % 4] if full else "white",
                    hatch=SEQUENCE_HATCHES[k % 4] if full else "",
                )
            )  # fmt: skip
            if full:
                ax.text(page * 1.3 + 0.55, slot + 0.5, seq, ha="center", va="center", size=9,
                        bbox=dict(facecolor="white", edgecolor="none", pad=1))  # fmt: skip
        ax.text(page * 1.3 + 0.55, -0.35, str(page), ha="center", size=9)
    ax.set(xlim=(-0.1, len(cache.K) * 1.3), ylim=(cache.page_size + 0.2, -1.1))
    ax.set(xlabel="page number", yticks=[], xticks=[])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.grid(False)
    return fig


def draw_window(N, window, sinks):
    """Which keys each of N queries sees: the sinks, the window, and what is never loaded."""
    fig, ax = new_figure(4.6, 4.2)
    for q in range(N):
        first, last = visible_keys(q, q, N, window, sinks)
        for part, key, hatch in ((first, "hbm", "//"), (last, "sram", "")):
            for k in range(part.start, part.stop):
                ax.add_patch(Rectangle((k, q), 1, 1, facecolor=COLOURS[key], edgecolor="white",
                                       hatch=hatch))  # fmt: skip
    ax.plot((0, N), (0, N), color=COLOURS["limit"], lw=1)
    ax.text(sinks / 2, N * 0.62, "sinks", ha="center", rotation=90, va="center",
            bbox=dict(facecolor="white", edgecolor="none", pad=1.5))  # fmt: skip
    ax.text(N * 0.68, N * 0.78, "window", ha="center", va="center",
            bbox=dict(facecolor="white", edgecolor="none", pad=1.5))  # fmt: skip
    ax.set(xlim=(0, N), ylim=(N, 0), xlabel="key", ylabel="query")
    ax.set_aspect("equal")
    ax.grid(False)
    return fig


def draw_ring_work(works, devices):
    """Scores computed by each device in each step. works: title -> the work of a Links."""
    fig, axes = new_figure(7.4, 3.4, ncols=len(works))
    most = max(max(work.values()) for work in works.values())
    for ax, (title, work) in zip(np.atleast_1d(axes), works.items(), strict=True):
        for (step, device), scores in work.items():
            grey = 1 - 0.45 * scores / most
            ax.add_patch(Rectangle((step, device), 0.94, 0.94, facecolor=(grey, grey, 1.0),
                                   edgecolor="black", lw=0.6))  # fmt: skip
            text = str(scores) if scores else "waits"
            ax.text(step + 0.47, device + 0.47, text, ha="center", va="center", size=9)
        ax.set(xlim=(0, devices), ylim=(devices, -0.05), title=title, xlabel="step")
        ax.set_xticks([s + 0.47 for s in range(devices)], range(devices))
        ax.set_yticks([s + 0.47 for s in range(devices)], range(devices))
        ax.set_ylabel("device")
        ax.grid(False)
    return fig
