"""Exercises whose answer is the text of a CUDA kernel.

The text is compiled where NVRTC is installed, and run on the stand-in, which watches every access;
where there is a GPU, a kernel that passed is run there as well. What comes of a launch is judged
like the result of any other program: an answer that leaves the same traces as a wrong idea has it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attention_lib import gpu, inputs
from attention_lib.checks.exercises.ex08 import _functions
from attention_lib.checks.judge import first_difference, shown
from attention_lib.checks.kinds import Mistake, Program
from attention_lib.checks.programs import check_program, rows
from attention_lib.checks.result import NOT_ATTEMPTED, NOT_YET, PASSED, RAISED, Result
from attention_lib.gpu import broken, standin, standin_cuda
from attention_lib.gpu.own import Launch, compiler_says, on_gpu
from attention_lib.gpu.standin import run_grid
from attention_lib.gpu.standin_cuda import NotRead, kernel

KINDS = ("race", "race of blocks", "out of bounds", "unwritten")


@dataclass(frozen=True)
class Kernel:
    """The answer is a kernel's text, made from `given`, which has something wrong or missing.

    launch(**arguments of a probe) -> Launch, with fresh outputs. program: how what comes of it is
    judged; its first output is `traces`. arrays: the names that a report is sorted by.
    """

    id: str
    text: str
    given: str  # a name of gpu.broken
    launch: Callable[..., Launch]
    program: Program
    arrays: tuple[str, ...]


def on_standin(launch, arrays, text):
    """A kernel's text as a program: arguments of a probe -> (traces, *outputs)."""

    def program(**arguments):
        made = launch(**arguments)
        report = run_grid(kernel(text), made.blocks, made.threads, *made.args, seed=made.seed)
        outputs = [made.args[k].astype(np.float64) for k in made.outputs]
        if report.found:  # then they are one of several results that may come
            outputs = [np.full_like(x, np.nan) for x in outputs]
        return (traces(report, arrays), *outputs)

    return program


def traces(report, arrays):
    """A report as numbers: for each kind of fault and each array, was it found; then barriers.

    Of accesses out of bounds it is the number of them, negative if the first index is (an offset
    that has wrapped round). Of the barriers: 1 if some threads have ended, 2 if they wait at
    different ones.
    """
    seen = np.zeros((len(KINDS), len(arrays) + 1))
    for f in report.found:
        if f.what in KINDS:
            column = arrays.index(f.array) if f.array in arrays else len(arrays)
            first = f.index[0] if isinstance(f.index, tuple) else f.index
            value = 1 if f.what != "out of bounds" else -f.times if first < 0 else f.times
            seen[KINDS.index(f.what), column] = value
    uneven = [2.0 if f.says.endswith("another") else 1.0 for f in report.uneven[:1]]
    if report.races or uneven:  # then what is unwritten hangs on the order of the threads
        seen[KINDS.index("unwritten")] = 0
    return np.array([*seen.ravel(), *(uneven or [0.0])])


def make(id, text, given, launch, right, probes, arrays, outputs, read, mistakes):
    """A Kernel. right(**arguments) -> its outputs; mistakes: (name, what to say, texts, read)."""

    def with_traces(**arguments):
        value = right(**arguments)
        return (np.zeros(len(KINDS) * (len(arrays) + 1) + 1), *value)

    known = [
        Mistake(name, on_standin(launch, arrays, wrong), says, at)
        for name, says, texts, at in mistakes
        for wrong in texts
    ]
    library = {f for m in (standin, standin_cuda, inputs) for f in _functions(m)}
    library |= {x.__qualname__.split(".<locals>")[0] for x in (on_standin, traces, launch)}
    names = ("traces", *outputs)
    program = Program(
        id, text, names, with_traces, probes, tuple(known), read, library=frozenset(library)
    )
    return Kernel(id, text, given, launch, program, arrays)


def single(tolerance):
    """What rounding in float32 may do, from what `rounding` says of float64."""
    return tuple(float(t) * 2.0**29 for t in tolerance)


def check_kernel(q: Kernel, text, seed=0):
    """Judge the text of a kernel. Returns a Result."""
    where = f"Read: {q.program.read}"
    if not isinstance(text, str) or "__global__" not in text:
        return _not_yet(q, None, f"the answer is the text of a kernel, got {shown(text)}.", where)
    if text.split() == broken.source(q.given).split():
        return Result(NOT_ATTEMPTED, f"{q.id}: change the kernel, then run again.")
    if re.search(r"^\s*#(?!pragma unroll)|\basm\b", text, re.MULTILINE):
        says = "leave out lines that begin with #, and asm: the kernel needs none."
        return _not_yet(q, None, says, where)
    wrong = compiler_says(text)
    if wrong:
        return Result(RAISED, f"{q.id}: the compiler says: {_short(wrong)}\n{where}")
    try:
        kernel(text)
    except NotRead as error:
        if "__syncwarp" in text:
            says = "__syncwarp waits for one warp. A block may have many: use __syncthreads."
            return _not_yet(q, "one-warp-only", says, where)
        return _not_yet(q, None, _short(str(error)), where)

    result = check_program(q.program, on_standin(q.launch, q.arrays, text), seed)
    if result.status == NOT_YET:
        return _with_report(q, text, result, seed)
    if result.status != PASSED or not gpu.available():
        return result
    return _on_this_gpu(q, text, result, seed, where)


def _short(text):
    return text if len(text) <= 150 else text[:147] + "..."


def _not_yet(q, mistake, *lines):
    return Result(NOT_YET, "\n".join([f"{q.id}: {lines[0]}", *lines[1:]]), mistake)


def _with_report(q, text, result, seed):
    """The message, with what the stand-in reported in place of a line about its traces."""
    line = re.search(r"traces\[.*$", result.message, re.MULTILINE)
    if not line:
        return result
    (row,) = (r for r in rows(q.program, seed) if f"On: {r.probe.says}\n" in result.message)
    made = q.launch(**row.probe.arguments)
    report = run_grid(kernel(text), made.blocks, made.threads, *made.args, seed=made.seed)
    says = f"{report.found[0].what}: {report.found[0].says}."
    if len(says) > 88:  # without the size of the array
        says = says.split(", and ")[0] + "."
    message = result.message.replace(line[0], says)
    return Result(result.status, message, result.misconception)


def _on_this_gpu(q, text, result, seed, where):
    """The same inputs on the GPU, against the same right outputs."""
    done = 0
    for row in rows(q.program, seed):
        try:
            outputs = on_gpu(text, q.launch(**row.probe.arguments))
        except Exception as error:
            message = f"{q.id}: on the GPU: {type(error).__name__}: {_short(str(error))}\n{where}"
            return Result(RAISED, message)
        if outputs is None:
            continue
        done += 1
        for name, got, want, tolerance in zip(
            q.program.outputs[1:], outputs, row.want[1:], row.probe.tolerance[1:], strict=True
        ):
            at = first_difference(got, want, tolerance)
            if at is not None:
                says = f"right on the stand-in, but on the GPU {name}{list(at)} is {got[at]:.6g}."
                return _not_yet(q, None, says, f"On: {row.probe.says}", where)
    return Result(PASSED, f"{result.message} On this GPU too: {done}.")
