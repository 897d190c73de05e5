"""Exercise 2, faded: the same function as in ex02, from code with gaps to comments alone."""

from dataclasses import replace

from attention_lib.checks.exercises import ex02

# The loops of `attention_lib.checks.gaps` are around the learner's functions.
WITH_GAPS = replace(ex02.FLASH, library=ex02.MAY_CALL | {"filled", "two_gaps", "five_gaps"})

QUESTIONS = [
    replace(
        WITH_GAPS,
        id="ex02f-two-gaps",
        text="Fill the two gaps of flash_two_gaps: the factor old, and the sum O_sum.",
    ),
    replace(
        WITH_GAPS,
        id="ex02f-five-gaps",
        text="Fill the five gaps of flash_five_gaps, one for each subgoal: load, score, rescale, "
        "accumulate, store.",
    ),
    replace(
        WITH_GAPS,
        id="ex02f-comments",
        text="Write the lines under the comments of flash_comments: load, score, rescale, "
        "accumulate, store.",
    ),
]
