"""Attention on a GPU: a ladder of CUDA kernels, from readable to fast, behind one call.

    gpu.available()             is there a GPU, and CuPy to reach it?
    gpu.kernels()               the rungs, from the slowest to the fastest
    gpu.choose(d)               which rung `attention` would take, and why
    gpu.attention(Q, K, V)      run it
    gpu.decode(Q, K, V)         a few queries against a long cache, in one launch
    gpu.backward(Q, K, V, O, L, dO)   the gradients; torch's autograd finds them by itself
    gpu.register()              let torch's own call use these kernels; `with gpu.registered():`

The kernels are in kernels/, one file a rung. Without a GPU, `recordings/` holds what they did.
"""

import importlib.util

from attention_lib.gpu import ladder


class NoGPU(RuntimeError):
    """There is no GPU here, or no CuPy to reach it."""


def missing():
    """What is missing here to run a kernel, in a few words; None if nothing is."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    return None if cupy.cuda.is_available() else "CuPy finds no NVIDIA GPU"


def available():
    """True if a kernel can run here."""
    return missing() is None


def kernels():
    """The names of the rungs, in the order of the ladder."""
    return [kernel.name for kernel in ladder.LADDER]


def _require():
    reason = missing()
    if reason:
        raise NoGPU(
            f"{reason}: no kernel can run. The CPU versions in attention_lib.tiled compute the "
            "same, and recorded results of a GPU are shown in the notebooks."
        )


def able():
    """The names of the rungs that this GPU can run, in the order of the ladder. Raises NoGPU."""
    _require()
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    names = [kernel.name for kernel in ladder.LADDER if kernel.runs_on(capability)]
    if not names:
        raise NoGPU(f"the GPU has compute capability {capability}; the kernels need 80 or more")
    return names


def choose(d=128):
    """The rung that `attention` takes on this GPU for head dimension d, and why: (name, reason).
    Raises NoGPU, or ValueError for a d that no rung is written for."""
    best = [name for name in able() if d in ladder.rung(name).heads_d]
    if not best:
        accepted = ", ".join(map(str, ladder.HEAD_DIMENSIONS))
        raise ValueError(f"d is {d!r}; accepted: {accepted}")
    import cupy

    capability = cupy.cuda.Device().compute_capability
    return best[-1], f"the last rung for compute capability {capability} and d = {d}"


def attention(Q, K, V, *, causal=False, kernel=None, return_lse=False, align="lower-right"):
    """Attention on the GPU: softmax(Q K^T / sqrt(d)) V.

    Q: (batch, heads, Nq, d); K, V: (batch, heads or a divisor of it, Nk, d); float16 or bfloat16;
    d is 32, 64, 128 or 256. CuPy arrays, or CUDA tensors of torch: both are read in place with
    their strides, unless d is not contiguous or a row does not start at 16 bytes; then a copy is
    made. Runs on the current stream of the library that the arrays are from.
    causal, align: as in standard_attention. kernel: a name of `kernels()`, or None for the rung
    that `choose(d)` names. return_lse: also return L, float32 (batch, heads, Nq), the log-sum-exp
    of each row's scores. Sums and statistics are float32.
    Returns O, or O and L, of the kind that Q is. A row that sees no key: O = 0, L = -inf. If torch
    asks for gradients, O has one for d = 64 and 128, by `backward`; L has none.
    Raises NoGPU where nothing can run; TypeError or ValueError that name the argument.
    """
    _require()
    from attention_lib.gpu import launch

    return launch.attention(Q, K, V, causal, kernel, return_lse, align)


# At the end, because these modules use what stands above. None of them imports CuPy or torch yet.
from attention_lib.gpu.autograd import register, registered  # noqa: E402, F401
from attention_lib.gpu.decoding import decode  # noqa: E402, F401
from attention_lib.gpu.gradients import backward  # noqa: E402, F401
