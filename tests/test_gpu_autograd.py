"""The kernels inside torch: gradients of gpu.attention, and the drop-in for the framework call."""

import contextlib
import importlib
from collections import Counter

import pytest

from attention_lib import gpu
from tests import test_gpu, test_gpu_gradients

autograd = importlib.import_module("attention_lib.gpu.autograd")

needs_gpu = pytest.mark.skipif(not gpu.available(), reason=f"needs a GPU: {gpu.missing()}")


def framework():
    torch = test_gpu.torch_()
    return torch, torch.nn.functional


# ---------------------------------------------------------------- on any machine


@pytest.mark.skipif(gpu.available(), reason="needs a GPU to be absent")
def test_without_a_gpu_nothing_is_replaced():
    with pytest.raises(gpu.NoGPU):
        gpu.register()
    with pytest.raises(gpu.NoGPU), gpu.registered():
        raise AssertionError("not reached")


Q, K, GPU = (2, 8, 5, 64), (2, 8, 9, 64), "not on one GPU"
REASONS = [
    ((Q, K, K), {}, GPU),
    ((Q, K, K), {"is_causal": True}, GPU),
    ((Q, K, K), {"scale": 0.125}, GPU),
    ((Q, K, K), {"scale": 0.1}, "scale"),
    ((Q, K, K), {"attn_mask": 1}, "a mask"),
    ((Q, K, K), {"dropout_p": 0.1}, "dropout"),
    ((Q[1:], K[1:], K[1:]), {}, "not (batch, heads, N, d)"),
    ((Q, (2, 2, 9, 64), (2, 2, 9, 64)), {}, "batch or heads"),
    ((Q, (2, 2, 9, 64), (2, 2, 9, 64)), {"enable_gqa": True}, GPU),
    ((Q, (2, 3, 9, 64), (2, 3, 9, 64)), {"enable_gqa": True}, "batch or heads"),
    ((Q, (1, 8, 9, 64), (1, 8, 9, 64)), {}, "batch or heads"),
    ((Q, K, (2, 8, 9, 128)), {}, "d, or another d for V"),
    (((2, 8, 5, 96),) * 3, {}, "d, or another d for V"),
]


@pytest.mark.parametrize("shapes, given, expected", REASONS)
def test_a_call_goes_to_the_framework_for_a_reason(shapes, given, expected):
    """The last question is where the tensors are: there the CPU's get a no."""
    torch, _ = framework()
    tensors = [torch.empty(shape, dtype=torch.float16) for shape in shapes]
    assert autograd.reason(*tensors, **given) == expected
    if expected == "not on one GPU":
        assert autograd.reason(*(x.float() for x in tensors), **given) == "dtype"
        x = torch.Tensor._make_subclass(type("Own", (torch.Tensor,), {}), tensors[0])
        assert autograd.reason(x, *tensors[1:], **given) == "a subclass of Tensor"


@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.0}])
def test_on_the_cpu_the_framework_answers_as_before(given):
    torch, F = framework()
    before, used = F.scaled_dot_product_attention, Counter()
    replaced = autograd.replacement(before, used)
    x, y, z = torch.randn(3, 1, 2, 6, 64)
    assert torch.equal(replaced(x, y, z, **given), before(x, y, z, **given))
    assert used == {"dtype": 1}
    assert replaced.__doc__ == before.__doc__


# ---------------------------------------------------------------- on a GPU


def leaves(*tensors, asks=(True, True, True)):
    return [x.detach().clone().requires_grad_(ask) for x, ask in zip(tensors, asks, strict=True)]


@needs_gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_are_as_good_as_the_frameworks(dtype, d, causal, kv_heads):
    torch, _ = framework()
    *given, dO = test_gpu_gradients.draw(300, 300, d, dtype, heads=4, kv_heads=kv_heads)
    off = 0 if causal else None
    ours = leaves(*given)
    gpu.attention(*ours, causal=causal).backward(dO)
    true, other = (f(*given, dO, off) for f in (test_gpu_gradients.exact, test_gpu_gradients.peer))
    for x, t, o in zip(ours, true, other, strict=True):
        error, theirs = ((y.double() - t).norm().item() for y in (x.grad, o))
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
        assert error <= max(3 * theirs, torch.finfo(x.dtype).eps * t.norm().item())


@needs_gpu
@pytest.mark.parametrize("asks", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
def test_only_who_asks_gets_a_gradient(asks):
    torch, _ = framework()
    *given, dO = test_gpu_gradients.draw(100, 120, 64, "float16")
    all_three, some = leaves(*given), leaves(*given, asks=map(bool, asks))
    for x in (all_three, some):
        gpu.attention(*x, causal=True).backward(dO)
    for full, x, ask in zip(all_three, some, asks, strict=True):
        assert (x.grad is not None) == bool(ask)
        if ask:  # dQ is added up in any order, and then rounded
            bound = 4 * torch.finfo(x.dtype).eps * full.grad.abs().max().item()
            assert (full.grad - x.grad).abs().max().item() <= bound


@needs_gpu
def test_a_gradient_goes_through_the_rest_of_the_graph():
    torch, F = framework()
    x = torch.randn(2, 50, 4 * 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(3 * 256, 256, device="cuda", dtype=torch.bfloat16) / 16
    found = []
    for call in (lambda *a: gpu.attention(*a, causal=True),
                 lambda *a: F.scaled_dot_product_attention(*a, is_causal=True)):  # fmt: skip
        w = weight.clone().requires_grad_()
        Q, K, V = (x @ w.T).view(2, 50, 3, 4, 64).permute(2, 0, 3, 1, 4)
        call(Q, K, V).float().square().sum().backward()
        found.append(w.grad.double())
    assert ((found[0] - found[1]).norm() / found[1].norm()).item() < 0.02  # bfloat16 has 2^-8


@needs_gpu
def test_what_has_no_gradient_says_so():
    torch, _ = framework()
    Q, K, V, dO = test_gpu_gradients.draw(40, 40, 64, "float16")
    given = leaves(Q, K, V)
    O, L = gpu.attention(*given, return_lse=True)
    assert O.requires_grad and not L.requires_grad
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(O, given[0], dO, create_graph=True)
    narrow = [x[..., :32].detach().requires_grad_() for x in given]
    with pytest.raises(ValueError, match="d is 32; with a gradient: 64, 128"):
        gpu.attention(*narrow)
    with torch.no_grad():
        assert not gpu.attention(*narrow).requires_grad
        assert torch.equal(gpu.attention(*given), gpu.attention(Q, K, V))


@needs_gpu
def test_the_drop_in_is_there_and_then_gone():
    torch, F = framework()
    before = F.scaled_dot_product_attention
    Q, K, V, _ = test_gpu_gradients.draw(64, 64, 64, "float16", heads=4, kv_heads=4)
    with gpu.registered() as used:
        assert F.scaled_dot_product_attention is not before
        inside = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
        with gpu.registered() as inner:
            F.scaled_dot_product_attention(Q, K, V)
        assert inner == {"ours": 1} and used == {"ours": 1}
        mask = torch.ones(64, 64, device="cuda", dtype=torch.bool).tril()
        masked = F.scaled_dot_product_attention(Q, K, V, attn_mask=mask)
        F.scaled_dot_product_attention(Q.float(), K.float(), V.float())
        F.scaled_dot_product_attention(Q, K, V, dropout_p=0.5)
    assert used == {"ours": 1, "a mask": 1, "dtype": 1, "dropout": 1}
    assert F.scaled_dot_product_attention is before
    assert torch.equal(inside, gpu.attention(Q, K, V, causal=True))
    assert torch.equal(masked, before(Q, K, V, attn_mask=mask))
    with contextlib.suppress(ZeroDivisionError), gpu.registered():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is before


@needs_gpu
@pytest.mark.parametrize("Nq, Nk", [(50, 80), (80, 50)])
def test_causal_starts_where_the_frameworks_starts(Nq, Nk):
    torch, F = framework()
    Q, K, V, _ = test_gpu_gradients.draw(Nq, Nk, 64, "float16", heads=4, kv_heads=2)
    expected = F.scaled_dot_product_attention(
        Q.float(), K.float(), V.float(), is_causal=True, enable_gqa=True
    )
    with gpu.registered() as used:
        found = F.scaled_dot_product_attention(Q, K, V, is_causal=True, enable_gqa=True)
    assert used == {"ours": 1}
    assert (found - expected).abs().max().item() < 4 * 2**-11 * expected.abs().max().item()


@needs_gpu
def test_autocast_casts_as_the_frameworks_call_does():
    torch, F = framework()
    x = [torch.randn(2, 4, 70, 64, device="cuda", requires_grad=True) for _ in "QKV"]
    with gpu.registered() as used, torch.autocast("cuda", torch.bfloat16):
        O = F.scaled_dot_product_attention(*x)
    assert used == {"ours": 1} and O.dtype == torch.bfloat16
    O.float().sum().backward()
    assert all(y.grad.dtype == torch.float32 and torch.isfinite(y.grad).all() for y in x)


@needs_gpu
def test_a_model_trains_as_with_the_framework():
    """An encoder layer of torch, as it is: the losses of 20 steps agree within bfloat16's noise."""
    torch, _ = framework()

    def losses(context):
        torch.manual_seed(3)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True).cuda()
        x, goal = torch.randn(2, 4, 100, 256, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
        out = []
        with context as used:
            for _ in range(20):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = (layer(x).float() - goal).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                out.append(loss.item())
        return out, used

    theirs, _ = losses(contextlib.nullcontext())
    ours, used = losses(gpu.registered())
    assert used == {"ours": 20}
    assert ours[-1] < ours[0]
    assert max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) < 0.01
