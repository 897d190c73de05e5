"""Notebooks 19 and 20: small stand-ins for Hopper's instructions, and their pictures.

TMA, the 128-byte swizzle and wgmma's descriptor in numpy; an mbarrier, and a simulation of warps
that wait for each other. Source: PTX ISA, "Tensor copy", "Asynchronous warpgroup level matrix
instructions", "mbarrier"; the kernels' own wrappers are in gpu/kernels/hopper.cuh.
"""

import importlib.util
import re
from dataclasses import dataclass

import numpy as np
from matplotlib.patches import Rectangle

from attention_lib import gpu
from attention_lib.gpu import bench, fragments, ladder, nvrtc
from attention_lib.hardware import GPUS
from attention_lib.recordings import recording
from attention_lib.show.style import COLOURS, new_figure

BOX = 64  # columns of a box: 128 bytes of 16-bit numbers
FIELDS = {"address": (0, 14), "lead": (16, 14), "stride": (32, 14), "swizzle": (62, 2)}  # bits
PLAIN = dict(facecolor="white", edgecolor="none", pad=1.2)


def on_hopper(live):
    """live where this GPU has wgmma, and torch is installed; else None: for `live_or_recorded`."""
    if not gpu.available() or importlib.util.find_spec("torch") is None:
        return None
    return live if ladder.rung(gpu.choose(128)[0]).box else None


def pick(rows, N, causal=False):
    """Rows of the bench, forward and float16, at one N: {(kernel, d): row}."""
    want = ("float16", N, causal)
    return {
        (r["kernel"], r["d"]): r
        for r in rows
        if r["pass"] == "forward" and (r["dtype"], r["N"], r["causal"]) == want
    }


def budget(row):
    """Milliseconds of a row of the bench: products at the peak, exp at its rate, and the rest.

    exp: one for each score, 16 a clock on each SM of the H200 at its highest clock.
    """
    N, flops, h200 = row["N"], bench.flops(row["N"], row["causal"]), GPUS["H200"]
    clock = recording("h200_device")["attributes"]["ClockRate"] * 1e3
    scores = bench.TOKENS * N * (bench.HIDDEN // row["d"]) / (2 if row["causal"] else 1)
    products = 1e3 * flops / h200.tensor_flops
    exp = 1e3 * scores / (h200.sms * 16 * clock)
    rest = flops / row["tflops"] / 1e9 - products - exp
    return {"products, at the peak": products, "exp": exp, "the rest": rest}


def said(bars):
    """Bars of a budget in words, for an alt text."""
    return " ".join(
        f"{label}: " + ", ".join(f"{part} {ms:.1f}" for part, ms in bar.items()) + "."
        for label, bar in bars.items()
    )


# ---------------------------------------------------------------- notebook 19: TMA and wgmma


def land(row, column):
    """Byte of a box of 64 columns at which TMA, swizzling 128 bytes, puts element (row, column)."""
    return 128 * row + 16 * (column // 8 ^ row % 8) + 2 * (column % 8)


def tma_load(memory, at, tensor, row, column, rows):
    """What the copy engine does: a box of rows x 64 columns of tensor, swizzled, into memory.

    memory: uint16, one number for each two bytes; at: byte of the box, a multiple of 1024. What
    lies outside the tensor becomes zeros. Returns the bytes that it counts at the barrier.
    """
    box = np.zeros((rows, BOX), np.float16)
    inside = tensor[row : row + rows, column : column + BOX]
    box[: inside.shape[0], : inside.shape[1]] = inside
    r, c = np.indices(box.shape)
    memory[(at + land(r, c)) // 2] = box.view(np.uint16)
    return box.nbytes


def matrix(address, lead=0):
    """The descriptor that `matrix` of hopper.cuh makes: an int of 64 bits."""
    return (address & 0x3FFFF) >> 4 | (lead >> 4) << 16 | (1024 >> 4) << 32 | 1 << 62


def fetch(memory, descriptor, rows):
    """What wgmma reads: the (rows, 16) matrix that a descriptor names, the sum along its rows.

    Address and stride give the place as if nothing were swizzled; then bits 7 to 9 of each address
    are added (XOR) to its bits 4 to 6.
    """
    address = (descriptor & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    r, c = np.indices((rows, 16))
    a = address + r // 8 * stride + r % 8 * 128 + 2 * c
    return memory[(a ^ (a >> 7 & 7) << 4) // 2].view(np.float16)


def matmul_tile(A, B, row0, col0):
    """The block of matmul.cu for rows row0 and columns col0 of A B^T, 128 x 128, in float32."""
    memory = np.empty(2 * 128 * BOX, np.uint16)  # one stage: a tile of A, a tile of B
    C = np.zeros((128, 128), np.float32)
    for k in range(0, A.shape[1], BOX):
        tma_load(memory, 0, A, row0, k, 128)
        tma_load(memory, 16_384, B, col0, k, 128)
        for w in range(2):  # each warpgroup: 64 rows
            for x in range(BOX // 16):
                a = fetch(memory, matrix(64 * 128 * w + 32 * x), 64).astype(np.float32)
                b = fetch(memory, matrix(16_384 + 32 * x), 128).astype(np.float32)
                C[64 * w : 64 * w + 64] += a @ b.T
    return C


def operand_passes(d, Bc=128):
    """Passes of 128 bytes through shared memory by one warpgroup for one tile, if wgmma reads each
    of its operands once: 64 rows of Q, Bc of K, Bc of V."""
    return 2 * d * (64 + 2 * Bc) // 128


def _box(ax, x, y, width, height, text="", fill="white", size=9.5, **style):
    style = dict(edgecolor="black", linewidth=1.1) | style
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, **style))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def draw_matmul():
    """One thread asks, the copy engine fills, the barrier counts, two warpgroups multiply."""
    fig, ax = new_figure(9.4, 3.3)
    _box(ax, 0, 0.2, 1.9, 2.6, "A and B\nin HBM,\ntensor maps", COLOURS["hbm"])
    _box(ax, 2.9, 1.0, 1.5, 1.0, "copy engine\n(TMA)", "#f2f2f2")
    for i in range(4):
        _box(ax, 5.4, 2.15 - 0.65 * i, 1.7, 0.55, f"stage {i}: A, B", COLOURS["sram"], 9)
        _box(ax, 7.2, 2.15 - 0.65 * i, 0.65, 0.55, f"full[{i}]", "white", 7.5)
    for w in range(2):
        _box(ax, 9.0, 1.6 - 1.4 * w, 2.0, 1.2, f"warpgroup {w}\n64 rows of C\nin registers", size=9)
    _box(ax, 2.9, 2.45, 1.5, 0.5, "thread 0", "white", 9)
    arrow = dict(arrowstyle="-|>", color="black", linewidth=1.3)
    ways = (
        ((1.9, 1.5), (2.9, 1.5)),
        ((4.4, 1.5), (5.4, 1.5)),
        ((3.65, 2.45), (3.65, 2.0)),
        ((7.9, 1.7), (9.0, 2.1)),
        ((7.9, 1.2), (9.0, 0.9)),
    )
    for start, end in ways:
        ax.annotate("", end, start, arrowprops=arrow)
    ax.text(3.8, 2.22, "asks for boxes", fontsize=8.5, va="center")
    ax.text(4.9, 1.6, "bytes", fontsize=8.5, ha="center")
    ax.text(8.4, 2.45, "wait, then\nwgmma reads", fontsize=8, ha="center", va="bottom")
    ax.set(xlim=(-0.1, 11.1), ylim=(0.0, 3.1))
    ax.axis("off")
    return fig


def draw_descriptor(descriptor):
    """The 64 bits of a descriptor, highest first, in two lines, with the fields named."""
    fig, ax = new_figure(9.6, 2.5)
    fills = dict(zip(FIELDS, ("sram", "q_outer", "hbm", "quiet"), strict=True))
    for bit in range(64):
        x, y = 31 - bit % 32, 1.5 * (bit // 32)
        name = next((n for n, (low, n_bits) in FIELDS.items() if low <= bit < low + n_bits), None)
        fill = COLOURS[fills[name]] + "88" if name else "white"
        _box(ax, x, y, 1, 0.6, str(descriptor >> bit & 1), fill, 8.5, linewidth=0.6)
        if bit % 4 == 0:
            ax.text(x + 0.5, y - 0.05, str(bit), ha="center", va="top", fontsize=7.5)
    for name, (low, bits) in FIELDS.items():
        middle = 32 - low % 32 - bits / 2
        ax.text(middle, 1.5 * (low // 32) + 0.66, name, ha="center", va="bottom", fontsize=9.5)
    ax.set(xlim=(-0.3, 32.3), ylim=(-0.35, 2.5))
    ax.axis("off")
    return fig


def draw_boxes(rows, columns, box_rows=128):
    """The boxes that cover a tensor: what is read, and what arrives as zeros."""
    fig, ax = new_figure(6.4, 3.4)
    down, across = -(-rows // box_rows), -(-columns // BOX)
    for i, j in np.ndindex(down, across):
        _box(ax, j * BOX, i * box_rows, BOX, box_rows, "", "white", hatch="//", linewidth=1.3)
    ax.add_patch(Rectangle((0, 0), columns, rows, facecolor=COLOURS["sram"], edgecolor="none"))
    for i, j in np.ndindex(down, across):
        ax.add_patch(Rectangle((j * BOX, i * box_rows), BOX, box_rows, fill=False, linewidth=1.3))
    ax.text(columns / 2, 0.27 * rows, f"the tensor:\n{rows} x {columns}", ha="center", va="center",
            bbox=PLAIN)  # fmt: skip
    ax.text(across * BOX + 8, down * box_rows, "hatched:\nzeros", va="bottom", fontsize=9.5)
    ax.spines["bottom"].set_bounds(0, across * BOX)
    ax.set(xlim=(-2, across * BOX + 60), ylim=(down * box_rows + 2, -2))
    ax.set(xlabel="column", ylabel="row", xticks=range(0, across * BOX + 1, BOX))
    ax.set_yticks(range(0, down * box_rows + 1, box_rows))
    ax.grid(False)
    return fig


def draw_swizzle(columns=(0, 8), rows=8):
    """The places of a column's pieces in the banks, as they come and swizzled. Returns fig."""
    fig, axes = new_figure(9.4, 3.2, ncols=2)
    plain = lambda r, c: 128 * r + 2 * c  # noqa: E731
    for ax, place, title in zip(axes, (plain, land), ("plain", "128-byte swizzle"), strict=True):
        for r in range(rows):
            for c in range(0, BOX, 8):
                k, mine = place(r, c) // 16 % 8, columns[0] <= c < columns[1]
                _box(ax, k, r, 1, 1, f"{c // 8}", COLOURS["hbm"] if mine else "white", 9,
                     linewidth=2 if mine else 0.6)  # fmt: skip
        n = fragments.passes([place(r, columns[0]) for r in range(rows)])
        ax.set_title(f"{title}: {n} pass{'es' if n > 1 else ''}", loc="left", fontsize=11)
        ax.set(xlim=(0, 8), ylim=(rows, 0), xlabel="group of four banks", ylabel="row")
        ax.set_xticks(np.arange(8) + 0.5, range(8))
        ax.set_yticks(np.arange(rows) + 0.5, range(rows))
        ax.grid(False)
    return fig


def draw_rungs(bars, unit="TFLOP/s"):
    """Grouped bars. bars: group -> {name: value}; the first name is hatched."""
    fig, ax = new_figure(8.2, 3.2)
    names = list(next(iter(bars.values())))
    styles = ((COLOURS["quiet"], "//"), (COLOURS["flash"], ""), (COLOURS["hbm"], ".."))
    width = 0.8 / len(names)
    for k, (name, (fill, hatch)) in enumerate(zip(names, styles, strict=False)):
        x = np.arange(len(bars)) + (k - (len(names) - 1) / 2) * width
        values = [bar[name] for bar in bars.values()]
        ax.bar(x, values, width * 0.94, color=fill, hatch=hatch, edgecolor="white", label=name)
        for at, value in zip(x, values, strict=True):
            ax.text(at, value, f"{value:.0f}", ha="center", va="bottom", fontsize=9)
    ax.set_xticks(range(len(bars)), list(bars))
    ax.set(ylabel=unit, ylim=(0, 1.15 * max(max(bar.values()) for bar in bars.values())))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(names), frameon=False)
    return fig


def draw_budget(bars):
    """Stacked parts of a time, in ms. bars: label -> {part: ms}."""
    fig, ax = new_figure(8.8, 0.5 * len(bars) + 1.4)
    styles = ((COLOURS["flash"], ""), (COLOURS["hbm"], "//"), ("white", "xx"))
    left = np.zeros(len(bars))
    for part, (fill, hatch) in zip(next(iter(bars.values())), styles, strict=False):
        ms = np.array([bar[part] for bar in bars.values()])
        ax.barh(range(len(bars)), ms, left=left, color=fill, hatch=hatch, edgecolor="black",
                height=0.62, label=part, linewidth=0.8)  # fmt: skip
        for row, (a, b) in enumerate(zip(left, ms, strict=True)):
            ax.text(a + b / 2, row, f"{b:.1f}", ha="center", va="center", fontsize=9, bbox=PLAIN)
        left += ms
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set(xlabel="ms", xlim=(0, 1.06 * left.max()), ylim=(len(bars) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=9.5)
    return fig


# ---------------------------------------------------------------- notebook 20: a ring of buffers


class Barrier:
    """An mbarrier. A phase ends when `arrivals` have arrived and all expected bytes have come."""

    def __init__(self, name, arrivals):
        self.name, self.arrivals, self.pending = name, arrivals, arrivals
        self.bytes = self.phase = 0

    def arrive(self, expecting=0):
        if self.pending == 0:
            raise RuntimeError(f"{self.name}: more than {self.arrivals} arrivals in a phase")
        self.pending -= 1
        self.bytes += expecting
        self._end_phase()

    def count(self, bytes):
        """The copy engine: so many bytes have come."""
        self.bytes -= bytes
        self._end_phase()

    def ended(self, parity):
        """True if the phase of this parity has ended. Before the first, parity 1 has "ended"."""
        return self.phase % 2 != parity

    def _end_phase(self):
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals


@dataclass(frozen=True)
class Wait:
    """A step of a warp: wait until the phase of this parity of barrier has ended."""

    barrier: Barrier
    parity: int


@dataclass(frozen=True)
class Work:
    """A step of a warp: be busy for `time`. unit: who else needs it must wait, None for nobody."""

    time: float
    what: str
    unit: str | None = None


@dataclass(frozen=True)
class Run:
    """log: (who, what, begin, end) of each piece of work; stuck: who still waits -> for what."""

    log: list
    stuck: dict

    @property
    def end(self):
        return max((end for *_, end in self.log), default=0)

    def busy(self, who):
        return sum(end - begin for name, _, begin, end in self.log if name == who)


def simulate(warps):
    """Run warps at once. warps: name -> a generator that yields Wait and Work steps."""
    now, log, free, waiting, wake = 0, [], {}, {}, dict.fromkeys(warps, 0)
    while True:
        for name in [n for n, w in waiting.items() if w.barrier.ended(w.parity)]:
            del waiting[name]
            wake[name] = now
        if not wake:
            return Run(log, {n: f"{w.barrier.name}, parity {w.parity}" for n, w in waiting.items()})
        name = min(wake, key=wake.get)
        now = wake.pop(name)
        step = next(warps[name], None)
        if isinstance(step, Wait):
            waiting[name] = step
        elif step is not None:
            begin = max(now, free.get(step.unit, now)) if step.unit else now
            wake[name] = free[step.unit] = begin + step.time
            log.append((name, step.what, begin, begin + step.time))


class Ring:
    """Buffers for tiles, each with two barriers: `full`, and `empty` for every reader to arrive.

    wrong: (reader, tile it wanted, what lay in the buffer before and after it read).
    """

    def __init__(self, stages, readers=1):
        self.full = [Barrier(f"full[{i}]", 1) for i in range(stages)]
        self.empty = [Barrier(f"empty[{i}]", readers) for i in range(stages)]
        self.buffer, self.stages, self.wrong = [None] * stages, stages, []

    def copy(self, i, j, time):
        """The loader: tile j into buffer i; full[i] counts its bytes. Use with `yield from`."""
        self.full[i].arrive(expecting=1)
        self.buffer[i] = "half a tile"
        yield Work(time, str(j))
        self.buffer[i] = j
        self.full[i].count(1)

    def read(self, who, i, j, time):
        """A reader at work on tile j in buffer i. Use with `yield from`."""
        before = self.buffer[i]
        yield Work(time, str(j))
        if not before == self.buffer[i] == j:
            self.wrong.append((who, j, before, self.buffer[i]))


def two_readers(products, softmax, tiles, together):
    """Two warpgroups that share the tensor cores: for each tile products, then softmax.

    together: a barrier for both after each tile, as in rung 6. Returns a Run.
    """
    all_here = Barrier("__syncthreads", 2)

    def reader():
        for j in range(tiles):
            yield Work(products, f"{j}", "tensor cores")
            yield Work(softmax, "")
            if together:
                all_here.arrive()
                yield Wait(all_here, j % 2)

    return simulate({"reader 0": reader(), "reader 1": reader()})


def draw_log(*runs, titles=("",), until=None, wrong=()):
    """What each warp does over time; numbers are tiles. A warp that is stuck ends with a cross.

    wrong: as of a Ring; these readings are hatched.
    """
    fig, axes = new_figure(9.4, 1.75 * len(runs) + 0.7, nrows=len(runs), sharex=True, squeeze=False)
    last = until or max(run.end for run in runs)
    for ax, run, title in zip(axes[:, 0], runs, titles, strict=True):
        names = list(dict.fromkeys([*(w for w, *_ in run.log), *run.stuck]))
        for who, what, begin, end in run.log:
            row, quiet = names.index(who), what == ""
            bad = any((who, what) == (reader, str(tile)) for reader, tile, *_ in wrong)
            fill = "white" if quiet else COLOURS["hbm" if who == "loader" else "sram"]
            ax.barh(row, end - begin, left=begin, color=fill, edgecolor="black", height=0.7,
                    hatch="//" if quiet else "xx" if bad else "", linewidth=0.9)  # fmt: skip
            ax.text((begin + end) / 2, row, what, ha="center", va="center", fontsize=9,
                    bbox=PLAIN if bad else None)  # fmt: skip
        for who in run.stuck:
            at = max((end for name, _, _, end in run.log if name == who), default=0)
            ax.plot(
                at + 0.012 * last, names.index(who), "X", color=COLOURS["standard"], markersize=9
            )
        ax.set_yticks(range(len(names)), names)
        ax.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, 1.03 * last))
        ax.set_title(title, loc="left", fontsize=11)
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel("time (units of a model); the number in a bar is its tile")
    return fig


def draw_stages(waits):
    """Time that a reader waits, against the number of stages. waits: label -> {stages: time}."""
    fig, ax = new_figure(7.4, 3.2)
    styles = ((COLOURS["flash"], "o", "-"), (COLOURS["standard"], "s", "--"))
    for (label, values), (colour, marker, line) in zip(waits.items(), styles, strict=True):
        ax.plot(list(values), list(values.values()), line, marker=marker, color=colour, label=label)
        for x, y in values.items():
            above = y >= max(other[x] for other in waits.values())
            ax.annotate(f"{y:g}", (x, y), xytext=(0, 7 if above else -15), ha="center",
                        textcoords="offset points", fontsize=9, color=colour)  # fmt: skip
    ax.set(xlabel="stages", ylabel="time that the reader waits", xticks=list(values))
    most = max(max(v.values()) for v in waits.values())
    ax.set_ylim(-0.13 * most, 1.2 * most)
    ax.legend(frameon=False)
    return fig


def draw_registers(rows, room=65_536):
    """Registers of an SM, warpgroup by warpgroup. rows: label -> registers of a thread in each."""
    fig, ax = new_figure(8.8, 0.62 * len(rows) + 1.1)
    for y, threads in enumerate(rows.values()):
        left = 0
        for k, n in enumerate(threads):
            fill = COLOURS["hbm"] if k == 0 and len(threads) > 2 else COLOURS["sram"]
            _box(ax, left, y - 0.32, 128 * n, 0.64, f"128 x {n}" if n > 64 else n, fill, 9)
            left += 128 * n
    ax.axvline(room, color=COLOURS["limit"], linestyle="--", linewidth=1.3)
    ax.text(room, -0.5, f"{room:,} ", ha="right", va="bottom", fontsize=9)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(xlabel="registers of one SM", xlim=(0, 1.4 * room), ylim=(len(rows) - 0.5, -0.85))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.grid(axis="y", visible=False)
    return fig


def without_setmaxnreg(name, d):
    """A rung compiled without its two setmaxnreg: (registers, spilled bytes). Needs NVRTC."""
    text, n = re.subn(r"(give|take)_registers<[^;]*>\(\);", "", ladder.source(name))
    assert n == 2, f"{name} has {n} setmaxnreg"
    options = ladder.options(d, "float16", False, ladder.rung(name).shared(d))
    _, log = nvrtc.compile_text(text, "bare.cu", "sm_90a", options)
    used = nvrtc.usage(log)["attention"]
    return used["registers"], used["spill_bytes"]
