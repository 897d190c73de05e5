"""The framework call, torch's scaled_dot_product_attention, case by case.

torch is optional. Where it is installed every case runs, on the CPU; where it is not, the answer
is the one of a recorded run. The inputs are made here, by numpy, either way. So what torch said,
then or now, can be held against what this library says now.

    python -m attention_lib.framework             run or read everything; say where it is from
    python -m attention_lib.framework --record    run everything, write recordings/sdpa_cpu.json

torch runs in a process of its own: it brings its own thread pool and BLAS, its profiler writes to
the terminal, and a torch that does not start is then no reason for a notebook to stop.

`backends` states, for a call, which of torch's implementations may run it. It is a summary of
torch's own rules, in PyTorch's source, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and
sdp_utils_cpp.cpp, as read in November 2026, for NVIDIA GPUs of compute capability 8.0 or newer
and dense tensors with batch and head axes. The CPU part is checked against torch by a test; the GPU
part was read, not run.
"""

import datetime
import hashlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np

from attention_lib.recordings import recording

RECORDING = Path(__file__).parent / "recordings" / "sdpa_cpu.json"
COMMAND = "python -m attention_lib.framework --record"
OLDEST_TORCH = (2, 5)  # the first with every keyword used here, and with zeros for empty rows
TIMEOUT = 110  # seconds for all cases together
TOLERANCE = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}

# ---------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    """One call: the shapes of its inputs, its mask by name, and the keywords it passes."""

    Nq: int = 4
    Nk: int = 6
    heads: int = 2
    kv_heads: int = 2
    d: int = 8
    dtype: str = "float32"
    mask: str | None = None
    options: dict = field(default_factory=dict)
    backend: str | None = None  # a name of torch's SDPBackend, or its own choice
    layout: str | None = None


CASES = {
    "plain": Case(),
    "float64": Case(dtype="float64"),
    "float16": Case(dtype="float16"),
    "scale": Case(options={"scale": 1.0}),
    "causal, square": Case(Nq=6, options={"is_causal": True}),
    "causal": Case(options={"is_causal": True}),
    "causal, math": Case(options={"is_causal": True}, backend="MATH"),
    "lower right": Case(mask="lower right"),
    "padding": Case(mask="padding"),
    "padding, the wrong way round": Case(mask="inverted padding"),
    "grouped heads": Case(heads=4, options={"enable_gqa": True}),
    "grouped heads, not enabled": Case(heads=4),
    "empty row": Case(mask="empty row"),
    "empty row, math": Case(mask="empty row", backend="MATH"),
    "finite fill": Case(mask="finite fill"),
    "mask and causal": Case(mask="padding", options={"is_causal": True}),
    "mask and causal, math": Case(mask="padding", options={"is_causal": True}, backend="MATH"),
    "dropout": Case(options={"dropout_p": 0.5}),
    "no batch axis": Case(layout="no batch axis"),
    "d not contiguous": Case(layout="d not contiguous"),
}
MODULE = "key_padding_mask"  # nn.MultiheadAttention with identity weights, on the case "padding"
PROFILED = 1024, 2048, 4096  # N of the memory measurements; one head, d = 64, float32


def mask_of(case):
    """The mask of a case, or None. Boolean: True where the query may see the key."""
    if case.mask is None:
        return None
    if case.mask == "lower right":
        return np.tril(np.ones((case.Nq, case.Nk), bool), k=case.Nk - case.Nq)
    if case.mask in ("padding", "inverted padding"):
        real = (np.arange(case.Nk) < case.Nk - 2)[None, :]  # the last two keys are padding
        return real if case.mask == "padding" else ~real
    sees = np.ones((case.Nq, case.Nk), bool)
    sees[2] = False
    return sees if case.mask == "empty row" else np.where(sees, 0, -1e9).astype(case.dtype)


def inputs(name):
    """Q (1, heads, Nq, d), K, V (1, kv_heads, Nk, d) and the mask of a case, as numpy arrays."""
    case = CASES[name]
    rng = np.random.default_rng(0)
    Q = rng.standard_normal((1, case.heads, case.Nq, case.d)).astype(case.dtype)
    kv = (1, case.kv_heads, case.Nk, case.d)
    K, V = (rng.standard_normal(kv).astype(case.dtype) for _ in "KV")
    return Q, K, V, mask_of(case)


def call_text(name):
    """The call of a case as one writes it."""
    case = CASES[name]
    mask = [] if case.mask is None else ["attn_mask=mask"]
    options = [f"{key}={value}" for key, value in case.options.items()]
    return f"scaled_dot_product_attention({', '.join(['Q', 'K', 'V', *mask, *options])})"


# ---------------------------------------------------------------- torch, in its own process


def _tensors(torch, name):
    case = CASES[name]
    *qkv, mask = inputs(name)
    qkv = [torch.from_numpy(x) for x in qkv]
    if case.layout == "no batch axis":
        qkv = [x[0] for x in qkv]
    if case.layout == "d not contiguous":
        qkv = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in qkv]
    return qkv, None if mask is None else torch.from_numpy(mask)


def _attention(torch, name):
    """What torch gives for a case: nested lists, or the text of its error."""
    case = CASES[name]
    qkv, mask = _tensors(torch, name)
    backends = torch.nn.attention.SDPBackend
    both = [backends.FLASH_ATTENTION, backends.MATH]  # there are no others on a CPU
    allowed = getattr(backends, case.backend) if case.backend else both
    torch.manual_seed(0)
    try:
        with torch.nn.attention.sdpa_kernel(allowed):
            O = torch.nn.functional.scaled_dot_product_attention(*qkv, mask, **case.options)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return _lists(O.reshape(1, case.heads, case.Nq, case.d))


def _lists(O):
    """A tensor as nested lists of the shortest decimals that mean the same in its type."""
    O = O.numpy()
    return np.array([float(str(x)) for x in O.ravel()]).reshape(O.shape).tolist()


def _module(torch):
    """nn.MultiheadAttention with all weights the identity: attention of the layer's own inputs.

    One head, so that d = 8 is its whole width. key_padding_mask is True at the padding.
    """
    Q, K, V, real = inputs("padding")
    layer = torch.nn.MultiheadAttention(Q.shape[-1], 1, bias=False, batch_first=True).eval()
    identity = torch.eye(Q.shape[-1])
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([identity] * 3))
        layer.out_proj.weight.copy_(identity)
        qkv = [torch.from_numpy(x[:, 0]) for x in (Q, K, V)]
        O, _ = layer(*qkv, key_padding_mask=torch.from_numpy(~real))
    return _lists(O)


def _traces(torch, calls):
    """Run every call under torch's profiler: {name: its events}, in the order of time."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        for name, call in calls.items():
            with torch.profiler.record_function(name):
                call()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(file)
        with open(file, encoding="utf-8") as trace:
            events = json.load(trace)["traceEvents"]
    events = sorted((e for e in events if "ts" in e), key=lambda e: e["ts"])
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in calls}
    return {
        name: [e for e in events if start <= e["ts"] <= end] for name, (start, end) in spans.items()
    }


def _kernel(events):
    """The operation that a call ended in: aten::_scaled_dot_product_..., without the prefix."""
    prefix = "aten::_scaled_dot_product_"
    found = [e["name"] for e in events if e["name"].startswith(prefix)]
    return found[0].removeprefix(prefix)


def _peak(events):
    """The most bytes that torch held at once for what it made during a call."""
    held = peak = 0
    for event in events:
        if event["name"] == "[memory]":  # one for each allocation, and for each release
            held += event["args"]["Bytes"]
            peak = max(peak, held)
    return peak


def _unforced(torch, name):
    """The call of a case, with torch's own choice of implementation."""
    qkv, mask = _tensors(torch, name)
    options = CASES[name].options
    return lambda: torch.nn.functional.scaled_dot_product_attention(*qkv, mask, **options)


def _large(torch, N, backend):
    """One head of N rows, d = 64, float32, on one implementation."""
    rng = np.random.default_rng(0)
    shape = (1, 1, N, 64)
    qkv = [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for _ in "QKV"]
    backend = getattr(torch.nn.attention.SDPBackend, backend)

    def call():
        with torch.nn.attention.sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(*qkv)

    return call


def _everything(torch):
    """Run all of it: what a recording holds."""
    torch.set_num_threads(1)
    outputs = {name: _attention(torch, name) for name in CASES}
    outputs[MODULE] = _module(torch)
    ran = [n for n, case in CASES.items() if not case.backend and not isinstance(outputs[n], str)]
    small = _traces(torch, {name: _unforced(torch, name) for name in ran})
    large = {f"{b} {N}": _large(torch, N, b) for b in ("FLASH_ATTENTION", "MATH") for N in PROFILED}
    return {
        "outputs": outputs,
        "kernels": {name: _kernel(events) for name, events in small.items()},
        "peak_bytes": {name: _peak(events) for name, events in _traces(torch, large).items()},
    }


def definitions():
    """A hash of all that decides what a recording holds. Another hash: the recording is stale."""
    parts = [inspect.getsource(Case), repr(CASES), repr(PROFILED)]
    ran = (mask_of, inputs, _tensors, _attention, _lists, _module, _traces, _kernel, _peak)
    ran += (_unforced, _large, _everything)
    parts += [inspect.getsource(function) for function in ran]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# ---------------------------------------------------------------- live or recorded


def installed():
    """True if a torch that is new enough is installed (which does not say that it starts)."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(n) for n in version.split("+")[0].split(".")[:2]) >= OLDEST_TORCH


def recorded():
    """The recording, as a dict."""
    return recording("sdpa_cpu")


@cache
def results():
    """All results, and "origin": live where torch runs, else the recording. Runs once."""
    reason = ""
    if installed():
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "live.json")
            root = str(Path(__file__).parent.parent)
            path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
            try:
                subprocess.run(
                    [sys.executable, "-m", "attention_lib.framework", "--to", file],
                    env=os.environ | {"PYTHONPATH": path},
                    capture_output=True,
                    encoding="utf-8",
                    errors="replace",
                    timeout=TIMEOUT,
                    check=True,
                )
                with open(file, encoding="utf-8") as live:
                    answer = json.load(live)
                return answer | {"origin": f"live, torch {answer['versions']['torch']}"}
            except subprocess.CalledProcessError as error:
                last = (error.stderr.strip() or "no message").splitlines()[-1]
                reason = f"\ntorch is installed but did not run: {last[:200]}"
            except (OSError, subprocess.TimeoutExpired) as error:
                reason = f"\ntorch is installed but did not run: {type(error).__name__}"
    answer = recorded()
    origin = (
        f"recorded on {answer['date']}, torch {answer['versions']['torch']}, "
        f"{answer['device']['cpu']}, one thread\nto make it again: {answer['command']}"
    )
    return answer | {"origin": origin + reason}


def origin():
    """Where the results come from, in words: "live, torch ..." or "recorded on ..."."""
    return results()["origin"]


def torch_says(name):
    """What torch gives for a case, as an array; if it refused the call, its error as text."""
    O = results()["outputs"][name]
    return O if isinstance(O, str) else np.array(O, CASES[name].dtype if name in CASES else "f4")


def kernel(name):
    """The operation inside torch that ran a case, as its profiler names it."""
    return results()["kernels"][name]


def peak_bytes(N, backend):
    """The most that torch held during one call, besides Q, K and V. N: one of PROFILED."""
    return results()["peak_bytes"][f"{backend} {N}"]


def same(a, b):
    """True if two results agree to the accuracy of their type. NaN agrees with nothing."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray) or a.shape != b.shape:
        return False
    tolerance = max(TOLERANCE[x.dtype.name] for x in (a, b))
    difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return bool((difference <= tolerance).all())


AGREE_ON = (
    "plain",
    "float64",
    "scale",
    "causal, square",
    "causal",
    "lower right",
    "padding",
    "grouped heads",
    "empty row",
    "finite fill",
)


def agreement(attention):
    """Hold a function with torch's signature against torch: {case: True if they agree}.

    attention(Q, K, V, attn_mask=None, is_causal=False, scale=None, enable_gqa=False), on numpy
    arrays. A case on which it raises, or gives None, does not agree.
    """
    result, tuples = {}, 0
    for name in AGREE_ON:
        Q, K, V, mask = inputs(name)
        try:
            answer = attention(Q, K, V, mask, **CASES[name].options)
            result[name] = same(torch_says(name), answer)
            tuples += isinstance(answer, tuple)
        except Exception as error:
            result[name] = False
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    if tuples:
        print("got a tuple: return O alone")
    return result


# ---------------------------------------------------------------- which implementation may run

ORDER = ("flash", "efficient", "math", "cudnn")
# H100, H200, B200 with cuDNN > 9.15.0, as in the packages built for CUDA 13
ORDER_HOPPER = ("cudnn", "flash", "efficient", "math")
CALLS = {
    "float16": {},
    "bfloat16, is_causal, Nq = Nk": dict(dtype="bfloat16", is_causal=True),
    "float16, dropout_p=0.1": dict(dropout=0.1),
    "float16, attn_mask": dict(mask=True),
    "float16, is_causal, Nq != Nk": dict(is_causal=True, square=False),
    "float16, d = 320": dict(d=320),
    "float32": dict(dtype="float32"),
    "float64": dict(dtype="float64"),
}


def backends(
    dtype="float16", d=64, mask=False, is_causal=False, square=True, dropout=0.0, device="cuda"
):
    """Why an implementation cannot run a call: {name: reason}, "" where it can.

    square: as many queries as keys. device: "cuda" (compute capability 8.0 or newer) or "cpu".
    """
    half = dtype in ("float16", "bfloat16")
    if device == "cpu":
        no_cpu = "only on a GPU"
        flash = "dropout" if dropout else ""
        return {"flash": flash, "efficient": no_cpu, "cudnn": no_cpu, "math": ""}

    def first(*rules):
        return next((reason for broken, reason in rules if broken), "")

    return {
        "flash": first(
            (not half, f"dtype {dtype}"),
            (mask, "attn_mask"),
            (d > 256, "d > 256"),
            (is_causal and not square, "is_causal, Nq != Nk"),
        ),
        "efficient": first(
            (not half and dtype != "float32", f"dtype {dtype}"),
            (d % (8 if half else 4), "d not aligned"),
        ),
        "cudnn": first(
            (not half, f"dtype {dtype}"),
            (d > 128, "d > 128"),
            (d % 8, "d not aligned"),
            (dropout * 16 % 1, "dropout not n/16"),
        ),
        "math": "",
    }


def choice(order=ORDER, **call):
    """The first implementation in the order that can run the call."""
    reasons = backends(**call)
    return next(name for name in order if not reasons[name])


# ---------------------------------------------------------------- the command


def _cpu_name():
    """The processor as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _write(file):
    import torch
    import torch.nn.attention
    import torch.profiler

    versions = {"python": platform.python_version(), "numpy": np.__version__}
    record = {
        "date": datetime.date.today().isoformat(),
        "command": COMMAND,
        "device": {"cpu": _cpu_name(), "system": f"{platform.system()} {platform.machine()}"},
        "versions": versions | {"torch": torch.__version__},
        "definitions": definitions(),
    }
    text = json.dumps(record | _everything(torch), indent=1)
    text = re.sub(r"\[[\d\s.,e+-]+\]", lambda m: re.sub(r"\s+", " ", m.group()), text)
    Path(file).write_text(text + "\n", encoding="utf-8", newline="\n")


def main(arguments):
    if arguments[:1] == ["--to"]:
        _write(arguments[1])
    elif arguments == ["--record"]:
        _write(RECORDING)
        print(f"wrote {RECORDING.name}")
    elif not arguments:
        print(origin())
        for name in CASES:
            said = torch_says(name)
            print(f"{name:30} {said if isinstance(said, str) else 'an array'}"[:100])
    else:
        sys.exit(f"accepted: nothing, or --record; got {' '.join(arguments)}")


if __name__ == "__main__":
    main(sys.argv[1:])
