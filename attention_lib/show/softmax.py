"""Drawings for notebook 02, and the judge of its small task.

Each drawing returns a figure and the words for it. The numbers in both are computed here from the
scores themselves, by the definition: none of them comes from the loop that the notebook is about.
"""

import math

import numpy as np

from attention_lib.checks import NOT_ATTEMPTED, NOT_YET, PASSED, Result
from attention_lib.reference import softmax
from attention_lib.show.style import COLOURS, HATCHES, MARKERS, new_figure


def tiles_against_row(x, chunk):
    """Two bar charts of the row x: softmax of the whole row, and of each tile of `chunk` scores."""
    fig, axes = new_figure(height=4.4, nrows=2, sharex=True, sharey=True)
    tile_by_tile = softmax(x.reshape(-1, chunk)).ravel()
    versions = (
        ("softmax of the whole row", softmax(x), "flash"),
        ("softmax of each tile", tile_by_tile, "standard"),
    )
    for ax, (title, weights, key) in zip(axes, versions, strict=True):
        ax.bar(range(len(x)), weights, color=COLOURS[key], hatch=HATCHES[key], edgecolor="white")
        ax.set(title=f"{title}: total {weights.sum():.0f}", ylabel="weight", ylim=(0, 1.12))
        for k in range(0, len(x), chunk):
            if k:
                ax.axvline(k - 0.5, color=COLOURS["limit"], lw=1, ls="--")
            total = weights[k : k + chunk].sum()
            ax.text(k + chunk / 2 - 0.5, 0.99, f"tile total {total:.3f}", ha="center")
    axes[-1].set(xlabel="key", xlim=(-0.5, len(x) - 0.5), xticks=range(len(x)))
    held = ", ".join(f"{t:.3f}" for t in softmax(x).reshape(-1, chunk).sum(axis=1))
    return fig, (
        f"Two rows of bars, one bar for each of {len(x)} keys, cut into tiles of {chunk}. Above, "
        f"softmax of the whole row: the tiles hold {held} and add up to 1. Below, softmax of each "
        f"tile: every tile holds 1.000, together {tile_by_tile.sum():.0f}."
    )


def running_state(x, chunk):
    """The scores of the row x in the order they arrive, with m and l after each chunk."""
    fig, ax = new_figure(height=4)
    top, sums, factors, seen = [], [], [], range(chunk, len(x) + 1, chunk)
    ax.bar(range(len(x)), x, color=COLOURS["sram"], width=0.6, label="score")
    for k in seen:
        m = x[:k].max()
        l = np.exp(x[:k] - m).sum()
        top.append(m)
        sums.append(f"{l:.4f}")
        ax.text(k - chunk / 2 - 0.5, x.max() + 0.9, f"m = {m:.4f}\nl = {l:.4f}", ha="center")
        if k < len(x):
            ax.axvline(k - 0.5, color=COLOURS["limit"], lw=1, ls="--")
    ends = [-0.5, *(k - 0.5 for k in seen)]
    line = dict(color=COLOURS["standard"], lw=2.5, label="m, running maximum")
    ax.stairs(top, ends, baseline=None, **line)
    for k, old, new in zip(seen, top, top[1:], strict=False):
        factors.append(f"{math.exp(old - new):.4f}")
        ax.text(k - 0.5, -4.6, f"x {factors[-1]}", ha="center", backgroundcolor="white")
    ax.text(-0.4, -4.6, "rescale:", ha="left")
    ax.set(xlabel="key", ylabel="score", xlim=(-0.5, len(x) - 0.5), ylim=(-5.2, x.max() + 2.4))
    ax.set_xticks(range(len(x)))
    ax.legend(loc="lower left", bbox_to_anchor=(0, 0.12), framealpha=1)
    return fig, (
        f"The {len(x)} scores as bars, in chunks of {chunk}, with m as a step line over them. "
        f"m after each chunk: {', '.join(f'{m:.4f}' for m in top)}. l: {', '.join(sums)}. Between "
        f"the chunks stand the rescale factors: {', '.join(factors)}."
    )


def rising_maxima(per_head, per_row, expected):
    """Left: mean number of rises for each head, by layer. Right: how many rows have how many.

    per_head: (layer, head) -> mean rises of a row. per_row: label -> the rises of each row.
    expected: what unrelated scores give on average.
    """
    fig, (left, right) = new_figure(width=9, height=3.8, ncols=2)
    layers = sorted({layer for layer, _ in per_head})
    heads = sorted({head for _, head in per_head})
    for n, (head, marker) in enumerate(zip(heads, "vP*D", strict=True)):
        at = [i + 0.12 * (n - 1.5) for i in range(len(layers))]
        means = [per_head[layer, head] for layer in layers]
        left.plot(at, means, marker, ms=8, color=COLOURS["limit"], label=f"head {head}")
    left.axhline(expected, color=COLOURS["limit"], ls="--", lw=1.5)
    left.text(-0.4, expected - 0.06, f"unrelated scores: {expected:.2f}", ha="left", va="top")
    left.set(xticks=range(len(layers)), xticklabels=[f"layer {n}" for n in layers], ylim=(-0.15, 3))
    left.set(xlim=(-0.45, len(layers) - 0.55), ylabel="rises of m, mean over rows")
    left.legend(ncols=2, loc="upper right", framealpha=1)

    looks = (
        ("quiet", "x", "--"),
        ("standard", MARKERS["standard"], "-"),
        ("flash", MARKERS["flash"], "-"),
        ("q_outer", MARKERS["q_outer"], "-"),
    )
    for (label, rises), (key, marker, ls) in zip(per_row.items(), looks, strict=True):
        share = np.bincount(rises, minlength=8) / len(rises)
        right.plot(share, color=COLOURS[key], marker=marker, ms=7, ls=ls, label=label)
    right.set(xlabel="rises of m in a row (7 chunks can raise it)", ylabel="share of rows")
    right.set(ylim=(0, 1.04), xticks=range(8))
    right.legend(framealpha=1)
    spans = []
    for layer in layers:
        means = [per_head[layer, head] for head in heads]
        spans.append(f"layer {layer} from {min(means):.1f} to {max(means):.1f}")
    case_means = [f"{label}: {rises.mean():.1f}" for label, rises in per_row.items()]
    return fig, (
        f"Left: mean rises of m in a row, for {len(per_head)} heads: {', '.join(spans)}. Unrelated "
        f"scores give {expected:.2f}. Right: how the rows of four cases spread over 0 to 7 rises. "
        f"Mean rises: {'; '.join(case_means)}."
    )


def judge_merge(merge, x):
    """Try merge(m_1, l_1, m_2, l_2) -> m, l on the pieces of the row x: a Result with what to do.

    The pieces come forwards and backwards, and two of them are empty, with m = -inf and l = 0.
    """
    empty = (-math.inf, 0.0)
    pieces = [(c.max(), np.exp(c - c.max()).sum()) for c in x.reshape(-1, 4)]

    def fold(parts):
        total = parts[0]
        for part in parts[1:]:
            total = merge(*total, *part)
        return np.array(total, dtype=float)

    try:
        with np.errstate(all="ignore"):
            first = merge(*pieces[0], *pieces[1])
            parts = first if isinstance(first, tuple) else (first,)
            if any(part is ... for part in parts):
                return Result(NOT_ATTEMPTED, "my_merge: put m, l in place of the dots.")
            if np.shape(first) != (2,):
                return Result(NOT_YET, "my_merge has to return two numbers, m and l.")
            two, turned, none = fold(pieces[:2]), fold(pieces[1::-1]), fold([empty, empty])
            forwards, backwards = fold([empty, *pieces, empty]), fold(pieces[::-1])
    except Exception as error:  # a learner's function may do anything
        return Result(NOT_YET, f"my_merge raised {type(error).__name__}: {error}")
    m, l = x[:8].max(), np.exp(x[:8] - x[:8].max()).sum()
    if not np.isclose(two[0], m):
        return Result(NOT_YET, "m of both together is the larger of the two m.")
    if np.isclose(two[1], pieces[0][1] + pieces[1][1]):
        return Result(NOT_YET, "the two l are on two scales: rescale before you add.", "added")
    if not np.isclose(two[1], l):
        return Result(NOT_YET, f"l is {two[1]:.4f}, not {l:.4f}: each l times e^(its m - new m).")
    if not np.allclose(turned, two):
        says = "right with the larger m second, wrong with it first: rescale both l."
        return Result(NOT_YET, says, "one-side-rescaled")
    if not np.array_equal(none, empty):
        return Result(NOT_YET, "two empty pieces give (-inf, 0): mind -inf - (-inf).", "no-guard")
    whole = (x.max(), np.exp(x - x.max()).sum())
    if not np.allclose(backwards, whole):
        return Result(NOT_YET, "two pieces are right, the whole row backwards is not.")
    if not np.allclose(forwards, whole):
        return Result(NOT_YET, "wrong where one of the two pieces is empty.", "no-guard")
    return Result(PASSED, "forwards, backwards, with empty pieces: the same m and l.")
