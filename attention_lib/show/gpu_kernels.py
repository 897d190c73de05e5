"""Pictures of notebooks 14 and 15: threads and blocks, who has which row, fragments, banks."""

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter

from attention_lib.gpu import fragments
from attention_lib.show.style import COLOURS, MARKERS, new_figure

PLAIN = dict(facecolor="white", edgecolor="none", pad=1.2)


def _box(ax, x, y, width, height, text="", fill="white", size=9.5, **style):
    style = dict(edgecolor="black", linewidth=1.1) | style
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, **style))
    label = dict(bbox=PLAIN) if style.get("hatch") and text else {}
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, **label)


def _arrow(ax, start, end, **style):
    style = dict(arrowstyle="-|>", mutation_scale=12, color="black", linewidth=1.3) | style
    ax.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))


# ---------------------------------------------------------------- notebook 14


def draw_launch():
    """A grid of blocks, the SMs that they are given to, and which memory belongs to whom."""
    fig, ax = new_figure(9.2, 4.3)
    ax.text(0, 5.55, "the launch: a grid of blocks", weight="bold")
    for k in range(6):
        x, y = (k % 3) * 1.25, 4.1 - (k // 3) * 1.3
        _box(ax, x, y, 1.1, 1.1, f"block {k}", COLOURS["sram"] if k in (0, 1) else "white")
    ax.text(1.8, 2.3, "the others wait until\nan SM has room", ha="center", va="top", fontsize=9)
    for k in range(2):
        x = 4.6 + 2.5 * k
        _box(ax, x, 2.1, 2.2, 3.2, "", "#f2f2f2")
        ax.text(x + 1.1, 5.4, f"SM {k}", ha="center", va="bottom", weight="bold")
        ax.text(x + 1.1, 5.05, f"block {k}: its threads", ha="center", va="center", fontsize=9)
        for n in range(12):
            cx, cy = x + 0.3 + (n % 6) * 0.32, 4.65 - (n // 6) * 0.6
            ax.plot(cx, cy, "o", color="black", markersize=4)
            ax.add_patch(Rectangle((cx - 0.09, cy - 0.38), 0.18, 0.18, facecolor="white",
                                   edgecolor="black", lw=0.8))  # fmt: skip
        ax.text(x + 1.1, 3.48, "dot: thread; square: its registers", ha="center", fontsize=8)
        _box(ax, x + 0.15, 2.25, 1.9, 1.0, "shared memory:\none for the block", COLOURS["sram"])
        _arrow(ax, (x + 1.1, 2.1), (x + 1.1, 1.35), arrowstyle="<|-|>")
    _box(ax, 4.6, 0.6, 4.7, 0.7, "HBM, through L2: one for all blocks", COLOURS["hbm"])
    _arrow(ax, (3.75, 4.6), (4.5, 4.6))
    ax.set(xlim=(-0.1, 9.5), ylim=(0.4, 6.0))
    ax.axis("off")
    return fig


def draw_barrier():
    """Four threads of unequal speed: with a barrier, and without one."""
    fig, axes = new_figure(9.2, 2.9, ncols=2)
    writes, reads = (1.0, 2.4, 1.6, 3.0), (1.2, 0.9, 1.4, 1.0)
    for ax, barrier in zip(axes, (True, False), strict=True):
        for k, (w, r) in enumerate(zip(writes, reads, strict=True)):
            begin = max(writes) + 0.15 if barrier else w
            ax.barh(-k, w, color=COLOURS["sram"], edgecolor="black", height=0.6)
            ax.text(w / 2, -k, "write", ha="center", va="center", fontsize=9)
            ax.barh(-k, r, left=begin, color="white", edgecolor="black", hatch="//", height=0.6)
            ax.text(begin + r / 2, -k, "read", ha="center", va="center", fontsize=9, bbox=PLAIN)
        if barrier:
            ax.axvline(max(writes) + 0.07, color="black", linewidth=2.5)
        else:
            _arrow(ax, (1.15, -0.25), (2.9, -2.75), color=COLOURS["standard"], linewidth=2)
            ax.text(2.75, -0.1, "thread 0 reads what\nthread 3 has yet to write",
                    fontsize=9, color=COLOURS["standard"], va="center")  # fmt: skip
        ax.set_title("with the barrier" if barrier else "without it", loc="left", fontsize=11)
        ax.set(xlim=(0, 5), xlabel="time", xticks=[], ylim=(-3.5, 0.6))
        ax.set_yticks([-k for k in range(4)], [f"thread {k}" for k in range(4)])
        ax.grid(False)
    return fig


def draw_rows(N=1000, threads=256, thread=5, Br=64):
    """Who computes which row of Q: rung 1, one block; and rung 2, a block for each Br rows."""
    fig, (left, right) = new_figure(9.6, 3.6, ncols=2, width_ratios=(1.5, 1))
    passes = -(-N // threads)
    for k in range(passes):
        n = min(threads, N - k * threads)
        _box(left, 0, -k, n, 0.8, "", COLOURS["sram"])
        left.text(n / 2, 0.4 - k, f"rows {k * threads} to {k * threads + n - 1}", ha="center",
                  va="center", fontsize=9.5)  # fmt: skip
        left.plot([thread + 0.5] * 2, [-k, 0.8 - k], color="black", linewidth=3)
        if n < threads:
            _box(left, n, -k, threads - n, 0.8, "", "white", hatch="xx")
    left.text(thread + 6, 0.95, f"thread {thread}", fontsize=9.5, va="bottom")
    left.set(xlim=(0, threads + 1), ylim=(0.9 - passes - 0.1, 1.35), xlabel="thread of the block")
    left.set_yticks([0.4 - k for k in range(passes)], [f"pass {k + 1}" for k in range(passes)])
    left.set_title("rung 1: one block has all rows of a head", loc="left", fontsize=11, pad=10)
    left.grid(False)
    blocks = -(-N // Br)
    for k in range(blocks):
        n = min(Br, N - k * Br)
        x, y = k % 4, -(k // 4)
        _box(right, x, y, 0.92, 0.8, f"block {k}\n{n} rows", COLOURS["q_outer"] + "55", size=8.5,
             hatch=".." if n < Br else "")  # fmt: skip
    right.set(xlim=(0, 4), ylim=(0.9 - -(-blocks // 4) - 0.1, 1.35))
    right.set_title(f"rung 2: {blocks} blocks, any order", loc="left", fontsize=11, pad=10)
    right.axis("off")
    return fig


def draw_idle(rows, sms=132):
    """TFLOP/s of rungs 1 and 2 against the number of blocks of rung 1. rows: of the bench."""
    fig, ax = new_figure(8.2, 3.8)
    for name, key, text in (
        ("algorithm_1", "flash", "algorithm_1: one block a head"),
        ("q_outer", "q_outer", "q_outer: one block for 64 rows"),
    ):
        mine = [r for r in rows if r["kernel"] == name and not r["causal"]]
        mine = [r for r in mine if r["dtype"] == "float16" and r["d"] == 64]
        blocks = [16_384 // r["N"] * 2048 // r["d"] for r in mine]
        ax.plot(blocks, [r["tflops"] for r in mine], color=COLOURS[key], marker=MARKERS[key])
        for b, r in zip(blocks, mine, strict=True):
            ax.annotate(f"{r['tflops']}", (b, r["tflops"]), xytext=(0, 7), ha="center",
                        textcoords="offset points", fontsize=9, bbox=PLAIN)  # fmt: skip
        ax.annotate(text, (blocks[1], mine[1]["tflops"]), xytext=(8, -14), color=COLOURS[key],
                    textcoords="offset points", fontsize=10)  # fmt: skip
    ax.axvline(sms, color=COLOURS["limit"], linestyle="--", linewidth=1.2, zorder=0)
    ax.text(sms * 1.03, 0.6, f"{sms} SMs", fontsize=9.5)
    ax.set(xscale="log", ylim=(0, 23), xlim=(24, 900), ylabel="TFLOP/s")
    ax.set_xticks([32, 128, 512], ["32\nN = 16,384", "128\nN = 4,096", "512\nN = 1,024"])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("heads in the launch (blocks of rung 1), log scale; 16,384 tokens each time")
    return fig


def draw_occupancy(points):
    """Speed against occupancy. points: name -> (occupancy, TFLOP/s)."""
    fig, ax = new_figure(7.6, 3.8)
    for k, (name, (share, speed)) in enumerate(points.items()):
        ax.plot(share, speed, "os^Dv"[k % 5], color=COLOURS["flash"], markersize=8)
        ax.annotate(f"{name}, {speed:g}", (share, speed), xytext=(8, 3),
                    textcoords="offset points", fontsize=9.5)  # fmt: skip
    ax.set(yscale="log", xlim=(0, 0.4), xlabel="occupancy: threads on an SM / 2048")
    ax.set(ylim=(1, 1000), ylabel="TFLOP/s, log scale")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
    return fig


# ---------------------------------------------------------------- notebook 15


def draw_fragments(lane=5):
    """A, B and C of one mma: which lane holds which element; one lane marked, its numbers too."""
    fig, ax = new_figure(10.2, 5.6)
    for which, (x0, y0) in {"A": (0, -9.5), "B": (17.5, 7.5), "C": (17.5, -9.5)}.items():
        rows, columns = fragments.SHAPES[which]
        places = fragments.places(which)
        for k in range(32):
            for n, (r, c) in enumerate(places[k]):
                mine = k == lane
                fill = COLOURS["hbm"] if mine else "#e8f3fb" if k // 4 % 2 else "white"
                x, y = x0 + c, y0 + rows - 1 - r
                ax.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, edgecolor="#888888", lw=0.5))
                text = f"{k}\n[{n}]" if mine else str(k)
                ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", linespacing=0.85,
                        fontsize=6 if mine else 7, weight="bold" if mine else "normal")  # fmt: skip
        ax.add_patch(Rectangle((x0, y0), columns, rows, fill=False, edgecolor="black", lw=1.4))
    ax.text(0, 7, "A: 16 x 16", weight="bold", va="bottom")
    ax.text(26, 23, "B: 16 x 8", weight="bold", va="top")
    ax.text(26, 5.9, "C: 16 x 8", weight="bold", va="top")
    note = f"In each square: the lane\nthat holds it. Orange: lane {lane},"
    note += "\nand [which] of its numbers."
    ax.text(0, 11, note, va="bottom", fontsize=10)
    ax.set(xlim=(-0.5, 31), ylim=(-9.8, 23.8), aspect="equal")
    ax.axis("off")
    return fig


def draw_banks(d=64, matrix=1):
    """Where the 16-byte pieces of eight rows lie in the banks: as they come, and swizzled."""
    fig, axes = new_figure(9.6, 3.9, ncols=2)
    titles = ("plain", "piece number XOR row")
    for ax, layout, title in zip(axes, (fragments.plain, fragments.swizzled), titles, strict=True):
        for r in range(8):
            for c in range(0, d, 8):
                line, group = divmod(layout(r, c, d) // 16, 8)
                mine = c == 8 * matrix
                ax.add_patch(Rectangle((group, line), 1, 1, edgecolor="black", lw=0.8,
                                       facecolor=COLOURS["hbm"] if mine else "white",
                                       hatch="//" if mine else ""))  # fmt: skip
                ax.text(group + 0.5, line + 0.5, f"{r}.{c // 8}", ha="center", va="center",
                        fontsize=9, bbox=PLAIN if mine else None)  # fmt: skip
        n = fragments.passes([layout(r, 8 * matrix, d) for r in range(8)])
        ax.set_title(f"{title}: {n} pass{'es' if n > 1 else ''}", loc="left", fontsize=11)
        ax.set_xticks([k + 0.5 for k in range(8)], [f"{4 * k}-{4 * k + 3}" for k in range(8)],
                      fontsize=8)  # fmt: skip
        ax.set(xlim=(0, 8), ylim=(-(-8 * d // 64), 0), xlabel="banks", yticks=[])
        ax.set_ylabel("128 bytes of shared memory, line by line")
        ax.grid(False)
    return fig


def finish_times(load, compute, tiles, buffers):
    """[(load begins, load ends, compute begins, compute ends)] of each tile of a loop.

    A load waits for the load before it and for a free buffer; a computation for its load.
    """
    times = []
    for k in range(tiles):
        begin = times[-1][1] if times else 0
        if k >= buffers:
            begin = max(begin, times[k - buffers][3])
        there = begin + load
        start = max(there, times[-1][3]) if times else there
        times.append((begin, there, start, start + compute))
    return times


def draw_pipeline(load=2, compute=3, tiles=4):
    """Loads and computations over time, with one buffer and with two."""
    fig, axes = new_figure(9.4, 3.6, nrows=2, sharex=True)
    for ax, buffers in zip(axes, (1, 2), strict=True):
        times = finish_times(load, compute, tiles, buffers)
        for k, (a, b, c, e) in enumerate(times):
            ax.barh(1, b - a, left=a, color=COLOURS["hbm"], edgecolor="black", height=0.7)
            ax.barh(0, e - c, left=c, color=COLOURS["sram"], edgecolor="black", hatch="..",
                    height=0.7)  # fmt: skip
            for y, left, right in ((1, a, b), (0, c, e)):
                ax.text((left + right) / 2, y, str(k), ha="center", va="center", bbox=PLAIN)
        ax.set_yticks([1, 0], ["load", "compute"])
        word = "one buffer" if buffers == 1 else "two buffers"
        ax.set_title(f"{word}: done at {times[-1][3]}", loc="left", fontsize=11)
        ax.grid(axis="y", visible=False)
    end = tiles * (load + compute)
    axes[1].set(xlabel="time (units of a model)", xlim=(0, end + 0.3))
    axes[1].set_xticks(range(0, end + 1, 2))
    return fig


def causal_tiles(N, Br, Bc):
    """Kind of each tile (Q block, K/V block): 0 skipped, 1 on the diagonal, 2 whole."""
    first = np.arange(0, N, Br)[:, None]
    begin = np.arange(0, N, Bc)[None]
    last = np.minimum(first + Br, N) - 1
    end = np.minimum(begin + Bc, N) - 1
    return np.where(begin > last, 0, np.where(end > first, 1, 2))


def draw_causal(N=1024, Br=128, Bc=64):
    """The tiles of a causal row of blocks: skipped, masked, computed whole."""
    kinds = causal_tiles(N, Br, Bc)
    fig, ax = new_figure(7.6, 3.9)
    styles = (("white", ""), (COLOURS["hbm"], "//"), (COLOURS["sram"], ""))
    for (i, j), kind in np.ndenumerate(kinds):
        fill, hatch = styles[kind]
        ax.add_patch(Rectangle((j * Bc, i * Br), Bc, Br, facecolor=fill, hatch=hatch,
                               edgecolor="black", lw=0.8))  # fmt: skip
    for k, name in enumerate(("skipped", "computed, then masked", "computed, no mask")):
        ax.bar(0, 0, color=styles[k][0], hatch=styles[k][1], edgecolor="black",
               label=f"{name}: {(kinds == k).sum()}")  # fmt: skip
    ax.set(xlim=(0, N), ylim=(N, 0), xlabel="key", ylabel="query", aspect="equal")
    ax.grid(False)
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return fig


def draw_shared(rows):
    """GB through shared memory: rows of (label, predicted fragment reads, recorded)."""
    fig, ax = new_figure(8.2, 2.9)
    for k, (_, predicted, recorded) in enumerate(rows):
        names = ("fragments, predicted", "recorded") if k == 0 else (None, None)
        ax.barh(-k + 0.18, predicted / 1e9, height=0.34, color="white", edgecolor="black",
                hatch="//", label=names[0])  # fmt: skip
        ax.barh(-k - 0.18, recorded / 1e9, height=0.34, color=COLOURS["sram"],
                edgecolor="black", label=names[1])  # fmt: skip
        ax.text(
            recorded / 1e9, -k, f"  {predicted / 1e9:.0f} and {recorded / 1e9:.0f}", va="center"
        )
    ax.set_yticks([-k for k in range(len(rows))], [label for label, _, _ in rows])
    ax.set(xlabel="GB of passes through shared memory", xlim=(0, 1.2 * rows[0][2] / 1e9))
    ax.grid(axis="y", visible=False)
    ax.legend(frameon=False, loc="lower right")
    return fig
