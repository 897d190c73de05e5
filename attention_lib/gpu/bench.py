"""The speed of every rung beside the framework's own backends, timed in one run.

    python -m attention_lib.gpu.bench                     measure, and print a table
    python -m attention_lib.gpu.bench --recorded --json   print the rows that were recorded
    python -m attention_lib.gpu.bench --json --out FILE   measure, and write a recording

A row: pass, kernel, dtype, d, N, causal; tflops of the kernel, and of torch's backends in the same
run: flash, cudnn, efficient, math (None where a backend refuses). 16,384 tokens, hidden size 2048.
FLOPs are those of the two products, 4 N^2 d a head, half of it if causal; backward five products,
2.5 times as many. Backward kernels are those of gpu.backward: backward_mma, backward_wgmma, and
backward_deterministic. Times are medians, from CUDA events, over rounds in which all take turns.
"""

import functools
import statistics

from attention_lib.gpu import ladder, recordings

TOKENS, HIDDEN = 16_384, 2048
SIZES, HEADS_D = (1024, 4096, 16_384), (64, 128)
BACKWARD_FILES = ("backward.cu", "backward_wgmma.cu")
BACKWARD = ("backward_mma", "backward_wgmma", "backward_deterministic")
FAST = ("pipeline", "overlap", "backward_wgmma")  # the last forward on mma.sync, those on wgmma
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
COMMAND = "python -m attention_lib.gpu.bench --json --out FILE"


def flops(N, causal, direction="forward"):
    """Of one pass over TOKENS tokens, every head: two products forward, five backward."""
    products = {"forward": 2, "backward": 5}[direction]
    return products * 2 * TOKENS * N * HIDDEN / (2 if causal else 1)


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


def backend(name, Q, K, V, causal=False):
    """The framework's call by one of its backends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, BACKENDS[name])):
        return torch.nn.functional.scaled_dot_product_attention(
            Q, K, V, is_causal=causal, enable_gqa=Q.shape[1] != K.shape[1]
        )


def forward_calls(Q, K, V, causal, kernels):
    """{name: call} of the rungs and of the framework's backends."""
    from attention_lib import gpu

    ours = {k: functools.partial(gpu.attention, Q, K, V, causal=causal, kernel=k) for k in kernels}
    return ours | {b: functools.partial(backend, b, Q, K, V, causal) for b in BACKENDS}


def backward_calls(Q, K, V, causal, kernels):
    """The same of the backward pass alone; its inputs are made on the first call."""
    import torch

    from attention_lib import gpu

    dO = torch.randn_like(Q)

    @functools.cache
    def ours():
        return gpu.attention(Q, K, V, causal=causal, return_lse=True)

    def kernel(name):
        variant = {"deterministic": True} if name == "deterministic" else {"kernel": name}
        return gpu.backward(Q, K, V, *ours(), dO, causal=causal, **variant)

    @functools.cache
    def graph(name):
        leaves = tuple(x.detach().requires_grad_() for x in (Q, K, V))
        return backend(name, *leaves, causal), leaves

    def framework(name):
        O, leaves = graph(name)
        return torch.autograd.grad(O, leaves, dO, retain_graph=True)

    calls = {k: functools.partial(kernel, k.removeprefix("backward_")) for k in kernels}
    return calls | {b: functools.partial(framework, b) for b in BACKENDS}


def accepted(calls):
    """Those of the calls that run: a backend may be absent, or refuse a shape."""
    import torch

    able = {}
    for name, call in calls.items():
        try:
            call()
            able[name] = call
        except (RuntimeError, torch.OutOfMemoryError):
            if name not in BACKENDS:
                raise
            torch.cuda.empty_cache()
    return able


def measure(
    kernels=None, dtypes=ladder.DTYPES, rounds=5, sizes=SIZES, heads_d=HEADS_D, direction="forward"
):
    """The rows. kernels: names, or None for all that run here; in bfloat16 those of FAST only.
    direction: "forward", or "backward" with kernels of BACKWARD."""
    import torch

    from attention_lib import gpu

    forward = direction == "forward"
    kernels = kernels or (gpu.able() if forward else BACKWARD)
    rows = []
    for dtype in dtypes:
        names = [k for k in kernels if dtype == "float16" or k in FAST]
        for d in heads_d:
            for N in sizes:
                shape = (TOKENS // N, HIDDEN // d, N, d)
                Q, K, V = (
                    torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3)
                )
                for causal in (False, True):
                    make = forward_calls if forward else backward_calls
                    calls = accepted(make(Q, K, V, causal, names))
                    times = {name: [milliseconds(call)] for name, call in calls.items()}
                    for _ in range(rounds - 1):
                        for name, call in calls.items():
                            if times[name][0] < 100:
                                times[name].append(milliseconds(call))
                    speed = {
                        name: round(flops(N, causal, direction) / statistics.median(t) / 1e9, 1)
                        for name, t in times.items()
                    }
                    rows += [
                        {"pass": direction, "kernel": name, "dtype": dtype, "d": d, "N": N}
                        | {"causal": causal, "tflops": speed[name]}
                        | {b: speed.get(b) for b in BACKENDS}
                        for name in names
                    ]
    return rows


def show(rows):
    """The rows as lines of text, with the ratio to the framework's flash backend."""
    yield f"{'kernel':23}{'dtype':9}{'d':>4}{'N':>7} causal  TFLOP/s   flash  ratio   cudnn"
    for r in rows:
        ratio = f"{r['tflops'] / r['flash']:7.2f}" if r["flash"] else "      -"
        cudnn = f"{r['cudnn']:8.1f}" if r["cudnn"] else "       -"
        yield (
            f"{r['kernel']:23}{r['dtype']:9}{r['d']:4}{r['N']:7} {r['causal']!s:6}"
            f"{r['tflops']:9.1f}{r['flash'] or 0:8.1f}{ratio}{cudnn}"
        )


def record():
    """The rows, and where they are from."""
    rows = measure() + measure(direction="backward")
    kernels = [*(k.name for k in ladder.LADDER), *BACKWARD_FILES]
    about = recordings.provenance(COMMAND, kernels)
    return about | {"tokens": TOKENS, "hidden": HIDDEN, "rows": rows}


def main(argv=None):
    recordings.command_line("bench", __doc__.split("\n")[0], record, show, argv)


if __name__ == "__main__":
    main()
