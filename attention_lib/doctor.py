"""Is this machine ready for the course? One line a check; for each failure, what repairs it.

    from attention_lib.doctor import doctor; doctor()      in a notebook
    python -m attention_lib.doctor                         in a terminal; exits 1 on a FIX

A check is a small function that returns a Finding. What it looks at is an argument with the real
thing as its default, so that a test can show it a broken machine. A line starts with

    ok          as it should be
    FIX         the course will not run like this; the next line says what to do
    optional    not needed: what would be possible with it
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

OK, FIX, OPTIONAL = "ok", "FIX", "optional"
COURSE = "flashattention-course"
ROOT = Path(__file__).resolve().parent.parent  # the checkout, where the course runs from one
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "torch>=2.5"  # the first in which every call of notebook 07 exists
LEAST_MEMORY = 3.5 * 2**30  # bytes; a machine sold with 4 GB has a little less than 4 GiB
GPU_TIMEOUT = 10  # seconds for nvidia-smi


@dataclass(frozen=True)
class Finding:
    """What one check saw: its subject, "ok", "FIX" or "optional", in words, and the repair."""

    name: str
    state: str
    found: str
    fix: str | None = None

    def __str__(self):
        line = f"{self.state:<9} {self.name:<12} {self.found}"
        return line if self.fix is None else f"{line}\n{'':<9} {'':<12} -> {self.fix}"


# ---------------------------------------------------------------- how to repair


def install(requirement, *, in_notebook=None, has_pip=None, has_uv=None, python=sys.executable):
    """The command that installs a requirement into the environment of this kernel."""
    in_notebook = "ipykernel" in sys.modules if in_notebook is None else in_notebook
    # Not importlib.util.find_spec: setuptools stands in its way, and may warn about distutils.
    has_pip = PathFinder.find_spec("pip") is not None if has_pip is None else has_pip
    has_uv = shutil.which("uv") is not None if has_uv is None else has_uv
    if has_pip and in_notebook:
        return f'in a new cell: %pip install "{requirement}", then Kernel > Restart Kernel'
    if has_pip:
        return f'in a terminal: "{python}" -m pip install "{requirement}"'
    if has_uv:
        return f'in a terminal: uv pip install --python "{python}" "{requirement}"'
    return f'in a terminal: "{python}" -m ensurepip, then look here again'


def setup(root=ROOT, *, windows=os.name == "nt", python=sys.executable):
    """The command that installs the course from its checkout."""
    if windows or not (root / "Makefile").is_file():
        return f'in a terminal: "{python}" -m pip install -e "{root}"'
    return f'stop JupyterLab, then in a terminal: cd "{root}" && make lab'


# ---------------------------------------------------------------- what the course asks for


def required(root=ROOT, metadata_of=metadata.requires):
    """The runtime requirements: of pyproject.toml in a checkout, else of the installed course."""
    pyproject = root / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == COURSE:
            return list(project["dependencies"])
    try:
        return [r for r in metadata_of(COURSE) or [] if "extra ==" not in r]
    except metadata.PackageNotFoundError:
        return []


def parse(requirement):
    """From "numpy>=2,<3" to "numpy", [(">=", (2,)), ("<", (3,))]. Markers are dropped."""
    text = requirement.split(";")[0].strip()
    name = re.match(r"[A-Za-z0-9._-]+", text).group()
    bounds = re.findall(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)", text[len(name) :])
    return name, [(sign, numbers(version)) for sign, version in bounds]


def numbers(version):
    """From "2.4.6rc1" to (2, 4, 6): the numbers of a release, as far as they go."""
    return tuple(int(n) for n in re.match(r"[0-9.]*", version).group().split(".") if n)


def satisfies(version, bounds):
    """True if a version keeps every bound. Short versions are filled up: 2 means 2.0.0."""
    compare = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b,
        "<": lambda a, b: a < b,
    }
    have = numbers(version)
    for sign, wanted in bounds:
        length = max(len(have), len(wanted))
        a, b = (x + (0,) * (length - len(x)) for x in (have, wanted))
        if not compare[sign](a, b):
            return False
    return True


# ---------------------------------------------------------------- the checks


def check_python(version=sys.version_info[:3]):
    found = ".".join(map(str, version))
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return Finding("Python", OK, found)
    need = f"{found}; needed: {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    fix = "install Python 3.12, then in the course's folder: make lab PYTHON=python3.12"
    return Finding("Python", FIX, need, fix)


def check_package(requirement, version_of=metadata.version):
    """A package against its requirement, by the metadata of what is installed."""
    name, bounds = parse(requirement)
    wanted = requirement.split(";")[0].strip()[len(name) :].strip()
    try:
        version = version_of(name)
    except metadata.PackageNotFoundError:
        version = None
    if not version:  # None too: what a half-deleted package leaves behind
        return Finding(name, FIX, f"not installed; needed: {wanted or 'any'}", install(requirement))
    if not satisfies(version, bounds):
        return Finding(name, FIX, f"{version}; needed: {wanted}", install(requirement))
    return Finding(name, OK, f"{version} (needed: {wanted or 'any'})")


def check_kernel(
    prefix=sys.prefix,
    library=Path(__file__).parent,
    folder=None,
    distribution=metadata.distribution,
):
    """Does this kernel run in the environment in which the course is installed?

    prefix: the environment of the kernel. library: the attention_lib that was imported. folder:
    where the notebook is. A kernel of another Python, or a second copy of the course, is the most
    common reason for "it works in the terminal but not in the notebook".
    """
    prefix, library = Path(prefix).resolve(), Path(library).resolve()
    try:
        site = Path(str(distribution(COURSE).locate_file(""))).resolve()
    except metadata.PackageNotFoundError:
        found = f"the course is not installed in the environment of this kernel, {prefix}"
        return Finding("kernel", FIX, found, setup())
    if not site.is_relative_to(prefix):
        found = f"runs in {prefix}, but the course is installed in {site}"
        return Finding("kernel", FIX, found, setup())
    folder = Path.cwd() if folder is None else Path(folder)
    for place in (folder, folder.parent):
        copy = place / "attention_lib"
        if (copy / "doctor.py").is_file() and copy.resolve() != library:
            found = f"uses the library in {library}, not the one beside this notebook"
            return Finding("kernel", FIX, found, setup(place.resolve()))
    return Finding("kernel", OK, f"runs where the course is installed ({prefix.name})")


def check_widgets(prefix=sys.prefix):
    """The half of ipywidgets that lives in JupyterLab: without it a widget shows as text."""
    extension = Path(prefix, "share/jupyter/labextensions/@jupyter-widgets/jupyterlab-manager")
    if extension.is_dir():
        return Finding("widgets", OK, "JupyterLab can show them")
    return Finding("widgets", FIX, "JupyterLab cannot show them", install("jupyterlab-widgets"))


def memory_bytes(limit_file=Path("/sys/fs/cgroup/memory.max")):
    """The memory of this machine, or of the container it runs in; None if it cannot be told."""
    total = None
    if os.name == "nt":

        class Status(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
                (f"size{k}", ctypes.c_ulonglong) for k in range(7)
            ]

        status = Status()
        status.length = ctypes.sizeof(status)
        if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            total = status.size0
    elif "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limit_file.is_file():
        limit = limit_file.read_text().strip()
        if limit.isdigit():
            total = int(limit) if total is None else min(total, int(limit))
    return total


def check_memory(total=memory_bytes):
    size = total()
    if size is None:
        return Finding("memory", OPTIONAL, "cannot be told here; a notebook needs up to 2 GiB")
    found = f"{size / 2**30:.1f} GiB"
    if size >= LEAST_MEMORY:
        return Finding("memory", OK, found)
    fix = "close other programs and notebooks; if a kernel still dies, use a smaller N in that cell"
    return Finding("memory", FIX, f"{found}; needed: {LEAST_MEMORY / 2**30:.1f} GiB", fix)


def usable_cores():
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_cores(count=usable_cores):
    cores = count()
    return Finding("cores", OK, f"{cores} (one is enough)")


def nvidia_smi():
    """For each GPU "name, driver", by NVIDIA's own tool; None if the tool is not there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, timeout=GPU_TIMEOUT)
    if run.returncode:
        raise OSError((run.stdout + run.stderr).strip().splitlines()[0])
    return [line.strip() for line in run.stdout.splitlines() if line.strip()]


def cuda_devices():
    """How many GPUs CUDA's driver library sees; None if the library is not there."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def check_gpu(smi=nvidia_smi, devices=cuda_devices):
    """An NVIDIA GPU and a driver that answers. Never a failure: the course runs without."""
    try:
        names = smi()
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        found = f"nvidia-smi is here but gives no answer ({error}); not needed"
        return Finding("GPU", OPTIONAL, found)
    if names:
        return Finding("GPU", OK, "; ".join(names))
    if devices():
        return Finding("GPU", OK, f"{devices()} NVIDIA GPU(s), by the driver library")
    return Finding("GPU", OPTIONAL, "no NVIDIA GPU; every notebook runs without one")


def check_extra(requirement, purpose, version_of=metadata.version):
    """A package that nothing needs: fine when it is missing, and when it is too old to be used."""
    name, bounds = parse(requirement)
    try:
        version = version_of(name)
    except metadata.PackageNotFoundError:
        return Finding(name, OPTIONAL, f"not installed; {purpose}", install(requirement))
    if not satisfies(version or "0", bounds):
        found = f"{version} is too old to be used here; {purpose}"
        return Finding(name, OPTIONAL, found, install(requirement))
    return Finding(name, OK, version)


def check_cupy(version_of=metadata.version):
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return Finding("cupy", OK, f"{version_of(name)} ({name})")
        except metadata.PackageNotFoundError:
            continue
    return Finding("cupy", OPTIONAL, "not installed; only for kernels on an NVIDIA GPU")


def check_torch(version_of=metadata.version):
    return check_extra(TORCH, "without it notebook 07 shows recorded results", version_of)


# ---------------------------------------------------------------- all of them


def checks():
    """Every check as (name, function without arguments), in the order in which they are shown."""
    listed = [("Python", check_python), ("kernel", check_kernel)]
    for requirement in required():
        listed.append((requirement, lambda r=requirement: check_package(r)))
    return listed + [
        ("widgets", check_widgets),
        ("memory", check_memory),
        ("cores", check_cores),
        ("GPU", check_gpu),
        ("cupy", check_cupy),
        ("torch", check_torch),
    ]


def examine(listed=None):
    """The Finding of every check. A check that itself fails becomes a Finding too."""
    findings = []
    try:
        listed = checks() if listed is None else listed
    except Exception as error:
        return [_failed("doctor", error)]
    for name, check in listed:
        try:
            findings.append(check())
        except Exception as error:  # the doctor is what people run when something is broken
            findings.append(_failed(name, error))
    return findings


def _failed(name, error):
    found = f"this check itself failed: {type(error).__name__}: {error}"
    return Finding(name, FIX, found, "report it, with these lines (see: How to report an error)")


def needs_fixing(findings=None):
    """The names of what must be repaired before the course runs; [] is what you want to see."""
    findings = examine() if findings is None else findings
    return [f.name for f in findings if f.state == FIX]


def doctor(findings=None):
    """Print one line for each check, and a verdict. Raises nothing, returns nothing."""
    findings = examine() if findings is None else findings
    for finding in findings:
        print(finding)
    broken = needs_fixing(findings)
    print()
    if broken:
        print(f"To repair: {', '.join(broken)}. Do what the arrows say, then run this again.")
    else:
        print("Nothing needs fixing.")


if __name__ == "__main__":
    _findings = examine()
    doctor(_findings)
    sys.exit(bool(needs_fixing(_findings)))
