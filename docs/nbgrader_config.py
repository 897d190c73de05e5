"""nbgrader on a hub, for this course: what to put in front, and who judges.

Every user's server has to find this file: docs/jupyterhub_config.py puts its folder on
JUPYTER_CONFIG_PATH. An instructor's folder of the course is COURSE_FOLDER.
"""

import os
import sys
from pathlib import Path

c = get_config()  # noqa: F821
COURSE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(COURSE))

c.CourseDirectory.course_id = os.environ.get("COURSE_ID", "flashattention")
if "COURSE_FOLDER" in os.environ:
    c.CourseDirectory.root = os.environ["COURSE_FOLDER"]
c.Exchange.root = os.environ.get("COURSE_EXCHANGE", "/srv/nbgrader/exchange")

# What stands where a solution was: a comment, as in exercises/.
c.ClearSolutions.code_stub = {"python": "# your lines here"}
c.ClearSolutions.text_stub = "*Your text here.*"

# A check that a student deleted comes back.
c.OverwriteCells.add_missing_cells = True

# The student's code does not judge itself: nbgrader's Execute gives way to the course's Judge.
c.Autograde.autograde_preprocessors = [
    "tools.grading.preprocessor.Judge",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]

# The pages hold other people's text: it is cleaned before it becomes HTML, and loads nothing.
c.GenerateFeedback.exporter_class = "tools.grading.pages.FeedbackExporter"
