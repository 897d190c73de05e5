"""Record what the CPU notebooks quote from a GPU. Needs a GPU, torch, CuPy and Nsight Compute.

    python tools/record_gpu.py OUT     writes three files; copied to attention_lib/recordings/ they
                                       are h200_device, h200_sdpa_counters and h200_sdpa_calls

h200_device: what the device says of itself, and whether a kernel starts with so much shared memory.
h200_sdpa_counters: bytes through DRAM and through L2, by the hardware's own counters, of standard
attention as three framework kernels and of the framework's fused call; times from CUDA events.
The scale is folded into Q beforehand, so that the three kernels are all there is.
h200_sdpa_calls: which implementation the framework's call picked for eight kinds of input, by the
names of the kernels that ran; and how much memory each implementation took for one input.
"""

import csv
import datetime
import hashlib
import io
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

HEADS, D = 16, 64
SIZES = (4096, 16384)
STEPS = ("S = Q K^T", "softmax", "O = P V", "fused")
METRICS = {
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_write",
    "lts__t_bytes.sum": "l2_bytes",
}
PROBE = r"""
extern "C" __global__ void probe(float *out) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = 1.0f;
    out[threadIdx.x] = tile[threadIdx.x];
}
"""


def provenance():
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.check_output(query, text=True).strip().split(", ")
    return {
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "command": "python tools/record_gpu.py OUT",
        "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }


def record_device():
    import cupy as cp

    attributes = cp.cuda.Device(0).attributes
    wanted = (
        "L2CacheSize",
        "MultiProcessorCount",
        "MaxSharedMemoryPerMultiprocessor",
        "MaxSharedMemoryPerBlockOptin",
        "ReservedSharedMemoryPerBlock",
        "MaxRegistersPerMultiprocessor",
        "ClockRate",  # kHz
        "MemoryClockRate",  # kHz
        "GlobalMemoryBusWidth",  # bits
    )
    launches, kernel = {}, cp.RawKernel(PROBE, "probe")
    for kib in (48, 100, 163, 227, 228, 258):
        try:
            kernel.max_dynamic_shared_size_bytes = kib * 1024
            kernel((1,), (32,), (cp.zeros(32, cp.float32),), shared_mem=kib * 1024)
            cp.cuda.Device().synchronize()
            launches[f"{kib} KiB"] = "ran"
        except cp.cuda.driver.CUDADriverError as error:
            launches[f"{kib} KiB"] = str(error)
    return provenance() | {
        "cupy": cp.__version__,
        "attributes": {name: attributes[name] for name in wanted},
        "total_memory": cp.cuda.runtime.getDeviceProperties(0)["totalGlobalMem"],
        "launch_with_shared_memory": launches,
    }


def steps(N):
    """The four steps of one forward pass as callables, in order, on fresh random inputs."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    Q, K, V = (torch.randn(1, HEADS, N, D, device="cuda", dtype=torch.float16) for _ in range(3))
    scaled = Q / math.sqrt(D)
    kept = {}

    def fused():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(Q, K, V)

    return {
        "S = Q K^T": lambda: kept.update(S=scaled @ K.transpose(-1, -2)),
        "softmax": lambda: kept.update(P=torch.softmax(kept["S"], dim=-1)),
        "O = P V": lambda: kept.update(O=kept["P"] @ V),
        "fused": fused,
    }


def workload(N):
    """What runs under Nsight Compute: each step once to warm up, then once to be counted."""
    import torch

    todo = steps(N)
    for step in todo.values():
        step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for step in todo.values():
        step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def count(N):
    """Rows of counters for the four steps: one kernel each, or the run is refused."""
    command = [
        *("ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"),
        *("--print-units", "base", "--metrics", ",".join(METRICS)),
        *(sys.executable, __file__, "--workload", str(N)),
    ]
    text = subprocess.check_output(command, text=True)
    table = text[text.index('"ID"') :]
    kernels = {}
    for row in csv.DictReader(io.StringIO(table)):
        kernel = kernels.setdefault(int(row["ID"]), {"kernel": row["Kernel Name"]})
        value = float(row["Metric Value"].replace(",", ""))
        kernel[METRICS[row["Metric Name"]]] = int(value)
    if len(kernels) != len(STEPS):
        names = [k["kernel"] for k in kernels.values()]
        raise SystemExit(f"expected one kernel a step, {len(STEPS)}; got {len(names)}: {names}")
    rows = [kernels[i] for i in sorted(kernels)]
    return [{"N": N, "step": s} | row for s, row in zip(STEPS, rows, strict=True)]


def microseconds(step, runs=30):
    """The median time of a step, from CUDA events."""
    import torch

    times = []
    for _ in range(runs + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return round(statistics.median(times[3:]), 1)


def record_counters():
    rows = [row for N in SIZES for row in count(N)]
    for N in SIZES:
        todo = steps(N)
        for row in rows:
            if row["N"] == N:
                row["microseconds"] = microseconds(todo[row["step"]])
    return provenance() | {"dtype": "float16", "batch": 1, "heads": HEADS, "d": D, "rows": rows}


# ---------------------------------------------------------------- which implementation runs


def inputs(dtype="float16", d=64, square=True):
    import torch

    kind = getattr(torch, dtype)
    lengths = (2048, 2048 if square else 4096, 2048 if square else 4096)
    return [torch.randn(1, 8, n, d, device="cuda", dtype=kind) for n in lengths]


def picked(options):
    """The implementation that ran, from the kernels' names, and those names."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    options = dict(options)
    shape = {k: options.pop(k) for k in ("dtype", "d", "square") if k in options}
    Q, K, V = inputs(**shape)
    call = {"is_causal": options.get("is_causal", False), "dropout_p": options.get("dropout", 0.0)}
    if options.get("mask"):
        call["attn_mask"] = torch.rand(Q.shape[2], K.shape[2], device="cuda") < 0.9
    torch.nn.functional.scaled_dot_product_attention(Q, K, V, **call)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        torch.nn.functional.scaled_dot_product_attention(Q, K, V, **call)
        torch.cuda.synchronize()
    operators = [event.key for event in trace.key_averages() if event.key.startswith("aten::")]
    kinds = {
        "aten::_scaled_dot_product_flash_attention": "flash",
        "aten::_scaled_dot_product_efficient_attention": "efficient",
        "aten::_scaled_dot_product_cudnn_attention": "cudnn",
        "aten::_scaled_dot_product_attention_math": "math",
    }
    return next(kind for name, kind in kinds.items() if name in operators)


def memory_taken(backend):
    """MiB that one call takes beyond its inputs, at its peak, with this implementation forced."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    Q, K, V = (torch.randn(2, 16, 4096, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    for _ in range(2):  # the first call may load a library
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with sdpa_kernel(getattr(SDPBackend, backend)):
            torch.nn.functional.scaled_dot_product_attention(Q, K, V)
        torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def record_calls():
    import torch

    calls = {
        "float16": {},
        "bfloat16, is_causal, Nq = Nk": {"dtype": "bfloat16", "is_causal": True},
        "float16, dropout_p=0.1": {"dropout": 0.1},
        "float16, attn_mask": {"mask": True},
        "float16, is_causal, Nq != Nk": {"is_causal": True, "square": False},
        "float16, d = 320": {"d": 320},
        "float32": {"dtype": "float32"},
        "float64": {"dtype": "float64"},
    }
    backends = {
        "flash": "FLASH_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION",
        "cudnn": "CUDNN_ATTENTION",
        "math": "MATH",
    }
    return provenance() | {
        "cudnn": torch.backends.cudnn.version(),
        "picked": {name: picked(options) for name, options in calls.items()},
        "memory_shape": "(2, 16, 4096, 64), float16",
        "memory_MiB": {name: memory_taken(backend) for name, backend in backends.items()},
    }


def main():
    if sys.argv[1:2] == ["--workload"]:
        return workload(int(sys.argv[2]))
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    records = {
        "h200_device": record_device,
        "h200_sdpa_counters": record_counters,
        "h200_sdpa_calls": record_calls,
    }
    for name, record in records.items():
        (out / f"{name}.json").write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {name}.json", flush=True)


if __name__ == "__main__":
    main()
