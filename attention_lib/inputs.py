"""What the public functions accept, and what they say when they get something else.

A message names the argument, what came, and what is accepted.
"""

import math
import operator

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
ALIGN = ("lower-right", "upper-left")


def compute_dtype(dtype):
    """The dtype the arithmetic runs in: float32 for the 16-bit types, else the type itself."""
    dtype = np.dtype(dtype).newbyteorder("=")
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def check_array(name, x):
    """Raise unless x is a plain numpy array. A masked array's mask would be lost without a word."""
    if not isinstance(x, np.ndarray) or isinstance(x, (np.ma.MaskedArray, np.matrix)):
        raise TypeError(f"{name} must be a numpy array, got {type(x).__name__}")


def check_float_array(name, x, ndim=1):
    """Raise unless x is a numpy array of at least `ndim` axes with a floating dtype we support."""
    check_array(name, x)
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype.name}; accepted: {', '.join(FLOATS)}")
    if x.ndim < ndim:
        raise ValueError(f"{name} has shape {x.shape}; accepted: at least {ndim} axes")


def check_int(name, value):
    """Return value as an int, or raise if it is not a whole number."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    try:
        return operator.index(value)
    except TypeError:  # an array of more than one int has __index__ too
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}") from None


def check_positive_int(name, value, minimum=1):
    """Return value as an int, or raise if it is not a whole number of at least `minimum`."""
    value = check_int(name, value)
    if value < minimum:
        raise ValueError(f"{name} is {value}; accepted: {minimum} or more")
    return value


def check_bool(name, value):
    """Raise unless value is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__} {value!r}")


def check_choice(name, value, accepted):
    """Raise unless value is one of the accepted strings."""
    if not isinstance(value, str) or value not in accepted:
        options = ", ".join(repr(a) for a in accepted)
        raise ValueError(f"{name} is {value!r}; accepted: {options}")


def check_qkv(Q, K, V):
    """Raise unless Q, K, V are attention inputs that belong together (shapes, dtype, heads)."""
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        check_float_array(name, x, ndim=2)
        if not np.isfinite(x).all():
            raise ValueError(f"{name} has NaN or infinity; accepted: finite numbers")
    for name, x in (("K", K), ("V", V)):
        if x.dtype.name != Q.dtype.name:
            raise TypeError(
                f"{name} has dtype {x.dtype.name} but Q has {Q.dtype.name}; "
                "accepted: one dtype for all three (cast on purpose, with .astype)"
            )
    d = Q.shape[-1]
    if d == 0:
        raise ValueError(f"Q has shape {Q.shape}: d is 0; accepted: a head dimension of 1 or more")
    if K.shape[-1] != d:
        raise ValueError(f"K has shape {K.shape}; accepted: last axis d = {d}, as in Q {Q.shape}")
    if V.shape != K.shape:
        raise ValueError(f"V has shape {V.shape}; accepted: the shape of K, {K.shape}")
    if K.ndim != Q.ndim or K.shape[:-3] != Q.shape[:-3]:
        raise ValueError(f"K has shape {K.shape}; accepted: the leading axes of Q, {Q.shape}")
    if Q.ndim > 2 and (K.shape[-3] == 0 or Q.shape[-3] % K.shape[-3]):
        raise ValueError(
            f"K has {K.shape[-3]} heads; accepted: a divisor of the {Q.shape[-3]} heads of Q"
        )


def check_mask(mask, Q, K):
    """Raise unless mask is boolean, or additive float, and broadcasts to (..., Nq, Nk)."""
    check_array("mask", mask)
    full = (*Q.shape[:-1], K.shape[-2])
    try:
        fits = np.broadcast_shapes(mask.shape, full) == full
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"mask has shape {mask.shape}; accepted: broadcastable to {full}")
    if mask.dtype == bool:
        return
    if mask.dtype.name not in FLOATS:
        raise TypeError(
            f"mask has dtype {mask.dtype.name}; accepted: bool (True: may see), {', '.join(FLOATS)}"
        )
    with np.errstate(invalid="ignore"):
        largest = float(mask.max(initial=-math.inf))  # one number, not a copy; NaN stays NaN
    limit = float(np.finfo(compute_dtype(Q.dtype)).max)
    if not largest <= limit:
        raise ValueError(
            f"mask has NaN, +inf or more than {limit:.3g}; accepted: numbers, and -inf to hide"
        )
