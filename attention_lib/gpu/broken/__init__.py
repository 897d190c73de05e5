"""Small kernels with something wrong or missing, for exercises 13 to 16; and how to edit them.

print(listing("missing_barrier"))            the text, with line numbers
edited(source("missing_barrier"), after={19: "..."}, replace={20: "..."})
python -m attention_lib.gpu.broken missing_barrier           run it once on a GPU
python -m attention_lib.gpu.broken missing_barrier FILE      the same launch, the kernel in FILE
"""

from importlib import resources

import numpy as np

from attention_lib.gpu.own import Launch
from attention_lib.gpu.standin import far, poisoned

NAMES = ("missing_barrier", "wrong_tail_guard", "offset_in_32_bits", "rescale_gap")


def source(name):
    """The CUDA C++ of a kernel. Raises ValueError for a name that is not in NAMES."""
    if name not in NAMES:
        raise ValueError(f"name is {name!r}; accepted: {', '.join(map(repr, NAMES))}")
    return (resources.files(__package__) / f"{name}.cu").read_text(encoding="utf-8")


def listing(name):
    """The same, with a number before each line."""
    lines = source(name).rstrip("\n").split("\n")
    return "\n".join(f"{k:2}  {line}".rstrip() for k, line in enumerate(lines, 1))


def edited(text, replace=None, after=None):
    """The text with lines changed. Lines count from 1, as in `listing`, whatever was put in.

    replace, after: {line number: new text}, in place of that line, or after it (0: at the top).
    A new text may have several lines, or be empty. Raises ValueError for a number with no line.
    """
    lines = text.rstrip("\n").split("\n")
    replace, after = replace or {}, after or {}
    for name, given, first in (("replace", replace, 1), ("after", after, 0)):
        for number in given:
            if number not in range(first, len(lines) + 1):
                raise ValueError(f"{name} has line {number}; accepted: {first} to {len(lines)}")
    made = [after[0]] if 0 in after else []
    for number, line in enumerate(lines, 1):
        made.append(replace.get(number, line))
        if number in after:
            made.append(after[number])
    return "\n".join(made) + "\n"


def example(name):
    """A small Launch of the kernel with this name. (Of the offset: at the end of 8 GiB.)"""
    draw = np.random.default_rng(0).standard_normal
    Q, K, V = (draw(2 * n).astype(np.float32) for n in (6, 7, 7))
    if name == "missing_barrier":
        return Launch(2, 8, (Q, K, poisoned(6), 6, 7), (2,))
    if name == "wrong_tail_guard":
        return Launch(2, 4, (Q, K, V, poisoned(12), 6, 7), (3,))
    if name == "rescale_gap":
        return Launch(2, 8, (Q, K, V, poisoned(12), poisoned(6), 6, 7, 0), (3, 4))
    if name == "offset_in_32_bits":
        row, stride = 2**18, 8192
        end = far(np.ones(4 * stride, np.float32), row * stride)
        return Launch(1, 4, (end, end, poisoned(4), row, 4, stride, stride, 3), (2,))
    return source(name)  # raises
