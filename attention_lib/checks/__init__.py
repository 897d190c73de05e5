"""Feedback while you work: predictions and checkpoint questions.

    ask("q1")           show a question
    check("q1", "b")    answer it; a number, or a letter
    check("q1", ...)    not attempted yet: that is a state, not a mistake

`check` never raises for a wrong or odd answer: it returns a Result that says what to do next.
"""

import importlib
import math
import numbers
import pkgutil
import reprlib

from attention_lib.checks import exercises as _exercises
from attention_lib.checks import questions
from attention_lib.checks.kinds import Choice, Number, Program
from attention_lib.checks.parsons import Parsons, check_parsons
from attention_lib.checks.programs import check_program
from attention_lib.checks.result import NOT_ATTEMPTED, NOT_YET, PASSED, Result, wrap


def _registry():
    names = [
        f"{package.__name__}.{module.name}"
        for package in (questions, _exercises)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    found = [q for name in sorted(names) for q in importlib.import_module(name).QUESTIONS]
    ids = [q.id for q in found]
    repeated = {i for i in ids if ids.count(i) > 1}
    if repeated:
        raise ValueError(f"two questions share an id: {', '.join(sorted(repeated))}")
    return {q.id: q for q in found}


_QUESTIONS = _registry()


def exercises():
    """The ids that `ask` and `check` know."""
    return list(_QUESTIONS)


def _find(exercise_id):
    if exercise_id not in _QUESTIONS:
        raise ValueError(f"exercise_id is {exercise_id!r}; accepted: {', '.join(_QUESTIONS)}")
    return _QUESTIONS[exercise_id]


class _Text(str):
    """A string that a notebook shows as it reads, without quotes."""

    __slots__ = ()

    def __repr__(self):
        return str(self)


def ask(exercise_id):
    """The question with this id, as text. Raises ValueError for an unknown id."""
    q = _find(exercise_id)
    if isinstance(q, Program):
        return _Text(wrap(q.text))
    if isinstance(q, Number):
        return _Text(wrap(f"{q.text}\nAnswer with a number ({q.unit})."))
    options = [wrap(f"  {letter}) {text}", "     ") for letter, text in q.options.items()]
    return _Text("\n".join([wrap(q.text), *options]))


def check(exercise_id, answer):
    """Judge an answer. Returns a Result: "not attempted", "passed", "not yet" or "raised".

    answer: a letter for a choice, a number for a prediction, a function for a program; ... or
    None for no answer yet. Raises ValueError for an unknown id only.
    """
    q = _find(exercise_id)
    if answer is None or answer is ...:
        return Result(
            NOT_ATTEMPTED, f"{q.id}: put {_todo(q)} in place of the dots, then run again."
        )
    return _JUDGES[type(q)](q, answer)


def _todo(q):
    if isinstance(q, Choice):
        return f"one of {', '.join(q.options)}"
    if isinstance(q, Parsons):
        return "the letters of your lines, such as 'CAB',"
    return f"a number ({q.unit})" if isinstance(q, Number) else "your function"


def _odd(q, answer):
    return Result(NOT_YET, f"{q.id}: the answer is {_todo(q)}, got {reprlib.repr(answer)}.")


def _check_choice(q: Choice, answer):
    letter = answer.strip().lower() if isinstance(answer, str) else None
    if letter not in q.options:
        return Result(
            NOT_YET,
            f"{q.id}: the answer is one of {', '.join(q.options)}, got {reprlib.repr(answer)}.",
        )
    if letter == q.right:
        return Result(PASSED, f"{q.id}: yes. {q.remarks[letter]}")
    return Result(NOT_YET, f"{q.id}: not {letter}. {q.remarks[letter]}", f"{q.id}-{letter}")


def _check_number(q: Number, answer):
    is_number = isinstance(answer, numbers.Real) and not isinstance(answer, bool)
    if not is_number or not math.isfinite(answer):
        return Result(
            NOT_YET, f"{q.id}: the answer is a number ({q.unit}), got {reprlib.repr(answer)}."
        )
    truth = q.truth()
    if abs(answer - truth) <= q.tolerance * abs(truth):
        exactly = "" if answer == truth else f" To five digits: {truth:,.5g}."
        return Result(PASSED, f"{q.id}: yes. {q.why}{exactly}")
    for name, (wrong, remark) in q.slips.items():
        if abs(answer - wrong()) <= q.slip_tolerance * abs(wrong()):
            return Result(NOT_YET, f"{q.id}: {_ratio(answer, truth)} {remark}", name)
    return Result(NOT_YET, f"{q.id}: {_ratio(answer, truth)} {q.hint}")


def _ratio(answer, truth):
    if truth == 0 or answer / truth <= 0:
        return "not that number."
    ratio = answer / truth
    side, factor = ("large", ratio) if ratio > 1 else ("small", 1 / ratio)
    amount = f"{factor:.3g}x" if factor >= 1.05 else f"{100 * (factor - 1):.2g}%"
    return f"too {side} by {amount}."


_JUDGES = {
    Choice: _check_choice,
    Number: _check_number,
    Program: check_program,
    Parsons: check_parsons,
}
