"""Execute the notebooks and write them back in a normal form: a diff shows only changes.

    python tools/notebooks.py                     all of notebooks/
    python tools/notebooks.py notebooks/03*.ipynb those
    python tools/notebooks.py --no-execute ...    normalise only
    python tools/notebooks.py --check ...         write nothing; exit 1, naming what would change

The normal form: no execution metadata, no widget state, one fixed kernelspec and language_info,
every cell with an id, neighbouring stream outputs joined. A cell tagged nbval-ignore-output (times,
devices) keeps the outputs it has as long as its source is the same.
"""

import argparse
import asyncio
import copy
import os
import re
import sys
import tempfile
import time
from pathlib import Path

# One BLAS thread and this environment's kernel, as in the tests: a sum's bits must not depend on
# the number of cores.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
os.environ |= dict.fromkeys(THREADS, "1")
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
os.environ.pop("JUPYTER_PATH", None)
os.environ["COURSE_PROGRESS"] = "off"  # nobody is learning here

import nbformat  # noqa: E402
from nbclient import NotebookClient  # noqa: E402
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 120  # seconds a cell
AT_ONCE = 2  # notebooks
IGNORED = "nbval-ignore-output"

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE_INFO = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}
# What editors write into a cell's metadata and no reader needs.
EDITOR_METADATA = ("execution", "collapsed", "scrolled", "trusted", "ExecuteTime", "vscode")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def tags(cell):
    return cell.metadata.get("tags", [])


def normalise(nb):
    """The notebook's normal form, in a copy. Outputs and sources stay as they are."""
    nb = nbformat.v4.upgrade(copy.deepcopy(nb))
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO})
    seen = set()
    for position, cell in enumerate(nb.cells):
        cell.id = unused(cell.get("id"), seen, position)
        cell.source = cell.source.rstrip("\n")
        for key in EDITOR_METADATA:
            cell.metadata.pop(key, None)
        if cell.metadata.get("editable") is True:
            del cell.metadata["editable"]
        if not cell.metadata.get("slideshow", {}).get("slide_type", "x"):
            del cell.metadata["slideshow"]
        if not tags(cell):
            cell.metadata.pop("tags", None)
        if cell.cell_type == "code":
            cell.outputs = normal_outputs(cell.outputs)
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count
    return nb


def unused(cell_id, seen, position):
    """The id itself if it is new, else one that follows from the cell's position."""
    if not cell_id or cell_id in seen:
        cell_id = f"cell-{position:02d}"
        while cell_id in seen:
            cell_id += "x"
    seen.add(cell_id)
    return cell_id


def normal_outputs(outputs):
    result = []
    for output in outputs:
        if "data" in output:
            # A widget's id means nothing without its kernel; its text stays as the static picture.
            output.data.pop(WIDGET_VIEW, None)
            if "text/plain" in output.data:
                text = output.data["text/plain"]
                output.data["text/plain"] = re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x0", text)
            if not output.data:
                continue
        if output.output_type == "stream":  # a warning's file name holds the kernel's process id
            output.text = re.sub(r"\S*ipykernel_\d+[/\\]\d+\.py", "ipykernel/cell.py", output.text)
        last = result[-1] if result else None
        if output.output_type == "stream" and last and last.get("name") == output.name:
            last.text += output.text
        else:
            result.append(output)
    return result


def dumps(nb):
    """The bytes that are committed."""
    nbformat.validate(nb)
    return nbformat.writes(nb, indent=1).rstrip("\n") + "\n"


def keep_ignored_outputs(nb, before):
    """Put back the outputs of cells that differ from run to run, where the source is unchanged."""
    old = {cell.id: cell for cell in before.cells if cell.cell_type == "code"}
    for cell in nb.cells:
        was = old.get(cell.id)
        if cell.cell_type == "code" and IGNORED in tags(cell) and was and was.outputs:
            if was.source == cell.source:
                cell.outputs = copy.deepcopy(was.outputs)


async def execute(nb, folder):
    """Run all cells, as a person would in that folder; the outputs land in nb."""
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        nb,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        extra_arguments=["--log-level=50"],  # the terminal is for the notebooks' names
    )
    await client.async_execute()


def first_error(nb):
    """(position, cell, message) of the first cell whose output is an error, or None."""
    for position, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                message = f"{output.ename}: {output.evalue}"
                if "raises-exception" not in tags(cell):
                    return position, cell, message
    return None


async def rebuild(path, run, gate):
    """(new text, problem) of one notebook; problem is None when every cell ran."""
    before = normalise(nbformat.reads(path.read_text(encoding="utf-8"), as_version=4))
    nb = copy.deepcopy(before)
    if run:
        async with gate:
            started = time.perf_counter()
            try:
                await execute(nb, path.parent)
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                position, cell, message = first_error(nb) or unfinished(nb, error)
                where = f"{name(path)}, cell {position} (id {cell.id})"
                return None, f"{where}: {message}\n{indent(cell.source)}"
            print(f"{name(path)}: {time.perf_counter() - started:.1f} s", flush=True)
        nb = normalise(nb)
        keep_ignored_outputs(nb, before)
    return dumps(normalise(nb)), None


def unfinished(nb, error):
    """The cell that was running when its time ran out or its kernel died."""
    reason = str(error).strip().splitlines()[0]
    code = [(i, c) for i, c in enumerate(nb.cells) if c.cell_type == "code" and c.source.strip()]
    for position, cell in code:
        if cell.execution_count is None:
            return position, cell, reason
    return (*code[-1], reason)


def indent(text):
    return "\n".join("    " + line for line in text.splitlines())


def name(path):
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


async def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--check", action="store_true", help="report only, write nothing")
    parser.add_argument("--no-execute", action="store_true", help="normalise only")
    options = parser.parse_args(arguments)

    paths = [p.resolve() for p in options.paths] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    missing = [name(p) for p in paths if not p.is_file()]
    if missing or not paths:
        print("no such notebook:", ", ".join(missing) or "notebooks/ is empty", file=sys.stderr)
        return 1

    gate = asyncio.Semaphore(AT_ONCE)
    run = not options.no_execute
    results = await asyncio.gather(*(rebuild(path, run, gate) for path in paths))
    failed = False
    for path, (text, problem) in zip(paths, results, strict=True):
        if problem:
            print(f"FAILED {problem}", file=sys.stderr)
            failed = True
        elif text != path.read_text(encoding="utf-8"):
            print(f"{'would change' if options.check else 'changed'}: {name(path)}")
            failed = failed or options.check
            if not options.check:
                path.write_text(text, encoding="utf-8", newline="\n")
    return int(failed)


if __name__ == "__main__":
    # A person's own IPython start-up files must not change what a notebook prints.
    with tempfile.TemporaryDirectory(prefix="course-ipython-") as folder:
        os.environ["IPYTHONDIR"] = folder
        sys.exit(asyncio.run(main(sys.argv[1:])))
