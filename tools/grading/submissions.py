"""A folder of submissions, FOLDER/STUDENT/EXERCISE.ipynb, read as somebody else's files.

No link is followed, nothing larger than a notebook can be is read, and of a notebook only the text
of its cells is kept: its metadata, outputs and attachments are not looked at. `align` then lays the
student's cells against the exercise as it was handed out.
"""

import ast
import contextlib
import difflib
import json
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import nbformat

MOST_BYTES = 20 * 2**20
MOST_CELLS, MOST_SOURCE = 1000, 2**20
MOST_FILES = 200
# Words that say that somebody looked behind the checks. No proof: a hint to look at the cell.
SUSPECT = ("checks.exercises", "checks.judge", "checks.questions", "checks._", "_QUESTIONS",
           "__code__", "setprofile", "getsource", "gc.get_", "ctypes", "/proc/", "tracemalloc",
           "solutions/")  # fmt: skip


@dataclass(frozen=True)
class Submission:
    student: str
    exercise: str  # the file's name without .ipynb
    path: Path
    problem: str | None = None  # why it cannot be an exercise


class Unreadable(Exception):
    """The file is no notebook that can be graded; says why."""


def find(folder, exercises):
    """Every file that was handed in, in order of student and name."""
    found = []
    for entry in _entries(folder):
        if not entry.is_dir(follow_symlinks=False):
            kind = "a link" if entry.is_symlink() else "a file outside a student's folder"
            found.append(Submission("", entry.name, Path(entry.path), f"{kind}: not looked at"))
            continue
        try:
            files = _entries(entry.path)
        except OSError as error:
            found.append(Submission(entry.name, "", Path(entry.path), f"closed: {error.strerror}"))
            continue
        for file in files:
            name, _, ending = file.name.rpartition(".")
            if ending.lower() == "ipynb":
                problem = None
                if name not in exercises:
                    problem = f"no exercise has this name{_nearest(name, exercises)}"
                elif not _is_text(entry.name):
                    problem = "the name of the student's folder is no UTF-8: rename it"
                found.append(Submission(entry.name, name, Path(file.path), problem))
    return found


def _entries(folder):
    with os.scandir(folder) as entries:
        return sorted((e for e in entries if e.name[0] != "."), key=lambda e: e.name)


def _is_text(name):
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _nearest(name, exercises):
    start = re.match(r"ex\d+", name.lower())
    same = [e for e in exercises if start and e.startswith(start[0] + "_")]
    near = same or difflib.get_close_matches(name, exercises, 1)
    return f"; is it {near[0]}?" if near else ""


def students(folder):
    return [e.name for e in _entries(folder) if e.is_dir(follow_symlinks=False)]


def read(path):
    """[(id or None, cell type, source)] of a notebook. Raises Unreadable."""
    data = _bytes(path)
    if not data.strip():
        raise Unreadable("the file is empty")
    try:
        nb = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise Unreadable("not a notebook: it is not JSON") from None
    if not isinstance(nb, dict) or not isinstance(nb.get("nbformat"), int):
        raise Unreadable("not a notebook: JSON, but with no nbformat")
    if nb["nbformat"] < 4:
        try:
            nb = json.loads(nbformat.writes(nbformat.convert(nbformat.from_dict(nb), 4)))
        except Exception as error:  # an old format, converted by code that expects no harm
            raise Unreadable(f"an old notebook that does not convert: {error}"[:200]) from None
    cells = nb.get("cells")
    if not isinstance(cells, list):
        raise Unreadable("not a notebook: no list of cells")
    if len(cells) > MOST_CELLS:
        raise Unreadable(f"{len(cells):,} cells; at most {MOST_CELLS:,} are read")
    read = [_cell(cell, position) for position, cell in enumerate(cells)]
    if sum(len(source) for _, _, source in read) > MOST_SOURCE:
        raise Unreadable(f"more than {MOST_SOURCE:,} characters of source")
    return read


def _cell(cell, position):
    kind = cell.get("cell_type") if isinstance(cell, dict) else None
    source = cell.get("source", "") if isinstance(cell, dict) else None
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if kind not in ("code", "markdown", "raw") or not isinstance(source, str):
        raise Unreadable(f"not a notebook: cell {position + 1} is none")
    id = cell.get("id")
    source = source.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written
    return (id if isinstance(id, str) else None), kind, source


def _bytes(path):
    """The content of a plain file of a notebook's size; a link, a pipe or a device is refused."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        fd = os.open(path, flags | getattr(os, "O_BINARY", 0))
    except OSError as error:
        link = os.path.islink(path)
        why = "a link: not followed" if link else (error.strerror or "no file")
        raise Unreadable(why) from None
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise Unreadable("not a plain file")
        if about.st_size > MOST_BYTES:
            raise Unreadable(
                f"{about.st_size / 2**20:.0f} MiB; at most {MOST_BYTES // 2**20} are read"
            )
        return file.read(MOST_BYTES + 1)


def copy_files(folder, target):
    """The student's other files (data, modules) into target: plain files only, not too many."""
    room, files = MOST_BYTES, 0
    for here, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [f for f in folders if not f.startswith(".")]
        for name in sorted(names):
            path = Path(here) / name
            if name.startswith(".") or name.endswith(".ipynb"):
                continue
            with contextlib.suppress(Unreadable, OSError):
                data = _bytes(path)
                room, files = room - len(data), files + 1
                if room < 0 or files > MOST_FILES:
                    return
                copy = target / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(data)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def remove(folder):
    shutil.rmtree(folder, ignore_errors=True)


# ---- the student's cells and the exercise's


def align(cells, release):
    """(notebook, notes): the student's cells, the exercise's tasks and checks known and all there.

    A cell is known by its id; where a notebook has lost its ids, a check by its exercise, and a
    task by the function or name that it defines. A task or check that is gone comes back as it was
    handed out, in its place. All metadata is the exercise's own.
    """
    theirs = [{"kind": kind, "source": source, "id": id} for id, kind, source in cells]
    owned = [c for c in release.cells if c.metadata.get("nbgrader")]
    known = {}
    for cell in release.cells:
        match = next((t for t in theirs if t["id"] == cell.id and "is" not in t), None)
        if match is not None:
            match["is"], known[cell.id] = cell, match
    notes = []
    for cell in owned:
        if cell.id not in known and cell.metadata.nbgrader.grade:
            _by_its_check(cell, theirs, known)
    for cell in owned:
        if cell.id not in known and cell.cell_type == "code":
            _by_its_names(cell, theirs, known, owned)
    for cell in owned:
        graded = cell.metadata.nbgrader.grade
        if cell.id not in known:
            what = "check" if graded else "task"
            notes.append(f"{what} {cell.metadata.nbgrader.grade_id} was missing: put back")
            entry = {"kind": cell.cell_type, "source": cell.source, "id": cell.id, "is": cell}
            theirs.insert(_place(cell, release, theirs, known), entry)
            known[cell.id] = entry
        elif graded and not cell.metadata.nbgrader.solution:
            if known[cell.id]["source"].strip() != cell.source.strip():
                notes.append(f"check {cell.metadata.nbgrader.grade_id} was edited: put back")
    _checks_after_tasks(owned, theirs, known)
    notes += _suspects(theirs, release)
    return _notebook(theirs, release), notes


def _suspects(theirs, release):
    given = {line.strip() for cell in release.cells for line in cell.source.split("\n")}
    for position, entry in enumerate(theirs):
        own = [x for x in entry["source"].split("\n") if x.strip() not in given]
        words = [word for word in SUSPECT if any(word in line for line in own)]
        if entry["kind"] == "code" and words:
            yield f"cell {position + 1} mentions {', '.join(words)}: look at it"


def _by_its_check(cell, theirs, known):
    id = re.escape(cell.metadata.nbgrader.grade_id)
    call = re.compile(rf"^\s*check\(\s*['\"]{id}['\"]", re.MULTILINE)
    for entry in theirs:
        if "is" not in entry and entry["kind"] == "code" and call.search(entry["source"]):
            entry["is"], known[cell.id] = cell, entry
            return


def _by_its_names(cell, theirs, known, owned):
    functions, names = _defined(cell.source)
    for entry in reversed(theirs):  # the last one is what the check would have seen
        if "is" not in entry and entry["kind"] == "code":
            if functions and functions <= _defined(entry["source"])[0]:
                entry["is"], known[cell.id] = cell, entry
                return
    after = owned[owned.index(cell) + 1 :][:1]
    if functions or not names or not after or after[0].id not in known:
        return
    at = theirs.index(known[after[0].id])
    for entry in reversed(theirs[:at]):
        if "is" in entry:
            return
        if entry["kind"] == "code" and names <= _defined(entry["source"])[1]:
            entry["is"], known[cell.id] = cell, entry
            return


def _defined(source):
    """({functions}, {other names}) that a cell defines at its top level."""
    functions, names = set(), set()
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^def (\w+)", source, re.MULTILINE)), set()
    for line in body:
        if isinstance(line, ast.FunctionDef):
            functions.add(line.name)
        elif isinstance(line, ast.Assign):
            names |= {t.id for t in line.targets if isinstance(t, ast.Name)}
    return functions, names


def _place(cell, release, theirs, known):
    """Behind what comes before it in the exercise and is still there."""
    ids = [c.id for c in release.cells]
    for id in reversed(ids[: ids.index(cell.id)]):
        if id in known:
            return theirs.index(known[id]) + 1
    return len(theirs)


def _checks_after_tasks(owned, theirs, known):
    """A check that was moved in front of its task goes behind it."""
    task = None
    for cell in owned:
        if not cell.metadata.nbgrader.grade:
            task = cell
        elif task is not None:
            check, its = known[cell.id], known[task.id]
            if theirs.index(check) < theirs.index(its):
                theirs.remove(check)
                theirs.insert(theirs.index(its) + 1, check)


def _notebook(theirs, release):
    nb = nbformat.v4.new_notebook(metadata=release.metadata)
    for number, entry in enumerate(theirs):
        cell = entry.get("is")
        kind = cell.cell_type if cell is not None else entry["kind"]
        new = {
            "code": nbformat.v4.new_code_cell,
            "markdown": nbformat.v4.new_markdown_cell,
            "raw": nbformat.v4.new_raw_cell,
        }[kind](entry["source"])
        new.id = cell.id if cell is not None else f"own-{number}"
        if cell is not None:
            new.metadata = nbformat.from_dict(dict(cell.metadata))
        nb.cells.append(new)
    return nb
