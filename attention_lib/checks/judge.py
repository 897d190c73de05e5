"""How a learner's function is called: with copies, under a time limit, and watched.

Nothing that the function does ends the check: what it raises, how long it takes, what it returns
and what it changes are all findings. `observe` makes them, `same` compares answers.
"""

import _thread
import contextlib
import math
import reprlib
import signal
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
    # A shell starts background jobs with SIGINT ignored, and then an interrupt does nothing. Only
    # the main thread may change that.
    main = threading.current_thread() is threading.main_thread()
    ignored = main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass
class Seen:
    """One call of the learner's function: what came back, and what else happened."""

    value: object = None
    error: str | None = None  # what it raised, and where in the learner's code
    timed_out: bool = False
    mutated: str | None = None  # the name of an argument that is no longer what it was
    library: frozenset = frozenset()  # functions of this library that it called, the checks' too
    peak: int = 0  # bytes allocated at the same time, beyond the inputs


def copies(value):
    """The value again, with each array in it copied, in tuples, lists and dicts too."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {k: copies(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        make = getattr(value, "_make", type(value))  # a named tuple has its own way
        return make(map(copies, value))
    return value


def unchanged(before, after):
    """Is a copy still what it was made from? What is not copied, such as an HBM, may change."""
    if isinstance(before, np.ndarray):
        return (
            isinstance(after, np.ndarray)
            and (before.shape, before.dtype) == (after.shape, after.dtype)
            and before.tobytes() == after.tobytes()
        )
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            unchanged(v, after[k]) for k, v in before.items()
        )
    if isinstance(before, (tuple, list)):
        return len(before) == len(after) and all(map(unchanged, before, after))
    return before is after


observer = None  # the grader's, in place of observe_here: its functions live in another process


def observe(function, arguments, **how):
    """observe_here, or what a grader has put in its place."""
    return (observer or observe_here)(function, arguments, **how)


def observe_here(function, arguments, *, watch_library=False, measure=False, seconds=None):
    """Call function(**arguments) on copies and report as Seen. Never raises, but for Ctrl+C.

    watch_library notes which library functions run, and "sys.setprofile" if the watching is
    switched off (slow: only where it matters). measure notes the peak of memory. seconds: the time
    limit, math.inf for none.
    """
    given, seen = copies(arguments), Seen()
    called = set()
    seconds = TIME_LIMIT if seconds is None else seconds
    limit = contextlib.nullcontext() if seconds == math.inf else time_limit(seconds)

    def profile(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            called.add(frame.f_code.co_qualname.split(".<locals>")[0])
        elif event == "c_call" and arg is sys.setprofile:
            called.add("sys.setprofile")

    try:
        with limit, np.errstate(all="ignore"):
            if measure:
                tracemalloc.start()
            if watch_library:
                sys.setprofile(profile)
            try:
                seen.value = function(**given)
            finally:
                if watch_library:
                    off = set() if sys.getprofile() is profile else {"sys.setprofile"}
                    seen.library = frozenset(called | off)
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
    seen.mutated = next((k for k, v in arguments.items() if not unchanged(v, given[k])), None)
    return seen


def describe(error):
    """One line: the error, and the last line of the learner's own code that led to it."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:110]
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARY)
    ]
    own = [f for f in frames if "site-packages" not in f.filename]
    if own:
        text += f" (line {own[-1].lineno}: {(own[-1].line or '').strip()[:60]})"
    return text


def shown(value):
    """What came, in a few characters. Never raises: an int of 5,000 digits has no repr."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


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
            array = np.asarray(part)
            if array.dtype.kind == "c":  # it would lose its imaginary part without a word
                return None
            arrays.append(array.astype(np.float64, copy=False))
        except (TypeError, ValueError, OverflowError):
            return None
    return arrays


def first_difference(got, want, tolerance):
    """The index of the first element that is off by more than tolerance (NaN is), or None."""
    with np.errstate(invalid="ignore"):
        near = (np.abs(got - want) <= tolerance) | (got == want)
    return None if near.all() else tuple(int(i) for i in np.argwhere(~near)[0])


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
