"""The ladder of kernels as data: one CUDA C++ file a rung, one new idea a rung.

Nothing here needs a GPU. `source` is what is compiled, by CuPy on a GPU machine and by NVRTC alone
on any other.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

HEAD_DIMENSIONS = (32, 64, 128, 256)
DTYPES = ("float16", "bfloat16")


class Target:
    """What a kernel is compiled for. Its `box` says if it uses TMA: rows of a copy, or nothing."""

    def runs_on(self, capability):
        """True if a GPU of this compute capability (10 * major + minor) has its instructions."""
        return capability == 90 if self.box else capability >= 80

    def architectures(self):
        """What it is compiled for where no GPU says it: NVRTC's names."""
        return ("sm_90a",) if self.box else ("sm_80", "sm_90", "sm_100")

    def architecture_option(self):
        """For CuPy, which names the GPU without the `a` that wgmma needs."""
        return (f"-arch={self.architectures()[0]}",) if self.box else ()


@dataclass(frozen=True)
class Kernel(Target):
    """A rung: its file, its idea, and what a launch must know.

    threads(d), rows(d): threads of a block, and rows of Q that a block takes. shared(d): bytes of
    dynamic shared memory. heads_d: the d that it is written for.
    box: rows of K and V that TMA copies at once, on Hopper alone; 0 for a rung without TMA.
    stays: one block an SM goes through all the work, where others have a block for each part.
    """

    name: str
    idea: str
    file: str
    threads: Callable[[int], int]
    rows: Callable[[int], int]
    shared: Callable[[int], int] = lambda d: 0
    entries: tuple[str, ...] = ("attention",)
    heads_d: tuple[int, ...] = HEAD_DIMENSIONS
    box: int = 0
    stays: bool = False


def _tiles(*rows):
    """Bytes of 16-bit tiles of so many rows of d."""
    return lambda d: 2 * d * sum(rows)


def _hopper(warpgroups, more, O=0):
    """Of a rung on TMA: threads, rows and shared memory. warpgroups(d): those that compute, 64
    rows each; more: 1 if another one loads. K and V have two tiles of 128 keys each; O: its rows
    pass through shared memory too; and barriers."""
    return {
        "threads": lambda d: 128 * (warpgroups(d) + more),
        "rows": lambda d: 64 * warpgroups(d),
        "shared": lambda d: 2 * d * (64 * warpgroups(d) * (1 + O) + 4 * 128) + 256,
        "heads_d": (64, 128),
        "box": 128,
    }


LADDER = (
    Kernel(
        "unfused",
        "three kernels; S and P go through HBM",
        "rung0_unfused.cu",
        lambda d: 256,
        lambda d: 64,
        entries=("scores", "softmax", "outputs"),
    ),
    Kernel(
        "algorithm_1",
        "no N x N matrix: K/V outside, one thread a row, one block a head",
        "rung1_algorithm_1.cu",
        lambda d: 256,
        lambda d: 256,
    ),
    Kernel(
        "q_outer",
        "loops swapped: one block for 64 rows of Q, O stays on chip",
        "rung2_q_outer.cu",
        lambda d: 256,
        lambda d: 64,
        lambda d: 2 * 3 * 64 * (d + 2) + 4 * 64 * (65 + 3),
    ),
    Kernel(
        "tensor_cores",
        "mma.sync; S and P stay in registers",
        "rung3_tensor_cores.cu",
        lambda d: 128,
        lambda d: 64,
        _tiles(64, 64, 64),
    ),
    Kernel(
        "swizzle",
        "XOR swizzle and cp.async: shared memory at its full width",
        "rung4_swizzle.cu",
        lambda d: 128,
        lambda d: 64,
        _tiles(64, 64, 64),
    ),
    Kernel(
        "pipeline",
        "wider warp tiles, K/V pipeline, exp2, causal tiles skipped",
        "rung5_pipeline.cu",
        lambda d: 128,
        lambda d: 64 if d > 128 else 128,
        lambda d: _tiles(64 if d > 128 else 128, 4 * {32: 64, 64: 64, 128: 48, 256: 32}[d])(d),
    ),
    Kernel("wgmma", "wgmma, and TMA loads", "rung6_wgmma.cu", **_hopper(lambda d: 2, 0)),
    Kernel(
        "specialised",
        "one warpgroup loads, two compute",
        "rung7_specialised.cu",
        **_hopper(lambda d: 2, 1),
    ),
    Kernel(
        "overlap",
        "softmax behind the next product; turns; blocks that stay",
        "rung8_overlap.cu",
        **_hopper(lambda d: 3 if d == 64 else 2, 1, O=1),
        stays=True,
    ),
)


def rung(name):
    """The Kernel with this name. Raises ValueError for another."""
    for kernel in LADDER:
        if kernel.name == name:
            return kernel
    accepted = ", ".join(repr(k.name) for k in LADDER)
    raise ValueError(f"kernel is {name!r}; accepted: {accepted}, or None for the best")


def _read(file):
    return (resources.files(__package__) / "kernels" / file).read_text(encoding="utf-8")


def read(file):
    """The CUDA C++ in a file of kernels/, with the headers of that folder put in their places."""
    return re.sub(r'#include "(\w+\.cuh)"\n', lambda m: _read(m[1]), _read(file))


def source(name):
    """The CUDA C++ of a rung, as it is compiled."""
    return read(rung(name).file)


def options(d, dtype, causal, shared):
    """The compiler's definitions for one case of a kernel; shared: bytes it asks for."""
    return (
        "--std=c++17",
        f"-DHEAD={d}",
        f"-DBF16={int(dtype == 'bfloat16')}",
        f"-DCAUSAL={int(causal)}",
        f"-DSHARED={shared}",
    )
