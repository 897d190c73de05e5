"""Judging a learner's function: what is wrong, on which small input, expected against got.

A wrong idea is recognised by what it computes: each `Mistake` is a program, and an answer that
gives the same outputs as one of them, on every probe of a stage, has that idea, however written.
"""

import reprlib

import numpy as np

from attention_lib.checks.judge import as_arrays, first_difference, observe, same
from attention_lib.checks.kinds import Program
from attention_lib.checks.result import NOT_ATTEMPTED, NOT_YET, PASSED, RAISED, Result


def check_program(exercise: Program, answer, seed=0):
    """Run the answer on every probe and on the claims; returns a Result."""
    where = f"Read: {exercise.read}"
    if not callable(answer):
        came = f"got {type(answer).__name__} {reprlib.repr(answer)}"
        return _not_yet(exercise, None, f"the answer is a function, {came}.", where)

    probes, outputs, first_wrong = exercise.probes(seed), [], None
    for probe in probes:
        seen = observe(answer, probe.arguments)
        if first_wrong and (seen.error or seen.timed_out or seen.mutated):
            break  # the wrong answer to an easier input says more
        if seen.error:
            message = f"{exercise.id}: your code raised {seen.error}\nOn: {probe.says}\n{where}"
            return Result(RAISED, message)
        if seen.timed_out:
            text = "your code was still running at the time limit: does every loop end?"
            return _not_yet(exercise, "never-ends", text, f"On: {probe.says}", where)
        if seen.mutated:
            text = f"your code changed its input {seen.mutated}; work on a copy."
            return _not_yet(exercise, "mutates-its-input", text, f"On: {probe.says}", where)
        if probe is probes[0] and (seen.value is None or seen.value is ...):  # the stub, as it came
            return Result(NOT_ATTEMPTED, f"{exercise.id}: write the function, then run again.")
        want = as_arrays(exercise.right(**probe.arguments), len(exercise.outputs))
        got = as_arrays(seen.value, len(exercise.outputs))
        outputs.append((probe, got, want))
        if first_wrong is None:
            problem = _compare(exercise, probe, got, want, seen.value)
            if problem:
                first_wrong = (probe, problem)
    if first_wrong is None:
        return _claims(exercise, answer, seed, where)

    probe, problem = first_wrong
    # Within one stage: somebody who forgot a rescale may have forgotten a guard as well.
    mistake = _recognise(exercise, [o for o in outputs if o[0].stage == probe.stage])
    if mistake is None:
        return _not_yet(exercise, None, problem, f"On: {probe.says}", where)
    return _not_yet(
        exercise, mistake.id, mistake.says, f"On: {probe.says}", problem, f"Read: {mistake.read}"
    )


def _compare(exercise, probe, got, want, value):
    """What is wrong with the outputs of one probe, in one line, or None."""
    names = ", ".join(exercise.outputs)
    if got is None:
        came = "nothing" if value is None else type(value).__name__
        if isinstance(value, tuple):
            came = f"a tuple of {len(value)}"
        return f"Expected the numbers {names}; got {came}."
    for name, g, w, tolerance in zip(exercise.outputs, got, want, probe.tolerance, strict=True):
        if g.shape != w.shape:
            return f"Expected {name} of shape {w.shape}; got {g.shape}."
        at = first_difference(g, w, tolerance)
        if at is not None:
            place = f"[{', '.join(map(str, at))}]" if at else ""
            return f"{name}{place}: expected {w[at]:.6g}, got {g[at]:.6g}."
    return None


def _recognise(exercise, outputs):
    """The mistake that gives these outputs on every probe, and not the right ones; or None."""
    for mistake in exercise.mistakes:
        differs = False
        for probe, got, want in outputs:
            seen = observe(mistake.program, probe.arguments)
            wrong = as_arrays(seen.value, len(exercise.outputs))
            if not same(got, wrong):
                break
            differs = differs or not same(wrong, want)
        else:
            if differs:
                return mistake
    return None


def _claims(exercise, answer, seed, where):
    """The outputs are right. Is what the exercise claims about the program right too?"""
    probe = exercise.probes(seed)[0]
    called = observe(answer, probe.arguments, watch_library=True).library - exercise.library
    if called:
        text = (
            f"right numbers, but they come from the library ({sorted(called)[0]}). Write your own."
        )
        return _not_yet(exercise, "calls-the-library", text, where)
    if exercise.memory:
        big = exercise.big(seed)
        peak, allowed = observe(answer, big, measure=True).peak, exercise.memory(big)
        if peak > allowed:
            text = "right numbers, but your code holds an N x N array; only tiles may exist."
            more = (
                f"At N = {len(big['Q']):,}: {peak / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f}."
            )
            return _not_yet(exercise, "makes-n-by-n", text, more, where)
    for claim in exercise.claims:
        finding = claim(answer)
        if finding:
            mistake, text, read = finding
            return _not_yet(exercise, mistake, text, f"Read: {read}")
    return Result(PASSED, f"{exercise.id}: yes. {len(exercise.probes(seed))} inputs, all right.")


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
