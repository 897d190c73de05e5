"""Notebook 09: a counter for elementwise work, a scheduler for thread blocks, and three pictures.

`Metered` counts what numpy really computes, and `schedule` gives each block to the SM that is free
first; the drawing functions get their results and draw them.
"""

import heapq
import math
from collections import Counter

import numpy as np
from matplotlib.patches import Rectangle

from attention_lib.inputs import check_positive_int
from attention_lib.show.style import COLOURS, HATCHES, new_figure
from attention_lib.tiled import blocks

# Line 10 of FlashAttention-2's listing (arXiv 2307.08691 v1, Algorithm 1): what becomes of the
# un-scaled O, where a = exp(m_old - m_new), one number a row. In print the exponent is -1.


def as_printed(O, a):
    return O / a


def printed_with_a_guard(O, a):
    return np.divide(O, a, out=0 * O, where=a > 0)


def repaired(O, a):
    return O * a


LINE_10 = {
    "as printed": as_printed,
    "printed, 0/0 taken as 0": printed_with_a_guard,
    "repaired": repaired,
}


def fa2_rows(line_10, Q, K, V, Br=64, Bc=100):
    """O (Nq, d) by FlashAttention-2's listing, with one of LINE_10. Q: (Nq, d), K, V: (Nk, d)."""
    O = np.empty_like(Q)
    for rows in blocks(len(Q), Br):
        m, l, Oi = np.full(len(Q[rows]), -np.inf), 0.0, np.zeros_like(Q[rows])
        for cols in blocks(len(K), Bc):
            S = Q[rows] @ K[cols].T / math.sqrt(Q.shape[1])  # score
            m_new = np.maximum(m, S.max(axis=1))
            P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
            l = alpha * l + P.sum(axis=1)  # rescale
            Oi, m = line_10(Oi, alpha[:, None]) + P @ V[cols], m_new  # accumulate
        O[rows] = Oi / l[:, None]
    return O


class Metered(np.ndarray):
    """An array that counts the elementwise work done with it, in elements, by name of the ufunc.

    ops = Counter(); x = Metered.of(array, ops); then exp, *, /, +, - with x add to ops, and so do
    their results. Matrix products and reductions (max, sum) are not counted.
    """

    @classmethod
    def of(cls, array, ops):
        x = np.asarray(array).view(cls)
        x.ops = ops
        return x

    def __array_finalize__(self, other):
        self.ops = getattr(other, "ops", None)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        ops = next((x.ops for x in inputs if isinstance(x, Metered) and x.ops is not None), None)
        plain = [x.view(np.ndarray) if isinstance(x, Metered) else x for x in inputs]
        if out is not None:
            options["out"] = tuple(x.view(np.ndarray) for x in out)
        result = getattr(ufunc, method)(*plain, **options)
        if ops is not None and method == "__call__" and ufunc is not np.matmul:
            ops[ufunc.__name__] += np.size(result)
        return Metered.of(result, Counter() if ops is None else ops)


def schedule(lengths, sms):
    """When each thread block runs: a list of (sm, start, length), in the order of `lengths`.

    Blocks start in order; each goes to the SM that is free first, one block on an SM at a time.
    """
    check_positive_int("sms", sms)
    free = [(0, sm) for sm in range(sms)]
    plan = []
    for length in lengths:
        start, sm = heapq.heappop(free)
        plan.append((sm, start, length))
        heapq.heappush(free, (start + length, sm))
    return plan


def makespan(plan):
    """The time at which the last block of a `schedule` ends."""
    return max(start + length for _, start, length in plan)


def draw_timeline(plans, sms, colours=("flash", "q_outer")):
    """One panel for each plan, one lane for each SM. plans: title -> a list of (sm, start, length).

    Time runs to the right, on one axis for all panels. Returns fig.
    """
    fig, axes = new_figure(8.5, 4.6, nrows=len(plans), sharex=True, squeeze=False)
    for ax, (title, plan), key in zip(axes[:, 0], plans.items(), colours, strict=True):
        for number, (sm, start, length) in enumerate(plan, 1):
            style = dict(facecolor=COLOURS[key], edgecolor="white", hatch=HATCHES[key], linewidth=2)
            ax.add_patch(Rectangle((start, sm - 0.42), length, 0.84, **style))
            box = dict(facecolor="white", edgecolor="none", pad=1)
            ax.text(start + length / 2, sm, number, ha="center", va="center", fontsize=9, bbox=box)
        ax.set(yticks=range(sms), ylim=(sms - 0.4, -0.6), ylabel="SM")
        ax.set_title(f"{title}, {makespan(plan)} steps", loc="left", fontsize=11)
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set(xlabel="time, in tiles", xlim=(0, 1.02 * max(map(makespan, plans.values()))))
    return fig


def draw_shapes(Br, Bc, ratio, marked, line):
    """Which order moves less, over block shapes.

    Br, Bc: the values along the axes. ratio[i][j]: Q outside over K/V outside, at Br[i] and Bc[j];
    NaN where the tiles do not fit. marked: label -> (Br, Bc). line: Br on the even line, for each
    Bc. Returns fig.
    """
    fig, ax = new_figure(7.6, 4.8)
    shown = np.ma.masked_invalid(np.log2(ratio))
    mesh = ax.pcolormesh(Bc, Br, shown, cmap="PuOr", vmin=-2, vmax=2, shading="nearest")
    inside = [(c, r) for c, r in zip(Bc, line, strict=True) if r <= max(Br)]
    ax.plot(*zip(*inside, strict=True), color=COLOURS["limit"], linestyle="--")
    ax.annotate("even", inside[-1], xytext=(6, -2), textcoords="offset points", fontsize=10)
    for label, (r, c) in marked.items():
        ax.plot(c, r, "o", markersize=7, markerfacecolor="white", markeredgecolor="black")
        box = dict(facecolor="white", edgecolor="none", alpha=0.85, pad=1.5)
        ax.annotate(label, (c, r), xytext=(8, 6), textcoords="offset points", fontsize=9, bbox=box)
    ax.set(xlabel="Bc, rows of a K/V block", ylabel="Br, rows of a Q block")
    ax.grid(visible=False)
    bar = fig.colorbar(mesh, ax=ax, ticks=[-2, -1, 0, 1, 2])
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.set_label("Q outside / K/V outside")
    return fig


def draw_warps(warps=4):
    """One tile shared among warps: split over keys ("split-K"), and over queries. Returns fig."""
    fig, axes = new_figure(9, 3.9, ncols=2)
    fills = (COLOURS["sram"], "white", COLOURS["hbm"], "#dddddd")
    hatches = ("", "//", "..", "xx")

    def box(ax, x, y, width, height, text="", warp=None):
        warp_style = {} if warp is None else dict(hatch=hatches[warp % 4])
        face = "white" if warp is None else fills[warp % 4]
        ax.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor="black",
                               **warp_style))  # fmt: skip
        label = dict(facecolor="white", edgecolor="none", pad=1.2)
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9.5,
                bbox=label if text else None)  # fmt: skip

    part = 4 / warps
    for ax, split_keys in zip(axes, (True, False), strict=True):
        for w in range(warps):
            x, y = 2 + w * part, 4 - (w + 1) * part
            if split_keys:
                box(ax, x, 4.4, part, 1.2, f"w{w + 1}", w)  # a slice of K and V
                box(ax, x, 0, part, 4, f"w{w + 1}", w)
                box(ax, 7 + 0.28 * w, 0.28 * (warps - 1 - w), 1.3, 3.2, "", w)
            else:
                box(ax, 0, y, 1.3, part, f"w{w + 1}", w)
                box(ax, 2, y, 4, part, f"w{w + 1}", w)
                box(ax, 7, y, 1.3, part, f"w{w + 1}", w)
        if split_keys:
            box(ax, 0, 0, 1.3, 4, "all\nwarps")
            title, below = "split over keys", f"{warps} partial O: write, wait, add"
        else:
            box(ax, 2, 4.4, 4, 1.2, "all warps")
            title, below = "split over queries", "each warp owns its rows"
        ax.text(0.65, -0.35, "Q", ha="center", va="top")
        ax.text(1.8, 5, "K, V", ha="right", va="center")
        ax.text(4, -0.35, "S, then P", ha="center", va="top")
        ax.text(7.75, -0.35, f"O\n{below}", ha="center", va="top", fontsize=10)
        ax.set_title(title, loc="left", fontsize=11)
        ax.set(xlim=(-0.3, 10.1), ylim=(-1.9, 6))
        ax.axis("off")
    return fig
