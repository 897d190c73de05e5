"""The tile stepper: what it shows is what the loop did, for every size, order and mask."""

import base64
import importlib.util
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_lib import HBM, OnChipOverflow, online
from attention_lib.show import stepper as show
from attention_lib.show import svg
from attention_lib.tiled import blocks, nothing_visible
from attention_lib.traffic import flash_traffic, q_outer_traffic, standard_traffic

ROOT = Path(__file__).parent.parent
FORMS = {"K/V outside": flash_traffic, "Q outside": q_outer_traffic}
ORDERS = list(FORMS)


def qkv(Nq, Nk, d, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((N, d)).astype(dtype) for N in (Nq, Nk, Nk))


@st.composite
def settings_of_a_run(draw):
    Nq, Nk, d = (draw(st.integers(1, n)) for n in (40, 40, 9))
    Br, Bc = (draw(st.integers(-(-N // 12), N + 2)) for N in (Nq, Nk))
    mask = None
    if draw(st.booleans()):
        Tr, Tc = -(-Nq // Br), -(-Nk // Bc)
        mask = np.array(draw(st.lists(st.booleans(), min_size=Tr * Tc, max_size=Tr * Tc)), bool)
        mask = mask.reshape(Tr, Tc)
    how = dict(order=draw(st.sampled_from(ORDERS)), causal=draw(st.booleans()), block_mask=mask)
    return (Nq, Nk, d, Br, Bc), how, draw(st.integers(0, Nq - 1))


class Spy(HBM):
    """The counts at the end of each tile's second product, kept without the stepper's help."""

    def __init__(self):
        super().__init__()
        self.products, self.seen = 0, []

    def matmul(self, A, B):
        result = super().matmul(A, B)
        self.products += 1
        if self.products % 2 == 0:
            self.seen.append((sum(self.on_chip.values()), self.reads, self.matmul_flops))
        return result


@given(settings_of_a_run())
@settings(max_examples=120, deadline=None)
def test_the_steps_are_what_the_loop_did(case):
    (Nq, Nk, d, Br, Bc), how, row = case
    Q, K, V = qkv(Nq, Nk, d)
    run = show.trace(Q, K, V, Br, Bc, row=row, **how)
    spy, options = Spy(), {k: how[k] for k in ("causal", "block_mask")}
    result = show.ORDERS[how["order"]](Q, K, V, Br, Bc, hbm=spy, **options)

    tiles = [step for step in run.steps if step.tile]
    assert [(sum(s.on_chip.values()), s.reads, s.flops) for s in tiles] == spy.seen
    last = run.steps[-1]
    assert (last.reads, last.writes) == (spy.reads, spy.writes)
    assert (run.hbm.reads_by, run.hbm.writes_by) == (spy.reads_by, spy.writes_by)
    assert sum(sum(n for _, n in step.loaded) for step in run.steps) == spy.reads
    assert sum(sum(n for _, n in step.stored) for step in run.steps) == spy.writes
    if how["block_mask"] is None:
        assert last.moved == FORMS[how["order"]](Nq, d, Br, Bc, how["causal"], Nk=Nk)
    assert run.standard == standard_traffic(Nq, d, Nk=Nk)
    for mine, its in zip(run.result, result, strict=True):
        assert np.array_equal(mine, its)

    first = run.steps[0]
    assert (first.tile, first.moved, first.on_chip) == (None, 0, {})
    assert np.array_equal(last.O, result[0][row])
    if how["order"] == "K/V outside":
        assert (last.l, last.m) == (result[1][row], result[2][row])
    else:
        O, L = online.finish(online.State(*(np.array([x]) for x in (last.m, last.l, last.O))))
        assert L[0] == result[1][row]


@given(settings_of_a_run())
@settings(max_examples=60, deadline=None)
def test_each_tile_is_computed_once_in_order_or_left_out_with_a_reason(case):
    (Nq, Nk, d, Br, Bc), how, row = case
    run = show.trace(*qkv(Nq, Nk, d), Br, Bc, row=row, **how)
    done = [step.tile for step in run.steps if step.tile]
    key = (lambda t: (t[1], t[0])) if how["order"] == "K/V outside" else (lambda t: t)
    assert done == sorted(set(done), key=key)
    outer = 1 if how["order"] == "K/V outside" else 0
    without = set(range((run.Tr, run.Tc)[outer])) - {tile[outer] for tile in done}
    assert len(run.steps) == 1 + len(done) + len(without), "a block without a tile is a step"
    offset = Nk - Nq if how["causal"] else None
    for i, rows in enumerate(blocks(Nq, Br)):
        for j, cols in enumerate(blocks(Nk, Bc)):
            hidden = nothing_visible(rows, cols, offset)
            masked = how["block_mask"] is not None and not how["block_mask"][i, j]
            assert ((i, j) in done) == (not hidden and not masked)
            expected = "causal" if hidden else "sparse" if masked else None
            assert run.left_out.get((i, j)) == expected


@pytest.mark.parametrize("order", ORDERS)
def test_the_row_is_attention_over_the_keys_so_far(order):
    Q, K, V = qkv(20, 23, 5, seed=3)
    run = show.trace(Q, K, V, 6, 7, order, row=13)
    mine = [step for step in run.steps if step.tile and step.tile[0] == 13 // 6]
    for step in mine:
        S = Q[13] @ K[: step.cols.stop].T / math.sqrt(5)
        assert step.m == pytest.approx(S.max(), rel=1e-14)
        assert step.l == pytest.approx(np.exp(S - S.max()).sum(), rel=1e-13)
        O = np.exp(S - S.max()) @ V[: step.cols.stop]
        if "not yet" not in step.where:
            O = O / step.l
        np.testing.assert_allclose(step.O, O, rtol=1e-12, atol=1e-14)
    assert "not yet" not in run.steps[-1].where


def words(tree):
    return " ".join(part.text or "" for part in tree.iter() if part.tag.endswith(("text", "tspan")))


@given(settings_of_a_run())
@settings(max_examples=25, deadline=None)
def test_every_picture_is_sound_and_says_the_numbers(case):
    (Nq, Nk, d, Br, Bc), how, row = case
    run = show.trace(*qkv(Nq, Nk, d), Br, Bc, row=row, **how)
    for k, step in enumerate(run.steps):
        source = show.draw(run, k)
        tree = ElementTree.fromstring(source)
        assert tree.get("role") == "img" and len(tree[1].text) > 60
        ids = re.findall(r' id="([^"]+)"', source)
        assert len(ids) == len(set(ids))
        used = set(re.findall(r"url\(#([^)]+)\)", source)) | {tree.get("aria-labelledby")}
        assert used <= set(ids) and "nan" not in source.lower().replace("dominant", "")
        assert f"{step.moved:,} elements" in words(tree)
        assert f"{sum(step.on_chip.values()):,}" in words(tree)
        if step.tile:
            assert f"S({step.tile[0]}, {step.tile[1]})" in words(tree)


def test_twelve_by_twelve_tiles_and_sparse_and_causal_tiles_look_different():
    mask = np.random.default_rng(0).random((12, 12)) > 0.4
    run = show.trace(*qkv(96, 90, 8), 8, 8, causal=True, block_mask=mask, M=1000)
    assert {"causal", "sparse"} == set(run.left_out.values())
    source = show.draw(run, 9)
    assert "skipped: causal" in source and "never visited: block mask" in source
    for hatch in ("stripes", "crosses"):
        assert re.search(rf"url\(#al\w+-{hatch}\)", source)
    plain = show.draw(show.trace(*qkv(96, 90, 8), 8, 8), 9)
    assert "skipped" not in plain and "crosses" not in plain


def areas(part):
    return [float(w) * float(h) for w, h in re.findall(r"h([\d.]+)v([\d.]+)h", part)]


def test_the_tiles_are_drawn_to_scale():
    """Of each look as much area as the run has tiles of that kind, weighted by their scores."""
    mask = np.random.default_rng(1).random((3, 5)) > 0.3
    run = show.trace(*qkv(40, 30, 4), 16, 7, causal=True, block_mask=mask)
    for k in range(len(run.steps)):
        done = {step.tile for step in run.steps[: k + 1]}
        expected = dict.fromkeys(show.LOOKS, 0)
        for i, rows in enumerate(blocks(40, 16)):
            for j, cols in enumerate(blocks(30, 7)):
                kind = run.left_out.get((i, j)) or ("done" if (i, j) in done else "to come")
                expected[kind] += (rows.stop - rows.start) * (cols.stop - cols.start)
        parts, _, _ = show.grid(run, k, side=400)
        drawn = dict(zip(show.LOOKS, parts, strict=False))
        for kind, scores in expected.items():
            assert sum(areas(drawn[kind].split("<path")[-1])) == pytest.approx(100 * scores)


def test_two_runs_are_shown_when_they_have_moved_equally_many():
    Q, K, V = qkv(40, 40, 4)
    a, b = show.trace(Q, K, V, 8, 16), show.trace(Q, K, V, 16, 8, "Q outside")
    clock = show.moments(a, b)
    assert clock[0] == 0 and clock == sorted(set(clock))
    assert {s.moved for s in a.steps} | {s.moved for s in b.steps} == set(clock)
    for n, moved in enumerate(clock):
        for run in (a, b):
            k = show.at(run, moved)
            assert run.steps[k].moved <= moved
            assert k == len(run.steps) - 1 or run.steps[k + 1].moved > moved
        tree = ElementTree.fromstring(show.draw_pair(a, b, n))
        assert f"{moved:,} elements" in words(tree)  # one of the two is there exactly
    assert all(show.at(run, clock[-1]) == len(run.steps) - 1 for run in (a, b))


def test_the_widget_only_passes_on_what_draw_makes():
    Q, K, V = qkv(20, 20, 4)
    widget = show.stepper(Q, K, V, 8, 8, row=3)
    controls, picture = widget.children
    named = {getattr(c, "description", ""): c for c in controls.children}
    run = show.trace(Q, K, V, 8, 8, row=3)
    assert picture.value == show.draw(run, 0)
    named["Next"].click()
    named["Next"].click()
    assert picture.value == show.draw(run, 2)
    named["Back"].click()
    assert picture.value == show.draw(run, 1)
    named["Last"].click()
    named["Next"].click()
    assert picture.value == show.draw(run, len(run.steps) - 1)
    named["Step"].value = 4
    assert picture.value == show.draw(run, 4)
    named["Follow row"].value = 19
    assert picture.value == show.draw(show.trace(Q, K, V, 8, 8, row=19), 4)
    named["First"].click()
    named["Back"].click()
    assert named["Step"].value == 0
    for control in named.values():
        if hasattr(control, "click"):
            assert control.description and control.tooltip


def test_two_runs_in_one_widget():
    Q, K, V = qkv(20, 20, 4)
    widget = show.stepper(Q, K, V, 8, 8, beside=dict(order="Q outside"))
    a, b = show.trace(Q, K, V, 8, 8), show.trace(Q, K, V, 8, 8, "Q outside")
    controls, picture = widget.children
    slider = next(c for c in controls.children if getattr(c, "description", "") == "Step")
    assert slider.max == len(show.moments(a, b)) - 1
    slider.value = 5
    assert picture.value == show.draw_pair(a, b, 5)


@pytest.mark.parametrize("beside", [None, dict(order="Q outside", Br=196, Bc=64)])
def test_a_notebook_without_its_kernel_keeps_a_film(beside):
    Q, K, V = qkv(1000, 1000, 64, np.float32)
    bundle = show.stepper(Q, K, V, 64, 196, M=50_000, beside=beside)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    film = show.film(Q, K, V, 64, 196, M=50_000, beside=beside)._repr_mimebundle_()
    assert bundle["text/html"] == film["text/html"] and bundle["text/plain"] == film["text/plain"]
    assert len(film["text/html"]) < 60_000
    source = base64.b64decode(re.search(r"base64,([^\"]+)", film["text/html"])[1]).decode()
    tree = ElementTree.fromstring(source)
    assert "moved 1,304,000" in words(tree) and "4,256,000" in words(tree)
    assert "1,304,000" in film["text/plain"]
    assert len(re.findall(r"moved [\d,]+<", source)) == (5 if beside is None else 10)


def test_frames_for_the_web_are_few_and_small():
    made = show.frames()
    assert len(made) <= 60 and sum(len(source) for _, source, _ in made) < 300_000
    assert len({source for _, source, _ in made}) == len(made)
    assert {state["order"] for state, _, _ in made} == set(ORDERS)
    for _, source, alt in made:
        assert ElementTree.fromstring(source)[1].text == alt


BAD = {
    "order": (dict(order="sideways"), "order is 'sideways'; accepted: 'K/V outside', 'Q outside'"),
    "Br": (dict(Br=1), "Br is 1, which makes 40 blocks; accepted: 2 or more"),
    "Bc": (dict(Bc=0), "Bc is 0; accepted: 1 or more"),
    "row": (dict(row=40), "row is 40; accepted: 0 to 39"),
    "heads": (dict(Q=np.zeros((2, 40, 4))), r"Q has shape \(2, 40, 4\); accepted: \(N, d\)"),
    "empty": (dict(K=np.zeros((0, 4))), r"K has shape \(0, 4\); accepted"),
    "mask": (dict(block_mask=np.ones((2, 2), bool)), r"block_mask has shape \(2, 2\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_named(name):
    change, message = BAD[name]
    Q, K, V = qkv(40, 40, 4)
    with pytest.raises(ValueError, match=message):
        show.trace(**dict(Q=Q, K=K, V=V, Br=8, Bc=8) | change)


def test_other_wrong_arguments():
    Q, K, V = qkv(40, 40, 4)
    with pytest.raises(OnChipOverflow, match="too many"):
        show.stepper(Q, K, V, 8, 8, M=100)
    with pytest.raises(ValueError, match="beside is .*accepted: a dict"):
        show.stepper(Q, K, V, 8, 8, beside={"blocks": 3})
    with pytest.raises(ValueError, match="k is 99; accepted: 0 to"):
        show.draw(show.trace(Q, K, V, 8, 8), 99)
    with pytest.raises(ValueError, match="colour is 'mauve'"):
        svg.rect(0, 0, 1, 1, "mauve")
    with pytest.raises(ValueError, match="hatch is '--'"):
        svg.rect(0, 0, 1, 1, hatch="--")
    with pytest.raises(ValueError, match="alt is 'a bar'"):
        svg.picture([], "a bar", 1, 1)


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_colours_can_be_read(theme):
    def contrast(a, b):
        dark, light = sorted(map(luminance, (theme[a], theme[b])))
        return (light + 0.05) / (dark + 0.05)

    for ground in ("paper", "faint", "pale"):
        assert contrast("ink", ground) >= 4.5
    for fill in ("hbm", "sram"):
        assert contrast("on", fill) >= 4.5
    for mark in ("edge", "flash", "q_outer", "standard"):
        assert contrast(mark, "paper") >= 3


@pytest.fixture(scope="module")
def animation():
    path = ROOT / "tools" / "readme_animation.py"
    spec = importlib.util.spec_from_file_location("readme_animation", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_moving_picture_is_the_one_that_the_trace_gives(animation, capsys):
    assert animation.main(["--check"]) == 0, capsys.readouterr().out
    for name in ("stepper.svg", "stepper_still.svg"):
        path = ROOT / "docs" / "images" / name
        assert path.stat().st_size < 1_000_000
        tree = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert "1,304,000 elements" in words(tree) and "4,256,000 elements" in words(tree)
        outside = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "http" not in outside and "<script" not in outside


def test_the_still_stands_still_and_the_readme_offers_it(animation):
    still = (ROOT / "docs" / "images" / "stepper_still.svg").read_text(encoding="utf-8")
    moving = (ROOT / "docs" / "images" / "stepper.svg").read_text(encoding="utf-8")
    assert "animation" not in still and "@keyframes" in moving
    assert "@media(prefers-reduced-motion:reduce){.a{animation:none}}" in moving
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<picture>.*?</picture>", readme, re.DOTALL)[0]
    assert (
        'media="(prefers-reduced-motion: reduce)" srcset="docs/images/stepper_still.svg"' in block
    )
    assert 'src="docs/images/stepper.svg"' in block
    assert animation.alt(*animation.runs()) in block
