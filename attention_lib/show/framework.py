"""Pictures of notebook 07: the corner of a causal mask, the choice of an implementation, memory.

Each function returns a matplotlib figure; show it with `figure(fig, alt=...)`.
"""

import numpy as np
from matplotlib.patches import Rectangle

from attention_lib.framework import CALLS, backends, choice
from attention_lib.show.style import COLOURS, MARKERS, new_figure

MiB = 2**20


def corners_figure(Nq, Nk):
    """Which keys each query sees, with the causal mask at the upper left and the lower right."""
    fig, axes = new_figure(7.6, 0.42 * Nq + 1.5, ncols=2)
    for ax, title, shift in (
        (axes[0], "upper left (torch, is_causal)", 0),
        (axes[1], "lower right (this library)", Nk - Nq),
    ):
        for i in range(Nq):
            for j in range(Nk):
                sees = j <= i + shift
                style = dict(facecolor=COLOURS["sram"]) if sees else dict(facecolor="white")
                ax.add_patch(Rectangle((j, i), 1, 1, edgecolor=COLOURS["quiet"], **style))
                if sees:
                    ax.text(j + 0.5, i + 0.5, "x", ha="center", va="center", fontsize=10)
        ax.set(xlim=(0, Nk), ylim=(Nq, 0), aspect="equal", xlabel="key")
        ax.set_xticks(np.arange(Nk) + 0.5, range(Nk))
        ax.set_yticks(np.arange(Nq) + 0.5, range(Nq))
        ax.grid(False)
        ax.tick_params(length=0)
        ax.set_title(title, fontsize=11)
    axes[0].set_ylabel("query")
    return fig


def choice_figure(order, calls=CALLS):
    """Calls against implementations in an order: what can run, what does, and why not."""
    fig, ax = new_figure(8.6, 0.46 * len(calls) + 0.9)
    for row, call in enumerate(calls.values()):
        reasons, chosen = backends(**call), choice(order, **call)
        for column, backend in enumerate(order):
            picked = backend == chosen
            box = Rectangle(
                (column + 0.04, row + 0.08),
                0.92,
                0.84,
                facecolor=COLOURS["sram"] if picked else "white",
                edgecolor="black" if picked else COLOURS["quiet"],
                linewidth=2.2 if picked else 0.8,
            )
            ax.add_patch(box)
            text = "RUNS" if picked else f"no: {reasons[backend]}" if reasons[backend] else "could"
            ax.text(
                column + 0.5,
                row + 0.5,
                text,
                ha="center",
                va="center",
                fontsize=8.5,
                weight="bold" if picked else "normal",
            )
    ax.set(xlim=(0, len(order)), ylim=(len(calls), 0))
    ax.set_xticks(np.arange(len(order)) + 0.5, order)
    ax.set_yticks(np.arange(len(calls)) + 0.5, calls)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return fig


def memory_figure(sizes, unfused, fused):
    """Peak bytes of two implementations against N."""
    fig, ax = new_figure(6.4, 3.4)
    for label, key, values in (("math", "standard", unfused), ("flash", "flash", fused)):
        peaks = [x / MiB for x in values]
        ax.plot(sizes, peaks, marker=MARKERS[key], color=COLOURS[key], label=label, markersize=8)
        ax.annotate(
            label,
            (sizes[-1], peaks[-1]),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[key],
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes])
    ax.minorticks_off()
    ax.set_xlim(sizes[0] * 0.9, sizes[-1] * 1.35)
    ax.set(xlabel="N", ylabel="peak extra memory, MiB")
    return fig


def counters_figure(rows):
    """Bytes through DRAM and through L2, each row of a recording a dot, on a log scale.

    Dots, since the length of a bar means nothing on such a scale. The last row is said as a share
    of the first.
    """
    fig, axes = new_figure(8.6, 2.9, ncols=2, sharey=True)
    names = [row["step"] for row in rows]
    for ax, title, values in (
        (axes[0], "DRAM, read and written", [r["dram_read"] + r["dram_write"] for r in rows]),
        (axes[1], "L2", [r["l2_bytes"] for r in rows]),
    ):
        for k, (name, value) in enumerate(zip(names, values, strict=True)):
            kind = "q_outer" if name == "fused" else "standard"
            ax.plot(value, k, MARKERS[kind], color=COLOURS[kind], markersize=10)
            label = f"{value / 1e9:.1f} GB" if value > 1e9 else f"{value / 1e6:.0f} MB"
            share = f", 1/{values[0] / value:.0f} of {names[0]}" if value < values[0] / 10 else ""
            ax.text(value * 1.35, k, label + share, va="center", fontsize=10)
        ax.set(xscale="log", xlim=(4e7, 4e11), title=title, xlabel="bytes, log scale")
        ax.margins(y=0.15)
        ax.set_yticks(range(len(names)), names)
        ax.grid(False, axis="y")
    axes[0].invert_yaxis()
    return fig
