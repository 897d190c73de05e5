"""Drawings of where the data is and what limits the time: data flow, memories, roofline.

Each function returns a matplotlib figure; show it with `figure(fig, alt=...)`.

    dataflow_figure            three kernels and their trips through HBM, beside one fused kernel
    memory_hierarchy_figure    the memories of a GPU, to scale (a log scale), from hardware.GPUS
    roofline_figure            roofs of GPUS and the points that you give it
                               (Williams, Waterman and Patterson, CACM 52(4), 2009)
"""

from itertools import cycle
from typing import NamedTuple

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from attention_lib.hardware import GPU, GiB, KiB, MiB, find_gpu, peak, ridge, roofline
from attention_lib.show.style import COLOURS, MARKERS, new_figure

# 65,536 registers of 4 bytes in every SM. NVIDIA, Ampere Tuning Guide, section 1.4.1.1, and the
# same in the tuning guides of later architectures.
REGISTERS_PER_SM = 256 * KiB


# ---------------------------------------------------------------- data flow


def _box(ax, x, y, width, height, text="", colour="white", **style):
    """A labelled rectangle with its lower left corner at (x, y)."""
    style = {"edgecolor": "black", "linewidth": 1.2, "zorder": 2} | style
    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, **style))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", zorder=3, fontsize=10)


def _arrow(ax, start, end, text, heavy=False):
    """An arrow with its label above the middle; heavy ones carry an N x N matrix."""
    colour = COLOURS["standard"] if heavy else "black"
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=16 if heavy else 11, zorder=2,
            color=colour, linewidth=3 if heavy else 1.3, shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip
    rise = abs((end[1] - start[1]) / (end[0] - start[0]))  # a steep arrow pushes its label up
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12 + 0.6 * rise
    weight = "bold" if heavy else "normal"
    ax.text(*middle, text, ha="center", va="bottom", fontsize=9.5, color=colour, weight=weight)


def _panel(ax, title):
    """Two regions, HBM on the left and the chip on the right."""
    ax.set(xlim=(0, 10), ylim=(-0.2, 12.2), xticks=[], yticks=[])
    ax.axis("off")
    ax.set_title(title, fontsize=11.5, weight="bold", loc="left")
    for x, name, colour in ((0, "HBM", "hbm"), (6.3, "on chip", "sram")):
        ax.add_patch(Rectangle((x, -0.1), 3.7, 11.5, color=COLOURS[colour], alpha=0.25, lw=0))
        ax.text(x + 1.85, 11.5, name, ha="center", va="bottom", fontsize=10.5)


def dataflow_figure():
    """Standard attention as three kernels, and FlashAttention (K/V outside) as one.

    Squares are N x N, slim bars are N x d; heavy arrows carry an N x N matrix.
    """
    fig, (left, right) = new_figure(9.6, 5.4, ncols=2)

    _panel(left, "Standard: three kernels")
    hbm, chip = COLOURS["hbm"], COLOURS["sram"]
    for name, x, y in (("Q", 0.5, 9.9), ("K", 1.5, 9.9), ("V", 0.6, 1.6), ("O", 2.3, 0.1)):
        _box(left, x, y, 0.7, 1.3, name, hbm)
    _box(left, 0.8, 6.9, 2.0, 2.0, "S\nN x N", hbm)
    _box(left, 0.8, 3.6, 2.0, 2.0, "P\nN x N", hbm)
    for y, text in ((9.2, "1: S = Q Kᵀ"), (5.4, "2: P = softmax(S)"), (1.0, "3: O = P V")):
        _box(left, 6.6, y, 3.1, 1.5, text, chip)
    _arrow(left, (2.3, 10.4), (6.5, 10.4), "read Q, K")
    _arrow(left, (6.5, 9.4), (2.9, 8.4), "write S", heavy=True)
    _arrow(left, (2.9, 7.4), (6.5, 6.5), "read S", heavy=True)
    _arrow(left, (6.5, 5.8), (2.9, 5.1), "write P", heavy=True)
    _arrow(left, (2.9, 4.1), (6.5, 2.3), "read P", heavy=True)
    _arrow(left, (1.4, 2.1), (6.5, 1.8), "read V")
    _arrow(left, (6.5, 1.2), (3.1, 0.6), "write O")

    _panel(right, "Fused: one kernel")
    for name, x, y in (("K", 0.7, 8.7), ("V", 2.1, 8.7), ("Q", 0.7, 5.2), ("O", 2.1, 5.2)):
        _box(right, x, y, 0.7, 1.9, name, hbm)
    right.text(1.75, 5.0, "and m, l:\n2 numbers a row", ha="center", va="top", fontsize=9)
    for name, x in (("S", 0.35), ("P", 1.95)):
        _box(right, x, 1.6, 1.4, 1.4, name, "none", linestyle=":", edgecolor="gray")
        right.plot([x, x + 1.4], [1.6, 3.0], ":", color="gray", linewidth=1.2)
    right.text(1.85, 1.4, "never made in HBM", ha="center", va="top", fontsize=9.5)
    _box(right, 6.6, 0.6, 3.1, 10.2, "", "white")
    for name, x, y in (("K_j", 6.9, 8.9), ("V_j", 8.3, 8.9), ("Q_i", 6.9, 6.4), ("O_i", 8.3, 6.4)):
        _box(right, x, y, 1.1, 1.1, f"${name}$", chip)
    _box(right, 7.35, 3.4, 1.6, 1.6, "$S_{ij}$, $P_{ij}$", chip)
    note = "one tile, used once,\nthen overwritten"
    right.text(8.15, 3.2, note, ha="center", va="top", fontsize=9)
    _arrow(right, (3.0, 9.5), (6.5, 9.5), "read K, V: once")
    _arrow(right, (3.0, 7.3), (6.5, 7.3), "read Q, O, m, l")
    _arrow(right, (6.5, 5.6), (3.0, 5.6), "write O, m, l")
    right.text(4.95, 6.75, "for every j", ha="center", va="center", fontsize=9.5, style="italic")
    return fig


# ---------------------------------------------------------------- memories


def size_text(size):
    """A number of bytes in KiB, MiB or GiB, as people say it."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if size >= unit:
            return f"{size / unit:,.4g} {name}"
    return f"{size:,.0f} bytes"


def memory_levels(gpu="A100-80"):
    """The memories of a GPU, nearest to the arithmetic first: (name, bytes, how it is made up)."""
    gpu = find_gpu(gpu)

    def of_all(each):
        return gpu.sms * each, f"{gpu.sms} x {size_text(each)}"

    return [
        ("registers", *of_all(REGISTERS_PER_SM)),
        ("SRAM (shared memory, L1)", *of_all(gpu.l1_per_sm)),
        ("L2 cache", gpu.l2, "one for all SMs"),
        ("HBM", gpu.memory, "off the chip"),
    ]


def memory_hierarchy_figure(gpu="A100-80", *, sram_bandwidth=None, marks=None):
    """Each memory of a GPU as a bar as long as the memory is large (log scale).

    sram_bandwidth: bytes/s to write beside SRAM, if you have a figure with a source.
    marks: name -> bytes, drawn as vertical lines across the bars.
    """
    gpu = find_gpu(gpu)
    speeds = {"HBM": gpu.bandwidth, "SRAM (shared memory, L1)": sram_bandwidth}
    levels = memory_levels(gpu)
    beside = max(64 * MiB, *(1.3 * size for _, size, _ in levels if size < GiB))
    fig, ax = new_figure(8.4, 3.7)
    left = MiB
    for row, (name, size, parts) in enumerate(levels):
        colour, hatch = ("hbm", "") if name == "HBM" else ("sram", "")
        if name == "L2 cache":
            colour, hatch = "quiet", ".."
        ax.barh(
            -row, size - left, left=left, height=0.62, color=COLOURS[colour], hatch=hatch,
            edgecolor="black", alpha=0.9,
        )  # fmt: skip
        speed = f", {speeds[name] / 1e12:.3g} TB/s" if speeds.get(name) else ""
        inside = size > GiB
        ax.text(
            size / 1.3 if inside else beside, -row, f"{size_text(size)}{speed}\n{parts}",
            va="center", fontsize=10, ha="right" if inside else "left", zorder=5,
            bbox={"facecolor": "none" if inside else "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    for number, (name, size) in enumerate((marks or {}).items()):
        line = {"color": COLOURS["standard"], "linestyle": ("--", ":", "-.")[number % 3]}
        # a line ends at its label, the largest lowest, so that none runs through another's label
        y = 0.7 + 0.4 * sum(other > size for other in marks.values())
        ax.plot([size] * 2, [0.5 - len(levels), y + 0.18], zorder=3, **line)
        ax.text(
            size * 1.1, y, name, color=COLOURS["standard"], fontsize=10,
            va="center", zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    ax.set(
        xscale="log", xlim=(left, 2e12), ylim=(0.5 - len(levels), 0.5 + 0.4 * len(marks or {})),
        yticks=[-row for row in range(len(levels))], yticklabels=[name for name, _, _ in levels],
        xticks=[MiB, 16 * MiB, 256 * MiB, 4 * GiB, 64 * GiB, 1024 * GiB],
    )  # fmt: skip
    ax.set_xticks([], minor=True)
    ax.set_xticklabels(["1 MiB", "16 MiB", "256 MiB", "4 GiB", "64 GiB", "1 TiB"])
    ax.set_xlabel(f"capacity of {gpu.name}, log scale")
    ax.grid(axis="y", visible=False)
    return fig


# ---------------------------------------------------------------- roofline


class Point(NamedTuple):
    """Work on a roofline figure. Without flops it stands where it may at most be: on every roof."""

    label: str
    intensity: float  # FLOP per byte
    kind: str = "standard"  # a key of MARKERS: "standard", "flash" or "q_outer"
    flops: float | None = None  # FLOP/s, if it was measured


ROOFS = (
    {"color": "#000000", "linestyle": "-", "linewidth": 2.2},
    {"color": "#000000", "linestyle": (0, (1.2, 1.2)), "linewidth": 1.8},
    {"color": "#777777", "linestyle": (0, (6, 2)), "linewidth": 2.2},
    {"color": "#777777", "linestyle": (0, (6, 2, 1.2, 2)), "linewidth": 2.2},
    {"color": "#aaaaaa", "linestyle": "-", "linewidth": 2.2},
    {"color": "#000000", "linestyle": (0, (8, 2, 1.2, 2, 1.2, 2)), "linewidth": 1.8},
    {"color": "#aaaaaa", "linestyle": (0, (1.2, 1.2)), "linewidth": 2.2},
)


def roofline_figure(gpus, points=()):
    """Roofs of GPUs, and work under them: FLOP/s that can be reached against FLOP per byte.

    gpus: names of GPUS or GPU objects; (gpu, "fp32") draws the roof of the fp32 cores.
    points: Point, or tuples (label, intensity, kind, flops) of which the last two may be left out.
    """
    roofs = [g if isinstance(g, tuple) and not isinstance(g, GPU) else (g, "tensor") for g in gpus]
    roofs = [(find_gpu(gpu), unit) for gpu, unit in roofs]
    points = [Point(*p) for p in points]
    if not roofs:
        raise ValueError("gpus is empty; accepted: at least one GPU")
    for p in points:
        if p.kind not in MARKERS or p.intensity <= 0:
            raise ValueError(f"{p}; accepted: intensity above 0, kind one of {', '.join(MARKERS)}")
    low = min([0.5, *(p.intensity / 2 for p in points)])
    high = max([2048, *(p.intensity * 2 for p in points)])
    x = np.geomspace(low, high, 400)

    fig, ax = new_figure(8.4, 4.6)
    for style, (gpu, unit) in zip(cycle(ROOFS), roofs, strict=False):
        turn = ridge(gpu, unit)
        xs = np.unique(np.append(x, turn))
        name = gpu.name.replace("NVIDIA ", "") + (", fp32 cores" if unit == "fp32" else "")
        label = f"{name}: ridge {turn:,.3g}"
        ax.plot(xs, [roofline(gpu, i, unit) / 1e12 for i in xs], label=label, **style)
        ax.plot([turn], [peak(gpu, unit) / 1e12], "|", color=style["color"], markersize=13, mew=2)

    bottom = min(roofline(gpu, low, unit) for gpu, unit in roofs) / 1e12 / 15
    for p in points:
        colour, marker = COLOURS[p.kind], MARKERS[p.kind]
        tensor = [g for g, unit in roofs if unit == "tensor"]
        heights = [roofline(g, p.intensity) for g in tensor] or [
            roofline(g, p.intensity, unit) for g, unit in roofs
        ]
        heights = heights if p.flops is None else [p.flops]
        ax.plot([p.intensity] * 2, [bottom, max(heights) / 1e12], color=colour, linewidth=1)
        for height in heights:
            ax.plot(p.intensity, height / 1e12, marker, color=colour, markersize=8, mec="black")
        ax.text(
            p.intensity / 1.04, bottom * 1.25, f"{p.label}: {p.intensity:,.4g}", rotation=90,
            ha="right", va="bottom", fontsize=9.5, color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9},
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, None))
    ax.set_xlabel("arithmetic intensity: FLOP per byte moved to or from HBM")
    ax.set_ylabel("TFLOP/s that can be reached")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=9, frameon=False, handlelength=4
    )
    return fig
