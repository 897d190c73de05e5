"""Any leading axes (batch, heads) around an algorithm that is written for one head.

`for_each_head` does it for a forward pass, `for_each_head_backward` for a backward pass. Both check
the arguments once, at the entry, then run the algorithm for every leading index, with K and V
shared by groups of query heads where they have fewer heads (grouped-query attention, GQA). They
differ in what becomes of the results: the outputs of heads stand side by side; the gradients of K
and V add up over the heads that share them.
"""

import functools
import inspect

import numpy as np

from attention_lib.inputs import (
    ALIGN,
    check_bool,
    check_choice,
    check_float_array,
    check_mask,
    check_positive_int,
    check_qkv,
    compute_dtype,
)
from attention_lib.memory import HBM

SAVED = ("O", "dO", "P", "L", "l", "m")  # what a backward pass takes beside Q, K, V


def for_each_head(algorithm):
    """Make an algorithm for one head accept any leading axes, after checking its arguments.

    The wrapped function must take Q, K, V first and the keywords causal, mask and align; Br, Bc
    and hbm are checked where it has them. Its outputs get the leading axes of Q.
    """
    return _entry(algorithm, _stacked)


def for_each_head_backward(algorithm):
    """The same for a backward pass.

    The wrapped function takes Q, K, V and some of SAVED, which have the heads of Q, and returns dQ,
    dK, dV in the dtype of the arithmetic. Query heads that share a K/V head each have a part in its
    gradient: dK and dV are the sums over the group. The result has the dtype of Q.
    """
    return _entry(algorithm, _summed)


def _entry(algorithm, over_heads):
    signature = inspect.signature(algorithm)

    @functools.wraps(algorithm)
    def entry(*args, **kwargs):
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{algorithm.__name__}() got wrong arguments: {error}") from None
        call.apply_defaults()
        _check_arguments(call.arguments)
        # exp underflows to 0 far from the maximum: that is the intended answer, not a fault.
        with np.errstate(under="ignore"):
            return over_heads(algorithm, call)

    return entry


def _check_arguments(a):
    Q, K, V = a["Q"], a["K"], a["V"]
    check_qkv(Q, K, V)
    if 0 in Q.shape[:-2]:
        raise ValueError(f"Q has shape {Q.shape}; accepted: leading axes of 1 or more")
    for name in SAVED:
        if name in a:
            _check_saved(name, a[name], Q, K)
    if "causal" in a:
        check_bool("causal", a["causal"])
        check_choice("align", a["align"], ALIGN)
        if a["mask"] is not None:
            check_mask(a["mask"], Q, K)
    for name in ("Br", "Bc"):
        if name in a:
            a[name] = check_positive_int(name, a[name])
    if "hbm" in a:
        a["hbm"] = HBM() if a["hbm"] is None else a["hbm"]
        if not isinstance(a["hbm"], HBM):
            raise TypeError(f"hbm must be an HBM or None, got {type(a['hbm']).__name__}")


def _check_saved(name, x, Q, K):
    check_float_array(name, x)
    dtype, why = Q.dtype, "the dtype of Q"
    if name in "Llm":
        dtype, why = compute_dtype(Q.dtype), "as the forward pass returns it"
    if x.dtype.name != dtype.name:
        raise TypeError(f"{name} has dtype {x.dtype.name}; accepted: {dtype.name}, {why}")
    shapes = {"O": Q.shape, "dO": Q.shape, "P": (*Q.shape[:-1], K.shape[-2])}
    shape = shapes.get(name, Q.shape[:-1])
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; accepted: {shape}, for Q {Q.shape}")
    if not (np.isfinite(x) | (np.isneginf(x) & (name in "Lm"))).all():
        also = ", or -inf for a row that sees no key" if name in "Lm" else ""
        raise ValueError(f"{name} has NaN or infinity; accepted: finite numbers{also}")
    if name == "l" and (x < 0).any():
        raise ValueError("l has negative numbers; accepted: sums of exponentials, 0 or more")


def _heads(a):
    """Put one head after the other into the arguments; yields its index, and that of its K and V.

    Arrays without leading axes are one head, at the index ().
    """
    whole = {name: a[name] for name in ("Q", *SAVED) if name in a}
    K, V, mask = a["K"], a["V"], a.get("mask")
    lead = a["Q"].shape[:-2]
    group = lead[-1] // K.shape[-3] if lead else 1
    if mask is not None:
        mask = np.atleast_2d(mask)
        mask = np.broadcast_to(mask, lead + mask.shape[-2:])
    for index in np.ndindex(lead):
        kv = (*index[:-1], index[-1] // group) if lead else ()
        a.update({name: x[index] for name, x in whole.items()}, K=K[kv], V=V[kv])
        if mask is not None:
            a["mask"] = mask[index]
        yield index, kv


def _stacked(algorithm, call):
    lead, outputs = call.arguments["Q"].shape[:-2], None
    for index, _ in _heads(call.arguments):
        results = algorithm(*call.args, **call.kwargs)
        if not lead:
            return results
        if outputs is None:
            outputs = tuple(np.empty(lead + r.shape, r.dtype) for r in results)
        for whole, part in zip(outputs, results, strict=True):
            whole[index] = part
    return outputs


def _summed(algorithm, call):
    a = call.arguments
    out_dtype, dtype = a["Q"].dtype, compute_dtype(a["Q"].dtype)
    dQ = np.empty(a["Q"].shape, dtype)
    dK, dV = np.zeros(a["K"].shape, dtype), np.zeros(a["V"].shape, dtype)
    for index, kv in _heads(a):
        dQ[index], dK_part, dV_part = algorithm(*call.args, **call.kwargs)
        dK[kv] += dK_part
        dV[kv] += dV_part
    with np.errstate(over="ignore"):  # a gradient beyond float16 is inf there
        return tuple(x.astype(out_dtype, copy=False) for x in (dQ, dK, dV))
