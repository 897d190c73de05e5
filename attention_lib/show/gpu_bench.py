"""Pictures of notebooks 16 to 18: counted bytes, what each rung bought, the framework's backends.

Each function takes numbers and returns a matplotlib figure; show it with `figure(fig, alt=...)`.
`TRIES` is the log of how the block sizes of rung 5 were chosen.
"""

import importlib.util

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from attention_lib.show.style import COLOURS, new_figure

# Notes taken while rung 5 was tuned: d, rows of a K/V tile, what else, and the smallest and the
# mean ratio to torch's FLASH backend over six shapes (N = 1024, 4096, 16,384, causal and not,
# float16). One H200, 2026-11-29. The variants were not kept, so this is a log and no recording.
TRIES = (
    (128, 32, "", 0.99, 1.01),
    (128, 48, "", 1.01, 1.05),
    (128, 48, "O rescaled only after growth by 2^8", 1.04, 1.09),
    (128, 64, "", 1.03, 1.06),
    (128, 64, "same; 16 to 40 bytes spilled", 1.08, 1.11),
    (64, 64, "Q read again for each tile", 1.05, 1.07),
    (64, 64, "Q kept in registers", 1.06, 1.09),
    (64, 96, "", 1.08, 1.12),
    (64, 128, "spills", 1.05, 1.06),
)

SERIES = (  # colour and marker, so that neither stands alone
    (COLOURS["flash"], "o"),
    (COLOURS["standard"], "s"),
    (COLOURS["q_outer"], "^"),
    (COLOURS["hbm"], "D"),
    (COLOURS["limit"], "v"),
    (COLOURS["sram"], "P"),
)


def with_torch(live):
    """live where torch is installed, else None: for `live_or_recorded`."""
    return live if importlib.util.find_spec("torch") else None


def _plain(axis):
    """A log axis with numbers as one writes them."""
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
    axis.set_minor_locator(NullLocator())


def draw_ratios(labels, series):
    """Counted over predicted, one row a kernel and shape, on a log axis with a line at 1.

    labels: one a row. series: name -> one ratio for each row.
    """
    fig, ax = new_figure(8.6, 0.27 * len(labels) + 1.3)
    rows = -np.arange(len(labels))
    for (name, ratios), (colour, marker) in zip(series.items(), SERIES, strict=False):
        ax.plot(ratios, rows, marker, color=colour, markersize=6, label=name, alpha=0.85)
    ax.axvline(1, color=COLOURS["limit"], linewidth=1)
    ax.set_xscale("log")
    ax.set_xticks([0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128])
    _plain(ax.xaxis)
    ax.set_yticks(rows, labels, fontsize=9)
    ax.set(xlabel="counted / closed form, log scale", xlim=(0.12, 200))
    ax.legend(loc="lower right", fontsize=9)
    return fig


def draw_outgrown(N, accounts, counted):
    """DRAM reads of one head against N: counted, beside accounts. All in units of Nd bytes.

    accounts: label -> one number for each N. counted: the same, of the hardware.
    """
    fig, ax = new_figure(8, 3.9)
    styles = (("--", COLOURS["quiet"]), ("-", COLOURS["flash"]), (":", COLOURS["standard"]))
    for (label, values), (style, colour) in zip(accounts.items(), styles, strict=True):
        ax.plot(N, values, style, color=colour)
        ax.annotate(label, (N[-1], values[-1]), xytext=(8, -4), textcoords="offset points",
                    color=colour, fontsize=10)  # fmt: skip
    ax.plot(N, counted, "D", color=COLOURS["limit"], markersize=9)
    for x, y in zip(N, counted, strict=True):
        ax.annotate(f"{y:.1f}", (x, y), xytext=(0, 9), textcoords="offset points", ha="center")
    ax.annotate("counted", (N[-1], counted[-1]), xytext=(8, 7), textcoords="offset points")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        _plain(axis)
    ax.set_xticks(N)
    ax.set(xlabel="N, one head, d = 128", ylabel="DRAM reads, in N x d x 2 bytes")
    ax.set(xlim=(N[0] / 1.2, N[-1] * 2.6), ylim=(2, max(map(max, accounts.values())) * 2))
    return fig


def draw_banks(layouts):
    """Where the eight rows of an 8 x 8 piece lie: rows against groups of four banks.

    layouts: title -> the bank group, 0 to 7, of each of the eight rows.
    """
    fig, axes = new_figure(8.2, 3, ncols=len(layouts), squeeze=False)
    for ax, (title, groups) in zip(axes[0], layouts.items(), strict=True):
        for row, group in enumerate(groups):
            ax.add_patch(Rectangle((group, row), 1, 1, facecolor=COLOURS["sram"]))
            ax.text(group + 0.5, row + 0.5, "x", ha="center", va="center")
        for k in range(9):
            ax.plot([k, k], [0, 8], color=COLOURS["quiet"], linewidth=0.6)
            ax.plot([0, 8], [k, k], color=COLOURS["quiet"], linewidth=0.6)
        ax.set(xlim=(0, 8), ylim=(8, 0), xlabel="bank group: 4 banks, 16 bytes")
        ax.set_xticks(np.arange(8) + 0.5, range(8))
        ax.set_yticks(np.arange(8) + 0.5, range(8))
        ax.grid(False)
        ax.set_title(title, fontsize=11)
    axes[0][0].set_ylabel("row")
    return fig


def draw_ladder(names, speeds, lines):
    """TFLOP/s of each rung on a log scale. speeds: label -> one number a rung.

    lines: label -> TFLOP/s, drawn across.
    """
    fig, ax = new_figure(8.6, 4.6)
    x = np.arange(len(names))
    highest = [max(column) for column in zip(*speeds.values(), strict=True)]
    for (label, values), (colour, marker) in zip(speeds.items(), SERIES, strict=False):
        ax.plot(x, values, color=colour, marker=marker, markersize=8, label=label)
        for i, value in enumerate(values):  # the faster one above, the others below
            ax.annotate(f"{value:.3g}", (x[i], value), fontsize=9.5, ha="center", color=colour,
                        xytext=(0, 8 if value == highest[i] else -16),
                        textcoords="offset points")  # fmt: skip
    for label, value in lines.items():
        ax.axhline(value, color=COLOURS["quiet"], linestyle="--", linewidth=1)
        ax.annotate(label, (-0.45, value), xytext=(0, 3), textcoords="offset points", fontsize=9)
    ax.set_yscale("log")
    ax.set_yticks([1, 3, 10, 30, 100, 300, 1000])
    _plain(ax.yaxis)
    ax.set_xticks(x, [f"{i} {name}" for i, name in enumerate(names)], fontsize=9.5)
    ax.set(ylabel="TFLOP/s, log scale", xlim=(-0.5, len(names) - 0.5), ylim=(0.35, 1800))
    ax.legend(loc="lower right", fontsize=9.5)
    return fig


def draw_rooflines(panels):
    """Rooflines side by side. panels: (title, bytes/s, roofs, points) each.

    roofs: label -> TFLOP/s. points: label -> (FLOP per byte, TFLOP/s).
    """
    fig, axes = new_figure(9.4, 4.4, ncols=len(panels), sharey=True)
    for ax, (title, bandwidth, roofs, points) in zip(axes, panels, strict=True):
        x = np.geomspace(
            0.6 * min(p[0] for p in points.values()), 2.2 * max(p[0] for p in points.values())
        )
        ax.plot(x, np.minimum(bandwidth * x / 1e12, max(roofs.values())), color=COLOURS["limit"])
        for label, roof in roofs.items():
            ax.axhline(roof, color=COLOURS["quiet"], linestyle="--", linewidth=1)
            ax.annotate(label, (x[-1], roof), xytext=(-2, 3), ha="right", fontsize=8.5,
                        textcoords="offset points")  # fmt: skip
        box = dict(facecolor="white", edgecolor="none", pad=0.5, alpha=0.8)
        for k, (label, (intensity, speed)) in enumerate(points.items()):
            colour, marker = SERIES[k % len(SERIES)]
            ax.plot(intensity, speed, marker, color=colour, markersize=9)
            right = intensity > np.sqrt(x[0] * x[-1])
            crowded = any(0 < np.log(s / speed) < 0.5 and abs(np.log(i / intensity)) < 0.5
                          for i, s in points.values())  # fmt: skip
            ax.annotate(label, (intensity, speed), fontsize=9, ha="right" if right else "left",
                        xytext=(-9 if right else 9, -11 if crowded else -4), bbox=box,
                        textcoords="offset points")  # fmt: skip
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set(title=title, xlabel="FLOP per byte, log scale", ylim=(0.6, 2500))
        ax.title.set_fontsize(11)
        for axis in (ax.xaxis, ax.yaxis):
            _plain(axis)
    axes[0].set_ylabel("TFLOP/s, log scale")
    return fig


def draw_parts(bars):
    """Time of each part alone, stacked, as a share of the measured time.

    bars: label -> {part: share}. A bar that ends near 1 is a sum of its parts.
    """
    fig, ax = new_figure(8.6, 0.42 * len(bars) + 1.4)
    hatches = ("//", "", "..", "xx")
    colours = [COLOURS[k] for k in ("standard", "sram", "q_outer", "hbm")]
    parts = list(next(iter(bars.values())))
    left = np.zeros(len(bars))
    for part, colour, hatch in zip(parts, colours, hatches, strict=True):
        share = np.array([bar[part] for bar in bars.values()])
        ax.barh(range(len(bars)), share, left=left, color=colour, hatch=hatch, label=part,
                edgecolor="white", height=0.7)  # fmt: skip
        left += share
    for row, total in enumerate(left):
        ax.text(total + 0.012, row, f"{total:.2f}", va="center", fontsize=9.5,
                bbox=dict(facecolor="white", edgecolor="none", pad=1))  # fmt: skip
    ax.axvline(1, color=COLOURS["limit"], linewidth=1.4, zorder=1.5)
    ax.set_yticks(range(len(bars)), list(bars), fontsize=9.5)
    ax.set(xlabel="time of each part alone / measured time", xlim=(0, max(1.1, left.max() + 0.12)))
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.45, 1), ncols=len(parts), fontsize=9,
              frameon=False)  # fmt: skip
    return fig


def draw_shapes(labels, series, ylabel, line=None, log=False):
    """One value for each shape and series. series: name -> values. line: (y, label) or None."""
    fig, ax = new_figure(8.6, 3.9)
    x = np.arange(len(labels))
    for (name, values), (colour, marker) in zip(series.items(), SERIES, strict=False):
        ax.plot(x, values, color=colour, marker=marker, markersize=7, linewidth=1, label=name)
    if line:
        ax.axhline(line[0], color=COLOURS["limit"], linestyle="--", linewidth=1)
        ax.annotate(line[1], (len(labels) - 0.5, line[0]), xytext=(0, 3), ha="right",
                    textcoords="offset points", fontsize=9)  # fmt: skip
    if log:
        ax.set_yscale("log")
        ax.set_yticks([10, 30, 100, 300, 1000])
        _plain(ax.yaxis)
    ax.set_xticks(x, labels, fontsize=8.5)
    ax.set(ylabel=ylabel, xlim=(-0.5, len(labels) - 0.5))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=6, fontsize=9, frameon=False)
    return fig


def kernels_of(call):
    """Names of the GPU kernels that a call ran, as torch's profiler gives them. Needs a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()  # the first call may load libraries
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both, acc_events=True) as trace:  # else torch 2.11 warns of cycles
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [event.key for event in trace.key_averages() if event.device_type == on_gpu]


def errors(Q, K, V):
    """Relative error against float64 of each backend of torch and each rung that runs on this GPU.

    Q, K, V: numpy, (N, d), one head, float16. Returns {name: error, in the Frobenius norm}.
    """
    import torch

    from attention_lib.gpu import bench, ladder

    major, minor = torch.cuda.get_device_capability()
    able = [k.name for k in ladder.LADDER if k.runs_on(10 * major + minor)]
    gpu = [torch.from_numpy(x).cuda()[None, None] for x in (Q, K, V)]
    q, k, v = (x.double() for x in gpu)
    exact = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
    calls = bench.accepted(bench.forward_calls(*gpu, False, able))
    return {
        name: float((call().double() - exact).norm() / exact.norm()) for name, call in calls.items()
    }
