"""The hardware's own byte counters for every rung, beside what the closed forms predict.

    python -m attention_lib.gpu.counters                     measure (needs ncu), print a table
    python -m attention_lib.gpu.counters --recorded --json   print the rows that were recorded
    python -m attention_lib.gpu.counters --json --out FILE   measure, and write a recording

A row: kernel, N, heads, d; dram_read, dram_write, l2_read, l2_write, l2_bytes, l2_slice_bytes,
shared_bytes by Nsight Compute, summed over the kernels of the rung; predicted_dram, predicted_l2.
All in bytes, float16, causal=False, with L. l2_bytes is what crosses between the SMs and L2, both
ways, counted where it enters and leaves the SMs; l2_slice_bytes is counted inside L2, where
requests of neighbouring SMs for the same
bytes have become one. shared_bytes counts the passes through shared memory, 128 bytes each: a bank
conflict adds passes.
"""

import csv
import io
import subprocess
import sys

from attention_lib import gpu
from attention_lib.gpu import ladder, recordings
from attention_lib.hardware import GPUS
from attention_lib.traffic import general_traffic, standard_traffic

METRICS = {
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_write",
    "lts__t_bytes.sum": "l2_slice_bytes",
    "l1tex__m_xbar2l1tex_read_bytes.sum": "l2_read",  # to the SMs
    "l1tex__m_l1tex2xbar_write_bytes.sum": "l2_write",  # from them
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "shared_bytes",
}
# (N, heads, d): sizes of the course, then one head whose K and V outgrow the L2 of an H200.
SHAPES = [(4096, 16, 64), (16_384, 16, 64), (4096, 16, 128), (16_384, 16, 128)]
LONG = [(65_536, 1, 128), (131_072, 1, 128), (262_144, 1, 128)]
COMMAND = "python -m attention_lib.gpu.counters --json --out FILE"


def in_flight(kernel, d, gpu):
    """Blocks of a rung that run at once: as many on each SM as shared memory has room for, two."""
    return gpu.sms * min(2, gpu.sram_per_sm // (kernel.shared(d) + 1024))


def predicted_dram(kernel, N, heads, d, gpu=GPUS["H200"]):
    """Bytes between L2 and HBM. Unfused: all of S and P, both ways. Fused: each tensor once while
    K and V of a head stay in L2; else K and V once for each wave of blocks that run together."""
    statistics = 4 * heads * N  # L, in float
    if kernel.name == "unfused":
        return 2 * heads * standard_traffic(N, d) + statistics
    if 2 * 2 * N * d <= gpu.l2:
        return 2 * heads * general_traffic(N, d) + statistics
    waves = -(-N // (kernel.rows(d) * in_flight(kernel, d, gpu)))
    return 2 * heads * general_traffic(N, d, R_KV=waves) + statistics


def predicted_l2(kernel, N, heads, d):
    """Bytes between the SMs and L2: what the loop of the rung loads and stores."""
    Tr = -(-N // kernel.rows(d))
    statistics = 4 * heads * N
    if kernel.name == "unfused":  # Q and K again for each tile of S; V for each 64 rows of O
        scores = general_traffic(N, d, R_Q=Tr, c_Q=1, R_KV=0, sigma=1) + Tr * N * d
        return 2 * heads * (scores + 2 * N * N + N * N + N * d + Tr * N * d) + statistics
    if kernel.name == "algorithm_1":  # O, l, m in float, read and written for each K/V block
        Tc = -(-N // (16 if d > 128 else 32))
        a_pass = 2 * N * d + 2 * 4 * N * (d + 2)
        ends = 4 * N * (d + 2) + 4 * N * (d + 2) + 2 * N * d
        return heads * (2 * 2 * N * d + Tc * a_pass + ends) + statistics
    return 2 * heads * general_traffic(N, d, R_KV=Tr) + statistics


def workload(kernel, shapes):
    """What runs under Nsight Compute: each shape once to compile, then once to be counted."""
    import cupy

    draw = cupy.random.default_rng(0)
    for N, heads, d in shapes:
        Q, K, V = (
            draw.standard_normal((1, heads, N, d), dtype=cupy.float32).astype(cupy.float16)
            for _ in range(3)
        )
        gpu.attention(Q, K, V, kernel=kernel, return_lse=True)
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStart()
        gpu.attention(Q, K, V, kernel=kernel, return_lse=True)
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStop()


def count(kernel, shapes):
    """The counters of a rung at each shape, summed over its kernels."""
    command = [
        *("ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"),
        *("--print-units", "base", "--metrics", ",".join(METRICS)),
        *(sys.executable, "-m", "attention_lib.gpu.counters"),
        *("--workload", kernel, *(str(n) for shape in shapes for n in shape)),
    ]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode or '"ID"' not in done.stdout:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    launches = {}  # by their number, in the order they were made
    for row in csv.DictReader(io.StringIO(done.stdout[done.stdout.index('"ID"') :])):
        value = int(float(row["Metric Value"].replace(",", "")))
        launches.setdefault(row["ID"], {})[METRICS[row["Metric Name"]]] = value
    launches, each = list(launches.values()), len(ladder.rung(kernel).entries)
    if len(launches) != each * len(shapes):
        raise SystemExit(f"{kernel}: {len(launches)} launches for {len(shapes)} shapes")
    counted = []
    for k in range(0, len(launches), each):
        sums = {key: sum(x[key] for x in launches[k : k + each]) for key in METRICS.values()}
        sums["shared_bytes"] *= 128
        counted.append(sums | {"l2_bytes": sums["l2_read"] + sums["l2_write"]})
    return counted


def rows(kernel, shapes):
    """The rows of the rung with this name at shapes (N, heads, d)."""
    rung = ladder.rung(kernel)
    return [
        dict(zip(("kernel", "N", "heads", "d"), (kernel, *shape), strict=True))
        | counted
        | {"predicted_dram": predicted_dram(rung, *shape)}
        | {"predicted_l2": predicted_l2(rung, *shape)}
        for shape, counted in zip(shapes, count(kernel, shapes), strict=True)
    ]


def measure():
    """The rows: every rung at SHAPES, Algorithm 1 at the short ones, two rungs at LONG too."""
    found = []
    for kernel in gpu.able():
        shapes = SHAPES if kernel != "algorithm_1" else SHAPES[::2]
        found += rows(kernel, shapes + (LONG if kernel in ("pipeline", "overlap") else []))
    return found


def show(rows):
    """The rows as lines of text, in MB, with the ratio of each counter to its prediction."""
    yield (
        f"{'kernel':13}{'N':>7}{'heads':>6}{'d':>4}{'DRAM MB':>11}{'/ form':>8}{'L2 MB':>12}"
        f"{'/ form':>8}{'slices':>8}{'shared MB':>12}"
    )
    for r in rows:
        dram = r["dram_read"] + r["dram_write"]
        yield (
            f"{r['kernel']:13}{r['N']:7}{r['heads']:6}{r['d']:4}{dram / 1e6:11,.1f}"
            f"{dram / r['predicted_dram']:8.3f}{r['l2_bytes'] / 1e6:12,.1f}"
            f"{r['l2_bytes'] / r['predicted_l2']:8.3f}"
            f"{r['l2_slice_bytes'] / r['predicted_l2']:8.3f}{r['shared_bytes'] / 1e6:12,.0f}"
        )


def record():
    """The rows, and where they are from."""
    where = {"dtype": "float16", "causal": False}
    about = recordings.provenance(COMMAND, [k.name for k in ladder.LADDER])
    return about | where | {"rows": measure()}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--workload"]:  # what Nsight Compute watches
        kernel, *numbers = argv[1:]
        workload(kernel, list(zip(*[map(int, numbers)] * 3, strict=True)))
    else:
        recordings.command_line("counters", __doc__.split("\n")[0], record, show, argv)


if __name__ == "__main__":
    main()
