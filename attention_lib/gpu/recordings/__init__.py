"""What the kernels did on a GPU: bench, counters and sanitizer; and what NVRTC made of them.

Each names the device, driver, versions, date and command, and the hash of each kernel's source. A
test refuses a recording whose kernel has changed since. `make record` on a GPU makes them again;
but not `decode_before`, two earlier versions of decode.cu, which notebook 23 tells of.
"""

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

from attention_lib.gpu import ladder

BESIDES = ("matmul.cu", "backward.cu", "backward_wgmma.cu", "decode.cu")  # the ladder


def read(name):
    """The recording with this name, as a dict. Raises ValueError for a name that is not there."""
    names = sorted(
        f.name.removesuffix(".json")
        for f in resources.files(__name__).iterdir()
        if f.name.endswith(".json")
    )
    if name not in names:
        raise ValueError(f"name is {name!r}; accepted: {', '.join(names)}")
    return json.loads((resources.files(__name__) / f"{name}.json").read_text(encoding="utf-8"))


def said(record):
    """One sentence that says what was recorded where: to print beside the numbers."""
    return (
        f"Recorded on one {record['device']}, {record['date']}, driver {record['driver']}, CUDA "
        f"{record['cuda']}, CuPy {record['cupy']}, torch {record['torch']}, by: {record['command']}"
    )


def sha256(kernel):
    """The hash of everything that is compiled for a rung, or for a file of kernels/."""
    source = ladder.read(kernel) if kernel in BESIDES else ladder.source(kernel)
    return hashlib.sha256(source.encode()).hexdigest()


def kernels():
    """Every kernel: the rungs by their names, and the files BESIDES them."""
    return [*(k.name for k in ladder.LADDER), *BESIDES]


def provenance(command, kernels):
    """Where and with what this runs, and the hash of these kernels. Needs a GPU and torch."""
    import cupy
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    return {
        "device": device,
        "driver": driver,
        "cuda": ".".join(map(str, divmod(cupy.cuda.runtime.runtimeGetVersion() // 10, 100))),
        "cupy": cupy.__version__,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "date": datetime.date.today().isoformat(),
        "command": command,
        "kernel_sha256": {kernel: sha256(kernel) for kernel in kernels},
    }


def dumps(record):
    """A recording as text: one row a line, so that a diff can be read."""
    head = json.dumps({k: v for k, v in record.items() if k != "rows"}, indent=1)
    rows = ",\n".join("  " + json.dumps(row) for row in record["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def command_line(name, description, measure, show, argv=None):
    """The command of a recording: measure here or print what was recorded; as a table or as JSON.

    measure() -> the record, needs a GPU; show(rows) -> lines of a table.
    """
    from attention_lib import gpu

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recorded", action="store_true", help="print what was recorded")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--out", type=Path, help="write a recording to this file")
    given = parser.parse_args(argv)
    if given.recorded:
        record = read(name)
    elif not gpu.available():
        raise SystemExit(f"NoGPU: {gpu.missing()}. --recorded prints a recording.")
    else:
        record = measure()
    if given.out:
        given.out.write_text(dumps(record), encoding="utf-8")
    if given.json:
        print(json.dumps(record["rows"], indent=1))
    else:
        print(said(record) if given.recorded else "Measured here.")
        print("\n".join(show(record["rows"])))
