"""How a learner's function is called: with copies, under a time limit, and watched.

Nothing that the function does ends the check: what it raises, how long it takes, what it returns
and what it changes are all findings. `observe` makes them, `same` compares answers.
"""

import _thread
import contextlib
import sys
import threading
import time
import traceback
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LIBRARY = str(Path(__file__).parent.parent)
TIME_LIMIT = 10.0  # seconds for one call; the inputs are small, a right answer takes milliseconds


class TimeIsUp(Exception):
    """The learner's code was still running when its time was over."""


@contextlib.contextmanager
def time_limit(seconds):
    """Raise TimeIsUp in the main thread if the block takes longer, again and again until it stops.

    An interrupt, not a signal, so that it works on Windows too. It reaches Python code only: one
    long call into C ends first. A real Ctrl+C stays a KeyboardInterrupt.
    """
    over, lock, fired = threading.Event(), threading.Lock(), threading.Event()

    def watch():
        if over.wait(seconds):
            return
        while True:
            with lock:
                if over.is_set():
                    return
                fired.set()
                _thread.interrupt_main()
            if over.wait(0.5):
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            with lock:
                over.set()
        if fired.is_set():
            time.sleep(0.05)  # the interrupt that is on its way arrives here, not in the caller
            raise TimeIsUp
    except KeyboardInterrupt:
        if fired.is_set():
            raise TimeIsUp from None
        raise
    finally:
        watcher.join()


@dataclass
class Seen:
    """One call of the learner's function: what came back, and what else happened."""

    value: object = None
    error: str | None = None  # what it raised, and where in the learner's code
    timed_out: bool = False
    mutated: str | None = None  # the name of an argument that is no longer what it was
    library: frozenset = frozenset()  # functions of this library that it called
    peak: int = 0  # bytes allocated at the same time, beyond the inputs


def copies(arguments):
    """The arguments again, arrays copied with their strides' order lost on purpose."""
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items()}


def observe(function, arguments, *, watch_library=False, measure=False, seconds=None):
    """Call function(**arguments) on copies and report as Seen. Never raises, but for Ctrl+C.

    watch_library notes which library functions run (slow: only where it matters). measure notes
    the peak of memory.
    """
    given, seen = copies(arguments), Seen()
    called = set()

    def profile(frame, event, arg):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(LIBRARY) and "checks" not in Path(file).parts:
            called.add(frame.f_code.co_qualname)

    try:
        with time_limit(TIME_LIMIT if seconds is None else seconds), np.errstate(all="ignore"):
            if measure:
                tracemalloc.start()
            if watch_library:
                sys.setprofile(profile)
            try:
                seen.value = function(**given)
            finally:
                sys.setprofile(None)
                if measure:
                    seen.peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
    except TimeIsUp:
        seen.timed_out = True
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: an answer must not end the check
        seen.error = describe(error)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and not np.array_equal(
            value, given[name], equal_nan=value.dtype.kind == "f"
        ):
            seen.mutated = name
    seen.library = frozenset(called)
    return seen


def describe(error):
    """One line: the error, and the last line of the learner's own code that led to it."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARY)
    ]
    own = [f for f in frames if "site-packages" not in f.filename]
    if own:
        text += f" (line {own[-1].lineno}: {(own[-1].line or '').strip()[:80]})"
    return text


def as_arrays(value, count):
    """The outputs as float64 arrays, or None if they are not `count` numeric arrays."""
    parts = value if isinstance(value, (tuple, list)) and count > 1 else (value,)
    if len(parts) != count:
        return None
    arrays = []
    for part in parts:
        if isinstance(part, (str, bytes, bool)) or part is None or part is ...:
            return None
        try:
            arrays.append(np.asarray(part, dtype=np.float64))
        except (TypeError, ValueError):
            return None
    return arrays


def first_difference(got, want, tolerance):
    """The index of the first element that is off by more than tolerance (NaN is), or None."""
    with np.errstate(invalid="ignore"):
        off = ~((np.abs(got - want) <= tolerance) | (got == want))
    return None if not off.any() else tuple(int(i) for i in np.argwhere(off)[0])


def same(a, b, relative=1e-6):
    """Do two wrong answers come from one idea? Equal up to rounding; not finite is one class."""
    if a is None or b is None or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return False
    for x, y in zip(a, b, strict=True):
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(y)):
            return False
        scale = np.abs(y[finite]).max(initial=0.0)
        if not np.all(np.abs(x[finite] - y[finite]) <= relative * (scale + 1e-12)):
            return False
    return True
