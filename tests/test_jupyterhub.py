"""docs/jupyterhub_config.py in a real hub: an instructor and a student, from release to feedback.

The hub is JupyterHub with its proxy, as `docs/instructors.md` says to install them; the two users
log in by its form and get servers of their own. Needs the commands jupyterhub and configurable-
http-proxy, beside this Python or in the folders of COURSE_HUB (separated as in PATH).
"""

import contextlib
import csv
import http.cookiejar
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import nbformat
import pytest

from tests.test_grading_pages import assert_alone

if sys.platform != "linux":
    pytest.skip("needs Linux: JupyterHub", allow_module_level=True)

ROOT = Path(__file__).parent.parent
HERE = str(Path(sys.executable).parent)
PATH = os.pathsep.join([os.environ.get("COURSE_HUB", HERE), HERE, os.environ.get("PATH", "")])
HUB, PROXY = (shutil.which(name, path=PATH) for name in ("jupyterhub", "configurable-http-proxy"))
if not (HUB and PROXY):
    pytest.skip("needs JupyterHub: see docs/instructors.md", allow_module_level=True)

NAME = "ex01_online_softmax"
COURSE = "flashattention"
EXTRA = """
# What this test makes up: users with one password, all of them this system's user.
load_subconfig({config!r})
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = "a password"
c.Authenticator.allow_all = True
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = {home!r}
c.Spawner.args = {root!r}
c.Spawner.start_timeout = 180
c.Spawner.http_timeout = 180
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api_port}"
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Browser:
    """One user: cookies, the form, and the token that pages send along."""

    def __init__(self, base, user):
        self.base, self.user = base, user
        self.cookies = http.cookiejar.CookieJar()
        self.opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(self.cookies)
        )

    def token(self, path):
        found = [c for c in self.cookies if c.name == "_xsrf" and path.startswith(c.path)]
        return max(found, key=lambda c: len(c.path)).value if found else ""

    def open(self, path, form=None):
        """(status, text); a form is posted."""
        data, headers = None, {"Referer": self.base + path}
        if form is not None:
            headers["X-XSRFToken"] = self.token(path)
            data = urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(self.base + path, data, headers)
        try:
            with self.opener.open(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def log_in(self):
        self.open("/hub/login")
        form = {"username": self.user, "password": "a password", "_xsrf": self.token("/hub/")}
        assert self.open("/hub/login", form)[0] == 200

    def start_server(self):
        self.open(f"/hub/spawn/{self.user}")
        until = time.monotonic() + 240
        while time.monotonic() < until:
            self.mine("/lab")  # a page: it asks the hub who this is
            status, text = self.mine("/api/status")
            if status == 200 and '"started"' in text:
                return
            time.sleep(1)
        raise AssertionError(f"no server for {self.user}: {status} {text[:300]}")

    def mine(self, path, form=None):
        return self.open(f"/user/{self.user}{path}", form)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    base = tmp_path_factory.mktemp("hub")
    base.chmod(0o755)
    exchange, folder = base / "exchange", base / "course"
    exchange.mkdir()
    exchange.chmod(0o1777)
    folder.mkdir(mode=0o700)
    for user in ("ida", "ben"):
        (base / "home" / user / ".jupyter").mkdir(parents=True)
    # Both are one system user here, and nbgrader would take its name for the student's.
    own = base / "home" / "ben" / ".jupyter" / "nbgrader_config.py"
    own.write_text('get_config().CourseDirectory.student_id = "ben"')
    port = free_port()
    config = EXTRA.format(
        config=str(ROOT / "docs" / "jupyterhub_config.py"),
        home=str(base / "home" / "{username}"),
        root=["--allow-root"] if os.geteuid() == 0 else [],
        port=port, hub_port=free_port(), api_port=free_port(), proxy=PROXY,
    )  # fmt: skip
    (base / "jupyterhub_config.py").write_text(config)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "IPYTHON"))} | {
        "PATH": PATH, "COURSE_INSTRUCTORS": "ida", "COURSE_EXCHANGE": str(exchange),
        "COURSE_FOLDER": str(folder), "COURSE_ID": COURSE,
    }  # fmt: skip
    with open(base / "hub.log", "w+") as log:
        process = subprocess.Popen(
            [HUB, "-f", str(base / "jupyterhub_config.py")],
            cwd=base, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            users = [Browser(f"http://127.0.0.1:{port}", user) for user in ("ida", "ben")]
            try:
                wait_for(process, users[0])
                for user in users:
                    user.log_in()
                    user.start_server()
            except BaseException:
                log.seek(0)
                print(log.read()[-8000:])
                raise
            yield *users, base, env
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            left = base / "jupyterhub-proxy.pid"  # there if the hub did not end its proxy
            if left.exists():
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(left.read_text().split()[0]), signal.SIGTERM)


def wait_for(process, browser):
    until = time.monotonic() + 180
    while time.monotonic() < until:
        assert process.poll() is None, "the hub ended"
        try:
            if browser.open("/hub/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError("the hub did not answer")


def nbgrader(hub, *arguments):
    """A command of the instructor's, in the instructor's terminal."""
    _, _, base, env = hub
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments],
        cwd=base / "course", capture_output=True, text=True, timeout=300,
        env=env | {
            "JUPYTER_CONFIG_PATH": str(ROOT / "docs"), "JUPYTERHUB_USER": "ida",
            "HOME": str(base / "home" / "ida"),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def assignments(student):
    status, text = student.mine(f"/assignments?course_id={COURSE}")
    assert status == 200, text[:500]
    return {a["assignment_id"]: a["status"] for a in json.loads(text)["value"]}


def test_two_users_from_release_to_feedback(hub):
    ida, ben, base, env = hub
    course = base / "course"

    # The instructor's pages are not the student's.
    assert ida.mine("/formgrader")[0] == 200
    assert ben.mine("/formgrader")[0] in (403, 404)
    assert ben.mine("/lab")[0] == 200

    # The exercise goes out.
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "exercises.py"), "--nbgrader", str(course),
         str(ROOT / "solutions" / f"{NAME}.ipynb")],
        check=True, capture_output=True,
    )  # fmt: skip
    nbgrader(hub, "generate_assignment", NAME)
    nbgrader(hub, "release_assignment", NAME)
    assert assignments(ben) == {NAME: "released"}

    # The student fetches it, does a part of it, and hands it in.
    form = {"course_id": COURSE, "assignment_id": NAME}
    assert ben.mine("/assignments/fetch", form)[0] == 200
    path = base / "home" / "ben" / NAME / f"{NAME}.ipynb"
    nb, solved = nbformat.read(path, 4), nbformat.read(ROOT / "solutions" / path.name, 4)
    released = "\n".join(cell.source for cell in nb.cells)
    assert "# your lines here" in released and "BEGIN SOLUTION" not in released
    right = {c.id: c.source for c in solved.cells if c.cell_type == "code"}
    task = next(c for c in nb.cells if c.source.startswith("def attend("))
    task.source = right[task.id]
    for cell in nb.cells:
        if 'check("ex01-attend"' not in cell.source and "check(" in cell.source:
            cell.source = 'print("[passed]")  # was a check'
    nbformat.write(nb, path)
    assert ben.mine("/assignments/submit", form)[0] == 200

    # It comes back, is graded by the course's own judge, and goes out again.
    nbgrader(hub, "collect", NAME, "--ExchangeCollect.check_owner=False")
    said = nbgrader(hub, "autograde", NAME)
    assert "isolation of the students' code: OFF" not in said
    nbgrader(hub, "generate_feedback", NAME)
    nbgrader(hub, "release_feedback", NAME)
    nbgrader(hub, "export", "--to", str(course / "grades.csv"))
    with open(course / "grades.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["student_id"], float(row["score"])) == ("ben", 1.0), row
    assert float(row["max_score"]) > 1
    page = (course / "feedback" / "ben" / NAME / f"{NAME}.html").read_text()
    assert "[passed] ex01-attend" in page and "[not attempted]" in page
    assert_alone(page)
