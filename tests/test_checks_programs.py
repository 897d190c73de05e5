"""What `check` says of any answer to a program exercise, and that it knows every wrong idea."""

import dataclasses
import math
import signal
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from attention_lib.checks import _QUESTIONS, check, judge, programs
from attention_lib.checks.exercises import ex02, ex03, ex04, ex06, ex08, ex09
from attention_lib.checks.kinds import Mistake, Number, Probe, Program
from attention_lib.checks.programs import check_program, rows
from attention_lib.memory import HBM
from tests import test_checks_seeds as seeds
from tests import test_ex04_06_08 as t4

PROGRAMS = seeds.PROGRAMS
CARD = 88


def right(id):
    """A right answer, not the library's; for ex08-traffic together with its loop."""
    if id == "ex08-traffic":
        return ex08.both(seeds.RIGHT[id][0], t4.LOOP)
    return seeds.RIGHT[seeds.SAME.get(id, id)][0]


def fits(result):
    lines = repr(result).splitlines()
    return len(lines) <= 5 and max(map(len, lines)) <= CARD


# ---------------------------------------------------------------- any answer


def an_endless_loop(id):
    def answer(**given):
        while True:
            pass

    return answer, "not yet", "never-ends"


def first_array(x):
    if isinstance(x, np.ndarray) and x.size:
        return x
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else ()
    return next((a for a in map(first_array, parts) if a is not None), None)


def a_mutation(id):
    program = right(id)

    def answer(**given):
        value = program(**given)
        first_array(given)[...] = 0.0
        return value

    return answer, "not yet", "mutates-its-input"


def an_n_by_n(id):
    program = right(id)

    def answer(**given):
        np.ones((len(given["Q"]), len(given["K"])), bool)
        return program(**given)

    return answer, "not yet", "makes-n-by-n"


def nothing(id):
    return lambda **given: None, "not attempted", None


def a_wrong_shape(id):
    program = right(id)

    def answer(**given):
        value = program(**given)
        if not isinstance(value, tuple):
            return [value, value, value, value, value]
        return np.zeros((7, 7, 7)), *value[1:]

    return answer, "not yet", None


def a_string(id):
    return lambda **given: "the answer", "not yet", None


def complex_numbers(id):
    count = len(PROGRAMS[id].outputs)
    return lambda **given: (np.zeros(3, complex),) * count if count > 1 else 1j, "not yet", None


def the_checks_own(id):
    own = PROGRAMS[id].right
    return lambda **given: own(**given), "not yet", "calls-the-library"


def an_exit(id):
    return lambda **given: sys.exit(0), "raised", None


ANSWERS = [an_endless_loop, a_mutation, an_n_by_n, nothing, a_wrong_shape, a_string,
           complex_numbers, the_checks_own, an_exit]  # fmt: skip


def cases():
    for id, q in PROGRAMS.items():
        arguments = rows(q)[0].probe.arguments
        for make in ANSWERS:
            if make is a_mutation and first_array(arguments) is None:
                continue  # numbers cannot be changed
            if make is an_n_by_n and not q.memory:
                continue  # no such claim
            yield pytest.param(id, make, id=f"{id}-{make.__name__}")


@pytest.mark.parametrize("id, make", list(cases()))
def test_any_answer_gets_a_sensible_reply(id, make, monkeypatch):
    if make is an_endless_loop:
        monkeypatch.setattr(judge, "TIME_LIMIT", 0.2)
    answer, status, name = make(id)
    result = check(id, answer)
    assert (result.status, result.misconception) == (status, name), result
    assert fits(result), result
    if make in (a_wrong_shape, a_string, complex_numbers):
        assert "xpected" in result.message and "got" in result.message


@pytest.mark.parametrize("id", PROGRAMS)
def test_a_long_error_fits_too(id):
    def answer(**given):
        raise ValueError("a long text " * 50 + str(given))  # and a long line of code, as it happens

    result = check(id, answer)
    assert result.status == "raised" and "ValueError: a long text" in result.message
    assert "raise ValueError(" in result.message.replace("\n", " ") and fits(result), result


@pytest.mark.parametrize("id", PROGRAMS)
def test_a_right_answer_passes(id):
    result = check(id, right(id))
    assert result.status == "passed" and fits(result), result


ODD = ["b", 3, 10**5000, [], {}, np.zeros(3), b"x", object()]


@pytest.mark.parametrize("answer", ODD, ids=lambda x: type(x).__name__)
def test_what_is_no_function_is_said(answer):
    result = check("ex02-flash-attention", answer)
    assert result.status == "not yet" and "the answer is a function" in result.message
    assert fits(result)


# ---------------------------------------------------------------- numbers

PERCENT = {
    "passed": [16.7, Fraction(50, 3), Decimal("16.7"), np.float32(16.7), np.longdouble(16.7),
               np.array(16.7), np.float16(16.7)],
    "too large by far": [10**400, 10**5000, Fraction(10**500, 3), Decimal("1e400"), 1e300],
    "not that number": [-(10**400), -1, 0, 5e-324, Decimal("-1e400"), Decimal("1e-400"),
                        np.int8(0)],
    "is a number": [math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("sNaN"),
                    Decimal("Infinity"), np.float64("inf"), 3 + 0j, np.complex128(3), True,
                    np.True_, np.array([16.7]), "x", "", "1 6", b"16.7", np.datetime64("2026"),
                    np.array(None)],
    "Leave the quotes out": ["16.7", "16", " 16.7 ", "1,234.5", "1e3", "nan", np.str_("16.7")],
}  # fmt: skip


@pytest.mark.parametrize(
    "says, answer", [(s, x) for s, xs in PERCENT.items() for x in xs], ids=judge.shown
)
def test_any_number_gets_a_sensible_reply(says, answer):
    result = check("ex05-both", answer)
    assert result.status == ("passed" if says == "passed" else "not yet"), result
    assert says in repr(result).replace("\n", " ") and result.misconception is None
    assert len(repr(result).splitlines()) <= 5


def test_the_neighbours_of_a_count_are_other_numbers():
    said = {n: check("ex03-smallest", n) for n in (12_287, 12_288, 12_289, 12_290, 12_544, 12_545)}
    names = {n: (r.status, r.misconception) for n, r in said.items()}
    assert names == {
        12_287: ("not yet", None),
        12_288: ("not yet", "one-short"),
        12_289: ("passed", None),
        12_290: ("not yet", None),
        12_544: ("not yet", "Bc-rounded-down"),
        12_545: ("not yet", None),
    }
    assert "too small by 1." in said[12_288].message and "12,288 is 4d" in said[12_288].message
    assert "too large by 1." in said[12_290].message and "12,288" not in said[12_290].message
    assert check("ex04-last", 201).misconception is None  # 200 is a slip, 201 is not
    assert check("ex03-bytes", 24.6).misconception == "in-kB"  # this one is rounded


@pytest.mark.parametrize("id", [q.id for q in _QUESTIONS.values() if isinstance(q, Number)])
def test_the_nearest_slip_is_the_one_that_is_named(id):
    q = _QUESTIONS[id]
    numbers = {name: wrong() for name, (wrong, _) in q.slips.items()}
    for name, number in numbers.items():
        if list(numbers.values()).count(number) == 1:
            assert check(id, number).misconception == name


# ---------------------------------------------------------------- one probe, seen closely


def tiny(right=lambda x: x, mistakes=(), probes=None, **more):
    """An exercise of one number, on the inputs 1, 2 and 3, each a stage."""
    made = [
        Probe(f"x = {x}", {"x": float(x)}, (1e-12,), stage) for stage, x in enumerate((1, 2, 3))
    ]
    return Program("t", "", ("y",), right, probes or (lambda seed: made), tuple(mistakes), "here",
                   **more)  # fmt: skip


def test_a_mistake_that_an_earlier_stage_shows_is_not_this_one():
    """Both give 9 at x = 3. The answer is right at 1 and 2; one of the mistakes is not."""
    always = Mistake("always", lambda x: 3 * x, "three times too large", "here")
    late = Mistake("late", lambda x: 9.0 if x == 3 else x, "only at the end", "here")
    answer = lambda x: 9.0 if x > 2 else x  # noqa: E731
    assert check_program(tiny(mistakes=[always, late]), answer).misconception == "late"
    assert check_program(tiny(mistakes=[always]), answer).misconception is None
    assert check_program(tiny(mistakes=[always]), lambda x: 3 * x).misconception == "always"


def test_after_a_failure_the_other_stages_are_not_run():
    seen = []

    def answer(x):
        seen.append(x)
        return -x

    assert check_program(tiny(), answer).status == "not yet"
    assert seen == [1.0]


def test_the_message_shows_enough_digits_that_the_numbers_differ():
    def message(expected, got):
        probe = Probe("it", {"x": 0}, (0.0,))
        exercise = tiny(right=lambda x: expected, probes=lambda seed: [probe])
        return check_program(exercise, lambda x: got).message

    for expected, got in (
        (0.1, np.nextafter(0.1, 1)),
        (1e300, np.nextafter(1e300, 0)),
        (1, 1 + 1e-9),
    ):
        found = message(expected, got).split("expected ")[1].splitlines()[0].removesuffix(".")
        first, second = found.split(", got ")
        assert first != second and float(first) != float(second)
        assert abs(float(first) - expected) < abs(expected - got)
    assert "expected 17,383,424, got 17,383,425." in message(17_383_424, 17_383_425)
    assert "expected 0.25, got nan" in message(0.25, math.nan)
    assert "of shape (2,); got (3,)" in message(np.zeros(2), np.zeros(3))
    assert "It is float32: compute in float64." in message(0.1, np.float32(0.1))
    assert "got complex." in message(1.0, 1 + 1j)
    assert "got complex128." in message(1.0, np.ones(2, complex))
    O, _, m = (np.ones(3) for _ in range(3))
    several = check("ex02-flash-attention", lambda **given: (O, "l", m))
    assert "Expected the numbers O, l, m; got str for l." in several.message
    several = check("ex02-flash-attention", lambda **given: [O, m])
    assert "got a list of 2." in several.message


@pytest.mark.parametrize("inside", [
    lambda x: x, lambda x: (x,), lambda x: [1, (x,)], lambda x: {"a": [x]},
])  # fmt: skip
def test_a_mutation_is_noticed_wherever_the_array_is(inside):
    given = np.ones(3)

    def answer(x):
        first = x
        while not isinstance(first, np.ndarray):
            first = list(first.values())[-1] if isinstance(first, dict) else first[-1]
        first[0] = 2.0

    assert judge.observe(answer, {"x": inside(given)}).mutated == "x"
    assert judge.observe(lambda x: None, {"x": inside(given)}).mutated is None
    assert given[0] == 1.0


def test_other_changes_of_an_input_are_noticed_and_what_may_change_may():
    def mutated(answer, x):
        return judge.observe(answer, {"x": x}).mutated

    assert mutated(lambda x: x.append(1), [1, 2]) == "x"
    assert mutated(lambda x: x.update(b=1), {"a": 1}) == "x"
    assert mutated(lambda x: x.resize((4,), refcheck=False), np.ones(2)) == "x"
    assert mutated(lambda x: x.tensor("Q", np.ones((2, 2))).load(), HBM()) is None
    assert mutated(lambda x: None, np.array([np.nan, -np.inf])) is None
    assert mutated(lambda x: x[0] + x[1].m[0], (1, ex09_state())) is None


def ex09_state():
    from attention_lib.online import start

    return start(2, 3)  # a named tuple


# ---------------------------------------------------------------- whose answer it is


def borrowed():
    """Answers that come from the library or from the check, in ways that are not a plain call."""

    def off(N, d):
        sys.setprofile(None)
        return ex03.right(N, d)

    def off_and_on(N, d):
        watching = sys.getprofile()
        sys.setprofile(None)
        try:
            return ex03.right(N, d)
        finally:
            sys.setprofile(watching)

    own = lambda N, d: ex03.right(N, d)  # noqa: E731
    own(256, 8)
    return {
        "off": ("ex03-break-even", off, "sys.setprofile"),
        "off and on": ("ex03-break-even", off_and_on, "sys.setprofile"),
        "the check's": ("ex03-break-even", own, "(right)"),
        "itself": ("ex03-break-even", ex03.right, "(right)"),
        "rows": ("ex04-nan-rows", lambda **sizes: len(ex04.broken_rows(**sizes)), "broken_rows"),
        "counted": ("ex06-traffic", lambda **sizes: ex06.counted(**sizes)[0], "counted"),
        "a mistake without its switch": (
            "ex02-inner-step", lambda **tile: ex02.step(**tile), "(step)"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("how", borrowed())
def test_an_answer_that_is_not_the_learners_is_said(how):
    id, answer, name = borrowed()[how]
    for _ in range(2):  # also when what it needs was computed before
        result = check(id, answer)
        assert (result.status, result.misconception) == ("not yet", "calls-the-library"), result
        assert name in result.message and fits(result)


def test_watching_leaves_no_profiler_behind():
    before = sys.getprofile()
    judge.observe(lambda: None, {}, watch_library=True)
    assert sys.getprofile() is before


def test_an_observer_takes_the_place_of_the_call(monkeypatch):
    asked = []

    def elsewhere(function, arguments, **how):
        asked.append(how)
        return judge.observe_here(function, arguments, **how)

    monkeypatch.setattr(judge, "observer", elsewhere)
    assert check("ex09-backward", right("ex09-backward")).status == "passed"
    # Ten probes, the watched run, the large input, and two claims of two runs.
    assert len(asked) == 10 + 1 + 1 + 4
    assert {k for how in asked for k in how} == {"watch_library", "measure", "seconds"}


# ---------------------------------------------------------------- the claims


def on_the_large_input(id, do):
    program, small = right(id), 100

    def answer(**given):
        if len(given["Q"]) > small:
            return do()
        return program(**given)

    return answer


LARGE = [id for id, q in PROGRAMS.items() if q.memory]


@pytest.mark.parametrize("id", LARGE)
def test_a_large_input_that_takes_too_long_or_fails_is_said(id, monkeypatch):
    monkeypatch.setattr(judge, "TIME_LIMIT", 3)  # the small inputs must not meet it, however busy

    def sleep():
        while True:
            time.sleep(0.01)

    result = check(id, on_the_large_input(id, sleep))
    assert (result.status, result.misconception) == ("not yet", "too-slow"), result
    assert "still running at the time limit" in result.message.replace("\n", " ")
    assert "At N = " in result.message and fits(result)

    def fail():
        raise RecursionError("too deep")

    result = check(id, on_the_large_input(id, fail))
    assert result.status == "raised" and "too deep" in result.message and fits(result)


@pytest.mark.parametrize("id", ["ex01-attend", "ex11-split-kv"])
def test_a_failure_on_many_keys_is_said(id):
    program = right(id)

    def answer(**given):
        if len(given["V"]) > 1000:
            raise MemoryError("too many")
        return program(**given)

    result = check(id, answer)
    assert result.status == "not yet" and "MemoryError: too many" in result.message and fits(result)


# ---------------------------------------------------------------- the wrong ideas, and their words

MISTAKES = [
    pytest.param(q, mistake, id=f"{q.id}-{mistake.id}-{number}")
    for q in PROGRAMS.values()
    if q.id not in seeds.SAME
    for number, mistake in enumerate({m.id: m for m in q.mistakes}.values())
]


@pytest.mark.parametrize("q, mistake", MISTAKES)
def test_a_message_has_at_most_five_lines_whatever_the_probe(q, mistake):
    """Each wrong idea with the longest problem of each probe that it may be shown with."""
    for row in rows(q):
        got = programs._gives(q, mistake, row)
        problem = programs._compare(q, row, got, tuple(got or ()))
        if problem is None:
            continue
        result = programs._not_yet(
            q, mistake.id, mistake.says, f"On: {row.probe.says}", problem, f"Read: {mistake.read}"
        )
        assert fits(result), result


def test_there_are_enough_wrong_ideas():
    ideas = {(id, m.id) for id, q in PROGRAMS.items() if id not in seeds.SAME for m in q.mistakes}
    assert len(ideas) >= 40
    tiled = {
        m.id for q in (ex02.FLASH, ex04.REPAIR, ex08.FORWARD, ex09.BACKWARD) for m in q.mistakes
    }
    assert len(tiled) >= 12


def test_every_wrong_idea_has_a_program_in_another_style():
    """One that test_ex*.py asks the check to name. Lists what is missing."""
    missing = [
        (id, m)
        for id, q in PROGRAMS.items()
        for m in sorted({m.id for m in q.mistakes})
        if m not in {name for name, _ in seeds.WRONG[seeds.SAME.get(id, id)]}
    ]
    assert not missing


def test_every_id_of_a_mistake_has_one_sentence():
    for q in PROGRAMS.values():
        words = {}
        for m in q.mistakes:
            words.setdefault((m.id, m.read), set()).add(m.says)
        assert all(len(says) == 1 for says in words.values()), q.id


def test_the_kept_probes_are_those_of_the_seed():
    q = ex02.INNER_STEP
    again = dataclasses.replace(q, id="other")
    assert rows(q, 3) is rows(again, 3) and rows(q, 3) is not rows(q, 4)
    for row, probe in zip(rows(q, 3), q.probes(3), strict=True):
        assert row.probe.says == probe.says
        for name, x in probe.arguments.items():
            np.testing.assert_array_equal(row.probe.arguments[name], x)
        for got, want in zip(row.want, q.right(**probe.arguments), strict=True):
            np.testing.assert_array_equal(got, want)


def test_the_time_limit_works_where_interrupts_are_ignored():
    """As in a shell's background job, where an interrupt of the main thread does nothing."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(judge.TimeIsUp), judge.time_limit(0.2):
            while True:
                pass
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        found = []  # another thread may not touch signals: the block runs as it did

        def elsewhere():
            with judge.time_limit(10):
                found.append("ran")

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert found == ["ran"]
    finally:
        signal.signal(signal.SIGINT, before)
