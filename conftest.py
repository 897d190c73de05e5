"""Settings of every test run: one BLAS thread a worker, this environment's kernel, no skip in CI.

COURSE_CI=1 (set by .ci/run and the workflow) turns a skip into a failure, unless its reason starts
with one of ALLOWED_SKIPS: a machine of CI has no GPU, no torch, one operating system, and not
always npm.
"""

import importlib.util
import os
import sys
import tempfile

import pytest

# Before numpy is imported; the notebooks' kernels inherit all of it.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
os.environ |= dict.fromkeys(THREADS, "1")
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
os.environ.pop("JUPYTER_PATH", None)
os.environ["COURSE_PROGRESS"] = "off"  # no learner is at work: attention_lib.progress notes nothing
# A user's IPython start-up files must not change what a notebook prints.
if "COURSE_IPYTHONDIR" not in os.environ:
    os.environ["COURSE_IPYTHONDIR"] = tempfile.mkdtemp(prefix="course-ipython-")
os.environ["IPYTHONDIR"] = os.environ["COURSE_IPYTHONDIR"]

CI = os.environ.get("COURSE_CI", "") not in ("", "0")
ALLOWED_SKIPS = {
    "needs a GPU": True,
    "needs torch": importlib.util.find_spec("torch") is None,
    "needs JupyterHub": "COURSE_HUB" not in os.environ,  # .ci/run sets it where it has npm
    "needs Linux": sys.platform != "linux",
    "needs macOS": sys.platform != "darwin",
    "needs Windows": sys.platform != "win32",
}


def pytest_xdist_auto_num_workers():
    """One worker a usable core, at most 8: each may hold a notebook's kernel."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count() or 2
    return min(8, cores)


def forbid_skip(report):
    """In CI, make a skipped test or module a failed one unless its reason is allowed."""
    if not (CI and report.skipped) or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ").strip()
    if not any(reason.startswith(start) and ok for start, ok in ALLOWED_SKIPS.items()):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped in CI, where it must run: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return forbid_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return forbid_skip((yield))
