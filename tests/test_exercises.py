"""Exercises come from solutions: nothing leaks, solving only adds, and nothing passes vacuously."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools import exercises, notebooks

ROOT = Path(__file__).parent.parent
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))

TASK = '''def double(S, V, chunk):
    """Twice S."""
    ### BEGIN SOLUTION
    doubled = S + S
    return doubled
    ### END SOLUTION'''
LETTER = 'letter = ...\n### BEGIN SOLUTION\nletter = "b"\n### END SOLUTION'
CHECK = 'check("ex01-attend", double)'


def code(id, source, outputs=(), **metadata):
    cell = nbformat.v4.new_code_cell(source, id=id, metadata=metadata)
    cell.outputs = [
        nbformat.v4.new_output("execute_result", data={"text/plain": text}) for text in outputs
    ]
    return cell


def markdown(id, source, **metadata):
    return nbformat.v4.new_markdown_cell(source, id=id, metadata=metadata)


def solution(**changes):
    """A solution in small; a cell may be replaced, or dropped with None."""
    cells = {
        "title": markdown("title", "# Exercise\n\nA hint: `doubled = S + S`."),
        "imports": code("imports", "from attention_lib.checks import check"),
        "task": code("task", TASK),
        "check": code("check", CHECK, ["[passed] ex01-attend"]),
        "why": markdown("why", "It is twice because\n```\ndoubled = S + S\n```", tags=["solution"]),
        "show": code("show", "print(double(3, 0, 0))", tags=["solution"]),
        "letter": code("letter", LETTER),
        "check-letter": code(
            "check-letter", 'check("ex01-associative", letter)', ["[passed] ex01-associative"]
        ),
    }
    cells |= {name.replace("_", "-"): cell for name, cell in changes.items()}
    return nbformat.v4.new_notebook(cells=[c for c in cells.values() if c is not None])


def sources(nb):
    return {cell.id: cell.source for cell in nb.cells}


def built(nb, tmp_path):
    """(exercise or None, why not) by the whole way, execution included."""
    path = tmp_path / "solutions" / "ex.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nb, path)
    target = tmp_path / "exercises" / "ex.ipynb"
    text, problem = asyncio.run(exercises.build(path, target, asyncio.Semaphore(1)))
    return (nbformat.reads(text, as_version=4) if text else None), problem


# ---- the course


def test_there_are_solutions():
    assert SOLUTIONS


def test_every_exercise_is_what_its_solution_gives():
    """Generated again, executed, compared byte by byte."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "exercises.py"), "--check"],
        capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SOLUTIONS)} exercises, each from its solution" in done.stdout


def environment():
    """A cell that runs on a busy machine is no slower to the reader."""
    return {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda p: p.stem)
def test_a_solution_may_be_released(path):
    nb = exercises.read(path)
    exercises.must_be_a_solution(nb)
    release = exercises.release(nb)
    exercises.must_only_add(nb, release)
    exercises.must_not_leak(nb, release)
    regions = sum(len(exercises.regions(c.source)) for c in nb.cells)
    stubs = sum(c.source.count(exercises.STUB) for c in release.cells if c.cell_type == "code")
    written = [c for c in release.cells if exercises.is_written(c)]
    assert stubs == regions and (regions or written)
    assert sum(len(c.source) for c in release.cells) < sum(len(c.source) for c in nb.cells)


# ---- what the generator does


def test_solutions_give_way_to_a_stub_and_tagged_cells_go():
    nb = solution()
    exercises.must_be_a_solution(nb)
    release = exercises.release(nb)
    got = sources(release)
    assert got["task"] == 'def double(S, V, chunk):\n    """Twice S."""\n    # your lines here'
    assert got["letter"] == "letter = ...\n# your lines here"
    assert set(got) == set(sources(nb)) - {"why", "show"}
    exercises.must_only_add(nb, release)
    exercises.must_not_leak(nb, release)


def test_checks_are_graded_and_locked_tasks_are_not():
    about = {c.id: c.metadata for c in exercises.release(solution()).cells}
    check, task = about["check"], about["task"]
    assert check.nbgrader.grade and check.nbgrader.points == 1 and check.nbgrader.locked
    assert check.nbgrader.grade_id == "ex01-attend" and check.editable is False
    assert task.nbgrader.solution and not task.nbgrader.grade and "editable" not in task
    assert "nbgrader" not in about["imports"]


def test_points_are_what_the_solution_says():
    cell = code("check", CHECK, ["[passed] ex01-attend"], nbgrader={"points": 5})
    release = exercises.release(solution(check=cell))
    points = {c.id: c.metadata.nbgrader.points for c in release.cells if c.id == "check"}
    assert points == {"check": 5}


def test_hidden_tests_stay_with_the_grader():
    hidden = f'{CHECK}\n### BEGIN HIDDEN TESTS\ncheck("ex01-merge", double)\n### END HIDDEN TESTS'
    cell = code("check", hidden, ["[passed] ex01-attend", "[passed] ex01-merge"])
    release = exercises.release(solution(check=cell))
    assert sources(release)["check"].strip() == CHECK
    assert exercises.check_calls(hidden) == [("ex01-attend", "double"), ("ex01-merge", "double")]


def test_a_written_answer_is_kept_and_marked_by_hand():
    text = "**Your answer.** In a sentence.\n\n*Your text here.*"
    release = exercises.release(solution(letter=markdown("letter", text), check_letter=None))
    cell = next(c for c in release.cells if c.id == "letter")
    assert cell.source == text
    assert cell.metadata.nbgrader.grade and cell.metadata.nbgrader.solution


def test_a_written_answer_has_the_points_and_the_name_that_the_solution_gives():
    text = "**Your answer.** In a sentence."
    given = markdown("letter", text, nbgrader={"points": 3, "grade_id": "ex01-sentence"})
    release = exercises.release(solution(letter=given, check_letter=None))
    about = next(c for c in release.cells if c.id == "letter").metadata.nbgrader
    assert (about.points, about.grade_id) == (3, "ex01-sentence")
    assert about.grade and about.solution and not about.locked


def test_the_projects_points_are_those_of_its_rubric():
    """The rubric's table: a row's points belong to the grade ids that the row names."""
    nb = exercises.read(ROOT / "solutions" / "ex08_project_loop_swapped.ipynb")
    rubric = next(c.source for c in nb.cells if "Rubric for the instructor" in c.source)
    graded = {
        about.grade_id: about.points
        for cell in exercises.release(nb).cells
        if (about := cell.metadata.get("nbgrader", {})).get("grade")
    }
    named = {}
    for row in re.findall(r"^\| \d.*$", rubric, re.MULTILINE):
        points = int(row.split("|")[2])
        ids = re.findall(r"`(ex08-[a-z]+)`", row)
        assert sum(graded[id] for id in ids) == points, row
        named |= dict.fromkeys(ids)
    assert set(named) == set(graded)
    total = re.search(r"^(\d+) points", rubric, re.MULTILINE)
    assert int(total[1]) == sum(graded.values())


def test_an_exercise_of_written_answers_needs_no_region():
    text = markdown("answer", "**Your answer.** *(Write.)*")
    model = markdown("model", "Because.", tags=["solution"])
    exercises.must_be_a_solution(nbformat.v4.new_notebook(cells=[text, model]))
    for cells in ([text], [model], []):
        with pytest.raises(exercises.Refused, match="no solution region"):
            exercises.must_be_a_solution(nbformat.v4.new_notebook(cells=cells))


def test_the_students_copy_ships_with_its_outputs(tmp_path):
    exercise, problem = built(solution(), tmp_path)
    assert problem is None
    said = {
        c.id: [o.data["text/plain"] for o in c.outputs] for c in exercise.cells if "outputs" in c
    }
    assert said["check"][0].startswith("[not attempted] ex01-attend")
    assert said["check-letter"][0].startswith("[not attempted] ex01-associative")
    again, _ = built(solution(), tmp_path)
    assert notebooks.dumps(again) == notebooks.dumps(exercise)


# ---- what it refuses


def plain(source, id="task"):
    return code(id, source)


REFUSED = {
    "no solution region": solution(
        task=plain("double = abs"), letter=plain("letter = 'b'", "letter")
    ),
    "'END SOLUTION' without": solution(task=plain(TASK.replace("    ### BEGIN SOLUTION\n", ""))),
    "'BEGIN SOLUTION' without": solution(task=plain(TASK.replace("### END SOLUTION", ""))),
    "a second 'BEGIN SOLUTION'": solution(
        task=plain(TASK.replace("END SOLUTION", "BEGIN SOLUTION"))
    ),
    "an empty solution region": solution(
        task=plain('def double(S):\n    """."""\n    ### BEGIN SOLUTION\n    ### END SOLUTION')
    ),
    "does not say": solution(check=code("check", CHECK, ["[not yet] ex01-attend"])),
    "as committed": solution(check=code("check", CHECK)),
    "checked twice": solution(
        check_letter=code("check-letter", CHECK, ["[passed] ex01-attend"])
    ),
    "and nothing else": solution(
        check=code("check", f"x = 1\n{CHECK}", ["[passed] ex01-attend"])
    ),
    "give the answer of ex01-attend a name": solution(
        check=code("check", 'check("ex01-attend", "b")', ["[passed] ex01-attend"])
    ),
    "the student does not have": solution(
        check=code("check", CHECK, ["[passed] ex01-attend"], tags=["solution"])
    ),
    "no check": solution(check=None, check_letter=None),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_it_refuses(why, tmp_path):
    exercise, problem = built(REFUSED[why], tmp_path)
    assert exercise is None and why in problem, problem


LEAKS = {
    "in code": solution(title=code("title", "def other(x):\n    doubled = S + S  # as below")),
    "in an output": solution(title=code("title", 'print("doubled = S" + " + S")')),
    "in a code block": solution(title=markdown("title", "```python\ndoubled = S + S\n```")),
}


@pytest.mark.parametrize("where", LEAKS)
def test_it_refuses_a_line_of_the_solution(where, tmp_path):
    nb = LEAKS[where]
    if where == "in code":  # in the exercise only, as a faulty generator would leave it
        release = exercises.release(solution())
        release.cells[0] = nb.cells[0]
        with pytest.raises(exercises.Refused, match="shows a line of the solution"):
            exercises.must_not_leak(solution(), release)
        return
    exercise, problem = built(nb, tmp_path)
    assert exercise is None and "shows a line of the solution" in problem, problem


def test_a_line_that_the_task_gives_is_no_secret():
    nb = solution(title=code("title", "for chunk in chunks:\n    pass"))
    nb.cells[2].source = TASK.replace(
        "    doubled = S + S", "    for chunk in chunks:\n        pass"
    )
    exercises.must_not_leak(nb, exercises.release(nb))


def test_it_refuses_an_exercise_in_which_solving_would_change_a_line():
    release = exercises.release(solution())
    next(c for c in release.cells if c.id == "task").source += "\n    return None"
    with pytest.raises(exercises.Refused, match="solving would have to change the line"):
        exercises.must_only_add(solution(), release)
    release.cells.reverse()
    with pytest.raises(exercises.Refused, match="another order"):
        exercises.must_only_add(solution(), release)


def test_it_names_the_cell_of_a_copy_that_fails(tmp_path):
    no_docstring = TASK.replace('    """Twice S."""\n', "")
    exercise, problem = built(solution(task=plain(no_docstring)), tmp_path)
    assert exercise is None and "cell task" in problem and "docstring" in problem
    unguarded = code("after", "double(1, 2, 3) + 1")
    nb = solution()
    nb.cells.append(unguarded)
    exercise, problem = built(nb, tmp_path)
    assert exercise is None and "cell after" in problem and "unguarded" in problem


def test_it_refuses_a_copy_that_is_attempted_already(tmp_path):
    given = plain(
        "def double(S, V, chunk):\n    return S\n\n\n"
        "### BEGIN SOLUTION\nunused = 1\n### END SOLUTION"
    )
    exercise, problem = built(solution(task=given), tmp_path)
    assert exercise is None and "should say [not attempted]" in problem


# ---- the command


def command(*arguments):
    return asyncio.run(exercises.main([str(a) for a in arguments]))


def test_the_check_says_what_differs_and_writing_repairs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exercises, "ROOT", tmp_path)
    (tmp_path / "solutions").mkdir()
    nbformat.write(solution(), tmp_path / "solutions" / "ex.ipynb")
    target = tmp_path / "exercises"
    assert command("--check", "--to", target) == 1
    assert "differs: " in capsys.readouterr().out and not list(target.glob("*.ipynb"))
    assert command("--to", target) == 0
    assert command("--check", "--to", target) == 0
    stale = target / "ex99_gone.ipynb"
    stale.write_text("{}")
    assert command("--check", "--to", target) == 1
    assert "has no solution: " in capsys.readouterr().out and stale.exists()
    assert command("--to", target) == 0 and not stale.exists()


def test_the_source_of_an_nbgrader_course(tmp_path):
    path = tmp_path / "ex.ipynb"
    text = markdown("letter", "**Your answer.** In a sentence.\n\n*Your text here.*")
    nbformat.write(solution(letter=text, check_letter=None), path)
    exercises.write_sources([path], tmp_path)
    nb = nbformat.read(tmp_path / "source" / "ex" / "ex.ipynb", as_version=4)
    got = sources(nb)
    assert "why" not in got and exercises.BEGIN in got["task"]
    assert got["letter"].startswith("**Your answer.** In a sentence.\n\n### BEGIN SOLUTION")


def test_no_notebook_is_an_error(tmp_path, capsys):
    assert command(tmp_path / "no.ipynb") == 1
    assert "no such notebook" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["solutions", "exercises"])
def test_a_code_cell_fits_on_a_screen(part):
    long = [
        f"{path.stem}, {cell.id}: {len(cell.source.splitlines())} lines"
        for path in sorted((ROOT / part).glob("*.ipynb"))
        for cell in exercises.read(path).cells
        if cell.cell_type == "code" and len(cell.source.splitlines()) > 20
    ]
    assert not long, long
