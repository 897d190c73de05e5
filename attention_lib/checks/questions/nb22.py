"""Predictions and checkpoint questions of notebook 22, the backward kernels, and its open task."""

import numpy as np

from attention_lib.checks.kinds import Choice, Number
from attention_lib.gpu import bench, recordings

N, D = 16_384, 128
ROWS = {
    (r["kernel"], r["d"], r["N"], r["causal"]): r
    for r in recordings.read("bench")["rows"]
    if r["dtype"] == "float16"
}


def _speed(kernel, d=D, N=N, causal=False):
    """TFLOP/s of a backward kernel as recorded, float16."""
    return ROWS[f"backward_{kernel}", d, N, causal]["tflops"]


def _share():
    """Percent of a training step's attention FLOPs that are the backward pass."""
    forward, backward = (bench.flops(N, False, x) for x in ("forward", "backward"))
    return 100 * backward / (forward + backward)


def two_speeds(d=D, N=N, causal=False):
    """TFLOP/s of the deterministic mode, if four products run at wgmma's speed and three at
    mma.sync's. Counted as five, as in the bench."""
    return 5 / (4 / _speed("wgmma", d, N, causal) + 3 / _speed("mma", d, N, causal))


WGMMA, MMA = _speed("wgmma"), _speed("mma")
FLASH = ROWS["backward_mma", D, N, False]["flash"]

QUESTIONS = [
    Number(
        id="p22-1",
        text=(
            "A training step runs attention forward, then backward. S is not kept, so it is made\n"
            "again. Count matrix products of 2N²d FLOP each. Which share of the attention FLOPs\n"
            "of a step is the backward pass?"
        ),
        unit="percent",
        truth=_share,
        why="Five products of seven.",
        hint="Forward: S and O. Backward: one for each gradient of a product, and S once more.",
        slips={
            "as-forward": (
                lambda: 50,
                "That is two products each way. Each product of the forward pass has two "
                "gradients.",
            ),
            "S-kept": (
                lambda: 100 * 4 / 6,
                "Four products of six: the rule of twice the forward pass. You forgot that S is "
                "made again.",
            ),
        },
        slip_tolerance=0.005,
    ),
    Number(
        id="p22-2",
        text=(
            "The deterministic mode runs two kernels: one with K/V outside makes dK and dV, one\n"
            "with Q outside makes dQ. No tile is kept from one to the other. How many matrix\n"
            "products do the two run in all?"
        ),
        unit="products",
        truth=lambda: 7,
        tolerance=0,
        why="S, dP, dV, dK in the first; S, dP, dQ in the second.",
        hint="Write down for each kernel what it needs before its gradient. Which occur twice?",
        slips={
            "five": (
                lambda: 5,
                "That is one kernel for all three. Here S and dP are needed on both sides.",
            ),
            "twice": (
                lambda: 10,
                "Not all five are made twice: each kernel leaves out the gradients of the other.",
            ),
            "S-only": (lambda: 6, "S is made twice. dP, too: dS needs both."),
        },
    ),
    Number(
        id="p22-3",
        text=(
            "d = 128. A warp of 32 lanes owns 16 keys and keeps their dK and dV, in float32, in\n"
            "registers of 4 bytes. How many registers of each thread are that?"
        ),
        unit="registers",
        truth=lambda: 2 * 16 * D / 32,
        tolerance=0,
        why="2 x 16 x 128 numbers over 32 lanes. A thread has 255 at most.",
        hint="How many numbers are dK and dV of 16 keys? They are shared out over 32 lanes.",
        slips={
            "one-gradient": (
                lambda: 16 * D / 32,
                "That is one gradient, or both in 16 bits. There are two, and sums are float32.",
            ),
            "per-lane": (
                lambda: 2 * D,
                "That is one key a lane. 32 lanes share 16 keys.",
            ),
        },
    ),
    Choice(
        id="p22-4",
        text=(
            "32 blocks add their parts to the same dQ, in float32, in whatever order they come.\n"
            "The same inputs are run 20 times. What about the 20 results?"
        ),
        options={
            "a": "all the same: addition does not mind the order",
            "b": "different in the last bits, each as accurate as the others",
            "c": "different, and those with an unlucky order are useless",
        },
        right="b",
        remarks={
            "a": "In exact arithmetic. A float32 sum is rounded after each addition.",
            "b": "Each addition rounds, and another order rounds other sums.",
            "c": "Rounding errors of 32 additions stay near the last bits.",
        },
    ),
    Number(
        id="p22-5",
        text=(
            f"d = 128, N = 16,384, no mask. With five products, the wgmma kernel has {WGMMA:.0f} "
            "TFLOP/s\n"
            f"and the mma.sync kernel {MMA:.0f}. The deterministic mode runs four products on\n"
            "wgmma and three on mma.sync. Its speed is counted as five products over the whole\n"
            "time. How many TFLOP/s, if each product takes as long as it does now?"
        ),
        unit="TFLOP/s",
        truth=two_speeds,
        why=f"4/{WGMMA:.0f} + 3/{MMA:.0f} is the time; five over it.",
        hint=f"Add times, not speeds. How long do four products take at {WGMMA:.0f}, and three at "
        f"{MMA:.0f}?",
        slips={
            "mean-of-speeds": (
                lambda: (4 * _speed("wgmma") + 3 * _speed("mma")) / 7,
                "You averaged speeds. The slow part takes longer, so it counts for more.",
            ),
            "seven-counted": (
                lambda: 7 / 5 * two_speeds(),
                "You counted seven products as useful. The work asked for is five.",
            ),
            "all-wgmma": (
                lambda: 5 / 7 * _speed("wgmma"),
                "That is with all seven at wgmma's speed. The second kernel has mma.sync.",
            ),
        },
    ),
    Choice(
        id="p22-6",
        text=(
            f"The kernel on mma.sync is at {MMA / FLASH:.2f} of torch's FLASH backward (d = 128, "
            "N = 16,384).\n"
            "Now the same algorithm with wgmma, TMA and a warpgroup that loads. How many times\n"
            "faster is it?"
        ),
        options={
            "a": "about 1.2 times",
            "b": "about 1.5 times: mma.sync is said to reach two thirds of the peak",
            "c": "about 2 times",
            "d": "about 4 times",
        },
        right="c",
        remarks={
            "a": "In the forward pass these instructions brought more than that, too.",
            "b": "That would be so if both ran at their limit. The kernel on mma.sync does not.",
            "c": "A higher limit, and more of it reached: the products overlap with exp and dS.",
            "d": "That would be past the peak of the tensor cores.",
        },
    ),
    Choice(
        id="p22-7",
        text=(
            "The deterministic mode adds nothing to dQ. But `queries` has Q outside: each of its\n"
            "blocks loads all of K and V. How many bytes go between the SMs and L2, compared with\n"
            "the mode that adds?"
        ),
        options={
            "a": "about half as many: the adding was most of it",
            "b": "about as many",
            "c": "about twice as many: two kernels pass over everything",
        },
        right="b",
        remarks={
            "a": "The adding goes away, and something comes instead. Count both for one block.",
            "b": "A block added 4Nd bytes of dQ, in float. Now one loads 4Nd bytes of K and V.",
            "c": "Only `queries` comes in addition, and the adding is gone. Count one block each.",
        },
    ),
    Choice(
        id="q64",
        text=(
            "K/V blocks are outside. Why are dK and dV complete when a block of threads ends,\n"
            "and dQ is not?"
        ),
        options={
            "a": "dK and dV of a key are sums over queries, and all queries came by",
            "b": "dQ is larger: it has float32 sums",
            "c": "dQ needs dK and dV first",
        },
        right="a",
        remarks={
            "a": "A row of dQ is a sum over keys, and the block has 128 of them.",
            "b": "Its size is that of Q. What counts is over what it is summed.",
            "c": "dQ = dS K. It needs neither of them.",
        },
    ),
    Choice(
        id="q65",
        text="What does a warp gain by computing K Q^T instead of Q K^T?",
        options={
            "a": "fewer FLOPs",
            "b": "the maximum of a row needs no exchange between lanes",
            "c": "P^T lies in its registers as the A operand of dV += P^T dO needs it",
        },
        right="c",
        remarks={
            "a": "The same products, and the same number of multiply-adds.",
            "b": "The backward pass takes no maximum. L is known.",
            "c": "And dS^T for dK. Two of three uses need no exchange; dQ takes shared memory.",
        },
    ),
    Choice(
        id="q66",
        text=(
            "Rows of K beyond the last key are filled with zeros, and their dK is not stored.\n"
            "Why must their weights be masked all the same?"
        ),
        options={
            "a": "2^(0 - L) may be infinite, and infinite times zero is NaN in dQ",
            "b": "their weights would make the softmax's sum too large",
            "c": "it saves time",
        },
        right="a",
        remarks={
            "a": "The product with a row of zeros is harmless only while the weight is finite.",
            "b": "In the forward pass, yes. Here the sum is in L already, and is not formed.",
            "c": "The mask costs time. It is there for rows whose scores are all very low.",
        },
    ),
]


def check_total(total):
    """Judge total(arrivals): arrivals is a list of (block, part), any order. Returns a Result."""
    from attention_lib.checks import NOT_ATTEMPTED, NOT_YET, PASSED, Result

    rng = np.random.default_rng(7)
    parts = [(k, x) for k, x in enumerate(rng.standard_normal((32, 16, 64)).astype(np.float32))]
    results = []
    for _ in range(20):
        arrivals = [(k, parts[k][1].copy()) for k in rng.permutation(32).tolist()]
        try:
            result = total(arrivals)
        except Exception as error:
            return Result(NOT_YET, f"your function raised {type(error).__name__}: {error}")
        if result is ...:
            return Result(NOT_ATTEMPTED, "return an array in place of the dots.")
        results.append(np.asarray(result))
    exact = sum(x.astype(np.float64) for _, x in parts)
    if any(x.shape != exact.shape or not np.allclose(x, exact, atol=1e-4) for x in results):
        return Result(NOT_YET, "that is not the sum of the parts.", "not-the-sum")
    if any(x.dtype != np.float32 for x in results):
        return Result(NOT_YET, f"the sum is {results[0].dtype}; stay in float32.", "wider-sum")
    if len({x.tobytes() for x in results}) > 1:
        return Result(
            NOT_YET, "the bits still depend on which block came first.", "order-of-arrival"
        )
    return Result(PASSED, "20 orders of arrival, one result.")
