"""What you have passed so far: noted when `check` says so, shown by notebook 00.

    progress()    what is passed in each notebook and exercise, and what to do next
    forget()      delete the note

The note is one small file, .progress.json in the course's folder, and never leaves your machine.
COURSE_PROGRESS=path keeps it elsewhere; COURSE_PROGRESS=off notes nothing. Only answers given in a
notebook are noted. Where the file cannot be written there is no note, and `check` works as ever.
"""

import json
import os
import re
from contextlib import suppress
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTHING = "Nothing is passed yet."


def path():
    """The file of the note, or None if nothing is to be noted."""
    told = os.environ.get("COURSE_PROGRESS", "")
    if told:
        return None if told == "off" else Path(told)
    return ROOT / ".progress.json" if (ROOT / "notebooks").is_dir() else None


def passed():
    """The ids that were passed, as a set. A file that is damaged counts as empty."""
    file = path()
    if file is None or not file.is_file():
        return set()
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))["passed"]
        return {x for x in noted if isinstance(x, str)}
    except (OSError, ValueError, KeyError, TypeError):  # not readable, not JSON, not ours
        return set()


def note(exercise_id):
    """Note that an exercise is passed, if there is a learner at a notebook and a place to write."""
    file = path()
    if file is None or not _at_a_notebook():
        return
    ids = passed()
    if exercise_id in ids:
        return
    text = json.dumps({"passed": sorted(ids | {exercise_id})}, indent=1) + "\n"
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(file)  # at once, so that another notebook never reads half a file
    except OSError:  # a folder that cannot be written to is no reason to fail a right answer
        with suppress(OSError):
            new.unlink(missing_ok=True)


def _at_a_notebook():
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def forget():
    """Delete the note. You start anew."""
    file = path()
    if file is not None:
        file.unlink(missing_ok=True)


def contents():
    """(file, title, the ids that it asks), in order, of the notebooks and exercises that ask."""
    found = []
    for file in sorted(ROOT.glob("notebooks/*.ipynb")) + sorted(ROOT.glob("exercises/*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        ids = list(dict.fromkeys(re.findall(r'\bcheck\("([^"]+)"', code)))
        title = "".join(cells[0]["source"]).partition("\n")[0].removeprefix("# ")
        if ids:
            found.append((f"{file.parent.name}/{file.name}", title, ids))
    return found


class Progress:
    """What `progress` shows: rows of (file, title, how many are passed, how many there are)."""

    def __init__(self, rows):
        self.rows = rows

    def next(self):
        """Of the notebooks, then of the exercises: where you are, or what comes after it."""
        for folder in ("notebooks", "exercises"):
            rows = [row for row in self.rows if row[0].startswith(folder)]
            begun = [k for k, (_, _, done, _) in enumerate(rows) if done]
            here = rows[begun[-1] :] if begun else rows
            yield from [row for row in here if row[2] < row[3]][:1]

    def _lines(self):
        begun = [row for row in self.rows if row[2]]
        if not begun:
            return []
        done, of = (sum(row[k] for row in self.rows) for k in (2, 3))
        return [*begun, ("", "all", done, of)]

    def __repr__(self):
        lines = [f"{done:4} of {of:3}  {title}" for _, title, done, of in self._lines()]
        following = [f"next: {title}" for _, title, *_ in self.next()]
        return "\n".join([*(lines or [NOTHING]), *following])

    def _repr_html_(self):
        rows = "".join(
            f"<tr><td>{_link(file, title)}</td><td>{done} of {of}</td>"
            f'<td><progress max="{of}" value="{done}" aria-hidden="true"></progress></td></tr>'
            for file, title, done, of in self._lines()
        )
        head = '<tr><th scope="col">where</th><th scope="col">passed</th><td></td></tr>'
        table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
        following = " and ".join(_link(file, title) for file, title, *_ in self.next())
        first = table if rows else f"<p>{NOTHING}</p>"
        return first + (f"<p><b>Next:</b> {following}</p>" if following else "<p>All done.</p>")


def _link(file, title):
    return f'<a href="../{escape(file)}">{escape(title)}</a>' if file else f"<b>{escape(title)}</b>"


def progress():
    """What is passed in each notebook and exercise that you have begun, and what to do next.

    Next is the last one that you have begun, or the one after it.
    """
    done = passed()
    return Progress(
        [(file, title, len(done.intersection(ids)), len(ids)) for file, title, ids in contents()]
    )
