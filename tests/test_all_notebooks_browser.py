"""Every notebook and exercise as a learner meets it: JupyterLab in a browser, Run All, no error.

Here a few of them; all with COURSE_BROWSER=all, as in CI. COURSE_SCREENSHOTS=folder keeps pictures
of those with widgets: light, dark, and at 400% zoom.
"""

import os
import re

import pytest

from tests.browser import (
    ROOT,
    THEMES,
    cell_errors,
    change_theme,
    chromium,
    code_cells,
    jupyterlab,
    picture,
    run_in,
    watched,
    zoom_400,
)

ALL = sorted(p for part in ("notebooks", "exercises") for p in (ROOT / part).glob("*.ipynb"))
# The start, the stepper, an explorer, an exercise.
FEW = ("00_start_here", "03_tiled_attention", "06_what_fits_in_sram", "ex02_algorithm_1")
WIDGET = re.compile(r"^(explore|quiz|stepper)\(", re.MULTILINE)
WIDGETS = ".jp-OutputArea-output .jupyter-widgets.widget-vbox"

pytestmark = pytest.mark.browser


def chosen():
    wanted = os.environ.get("COURSE_BROWSER", "few")
    assert wanted in ("few", "all"), f"COURSE_BROWSER is {wanted!r}; accepted: few, all"
    return [p for p in ALL if wanted == "all" or p.stem in FEW]


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    with jupyterlab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def test_the_few_are_there():
    assert set(FEW) <= {p.stem for p in ALL}


@pytest.mark.parametrize(
    "body, complaint",
    [
        ("<script>console.error('odd')</script>", "console: odd"),
        ("<script>throw Error('odd')</script>", "uncaught: .*odd"),
        ("<img src='http://elsewhere.invalid/a.png'>", "hosts:\nhttp://elsewhere.invalid/a.png"),
        ("<script>new WebSocket('ws://elsewhere.invalid')</script>", "ws://elsewhere.invalid"),
    ],
)
def test_a_page_is_watched(browser, body, complaint):
    with pytest.raises(AssertionError, match=complaint), watched(browser) as page:
        page.set_content(body)
        page.wait_for_timeout(500)


@pytest.mark.parametrize("path", chosen(), ids=lambda path: path.stem)
def test_run_all_in_jupyterlab(browser, lab, path):
    copy = lab.folder / path.relative_to(ROOT)
    with run_in(lab, browser, copy) as page:
        problems = cell_errors(copy)
        assert not problems, "\n".join(problems)
        dialogs = page.locator(".jp-Dialog, .Toastify__toast").all_inner_texts()
        assert not dialogs, f"JupyterLab asks the learner something: {dialogs}"
        menus = page.locator(".lm-MenuBar-itemLabel").all_inner_texts()
        assert "Run" in menus and "Nbgrader" not in menus, f"the grader's is no learner's: {menus}"
        asked = [cell for cell in code_cells(copy) if WIDGET.search(cell.source)]
        assert page.locator(WIDGETS).count() == len(asked), "each widget is there to be used"
        if asked and "COURSE_SCREENSHOTS" in os.environ:
            pictures(page, path.stem)


def pictures(page, name):
    """The whole notebook in both themes; controls and picture of each widget at 400% zoom."""
    scrolled = page.locator(".jp-WindowedPanel-outer")
    height = scrolled.evaluate("x => x.scrollHeight")
    page.set_viewport_size({"width": 1280, "height": min(height + 150, 16_000)})
    for theme in ("dark", "light"):
        change_theme(page, THEMES[theme])
        scrolled.evaluate("x => x.scrollTo(0, 0)")
        page.wait_for_timeout(1000)
        picture(page.locator(".jp-NotebookPanel"), f"{name}-{theme}")
    zoom_400(page)
    parts = page.locator(f"{WIDGETS}, {WIDGETS} svg")
    for k in range(parts.count()):
        parts.nth(k).evaluate("x => x.scrollIntoView({block: 'start'})")
        page.wait_for_timeout(300)
        picture(page, f"{name}-400-percent-{k + 1}")
