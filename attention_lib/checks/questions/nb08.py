"""Predictions and checkpoint questions of notebook 08, the backward pass."""

from attention_lib.backward import flash_backward_traffic, standard_backward_traffic
from attention_lib.checks.kinds import Choice, Number
from attention_lib.traffic import flash_traffic, standard_traffic

N, D = 4096, 64
FORWARD, BACKWARD, REBUILT = 2, 4, 1  # N x N x d products
FIGURE_2 = 64 * 16 * 2  # (batch, head) pairs, times 2 bytes


def _squares():
    """Crossings of an N x N matrix in the standard backward pass."""
    return (standard_backward_traffic(N, D) - 8 * N * D) / N**2


def _ratio(variant="Algorithm 4", Br=64, Bc=196):
    return standard_backward_traffic(N, D) / flash_backward_traffic(N, D, Br, Bc, variant=variant)


def _bare():
    """Bytes of both passes, standard, in the setting of Figure 2, counting nothing else."""
    return FIGURE_2 * (standard_traffic(1024, D) + standard_backward_traffic(1024, D))


QUESTIONS = [
    Number(
        id="p08-1",
        text=(
            "Add up one row of dS, over all keys. What is the sum, up to rounding, for any Q, K,\n"
            "V and dO?"
        ),
        unit="the sum",
        truth=lambda: 0.0,
        why=(
            "Adding a constant to all scores of a row does not change P. So moving all of them "
            "together must not change the loss."
        ),
        hint=(
            "Add the same number to every score of a row. What happens to P, and so to the loss? "
            "The sum of the row of dS is the slope in that direction."
        ),
        slips={
            "row-of-P": (
                lambda: 1.0,
                "That is what a row of P adds up to. dS says how the loss moves when scores move.",
            ),
            "all-keys-alike": (
                lambda: float(N),
                "That counts the keys. Think of a row of scores in which all rise by 1.",
            ),
        },
    ),
    Number(
        id="p08-2",
        text=(
            "The standard backward pass as five kernels: dV; dP; dS; dQ; dK. P starts in HBM, dP\n"
            "and dS go through it. How many times does an N x N matrix cross, reads and writes\n"
            "together?"
        ),
        unit="crossings of N x N",
        truth=_squares,
        why="P is read twice, dP written and read, dS written and read twice.",
        hint=(
            "Go through the five kernels. For each ask which of P, dP, dS it reads, and which it "
            "writes."
        ),
        tolerance=0.01,
        slips={
            "one-a-kernel": (
                lambda: 5,
                "You counted one for each kernel. The third one reads two matrices and writes one.",
            ),
            "dS-read-once": (
                lambda: 6,
                "One is missing. dS is read by two kernels: for dQ, and again for dK. P has two "
                "readers as well.",
            ),
            "each-written-and-read": (
                lambda: 4,
                "You took the forward pass's count: two matrices, each written and read. Here some "
                "have two readers.",
            ),
            "P-written-too": (
                lambda: 8,
                "One too many. Was P written? The forward pass did that; here it is there already.",
            ),
        },
    ),
    Number(
        id="p08-3",
        text=(
            "N = 4096, d = 64, Bc = 196. How many times less does the tiled backward pass\n"
            "(Algorithm 4) move than the standard one? Their forward passes differ by 3.92."
        ),
        unit="a factor",
        truth=_ratio,
        why=(
            "119.5 against 28.7 million elements: about the forward pass's factor. Both passes "
            "grew by about the same amount."
        ),
        hint=(
            "Standard: 7N^2 + 8Nd. Tiled: K, V, dK, dV once, which is 4Nd; then for each of Tc "
            "blocks Q, O, dO, dQ in, dQ out, and two numbers a row."
        ),
        slips={
            "touched-once": (
                lambda: standard_backward_traffic(N, D) / (8 * N * D),
                "You let each array cross once. Q, O, dO and dQ cross again for every K/V block, "
                "and there are 21 of them.",
            ),
            "tr-for-tc": (
                lambda: (
                    standard_backward_traffic(N, D) / (4 * N * D + (N // 64) * (5 * N * D + 2 * N))
                ),
                "You took Tr = 64 passes. K/V is outside: there is one pass over Q for each K/V "
                "block, Tc = 21.",
            ),
            "forward-count": (
                lambda: standard_backward_traffic(N, D) / flash_traffic(N, D, 64, 196),
                "You divided by the forward pass's count. The backward loop moves five arrays a "
                "pass, not three.",
            ),
            "FlashAttention-2": (
                lambda: _ratio("FlashAttention-2"),
                "That is the order with D made before the loop: four arrays a pass. Algorithm 4 "
                "reads O in each pass too.",
            ),
        },
    ),
    Number(
        id="p08-4",
        text=(
            "Count N x N x d products. The backward pass with P rebuilt takes how many times the\n"
            "FLOPs of the forward pass?"
        ),
        unit="x",
        truth=lambda: (BACKWARD + REBUILT) / FORWARD,
        why="Five products against two.",
        hint="Forward: Q K^T and P V. Backward: four for dV, dP, dQ, dK, and P has to be rebuilt.",
        slips={
            "P-stored": (
                lambda: BACKWARD / FORWARD,
                "That is with P stored: four against two. Rebuilding P needs Q K^T once more.",
            ),
            "both-passes": (
                lambda: (FORWARD + BACKWARD + REBUILT) / FORWARD,
                "You counted both passes, seven products. The question is about the backward pass.",
            ),
            "forward-again": (
                lambda: (FORWARD + BACKWARD) / FORWARD,
                "You ran the whole forward pass again. O is kept, so only Q K^T is repeated.",
            ),
            "against-backward": (
                lambda: (BACKWARD + REBUILT) / BACKWARD,
                "You compared with the backward pass that has P stored. Compare with the forward "
                "pass.",
            ),
        },
    ),
    Number(
        id="p08-5",
        text=(
            "N = 1024, d = 64, 16 heads, batch 64, fp16. Standard attention, forward (4N^2 + 4Nd)\n"
            "and backward (7N^2 + 8Nd). How many GB cross, by this bare count? (1 GB = 10^9 bytes)"
        ),
        unit="GB",
        truth=lambda: _bare() / 1e9,
        why="11 N^2 + 12 Nd elements, 2 bytes each, 1,024 times. The printed number is larger.",
        hint="(11 N^2 + 12 Nd) elements for one head of one sequence, 2 bytes each, 16 x 64 times.",
        slips={
            "one-byte": (
                lambda: _bare() / 2e9,
                "Half of it: fp16 has 2 bytes an element.",
            ),
            "backward-only": (
                lambda: FIGURE_2 * standard_backward_traffic(1024, D) / 1e9,
                "That is the backward pass alone. Add the forward pass.",
            ),
            "forward-only": (
                lambda: FIGURE_2 * standard_traffic(1024, D) / 1e9,
                "That is the forward pass alone. Add the backward pass.",
            ),
            "binary": (
                lambda: _bare() / 2**30,
                "That is GiB, 2^30 bytes. The figure is in GB.",
            ),
            "one-sequence": (
                lambda: _bare() / 64e9,
                "That is one sequence. The batch has 64.",
            ),
            "as-printed": (
                lambda: 40.3,
                "That is the printed number. The bare count is less, which is the point: what is "
                "missing?",
            ),
        },
    ),
    Choice(
        id="q22",
        text="Why does the tiled backward pass need D, but not a whole row of P and dP at a time?",
        options={
            "a": "D is the same for all rows, so it is computed once.",
            "b": "The row sum of P * dP equals the row sum of dO * O, and O is kept.",
            "c": "D is small beside dP, so an estimate from one tile is enough.",
            "d": "L contains the row's sum already, and D follows from L.",
        },
        right="b",
        remarks={
            "a": (
                "Each row has its own D. It is one number a row, not one number. With a common D "
                "the rows of dS would not add up to zero."
            ),
            "b": (
                "Sum over keys first: P V is O. So N numbers, made from two N x d arrays, stand "
                "for a sum over N x N."
            ),
            "c": (
                "D is a mean of the row's dP: it has their size. And a sum over one tile is not "
                "the sum over the row, so nothing is estimated here."
            ),
            "d": (
                "L is a sum of exponentials of scores. It knows nothing about dO, and D depends on "
                "dO."
            ),
        },
    ),
    Choice(
        id="q23",
        text=(
            "With P rebuilt, the backward pass does five products in place of four. Why is it\n"
            "faster all the same?"
        ),
        options={
            "a": "The fifth product is done on tiles, and products of tiles need fewer FLOPs.",
            "b": "P is mostly zeros, so the rebuilt tiles can be skipped.",
            "c": "The standard pass waits for its traffic, which takes longer than a product.",
            "d": "Without P in memory a larger batch fits, and a larger batch is faster.",
        },
        right="c",
        remarks={
            "a": "Cutting a product into tiles changes where it is done, not its FLOPs.",
            "b": (
                "Softmax weights are small, not zero. Tiles are skipped only where a mask hides "
                "them, and the standard pass could do that too."
            ),
            "c": (
                "It moves N x N matrices seven times. On an A100 the fifth product takes less time "
                "than reading P once, and dP and dS never reach HBM either."
            ),
            "d": "A larger batch may fit, but the gain is there for the same batch.",
        },
    ),
    Choice(
        id="q24",
        text=(
            "A GPU gives each K/V block to another SM, all at the same time. What must change in\n"
            "the loop of this notebook?"
        ),
        options={
            "a": "dK and dV: all SMs add to the same rows of them.",
            "b": "dQ: all SMs add to its rows, so it takes atomic adds.",
            "c": "L and D: each SM needs its own copy, as it changes them.",
            "d": "Nothing: the tiles do not depend on each other.",
        },
        right="b",
        remarks={
            "a": (
                "A K/V block has its own rows of dK and dV, and one SM has that block. Nobody else "
                "adds to them."
            ),
            "b": (
                "dQ_i gets a part from every K/V block. Load, add, store by two SMs at once loses "
                "one of the parts. Atomic additions do not, but their order varies, and so do the "
                "last bits."
            ),
            "c": "The loop only reads L and D.",
            "d": (
                "The tiles of P and dS do not. The sums do: every K/V block adds to every block of "
                "dQ."
            ),
        },
    ),
]
