"""Make exercises/*.ipynb, what a student opens, from solutions/*.ipynb, their only source.

    python tools/exercises.py                      all of solutions/
    python tools/exercises.py solutions/ex01*.ipynb  those
    python tools/exercises.py --check              write nothing; exit 1, naming what differs
    python tools/exercises.py --nbgrader FOLDER    write FOLDER/source/NAME/NAME.ipynb: the
                                                   solutions as nbgrader wants them, for a hub

In a solution notebook, what stands between `### BEGIN SOLUTION` and `### END SOLUTION` gives way to
one comment, cells tagged `solution` go, and lines between `### BEGIN HIDDEN TESTS` and
`### END HIDDEN TESTS` stay with the grader. nbgrader's preprocessors do that. A cell of
`check("id", answer)` lines is a graded cell: 1 point, or what its nbgrader metadata says. A text
cell that begins with "**Your answer.**" (or another word) is marked by hand: 1 point and the cell's
id for a name, or what its nbgrader metadata says. The student's copy is then executed, so that it
ships with its outputs: "[not attempted]" everywhere.

Nothing is written from a solution notebook that has no solution region, has markers that do not
match, does not pass its own checks, or whose exercise would show a line of the solution. (One of
written answers has no region: there the cells tagged `solution` are what the student does not get.)
"""

import argparse
import ast
import asyncio
import copy
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import nbformat  # noqa: E402
from nbconvert.preprocessors import TagRemovePreprocessor  # noqa: E402
from nbgrader.preprocessors import (  # noqa: E402
    CheckCellMetadata,
    ClearHiddenTests,
    ClearOutput,
    ClearSolutions,
    ComputeChecksums,
    LockCells,
)

from tools import notebooks  # noqa: E402

STUB = "# your lines here"
TEXT_STUB = "*Your text here.*"
WRITTEN = re.compile(r"\*\*Your \w+\.\*\*")  # the first words of a cell for a written answer
SOLUTION = "solution"  # the tag of a cell that only the solution has
BEGIN, END = "BEGIN SOLUTION", "END SOLUTION"
BEGIN_HIDDEN, END_HIDDEN = "BEGIN HIDDEN TESTS", "END HIDDEN TESTS"
FEW_LETTERS = 10  # a line shorter than this (`else:`, `return O`) gives no solution away


class Refused(Exception):
    """A solution notebook that no exercise can be made from; says why."""


# ---- what a cell is


def check_calls(source):
    """[(exercise id, the answer's expression)] of a cell of check(...) lines; [] for another cell.

    Raises Refused for a cell that calls check and does something else as well: the grader runs the
    checks itself, in its own process, and nothing else of that cell.
    """
    if not re.search(r"^\s*check\(", source, re.MULTILINE):
        return []
    shape = 'a check cell holds lines check("id", name) and nothing else'
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise Refused(f"{shape}; this one does not parse: {error.msg}") from None
    calls = []
    for line in body:
        call = getattr(line, "value", None)
        named = isinstance(call, ast.Call) and getattr(call.func, "id", None) == "check"
        if not (named and isinstance(line, ast.Expr) and len(call.args) == 2 and not call.keywords):
            raise Refused(shape)
        id, answer = call.args
        if not (isinstance(id, ast.Constant) and isinstance(id.value, str)):
            raise Refused(shape)
        if isinstance(answer, ast.Constant):
            raise Refused(f"{shape}; give the answer of {id.value} a name, in the cell before")
        calls.append((id.value, ast.unparse(answer)))
    return calls


def regions(source):
    """The solution regions of a cell, each a list of lines. Refused if markers do not match."""
    found, inside = [], None
    for line in source.split("\n"):
        if BEGIN in line:
            if inside is not None:
                raise Refused(f"a second '{BEGIN}' before '{END}'")
            inside = []
        elif END in line:
            if inside is None:
                raise Refused(f"'{END}' without '{BEGIN}'")
            found.append(inside)
            inside = None
        elif inside is not None:
            inside.append(line)
    if inside is not None:
        raise Refused(f"'{BEGIN}' without '{END}'")
    return found


def helpers(nb):
    """{(module, function)} of attention_lib.checks.exercises that the notebook's cells import."""
    lines = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "code")
    found = re.findall(r"^from attention_lib\.checks\.exercises\.(\w+) import (.+)$", lines, re.M)
    return {(module, name.strip()) for module, names in found for name in names.split(",")}


def in_cell(cell, function):
    """function(cell.source), its Refused naming the cell."""
    try:
        return function(cell.source)
    except Refused as reason:
        raise Refused(f"cell {cell.id}: {reason}") from None


# ---- from a solution to its exercise


def with_metadata(nb):
    """The solution with nbgrader's metadata: which cells are graded, which hold solutions."""
    nb = copy.deepcopy(nb)
    for cell in nb.cells:
        if SOLUTION in notebooks.tags(cell) or is_written(cell):
            continue  # mark_written
        given = cell.metadata.get("nbgrader", {})
        checks = in_cell(cell, check_calls) if cell.cell_type == "code" else []
        has_region = bool(in_cell(cell, regions))
        if not (checks or has_region or given):
            continue
        own = {"grade_id": checks[0][0] if checks else cell.id, "grade": bool(checks)}
        own |= {"solution": has_region, "locked": bool(checks), "task": False, "schema_version": 3}
        if checks:
            own["points"] = 1
        cell.metadata["nbgrader"] = nbformat.from_dict(own | given)
    return nb


def is_written(cell):
    return cell.cell_type == "markdown" and bool(WRITTEN.match(cell.source))


def mark_written(nb):
    """Cells for written answers become nbgrader's: kept as they are, and marked by hand."""
    for cell in nb.cells:
        if is_written(cell) and SOLUTION not in notebooks.tags(cell):
            own = {"grade_id": cell.id, "grade": True, "solution": True, "locked": False}
            own |= {"task": False, "schema_version": 3, "points": 1}
            cell.metadata["nbgrader"] = nbformat.from_dict(own | cell.metadata.get("nbgrader", {}))
    return nb


def run_steps(nb, steps, resources=None):
    resources = {} if resources is None else resources
    for step in steps:
        try:
            nb, resources = step.preprocess(nb, resources)
        except Exception as error:  # nbgrader raises many kinds
            raise Refused(f"{type(step).__name__}: {error}") from error
    return nb


def release(nb, save=(), resources=None):
    """What the student gets, not executed. save: steps that see the checks with hidden tests."""
    clear = [
        TagRemovePreprocessor(remove_cell_tags={SOLUTION}, enabled=True),
        ClearSolutions(code_stub={"python": STUB}, text_stub=TEXT_STUB, enforce_metadata=False),
        ClearOutput(),
    ]
    steps = [
        LockCells(),
        CheckCellMetadata(),
        ComputeChecksums(),
        *save,
        ClearHiddenTests(enforce_metadata=False),
        ComputeChecksums(),
    ]
    nb = mark_written(run_steps(with_metadata(nb), clear))
    return notebooks.normalise(run_steps(nb, steps, resources))


# ---- what must hold


def must_be_a_solution(nb):
    """There are solution regions and checks, and all checks have passed."""
    ids, found = [], 0
    hidden = [c for c in nb.cells if SOLUTION in notebooks.tags(c) and c.source.strip()]
    written = [c for c in nb.cells if is_written(c)]
    for cell in nb.cells:
        for region in in_cell(cell, regions):
            if not any(line.strip() for line in region):
                raise Refused(f"cell {cell.id}: an empty solution region")
            found += 1
        for id, _ in in_cell(cell, check_calls) if cell.cell_type == "code" else []:
            if SOLUTION in notebooks.tags(cell):
                raise Refused(f"cell {cell.id}: a check in a cell that the student does not have")
            ids.append(id)
        if ids and cell.cell_type == "code" and check_calls(cell.source):
            said = [o.data.get("text/plain", "") for o in cell.outputs if "data" in o]
            if not said or not all(text.startswith("[passed]") for text in said):
                raise Refused(f"cell {cell.id}: the solution as committed does not say [passed]")
    if not found and not (hidden and written and not ids):
        raise Refused(f"no solution region (### {BEGIN} ... ### {END}) was found")
    if found and not ids:
        raise Refused('no check("id", answer) was found')
    twice = sorted({id for id in ids if ids.count(id) > 1})
    if twice:
        raise Refused(f"checked twice: {', '.join(twice)}")


def _compact(line):
    """A line without comment and spaces: what tells a solution, however it is laid out."""
    return re.sub(r"\s+", "", re.sub(r"(^|\s)#.*", "", line))


def _fenced(markdown):
    return "\n".join(re.findall(r"```[^\n]*\n(.*?)```", markdown, re.DOTALL))


def _text(output):
    if "text" in output:
        return output.text
    return "\n".join(v for k, v in output.get("data", {}).items() if k.startswith("text/"))


def must_not_leak(solution, exercise):
    """No line of a solution is a line of the exercise's code, code blocks or outputs.

    A line that a task's code gives as well, outside every solution region, is no secret.
    """
    own = [line for cell in solution.cells for region in regions(cell.source) for line in region]
    secret = {_compact(line): line.strip() for line in own if len(_compact(line)) >= FEW_LETTERS}
    given = {
        _compact(line)
        for cell in solution.cells
        if cell.cell_type == "code" and SOLUTION not in notebooks.tags(cell)
        for line in _given_lines(cell.source)
    }
    for cell in exercise.cells:
        if cell.cell_type != "code":
            text = _fenced(cell.source)
        else:
            text = "\n".join([cell.source, *map(_text, cell.outputs)])
        for line in text.split("\n"):
            if _compact(line) in secret and _compact(line) not in given:
                where = f"cell {cell.id} of the exercise"
                raise Refused(f"{where} shows a line of the solution: {line}")
        for marker in (BEGIN, END, BEGIN_HIDDEN, END_HIDDEN):
            if marker in cell.source:
                raise Refused(f"cell {cell.id} of the exercise shows the marker '{marker}'")


def _given_lines(source):
    """The lines of a cell that stand outside solution regions and hidden tests."""
    inside = False
    for line in source.split("\n"):
        if BEGIN in line or BEGIN_HIDDEN in line:
            inside = True
        elif END in line or END_HIDDEN in line:
            inside = False
        elif not inside:
            yield line


def must_only_add(solution, exercise):
    """Solving only adds: the exercise's lines, but the stub, are among the solution's, in order."""
    after = {cell.id: cell for cell in solution.cells}
    order = [cell.id for cell in solution.cells if cell.id in {c.id for c in exercise.cells}]
    if [cell.id for cell in exercise.cells] != order:
        raise Refused("the exercise has cells that the solution has not, or in another order")
    for cell in exercise.cells:
        rest = iter(after[cell.id].source.split("\n"))
        for line in cell.source.split("\n"):
            if line.strip() not in (STUB, TEXT_STUB) and line not in rest:
                raise Refused(f"cell {cell.id}: solving would have to change the line: {line}")


def must_be_unattempted(exercise):
    """As shipped, every check says so, and the student's cells raised nothing."""
    for cell in exercise.cells:
        if not cell.metadata.get("nbgrader", {}).get("grade") or cell.cell_type != "code":
            continue
        # A card's text; its HTML says the same.
        said = [o.get("data", {}).get("text/plain") or _text(o) for o in cell.outputs]
        if not said or not all(text.startswith("[not attempted]") for text in said):
            shown = " ".join(said).split("\n")[0] or "nothing"
            raise Refused(f"cell {cell.id}: the student's copy should say [not attempted]: {shown}")


# ---- files


def read(path):
    return notebooks.normalise(nbformat.reads(path.read_text(encoding="utf-8"), as_version=4))


async def build(path, target, gate):
    """(text of the exercise, None) or (None, why there is none)."""
    where = notebooks.name(path)
    try:
        solution = read(path)
        must_be_a_solution(solution)
        exercise = release(solution)
        must_only_add(solution, exercise)
        before = read(target) if target.is_file() else None
        async with gate:
            target.parent.mkdir(exist_ok=True)
            await notebooks.execute(exercise, target.parent)
        exercise = notebooks.normalise(exercise)
        if before:
            notebooks.keep_ignored_outputs(exercise, before)
        must_be_unattempted(exercise)
        must_not_leak(solution, exercise)
    except Refused as reason:
        return None, f"{where}: {reason}"
    except notebooks.CellExecutionError:
        position, cell, message = notebooks.first_error(exercise)
        hint = "a stub needs a docstring or a line before its solution region; and "
        cut = any(w in message for w in ("SyntaxError", "IndentationError", "IncompleteInput"))
        hint = hint if cut else ""
        why = f"{where}: the student's copy fails in cell {cell.id}: {message}"
        return None, f"{why}\n{hint}what follows a task must not use its result unguarded"
    except (notebooks.CellTimeoutError, notebooks.DeadKernelError) as error:
        return None, f"{where}: the student's copy does not end: {str(error).splitlines()[0]}"
    return notebooks.dumps(exercise), None


def write_sources(paths, folder):
    """The solutions as the source folder of an nbgrader course."""
    for path in paths:
        solution = read(path)
        must_be_a_solution(solution)
        target = folder / "source" / path.stem / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        steps = [TagRemovePreprocessor(remove_cell_tags={SOLUTION}, enabled=True), ClearOutput()]
        nb = mark_written(run_steps(with_metadata(solution), steps))
        for cell in nb.cells:  # nbgrader clears all of a text cell but what is outside a region
            if cell.metadata.get("nbgrader", {}).get("solution") and cell.cell_type == "markdown":
                text = cell.source.replace(TEXT_STUB, "").rstrip()
                cell.source = f"{text}\n\n### {BEGIN}\n{TEXT_STUB}\n### {END}"
        nb = notebooks.normalise(nb)
        target.write_text(notebooks.dumps(nb), encoding="utf-8", newline="\n")
        print(target)


async def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="default: all of solutions/")
    parser.add_argument("--check", action="store_true", help="report only, write nothing")
    parser.add_argument("--nbgrader", type=Path, metavar="FOLDER", help="write an nbgrader course")
    parser.add_argument("--to", type=Path, default=ROOT / "exercises", help="default: exercises/")
    options = parser.parse_args(arguments)

    paths = [p.resolve() for p in options.paths] or sorted((ROOT / "solutions").glob("*.ipynb"))
    missing = [notebooks.name(p) for p in paths if not p.is_file()]
    if missing or not paths:
        print("no such notebook:", ", ".join(missing) or "solutions/ is empty", file=sys.stderr)
        return 1
    if options.nbgrader:
        try:
            write_sources(paths, options.nbgrader)
        except Refused as reason:
            print(f"FAILED {reason}", file=sys.stderr)
            return 1
        return 0

    folder, failed = options.to.resolve(), False
    gate = asyncio.Semaphore(notebooks.AT_ONCE)
    targets = [folder / path.name for path in paths]
    results = await asyncio.gather(
        *(build(p, t, gate) for p, t in zip(paths, targets, strict=True))
    )
    for target, (text, problem) in zip(targets, results, strict=True):
        old = target.read_text(encoding="utf-8") if target.is_file() else None
        if problem:
            print(f"FAILED {problem}", file=sys.stderr)
            failed = True
        elif text != old:
            print(f"{'differs' if options.check else 'written'}: {notebooks.name(target)}")
            failed = failed or options.check
            if not options.check:
                target.write_text(text, encoding="utf-8", newline="\n")
    if not options.paths:
        for stale in sorted(set(folder.glob("*.ipynb")) - set(targets)):
            print(f"{'has no solution' if options.check else 'removed'}: {notebooks.name(stale)}")
            failed = failed or options.check
            if not options.check:
                stale.unlink()
    if not failed:
        print(f"{len(paths)} exercises, each from its solution")
    return int(failed)


if __name__ == "__main__":
    # A person's own IPython start-up files must not change what a notebook prints.
    with tempfile.TemporaryDirectory(prefix="course-ipython-") as own:
        os.environ["IPYTHONDIR"] = own
        sys.exit(asyncio.run(main()))
