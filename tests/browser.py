"""What the browser tests share: a JupyterLab, a Chromium, and a page that accepts no error.

COURSE_SCREENSHOTS=folder keeps pictures. When a test fails, one of what the page showed is kept
there, or else in a temporary folder.
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
]
LOCAL = {"127.0.0.1", "localhost", None}  # None: data:, blob:, about:
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    # Chromium's own calls home are not the course's: switch them off, so that none is seen.
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Nothing leaves this machine, whoever asks for it.
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
FOCUSED = "() => document.activeElement.textContent.trim()"
START_TIMEOUT = 120  # seconds until a server or a kernel answers
RUN_TIMEOUT = 180  # seconds for all cells


# ---------------------------------------------------------------- a JupyterLab


class Lab(NamedTuple):
    """A running JupyterLab: its address, its token, and the folder that it shows."""

    url: str
    token: str
    folder: Path

    def ask(self, address, method="GET"):
        """The server's answer, read from JSON; None where it is empty."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(
            f"{self.url}/api/{address}", headers=headers, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as answer:
            return json.loads(answer.read() or "null")

    def kernel(self, copy):
        """What the server says of this notebook's kernel; an empty dict if it has none."""
        name = copy.relative_to(self.folder).as_posix()
        found = [s["kernel"] for s in self.ask("sessions") if s["path"] == name]
        return found[0] if found else {}

    def idle(self, copy):
        """Whether this notebook's kernel waits for work, and someone is connected to it."""
        kernel = self.kernel(copy)
        return kernel.get("execution_state") == "idle" and kernel["connections"] > 0

    def stop_kernels(self):
        for session in self.ask("sessions"):
            self.ask(f"sessions/{session['id']}", "DELETE")


@contextmanager
def jupyterlab(folder):
    """JupyterLab as `make lab` starts it, in an empty home, on a copy of the course's notebooks.

    The copies have no outputs: what is there afterwards comes from the run.
    """
    work, home = folder / "course", folder / "home"
    home.mkdir()
    ignore = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
    for part in ("docs", "exercises", "notebooks"):
        shutil.copytree(ROOT / part, work / part, ignore=ignore)
    for path in work.rglob("*.ipynb"):
        clear_outputs(path)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", secrets.token_hex(16), work)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "JPY_", "IPYTHON"))}
    env |= {"HOME": str(home), "USERPROFILE": str(home), "APPDATA": str(home)}
    env |= {"JUPYTER_PREFER_ENV_PATH": "1", "XDG_DATA_HOME": str(home / "share")}
    env |= {"JUPYTER_CONFIG_PATH": str(ROOT / "tools" / "jupyter" / "plain")}
    env |= {"COURSE_PROGRESS": str(home / "progress.json")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={lab.token}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    log = folder / "jupyterlab.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(command, cwd=work, env=env, stdout=stream, stderr=stream)
    try:
        wait_for_server(server, lab, log)
        yield lab
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(20)


def wait_for_server(server, lab, log):
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end and server.poll() is None:
        try:
            lab.ask("status")
            return
        except OSError:
            time.sleep(0.2)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    pytest.fail(f"JupyterLab did not answer in {START_TIMEOUT} s. Its log ends:\n{tail}")


# ---------------------------------------------------------------- a notebook's file


def clear_outputs(path):
    nb = nbformat.read(path, as_version=4)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(nb, path)


def code_cells(path):
    nb = nbformat.read(path, as_version=4)
    return [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]


def not_executed(path):
    return [cell.id for cell in code_cells(path) if cell.execution_count is None]


def cell_errors(path):
    return [
        f"cell {cell.id} raised {output.ename}: {output.evalue}\n{cell.source}"
        for cell in code_cells(path)
        if "raises-exception" not in cell.metadata.get("tags", [])
        for output in cell.outputs
        if output.output_type == "error"
    ]


# ---------------------------------------------------------------- a Chromium


def find_browser():
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip("needs Chromium or Chrome, which is not installed")


@contextmanager
def chromium():
    """A headless browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (the dev extra)")
    executable = find_browser()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def watched(browser, **options):
    """A fresh page. At its end: no error in its console, and no request to another host."""
    errors, foreign = [], []

    def seen(address):
        if urlsplit(address).hostname not in LOCAL:
            foreign.append(address)

    context = browser.new_context(**{"viewport": {"width": 1280, "height": 1000}} | options)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("request", lambda request: seen(request.url))
    page.on("websocket", lambda socket: seen(socket.url))
    page.on("pageerror", lambda error: errors.append(f"uncaught: {error}"))
    page.on("console", lambda m: m.type == "error" and errors.append(f"console: {m.text}"))
    try:
        yield page
    except BaseException as error:
        folder = os.environ.get("COURSE_SCREENSHOTS") or tempfile.mkdtemp(prefix="course-browser-")
        shot = Path(folder) / f"failed-{secrets.token_hex(4)}.png"
        page.screenshot(path=shot)
        error.add_note(f"what the page showed: {shot}")
        raise
    finally:
        context.close()
    assert not foreign, "requests to other hosts:\n" + "\n".join(sorted(set(foreign)))
    assert not errors, "the browser's console shows errors:\n" + "\n".join(errors)


def picture(part, name, **options):
    """A picture of a page or of a part of it, if someone wants to see it."""
    if folder := os.environ.get("COURSE_SCREENSHOTS"):
        part.screenshot(path=Path(folder) / f"{name}.png", **options)


def press_until(page, key, found, most=60):
    """Press the key until found() is true."""
    for _ in range(most):
        if found():
            return
        page.keyboard.press(key)
        page.wait_for_timeout(50)
    raise AssertionError(f"{most} times {key} did not lead there")


# ---------------------------------------------------------------- a notebook in JupyterLab


@contextmanager
def run_in(lab, browser, copy, **options):
    """A page with this copy of a notebook, all of it run and saved. What `watched` says holds."""
    # A workspace of its own: no tab of another notebook is opened again.
    name = copy.relative_to(lab.folder).as_posix()
    try:
        with watched(browser, **options) as page:
            page.goto(f"{lab.url}/lab/workspaces/{copy.stem}/tree/{name}?token={lab.token}")
            wait_for_kernel(page, lab, copy)
            run_all(page)
            wait_until_done(page, lab, copy)
            yield page
    finally:
        lab.stop_kernels()


def wait_for_kernel(page, lab, copy):
    """Until the notebook is shown and the page is connected to its idle kernel."""
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        if lab.idle(copy):
            page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").first.wait_for()
            return
        page.wait_for_timeout(200)
    raise TimeoutError(f"no kernel was ready in {START_TIMEOUT} s")


def run_all(page):
    """A click on the notebook, then menu Run, Run All Cells, as a learner does."""
    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).click()


def wait_until_done(page, lab, copy):
    """Until the kernel is idle and every code cell, saved, has its number, or one has failed."""
    end = time.monotonic() + RUN_TIMEOUT
    waiting = ["all cells"]
    while time.monotonic() < end:
        page.wait_for_timeout(200)
        if (dialog := page.locator(".jp-Dialog")).count():
            raise AssertionError(f"JupyterLab asks: {' '.join(dialog.first.inner_text().split())}")
        if lab.idle(copy):
            save(page, copy)
            waiting = not_executed(copy)
            if not waiting or cell_errors(copy):
                return
    raise TimeoutError(f"after {RUN_TIMEOUT} s not executed: {', '.join(waiting)}")


def save(page, copy):
    """Save the notebook, and wait until the file is another one."""
    before = copy.stat().st_mtime_ns
    for k in range(300):
        if k % 20 == 0:  # once more: JupyterLab ignores the key while the last save is under way
            page.keyboard.press("Control+s")
        page.wait_for_timeout(100)
        if copy.stat().st_mtime_ns != before and is_json(copy):
            return
    raise TimeoutError(f"{copy.name} was not saved in 30 s")


def is_json(path):
    """False while the file is being written."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def change_theme(page, name):
    """Through the menus, as a learner does: one of the values of THEMES."""
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Theme$")).hover()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{name}$")).click()
    page.locator(f'body[data-jp-theme-name="{name}"]').wait_for(state="attached")


def zoom_400(page):
    """What a window of 1280 by 1024 pixels has room for at 400%: 320 by 256."""
    page.keyboard.press("Control+b")  # the list of files leaves no room
    page.set_viewport_size({"width": 320, "height": 256})
    page.wait_for_timeout(1000)
