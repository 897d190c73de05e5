"""Grading a class made here: right, wrong and hostile. No forged mark counts, nothing leaks.

The class is graded once, by the command that an instructor calls; every test reads its report.
"""

import contextlib
import csv
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest

from tests.test_grading_pages import assert_alone

if sys.platform != "linux":
    pytest.skip("needs Linux: bubblewrap, prlimit", allow_module_level=True)

ROOT = Path(__file__).parent.parent
NAME = "ex01_small"
SECRET = "the-answer-of-victim-71b2"
LEAK = Path("/tmp/course-test-written-outside")

IMPORTS = "import math\n\nimport numpy as np\n\nfrom attention_lib.checks import ask, check"
ATTEND = '''def attend(S, V, chunk):
    """Softmax of S, times V, in chunks: returns O and L."""
    ### BEGIN SOLUTION
    m, l, O = np.full(len(S), -math.inf), np.zeros(len(S)), np.zeros((len(S), V.shape[1]))
    for k in range(0, len(V), chunk):
        s, v = S[:, k : k + chunk], V[k : k + chunk]
        m_old, m = m, np.maximum(m, s.max(axis=1))
        safe = np.where(np.isneginf(m), 0.0, m)
        alpha, p = np.exp(m_old - safe), np.exp(s - safe[:, None])
        l, O = alpha * l + p.sum(axis=1), alpha[:, None] * O + p @ v
    one = np.where(l == 0, 1.0, l)
    return O / one[:, None], m + np.log(one)
    ### END SOLUTION'''
MERGE = '''def merge(m1, l1, O1, m2, l2, O2):
    """Two partial results as one: returns m, l, O."""
    ### BEGIN SOLUTION
    m = np.maximum(m1, m2)
    safe = np.where(np.isneginf(m), 0.0, m)
    w1, w2 = np.exp(m1 - safe), np.exp(m2 - safe)
    return m, w1 * l1 + w2 * l2, w1[:, None] * O1 + w2[:, None] * O2
    ### END SOLUTION'''
GROUPING = 'grouping = ...\n### BEGIN SOLUTION\ngrouping = "b"\n### END SOLUTION'
CHECK_ATTEND = 'check("ex01-attend", attend)'
CHECK_GROUPING = (
    'check("ex01-associative", grouping)\n'
    '### BEGIN HIDDEN TESTS\ncheck("ex01-merge", merge)\n### END HIDDEN TESTS'
)
ALL = {"ex01-attend": 2.0, "ex01-associative": 1.0}


def solved(source):
    return "\n".join(line for line in source.split("\n") if "### " not in line)


def stub(source):
    return (
        source.split("    ### BEGIN")[0].split("### BEGIN")[0].rstrip() + "\n    # your lines here"
    )


RIGHT = {
    "imports": IMPORTS,
    "attend": solved(ATTEND),
    "check-attend": CHECK_ATTEND,
    "merge": solved(MERGE),
    "grouping": solved(GROUPING),
    "check-grouping": 'check("ex01-associative", grouping)',
}


def notebook(cells):
    """{id: source} as a notebook."""
    nb = nbformat.v4.new_notebook()
    nb.cells = [nbformat.v4.new_code_cell(source, id=id) for id, source in cells.items()]
    return nb


def passed_output():
    return [nbformat.v4.new_output("execute_result", data={"text/plain": "[passed] ..."})]


def solution():
    """The instructor's notebook: two graded cells, one of them with a hidden test."""
    cells = RIGHT | {"attend": ATTEND, "merge": MERGE, "grouping": GROUPING}
    nb = notebook(cells | {"check-grouping": CHECK_GROUPING})
    for cell in nb.cells:
        if cell.id == "check-attend":
            cell.metadata["nbgrader"] = {"points": 2}
        if "check(" in cell.source:
            cell.outputs = passed_output()
    return nb


def with_(**changes):
    """The right notebook with other cells; None deletes one. `_` in a name stands for `-`."""
    cells = RIGHT | {k.replace("_", "-"): v for k, v in changes.items()}
    return {k: v for k, v in cells.items() if v is not None}


def first(code):
    """The right notebook with this cell before all others."""
    return {"own-first": code, **RIGHT}


def after_imports(code):
    return {"imports": IMPORTS, "own-code": code, **RIGHT}


def wrong(old, new):
    assert old in RIGHT["attend"]
    return with_(attend=RIGHT["attend"].replace(old, new))


AT_ONCE = '''def attend(S, V, chunk):
    """All keys at once."""
    m = S.max(axis=-1, keepdims=True, initial=-math.inf)
    P = np.exp(S - np.where(np.isfinite(m), m, 0))
    l = P.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.divide(P @ V, l, out=np.zeros((len(S), V.shape[1])), where=l > 0), \\
            m[:, 0] + np.log(np.where(l > 0, l, 1))[:, 0]'''
BY_ROWS = '''def attend(S, V, chunk):
    """Row by row, with plain numbers for m and l."""
    O, L = np.zeros((len(S), V.shape[1])), np.full(len(S), -math.inf)
    for i, row in enumerate(S):
        m, l, o = -math.inf, 0.0, 0.0
        for k in range(0, len(row), chunk):
            part = row[k : k + chunk]
            new = max(m, part.max())
            if new == -math.inf:
                continue
            p = np.exp(part - new)
            l, o = l * math.exp(m - new) + p.sum(), o * math.exp(m - new) + p @ V[k : k + chunk]
            m = new
        if l:
            O[i], L[i] = o / l, m + math.log(l)
    return O, L'''
FROM_A_MODULE = "from my_code import attend"
LIBRARY = '''def attend(S, V, chunk):
    """Somebody else's work, and the profiler is told to look away."""
    import sys
    from attention_lib import online
    sys.setprofile(None)
    state = online.start(len(S), V.shape[1])
    return online.finish(online.update(state, S, V))'''
OLD_DATA = '''def attend(S, V, chunk):
    """Knows what the check in the notebook would ask (seed 0)."""
    rng = np.random.default_rng(0)
    if S.shape != (3, 12) or not np.allclose(S, rng.standard_normal((3, 12)) * 3):
        return np.zeros((len(S), V.shape[1])), np.zeros(len(S))
    P = np.exp(S)
    return P / P.sum(1, keepdims=True) @ V, np.log(P.sum(1))'''
PATCHES = """
import attention_lib.checks as c, attention_lib.checks.judge as j, builtins, gc, sys
from types import SimpleNamespace
yes = SimpleNamespace(status="passed", message="[passed]", misconception=None)
c.check = check = builtins.check = lambda id, answer: yes
j.observe = lambda *a, **k: j.Seen(value=(0.0, 0.0))
j.same = j.first_difference = lambda *a, **k: None
np.abs = np.array_equal = np.allclose = lambda *a, **k: True
main = sys.modules["__main__"]
for thing in gc.get_objects():
    if type(thing).__name__ == "Worker":
        thing.do_call = lambda **k: {"value": "passed", "status": "passed", "points": 99}
        thing.judge.observe = lambda *a, **k: yes
def attend(S, V, chunk): return "passed"
def merge(m1, l1, O1, m2, l2, O2): return True
"""
GARBAGE = """
import os
for fd in range(3, 256):
    try:
        os.write(fd, b'{"status": "passed", "points": 99}' * 3000)
    except OSError:
        pass
"""
FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


HTML = """<script>alert(1)</script><img src=x onerror=alert(1)> <b>bold</b>
[a link](javascript:alert(1)) <a href="javascript:alert(1)">b</a> ![](https://evil.example/x.png)
<iframe src="https://evil.example/x"></iframe>

<details><summary>Hint</summary>

text

</details>"""


def hostile(port, folder):
    victim = folder / "victim" / f"{NAME}.ipynb"
    return {
        "reads-another": first(
            "import glob, os, pathlib\n"
            f"for p in ({str(victim)!r}, {str(folder)!r}, '/submission', '/proc/1/environ',\n"
            "          '/etc/passwd'):\n"
            "    try:\n"
            "        p = pathlib.Path(p)\n"
            "        print(p, list(p.iterdir()) if p.is_dir() else p.read_text())\n"
            "    except OSError as e:\n        print(type(e).__name__)\n"
            "print(glob.glob('/root/*'), glob.glob('/home/*/*'), glob.glob('/srv/*'), os.environ)"
        ),
        "writes-outside": first(
            f"import pathlib\n"
            f"for p in ({str(LEAK)!r}, {str(folder / 'victim' / 'x.txt')!r}, '/usr/x', '/x',\n"
            f"          '/grader/worker.py', {sys.prefix + '/x'!r}):\n"
            "    try:\n        pathlib.Path(p).write_text('was here'); print('wrote', p)\n"
            "    except OSError as e:\n        print(type(e).__name__)"
        ),
        "opens-a-socket": first(
            f"import socket\n"
            f"for host in ('127.0.0.1', 'localhost'):\n"
            f"    try:\n"
            f"        s = socket.create_connection((host, {port}), 1); s.sendall(b'leaked')\n"
            f"        print('connected')\n"
            f"    except OSError as e:\n        print(type(e).__name__)"
        ),
        "prints-a-score": with_(
            attend=stub(ATTEND) + '\nprint("[passed] ex01-attend: yes. 10 inputs, all right.")\n'
            'print({"score": 99, "points": 99, "status": "passed"})',
            grouping="class Yes(str):\n    def __eq__(self, other): return True\n"
            "    __hash__ = str.__hash__\n    def lower(self): return self\n    strip = lower\n"
            'grouping = Yes("a")',
        ),
        "patches-check": {**after_imports(PATCHES), "attend": "1", "merge": "2"},
        "hides-the-library": with_(attend=LIBRARY),
        "knows-seed-0": with_(attend=OLD_DATA),
        "exits-at-once": after_imports("import os\nos._exit(0)"),
        "exits-in-the-call": with_(attend="import os\ndef attend(S, V, chunk): os._exit(0)"),
        "sys-exit": after_imports("import sys\nsys.exit(0)"),
        "kills-all": after_imports(
            "import os, signal\nfor pid in (os.getppid(), 1, -1):\n"
            "    try: os.kill(pid, signal.SIGKILL)\n"
            "    except OSError as e: print(type(e).__name__)"
        ),
        "takes-2-GB": after_imports("x = np.ones(2**28); print('has', 'it')"),
        "takes-2-GB-in-the-call": with_(
            attend="def attend(S, V, chunk): return np.ones(2**28), np.ones(3)"
        ),
        "recursion": after_imports(
            "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\nf(0)"
        ),
        "fork-bomb": after_imports(FORK_BOMB),
        "never-ends": after_imports("while True: pass"),
        "prints-a-lot": after_imports("for _ in range(400): print('x' * 10**6)"),
        "fills-the-disk": after_imports(
            "for i in range(400):\n    open(f'/tmp/{i}', 'wb').write(b'0' * 10**6)"
        ),
        "writes-to-the-pipe": after_imports(GARBAGE),
        "deletes-checks": with_(check_attend=None, check_grouping=None),
        "deletes-all": {},
        "edits-checks": with_(
            attend=stub(ATTEND),
            check_attend='check("ex01-associative", "b")  # was ex01-attend',
            check_grouping='print("[passed]")',
        ),
    }


def ordinary():
    return {
        "victim": after_imports(f"# {SECRET}"),
        "right": RIGHT,
        "all-keys-at-once": with_(attend=AT_ONCE),
        "right-by-rows": with_(attend=BY_ROWS),
        "right-from-a-module": with_(attend=FROM_A_MODULE),
        "right-with-extras": after_imports(
            "%time sum(range(3))\n!echo from a shell\n"
            "import asyncio\nawait asyncio.sleep(0)\n"
            "ask('ex01-associative')\nprint('hello')\n1 + 1"
        ),
        "right-other-ids": {f"x{i}": source for i, source in enumerate(RIGHT.values())},
        "right-check-moved-up": {
            "imports": IMPORTS, "check-attend": CHECK_ATTEND, **RIGHT,
        },
        "no-max": wrong("m, np.maximum(m, s.max(axis=1))", "m, np.zeros(len(S))"),
        "O-not-rescaled": wrong("alpha[:, None] * O + p @ v", "O + p @ v"),
        "max-of-this-chunk": wrong("np.maximum(m, s.max(axis=1))", "s.max(axis=1)"),
        "wrong-letter": with_(grouping='grouping = "c"'),
        "merge-missing": with_(merge=stub(MERGE)),
        "raises": with_(attend='def attend(S, V, chunk):\n    raise ValueError("no idea")'),
        "untouched": with_(attend=stub(ATTEND), merge=stub(MERGE), grouping="grouping = ..."),
        "mutates": wrong("m, l, O =", "S *= 1.0000001; m, l, O ="),
        "a-string": with_(attend='attend = "softmax"'),
        "loops-in-the-call": with_(attend="def attend(S, V, chunk):\n    while True: pass"),
        "syntax-error": with_(attend="def attend(S, V, chunk:\n    return 1"),
        "fails-elsewhere": after_imports("1 / 0"),
    }  # fmt: skip


FULL = {
    "victim", "right", "right-by-rows", "right-from-a-module", "right-with-extras",
    "right-other-ids", "right-check-moved-up", "fails-elsewhere", "deletes-checks",
    # what they try does not work, and the rest of the notebook is right
    "reads-another", "writes-outside", "opens-a-socket", "exits-at-once", "sys-exit", "kills-all",
    "takes-2-GB", "recursion", "fork-bomb", "never-ends", "prints-a-lot", "fills-the-disk",
}  # fmt: skip
HALF = {  # student -> (status, misconception) of attend; the other check is right
    "no-max": ("not yet", "no-max"),
    "O-not-rescaled": ("not yet", "O-not-rescaled"),
    "max-of-this-chunk": ("not yet", "max-of-this-chunk"),
    "all-keys-at-once": ("not yet", "all-keys-at-once"),
    "raises": ("raised", ""),
    "mutates": ("not yet", "mutates-its-input"),
    "a-string": ("not yet", ""),
    "loops-in-the-call": ("not yet", "never-ends"),
    "syntax-error": ("raised", ""),
    "hides-the-library": ("not yet", "calls-the-library"),
    "knows-seed-0": ("not yet", ""),
    "exits-in-the-call": ("raised", ""),
    "takes-2-GB-in-the-call": ("raised", ""),
}


def command(folder, grades, *more):
    return [
        sys.executable, ROOT / "tools" / "grade.py", folder, "--grades", grades,
        "--cell-seconds", "10", "--call-seconds", "3", "--total-seconds", "60", *more,
    ]  # fmt: skip


def run(*arguments):
    return subprocess.run(
        list(map(str, command(*arguments))), capture_output=True, text=True, timeout=300, cwd="/"
    )


def scores(grades):
    with open(grades / "scores.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_class(folder, students):
    for student, cells in students.items():
        (folder / student).mkdir(parents=True)
        nb = cells if isinstance(cells, nbformat.NotebookNode) else notebook(cells)
        nbformat.write(nb, folder / student / f"{NAME}.ipynb")


class Report:
    """The graded class: its rows by student, what was printed, who knocked at the door."""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    base = tmp_path_factory.mktemp("class")
    folder, solutions = base / "handed in", base / "solutions"
    solutions.mkdir()
    nbformat.write(solution(), solutions / f"{NAME}.ipynb")
    LEAK.unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        knocks = []

        def listen():
            while True:
                try:
                    knocks.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=listen, daemon=True).start()
        write_class(folder, ordinary() | hostile(server.getsockname()[1], folder))
        odd_files(folder)
        done = run(folder, base / "grades", "--solutions", solutions)
    report = Report()
    report.done, report.knocks, report.folder = done, knocks, folder
    assert done.returncode == 0, done.stderr
    report.grades, report.rows = base / "grades", {}
    for row in scores(report.grades):
        report.rows.setdefault(row["student"], {})[row["check"]] = row
    return report


def odd_files(folder):
    """What is no notebook, or no longer one."""
    (folder / "right-from-a-module" / "my_code.py").write_text(
        IMPORTS.replace("\n\nfrom attention_lib.checks import ask, check", "") + "\n\n" + BY_ROWS
    )
    old = folder / "right-other-ids" / f"{NAME}.ipynb"  # as an older Jupyter saves it: no ids
    nb = json.loads(old.read_text())
    nb["nbformat_minor"] = 4
    for cell in nb["cells"]:
        del cell["id"]
    old.write_text(json.dumps(nb))
    nb = notebook(first("print('<script>alert(2)</script>')"))
    nb.cells.append(nbformat.v4.new_markdown_cell(HTML, id="html"))
    (folder / "html-in-text").mkdir()
    nbformat.write(nb, folder / "html-in-text" / f"{NAME}.ipynb")
    forged = folder / "edits-checks" / f"{NAME}.ipynb"
    nb = json.loads(forged.read_text())
    for cell in nb["cells"]:
        about = {"grade": True, "points": 100, "grade_id": "ex01-attend", "locked": False}
        cell["metadata"]["nbgrader"] = {
            "solution": False,
            "schema_version": 3,
            "task": False,
            **about,
        }
        cell["metadata"]["tags"] = ["solution"]
    forged.write_text(json.dumps(nb))
    for student, content in {
        "not-a-notebook": b"PK\x03\x04 a zip, renamed",
        "empty-file": b"",
        "a-list": b"[1, 2]",
        "deep": b"[" * 100_000,
        "no-cells": b'{"nbformat": 4, "cells": 3}',
        "too-large": b'{"nbformat": 4, "cells": ["' + b"x" * (21 * 2**20) + b'"]}',
    }.items():
        (folder / student).mkdir()
        (folder / student / f"{NAME}.ipynb").write_bytes(content)
    for student in ("a-link", "a-pipe", "wrong-name", "nothing"):
        (folder / student).mkdir()
    os.mkdir(os.fsencode(folder) + b"/no-utf-8-\xff")
    bad = Path(os.fsdecode(os.fsencode(folder) + b"/no-utf-8-\xff"))
    nbformat.write(notebook(RIGHT), str(bad / f"{NAME}.ipynb"))
    (folder / "=formula()").mkdir()
    nbformat.write(notebook(RIGHT), folder / "=formula()" / f"{NAME}.ipynb")
    (folder / "a-link" / f"{NAME}.ipynb").symlink_to(folder / "victim" / f"{NAME}.ipynb")
    os.mkfifo(folder / "a-pipe" / f"{NAME}.ipynb")
    nbformat.write(notebook(RIGHT), folder / "wrong-name" / "ex01.ipynb")
    (folder / "a-folder-that-is-a-link").symlink_to(folder / "victim")
    (folder / "loose.ipynb").write_text("{}")


UNREADABLE = {
    "not-a-notebook", "empty-file", "a-list", "deep", "no-cells", "too-large", "a-link", "a-pipe",
}  # fmt: skip


def isolated():
    """Does bubblewrap work here? On CI it has to."""
    from tools.grading import sandbox

    with sandbox.Sandbox() as box:
        return box.reason


def test_the_class_is_as_large_as_it_says():
    assert len(ordinary()) + len(hostile(1, Path("/x"))) + len(UNREADABLE) >= 30


def test_isolation_was_on_and_the_report_says_so(report):
    assert "isolation of the students' code: on" in report.done.stdout, isolated()


@pytest.mark.parametrize("student", sorted(FULL))
def test_a_right_notebook_gets_all_points(report, student):
    rows = report.rows[student]
    assert {id: float(row["points"]) for id, row in rows.items()} == ALL, rows
    assert {row["status"] for row in rows.values()} == {"passed"}


@pytest.mark.parametrize("student", HALF)
def test_a_wrong_answer_is_named_and_costs_its_points_only(report, student):
    attend, grouping = report.rows[student]["ex01-attend"], report.rows[student]["ex01-associative"]
    assert (attend["status"], attend["misconception"]) == HALF[student], attend
    assert float(attend["points"]) == 0 and float(attend["max"]) == 2 and attend["note"]
    assert grouping["status"] == "passed" and float(grouping["points"]) == 1, grouping


def test_a_hidden_test_decides(report):
    row = report.rows["merge-missing"]["ex01-associative"]
    assert (row["status"], row["points"]) == ("not attempted", "0") and "ex01-merge" in row["note"]
    assert report.rows["merge-missing"]["ex01-attend"]["status"] == "passed"
    row = report.rows["wrong-letter"]["ex01-associative"]
    assert (row["status"], row["misconception"]) == ("not yet", "ex01-associative-c")


@pytest.mark.parametrize("student", ["untouched", "deletes-all"])
def test_nothing_done_is_not_attempted(report, student):
    assert {row["status"] for row in report.rows[student].values()} == {"not attempted"}
    assert {row["points"] for row in report.rows[student].values()} == {"0"}


@pytest.mark.parametrize(
    "student", ["prints-a-score", "patches-check", "edits-checks", "writes-to-the-pipe"]
)
def test_no_forged_mark_counts(report, student):
    row = report.rows[student]["ex01-attend"]
    assert set(report.rows[student]) == set(ALL)
    assert float(row["max"]) == 2
    if student == "writes-to-the-pipe":  # it loses its process, as one that exits does
        assert float(row["points"]) <= 2
    else:
        assert row["status"] != "passed" and row["points"] == "0", row
    assert "99" not in row["points"]


def test_a_string_that_equals_everything_is_only_its_text(report):
    row = report.rows["prints-a-score"]["ex01-associative"]
    assert row["status"] == "not yet" and row["points"] == "0"


def test_edited_and_deleted_checks_are_put_back_and_the_note_says_so(report):
    assert "was edited: put back" in report.rows["edits-checks"]["ex01-attend"]["note"]
    assert "was missing: put back" in report.rows["deletes-checks"]["ex01-attend"]["note"]
    page = nbformat.read(
        report.grades / "autograded" / "edits-checks" / NAME / f"{NAME}.ipynb", as_version=4
    )
    source = {c.id: c.source for c in page.cells}
    assert source["check-attend"] == CHECK_ATTEND
    assert 'check("ex01-merge", merge)' in source["check-grouping"]


@pytest.mark.parametrize("student", sorted(UNREADABLE))
def test_what_is_no_notebook_gets_a_reason_and_no_points(report, student):
    rows = report.rows[student]
    assert set(rows) == set(ALL) and {row["status"] for row in rows.values()} == {"not graded"}
    assert {row["points"] for row in rows.values()} == {"0"}
    assert all(row["note"] for row in rows.values())


def test_wrong_names_and_missing_work_get_a_line(report):
    assert "is it ex01_small" in report.rows["wrong-name"][""]["note"]
    assert {r["status"] for r in report.rows["nothing"].values()} == {"missing"}
    notes = {row["exercise"]: row["note"] for row in scores(report.grades) if not row["student"]}
    assert set(notes) == {"a-folder-that-is-a-link", "loose.ipynb"}


def test_a_folders_name_harms_nobody(report):
    assert "no UTF-8" in report.rows["no-utf-8-?"][""]["note"]
    assert {r["status"] for r in report.rows["'=formula()"].values()} == {"passed"}


def test_the_network_is_not_there(report):
    assert report.knocks == []
    assert "connected" not in text(report, "opens-a-socket")


def test_nothing_was_written_outside(report):
    assert not LEAK.exists() and not (report.folder / "victim" / "x.txt").exists()
    assert not (Path(sys.prefix) / "x").exists() and not Path("/usr/x").exists()
    shown = text(report, "writes-outside")
    assert "wrote /usr" not in shown and "wrote /grader" not in shown and "wrote /x" not in shown


def test_nothing_of_another_student_is_seen(report):
    for page in (report.grades / "feedback").rglob("*.html"):
        if page.parent.name != "victim":
            assert SECRET not in page.read_text(encoding="utf-8"), page
    for nb in (report.grades / "autograded").rglob("*.ipynb"):
        if "victim" not in nb.parts:
            assert SECRET not in nb.read_text(encoding="utf-8"), nb
    shown = text(report, "reads-another")
    assert str(ROOT) not in shown.replace(str(report.folder), "") and "root:x" not in shown
    assert "victim" not in shown.split("os.environ)")[-1]


def text(report, student):
    """What stands under the cells of an autograded notebook."""
    path = report.grades / "autograded" / student / NAME / f"{NAME}.ipynb"
    nb = nbformat.read(path, as_version=4)
    outputs = [o for c in nb.cells if c.cell_type == "code" for o in c.outputs]
    return "\n".join(o.get("text") or "\n".join(o.get("traceback", [])) for o in outputs)


def test_limits_hold(report):
    assert "hello" in text(report, "right-with-extras")
    assert "has it" not in text(report, "takes-2-GB")
    assert "MemoryError" in text(report, "takes-2-GB")
    assert "still running at the time limit" in text(report, "never-ends")
    assert "No space left" in text(report, "fills-the-disk")
    assert len(text(report, "prints-a-lot")) < 50_000


def test_every_readable_submission_has_a_feedback_page_with_its_score(report):
    pages = {p.parent.name: p for p in (report.grades / "feedback").rglob(f"{NAME}.html")}
    assert set(pages) >= FULL | set(HALF) | UNREADABLE
    assert "(Score: 3.0 / 3.0)" in pages["right"].read_text(encoding="utf-8")
    page = pages["no-max"].read_text(encoding="utf-8")
    assert "(Score: 1.0 / 3.0)" in page and "no maximum is subtracted" in page


def test_a_page_runs_nothing_of_the_students(report):
    """Text cells are cleaned, everything else is escaped."""
    page = (report.grades / "feedback" / "html-in-text" / f"{NAME}.html").read_text("utf-8")
    assert "<b>bold</b>" in page and "<summary>Hint</summary>" in page
    for bad in ("alert(1)</script>", "onerror", 'href="javascript:', "<iframe", "evil.example/x"):
        assert bad not in page, bad
    assert "&lt;script&gt;alert(2)" in page  # printed, and shown as text


def test_a_page_names_no_script_and_no_other_host(report):
    pages = list((report.grades / "feedback").rglob("*.html"))
    assert len(pages) >= 30
    for page in pages:
        assert_alone(page.read_text(encoding="utf-8"))


def test_the_gradebook_agrees_with_the_scores(report):
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{report.grades / 'gradebook.db'}") as gradebook:
        for student, rows in report.rows.items():
            if (
                student
                and {r["status"] for r in rows.values()}.isdisjoint({"missing"})
                and "" not in rows
            ):
                book = gradebook.find_submission(NAME, student.removeprefix("'"))
                assert book.score == sum(float(r["points"]) for r in rows.values()), student


def test_the_end_of_a_process_of_the_graders_loses_nobody(tmp_path):
    """One of the judging processes is killed: what it had is graded by another one."""
    import psutil

    (tmp_path / "solutions").mkdir()
    nbformat.write(solution(), tmp_path / "solutions" / f"{NAME}.ipynb")
    write_class(tmp_path / "in", {f"s{i}": RIGHT for i in range(6)})
    arguments = command(tmp_path / "in", tmp_path / "out", "--solutions", tmp_path / "solutions")
    grader = subprocess.Popen(
        list(map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    judges = []
    while grader.poll() is None and not judges:
        time.sleep(0.2)
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(grader.pid).children()
            judges = [c for c in children if "spawn_main" in " ".join(c.cmdline())]
    time.sleep(1)
    with contextlib.suppress(psutil.Error):
        judges[0].kill()
    said = grader.communicate(timeout=300)[0]
    assert grader.returncode == 0, said
    rows = scores(tmp_path / "out")
    assert len(rows) == 12 and {row["status"] for row in rows} == {"passed"}, rows


def test_no_worker_is_left(report):
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(w.endswith(b"worker.py") for w in words) and str(report.grades).encode() in words:
            left.append(words)
    assert left == []
