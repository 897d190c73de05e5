"""Exercise 15: an offset that no longer fits into 32 bits."""

import numpy as np

from attention_lib.checks.cuda import make
from attention_lib.checks.kinds import Choice, Number, Probe
from attention_lib.gpu.broken import edited, source
from attention_lib.gpu.own import Launch
from attention_lib.gpu.standin import far, poisoned

ERRORS = "notebook 14, 'Common mistakes'"
MODEL = "notebook 14, 'A GPU made of Python'"
GIVEN = source("offset_in_32_bits")
THREADS = 4


def probes(seed):
    rng = np.random.default_rng(seed)

    def probe(first, rows, dO_stride, O_stride, d=3, stage=0):
        dO, O = rng.standard_normal((2, rows, d)).astype(np.float32)
        # A sum of d products in float32, in any order.
        size = float((np.abs(dO).astype(np.float64) * np.abs(O)).sum(axis=1).max())
        tolerance = 3 * (d + 1) * float(np.finfo(np.float32).eps) * size
        given = {"dO": dO, "O": O, "first": first}
        given |= {"dO_stride": dO_stride, "O_stride": O_stride}
        says = f"rows {first:,} on, strides {dO_stride:,} and {O_stride:,}, d = {d}"
        return Probe(says, given, (0.0, tolerance), stage)

    edge = 2**31
    return [
        probe(3, 5, 64, 32),
        probe(edge // 8192, 6, 8192, 8192),
        probe(edge // 8192 - 2, 4, 8192, 4096),
        probe(edge // 4096, 3, 2048, 4096),
        probe(edge // 512 + int(rng.integers(1000)), 2, 512, 1024, d=5),
        probe(edge // 4096 + 7, 3, 4096, 16),
        probe(300_007, 3, 7_177, 7_177),
        probe(2 * edge // 8192 + 5, 3, 8192, 8192, stage=1),
        probe(3 * edge // 1024, 2, 2048, 2048, stage=1),
    ]


def launch(dO, O, first, dO_stride, O_stride):
    rows, d = dO.shape

    def spread(x, stride):
        whole = np.zeros(rows * stride, np.float32)  # what lies between belongs to other heads
        whole.reshape(rows, stride)[:, :d] = x
        return far(whole, first * stride)

    args = (spread(dO, dO_stride), spread(O, O_stride), poisoned(rows))
    args += (first, rows, dO_stride, O_stride, d)
    return Launch(-(-rows // THREADS), THREADS, args, (2,))


def right(dO, O, first, dO_stride, O_stride):
    return ((dO.astype(np.float64) * O).sum(axis=1),)


def indexed(a, b):
    return edited(GIVEN, replace={12: f"        sum += dO[{a}] * O[{b}];"})


A, B = "row * dO_stride + c", "row * O_stride + c"
WIDE_A, WIDE_B = f"(long long){A}", f"(long long){B}"
AFTER = "    long long a = row * dO_stride, b = row * O_stride;"

OFFSETS = make(
    "ex15-offsets",
    "Repair the kernel: return its text, right for offsets beyond 2^31 and 2^32.",
    "offset_in_32_bits",
    launch,
    right,
    probes,
    ("dO", "O", "D"),
    ("D",),
    ERRORS,
    (
        (
            "widened-after-the-product",
            "the product is still made in 32 bits, and what is widened has wrapped round already. "
            "One factor must be long long before it is multiplied.",
            [
                indexed(f"(long long)({A})", f"(long long)({B})"),
                edited(GIVEN, {12: "        sum += dO[a + c] * O[b + c];"}, {9: AFTER}),
            ],
            ERRORS,
        ),
        (
            "one-of-the-two",
            "one product is right, the other is still made in 32 bits. There are two tensors here.",
            [indexed(WIDE_A, B), indexed(A, WIDE_B)],
            ERRORS,
        ),
        (
            "unsigned-only",
            "unsigned goes to 2^32, and then it wraps round as well. Take 64 bits.",
            [
                indexed(f"(unsigned){A}", f"(unsigned){B}"),
                edited(GIVEN, {9: "    unsigned row = first + k;"}),
            ],
            ERRORS,
        ),
        (
            "first-forgotten",
            "the offset is counted from the launch's first row. The tensor begins at row 0: keep "
            "first in it.",
            [
                indexed("(long long)k * dO_stride + c", "(long long)k * O_stride + c"),
            ],
            MODEL,
        ),
        (
            "one-stride-for-both",
            "both tensors are read with one stride. Each has its own.",
            [
                indexed(WIDE_A, WIDE_A),
                indexed(WIDE_B, WIDE_B),
                edited(
                    GIVEN,
                    {12: "        sum += dO[at + c] * O[at + c];"},
                    {9: "    long long at = (long long)row * dO_stride;"},
                ),
            ],
            MODEL,
        ),
        (
            "through-a-float",
            "a float has 24 binary digits. A large offset is rounded in it to a neighbour's.",
            [indexed("(i64)((float)row * dO_stride) + c", "(i64)((float)row * O_stride) + c")],
            ERRORS,
        ),
        (
            "negative-made-0",
            "an offset that has wrapped round is replaced by 0. Then another element is read.",
            [
                indexed("max(0, row * dO_stride + c)", "max(0, row * O_stride + c)"),
            ],
            ERRORS,
        ),
    ),
)

HIDDEN = 8192

QUESTIONS = [
    Number(
        "ex15-first-row",
        f"A tensor of floats has rows of {HIDDEN:,} elements. Which is the first row whose offset "
        "(row times stride, in elements) does not fit into an int of 32 bits?",
        "a row number",
        truth=lambda: 2**31 // HIDDEN,
        why="The largest int is 2^31 - 1. 262,144 * 8,192 is 2^31.",
        hint="The largest int is 2^31 - 1. Which row starts at the first element behind that?",
        tolerance=0,
        slips={
            "unsigned": (
                lambda: 2**32 // HIDDEN,
                "That is for 2^32. An int has a sign, and half of the range is below 0.",
            ),
            "counted-in-bytes": (
                lambda: 2**31 // HIDDEN // 4,
                "An index counts elements. The compiler multiplies by 4 bytes, in 64 bits.",
            ),
            "last-that-fits": (
                lambda: 2**31 // HIDDEN - 1,
                "That row still fits. Which one comes next?",
            ),
        },
    ),
    OFFSETS,
    Choice(
        "ex15-tool",
        "A kernel with such an offset is run on small tensors under all four checkers, and "
        "nothing is found. What does that say?",
        {
            "a": "The offset is right: memcheck looks at every address",
            "b": "Nothing about large tensors: the wrong address is used only there",
            "c": "The compiler has made the offset 64 bits wide",
            "d": "racecheck would have been the one to find it, on several runs",
        },
        "b",
        {
            "a": "At every address that this run used. None of them was beyond 2^31.",
            "b": "So test with a tensor of more than 2^31 elements, under memcheck; or with a view "
            "of one whose stride is large. Here the stand-in has only the far end of it.",
            "c": "int times int is an int. What is done with the product later does not matter.",
            "d": "It is no question of order. Each thread alone computes the wrong address.",
        },
    ),
]
