"""The explorers: every picture over the range of its controls, its numbers, and the thin shell."""

import base64
import json
import math
import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_lib import GPUS, HBM, sparse, standard_traffic
from attention_lib.hardware import GiB
from attention_lib.show import widgets
from attention_lib.show.explorers import EXPLORERS, FRAMES, chart, explore, masks, sram, traffic
from attention_lib.traffic import attention_memory, flash_traffic, q_outer_traffic

ROOT = Path(__file__).parent.parent
NAMES = sorted(EXPLORERS)
VIEW = "application/vnd.jupyter.widget-view+json"
# Too many values for every combination: these, ends included.
COARSE = {"Br": (16, 64, 80, 128, 192, 256), "Bc": (16, 48, 64, 128, 176, 256)}


def grid(name):
    """Every state of an explorer; of the softmax row some hundred."""
    controls = EXPLORERS[name].CONTROLS
    if name == "softmax":
        rng = np.random.default_rng(0)
        rows = [rng.choice(controls[-1].values, 8).tolist() for _ in range(40)]
        rows += [[end] * 8 for end in (-6.0, 0.0, 6.0)]
        for row, chunk, rescale in product(rows, (1, 2, 4, 8), (True, False)):
            yield dict(chunk=chunk, rescale=rescale) | {f"x{k}": x for k, x in enumerate(row)}
        return
    names = [c.name for c in controls]
    for values in product(*(COARSE.get(c.name, c.values) for c in controls)):
        yield dict(zip(names, values, strict=True))


def numbers(text):
    return [float(x.replace(",", "")) for x in re.findall(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?", text)]


def check_picture(made):
    """A sound SVG with words, and nothing outside of it."""
    assert not re.search(r'="[^"<>]*\b(nan|inf)\b[^"<>]*"', made.svg, re.IGNORECASE)
    assert "nan" not in made.alt
    tree = ElementTree.fromstring(made.svg)
    _, _, W, H = map(float, tree.get("viewBox").split())
    title, desc = tree[0], tree[1]
    assert tree.get("role") == "img" and len(title.text) > 10 and desc.text == made.alt
    assert tree.get("aria-labelledby") == title.get("id")
    assert tree.get("aria-describedby") == desc.get("id")
    for part in tree.iter():
        for key in ("x", "x1", "x2", "cx"):
            assert -0.1 <= float(part.get(key, 0)) <= W + 0.1, ElementTree.tostring(part)
        for key in ("y", "y1", "y2", "cy"):
            assert -0.1 <= float(part.get(key, 0)) <= H + 0.1, ElementTree.tostring(part)
        if part.tag.endswith("rect"):
            assert float(part.get("x")) + float(part.get("width")) <= W + 0.1
            assert float(part.get("y")) + float(part.get("height")) <= H + 0.1
        if part.tag.endswith("}text") and not part.get("transform"):
            # A character is a little more than half as wide as its size.
            wide = len(part.text) * float(part.get("font-size")) * 0.53
            before = {"start": 0, "middle": wide / 2, "end": wide}
            left = float(part.get("x")) - before[part.get("text-anchor", "start")]
            assert left >= -2 and left + wide <= W + 2, part.text
        for x in numbers(re.sub("[A-Za-z]", " ", part.get("d", ""))):
            assert math.isfinite(x)


@pytest.mark.parametrize("name", NAMES)
def test_every_state_has_a_sound_picture(name):
    draw = EXPLORERS[name].draw
    for state in grid(name):
        made = draw(**state)
        check_picture(made)
        assert draw(**state) == made, "the same state, the same picture"


@pytest.mark.parametrize("name", NAMES)
def test_each_control_changes_the_picture(name):
    module = EXPLORERS[name]
    start = widgets.state_of(module.CONTROLS)
    for control in module.CONTROLS:
        made = {module.draw(**start | {control.name: value}).svg for value in control.values}
        assert len(made) >= 2, control.name
        assert control.start in control.values and control.label


# ---------------------------------------------------------------- the numbers


@given(
    st.lists(st.sampled_from(EXPLORERS["softmax"].SCORES), min_size=8, max_size=8),
    st.sampled_from((1, 2, 4, 8)),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_softmax_numbers(row, chunk, rescale):
    made = EXPLORERS["softmax"].draw_row(tuple(row), chunk, rescale)
    x = np.array(row)
    m, l, O, factors = -math.inf, 0.0, np.zeros(8), []
    for k in range(0, 8, chunk):
        m_old, m = m, max(m, x[k : k + chunk].max())
        factor = math.exp(m_old - m) if rescale else 1.0
        p = np.exp(x - m) * (np.arange(8) // chunk == k // chunk)
        l, O = factor * l + p.sum(), factor * O + p
        factors.append(f"{factor:.3g}")
    assert f"multiplied by {', '.join(factors)}." in made.alt
    assert f"m = {m:g}, l = {l:.4g}." in made.alt
    error = np.abs(O / l - np.exp(x - x.max()) / np.exp(x - x.max()).sum()).max()
    if error < 1e-12:
        assert made.alt.endswith("equal softmax(x).")
    else:
        assert not rescale and made.alt.endswith(f"off by {error:.3f}.")
    shown = re.findall(r">(\d\.\d{3})</text>", made.svg)
    assert shown[:8] == [f"{weight:.3f}" for weight in O / l]


def test_roofline_numbers():
    module = EXPLORERS["roofline"]
    elements = {
        "standard": lambda N, d, T: 4 * N * d + 4 * N * N,
        "K/V outside": lambda N, d, T: 2 * N * d + T * (3 * N * d + 4 * N),
        "Q outside": lambda N, d, T: 2 * N * d + N + T * 2 * N * d,
        "each array once": lambda N, d, T: 4 * N * d,
    }
    for state in grid("roofline"):
        N, d, gpu = state["N"], state["d"], GPUS[state["gpu"]]
        size, peak = (4, gpu.fp32_flops) if "fp32" in state["dtype"] else (2, gpu.tensor_flops)
        intensity = 4 * N * N * d / (size * elements[state["algorithm"]](N, d, N // 128))
        reach = min(peak, gpu.bandwidth * intensity)
        alt = module.draw(**state).alt
        shown = re.search(r"does ([\d.,]+) FLOP per byte, which allows ([\d.,]+) TFLOP/s", alt)
        assert numbers(" ".join(shown.groups())) == pytest.approx(
            [intensity, reach / 1e12], rel=6e-4
        )
        limit = "memory traffic" if intensity < peak / gpu.bandwidth else "arithmetic"
        assert alt.endswith(f"The limit is {limit}.")


def test_sram_numbers():
    for state in grid("sram"):
        Br, Bc, d, size = (*(state[k] for k in ("Br", "Bc", "d")), sram.DTYPES[state["dtype"]])
        total = (Br + 2 * Bc) * d * size
        rule = sram.COUNTED[state["counted"]]
        if rule == "real":
            total += 4 * Br * d + 4 * Br * Bc + 8 * Br
        elif rule == "article":
            total += Br * d * size + 8 * Br
        alt = sram.draw(**state).alt
        assert f"They take {chart.short(total / 1024)} KiB" in alt
        for name, gpu in GPUS.items():
            if total > gpu.sram_per_block:
                assert f"{name} does not launch" in alt
            else:
                assert f"{name} fits, {int(gpu.sram_per_sm // (total + 1024))} on an SM" in alt


def test_traffic_numbers():
    for state in grid("traffic"):
        M, N, d = (state[k] for k in ("M", "N", "d"))
        Bc = math.ceil(M / (4 * d))
        expected = {
            "standard": standard_traffic(N, d),
            "Algorithm 1": flash_traffic(N, d, min(Bc, d), Bc),
            "Q outside": q_outer_traffic(N, d, Bc, min(Bc, d)),
            "each once": 4 * N * d,
        }
        assert traffic.moved(M, N, d) == expected
        alt = traffic.draw(**state).alt
        for name, count in expected.items():
            assert f"{name} {chart.amount(2 * count)}" in alt
        heads = 108 if state["order"] == "K/V outside" else max(1, 108 / math.ceil(N / Bc))
        hidden = heads * 4 * N * d <= 40 * 2**20
        assert ("stays in L2" in alt) == (state["L2"] and hidden)
        if state["L2"]:
            loop = expected[traffic.ORDERS[state["order"]]]
            at_dram = expected["each once"] if hidden else loop
            assert f"Between L2 and DRAM: {chart.amount(2 * at_dram)}." in alt


@pytest.mark.parametrize("pattern", masks.PATTERNS)
def test_mask_numbers_are_those_of_counted_runs(pattern):
    mask = masks.mask_of(pattern, 2, 8, causal=True)
    N = 8 * masks.B
    Q = np.zeros((N, masks.HEAD), np.float32)
    loops = (sparse.block_sparse_attention, sparse.block_sparse_attention_q_outer)
    found = {name: mine for name, mine, _ in masks.counts(mask)}
    for loop, name in zip(loops, ("K/V outside moves", "Q outside moves"), strict=True):
        loop(Q, Q, Q, mask, masks.B, masks.B, hbm=(hbm := HBM()))
        assert found[name] == 2 * (hbm.reads + hbm.writes)
        assert found["both multiply"] == hbm.matmul_flops
    made = masks.draw(pattern, 2, 8, causal=True)
    assert f"the {mask.sum()} filled ones" in made.alt and f"s = {mask.mean():.4g}" in made.alt
    (tiles,) = re.findall(r'<path d="([^"]*)" class="f-sram', made.svg)
    assert tiles.count("M") == mask.sum()


def test_context_numbers_are_the_largest_that_fit():
    for state in grid("context"):
        alt = EXPLORERS["context"].draw(**state).alt
        found = [int(x.replace(",", "")) for x in re.findall(r"(?:standard|tiled) ([\d,]+)\b", alt)]
        size = 4 if state["dtype"] == "fp32" else 2
        for N, method in zip(found, ("standard", "flash"), strict=True):
            need = [
                attention_memory(n, state["d"], state["heads"], method=method, element_bytes=size)
                for n in (N, N + 1)
            ]
            assert need[0]["total"] <= state["memory"] * GiB < need[1]["total"]


def test_ladder_numbers_are_the_recording():
    file = ROOT / "attention_lib" / "gpu" / "recordings" / "bench.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    rows = [r for r in record["rows"] if r["dtype"] == "float16" and r["pass"] == "forward"]
    assert len(rows) == len(list(grid("ladder")))
    for row in rows:
        state = dict(rung=row["kernel"], N=row["N"], d=row["d"], causal=row["causal"])
        alt = EXPLORERS["ladder"].draw(**state).alt
        assert f"{row['kernel']} {row['tflops']:g}" in alt and record["device"] in alt
        assert f"torch: FLASH {row['flash']:g}" in alt


# ---------------------------------------------------------------- frames, still and shell


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_frames_are_few_small_and_told_apart(name):
    made = FRAMES[name]()
    assert 10 <= len(made) <= 60
    pictures = [(svg, alt) for _, svg, alt in made]
    as_sent = json.dumps(pictures) if name in EXPLORERS else "".join(svg for svg, _ in pictures)
    assert len(as_sent) <= 300_000
    assert len({json.dumps(state) for state, _, _ in made}) == len(made)
    assert {tuple(state) for state, _, _ in made} == {tuple(made[0][0])}
    for label, first in made[0][0].items():  # a slider on a page goes from the first value up
        values = list(dict.fromkeys(state[label] for state, _, _ in made))
        if not isinstance(first, (bool, str)):
            assert values == sorted(values), label
    for _, svg, alt in made if name in EXPLORERS else ():
        check_picture(widgets.Picture(svg, alt))


@pytest.mark.parametrize("name", NAMES)
def test_the_shell_shows_what_draw_makes(name):
    module = EXPLORERS[name]
    box = explore(name)
    row, svg, alt, script = box.children
    state = widgets.state_of(module.CONTROLS)
    by_label = {control.description: control for control in row.children}
    assert list(by_label) == [c.label for c in module.CONTROLS]
    assert svg.value == module.draw(**state).svg
    for control in module.CONTROLS:
        state[control.name] = next(v for v in control.values if v != state[control.name])
        by_label[control.label].value = state[control.name]
        made = module.draw(**state)
        assert svg.value == made.svg
        assert ElementTree.fromstring(alt.value).text == made.alt
    assert script.outputs[0]["data"]["application/javascript"] == widgets.ASSIST


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_without_its_kernel_keeps_picture_and_words(name):
    module = EXPLORERS[name]
    made = module.draw(**widgets.state_of(module.CONTROLS))
    bundle = explore(name)._repr_mimebundle_()
    assert VIEW in bundle and bundle["text/plain"] == made.alt
    tree = ElementTree.fromstring(bundle["text/html"])
    image = tree.find("img")
    assert tree.get("data-explorer") == name and image.get("alt") == made.alt
    assert base64.b64decode(image.get("src").partition(",")[2]).decode() == made.svg
    words = "".join(tree.itertext())
    assert made.alt in words and all(c.label in words for c in module.CONTROLS)
    assert len(bundle["text/html"]) < 60_000


def test_a_start_of_ones_own():
    made = EXPLORERS["roofline"].draw(
        **widgets.state_of(EXPLORERS["roofline"].CONTROLS, gpu="H200")
    )
    assert explore("roofline", gpu="H200").children[1].value == made.svg


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="name is 'roof'; accepted: 'softmax', 'roofline'"):
        explore("roof")
    with pytest.raises(ValueError, match="name is 'batch'; accepted: 'gpu', 'N'"):
        explore("roofline", batch=3)
    with pytest.raises(ValueError, match="N is 100; accepted: 256, 512"):
        explore("roofline", N=100)
    with pytest.raises(ValueError, match="x is 7; accepted: 1 to 5, the axis"):
        chart.Axis(1, 5, 0, 100)(7)


@pytest.mark.parametrize(
    ("size", "said"),
    [(512, "0.5 KiB"), (1023 * 1024, "0.999 MiB"), (3 * 2**30, "3 GiB"), (2**42, "4 TiB"),
     (2**52, "4,096 TiB")],
)  # fmt: skip
def test_amounts(size, said):
    assert chart.amount(size) == said


@pytest.mark.parametrize(
    ("x", "said"),
    [(0.012345, "0.01235"), (56.789, "56.79"), (999.96, "1,000"), (123456, "123,456")],
)
def test_short_numbers(x, said):
    assert chart.short(x) == said
