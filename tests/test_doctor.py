"""The doctor: shown a broken machine it names what is broken and the command that repairs it."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from attention_lib import doctor as d

ROOT = Path(__file__).resolve().parent.parent


def nothing_installed(name):
    raise metadata.PackageNotFoundError(name)


class Installed:
    """A distribution whose files are in `site`."""

    def __init__(self, site):
        self.site = site

    def locate_file(self, name):
        return self.site / name


# ---------------------------------------------------------------- this machine


def test_here_nothing_needs_fixing(capsys):
    assert d.needs_fixing() == []
    d.doctor()
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[-1] == "Nothing needs fixing."
    shown = [line for line in lines[:-2] if "->" not in line]
    assert all(line.split()[0] in ("ok", "optional") for line in shown)
    for name in ("Python", "kernel", "numpy", "jupyterlab", "ipywidgets", "memory", "GPU", "torch"):
        assert sum(line.split()[1] == name for line in shown) == 1, name
    assert "\x1b" not in out


def test_as_a_command():
    run = [sys.executable, "-m", "attention_lib.doctor"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT / "notebooks", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and done.stdout.endswith("Nothing needs fixing.\n")


# ---------------------------------------------------------------- one broken thing at a time


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 9), (3, 13, 1)])
def test_python_that_fits(version):
    assert d.check_python(version).state == "ok"


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 14, 0), (2, 7, 18), (4, 0, 0)])
def test_python_that_does_not(version):
    finding = d.check_python(version)
    assert finding.state == "FIX" and "make lab PYTHON=" in finding.fix
    assert "3.11 to 3.13" in finding.found


def test_the_pythons_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (oldest, newest) = d.OLDEST, d.NEWEST
    assert project["requires-python"] == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"


@pytest.mark.parametrize(
    ("requirement", "version", "state"),
    [
        ("numpy>=2", "2.0.0", "ok"),
        ("numpy>=2", "2.4.6", "ok"),
        ("numpy>=2", "1.26.4", "FIX"),
        ("jupyterlab>=4.2,<5", "4.2", "ok"),
        ("jupyterlab>=4.2,<5", "4.10.1", "ok"),
        ("jupyterlab>=4.2,<5", "4.1.9", "FIX"),
        ("jupyterlab>=4.2,<5", "5.0.0a1", "FIX"),
        ("ipykernel>=6.29", "7.0.0rc1", "ok"),
        ("thing", "0.0.1", "ok"),
        ('thing[extra]>=1 ; python_version < "3.12"', "1.0", "ok"),
        ("thing!=2.0", "2", "FIX"),
        ("thing==1.5", "1.5.0", "ok"),
        ("thing<=1", "1.0.1", "FIX"),
        ("thing>1", "1.0", "FIX"),
    ],
)
def test_package_versions(requirement, version, state):
    finding = d.check_package(requirement, version_of=lambda name: version)
    assert finding.state == state, finding
    assert (finding.fix is None) == (state == "ok")


@pytest.mark.parametrize("version_of", [nothing_installed, lambda name: None])
def test_missing_package(version_of):
    finding = d.check_package("numpy>=2", version_of=version_of)
    assert finding.state == "FIX" and "not installed; needed: >=2" in finding.found
    assert '"numpy>=2"' in finding.fix and "install" in finding.fix


def test_every_runtime_requirement_is_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [name for name, _ in d.checks()]
    assert project["dependencies"] == [n for n in names if n in project["dependencies"]]


def test_without_a_checkout_the_requirements_are_those_of_the_installed_course(tmp_path):
    listed = ["numpy>=2", "pytest>=8; extra == 'dev'"]
    assert d.required(tmp_path, metadata_of=lambda name: listed) == ["numpy>=2"]
    assert d.required(tmp_path, metadata_of=nothing_installed) == []
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n', encoding="utf-8")
    assert d.required(tmp_path, metadata_of=lambda name: listed) == ["numpy>=2"]


@pytest.mark.parametrize(
    ("machine", "start"),
    [
        (dict(in_notebook=True, has_pip=True), 'in a new cell: %pip install "numpy>=2"'),
        (dict(in_notebook=False, has_pip=True), 'in a terminal: "py" -m pip install "numpy>=2"'),
        (dict(has_pip=False, has_uv=True), 'in a terminal: uv pip install --python "py" "numpy'),
        (dict(has_pip=False, has_uv=False), 'in a terminal: "py" -m ensurepip'),
    ],
)
def test_the_command_fits_the_machine(machine, start):
    assert d.install("numpy>=2", python="py", **machine).startswith(start)


def test_setup_command(tmp_path):
    (tmp_path / "Makefile").touch()
    assert d.setup(tmp_path, windows=False).endswith(f'cd "{tmp_path}" && make lab')
    command = f'"py" -m pip install -e "{tmp_path}"'
    assert d.setup(tmp_path, windows=True, python="py").endswith(command)


def kernel(tmp_path, **changes):
    """check_kernel in a made-up environment, where all is well unless changed."""
    env, course = tmp_path / "env", tmp_path / "course"
    for folder in (env / "lib", course / "attention_lib", course / "notebooks"):
        folder.mkdir(parents=True, exist_ok=True)
    (course / "attention_lib" / "doctor.py").touch()
    machine = dict(
        prefix=env,
        library=course / "attention_lib",
        folder=course / "notebooks",
        distribution=lambda name: Installed(env / "lib"),
    )
    return d.check_kernel(**(machine | changes))


def test_kernel_in_the_right_environment(tmp_path):
    finding = kernel(tmp_path)
    assert finding.state == "ok" and "env" in finding.found
    assert str(tmp_path) not in str(finding)  # no path of a person in what is committed
    elsewhere = kernel(tmp_path, folder=tmp_path)  # a notebook that was moved away is no failure
    assert elsewhere.state == "ok"


def test_kernel_of_another_python(tmp_path):
    finding = kernel(tmp_path, distribution=nothing_installed)
    assert finding.state == "FIX"
    assert "not installed in the environment of this kernel" in finding.found
    assert "make lab" in finding.fix or "pip install -e" in finding.fix
    finding = kernel(tmp_path, distribution=lambda name: Installed(tmp_path / "user-site"))
    assert finding.state == "FIX" and "user-site" in finding.found and finding.fix


def test_kernel_with_the_library_of_another_copy(tmp_path):
    finding = kernel(tmp_path, library=tmp_path / "old" / "attention_lib")
    assert finding.state == "FIX" and "not the one beside this notebook" in finding.found
    assert str(tmp_path / "course") in finding.fix


def test_widgets(tmp_path):
    finding = d.check_widgets(tmp_path)
    assert finding.state == "FIX" and "jupyterlab-widgets" in finding.fix
    extension = "share/jupyter/labextensions/@jupyter-widgets/jupyterlab-manager"
    (tmp_path / extension).mkdir(parents=True)
    assert d.check_widgets(tmp_path).state == "ok"


@pytest.mark.parametrize(
    ("gib", "state"), [(0.5, "FIX"), (3.4, "FIX"), (3.6, "ok"), (512, "ok"), (None, "optional")]
)
def test_memory(gib, state):
    finding = d.check_memory(total=lambda: None if gib is None else int(gib * 2**30))
    assert finding.state == state
    assert (finding.fix is not None) == (state == "FIX")


def test_memory_of_a_container_is_its_limit(tmp_path):
    limit = tmp_path / "memory.max"
    machine = d.memory_bytes(limit)
    assert machine is None or machine > 2**30
    limit.write_text("1073741824\n")
    assert d.memory_bytes(limit) == 2**30
    limit.write_text("max\n")
    assert d.memory_bytes(limit) == machine


def test_cores():
    assert d.check_cores(lambda: 1).state == "ok"
    assert d.usable_cores() >= 1


def broken_smi():
    raise OSError("Driver/library version mismatch")


def slow_smi():
    raise subprocess.TimeoutExpired("nvidia-smi", 10)


@pytest.mark.parametrize(
    ("smi", "devices", "state", "said"),
    [
        (lambda: ["NVIDIA H200, 580.65.06"], lambda: 1, "ok", "H200"),
        (lambda: ["A", "B"], lambda: 2, "ok", "A; B"),
        (lambda: None, lambda: 1, "ok", "1 NVIDIA GPU"),
        (lambda: [], lambda: 0, "optional", "no NVIDIA GPU"),
        (lambda: None, lambda: None, "optional", "no NVIDIA GPU"),
        (broken_smi, lambda: 0, "optional", "version mismatch"),
        (slow_smi, lambda: 0, "optional", "timed out"),
    ],
)
def test_gpu(smi, devices, state, said):
    finding = d.check_gpu(smi, devices)
    assert finding.state == state and said in finding.found


def test_optional_packages_are_never_a_failure():
    for check in (d.check_cupy, d.check_torch):
        assert check(version_of=nothing_installed).state == "optional"
        assert check(version_of=lambda name: "99.1").state == "ok"
    old = d.check_torch(version_of=lambda name: "2.3.1+cpu")
    assert old.state == "optional" and "too old" in old.found and d.TORCH in old.fix


# ---------------------------------------------------------------- never an exception


def test_a_check_that_fails_is_a_finding(capsys):
    def breaks():
        raise RuntimeError("no such machine")

    findings = d.examine([("odd", breaks), ("Python", d.check_python)])
    assert [f.state for f in findings] == ["FIX", "ok"]
    assert "RuntimeError: no such machine" in findings[0].found and findings[0].fix
    d.doctor(findings)
    assert "To repair: odd." in capsys.readouterr().out


def test_no_list_of_checks_is_a_finding(monkeypatch):
    monkeypatch.setattr(d, "required", lambda: 1 / 0)
    assert [f.name for f in d.examine()] == ["doctor"] == d.needs_fixing()


def test_every_failure_says_what_to_do(capsys):
    findings = [
        d.check_python((3, 9, 0)),
        d.check_package("numpy>=2", nothing_installed),
        d.check_widgets("nowhere"),
        d.check_memory(lambda: 1),
        d.check_kernel(distribution=nothing_installed),
    ]
    d.doctor(findings)
    out = capsys.readouterr().out
    assert out.count("FIX ") == out.count("-> ") == 5 == len(d.needs_fixing(findings))
    assert "To repair: Python, numpy, widgets, memory, kernel." in out
