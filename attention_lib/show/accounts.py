"""Notebook 11: a cache behind the counted memory, the card, and two pictures.

`CachedHBM` counts one run at two places: what the chip asks for, and what a cache between chip and
DRAM then asks DRAM for.
"""

from collections import OrderedDict

from IPython.display import display
from matplotlib.ticker import FuncFormatter

from attention_lib.inputs import check_positive_int
from attention_lib.memory import HBM, Tensor
from attention_lib.show.style import COLOURS, MARKERS, new_figure


class CachedHBM(HBM):
    """An HBM with a cache in front of it, as L2 stands in front of DRAM.

    cache: its size in elements, 0 or more. It keeps whole tiles, drops the one that was used
    longest ago, and writes a changed tile to DRAM when it drops it.
    reads and writes count what the chip asks for, as in HBM; dram_reads and dram_writes what goes
    on to DRAM. Call flush() after the run: what is still in the cache is then written.
    A tile is known by its tensor's name and index, so a loop must cut a tensor one way only.
    """

    def __init__(self, cache, budget=None):
        super().__init__(budget)
        self.cache = check_positive_int("cache", cache, 0)
        self.dram_reads = self.dram_writes = 0
        self._tiles = OrderedDict()  # (name, index) -> [size, changed], oldest first

    def tensor(self, name, array):
        return _CachedTensor(self, name, array)

    def _touch(self, key, size, changed):
        if key in self._tiles:
            changed = changed or self._tiles[key][1]
            self._tiles.move_to_end(key)
        elif not changed:
            self.dram_reads += size
        self._tiles[key] = [size, changed]
        while sum(kept for kept, _ in self._tiles.values()) > self.cache:
            self._drop()

    def _drop(self):
        _, (size, changed) = self._tiles.popitem(last=False)
        self.dram_writes += size if changed else 0

    def flush(self):
        """Write what changed and is still in the cache; returns dram_reads + dram_writes."""
        while self._tiles:
            self._drop()
        return self.dram_reads + self.dram_writes


class _CachedTensor(Tensor):
    def load(self, *index, dtype=None):
        tile = super().load(*index, dtype=dtype)
        self.hbm._touch((self.name, repr(index)), tile.size, changed=False)
        return tile

    def store(self, tile, *index):
        super().store(tile, *index)
        self.hbm._touch((self.name, repr(index)), tile.size, changed=True)


def card(question, result):
    """Show a question, and below it what `check` says about the answer."""
    print(question)
    display(result)


def draw_accounts(accounts, measured):
    """Accounts as points on a log axis of GB, and what was measured as vertical lines.

    accounts: label -> (a key of COLOURS, GB). measured: label -> GB. Returns fig.
    """
    fig, ax = new_figure(8.6, 3.9)
    for row, (key, size) in enumerate(accounts.values()):
        ax.plot(size, -row, MARKERS.get(key, "D"), color=COLOURS[key], markersize=9)
        box = dict(facecolor="white", edgecolor="none", pad=1)
        ax.annotate(f"{size:,.3g}", (size, -row), xytext=(0, 10), textcoords="offset points",
                    ha="center", fontsize=9, bbox=box)  # fmt: skip
    for (label, size), style in zip(measured.items(), ("--", ":"), strict=True):
        ax.axvline(size, color=COLOURS["limit"], linestyle=style, linewidth=1.6)
        ax.text(size, 0.95, f"{label}\n{size:,.3g}", ha="center", va="bottom", fontsize=9.5)
    ax.set_xscale("log", base=10)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.set_yticks([-row for row in range(len(accounts))], list(accounts))
    ax.set(xlabel="GB, log scale", ylim=(0.6 - len(accounts), 0.8))
    ax.set_xlim(min(s for _, s in accounts.values()) / 2, 2 * max(s for _, s in accounts.values()))
    ax.grid(axis="y", visible=False)
    return fig


def draw_cache(sizes, runs, ends):
    """DRAM traffic against the size of the cache. runs: label -> (key, one number for each size).

    ends: label -> a number that some account gives, drawn as a horizontal line. Returns fig.
    """
    fig, ax = new_figure(8.6, 4)
    for label, (key, values) in runs.items():
        ax.plot(sizes, values, color=COLOURS[key], marker=MARKERS[key], markersize=5,
                drawstyle="steps-post")  # fmt: skip
        ax.annotate(label, (sizes[1], values[1]), xytext=(6, 4), textcoords="offset points",
                    color=COLOURS[key])  # fmt: skip
    for label, value in ends.items():
        ax.axhline(value, color=COLOURS["quiet"], linestyle="--", linewidth=1)
        ax.annotate(label, (sizes[0], value), xytext=(0, 4), textcoords="offset points",
                    fontsize=9.5)  # fmt: skip
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y / 1e6:.2g}M"))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e3:,.0f}k"))
    top = max(max(values) for _, values in runs.values())
    ax.set(xlabel="elements that the cache holds", ylabel="elements to and from DRAM")
    ax.set_ylim(min(ends.values()) / 1.5, 2 * top)
    return fig
