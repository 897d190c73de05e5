"""What a JupyterHub needs for this course. Load it from the hub's own jupyterhub_config.py:

    load_subconfig("/srv/course/docs/jupyterhub_config.py")

The hub keeps its authenticator, its spawner and its users. Set the four values below, or the
environment variables of the same names, for the hub.
"""

import os
import sys
from pathlib import Path

c = get_config()  # noqa: F821
DOCS = Path(__file__).resolve().parent

# Who may see the solutions and the marks.
INSTRUCTORS = set(os.environ.get("COURSE_INSTRUCTORS", "instructor").split(","))
# Where assignments go out and come back: every user writes there (mode 1777, made once by root).
EXCHANGE = os.environ.get("COURSE_EXCHANGE", "/srv/nbgrader/exchange")
# The instructors' folder: the solutions, the gradebook. No student may read it (mode 0700 or 2770).
FOLDER = os.environ.get("COURSE_FOLDER", "/srv/nbgrader/flashattention")
COURSE_ID = os.environ.get("COURSE_ID", "flashattention")

c.Spawner.environment.update(
    {
        # Where docs/nbgrader_config.py is found.
        "JUPYTER_CONFIG_PATH": str(DOCS),
        "COURSE_EXCHANGE": EXCHANGE,
        "COURSE_ID": COURSE_ID,
        # `alembic` and `bwrap` are called by their names.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
)
c.Spawner.default_url = "/lab"

STUDENTS_HAVE_NOT = ("formgrader", "course_list")


def course_for(spawner):
    """The formgrader is an instructor's; everybody has the list of assignments."""
    instructor = spawner.user.name in INSTRUCTORS
    if instructor:
        spawner.environment = {**spawner.environment, "COURSE_FOLDER": FOLDER}
    for part in STUDENTS_HAVE_NOT:
        name = f"nbgrader.server_extensions.{part}"
        argument = f"--ServerApp.jpserver_extensions={name}={instructor}"
        spawner.args = [*(a for a in spawner.args if name not in a), argument]


c.Spawner.pre_spawn_hook = course_for
