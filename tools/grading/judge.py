"""One submission: its cells run in a worker, its checks are judged here.

`grade` takes a notebook whose graded cells are the instructor's (bookkeeping.py puts them back) and
returns what came of each check, and what to show under each cell. A cell that ends its worker, or
does not end, is left out, and the rest goes on in a new one.
"""

import contextlib
import os
import time
from dataclasses import dataclass, field

from attention_lib import checks
from attention_lib.checks.kinds import Program
from attention_lib.checks.programs import check_program
from attention_lib.checks.result import NOT_YET, PASSED, RAISED, Result
from tools.grading import remote

NOT_GRADED = "not graded"
MOST_STARTS = 5  # workers for one notebook


@dataclass
class Checked:
    """One graded cell: what came of its checks."""

    grade_id: str
    status: str
    message: str
    misconception: str = ""


@dataclass
class Graded:
    """One submission: a Checked for each graded cell, and text under each cell by its position."""

    checked: list = field(default_factory=list)
    outputs: dict = field(default_factory=dict)  # position -> (printed, None or an error's parts)
    notes: list = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0  # bytes


class Session:
    """A worker that has run the cells so far, made again when it was lost."""

    def __init__(self, sandbox, files, slot, until):
        self.make = lambda: remote.Worker(sandbox, files, slot, until)
        self.worker, self.starts, self.ran, self.peak = None, 0, [], 0

    def ready(self):
        """The worker; a new one first runs what the old one had run."""
        while self.worker is None or self.worker.started is None:
            self.end()
            if self.starts == MOST_STARTS:
                raise remote.TimeIsOver(f"its process was lost {MOST_STARTS} times")
            self.starts += 1
            self.worker = self.make()
            for source in list(self.ran):
                try:
                    self.worker.run_cell(source)
                except remote.WorkerEnded:
                    self.ran.remove(source)
                    break
        return self.worker

    def run(self, source):
        """(printed, error) of a cell. One that ends the worker is not run again."""
        try:
            result = self.ready().run_cell(source)
        except remote.WorkerEnded as reason:
            kind = "TimeLimit" if isinstance(reason, remote.TookTooLong) else "ProcessEnded"
            return "", (kind, f"{reason}. The cell is left out from here on", "")
        self.ran.append(source)
        return result

    def value(self, expression):
        try:
            return self.ready().value(expression)
        except remote.WorkerEnded as reason:
            return None, f"ProcessEnded: {reason}"

    def end(self):
        if self.worker is not None:
            self.worker.end()
            self.peak = max(self.peak, self.worker.peak_rss)


def grade(cells, sandbox, files, slot=0, seed=0):
    """cells: ("code", source), ("checks", grade_id, [(exercise id, expression)]) or ("text",).

    Never raises for what a submission contains: whatever happens is a Checked for each check.
    """
    started = time.monotonic()
    graded = Graded()
    session = Session(sandbox, files, slot, started + sandbox.limits.total)
    over = None
    try:
        for position, (kind, *cell) in enumerate(cells):
            try:
                if kind == "code" and not over and cell[0].strip():
                    graded.outputs[position] = session.run(cell[0])
                elif kind == "checks":
                    grade_id, calls = cell
                    checked = _stopped(grade_id, over) if over else _all(session, *cell, seed)
                    graded.checked.append(checked)
            except remote.TimeIsOver as reason:
                over = str(reason)
                if kind == "checks":
                    graded.checked.append(_stopped(cell[0], over))
                else:
                    graded.outputs[position] = "", ("TimeLimit", over, "")
    finally:
        session.end()
    graded.seconds, graded.peak = time.monotonic() - started, session.peak
    return graded


def _stopped(grade_id, why):
    return Checked(grade_id, NOT_GRADED, f"not graded: {why}")


def _all(session, grade_id, calls, seed):
    """All check lines of one cell: passed if each is, else the first that is not."""
    results = []
    for id, expression in calls:
        result = _one(session, id, expression, seed)
        results.append(result)
        if result.status != PASSED:
            break
    last = results[-1]
    text = "\n".join(repr(r) for r in results) if last.status == PASSED else repr(last)
    return Checked(grade_id, last.status, text, last.misconception or "")


def _one(session, id, expression, seed):
    answer, error = session.value(expression)
    if error:
        return Result(RAISED, f"{id}: {expression} raised {error}")
    exercise = checks._QUESTIONS[id]
    try:
        functions = remote.functions_in(answer) if isinstance(exercise, Program) else []
        for function in functions:
            function.judging(exercise)
        return check_program(exercise, answer, seed) if functions else checks.check(id, answer)
    except (remote.TimeIsOver, remote.CannotStart):
        raise
    except Exception as error:  # an answer that the check was not ready for
        return Result(
            NOT_YET, f"{id}: the check could not judge it: {type(error).__name__}: {error}"
        )


# ---- in a process of its own


def prepare(sandbox, slots):
    """Make this process a judge: called once in each of the pool's processes."""
    global _SANDBOX, _SLOT
    _SANDBOX, _SLOT = sandbox, slots.get()
    remote.watch_workers()
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"


def grade_here(cells, files, seed):
    """grade in this process; what goes wrong on our side is said, not raised."""
    try:
        return grade(cells, _SANDBOX, files, _SLOT, seed)
    except Exception as error:
        graded = Graded(notes=[f"the grader failed: {type(error).__name__}: {error}"[:300]])
        with contextlib.suppress(Exception):
            graded.checked = [
                _stopped(cell[1], "the grader failed") for cell in cells if cell[0] == "checks"
            ]
        return graded
