"""The speed of every rung beside the framework's own backends, timed in one run.

    python -m attention_lib.gpu.bench                     measure, and print a table
    python -m attention_lib.gpu.bench --recorded --json   print the rows that were recorded
    python -m attention_lib.gpu.bench --json --out FILE   measure, and write a recording

A row: pass, kernel, dtype, d, N, causal; tflops of the kernel, and of torch's backends in the same
run: flash, cudnn, efficient, math (None where a backend refuses). 16,384 tokens, hidden size 2048.
FLOPs are those of the two products, 4 N^2 d a head, half of it if causal. Times are medians, from
CUDA events, over rounds in which all take turns.
"""

import statistics

from attention_lib.gpu import ladder, recordings

TOKENS, HIDDEN = 16_384, 2048
SIZES, HEADS_D = (1024, 4096, 16_384), (64, 128)
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
COMMAND = "python -m attention_lib.gpu.bench --json --out FILE"


def flops(N, causal):
    """Of one forward pass over TOKENS tokens: the two products, every head."""
    return 4 * TOKENS * N * HIDDEN / (2 if causal else 1)


def milliseconds(call, enough=20.0):
    """One time of a call: as many in a row as last `enough` ms, so that none waits for Python."""
    import torch

    def run(n):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(n):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / n

    return run(max(1, int(enough / run(1))))


def contenders(Q, K, V, causal, kernels):
    """{name: call} of the rungs and of the framework's backends that accept the inputs."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from attention_lib import gpu

    def rung(name):
        return lambda: gpu.attention(Q, K, V, causal=causal, kernel=name)

    def backend(name):
        def call():
            with sdpa_kernel(getattr(SDPBackend, BACKENDS[name])):
                return torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=causal)

        return call

    calls = {name: rung(name) for name in kernels}
    for name in BACKENDS:
        try:
            backend(name)()
            calls[name] = backend(name)
        except (RuntimeError, torch.OutOfMemoryError):  # not here, or not for this shape
            torch.cuda.empty_cache()
    return calls


def measure(kernels=None, dtypes=ladder.DTYPES, rounds=5, sizes=SIZES, heads_d=HEADS_D):
    """The rows. kernels: names of rungs, or None for all; the slow ones are timed in float16."""
    import torch

    from attention_lib import gpu

    kernels = kernels or gpu.kernels()
    rows = []
    for dtype in dtypes:
        names = kernels if dtype == dtypes[0] else kernels[-1:]
        for d in heads_d:
            for N in sizes:
                shape = (TOKENS // N, HIDDEN // d, N, d)
                Q, K, V = (
                    torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3)
                )
                for causal in (False, True):
                    calls = contenders(Q, K, V, causal, names)
                    times = {name: [milliseconds(call)] for name, call in calls.items()}
                    for _ in range(rounds - 1):
                        for name, call in calls.items():
                            if times[name][0] < 100:
                                times[name].append(milliseconds(call))
                    speed = {
                        name: round(flops(N, causal) / statistics.median(t) / 1e9, 1)
                        for name, t in times.items()
                    }
                    rows += [
                        {"pass": "forward", "kernel": name, "dtype": dtype, "d": d, "N": N}
                        | {"causal": causal, "tflops": speed[name]}
                        | {b: speed.get(b) for b in BACKENDS}
                        for name in names
                    ]
    return rows


def show(rows):
    """The rows as lines of text, with the ratio to the framework's flash backend."""
    yield f"{'kernel':13}{'dtype':9}{'d':>4}{'N':>7} causal  TFLOP/s   flash  ratio   cudnn"
    for r in rows:
        ratio = f"{r['tflops'] / r['flash']:7.2f}" if r["flash"] else "      -"
        cudnn = f"{r['cudnn']:8.1f}" if r["cudnn"] else "       -"
        yield (
            f"{r['kernel']:13}{r['dtype']:9}{r['d']:4}{r['N']:7} {r['causal']!s:6}"
            f"{r['tflops']:9.1f}{r['flash'] or 0:8.1f}{ratio}{cudnn}"
        )


def record():
    """The rows, and where they are from."""
    where = {"tokens": TOKENS, "hidden": HIDDEN}
    return recordings.provenance(COMMAND) | where | {"rows": measure()}


def main(argv=None):
    recordings.command_line("bench", __doc__.split("\n")[0], record, show, argv)


if __name__ == "__main__":
    main()
