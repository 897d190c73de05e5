"""What comes of an answer: as text, and as a card in a notebook."""

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from urllib.parse import quote

NOT_ATTEMPTED, PASSED, NOT_YET, RAISED = "not attempted", "passed", "not yet", "raised"

# Symbol, line and colour of a card. The state is a word; a symbol and a kind of line go with it, so
# nothing hangs on the colour. The colours show on light and on dark pages; the text has the page's.
LOOKS = {
    NOT_ATTEMPTED: ("○", "dotted", "#808080"),
    PASSED: ("✓", "solid", "#2e8b57"),
    NOT_YET: ("△", "double", "#b8721d"),
    RAISED: ("✕", "dashed", "#d0504a"),
}
ID = re.compile(r"(?:([\w-]+): )?(.*)", re.DOTALL)
READ = re.compile(r"(Read: )(notebook (\d\d), (['\"])(.+)\4)")
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@dataclass(frozen=True)
class Result:
    """What came of an answer: status, a message, and the name of the mistake if it is known.

    The message begins with the exercise's id and a colon, where it has one. A notebook shows the
    card, everything else the text.
    """

    status: str
    message: str
    misconception: str | None = None

    def __repr__(self):
        return wrap(f"[{self.status}] {self.message}")

    def _repr_html_(self):
        """The card. A screen reader begins with the state; HTML in the message stays text."""
        symbol, line, colour = LOOKS[self.status]
        id, text = ID.fullmatch(self.message).groups()
        # The name of a wrong letter is the letter, and the message begins with that.
        named = self.misconception and not self.misconception.startswith(f"{id}-")
        head = f" · <code>{id}</code>" if id else ""
        head += f" · mistake: <i>{escape(self.misconception)}</i>" if named else ""
        lines = "\n".join(map(_with_link, text.splitlines()))
        style = f"border-left:7px {line} {colour};padding-left:10px;line-height:1.5"
        return (
            f'<div role="status" style="{style}">'
            f'<b><span aria-hidden="true">{symbol}</span> {self.status}</b>{head}'
            f'<div style="white-space:pre-wrap">{lines}</div></div>'
        )


def _with_link(line):
    """A line of a message in HTML. The place to read is a link where the notebook is at hand."""
    found = READ.fullmatch(line)
    file = found and _file(found[3])
    if not file:
        return escape(line)
    # The same from notebooks/, exercises/ and solutions/. The anchor is written as JupyterLab does.
    target = f"../notebooks/{file}#{quote(found[5].replace(' ', '-'))}"
    return f'{found[1]}<a href="{escape(target)}">{escape(found[2])}</a>'


@cache
def _file(number):
    """The name of the notebook with this number; None where the library is without the course."""
    return next((path.name for path in NOTEBOOKS.glob(f"{number}_*.ipynb")), None)


def wrap(text, indent=""):
    """Lines of at most 88 characters; the line breaks of the text stay."""
    lines = (textwrap.fill(x, 88, subsequent_indent=indent) for x in text.splitlines())
    return "\n".join(lines)
