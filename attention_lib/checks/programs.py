"""Judging a learner's function: what is wrong, on which small input, expected against got.

A wrong idea is recognised by what it computes: each `Mistake` is a program, and an answer that
gives the same outputs as one of them, on every probe of a stage, has that idea, however written.
"""

import functools
import math
from dataclasses import dataclass, field

import numpy as np

from attention_lib.checks import judge
from attention_lib.checks.judge import as_arrays, first_difference, observe, same, shown
from attention_lib.checks.kinds import Probe, Program
from attention_lib.checks.result import NOT_ATTEMPTED, NOT_YET, PASSED, RAISED, Result


@dataclass(frozen=True)
class Row:
    """A probe, what is right on it, and what each wrong idea gives there, once it was asked for."""

    probe: Probe
    want: list
    wrong: dict = field(default_factory=dict)


def rows(exercise: Program, seed=0):
    """The probes of this seed. They are kept for a while: what is right need not be found again."""
    return _rows(exercise.probes, exercise.right, len(exercise.outputs), seed)


@functools.lru_cache(maxsize=16)
def _rows(probes, right, count, seed):
    return tuple(Row(p, as_arrays(right(**p.arguments), count)) for p in probes(seed))


def run(exercise: Program, answer, row, **how):
    """The answer on one probe: what was seen, its outputs, and what is wrong with them or None."""
    seen = observe(answer, row.probe.arguments, **how)
    if seen.error or seen.timed_out or seen.mutated:
        return seen, None, "it did not come to an answer"
    got = as_arrays(seen.value, len(exercise.outputs))
    return seen, got, _compare(exercise, row, got, seen.value)


def fails_on(exercise: Program, answer, seed=0, first=0):
    """The number of a probe on which the answer is wrong, or None: the verdict without the words.

    It is `check_program`'s, but for the time limit and the claims. Probe `first` is tried first.
    """
    numbered = list(enumerate(rows(exercise, seed)))
    for number, row in numbered[first:] + numbered[:first]:
        if run(exercise, answer, row, seconds=math.inf)[2]:
            return number
    return None


def check_program(exercise: Program, answer, seed=0):
    """Run the answer on every probe and on the claims; returns a Result."""
    where = f"Read: {exercise.read}"
    if not callable(answer):
        came = f"got {type(answer).__name__} {shown(answer)}"
        return _not_yet(exercise, None, f"the answer is a function, {came}.", where)

    done, first_wrong = [], None
    for row in rows(exercise, seed):
        # Within one stage: somebody who forgot a rescale may have forgotten a guard as well.
        if first_wrong and row.probe.stage != first_wrong[0].probe.stage:
            break
        seen, got, problem = run(exercise, answer, row)
        stopped = _stopped(exercise, seen, f"On: {row.probe.says}", where)
        if stopped and first_wrong:
            break  # the wrong answer to an easier input says more
        if stopped:
            return stopped
        if not done and (seen.value is None or seen.value is ...):  # the stub, as it came
            return Result(NOT_ATTEMPTED, f"{exercise.id}: write the function, then run again.")
        done.append((row, got))
        if problem and not first_wrong:
            first_wrong = row, problem
    if not first_wrong:
        return _claims(exercise, answer, seed, where)

    row, problem = first_wrong
    on, mistake = f"On: {row.probe.says}", _recognise(exercise, done)
    if mistake is None:
        return _not_yet(exercise, None, problem, on, where)
    return _not_yet(exercise, mistake.id, mistake.says, on, problem, f"Read: {mistake.read}")


def _stopped(exercise, seen, on, where):
    """What to say of a call that came to no answer, or None."""
    if seen.error:
        message = f"{exercise.id}: your code raised {seen.error}\n{on}\n{where}"
        return Result(RAISED, message)
    if seen.timed_out:
        text = "your code was still running at the time limit: does every loop end?"
        return _not_yet(exercise, "never-ends", text, on, where)
    if seen.mutated:
        text = f"your code changed its input {seen.mutated}; work on a copy."
        return _not_yet(exercise, "mutates-its-input", text, on, where)
    return None


def _compare(exercise, row, got, value):
    """What is wrong with the outputs of one probe, in one line, or None."""
    names = ", ".join(exercise.outputs)
    if got is None:
        return f"Expected the numbers {names}; got {_what(value, exercise.outputs)}."
    parts = value if len(got) > 1 else [value]
    for name, g, w, tolerance, part in zip(
        exercise.outputs, got, row.want, row.probe.tolerance, parts, strict=True
    ):
        if g.shape != w.shape:
            return f"Expected {name} of shape {w.shape}; got {g.shape}."
        at = first_difference(g, w, tolerance)
        if at is not None:
            place = f"[{', '.join(map(str, at))}]" if at else ""
            expected, came = _told_apart(w[at], g[at])
            kind = getattr(part, "dtype", g.dtype)
            rounded = f" It is {kind}: compute in float64." if kind in NARROW else ""
            return f"{name}{place}: expected {expected}, got {came}.{rounded}"
    return None


def _what(value, names):
    """What came where numbers belong."""
    if value is None:
        return "nothing"
    if isinstance(value, (tuple, list)) and len(names) > 1:
        if len(value) != len(names):
            return f"a {type(value).__name__} of {len(value)}"
        odd = (x for x in zip(value, names, strict=True) if as_arrays(x[0], 1) is None)
        value, name = next(odd)
        return f"{_what(value, ())} for {name}"
    return str(getattr(value, "dtype", type(value).__name__))


NARROW = (np.dtype(np.float16), np.dtype(np.float32))


def _told_apart(a, b):
    """Two numbers as text, with as many digits as it takes to see that they differ."""
    if a == b or not (np.isfinite(a) and np.isfinite(b)):
        return f"{a:.6g}", f"{b:.6g}"
    if a.is_integer() and b.is_integer() and max(abs(a), abs(b)) < 1e15:
        return f"{a:,.0f}", f"{b:,.0f}"
    pairs = ((f"{a:.{n}g}", f"{b:.{n}g}") for n in range(6, 18))
    return next(pair for pair in pairs if pair[0] != pair[1])  # 17 digits tell any two apart


def _gives(exercise, mistake, row):
    """What a wrong idea gives on a probe."""
    if mistake.program not in row.wrong:
        seen = observe(mistake.program, row.probe.arguments, seconds=math.inf)
        row.wrong[mistake.program] = as_arrays(seen.value, len(exercise.outputs))
    return row.wrong[mistake.program]


def _recognise(exercise, done):
    """The mistake that gives the same as the answer on every probe so far, right or wrong; or None.

    So a mistake that an earlier stage shows is not the one of an answer that passed that stage.
    """
    for mistake in exercise.mistakes:
        differs = False
        for row, got in reversed(done):  # the stage that failed tells most of them apart
            wrong = _gives(exercise, mistake, row)
            if not same(got, wrong):
                break
            differs = differs or not same(wrong, row.want)
        else:
            if differs:
                return mistake
    return None


def _claims(exercise, answer, seed, where):
    """The outputs are right. Is what the exercise claims about the program right too?"""
    probes = [row.probe for row in rows(exercise, seed)]
    seen = observe(answer, probes[0].arguments, watch_library=True)
    stopped = _stopped(exercise, seen, f"On: {probes[0].says}", where)
    if stopped:
        return stopped
    called = sorted(seen.library - exercise.library, key=lambda x: (x[:1] in "<_", x))
    if "sys.setprofile" in called:
        text = "right numbers, but your code calls sys.setprofile: what it calls is hidden then."
        return _not_yet(exercise, "calls-the-library", text, where)
    if called:
        text = f"right numbers, but they come from the library ({called[0]}). Write your own."
        return _not_yet(exercise, "calls-the-library", text, where)
    if exercise.memory:
        big = exercise.big(seed)
        # Measuring makes plain Python five times slower, and it may be right.
        seen = observe(answer, big, measure=True, seconds=3 * judge.TIME_LIMIT)
        allowed = exercise.memory(big)
        at = f"At N = {len(big['Q']):,}"
        if seen.peak > allowed:
            text = "right numbers, but your code holds an N x N array; only tiles may exist."
            more = f"{at}: {seen.peak / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f}."
            return _not_yet(exercise, "makes-n-by-n", text, more, where)
        if seen.timed_out:
            text = "right numbers, but too slow: your code was still running at the time limit."
            more = f"{at}, d = {big['Q'].shape[1]}. Let numpy work on whole tiles."
            return _not_yet(exercise, "too-slow", text, more, where)
        stopped = _stopped(exercise, seen, at, where)
        if stopped:
            return stopped
    for claim in exercise.claims:
        finding = claim(answer)
        if finding:
            mistake, text, read = finding
            return _not_yet(exercise, mistake, text, f"Read: {read}")
    return Result(PASSED, f"{exercise.id}: yes. {len(probes)} inputs, all right.")


def _not_yet(exercise, mistake, text, *lines):
    return Result(NOT_YET, "\n".join([f"{exercise.id}: {text}", *lines]), mistake)


def rounding(size, keys, V):
    """What rounding in float64 may do to O and L: scores up to `size`, so many keys, values V.

    To first order each weight is off by eps * (4 size + 2 keys + 16), whatever order the sums are
    taken in; three times that is allowed.
    """
    eps = float(np.finfo(np.float64).eps)
    relative = 3 * eps * (4 * size + 2 * keys + 16)
    return relative * float(np.abs(V).max(initial=0.0)), relative + 3 * eps * size
