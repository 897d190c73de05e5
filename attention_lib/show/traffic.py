"""Pictures of traffic: what a run moved, in order; how traffic grows; where one can count it.

`Trace` is an HBM that also remembers the order of its copies, so the first picture is drawn from
the run itself. The others get numbers and draw them.
"""

from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from attention_lib.memory import HBM, Tensor
from attention_lib.show.style import COLOURS, MARKERS, new_figure

LANES = {"read": ("sram", ""), "write": ("standard", "////")}


class Trace(HBM):
    """An HBM that also keeps every copy, in order, as (name, "read" or "write", elements)."""

    def __init__(self, budget=None):
        super().__init__(budget)
        self.copies = []

    def tensor(self, name, array):
        return _Traced(self, name, array)


class _Traced(Tensor):
    def load(self, *index, dtype=None):
        tile = super().load(*index, dtype=dtype)
        self.hbm.copies.append((self.name, "read", tile.size))
        return tile

    def store(self, tile, *index):
        super().store(tile, *index)
        self.hbm.copies.append((self.name, "write", tile.size))


def draw_copies(runs):
    """One panel for each run, one lane for each tensor, one bar for each copy; time runs right.

    runs: title -> Trace. The x axis is the elements moved so far, the same in all panels.
    Returns fig.
    """
    lanes = [len({name for name, _, _ in trace.copies}) for trace in runs.values()]
    fig, axes = new_figure(
        9,
        0.32 * sum(lanes) + 1.9,
        nrows=len(runs),
        sharex=True,
        squeeze=False,
        height_ratios=lanes,
    )
    for ax, (title, trace) in zip(axes[:, 0], runs.items(), strict=True):
        names = list(dict.fromkeys(name for name, _, _ in trace.copies))
        bars = {(name, kind): [] for name in names for kind in LANES}
        moved = 0
        for name, kind, size in trace.copies:
            bars[name, kind].append((moved, size))
            moved += size
        for (name, kind), spans in bars.items():
            key, hatch = LANES[kind]
            lane = (names.index(name) - 0.38, 0.76)
            # first the bars, with an edge so that a thin one shows; then the hatch over them
            ax.broken_barh(spans, lane, color=COLOURS[key], linewidth=0.6)
            ax.broken_barh(spans, lane, facecolor="none", edgecolor="white", hatch=hatch, lw=0)
        ax.axvline(moved, color=COLOURS["limit"], linewidth=1, linestyle=":")
        ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6))
        ax.set_title(f"{title}: {moved:,} elements", loc="left", fontsize=11)
        ax.grid(axis="y", visible=False)
    samples = [
        Patch(facecolor=COLOURS[key], edgecolor="white", hatch=hatch, label=kind)
        for kind, (key, hatch) in LANES.items()
    ]
    axes[-1, 0].legend(handles=samples, loc="lower right", ncols=2, frameon=False)
    axes[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:,.0f}k"))
    axes[-1, 0].set(xlabel="elements moved so far", xlim=(0, None))
    return fig


def draw_growth(Ns, series):
    """Traffic against N on log axes. series: label -> (a key of COLOURS, MiB for each N)."""
    fig, ax = new_figure(8, 4.2)
    for label, (key, values) in series.items():
        marked = key in MARKERS
        ax.plot(
            Ns,
            values,
            color=COLOURS[key],
            marker=MARKERS.get(key, ""),
            markersize=6,
            linestyle="-" if marked else "--",
        )
        ax.annotate(
            label,
            (Ns[-1], values[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[key if marked else "limit"],
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xticks=Ns, xlabel="N", ylabel="traffic of one head, MiB (fp16)")
    return fig


def draw_sweep(panels, typical):
    """Traffic of Algorithm 1 against the on-chip memory M; one panel for each head dimension.

    panels: list of (d, mib(M, d), the M to mark, standard's MiB, break-even M).
    typical: the M of a typical chip. Returns fig.
    """
    fig, axes = new_figure(9.5, 4, ncols=len(panels), sharey=True, squeeze=False)
    for ax, (d, mib, marked, standard, even) in zip(axes[0], panels, strict=True):
        low, high = 0.85 * min(marked), 1.15 * max(marked)
        Ms = [round(low * (high / low) ** (k / 300)) for k in range(301)]
        ax.plot(Ms, [mib(M, d) for M in Ms], color=COLOURS["flash"], label="Algorithm 1")
        ax.plot(list(marked), [mib(M, d) for M in marked], MARKERS["flash"], color=COLOURS["flash"])
        ax.axhline(standard, color=COLOURS["standard"], linestyle="--", label="standard")
        ax.axvline(typical, color=COLOURS["quiet"], linestyle=":", label=f"M = {typical:,}")
        ax.plot(
            even,
            standard,
            marker="D",
            markersize=9,
            linestyle="",
            markerfacecolor="white",
            markeredgecolor=COLOURS["limit"],
            label="break-even, $3d^2+4d$",
        )
        ax.annotate(f"{even:,}", (even, standard), xytext=(8, 8), textcoords="offset points")
        ax.set_xscale("log", base=10)
        ax.set(xlabel="M, elements on chip", xticks=list(marked))
        ax.set_title(f"d = {d}", loc="left", fontsize=11)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k"))
        ax.xaxis.set_minor_locator(NullLocator())
    axes[0, 0].set(ylabel="traffic of one head, MiB (fp16)", ylim=(0, None))
    axes[0, -1].legend(loc="upper right", fontsize=9, framealpha=1)
    return fig


def draw_counting_places(above, below, labels):
    """The chip, its L2 cache and its DRAM in a row, with the bytes that crossed each gap.

    above: what the kernel asked L2 for; below: what L2 asked DRAM for: (bytes, text) each. The
    width of an arrow is in proportion to its bytes. labels: text of the three boxes. Returns fig.
    """
    fig, ax = new_figure(9, 2.7)
    ax.set_axis_off()
    ax.set(xlim=(-0.5, 100.5), ylim=(6, 39))
    for left, text, key in zip((0, 41, 82), labels, ("sram", "quiet", "hbm"), strict=True):
        style = {"facecolor": COLOURS[key], "edgecolor": COLOURS["limit"], "alpha": 0.6}
        ax.add_patch(Rectangle((left, 8), 18, 24, **style))
        ax.text(left + 9, 20, text, ha="center", va="center", fontsize=10.5)
    thick = 13 / max(above[0], below[0])
    for left, (moved, text) in ((18.6, above), (59.6, below)):
        half = max(moved * thick, 0.15) / 2
        ax.fill(
            [left, left + 1.5, left + 20.3, left + 21.8, left + 20.3, left + 1.5],
            [20, 20 + half, 20 + half, 20, 20 - half, 20 - half],
            facecolor=COLOURS["flash"],
        )
        ax.text(left + 10.9, 35.5, text, ha="center", va="center", fontsize=10)
    return fig
