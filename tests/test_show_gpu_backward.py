"""Notebooks 22 and 24: a warp of the backward kernel in numpy, budgets, and what was recorded."""

import importlib
import itertools
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest

from attention_lib import flash_attention_q_outer, standard_backward
from attention_lib.backward import flash_backward
from attention_lib.checks.questions import nb22, nb24
from attention_lib.gpu import fragments, recordings, sanitize
from attention_lib.show import gpu_backward as show
from attention_lib.show import gpu_training as training
from attention_lib.show.gpu import show_diff, show_file

gradients = importlib.import_module("attention_lib.gpu.gradients")


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def backward_rows(kernel):
    return [r for r in recordings.read("bench")["rows"] if r["kernel"] == kernel]


# ---------------------------------------------------------------- the kernels


def test_source_is_shown_as_it_is(capsys):
    show_file("backward.cuh", " prepare(", 2)
    title, first, _ = capsys.readouterr().out.splitlines()
    number = int(first[:4])
    assert title == f"backward.cuh, lines {number} to {number + 1}" and "prepare(" in first
    with pytest.raises(ValueError, match="file is 'rung9.cu'"):
        show_file("rung9.cu", "x")
    with pytest.raises(ValueError, match="marker is 'nowhere'"):
        show_file("backward.cu", "nowhere")


def test_the_diff_of_kernels_that_are_no_rungs(capsys):
    show_diff("backward.cu", "backward_wgmma.cu", "bulk_add(dQ_of", 2)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "backward.cu (-) and backward_wgmma.cu (+)"
    assert len(lines) == 2 and all(x.startswith("+") for x in lines)
    with pytest.raises(ValueError, match="kernel is 'backward.cuh'; accepted: 'unfused'"):
        show_diff("backward.cu", "backward.cuh")


@pytest.mark.parametrize("Br, d", [(16, 16), (64, 64), (32, 128)])
def test_a_warp_makes_the_gradients_of_16_keys(Br, d):
    rng = np.random.default_rng(Br)
    Q, dO = rng.standard_normal((2, Br, d)).astype(np.float16)
    K, V = rng.standard_normal((2, 16, d)).astype(np.float16)
    exact = [x.astype(np.float64) for x in (Q, K, V, dO)]
    O, L = flash_attention_q_outer(*exact[:3], 16, 16)
    want = standard_backward(*exact)
    D = (exact[3] * O).sum(axis=1)
    statistics = (x.astype(np.float32) for x in (L * math.log2(math.e), D))
    dK, dV, dS = show.warp_backward(K, V, Q, dO, *statistics)

    def whole(pieces):
        return np.concatenate([fragments.join("C", x) for x in pieces], axis=1)

    dQ = whole(dS).T.astype(np.float64) @ exact[1] / math.sqrt(d)
    for mine, right in zip((dQ, whole(dK) / math.sqrt(d), whole(dV)), want, strict=True):
        assert abs(mine - right).max() < 4 * np.finfo(np.float16).eps * abs(right).max()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kernel", gradients.KERNELS, ids=lambda k: k.name)
def test_budgets(kernel, d):
    assert sum(show.shared_parts(kernel.name, d).values()) == kernel.shared(d)
    assert show.tile_rows(d) == gradients._rows(d)
    for held in show.registers(kernel.name, d).values():
        assert held["dK"] * 32 == held["dV"] * 32 == 16 * d  # 16 keys a warp, in float
        assert sum(held.values()) <= (255 if kernel.name == "mma" else 240)


def test_pictures():
    budget = show.registers("wgmma", 128)
    ax = show.draw_registers({"x": budget}, {"x": 240}).axes[0]
    right = max(p.get_x() + p.get_width() for p in ax.patches)
    assert right == max(sum(held.values()) for held in budget.values())
    assert len(show.draw_owners().axes) == 2
    ax = training.draw_losses({"a": [3, 2, 1], "b": [3, 2.5, 2]}, width=1).axes[0]
    assert [list(line.get_ydata()) for line in ax.lines][:2] == [[3, 2, 1], [3, 2.5, 2]]
    ax = training.draw_apart({"a": [0, 1e-3]}, 1e-2).axes[0]
    y = list(ax.lines[0].get_ydata())
    assert math.isnan(y[0]) and y[1] == 1e-3
    found = {"x": [1e-4, 3e-4, 2e-4], "y": [1e-3]}
    fig = training.draw_distances({"one": found, "other": found}, 0.05, "two starts")
    assert [ax.get_title() for ax in fig.axes] == ["one", "other"]
    dots, bar, *_ = fig.axes[0].lines
    assert list(dots.get_xdata()) == found["x"] and list(bar.get_xdata()) == [2e-4, 2e-4]
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["x", "y"]


# ---------------------------------------------------------------- what was recorded


def test_backward_reaches_its_marks_in_every_row():
    """0.70 of torch's FLASH backward on mma.sync, 0.80 of cuDNN's on wgmma."""
    mma, wgmma = backward_rows("backward_mma"), backward_rows("backward_wgmma")
    shapes = {(r["d"], r["N"], r["causal"]) for r in mma}
    assert len(shapes) == len(mma) == 12 and len(wgmma) == 24
    assert {r["dtype"] for r in wgmma} == {"float16", "bfloat16"}
    assert all(r["tflops"] >= 0.70 * r["flash"] for r in mma)
    assert all(r["tflops"] >= 0.80 * r["cudnn"] for r in wgmma)


def test_what_notebook_22_says_of_the_recording():
    mma, wgmma = backward_rows("backward_mma"), backward_rows("backward_wgmma")
    half = [r for r in wgmma if r["dtype"] == "float16"]
    faster = [b["tflops"] / a["tflops"] for a, b in zip(mma, half, strict=True)]
    assert min(faster) > 1.6 and sum(1.75 < x < 2.3 for x in faster) >= 10  # about twice in most
    over = [r["tflops"] / r["cudnn"] for r in wgmma]
    assert sum(x > 1 for x in over) == 7 and min(over) > 0.89
    for r in backward_rows("backward_deterministic"):
        (full,) = (x for x in half if all(x[k] == r[k] for k in ("d", "N", "causal")))
        if not r["causal"]:
            assert 0.52 < r["tflops"] / full["tflops"] < 0.67  # a third to nearly a half is lost


def test_initcheck_reported_every_read_of_O():
    rows_of_O = 2 * sum(Nq for Nq, _ in sanitize.SHAPES)
    assert 3 * rows_of_O * 64 // 8 == 21_456  # as it was reported; 8 numbers of 16 bits a read


def test_two_speeds_explain_the_deterministic_mode():
    """Four products at wgmma's speed, then three at mma.sync's: within a quarter."""
    mma, wgmma, same = map(
        backward_rows, ("backward_mma", "backward_wgmma", "backward_deterministic")
    )
    for a, b, c in zip(mma, wgmma, same, strict=False):
        assert (a["d"], a["N"], a["causal"]) == (c["d"], c["N"], c["causal"])
        model = 5 / (4 / b["tflops"] + 3 / a["tflops"])
        assert 0.75 < model / c["tflops"] < 1.1


def test_distances_are_between_all_pairs_of_runs():
    runs = {("ours", 0): (1, 2), ("x", 0): (4, 8), ("y", 0): (9,), ("x", 1): (16, 32)}
    rows = [
        {"attention": name, "seed": seed, "losses": [level] * 20}
        for (name, seed), levels in runs.items()
        for level in levels
    ]
    assert training.distances(rows, "x", "x") == pytest.approx([4])
    assert training.distances(rows, "x", "ours") == pytest.approx([3, 2, 7, 6])
    want = ([1], [4], [5, 1], [3, 7, 2, 6, 8, 7])
    for found, right in zip(training.kinds(rows).values(), want, strict=True):
        assert found == pytest.approx(list(right))
    assert training.noise(rows) == pytest.approx(5)
    assert training.between_starts(rows, "x") == pytest.approx(8)


@pytest.mark.parametrize("seed", [0, 1])
def test_ours_trains_as_the_framework_does(seed):
    """Our runs are from torch's at most twice as far as torch's are from one another, all pairs of
    runs from the same start: rounding alone is between them. Another start is much further."""
    rows = recordings.read("train")["rows"]
    here = [r for r in rows if r["seed"] == seed]
    names = {"ours", "flash", "cudnn", "math"}
    assert sorted((r["attention"], r["run"]) for r in here) == sorted(
        itertools.product(names, range(4))
    )
    found = training.kinds(rows, seed)
    ours = found["ours and one of torch's"]
    theirs = found["one of torch's, twice"] + found["two of torch's"]
    assert (len(ours), len(theirs)) == (48, 66)
    limit = 2 * training.noise(rows, seed)
    assert max(ours) <= limit and limit == 2 * max(theirs)
    assert np.median(ours) <= 2 * np.median(theirs)
    assert all(training.between_starts(rows, name) > 20 * limit for name in names)
    assert all(r["losses"][-1] < r["losses"][0] / 2 for r in here)


def test_what_notebook_24_says_of_the_recording():
    rows = recordings.read("train")["rows"]
    for seed in (0, 1):
        found, limit = training.kinds(rows, seed), training.noise(rows, seed)
        assert min(min(x) for x in found.values()) > 0  # nothing repeats itself
        assert max(max(x) for x in found.values()) < 0.001
        medians = [np.median(x) for x in found.values()]
        assert max(medians) < 2 * min(medians)
        assert max(found["ours and one of torch's"]) < 1.1 * limit
        assert training.between_starts(rows) > 40 * 2 * limit
        assert 6.5 < 0.0049 / max(max(x) for x in found.values()) < 9  # seven times and more
        assert len({r["losses"][0] for r in rows if r["seed"] == seed}) == 1
    assert all(r["seconds"] < 10 for r in rows)
    ours = [r["seconds"] for r in rows if r["attention"] == "ours"]
    assert ours[0] > 3 * max(ours[1:])  # it compiled the kernels


# ---------------------------------------------------------------- the small training


def test_gradients_of_the_small_training_by_nudging():
    model = training.Tiny(np.float64)
    tokens = model.draw()
    gradient = model.gradients(tokens, flash_backward)[1]
    for name, x in model.weights.items():
        at, h = np.unravel_index(np.abs(gradient[name]).argmax(), x.shape), 1e-5
        x[at] += h
        up = model.gradients(tokens, flash_backward)[0]
        x[at] -= 2 * h
        down = model.gradients(tokens, flash_backward)[0]
        x[at] += h
        assert (up - down) / (2 * h) == pytest.approx(gradient[name][at], rel=1e-5), name


def test_the_small_training_learns_and_a_forgotten_D_is_seen():
    losses = training.train_tiny(flash_backward, steps=60)
    assert np.mean(losses[-10:]) < 0.8 * losses[0]

    def forgotten(Q, K, V, O, *rest, **options):
        return flash_backward(Q, K, V, 0 * O, *rest, **options)

    def other(Q, K, V, O, L, dO, Br, Bc, **options):
        return flash_backward(Q, K, V, O, L, dO, 5, 7, **options)

    noise = abs(np.subtract(training.train_tiny(other, steps=60), losses)).max()
    assert abs(np.subtract(training.train_tiny(forgotten, steps=60), losses)).max() > 10 * noise


def test_numbers_that_questions_quote_are_those_of_the_recordings():
    text = {q.id: q.text.replace("\n", " ") for q in [*nb22.QUESTIONS, *nb24.QUESTIONS]}
    shape = {"dtype": "float16", "d": 128, "N": 16_384, "causal": False}
    mma, wgmma = (
        next(r for r in backward_rows(k) if shape.items() <= r.items())
        for k in ("backward_mma", "backward_wgmma")
    )
    said = f"has {wgmma['tflops']:.0f} TFLOP/s and the mma.sync kernel {mma['tflops']:.0f}."
    assert said in text["p22-5"]
    assert f"at {mma['tflops'] / mma['flash']:.2f} of torch's FLASH" in text["p22-6"]
    assert f"loss is {nb24.last_loss():.2f}," in text["p24-3"]
    rows = recordings.read("train")["rows"]
    found = [training.kinds(rows, seed) for seed in (0, 1)]
    furthest = max(max(x["ours and one of torch's"]) for x in found)
    assert f" {furthest:.4f} " in text["q71"]
    twice = [x for start in found for x in start["ours, twice"]]
    assert 0 < min(twice) and max(twice) < 0.001  # as p24-2 says
    assert 0.045 < training.between_starts(rows) < 0.055  # about 0.05, it says
    (asked,) = (q for q in nb24.QUESTIONS if q.id == "p24-2")
    assert f" {min(twice):.5f} to {max(twice):.5f}." in asked.remarks["b"]


def test_the_task_of_notebook_22():
    def fixed(arrivals):
        return sum((part for _, part in sorted(arrivals, key=lambda x: x[0])), np.float32(0))

    def as_they_come(arrivals):
        return sum((part for _, part in arrivals), np.float32(0))

    assert nb22.check_total(fixed).status == "passed"
    assert nb22.check_total(lambda arrivals: ...).status == "not attempted"
    assert nb22.check_total(as_they_come).misconception == "order-of-arrival"
    assert nb22.check_total(lambda x: as_they_come(x[1:])).misconception == "not-the-sum"
    wide = nb22.check_total(lambda x: fixed([(k, part.astype(float)) for k, part in x]))
    assert wide.misconception == "wider-sum"
    assert "raised" in nb22.check_total(lambda: None).message


def test_source_of_the_training_without_torch(capsys):
    training.show_part("train", "Block")
    shown = capsys.readouterr().out
    assert shown.startswith("class Block(nn.Module):") and "scaled_dot_product_attention" in shown
    assert "class GPT" not in shown
    training.show_part("train", "train", after="with using")
    assert capsys.readouterr().out.lstrip().startswith("with using")
    with pytest.raises(ValueError, match="name is 'Nothing'"):
        training.show_part("train", "Nothing")


def test_the_live_plot_follows_the_training():
    report = training.live_plot(20, every=10)
    bar, plot = report.shown.children
    for step in range(1, 21):
        report(step, [5.0] * step)
    assert bar.value == bar.max == 20 and bar.description == "20 of 20"
    assert plt.get_fignums() == []
