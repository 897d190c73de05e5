"""The explorers in a real JupyterLab: names, mouse, keyboard, both themes, 400% zoom, saved.

COURSE_SCREENSHOTS=folder keeps pictures. The times from a key to the new picture are printed
(pytest -s): a machine's speed is no question of right and wrong.
"""

import statistics

import nbformat
import pytest

from attention_lib.show import widgets
from attention_lib.show.explorers import EXPLORERS
from tests.browser import (
    THEMES,
    change_theme,
    chromium,
    jupyterlab,
    picture,
    press_until,
    run_in,
    save,
    zoom_400,
)

NAME = "notebooks/00_start_here.ipynb"
HERE = "part => part === document.activeElement"
INK = "part => getComputedStyle(part).fill"
# Notes the time of each key, and of the first frame after the picture has changed.
CLOCK = """box => {
  box.times = [];
  let pressed = null;
  document.addEventListener('keydown', () => { pressed = performance.now(); }, true);
  new MutationObserver(() => {
    if (pressed === null) return;
    const start = pressed;
    pressed = null;
    requestAnimationFrame(() => box.times.push(performance.now() - start));
  }).observe(box.querySelector('.widget-html-content'), {childList: true});
}"""
# How wide a box and what is in it are, and how far it scrolls.
SCROLL = """box => {
  box.scrollLeft = 1e6;
  const end = box.scrollLeft;
  box.scrollLeft = 0;
  return [box.clientWidth, box.scrollWidth, end];
}"""

pytestmark = pytest.mark.browser


@pytest.fixture
def opened(tmp_path):
    """A notebook with every explorer, run in JupyterLab; no error, no request to elsewhere."""
    with chromium() as browser, jupyterlab(tmp_path) as lab:
        copy = lab.folder / NAME
        nb = nbformat.read(copy, as_version=4)
        sources = ["from attention_lib.show.explorers import explore"]
        sources += [f'explore("{name}")' for name in EXPLORERS]
        nb.cells = [nbformat.v4.new_code_cell(s, id=f"c{k}") for k, s in enumerate(sources)]
        nbformat.write(nb, copy)
        with run_in(lab, browser, copy) as page:
            yield page, copy


def find(cell, control):
    """The control by its role and name, as a screen reader finds it."""
    if isinstance(control.start, bool):
        return cell.get_by_role("checkbox", name=control.label, exact=True)
    role = "combobox" if isinstance(control.start, str) else "slider"
    return cell.get_by_role(role, name=control.label, exact=True)


def shows(cell, module, state):
    """Wait until the picture and the words are those of the state."""
    made = module.draw(**state)
    cell.locator("svg.attn desc", has_text=made.alt).wait_for(state="attached")
    cell.locator(".explorer-words").get_by_text(made.alt, exact=True).wait_for()


def neighbour(control, value, step):
    values = list(control.values)
    return values[min(max(values.index(value) + step, 0), len(values) - 1)]


def by_keyboard(page, cell, module, control, state):
    """Tab to the control, press a key, look; a slider also goes back and to its ends."""
    widget = find(cell, control)
    assert widget.count() == 1, control.label
    press_until(page, "Tab", lambda: widget.evaluate(HERE))
    value = state[control.name]
    if isinstance(value, bool):
        page.keyboard.press("Space")
        state[control.name] = not value
        shows(cell, module, state)
        return
    step = 1 if value != control.values[-1] else -1
    keys = ("ArrowDown", "ArrowUp") if isinstance(value, str) else ("ArrowRight", "ArrowLeft")
    page.keyboard.press(keys[0] if step == 1 else keys[1])
    state[control.name] = neighbour(control, value, step)
    shows(cell, module, state)
    if isinstance(value, str):
        return
    assert widget.get_attribute("aria-valuetext") == widgets.words(state[control.name])
    page.keyboard.press("Home")
    state[control.name] = control.values[0]
    shows(cell, module, state)
    page.keyboard.press("ArrowUp")
    state[control.name] = control.values[1]
    shows(cell, module, state)
    assert widget.get_attribute("aria-valuetext") == widgets.words(control.values[1])


def by_mouse(page, cell, module, state):
    """Drag the first slider to its end; tick a box or choose from a list."""
    sliders = [c for c in module.CONTROLS if not isinstance(c.start, (bool, str))]
    handle = find(cell, sliders[0]).bounding_box()
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.down()
    page.mouse.move(handle["x"] + 600, handle["y"], steps=5)
    page.mouse.up()
    state[sliders[0].name] = sliders[0].values[-1]
    shows(cell, module, state)
    for control in module.CONTROLS:
        if isinstance(control.start, bool):
            find(cell, control).click()
            state[control.name] = not state[control.name]
            shows(cell, module, state)
        elif isinstance(control.start, str):
            state[control.name] = next(v for v in control.values if v != state[control.name])
            find(cell, control).select_option(state[control.name])
            shows(cell, module, state)


def test_the_explorers_in_jupyterlab(opened):
    from axe_playwright_python.sync_playwright import Axe

    page, copy = opened
    cells = page.locator(".jp-Cell").count()
    print()
    for name, module in EXPLORERS.items():
        cell = page.locator(".jp-CodeCell", has_text=f'explore("{name}")')
        cell.locator("svg.attn").scroll_into_view_if_needed()
        cell.locator('.explorer-words [aria-live="polite"]').wait_for(state="attached")
        assert cell.get_by_role("img").count() == 1, "the still gives way to the widget"
        state = widgets.state_of(module.CONTROLS)
        shows(cell, module, state)
        by_mouse(page, cell, module, state)
        cell.locator(".jp-InputArea-prompt").click()
        page.keyboard.press("Escape")
        cell.get_by_role("img").evaluate("part => part.scrollIntoView({block: 'center'})")
        find(cell, module.CONTROLS[0]).focus()
        for control in module.CONTROLS:
            by_keyboard(page, cell, module, control, state)
        assert "jp-mod-active" in cell.get_attribute("class"), "the keys were not JupyterLab's"

        cell.locator(".explorer").evaluate(CLOCK)
        slider = next(c for c in module.CONTROLS if not isinstance(c.start, (bool, str)))
        find(cell, slider).focus()
        steps = len(slider.values) - 1
        for k in range(24):
            page.keyboard.press("ArrowRight" if k // steps % 2 == 0 else "ArrowLeft")
            page.wait_for_timeout(150)
        times = sorted(cell.locator(".explorer").evaluate("box => box.times"))
        print(f"{name:9} key to new picture, {len(times)} times: median "
              f"{statistics.median(times):.0f} ms, longest {times[-1]:.0f} ms")  # fmt: skip
        assert len(times) >= 10
    assert page.locator(".jp-Cell").count() == cells

    for theme, ink in (("dark", "rgb(232, 237, 242)"), ("light", "rgb(22, 32, 42)")):
        change_theme(page, THEMES[theme])
        for name in EXPLORERS:
            cell = page.locator(".jp-CodeCell", has_text=f'explore("{name}")')
            cell.locator("svg.attn").scroll_into_view_if_needed()
            page.wait_for_timeout(300)
            assert cell.locator("svg.attn text.f-ink").first.evaluate(INK) == ink
            picture(cell, f"{name}-{theme}")

    found = Axe().run(page, context=".explorer").response["violations"]
    assert not [(v["id"], v["impact"]) for v in found if v["impact"] in ("serious", "critical")]

    # Saved, it is the still.
    save(page, copy)
    for cell, name in zip(nbformat.read(copy, as_version=4).cells[1:], EXPLORERS, strict=True):
        (output,) = cell.outputs
        assert f'data-explorer="{name}"' in output.data["text/html"]

    # 400%: a window of 1280 pixels has room for 320. The picture scrolls.
    zoom_400(page)
    for name in EXPLORERS:
        cell = page.locator(".jp-CodeCell", has_text=f'explore("{name}")')
        cell.locator("svg.attn").scroll_into_view_if_needed()
        page.wait_for_timeout(300)
        wide, whole, end = cell.locator(".explorer > .widget-html").first.evaluate(SCROLL)
        assert wide <= 320 and end >= whole - wide - 1
        picture(page, f"{name}-400-percent")
