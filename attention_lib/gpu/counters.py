"""The hardware's own byte counters for every kernel, beside what the closed forms predict.

    python -m attention_lib.gpu.counters                     measure (needs ncu), print a table
    python -m attention_lib.gpu.counters --recorded --json   print the rows that were recorded
    python -m attention_lib.gpu.counters --json --out FILE   measure, and write a recording

A row: kernel, N, heads, kv_heads, d; dram_read, dram_write, l2_read, l2_write, l2_bytes,
l2_slice_bytes, shared_bytes by Nsight Compute, summed over the launches of a call; predicted_dram,
predicted_l2. All in bytes, float16, causal=False. kernel: a rung (with L), a backward kernel by its
name in the bench, or "decode", with one query and N keys. l2_bytes is what crosses between the SMs
and L2, both ways, counted where it enters and leaves the SMs; l2_slice_bytes is counted inside L2,
where requests of neighbouring SMs for the same bytes have become one. shared_bytes counts the
passes through shared memory, 128 bytes each: a bank conflict adds passes. Nsight Compute empties
the caches before each launch.
"""

import csv
import io
import subprocess
import sys

from attention_lib import gpu
from attention_lib.gpu import bench, decoding, gradients, ladder, recordings
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
# (N, heads, d, kv_heads): a group of 4, none, and one head of K and V for all.
STEPS = [
    (N, heads, d, kv_heads)
    for d in (64, 128)
    for heads, kv_heads in ((32, 8), (32, 32), (16, 1))
    for N in (4096, 65_536)
]
KERNELS = [*(k.name for k in ladder.LADDER), *bench.BACKWARD_FILES, "decode.cu"]
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


def backward_bytes(kernel, N, d, blocks=None):
    """{launch: (bytes loaded, bytes stored or added)} of a backward kernel, one head.

    blocks: how often the tensors pass that a block does not own; None: once for each 128 keys (in
    `queries`, rows of Q). N: a multiple of 128.
    """
    blocks = N // gradients.KEYS if blocks is None else blocks
    tensor, row, dQ = 2 * N * d, 4 * N, 4 * N * d  # of 16-bit numbers; L, L2 or D; float
    prepare = 2 * tensor + row, 2 * row + dQ  # O, dO, L; L2, D, and dQ = 0
    loaded = 2 * tensor + blocks * (2 * tensor + 2 * row)  # K, V; Q, dO, L2, D
    if kernel == "backward_deterministic":
        queries = 2 * tensor + 2 * row + blocks * 2 * tensor, tensor
        return {"prepare": prepare, "keys": (loaded, 2 * tensor), "queries": queries}
    keys = loaded, 2 * tensor + blocks * dQ  # dK, dV; dQ is added to
    return {"prepare": prepare, "keys": keys, "finish": (dQ, tensor)}


def predicted_backward(kernel, N, heads, d):
    """(DRAM, L2) bytes of a backward kernel. DRAM: each launch has each of its tensors once; dQ,
    which is added to, both ways."""
    added = 0 if kernel == "backward_deterministic" else 4 * N * d
    once = sum(map(sum, backward_bytes(kernel, N, d, 1).values()))
    return heads * (once + added), heads * sum(map(sum, backward_bytes(kernel, N, d).values()))


def predicted_decode(N, heads, d, kv_heads, reach):
    """(DRAM, L2) bytes of a decoding step: K, V, Q and O once. For the second, each block has Q;
    O of each cluster is stored and loaded again; and what blocks of a cluster read from each other
    leaves one SM and enters another. m, l and the counters are not in it.

    reach: as in decoding.cut.
    """
    rows = heads // kv_heads
    splits, cluster = decoding.cut(kv_heads, -(-N // decoding.KEYS), rows, reach)
    cache, Q, state = 2 * 2 * N * d, 2 * rows * d, 4 * rows * d
    clusters = splits // cluster
    states = (clusters if clusters > 1 else 0) + clusters * (cluster - 1)
    l2 = cache + (splits + 1) * Q + 2 * states * state
    return kv_heads * (cache + 2 * Q), kv_heads * l2


def call_of(kernel, N, heads, d, kv_heads):
    """What is counted: the call of this kernel."""
    import cupy

    draw = cupy.random.default_rng(0)

    def tensor(heads, N):
        return draw.standard_normal((1, heads, N, d), dtype=cupy.float32).astype(cupy.float16)

    Q = tensor(heads, 1 if kernel == "decode" else N)
    K, V = tensor(kv_heads, N), tensor(kv_heads, N)
    if kernel == "decode":
        return lambda: gpu.decode(Q, K, V)
    if kernel in bench.BACKWARD:
        variant = kernel.removeprefix("backward_")
        how = {"deterministic": True} if variant == "deterministic" else {"kernel": variant}
        O, L = gpu.attention(Q, K, V, return_lse=True)
        dO = tensor(heads, N)
        return lambda: gpu.backward(Q, K, V, O, L, dO, **how)
    return lambda: gpu.attention(Q, K, V, kernel=kernel, return_lse=True)


def workload(kernel, shapes):
    """What runs under Nsight Compute: each shape once to compile, then once to be counted."""
    import cupy

    for shape in shapes:
        call = call_of(kernel, *shape)
        call()
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStart()
        call()
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStop()


def launches_of(kernel):
    """How many launches a call of this kernel makes."""
    if kernel == "decode":
        return 1
    return 3 if kernel in bench.BACKWARD else len(ladder.rung(kernel).entries)


def count(kernel, shapes):
    """The counters of a kernel at each shape, summed over its launches."""
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
    launches, each = list(launches.values()), launches_of(kernel)
    if len(launches) != each * len(shapes):
        raise SystemExit(f"{kernel}: {len(launches)} launches for {len(shapes)} shapes")
    counted = []
    for k in range(0, len(launches), each):
        sums = {key: sum(x[key] for x in launches[k : k + each]) for key in METRICS.values()}
        sums["shared_bytes"] *= 128
        counted.append(sums | {"l2_bytes": sums["l2_read"] + sums["l2_write"]})
    return counted


def predicted(kernel, N, heads, d, kv_heads):
    """(DRAM, L2) bytes of a call of this kernel."""
    if kernel == "decode":
        return predicted_decode(N, heads, d, kv_heads, decoding.reach(0))
    if kernel in bench.BACKWARD:
        return predicted_backward(kernel, N, heads, d)
    rung = ladder.rung(kernel)
    return predicted_dram(rung, N, heads, d), predicted_l2(rung, N, heads, d)


def rows(kernel, shapes):
    """The rows of this kernel at shapes (N, heads, d), or for "decode" (N, heads, d, kv_heads)."""
    shapes = [shape if kernel == "decode" else (*shape, shape[1]) for shape in shapes]
    found = []
    for (N, heads, d, kv_heads), counted in zip(shapes, count(kernel, shapes), strict=True):
        dram, l2 = predicted(kernel, N, heads, d, kv_heads)
        about = {"kernel": kernel, "N": N, "heads": heads, "kv_heads": kv_heads, "d": d}
        found.append(about | counted | {"predicted_dram": dram, "predicted_l2": l2})
    return found


def measure():
    """The rows: every rung at SHAPES, Algorithm 1 at the short ones, two rungs at LONG too; then
    the backward kernels at SHAPES, and decode at STEPS."""
    found = []
    for kernel in gpu.able():
        shapes = SHAPES if kernel != "algorithm_1" else SHAPES[::2]
        found += rows(kernel, shapes + (LONG if kernel in ("pipeline", "overlap") else []))
    for kernel in bench.BACKWARD:
        found += rows(kernel, SHAPES)
    return found + rows("decode", STEPS)


def show(rows):
    """The rows as lines of text, in MB, with the ratio of each counter to its prediction."""
    yield (
        f"{'kernel':23}{'N':>7}{'heads':>9}{'d':>4}{'DRAM MB':>11}{'/ form':>8}{'L2 MB':>12}"
        f"{'/ form':>8}{'slices':>8}{'shared MB':>12}"
    )
    for r in rows:
        dram = r["dram_read"] + r["dram_write"]
        yield (
            f"{r['kernel']:23}{r['N']:7}{r['heads']:6}/{r['kv_heads']:<2}{r['d']:4}"
            f"{dram / 1e6:11,.1f}"
            f"{dram / r['predicted_dram']:8.3f}{r['l2_bytes'] / 1e6:12,.1f}"
            f"{r['l2_bytes'] / r['predicted_l2']:8.3f}"
            f"{r['l2_slice_bytes'] / r['predicted_l2']:8.3f}{r['shared_bytes'] / 1e6:12,.0f}"
        )


def record():
    """The rows, and where they are from."""
    where = {"dtype": "float16", "causal": False, "reach": decoding.reach(0)}
    about = recordings.provenance(COMMAND, KERNELS)
    return about | where | {"rows": measure()}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--workload"]:  # what Nsight Compute watches
        kernel, *numbers = argv[1:]
        workload(kernel, list(zip(*[map(int, numbers)] * 4, strict=True)))
    else:
        recordings.command_line("counters", __doc__.split("\n")[0], record, show, argv)


if __name__ == "__main__":
    main()
