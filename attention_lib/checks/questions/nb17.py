"""Predictions and checkpoint questions of notebook 17, what each rung of the ladder bought."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.gpu import recordings
from attention_lib.hardware import GPUS
from attention_lib.recordings import recording
from attention_lib.traffic import standard_traffic

H200 = GPUS["H200"]
N = 16_384
A_MMA = 2 * 16 * 8 * 16  # FLOP


def _tflops(kernel, d=64, N=N, causal=False):
    """TFLOP/s of a rung as recorded, float16."""
    key = ("float16", kernel, d, N, causal)
    return next(
        r["tflops"]
        for r in recordings.read("bench")["rows"]
        if (r["dtype"], r["kernel"], r["d"], r["N"], r["causal"]) == key
    )


def _dram_roof(element_bytes=2, crossings=4, d=64):
    """TFLOP/s of standard attention if DRAM alone set the pace."""
    moved = standard_traffic(N, d) - (4 - crossings) * N * N
    return 4 * N * N * d / (element_bytes * moved) * H200.bandwidth / 1e12


def _shared_roof(bytes_a_mma, passes):
    """TFLOP/s if passes through shared memory alone set the pace."""
    clock = recording("h200_device")["attributes"]["ClockRate"] * 1e3
    return H200.sms * 128 * clock / (bytes_a_mma * passes) * A_MMA / 1e12


QUESTIONS = [
    Number(
        id="p17-1",
        text=(
            "Rung 0 moves 4N² + 4Nd elements of 2 bytes a head and does 4N²d FLOP. N = 16,384,\n"
            "d = 64. The H200's DRAM gives 4.8 TB/s. If DRAM alone set the pace, how many TFLOP/s\n"
            "would rung 0 reach?"
        ),
        unit="TFLOP/s",
        truth=_dram_roof,
        why="About d/2 = 32 FLOP for each byte, times 4.8 TB/s.",
        hint="FLOP per byte first: 4N²d over 2(4N² + 4Nd). N cancels nearly.",
        slips={
            "elements": (
                lambda: _dram_roof(1),
                "Twice too much: you divided by elements. Each has 2 bytes.",
            ),
            "three-crossings": (
                lambda: _dram_roof(crossings=3),
                "You counted N x N three times. S is written and read, P too: four times.",
            ),
            "float32": (lambda: _dram_roof(4), "Half: S and P have 2 bytes an element here."),
        },
    ),
    Number(
        id="p17-2",
        text=(
            "Rung 1 runs one block of threads a head. With N = 4096 and 128 heads in all it\n"
            f"reaches {_tflops('algorithm_1', N=4096)} TFLOP/s on 132 SMs. With N = 16,384 the "
            "same number of tokens gives 32\n"
            "heads. How many TFLOP/s, if a busy SM goes on at the same speed?"
        ),
        unit="TFLOP/s",
        truth=lambda: _tflops("algorithm_1", N=4096) / 4,
        why="32 busy SMs, not 128: a quarter of the speed. The other 100 have nothing to do.",
        hint="How many SMs are busy in each of the two cases?",
        slips={
            "unchanged": (
                lambda: _tflops("algorithm_1", N=4096),
                "You kept the speed of the whole chip. How many blocks are there now?",
            ),
            "quadratic": (
                lambda: _tflops("algorithm_1", N=4096) / 16,
                "A sixteenth would be the number of heads squared. The FLOPs are in the rate.",
            ),
        },
    ),
    Choice(
        id="p17-3",
        text=(
            "Rung 3 computes both products on the tensor cores. Their peak is 989 TFLOP/s, that\n"
            "of the fp32 cores, which rung 2 uses, 66.9: a factor of 15. How much faster than\n"
            "rung 2 is rung 3?"
        ),
        options={
            "a": "about 15 times",
            "b": "about 8 times: softmax stays on the fp32 cores",
            "c": "between 2 and 3 times",
            "d": "not at all: it is limited by DRAM",
        },
        right="c",
        remarks={
            "a": "If rung 2 had been at its peak, and rung 3 could be fed. Neither is so.",
            "b": "Softmax does take time. But something else takes most of it: see below.",
            "c": "The tensor cores wait for shared memory. The next section counts how long.",
            "d": "DRAM sees each array once. It is hardly in use.",
        },
    ),
    Number(
        id="p17-4",
        text=(
            "For each mma of 4096 FLOP rung 3 reads 288 bytes from shared memory, and every read\n"
            "takes eight passes instead of one. An SM does one pass of 128 bytes a clock: 132 SMs\n"
            "at 1.98 GHz. How many TFLOP/s at most?"
        ),
        unit="TFLOP/s",
        truth=lambda: _shared_roof(288, 8),
        why="33.5 TB/s, over 2304 bytes of passes, times 4096 FLOP.",
        hint="Passes a second first: 132 x 1.98e9, 128 bytes each. How many does one mma take?",
        slips={
            "no-conflicts": (
                lambda: _shared_roof(288, 1),
                "That is without bank conflicts. Each read takes eight passes.",
            ),
            "one-SM": (lambda: _shared_roof(288, 8) / 132, "That is one SM. There are 132."),
            "four-bytes": (
                lambda: _shared_roof(288, 8) / 32,
                "You let a pass carry 4 bytes. It has 32 banks of 4 bytes.",
            ),
        },
    ),
    Choice(
        id="p17-5",
        text=(
            "The swizzle of rung 4 takes away seven of eight passes through shared memory, and\n"
            "shared memory was what rung 3 waited for. How much faster is rung 4?"
        ),
        options={
            "a": "8 times",
            "b": "about 4 times",
            "c": "about 1.1 times",
        },
        right="b",
        remarks={
            "a": "Passes were most of the time, not all of it. What was small before is not now.",
            "b": "The passes shrink eightfold, the rest stays. Rung 4 also copies while it waits.",
            "c": "You expect another limit close by. Take the largest part away and see.",
        },
    ),
    Number(
        id="p17-6",
        text=(
            "Rung 4 computes all tiles of S and then hides those above the diagonal. Without a\n"
            f"mask it has {_tflops('swizzle'):.0f} TFLOP/s. The causal figure counts half the "
            "FLOPs, as useful. What is\n"
            "it, if hiding costs nothing?"
        ),
        unit="TFLOP/s",
        truth=lambda: _tflops("swizzle") / 2,
        why="The same time, half the count.",
        hint="A rate is a count over a time. Which of the two changes?",
        slips={
            "unchanged": (lambda: _tflops("swizzle"), "The time is the same, the count is half."),
            "doubled": (
                lambda: 2 * _tflops("swizzle"),
                "Half the time needs half the work. This rung does all of it.",
            ),
        },
    ),
    Choice(
        id="q49",
        text=(
            "A kernel has 8,500 FLOP for each byte from DRAM and reaches 48 of 989 TFLOP/s.\n"
            "What does the roofline of DRAM tell you?"
        ),
        options={
            "a": "it is compute-bound, so a faster chip would help",
            "b": "that DRAM is not the limit, and nothing more",
            "c": "it is memory-bound: it is far below the peak",
        },
        right="b",
        remarks={
            "a": "It is not limited by DRAM. Whether the units compute or wait is another matter.",
            "b": "Other limits have rooflines of their own: shared memory, exp, waiting.",
            "c": "Far below the peak, yes. But 8,500 FLOP a byte is far right of the ridge.",
        },
    ),
    Choice(
        id="q50",
        text=(
            "In a kernel matrix products take 3 ms, shared memory 5 ms, exp 2 ms, each alone. It\n"
            "takes 10.5 ms. What do you try first?"
        ),
        options={
            "a": "a faster exp: it is 2 ms",
            "b": "let the three run at the same time",
            "c": "nothing: it is at 95% of the sum",
        },
        right="b",
        remarks={
            "a": "That saves 2 ms at most. The parts wait for each other now.",
            "b": "The sum is 10, the largest is 5. Overlap could bring up to half.",
            "c": "The sum is no limit. The largest part is.",
        },
    ),
    Choice(
        id="q51",
        text=(
            "A change brings 4% at d = 128 and makes the kernel spill 16 bytes with one compiler\n"
            "version. What is the soundest decision?"
        ),
        options={
            "a": "take it: 4% is 4%",
            "b": "look for a smaller tile that keeps most of the gain and spills nowhere",
            "c": "forbid that compiler version",
        },
        right="b",
        remarks={
            "a": "Here. With the next version the spill may land in the inner loop.",
            "b": "So did the log: rows of 48 instead of 64.",
            "c": "Whoever runs the kernel brings the compiler along.",
        },
    ),
]
