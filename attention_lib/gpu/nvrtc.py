"""Compile a rung with NVRTC, for any GPU, on a machine that has none. Needs the extra `nvrtc`.

python -m attention_lib.gpu.nvrtc --recorded     print registers, spills and shared memory
python -m attention_lib.gpu.nvrtc --out FILE     compile every case, and write the table
"""

import argparse
import functools
import importlib.util
import re
from importlib import resources
from pathlib import Path

from attention_lib.gpu import ladder, recordings


def available():
    """True if cuda-bindings and the CUDA headers are installed."""
    try:
        return all(importlib.util.find_spec(x) for x in ("cuda.bindings.nvrtc", "nvidia"))
    except ModuleNotFoundError:  # not even a package named cuda
        return False


@functools.cache
def include_directories():
    """Where the wheels nvidia-cuda-runtime and nvidia-cuda-crt keep the CUDA headers."""
    roots = [Path(str(p)) for p in resources.files("nvidia").iterdir()]
    return [str(p / "include") for p in roots if (p / "include" / "cuda_fp16.h").exists()]


def compile(name, d, dtype, causal, architecture):
    """Compile one case of a rung. Returns (cubin, log): bytes, and what ptxas -v said.

    Raises RuntimeError with the compiler's log if it does not compile.
    """
    kernel = ladder.rung(name)
    given = ladder.options(d, dtype, causal, kernel.shared(d))
    return compile_text(ladder.source(name), kernel.file, architecture, given)


def compile_text(text, file, architecture="sm_90", options=()):
    """Compile CUDA C++ text, which the log calls `file`. Returns and raises as compile does."""
    from cuda.bindings import nvrtc

    def done(result):
        error, *values = result
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {error.name}\n{log()}")
        return values[0] if values else None

    def log():
        size = nvrtc.nvrtcGetProgramLogSize(program)[1]
        said = b" " * size
        nvrtc.nvrtcGetProgramLog(program, said)
        return said.decode(errors="replace").rstrip("\0 \n")

    headers = (f"-I{path}" for path in include_directories())
    given = [*options, f"-arch={architecture}", "--ptxas-options=-v", *headers]
    given = [x.encode() for x in given]
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, [], [])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {error.name}")
    try:
        done(nvrtc.nvrtcCompileProgram(program, len(given), given))
        cubin = b" " * done(nvrtc.nvrtcGetCUBINSize(program))
        done(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, log()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def usage(log):
    """What ptxas reported of each entry: {entry: {registers, spill_bytes, static_shared}}."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        smem = re.search(r"(\d+) bytes smem", part)
        found[part[: part.index("'")]] = {
            "registers": int(re.search(r"Used (\d+) registers", part)[1]),
            "spill_bytes": int(spill[1]) + int(spill[2]),
            "static_shared": int(smem[1]) if smem else 0,
        }
    return found


def lost_speed(log):
    """What ptxas says when wgmma or setmaxnreg lost its effect: its codes, C7508 to C7519."""
    return re.findall(r"\((C75(?:0[89]|1\d))\)", log)


def version():
    """The compiler's version, as (major, minor)."""
    from cuda.bindings import nvrtc

    return list(nvrtc.nvrtcVersion()[1:])


def cases(name):
    """What is compiled of a rung: everything for Hopper; else float16 and the measured d."""
    return [
        (d, dtype, causal, architecture)
        for architecture in ladder.rung(name).architectures()
        for d in ladder.rung(name).heads_d
        for dtype in ladder.DTYPES
        for causal in (False, True)
        if architecture.startswith("sm_90") or (d in (64, 128) and dtype == "float16")
    ]


def rows(name, d, dtype, causal, architecture):
    """A row for each entry of one case: registers, spills, and bytes of shared memory."""
    _, log = compile(name, d, dtype, causal, architecture)
    return [
        {"kernel": name, "entry": entry, "d": d, "dtype": dtype, "causal": causal}
        | {"architecture": architecture, "registers": found["registers"]}
        | {"spill_bytes": found["spill_bytes"]}
        | {"shared": found["static_shared"] + ladder.rung(name).shared(d)}
        for entry, found in sorted(usage(log).items())
    ]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recorded", action="store_true", help="print the table that is kept")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    given = parser.parse_args(argv)
    if given.recorded:
        record = recordings.read("nvrtc")
    elif not available():
        raise SystemExit("NVRTC is not installed here; the extra `nvrtc` brings it.")
    else:
        record = {
            "nvrtc": version(),
            "command": "python -m attention_lib.gpu.nvrtc --out FILE",
            "kernel_sha256": {k.name: recordings.sha256(k.name) for k in ladder.LADDER},
            "rows": [r for k in ladder.LADDER for c in cases(k.name) for r in rows(k.name, *c)],
        }
    if given.out:
        given.out.write_text(recordings.dumps(record), encoding="utf-8")
    print("kernel        entry       d dtype     causal arch   registers spilled  shared")
    for r in record["rows"]:
        print(
            f"{r['kernel']:13} {r['entry']:9} {r['d']:3} {r['dtype']:9} {r['causal']!s:6} "
            f"{r['architecture']:6} {r['registers']:9} {r['spill_bytes']:7} {r['shared']:7}"
        )


if __name__ == "__main__":
    main()
