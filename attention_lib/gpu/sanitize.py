"""Run every kernel under NVIDIA's four checkers, and record what they found.

    python -m attention_lib.gpu.sanitize               run compute-sanitizer, print what it said
    python -m attention_lib.gpu.sanitize --out FILE    and write a recording

memcheck: out of bounds and misaligned; racecheck: shared memory without a barrier between;
initcheck: memory read before it was written; synccheck: barriers that not all threads reach.
"""

import argparse
import itertools
import re
import subprocess
import sys
from pathlib import Path

from attention_lib.gpu import NoGPU, ladder, recordings

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# (Nq, Nk): ragged both ways, tiles that are hidden, rows that see nothing, one row, one key.
SHAPES = [(113, 203), (203, 113), (1, 130), (130, 1)]
HEADS_D = (64, 128)
COMMAND = "python -m attention_lib.gpu.sanitize --out FILE"


CASES = list(itertools.product(HEADS_D, ladder.DTYPES, (False, True)))


def workload(cases):
    """Every kernel in these cases over SHAPES; each array an allocation of its own."""
    import cupy

    from attention_lib import gpu
    from attention_lib.gpu import hopper

    cupy.cuda.set_allocator(None)  # in a pool an access past the end may hit a neighbour
    draw = cupy.random.default_rng(0)

    def normal(dtype, *shape):
        return draw.standard_normal(shape, dtype=cupy.float32).astype(dtype)

    for (d, dtype, causal), (Nq, Nk) in itertools.product(cases, SHAPES):
        Q, K, V = (normal(dtype, 1, h, n, d) for h, n in ((2, Nq), (1, Nk), (1, Nk)))
        for kernel in gpu.able():
            O, L = gpu.attention(Q, K, V, causal=causal, kernel=kernel, return_lse=True)
        for how in ({"kernel": "mma"}, {"kernel": "wgmma"}, {"deterministic": True}):
            gpu.backward(Q, K, V, O, L, normal(dtype, *Q.shape), causal=causal, **how)
        gpu.decode(Q[:, :, :8], K, V, causal=causal, return_lse=True)
        pages, table = normal(dtype, 4, 1, 64, d), cupy.array([[2, 0, 3, 1]], cupy.int32)
        lengths = cupy.array([Nk], cupy.int32)
        gpu.decode(Q[:, :, :8], pages, pages, causal=causal, block_table=table, lengths=lengths)
    for dtype in ladder.DTYPES:
        hopper.matmul(normal(dtype, 300, 72), normal(dtype, 200, 72))
    cupy.cuda.Device().synchronize()


def start(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    if tool == "memcheck":  # cuda-bindings asks for functions that an older driver does not have
        command += ["--report-api-errors", "no"]
    command += [sys.executable]
    command += ["-m", "attention_lib.gpu.sanitize", "--workload"]
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )


def finish(tool, process):
    """One row: the tool, and how many errors it counted over all kernels."""
    text, _ = process.communicate()
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if found is None or process.returncode not in (0, 9):
        raise SystemExit(f"{tool} ended with {process.returncode}\n{text[-3000:]}")
    if int(found[1]):
        print(text[:6000], file=sys.stderr)
    return {"tool": tool, "errors": int(found[1]), "kernels": recordings.kernels()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write a recording to this file")
    parser.add_argument("--workload", nargs="*", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.workload is not None:
        return workload([CASES[k] for k in given.workload] or CASES)
    from attention_lib import gpu

    if not gpu.available():
        raise SystemExit(f"{NoGPU.__name__}: {gpu.missing()}.")
    record = recordings.provenance(COMMAND, recordings.kernels())
    # Compile first, all cases at once: each checker would compile them all, one after the other.
    myself = [sys.executable, "-m", "attention_lib.gpu.sanitize", "--workload"]
    compiling = [subprocess.Popen([*myself, str(k)]) for k in range(len(CASES))]
    if any(process.wait() for process in compiling):
        raise SystemExit("a kernel failed without a checker: see above")
    started = {tool: start(tool) for tool in TOOLS}
    record["rows"] = [finish(tool, process) for tool, process in started.items()]
    for row in record["rows"]:
        print(f"{row['tool']:10} {row['errors']} errors")
    if given.out:
        given.out.write_text(recordings.dumps(record), encoding="utf-8")
    if any(row["errors"] for row in record["rows"]):
        raise SystemExit("the checkers found something: see above")


if __name__ == "__main__":
    main()
