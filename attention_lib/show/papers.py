"""Notebook 13: pictures of what the papers measured, from the tables of attention_lib.papers."""

from matplotlib.ticker import FuncFormatter, NullLocator

from attention_lib.hardware import GPUS
from attention_lib.papers import table
from attention_lib.show.style import COLOURS, HATCHES, MARKERS, new_figure

LINES = ("-", "--", ":", "-.")
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")

# label, key of COLOURS, table, row in it, GPU, its peak over the peak at 16 bits
SHARES = (
    ("A100, FA, d = 64, fwd + bwd", "standard", "fa2, d = 64", "FlashAttention", "A100-80", 1),
    ("A100, FA-2, d = 64, fwd + bwd", "flash", "fa2, d = 64", "FlashAttention-2", "A100-80", 1),
    ("A100, FA-2, d = 128, fwd + bwd", "flash", "fa2, d = 128", "FlashAttention-2", "A100-80", 1),
    ("A100, FA-2, best, fwd", "flash", "fa2 best", "forward, A100", "A100-80", 1),
    ("H100, FA-2, d = 128, fwd", "flash", "fa3, d = 128", "FlashAttention-2", "H100", 1),
    ("H100, FA-3, d = 128, fwd", "q_outer", "fa3, d = 128", "FlashAttention-3", "H100", 1),
    ("H100, FA-3, d = 256, fwd", "q_outer", "fa3, d = 256", "FlashAttention-3", "H100", 1),
    ("H100, FA-3, best, v2", "q_outer", "fa3 best", "16 bits", "H100", 1),
    ("H100, FA-3, best, NeurIPS", "q_outer", "fa3 best (NeurIPS)", "16 bits", "H100", 1),
    ("H100, FA-3, 8 bits, v2", "sram", "fa3 best", "8 bits", "H100", 2),
    ("H100, FA-3, 8 bits, NeurIPS", "sram", "fa3 best (NeurIPS)", "8 bits", "H100", 2),
)


def shares():
    """The rows of SHARES for draw_shares: label -> (a key of COLOURS, [share of the peak, ...])."""
    rows = {}
    for label, key, id, row, gpu, times in SHARES:
        held = table(id)
        rates = [held.value(row, c) for c, unit in held.columns.items() if unit == "TFLOP/s"]
        peak = times * GPUS[gpu].tensor_flops
        rows[label] = key, [rate * 1e12 / peak for rate in rates if rate is not None]
    return rows


def _lengths(ax, lengths):
    """A log axis of sequence lengths, with the lengths themselves on it: 512, 1k, 2k."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(lengths), [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("sequence length N")


def draw_days(groups):
    """Bars of training time. groups: title -> {label: (a key of COLOURS, days)}. Returns fig."""
    fig, axes = new_figure(8.6, 2.6, ncols=len(groups))
    for ax, (title, bars) in zip(axes, groups.items(), strict=True):
        for row, (key, days) in enumerate(bars.values()):
            ax.barh(-row, days, color=COLOURS[key], hatch=HATCHES[key], edgecolor="white")
            ax.annotate(
                f"{days:g}", (days, -row), xytext=(4, 0), textcoords="offset points", va="center"
            )
        ax.set_yticks([-row for row in range(len(bars))], list(bars))
        ax.set(title=title, xlabel="days", xlim=(0, 1.15 * max(d for _, d in bars.values())))
        ax.grid(axis="y", visible=False)
    return fig


def draw_context(days, line, perplexity, limit):
    """Left: days against context, with a line through the first two. Right: perplexity.

    days: tokens -> days; line: a function of tokens; perplexity: label -> {tokens: perplexity};
    limit: (label, days), drawn as a horizontal line. Returns fig.
    """
    fig, (left, right) = new_figure(8.8, 3.4, ncols=2)
    lengths = list(days)
    left.plot(lengths, list(days.values()), MARKERS["flash"], color=COLOURS["flash"], markersize=9)
    ends = (0, 1.1 * lengths[-1])
    left.plot(ends, [line(n) for n in ends], "--", color=COLOURS["quiet"], linewidth=1.4)
    for n, d in days.items():
        left.annotate(f"{d:g}", (n, d), xytext=(0, 9), textcoords="offset points", ha="center")
    left.axhline(limit[1], color=COLOURS["standard"], linestyle=":")
    left.annotate(
        f"{limit[0]}: {limit[1]:g}", (lengths[-1], limit[1]), xytext=(0, 4),
        textcoords="offset points", ha="right", color=COLOURS["standard"],
    )  # fmt: skip
    left.set(xlabel="context, tokens", ylabel="days", xlim=(0, ends[1]), ylim=(0, 5.6))
    left.set_xticks(lengths)
    for (label, values), key, style in zip(
        perplexity.items(), ("flash", "standard"), LINES, strict=False
    ):
        right.plot(
            list(values), list(values.values()), style, color=COLOURS[key], marker=MARKERS[key],
            label=label,
        )  # fmt: skip
    right.set(xlabel="context, tokens", ylabel="perplexity", ylim=(17, 18.4))
    right.set_xticks(lengths)
    right.legend(frameon=False)
    return fig


def draw_accuracy(points, band):
    """Accuracy against speedup. points: label -> (speedup, accuracy, a key of COLOURS).

    band: (low, high, what it is), the accuracies that one and the same function got. Returns fig.
    """
    fig, ax = new_figure(8.6, 3.8)
    low, high, what = band
    ax.axhspan(low, high, color=COLOURS["quiet"], alpha=0.25, linewidth=0)
    ax.text(1.02, high + 0.1, what, fontsize=9.5)
    for shape, (label, (speed, accuracy, key)) in zip("so^DvPX*h", points.items(), strict=True):
        ax.plot(speed, accuracy, shape, color=COLOURS[key], markersize=9)
        above, left = accuracy >= high, label.startswith("Lin") or speed > 2.6
        ax.annotate(
            label, (speed, accuracy), xytext=(0, 8) if above else (-9 if left else 9, -4),
            textcoords="offset points", ha="center" if above else "right" if left else "left",
            fontsize=9.5,
        )  # fmt: skip
    ax.set(xlabel="speedup of training over the Transformer", ylabel="mean accuracy, %")
    ax.set(xlim=(0.85, 3), ylim=(54.3, 60.9))
    return fig


def draw_ratios(curves, lengths, ylabel="times faster"):
    """Ratios against the sequence length. curves: label -> (a key of COLOURS, {N: ratio}).

    A line at 1: no gain. Returns fig.
    """
    fig, ax = new_figure(8.6, 3.8)
    for (label, (key, values)), shape, style in zip(
        curves.items(), SHAPES, LINES * 2, strict=False
    ):
        ax.plot(
            list(values), list(values.values()), style, color=COLOURS[key], marker=shape,
            label=label,
        )  # fmt: skip
    ax.axhline(1, color=COLOURS["limit"], linewidth=1)
    _lengths(ax, lengths)
    ax.set(ylabel=ylabel, ylim=(0, None))
    ax.legend(frameon=False, fontsize=9.5, loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def draw_memory(printed, formulas, limit):
    """Memory against N, both axes log: printed points on the lines of formulas.

    printed: label -> {N: MiB}; formulas: label -> (a key of COLOURS, {N: MiB}); limit: MiB of the
    GPU. Returns fig.
    """
    fig, ax = new_figure(8.6, 3.8)
    for label, (key, values) in formulas.items():
        ax.plot(list(values), list(values.values()), "-", color=COLOURS[key], linewidth=1.2)
        ax.plot(
            list(printed[label]), list(printed[label].values()), MARKERS[key], color=COLOURS[key],
            markersize=8, label=f"{label}, printed",
        )  # fmt: skip
    ax.axhline(limit, color=COLOURS["limit"], linestyle="--", linewidth=1.2)
    ax.text(128, limit * 1.15, f"memory of the GPU: {limit / 1024:g} GiB", fontsize=9.5)
    _lengths(ax, list(values))
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: f"{y / 1024:g} GiB" if y >= 1024 else f"{y:g} MiB")
    )
    ax.set(ylabel="memory, lines: the formulas", ylim=(8, 2**18))
    ax.legend(frameon=False, fontsize=9.5, loc="lower right")
    return fig


def draw_shares(rows):
    """Shares of a peak as points. rows: label -> (a key of COLOURS, [share, ...]), shares in 0..1.

    Several shares in a row are joined: the settings of one figure. Returns fig.
    """
    fig, ax = new_figure(8.8, 0.42 * len(rows) + 0.9)
    for row, (key, shares) in enumerate(rows.values()):
        low, high = min(shares), max(shares)
        ax.plot([low, high], [-row, -row], color=COLOURS[key], linewidth=2)
        ax.plot(shares, [-row] * len(shares), MARKERS.get(key, "D"), color=COLOURS[key])
        text = f"{high:.0%}" if high - low < 0.01 else f"{low:.0%} to {high:.0%}"
        ax.annotate(
            text, (high, -row), xytext=(9, 0), textcoords="offset points", va="center", fontsize=9.5
        )
    ax.set_yticks([-row for row in range(len(rows))], list(rows), fontsize=9.5)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
    ax.set(xlabel="share of the GPU's peak, counted as the papers count", xlim=(0, 1))
    ax.set_ylim(0.6 - len(rows), 0.6)
    ax.grid(axis="y", visible=False)
    return fig
