"""Rules that every notebook keeps. nbval runs them and compares; this reads them.

nbval passes a notebook whose outputs were stripped, so "executed" is a rule here.
"""

import importlib.util
import json
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TITLES = [
    "00_start_here",
    "01_where_the_time_goes",
    "02_softmax_one_piece_at_a_time",
    "03_tiled_attention",
    "04_counting_hbm_traffic",
    "05_memory_and_recomputation",
    "06_what_fits_in_sram",
    "07_the_framework_call",
    "08_backward",
    "09_loop_order",
    "10_block_sparse",
    "11_one_number_three_answers",
    "12_decode_and_beyond",
    "13_what_the_papers_measured",
    "14_your_first_gpu_kernel",
    "15_to_tensor_cores",
    "16_where_the_bytes_go",
    "17_what_each_idea_bought",
    "18_the_framework_call_on_a_gpu",
    "19_hopper_in_200_lines",
    "20_specialised_warps",
    "21_hiding_the_softmax",
    "22_backward_on_the_gpu",
    "23_decode_on_the_gpu",
    "24_train_a_small_gpt",
]
VARIES = "nbval-ignore-output"

# A cell that says one of these says something that the notebook did not compute.
CLAIM = re.compile(
    r"\b(papers?|datasheets?|whitepapers?|documentation|docs|reported|reports|published|et al)\b",
    re.IGNORECASE,
)
# A figure of hardware or of somebody's measurement, in prose.
FIGURE = re.compile(r"\d\s?(TB/s|GB/s|TFLOPs?(/s)?|PFLOPs?(/s)?|GFLOPs?(/s)?|ms|tokens/s)\b")
SHOWN = re.compile(r"\]\((https?://|\d\d_|#)|\b(computed|measured|recorded|above|below|GPUS)\b")
PATH = re.compile(r"(?<![\w.:/])(/(home|root|tmp|work|Users|usr|var|opt)/|[A-Z]:\\\\)")
FILLER = re.compile(
    r"\b(simply|obviously|of course|powerful|crucial|delve|let's|in this section we will|"
    r"game.chang\w+|cutting.edge|seamless\w*|leverag\w+)\b|!(?=\s|$)",
    re.IGNORECASE,
)
EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf]")


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(params=NOTEBOOKS, ids=lambda p: p.stem, scope="module")
def notebook(request):
    return read(request.param)


def prose(nb):
    return [c for c in nb.cells if c.cell_type == "markdown"]


def code(nb):
    return [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]


def tags(cell):
    return set(cell.metadata.get("tags", []))


def without_code(text):
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


def test_they_are_all_there():
    assert [p.stem for p in NOTEBOOKS[: len(TITLES)]] == TITLES


def test_every_cell_was_executed_in_order(notebook):
    counts = [c.execution_count for c in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))


def test_no_cell_failed_and_no_warning_is_shown(notebook):
    for cell in code(notebook):
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", cell.source


def test_something_is_compared(notebook):
    compared = [c for c in code(notebook) if c.outputs and VARIES not in tags(c)]
    varying = [c for c in code(notebook) if VARIES in tags(c)]
    assert len(compared) >= 8 and len(varying) <= 4
    for cell in code(notebook):  # nothing hides from the comparison by another tag
        assert tags(cell) <= {VARIES}, (tags(cell), cell.source)


def test_normal_form(notebook):
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert "version" not in notebook.metadata.language_info
    ids = [c.id for c in notebook.cells]
    assert len(ids) == len(set(ids))
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}, cell.metadata


def test_make_notebooks_would_keep_the_form():
    spec = importlib.util.spec_from_file_location("notebooks_tool", ROOT / "tools/notebooks.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert tool.dumps(tool.normalise(read(path))) == text, path.name


def test_first_cell_says_what_for_and_how_long(notebook):
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and re.match(r"# \d\d · \S", first.source)
    for label in ("**After this you can**", "**Before this**", "**Time**"):
        assert label in first.source, label
    assert re.search(r"\*\*Time\*\*.*\d+ minutes.*estimate", first.source)


def test_it_ends_with_summary_checkpoint_next(notebook):
    headings = re.findall(r"^## (.+)$", "\n".join(c.source for c in prose(notebook)), re.MULTILINE)
    assert headings[-3:] == ["Summary", "Checkpoint", "Next"]
    sources = [c.source for c in code(notebook)]
    asked = {m for s in sources for m in re.findall(r'ask\("([^"]+)"\)', s)}
    checked = {m for s in sources for m in re.findall(r'check\("([^"]+)"', s)}
    assert asked and asked == checked
    assert any(m.startswith("q") for m in asked) or "00 ·" in notebook.cells[0].source


def test_the_rhythm_is_labelled(notebook):
    text = "\n".join(c.source for c in prose(notebook))
    for label in ("**Predict.**", "**Run.**", "**Investigate.**", "**Modify.**", "**Make.**"):
        assert label in text, label


def test_sizes(notebook):
    start = "00 ·" in notebook.cells[0].source
    assert (12 if start else 25) <= len(notebook.cells) <= 60
    for cell in code(notebook):
        assert len(cell.source.splitlines()) <= 20, cell.source
        lines = sum(len(o.get("text", "").splitlines()) for o in cell.outputs)
        assert lines <= 45, f"{lines} lines of output: {cell.source}"


def test_answers_are_not_given_away(notebook):
    for cell in code(notebook):
        for answer in re.findall(r'check\("[^"]+", (.+?)\)', cell.source):
            assert answer in ("...", "guess") or answer.isidentifier(), cell.source
        if re.search(r"^guess\b.*=", cell.source, re.MULTILINE):
            assert re.search(r"^guess = \.\.\.", cell.source, re.MULTILINE), cell.source


def test_no_absolute_path(notebook):
    for cell in notebook.cells:
        text = cell.source + json.dumps(cell.get("outputs", []))
        assert not PATH.search(text), PATH.search(text)


def test_every_figure_has_words(notebook):
    pictures = 0
    for cell in code(notebook):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                alt = output.metadata.get("image/png", {}).get("alt", "")
                assert len(alt) >= 20, cell.source
                pictures += 1
                caption = [o for o in cell.outputs if f"*Figure: {alt}*" in str(o.get("data"))]
                assert caption, cell.source
        assert "plt.show" not in cell.source
    assert pictures >= 1
    assert "![" not in "\n".join(re.findall(r"!\[\]", "\n".join(c.source for c in prose(notebook))))


def test_claims_have_a_source(notebook):
    for cell in prose(notebook):
        text = without_code(cell.source)
        for found in (CLAIM.search(text), FIGURE.search(text)):
            assert not found or SHOWN.search(text), f"no source for {found.group(0)!r} in: {text}"


def test_prose_is_plain(notebook):
    for cell in prose(notebook):
        text = re.sub(r"\$[^$]*\$", "", without_code(cell.source))
        assert not FILLER.search(text), (FILLER.search(text).group(0), text)
        assert not EMOJI.search(text), text


def test_links_between_notebooks_lead_somewhere(notebook):
    for cell in prose(notebook):
        for target in re.findall(r"\]\(([^)#:]+\.ipynb)", cell.source):
            assert (ROOT / "notebooks" / target).exists(), target


def test_no_registry_of_answers_in_sight(notebook):
    text = "\n".join(c.source for c in notebook.cells)
    assert "_QUESTIONS" not in text and ".right" not in text
