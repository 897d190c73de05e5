"""Notebook 23: models of a decoding step on a GPU, and their pictures. No GPU is needed.

`trips` counts the reads of the merges of decode.cu that wait for each other, and `last_block` plays
the end of a launch. The drawings take rows of the recordings `decode` and `decode_before`.
"""

import functools

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from attention_lib import online
from attention_lib.gpu import decoding
from attention_lib.gpu.bench_decode import best
from attention_lib.inputs import check_positive_int
from attention_lib.show.style import COLOURS, new_figure

NAMES = {"ours": "ours", "flash": "torch FLASH", "cudnn": "torch cuDNN"}
# Tried on one H200, 2026-11-30, MQA and large caches, by graph replays: a log, not a recording.
TRIES = (
    ("eight warps a block, not four", "MQA, 64k keys", "6 to 7% slower"),
    ("eight warps a block, not four", "large caches", "from 1% faster to 11% slower"),
    ("twice the tiles under way, one block an SM", "MQA, 64k keys", "2 to 3% slower"),
    ("16 states at once in the last merge, not 8", "MQA, 64k keys", "2% faster"),
    ("copies with the hint L2::128B", "large caches", "within 1.5%, either way"),
    ("copies with the hint L2::256B", "large caches", "8% slower, or more"),
)
STYLES = {  # colour and marker of each
    "ours": (COLOURS["q_outer"], "o"),
    "flash": (COLOURS["flash"], "s"),
    "cudnn": (COLOURS["standard"], "^"),
}


def trips(splits, cluster, rows, d):
    """(in clusters, through memory): reads of a thread in a merge, one after the other, at most.

    A thread reads eight states at a time, 4 columns of each; 128 threads share a block's slice of
    the rows x d columns. Source: `merge` in decode.cu, and the two loops that call it.
    """
    for name, x in (("splits", splits), ("cluster", cluster), ("rows", rows), ("d", d)):
        check_positive_int(name, x)
    if splits % cluster:
        raise ValueError(f"splits is {splits}; accepted: a multiple of the cluster, {cluster}")
    loops = -(-rows * d // (4 * decoding.THREADS * cluster))
    clusters = splits // cluster
    return (
        loops * -(-cluster // 8) if cluster > 1 else 0,
        loops * -(-clusters // 8) if clusters > 1 else 0,
    )


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


def draw_slices(cluster):
    """A merge in a cluster: before, each block has all columns of its state; after, one slice of
    all states."""
    fig, axes = new_figure(9.2, 3.6, ncols=2)
    shades = [COLOURS["flash"], COLOURS["sram"]] * cluster
    titles = "each block has its own state", "each merges one slice of all states"
    for ax, title, merged in zip(axes, titles, (False, True), strict=True):
        for block in range(cluster):
            ax.text(-0.25, block + 0.42, f"block {block}", ha="right", va="center", fontsize=9.5)
            for slice_ in range(cluster):
                mine = slice_ == block
                face = "white" if merged and not mine else shades[slice_]
                ax.add_patch(Rectangle((slice_, block), 0.92, 0.8, facecolor=face,
                                       edgecolor="black", lw=0.7,
                                       linestyle="-" if face != "white" else ":"))  # fmt: skip
        ax.set_title(title, loc="left", fontsize=11)
        ax.set(xlim=(-1.7, cluster), ylim=(cluster, -0.2))
        ax.axis("off")
        ax.text(cluster / 2, cluster + 0.1, "columns of O", ha="center", va="top", fontsize=9.5)
    return fig


def draw_cut(cases, reach):
    """The model over the number of splits, in clusters of the size that `cut` chooses; its choice
    is marked. Dashed: the same without clusters. cases: label -> (KV heads, tiles, rows). reach: as
    in decoding.cut.
    """
    fig, ax = new_figure(8, 3.9)
    styles = zip(cases.items(), ("flash", "standard", "q_outer", "hbm"), "os^D", strict=False)
    for (label, case), key, marker in styles:
        splits, cluster = decoding.cut(*case, reach)
        times = {w[1:]: decoding.duration(*case, *w) for w in decoding.ways(*case[:2], reach)}
        for size, line in {1: "--", cluster: "-"}.items():
            curve = {way[0]: time for way, time in times.items() if way[1] == size}
            ax.plot(list(curve), list(curve.values()), line, color=COLOURS[key], linewidth=1.3)
        ax.plot(splits, times[splits, cluster], marker, color=COLOURS[key], markersize=9,
                label=f"{label}: {splits}, {cluster}")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="splits of each KV head, log scale")
    _plain(ax.xaxis, [1, 2, 4, 8, 16, 32, 64, 128, 256])
    _plain(ax.yaxis, [10, 30, 100, 300, 1000])
    ax.set(ylabel="modelled time (tiles), log scale", ylim=(6, 1500))
    ax.legend(framealpha=1, edgecolor="none", fontsize=9.5, loc="upper right",
              title="chosen: splits, cluster")  # fmt: skip
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


def versions(before, now):
    """[(version, its rows)], the oldest first. before, now: rows of the two recordings."""
    found = {}
    for r in before:
        found.setdefault(r["version"], []).append(r)
    return [*found.items(), ("a cluster merges, each block its slice", now)]


def draw_versions(histories):
    """Three versions and torch's best (of the last one's run) over the length of an MQA cache.

    histories: d -> as from `versions`, with rows of one shape.
    """
    fig, axes = new_figure(9.4, 3.9, ncols=len(histories), sharey=True)
    for ax, (d, history) in zip(axes, histories.items(), strict=True):
        for (label, rows), key, marker in zip(
            history, ("standard", "hbm", "q_outer"), "^so", strict=True
        ):
            ax.plot([r["Nk"] for r in rows], [r["ours_graph"] for r in rows], marker=marker,
                    color=COLOURS[key], markersize=6, label=label)  # fmt: skip
        ax.plot([r["Nk"] for r in rows], [best(r, "_graph")[0] for r in rows], "--",
                color=COLOURS["limit"], linewidth=1.3, label="torch's best")  # fmt: skip
        ax.set(xscale="log", yscale="log", xlabel="keys, log scale", ylim=(4, 100))
        _plain(ax.xaxis, [r["Nk"] for r in rows])
        ax.tick_params(axis="x", labelsize=9)
        _plain(ax.yaxis, [5, 10, 20, 50, 100])
        ax.set_title(f"d = {d}", loc="left", fontsize=11)
    axes[0].set_ylabel("microseconds (graph), log scale")
    axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    return fig
