"""The kernels' source in a notebook, recorded numbers, the models behind notebooks 14 and 15."""

import math

import numpy as np
import pytest

from attention_lib import gpu, standard_attention
from attention_lib.checks.questions import nb14, nb15
from attention_lib.gpu import fragments, ladder, recordings
from attention_lib.gpu.occupancy import blocks_per_sm, occupancy, room
from attention_lib.show import gpu as show
from attention_lib.show import gpu_kernels as picture

LANE = np.arange(32)


# ---------------------------------------------------------------- show/gpu.py


def test_show_kernel_prints_the_file_itself(capsys):
    show.show_kernel("algorithm_1", "for (int j0", lines=2)
    title, first, second = capsys.readouterr().out.splitlines()
    number = int(first[:4])
    assert title == f"rung1_algorithm_1.cu, lines {number} to {number + 1}"
    text = ladder._read("rung1_algorithm_1.cu").splitlines()
    assert [first[5:], second[5:]] == text[number - 1 : number + 1]


def test_show_kernel_looks_into_headers_and_says_what_is_wrong(capsys):
    show.show_kernel("swizzle", "void mma(", lines=1)
    assert capsys.readouterr().out.startswith("ptx.cuh, lines ")
    show.show_kernel("unfused", lines=1)
    assert capsys.readouterr().out.startswith("rung0_unfused.cu, lines 1 to 1\n")
    with pytest.raises(ValueError, match="marker is 'nowhere'"):
        show.show_kernel("swizzle", "nowhere")
    with pytest.raises(ValueError, match="kernel is 'rung9'"):
        show.show_kernel("rung9")


def test_live_or_recorded(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "available", lambda: False)
    rows = show.live_or_recorded("bench", lambda: ["live"])
    said = capsys.readouterr().out
    assert rows == recordings.read("bench")["rows"]
    assert " ".join(said.split()) == recordings.said(recordings.read("bench"))
    assert max(map(len, said.splitlines())) <= 88
    monkeypatch.setattr(gpu, "available", lambda: True)
    assert show.live_or_recorded("bench", lambda: ["live"]) == ["live"]
    assert capsys.readouterr().out == "Measured here, just now.\n"
    assert show.live_or_recorded("bench") == rows  # nothing to run: the recording, and it says so
    assert "Recorded on" in capsys.readouterr().out


# ---------------------------------------------------------------- occupancy


def test_occupancy_by_hand():
    # 65,536 / (96 x 256) = 2.67; 228 KiB / (42,752 + 1,024) = 5.3; 2048 / 256 = 8
    assert room(96, 256, 42_752) == {
        "registers": 2,
        "shared memory": 5,
        "threads": 8,
        "blocks": 32,
    }
    assert blocks_per_sm(96, 256, 42_752) == 2 and occupancy(96, 256, 42_752) == 0.25
    # a warp of 33 registers takes 5 pieces of 256: 65,536 / 1280 = 51 warps
    assert room(33, 32, 0)["registers"] == 51
    with pytest.raises(ValueError, match="threads is 0"):
        room(32, 0, 0)


def test_the_numbers_that_the_question_quotes_are_those_of_the_recording():
    registers, threads, shared = nb14.q_outer_usage()
    text = next(q for q in nb14.QUESTIONS if q.id == "p14-3").text
    for quoted in (f"{registers} registers", f"{threads} threads", f"{shared:,} bytes"):
        assert quoted in text.replace("\n", " ")


# ---------------------------------------------------------------- fragments


@pytest.mark.parametrize("which", "ABC")
def test_each_element_has_one_lane(which):
    rows, columns = fragments.SHAPES[which]
    matrix = np.arange(rows * columns).reshape(rows, columns)
    fragment = fragments.split(which, matrix)
    assert sorted(fragment.ravel()) == list(range(rows * columns))
    assert np.array_equal(fragments.join(which, fragment), matrix)
    with pytest.raises(ValueError, match="matrix has shape"):
        fragments.split(which, matrix[1:])


def test_places_are_those_of_the_manual():
    # PTX ISA: groupID = lane >> 2 = 1 and threadID_in_group = lane % 4 = 2 for lane 6
    assert fragments.places("A")[6].tolist() == [
        [1, 4], [1, 5], [9, 4], [9, 5], [1, 12], [1, 13], [9, 12], [9, 13],
    ]  # fmt: skip
    assert fragments.places("B")[6].tolist() == [[4, 1], [5, 1], [12, 1], [13, 1]]
    assert fragments.places("C")[6].tolist() == [[1, 4], [1, 5], [9, 4], [9, 5]]


def test_mma_is_a_product_and_two_pieces_of_S_are_one_A():
    rng = np.random.default_rng(0)
    A, B, C = (rng.standard_normal(fragments.SHAPES[x]) for x in "ABC")
    c = fragments.mma(*(fragments.split(x, m) for x, m in (("C", C), ("A", A), ("B", B))))
    assert np.allclose(fragments.join("C", c), C + A @ B, atol=1e-5)
    two = [fragments.split("C", A[:, :8]), fragments.split("C", A[:, 8:])]
    assert np.array_equal(np.concatenate(two, axis=1), fragments.split("A", A))


def test_ldmatrix_with_the_kernels_addresses():
    tile = np.arange(64 * 64).reshape(64, 64)
    a = fragments.ldmatrix(tile, 16 + LANE % 16, 32 + LANE // 16 * 8)
    assert np.array_equal(a, fragments.split("A", tile[16:32, 32:48]))
    b = fragments.ldmatrix(tile, 16 + LANE % 8 + LANE // 16 * 8, 32 + LANE // 8 % 2 * 8)
    assert np.array_equal(b[:, 4:], fragments.split("B", tile[24:32, 32:48].T))
    v = fragments.ldmatrix(tile, 16 + LANE % 16, 32 + LANE // 16 * 8, transposed=True)
    assert np.array_equal(v[:, 4:], fragments.split("B", tile[16:32, 40:48]))


@pytest.mark.parametrize("Nk, d", [(16, 16), (64, 64), (48, 128)])
def test_a_warp_computes_attention(Nk, d):
    rng = np.random.default_rng(d)
    Q = rng.standard_normal((16, d)).astype(np.float16)
    K, V = rng.standard_normal((2, Nk, d)).astype(np.float16)
    right = standard_attention(*(x.astype(np.float64) for x in (Q, K, V)))[0]
    # P and l: P is rounded to 11 bits, l is not; the weights of a row add up to 1
    assert abs(fragments.warp_attention(Q, K, V) - right).max() < 2**-11 * abs(V).max()


# ---------------------------------------------------------------- banks


@pytest.mark.parametrize("d, conflict", [(32, 4), (64, 8), (128, 8), (256, 8)])
def test_passes(d, conflict):
    """Rows 2 d bytes apart: 128 bytes or a multiple meet all eight, 64 bytes meet four."""
    for rows, columns in (
        (LANE % 16, LANE // 16 * 8),
        (LANE % 8 + LANE // 16 * 8, LANE // 8 % 2 * 8),
    ):
        assert fragments.ldmatrix_passes(rows, columns, d, fragments.plain) == 4 * conflict
        assert fragments.ldmatrix_passes(rows, columns, d, fragments.swizzled) == 4
    tile = {fragments.swizzled(r, c, d) for r in range(64) for c in range(d)}
    assert tile == set(range(0, 2 * 64 * d, 2))  # a permutation
    assert fragments.passes([0, 0, 128]) == 2  # the same piece is read once


@pytest.mark.parametrize("name, d, loads", [("tensor_cores", 64, 36), ("pipeline", 64, 32)])
def test_tile_passes_by_hand(name, d, loads):
    # 16 columns of Q (4 loads, not in rung 5), K and V: 16 loads each; four matrices a load
    assert fragments.tile_passes(name, d) == loads * 4 * (8 if name == "tensor_cores" else 1)


def test_the_model_explains_the_recorded_counter():
    """Reads of fragments are most of what shared memory passed, and never more than it."""
    rows = [r for r in recordings.read("counters")["rows"]]
    rows = [r for r in rows if r["kernel"] in ("tensor_cores", "swizzle", "pipeline")]
    assert {r["kernel"] for r in rows} == {"tensor_cores", "swizzle", "pipeline"}
    for r in rows:
        model = fragments.fragment_bytes(r["kernel"], r["N"], r["heads"], r["d"])
        assert 0.9 < model / r["shared_bytes"] < 1


def test_constants_of_the_model_are_those_of_the_kernel():
    """Rung 5's Br and shared memory follow from its tiles: Q, and two buffers of K and V."""
    for d in ladder.HEAD_DIMENSIONS:
        kernel = ladder.rung("pipeline")
        assert kernel.rows(d) == 16 * fragments._wide("pipeline", d) * 4
        tiles = kernel.rows(d) + 4 * fragments._Bc("pipeline", d)
        assert kernel.shared(d) == 2 * d * tiles


# ---------------------------------------------------------------- lazy rescale, pictures


def test_any_m_serves():
    rng = np.random.default_rng(1)
    S, V = 3 * rng.standard_normal((32, 640)), rng.standard_normal((640, 4))
    weights = np.exp2(S - S.max(axis=1, keepdims=True))
    right = weights @ V / weights.sum(axis=1, keepdims=True)
    counts = []
    for threshold in (0, 2, 8, 30):
        O, rescales = fragments.lazy_softmax_sum(S, V, 64, threshold)
        assert np.allclose(O, right, atol=1e-5)
        counts.append(rescales.sum())
    rises = np.maximum.accumulate(S.reshape(32, 10, 64).max(axis=2), axis=1)
    assert counts[0] == (np.diff(rises, axis=1) > 0).sum()
    assert counts == sorted(counts, reverse=True) and counts[-1] == 0


def test_double_buffer():
    assert picture.finish_times(2, 3, 4, 1)[-1][3] == 4 * (2 + 3)
    assert picture.finish_times(2, 3, 4, 2)[-1][3] == 2 + 4 * 3
    assert picture.finish_times(4, 3, 4, 2)[-1][3] == 4 * 4 + 3


@pytest.mark.parametrize("N, Br, Bc", [(1024, 128, 64), (100, 16, 24), (7, 3, 2)])
def test_causal_tiles_by_element(N, Br, Bc):
    kinds = picture.causal_tiles(N, Br, Bc)
    for i, j in np.ndindex(kinds.shape):
        rows = np.arange(i * Br, min(i * Br + Br, N))[:, None]
        seen = np.arange(j * Bc, min(j * Bc + Bc, N))[None] <= rows
        assert kinds[i, j] == (2 if seen.all() else 1 if seen.any() else 0)
    assert kinds.shape == (math.ceil(N / Br), math.ceil(N / Bc))


# ---------------------------------------------------------------- the open tasks


def block_max(body):
    def kernel(t, x, n, out):
        s = t.shared("s", t.blockDim)
        s[t.threadIdx] = x[t.threadIdx] if t.threadIdx < n else -math.inf
        yield
        yield from body(t, s)
        if t.threadIdx == 0:
            out[0] = s[0]

    return kernel


def tree(t, s, barrier=True):
    half = t.blockDim // 2
    while half > 0:
        if t.threadIdx < half:
            s[t.threadIdx] = max(s[t.threadIdx], s[t.threadIdx + half])
        if barrier:
            yield
        half //= 2


def one_thread(t, s):
    if t.threadIdx == 0:
        s[0] = max(s[k] for k in range(t.blockDim))
    yield


def test_the_task_of_notebook_14():
    for body in (tree, one_thread):
        assert nb14.check_block_max(block_max(body)).status == "passed"
    racy = nb14.check_block_max(block_max(lambda t, s: tree(t, s, barrier=False)))
    assert (racy.status, racy.misconception) == ("not yet", "missing-barrier")
    nothing = nb14.check_block_max(block_max(lambda t, s: iter(())))
    assert nothing.status == "not yet" and "largest" in nothing.message
    assert "raised" in nb14.check_block_max(lambda t: None).message


def test_the_task_of_notebook_15():
    for piece in (lambda r, c: c ^ r % 8, lambda r, c: (c + r) % 8, lambda r, c: (c - r) % 8):
        assert nb15.check_swizzle(piece).status == "passed"
    assert nb15.check_swizzle(lambda r, c: c).status == "not attempted"
    assert nb15.check_swizzle(lambda r, c: r % 8).misconception == "pieces-collide"
    assert nb15.check_swizzle(lambda r, c: (c + r // 2) % 8).misconception == "conflict"
    assert "raised" in nb15.check_swizzle(lambda r: r).message
