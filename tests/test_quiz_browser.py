"""A question answered with the keyboard alone, and cards as they look, in a real JupyterLab.

COURSE_SCREENSHOTS=folder keeps pictures of the form and of the four cards.
"""

import json

import nbformat
import pytest

from attention_lib import checks
from tests.browser import (
    FOCUSED,
    THEMES,
    change_theme,
    chromium,
    jupyterlab,
    picture,
    press_until,
    run_in,
    save,
)

NAME = "notebooks/00_start_here.ipynb"
ASKED = "p00-3"
CARDS = """from attention_lib.checks import check
display(check("ex01-attend", ...))
display(check("q1", "c"))
display(check("ex01-attend", lambda S, V, chunk: (V[0], S[0])))
display(check("ex01-attend", lambda S, V, chunk: 1 / 0))
check("p00-1", 4096)"""
# The colours of each card's texts and of what lies behind them.
COLOURS = """cards => cards.flatMap(card => {
  let page = card;
  while (getComputedStyle(page).backgroundColor === "rgba(0, 0, 0, 0)") page = page.parentElement;
  const behind = getComputedStyle(page).backgroundColor;
  return [card, ...card.querySelectorAll("b, code, i, a, div")].map(part => {
    const own = getComputedStyle(part);
    const solid = own.backgroundColor !== "rgba(0, 0, 0, 0)";
    return [part.tagName, own.color, solid ? own.backgroundColor : behind];
  });
})"""

pytestmark = pytest.mark.browser


def luminance(colour):
    parts = [int(x) / 255 for x in colour.strip("rgba()").split(",")[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.fixture
def opened(tmp_path):
    """Notebook 00 with one more cell, which shows cards, opened in JupyterLab and run."""
    with chromium() as browser, jupyterlab(tmp_path) as lab:
        copy = lab.folder / NAME
        nb = nbformat.read(copy, as_version=4)
        nb.cells.append(nbformat.v4.new_code_cell(CARDS, id="cards"))
        nbformat.write(nb, copy)
        with run_in(lab, browser, copy) as page:
            yield page, copy


def test_a_question_by_keyboard_and_cards_in_both_themes(opened):
    page, copy = opened
    q = checks._QUESTIONS[ASKED]
    wrong = next(x for x in q.options if x != q.right)
    quiz = page.locator(".jp-CodeCell", has_text=f'quiz("{ASKED}")')
    form = quiz.locator(".jupyter-widgets").first

    # With the keyboard alone: up to the cell, run it, Tab to a letter.
    page.keyboard.press("Escape")
    press_until(page, "ArrowUp", lambda: "jp-mod-active" in (quiz.get_attribute("class") or ""))
    page.keyboard.press("Control+Enter")
    form.get_by_role("button").first.wait_for()
    page.wait_for_timeout(500)
    cells = page.locator(".jp-Cell").count()
    reply = quiz.get_by_role("status")
    for letter, key, state in ((wrong, "Enter", "not yet"), (q.right, "Space", "passed")):
        here = page.evaluate(FOCUSED)
        step = "Shift+Tab" if len(here) == 1 and here > letter else "Tab"
        press_until(page, step, lambda x=letter: page.evaluate(FOCUSED) == x)
        page.keyboard.press(key)
        reply.get_by_text(state).wait_for()
        assert " ".join(q.remarks[letter].split()) in " ".join(reply.inner_text().split())
        assert page.evaluate(FOCUSED) == letter, "the focus stays where it was"
    # The keys were the form's, not JupyterLab's: no cell added, cut or left.
    assert page.locator(".jp-Cell").count() == cells
    assert "jp-mod-active" in quiz.get_attribute("class")
    picture(quiz, "quiz")

    # Saved, it is the text: nothing of the form tells the answer.
    save(page, copy)
    saved = nbformat.read(copy, as_version=4)
    (cell,) = [c for c in saved.cells if c.source == f'quiz("{ASKED}")']
    assert cell.outputs[0].data["text/plain"] == str(checks.ask(ASKED))
    assert q.remarks[q.right] not in json.dumps(cell.outputs)

    cards = page.locator(".jp-CodeCell", has_text="1 / 0")
    for theme, name in THEMES.items():
        change_theme(page, name)
        cards.scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        assert cards.get_by_role("status").count() == 5
        measured = cards.get_by_role("status").evaluate_all(COLOURS)
        assert {tag for tag, *_ in measured} >= {"B", "CODE", "DIV", "A"}
        worst = min(measured, key=lambda x: contrast(*x[1:]))
        assert contrast(*worst[1:]) >= 4.5, (theme, worst)
        picture(cards, f"cards-{theme}")

    # Where to read is a link that opens the notebook.
    cards.get_by_role("link").first.click()
    page.locator(".lm-TabBar-tab", has_text="02_softmax_one_piece_at_a_time.ipynb").wait_for()
