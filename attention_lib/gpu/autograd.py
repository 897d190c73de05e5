"""The kernels inside torch: a gradient for gpu.attention, and a place in a model as it is.

The drop-in replaces the attribute torch.nn.functional.scaled_dot_product_attention, and nothing
else. That is the smallest thing that reaches models as they are: they look the attribute up at each
call, and so do nn.MultiheadAttention and the models of Transformers with
attn_implementation="sdpa". It is also easy to see and to undo. A TorchFunctionMode would cost time
at every call of torch, and holds only in its own thread, while checkpointing calls from the
thread of the backward pass. An override in torch's dispatcher would be found by C++ callers too,
but replaces one backend of torch, under torch's own rules for when to choose it.
What the replacement does not reach: a function that imported the name before, and C++.
"""

import contextlib
import functools
import math
from collections import Counter

from attention_lib.gpu import _require
from attention_lib.gpu.gradients import HEAD_DIMENSIONS, backward
from attention_lib.inputs import check_bool


@functools.cache
def _function():
    """The torch.autograd.Function; made on first use, because torch is optional."""
    import torch

    from attention_lib.gpu import launch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, Q, K, V, causal, kernel, align):
            O, L = launch.attention(Q.detach(), K.detach(), V.detach(), causal, kernel, True, align)
            ctx.save_for_backward(Q, K, V, O, L)
            ctx.mark_non_differentiable(L)
            ctx.set_materialize_grads(False)
            ctx.case = {"causal": causal, "align": align}
            return O, L

        @staticmethod
        def backward(ctx, dO, _):
            # once_differentiable would look at dO alone, and not see that Q, K, V matter too.
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "gpu.attention has no second derivative; accepted: create_graph=False"
                )
            if dO is None:
                return (None,) * 6
            same = torch.are_deterministic_algorithms_enabled()
            gradients = backward(*ctx.saved_tensors, dO, deterministic=same, **ctx.case)
            wanted = zip(gradients, ctx.needs_input_grad[:3], strict=True)
            return (*(x if wants else None for x, wants in wanted), None, None, None)

    return Attention


def needed(*tensors):
    """True if all are torch's, and one of them asks for a gradient."""
    asks = [getattr(x, "requires_grad", None) for x in tensors]
    return None not in asks and True in asks


def attention(Q, K, V, causal, kernel, return_lse, align):
    """gpu.attention for tensors of torch of which one asks for a gradient.

    The gradient of O is that of gpu.backward, deterministic where torch is told to be. L has none;
    and a gradient of the gradient (create_graph=True) raises RuntimeError.
    """
    import torch

    check_bool("return_lse", return_lse)
    if torch.is_grad_enabled() and Q.ndim == 4 and Q.shape[3] not in HEAD_DIMENSIONS:
        raise ValueError(
            f"Q has shape {tuple(Q.shape)}: d is {Q.shape[3]}; with a gradient: 64, 128; "
            "else pass .detach()"
        )
    O, L = _function().apply(Q, K, V, causal, kernel, align)
    return (O, L) if return_lse else O


# ---------------------------------------------------------------- a drop-in for the framework call


def reason(Q, K, V, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Why this call of scaled_dot_product_attention stays with the framework; None: it need not."""
    import torch

    tensors = (Q, K, V)
    if any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return "a subclass of Tensor"
    if attn_mask is not None:
        return "a mask"
    if dropout_p:
        return "dropout"
    if any(x.ndim != 4 for x in tensors):
        return "not (batch, heads, N, d)"
    if Q.dtype not in (torch.float16, torch.bfloat16) or K.dtype != Q.dtype or V.dtype != Q.dtype:
        return "dtype"
    if Q.shape[3] not in HEAD_DIMENSIONS or K.shape[3] != Q.shape[3] or V.shape != K.shape:
        return "d, or another d for V"
    if scale is not None and not math.isclose(scale, 1 / math.sqrt(Q.shape[3]), rel_tol=1e-6):
        return "scale"
    (batch, heads), (kv_batch, kv_heads) = Q.shape[:2], K.shape[:2]
    grouped = enable_gqa and kv_heads and heads % kv_heads == 0
    if batch != kv_batch or not (heads == kv_heads or grouped):
        return "batch or heads"
    if not all(x.is_cuda and x.device == Q.device for x in tensors):
        return "not on one GPU"
    return None


def replacement(before, used):
    """A function with the contract of `before`, the framework's: our kernels where they can,
    `before` where not. used: a Counter of "ours", and of the reasons for `before`."""
    import torch

    from attention_lib import gpu

    @functools.wraps(before)
    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
    ):  # fmt: skip
        Q, K, V = query, key, value
        if torch.is_autocast_enabled("cuda"):  # as the framework's call does
            dtype = torch.get_autocast_dtype("cuda")
            Q, K, V = (
                x.to(dtype) if x.is_cuda and x.dtype == torch.float32 else x for x in (Q, K, V)
            )
        why = reason(Q, K, V, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        used[why or "ours"] += 1
        if why is None:  # the framework's causal mask starts at the upper left
            return gpu.attention(Q, K, V, causal=bool(is_causal), align="upper-left")
        return before(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip

    return scaled_dot_product_attention


def register():
    """Let torch.nn.functional.scaled_dot_product_attention use these kernels, from now on.

    Ours are: float16 or bfloat16 (also by autocast) on one GPU, (batch, heads, N, d) with d = 64 or
    128, no mask, no dropout, the usual scale; is_causal with any number of queries and keys;
    enable_gqa; with gradients. Every other call goes to the framework as before. For a whole
    process, all threads. torch's own choice of a backend (sdpa_kernel) does not concern our calls.
    Returns (what stood there, a Counter of the calls: "ours", or why not). Raises NoGPU.
    """
    _require()
    import torch.nn.functional as F

    before, used = F.scaled_dot_product_attention, Counter()
    F.scaled_dot_product_attention = replacement(before, used)
    return before, used


@contextlib.contextmanager
def registered():
    """register for the length of a `with`, which gets the Counter; then the old one is back."""
    before, used = register()
    import torch.nn.functional as F

    try:
        yield used
    finally:
        F.scaled_dot_product_attention = before
