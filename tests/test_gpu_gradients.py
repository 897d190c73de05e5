"""gpu.backward: the compiler without a GPU; the gradients against float64 on one.

Right: the error of each gradient is at most three times that of the framework's backward pass in
the same precision. Each library starts from its own forward pass.
"""

import importlib
import math

import pytest

from attention_lib import gpu
from attention_lib.gpu import ladder, nvrtc
from tests import test_gpu

backward = importlib.import_module("attention_lib.gpu.gradients")

needs_nvrtc = pytest.mark.skipif(
    not nvrtc.available(), reason="needs Linux: NVRTC has no package for this system"
)
needs_gpu = pytest.mark.skipif(not gpu.available(), reason=f"needs a GPU: {gpu.missing()}")
KERNELS = [k.name for k in backward.KERNELS if k.runs_on(test_gpu.CAPABILITY)]


# ---------------------------------------------------------------- on any machine


@needs_nvrtc
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", backward.HEAD_DIMENSIONS)
@pytest.mark.parametrize(
    "kernel, architecture",
    [(k, a) for k in backward.KERNELS for a in k.architectures()],
    ids=lambda x: getattr(x, "name", x),
)
def test_it_compiles_without_a_spill(kernel, architecture, d, causal, deterministic):
    for dtype in ladder.DTYPES if architecture.startswith("sm_90") else ladder.DTYPES[:1]:
        given = backward.options(kernel, d, dtype, causal, deterministic)
        text = ladder.read(kernel.file)
        _, log = nvrtc.compile_text(text, kernel.file, architecture, given)
        used = nvrtc.usage(log)
        assert {"prepare", "keys", "finish"} <= set(used) and not nvrtc.lost_speed(log)
        assert all(row["spill_bytes"] == 0 for row in used.values()), used
        assert kernel.threads * used["keys"]["registers"] <= 65_536


def test_the_first_kernel_runs_on_every_gpu_of_the_ladder_and_has_the_swapped_loops():
    first = backward.KERNELS[0]
    assert first.runs_on(80) and first.runs_on(90) and not first.runs_on(75)
    assert "queries(const Params" in ladder.read(first.file)
    for d in backward.HEAD_DIMENSIONS:
        assert max(first.shared(d), backward.queries_shared(d)) <= 163 * 1024  # of an A100's block


def test_the_best_kernel_is_the_last_that_can_run():
    assert backward.choose(None, 80).name == "mma"
    assert backward.choose(None, 90) is [k for k in backward.KERNELS if k.runs_on(90)][-1]
    assert backward.choose("mma", 90).name == "mma"
    with pytest.raises(ValueError, match="kernel is 'fastest'; accepted: 'mma'"):
        backward.choose("fastest", 90)
    with pytest.raises(gpu.NoGPU, match="compute capability 75"):
        backward.choose(None, 75)


@pytest.mark.skipif(gpu.available(), reason="needs a GPU to be absent")
def test_without_a_gpu_it_says_so():
    with pytest.raises(gpu.NoGPU, match=r"no kernel can run.*attention_lib\.tiled"):
        gpu.backward(None, None, None, None, None, None)


# ---------------------------------------------------------------- on a GPU


def exact(Q, K, V, dO, off):
    """dQ, dK, dV in float64, a head at a time."""
    torch = test_gpu.torch_()
    group, scale = Q.shape[1] // K.shape[1], 1 / math.sqrt(Q.shape[3])
    dQ, dK, dV = (torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in (Q, K, V))
    for b in range(Q.shape[0]):
        for h in range(Q.shape[1]):
            q, k, v = Q[b, h].double(), K[b, h // group].double(), V[b, h // group].double()
            g = dO[b, h].double()
            S = q @ k.T * scale
            if off is not None:
                S.masked_fill_(test_gpu.hidden(*S.shape, off), -math.inf)
            P = torch.nan_to_num(torch.softmax(S, -1))
            dP = g @ v.T
            dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * scale
            dQ[b, h] = dS @ k
            dK[b, h // group] += dS.T @ q
            dV[b, h // group] += P.T @ g
    return dQ, dK, dV


def peer(Q, K, V, dO, off):
    """The framework's gradients in the same precision: FLASH where it runs, else the fused call
    that takes a mask, for the rows that see a key."""
    torch = test_gpu.torch_()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    Nq, Nk, group = Q.shape[2], K.shape[2], Q.shape[1] // K.shape[1]
    flash, mask, rows = off is None or (off == 0 and Nq == Nk), None, slice(None)
    if not flash:
        seen = ~test_gpu.hidden(Nq, Nk, off)
        rows = seen.any(-1)
        mask = seen[rows]
    q = Q[:, :, rows].contiguous().requires_grad_()
    k, v = (x.repeat_interleave(group, 1).contiguous().requires_grad_() for x in (K, V))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION):
        O = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=flash and off is not None
        )
    O.backward(dO[:, :, rows].contiguous())
    dQ = torch.zeros(Q.shape, dtype=torch.float64, device="cuda")
    dQ[:, :, rows] = q.grad.double()
    return dQ, *(x.grad.double().unflatten(1, (-1, group)).sum(2) for x in (k, v))


def forward(Q, K, V, causal, align):
    return gpu.attention(Q, K, V, causal=causal, align=align, return_lse=True)


def compare(kernel, Q, K, V, dO, causal=False, align="lower-right", deterministic=False):
    torch = test_gpu.torch_()
    off = test_gpu.offset(Q.shape[2], K.shape[2], causal, align)
    O, L = forward(Q, K, V, causal, align)
    test_gpu.poison()
    for size in (1 << 18, 1 << 24):
        torch.full((size,), math.nan, device="cuda")
    found = gpu.backward(
        Q, K, V, O, L, dO, causal=causal, deterministic=deterministic, align=align, kernel=kernel
    )
    for name, x, true, other, like in zip(
        ("dQ", "dK", "dV"),
        found,
        exact(Q, K, V, dO, off),
        peer(Q, K, V, dO, off),
        (Q, K, V),
        strict=True,
    ):
        assert x.shape == like.shape and x.dtype == like.dtype and torch.isfinite(x).all(), name
        # Where the framework happens to be exact, one rounding of the output is allowed; and where
        # dP - D should be zero, what is left of a sum of d products in float.
        rounding = torch.finfo(Q.dtype).eps / 2 * true.norm().item()  # at most, of each number
        rest = torch.finfo(torch.float32).eps * Q.shape[3] * math.sqrt(true.numel())
        error, theirs = ((y.double() - true).norm().item() for y in (x, other))
        assert error <= max(3 * theirs, rounding, rest), (name, error, theirs)


def draw(Nq, Nk, d, dtype, kind="normal", **heads):
    torch = test_gpu.torch_()
    Q, K, V = test_gpu.draw(Nq, Nk, d, dtype, kind, **heads)
    return Q, K, V, torch.randn_like(Q)


@needs_gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal, align", test_gpu.MASKS)
@pytest.mark.parametrize("Nq, Nk", test_gpu.SHAPES)
@pytest.mark.parametrize("d", backward.HEAD_DIMENSIONS)
@pytest.mark.parametrize("dtype", ladder.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_error_against_float64(kernel, dtype, d, Nq, Nk, causal, align, deterministic):
    if Nq > 4000:
        Nq = Nk = 2113
    compare(kernel, *draw(Nq, Nk, d, dtype), causal, align, deterministic)


@needs_gpu
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (8, 1), (1, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_that_share_keys(kernel, heads, kv_heads):
    compare(kernel, *draw(300, 300, 128, "float16", heads=heads, kv_heads=kv_heads), True)


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["huge", "equal keys", "rising"])
@pytest.mark.parametrize("d", backward.HEAD_DIMENSIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_values(kernel, d, kind, causal):
    Q, K, V, dO = draw(517, 517, d, "bfloat16", kind)
    compare(kernel, Q, K, V, dO, causal)


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ladder.DTYPES)
@pytest.mark.parametrize("d", backward.HEAD_DIMENSIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_deterministic_gives_the_same_bits(kernel, d, dtype, causal):
    torch = test_gpu.torch_()
    Q, K, V, dO = draw(1500, 1500, d, dtype)
    O, L = forward(Q, K, V, causal, "lower-right")
    given = {"causal": causal, "deterministic": True, "kernel": kernel}
    first = gpu.backward(Q, K, V, O, L, dO, **given)
    for _ in range(5):
        test_gpu.poison()
        again = gpu.backward(Q, K, V, O, L, dO, **given)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@needs_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_of_all_kinds(kernel):
    """dO of a sum has strides of 0; a sliced row starts at 2 bytes; a transposed d."""
    torch = test_gpu.torch_()
    Q, K, V, dO = draw(200, 200, 64, "float16")
    for odd in (
        dO[:1, :1, :1, :1].expand(dO.shape),
        torch.randn(*dO.shape[:3], 72, device="cuda").half()[..., 1:65],
        torch.randn(*dO.shape[:2], 64, 200, device="cuda").half().mT,
    ):
        compare(kernel, Q, K, V, odd, True)
        O, L = forward(Q, K, V, False, "lower-right")
        expected = gpu.backward(Q, K, V, O, L, odd.contiguous(), kernel=kernel, deterministic=True)
        L_odd = torch.stack([L, L], -1)[..., 0]  # not in order
        O_odd = torch.stack([O, O], -1)[..., 0]
        found = gpu.backward(Q, K, V, O_odd, L_odd, odd, kernel=kernel, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


@needs_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_cupy_arrays(kernel):
    import cupy

    torch = test_gpu.torch_()
    Q, K, V, dO = (x.contiguous() for x in draw(130, 150, 64, "float16"))
    O, L = forward(Q, K, V, False, "lower-right")
    given = {"kernel": kernel, "deterministic": True}
    expected = gpu.backward(Q, K, V, O, L, dO, **given)
    found = gpu.backward(*(cupy.from_dlpack(x) for x in (Q, K, V, O, L, dO)), **given)
    for x, y in zip(expected, found, strict=True):
        assert isinstance(y, cupy.ndarray) and torch.equal(x, torch.from_dlpack(y))


@needs_gpu
@pytest.mark.parametrize("Nq, Nk", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_gives_zeros(kernel, Nq, Nk):
    Q, K, V, dO = draw(Nq, Nk, 64, "float16")
    O, L = forward(Q, K, V, False, "lower-right")
    for x, like in zip(gpu.backward(Q, K, V, O, L, dO, kernel=kernel), (Q, K, V), strict=True):
        assert x.shape == like.shape and (x == 0).all()


BAD = [
    ({"O": lambda x: x[:, :, 1:]}, ValueError, r"O has shape \(1, 2, 7, 64\); accepted"),
    ({"dO": lambda x: x.float()}, TypeError, "dO has dtype float32; accepted: float16"),
    ({"L": lambda x: x.half()}, TypeError, "L has dtype float16; accepted: float32"),
    ({"L": lambda x: x.cpu()}, TypeError, "L is on cpu; accepted: a CUDA tensor"),
    ({"L": lambda x: None}, TypeError, "L is a NoneType; accepted: a CUDA tensor"),
    ({"K": lambda x: x[:, :, :, :32]}, ValueError, "K has shape"),
]


@needs_gpu
@pytest.mark.parametrize("change, kind, message", BAD)
def test_bad_input_is_refused(change, kind, message):
    torch = test_gpu.torch_()
    Q = torch.randn(1, 2, 8, 64, device="cuda").half()
    given = dict.fromkeys(("Q", "K", "V", "O", "dO"), Q) | {"L": torch.zeros(1, 2, 8).cuda()}
    for name, f in change.items():
        given[name] = f(given[name])
    with pytest.raises(kind, match=message):
        gpu.backward(**given)


@needs_gpu
def test_a_d_without_a_kernel_is_refused():
    torch = test_gpu.torch_()
    Q = torch.randn(1, 2, 8, 32, device="cuda").half()
    with pytest.raises(ValueError, match="d is 32; with a gradient: 64, 128"):
        gpu.backward(Q, Q, Q, Q, torch.zeros(1, 2, 8).cuda(), Q)
