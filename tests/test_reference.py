"""The glossary and the cheat sheet: made from the library, and refused when they would differ."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest

from attention_lib import glossary, hardware, memory
from attention_lib.show.course_map import NOTEBOOKS, map_figure
from tests.browser import FLAGS, find_browser
from tools import reference as tool

ROOT = Path(__file__).parent.parent
STEMS = {stem[:2]: stem for stem, *_ in NOTEBOOKS}
ROWS = (*tool.STEPS, *tool.TRAFFIC, *tool.OTHER)
by_name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)


@functools.cache
def text_of(notebook):
    """What a reader finds in it: the cells, and the words that they show."""
    cells = nbformat.read(notebook, as_version=4).cells
    shown = [out.get("data", out) for cell in cells for out in cell.get("outputs", [])]
    kinds = ("text", "text/plain", "text/markdown")
    words = ["".join(out[kind]) for out in shown for kind in kinds if kind in out]
    return "\n".join([*(cell.source for cell in cells), *words])


# ---------------------------------------------------------------- generated


@pytest.mark.parametrize("name", tool.PAGES)
def test_the_committed_page_is_the_one_the_library_gives(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == tool.PAGES[name](), "run `make reference`"
    assert "Made by tools/reference.py" in text.splitlines()[0]
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).is_file(), target


def test_check_and_refusal_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    assert tool.main(["--check"]) == 1
    assert not list((tmp_path / "docs").iterdir())
    assert tool.main([]) == 0 == tool.main(["--check"])
    before = {p: p.read_text("utf-8") for p in (tmp_path / "docs").iterdir()}
    assert len(before) == 2

    change(monkeypatch, "traffic.flash_traffic")
    assert tool.main([]) == 1
    assert "Algorithm 1" in capsys.readouterr().err
    assert before == {p: p.read_text("utf-8") for p in (tmp_path / "docs").iterdir()}


# ---------------------------------------------------------------- refused


def plus_one(x):
    """A result, a little wrong."""
    if isinstance(x, tuple):
        parts = [plus_one(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if isinstance(x, dict):
        return {key: plus_one(value) for key, value in x.items()}
    if isinstance(x, list):
        return [plus_one(part) for part in x]
    return x if isinstance(x, str) else x + 1


def change(monkeypatch, function):
    module, name = function.split(".")
    module = importlib.import_module(f"attention_lib.{module}")
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: plus_one(right(*a, **k)))


@by_name
def test_a_changed_library_is_refused(row, monkeypatch):
    tool.prove(row)
    if row.library.startswith("matmul_flops"):
        right = memory.HBM.matmul

        def one_product_twice(self, A, B):
            self.matmul_flops += 2
            return right(self, A, B)

        monkeypatch.setattr(memory.HBM, "matmul", one_product_twice)
    else:
        change(monkeypatch, re.search(r"\b([a-z]+\.\w+)\(", row.library)[1])
    with pytest.raises(tool.Refused, match=re.escape(row.what)):
        tool.prove(row)


def slips(line):
    """The line with one number one larger, or one sign or side the other way round."""
    spots = [n for n in ast.walk(ast.parse(line)) if isinstance(n, (ast.Constant, ast.BinOp))]
    for k, spot in enumerate(spots):
        tree = ast.parse(line)
        node = [n for n in ast.walk(tree) if isinstance(n, (ast.Constant, ast.BinOp))][k]
        if isinstance(spot, ast.Constant):
            node.value += 1
        elif isinstance(spot.op, ast.Add):
            node.op = ast.Sub()
        elif isinstance(spot.op, ast.Sub):
            node.op = ast.Add()
        elif isinstance(spot.op, ast.Mult):
            node.op = ast.Add()
        elif isinstance(spot.op, ast.Div):
            node.op = ast.Mult()
        else:
            continue
        yield ast.unparse(tree).replace("\n", "; ")


@by_name
def test_a_slip_in_the_printed_line_is_refused(row):
    for line in slips(row.text):
        try:
            tool.prove(row._replace(text=line))
        except (tool.Refused, ValueError, ZeroDivisionError):  # or arrays that do not fit
            continue
        pytest.fail(f"{row.what}: {line} went through as {row.text}")


def test_a_formula_that_is_tried_nowhere_is_refused():
    row = tool.TRAFFIC[0]._replace(when="N > 1000")
    with pytest.raises(tool.Refused, match="only 1 sizes"):
        tool.prove(row)


@pytest.mark.parametrize(
    "function, claims",
    [
        ("traffic.q_outer_traffic", (tool.training, tool.prefill)),
        ("traffic.arithmetic_intensity", (tool.prefill,)),
        ("decode.split_kv_traffic", (tool.long_cache,)),
        ("decode.window_traffic", (tool.endless,)),
        ("sparse.touched", (tool.pattern,)),
        ("hardware.ridge", (tool.long_cache,)),
    ],
)
def test_a_claim_that_stops_being_true_is_refused(function, claims, monkeypatch):
    wrong = {
        "traffic.q_outer_traffic": lambda *a, **k: 10**12,
        "traffic.arithmetic_intensity": lambda *a, **k: 1.0,
        "decode.split_kv_traffic": lambda Nk, d, splits, **k: 10**9 // splits,  # splits save bytes
        "decode.window_traffic": lambda N, d, window, sinks=0, *, Nk: Nk,
        "sparse.touched": lambda mask, Br, Bc: np.eye(8, dtype=bool),
        "hardware.ridge": lambda gpu: 0.5,
    }[function]
    module, name = function.split(".")
    for claim in claims:
        claim()
    monkeypatch.setattr(importlib.import_module(f"attention_lib.{module}"), name, wrong)
    for claim in claims:
        with pytest.raises(tool.Refused):
            claim()


# ---------------------------------------------------------------- what is printed


@pytest.mark.parametrize(
    "line, printed",
    [
        ("2*N*d + Tc*(3*N*d + 4*N)", "$2Nd + T_c(3Nd + 4N)$"),
        ("a - (b + c)", "$a - (b + c)$"),
        ("a - b + c", "$a - b + c$"),
        ("a / (b*c)", "$a / (bc)$"),
        ("a / b * c", "$(a / b)c$"),
        ("(a + b)**2 * N**2", "$(a + b)^2N^2$"),
        ("d * sum(b for b in range(Tc)) * N", r"$(d \sum_{b=0}^{T_c-1} b)N$"),
        ("b*Bc // Br", r"$\lfloor bB_c / B_r \rfloor$"),
        ("rows*(w + sinks)", r"$\text{rows} \cdot (w + \text{sinks})$"),
        ("D = rowsum(dO * O); x = dS.T @ Q / sqrt(d)",
         r"$D = \text{rowsum}(\mathrm{d}O \circ O)$, $x = \mathrm{d}S^T\ Q / \sqrt{d}$"),
    ],
)  # fmt: skip
def test_the_formula_says_what_the_line_says(line, printed):
    assert tool.latex(line) == printed


def test_an_expression_that_cannot_be_printed_is_refused():
    with pytest.raises(tool.Refused, match="no way to print N % 2"):
        tool.latex("N % 2")


def test_the_numbers_that_were_derived_elsewhere():
    """The counts, worked out apart from the library, and the figures of two datasheets."""
    sheet = tool.cheat_sheet()
    for number in (
        *("68,157,440", "17,383,424", "17,305,600", "1,048,576", "119,537,664", "35,393,536"),
        *("69,206,016", "67,796,992", "34,607,104", "2,097,152", "12,289", "49,665"),
        *("3.92x", "3.94x", "1.02x", "2.00x", "65.00x", "33.00x", "density 0.188"),
    ):
        assert number in sheet, number
    rows = [line.split(" | ") for line in sheet.splitlines() if line.startswith("| A100 80GB")]
    assert rows[0][1:4] == ["312", "19.5", "2039"] and rows[0][8] == "153 |"


def test_every_gpu_is_there_and_its_ridge_is_the_quotient_of_its_columns():
    lines = tool.cheat_sheet().split("## GPUs")[1].split("##")[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert len(rows) == len(hardware.GPUS)
    for row in rows:
        tensor, bandwidth, ridge = float(row[1]), float(row[3]), float(row[8])
        assert abs(1000 * tensor / bandwidth - ridge) <= 0.06


@pytest.mark.browser
@pytest.mark.parametrize("paper", ["A4", "Letter"])
def test_the_cheat_sheet_prints_on_one_page(paper, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (the dev extra)")
    executable, file = find_browser(), tmp_path / "sheet.html"
    assert tool.main(["--print", str(file)]) == 0
    assert "$" not in re.sub(r"<code>.*?</code>", "", file.read_text("utf-8")), "a formula is left"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        page = browser.new_page()
        page.goto(file.as_uri())
        page.emulate_media(media="print")
        millimetres = {"A4": 210, "Letter": 216}[paper]
        page.set_viewport_size({"width": round((millimetres - 16) / 25.4 * 96), "height": 900})
        wide = page.evaluate("[document.body.scrollWidth, document.documentElement.clientWidth]")
        pdf = page.pdf(format=paper)
        browser.close()
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1
    assert wide[0] <= wide[1], "something is cut off on the right"


# ---------------------------------------------------------------- the glossary

entries = pytest.mark.parametrize("entry", glossary.TERMS, ids=lambda t: t.term)


def test_alphabetical_and_each_once():
    names = [entry.term.casefold() for entry in glossary.TERMS]
    assert names == sorted(set(names))


@entries
def test_one_sentence_without_the_word_itself(entry):
    assert re.fullmatch(r"[^.]+(\.\w[^.]*)*\.", entry.meaning), "one sentence"
    assert entry.meaning[0].isupper() or entry.meaning[0] in "0123456789" or " + " in entry.meaning
    for word in re.fullmatch(r"([^(]+?)(?: \((\w+)\))?", entry.term).groups():
        assert word is None or not re.search(
            rf"\b{re.escape(word)}s?\b", entry.meaning, 0 if len(word) == 1 else re.I
        )


@entries
def test_its_notebook_speaks_of_it(entry):
    text = text_of(ROOT / "notebooks" / f"{STEMS[entry.notebook]}.ipynb")
    words = [re.sub(r" \(.*", "", entry.term), *filter(None, entry.symbol.split(", "))]
    words += [entry.library.split(".")[-1]] if entry.library else []
    assert any(re.search(rf"\b{re.escape(word)}", text, re.I) for word in words), words


@entries
def test_its_object_in_the_library_exists(entry):
    if entry.library:
        pkgutil.resolve_name(f"attention_lib.{entry.library}")  # a module's, too


def test_the_papers_symbols_are_in_it():
    symbols = set(glossary.symbols())
    assert symbols >= set("Q K V S P O m l L D M N d Br Bc Tr Tc Nq Nk dQ dK dV dO".split())


def test_the_symbols_that_the_library_takes_are_in_it():
    """Every parameter of a public function that is written as a symbol."""
    found = set()
    for name in ("reference", "tiled", "backward", "sparse", "decode", "traffic", "hardware"):
        module = importlib.import_module(f"attention_lib.{name}")
        for member in vars(module).values():
            if inspect.isfunction(member) and member.__module__ == module.__name__:
                found |= set(inspect.signature(member).parameters)
    symbol = re.compile(r"d?[A-Z][a-z]?|[dlm]|[A-Za-z]_[A-Z]+|c_s")
    named = {name for name in found if symbol.fullmatch(name)}
    assert {"Q", "dO", "Br", "Nk", "R_KV"} <= named
    # B: any block length, Br or Bc. Qi: the rows of Q in a block.
    assert named - set(glossary.symbols()) <= {"B", "Qi"}


def test_the_symbols_in_the_notebooks_are_in_it():
    """Symbols that stand alone between dollars or back-ticks, without the index of a block."""
    missing = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                prose = re.sub(r"```.*?```|\$\$.*?\$\$", "", cell.source, flags=re.DOTALL)
                for a, b in re.findall(r"`([^`\n]+)`|\$([^$\n]+)\$", prose):
                    name = re.sub(r"(?<=\w)_\{?(new|old|i|j)\}?$|(?<=[A-Z])[ij]$", "", a or b)
                    name = re.sub(r"^([BTN])_\{?([rcqk])\}?$", r"\1\2", name)
                    if re.fullmatch(r"d?[A-Z][rcqk]?|[a-z]|[Rc]_\w+", name):
                        missing.setdefault(name, set()).add(path.stem)
    for name in (*glossary.symbols(), *"ijcxy"):  # any row, column, number, array
        missing.pop(name, None)
    assert not missing


# ---------------------------------------------------------------- the map


def test_the_map_names_the_notebooks_that_there_are():
    stems = [stem for stem, *_ in NOTEBOOKS]
    assert stems == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    readme, start = ROOT / "README.md", text_of(ROOT / "notebooks" / f"{stems[0]}.ipynb")
    for stem, title, _ in NOTEBOOKS:
        heading = text_of(ROOT / "notebooks" / f"{stem}.ipynb").splitlines()[0]
        assert heading == f"# {stem[:2]} · {title}"
        assert f"| {stem[:2]} | {title} |" in readme.read_text(encoding="utf-8")
        assert stem == stems[0] or f"[{stem[:2]} · {title}]({stem}.ipynb)" in start


def test_the_map_draws_a_box_for_each_and_no_words_outside_a_box():
    fig = map_figure()
    ax = fig.axes[0]
    fig.canvas.draw()
    boxes = [p for p in ax.patches if type(p).__name__ == "FancyBboxPatch"]
    assert len(boxes) == len(NOTEBOOKS)
    corners = [box.get_window_extent() for box in boxes]
    for text in ax.texts:
        where = text.get_window_extent()
        assert any(c.x0 <= where.x0 and where.x1 <= c.x1 for c in corners
                   if c.y0 <= where.y0 and where.y1 <= c.y1), text.get_text()  # fmt: skip
