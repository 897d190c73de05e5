"""Questions of notebook 01: where the time goes."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.hardware import ridge, time_bound
from attention_lib.traffic import attention_memory, standard_traffic


def _times(N=4096, d=128, heads=32, gpu="A100-80"):
    """TimeBound of the three kernels, and of the same FLOPs with 4Nd moved (fp16)."""
    flops = 4 * heads * N * N * d
    before = time_bound(gpu, flops, 2 * heads * standard_traffic(N, d))
    after = time_bound(gpu, flops, 2 * heads * 4 * N * d)
    return before, after


def _speed_up():
    before, after = _times()
    return max(before.compute, before.memory) / max(after.compute, after.memory)


def _matrix_ratio():
    memory = attention_memory(16384, 64, 1, method="standard")
    return (memory["S"] + memory["P"]) / memory["QKVO"]


QUESTIONS = [
    Number(
        id="p01-1",
        text="One head, N = 1024, d = 64, the three kernels of the figure. Each kernel reads each\n"
        "of its inputs once and writes its output once. How many elements cross between HBM\n"
        "and the chip, reads and writes together?",
        unit="elements",
        truth=lambda: standard_traffic(1024, 64),
        why="Four arrays of N x d cross once each, and S and P cross twice each.",
        hint="Walk along the arrows on the left of the figure. Each array on one adds N*d or N*N.",
        slips={
            "only-inputs-and-output": (
                lambda: 4 * 1024 * 64,
                "You probably counted Q, K, V and O. Follow the heavy arrows too: what do the "
                "kernels leave for each other in HBM?",
            ),
            "written-not-read": (
                lambda: 4 * 1024 * 64 + 2 * 1024**2,
                "You probably counted S and P once each. One kernel writes each of them and "
                "another kernel has to read it back.",
            ),
            "three-crossings": (
                lambda: 4 * 1024 * 64 + 3 * 1024**2,
                "You probably counted three crossings of an N x N matrix, perhaps one for each "
                "kernel. Count the heavy arrows.",
            ),
            "softmax-reads-twice": (
                lambda: 4 * 1024 * 64 + 5 * 1024**2,
                "You probably counted one more pass over S, as if the maximum and the sum took a "
                "read each. A row of S fits on chip, so the softmax kernel can do both after one "
                "read.",
            ),
            "three-single-trips": (
                lambda: 3 * 1024**2,
                "You probably took one N x N crossing for each of the three kernels. Some arrows "
                "carry N x d, and some kernels have two heavy arrows. Count arrow by arrow.",
            ),
            "three-round-trips": (
                lambda: 6 * 1024**2,
                "You probably took an N x N matrix in and another out for each of the three "
                "kernels. Look at the first load and the last store: what do they carry?",
            ),
            "inputs-forgotten": (
                lambda: 4 * 1024**2,
                "The N x N part is right. The inputs and the output cross as well: four times N*d.",
            ),
            "bytes-not-elements": (
                lambda: 2 * standard_traffic(1024, 64),
                "That is the number of bytes in fp16. Here elements are counted.",
            ),
        },
        slip_tolerance=0.0005,
    ),
    Number(
        id="p01-2",
        text="N = 16384, d = 64. S and P together take how many times the memory that Q, K, V\n"
        "and O take together?",
        unit="how many times as much",
        truth=_matrix_ratio,
        why="2 N*N elements against 4 N*d: the ratio is N/(2d), and it grows with N.",
        hint="Write both as a number of elements, one over the other. Most of it cancels.",
        slips={
            "one-matrix": (
                lambda: _matrix_ratio() / 2,
                "You probably counted one N x N matrix. There are two: S, and the P made from it.",
            ),
            "output-forgotten": (
                lambda: 2 * 16384 / (3 * 64),
                "You probably divided by three arrays. O has N x d elements too, which makes four.",
            ),
            "one-against-one": (
                lambda: 16384 / 64,
                "That is N/d: one N x N matrix against one N x d array, or all their crossings. "
                "In memory two of the first stand against four of the second.",
            ),
        },
    ),
    Number(
        id="p01-3",
        text="A softmax over S in fp16 does about 5 FLOP an element (compare for the maximum,\n"
        "subtract it, exp, add to the sum, divide). It reads 2 bytes and writes 2 bytes an\n"
        "element. Hold that against the tensor ridge of the A100 80GB, above: what percent of\n"
        "its tensor peak is the most that a softmax can use?",
        unit="percent",
        truth=lambda: 100 * (5 / 4) / ridge("A100-80"),
        why="1.25 FLOP a byte, where the machine could do 153.",
        hint="FLOP per byte of the softmax, divided by the ridge, times 100.",
        tolerance=0.05,
        slips={
            "write-forgotten": (
                lambda: 100 * (5 / 2) / ridge("A100-80"),
                "You probably divided by 2 bytes. The result has to be written too, which makes 4.",
            ),
            "elements-not-bytes": (
                lambda: 100 * 5 / ridge("A100-80"),
                "5 is FLOP per element. The ridge is in FLOP per byte, so divide by the bytes.",
            ),
            "fp32-ridge": (
                lambda: 100 * (5 / 4) / ridge("A100-80", "fp32"),
                "You probably took the fp32 ridge. Correct, but of another peak: the question is "
                "about the tensor cores.",
            ),
            "other-card": (
                lambda: 100 * (5 / 4) / ridge("A100-40"),
                "That is the 40 GB card. Its memory is slower, so its ridge is another one.",
            ),
            "fraction-not-percent": (
                lambda: (5 / 4) / ridge("A100-80"),
                "That is the fraction. Times 100 it is the percentage.",
            ),
        },
    ),
    Number(
        id="p01-4",
        text="The same layer. Suppose one kernel moves only 4Nd elements a head: 33 times fewer\n"
        "bytes, with the same FLOPs. Loading and computing overlap perfectly, before and\n"
        "after, so the longer of the two is the time. How many times faster is it at most?",
        unit="how many times as fast",
        truth=_speed_up,
        why="Before, loading took longest. After, computing does, and that did not shrink.",
        hint="The time before is the longer of the two bounds. Which is the longer one after?",
        tolerance=0.05,
        slips={
            "bytes-are-time": (
                lambda: _times()[0].memory / _times()[1].memory,
                "That is the ratio of bytes. The FLOPs are as many as before. They take time too.",
            ),
            "no-overlap": (
                lambda: sum(_times()[0][:2]) / sum(_times()[1][:2]),
                "You probably added loading and computing, before and after. With perfect overlap "
                "the time is the longer of the two.",
            ),
            "no-overlap-before": (
                lambda: sum(_times()[0][:2]) / _times()[1].compute,
                "You probably added loading and computing for the three kernels. The question lets "
                "them overlap there too, so take the longer one.",
            ),
        },
    ),
    Choice(
        id="q1",
        text="In standard attention, which two intermediate matrices are N x N, and where are\n"
        "they between the kernels?",
        options={
            "a": "Q K^T and K^T Q, on chip",
            "b": "S and P, on chip in SRAM",
            "c": "S and P, in HBM",
            "d": "P and O, in HBM",
        },
        right="c",
        remarks={
            "a": "K^T Q would be d x d, and attention never forms it. The scores Q K^T are one of "
            "the two; the other is made from them by softmax.",
            "b": "The matrices are right. A kernel leaves nothing on chip for the next one, and at "
            "N = 4096 one of them alone is larger than all the SRAM of an A100.",
            "c": "The scores and the weights. Each is written by one kernel and read by the next.",
            "d": "P is one of them. O is the output, N x d, like Q, K and V.",
        },
    ),
    Choice(
        id="q6",
        text="A kernel does 40 FLOP for each byte it moves. The GPU's ridge is 153 FLOP per byte.\n"
        "What follows from these two numbers?",
        options={
            "a": "It is compute-bound: 40 FLOP a byte is a lot of arithmetic",
            "b": "It is memory-bound, and it runs at 26% of the peak",
            "c": "It is memory-bound, and it can reach 26% of the peak at most",
            "d": "Nothing: how many bytes it moves in all is missing",
        },
        right="c",
        remarks={
            "a": "Whether 40 is a lot depends on the machine. This one does 153 FLOP in the time "
            "that a byte takes, so it waits for the bytes.",
            "b": "A roofline gives a ceiling. A kernel that loads badly stays below it, and 26% is "
            "what it reaches if it uses the whole bandwidth.",
            "c": "40/153 is 26%: a ceiling, not a forecast. Faster arithmetic would not raise it.",
            "d": "The total sets how long it takes. Which of loading and computing is longer is a "
            "matter of the ratio alone, since both grow with the total.",
        },
    ),
    Choice(
        id="q7",
        text="The layer of the section on time again, on a GPU with the A100's bandwidth and half\n"
        "of its tensor FLOP/s. The bytes fall 33 times, the FLOPs stay. With perfect overlap,\n"
        "the largest possible speed-up is, compared with the A100:",
        options={
            "a": "larger, because the arithmetic is slower there",
            "b": "smaller, because the arithmetic that stays takes longer there",
            "c": "the same, because the bandwidth is the same",
            "d": "33 times on both, because a count of bytes does not depend on the GPU",
        },
        right="b",
        remarks={
            "a": "Slow arithmetic makes both versions slow, the fused one most of all: its time is "
            "all arithmetic. Work the two times out: only one of them doubles.",
            "b": "The time before is still the 2.17 ms of loading. The time after doubles, from "
            "0.88 to 1.76 ms: 1.23 times faster instead of 2.47.",
            "c": "The bandwidth sets the time before. After the change the arithmetic sets it, and "
            "that differs between the two GPUs.",
            "d": "The count is the same everywhere. Time is not: it is the longer of loading and "
            "computing.",
        },
    ),
]
