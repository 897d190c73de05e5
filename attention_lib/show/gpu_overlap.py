"""Notebook 21: units that take turns or work at once, blocks dealt to SMs, a sum that drifts.

Models to run without a GPU. Each unit of an SM is shared evenly by the warpgroups that want it.
Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2, and rung8_overlap.cu.
`TRIES` is the log of how rung 8 came about; `SKIPPED`, `ALL_ARRIVE` and `BRANCH` are experiments.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from attention_lib.hardware import GPUS
from attention_lib.inputs import check_positive_int
from attention_lib.show.style import COLOURS, new_figure

ROWS, KEYS = 64, 128  # of the tile that a warpgroup works on
FLOP_A_CLOCK = 4096  # tensor cores of one SM, 16-bit inputs
A_CLOCK = {"exp": 16, "max": 64, "convert": 64, "fp32": 128}  # results a clock and SM

# Notes taken while rung 8 was made. One H200, 2026-11-29, float16. The variants were not kept, so
# this is a log and no recording. TFLOP/s before and after, where they were written down.
TRIES = (
    ("tiles of 192 keys in place of 128", "slower", ()),
    ("turns (named barriers) on, against off", "a few percent faster at d = 128", ()),
    ("blocks that stay, next work by a fixed step", "causal runs became slower", ()),
    ("next work drawn from a counter", "that was mended", ()),
    ("longest first over all heads at once", "slower than head by head", ()),
    ("24 registers for the loader", "spilled; 40, or 32 with 3 readers, do not", ()),
    ("work number read from shared memory", "ptxas serialised wgmma (C7519, C7510)", ()),
    ("the same through __shfl_sync", "no warning: the number is uniform now", ()),
    ("O stored by TMA: d = 128, N = 1024", "faster", (530, 568)),
    ("O stored by TMA: d = 128, N = 4096, causal", "faster", (458, 494)),
    ("O stored by TMA: d = 128, N = 16,384", "faster", (580, 598)),
    ("O stored by TMA: d = 64", "no difference beyond noise", ()),
)
# Two comparisons of kernels, each in one run, of the same day, GPU and dtype; d = 64, TFLOP/s.
# N -> causal: every reader computes all tiles of its block; it skips those it does not see; cuDNN.
SKIPPED = {1024: (271, 322, 340), 16_384: (454, 466, 453)}
# N -> no mask: the leader arrives at Q_empty for its reader; all 128 threads arrive.
ALL_ARRIVE = {1024: (405, 393), 16_384: (507, 492)}
# How a reader gets the number of its block, causal, float16. (d, N) -> TFLOP/s of a branch for one
# lane, and of a load with a predicate, which is in the kernel: both in one run, 2026-11-30.
BRANCH = {
    (64, 1024): (302, 311),
    (64, 16_384): (443, 456),
    (128, 1024): (383, 395),
    (128, 16_384): (535, 556),
}
# d -> R2UR in the machine code, NVRTC 13.0: the branch; all lanes and __syncwarp; the predicate.
MOVES = {64: (90, 41, 36), 128: (115, 46, 46)}


# ---------------------------------------------------------------- clocks of a tile


def clocks(d):
    """Clocks of one SM for a tile of one warpgroup, 64 rows x 128 keys: each part alone.

    products: S = Q K^T and O += P V. exp: one a score. other: max, multiply-add, sum and rounding
    of each score, and the rescale of O.
    """
    check_positive_int("d", d)
    scores = ROWS * KEYS
    other = scores / A_CLOCK["max"] + 2 * scores / A_CLOCK["fp32"]
    other += scores / 2 / A_CLOCK["convert"] + ROWS * d / A_CLOCK["fp32"]
    return {
        "products": 2 * 2 * scores * d / FLOP_A_CLOCK,
        "exp": scores / A_CLOCK["exp"],
        "other": other,
    }


def measured_clocks(tflops, d, gpu="H200"):
    """Clocks of one SM for such a tile at a measured speed; the clock is that of the peak."""
    return clocks(d)["products"] * GPUS[gpu].tensor_flops / (tflops * 1e12)


# ---------------------------------------------------------------- the timeline


@dataclass(frozen=True)
class Step:
    """One piece of work: of warpgroup `who`, for tile `tile`, on `unit`, from start to end."""

    who: int
    what: str
    tile: int
    unit: str
    start: float
    end: float


def in_turn(tiles):
    """Rung 7: S, softmax, P V, and only then the next tile. [(what, tile, what must have ended)]"""
    work = []
    for i in range(tiles):
        work += [("S", i, [("PV", i - 1)]), ("softmax", i, [("S", i)]), ("PV", i, [("softmax", i)])]
    return work


def overlapped(tiles):
    """Rung 8: S of tile i is started before P V of tile i - 1, and softmax of tile i beside it."""
    work = [("S", 0, []), ("softmax", 0, [("S", 0)])]
    for i in range(1, tiles):
        work += [
            ("S", i, [("softmax", i - 1), ("PV", i - 2)]),
            ("PV", i - 1, [("S", i)]),
            ("softmax", i, [("S", i)]),
        ]
    return work + [("PV", tiles - 1, [("softmax", tiles - 1), ("PV", tiles - 2)])]


def timeline(program, warpgroups, product, softmax, tiles=6, late=0, turns=False):
    """Run a program on every warpgroup; returns the Steps.

    program: in_turn or overlapped. product, softmax: clocks of S or of P V, and of softmax, with
    the unit to oneself. late: clocks by which each warpgroup starts after the one before it.
    turns: a warpgroup starts its products when the one before it has ended its own.
    """
    check_positive_int("warpgroups", warpgroups)
    left, after, begun, done = {}, {}, {}, {}
    for who in range(warpgroups):
        for what, i, needs in program(check_positive_int("tiles", tiles)):
            left[who, what, i] = float(softmax if what == "softmax" else product)
            after[who, what, i] = [(who, *need) for need in needs if need[1] >= 0]
            if turns and what == "S" and i > 0:
                before = (who - 1, "PV", i - 1) if who else (warpgroups - 1, "PV", i - 2)
                after[who, what, i] += [before] if before[2] >= 0 else []
    now, steps = 0.0, []
    while left:
        active = {}
        for key in left:
            if all(need in done for need in after[key]) and now >= key[0] * late:
                active.setdefault("softmax" if key[1] == "softmax" else "products", []).append(key)
                begun.setdefault(key, now)
        ends = [left[k] * len(keys) for keys in active.values() for k in keys]
        starts = [w * late - now for w in range(warpgroups) if w * late > now]
        passed = min(ends + starts)
        now += passed
        for unit, keys in active.items():
            for key in keys:
                left[key] -= passed / len(keys)
                if left[key] < 1e-6:
                    del left[key]
                    done[key] = now
                    steps.append(Step(*key, unit, begun[key], now))
    return steps


def clocks_a_tile(steps):
    """Clocks for each tile of each warpgroup, start and end of the run left out.

    From the end of tile 1 to the end of the last but one, of all warpgroups.
    """
    ends = sorted(s.end for s in steps if s.what == "PV")
    warpgroups = 1 + max(s.who for s in steps)
    first, last = ends[2 * warpgroups - 1], ends[-1 - warpgroups]
    return (last - first) / (len(ends) - 3 * warpgroups)


def busy(steps):
    """Share of the run in which the tensor cores have work."""
    spans = sorted((s.start, s.end) for s in steps if s.unit == "products")
    total, reached = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / max(s.end for s in steps)


# ---------------------------------------------------------------- the new order of the loop


def attention_overlapped(Q, K, V, Bc, late_rescale=True):
    """One block of Q in the order of rung 8, tiles from the last to the first. numpy, (N, d).

    late_rescale: O is rescaled for tile i after P V of tile i - 1 has been added, as it must be.
    False: before, when m is known. Returns O.
    """
    scale, tiles = 1 / math.sqrt(Q.shape[1]), range(0, K.shape[0], Bc)[::-1]
    O, m, l = np.zeros((len(Q), V.shape[1])), np.full(len(Q), -np.inf), np.zeros(len(Q))
    waiting = None  # weights of the tile before, and its V
    for j in tiles:
        S = Q @ K[j : j + Bc].T * scale  # score: started first
        m_new = np.maximum(m, S.max(axis=1))
        rescale, P = np.exp(m - m_new), np.exp(S - m_new[:, None])
        if not late_rescale:
            O *= rescale[:, None]
        if waiting:
            O += waiting[0] @ waiting[1]  # accumulate the tile before, beside this softmax
        if late_rescale:
            O *= rescale[:, None]
        l, m, waiting = l * rescale + P.sum(axis=1), m_new, (P, V[j : j + Bc])
    return (O + waiting[0] @ waiting[1]) / l[:, None]


# ---------------------------------------------------------------- causal blocks on SMs


def blocks_of(heads, N, Br, order="longest first"):
    """[(head, tiles)] of a causal launch in the order of their numbers.

    order: "as they come", "longest first" (in each head), or "longest first, all heads".
    """
    head = [-(-min(N, row + Br) // KEYS) for row in range(0, N, Br)]
    orders = {
        "as they come": lambda: [(h, n) for h in range(heads) for n in head],
        "longest first": lambda: [(h, n) for h in range(heads) for n in head[::-1]],
        "longest first, all heads": lambda: [(h, n) for n in head[::-1] for h in range(heads)],
    }
    if order not in orders:
        raise ValueError(f"order is {order!r}; accepted: {', '.join(map(repr, orders))}")
    return orders[order]()


def reader_tiles(N, Br):
    """Tiles of 64 rows x 128 keys of a head, causal: (those that its readers' blocks load, those
    of which a reader sees a key).

    A block of Br rows has Br / 64 readers. Rows beyond N see nothing.
    """
    if Br % ROWS:
        raise ValueError(f"Br is {Br}; accepted: multiples of {ROWS}")
    loaded = sum(Br // ROWS * tiles for _, tiles in blocks_of(1, N, Br))
    return loaded, sum(tiles for _, tiles in blocks_of(1, N, ROWS))


def deal(blocks, sms, draw=True):
    """Give blocks to SMs; [(sm, head, start, end)] in tiles.

    draw: an SM that is free takes the next number. False: SM s takes s, s + sms, s + 2 sms, ...
    """
    free, runs = [(0, sm) for sm in range(check_positive_int("sms", sms))], []
    for number, (head, tiles) in enumerate(blocks):
        if draw:
            start, sm = heapq.heappop(free)
            heapq.heappush(free, (start + tiles, sm))
        else:
            start, sm = free[number % sms]
            free[sm] = (start + tiles, sm)
        runs.append((sm, head, start, start + tiles))
    return runs


def loads(runs, sms):
    """Tiles of each SM."""
    total = [0] * sms
    for sm, _, start, end in runs:
        total[sm] += end - start
    return total


def heads_at_once(runs):
    """The largest number of heads that are being worked on at one time."""
    most = 0
    for now in {start for _, _, start, _ in runs}:
        most = max(most, len({head for _, head, start, end in runs if start <= now < end}))
    return most


# ---------------------------------------------------------------- the sum that drifted


def fma(a, b, c):
    """a * b + c in float32, rounded once: the product of two float32 is exact in float64."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def exp2(x):
    """2^x, x float32, correct to float32."""
    return np.exp2(np.float64(x)).astype(np.float32)


def drift(S, c, tiles, mended):
    """Error of L after each tile, (tiles, rows), against float64.

    S: (rows, keys) float32, cut into tiles. c: the scale times log2(e). mended: False for the
    rescale with one rounding less, 2^(m c - shift); True for 2^((m - m_new) c).
    """
    c = np.float32(c)
    parts = np.split(S, tiles, axis=1)
    m = np.full(len(S), -np.inf, np.float32)
    l, exact, errors = np.zeros_like(m), 0.0, []
    for part in parts:
        m_new = np.maximum(m, part.max(axis=1))
        shift = m_new * c  # rounded
        rescale = exp2((m - m_new) * c) if mended else exp2(fma(m, c, -shift))
        l = l * rescale + exp2(fma(part, c, -shift[:, None])).sum(axis=1, dtype=np.float32)
        exact = exact + np.exp2(np.float64(part) * np.float64(c)).sum(axis=1)
        m = m_new
        L = np.float64(m) * np.float64(c) * math.log(2) + np.log(np.float64(l))
        errors.append(L - np.log(exact))
    return np.array(errors)


# ---------------------------------------------------------------- pictures

STEP = {  # what -> colour, hatch
    "S": (COLOURS["sram"], ""),
    "PV": (COLOURS["q_outer"], "//"),
    "softmax": (COLOURS["hbm"], ".."),
}


def draw_timelines(runs, until):
    """Who does what when. runs: title -> Steps; until: clocks shown."""
    rows = [1 + max(s.who for s in steps) for steps in runs.values()]
    fig, axes = new_figure(9.4, 0.55 * sum(rows) + 0.75 * len(rows) + 0.8, nrows=len(runs),
                           sharex=True, squeeze=False, height_ratios=rows)  # fmt: skip
    for ax, (title, steps), n in zip(axes[:, 0], runs.items(), rows, strict=True):
        for s in steps:
            if s.start >= until:
                continue
            colour, hatch = STEP[s.what]
            y = -s.who + (0.19 if s.unit == "products" else -0.19)
            ax.barh(y, s.end - s.start, left=s.start, height=0.36, color=colour, hatch=hatch,
                    edgecolor="black", linewidth=0.7)  # fmt: skip
            width = min(s.end, until) - s.start
            if width > until / 40:
                ax.text(s.start + width / 2, y, str(s.tile), ha="center", va="center", fontsize=8,
                        bbox=dict(facecolor="white", edgecolor="none", pad=0.8))  # fmt: skip
        ax.set_title(title, loc="left", fontsize=10.5)
        ax.set_yticks([-k for k in range(n)], [f"warpgroup {k}" for k in range(n)], fontsize=9)
        ax.set(xlim=(0, until), ylim=(-n + 0.5, 0.5))
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel("clocks of a model")
    for what, (colour, hatch) in STEP.items():
        axes[0, 0].barh(0, 0, color=colour, hatch=hatch, edgecolor="black",
                        label={"S": "S = Q K^T", "PV": "O += P V"}.get(what, what))  # fmt: skip
    axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=9, frameon=False)
    return fig


def draw_clocks(bars, measured):
    """Clocks of a tile, parts stacked. bars, measured: label -> {part or name: clocks}."""
    fig, ax = new_figure(8.6, 0.8 * len(bars) + 1.5)
    styles = {"products": STEP["S"], "exp": STEP["softmax"], "other": (COLOURS["quiet"], "xx")}
    for k, (label, parts) in enumerate(bars.items()):
        left = 0
        for part, clocks_ in parts.items():
            colour, hatch = styles[part]
            ax.barh(-k, clocks_, left=left, color=colour, hatch=hatch, edgecolor="black",
                    height=0.5, linewidth=0.7, label=part if k == 0 else None)  # fmt: skip
            left += clocks_
        for n, (name, x) in enumerate(measured[label].items()):
            ax.plot(x, 0.34 - k, "Dv^"[n], color="black", markersize=8, markerfacecolor="white",
                    label=name if k == 0 else None)  # fmt: skip
    ax.set_yticks([-k for k in range(len(bars))], list(bars))
    ax.set(xlabel="clocks of an SM for 64 rows x 128 keys", ylim=(-len(bars) + 0.6, 0.55))
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.45, 1), ncols=3, fontsize=9, frameon=False)
    return fig


def draw_loads(panels, mean):
    """Tiles of each SM, SMs sorted. panels: label -> loads."""
    fig, ax = new_figure(8.6, 3.8)
    styles = (
        ("standard", "-", "s"),
        ("hbm", "--", "D"),
        ("flash", "-", "o"),
        ("q_outer", ":", "^"),
    )
    for (label, values), (colour, line, marker) in zip(panels.items(), styles, strict=False):
        ax.plot(sorted(values, reverse=True), line, color=COLOURS[colour], marker=marker,
                markevery=12, markersize=6, label=f"{label}: last at {max(values):,}")  # fmt: skip
    ax.axhline(mean, color=COLOURS["limit"], linewidth=1)
    ax.annotate(f"all equal: {mean:,.0f}", (0, mean), xytext=(4, -13), textcoords="offset points",
                fontsize=9)  # fmt: skip
    ax.set(xlabel="SMs, the busiest first", ylabel="tiles", ylim=(0, None))
    ax.legend(frameon=False, fontsize=9.5, loc="lower left")
    return fig


def draw_drift(tiles, errors):
    """Errors after so many tiles, both axes logarithmic. errors: label -> one number for each."""
    fig, ax = new_figure(8, 3.8)
    for (label, values), (colour, marker) in zip(
        errors.items(), ((COLOURS["standard"], "s"), (COLOURS["flash"], "o")), strict=False
    ):
        ax.plot(tiles, values, color=colour, marker=marker, markersize=7, label=label)
    ax.set(xscale="log", yscale="log", xlabel="tiles so far", ylabel="error of L, root mean square")
    ax.set_xticks(tiles, [str(t) for t in tiles])
    ax.set_xticks([], minor=True)
    ax.legend(frameon=False)
    return fig
