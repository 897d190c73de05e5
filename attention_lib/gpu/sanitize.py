"""Run every rung under NVIDIA's four checkers, and record what they found.

    python -m attention_lib.gpu.sanitize               run compute-sanitizer, print what it said
    python -m attention_lib.gpu.sanitize --out FILE    and write a recording

memcheck: out of bounds and misaligned; racecheck: shared memory without a barrier between;
initcheck: memory read before it was written; synccheck: barriers that not all threads reach.
"""

import argparse
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


def workload():
    """Every rung, dtype and mask over HEADS_D and SHAPES; each array an allocation of its own."""
    import cupy

    from attention_lib import gpu

    cupy.cuda.set_allocator(None)  # in a pool an access past the end may hit a neighbour
    draw = cupy.random.default_rng(0)
    for kernel in ladder.LADDER:
        for d in HEADS_D:
            for dtype in ladder.DTYPES:
                for causal in (False, True):
                    for Nq, Nk in SHAPES:
                        Q, K, V = (
                            draw.standard_normal((1, h, n, d), dtype=cupy.float32).astype(dtype)
                            for h, n in ((2, Nq), (1, Nk), (1, Nk))
                        )
                        gpu.attention(Q, K, V, causal=causal, kernel=kernel.name, return_lse=True)
    cupy.cuda.Device().synchronize()


def start(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
    command += ["-m", "attention_lib.gpu.sanitize", "--workload"]
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )


def finish(tool, process):
    """One row: the tool, and how many errors it counted over all rungs."""
    text, _ = process.communicate()
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if found is None or process.returncode not in (0, 9):
        raise SystemExit(f"{tool} ended with {process.returncode}\n{text[-3000:]}")
    if int(found[1]):
        print(text[:6000], file=sys.stderr)
    return {"tool": tool, "errors": int(found[1]), "kernels": [k.name for k in ladder.LADDER]}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write a recording to this file")
    parser.add_argument("--workload", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.workload:
        return workload()
    from attention_lib import gpu

    if not gpu.available():
        raise SystemExit(f"{NoGPU.__name__}: {gpu.missing()}.")
    record = recordings.provenance(COMMAND)
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
