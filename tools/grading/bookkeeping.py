"""What nbgrader does here: the gradebook, checks put back, marks saved, feedback as HTML.

The folder of grades is an nbgrader course: each exercise is an assignment with one notebook, so
that `jupyter lab` in it, with nbgrader's formgrader, shows every submission and takes marks by
hand. Only one part of nbgrader is left out, the one that runs a notebook and its checks in one
kernel: judge.py takes its place.
"""

import copy
import logging
import warnings
from pathlib import Path

import nbformat

warnings.filterwarnings("ignore", "Object of type <Submitted", module="nbgrader.api")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import alembic.config
    import alembic.script
    import nbgrader.api
    from nbgrader.api import Gradebook, MissingEntry
    from nbgrader.dbutil import ALEMBIC_DIR
    from nbgrader.preprocessors import (
        CheckCellMetadata,
        OverwriteCells,
        OverwriteKernelspec,
        SaveAutoGrades,
        SaveCells,
    )

from attention_lib.checks.result import PASSED  # noqa: E402
from tools import exercises, notebooks  # noqa: E402
from tools.grading import pages  # noqa: E402


class Course:
    """The folder of grades."""

    def __init__(self, folder):
        self.folder = Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.db_url = f"sqlite:///{self.folder / 'gradebook.db'}"
        logging.getLogger("traitlets").setLevel(logging.CRITICAL)  # changed cells are in our notes
        # For a new gradebook nbgrader starts `alembic`, whichever PATH has, to ask for this number.
        nbgrader.api.get_alembic_version = _version_of_tables
        with Gradebook(self.db_url):
            pass
        self.exporter = pages.exporter()

    def resources(self, student, exercise):
        names = {"student": student, "assignment": exercise, "notebook": exercise}
        return {"nbgrader": {**names, "db_url": self.db_url}}

    def register(self, solution):
        """Put an exercise into the gradebook; returns it as it is handed out.

        Raises exercises.Refused if the gradebook holds another version of it, with marks.
        """
        name, nb = solution.stem, exercises.read(solution)
        exercises.must_be_a_solution(nb)
        with Gradebook(self.db_url) as gradebook:
            gradebook.update_or_create_assignment(name)
        resources = self.resources("", name)
        try:
            release = exercises.release(nb, save=[SaveCells()], resources=resources)
        except exercises.Refused as reason:
            if "submissions associated" in str(reason):
                raise exercises.Refused(
                    f"{name} has other tasks or checks now than when {self.folder} was made: "
                    "give another folder for the grades"
                ) from None
            raise
        source = exercises.mark_written(exercises.with_metadata(nb))
        _write(self.folder / "source" / name / f"{name}.ipynb", source)
        _write(self.folder / "release" / name / f"{name}.ipynb", release)
        return release

    def put_back(self, nb, student, exercise):
        """The checks as the gradebook has them, with their hidden tests."""
        with Gradebook(self.db_url) as gradebook:
            gradebook.update_or_create_student(student)
            gradebook.update_or_create_submission(exercise, student)
        steps = [OverwriteKernelspec(), OverwriteCells(add_missing_cells=True), CheckCellMetadata()]
        return exercises.run_steps(nb, steps, self.resources(student, exercise))

    def save(self, nb, graded, student, exercise):
        """Outputs, marks and feedback of one submission. Returns what `points` does."""
        nb = copy.deepcopy(nb)
        show(nb, graded)
        resources = self.resources(student, exercise)
        nb = exercises.run_steps(nb, [SaveAutoGrades(), CheckCellMetadata()], resources)
        _write(self.folder / "autograded" / student / exercise / f"{exercise}.ipynb", nb)
        html, _ = self.exporter.from_notebook_node(nb, resources)
        page = self.folder / "feedback" / student / f"{exercise}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(html, encoding="utf-8")
        return self.points(student, exercise)

    def points(self, student, exercise):
        """{grade id: (points, of, by hand)}; by hand: None, "to be marked" or "marked"."""
        with Gradebook(self.db_url) as gradebook:
            try:
                notebook = gradebook.find_submission_notebook(exercise, exercise, student)
            except MissingEntry:
                return {}
            return {g.name: (g.score, g.max_score, _by_hand(g)) for g in notebook.grades}


def _by_hand(grade):
    if grade.manual_score is not None:
        return "marked"
    return "to be marked" if grade.needs_manual_grade else None


def show(nb, graded):
    """Write under each cell what came of it: what it printed, the grader's word on a check."""
    checked = {c.grade_id: c for c in graded.checked}
    number = 0
    for position, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        number += 1
        cell.execution_count, cell.outputs = number, []
        if is_check(cell):
            c = checked.get(cell.metadata.nbgrader.grade_id)
            if c is not None and c.status == PASSED:
                data = {"text/plain": c.message}
                cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
            else:  # an error output is what nbgrader counts as 0 points
                status = "not graded" if c is None else c.status
                message = "not graded" if c is None else c.message
                cell.outputs = [_error(status, message)]
        elif position in graded.outputs:
            printed, error = graded.outputs[position]
            if printed:
                cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=printed))
            if error:
                cell.outputs.append(_error(*error))


def _error(name, text, traceback=""):
    shown = traceback or (text if name in text else f"{name}: {text}")
    return nbformat.v4.new_output("error", ename=name, evalue=text, traceback=[shown])


def is_check(cell):
    about = cell.metadata.get("nbgrader", {})
    return (
        cell.cell_type == "code" and about.get("grade", False) and not about.get("solution", False)
    )


def written(nb):
    """The grade ids of what a person has to mark."""
    graded = [c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade")]
    return [c.metadata.nbgrader.grade_id for c in graded if not is_check(c)]


def cells(nb):
    """What judge.grade takes."""
    found = []
    for cell in nb.cells:
        if is_check(cell):
            calls = exercises.check_calls(cell.source)
            found.append(("checks", cell.metadata.nbgrader.grade_id, calls))
        else:
            found.append(("code", cell.source) if cell.cell_type == "code" else ("text",))
    return found


def _version_of_tables():
    config = alembic.config.Config()
    config.set_main_option("script_location", ALEMBIC_DIR)
    return alembic.script.ScriptDirectory.from_config(config).get_current_head()


def _write(path, nb):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(notebooks.dumps(nb), encoding="utf-8", newline="\n")
