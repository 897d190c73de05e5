"""The models and pictures of notebook 21, and its questions."""

import math
from fractions import Fraction

import matplotlib.pyplot as plt
import numpy as np
import pytest

from attention_lib import standard_attention
from attention_lib.checks import check
from attention_lib.checks.questions import nb21
from attention_lib.gpu import ladder, recordings
from attention_lib.show import gpu_overlap as model

in_turn, overlapped = model.in_turn, model.overlapped


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def test_clocks_by_hand():
    # 64 x 128 scores: 512 FLOP and one exp each at d = 128; 4096 FLOP and 16 exp a clock
    assert model.clocks(128)["products"] == 64 * 128 * 512 / 4096 == 1024
    assert model.clocks(128)["exp"] == model.clocks(64)["exp"] == 512
    # max at 64 a clock, multiply-add and sum at 128, two in one conversion at 64; O is 64 x d
    assert model.clocks(64)["other"] == 128 + 64 + 64 + 64 + 32
    # at the peak a tile takes what its products take
    assert model.measured_clocks(989.4, 64) == pytest.approx(512)


def test_taking_turns_is_the_sum_and_in_step_is_no_faster():
    for product, softmax in ((256, 512), (512, 512), (512, 896)):
        alone = model.timeline(in_turn, 1, product, softmax)
        assert model.clocks_a_tile(alone) == 2 * product + softmax
        assert max(s.end for s in alone) == 6 * (2 * product + softmax)
        for warpgroups in (2, 3):
            steps = model.timeline(in_turn, warpgroups, product, softmax)
            assert model.clocks_a_tile(steps) == 2 * product + softmax
            assert model.busy(steps) == pytest.approx(2 * product / (2 * product + softmax))


def test_out_of_step_and_rung_8_reach_the_longer_unit():
    late = model.timeline(in_turn, 2, 256, 512, late=512)
    assert model.clocks_a_tile(late) == 512
    for product, softmax in ((256, 864), (512, 512)):
        steps = model.timeline(overlapped, 2, product, softmax, tiles=40, turns=True)
        longest = max(2 * product, softmax)
        assert longest <= model.clocks_a_tile(steps) < 1.03 * longest


@pytest.mark.parametrize("program", (in_turn, overlapped))
@pytest.mark.parametrize("turns", (False, True))
@pytest.mark.parametrize("warpgroups", (1, 2, 3))
def test_a_timeline_keeps_the_order_and_does_all_the_work(program, turns, warpgroups):
    steps = model.timeline(program, warpgroups, 3, 5, tiles=7, turns=turns)
    when = {(s.who, s.what, s.tile): s for s in steps}
    assert len(steps) == len(when) == 3 * 7 * warpgroups
    for (who, what, i), s in when.items():
        assert s.end - s.start >= (5 if what == "softmax" else 3) - 1e-9
        for other, j in {"S": [("softmax", i - 1)], "softmax": [("S", i)],
                         "PV": [("softmax", i), ("PV", i - 1)]}[what]:  # fmt: skip
            if j >= 0:
                assert when[who, other, j].end <= s.start + 1e-9
    for unit, each in (("products", 6), ("softmax", 5)):  # a unit does no more than it can
        mine = [s for s in steps if s.unit == unit]
        assert max(s.end for s in mine) - min(s.start for s in mine) >= 7 * warpgroups * each - 1e-9
    if turns:
        for (who, what, i), s in when.items():
            if what == "S" and i > 0 and who > 0:
                assert when[who - 1, "PV", i - 1].end <= s.start + 1e-9


def test_the_new_order_is_right_and_the_early_rescale_is_not():
    Q, K, V = (3 * x for x in np.random.default_rng(1).standard_normal((3, 40, 16)))
    exact = standard_attention(Q, K, V)[0]
    for Bc in (40, 8, 7):
        assert np.allclose(model.attention_overlapped(Q, K, V, Bc), exact, atol=1e-12)
    assert not np.allclose(model.attention_overlapped(Q, K, V, 8, late_rescale=False), exact)


def test_blocks_and_ways_to_deal_them():
    blocks = model.blocks_of(16, 16_384, 128)
    assert blocks[:2] == [(0, 128), (0, 127)] and blocks[128] == (1, 128)
    total = 16 * 128 * 129 // 2
    for order in ("as they come", "longest first", "longest first, all heads"):
        mine = model.blocks_of(16, 16_384, 128, order)
        assert sorted(mine) == sorted(blocks)
        for draw in (False, True):
            load = model.loads(model.deal(mine, 132, draw), 132)
            assert sum(load) == total and max(load) >= total / 132
    fixed = model.loads(model.deal(blocks, 132, draw=False), 132)
    assert fixed[0] == sum(128 - 4 * k for k in range(16))
    # longest first of all heads is LPT: at most 4/3 of the best, here far better
    lpt = model.deal(model.blocks_of(16, 16_384, 128, "longest first, all heads"), 132)
    assert max(model.loads(lpt, 132)) < 1.01 * total / 132
    assert model.heads_at_once(lpt) == 16
    assert model.heads_at_once(model.deal(blocks, 132)) < 8
    assert model.deal([(0, 5), (0, 4), (0, 3)], 2) == [(0, 0, 0, 5), (1, 0, 0, 4), (1, 0, 4, 7)]
    # 192 rows: the tiles of keys that rows 0 to 191 see are two
    assert model.blocks_of(1, 384, 192, "as they come") == [(0, 2), (0, 3)]
    with pytest.raises(ValueError, match="order is 'random'"):
        model.blocks_of(1, 128, 128, "random")
    with pytest.raises(ValueError, match="sms"):
        model.deal(blocks, 0)


def test_tiles_that_a_reader_sees_by_looking_at_every_row():
    for N in (1, 64, 200, 1024):
        loaded = seen = 0
        for block in range(0, N, 192):
            tiles = {key // 128 for row in range(block, min(block + 192, N)) for key in (0, row)}
            loaded += 3 * (1 + max(tiles))
            for top in range(block, block + 192, 64):
                seen += max((row // 128 + 1 for row in range(top, min(top + 64, N))), default=0)
        assert model.reader_tiles(N, 192) == (loaded, seen)
    assert model.reader_tiles(1024, 192) == (96, 72)
    assert model.reader_tiles(1024, 128)[0] == model.reader_tiles(1024, 128)[1]  # Br = Bc: all seen
    with pytest.raises(ValueError, match="Br is 100"):
        model.reader_tiles(1024, 100)


def test_fma_rounds_once():
    x = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    for a, b, c in x.T[:200]:
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        got = model.fma(a, b, c)
        around = [float(np.nextafter(got, np.float32(s))) for s in (-9, 9)]
        error = abs(Fraction(float(got)) - exact)
        assert all(error <= abs(Fraction(y) - exact) for y in around)
    shift = x[0] * x[1]
    assert (x[0] * x[1] - shift == 0).all() and (model.fma(x[0], x[1], -shift) != 0).mean() > 0.9


def test_the_drift_grows_with_the_tiles_and_is_mended():
    S = (8 * np.random.default_rng(2).standard_normal((100, 64 * 64))).astype(np.float32)
    c = math.log2(math.e) / 8
    size = {mended: np.sqrt((model.drift(S, c, 64, mended) ** 2).mean(axis=1))
            for mended in (False, True)}  # fmt: skip
    assert size[False][0] == size[True][0]  # one tile: nothing is rescaled
    assert 3 < size[False][63] / size[False][15] < 5  # in proportion: 64 / 16
    assert size[True][63] < 2.5 * size[True][15] and size[True][63] < 1e-6
    assert size[False][63] > 8 * size[True][63]


def test_the_log_is_possible():
    for what, outcome, numbers in model.TRIES:
        assert what and outcome and len(numbers) in (0, 2)
        assert all(300 < x < 989 for x in numbers)
        assert not numbers or ("faster" in outcome) == (numbers[1] > numbers[0])
    for N, (before, after, _) in model.SKIPPED.items():  # no more than what is left out, and noise
        loaded, seen = model.reader_tiles(N, 192)
        assert 1 < after / before < 1.01 * loaded / seen
    assert all(0.96 < after / before < 0.98 for before, after in model.ALL_ARRIVE.values())
    gains = [round(100 * (after / branch - 1)) for branch, after in model.BRANCH.values()]
    assert (min(gains), max(gains)) == (3, 4)  # "3 to 4%"
    assert all(2.4 < branch / moves[-1] < 2.6 for branch, *moves in model.MOVES.values())


def test_what_notebook_21_says_of_the_recording():
    rows = [r for r in recordings.read("bench")["rows"] if r["pass"] == "forward"]
    rows = {(r["kernel"], r["dtype"], r["d"], r["N"], r["causal"]): r for r in rows}
    speed = {key: r["tflops"] for key, r in rows.items()}

    def gain(d, causal):
        at = ("float16", d, 16_384, causal)
        return speed["overlap", *at] / speed["specialised", *at]

    assert 1.28 < gain(64, False) < 1.38 and 1 < gain(128, False) < 1.1  # p21-3, the summary
    assert 1.2 < gain(64, True) < gain(64, False) and 1 < gain(128, True) < gain(128, False)
    over = {k[1:]: r["tflops"] / r["cudnn"] for k, r in rows.items() if k[0] == "overlap"}
    assert {k[1:] for k, x in over.items() if x < 1} == {(64, 1024, True)}
    behind = [100 * (1 - x) for k, x in over.items() if k[1:] == (64, 1024, True)]
    assert [round(x) for x in sorted(behind)] == [2, 3]  # percent
    before, _, cudnn = model.SKIPPED[1024]
    assert round(100 * (1 - before / cudnn)) == 20


def test_pictures():
    steps = model.timeline(overlapped, 2, 256, 512, turns=True)
    axes = model.draw_timelines({"a": steps, "b": steps}, 2000).axes
    assert [ax.get_title(loc="left") for ax in axes] == ["a", "b"]
    assert axes[0].get_xlim() == (0, 2000) and len(axes[0].patches) > 8
    ax = model.draw_clocks({"x": model.clocks(64)}, {"x": {"now": 900}}).axes[0]
    assert max(p.get_x() + p.get_width() for p in ax.patches) == sum(model.clocks(64).values())
    ax = model.draw_loads({"a": [3, 5, 4]}, 4).axes[0]
    assert list(ax.lines[0].get_ydata()) == [5, 4, 3]
    ax = model.draw_drift([1, 2], {"bad": [1e-7, 2e-7], "good": [1e-7, 1e-7]}).axes[0]
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_the_questions_know_their_answers():
    truth = {q.id: q.truth() for q in nb21.QUESTIONS if hasattr(q, "truth")}
    assert truth == {
        "p21-1": 100,
        "p21-2": 2 * (256 + 512 + 256),
        "p21-4": math.ceil(16_384 / 192),
        "p21-5": sum(range(68, 129, 4)),
        "p21-7": 75,
    }
    assert ladder.rung("overlap").rows(64) == 192
    assert check("p21-4", 86).status == "passed"
    assert check("p21-4", 128).misconception == "rung-7"
    assert check("p21-7", 75).status == "passed"
    assert check("p21-7", 56.25).misconception == "all-of-the-square"
