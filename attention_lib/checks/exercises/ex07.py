"""Exercise 7: the roofline of standard attention on two GPUs, and where a fused kernel moves."""

import numpy as np

from attention_lib.checks.kinds import Choice, Mistake, Number, Probe, Program
from attention_lib.hardware import GPUS, GiB, ridge, time_bound, your_gpu
from attention_lib.traffic import arithmetic_intensity, layer_traffic, standard_traffic

THREE_KERNELS = "notebook 01, 'Three steps, three kernels'"
SIZES = "notebook 01, 'How large S and P are'"
RATIO = "notebook 01, 'Two limits, one ratio'"
TIME = "notebook 01, 'From bytes to time'"
TRAPS = "notebook 01, 'Common mistakes'"

N, D, HEADS = 4096, 128, 32
FLOPS = 4 * N * N * D * HEADS
BYTES = layer_traffic(N, D, HEADS, method="standard")
FUSED = layer_traffic(N, D, HEADS, method="q-outer", Br=128)


def attention_time(gpu, N, d, heads, *, flops=4, moved=None, element_bytes=2, giga=1.0,
                   tensor=True, combine=max, unit=1.0):  # fmt: skip
    """The right bound, with a switch for each wrong idea.

    flops: FLOP for each of the N * N * d multiply-adds of both products together. moved(N, d):
    elements of one head. giga: bytes of a GB over 10^9. combine: of computing and loading.
    """
    elements = 4 * N * d + 4 * N * N if moved is None else moved(N, d)
    compute = heads * flops * N * N * d / (gpu.tensor_flops if tensor else gpu.fp32_flops)
    memory = heads * elements * element_bytes / (gpu.bandwidth * giga)
    return unit * combine(compute, memory)


def right(gpu, N, d, heads):
    """By the library's traffic and its roofline, for fp16."""
    bound = time_bound(gpu, heads * 4 * N * N * d, heads * 2 * standard_traffic(N, d))
    return max(bound.compute, bound.memory)


def kernel_by_kernel(gpu, N, d, heads):
    """The sum of three bounds: Q K^T, softmax, P V."""
    product, both = 2 * N * N * d, 2 * N * d + N * N
    kernels = ((product, both), (0, 2 * N * N), (product, both))
    bounds = (time_bound(gpu, heads * flops, heads * 2 * moved) for flops, moved in kernels)
    return sum(max(bound.compute, bound.memory) for bound in bounds)


def probes(seed):
    rng = np.random.default_rng(seed)
    slow = your_gpu("RTX4090", name="a slow GPU", tensor_flops=20e12, fp32_flops=10e12)
    sizes = [
        ("A100-80", GPUS["A100-80"], 4096, 128, 32),
        ("H200", GPUS["H200"], 4096, 128, 32),
        ("A100-40, one wide head", GPUS["A100-40"], 8192, 4096, 1),
        ("a GPU with 20 TFLOP/s", slow, 2048, 64, 8),
        ("H100, short and wide", GPUS["H100"], 200, 96, 12),
        ("a GPU with 20 TFLOP/s", slow, 16384, 128, 4),
    ]
    for _ in range(4):
        name = str(rng.choice(list(GPUS)))
        n, d = (int(rng.integers(*limits)) for limits in ((300, 9000), (16, 300)))
        sizes.append((name, GPUS[name], n, d, int(rng.integers(2, 40))))
    # About ten multiplications and divisions, each off by eps/2 at most; three times that.
    relative = 3 * 10 * float(np.finfo(np.float64).eps) / 2
    found = []
    for name, gpu, n, d, heads in sizes:
        arguments = {"gpu": gpu, "N": n, "d": d, "heads": heads}
        says = f"{name}, N = {n:,}, d = {d}, heads = {heads}"
        found.append(Probe(says, arguments, (relative * right(gpu, n, d, heads),)))
    return found


def _mistake(id, says, read, *variants):
    def program(switches):
        return lambda gpu, N, d, heads: attention_time(gpu, N, d, heads, **switches)

    programs = (v if callable(v) else program(v) for v in variants)
    return [Mistake(id, p, says, read) for p in programs]


ATTENTION_TIME = Program(
    id="ex07-attention-time",
    text="Write attention_time(gpu, N, d, heads) -> seconds: the least time that standard\n"
    "attention of one layer in fp16 can take, if all loading and computing overlap perfectly.",
    outputs=("seconds",),
    right=right,
    probes=probes,
    read=TIME,
    library=frozenset("standard_traffic _check check_positive_int check_int".split()),
    mistakes=(
        *_mistake(
            "elements-for-bytes",
            "you divide elements by the bandwidth, which is in bytes. fp16 has 2 bytes an element.",
            TRAPS,
            {"element_bytes": 1},
        ),
        *_mistake(
            "four-bytes",
            "you took 4 bytes an element, as for fp32. The layer is in fp16: 2.",
            TRAPS,
            {"element_bytes": 4},
        ),
        *_mistake(
            "half-the-computing",
            "your computing time is half of it. There are two products of 2 N^2 d FLOP each; and "
            "is your peak the dense one?",
            RATIO,
            {"flops": 2},
        ),
        *_mistake(
            "sum-of-both",
            "you add loading and computing. They overlap, so the longer one is the time.",
            TIME,
            {"combine": lambda compute, memory: compute + memory},
        ),
        *_mistake(
            "shorter-of-both",
            "you take the shorter of the two. The layer is done when both are done: the longer "
            "one.",
            TIME,
            {"combine": min},
        ),
        *_mistake(
            "loading-only",
            "you look at the bytes only. Where the arithmetic takes longer, it sets the time.",
            TIME,
            {"combine": lambda compute, memory: memory},
        ),
        *_mistake(
            "computing-only",
            "you look at the FLOPs only. Here loading often takes longer, and sets the time.",
            TIME,
            {"combine": lambda compute, memory: compute},
        ),
        *_mistake(
            "gib-for-gb",
            "you mix GiB and GB. The bandwidth counts G as 10^9, not 2^30.",
            TRAPS,
            {"giga": GiB / 1e9},
            {"giga": 1e9 / GiB},
        ),
        *_mistake(
            "one-head",
            "that is the time of one head. The layer has `heads` of them, FLOPs and bytes.",
            TIME,
            lambda gpu, N, d, heads: attention_time(gpu, N, d, 1),
        ),
        *_mistake(
            "d-shared-by-heads",
            "you divide d by the heads. Here d is the width of one head already.",
            TIME,
            lambda gpu, N, d, heads: attention_time(gpu, N, d / heads, heads),
            lambda gpu, N, d, heads: attention_time(gpu, N, d // heads, heads),
        ),
        *_mistake(
            "fp32-cores",
            "you take the peak of the fp32 cores. Matrix products in fp16 run on the tensor cores.",
            RATIO,
            {"tensor": False},
        ),
        *_mistake(
            "scores-only",
            "that is the kernel of Q K^T alone. Softmax and P V are part of the layer.",
            THREE_KERNELS,
            {"flops": 2, "moved": lambda N, d: 2 * N * d + N * N},
        ),
        *_mistake(
            "kernel-by-kernel",
            "you bound each kernel and add the bounds. That is sharper; here the whole layer is "
            "one: all FLOPs, all bytes, the longer time.",
            TIME,
            kernel_by_kernel,
        ),
        *_mistake(
            "S-once",
            "you move N x N once. S is written and read, and so is P: four times.",
            THREE_KERNELS,
            {"moved": lambda N, d: 4 * N * d + N * N},
        ),
        *_mistake(
            "softmax-left-out",
            "you leave out what softmax moves (or take the intensity of Q K^T for all). It reads S "
            "and writes P: 4N^2 in all.",
            THREE_KERNELS,
            {"moved": lambda N, d: 4 * N * d + 2 * N * N},
        ),
        *_mistake(
            "three-crossings",
            "you move N x N three times, perhaps once for each kernel. S and P are written and "
            "read: four.",
            THREE_KERNELS,
            {"moved": lambda N, d: 4 * N * d + 3 * N * N},
        ),
        *_mistake(
            "inputs-forgotten",
            "you move S and P alone. Q, K, V and O cross as well: 4Nd.",
            THREE_KERNELS,
            {"moved": lambda N, d: 4 * N * N},
        ),
        *_mistake(
            "already-fused",
            "you move Q, K, V and O alone. That is a fused kernel; standard attention moves S and "
            "P.",
            THREE_KERNELS,
            {"moved": lambda N, d: 4 * N * d},
        ),
        *_mistake(
            "milliseconds",
            "you return milliseconds. The function gives seconds.",
            TIME,
            {"unit": 1e3},
        ),
    ),
)


def _ms(gpu, flops=FLOPS, moved=BYTES):
    return 1e3 * max(time_bound(gpu, flops, moved)[:2])


QUESTIONS = [
    Number(
        id="ex07-bytes",
        text="One layer of standard attention: N = 4096, d = 128, 32 heads, fp16, three kernels.\n"
        "How many GB (10^9 bytes) cross between HBM and the chip?",
        unit="GB",
        truth=lambda: BYTES / 1e9,
        why="32 heads of 4Nd + 4N^2 elements, 2 bytes each. 97% of it is S and P.",
        hint="Elements of one head first: four arrays of N x d, and N x N how often? Then bytes, "
        "then heads.",
        tolerance=0.01,
        slips={
            "elements-for-bytes": (
                lambda: BYTES / 2e9,
                "That is the number of elements. fp16 has 2 bytes each.",
            ),
            "four-bytes": (
                lambda: 2 * BYTES / 1e9,
                "You took 4 bytes an element. fp16 has 2.",
            ),
            "gib-for-gb": (
                lambda: BYTES / GiB,
                "That is in GiB, 2^30 bytes each. A bandwidth is in GB, so take 10^9.",
            ),
            "one-head": (
                lambda: BYTES / HEADS / 1e9,
                "That is one head. The layer has 32.",
            ),
            "S-once": (
                lambda: HEADS * 2 * (4 * N * D + N * N) / 1e9,
                "You moved N x N once. S is written and read, and so is P: four times.",
            ),
            "written-not-read": (
                lambda: HEADS * 2 * (4 * N * D + 2 * N * N) / 1e9,
                "You moved S and P once each. Each is written by one kernel and read by the next.",
            ),
            "inputs-forgotten": (
                lambda: HEADS * 2 * 4 * N * N / 1e9,
                "S and P are right. Q, K, V and O cross as well.",
            ),
            "already-fused": (
                lambda: HEADS * 2 * 4 * N * D / 1e9,
                "That is Q, K, V and O alone: what a fused kernel moves at least.",
            ),
        },
    ),
    Number(
        id="ex07-flops",
        text="The same layer: how many GFLOP do its matrix products take?\n"
        "(A multiplication and an addition are two FLOP.)",
        unit="GFLOP",
        truth=lambda: FLOPS / 1e9,
        why="Two products of 2 N^2 d each, 32 heads.",
        hint="Q K^T has N x N results of d multiply-adds each. P V has N x d results. Of how many?",
        tolerance=0.01,
        slips={
            "half-of-it": (
                lambda: FLOPS / 2e9,
                "Half of it: is a product missing (there are two), or did a multiply-add count as "
                "one FLOP?",
            ),
            "quarter-of-it": (
                lambda: FLOPS / 4e9,
                "A quarter: there are two products, and a multiply-add is two FLOP.",
            ),
            "one-head": (
                lambda: FLOPS / HEADS / 1e9,
                "That is one head. The layer has 32.",
            ),
            "with-backward": (
                lambda: 3.5 * FLOPS / 1e9,
                "You added a backward pass. The question is about the forward pass.",
            ),
        },
    ),
    Number(
        id="ex07-intensity",
        text="What is its arithmetic intensity, in FLOP for each byte moved?",
        unit="FLOP per byte",
        truth=lambda: FLOPS / BYTES,
        why="Nd / (N + d) / 2: about d/2, however long N is. Heads cancel.",
        hint="Your FLOPs over your bytes.",
        tolerance=0.01,
        slips={
            "per-element": (
                lambda: 2 * FLOPS / BYTES,
                "That is FLOP per element. An element has 2 bytes.",
            ),
            "scores-only": (
                lambda: N * D / (N + 2 * D),
                "That is the intensity of Q K^T alone. P V has it too, but softmax moves 2N^2 "
                "elements for no products at all.",
            ),
            "half-of-it": (
                lambda: FLOPS / BYTES / 2,
                "Half of it: two products, or bytes of fp32?",
            ),
            "gib-for-gb": (
                lambda: FLOPS / BYTES * GiB / 1e9,
                "You divided GFLOP by GiB. The first counts G as 10^9, the second as 2^30.",
            ),
            "already-fused": (
                lambda: N / 2,
                "That is for a kernel that moves Q, K, V and O once each. This one moves S and P.",
            ),
        },
    ),
    Number(
        id="ex07-ridge",
        text="What is the ridge of the H200 for fp16 on the tensor cores: the intensity at which\n"
        "loading and computing take equally long?",
        unit="FLOP per byte",
        truth=lambda: ridge("H200"),
        why="989.4 TFLOP/s over 4.8 TB/s. The A100 80GB has 153.",
        hint="GPUS['H200'] has tensor_flops and bandwidth. Divide.",
        tolerance=0.01,
        slips={
            "sparse-peak": (
                lambda: 2 * ridge("H200"),
                "You took the peak with sparsity, 1,979 TFLOP/s. It counts products with zeros "
                "that are never done; dense is half.",
            ),
            "H100": (
                lambda: ridge("H100"),
                "That is the H100: the same arithmetic, slower memory.",
            ),
            "A100": (
                lambda: ridge("A100-80"),
                "That is the A100 80GB.",
            ),
            "fp32-cores": (
                lambda: ridge("H200", "fp32"),
                "You took the peak of the fp32 cores. Matrix products in fp16 run on the tensor "
                "cores.",
            ),
            "gib-for-gb": (
                lambda: ridge("H200") * GiB / 1e9,
                "You mixed G as 10^9 and as 2^30. Both figures have 10^9.",
            ),
            "upside-down": (
                lambda: 1 / ridge("H200"),
                "That is bytes per FLOP. Turn it over.",
            ),
        },
    ),
    Choice(
        id="ex07-bound",
        text="The intensity of the layer against the two ridges: what limits standard attention?",
        options={
            "a": "Computing on the A100 80GB, memory on the H200.",
            "b": "Computing on both: 275 GFLOP are a lot of arithmetic.",
            "c": "Memory on both, and a longer N makes it compute-bound.",
            "d": "Memory on both, for any N.",
        },
        right="d",
        remarks={
            "a": "Compare again: 62 with 153, and with 206.",
            "b": "How much it is says nothing. The A100 does 153 FLOP in the time of one byte, and "
            "this layer has 62 for each.",
            "c": "Both FLOPs and bytes grow as N^2. Nd / (2 (N + d)) never passes d/2, which is 64 "
            "here.",
            "d": "62 is below 153 and 206, and the intensity stays below d/2 = 64 for every N.",
        },
    ),
    Number(
        id="ex07-time-a100",
        text="If loading and computing overlap perfectly: how many milliseconds does the layer\n"
        "take at least on the A100 80GB?",
        unit="ms",
        truth=lambda: _ms("A100-80"),
        why="The bytes take 2.17 ms, the FLOPs 0.88 ms. The longer one counts.",
        hint="Two times: bytes over bandwidth, FLOPs over peak. They run side by side.",
        tolerance=0.01,
        slips={
            "computing-only": (
                lambda: 1e3 * FLOPS / GPUS["A100-80"].tensor_flops,
                "That is the arithmetic. Loading takes longer.",
            ),
            "sum-of-both": (
                lambda: 1e3 * sum(time_bound("A100-80", FLOPS, BYTES)[:2]),
                "You added the two. They overlap, so the longer one is the time.",
            ),
            "elements-for-bytes": (
                lambda: _ms("A100-80", moved=BYTES / 2),
                "You divided elements by bytes a second. fp16 has 2 bytes each.",
            ),
            "gib-for-gb": (
                lambda: _ms("A100-80", moved=BYTES * 1e9 / GiB),
                "You divided GiB by GB/s. Take G as 10^9 in both.",
            ),
            "other-card": (
                lambda: _ms("A100-40"),
                "You took the bandwidth of the 40 GB card, 1.555 TB/s. This one has 2.039.",
            ),
            "one-head": (
                lambda: _ms("A100-80") / HEADS,
                "That is one head. The layer has 32.",
            ),
        },
    ),
    Number(
        id="ex07-time-h200",
        text="And on the H200?",
        unit="ms",
        truth=lambda: _ms("H200"),
        why="2.35 times faster: the ratio of the bandwidths. The tensor cores are 3.17 times "
        "faster, and that does not help.",
        hint="The same two times, with the figures of GPUS['H200'].",
        tolerance=0.01,
        slips={
            "computing-only": (
                lambda: 1e3 * FLOPS / GPUS["H200"].tensor_flops,
                "That is the arithmetic. Loading takes longer.",
            ),
            "sum-of-both": (
                lambda: 1e3 * sum(time_bound("H200", FLOPS, BYTES)[:2]),
                "You added the two. They overlap, so the longer one is the time.",
            ),
            "scaled-by-flops": (
                lambda: _ms("A100-80") * GPUS["A100-80"].tensor_flops / GPUS["H200"].tensor_flops,
                "You scaled the A100's time with the FLOP/s. It is bound by memory, so it scales "
                "with the bandwidth.",
            ),
            "gib-for-gb": (
                lambda: _ms("H200", moved=BYTES * 1e9 / GiB),
                "You divided GiB by GB/s. Take G as 10^9 in both.",
            ),
            "H100": (
                lambda: _ms("H100"),
                "That is the H100, with 3.35 TB/s. The H200 has 4.8.",
            ),
        },
    ),
    ATTENTION_TIME,
    Number(
        id="ex07-fused",
        text="Now a fused kernel: Q outside, blocks of 128 queries, K and V read again for each\n"
        "block, S and P never in HBM. What is the intensity of its whole forward pass?",
        unit="FLOP per byte",
        truth=lambda: arithmetic_intensity(N, D, 128),
        why="Twice that of standard attention, and still below both ridges.",
        hint="The same FLOPs. Elements of one head: Q and O once, L once, K and V for each of the "
        "N/128 blocks.",
        tolerance=0.01,
        slips={
            "one-step": (
                lambda: arithmetic_intensity(N, D, 128, rule="article"),
                "That is one inner step, where only K and V move. Q is read and O is written too.",
            ),
            "each-once": (
                lambda: N / 2,
                "That has K and V read once. A block of 128 queries ends before the next one "
                "starts: K and V are read again.",
            ),
            "standard": (
                lambda: FLOPS / BYTES,
                "That is standard attention. The fused kernel moves no S and no P.",
            ),
            "K-without-V": (
                lambda: FLOPS / (2 * HEADS * (2 * N * D + N + N * D * 32)),
                "You read one of K and V again. Both are: 2Nd for each block of queries.",
            ),
            "per-element": (
                lambda: 2 * arithmetic_intensity(N, D, 128),
                "That is FLOP per element. An element has 2 bytes.",
            ),
        },
    ),
    Choice(
        id="ex07-move",
        text="On the roofline of the A100 80GB, where does the point of the layer move when the\n"
        "three kernels become this fused one?",
        options={
            "a": "Straight up: the same intensity, more FLOP/s.",
            "b": "To the right, up the slope to 124; past the ridge only if L2 answers repeats.",
            "c": "To the right, to 124, past the ridge: from there on the arithmetic is what it "
            "waits for.",
            "d": "To the left: fewer bytes are moved, and the axis is bytes.",
        },
        right="b",
        remarks={
            "a": "On the slope a point can rise only if its intensity does. The bytes fell and the "
            "FLOPs did not, so it moves to the right.",
            "b": "Left of the ridge the roof is bandwidth times intensity. If L2 serves the "
            "repeats, DRAM sees 4Nd: N/2 FLOP a byte, under the flat roof.",
            "c": "The ridge is at 153. With every read of K and V from HBM, 124 is still on the "
            "slope.",
            "d": "The axis is FLOP for each byte. Fewer bytes for the same FLOPs is more for each.",
        },
    ),
    Number(
        id="ex07-gain",
        text="Suppose L2 answers all repeated reads, so that only 4Nd elements a head reach HBM.\n"
        "How many times faster than standard attention can the layer be on the H200?",
        unit="times",
        truth=lambda: _ms("H200") / _ms("H200", moved=HEADS * 2 * 4 * N * D),
        why="0.92 ms of loading become 0.28 ms of computing. The bytes fell 33 times.",
        hint="The bound before is the longer of two times. Work both out again for the new bytes.",
        tolerance=0.01,
        slips={
            "bytes-are-time": (
                lambda: 1 + N / D,
                "That is the ratio of the bytes. The FLOPs are as many as before, and they set the "
                "time now.",
            ),
            "A100": (
                lambda: _ms("A100-80") / _ms("A100-80", moved=HEADS * 2 * 4 * N * D),
                "That is the gain on the A100 80GB. The H200 has a higher ridge, so more to gain.",
            ),
            "no-cache": (
                lambda: _ms("H200") / _ms("H200", moved=FUSED),
                "That is with every read of K and V from HBM. Here L2 answers the repeated ones.",
            ),
            "sum-before": (
                lambda: (
                    1e3
                    * sum(time_bound("H200", FLOPS, BYTES)[:2])
                    / _ms("H200", moved=HEADS * 2 * 4 * N * D)
                ),
                "You added loading and computing before. Let them overlap there too.",
            ),
        },
    ),
]
