"""What every GPU notebook needs: the kernels' source, and numbers that say where they are from."""

import difflib
import re
import textwrap
from importlib import resources

from attention_lib import gpu
from attention_lib.gpu import ladder, recordings
from attention_lib.inputs import check_choice, check_positive_int


def show_file(file, marker=None, lines=20):
    """Print part of a file of gpu/kernels/, with its line numbers.

    marker: text of the line to begin at, None for the top of the file. lines: how many, at most.
    Raises ValueError for a file that is not there, or a marker that is not in it.
    """
    folder = resources.files("attention_lib.gpu") / "kernels"
    check_choice("file", file, sorted(x.name for x in folder.iterdir()))
    check_positive_int("lines", lines)
    text = ladder._read(file).splitlines()
    start = 0 if marker is None else next((n for n, x in enumerate(text) if marker in x), None)
    if start is None:
        raise ValueError(f"marker is {marker!r}; accepted: text of a line of {file}")
    part = text[start : start + lines]
    print(f"{file}, lines {start + 1} to {start + len(part)}")
    print("\n".join(f"{start + n + 1:4} {x}".rstrip() for n, x in enumerate(part)))


def show_kernel(name, marker=None, lines=20):
    """Print part of a rung's CUDA source, with its file and its line numbers.

    marker: text of the line to begin at, in the rung's file or else in the headers it includes;
    None for the top of the file. lines: how many, at most.
    Raises ValueError for an unknown rung, or a marker that is nowhere.
    """
    check_positive_int("lines", lines)
    file = ladder.rung(name).file
    for f in (file, *re.findall(r'#include "(\w+\.cuh)"', ladder._read(file))):
        if marker is None or any(marker in x for x in ladder._read(f).splitlines()):
            return show_file(f, marker, lines)
    raise ValueError(f"marker is {marker!r}; accepted: text of a line of {file} or its headers")


def show_diff(before, after, marker=None, lines=20):
    """Print part of the unified diff between two kernels' own files (their headers aside).

    before, after: rungs by their names, or files of gpu/kernels/ that are no rung. marker: text of
    the line of the diff to begin at; None for the first change. lines: how many, at most.
    Raises ValueError for an unknown kernel, or a marker that is nowhere in the diff.
    """
    check_positive_int("lines", lines)
    files = [x if x in recordings.BESIDES else ladder.rung(x).file for x in (before, after)]
    texts = [ladder._read(f).splitlines() for f in files]
    diff = list(difflib.unified_diff(*texts, lineterm="", n=1))[2:]  # without the two names
    if marker is None:
        start = next((n for n, x in enumerate(diff) if x[0] in "-+"), len(diff))
    else:
        start = next((n for n, x in enumerate(diff) if x[0] != "@" and marker in x[1:]), None)
    if start is None:
        raise ValueError(f"marker is {marker!r}; accepted: text of a line that the diff has")
    print(f"{files[0]} (-) and {files[1]} (+)")
    print("\n".join(x.rstrip() for x in diff[start : start + lines]))


def say(record):
    """Print where the numbers of a recording are from, in lines of a notebook's width."""
    print(textwrap.fill(recordings.said(record), 88))


def live_or_recorded(name, live=None):
    """The rows of a measurement, and a line that says whether they are live.

    Where there is a GPU: live(), measured here. Else, or if live is None: the recording `name`.
    """
    if live is not None and gpu.available():
        print("Measured here, just now.")
        return live()
    record = recordings.read(name)
    say(record)
    return record["rows"]
