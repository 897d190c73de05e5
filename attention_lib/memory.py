"""The memory of a GPU, small enough to count: HBM, and what is on chip at a time.

A kernel may compute only on what it has loaded. Here that rule holds by construction: a `Tensor`
lives in HBM and refuses arithmetic; `load` copies a tile on chip and counts its elements, `store`
copies one back and counts it. So a count is never a claim about a loop, it is what the loop did.

The model (FlashAttention, arXiv 2205.14135, section 2.1): two levels, HBM and SRAM. Registers,
caches and numbers that live for one line are not modelled. Sizes are elements, not bytes.
"""

from collections import Counter

import numpy as np

from attention_lib.inputs import check_array, check_positive_int


class OnChipOverflow(ValueError):
    """The tiles held at one moment need more on-chip elements than the stated budget."""


class HBM:
    """Counts what crosses between HBM and the chip, and what is held on chip.

    budget: on-chip elements allowed at a time, or None for no limit. Holding more raises
    OnChipOverflow, which says by how much.

    After a run (all in elements, or FLOPs):
      reads, writes          totals
      reads_by, writes_by    the same by tensor name, as a Counter
      matmul_flops           2 * rows * columns * depth of every matrix product
      peak_on_chip           the largest total held at one moment
      peak_tiles             what was held at that moment: name -> elements

    Counts of several runs add up, and the peak is the largest; use a new HBM to start from zero. A
    run that ends in an error leaves what it did until then.
    """

    def __init__(self, budget=None):
        self.budget = budget if budget is None else check_positive_int("budget", budget)
        self.reads_by, self.writes_by = Counter(), Counter()
        self.matmul_flops = 0
        self.on_chip, self.peak_tiles = {}, {}

    @property
    def reads(self):
        """Elements loaded from HBM."""
        return sum(self.reads_by.values())

    @property
    def writes(self):
        """Elements stored to HBM."""
        return sum(self.writes_by.values())

    @property
    def peak_on_chip(self):
        """Most elements held on chip at one moment."""
        return sum(self.peak_tiles.values())

    def tensor(self, name, array):
        """Place an array in HBM under a name. Moves nothing: the data starts there.

        The name is also the slot that its tiles take on chip, so give each tensor its own.
        """
        return Tensor(self, name, array)

    def launch(self):
        """Start a kernel: the chip is empty, whatever the kernel before it held."""
        self.on_chip = {}

    def hold(self, name, tile):
        """Note that a tile computed on chip is kept there, in the slot `name`; returns it.

        A slot holds one tile: a new one takes the place of the old, as in a kernel's buffers.
        """
        self.on_chip[name] = tile.size
        held = sum(self.on_chip.values())
        if self.budget is not None and held > self.budget:
            tiles = " + ".join(f"{n} {size:,}" for n, size in self.on_chip.items())
            raise OnChipOverflow(
                f"on chip: {tiles} = {held:,} elements, but the budget is {self.budget:,}: "
                f"{held - self.budget:,} too many"
            )
        if held > self.peak_on_chip:
            self.peak_tiles = dict(self.on_chip)
        return tile

    def matmul(self, A, B):
        """A @ B on tiles that are on chip; counts its FLOPs (a multiply and an add each)."""
        self.matmul_flops += 2 * A.shape[-2] * A.shape[-1] * B.shape[-1]
        return A @ B

    def __repr__(self):
        return (
            f"HBM(reads={self.reads:,}, writes={self.writes:,}, "
            f"matmul_flops={self.matmul_flops:,}, peak_on_chip={self.peak_on_chip:,})"
        )


class Tensor:
    """An array in HBM. Nothing can be computed on it: load a tile, compute, store."""

    def __init__(self, hbm, name, array):
        check_array(name, array)
        self.hbm, self.name, self.array = hbm, name, array

    @property
    def shape(self):
        return self.array.shape

    def load(self, *index, dtype=None):
        """Copy the tile array[index] on chip (as `dtype`, if given) and count its elements."""
        tile = np.array(self.array[index], dtype=dtype)
        self.hbm.reads_by[self.name] += tile.size
        return self.hbm.hold(self.name, tile)

    def store(self, tile, *index):
        """Copy a tile from the chip to array[index] and count its elements."""
        check_array(f"tile for {self.name}", tile)
        target = self.array[index]
        if target.shape != tile.shape:
            raise ValueError(
                f"tile for {self.name} has shape {tile.shape}; accepted: {target.shape}, "
                f"the shape of {self.name} at that place"
            )
        target[...] = tile
        self.hbm.writes_by[self.name] += tile.size

    def __array__(self, *args, **kwargs):
        name = self.name
        raise TypeError(f"{name} is in HBM: load a tile of it first, with {name}.load(rows)")

    # Arithmetic by operators ends there too, with the same sentence.
    __getitem__ = __matmul__ = __rmatmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __array__
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __iter__ = __array__
    T = property(__array__)

    def __repr__(self):
        return f"Tensor({self.name!r} in HBM, shape={self.shape}, dtype={self.array.dtype})"
