"""The map of the course: its notebooks, what each is about, and which one builds on which."""

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from attention_lib.show.style import COLOURS, new_figure

# number, title, the idea; then the place (column, row) in the picture
NOTEBOOKS = (
    ("00", "Start here", "your machine, and how to work", (0, 0)),
    ("01", "Where the time goes", "three kernels wait for memory", (1, 0)),
    ("02", "Softmax one piece at a time", "a row without seeing all of it", (2, 0)),
    ("03", "Tiled attention", "the whole algorithm, in tiles", (2, 1)),
    ("04", "Counting HBM traffic", "every load and store", (1, 1)),
    ("05", "Memory and recomputation", "no N x N matrix, and its price", (0, 1)),
    ("06", "What fits in SRAM", "block sizes of real GPUs", (0, 2)),
    ("07", "The framework call", "one line of PyTorch", (1, 2)),
)
WIDTH, HEIGHT = 0.8, 0.62


def map_figure():
    """The eight notebooks as a path of boxes; each leads to the next."""
    fig, ax = new_figure(10.4, 4.2)
    for number, title, idea, (x, y) in NOTEBOOKS:
        colour = COLOURS["hbm"] if number == "00" else COLOURS["sram"]
        ax.add_patch(
            FancyBboxPatch(
                (x, y),
                WIDTH,
                HEIGHT,
                boxstyle="round,pad=0.02",
                facecolor=colour,
                alpha=0.35,
                edgecolor="none",
            )
        )
        ax.text(x + 0.03, y + 0.17, number, fontsize=13, weight="bold", va="center")
        ax.text(x + 0.13, y + 0.17, title, fontsize=9.5, weight="bold", va="center")
        ax.text(x + 0.03, y + 0.45, idea, fontsize=9.5, va="center")
    places = [place for *_, place in NOTEBOOKS]
    for (x0, y0), (x1, y1) in zip(places, places[1:], strict=False):
        if y0 == y1:
            side = 1 if x1 > x0 else -1
            start = (x0 + (WIDTH + 0.03 if side == 1 else -0.03), y0 + HEIGHT / 2)
            end = (x1 + (-0.03 if side == 1 else WIDTH + 0.03), y1 + HEIGHT / 2)
        else:
            start = (x0 + WIDTH / 2, y0 + HEIGHT + 0.03)
            end = (x1 + WIDTH / 2, y1 - 0.03)
        ax.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, color="black")
        )
    ax.set(xlim=(-0.06, 2.9), ylim=(2.75, -0.1))
    ax.axis("off")
    return fig
