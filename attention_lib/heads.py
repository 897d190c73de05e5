"""Any leading axes (batch, heads) around an algorithm that is written for one head.

`for_each_head` checks the arguments once, at the entry, then runs the algorithm for every leading
index, with K and V shared by groups of query heads where they have fewer heads (grouped-query
attention, GQA).
"""

import functools
import inspect

import numpy as np

from attention_lib.inputs import (
    ALIGN,
    check_bool,
    check_choice,
    check_mask,
    check_positive_int,
    check_qkv,
)
from attention_lib.memory import HBM


def for_each_head(algorithm):
    """Make an algorithm for one head accept any leading axes, after checking its arguments.

    The wrapped function must take Q, K, V first and the keywords causal, mask and align; Br, Bc
    and hbm are checked where it has them. Its outputs get the leading axes of Q.
    """
    signature = inspect.signature(algorithm)

    @functools.wraps(algorithm)
    def entry(*args, **kwargs):
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{algorithm.__name__}() got wrong arguments: {error}") from None
        call.apply_defaults()
        a = call.arguments
        check_qkv(a["Q"], a["K"], a["V"])
        check_bool("causal", a["causal"])
        check_choice("align", a["align"], ALIGN)
        if a["mask"] is not None:
            check_mask(a["mask"], a["Q"], a["K"])
        for name in {"Br", "Bc"} & a.keys():
            a[name] = check_positive_int(name, a[name])
        if "hbm" in a:
            a["hbm"] = HBM() if a["hbm"] is None else a["hbm"]
            if not isinstance(a["hbm"], HBM):
                raise TypeError(f"hbm must be an HBM or None, got {type(a['hbm']).__name__}")
        # exp underflows to 0 far from the maximum: that is the intended answer, not a fault.
        with np.errstate(under="ignore"):
            return _loop(algorithm, call)

    return entry


def _loop(algorithm, call):
    Q, K, V, mask = (call.arguments[name] for name in ("Q", "K", "V", "mask"))
    if Q.ndim == 2:
        call.arguments["mask"] = None if mask is None else np.atleast_2d(mask)
        return algorithm(*call.args, **call.kwargs)
    lead = Q.shape[:-2]
    if 0 in lead:
        raise ValueError(f"Q has shape {Q.shape}; accepted: leading axes of 1 or more")
    group = Q.shape[-3] // K.shape[-3]
    if mask is not None:
        mask = np.atleast_2d(mask)
        mask = np.broadcast_to(mask, lead + mask.shape[-2:])
    outputs = None
    for index in np.ndindex(lead):
        kv = (*index[:-1], index[-1] // group)
        call.arguments.update(Q=Q[index], K=K[kv], V=V[kv])
        call.arguments["mask"] = None if mask is None else mask[index]
        results = algorithm(*call.args, **call.kwargs)
        if outputs is None:
            outputs = tuple(np.empty(lead + r.shape, r.dtype) for r in results)
        for whole, part in zip(outputs, results, strict=True):
            whole[index] = part
    return outputs
