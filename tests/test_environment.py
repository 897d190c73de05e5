"""The ways to install the course agree, and no committed file ties it to one registry."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PYTHONS = {"3.11": "3.11.2", "3.12": "3.12.1", "3.13": "3.13.0"}
SYSTEMS = {
    "linux": {"os_name": "posix", "platform_system": "Linux"},
    "darwin": {"os_name": "posix", "platform_system": "Darwin"},
    "win32": {"os_name": "nt", "platform_system": "Windows"},
}


def committed_files():
    """What git has, or would take: tracked and not ignored."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to know which files are committed")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / name for name in listing.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def requirements(lines):
    """{name: version constraint} of requirement strings, or of conda's, which look the same."""
    parsed = map(Requirement, lines)
    return {canonicalize_name(r.name): (r.specifier, frozenset(r.extras)) for r in parsed}


def lock_entries():
    """(requirement, number of hashes) of every entry of the lock."""
    text = LOCK.replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement, *hashes = line.split("--hash=")
            yield Requirement(requirement.strip()), hashes


# --- conda's files say what pyproject says


@pytest.mark.parametrize(
    ("file", "extras"), [("environment.yml", "dev"), ("environment-gpu.yml", "dev,gpu")]
)
def test_conda_environment_equals_pyproject(file, extras):
    environment = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    packages = [line for line in environment["dependencies"] if isinstance(line, str)]
    pip = [line for line in environment["dependencies"] if isinstance(line, dict)]
    listed = requirements(packages)
    python = listed.pop("python")[0]
    listed.pop("pip")
    assert listed == requirements(PROJECT["dependencies"])
    assert python == Requirement("python" + PROJECT["requires-python"]).specifier
    assert pip == [{"pip": [f"-e .[{extras}]"]}]
    assert environment["channels"] == ["conda-forge", "nodefaults"]


# --- the lock


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_lock_satisfies_pyproject(python, system):
    environment = dict(default_environment(), **SYSTEMS[system])
    environment |= {"sys_platform": system, "python_version": python}
    environment |= {"python_full_version": PYTHONS[python]}
    locked = {}
    for requirement, _ in lock_entries():
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in locked, f"two versions of {name} for Python {python} on {system}"
            locked[name] = str(requirement.specifier).removeprefix("==")
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate(environment):
            version = locked.get(canonicalize_name(wanted.name))
            assert version, f"{wanted.name}: not locked for Python {python}, {system}: make lock"
            assert wanted.specifier.contains(version), f"{line}, but locked is {version}"


def test_every_lock_entry_is_pinned_and_hashed():
    entries = list(lock_entries())
    assert len(entries) > 50
    for requirement, hashes in entries:
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), str(requirement)
        assert hashes, f"{requirement.name} has no hash"
        for digest in hashes:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest.strip()), str(requirement)


def test_the_grader_is_in_the_development_environment():
    extras = PROJECT["optional-dependencies"]
    assert set(extras["grade"]) <= set(extras["dev"])


def test_lock_has_no_framework_and_no_local_path():
    names = {canonicalize_name(requirement.name) for requirement, _ in lock_entries()}
    assert not names & {"torch", "cupy-cuda13x", "cupy"}
    assert "file:" not in LOCK and "/opt/" not in LOCK and "--index" not in LOCK
    assert "--find-links" not in LOCK and "://" not in LOCK


def test_gpu_extra_never_pulls_the_cuda_toolkit():
    gpu = [Requirement(line) for line in PROJECT["optional-dependencies"]["gpu"]]
    assert "cupy-cuda13x" in {r.name for r in gpu} and not any(r.extras for r in gpu)


# --- no registry host; no file that pins a Python or a registry

# In two parts, so that this file does not name them either.
HOSTS = [
    ("pypi", "org"),
    ("pypi", "python.org"),
    ("pythonhosted", "org"),
    ("anaconda", "org"),
    ("anaconda", "com"),
    ("npmjs", "org"),
    ("npmjs", "com"),
    ("yarnpkg", "com"),
    ("nvidia", "com/pypi"),
    ("pypi.nvidia", "com"),
    ("pytorch", "org/whl"),
    ("deb.debian", "org"),
    ("archive.ubuntu", "com"),
    ("jsdelivr", "net"),
    ("unpkg", "com"),
]


def test_no_committed_file_names_a_registry_host():
    pattern = re.compile("|".join(re.escape(".".join(host)) for host in HOSTS), re.IGNORECASE)
    named = []
    for path in committed_files():
        data = path.read_bytes()
        if b"\0" in data[:8192]:
            continue  # not text
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if match := pattern.search(line):
                named.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not named, "\n".join(named)


def test_nothing_pins_a_python_or_a_registry():
    names = {path.name for path in committed_files()}
    assert not names & {"uv.lock", ".python-version"}


# --- the README's commands exist


def test_make_targets_in_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.M))
    assert {"lab", "test", "bench", "notebooks", "lock", "lint", "env", "clean", "help"} <= targets
    assert {"exercises", "grade"} <= targets
    for file in ("README.md", "CONTRIBUTING.md", "docs/instructors.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        used = set(re.findall(r"`make ([a-z]+)", text))
        used |= set(re.findall(r"^ *make ([a-z]+)", text, flags=re.M))
        assert used <= targets, f"{file}: no such target: {sorted(used - targets)}"
        if file == "README.md":
            assert {"lab", "test"} <= used


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# --- make grade says what it lacks


@pytest.mark.skipif(sys.platform == "win32", reason="needs Linux or macOS: make")
@pytest.mark.parametrize(("given", "said"), [("", "which folder?"), ("no/such", "no/such")])
def test_make_grade_without_a_folder_says_so(given, said, tmp_path):
    command = ["make", "-o", "env", "grade", f"SUBMISSIONS={given}", f"GRADES={tmp_path / 'g'}"]
    command.append(f"BIN={Path(sys.executable).parent}")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert done.returncode != 0 and len(lines) == 1 and said in lines[0], done.stderr
    assert not (tmp_path / "g").exists()
