"""The kernels on wgmma: what the compiler made of them, and the matrix product.

No spill, and no warning of ptxas that says that wgmma or setmaxnreg lost its effect (C7508 to
C7519). test_gpu.py runs the rungs.
"""

import pytest

from attention_lib import gpu
from attention_lib.gpu import hopper, ladder, nvrtc

ROOM = 227 * 1024  # what a block may ask for on Hopper; the files check that they fit
HOPPER = [k for k in ladder.LADDER if k.box]

needs_nvrtc = pytest.mark.skipif(
    not nvrtc.available(), reason="needs Linux: NVRTC has no package for this system"
)


def lines(file, architecture, d, dtype, causal, shared):
    text = ladder.read(file)
    _, log = nvrtc.compile_text(text, file, architecture, ladder.options(d, dtype, causal, shared))
    used = nvrtc.usage(log)
    assert used and not nvrtc.lost_speed(log), log
    assert all(row["spill_bytes"] == 0 for row in used.values()), (file, architecture, used)
    return used


@needs_nvrtc
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ladder.DTYPES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kernel", HOPPER, ids=lambda k: k.name)
def test_a_hopper_rung_loses_no_speed_to_the_compiler(kernel, d, dtype, causal):
    lines(kernel.file, "sm_90a", d, dtype, causal, kernel.shared(d))


@needs_nvrtc
def test_the_matrix_product_compiles_and_is_short():
    lines("matmul.cu", "sm_90a", 64, "float16", False, hopper.MATMUL_SHARED)
    assert len(ladder.read("matmul.cu").splitlines()) < 300  # with the instructions' wrappers


@needs_nvrtc
def test_lost_speed_would_be_seen():
    """wgmma between ordinary reads of its registers: ptxas waits after each, and says so."""
    text = ladder.read("rung6_wgmma.cu").replace("wgmma_wait<0>();\n        rows.hide", "rows.hide")
    _, log = nvrtc.compile_text(
        text, "x.cu", "sm_90a", ladder.options(64, "float16", False, HOPPER[0].shared(64))
    )
    assert nvrtc.lost_speed(log)


@pytest.mark.skipif(gpu.available(), reason="needs a GPU to be absent")
def test_without_a_gpu_it_says_so():
    with pytest.raises(gpu.NoGPU):
        hopper.matmul(None, None)


# ---------------------------------------------------------------- on a Hopper GPU


@pytest.mark.skipif(not gpu.available(), reason="needs a GPU: one of Hopper")
@pytest.mark.parametrize("M, N, K", [(1, 1, 8), (128, 128, 64), (300, 200, 72), (1000, 513, 1024)])
@pytest.mark.parametrize("dtype", ladder.DTYPES)
def test_matmul(M, N, K, dtype):
    import cupy as cp

    if int(cp.cuda.Device().compute_capability) != 90:
        pytest.skip("needs a GPU: one of Hopper")
    A, B = (cp.random.standard_normal((n, K)).astype(dtype) for n in (M, N))
    true = A.astype(cp.float64) @ B.astype(cp.float64).T
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    error = float(cp.linalg.norm(hopper.matmul(A, B) - true))
    assert error <= rounding * float(cp.linalg.norm(true))
