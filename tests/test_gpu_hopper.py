"""The kernels beyond the ladder: Hopper's forward rungs, the backward pass, split-KV decoding.

Here they are compiled for every GPU they are for: no spill, and no warning of ptxas that says that
wgmma or setmaxnreg lost its effect (C7508 to C7519). On a Hopper GPU the rungs run too.
"""

import re

import pytest

from attention_lib import gpu
from attention_lib.gpu import hopper, ladder, nvrtc
from tests import test_gpu

LOST_SPEED = re.compile(r"\(C75(?:0[89]|1\d)\)")
ROOM = 227 * 1024  # what a block may ask for on Hopper; the files check that they fit

needs_nvrtc = pytest.mark.skipif(
    not nvrtc.available(), reason="needs Linux: NVRTC has no package for this system"
)


def lines(file, architecture, d, dtype, causal, shared):
    text = ladder.read(file)
    _, log = nvrtc.compile_text(text, file, architecture, ladder.options(d, dtype, causal, shared))
    used = nvrtc.usage(log)
    assert used and not LOST_SPEED.search(log), log
    assert all(row["spill_bytes"] == 0 for row in used.values()), (file, architecture, used)
    return used


@needs_nvrtc
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ladder.DTYPES)
@pytest.mark.parametrize("d", hopper.HEAD_DIMENSIONS)
@pytest.mark.parametrize("kernel", hopper.RUNGS, ids=lambda k: k.name)
def test_a_hopper_rung_compiles_without_a_spill_or_a_lost_idea(kernel, d, dtype, causal):
    assert kernel.shared(d) <= ROOM
    used = lines(kernel.file, "sm_90a", d, dtype, causal, kernel.shared(d))
    assert set(used) == {"attention"}
    # At the start every thread has as many; setmaxnreg moves them from the loader to the readers.
    assert used["attention"]["registers"] * kernel.threads(d) <= 65_536


@needs_nvrtc
def test_the_matrix_product_compiles_and_is_short():
    lines("matmul.cu", "sm_90a", 64, "float16", False, hopper.MATMUL_SHARED)
    assert len(ladder.read("matmul.cu").splitlines()) < 300  # with the instructions' wrappers


@needs_nvrtc
@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_backward_and_decode_compile_without_a_spill(d, causal, architecture):
    entries = lines("backward.cu", architecture, d, "float16", causal, ROOM)
    assert set(entries) == {"prepare", "keys", "queries", "finish"}
    assert set(lines("decode.cu", architecture, d, "bfloat16", causal, ROOM)) == {"split", "merge"}


@needs_nvrtc
def test_lost_speed_would_be_seen():
    """wgmma between ordinary reads of its registers: ptxas waits after each, and says so."""
    text = ladder.read("rung6_wgmma.cu").replace("wgmma_wait<0>();\n        rows.hide", "rows.hide")
    _, log = nvrtc.compile_text(
        text, "x.cu", "sm_90a", ladder.options(64, "float16", False, hopper.RUNGS[0].shared(64))
    )
    assert LOST_SPEED.search(log)


def test_an_unknown_rung_is_named():
    with pytest.raises(ValueError, match="kernel is 'fastest'; accepted: 'wgmma'"):
        hopper.rung("fastest")


@pytest.mark.skipif(gpu.available(), reason="needs a GPU to be absent")
def test_without_a_gpu_it_says_so():
    with pytest.raises(gpu.NoGPU):
        hopper.attention(None, None, None)
    with pytest.raises(gpu.NoGPU):
        hopper.matmul(None, None)


# ---------------------------------------------------------------- on a Hopper GPU


def is_hopper():
    if not gpu.available():
        return False
    import cupy

    return cupy.cuda.Device().compute_capability == "90"


needs_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a GPU: one of Hopper")


@needs_hopper
@pytest.mark.parametrize("causal, align", test_gpu.MASKS)
@pytest.mark.parametrize("Nq, Nk", test_gpu.SHAPES)
@pytest.mark.parametrize("d", hopper.HEAD_DIMENSIONS)
@pytest.mark.parametrize("dtype", ladder.DTYPES)
@pytest.mark.parametrize("kernel", [k.name for k in hopper.RUNGS])
def test_error_against_float64(kernel, dtype, d, Nq, Nk, causal, align, monkeypatch):
    monkeypatch.setattr(test_gpu.gpu, "attention", hopper.attention)
    test_gpu.compare(kernel, *test_gpu.draw(Nq, Nk, d, dtype), causal, align)


@needs_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["huge", "equal keys", "rising"])
@pytest.mark.parametrize("d", hopper.HEAD_DIMENSIONS)
@pytest.mark.parametrize("kernel", [k.name for k in hopper.RUNGS])
def test_extreme_values(kernel, d, kind, causal, monkeypatch):
    monkeypatch.setattr(test_gpu.gpu, "attention", hopper.attention)
    test_gpu.compare(kernel, *test_gpu.draw(517, 517, d, "float16", kind), causal)


@needs_hopper
@pytest.mark.parametrize("M, N, K", [(1, 1, 8), (128, 128, 64), (300, 200, 72), (1000, 513, 1024)])
@pytest.mark.parametrize("dtype", ladder.DTYPES)
def test_matmul(M, N, K, dtype):
    import cupy as cp

    A, B = (cp.random.standard_normal((n, K)).astype(dtype) for n in (M, N))
    true = A.astype(cp.float64) @ B.astype(cp.float64).T
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert float(cp.linalg.norm(hopper.matmul(A, B) - true)) <= rounding * float(
        cp.linalg.norm(true)
    )
