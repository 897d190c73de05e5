"""Notebook 23: models of a decoding step on a GPU, and their pictures. No GPU is needed.

`modelled` is what `decoding.cut` minimises, `reads_in_turn` counts the merge of decode.cu, and
`last_block` plays it. The drawings take rows of the recording `decode`.
"""

import functools

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from attention_lib import online
from attention_lib.gpu import decoding
from attention_lib.gpu.bench_decode import best
from attention_lib.hardware import GPUS
from attention_lib.inputs import check_positive_int
from attention_lib.show.style import COLOURS, new_figure

NAMES = {"ours": "ours", "flash": "torch FLASH", "cudnn": "torch cuDNN"}
STYLES = {  # colour and marker of each
    "ours": (COLOURS["q_outer"], "o"),
    "flash": (COLOURS["flash"], "s"),
    "cudnn": (COLOURS["standard"], "^"),
}


def at_once(d, gpu="H200"):
    """How many blocks of decode.cu a GPU runs at once."""
    chip = GPUS[gpu]
    return chip.sms * decoding.stages(d, chip.sram_per_block, chip.sram_per_sm)[1]


def modelled(heads, tiles, rows, places, splits):
    """Time of so many splits, in the time of one tile: what decoding.cut minimises."""
    rounds = -(-heads * splits // places)
    each = decoding.START + -(-tiles // splits)
    return rounds * each + decoding.merging(splits, rows)[0]


def reads_in_turn(splits, radix, rows, d):
    """Reads of 16 bytes that a lane makes to merge, over all levels; 0 if nothing is merged.

    A warp reads 128 numbers of a state at once and takes every fourth state of its group. The
    group with the most states counts. Source: the last loop of decode.cu.
    """
    for name, x in (("splits", splits), ("radix", radix), ("rows", rows), ("d", d)):
        check_positive_int(name, x)
    if radix < 2 <= splits:
        raise ValueError(f"radix is {radix}; accepted: at least 2, to merge {splits} splits")
    reads, n = 0, splits
    while n > 1:
        reads += -(-rows * d // 128) * -(-min(radix, n) // 4)
        n = -(-n // radix)
    return reads


def last_block(states, order, fence=True, late=()):
    """Play the end of a launch: blocks finish in `order`, and the last one merges.

    A block stores its state and then draws a number. Without a fence, the stores of the blocks in
    `late` have not arrived when the number is drawn. Returns (the merged State, who merged it, the
    counter afterwards).
    """
    if sorted(order) != list(range(len(states))):
        raise ValueError(f"order is {order!r}; accepted: each of {len(states)} blocks once")
    rows, d = states[0].O.shape
    memory = [online.start(rows, d, states[0].O.dtype) for _ in states]
    counter = 0
    for block in order:
        if fence or block not in late:
            memory[block] = states[block]  # store
        drawn, counter = counter, (counter + 1) % len(states)  # atomicInc: wraps to 0
    assert drawn == len(states) - 1
    memory[block] = states[block]  # its own stores a block always sees
    return functools.reduce(online.merge, memory), block, counter


def draw_sms(cases, sms=132):
    """The SMs as squares, one panel a case: title -> blocks. A square shows its blocks: 0, 1, 2."""
    fig, axes = new_figure(9.2, 3.7, ncols=len(cases))
    for ax, (title, blocks) in zip(axes, cases.items(), strict=True):
        for k in range(sms):
            n = blocks // sms + (k < blocks % sms)
            x, y = k % 12, k // 12
            fill = ("white", COLOURS["sram"], COLOURS["flash"])[min(n, 2)]
            ax.add_patch(Rectangle((x, y), 0.86, 0.8, facecolor=fill, edgecolor="black", lw=0.7))
            if n:
                ax.text(x + 0.43, y + 0.42, str(n), ha="center", va="center", fontsize=8,
                        color="white" if n > 1 else "black")  # fmt: skip
        busy = min(blocks, sms)
        ax.set_title(f"{title}:\n{busy} of {sms} SMs read", loc="left", fontsize=11)
        ax.set(xlim=(-0.1, 12), ylim=(-(-sms // 12), -0.1))
        ax.axis("off")
    return fig


def _plain(axis, ticks=None):
    """A log axis with numbers as one writes them."""
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
    axis.set_minor_locator(NullLocator())
    if ticks is not None:
        axis.set_ticks(ticks)


def draw_reading(rows, copy_gbs):
    """Microseconds of our kernel (graph replays) against bytes of the cache; the copy's rate."""
    fig, ax = new_figure(8, 4)
    kinds = {}
    for r in rows:
        kinds.setdefault(rows_a_tile(r), []).append(r)
    for (n, mine), marker, key in zip(
        sorted(kinds.items()), "os^D", ("q_outer", "flash", "standard", "hbm"), strict=False
    ):
        x, y = [r["cache_bytes"] / 1e6 for r in mine], [r["ours_graph"] for r in mine]
        ax.plot(x, y, marker, color=COLOURS[key], markersize=6, alpha=0.85,
                label=f"{n} row{'s' if n > 1 else ''} a KV head")  # fmt: skip
    x = np.array([1, 10_000.0])
    ax.plot(x, 1e3 * x / copy_gbs, color=COLOURS["limit"], linewidth=1.2)
    ax.text(140, 1e3 * 110 / copy_gbs, f"bytes / {copy_gbs:,.0f} GB/s", va="top", fontsize=9.5)
    ax.set(xscale="log", yscale="log", xlim=(0.8, 12_000), ylim=(1, 4000))
    _plain(ax.xaxis, [1, 10, 100, 1000, 10_000])
    _plain(ax.yaxis, [1, 10, 100, 1000])
    ax.set(xlabel="K and V of all heads, MB, log scale", ylabel="microseconds, log scale")
    ax.legend(frameon=False, loc="upper left", fontsize=9.5)
    return fig


def rows_a_tile(r):
    """Queries that share a head of K and V: the rows of the tile that are in use."""
    return r["heads"] // r["kv_heads"] * r["Nq"]


def draw_cut(cases, places):
    """The model over the number of splits; the choice of decoding.cut is marked.

    cases: label -> (KV heads of the batch, tiles, rows).
    """
    fig, ax = new_figure(8, 3.9)
    styles = zip(cases.items(), ("flash", "standard", "q_outer", "hbm"), "os^D", strict=False)
    for (label, (heads, tiles, rows)), key, marker in styles:
        splits = list(range(1, min(tiles, 512, decoding.COUNTERS // 2 // heads) + 1))
        ax.plot(splits, [modelled(heads, tiles, rows, places, s) for s in splits],
                color=COLOURS[key], linewidth=1.3)  # fmt: skip
        mine = decoding.cut(heads, tiles, rows, places)[0]
        ax.plot(mine, modelled(heads, tiles, rows, places, mine), marker, color=COLOURS[key],
                markersize=9, label=f"{label}: {mine}")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="splits of each KV head, log scale")
    _plain(ax.xaxis, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    _plain(ax.yaxis, [10, 30, 100, 300, 1000])
    ax.set(ylabel="modelled time (tiles), log scale", ylim=(10, 3000))
    ax.legend(framealpha=1, edgecolor="none", fontsize=9.5, title="chosen", loc="upper right")
    return fig


def draw_lengths(rows, copy_gbs):
    """One shape over the length of the cache: calls from Python, and replays of a graph."""
    fig, axes = new_figure(9.4, 3.9, ncols=2, sharey=True)
    x = [r["Nk"] for r in rows]
    for ax, kind, title in zip(axes, ("", "_graph"), ("from Python", "graph replays"), strict=True):
        for key, (colour, marker) in STYLES.items():
            ax.plot(x, [r[key + kind] for r in rows], color=colour, marker=marker, markersize=6,
                    label=NAMES[key])  # fmt: skip
        reading = [r["cache_bytes"] / copy_gbs / 1e3 for r in rows]
        ax.plot(x, reading, color=COLOURS["limit"], linestyle="--", linewidth=1.2, label="reading")
        ax.set(xscale="log", yscale="log", xlabel="keys, log scale", ylim=(1, 500))
        _plain(ax.xaxis, x)
        ax.tick_params(axis="x", labelsize=9)
        _plain(ax.yaxis, [1, 3, 10, 30, 100, 300])
        ax.set_title(title, loc="left", fontsize=11)
    axes[0].set_ylabel("microseconds, log scale")
    axes[1].legend(frameon=False, fontsize=9.5, loc="upper left")
    return fig


def gaps(rows, places):
    """[(reads in turn, microseconds behind torch's best by replay, row)] where Nq = 1."""
    found = []
    for r in rows:
        if r["Nq"] == 1:
            heads, n = r["batch"] * r["kv_heads"], rows_a_tile(r)
            how = decoding.cut(heads, -(-r["Nk"] // decoding.KEYS), n, places)
            behind = r["ours_graph"] - best(r, "_graph")[0]
            found.append((reads_in_turn(*how, n, r["d"]), behind, r))
    return found


def draw_gaps(points, slope):
    """How far behind torch's best each row is, against the reads in turn of its merge.

    points: as from `gaps`. slope: microseconds a read, drawn as a line.
    """
    fig, ax = new_figure(7.6, 3.9)
    for n, (colour, marker) in zip((1, 4, 16), STYLES.values(), strict=True):
        mine = [(reads, behind) for reads, behind, r in points if rows_a_tile(r) == n]
        ax.plot(*zip(*mine, strict=True), marker, color=colour, markersize=7, alpha=0.85,
                label=f"{n} row{'s' if n > 1 else ''} a KV head")  # fmt: skip
    ax.axhline(0, color=COLOURS["limit"], linewidth=1)
    most = max(reads for reads, _, _ in points)
    ax.plot([0, most], [0, slope * most], color=COLOURS["limit"], linestyle="--", linewidth=1.2,
            zorder=0)  # fmt: skip
    ax.text(0.72 * most, 0.6 * slope * most, f"{1e3 * slope:.0f} ns a read", fontsize=9.5)
    ax.set(xlabel="reads of a lane in the merges", ylabel="microseconds behind torch's best")
    ax.legend(frameon=False, loc="upper left", fontsize=9.5)
    return fig
