"""The grader's side of a worker: functions to call in it, and an HBM that it has to ask for.

Nothing that arrives is believed. A function's result is a value for `attention_lib.checks` to
judge, here. An HBM that goes with a call stays here: the worker's loads and stores are requests, so
what was counted was really asked for. What a process can only say about itself (which library
functions it called, whether it changed an input) is checked from outside where that is possible:
right answers are asked for again with the library sealed, and the peak of memory is also read from
the kernel.
"""

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import queue
import textwrap
import threading
import time
from pathlib import Path

import numpy as np

from attention_lib.checks import judge
from attention_lib.memory import HBM, Tensor
from tools.grading import wire

MOST_REQUESTS = 200_000  # of one call, to the grader's HBM
MOST_HELD = 512 * 2**20  # bytes of tensors that one call places in the grader's HBM
MOST_INDEX = 10_000  # numbers in an index
PAGES = 2 * 2**20  # bytes by which a process grows for reasons of its own
PATIENCE = 3.0  # seconds more than the worker's own time limit, before it is ended


class WorkerEnded(Exception):
    """The worker is no more, or had to be ended; says why."""


class TookTooLong(WorkerEnded):
    """It was ended because a cell or a call did not end."""


class CannotStart(Exception):
    """No worker could be started: nobody's submission is to blame."""


class TimeIsOver(Exception):
    """The time for the whole notebook is used up."""


class Worker:
    """One process of the sandbox, and what it answers. until: a time.monotonic() for all of it."""

    def __init__(self, sandbox, files, slot, until):
        self.sandbox, self.until = sandbox, until
        self.started = sandbox.start(files, slot)
        self.incoming, self.outgoing = queue.Queue(maxsize=4), queue.Queue()
        self.hbms, self.tensors = {}, {}
        self.numbers = itertools.count()
        for loop in (self._read, self._write):
            threading.Thread(target=loop, daemon=True).start()
        self.peak_rss = 0
        try:
            self._receive(60.0)
        except WorkerEnded as reason:
            raise CannotStart(str(reason)) from None

    # Two threads, because the other side may neither read nor write.

    def _read(self):
        stream = self.started.process.stdout
        try:
            while True:
                frame = wire.read_frame(stream)
                self.incoming.put(frame)
                if frame is None:
                    return
        except (wire.WireError, OSError, ValueError, MemoryError) as error:
            self.incoming.put(error)

    def _write(self):
        stream = self.started.process.stdin
        with contextlib.suppress(OSError, ValueError):
            while (frame := self.outgoing.get()) is not None:
                stream.write(frame)
                stream.flush()

    def end(self):
        if self.started is None:
            return
        self.note_memory()
        started, self.started = self.started, None
        started.end()
        self.outgoing.put(None)
        while True:  # let the reader go
            try:
                self.incoming.get_nowait()
            except queue.Empty:
                break
        for stream in (started.process.stdin, started.process.stdout):
            with contextlib.suppress(OSError, ValueError):
                stream.close()
        started.errors.close()

    def _gone(self, why, kind=WorkerEnded):
        said = self.started.said()
        self.end()
        raise kind(f"{why}: {said}" if said else why)

    def _receive(self, seconds):
        left = min(seconds, self.until - time.monotonic())
        try:
            frame = self.incoming.get(timeout=max(0.01, left))
        except queue.Empty:
            if self.until - time.monotonic() <= 0:
                self._gone("the time for the whole notebook was over", TimeIsOver)
            self._gone("it was still running at the time limit", TookTooLong)
        if frame is None:
            code = self.started.process.wait(10)
            self._gone(f"the process ended (exit code {code})")
        if isinstance(frame, Exception):
            self._gone(f"the process wrote something else than answers ({frame})")
        try:
            return wire.unpack(frame, self._from_worker)
        except wire.WireError as error:
            self._gone(f"the process wrote something else than answers ({error})")

    def ask(self, limit, /, **message):
        """Send a request; serve what the worker asks for meanwhile; return its answer."""
        if self.started is None:
            raise WorkerEnded("the process is no more")
        until, requests = time.monotonic() + limit, 0
        self.outgoing.put(wire.pack(message, self._to_worker))
        while True:
            reply = self._receive(max(0.0, until - time.monotonic()) or 0.01)
            if "ask" not in reply:
                return reply
            requests += 1
            if requests > MOST_REQUESTS:
                self._gone(f"more than {MOST_REQUESTS:,} loads and stores in one call")
            self.outgoing.put(wire.pack(self._serve(reply), self._to_worker))

    # ---- what the student's code may ask for

    def _serve(self, request):
        try:
            what = request.pop("ask")
            service = getattr(self, f"_serve_{what}", None)
            if service is None:
                raise ValueError(f"no such request: {what}")
            return {"answer": service(**request)}
        except Exception as error:  # an OnChipOverflow is a finding that the student's code may see
            return {"raised": (type(error).__name__, str(error)[:500])}

    def _serve_begin(self):
        """A call whose memory is measured starts now."""
        self.rss_before = self._memory(reset=True)

    def _serve_end(self):
        before, after = self.rss_before, self._memory()
        self.grown = max(0, after - before) if before and after else 0

    def _serve_hbm(self, id, get):
        if get not in ("reads_by", "writes_by", "matmul_flops", "on_chip", "peak_tiles",
                       "reads", "writes", "peak_on_chip"):  # fmt: skip
            raise ValueError(f"no such count: {get}")
        value = getattr(self.hbms[id], get)
        return dict(value) if isinstance(value, dict) else value

    def _serve_launch(self, id):
        self.hbms[id].launch()

    def _serve_hold(self, id, name, size):
        if not (isinstance(size, int) and 0 <= size < 2**40):
            raise ValueError("size must be a count of elements")
        if len(self.hbms[id].on_chip) > 1000:
            raise ValueError("more than 1000 slots on chip")
        self.hbms[id].hold(str(name)[:60], _Sized(size))

    def _serve_matmul(self, id, A, B):
        if not all(isinstance(n, int) and n >= 0 for n in (*A, *B)) or min(len(A), len(B)) < 2:
            raise ValueError("matmul of things that are no matrices")
        self.hbms[id].matmul_flops += 2 * A[-2] * A[-1] * B[-1]

    def _serve_tensor(self, id, name, array):
        held = sum(t.array.nbytes for t in self.tensors.values())
        if held + array.nbytes > MOST_HELD or len(self.tensors) > 1000:
            raise MemoryError("too much in HBM")
        return self.hbms[id].tensor(str(name)[:60], array)

    def _serve_array(self, id):
        return self.tensors[id].array

    def _serve_load(self, id, index, dtype):
        if dtype not in (None, "float16", "float32", "float64", "bool", "int64", "int32"):
            raise TypeError(f"dtype {dtype}")
        return self.tensors[id].load(*_checked_index(index), dtype=dtype)

    def _serve_store(self, id, index, tile):
        self.tensors[id].store(tile, *_checked_index(index))

    # ---- values with no plain form

    def _to_worker(self, value, encode):
        if isinstance(value, _Spy):
            source, name = source_of(type(value.array)), type(value.array).__name__
            array = encode(value.array.view(np.ndarray))
            return {"$": "spy", "id": value.id, "class": name, "source": source, "array": array}
        if isinstance(value, HBM):
            id = self._number(self.hbms, value)
            return {"$": "hbm", "id": id, "budget": value.budget}
        if isinstance(value, Tensor):
            id = self._number(self.tensors, value)
            hbm = self._number(self.hbms, value.hbm)
            shape = [int(n) for n in value.shape]
            return {"$": "tensor", "id": id, "hbm": hbm, "name": value.name, "shape": shape,
                    "dtype": value.array.dtype.name}  # fmt: skip
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith("attention_lib."):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            about = {"module": type(value).__module__, "class": type(value).__name__}
            return {"$": "object", **about, "fields": encode(fields)}
        return None

    def _number(self, known, value):
        for id, other in known.items():
            if other is value:
                return id
        id = next(self.numbers)
        known[id] = value
        return id

    def _from_worker(self, kind, item, decode):
        if kind == "hbm":
            return self.hbms[item["id"]]
        if kind == "tensor":
            return self.tensors[item["id"]]
        if kind == "function" and type(item["id"]) is int:
            return Function(self, item["id"], str(item["name"])[:60])
        if kind == "made":
            made_by = item["module"], item["function"]
            if made_by not in self.sandbox.helpers or len(item["of"]) > 20:
                raise KeyError(made_by)
            module = importlib.import_module(f"attention_lib.checks.exercises.{made_by[0]}")
            return getattr(module, made_by[1])(*(decode(x) for x in item["of"]))
        raise KeyError(kind)

    # ---- memory, as the kernel sees it

    def _memory(self, reset=False):
        """Bytes: resident now and from now on (reset), or the most since then; 0 if unknown."""
        try:
            process = Path(f"/proc/{self.started.pid()}")
            if reset:
                (process / "clear_refs").write_text("5")
            fields = dict(
                line.split(":", 1) for line in (process / "status").read_text().splitlines()
            )
            kib = int(fields["VmRSS" if reset else "VmHWM"].split()[0])
        except (OSError, KeyError, ValueError, IndexError):
            return 0
        self.peak_rss = max(self.peak_rss, 1024 * kib)
        return 1024 * kib

    def note_memory(self):
        if self.started is not None and self.started.process.poll() is None:
            self._memory()

    # ---- requests

    def run_cell(self, source):
        reply = self.ask(self.sandbox.limits.cell, do="cell", source=source)
        error = reply.get("error")
        if not (isinstance(error, list) and len(error) == 3):
            error = None
        return str(reply.get("printed", "")), error and tuple(str(x) for x in error)

    def value(self, expression):
        """(value, None) or (None, the error)."""
        reply = self.ask(self.sandbox.limits.cell, do="value", expression=expression)
        if "error" in reply:
            return None, str(reply["error"])[:300]
        return reply.get("value"), None


class _Sized:
    def __init__(self, size):
        self.size = size


def _checked_index(index):
    if not isinstance(index, tuple) or len(index) > 8:
        raise IndexError("index")
    for part in index:
        plain = isinstance(part, (int, slice, np.integer, type(...), type(None)))
        listed = isinstance(part, np.ndarray) and part.size <= MOST_INDEX
        if not (plain or listed):
            raise IndexError(f"{type(part).__name__} as an index of a tensor")
    return index


class RaisedThere(Exception):
    """The student's function raised, in the worker."""


class Function:
    """A function of the student's, to be called in the worker, for the exercise of `judging`."""

    def __init__(self, worker, id, name):
        self.worker, self.id, self.__name__ = worker, id, name
        self.allowed, self.right_so_far, self.error = frozenset(), [], None

    def judging(self, exercise):
        self.allowed, self.right_so_far = exercise.library, []

    def __repr__(self):
        return f"<function {self.__name__}>"

    def __call__(self, *args, **kwargs):
        arguments = {f"{i}": value for i, value in enumerate(args)} | kwargs
        seen = self._call(arguments, positional=len(args))
        if seen.timed_out:
            raise judge.TimeIsUp
        if seen.error:
            self.error = seen.error
            raise RaisedThere(seen.error)
        self._remember(arguments, len(args), seen)
        return seen.value

    def observe(self, arguments, *, watch_library=False, measure=False, seconds=None):
        """judge.observe, in the worker: what came back, as far as it can be believed."""
        seen = self._call(arguments, watch=watch_library, measure=measure, seconds=seconds)
        if watch_library:
            seen.library |= self.only_with_the_library()
        elif not (seen.error or seen.timed_out or measure):
            self._remember(arguments, 0, seen)
        return seen

    def _remember(self, arguments, positional, seen):
        if not any(isinstance(value, HBM) for value in arguments.values()):  # it would count twice
            self.right_so_far.append((arguments, positional, seen.value))

    def only_with_the_library(self):
        """Ask again for all that was right, the library sealed: what it then needed and had not."""
        called = set()
        for arguments, positional, before in self.right_so_far:
            seen = self._call(arguments, positional=positional, sealed_but=self.allowed)
            called |= seen.library
            if not called and not alike(seen.value, before):
                called.add("a function of the library")
            if called:
                break
        return frozenset(called)

    def _call(self, arguments, *, positional=0, watch=False, measure=False, seconds=None,
              sealed_but=None):  # fmt: skip
        seconds = min(seconds or judge.TIME_LIMIT, self.worker.sandbox.limits.call)
        worker, spies = self.worker, {}
        worker.grown = 0

        def special(value):
            if isinstance(value, np.ndarray) and isinstance(getattr(value, "log", None), list):
                spies[str(len(spies))] = value
                return _Spy(value, str(len(spies) - 1))
            return value

        try:
            reply = worker.ask(
                seconds + PATIENCE,
                do="call",
                function=self.id,
                arguments={name: special(value) for name, value in arguments.items()},
                positional=positional,
                watch=watch,
                measure=measure,
                sealed_but=None if sealed_but is None else sorted(sealed_but),
                seconds=float(seconds),
            )
        except TookTooLong:
            return judge.Seen(timed_out=True)
        except WorkerEnded as error:
            return judge.Seen(error=f"ProcessEnded: {error}")
        finally:
            worker.tensors.clear()
        error, mutated = reply.get("error"), reply.get("mutated")
        peak = reply.get("peak")
        seen = judge.Seen(
            value=reply.get("value"),
            error=None if error is None else str(error)[:300],
            timed_out=reply.get("timed_out") is True,
            mutated=mutated if isinstance(mutated, str) and mutated in arguments else None,
            library=frozenset(str(name)[:80] for name in reply.get("library") or ()),
            peak=peak if isinstance(peak, int) else 0,
        )
        if measure:
            seen.peak = max(seen.peak, worker.grown - PAGES)
        logs = reply.get("logs")
        for id, spy in spies.items():
            log = logs.get(id) if isinstance(logs, dict) else None
            spy.log.extend(x for x in log or () if isinstance(x, np.ndarray))
        return seen


def alike(a, b):
    """The same result twice: equal up to rounding, whatever it is made of."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    x, y = judge.as_arrays(a, 1), judge.as_arrays(b, 1)
    if x is None or y is None:
        return x is y and type(a).__name__ == type(b).__name__
    return judge.same(x, y)


class _Spy:
    """An array whose class notes in `log` what is done with it; the class goes along as text."""

    def __init__(self, array, id):
        self.array, self.id = array, id


def observe(function, arguments, **how):
    """judge.observe, for a function here or in a worker."""
    if isinstance(function, Function):
        return function.observe(arguments, **how)
    parts = functions_in(function)
    if not parts:
        return judge.observe_here(function, arguments, **how)
    # Something of ours around functions of the student's: each of them knows what it did.
    seen = judge.observe_here(function, arguments, seconds=10 * judge.TIME_LIMIT)
    if seen.error and seen.error.startswith(RaisedThere.__name__):
        seen.error = next((p.error for p in parts if p.error), seen.error)
    if seen.error and seen.error.startswith(judge.TimeIsUp.__name__):
        seen.error, seen.timed_out = None, True
    if how.get("watch_library"):
        seen.library = frozenset().union(*(p.only_with_the_library() for p in parts))
    return seen


def functions_in(answer):
    """The functions of the student's in an answer that a helper of the exercises put together."""
    if isinstance(answer, Function):
        return [answer]
    return [x for x in getattr(answer, "__dict__", {}).values() if isinstance(x, Function)]


def watch_workers():
    """Let every check observe a worker's function where the worker is."""
    judge.observer = observe


def source_of(type_):
    """The source of a class and of the functions of its module that its methods name."""
    module = inspect.getmodule(type_)
    methods = [f for f in vars(type_).values() if inspect.isfunction(f)]
    names = {name for f in methods for name in f.__code__.co_names}
    helpers = [f for n, f in vars(module).items() if n in names and inspect.isfunction(f)]
    return "\n\n".join(textwrap.dedent(inspect.getsource(x)) for x in (*helpers, type_))
