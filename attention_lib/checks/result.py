"""What comes of an answer, in words."""

import textwrap
from dataclasses import dataclass

NOT_ATTEMPTED, PASSED, NOT_YET, RAISED = "not attempted", "passed", "not yet", "raised"


@dataclass(frozen=True)
class Result:
    """What came of an answer: status, a message, and the name of the mistake if it is known."""

    status: str
    message: str
    misconception: str | None = None

    def __repr__(self):
        return wrap(f"[{self.status}] {self.message}")


def wrap(text, indent=""):
    """Lines of at most 88 characters; the line breaks of the text stay."""
    lines = (textwrap.fill(x, 88, subsequent_indent=indent) for x in text.splitlines())
    return "\n".join(lines)
