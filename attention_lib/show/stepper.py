"""The tile stepper: walk through a tiled run, and see what each tile loads, holds and stores.

    stepper(Q, K, V, 64, 196, M=50_000)                         a widget
    film(Q, K, V, 64, 196, M=50_000)                            some of its pictures in a row
    draw(trace(Q, K, V, 64, 196, M=50_000), 7)                  one picture, as a string of SVG

Nothing here computes attention. `trace` runs the library's own loop (attention_lib.tiled: Algorithm
1 of FlashAttention, arXiv 2205.14135, or of FlashAttention-2, arXiv 2307.08691) on a `Recorder`, an
HBM that notes each load, store, hold and product and cuts them into steps of one tile. `draw` turns
a step into a picture; `stepper` is its shell.
"""

import base64
from bisect import bisect_right
from contextlib import contextmanager
from html import escape
from itertools import groupby
from math import isinf
from typing import NamedTuple
from unittest import mock

import numpy as np
from numpy.linalg import norm

from attention_lib import online
from attention_lib.inputs import check_array, check_choice, check_int, check_positive_int
from attention_lib.memory import HBM, Tensor
from attention_lib.reference import causal_offset
from attention_lib.show.svg import SMALLEST, group, line, path, picture, rect, rects, text, texts
from attention_lib.tiled import blocks, flash_attention, flash_attention_q_outer, nothing_visible
from attention_lib.traffic import standard_traffic

ORDERS = {"K/V outside": flash_attention, "Q outside": flash_attention_q_outer}
GAP = 4 * "\N{NO-BREAK SPACE}"
MOST_BLOCKS = 24  # in one direction; smaller tiles would be dust
# A tile's fill and hatch. The words are those of the legend.
LOOKS = {
    "done": ("pale", ""),
    "to come": ("paper", ""),
    "causal": ("none", "//"),
    "sparse": ("none", "xx"),
}
INNER = {"K/V outside": "down the columns", "Q outside": "along the rows"}


# ---------------------------------------------------------------- the trace


class Step(NamedTuple):
    """What the loop did for one tile, and where that left it. Counts are elements since the start.

    tile: (i, j), or None where a block was loaded and no tile of it is computed (and before the
    first). rows, cols: the blocks of Q and of K, V on chip, as slices, or None.
    loaded, stored: ((name, elements), ...) of this step, in order. on_chip: name -> elements.
    m, l, O: the state of the chosen row after the step; O is (d,). where: what that O is.
    """

    tile: tuple | None
    rows: slice | None
    cols: slice | None
    loaded: tuple
    stored: tuple
    on_chip: dict
    reads: int
    writes: int
    flops: int
    m: float
    l: float
    O: np.ndarray
    where: str

    @property
    def moved(self):
        """Elements that have crossed between HBM and the chip so far."""
        return self.reads + self.writes


class Recorder(HBM):
    """An HBM that also cuts a run into steps: one for each tile, and one before the first.

    A step ends when both products of its tile are done and the next tile is loaded, or when the
    outer loop loads its next block. order: a key of ORDERS. row: the query whose state to keep.
    """

    def __init__(self, order, row, budget=None):
        super().__init__(budget)
        self.outer = "K" if order == "K/V outside" else "Q"
        self.row, self.steps = row, []
        self.tensors, self.kept = {}, {}
        self.rows = self.cols = None
        self._open()

    def _open(self):
        self.products, self.loaded, self.stored = 0, [], []

    def close(self):
        """End the step: note the counts, what is on chip, and the state of the row."""
        tile = self.products == 2
        where = (self.rows, self.cols)
        m, l, O, state = self._state()
        self.steps.append(
            Step(
                where if tile else None,
                *where,
                tuple(self.loaded),
                tuple(self.stored),
                dict(self.on_chip),
                self.reads,
                self.writes,
                self.matmul_flops,
                m,
                l,
                O,
                state,
            )  # fmt: skip
        )
        self._open()

    def _state(self):
        """The row's m, l, O where the loop keeps them: in HBM, or on chip until it is stored."""
        if self.outer == "K":
            m, l, O = (self.tensors[name].array[self.row] for name in ("m", "l", "O"))
            return float(m), float(l), O.copy(), "in HBM, finished for the keys so far"
        held = self.rows is not None and self.rows.start <= self.row < self.rows.stop
        if held:
            m, l, O = (self.kept[name][self.row - self.rows.start] for name in ("m", "l", "O"))
            if ("O", O.size * (self.rows.stop - self.rows.start)) not in self.stored:
                return float(m), float(l), O.copy(), "on chip, not yet divided by l"
            O = self.tensors["O"].array[self.row].copy()
            return float(m), float(l), O, "in HBM, divided by l"
        if self.rows is None or self.row >= self.rows.stop:
            d = self.tensors["O"].shape[1]
            return -np.inf, 0.0, np.zeros(d), "its Q block has not come yet"
        before = self.steps[-1]
        return before.m, before.l, before.O, before.where

    def begin(self, loads=None):
        """Before a load or hold: does it belong to the next step?"""
        new_block = loads == self.outer and self.loaded
        if self.products == 2 or new_block or (loads and not self.steps):
            self.close()

    def tensor(self, name, array):
        self.tensors[name] = _Recorded(self, name, array)
        return self.tensors[name]

    def hold(self, name, tile):
        self.begin()
        self.kept[name] = tile
        return super().hold(name, tile)

    def matmul(self, A, B):
        self.products += 1
        return super().matmul(A, B)

    @contextmanager
    def listening(self):
        """Keep each state that `online.update` returns: HBM sees where it is, not its numbers."""
        update = online.update

        def heard(*args, **kwargs):
            state = update(*args, **kwargs)
            self.kept.update(state._asdict())
            return state

        with mock.patch.object(online, "update", heard):
            yield


class _Recorded(Tensor):
    def load(self, *index, dtype=None):
        self.hbm.begin(self.name)
        tile = super().load(*index, dtype=dtype)
        self.hbm.loaded.append((self.name, tile.size))
        if self.name == "Q":
            self.hbm.rows = index[0]
        if self.name == "K":
            self.hbm.cols = index[0]
        return tile

    def store(self, tile, *index):
        super().store(tile, *index)
        self.hbm.stored.append((self.name, tile.size))


class Run(NamedTuple):
    """A recorded run: its sizes, its steps, and what the loop returned.

    left_out: (i, j) -> "causal" or "sparse", for the tiles that the run did not compute.
    result: what the loop returned (O, l, m, or O, L). hbm: the counts at the end.
    """

    order: str
    Nq: int
    Nk: int
    d: int
    Br: int
    Bc: int
    offset: int | None
    itemsize: int
    M: int | None
    row: int
    steps: list
    left_out: dict
    hbm: HBM
    result: tuple

    @property
    def Tr(self):
        return -(-self.Nq // self.Br)

    @property
    def Tc(self):
        return -(-self.Nk // self.Bc)

    @property
    def standard(self):
        """Elements that standard attention moves for the same Q, K, V, in three kernels."""
        return standard_traffic(self.Nq, self.d, Nk=self.Nk)

    @property
    def name(self):
        return f"{self.order}, blocks of {self.Br} and {self.Bc}"


def trace(Q, K, V, Br, Bc, order="K/V outside", causal=False, block_mask=None, M=None, row=None):
    """Run one head through the library's loop and keep what it did, tile by tile: a Run.

    Q: (Nq, d); K, V: (Nk, d). Br, Bc, causal, block_mask: as in attention_lib.flash_attention, at
    most 24 blocks each way. order: "K/V outside" (Algorithm 1) or "Q outside" (FlashAttention-2).
    M: on-chip elements, or None for no limit. row: the query to follow (default: the last one).
    Raises TypeError and ValueError that name the argument; OnChipOverflow if a step needs more
    than M.
    """
    check_choice("order", order, tuple(ORDERS))
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        check_array(name, x)
        if x.ndim != 2 or 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}; accepted: (N, d), one head, not empty")
    (Nq, d), Nk = Q.shape, K.shape[0]
    Br, Bc = check_positive_int("Br", Br), check_positive_int("Bc", Bc)
    for name, N, B in (("Br", Nq, Br), ("Bc", Nk, Bc)):
        if -(-N // B) > MOST_BLOCKS:
            least = -(-N // MOST_BLOCKS)
            raise ValueError(
                f"{name} is {B}, which makes {-(-N // B)} blocks; accepted: {least} or more "
                f"({MOST_BLOCKS} blocks can be drawn)"
            )
    row = Nq - 1 if row is None else check_int("row", row)
    if not 0 <= row < Nq:
        raise ValueError(f"row is {row}; accepted: 0 to {Nq - 1}, a row of Q")
    recorder = Recorder(order, row, M)
    with recorder.listening():
        result = ORDERS[order](Q, K, V, Br, Bc, causal=causal, block_mask=block_mask, hbm=recorder)
    recorder.close()
    steps = [
        step._replace(tile=step.tile and (step.rows.start // Br, step.cols.start // Bc))
        for step in recorder.steps
    ]
    offset = causal_offset(Nq, Nk, "lower-right") if causal else None
    done = {step.tile for step in steps}
    left_out = {
        (i, j): "causal" if nothing_visible(rows, cols, offset) else "sparse"
        for i, rows in enumerate(blocks(Nq, Br))
        for j, cols in enumerate(blocks(Nk, Bc))
        if (i, j) not in done
    }
    sizes = (order, Nq, Nk, d, Br, Bc, offset, Q.dtype.itemsize, M, row)
    return Run(*sizes, steps, left_out, recorder, result)


# ---------------------------------------------------------------- the picture


def _box(run, side):
    """The grid's width and height: to scale, but no thinner than a quarter."""
    most = max(run.Nq, run.Nk)
    return max(side * run.Nk / most, side / 4), max(side * run.Nq / most, side / 4)


def edges(N, parts, length):
    """Where the blocks begin and end along a side of `length` pixels."""
    return [(part.start * length / N, part.stop * length / N) for part in parts]


def grid(run, k, side=300):
    """The score matrix after step k, with the strips of Q, O (left, right) and K, V (top).

    side: pixels of the longer side. Returns (parts, width, height); the tiles start at (46, 34).
    """
    step, (W, H) = run.steps[k], _box(run, side)
    X, Y = 46, 34
    down, across = (
        edges(run.Nq, blocks(run.Nq, run.Br), H),
        edges(run.Nk, blocks(run.Nk, run.Bc), W),
    )
    number = {s.tile: n for n, s in enumerate([s for s in run.steps[: k + 1] if s.tile], 1)}
    looks, labels = {kind: [] for kind in LOOKS}, []
    for j, (left, right) in enumerate(across):
        kinds = [
            run.left_out.get((i, j)) or ("done" if (i, j) in number else "to come")
            for i in range(run.Tr)
        ]
        first = 0
        for kind, same in groupby(kinds):  # one box for tiles of one look below each other
            after = first + len(list(same))
            top, bottom = down[first][0], down[after - 1][1]
            looks[kind].append((X + left, Y + top, right - left, bottom - top))
            first = after
        for i, (top, bottom) in enumerate(down):
            if kinds[i] == "done" and right - left >= 20 and bottom - top >= 13:
                labels.append((X + left + 4, Y + bottom - 4, number[i, j]))
    parts = [rects(boxes, fill, hatch=hatch) for (fill, hatch), boxes in
             zip(LOOKS.values(), looks.values(), strict=True)]  # fmt: skip
    parts.append(
        rects([(X, Y + top, W, bottom - top) for top, bottom in down], "none", "edge", 0.8)
    )
    parts.append(
        rects([(X + left, Y, right - left, H) for left, right in across], "none", "edge", 0.8)
    )
    parts.append(texts(labels, 11))
    parts += _strips(run, step, down, across, X, Y, W, H)
    if run.offset is not None:  # right of this line the keys come after the query
        points = [(min(max(0, q + run.offset), run.Nk), min(max(q, 0), run.Nq))
                  for q in (max(0, -run.offset), min(run.Nq, run.Nk - run.offset))]  # fmt: skip
        parts.append(
            path([(X + x * W / run.Nk, Y + y * H / run.Nq) for x, y in points], "ink", 1.4)
        )
    if step.tile:
        (top, bottom), (left, right) = down[step.tile[0]], across[step.tile[1]]
        w, h = right - left, bottom - top
        parts.append(rect(X + left, Y + top, w, h, "sram", "ink", 2.6))
        if w >= 14 and h >= 12:
            x, y = X + left + w / 2, Y + top + h / 2 + 4.5
            parts.append(text(x, y, "S", 13, "on", "middle", bold=True))
    return parts, X + W + 34, Y + H + 20


def _strips(run, step, down, across, X, Y, W, H):
    """Q left, O right, K and V on top, as they lie in HBM; the blocks on chip are framed."""
    parts, rows, cols = [], step.rows, step.cols
    i = rows.start // run.Br if rows is not None and "Q" in step.on_chip else None
    j = cols.start // run.Bc if cols is not None and "K" in step.on_chip else None
    for left, name in ((X - 20, "Q"), (X + W + 6, "O")):
        boxes = [(left, Y + top, 14, bottom - top) for top, bottom in down]
        parts.append(rects(boxes, "hbm", "edge", 0.6))
        parts.append(text(left + 7, Y + H + 14, name, 13, anchor="middle", bold=True))
        if i is not None:
            top, bottom = down[i]
            parts.append(rect(left, Y + top, 14, bottom - top, "sram", "ink", 2.2))
    boxes = [(X + left, Y - 20, right - left, 14) for left, right in across]
    parts.append(rects(boxes, "hbm", "edge", 0.6))
    if j is not None:
        left, right = across[j]
        parts.append(rect(X + left, Y - 20, right - left, 14, "sram", "ink", 2.2))
    parts.append(text(X - 4, Y - 9, "K, V", 13, anchor="end", bold=True))
    if i is not None:
        top, bottom = down[i]
        parts.append(text(X - 23, Y + (top + bottom) / 2 + 4, i, 12, anchor="end", bold=True))
    if j is not None:
        left, right = across[j]
        parts.append(text(X + (left + right) / 2, Y - 24, j, 12, anchor="middle", bold=True))
    return parts


def facts(run, k, width=400):
    """What is on chip, what came and went, the row's state and the counters, after step k."""
    step = run.steps[k]
    held, row = sum(step.on_chip.values()), {"m": step.m, "l": step.l, "|O|": norm(step.O)}
    room = run.M or run.hbm.peak_on_chip
    limit = f"of M = {run.M:,} elements, {held / room:.0%}" if run.M else "elements, no limit given"
    parts = [
        text(0, 14, "On chip (SRAM)", 14, bold=True),
        text(width, 14, f"{held:,} {limit}", 13, anchor="end"),
        rect(0, 22, width, 24, "none", "ink", 1.2, dash="4 3"),
    ]
    x = 0
    for name, size in step.on_chip.items():
        w = size / room * width
        parts.append(rect(x, 22, w, 24, "sram", "ink", 0.8, tip=f"{name}: {size:,} elements"))
        if w >= 13:
            parts.append(text(x + w / 2, 39, name, 13, "on", "middle", bold=True))
        x += w
    parts += [
        *_sum(0, 63, step.on_chip.items(), width),
        text(0, 103, "Loaded", 14, bold=True),
        *_sum(70, 103, step.loaded, width - 70),
        text(0, 140, "Stored", 14, bold=True),
        *_sum(70, 140, step.stored, width - 70),
        text(0, 172, f"Row {run.row}", 14, bold=True),
        text(width, 172, step.where, 12, anchor="end"),
        text(0, 193, GAP.join(f"{name} = {_short(x)}" for name, x in row.items()), 13, mono=True),
        text(0, 212, f"O = ({_few(step.O)})", 13, mono=True),
    ]  # fmt: skip
    return parts + [group(counters(run, k, width), 0, 234)]


def counters(run, k, width=400):
    """Two bars: elements moved so far, reads and writes apart, and standard attention's total."""
    step, whole = run.steps[k], max(run.standard, run.hbm.reads + run.hbm.writes)
    read, written = (x / whole * width for x in (step.reads, step.writes))
    colour = "flash" if run.order == "K/V outside" else "q_outer"
    parts = [
        text(0, 12, "Moved", 14, bold=True),
        text(58, 12, "(dotted: written)", 12),
        text(width, 12, f"{step.moved:,} elements, {_bytes(step.moved * run.itemsize)}", 13,
             anchor="end"),
        rect(0, 20, read, 16, colour, tip=f"read: {step.reads:,}"),
        rect(read, 20, written, 16, colour, "ink", 0.8, "..", tip=f"written: {step.writes:,}"),
        rect(0, 20, width, 16, "none", "edge", 0.8),
        rect(0, 42, run.standard / whole * width, 16, "standard", "ink", 0.8, "//"),
        text(0, 74, "standard attention, all of it", 12),
        text(width, 74, f"{run.standard:,} elements, {_bytes(run.standard * run.itemsize)}", 12,
             anchor="end"),
    ]  # fmt: skip
    return parts


def _sum(x, y, pairs, width):
    """The sizes as a sum, in lines of at most `width` pixels."""
    if not pairs:
        return [text(x, y, "nothing", 12)]
    lines = [""]
    for name, size in pairs:
        more = f"{name} {size:,}"
        if lines[-1] and len(lines[-1]) + len(more) + 5 > width / 7.2:
            lines.append("")
        lines[-1] += f" + {more}" if lines[-1] or len(lines) > 1 else more
    return [text(x, y + 16 * n, words.strip(), 12) for n, words in enumerate(lines)]


def _sizes(pairs):
    return " + ".join(f"{name} {size:,}" for name, size in pairs)


def _short(x):
    if isinf(x):
        return "inf" if x > 0 else "-inf"
    return f"{x:.3f}" if abs(x) < 1000 else f"{x:.3g}"


def _few(O, first=4):
    return ", ".join(_short(float(x)) for x in O[:first]) + (", ..." if len(O) > first else "")


def _bytes(n):
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} bytes"


def _legend(run, width):
    """The looks of a tile, those that this run has, wrapped at `width`. Returns (parts, height)."""
    kinds = [("on chip now", "sram", ""), ("done and dropped", "pale", ""),
             ("to come", "paper", ""), ("in HBM", "hbm", "")]  # fmt: skip
    if "causal" in run.left_out.values():
        kinds.append(("skipped: causal", "none", "//"))
    if "sparse" in run.left_out.values():
        kinds.append(("never visited: block mask", "none", "xx"))
    parts, x, y = [], 0, 0
    for label, fill, hatch in kinds:
        need = 24 + 6.6 * len(label)
        if x and x + need > width:
            x, y = 0, y + 19
        parts += [rect(x, y, 14, 13, fill, "edge", 1, hatch), text(x + 19, y + 11, label, 12)]
        x += need + 10
    return parts, y + 16


def describe(run, k):
    """Step k in words."""
    step, last = run.steps[k], len(run.steps) - 1
    if k == 0:
        tiles = sum(s.tile is not None for s in run.steps)
        return (
            f"Before the first of {tiles} tiles: {run.name}, {INNER[run.order]}. All is in HBM, "
            "nothing is on chip."
        )
    what = f"tile {step.tile}" if step.tile else "no tile: nothing to see for this block"
    return (
        f"Step {k} of {last}, {what}. {run.name}. On chip {sum(step.on_chip.values()):,} "
        f"elements: {_sizes(step.on_chip.items())}. Loaded {_sizes(step.loaded) or 'nothing'}; "
        f"stored {_sizes(step.stored) or 'nothing'}. Row {run.row}: m {_short(step.m)}, "
        f"l {_short(step.l)}. Moved {step.moved:,} elements so far, "
        f"{step.moved / run.standard:.0%} of what standard attention moves."
    )


def _heading(run, k):
    step = run.steps[k]
    if k == 0:
        return f"Before the first tile ({INNER[run.order]})"
    if step.tile is None:
        return f"Step {k} of {len(run.steps) - 1}: a block without a tile"
    return f"Step {k} of {len(run.steps) - 1}: tile S({step.tile[0]}, {step.tile[1]})"


def draw(run, k):
    """The picture of step k of a run (0: before the first tile), as a string of SVG."""
    k = _check_step("k", k, run.steps)
    tiles, w, h = grid(run, k)
    x = max(w + 24, 300)
    legend, below = _legend(run, x - 60)
    height = max(h + 62 + below, 374)
    parts = [
        text(14, 24, run.name, 15, bold=True),
        text(x, 24, _heading(run, k), 15, bold=True),
        group(tiles, 0, 40),
        group(legend, 46, h + 50),
        group(facts(run, k), x, 44),
    ]
    return picture(parts, describe(run, k), x + 414, height)


def draw_pair(a, b, moment):
    """Two runs side by side at the same moment: an index of `moments(a, b)`."""
    clock = moments(a, b)
    moved = clock[_check_step("moment", moment, clock)]
    parts, alts, height = [], [], 0
    shown = [(run, at(run, moved)) for run in (a, b)]
    rows = max(grid(run, k, 240)[2] for run, k in shown)
    for n, (run, k) in enumerate(shown):
        tiles, w, h = grid(run, k, 240)
        legend, below = _legend(run, 380)
        finished = ", done" if k == len(run.steps) - 1 else ""
        parts.append(
            group(
                [
                    text(14, 24, run.name, 15, bold=True),
                    text(14, 46, _heading(run, k) + finished, 14),
                    group(tiles, 0, 62),
                    group(legend, 14, rows + 66),
                    group(facts(run, k), 14, rows + 108),
                ],
                440 * n,
            )
        )
        alts.append(describe(run, k))
        height = rows + 108 + 326
    alt = f"Two runs when each has moved {moved:,} elements. Left: {alts[0]} Right: {alts[1]}"
    title = f"{a.name}, beside {b.name}"
    return picture([*parts, line(432, 10, 432, height - 10, "edge", 1)], alt, 868, height, title)


def moments(a, b):
    """The clock of a pair: each number of elements at which one of the two completes a step.

    Both runs are shown when they have moved equally many: a loop that waits for memory takes that
    long. The one that moves less is done first.
    """
    return sorted({step.moved for run in (a, b) for step in run.steps})


def at(run, moved):
    """The last step that a run has completed when it has moved so many elements."""
    return bisect_right(run.steps, moved, key=lambda step: step.moved) - 1


def _check_step(name, k, steps):
    k = check_int(name, k)
    if not 0 <= k < len(steps):
        raise ValueError(f"{name} is {k}; accepted: 0 to {len(steps) - 1}")
    return k


# ---------------------------------------------------------------- where no kernel runs


def draw_film(runs, frames=5):
    """Some steps of each run in a row, first and last among them, as a string of SVG.

    Two runs stand one above the other, each frame at the same number of elements moved.
    """
    frames = check_positive_int("frames", frames, 2)
    clock = moments(*runs) if len(runs) == 2 else [s.moved for s in runs[0].steps]
    most = clock[-1]
    parts, y, wide = [], 0, 0
    for run in runs:
        parts.append(text(10, y + 22, run.name, 15, bold=True))
        x = 0
        tall = 0
        for n in range(frames):
            if len(runs) == 1:
                k = round(n * (len(run.steps) - 1) / (frames - 1))
            else:
                k = at(run, clock[bisect_right(clock, most * n / (frames - 1)) - 1])
            tiles, w, h = grid(run, k, 130)
            w = max(w, 190)
            step, last = run.steps[k], len(run.steps) - 1
            note = "done" if k == last else f"step {k} of {last}"
            bar = 150 * step.moved / max(run.standard, run.hbm.reads + run.hbm.writes)
            colour = "flash" if run.order == "K/V outside" else "q_outer"
            parts.append(
                group(
                    [
                        *tiles,
                        text(14, h + 14, note, 13, bold=True),
                        text(14, h + 31, f"moved {step.moved:,}", 12),
                        rect(14, h + 38, bar, 10, colour),
                        rect(14, h + 38, 150, 10, "none", "edge", 1),
                    ],
                    x,
                    y + 32,
                )
            )
            x, tall = x + w, max(tall, h)
        parts.append(
            text(14, y + tall + 97, f"A full bar is what standard attention moves: "
                 f"{run.standard:,} elements.", 12)
        )  # fmt: skip
        y, wide = y + tall + 108, max(wide, x)
    legend, below = _legend(runs[0], wide - 20)
    parts.append(group(legend, 14, y + 6))
    return picture(parts, _film_alt(runs), wide + 10, y + below + 12, "Film of the tile stepper")


def _film_alt(runs):
    said = []
    for run in runs:
        tiles = sum(step.tile is not None for step in run.steps)
        moved = run.hbm.reads + run.hbm.writes
        said.append(
            f"{run.name}: {tiles} tiles of {run.Tr} x {run.Tc}, {INNER[run.order]}, one on chip at "
            f"a time. In all {moved:,} elements are moved, {moved / run.standard:.2f} times "
            "standard attention's."
        )
    return " ".join(said)


def film(
    Q, K, V, Br, Bc, order="K/V outside", causal=False, block_mask=None, M=None, row=None,
    beside=None, frames=5,
):  # fmt: skip
    """The stepper without a kernel: `frames` of its pictures in a row. Arguments as in stepper."""
    runs = _runs(Q, K, V, Br, Bc, order, causal, block_mask, M, row, beside)
    return Film(draw_film(runs, frames), _film_alt(runs))


class Film:
    """A picture that a notebook keeps: shown as an image, with its words below and as alt text."""

    def __init__(self, svg, alt):
        self.svg, self.alt = svg, alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        # An image, since JupyterLab shows no bare SVG of a notebook that it does not trust yet.
        data = base64.b64encode(self.svg.encode()).decode()
        words = escape(self.alt, quote=True)
        html = (
            f'<img alt="{words}" style="max-width:100%;min-width:{SMALLEST}px" '
            f'src="data:image/svg+xml;base64,{data}">'
            f"<p><em>Figure: {words}</em></p>"
        )
        return {"text/html": html, "text/plain": self.alt}


def frames():
    """All steps of one small run, for the web edition: a list of (state, svg, alt).

    state: {"order": a key of ORDERS, "step": k}. Both orders, 36 queries and keys in 5 x 5 tiles,
    causal.
    """
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((3, 36, 8)).astype(np.float32)
    made = []
    for order in ORDERS:
        run = trace(Q, K, V, 8, 8, order, causal=True, M=400)
        for k in range(len(run.steps)):
            made.append(({"order": order, "step": k}, draw(run, k), describe(run, k)))
    return made


# ---------------------------------------------------------------- the shell


def _runs(Q, K, V, Br, Bc, order, causal, block_mask, M, row, beside):
    first = dict(Br=Br, Bc=Bc, order=order, causal=causal, block_mask=block_mask, M=M, row=row)
    runs = [trace(Q, K, V, **first)]
    if beside is not None:
        if not isinstance(beside, dict) or set(beside) - set(first):
            raise ValueError(
                f"beside is {beside!r}; accepted: a dict of what differs, with keys of "
                f"{', '.join(first)}"
            )
        runs.append(trace(Q, K, V, **first | beside))
    return runs


def stepper(
    Q, K, V, Br, Bc, order="K/V outside", causal=False, block_mask=None, M=None, row=None,
    beside=None,
):  # fmt: skip
    """A widget that walks through the tiles of a run: buttons, a slider, or play.

    Arguments as in trace. beside: what differs in a second run, shown next to the first, e.g.
    dict(order="Q outside") or dict(Br=196, Bc=64); both are shown when they have moved equally
    many elements. Without a kernel (a saved notebook, the web) a film of it is seen in its place.
    """

    def record(row):
        return _runs(Q, K, V, Br, Bc, order, causal, block_mask, M, row, beside)

    return _shell(record, row)


def _shell(record, row):
    """Controls around record(row), one run or two."""
    import ipywidgets as widgets  # 0.2 s, and only those who use the stepper need it

    class Stepper(widgets.VBox):
        def _repr_mimebundle_(self, **kwargs):
            still = Film(draw_film(runs), _film_alt(runs))._repr_mimebundle_()
            return super()._repr_mimebundle_(**kwargs) | still

    runs = record(row)
    last = len(runs[0].steps if len(runs) == 1 else moments(*runs)) - 1
    slider = widgets.IntSlider(0, 0, last, description="Step")
    slider.layout.width = "24em"
    # The clock is Play, in the browser; its own buttons have no names, so it stays out of sight.
    clock = widgets.Play(value=0, min=0, max=last, interval=700)
    clock.layout.display = "none"
    play = widgets.ToggleButton(description="Play", tooltip="Play: a step every 0.7 seconds")
    play.layout.width = "5em"
    play.add_class("stepper-play")
    widgets.jslink((clock, "value"), (slider, "value"))
    widgets.jslink((clock, "playing"), (play, "value"))
    play.observe(lambda on: setattr(play, "description", "Pause" if on.new else "Play"), "value")
    # Those who asked their system for less motion get no play button.
    calm = "@media(prefers-reduced-motion:reduce){.stepper-play{display:none!important}}"
    calm = widgets.HTML(f"<style>{calm}</style>")
    calm.layout.margin = "0"
    follow = widgets.BoundedIntText(runs[0].row, 0, runs[0].Nq - 1, description="Follow row")
    follow.layout.width = "11em"
    moves = {
        "First": ("before the first tile", lambda k: 0),
        "Back": ("one step back", lambda k: max(k - 1, 0)),
        "Next": ("one step on", lambda k: min(k + 1, last)),
        "Last": ("after the last tile", lambda k: last),
    }

    def button(name, tip, move):
        made = widgets.Button(description=name, tooltip=f"{name}: {tip}")
        made.layout.width = "5em"
        made.on_click(lambda _: setattr(slider, "value", move(slider.value)))
        return made

    shown = widgets.HTML()

    def show(_=None):
        many = len(runs) == 2
        shown.value = draw_pair(*runs, slider.value) if many else draw(runs[0], slider.value)

    def another_row(change):
        runs[:] = record(change.new)
        show()

    show()
    slider.observe(show, "value")
    follow.observe(another_row, "value")
    buttons = [button(name, *move) for name, move in moves.items()]
    controls = widgets.HBox([*buttons, play, slider, follow, clock, calm])
    controls.layout.flex_flow = "row wrap"
    return Stepper([controls, shown])
