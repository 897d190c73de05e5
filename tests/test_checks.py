"""Questions: every answer, right, wrong or odd, gets a state and a sentence; none raises."""

import math
import re

import numpy as np
import pytest

from attention_lib import checks
from attention_lib.checks.kinds import Choice, Number

QUESTIONS = checks._QUESTIONS
CHOICES = [q for q in QUESTIONS.values() if isinstance(q, Choice)]
NUMBERS = [q for q in QUESTIONS.values() if isinstance(q, Number)]
ODD = ["", "z", "yes", 3, -1, 0, 1.5, math.nan, math.inf, True, [], {}, object(), np.zeros(3), b"a"]


@pytest.mark.parametrize("id", QUESTIONS)
def test_no_answer_yet_is_a_state(id):
    for answer in (..., None):
        result = checks.check(id, answer)
        assert result.status == "not attempted" and result.misconception is None
        assert repr(result).startswith("[not attempted]")


@pytest.mark.parametrize("id", QUESTIONS)
def test_odd_answers_get_a_sentence(id):
    for answer in ODD:
        result = checks.check(id, answer)
        if isinstance(QUESTIONS[id], Choice):
            assert result.status == "not yet" and "one of" in result.message
        else:
            assert result.status in ("not yet", "passed")
        assert len(repr(result).splitlines()) <= 5


@pytest.mark.parametrize("q", CHOICES, ids=lambda q: q.id)
def test_every_option_is_judged_and_explained(q):
    assert len(q.options) >= 3
    for letter in q.options:
        for answer in (letter, f" {letter.upper()} "):
            result = checks.check(q.id, answer)
            assert result.status == ("passed" if letter == q.right else "not yet")
            assert q.remarks[letter] in result.message and len(q.remarks[letter]) > 20


@pytest.mark.parametrize("q", NUMBERS, ids=lambda q: q.id)
def test_the_truth_passes_and_every_slip_is_named(q):
    truth = q.truth()
    assert checks.check(q.id, truth).status == "passed"
    assert checks.check(q.id, np.float64(truth)).status == "passed"
    assert len(q.slips) >= 2
    for name, (wrong, remark) in q.slips.items():
        result = checks.check(q.id, wrong())
        assert (result.status, result.misconception) == ("not yet", name)
        assert remark in result.message
        if truth > 0 and wrong() > 0:
            assert re.search(r"too (large|small) by", result.message)
    far = checks.check(q.id, 1e9 * (abs(truth) + 1) + 0.5)
    assert far.status == "not yet" and far.misconception is None and q.hint in far.message


@pytest.mark.parametrize("id", QUESTIONS)
def test_a_question_reads_as_text(id):
    text = repr(checks.ask(id))
    assert QUESTIONS[id].text.split() == text.split()[: len(QUESTIONS[id].text.split())]
    assert max(len(line) for line in text.splitlines()) <= 88


def test_the_modules_five_questions_are_there():
    assert {"q1", "q2", "q3", "q4", "q5"} <= set(checks.exercises())


def test_right_answers_are_spread_over_the_letters():
    letters = [q.right for q in CHOICES]
    assert max(letters.count(x) for x in set(letters)) <= 0.5 * len(letters)


def test_two_questions_with_one_id_are_refused(monkeypatch):
    module = type(checks)("attention_lib.checks.questions.extra")
    module.QUESTIONS = [CHOICES[0], CHOICES[0]]
    monkeypatch.setattr(checks.importlib, "import_module", lambda name: module)
    with pytest.raises(ValueError, match=f"share an id: {CHOICES[0].id}"):
        checks._registry()


def test_a_choice_needs_a_remark_for_every_option():
    with pytest.raises(ValueError, match="x: every option needs a remark"):
        Choice("x", "?", {"a": "1", "b": "2"}, "a", {"a": "yes"})
