"""The grader on the course's own exercises: every solution gets all points, by every kind of check.

What a check hands to an answer (arrays, an HBM, a GPU, an array that watches) has to reach a worker
and come back, so each solution is graded. And where a claim is about how an answer does it (memory,
counted loads), one that lies about it is refused.
"""

import collections
import csv
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

if sys.platform != "linux":
    pytest.skip("needs Linux: bubblewrap, prlimit", allow_module_level=True)

from tools import exercises  # noqa: E402

ROOT = Path(__file__).parent.parent
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))

# N x N, and whoever measures is told to stop.
HIDES_MEMORY = """
import tracemalloc as _t
_honest = flash_attention
def flash_attention(Q, K, V, Br, Bc, causal=False):
    _t.stop()
    S = np.ones((len(Q), len(K)))
    return _honest(Q, K, V, Br, Bc, causal)
"""
# Right values, nothing loaded, and an HBM that is told what to say.
FORGES_COUNTS = """
_honest = q_outer
def q_outer(Q, K, V, Br, Bc, causal=False, hbm=None):
    O, L = _honest(Q, K, V, Br, Bc, causal)
    if hbm is not None:
        (Nq, d), Nk = Q.shape, len(K)
        n = 2 * Nq * d + Nq + 2 * d * Nk * -(-Nq // Br)
        try:
            type(hbm).reads = property(lambda self: n - Nq * d - Nq)
            type(hbm).writes = property(lambda self: Nq * d + Nq)
            hbm.__dict__.update(reads=n, writes=n, matmul_flops=n)
        except Exception:
            pass
    return O, L
"""
FORGERS = {
    "ex02_algorithm_1": ("ex02-flash-attention", HIDES_MEMORY),
    "ex08_project_loop_swapped": ("ex08-counters", FORGES_COUNTS),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """{(student, check): row} of a solved copy of every exercise, and of the forgers'."""
    base = tmp_path_factory.mktemp("course")
    folder = base / "handed in"
    (folder / "solved").mkdir(parents=True)
    (folder / "forged").mkdir()
    for path in SOLUTIONS:
        nb = exercises.read(path)
        nbformat.write(nb, folder / "solved" / path.name)
        if path.stem in FORGERS:
            check = FORGERS[path.stem][0]
            for cell in nb.cells:
                if cell.cell_type == "code" and f'check("{check}"' in cell.source:
                    at = nb.cells.index(cell)
            nb.cells.insert(at, nbformat.v4.new_code_cell(FORGERS[path.stem][1], id="forged"))
            nbformat.write(nb, folder / "forged" / path.name)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/grade.py"), str(folder), "--grades", str(base / "out"),
         "--cell-seconds", "60", "--call-seconds", "30", "--total-seconds", "240"],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "isolation of the students' code: on" in done.stdout, done.stdout
    with open(base / "out" / "scores.csv", newline="", encoding="utf-8") as file:
        return {(row["student"], row["check"]): row for row in csv.DictReader(file)}


def test_written_answers_are_marked_by_hand_and_stay_marked(tmp_path):
    """The folder of grades is an nbgrader course: marks given there are in the next scores.csv."""
    from nbgrader.api import Gradebook

    path = next(p for p in SOLUTIONS if p.stem == "ex10_interview")
    first, second = list(graded(path))[:2]
    nb = exercises.release(exercises.read(path))
    for cell in nb.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == first:
            cell.source = "**Your answer.** S and P are written and read once each."
    (tmp_path / "in" / "ada").mkdir(parents=True)
    nbformat.write(nb, tmp_path / "in" / "ada" / path.name)

    def grade():
        command = [sys.executable, str(ROOT / "tools/grade.py"), str(tmp_path / "in")]
        command += ["--grades", str(tmp_path / "out")]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        with open(tmp_path / "out" / "scores.csv", newline="", encoding="utf-8") as file:
            return {row["check"]: (row["status"], row["points"]) for row in csv.DictReader(file)}

    marks = grade()
    assert marks[first] == ("to be marked", "0") and marks[second] == ("not attempted", "0")
    with Gradebook(f"sqlite:///{tmp_path / 'out' / 'gradebook.db'}") as gradebook:
        grade_of = gradebook.find_grade(first, path.stem, path.stem, "ada")
        grade_of.manual_score = 0.5
        comment = gradebook.find_comment(first, path.stem, path.stem, "ada")
        comment.manual_comment = "Twice each, not once."
        gradebook.db.commit()
    assert grade()[first] == ("marked", "0.5")
    page = tmp_path / "out" / "feedback" / "ada" / f"{path.stem}.html"
    assert "Twice each, not once." in page.read_text(encoding="utf-8")


def graded(path):
    """{check: by a person?} of an exercise."""
    return {
        cell.metadata.nbgrader.grade_id: cell.cell_type == "markdown"
        for cell in exercises.release(exercises.read(path)).cells
        if cell.metadata.get("nbgrader", {}).get("grade")
    }


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda p: p.stem)
def test_the_solution_gets_every_point(rows, path):
    checks = graded(path)
    assert checks
    for id, by_hand in checks.items():
        row = rows["solved", id]
        if by_hand:
            assert row["status"] == "not attempted", row
        else:
            assert row["status"] == "passed" and row["points"] == row["max"] != "0", row
            assert row["note"] == "", row


def test_no_check_is_in_two_exercises():
    ids = collections.Counter(id for path in SOLUTIONS for id in graded(path))
    assert [id for id, count in ids.items() if count > 1] == []


@pytest.mark.parametrize("name", FORGERS)
def test_a_claim_cannot_be_forged(rows, name):
    check, _ = FORGERS[name]
    row = rows["forged", check]
    assert row["status"] == "not yet" and row["points"] == "0", row
    if name.startswith("ex02"):
        assert row["misconception"] == "makes-n-by-n", row
