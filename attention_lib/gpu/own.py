"""A kernel of one's own, as text: ask the compiler about it, or launch it on this machine's GPU.

The stand-in runs the same text: attention_lib.gpu.standin_cuda.
"""

import re
from typing import NamedTuple

import numpy as np

from attention_lib.gpu import nvrtc
from attention_lib.gpu.standin import Far
from attention_lib.gpu.standin_cuda import kernel

# What the course's kernels take for granted. The first line after it is line 1 of "kernel".
BEFORE = """\
#define INFINITY __int_as_float(0x7f800000)
typedef long long i64;
typedef unsigned u32;
#line 1 "kernel"
"""
SCALARS = {"int": np.int32, "unsigned": np.uint32, "float": np.float32}


class Launch(NamedTuple):
    """kernel<<<blocks, threads>>>(*args). outputs: which of the args are asked for afterwards."""

    blocks: int
    threads: int
    args: tuple
    outputs: tuple[int, ...]
    seed: int | None = None  # of the order in which the stand-in runs the threads


def compiler_says(text):
    """The compiler's first error, with its line; None if there is none, or no compiler here."""
    if not nvrtc.available():
        return None
    try:
        nvrtc.compile_text(BEFORE + text, "before")
    except RuntimeError as error:
        lines = str(error).splitlines()
        said = next((x for x in lines if "error" in x), lines[0])
        return re.sub(r"^kernel\((\d+)\): error: ", r"line \1: ", said)
    return None


def on_gpu(text, launch):
    """Run a launch on this machine's GPU: the outputs as float64 arrays; None if they do not fit.

    Needs CuPy and a GPU. An array made by `far` becomes the whole tensor, of which only the end is
    filled.
    """
    import cupy

    function = cupy.RawModule(code=BEFORE + text).get_function(kernel(text).__name__)
    given = []
    try:
        for (_, type), a in zip(kernel(text).parameters, launch.args, strict=True):
            if isinstance(a, Far):
                whole = cupy.empty(a.start + a.array.size, a.array.dtype)
                whole[a.start :] = cupy.asarray(a.array)
                given.append(whole)
            elif isinstance(a, np.ndarray):
                given.append(cupy.asarray(a))
            else:
                given.append(SCALARS.get(type, np.int64)(a))
    except cupy.cuda.memory.OutOfMemoryError:
        return None
    function((launch.blocks,), (launch.threads,), tuple(given))
    return [given[k].get().astype(np.float64) for k in launch.outputs]
