"""The tile stepper in a real JupyterLab: mouse, keyboard, both themes, 400% zoom, less motion.

COURSE_SCREENSHOTS=folder keeps pictures. The times from a click to the new picture are
printed (pytest -s): a machine's speed is no question of right and wrong.
"""

import statistics

import nbformat
import pytest

from tests.browser import (
    FOCUSED,
    THEMES,
    change_theme,
    chromium,
    jupyterlab,
    picture,
    press_until,
    run_in,
    zoom_400,
)

NAME = "notebooks/03_tiled_attention.ipynb"
TITLE = "() => document.querySelector('.widget-html svg.attn title').textContent"
# Presses a button of the stepper, returns the milliseconds until its picture is another one.
TIMED = """name => new Promise(done => {
  const now = () => document.querySelector('.widget-html svg.attn title').textContent;
  const button = [...document.querySelectorAll('.widget-button')]
    .find(x => x.textContent.trim() === name);
  const before = now(), start = performance.now();
  const shown = () => requestAnimationFrame(() => done(performance.now() - start));
  const look = () => now() === before ? requestAnimationFrame(look) : shown();
  button.click();
  look();
})"""
INK = "part => getComputedStyle(part).fill"

pytestmark = pytest.mark.browser


@pytest.fixture(params=["no-preference", "reduce"])
def opened(request, tmp_path):
    """Notebook 03 in JupyterLab, run: the page, its cell with the stepper, the motion wanted."""
    motion = request.param
    with chromium() as browser, jupyterlab(tmp_path) as lab:
        copy = lab.folder / NAME
        if motion == "reduce":  # only the stepper's cells are needed a second time
            nb = nbformat.read(copy, as_version=4)
            wanted = ("import math", "N, d, M", "names = {", "from attention_lib.show.stepper")
            code = [c for c in nb.cells if c.cell_type == "code"]
            nb.cells = [c for c in code if c.source.startswith(wanted)]
            nbformat.write(nb, copy)
        with run_in(lab, browser, copy, reduced_motion=motion) as page:
            cell = page.locator(".jp-CodeCell", has_text="from attention_lib.show.stepper import")
            cell.locator("svg.attn").scroll_into_view_if_needed()
            page.wait_for_timeout(500)
            yield page, cell, motion


def until(page, title):
    page.wait_for_function(f"() => ({TITLE})().startsWith({title!r})")


def test_the_stepper_in_jupyterlab(opened):
    page, cell, motion = opened
    play = cell.get_by_role("button", name="Play", exact=True)
    if motion == "reduce":
        assert cell.locator(".stepper-play").count() == 1 and not play.count()
        return
    cells = page.locator(".jp-Cell").count()
    assert cell.get_by_role("img").count() == 1, "the film gives way to the widget"
    until(page, "Before the first of 96 tiles")

    # With the mouse.
    for name, title in (
        ("Next", "Step 1 of 96, tile (0, 0)"),
        ("Next", "Step 2 of 96, tile (1, 0)"),
        ("Back", "Step 1 of 96"),
        ("Last", "Step 96 of 96, tile (15, 5)"),
        ("First", "Before the first"),
    ):
        cell.get_by_role("button", name=name, exact=True).click()
        until(page, title)
    handle = cell.get_by_role("slider")
    box = cell.locator(".noUi-target").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_function(f"() => /^Step (4|5)\\d of/.test(({TITLE})())")

    # With the keyboard alone, from the first button on.
    cell.get_by_role("button", name="First", exact=True).focus()
    page.keyboard.press("Enter")
    until(page, "Before the first")
    press_until(page, "Tab", lambda: page.evaluate(FOCUSED) == "Next")
    page.keyboard.press("Space")
    until(page, "Step 1 of 96")
    press_until(page, "Tab", lambda: handle.evaluate("x => x === document.activeElement"))
    for key, title in (
        ("ArrowRight", "Step 2 of 96"),
        ("ArrowUp", "Step 3 of 96"),
        ("ArrowLeft", "Step 2 of 96"),
        ("End", "Step 96 of 96"),
        ("Home", "Before the first"),
    ):
        page.keyboard.press(key)
        until(page, title)
    assert "jp-mod-active" in cell.get_attribute("class"), "the keys were the slider's"
    assert page.locator(".jp-Cell").count() == cells

    # Another row, typed.
    field = cell.get_by_label("Follow row")
    field.fill("3")
    field.press("Enter")
    cell.get_by_text("Row 3", exact=True).wait_for()

    # Play, then pause.
    cell.get_by_role("button", name="First", exact=True).click()
    until(page, "Before the first")
    play.click()
    until(page, "Step 3 of 96")
    cell.get_by_role("button", name="Pause", exact=True).click()
    play.wait_for()
    page.wait_for_timeout(1000)
    stopped = page.evaluate(TITLE)
    page.wait_for_timeout(1500)
    assert page.evaluate(TITLE) == stopped and not stopped.startswith("Step 96")

    cell.get_by_role("button", name="First", exact=True).click()
    until(page, "Before the first")
    times = sorted(page.evaluate(TIMED, "Next") for _ in range(40))
    print(f"\nfrom a click to the new picture, 40 clicks: median {statistics.median(times):.0f} ms,"
          f" 90% {times[35]:.0f} ms, longest {times[-1]:.0f} ms")  # fmt: skip

    inks = {}
    for theme, name in THEMES.items():
        change_theme(page, name)
        cell.locator("svg.attn").scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        inks[theme] = cell.locator("svg.attn text").first.evaluate(INK)
        picture(cell, f"stepper-{theme}")
    assert inks == {"light": "rgb(22, 32, 42)", "dark": "rgb(232, 237, 242)"}

    # 400%: a window of 1280 pixels has room for 320.
    zoom_400(page)
    cell.locator("svg.attn").scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    picture(page, "stepper-400-percent")
    part = cell.locator("svg.attn")
    assert part.bounding_box()["width"] >= 560, "text is not made smaller as the page is zoomed"
    part.evaluate("x => x.scrollIntoView({inline: 'end', block: 'end'})")
    page.wait_for_timeout(300)
    box = part.bounding_box()
    assert box["x"] + box["width"] <= 320, "its right end can be reached"
    picture(page, "stepper-400-percent-right")
