"""Exercise 5: what it costs to compute P again in the backward pass, and what it saves."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.hardware import GPUS, GiB, ridge, time_bound

# The setting of FlashAttention v2, Figure 2 (left): forward and backward on a 40 GB A100.
N, D, HEADS, BATCH = 1024, 64, 16, 64
PAIRS = HEADS * BATCH
GPU = GPUS["A100-40"]
GFLOP = {"standard": 66.6, "flash": 75.2}  # as printed there
GB = {"standard": 40.3, "flash": 4.4}  # as printed there

FORWARD = 2  # Q K^T, P V
BACKWARD = 4  # dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q


def products(count, pairs=PAIRS):
    """FLOP of `count` products of N x N x d, for so many (sequence, head) pairs."""
    return count * 2 * N * N * D * pairs


def traffic_ms(gigabytes, gpu=GPU):
    return 1e3 * time_bound(gpu, 0, gigabytes * 1e9).memory


def compute_ms(flop, unit="tensor"):
    return 1e3 * time_bound(GPU, flop, 0, unit).compute


SAVED = GB["standard"] - GB["flash"]
EXTRA = GFLOP["flash"] - GFLOP["standard"]

QUESTIONS = [
    Number(
        id="ex05-both",
        text="Count products of N x N x d. Standard attention: 2 forward, 4 backward.\n"
        "FlashAttention computes S = Q K^T once more, in the backward pass.\n"
        "How many percent more products is that, forward and backward together?",
        unit="percent",
        truth=lambda: 100 / (FORWARD + BACKWARD),
        why="7 products in place of 6.",
        hint="One more, over all that there were before.",
        tolerance=0.01,
        slips={
            "backward-alone": (
                lambda: 100 / BACKWARD,
                "That is for the backward pass alone, 5 in place of 4. Here both passes count.",
            ),
            "over-the-new-total": (
                lambda: 100 / (FORWARD + BACKWARD + 1),
                "You divided by 7. An increase is measured against what was there before.",
            ),
            "whole-forward-again": (
                lambda: 100 * FORWARD / (FORWARD + BACKWARD),
                "You ran P V again too. O is stored, so only Q K^T comes back.",
            ),
            "over-the-forward": (
                lambda: 100 / FORWARD,
                "You divided by the 2 products of the forward pass.",
            ),
        },
    ),
    Number(
        id="ex05-backward",
        text="And in the backward pass alone: how many percent more products?",
        unit="percent",
        truth=lambda: 100 / BACKWARD,
        why="5 products in place of 4. So backward takes 2.5 times the FLOPs of forward.",
        hint="Count only the products of the backward pass, before and after.",
        tolerance=0.01,
        slips={
            "both-passes": (
                lambda: 100 / (FORWARD + BACKWARD),
                "That is for both passes together. Leave the forward products out.",
            ),
            "over-the-new-total": (
                lambda: 100 / (BACKWARD + 1),
                "You divided by 5. There were 4 before.",
            ),
            "whole-forward-again": (
                lambda: 100 * FORWARD / BACKWARD,
                "You ran P V again too. O is stored, so only Q K^T comes back.",
            ),
            "against-the-forward": (
                lambda: 100 * ((BACKWARD + 1) / FORWARD - 1),
                "You compared the new backward pass with the forward pass: that ratio is 2.5. "
                "Compare it with the old backward pass.",
            ),
        },
    ),
    Number(
        id="ex05-printed",
        text="The paper prints 66.6 GFLOP for standard attention and 75.2 for FlashAttention,\n"
        "forward and backward. How many percent more is that?",
        unit="percent",
        truth=lambda: 100 * EXTRA / GFLOP["standard"],
        why="12.9%, not 16.7%. The next questions find out why.",
        hint="The difference, over the smaller one.",
        tolerance=0.01,
        slips={
            "over-the-new-total": (
                lambda: 100 * EXTRA / GFLOP["flash"],
                "You divided by 75.2. An increase is measured against what was there before.",
            ),
            "the-difference": (
                lambda: EXTRA,
                "That is the difference in GFLOP. In percent it is over 66.6.",
            ),
            "by-count": (
                lambda: 100 / (FORWARD + BACKWARD),
                "That is your count of products. Here the printed GFLOP are asked for.",
            ),
            "the-ratio": (
                lambda: 100 * GFLOP["flash"] / GFLOP["standard"],
                "That is the ratio in percent. The increase is what is above 100.",
            ),
        },
    ),
    Number(
        id="ex05-unit",
        text="One product of N x N x d with N = 1024 and d = 64, for 64 (sequence, head) pairs:\n"
        "how many GFLOP? (A multiplication and an addition are two FLOP; G is 10^9.)",
        unit="GFLOP",
        truth=lambda: products(1, 64) / 1e9,
        why="2 N^2 d for each pair. The printed difference, 8.6, is this one product.",
        hint="Each of the N x N results takes d multiplications and d additions.",
        tolerance=0.01,
        slips={
            "one-flop-for-two": (
                lambda: products(1, 64) / 2e9,
                "You counted a multiplication with its addition as one FLOP. They are two.",
            ),
            "one-pair": (
                lambda: products(1, 1) / 1e9,
                "That is one pair. The question has 64 of them.",
            ),
            "all-pairs": (
                lambda: products(1) / 1e9,
                "That is for 64 sequences of 16 heads, 1,024 pairs. The question has 64 pairs.",
            ),
            "binary-giga": (
                lambda: products(1, 64) / GiB,
                "You divided by 2^30. FLOPs are counted with G = 10^9.",
            ),
        },
    ),
    Choice(
        id="ex05-reconcile",
        text="In that unit the printed numbers are 66.6 = 7.75 units and 75.2 = 8.75 units.\n"
        "What do they say about the count of products, 6 and 7?",
        options={
            "a": "They contradict it: 7.75 and 8.75 are not whole numbers.",
            "b": "The recomputation costs less than one product, since 12.9% is less than 16.7%.",
            "c": "The paper counts 7.75 products, because standard attention recomputes as well.",
            "d": "They agree: the difference is one product. Both hold 1.75 units of other work.",
        },
        right="d",
        remarks={
            "a": "What is asked is the difference, and that is 1.00. Whatever the 1.75 above 6 is, "
            "it is in both numbers.",
            "b": "It costs one product by either count. 1 over 7.75 is 12.9%, 1 over 6 is 16.7%: "
            "only the base differs.",
            "c": "Standard attention keeps P. Seven would be a whole number; 7.75 is six and "
            "something that is not a product of this size.",
            "d": "One more on 6 is 16.7%, one more on 7.75 is 12.9%. (That the column counts 64 "
            "pairs is inferred from the numbers. The paper does not say so.)",
        },
    ),
    Number(
        id="ex05-saved",
        text="The paper prints 40.3 GB of HBM traffic for standard attention, 4.4 GB for\n"
        "FlashAttention. At 1.555 TB/s, how many milliseconds of traffic are saved?",
        unit="ms",
        truth=lambda: traffic_ms(SAVED),
        why="25.9 ms become 2.8 ms, if the bandwidth is used in full.",
        hint="Bytes saved over bytes a second, then times 1000.",
        tolerance=0.01,
        slips={
            "standard-alone": (
                lambda: traffic_ms(GB["standard"]),
                "That is the whole traffic of standard attention. FlashAttention has some too: "
                "subtract it.",
            ),
            "flash-alone": (
                lambda: traffic_ms(GB["flash"]),
                "That is what FlashAttention still moves. What is saved?",
            ),
            "gib-for-gb": (
                lambda: traffic_ms(SAVED) * GiB / 1e9,
                "You took G for 2^30 in the bytes and for 10^9 in the bandwidth. Both are 10^9.",
            ),
            "other-card": (
                lambda: traffic_ms(SAVED, GPUS["A100-80"]),
                "You took the bandwidth of the A100 with 80 GB. This one has 1.555 TB/s.",
            ),
            "seconds": (
                lambda: traffic_ms(SAVED) / 1e3,
                "That is in seconds. The question asks for milliseconds.",
            ),
            "microseconds": (
                lambda: traffic_ms(SAVED) * 1e3,
                "That is in microseconds: a thousand times too many. Check the powers of ten.",
            ),
        },
    ),
    Number(
        id="ex05-price",
        text="And the price: one more product of N x N x d for all 64 x 16 pairs, at the 312\n"
        "TFLOP/s of the tensor cores. How many milliseconds at least?",
        unit="ms",
        truth=lambda: compute_ms(products(1)),
        why="137.4 GFLOP. Even at a third of the peak it would be little over a millisecond.",
        hint="2 N^2 d for each pair, times 1,024 pairs, over 312e12, times 1000.",
        tolerance=0.01,
        slips={
            "64-pairs": (
                lambda: compute_ms(products(1, 64)),
                "That is 8.6 GFLOP, the unit of before and the printed difference: 64 pairs. The "
                "workload has 64 sequences of 16 heads.",
            ),
            "half-of-it": (
                lambda: compute_ms(products(1)) / 2,
                "Half of it: did a multiplication with its addition count as one FLOP, or did you "
                "take 624, the peak with sparsity?",
            ),
            "all-seven": (
                lambda: compute_ms(products(7)),
                "That is all seven products. The price of recomputing is one of them.",
            ),
            "fp32-cores": (
                lambda: compute_ms(products(1), "fp32"),
                "You took the 19.5 TFLOP/s of the fp32 cores. Matrix products in fp16 run on the "
                "tensor cores.",
            ),
            "seconds": (
                lambda: compute_ms(products(1)) / 1e3,
                "That is in seconds. The question asks for milliseconds.",
            ),
        },
    ),
    Choice(
        id="ex05-why",
        text="FlashAttention does one product more and takes 7.3 ms where standard attention\n"
        "takes 41.7 (the paper's times). Why is it faster?",
        options={
            "a": "Standard attention waits for its traffic, and most of that traffic is gone.",
            "b": "Its products are smaller, so that each takes fewer FLOPs.",
            "c": "The recomputed product costs nothing, since Q and K are on chip at that point.",
            "d": "Its backward pass leaves out the four products that need P.",
        },
        right="a",
        remarks={
            "a": "26 ms of traffic at least become 3, for under a millisecond of arithmetic. FLOPs "
            "were spent to save bytes.",
            "b": "A product in tiles takes the same FLOPs: the tiles add up to the whole. There is "
            "one product more, not less work.",
            "c": "It takes 137 GFLOP. That Q and K are there saves loading them, not multiplying "
            "them. It is cheap, not free.",
            "d": "The gradients need all four, and P for two of them. P is made again; the four "
            "stay.",
        },
    ),
    Number(
        id="ex05-largest-d",
        text="When does it not pay? Compare two ways to get P, at full speed on an A100 80GB:\n"
        "compute S again (2 N^2 d FLOP), or read P from HBM once (N^2 elements of 2 bytes).\n"
        "Up to which head dimension d is computing faster?",
        unit="d",
        truth=lambda: ridge("A100-80"),
        why="That is the ridge: d FLOP a byte are done for each byte of P that is not read. "
        "N cancels.",
        hint="Write both times as a formula and set them equal. N^2 is on both sides.",
        slips={
            "one-byte-an-element": (
                lambda: ridge("A100-80") / 2,
                "You took one byte for an element of P. fp16 has 2.",
            ),
            "one-flop-for-two": (
                lambda: 2 * ridge("A100-80"),
                "Twice that d: did a multiplication with its addition count as one FLOP, or did "
                "you write P as well as read it?",
            ),
            "other-card": (
                lambda: ridge("A100-40"),
                "That is for the 1.555 TB/s of the 40 GB card. The 80 GB card has 2.039.",
            ),
            "fp32-cores": (
                lambda: ridge("A100-80", "fp32"),
                "You took the peak of the fp32 cores. Matrix products in fp16 run on the tensor "
                "cores.",
            ),
        },
    ),
]
