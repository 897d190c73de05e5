"""The map of the course: its notebooks, what each is about, and the order to read them in."""

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from attention_lib.show.style import COLOURS, new_figure

# file, title, the idea; in reading order
NOTEBOOKS = (
    ("00_start_here", "Start here", "your machine, and how to work"),
    ("01_where_the_time_goes", "Where the time goes", "three kernels wait for memory"),
    ("02_softmax_one_piece_at_a_time", "Softmax one piece at a time", "a row not seen as a whole"),
    ("03_tiled_attention", "Tiled attention", "the whole algorithm, in tiles"),
    ("04_counting_hbm_traffic", "Counting HBM traffic", "every load and store"),
    ("05_memory_and_recomputation", "Memory and recomputation", "no N x N matrix, and its price"),
    ("06_what_fits_in_sram", "What fits in SRAM", "block sizes of real GPUs"),
    ("07_the_framework_call", "The framework call", "one line of PyTorch"),
    ("08_backward", "The backward pass", "gradients from O and L"),
    ("09_loop_order", "Loop order and FlashAttention-2", "which loop is outside"),
    ("10_block_sparse", "Block-sparse attention", "tiles that are left out"),
    ("11_one_number_three_answers", "One number, three answers", "which memory is counted"),
    ("12_decode_and_beyond", "Decode and beyond", "the merge, reused"),
    ("13_what_the_papers_measured", "What the papers measured", "their figures, with sources"),
    ("14_your_first_gpu_kernel", "Your first GPU kernel", "threads, barriers, guards"),
    ("15_to_tensor_cores", "To tensor cores", "how to keep them fed"),
    ("16_where_the_bytes_go", "Where the bytes go", "hardware counters"),
    ("17_what_each_idea_bought", "What each idea bought", "predicted, then measured"),
    ("18_the_framework_call_on_a_gpu", "The framework call on a GPU", "which kernel was picked"),
    ("19_hopper_in_200_lines", "Hopper in 200 lines", "wgmma, and copies by TMA"),
    ("20_specialised_warps", "Specialised warps", "some load, others compute"),
    ("21_hiding_the_softmax", "Hiding the softmax", "behind the matrix products"),
    ("22_backward_on_the_gpu", "Backward on the GPU", "five products, one kernel"),
    ("23_decode_on_the_gpu", "Decode on the GPU", "reading the cache, at full rate"),
    ("24_train_a_small_gpt", "Train a small GPT", "our kernels in a model that learns"),
)
MODULE = 8  # 00 to 07; the next ones go beyond it
ON_A_GPU = 14  # and those from here on are about kernels on a GPU
COLUMNS, WIDTH, HEIGHT = 3, 0.84, 0.62


def map_figure():
    """The notebooks as a path of boxes, to and fro.

    Those beyond the module have a dashed edge, those about kernels on a GPU a double one.
    """
    fig, ax = new_figure(10.4, 11.3)
    places = []
    for i, (stem, title, idea) in enumerate(NOTEBOOKS):
        y, step = divmod(i, COLUMNS)
        x = step if y % 2 == 0 else COLUMNS - 1 - step
        places.append((x, y))
        gpu, beyond = i >= ON_A_GPU, i >= MODULE
        colour = "quiet" if gpu else "q_outer" if beyond else "sram" if i else "hbm"
        ax.add_patch(
            FancyBboxPatch(
                (x, y),
                WIDTH,
                HEIGHT,
                boxstyle="round,pad=0.02",
                facecolor=(*_rgb(COLOURS[colour]), 0.35),
                edgecolor="black" if beyond else "none",
                linestyle="-" if gpu else "--",
                linewidth=0.8,
            )
        )
        if gpu:  # the inner line of its double edge
            inner = Rectangle((x - 0.005, y - 0.005), WIDTH + 0.01, HEIGHT + 0.01)
            inner.set(facecolor="none", edgecolor="black", linewidth=0.8)
            ax.add_patch(inner)
        ax.text(x + 0.02, y + 0.17, stem[:2], fontsize=13, weight="bold", va="center")
        ax.text(x + 0.12, y + 0.17, title, fontsize=9.5, weight="bold", va="center")
        ax.text(x + 0.02, y + 0.45, idea, fontsize=9.5, va="center")
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
    ax.set(xlim=(-0.06, COLUMNS - 0.1), ylim=(places[-1][1] + HEIGHT + 0.1, -0.1))
    ax.axis("off")
    return fig


def _rgb(colour):
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
