"""attention_lib.checks as the student's code sees it while it is graded: questions, no answers."""

import json
from pathlib import Path

_TEXTS = json.loads((Path(__file__).parent / "texts.json").read_text(encoding="utf-8"))


class _Text(str):
    __slots__ = ()

    def __repr__(self):
        return str(self)


class Result:
    """What check returns here: nothing is decided in this process."""

    status, message, misconception = "not attempted", "the grader checks this", None

    def __repr__(self):
        return "[the grader checks this]"


class Made:
    """What a helper of the exercises makes of an answer: the grader makes it, on its side."""

    def __init__(self, module, function, arguments):
        self.module, self.function, self.arguments = module, function, arguments


def maker(module, function):
    return lambda *arguments: Made(module, function, arguments)


def ask(exercise_id):
    return _Text(_TEXTS.get(exercise_id, exercise_id))


def check(exercise_id, answer):
    return Result()


def quiz(*exercise_ids):
    """No form: there is nobody to press its buttons."""


def exercises():
    return list(_TEXTS)
