"""What tiling buys in numpy, on this machine: ratios of time and of memory. `make bench`.

One core, float32, d = 64. Times are the median of several runs taken in turn, so that a busy
machine slows all versions alike; memory is the peak that numpy allocates beyond Q, K and V.
A ratio of two times on a CPU says nothing about a GPU: there, count what crosses HBM.
"""

# ruff: noqa: E402  (one thread, before numpy is imported)
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import argparse
import statistics
import time
import tracemalloc

import numpy as np

from attention_lib import flash_attention, flash_attention_q_outer, standard_attention

VERSIONS = {
    "standard": lambda Q, K, V, B: standard_attention(Q, K, V),
    "K/V outer": lambda Q, K, V, B: flash_attention(Q, K, V, B, B),
    "Q outer": lambda Q, K, V, B: flash_attention_q_outer(Q, K, V, B, B),
}


def seconds(function, *args):
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


def peak_bytes(function, *args):
    """Most bytes that numpy held beyond what was there before; the result counts too."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    function(*args)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return peak


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 8192], metavar="N")
    parser.add_argument("--block", type=int, default=256, metavar="B", help="Br = Bc = B")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    print(f"numpy {np.__version__}, one core, float32, d = 64, blocks {args.block} x {args.block}")
    print("Ratios to standard attention: time (less is faster), extra memory (1/x: x times less).")
    print(f"{'N':>6} {'version':>10} {'time':>7} {'extra memory':>14} {'peak MiB':>9}")
    for N in args.sizes:
        rng = np.random.default_rng(0)
        inputs = [rng.standard_normal((N, 64), dtype=np.float32) for _ in range(3)]
        inputs.append(args.block)
        times = {name: [] for name in VERSIONS}
        for _ in range(args.runs):
            for name, version in VERSIONS.items():
                times[name].append(seconds(version, *inputs))
        base_time = statistics.median(times["standard"])
        base_peak = peak_bytes(VERSIONS["standard"], *inputs)
        for name, version in VERSIONS.items():
            peak = peak_bytes(version, *inputs)
            time_ratio = statistics.median(times[name]) / base_time
            memory = f"1/{base_peak / peak:.0f}" if base_peak > 2 * peak else "1"
            print(f"{N:>6} {name:>10} {time_ratio:>6.2f}x {memory:>14} {peak / 2**20:>9.2f}")


if __name__ == "__main__":
    main()
