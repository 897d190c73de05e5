"""The time of a decoding step, beside the framework's own backends, in one run.

    python -m attention_lib.gpu.bench_decode              measure, and print a table
    python -m attention_lib.gpu.bench_decode --recorded   print the rows that were recorded
    python -m attention_lib.gpu.bench_decode --out FILE   measure, and write a recording

A row: d, batch, heads, kv_heads, Nq, Nk, float16; cache_bytes, of K and V together; then
microseconds of a call. `ours` and torch's `flash`, `cudnn`, `efficient` (None where it refuses) are
calls from Python, one after the other, as many as the GPU keeps up with; the same names with
`_graph` are replays of a captured CUDA graph, the GPU's time alone, as a serving engine runs them.
`copy`: a copy that reads and writes as many bytes in all as the cache has (the largest take longer
in a graph than from Python). Times are medians over rounds in which all take turns. In the head:
copy_gbs, bytes read and written a second in a copy of 1 GiB; reach, see decoding.reach. Caches
rotate, so that together they are three times the L2: K and V come from HBM. Torch's math backend is
left out: it writes S.
"""

import functools
import statistics

from attention_lib.gpu import decoding, recordings
from attention_lib.gpu.bench import BACKENDS, backend

SHAPES = ((1, 32, 8, 1), (1, 32, 32, 1), (1, 16, 1, 1), (4, 16, 4, 4), (8, 32, 8, 1))
LENGTHS, HEADS_D = (4096, 16_384, 65_536, 262_144), (64, 128)
MOST = 36 << 30  # bytes of a cache
KERNELS = ("decode.cu",)
COMMAND = "python -m attention_lib.gpu.bench_decode --out FILE"


def timer(calls, enough=15_000):
    """A function that measures: microseconds of a call, when the calls take turns for `enough`."""
    import torch

    def run(n):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for k in range(n):
            calls[k % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / n * 1e3

    run(2 * len(calls))
    n = max(10, int(enough / run(3 * len(calls))))
    return lambda: run(n)


def graph_timer(calls):
    """The same in the replay of one graph that holds each call, several times."""
    import torch

    rounds = max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    replay = timer([graph.replay])
    return lambda: replay() / (rounds * len(calls))


def medians(timers, rounds=5):
    """{name: microseconds}: the median over rounds in which all timers take turns."""
    times = [{name: measured() for name, measured in timers.items()} for _ in range(rounds)]
    return {name: round(statistics.median(t[name] for t in times), 1) for name in timers}


def row(d, shape, Nk):
    """One row of the table."""
    import torch

    from attention_lib import gpu
    from attention_lib.hardware import GPUS

    batch, heads, kv_heads, Nq = shape
    Q = torch.randn(batch, heads, Nq, d, device="cuda", dtype=torch.float16)
    size = 2 * 2 * batch * kv_heads * Nk * d
    caches = [
        torch.randn(2, batch, kv_heads, Nk, d, device="cuda", dtype=torch.float16)
        for _ in range(min(48, max(1, -(-3 * GPUS["H200"].l2 // size))))
    ]
    contenders = {"ours": gpu.decode}
    contenders |= {b: functools.partial(backend, b) for b in BACKENDS if b != "math"}
    calls = {
        name: [functools.partial(call, Q, K, V) for K, V in caches]
        for name, call in contenders.items()
    }
    halves = (x.flatten().view(torch.uint8).chunk(2) for x in caches)
    calls["copy"] = [functools.partial(one.copy_, other) for one, other in halves]
    timers, refused = {}, {}
    for name, some in calls.items():
        try:
            some[0]()
        except RuntimeError:
            if name not in BACKENDS:
                raise
            refused |= {name: None, f"{name}_graph": None}
            continue
        timers |= {name: timer(some), f"{name}_graph": graph_timer(some)}
    times = refused | medians(timers)
    about = {"d": d, "batch": batch, "heads": heads, "kv_heads": kv_heads, "Nq": Nq, "Nk": Nk}
    return about | {"cache_bytes": size} | times


def measure(shapes=SHAPES, lengths=LENGTHS, heads_d=HEADS_D):
    """The rows, for caches of at most MOST bytes."""
    return [
        row(d, shape, Nk)
        for d in heads_d
        for shape in shapes
        for Nk in lengths
        if 4 * shape[0] * shape[2] * Nk * d <= MOST
    ]


def best(r, kind=""):
    """(microseconds, name) of torch's fastest backend in a row. kind: "" or "_graph"."""
    times = ((r[f"{b}{kind}"], b) for b in BACKENDS if b != "math")
    return min(t for t in times if t[0] is not None)


def show(rows):
    """The rows as lines of text."""
    yield (
        f"{'d':>3}{'batch':>6}{'heads':>8}{'Nq':>4}{'Nk':>8}{'ours us':>9}{'graph':>8}{'GB/s':>7}"
        "   torch's best: from Python, graph     ours / best"
    )
    for r in rows:
        (call, name), (graph, graph_name) = best(r), best(r, "_graph")
        yield (
            f"{r['d']:3}{r['batch']:6}{r['heads']:5}/{r['kv_heads']:<2}{r['Nq']:4}{r['Nk']:8}"
            f"{r['ours']:9.1f}{r['ours_graph']:8.1f}{r['cache_bytes'] / r['ours_graph'] / 1e3:7.0f}"
            f"{call:15.1f} {name:9}{graph:8.1f} {graph_name:9}"
            f"{r['ours'] / call:6.2f}{r['ours_graph'] / graph:6.2f}"
        )


def copy_gbs():
    """GB/s, read and written, of a copy of 1 GiB on the GPU."""
    import torch

    x = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    times = medians({"copy": timer([lambda: y.copy_(x)])})
    return round(2 * 2**30 / times["copy"] / 1e3, 1)


def record():
    """The rows, and where they are from."""
    about = recordings.provenance(COMMAND, KERNELS)
    return about | {"copy_gbs": copy_gbs(), "reach": decoding.reach(0), "rows": measure()}


def main(argv=None):
    recordings.command_line("decode", __doc__.split("\n")[0], record, show, argv)


if __name__ == "__main__":
    main()
