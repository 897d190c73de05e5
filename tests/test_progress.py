"""The note of what is passed: written only for a learner, never in the way of an answer."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from attention_lib import checks, progress
from attention_lib.checks.result import NOT_YET, PASSED
from tools import notebooks

ROOT = Path(__file__).parent.parent
RIGHT = checks._QUESTIONS["q1"].right
WRONG = next(x for x in checks._QUESTIONS["q1"].options if x != RIGHT)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A place for the note, and a learner at a notebook."""
    place = tmp_path / "note.json"
    monkeypatch.setenv("COURSE_PROGRESS", str(place))
    monkeypatch.setattr(progress, "_at_a_notebook", lambda: True)
    return place


def test_only_what_is_passed_is_noted(file):
    checks.check("q1", ...)
    checks.check("q1", WRONG)
    checks.check("q1", 17)
    assert not file.exists()
    assert checks.check("q1", RIGHT).status == PASSED
    checks.check("p00-3", checks._QUESTIONS["p00-3"].right)
    checks.check("q1", WRONG)  # what was passed stays passed
    assert json.loads(file.read_text(encoding="utf-8")) == {"passed": ["p00-3", "q1"]}
    assert progress.passed() == {"q1", "p00-3"}
    assert [f.name for f in file.parent.iterdir()] == ["note.json"]
    progress.forget()
    progress.forget()
    assert progress.passed() == set() and not file.exists()


def test_nothing_is_noted_outside_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "note.json"))
    assert checks.check("q1", RIGHT).status == PASSED
    assert list(tmp_path.iterdir()) == []


def test_off_means_off(monkeypatch):
    assert os.environ["COURSE_PROGRESS"] == "off", "conftest.py sets it for every test"
    monkeypatch.setattr(progress, "_at_a_notebook", lambda: True)
    assert progress.path() is None
    assert checks.check("q1", RIGHT).status == PASSED
    progress.forget()
    assert progress.passed() == set()


def test_the_file_of_a_learner(monkeypatch):
    monkeypatch.delenv("COURSE_PROGRESS")
    assert progress.path() == ROOT / ".progress.json"
    monkeypatch.setattr(progress, "ROOT", ROOT / "tools")  # the library without the course
    assert progress.path() is None


def test_git_does_not_see_it():
    if not (ROOT / ".git").exists():
        ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
        assert ".progress.json*" in ignored
        return
    seen = subprocess.run(["git", "check-ignore", "-q", ".progress.json"], cwd=ROOT, check=False)
    assert seen.returncode == 0


def test_the_tools_that_run_notebooks_note_nothing():
    """make notebooks, make exercises and make grade all import tools.notebooks."""
    code = "import os, tools.notebooks; print(os.environ['COURSE_PROGRESS'])"
    environment = {k: v for k, v in os.environ.items() if k != "COURSE_PROGRESS"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "off", run.stderr


@pytest.mark.parametrize("where", ["no/such/folder/note.json", "."])
def test_a_place_that_cannot_be_written_to_fails_no_answer(tmp_path, monkeypatch, where):
    monkeypatch.setattr(progress, "_at_a_notebook", lambda: True)
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / where))
    assert checks.check("q1", RIGHT).status == PASSED
    assert checks.check("q1", WRONG).status == NOT_YET
    assert list(tmp_path.iterdir()) == [] and progress.passed() == set()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"passed": 3}', '{"done": []}', "\0"])
def test_a_damaged_note_counts_as_none(file, text):
    file.write_text(text, encoding="utf-8")
    assert progress.passed() == set()
    assert checks.check("q1", RIGHT).status == PASSED
    assert progress.passed() == {"q1"}


def test_strange_entries_are_left_out(file):
    file.write_text('{"passed": ["q1", 3, null, "no-such-id"]}', encoding="utf-8")
    shown = repr(progress.progress())
    assert "1 of   7  01" in shown and "1 of " in shown.splitlines()[1]


def test_contents_are_what_the_notebooks_ask():
    contents = progress.contents()
    ids = [i for _, _, asked in contents for i in asked]
    assert set(ids) <= set(checks.exercises())
    # What nobody asks yet belongs to an exercise whose notebook is being written.
    files = [file for file, _, _ in contents]
    assert files == sorted(files, key=lambda f: (not f.startswith("notebooks"), f))
    assert contents[0][:2] == ("notebooks/00_start_here.ipynb", "00 · Start here")
    assert contents[0][2] == ["p00-1", "p00-2", "p00-3"]
    assert all((ROOT / file).is_file() and title[0] in "012E" for file, title, _ in contents)


def rows(*counts):
    return [(f"notebooks/{k}.ipynb", f"N{k}", done, 3) for k, done in enumerate(counts)]


@pytest.mark.parametrize(
    ("counts", "following"),
    [
        ((0, 0, 0), ["N0"]),
        ((3, 0, 0), ["N1"]),
        ((2, 0, 0), ["N0"]),
        ((2, 3, 0), ["N2"]),  # one question skipped: go on
        ((2, 1, 0), ["N1"]),
        ((0, 3, 3), []),
    ],
)
def test_what_comes_next(counts, following):
    assert [title for _, title, *_ in progress.Progress(rows(*counts)).next()] == following


def test_a_beginner_sees_where_to_begin():
    shown = progress.progress()
    assert repr(shown).splitlines()[0] == "Nothing is passed yet."
    assert "next: 00 · Start here" in repr(shown) and "next: Exercise 1 ·" in repr(shown)
    html = shown._repr_html_()
    assert "Nothing is passed yet." in html and "<table>" not in html
    assert 'href="../notebooks/00_start_here.ipynb"' in html


def test_the_table_counts(file):
    file.write_text(json.dumps({"passed": ["p00-1", "p00-2", "p00-3", "q1"]}), encoding="utf-8")
    shown = progress.progress()
    lines = repr(shown).splitlines()
    assert lines[0] == "   3 of   3  00 · Start here"
    assert lines[1].startswith("   1 of   7  01 ·")
    total = sum(len(ids) for *_, ids in progress.contents())
    assert lines[2] == f"   4 of {total:3}  all"
    assert lines[3].startswith("next: 01 ·") and lines[4].startswith("next: Exercise 1")
    html = shown._repr_html_()
    assert html.count("<tr>") == 4 and "3 of 3" in html and '<th scope="col">passed</th>' in html


def test_in_a_real_notebook(file):
    """A kernel notes what its learner passes; the start notebook's cell shows it."""
    source = f'from attention_lib.checks import check\ncheck("q1", "{RIGHT}")'
    sources = (source, "from attention_lib import progress\nprogress.progress()")
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    asyncio.run(notebooks.execute(nb, file.parent))
    assert progress.passed() == {"q1"}
    assert "1 of   7  01" in nb.cells[1].outputs[0].data["text/plain"]
