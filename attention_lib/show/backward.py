"""Pictures of notebook 08: where each gradient comes from, the loop over tiles, and the bytes."""

from matplotlib.patches import FancyArrowPatch, Rectangle

from attention_lib.show.style import COLOURS, new_figure

N_BY_N = dict(facecolor="white", edgecolor=COLOURS["standard"], hatch="//", linewidth=1.5)
N_BY_D = dict(facecolor=COLOURS["hbm"], edgecolor="black", linewidth=1.2)


def _box(ax, x, y, name, big):
    """An N x N matrix as a hatched square, an N x d matrix as a slim bar; centred at (x, y)."""
    width, height = (1.1, 1.1) if big else (0.5, 1.1)
    ax.add_patch(
        Rectangle((x - width / 2, y - height / 2), width, height, **(N_BY_N if big else N_BY_D))
    )
    label = dict(facecolor="white", edgecolor="none", pad=1.2) if big else None
    ax.text(x, y, name, ha="center", va="center", fontsize=11, bbox=label, zorder=5)


def _arrow(ax, start, end, style="-", bend=0.0):
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=12, color="black", linestyle=style,
            linewidth=1.3, shrinkA=0, shrinkB=0, connectionstyle=f"arc3,rad={bend}",
        )
    )  # fmt: skip


def draw_chain():
    """Forward from left to right, backward from right to left, one below the other."""
    fig, ax = new_figure(8.4, 4.3)
    top, low = 3.4, 0.9
    for name, x, y, big in (
        ("Q", 0.5, top, False), ("K", 1.2, top, False), ("S", 3.6, top, True),
        ("P", 6.2, top, True), ("V", 7.6, top, False), ("O", 9.2, top, False),
        ("dQ", 0.5, low, False), ("dK", 1.2, low, False), ("dS", 3.6, low, True),
        ("dP", 6.2, low, True), ("dV", 7.6, low, False), ("dO", 9.2, low, False),
    ):  # fmt: skip
        _box(ax, x, y, name, big)
    for start, end, text in (
        (1.55, 2.95, "$QK^T/\\sqrt{d}$"),
        (4.25, 5.55, "softmax"),
        (7.95, 8.85, "$PV$"),
    ):
        _arrow(ax, (start, top), (end, top))
        ax.text((start + end) / 2, top + 0.2, text, ha="center", va="bottom", fontsize=10)
    for start, end, text in (
        (2.95, 1.55, "$dS\\,K$,  $dS^TQ$"),
        (5.55, 4.25, "$P*(dP-D)$"),
    ):
        _arrow(ax, (start, low), (end, low))
        ax.text((start + end) / 2, low + 0.2, text, ha="center", va="bottom", fontsize=10)
    _arrow(ax, (8.85, low), (7.95, low))
    ax.text(8.4, low + 0.2, "$P^TdO$", ha="center", va="bottom", fontsize=10)
    _arrow(ax, (9.05, low - 0.65), (6.5, low - 0.65), bend=-0.12)
    ax.text(7.8, low - 1.12, "$dO\\,V^T$", ha="center", va="center", fontsize=10)
    for start, end in (
        ((5.9, top - 0.6), (4.95, low + 0.62)),  # P is needed for dS
        ((6.6, top - 0.6), (8.2, low + 0.75)),  # and for dV
    ):
        _arrow(ax, start, end, style=":")
    ax.text(5.25, 2.2, "P is used\nagain, twice", ha="right", va="center", fontsize=9.5)
    ax.text(-0.2, top + 1.05, "forward", weight="bold")
    ax.text(-0.2, low + 0.85, "backward", weight="bold")
    ax.set(xlim=(-0.3, 9.8), ylim=(-0.75, 4.9))
    ax.axis("off")
    return fig


def draw_loop(Tr=4, Tc=3, step=5):
    """The tiles in the order of the loop, one of them at work, and where its results go."""
    fig, ax = new_figure(8, 4.4)
    j, i = divmod(step, Tr)
    for col in range(Tc):
        for row in range(Tr):
            number = col * Tr + row
            colour = COLOURS["sram"] if number == step else "white"
            done = number < step
            ax.add_patch(
                Rectangle((col * 1.4, -row), 1.4, 1, facecolor=colour, edgecolor="black",
                          hatch=".." if done else "", alpha=0.9)
            )  # fmt: skip
            ax.text(col * 1.4 + 0.7, 0.5 - row, f"{number + 1}", ha="center", va="center",
                    bbox=dict(facecolor=colour, edgecolor="none", pad=1.5))  # fmt: skip
    for row in range(Tr):
        here = row == i
        ax.add_patch(Rectangle((-1.5, 0.1 - row), 1.2, 0.8, **N_BY_D))
        ax.text(-0.9, 0.5 - row, f"Q, dO, L, D\nblock {row + 1}", ha="center", va="center",
                fontsize=8, weight="bold" if here else "normal")  # fmt: skip
        ax.add_patch(Rectangle((1.4 * Tc + 1.0, 0.1 - row), 1.2, 0.8, **N_BY_D))
        ax.text(1.4 * Tc + 1.6, 0.5 - row, f"dQ block {row + 1}", ha="center", va="center",
                fontsize=8, weight="bold" if here else "normal")  # fmt: skip
    y = 0.5 - i
    for y0, start, end in ((y + 0.2, 1.0, 0.05), (y - 0.2, 0.05, 1.0)):
        _arrow(ax, (1.4 * Tc + start, y0), (1.4 * Tc + end, y0))
    for col in range(Tc):
        here = col == j
        for y0, text, fill in (
            (1.2, f"K, V block {col + 1}", COLOURS["hbm"]),
            (0.4 - Tr - 0.4, f"dK, dV block {col + 1}", COLOURS["sram" if here else "hbm"]),
        ):
            ax.add_patch(
                Rectangle((col * 1.4 + 0.05, y0), 1.3, 0.6, facecolor=fill, edgecolor="black")
            )
            ax.text(col * 1.4 + 0.7, y0 + 0.3, text, ha="center", va="center", fontsize=8,
                    weight="bold" if here else "normal")  # fmt: skip
    ax.text(1.4 * Tc + 2.35, y, "loaded, added to,\nstored, in each tile", va="center", fontsize=9)
    ax.text(1.4 * Tc + 0.15, 0.3 - Tr, "on chip until the column is done,\nthen stored, once",
            va="center", fontsize=9)  # fmt: skip
    ax.set(xlim=(-1.6, 1.4 * Tc + 4.6), ylim=(-Tr - 0.2, 2.0))
    ax.axis("off")
    return fig


def draw_bytes(runs):
    """Elements moved in each run, as one bar in two parts: label -> (N x N, the rest)."""
    fig, ax = new_figure(7.4, 2.6)
    big = dict(color="white", edgecolor=COLOURS["standard"], hatch="//")
    slim = dict(color=COLOURS["flash"], edgecolor="black")
    for row, (squares, rest) in enumerate(runs.values()):
        names = (None, None) if row else ("P, dP, dS (N x N)", "N x d, and one number a row")
        ax.barh(-row, squares / 1e6, label=names[0], **big)
        ax.barh(-row, rest / 1e6, left=squares / 1e6, label=names[1], **slim)
        ax.text((squares + rest) / 1e6, -row, f" {(squares + rest) / 1e6:.1f}", va="center")
    ax.set_yticks([-row for row in range(len(runs))], list(runs))
    ax.set(xlabel="million elements", xlim=(0, 1.12 * max(sum(x) for x in runs.values()) / 1e6))
    ax.grid(axis="y", visible=False)
    ax.legend(frameon=False, loc="lower right")
    return fig


def draw_shares(bars, printed):
    """Stacked parts in GB: bars is label -> [(part, GB)], printed label -> the printed number."""
    fig, axes = new_figure(8.4, 4.4, nrows=2)
    hatches = ("", "//", "..", "xx", "\\\\")
    fills = (COLOURS["sram"], COLOURS["hbm"], "white", "#dddddd", "white")
    for ax, (label, parts) in zip(axes, bars.items(), strict=True):
        left = 0.0
        for k, (name, size) in enumerate(parts):
            ax.barh(0, size, left=left, color=fills[k], hatch=hatches[k], edgecolor="black",
                    height=0.6, label=f"{name}: {size:.2f}")  # fmt: skip
            left += size
        ax.axvline(printed[label], color=COLOURS["limit"], ls="--", lw=1.5)
        ax.text(printed[label], 0.42, f"printed: {printed[label]} ", ha="right", va="bottom")
        ax.set(yticks=[], xlim=(0, printed[label] * 1.06), ylim=(-0.4, 0.75), xlabel="GB")
        ax.set_title(f"{label}: {left:.2f} GB", loc="left", fontsize=11)
        ax.grid(axis="y", visible=False)
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9.5)
    return fig
