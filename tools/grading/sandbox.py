"""How a worker is started: in a bubblewrap sandbox where there is one, with limits in any case.

Isolated, a worker has no network, sees the system and this Python read-only, and nothing else of
this machine: not the course, not the submissions. Its /tmp and its home are its own, small, and
gone afterwards. Started by root, it runs as a user that exists for nothing else.

Without bubblewrap it is a plain process: the limits of memory and time hold, but it can read what
you can read, and it has the network. The report says so.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MIB = 2**20
HOME = "/student"  # inside
FIRST_UID = 60_100  # of a range that no system hands out; one user for each worker at a time
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
EXCHANGE = Path("/usr/local/share/nbgrader")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/fonts", "/etc/alternatives")
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class Limits:
    """Of one submission. A cell or call that takes longer ends; so does one that takes more."""

    cell: float = 20.0  # seconds for one cell
    call: float = 10.0  # seconds for one call of a function that is checked
    total: float = 120.0  # seconds for the whole notebook
    memory: int = 2048 * MIB  # address space of each process
    processes: int = 32
    file: int = 16 * MIB  # the largest file it can write
    disk: int = 64 * MIB  # /tmp and the home, each


class Sandbox:
    """What all workers of one run share. Use as a context manager."""

    def __init__(self, limits=None, isolate=True, hide=(), helpers=()):
        """hide: folders that no worker may see, wherever they lie.

        helpers: (module, function) of attention_lib.checks.exercises that a notebook calls to put
        an answer together; the worker has stand-ins for these.
        """
        self.limits = limits or Limits()
        self.isolate = isolate
        self.helpers = frozenset(helpers)
        self.hidden = [ROOT, EXCHANGE, *(Path(p).resolve() for p in hide)]
        self.reason = None  # why the workers are not isolated

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="course-grader-"))
        self.folder.chmod(0o755)
        shutil.copy(HERE / "worker.py", self.folder)
        shutil.copy(HERE / "wire.py", self.folder)
        _library_copy(self.folder / "library", self.helpers)
        _font_cache(self.folder / "fonts")
        self.reason = self._why_not()
        return self

    def __exit__(self, *exception):
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def isolated(self):
        return self.reason is None

    def _why_not(self):
        """None, or why bubblewrap is not used. It is tried, not only looked for."""
        if not self.isolate:
            return "it was turned off"
        if sys.platform != "linux":
            return "bubblewrap needs Linux"
        if shutil.which("bwrap") is None:
            return "bwrap is not installed (on Debian and Ubuntu: apt-get install bubblewrap)"
        with tempfile.TemporaryDirectory() as empty:
            command = [*self._bwrap(Path(empty), None), sys.executable, "-c", "print('in')"]
            try:
                tried = subprocess.run(
                    command, capture_output=True, text=True, timeout=30, env=_environment(), cwd="/"
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"bwrap does not work here: {error}"
        if tried.stdout.strip() != "in":
            said = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[0]
            return f"bwrap does not work here: {said}"
        return None

    def _bwrap(self, files, info):
        """The command in front of the worker's."""
        root = os.geteuid() == 0
        command = ["bwrap", "--die-with-parent", "--new-session", "--hostname", "grader"]
        if root:  # a real change of user inside is stronger than a user namespace
            command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
            command += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
            for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN"):
                command += ["--cap-add", capability]
        else:
            command += ["--unshare-all"]
        if info is not None:
            command += ["--info-fd", str(info)]
        size = str(self.limits.disk)
        command += ["--proc", "/proc", "--dev", "/dev"]
        command += ["--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]
        command += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
        command += ["--perms", "0777", "--size", size, "--tmpfs", HOME]
        mounted = []
        for path in SYSTEM:
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                command += ["--ro-bind", path, path]
                mounted.append(Path(path))
        for path in SYSTEM_FILES:
            command += ["--ro-bind-try", path, path]
        for path in _python_folders():
            if not any(path.is_relative_to(m) for m in mounted):
                for parent in reversed(path.parents[:-1]):  # bwrap's own would be closed to others
                    command += ["--perms", "0755", "--dir", str(parent)]
                command += ["--ro-bind", str(path), str(path)]
                mounted.append(path)
        for hidden in self.hidden:  # only if they happen to lie in one of the above
            if hidden.is_dir() and any(hidden.is_relative_to(m) for m in mounted):
                command += ["--tmpfs", str(hidden)]
                for path in _python_folders():
                    if path.is_relative_to(hidden):
                        command += ["--ro-bind", str(path), str(path)]
        command += ["--ro-bind", str(self.folder), "/grader"]
        command += ["--ro-bind", str(files), "/submission"]
        command += ["--remount-ro", "/", "--chdir", HOME]
        return command

    def start(self, files, slot):
        """A worker for the student's folder `files`. slot: which of the workers at one time."""
        here = "/grader" if self.isolated else str(self.folder)
        home = HOME if self.isolated else tempfile.mkdtemp(prefix="course-student-")
        temporary = "/tmp" if self.isolated else home
        root = self.isolated and os.geteuid() == 0
        settings = {
            "home": home,
            "files": "/submission" if self.isolated else str(files),
            "library": f"{here}/library",
            "fonts": f"{here}/fonts",
            "matplotlib": f"{temporary}/matplotlib",
            "memory": self.limits.memory,
            "file": self.limits.file,
            "cpu": int(2 * self.limits.total) + 1,
            "uid": FIRST_UID + slot if root else 0,
            "processes": self.limits.processes if self.isolated else 0,
        }
        command = [sys.executable, "-I", "-B", f"{here}/worker.py", json.dumps(settings)]
        read, write = os.pipe() if self.isolated else (None, None)
        if self.isolated:
            command = [*self._bwrap(files, write), *command]
        errors = tempfile.TemporaryFile()
        with contextlib.ExitStack() as close:
            if write is not None:
                close.callback(os.close, write)
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/" if self.isolated else home,
                env=_environment(home, temporary),
                pass_fds=() if write is None else (write,),
                start_new_session=True,
            )
        return Started(process, errors, read, None if self.isolated else home)


class Started:
    """A worker's process, its pipes, and how to end it with all that it started."""

    def __init__(self, process, errors, info, home):
        self.process, self.errors, self.info, self.home = process, errors, info, home
        self.first = None  # the first process of the sandbox, seen from outside

    def pid(self):
        """The worker itself, seen from outside; None if it cannot be found."""
        if self.info is None:
            return self.process.pid
        if self.first is None:
            with os.fdopen(self.info) as info:
                with contextlib.suppress(ValueError, KeyError):
                    self.first = json.loads(info.read())["child-pid"]
        with contextlib.suppress(OSError, ValueError, IndexError):
            children = Path(f"/proc/{self.first}/task/{self.first}/children").read_text().split()
            return int(children[0])
        return None

    def end(self):
        self.pid()
        if self.first is not None:  # the end of the first process is the end of all; bwrap sees it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.first, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.home is not None:
            shutil.rmtree(self.home, ignore_errors=True)

    def said(self):
        """The end of its stderr: why a worker did not even start."""
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - 2000))
        text = self.errors.read().decode("utf-8", "replace").strip()
        return text.splitlines()[-1] if text else ""


def _environment(home=HOME, temporary="/tmp"):
    """What a worker knows of the grader's environment: nothing but how to compute."""
    own = {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": temporary,
        "USER": "student",
        "LANG": "C.UTF-8",
        "MPLBACKEND": "agg",
        "MPLCONFIGDIR": f"{temporary}/matplotlib",
        "IPYTHONDIR": f"{temporary}/ipython",
        "MALLOC_ARENA_MAX": "1",
        **dict.fromkeys(THREADS, "1"),
    }
    kept = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "SYSTEMROOT", "NPY_DISABLE_CPU_FEATURES")
    return own | {name: os.environ[name] for name in kept if name in os.environ}


@functools.cache
def _python_folders():
    """Where this Python and its packages are, parents first."""
    real = Path(sys.executable).resolve()
    folders = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.exec_prefix), real.parent.parent}
    folders |= {Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages"))}
    link = Path(sys.executable)
    while link.is_symlink():  # python -> python3 -> /opt/python/bin/python3.12
        link = Path(os.path.normpath(link.parent / os.readlink(link)))
        folders.add(link.parent)
    return sorted(f for f in folders if f.is_dir() and f != Path("/"))


def _library_copy(target, helpers):
    """attention_lib without what the exercises' checks know; its `checks` is a stand-in."""
    from attention_lib import checks

    source = ROOT / "attention_lib"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, target / "attention_lib", ignore=ignore)
    stand_in = target / "attention_lib" / "checks"
    for answers in (stand_in / "exercises", stand_in / "questions"):
        shutil.rmtree(answers)
    shutil.copy(HERE / "no_checks.py", stand_in / "__init__.py")
    texts = {id: str(checks.ask(id)) for id in checks.exercises()}
    (stand_in / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    (stand_in / "exercises").mkdir()
    (stand_in / "exercises" / "__init__.py").touch()
    for module, function in sorted(helpers):
        with open(stand_in / "exercises" / f"{module}.py", "a", encoding="utf-8") as file:
            file.write("from attention_lib.checks import maker\n\n")
            file.write(f"{function} = maker({module!r}, {function!r})\n")
    import compileall

    compileall.compile_dir(target, quiet=2)


def _font_cache(target):
    """matplotlib's list of fonts: making it takes seconds, and a new home has none."""
    target.mkdir()
    with contextlib.suppress(Exception):
        import matplotlib

        for path in Path(matplotlib.get_cachedir()).glob("fontlist-*.json"):
            shutil.copy(path, target)
