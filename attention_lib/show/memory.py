"""Pictures of notebook 05: what is stored, for how long, and what it costs to rebuild P."""

from matplotlib.patches import Rectangle

from attention_lib.inputs import check_positive_int
from attention_lib.show.style import COLOURS, MARKERS, new_figure
from attention_lib.traffic import largest_context

# Which N x N arrays are alive at which line: name -> (first line, last line), from 0.
TEXTBOOK = {
    "lines": ("Q @ K.T", "/ sqrt(d)", "X - max", "exp(Z)", "E / sum", "P @ V"),
    "arrays": {"Q @ K.T": (0, 1), "S": (1, 5), "Z": (2, 4), "E": (3, 4), "P": (4, 5)},
}
IN_PLACE = {
    "lines": ("Q @ K.T", "S *= scale", "S - max", "exp, out=E", "E /= sum", "P @ V"),
    "arrays": {"S": (0, 5), "E, then P": (2, 5)},
}

FORWARD = ("$S = QK^T$", "$O = PV$")
BACKWARD = ("$dV = P^TdO$", "$dP = dO V^T$", "$dQ = dS\\,K$", "$dK = dS^TQ$")


def alive(case):
    """How many N x N arrays are alive at each line of TEXTBOOK or IN_PLACE."""
    spans = case["arrays"].values()
    return [sum(a <= line <= b for a, b in spans) for line in range(len(case["lines"]))]


def draw_stored(N, d):
    """The arrays of one head, to scale: what standard and what tiled attention store."""
    N, d = check_positive_int("N", N), check_positive_int("d", d)
    fig, ax = new_figure(7.4, 2.6)
    width, x = d / N, 0.0
    slab = dict(facecolor=COLOURS["hbm"], edgecolor="black")
    square = dict(facecolor="white", edgecolor=COLOURS["standard"], hatch="//")
    for title, squares in (("standard", ("S", "P")), ("tiled", ())):
        ax.text(x, 1.22, title, weight="bold")
        for name in "QKVO":
            ax.add_patch(Rectangle((x, 0), width, 1, **slab))
            ax.text(x + width / 2, 1.05, name, ha="center", family="monospace")
            x += width + 0.05
        for name in squares:
            ax.add_patch(Rectangle((x, 0), 1, 1, **square))
            ax.text(x + 0.5, 1.05, f"{name}   N x N", ha="center", family="monospace")
            x += 1.08
        if not squares:
            for name in "lm":
                x += 0.05
                ax.plot((x, x), (0, 1), color=COLOURS["flash"], lw=1)
                ax.text(x, 1.05, name, ha="center", family="monospace")
                x += 0.05
        x += 0.3
    ax.set(xlim=(-0.05, x - 0.2), ylim=(-0.05, 1.35))
    ax.set_aspect("equal")
    ax.axis("off")
    return fig


def draw_lifetimes():
    """For each line of the textbook code and of the in-place code: the N x N arrays alive."""
    heights = [len(case["arrays"]) + 1 for case in (TEXTBOOK, IN_PLACE)]
    fig, axes = new_figure(7.4, 4.8, nrows=2, height_ratios=heights)
    titles = ("textbook: every step makes a new array", "in place: a step overwrites its input")
    for ax, case, title in zip(axes, (TEXTBOOK, IN_PLACE), titles, strict=True):
        counts = alive(case)
        for row, (name, (first, last)) in enumerate(case["arrays"].items()):
            ax.barh(
                row,
                last - first + 1,
                left=first,
                height=0.7,
                align="edge",
                color="white",
                edgecolor=COLOURS["standard"],
                hatch="//",
                linewidth=1.5,
            )
            ax.text(
                (first + last + 1) / 2,
                row + 0.35,
                name,
                ha="center",
                va="center",
                family="monospace",
                bbox=dict(facecolor="white", edgecolor="none", pad=1.5),
            )
        bottom = len(case["arrays"]) + 0.4
        for line, count in enumerate(counts):
            most = count == max(counts)
            ax.text(
                line + 0.5,
                bottom,
                str(count),
                ha="center",
                va="center",
                weight="bold" if most else "normal",
                size=13 if most else 11,
            )
        ax.text(-0.1, bottom, "alive", ha="right", va="center")
        ax.set(xlim=(0, len(counts)), ylim=(bottom + 0.5, -0.2), yticks=[], title=title)
        middles = [line + 0.5 for line in range(len(counts))]
        ax.set_xticks(middles, case["lines"], family="monospace")
        ax.spines["left"].set_visible(False)
        ax.grid(False)
        for line in range(1, len(counts)):
            ax.axvline(line, color=COLOURS["quiet"], lw=0.6, zorder=0)
    return fig


PEAKS = {  # which measurement -> label, colour, plot style
    "textbook": ("np.sqrt: 4 arrays x 8 B", "standard", dict(marker="D", ls="--")),
    "math.sqrt": ("math.sqrt: 4 arrays x 4 B", "standard", dict(marker="v", ls="-.")),
    "in place": ("in place: 2 arrays x 4 B", "standard", dict(marker=MARKERS["standard"])),
    "K/V outer": ("tiled, K/V outer", "flash", dict(marker=MARKERS["flash"])),
    "Q outer": ("tiled, Q outer", "q_outer", dict(marker=MARKERS["q_outer"])),
}


def draw_peaks(peaks):
    """Peak memory against N, both axes logarithmic, with guides of slope 2 and 1.

    peaks: (name, N) -> bytes, the names being those of PEAKS.
    """
    fig, ax = new_figure(7.4, 4.4)
    sizes = sorted({N for _, N in peaks})
    for name, (label, colour, style) in PEAKS.items():
        x = [N for N in sizes if (name, N) in peaks]
        y = [peaks[name, N] / 2**20 for N in x]
        # A few KiB more or less must give the same picture: steps with no value near their edge.
        y = [round(v, 2) if v < 1 else round(v, 1) if v < 4 else round(4 * v) / 4 for v in y]
        ax.plot(x, y, color=COLOURS[colour], label=label, **style)
    for power, start in ((2, 3.2), (1, 0.16)):
        y = [start * (N / sizes[0]) ** power for N in (sizes[0], sizes[-1])]
        ax.plot((sizes[0], sizes[-1]), y, ":", color=COLOURS["limit"], lw=1.2)
        ax.annotate(
            f"slope {power}",
            (sizes[-1], y[-1]),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
        )
    ax.set(xscale="log", yscale="log", xlabel="N", ylabel="peak extra memory, MiB")
    ax.set_xlim(sizes[0] * 0.9, sizes[-1] * 1.6)
    ax.minorticks_off()
    ax.set_xticks(sizes, [f"{N:,}" for N in sizes])
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


CONTEXTS = {  # rule of largest_context -> label, colour, line style
    "article": ("a list of powers of two", "limit", ":"),
    "one matrix": ("the same account, any N", "standard", "--"),
    "corrected": ("S, P and all the rest, any N", "flash", "-"),
}


def draw_contexts(budgets):
    """How many times longer the tiled context is, for whole budgets in GiB: 32 heads, d = 128."""
    fig, ax = new_figure(7.4, 3.6)
    for rule, (label, colour, line) in CONTEXTS.items():
        ratios = []
        for budget in budgets:
            standard, tiled = (
                largest_context(budget * 2**30, 128, 32, method=method, rule=rule)
                for method in ("standard", "flash")
            )
            ratios.append(tiled / standard)
        steps = "steps-post" if rule == "article" else "default"
        ax.plot(budgets, ratios, label=label, color=COLOURS[colour], ls=line, drawstyle=steps)
    ax.axhspan(8, 16, color=COLOURS["quiet"], alpha=0.25, lw=0)
    ax.text(sum(budgets) / len(budgets), 12, '"8 to 16 times"', ha="center", va="center")
    ax.set(xlabel="budget, GiB", ylabel="tiled N / standard N", ylim=(0, None))
    ax.legend(frameon=False, loc="upper left")
    return fig


def draw_matmuls():
    """The N x N x d products of a training step: P stored (6), and P rebuilt (7)."""
    fig, ax = new_figure(7.4, 2.3)
    rows = (("P stored", FORWARD, BACKWARD), ("P rebuilt", FORWARD, ("$S = QK^T$", *BACKWARD)))
    for row, (label, forward, backward) in enumerate(rows):
        for k, name in enumerate(forward + backward):
            x = k + (0.25 if k >= len(forward) else 0)
            extra = len(backward) > len(BACKWARD) and k == len(forward)
            colour = COLOURS["sram"] if k < len(forward) else COLOURS["hbm"]
            ax.add_patch(
                Rectangle(
                    (x + 0.03, -row),
                    0.94,
                    0.7,
                    edgecolor="black",
                    facecolor="white" if extra else colour,
                    hatch="xx" if extra else "",
                )
            )
            ax.text(
                x + 0.5,
                -row + 0.35,
                name,
                ha="center",
                va="center",
                size=9,
                bbox=dict(facecolor="white", edgecolor="none", pad=2) if extra else None,
            )
        ax.text(-0.1, -row + 0.35, label, ha="right", va="center")
        ax.text(7.35, -row + 0.35, str(len(forward + backward)), va="center", weight="bold")
    ax.text(1, 0.85, "forward", ha="center")
    ax.text(4.75, 0.85, "backward", ha="center")
    ax.set(xlim=(-1.1, 7.6), ylim=(-1.15, 1.1))
    ax.axis("off")
    return fig
