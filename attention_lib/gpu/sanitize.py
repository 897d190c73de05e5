"""Run every kernel under NVIDIA's four checkers, and record what they found.

    python -m attention_lib.gpu.sanitize               run compute-sanitizer, print what it said
    python -m attention_lib.gpu.sanitize --out FILE    and write a recording

memcheck: out of bounds and misaligned; racecheck: shared memory without a barrier between;
initcheck: memory read before it was written; synccheck: barriers that not all threads reach.
racecheck does not follow copies by tensor map (notebook 22): for their order, see the tests.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attention_lib.gpu import NoGPU, ladder, recordings

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# (Nq, Nk): ragged both ways, tiles that are hidden, rows that see nothing, one row, one key.
SHAPES = [(113, 203), (203, 113), (1, 130), (130, 1)]
HEADS_D = (64, 128)
CASES = list(itertools.product(HEADS_D, ladder.DTYPES, (False, True)))  # d, dtype, causal
COMMAND = "python -m attention_lib.gpu.sanitize --out FILE"
WORKLOAD = [sys.executable, "-m", "attention_lib.gpu.sanitize", "--workload"]


def workload(d, dtype, causal):
    """Every kernel in this case over SHAPES; each array an allocation of its own."""
    import cupy

    from attention_lib import gpu
    from attention_lib.gpu import hopper

    cupy.cuda.set_allocator(None)  # in a pool an access past the end may hit a neighbour
    draw = cupy.random.default_rng(0)

    def normal(dtype, *shape):
        return draw.standard_normal(shape, dtype=cupy.float32).astype(dtype)

    for Nq, Nk in SHAPES:
        Q, K, V = (normal(dtype, 1, h, n, d) for h, n in ((2, Nq), (1, Nk), (1, Nk)))
        # The backward pass gets O of the first rung: initcheck does not count what the copy engine
        # stores, as the last one does, as written.
        for kernel in reversed(gpu.able()):
            O, L = gpu.attention(Q, K, V, causal=causal, kernel=kernel, return_lse=True)
        for how in ({"kernel": "mma"}, {"kernel": "wgmma"}, {"deterministic": True}):
            gpu.backward(Q, K, V, O, L, normal(dtype, *Q.shape), causal=causal, **how)
        gpu.decode(Q[:, :, :8], K, V, causal=causal, return_lse=True)
        pages, table = normal(dtype, 4, 1, 64, d), cupy.array([[2, 0, 3, 1]], cupy.int32)
        lengths = cupy.array([Nk], cupy.int32)
        gpu.decode(Q[:, :, :8], pages, pages, causal=causal, block_table=table, lengths=lengths)
    many = normal(dtype, 1, 1, 9000, d)  # many splits
    gpu.decode(Q[:, :, :1], many, many, causal=causal)
    hopper.matmul(normal(dtype, 300, 72), normal(dtype, 200, 72))
    cupy.cuda.Device().synchronize()


def watched(tool, case):
    """Errors that one checker counts in one case."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    if tool == "memcheck":  # cuda-bindings asks for functions that an older driver does not have
        command += ["--report-api-errors", "no"]
    done = subprocess.run(
        [*command, *WORKLOAD, str(case)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
    if found is None or done.returncode not in (0, 9):
        raise SystemExit(f"{tool} ended with {done.returncode}\n{done.stdout[-3000:]}")
    if int(found[1]):
        print(done.stdout[:6000], file=sys.stderr)
    print(f"{tool:10} {CASES[case]}  {found[1]} errors", flush=True)
    return int(found[1])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write a recording to this file")
    parser.add_argument("--workload", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.workload is not None:
        return workload(*CASES[given.workload])
    from attention_lib import gpu

    if not gpu.available():
        raise SystemExit(f"{NoGPU.__name__}: {gpu.missing()}.")
    record = recordings.provenance(COMMAND, recordings.kernels())
    # Compile first, all cases at once: each checker would compile them all, one after the other.
    compiling = [subprocess.Popen([*WORKLOAD, str(k)]) for k in range(len(CASES))]
    if any([process.wait() for process in compiling]):
        raise SystemExit("a kernel failed without a checker: see above")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = {tool: [pool.submit(watched, tool, k) for k in range(len(CASES))] for tool in TOOLS}
        record["rows"] = [
            {
                "tool": tool,
                "errors": sum(each.result() for each in cases),
                "kernels": recordings.kernels(),
            }
            for tool, cases in found.items()
        ]
    if given.out:
        given.out.write_text(recordings.dumps(record), encoding="utf-8")
    if any(row["errors"] for row in record["rows"]):
        raise SystemExit("the checkers found something: see above")


if __name__ == "__main__":
    main()
