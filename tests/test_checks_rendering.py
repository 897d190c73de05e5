"""Cards, forms and the questions behind them: for every eye and every keyboard, no answer in sight.

The form in a real browser is tested in test_quiz_browser.py.
"""

import ast
import dataclasses
import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import ipywidgets
import nbformat
import pytest

from attention_lib import checks
from attention_lib.checks import form
from attention_lib.checks.kinds import Choice, Number, Program
from attention_lib.checks.parsons import Parsons
from attention_lib.checks.result import LOOKS, Result, _file

ROOT = Path(__file__).parent.parent
FOLDERS = ("notebooks", "exercises", "solutions")
FILES = {
    f"{folder}/{path.stem}": path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.ipynb"))
}
QUESTIONS = checks._QUESTIONS
CHOICES = [q for q in QUESTIONS.values() if isinstance(q, Choice)]
NUMBERS = [q for q in QUESTIONS.values() if isinstance(q, Number)]
NOTEBOOK_CHOICES = [q for q in CHOICES if re.fullmatch(r"q\d+|p\d\d-\d+", q.id)]

STATES = ("not attempted", "passed", "not yet", "raised")
RESULTS = [
    Result("not attempted", "ex01-attend: write the function, then run again."),
    Result("passed", "ex01-attend: yes. 12 inputs, all right."),
    Result(
        "not yet",
        "ex01-attend: an old O stays at the old scale.\nOn: 3 rows, 12 keys, chunks of 4\n"
        "O[0, 1]: expected 1.5, got 2.25.\nRead: notebook 02, 'Carry two numbers: m and l'",
        "O-not-rescaled",
    ),
    Result("raised", "ex01-attend: your code raised NameError: name 'x' is not defined"),
    Result("not attempted", "the gap is still open."),  # of a notebook's own small task
]


class Card(HTMLParser):
    """The elements, the text in reading order, and the text that a screen reader does not skip."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.open, self.text, self.spoken = [], [], "", ""
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.open.append((tag, dict(attrs).get("aria-hidden") == "true"))
        self.spoken += "\n" if tag == "div" else ""

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        if not any(hidden for _, hidden in self.open):
            self.spoken += data


def read(path):
    return nbformat.read(path, as_version=4)


def code(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code"]


# ---- the card


def words(text, misconception=None):
    """The words of a card, from the text of the same result."""
    state, id, said = re.fullmatch(r"\[(.+?)\] (?:(\S+): )?(.+)", text, re.DOTALL).groups()
    mistake = f"· mistake: {misconception}" if misconception else ""
    return f"{state} {f'· {id}' if id else ''} {mistake} {said}".split()


@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_a_card_says_what_the_text_says(result):
    card = Card(result._repr_html_())
    assert card.spoken.split() == words(repr(result), result.misconception)


@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_a_screen_reader_begins_with_the_state(result):
    card = Card(result._repr_html_())
    assert card.elements[0][1]["role"] == "status"
    assert card.spoken.strip().startswith(result.status)


def test_no_state_hangs_on_its_colour():
    results = {r.status: r for r in RESULTS}
    assert tuple(results) == STATES == tuple(LOOKS)
    cards = [Card(r._repr_html_()) for r in results.values()]
    symbols = [c.text.replace(c.spoken.strip(), "").strip()[0] for c in cards]
    lines = [re.search(r"border-left:\S+ (\w+)", c.elements[0][1]["style"])[1] for c in cards]
    assert len(set(symbols)) == len(set(lines)) == len(STATES)


# Pages on which a card may stand: JupyterLab light and dark, a printed page, Sphinx's dark themes.
PAGES = ["#ffffff", "#111111", "#212121", "#131416", "#14181e"]


def luminance(colour):
    """Relative luminance of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_measure_of_contrast():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(
        4.48, abs=0.005
    )  # WCAG's known near miss


@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_it_can_be_seen_in_light_and_dark(result):
    """The text has the page's own colour; the line at its side is a shape: 3:1 (WCAG 1.4.11)."""
    html = result._repr_html_()
    assert not re.search(r"[;\"](color|background|opacity|font-size)", html)
    (colour,) = re.findall(r"#[0-9a-f]{6}\b", html)
    assert min(contrast(colour, page) for page in PAGES) >= 3


@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_a_card_is_small_and_needs_nothing(result):
    html = result._repr_html_()
    text = len(result.message) + len(result.misconception or "")
    assert len(html.encode()) - text < 600
    tags = {tag for tag, _ in Card(html).elements}
    assert tags <= {"div", "b", "span", "code", "i", "a"}
    assert not re.search(r"<script|<style|\bon\w+=|url\(|https?:|src=", html)


def test_what_a_learner_wrote_stays_text():
    bad = "<img src=x onerror=alert(1)></div>&\"'"
    html = checks.check("q1", bad)._repr_html_()
    card = Card(html)
    assert "<img" not in html and "<img src=x" in card.spoken
    for place in ("status", "message", "misconception"):
        if place != "status":
            result = dataclasses.replace(RESULTS[2], **{place: f"x: {bad}"})
            html = result._repr_html_()
            assert bad in Card(html).spoken and escape(bad) in html

    def attend(S, V, chunk):
        raise ValueError("<b>no</b>\n<script>")

    html = checks.check("ex01-attend", attend)._repr_html_()
    assert "<script" not in html and "raised" in html


def places():
    """Every place to read that a message may name."""
    found = set()
    for q in QUESTIONS.values():
        if isinstance(q, Parsons):
            found |= {line.read for line in q.lines}
        if isinstance(q, (Program, Parsons)):
            program = q.program if isinstance(q, Parsons) else q
            found |= {program.read} | {m.read for m in program.mistakes}
    return sorted(found - {""})


@pytest.mark.parametrize("place", places())
def test_where_to_read_is_a_link_that_leads_there(place):
    message = f"x: wrong.\nRead: {place}"
    card = Card(Result("not yet", message)._repr_html_())
    ((_, attributes),) = [e for e in card.elements if e[0] == "a"]
    link = urlsplit(attributes["href"])
    assert not link.scheme and not link.netloc
    for folder in FOLDERS:
        target = (ROOT / folder / unquote(link.path)).resolve()
        assert target.is_file() and target.parent == ROOT / "notebooks"
    text = "\n".join(c.source for c in read(target).cells if c.cell_type == "markdown")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert unquote(link.fragment) in [h.replace(" ", "-") for h in headings]
    assert card.spoken.endswith(f"Read: {place}")


def test_a_place_without_its_notebook_is_text():
    assert _file("99") is None
    html = Result("not yet", "x: wrong.\nRead: notebook 99, 'No such'")._repr_html_()
    assert "<a" not in html and "No such" in html


def test_a_wrong_letter_is_not_named_twice():
    html = checks.check("q1", "a")._repr_html_()
    assert "mistake:" not in html and "not a." in html
    assert "mistake: <i>N-times</i>" in checks.check("p00-1", 4096)._repr_html_()


# ---- the form


def widgets_in(box):
    yield box
    for child in getattr(box, "children", ()):
        yield from widgets_in(child)


def buttons(box):
    return {w.description: w for w in widgets_in(box) if isinstance(w, ipywidgets.Button)}


def reply(box):
    return box.children[-1].value


def field(box):
    (found,) = [w for w in widgets_in(box) if isinstance(w, ipywidgets.Text)]
    return found


@pytest.mark.parametrize("q", CHOICES, ids=lambda q: q.id)
def test_each_letter_is_a_button_that_answers(q):
    box = form.form(q, checks.check)
    assert list(buttons(box)) == list(q.options) and reply(box) == ""
    for letter, button in buttons(box).items():
        assert button.tooltip == q.options[letter]  # what a screen reader adds to the letter
        button.click()
        assert reply(box) == checks.check(q.id, letter)._repr_html_()


def test_a_number_is_typed_and_sent_by_button_or_enter():
    q = QUESTIONS["p00-1"]  # 64
    box = form.form(q, checks.check)
    assert q.unit in field(box).description
    for text, state in [("", "not attempted"), ("64", "passed"), ("4,096", "not yet")]:
        field(box).value = text
        buttons(box)["Answer"].click()
        assert f"</span> {state}</b>" in reply(box), text
    field(box).value = "many"
    field(box)._handle_custom_msg({"event": "submit"}, [])  # what the browser sends for Enter
    assert "the answer is a number" in reply(box) and "many" in reply(box)


@pytest.mark.parametrize(
    "text, value",
    [("12,289", 12289), (" 1_000 ", 1000), ("1.5e3", 1500), ("-3,000.5", -3000.5), ("", None),
     ("1,5", "1,5"), ("12,28", "12,28"), ("N/d", "N/d")],
)  # fmt: skip
def test_what_was_typed(text, value):
    assert form.number(text) == value


def test_what_the_browser_gets_does_not_tell_which_is_right():
    """The same widgets, whichever letter is right; and of a number nothing but its unit."""
    for q in CHOICES:
        states = []
        for right in q.options:
            other = dataclasses.replace(q, right=right)
            box = form.form(other, lambda id, answer: None)
            states.append([public(w) for w in widgets_in(box)])
        assert all(s == states[0] for s in states)
        for remark in q.remarks.values():
            assert remark not in json.dumps(states)
    for q in NUMBERS:
        state = json.dumps([public(w) for w in widgets_in(form.form(q, checks.check))])
        assert q.why not in state and q.hint not in state
        assert not any(remark in state for _, remark in q.slips.values())


def public(widget):
    """What is sent to the browser, without the names by which widgets refer to each other."""
    return {k: v for k, v in widget.get_state().items() if "IPY_MODEL" not in str(v)}


def test_before_an_answer_no_reply_depends_on_the_right_one(monkeypatch):
    for q in CHOICES:
        seen = set()
        for right in q.options:
            monkeypatch.setitem(QUESTIONS, q.id, dataclasses.replace(q, right=right))
            result = checks.check(q.id, ...)
            seen.add((repr(result), result._repr_html_(), checks.ask(q.id)))
        assert len(seen) == 1
        monkeypatch.undo()


def test_quiz_refuses_what_it_cannot_ask():
    with pytest.raises(ValueError, match="exercise_ids is empty"):
        checks.quiz()
    with pytest.raises(ValueError, match="'q999'; accepted: "):
        checks.quiz("q1", "q999")
    with pytest.raises(ValueError, match="ex01-attend is answered with your function; use check"):
        checks.quiz("ex01-attend")


def test_without_a_notebook_quiz_is_the_text(capsys):
    assert checks.quiz("q1", "p00-1") is None
    assert capsys.readouterr().out == f"{checks.ask('q1')}\n{checks.ask('p00-1')}\n"


def test_the_graders_stand_in_has_the_same_functions():
    """A student who tried `quiz` in an exercise must not lose `check` while it is graded."""
    source = (ROOT / "tools" / "grading" / "no_checks.py").read_text(encoding="utf-8")
    names = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert names >= {"ask", "check", "quiz", "exercises"}


# ---- what is committed


@pytest.mark.parametrize("name", FILES)
def test_committed_cards_are_the_texts(name):
    """A check's committed output has both forms, and neither is older than the other."""
    for cell in code(read(FILES[name])):
        for output in cell.outputs:
            data = output.get("data", {})
            text = data.get("text/plain", "")
            found = output.output_type != "stream" and re.match(r"\[([\w ]+)\] ", text)
            if found and found[1] in STATES:
                assert Card(data["text/html"]).spoken.split() == words(text), cell.source
            else:
                assert "role=" not in data.get("text/html", ""), cell.source


@pytest.mark.parametrize("name", [n for n in FILES if not n.startswith("solutions")])
def test_answers_are_not_in_clear(name):
    """Neither in a cell nor in an output, metadata or widget state: no remark, hint or letter."""
    nb = read(FILES[name])
    assert set(nb.metadata) <= {"kernelspec", "language_info"}  # no widget state
    text = " ".join(json.dumps(nb, ensure_ascii=False).replace(r"\n", " ").split())
    asked = set(re.findall(r'(?:ask|check|quiz)\(\\"([^"\\]+)\\"', text)) & set(QUESTIONS)
    assert asked or name.endswith("ex10_interview")
    for q in (QUESTIONS[id] for id in asked):
        secrets = []
        if isinstance(q, Choice):
            secrets = q.remarks.values()
        elif isinstance(q, Number):
            secrets = [q.why, q.hint, *(remark for _, remark in q.slips.values())]
        elif isinstance(q, Program):
            secrets = [m.says for m in q.mistakes]
        for secret in secrets:
            assert secret not in text and escape(secret) not in text, secret
    for cell in code(nb):
        assert not re.search(r'check\("[^"]+", ?["\d]', cell.source), cell.source
        assert "application/vnd.jupyter.widget-view+json" not in json.dumps(cell.outputs)


EXERCISES = [n for n in FILES if n.startswith("exercises")]


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_as_shipped_is_not_attempted_and_raises_nothing(name):
    """As committed. nbval runs the same cells and compares; a stripped output fails here."""
    calls = 0
    for cell in code(read(FILES[name])):
        assert cell.execution_count is not None, cell.source
        assert not [
            o for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"
        ]
        ids = re.findall(r'^check\("([^"]+)", (?:\w+|\.\.\.)\)$', cell.source, re.MULTILINE)
        if not ids:
            assert not re.search(r"^check\(", cell.source, re.MULTILINE), cell.source
            continue
        said = [o.data["text/plain"] for o in cell.outputs if "data" in o]
        assert [re.match(r"\[not attempted\] (\S+): ", x)[1] for x in said] == ids[-1:]
        calls += len(ids)
    solution = FILES[name.replace("exercises", "solutions")]
    own = re.findall(r'^check\("', "\n".join(c.source for c in code(read(solution))), re.MULTILINE)
    assert calls == len(own)
    assert calls or name.endswith("ex10_interview")


def test_every_exercise_of_the_registry_is_in_one():
    text = "\n".join(c.source for n in EXERCISES for c in code(read(FILES[n])))
    there = set(re.findall(r'^check\("([^"]+)"', text, re.MULTILINE))
    assert there == {id for id in QUESTIONS if id.startswith("ex")}


# ---- the questions


def test_there_are_the_modules_five_and_more_than_fifteen_others():
    quiz = {q.id for q in CHOICES if re.fullmatch(r"q\d+", q.id)}
    five = {f"q{n}" for n in range(1, 6)}
    assert five <= quiz and len(quiz - five) >= 15
    asked = {n: set(re.findall(r'ask\("(q\d+)"\)', FILES[n].read_text().replace("\\", "")))
             for n in FILES if n.startswith("notebooks")}  # fmt: skip
    assert set().union(*asked.values()) >= five
    assert sum(bool(ids) for ids in asked.values()) >= 8  # spread over the notebooks


@pytest.mark.parametrize(
    "id, right",
    [
        ("q1", "S and P, in HBM"),  # the module's quiz, as answered in the course's worked answers
        ("q2", "own sum"),
        ("q3", r"m and l; l and O .* e\^\(m_old - m_new\)"),
        ("q4", "result .* matmul FLOPs"),
        ("q5", "O, and for each row m and l"),
    ],
)
def test_the_modules_answers(id, right):
    q = QUESTIONS[id]
    assert re.search(right, q.options[q.right])


@pytest.mark.parametrize("q", CHOICES, ids=lambda q: q.id)
def test_every_option_has_a_remark_of_its_own(q):
    remarks = [" ".join(r.split()) for r in q.remarks.values()]
    assert all(len(r) > 20 for r in remarks) and len(set(remarks)) == len(q.options)
    assert len(set(q.options.values())) == len(q.options)


@pytest.mark.parametrize("which", [CHOICES, NOTEBOOK_CHOICES], ids=["all", "notebooks"])
def test_a_guess_by_place_or_length_does_not_pay(which):
    """No letter is right more often than a guess among three, nor is the longest option."""
    letters = [q.right for q in which]
    assert set(letters) == set("abcd")
    assert max(map(letters.count, letters)) <= 0.4 * len(which)
    longest = [q for q in which if q.right == max(q.options, key=lambda x: len(q.options[x]))]
    shortest = [q for q in which if q.right == min(q.options, key=lambda x: len(q.options[x]))]
    for found in (longest, shortest):
        assert len(found) <= 0.4 * len(which), [q.id for q in found]


def test_the_interview_has_models_and_what_weak_answers_sound_like():
    nb = read(FILES["solutions/ex10_interview"])
    parts = {}
    for cell in nb.cells:
        if found := re.match(r"## Question (\d+) · ", cell.source):
            parts[int(found[1])] = []
        if parts and not cell.source.startswith("## Afterwards"):
            parts[max(parts)].append(cell)
    assert list(parts) == list(range(1, len(parts) + 1)) and len(parts) >= 8
    student = {c.id for c in read(FILES["exercises/ex10_interview"]).cells}
    for number, cells in parts.items():
        text = {c.source.splitlines()[0]: c for c in cells if c.cell_type == "markdown"}
        model = text[f"### Model answer {number}"]
        weak = text["### What a weak answer sounds like"]
        assert len(model.source.split()) >= 60
        # Each weak answer in quotes, and after it, in italics, what it lacks.
        flat = " ".join(weak.source.split())
        assert len(re.findall(r'- "[^"]+" \*[^*]+\*', flat)) >= 2, number
        assert not {model.id, weak.id} & student
        assert cells[0].id in student
