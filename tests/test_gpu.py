"""The kernels on a GPU: against float64 and the framework, over ragged and extreme shapes.

A rung is right when its error is at most twice that of the framework's own call at the same
precision (three times for L). Rung 0 writes S to HBM in 16 bits, so its peer is the framework's
three separate calls, which do the same.
"""

import math

import pytest

from attention_lib import gpu
from attention_lib.gpu import ladder

pytestmark = pytest.mark.skipif(not gpu.available(), reason=f"needs a GPU: {gpu.missing()}")
CAPABILITY = 0
if gpu.available():
    import cupy

    CAPABILITY = int(cupy.cuda.Device().compute_capability)
KERNELS = [k.name for k in ladder.LADDER if k.runs_on(CAPABILITY)]
CASES = [(k.name, d) for k in ladder.LADDER if k.runs_on(CAPABILITY) for d in k.heads_d]
SHAPES = [
    (1, 1),
    (1, 4096),
    (239, 1),
    (799, 3),
    (1023, 1024),
    (113, 203),
    (4224, 4224),
    (300, 129),
    (64, 48),
]
MASKS = [(False, "lower-right"), (True, "lower-right"), (True, "upper-left")]


def torch_():
    return pytest.importorskip("torch", reason="needs torch")


def offset(Nq, Nk, causal, align):
    return None if not causal else Nk - Nq if align == "lower-right" else 0


def hidden(Nq, Nk, off):
    torch = torch_()
    i, j = torch.arange(Nq, device="cuda")[:, None], torch.arange(Nk, device="cuda")[None]
    return j > i + off


def exact(Q, K, V, off):
    """O and L in float64, a head at a time."""
    torch = torch_()
    group = Q.shape[1] // K.shape[1]
    O = torch.empty(Q.shape, dtype=torch.float64, device="cuda")
    L = torch.empty(Q.shape[:3], dtype=torch.float64, device="cuda")
    for b in range(Q.shape[0]):
        for h in range(Q.shape[1]):
            q, k, v = Q[b, h].double(), K[b, h // group].double(), V[b, h // group].double()
            S = q @ k.T / math.sqrt(Q.shape[3])
            if off is not None:
                S.masked_fill_(hidden(*S.shape, off), -math.inf)
            L[b, h] = torch.logsumexp(S, -1)
            S -= torch.where(torch.isinf(L[b, h]), 0, L[b, h])[:, None]
            O[b, h] = S.exp_() @ v
    return O, L


def peer(kernel, Q, K, V, off):
    """The framework at the same precision: O, and L where it is the fused call that gives it."""
    torch = torch_()
    group = Q.shape[1] // K.shape[1]
    Q = Q.contiguous()  # the framework's private call takes no other alignment
    K, V = (x.repeat_interleave(group, 1).contiguous() for x in (K, V))
    seen = None if off is None else ~hidden(Q.shape[2], K.shape[2], off)
    scale = 1 / math.sqrt(Q.shape[3])
    if kernel == "unfused":
        S = (Q @ K.transpose(-1, -2)) * scale
        if seen is not None:
            S = S.masked_fill(~seen, -math.inf)
        return torch.nan_to_num(torch.softmax(S, -1)) @ V, torch.logsumexp(S.float(), -1)
    if off is None or (off == 0 and Q.shape[2] == K.shape[2]):
        O, L, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            Q, K, V, is_causal=off is not None, scale=scale
        )
        return O, L[..., : Q.shape[2]]
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        O = torch.nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=seen)
    return torch.nan_to_num(O), None


def draw(Nq, Nk, d, dtype, kind="normal", batch=2, heads=4, kv_heads=2):
    """Fresh inputs, laid out (batch, N, heads, d) and transposed: strided, as a model has them."""
    torch = torch_()
    dtype = getattr(torch, dtype)

    def normal(N, heads):
        return torch.randn(batch, N, heads, d, device="cuda", dtype=dtype).transpose(1, 2)

    Q, K, V = normal(Nq, heads), normal(Nk, kv_heads), normal(Nk, kv_heads)
    if kind == "huge":  # scores of up to some 1e4
        Q, K = Q * 50, K * 40
    if kind == "equal keys":
        K = K[:, :, :1].expand(K.shape)
    if kind == "rising":  # each key scores higher than the last, for every query
        Q, K = Q.abs(), K.abs() * torch.linspace(0.02, 8, Nk, device="cuda", dtype=dtype)[:, None]
    return Q, K, V


def poison():
    """Leave NaN in the memory that the next outputs are made of."""
    import cupy

    block = cupy.empty(1 << 28, cupy.uint8)
    block.fill(0xFF)


def compare(kernel, Q, K, V, causal=False, align="lower-right"):
    torch = torch_()
    off = offset(Q.shape[2], K.shape[2], causal, align)
    poison()
    O, L = gpu.attention(Q, K, V, causal=causal, kernel=kernel, return_lse=True, align=align)
    true_O, true_L = exact(Q, K, V, off)
    peer_O, peer_L = peer(kernel, Q, K, V, off)
    assert O.shape == Q.shape and O.dtype == Q.dtype and L.dtype == torch.float32
    assert torch.isfinite(O).all()
    none = torch.isinf(true_L)
    assert (torch.isneginf(L) == none).all() and (O[none] == 0).all()

    def error(x, true):
        return (x.double() - true).norm().item()

    # Where the framework happens to be exact, one rounding of the output is allowed.
    rounding = torch.finfo(Q.dtype).eps / 4 * true_O.norm().item()
    assert error(O, true_O) <= max(2 * error(peer_O, true_O), rounding)
    seen = ~none
    own = (L.double() - true_L)[seen].abs().max().item() if seen.any() else 0
    if peer_L is not None:
        other = (peer_L.double() - true_L)[seen].abs().max().item() if seen.any() else 0
    else:
        other = 0
    largest = true_L[seen].abs().max().item() if seen.any() else 0
    bound = torch.finfo(torch.float32).eps * (largest + d_terms(Q))
    if kernel == "unfused":
        bound = torch.finfo(Q.dtype).eps * (largest + 1)  # its S has 16 bits
    assert own <= max(3 * other, bound)


def d_terms(Q):
    """Rounding of a float32 sum of d products: about sqrt(d) units, of the size of a score."""
    return math.sqrt(Q.shape[3]) * 4


@pytest.mark.parametrize("causal, align", MASKS)
@pytest.mark.parametrize("Nq, Nk", SHAPES)
@pytest.mark.parametrize("dtype", ladder.DTYPES)
@pytest.mark.parametrize("kernel, d", CASES)
def test_error_against_float64(kernel, dtype, d, Nq, Nk, causal, align):
    if Nq > 4000 and d not in (64, 128):
        Nq = Nk = 1100
    compare(kernel, *draw(Nq, Nk, d, dtype), causal, align)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["huge", "equal keys", "rising"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", ladder.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_values(kernel, dtype, d, kind, causal):
    compare(kernel, *draw(517, 517, d, dtype, kind), causal)


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_than_2_to_31_elements(kernel):
    """batch * heads * N * d is 2^31 and 2^17 more: an offset in 32 bits would wrap."""
    torch = torch_()
    batch, heads, N, d = 16_385, 16, 128, 64
    Q, K, V = (torch.randn(batch, heads, N, d, device="cuda", dtype=torch.float16) for _ in "QKV")
    assert Q.numel() > 2**31
    poison()
    O = gpu.attention(Q, K, V, kernel=kernel)
    for b in (0, batch // 2, batch - 1):
        part = (slice(b, b + 1), slice(None))
        true, _ = exact(Q[part], K[part], V[part], None)
        near, _ = peer(kernel, Q[part], K[part], V[part], None)
        error, other = ((x.double() - true).norm().item() for x in (O[part], near))
        assert error <= 2 * other


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_head_further_apart_than_2_to_31_elements(kernel):
    torch = torch_()
    wide = torch.randn(130, 2**24 + 64, device="cuda", dtype=torch.float16)
    Q = K = V = wide[None, None, :, -64:]
    assert (130 - 1) * Q.stride(2) > 2**31
    compare(kernel, Q, K, V)


@pytest.mark.parametrize("kernel", KERNELS)
def test_cupy_arrays(kernel):
    import cupy

    Q, K, V = cupy.random.standard_normal((3, 1, 2, 100, 64)).astype(cupy.float16)
    O, L = gpu.attention(Q, K, V, kernel=kernel, return_lse=True)
    assert isinstance(O, cupy.ndarray) and isinstance(L, cupy.ndarray)
    q, k, v = (x.astype(cupy.float64) for x in (Q, K, V))
    S = q @ k.swapaxes(-1, -2) / 8
    P = cupy.exp(S - S.max(-1, keepdims=True))
    true = P / P.sum(-1, keepdims=True) @ v
    bound = 4 * 2**-11 * float(abs(true).max())
    assert float(abs(O - true).max()) < bound


def test_torch_tensors_are_read_in_place():
    torch = torch_()
    from attention_lib.gpu import arrays, launch

    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(1, 50, 3, 64, device="cuda", dtype=dtype).transpose(1, 2)
        lib = arrays.library(x)
        layouts = [lib.layout("Q", x)] * 3
        for kernel in KERNELS:
            assert launch.plan(lib, *layouts, False, kernel, "lower-right").copied == (False,) * 3


def test_rows_that_are_not_on_16_bytes_are_copied():
    torch = torch_()
    for view in (
        lambda x: x[..., 1:65],  # starts at 2 bytes
        lambda x: x.mT[..., :64],  # d is not contiguous
    ):
        Q = view(torch.randn(1, 2, 72, 72, device="cuda", dtype=torch.float16))
        compare("pipeline", Q, Q, Q)


def test_runs_on_the_current_stream():
    torch = torch_()
    Q, K, V = draw(2048, 2048, 64, "float16")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = Q * 2  # ready only after the sleep: another stream would read something else
        O = gpu.attention(late, K, V)
    side.synchronize()
    assert torch.equal(O, gpu.attention(Q * 2, K, V))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_bits_every_time(kernel):
    torch = torch_()
    Q, K, V = draw(700, 700, 64, "float16")
    first = gpu.attention(Q, K, V, causal=True, kernel=kernel)
    for _ in range(5):
        poison()
        assert torch.equal(first, gpu.attention(Q, K, V, causal=True, kernel=kernel))


def test_nothing_to_see_and_nothing_to_do():
    torch = torch_()
    Q, none = torch.randn(1, 2, 5, 64, device="cuda").half(), torch.empty(1, 2, 0, 64).half().cuda()
    O, L = gpu.attention(Q, none, none, return_lse=True)
    assert (O == 0).all() and torch.isneginf(L).all()
    assert gpu.attention(none, Q, Q).shape == (1, 2, 0, 64)


@pytest.mark.parametrize("d", ladder.HEAD_DIMENSIONS)
def test_choice_says_why(d):
    name, reason = gpu.choose(d)
    last = [kernel for kernel, has in CASES if has == d][-1]
    assert name == last and f"capability {CAPABILITY} and d = {d}" in reason
    with pytest.raises(ValueError, match="d is 40; accepted: 32, 64, 128, 256"):
        gpu.choose(40)


@pytest.mark.parametrize("kernel", [k for k in ladder.LADDER if k.heads_d == (64, 128)])
def test_a_rung_names_the_d_it_takes(kernel):
    torch = torch_()
    Q = torch.randn(1, 2, 8, 32, device="cuda").half()
    with pytest.raises(ValueError, match=f"d is 32; accepted by {kernel.name}: 64, 128"):
        gpu.attention(Q, Q, Q, kernel=kernel.name)


BAD = [
    (lambda Q: (Q[0], Q, Q), ValueError, r"Q has shape \(2, 8, 64\); accepted: \(batch"),
    (lambda Q: (Q.float(), Q, Q), TypeError, "Q has dtype float32; accepted: float16, bfloat16"),
    (lambda Q: (Q, Q.bfloat16(), Q), TypeError, "K has dtype bfloat16; accepted: float16"),
    (lambda Q: (Q[..., :40], Q[..., :40], Q[..., :40]), ValueError, "d is 40; accepted: 32"),
    (lambda Q: (Q, Q[..., :32], Q), ValueError, r"K has shape .* accepted: \(1, heads, Nk, 64\)"),
    (lambda Q: (Q, Q, Q[:, :, :4]), ValueError, "V has shape .* accepted: the shape of K"),
    (lambda Q: (Q[:, :1], Q, Q), ValueError, "K has 2 heads; accepted: a divisor of the 1"),
    (lambda Q: (Q.cpu(), Q, Q), TypeError, "Q is on cpu; accepted: a CUDA tensor"),
]


@pytest.mark.parametrize("inputs, kind, message", BAD)
def test_bad_input_is_refused(inputs, kind, message):
    torch = torch_()
    Q = torch.randn(1, 2, 8, 64, device="cuda").half()
    with pytest.raises(kind, match=message):
        gpu.attention(*inputs(Q))
