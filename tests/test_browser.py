"""A learner's way in: JupyterLab in a real browser, Run All, no error, no request to another host.

COURSE_BROWSER_NOTEBOOK=path runs it on another notebook than 03.
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = Path(
    os.environ.get("COURSE_BROWSER_NOTEBOOK", ROOT / "notebooks" / "03_tiled_attention.ipynb")
)
BROWSERS = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
]
# Chromium's own calls home are not the course's: switch them off, so that none is seen.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
LOCAL = {"127.0.0.1", "localhost", None}  # None: data:, blob:, about:
START_TIMEOUT = 120  # seconds until the server answers
RUN_TIMEOUT = 180  # seconds for all cells

pytestmark = pytest.mark.browser


@pytest.fixture
def lab(tmp_path):
    """JupyterLab as `make lab` starts it, in an empty home, on a copy of the notebooks."""
    work, home = tmp_path / "course", tmp_path / "home"
    home.mkdir()
    ignore = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
    shutil.copytree(NOTEBOOK.parent, work / "notebooks", ignore=ignore)
    copy = work / "notebooks" / NOTEBOOK.name
    clear_outputs(copy)  # what is there afterwards comes from this run

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "JPY_", "IPYTHON"))}
    env |= {"HOME": str(home), "USERPROFILE": str(home), "APPDATA": str(home)}
    env |= {"JUPYTER_PREFER_ENV_PATH": "1", "XDG_DATA_HOME": str(home / "share")}
    env |= {"JUPYTER_CONFIG_PATH": str(ROOT / "tools" / "jupyter" / "plain")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    log = tmp_path / "jupyterlab.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(command, cwd=work, env=env, stdout=stream, stderr=stream)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_server(server, url, token, log)
        yield url, token, copy
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(20)


def clear_outputs(path):
    nb = nbformat.read(path, as_version=4)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(nb, path)


def ask(url, token):
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return json.load(answer)


def wait_for_server(server, url, token, log):
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            ask(f"{url}/api/status", token)
            return
        except OSError:
            time.sleep(0.2)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    pytest.fail(f"JupyterLab did not answer in {START_TIMEOUT} s. Its log ends:\n{tail}")


def find_browser():
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip("needs Chromium or Chrome, which is not installed")


def test_run_all_in_jupyterlab(request, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (the dev extra)")
    executable = find_browser()
    assert NOTEBOOK.is_file(), f"no such notebook: {NOTEBOOK}"
    url, token, copy = request.getfixturevalue("lab")
    foreign, errors = [], []

    def seen(address):
        host = urlsplit(address).hostname
        if host not in LOCAL and address not in foreign:
            foreign.append(address)
        return host in LOCAL

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.route("**/*", lambda r: r.continue_() if seen(r.request.url) else r.abort())
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("websocket", lambda socket: seen(socket.url))
        page.on("pageerror", lambda error: errors.append(f"uncaught: {error}"))
        page.on("console", lambda m: m.type == "error" and errors.append(f"console: {m.text}"))
        try:
            page.goto(f"{url}/lab/tree/notebooks/{copy.name}?token={token}")
            wait_for_kernel(page, url, token)
            run_all(page)
            wait_until_done(page, url, token, copy)
        except Exception as error:
            picture = tmp_path / "jupyterlab.png"
            page.screenshot(path=picture)
            pytest.fail(f"{str(error)[:600]}\nscreenshot: {picture}")
        if picture := os.environ.get("COURSE_BROWSER_SCREENSHOT"):
            page.screenshot(path=picture)
        menus = page.locator(".lm-MenuBar-itemLabel").all_inner_texts()
        dialogs = page.locator(".jp-Dialog, .Toastify__toast").all_inner_texts()
        context.close()
        browser.close()

    assert not foreign, "requests to other hosts:\n" + "\n".join(foreign)
    assert not errors, "the browser's console shows errors:\n" + "\n".join(errors)
    assert not dialogs, f"JupyterLab asks the learner something: {dialogs}"
    assert "Run" in menus and "Nbgrader" not in menus, f"the grader's menu is no learner's: {menus}"
    problems = cell_errors(copy)
    assert not problems, "\n".join(problems)


def wait_for_kernel(page, url, token):
    """Until the notebook is shown and the page is connected to its idle kernel."""
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        page.wait_for_timeout(500)
        kernels = ask(f"{url}/api/kernels", token)
        if any(k["execution_state"] == "idle" and k["connections"] > 0 for k in kernels):
            page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
            return
    raise TimeoutError(f"no kernel was ready in {START_TIMEOUT} s")


def run_all(page):
    """A click on the notebook, then menu Run, Run All Cells, as a learner does."""
    page.locator(".lm-TabBar-tab", has_text=NOTEBOOK.name).first.click()
    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).click()


def wait_until_done(page, url, token, copy):
    """Until the kernel is idle and every code cell, saved, has its number."""
    end = time.monotonic() + RUN_TIMEOUT
    waiting = ["all cells"]
    while time.monotonic() < end:
        page.wait_for_timeout(500)
        if (dialog := page.locator(".jp-Dialog")).count():
            raise AssertionError(f"JupyterLab asks: {' '.join(dialog.first.inner_text().split())}")
        if all(k["execution_state"] == "idle" for k in ask(f"{url}/api/kernels", token)):
            page.keyboard.press("Control+s")
            page.wait_for_timeout(1000)
            waiting = not_executed(copy)
            if not waiting or cell_errors(copy):
                return
    raise TimeoutError(f"after {RUN_TIMEOUT} s not executed: {', '.join(waiting)}")


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
