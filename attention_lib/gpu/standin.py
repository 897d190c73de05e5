"""A CPU stand-in for a GPU: runs one block of threads, or a grid, and watches every access.

A kernel is a Python generator that takes a thread and its arguments; `yield` is __syncthreads():

    def reverse(t, x, y):
        s = t.shared("s", t.blockDim)               # __shared__ float s[blockDim.x];
        s[t.threadIdx] = x[t.threadIdx]
        yield                                       # __syncthreads();
        y[t.threadIdx] = s[t.blockDim - 1 - t.threadIdx]

    print(run_block(reverse, 8, x, y))

It is a model: between two barriers each thread runs to the end before the next one starts, in the
order of their numbers, or shuffled anew after each barrier if there is a seed. So a race gives one
of the results that a GPU may give, and is reported whatever the result. There are no warps, no
caches and no times. Terms: CUDA C++ Programming Guide, "Thread Hierarchy" and "Memory Hierarchy".
"""

import functools
import inspect
from dataclasses import dataclass, field

import numpy as np

from attention_lib.inputs import check_positive_int

NOBODY, SEVERAL = -1, -2  # where an array of owners does not name one of them


def i32(x):
    """x as C's int keeps it: 32 bits, which wrap round at 2^31. Elsewhere an int has no limit."""
    return (int(x) + 2**31) % 2**32 - 2**31


def poisoned(*shape, dtype=np.float32):
    """An array that nobody has written yet: NaN, or the lowest number of an integer dtype."""
    dtype = np.dtype(dtype)
    return np.full(shape, np.nan if dtype.kind == "f" else np.iinfo(dtype).min, dtype)


@dataclass(frozen=True)
class Far:
    """A piece of a tensor that would be too large for a laptop: see `far`."""

    array: np.ndarray
    start: int


def far(array, start):
    """A flat array as elements start, start + 1, ... of a large tensor. Pass it to a kernel.

    Any other index is out of bounds. So a kernel that works near element 2^31 can be run here.
    """
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        raise ValueError(f"array is {type(array).__name__}; accepted: a numpy array of one axis")
    return Far(array, check_positive_int("start", start, 0))


@dataclass
class Found:
    """Something wrong: the first time it happened, and how often it did."""

    what: str  # "race", "race of blocks", "out of bounds", "unwritten", "uneven barrier"
    array: str  # its name; "" for a barrier
    index: tuple | None  # of the element, or as the kernel gave it
    says: str
    times: int = 1

    def __str__(self):
        return f"{self.what}: {self.says}" + (f"  (x{self.times})" if self.times > 1 else "")


@dataclass
class Report:
    """What a run showed. barriers: how many the threads of a block passed together.

    races: two threads (or two blocks) used one element, one of them wrote, and no barrier was
    between. out_of_bounds: an index outside its array; such a read gives poison, such a write is
    dropped. unwritten: shared memory was read that no thread had written. uneven: threads of a
    block waited at different barriers, or some had ended.
    """

    barriers: int = 0
    races: list = field(default_factory=list)
    out_of_bounds: list = field(default_factory=list)
    unwritten: list = field(default_factory=list)
    uneven: list = field(default_factory=list)

    @property
    def found(self):
        """All that is wrong, in one list."""
        return self.races + self.out_of_bounds + self.unwritten + self.uneven

    @property
    def clean(self):
        """True if nothing is."""
        return not self.found

    def __str__(self):
        lines = [f"barriers: {self.barriers}", *map(str, self.found)]
        return "\n".join(lines if self.found else [*lines, "nothing found"])

    def _add(self, where, what, array, index, says):
        for f in where:
            if (f.what, f.array) == (what, array):
                f.times += 1
                return
        where.append(Found(what, array, index, says))


class _Owners:
    """Who has read and who has written each element since the last reset."""

    def __init__(self, size, kind):
        self.readers, self.writers = np.full(size, NOBODY), np.full(size, NOBODY)
        self.kind = kind  # "thread" or "block"

    def reset(self):
        self.readers.fill(NOBODY)
        self.writers.fill(NOBODY)

    def clash(self, flat, me, write):
        """(position in flat, who, what they did) of a use that this one races with, or None."""
        did = [("wrote", self.writers)] + ([("read", self.readers)] if write else [])
        for verb, owners in did:
            others = np.flatnonzero((owners[flat] != NOBODY) & (owners[flat] != me))
            if others.size:
                who = owners[flat][others[0]]
                name = f"another {self.kind}" if who == SEVERAL else f"{self.kind} {who}"
                return others[0], f"{name} {verb}"
        return None

    def note(self, flat, me, write):
        owners = self.writers if write else self.readers
        old = owners[flat]
        owners[flat] = np.where((old == NOBODY) | (old == me), me, SEVERAL)


class Memory:
    """An array that a kernel sees: reads and writes by index go through here, and are watched.

    An index is an int, or a slice with a start and a stop, for each axis. A read is a copy.
    """

    def __init__(self, name, array, launch, shared=False, start=0):
        self._name, self._array, self._launch, self._start = name, array, launch, start
        self._positions = np.arange(array.size).reshape(array.shape)
        self._threads = _Owners(array.size, "thread")
        self._blocks = None if shared else _Owners(array.size, "block")
        self._written = np.zeros(array.size, bool) if shared else None

    shape = property(lambda self: self._array.shape)

    def _inside(self, index):
        """The index as numpy takes it, or None if any of it lies outside the array."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self._array.ndim:
            raise IndexError(
                f"{self._name} has {self._array.ndim} axes, and the index {index} has {len(index)}"
            )
        inside = []
        for i, n in zip(index, self._array.shape, strict=True):
            if isinstance(i, slice):
                first, last = (i.start or 0), (n if i.stop is None else i.stop)
                first, last = int(first) - self._start, int(last) - self._start
                if i.step not in (None, 1):
                    raise IndexError(f"{self._name}: the slice {i} has a step; accepted: none")
                if not 0 <= first <= last <= n:
                    return None
                inside.append(slice(first, last))
            else:
                if not 0 <= int(i) - self._start < n:
                    return None
                inside.append(int(i) - self._start)
        return tuple(inside)

    def _use(self, index, write):
        """Look at one access. Returns the index for numpy, or None if it is out of bounds."""
        launch, report = self._launch, self._launch.report
        verb = "writes" if write else "reads"
        here = f"{self._name}[{_text(index)}]"
        thread = f"thread {launch.thread} of block {launch.block}"
        inside = self._inside(index)
        if inside is None:
            size = " x ".join(str(n) for n in self._array.shape)
            begin = f" from {self._start} on" if self._start else ""
            says = f"{thread} {verb} {here}, and {self._name} has {size} elements{begin}"
            report._add(report.out_of_bounds, "out of bounds", self._name, index, says)
            return None
        flat = np.atleast_1d(self._positions[inside]).ravel()
        for owners, me in ((self._threads, launch.thread), (self._blocks, launch.block)):
            clash = owners.clash(flat, me, write) if owners else None
            if clash:
                where, they = clash
                at = np.unravel_index(flat[where], self._array.shape)
                at = tuple(int(i) + self._start for i in at)
                says = f"{they} {self._name}[{_text(at)}], {owners.kind} {me} {verb} it"
                what, end = _RACES[owners.kind]
                report._add(report.races, what, self._name, at, f"{says}, {end}")
            if owners:
                owners.note(flat, me, write)
        if self._written is not None:
            if write:
                self._written[flat] = True
            elif not self._written[flat].all():
                says = f"{thread} reads {here}, which no thread has written"
                report._add(report.unwritten, "unwritten", self._name, index, says)
        return inside

    def __getitem__(self, index):
        inside = self._use(index, write=False)
        if inside is not None:
            return self._array[inside].copy()
        index = index if isinstance(index, tuple) else (index,)
        lengths = [
            max(0, int(n if i.stop is None else i.stop) - int(i.start or 0))
            for i, n in zip(index, self._array.shape, strict=True)
            if isinstance(i, slice)
        ]
        return poisoned(*lengths, dtype=self._array.dtype)[()]

    def __setitem__(self, index, value):
        inside = self._use(index, write=True)
        if inside is not None:
            self._array[inside] = value


_RACES = {
    "thread": ("race", "no barrier between"),
    "block": ("race of blocks", "and blocks have no order"),
}


def _text(index):
    def one(i):
        if not isinstance(i, slice):
            return str(int(i))
        return ":".join("" if x is None else str(int(x)) for x in (i.start, i.stop))

    return ", ".join(map(one, index if isinstance(index, tuple) else (index,)))


@dataclass
class _Launch:
    """What all threads of a launch have in common."""

    report: Report
    thread: int = 0  # who runs now
    block: int = 0


class Thread:
    """A thread, as its kernel sees it, with CUDA's names for its place (of one dimension)."""

    def __init__(self, threadIdx, blockIdx, blockDim, gridDim, memories, launch):
        self.threadIdx, self.blockIdx = threadIdx, blockIdx
        self.blockDim, self.gridDim = blockDim, gridDim
        self._memories, self._launch = memories, launch

    def shared(self, name, *shape, dtype=np.float32):
        """The block's shared array of this name; poisoned when the first thread asks for it."""
        if name not in self._memories:
            array = poisoned(*shape, dtype=dtype)
            self._memories[name] = Memory(name, array, self._launch, shared=True)
        if self._memories[name].shape != tuple(shape):
            raise ValueError(
                f"shared {name!r} has shape {shape} here, {self._memories[name].shape} elsewhere"
            )
        return self._memories[name]


def _watch(kernel, args, launch):
    """The arguments, each array as a Memory that has the parameter's name."""
    names = list(inspect.signature(kernel).parameters)[1:]
    names += [f"argument {k}" for k in range(len(names), len(args))]
    watched = []
    for name, a in zip(names, args, strict=False):
        if isinstance(a, Far):
            a = Memory(name, a.array, launch, start=a.start)
        elif isinstance(a, np.ndarray):
            a = Memory(name, a, launch)
        watched.append(a)
    return watched


def run_block(kernel, threads, *args, seed=None):
    """Run one block: see run_grid. Returns a Report."""
    return run_grid(kernel, 1, threads, *args, seed=seed)


def run_grid(kernel, blocks, threads, *args, seed=None):
    """Run a kernel with so many blocks of so many threads: kernel<<<blocks, threads>>>(*args).

    kernel(t, *args): a generator function, or a function if it has no barrier; t is a Thread.
    args: arrays are watched (out of bounds, races) and changed in place; anything else goes
    through as it is. seed: shuffle the blocks, and the threads anew after every barrier; None runs
    them in the order of their numbers. Returns a Report. An exception in the kernel is raised.
    """
    check_positive_int("blocks", blocks)
    check_positive_int("threads", threads)
    if not callable(kernel):
        raise TypeError(f"kernel must be a function, got {type(kernel).__name__}")
    launch = _Launch(Report())
    args = _watch(kernel, args, launch)
    rng = None if seed is None else np.random.default_rng(seed)
    for block in _order(range(blocks), rng):
        launch.block = block
        memories = {}
        with np.errstate(invalid="ignore", over="ignore"):  # poison in a sum is no news
            _run(kernel, block, blocks, threads, args, memories, launch, rng)
    return launch.report


def _order(numbers, rng):
    return list(numbers) if rng is None else [int(n) for n in rng.permutation(list(numbers))]


def _run(kernel, block, blocks, threads, args, memories, launch, rng):
    """All phases of one block: each thread to its next barrier, until all have ended."""
    running, passed = {}, 0
    for k in range(threads):
        running[k] = functools.partial(
            _start, kernel, Thread(k, block, threads, blocks, memories, launch), args
        )
    while running:
        waiting = {}
        for k in _order(running, rng):
            launch.thread = k
            if isinstance(running[k], functools.partial):  # its first phase
                running[k] = running[k]()
            if next(running[k], _ENDED) is not _ENDED:
                waiting[k] = _line(running[k])
        if waiting:
            passed += 1
            _check_even(waiting, set(running) - set(waiting), block, launch.report)
        running = {k: running[k] for k in waiting}
        for memory in (*memories.values(), *args):
            if isinstance(memory, Memory):
                memory._threads.reset()
    launch.report.barriers = max(launch.report.barriers, passed)


_ENDED = object()


def _start(kernel, thread, args):
    result = kernel(thread, *args)
    return result if inspect.isgenerator(result) else iter(())


def _line(generator):
    """The line where a generator waits, in the innermost generator that it yields from."""
    while inspect.isgenerator(generator.gi_yieldfrom):
        generator = generator.gi_yieldfrom
    return generator.gi_frame.f_lineno


def _check_even(waiting, ended, block, report):
    if ended or len(set(waiting.values())) > 1:
        some = min(waiting)
        other = min(ended) if ended else next(k for k in waiting if waiting[k] != waiting[some])
        they = "has ended" if ended else "waits at another"
        says = f"thread {some} of block {block} waits at a barrier, thread {other} {they}"
        report._add(report.uneven, "uneven barrier", "", None, says)


def skip_barriers(kernel, which):
    """The kernel without some of its barriers: the k-th is left out where which(k) is true.

    k counts from 0, in each thread. To see what a barrier is for.
    """

    @functools.wraps(kernel)
    def without(t, *args):
        for k, _ in enumerate(kernel(t, *args)):
            if not which(k):
                yield

    return without
