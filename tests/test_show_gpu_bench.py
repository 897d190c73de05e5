"""The pictures and the log of notebooks 16 to 18."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from attention_lib import gpu
from attention_lib.show import gpu_bench as picture


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def texts(ax):
    return [t.get_text() for t in ax.texts]


def test_the_log_of_tries_is_possible():
    for d, Bc, what, least, mean in picture.TRIES:
        assert d in (64, 128) and Bc % 16 == 0 and isinstance(what, str)
        assert 0.9 < least <= mean < 1.2


def test_a_ladder_shows_every_number_and_none_hides_another():
    fig = picture.draw_ladder(["a", "b"], {"x": [1.5, 40], "y": [0.7, 55]}, {"peak": 900})
    fig.draw_without_rendering()
    ax = fig.axes[0]
    assert set(texts(ax)) == {"1.5", "40", "0.7", "55", "peak"}
    boxes = [t.get_window_extent() for t in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_roofline_is_the_lower_of_slope_and_roof():
    points = {"low": (2.0, 1.0), "high": (2000.0, 300.0)}
    fig = picture.draw_rooflines([("DRAM", 4e12, {"peak": 1000.0}, points)] * 2)
    x, y = fig.axes[0].lines[0].get_data()
    assert np.allclose(y, np.minimum(4 * x, 1000)) and y[0] < 1000 == y[-1]


def test_parts_are_stacked_to_their_sum():
    bars = {"k": {"products": 0.2, "shared memory": 0.5, "DRAM": 0.1, "exp": 0.04}}
    ax = picture.draw_parts(bars).axes[0]
    assert max(p.get_x() + p.get_width() for p in ax.patches) == pytest.approx(0.84)
    assert "0.84" in texts(ax)


def test_banks_shapes_and_ratios_draw_all_rows():
    assert len(picture.draw_banks({"a": [0] * 8, "b": list(range(8))}).axes) == 2
    ax = picture.draw_shapes(["s", "t"], {"x": [1, 2], "y": [3, 4]}, "TFLOP/s").axes[0]
    assert [list(line.get_ydata()) for line in ax.lines] == [[1, 2], [3, 4]]
    ax = picture.draw_ratios(["s", "t"], {"x": [0.5, 2]}).axes[0]
    assert list(ax.lines[0].get_xdata()) == [0.5, 2]


def test_dram_reads_lie_beside_their_accounts():
    accounts = {"once": [3, 3], "a wave": [5, 9], "a block": [100, 200]}
    ax = picture.draw_outgrown([64, 128], accounts, [5.1, 9.9]).axes[0]
    assert {"5.1", "9.9", "counted", *accounts} <= set(texts(ax))


@pytest.mark.skipif(not gpu.available(), reason=f"needs a GPU: {gpu.missing()}")
def test_errors_of_every_backend_and_rung_are_those_of_16_bits():
    pytest.importorskip("torch", reason="needs torch")
    Q, K, V = np.random.default_rng(0).standard_normal((3, 256, 64)).astype(np.float16)
    errors = picture.errors(Q, K, V)
    assert {"unfused", "pipeline", gpu.choose(64)[0]} <= set(errors)
    assert all(0 < e < 4 * np.finfo(np.float16).eps for e in errors.values())


@pytest.mark.skipif(not gpu.available(), reason=f"needs a GPU: {gpu.missing()}")
def test_the_profiler_names_our_kernel():
    torch = pytest.importorskip("torch", reason="needs torch")
    Q = torch.randn(1, 1, 64, 64, device="cuda", dtype=torch.float16)
    assert any("attention" in name for name in picture.kernels_of(lambda: gpu.attention(Q, Q, Q)))
