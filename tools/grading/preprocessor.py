"""nbgrader's Execute, replaced: for a course on a hub, graded with `nbgrader autograde`.

nbgrader runs a notebook and its checks in one kernel, and takes what stands under a check for the
truth; `check` raises for no answer, so every answer would get all points. With
docs/nbgrader_config.py the student's cells run in a worker, the checks on this side, and everything
else is nbgrader's.
"""

import atexit
import secrets
import tempfile
from pathlib import Path

from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Bool, Float, Int

from tools import exercises
from tools.grading import bookkeeping, judge, remote, sandbox, submissions


class Judge(NbGraderPreprocessor):
    cell_seconds = Float(20.0, help="For one cell").tag(config=True)
    call_seconds = Float(10.0, help="For one call of a checked function").tag(config=True)
    total_seconds = Float(120.0, help="For one notebook").tag(config=True)
    memory_mib = Int(2048, help="Address space of the student's process").tag(config=True)
    require_isolation = Bool(
        True, help="Refuse to grade where bubblewrap does not work: whoever grades can be read."
    ).tag(config=True)

    _sandbox = None

    def box(self):
        """One for all notebooks of this run."""
        if Judge._sandbox is None:
            limits = sandbox.Limits(
                cell=self.cell_seconds,
                call=self.call_seconds,
                total=self.total_seconds,
                memory=self.memory_mib * 2**20,
            )
            solutions = map(exercises.read, sorted((sandbox.ROOT / "solutions").glob("*.ipynb")))
            put_together = set().union(*map(exercises.helpers, solutions))
            box = sandbox.Sandbox(limits, helpers=put_together).__enter__()
            atexit.register(box.__exit__, None, None, None)
            remote.watch_workers()
            Judge._sandbox = box
        if not Judge._sandbox.isolated and self.require_isolation:
            raise RuntimeError(f"the students' code would not be isolated: {Judge._sandbox.reason}")
        return Judge._sandbox

    def preprocess(self, nb, resources):
        folder = resources.get("metadata", {}).get("path") or "."
        box, seed = self.box(), secrets.randbelow(2**32)
        with tempfile.TemporaryDirectory(prefix="course-submission-") as files:
            submissions.copy_files(Path(folder), Path(files))
            graded = judge.grade(bookkeeping.cells(nb), box, Path(files), seed=seed)
        bookkeeping.show(nb, graded)
        for note in graded.notes:
            self.log.warning(note)
        if not box.isolated:
            self.log.warning("isolation of the students' code: OFF (%s)", box.reason)
        return nb, resources
