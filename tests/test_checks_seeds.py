"""Over many seeds: no right program fails, no wrong one passes.

Each program meets COURSE_SEEDS seeds: 1,000 in CI, 100 unless set. The programs are those of the
exercises' own tests, in many styles, and the registry's. `fails_on` is check's verdict, without its
words. (Kernels, exercises 13 to 16, take longer and are in tests/test_ex13_17.py.)
"""

import functools
import os

import numpy as np
import pytest

from attention_lib.checks import _QUESTIONS
from attention_lib.checks.exercises import ex02
from attention_lib.checks.kinds import Program
from attention_lib.checks.programs import check_program, fails_on, rows
from tests import test_ex01_03_05_07 as t1
from tests import test_ex02 as t2
from tests import test_ex04_06_08 as t4
from tests import test_ex09 as t9
from tests import test_ex11 as t11
from tests import test_ex12 as t12
from tests import test_ex13_17 as t13

SEEDS = range(int(os.environ.get("COURSE_SEEDS", "100")))
PROGRAMS = {id: q for id, q in _QUESTIONS.items() if isinstance(q, Program)}
# The same probes, the same right answer and the same mistakes as another one.
SAME = {
    "ex02f-two-gaps": "ex02-flash-attention",
    "ex02f-five-gaps": "ex02-flash-attention",
    "ex02f-comments": "ex02-flash-attention",
    "ex08-counters": "ex08-forward",
}
BY_CLAIM = {"calls-the-library", "all-keys-at-once"}  # right numbers: no probe can show these


def changed(source, table):
    """(name, program) for each entry of {name: changes in this text}."""
    return [(name, t4.made(source, *changes)) for name, changes in table.items()]


def listed(table, make=lambda program: program):
    return [(name, make(p)) for name, programs in table.items() for p in programs]


def with_these_names(program):
    """For a lambda that takes its arguments by position only."""
    return lambda gpu, N, d, heads: program(gpu, N, d, heads)


def a_step(*changes):
    return t2.made(t2.STEP_BY_ROW, *changes)


RIGHT = {
    "ex01-attend": t1.ATTEND_RIGHT,
    "ex01-merge": t1.MERGE_RIGHT,
    "ex02-inner-step": list(t2.RIGHT_STEPS.values()),
    "ex02-flash-attention": list(t2.RIGHT.values()),
    "ex03-break-even": t1.EVEN_RIGHT,
    "ex04-nan-rows": t4.NAN_ROWS_RIGHT,
    "ex04-repair": [*t4.REPAIR_RIGHT, t4.made(t4.REPAIR)],
    "ex06-traffic": t4.CAUSAL_RIGHT,
    "ex06-flops": t4.FLOPS_RIGHT,
    "ex07-attention-time": t1.TIME_RIGHT,
    "ex08-forward": [*t4.RIGHT_LOOPS, t4.made(t4.ROWWISE)],
    "ex08-traffic": t4.FORM_RIGHT,
    "ex08-table": t4.TABLE_RIGHT,
    "ex09-backward": [*t9.RIGHT, t9.program()],
    "ex11-merge-all": t11.MERGE_RIGHT,
    "ex11-split-kv": t11.SPLIT_RIGHT,
    **t12.RIGHT,
    **t13.TILES_RIGHT,
}
WRONG = {
    "ex01-attend": [
        (name, functools.partial(t1.row_wise, row=row)) for name, row in t1.ATTEND_WRONG.items()
    ],
    "ex01-merge": listed(t1.MERGE_WRONG, t1.by_row),
    "ex02-inner-step": [(name, a_step(*changes)) for name, *changes in t2.WRONG_STEPS],
    "ex02-flash-attention": [
        (name, t2.made(source, *changes)) for name, source, *changes in t2.WRONG
    ],
    "ex03-break-even": listed(t1.EVEN_WRONG),
    "ex04-nan-rows": changed(t4.NAN_ROWS, t4.NAN_ROWS_WRONG),
    "ex04-repair": changed(t4.REPAIR, t4.REPAIR_WRONG),
    "ex06-traffic": changed(t4.CAUSAL, t4.CAUSAL_WRONG),
    "ex06-flops": changed(t4.FLOPS, t4.FLOPS_WRONG),
    "ex07-attention-time": listed(t1.TIME_WRONG, with_these_names),
    "ex08-forward": changed(t4.ROWWISE, t4.FORWARD_WRONG),
    "ex08-traffic": changed(t4.FORM, t4.FORM_WRONG),
    "ex08-table": [*changed(t4.TABLE, t4.TABLE_WRONG), ("causal", t4.table_with_mask)],
    "ex09-backward": [(name, t9.program(old, new)) for name, old, new in t9.WRONG],
    "ex11-merge-all": t11.wrong("ex11-merge-all"),
    "ex11-split-kv": t11.wrong("ex11-split-kv"),
    **t12.WRONG,
    **t13.TILES_WRONG,
}


def in_float32(exercise):
    """The right program, after its inputs were rounded to float32."""

    def rounded(x):
        if isinstance(x, np.ndarray) and x.dtype == np.float64:
            return x.astype(np.float32).astype(np.float64)
        return tuple(map(rounded, x)) if isinstance(x, tuple) else x

    return lambda **given: exercise.right(**{k: rounded(v) for k, v in given.items()})


def wrong_programs(id):
    exercise = PROGRAMS[id]
    found = [(name, p) for name, p in WRONG[id] if name not in BY_CLAIM]
    found += [(m.id, m.program) for m in exercise.mistakes]
    if not of_numbers(id):
        found.append(("float32", in_float32(exercise)))
    return found


def of_numbers(id):
    """Do the inputs hold no array? Then a program need not be run twice on the same ones."""
    arguments = rows(PROGRAMS[id])[0].probe.arguments
    return not any(isinstance(x, (np.ndarray, tuple)) for x in arguments.values())


def test_every_program_exercise_is_here():
    assert set(RIGHT) == set(WRONG) == set(PROGRAMS) - set(SAME)
    for id, other in SAME.items():
        a, b = PROGRAMS[id], PROGRAMS[other]
        assert (a.probes, a.right, a.mistakes) == (b.probes, b.right, b.mistakes)
    for id in RIGHT:
        assert len(RIGHT[id]) >= 3
        ideas = {m.id for m in PROGRAMS[id].mistakes}
        assert not ideas - {name for name, _ in WRONG[id]}, id


@pytest.mark.parametrize("id", RIGHT)
def test_no_right_program_fails_and_no_wrong_one_passes(id):
    exercise, remember = (
        PROGRAMS[id],
        functools.cache if of_numbers(id) else lambda program: program,
    )
    right = [remember(program) for program in (*RIGHT[id], exercise.right)]
    wrong = [(name, remember(program)) for name, program in wrong_programs(id)]
    telling = [0] * len(wrong)  # the probe that showed each of them last time is tried first
    for seed in SEEDS:
        for program in right:
            number = fails_on(exercise, program, seed)
            assert number is None, (seed, program, rows(exercise, seed)[number].probe.says)
        for k, (name, program) in enumerate(wrong):
            telling[k] = fails_on(exercise, program, seed, first=telling[k])
            assert telling[k] is not None, (seed, name, "passes")


def test_the_verdict_is_the_one_of_check():
    """Without the claims: `fails_on` says None where check passes, and only there."""
    for program in t2.RIGHT.values():
        assert fails_on(t2.QUICK, program, 1) is None
        assert check_program(t2.QUICK, program, 1).status == "passed"
    for _, source, *changes in t2.WRONG[::10]:
        program = t2.made(source, *changes)
        number = fails_on(t2.QUICK, program, 1)
        says = rows(ex02.FLASH, 1)[number].probe.says
        result = check_program(t2.QUICK, program, 1)
        assert result.status == "not yet" and f"On: {says}" in result.message
        later = fails_on(t2.QUICK, program, 1, first=number + 1)
        assert later is not None  # the last resort is to begin again from the front
