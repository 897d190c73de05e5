"""Feedback while you work: predictions and checkpoint questions.

    ask("q1")           show a question
    check("q1", "b")    answer it; a number, or a letter
    check("q1", ...)    not attempted yet: that is a state, not a mistake
    quiz("q1", "p00-1") the same questions with buttons and a field, in a notebook

`check` never raises for a wrong or odd answer: it returns a Result that says what to do next. In a
notebook it notes what is passed (attention_lib.progress).
"""

import importlib
import math
import numbers
import pkgutil
from decimal import Decimal

import numpy as np

from attention_lib import progress
from attention_lib.checks import exercises as _exercises
from attention_lib.checks import form, questions
from attention_lib.checks.cuda import Kernel, check_kernel
from attention_lib.checks.judge import shown
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
    if isinstance(q, (Program, Kernel)):
        return _Text(wrap(q.text))
    if isinstance(q, Number):
        return _Text(wrap(f"{q.text}\nAnswer with a number ({q.unit})."))
    options = [wrap(f"  {letter}) {text}", "     ") for letter, text in q.options.items()]
    return _Text("\n".join([wrap(q.text), *options]))


def quiz(*exercise_ids):
    """Show these questions, each with a form: a button for each letter, or a field for a number.

    Tab and Enter are enough. Where there are no widgets the text is shown, and `check` answers it.
    Raises ValueError for an unknown id, none, or one that is answered with a program.
    """
    found = [_find(x) for x in exercise_ids]
    if not found:
        raise ValueError("exercise_ids is empty; accepted: one or more ids, as in quiz('q1', 'q2')")
    for q in found:
        if not isinstance(q, (Choice, Number)):
            raise ValueError(f"{q.id} is answered with {_todo(q)}; use check({q.id!r}, answer)")
    for q in found:
        form.show(q, ask(q.id), check)


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
    result = _JUDGES[type(q)](q, answer)
    if result.status == PASSED:
        progress.note(exercise_id)
    return result


def _todo(q):
    if isinstance(q, Choice):
        return f"one of {', '.join(q.options)}"
    if isinstance(q, Parsons):
        return "the letters of your lines, such as 'CAB',"
    if isinstance(q, Kernel):
        return "the text of your kernel"
    return f"a number ({q.unit})" if isinstance(q, Number) else "your function"


def _odd(q, answer):
    return Result(NOT_YET, f"{q.id}: the answer is {_todo(q)}, got {shown(answer)}.")


def _check_choice(q: Choice, answer):
    letter = answer.strip().lower() if isinstance(answer, str) else None
    if letter not in q.options:
        return Result(
            NOT_YET,
            f"{q.id}: the answer is one of {', '.join(q.options)}, got {shown(answer)}.",
        )
    if letter == q.right:
        return Result(PASSED, f"{q.id}: yes. {q.remarks[letter]}")
    return Result(NOT_YET, f"{q.id}: not {letter}. {q.remarks[letter]}", f"{q.id}-{letter}")


def _check_number(q: Number, answer):
    value = _real(answer)
    if value is None:
        text = isinstance(answer, str) and _is_number(answer)
        quotes = " Leave the quotes out." if text else ""
        return Result(
            NOT_YET, f"{q.id}: the answer is a number ({q.unit}), got {shown(answer)}.{quotes}"
        )
    truth = q.truth()
    if abs(value - truth) <= q.tolerance * abs(truth):
        exactly = "" if value == truth else f" To five digits: {truth:,.5g}."
        return Result(PASSED, f"{q.id}: yes. {q.why}{exactly}")
    how_far = _ratio(value, truth, exact=q.tolerance == 0)
    slips = [(name, wrong(), remark) for name, (wrong, remark) in q.slips.items()]
    for name, wrong, remark in sorted(slips, key=lambda slip: abs(value - slip[1])):
        # Where the answer is a count, so is a slip: its neighbour is another number.
        exact = q.tolerance == 0 and float(wrong).is_integer()
        if abs(value - wrong) <= (0 if exact else q.slip_tolerance) * abs(wrong):
            return Result(NOT_YET, f"{q.id}: {how_far} {remark}", name)
    return Result(NOT_YET, f"{q.id}: {how_far} {q.hint}")


def _real(answer):
    """The answer as a float, or None if it is no finite real number.

    A number that is too large for a float, such as 10**400, is infinite here.
    """
    if isinstance(answer, (np.generic, np.ndarray)) and answer.ndim == 0:
        answer = answer.item()
    if isinstance(answer, bool) or not isinstance(answer, (numbers.Real, Decimal, np.floating)):
        return None
    try:
        value = float(answer)
    except OverflowError:
        return math.inf if answer > 0 else -math.inf
    except ValueError:  # a Decimal that is a signalling NaN
        return None
    return None if math.isnan(value) or (math.isinf(value) and answer == value) else value


def _is_number(text):
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True


def _ratio(answer, truth, exact=False):
    if truth == 0 or answer / truth <= 0:
        return "not that number."
    ratio = answer / truth
    side, factor = ("large", ratio) if ratio > 1 else ("small", 1 / ratio)
    if factor > 1e6:
        return f"too {side} by far."
    if exact and factor < 1.05 and float(answer).is_integer():
        return f"too {side} by {abs(answer - truth):,.0f}."
    amount = f"{factor:.3g}x" if factor >= 1.05 else f"{100 * (factor - 1):.2g}%"
    return f"too {side} by {amount}."


_JUDGES = {
    Choice: _check_choice,
    Number: _check_number,
    Program: check_program,
    Parsons: check_parsons,
    Kernel: check_kernel,
}
