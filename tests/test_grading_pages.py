"""A feedback page needs no network, runs nothing, and shows formulas as formulas."""

import re
import time
from pathlib import Path

import nbformat
import pytest
from nbconvert.exporters import HTMLExporter

from tools import exercises
from tools.grading import pages

SOLUTIONS = sorted((Path(__file__).parent.parent / "solutions").glob("*.ipynb"))


def html(markdown):
    return pages.exporter().markdown2html({}, markdown)


def test_a_formula_becomes_mathml():
    shown = html(r"The sum $\sum_j e^{s_j} < 2$ and" + "\n\n$$\\frac{1}{l_i}$$")
    assert 'display="inline"' in shown and 'display="block"' in shown and "$" not in shown
    assert "<mfrac>" in shown and "<msup>" in shown and "<mo>&lt;</mo>" in shown
    assert "math:" not in shown and "ns0:" not in shown


def test_a_dollar_in_code_and_one_alone_are_left_as_they_are():
    assert html("`echo $HOME $PATH` costs 5$ here").count("$") == 3
    assert html("```\na $b$ c\n```").count("$") == 2


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda p: p.stem)
def test_no_formula_of_the_course_is_left_as_tex(path):
    found, written = 0, 0
    for cell in exercises.read(path).cells:
        if cell.cell_type == "markdown":
            shown = html(cell.source)
            found += shown.count("<math ")
            written += re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.DOTALL).count("$")
            text = re.sub(r"<(code|pre)\b.*?</\1>", "", shown, flags=re.DOTALL)
            assert "$" not in text and "\\frac" not in shown, cell.source
    # An exercise about a kernel may have none; ex09 has some, or nothing was read.
    assert (found > 0) == (written > 1) and (found or path.stem != "ex09_backward")


HOSTILE = {
    "a script in a text": r"$\text{<script>alert(1)</script>}$",
    "an image in a text": r"$\text{<img src='https://evil.example/x' onerror='alert(1)'/>}$",
    "another namespace": r"$\text{<a xmlns='http://www.w3.org/1999/xhtml' href='x'>y</a>}$",
    "a link": r"$\href{javascript:alert(1)}{x}$",
    "a style": r"$\style{background:url(https://evil.example/x)}{x}$",
    "an attribute": "$\\color{red\"onclick='alert(1)'}{x}$",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_formula_runs_and_loads_nothing(what):
    shown = html(HOSTILE[what])
    tags = set(re.findall(r"<([a-z]+)", shown))
    assert tags <= pages.MATH_TAGS | {"p", "code"}, shown
    for word in ("href=", "style=", "onclick=", "onerror=", "src="):
        inside = [tag for tag in re.findall(r"<[^>]*>", shown) if word in tag]
        assert not inside, inside


def test_what_is_no_formula_stays_readable():
    assert html(r"$\frac$") == "<p><code>\\frac</code></p>\n"
    assert "<code>" in html("$" + "x" * 2000 + "$")


@pytest.mark.parametrize("text", [r"\begin{a}", "<b>", "$$a ", "[", "> ", "<ul><li>", "$x$"])
def test_a_long_hostile_text_takes_no_time(text):
    """A megabyte is all that is read of a notebook; without a bound some of these take minutes."""
    started = time.monotonic()
    assert html(text * (2**20 // len(text))).startswith("<pre>")
    html(text * (pages.MOST_TEXT // len(text)))
    assert time.monotonic() - started < 10


def test_a_page_is_alone():
    """In any template of nbconvert's: this one loads two scripts from other hosts by itself."""
    text = "$x$ <script src='https://evil.example/x'></script>"
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell("'<script>'")]
    nb = nbformat.v4.new_notebook(cells=cells)
    assert "<script src=" in HTMLExporter().from_notebook_node(nb)[0]
    shown = pages.FeedbackExporter().from_notebook_node(nb)[0]
    assert "<math " in shown and "&lt;script&gt;" in shown
    assert_alone(shown)


def assert_alone(shown):
    """No script, nothing loaded, and a rule that says so to the browser before all else."""
    assert not re.findall(r"<(?:script|link|iframe|object|embed|base)\b[^>]*>", shown)
    assert not re.findall(r"(?:\bsrc=|url\(|@import)[\"' ]*(?:https?:)?//[^\"' )]*", shown)
    head = shown.split("<style")[0]
    assert "Content-Security-Policy" in head and "default-src 'none'" in head
