"""Predictions and checkpoint questions of notebook 05, memory and recomputation."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.traffic import attention_memory, largest_context

MiB, GiB = 2**20, 2**30
MATMULS_FORWARD, MATMULS_BACKWARD = 2, 4  # with P stored
PER_ROW = attention_memory(1, 64, 1, method="flash", element_bytes=4)  # bytes: d = 64, float32


def _matrix(element_bytes, N=2048):
    """MiB of one N x N matrix."""
    return attention_memory(N, 64, 1, method="standard", element_bytes=element_bytes)["S"] / MiB


def _context(budget, method):
    return largest_context(budget * GiB, 128, 32, method=method)


QUESTIONS = [
    Number(
        id="p05-1",
        text=(
            "Q, K and V are float32, N = 2048, d = 64. At the busiest line of `textbook`,\n"
            "the extra memory is (N x N arrays alive) x (bytes an element) x N x N.\n"
            "How many MiB is the peak of `textbook(Q, K, V)`?"
        ),
        unit="MiB",
        truth=lambda: 4 * _matrix(8),
        why="Four arrays, and each element takes 8 bytes, although the inputs have 4.",
        hint=(
            "One N x N array of 4 bytes an element is 16 MiB here. Count the arrays in the "
            "fifth column of the picture, then run the next cell and compare."
        ),
        slips={
            "float32-all-through": (
                lambda: 4 * _matrix(4),
                "Four arrays of 4 bytes: that is what the code seems to say, and what most people "
                "answer. Run the next cell: it measures something else.",
            ),
            "S-and-P-only": (
                lambda: 2 * _matrix(4),
                "You counted S and P. Line-by-line code keeps its steps too: at `E / E.sum()` "
                "there are S, Z, E and the new P.",
            ),
            "three-arrays": (
                lambda: 3 * _matrix(4),
                "You counted three arrays. At `E / E.sum()` the result is a new array: "
                "S, Z, E and P are alive together.",
            ),
            "one-matrix": (
                lambda: _matrix(4),
                "That is one N x N array of 4 bytes an element. Several are alive at the peak.",
            ),
            "megabytes": (
                lambda: 4 * _matrix(8) * MiB / 1e6,
                "You took 10^6 bytes for a MiB, which is 2^20. Otherwise it is right.",
            ),
            "megabytes-and-float32": (
                lambda: 4 * _matrix(4) * MiB / 1e6,
                "You took 10^6 bytes for a MiB, which is 2^20. And four arrays of 4 bytes are what "
                "the code seems to say: run the next cell, it measures something else.",
            ),
        },
    ),
    Number(
        id="p05-2",
        text=(
            "`flash_attention`, float32, d = 64, one head. The tiles are the same for every N.\n"
            "N grows by one row. By how many bytes does the peak of its extra memory grow?"
        ),
        unit="bytes a row",
        truth=lambda: PER_ROW["QKVO"] / 4 + PER_ROW["l, m"],
        why="One row of O, and one l and one m: (d + 2) x 4 bytes. N x N appears nowhere.",
        hint=(
            "Ask which arrays of length N the function makes. Q, K and V are there before it "
            "starts. It makes O, which is N x d, and l and m, with one number a row."
        ),
        slips={
            "statistics-forgotten": (
                lambda: PER_ROW["QKVO"] / 4,
                "That is the row of O. Algorithm 1 also keeps l and m, one number each a row.",
            ),
            "L-only": (
                lambda: PER_ROW["QKVO"] / 4 + PER_ROW["l, m"] / 2,
                "You counted one number a row beside O: that is L, in the Q-outer order. "
                "Algorithm 1 keeps two, l and m.",
            ),
            "O-forgotten": (
                lambda: PER_ROW["l, m"],
                "That is l and m alone. The output O is new memory too: d numbers a row.",
            ),
            "inputs-counted": (
                lambda: PER_ROW["QKVO"] + PER_ROW["l, m"],
                "You counted Q, K and V. They existed before the call: extra memory is what the "
                "function itself makes.",
            ),
            "float64": (
                lambda: 2 * (PER_ROW["QKVO"] / 4 + PER_ROW["l, m"]),
                "You took 8 bytes an element. This function stays in float32: 4 bytes.",
            ),
        },
        tolerance=0.01,
        slip_tolerance=0.0005,
    ),
    Number(
        id="p05-3",
        text=(
            "Standard attention, 32 heads, d = 128, fp16. The memory for its arrays doubles,\n"
            "from 20 GiB to 40 GiB. By what factor does the longest context that fits grow?"
        ),
        unit="x",
        truth=lambda: _context(40, "standard") / _context(20, "standard"),
        why="Memory grows as N squared, so N grows as the square root of the memory: about 1.4.",
        hint="Almost all of the memory is N x N. If memory = c x N x N, what is N?",
        slips={
            "linear": (
                lambda: _context(40, "flash") / _context(20, "flash"),
                "That is the answer for a memory that grows as N: the tiled version. "
                "Standard attention stores N x N.",
            ),
            "squared-the-wrong-way": (
                lambda: 4,
                "Doubling N makes memory 4 times larger. Here memory doubles, and N is asked.",
            ),
            "list-of-powers-of-two": (
                lambda: 1,
                "With only powers of two to choose from, both budgets give the same N. "
                "Let N be any whole number.",
            ),
        },
    ),
    Number(
        id="p05-4",
        text=(
            "Count matrix products of size N x N x d. With P stored: forward 2, backward 4.\n"
            "Rebuilding P needs Q K^T once more. How many percent more products is that,\n"
            "forward and backward together?"
        ),
        unit="percent",
        truth=lambda: 100 / (MATMULS_FORWARD + MATMULS_BACKWARD),
        why="7 products in place of 6.",
        tolerance=0.03,
        hint="Put the number of extra products over the number of all products with P stored.",
        slips={
            "backward-alone": (
                lambda: 100 / MATMULS_BACKWARD,
                "That is right for the backward pass alone: 5 in place of 4. The question takes "
                "both passes together.",
            ),
            "forward-twice": (
                lambda: 100 * MATMULS_FORWARD / (MATMULS_FORWARD + MATMULS_BACKWARD),
                "You ran the whole forward pass again. O is stored, so P V is not needed a second "
                "time: only Q K^T is.",
            ),
            "over-the-new-total": (
                lambda: 100 / (MATMULS_FORWARD + MATMULS_BACKWARD + 1),
                "You divided by the new total. The increase is measured against what was there "
                "before.",
            ),
        },
    ),
    Choice(
        id="q5",
        text="What does FlashAttention keep for the backward pass in place of P?",
        options={
            "a": "Nothing: Q, K and V are enough; the backward pass runs the forward pass again.",
            "b": "O, and for each row m and l (or L = m + log l).",
            "c": "The tiles of P, compressed to 16 bits.",
            "d": "S, because P follows from it without a matrix product.",
        },
        right="b",
        remarks={
            "a": (
                "Q, K and V do determine P, but without m and l every row needs a pass over all "
                "keys to find its sum again before the first tile can be rebuilt. One number a row "
                "saves that pass. O is kept too: it is the output, and the backward pass uses it."
            ),
            "b": (
                "FlashAttention keeps m and l, FlashAttention-2 keeps L. With them any tile of P "
                "can be rebuilt on its own, from its rows of Q and K."
            ),
            "c": "That is still N x N numbers: fewer bytes, the same growth. No tile of P is kept.",
            "d": "S is N x N as well. Keeping it costs the memory and the traffic that P costs.",
        },
    ),
    Choice(
        id="q14",
        text=(
            "x is a large float32 array, and NumPy is version 2 or later. After which line is the\n"
            "result still float32?"
        ),
        options={
            "a": "y = x / np.sqrt(64)",
            "b": "y = x * np.float64(0.125)",
            "c": "y = x + np.array(1.0)",
            "d": "x *= np.sqrt(64); y = x",
        },
        right="d",
        remarks={
            "a": (
                "`np.sqrt(64)` is an np.float64, and NumPy 2 lets its type count: y is float64. "
                "Many expect a single number not to matter, and in NumPy 1 it did not."
            ),
            "b": (
                "np.float64 says its type by name, and the array follows it: y is float64. "
                "A plain 0.125 would leave x's type alone."
            ),
            "c": (
                "`np.array(1.0)` has no axes, but it is a float64 array and counts as one: y is "
                "float64. The plain number 1.0 would leave x's type alone."
            ),
            "d": (
                "In place, the result must go into memory that exists, and that is float32. "
                "This is one more reason to write `S *= scale`."
            ),
        },
    ),
    Choice(
        id="q15",
        text=(
            "N doubles, d stays; forward and backward together. To rebuild P, one more matrix\n"
            "product is needed, and the bytes of P need not be stored. What happens to the share\n"
            "by which the matrix products grow, and to the bytes that are not stored?"
        ),
        options={
            "a": "The share stays the same; the bytes become 4 times as many.",
            "b": "The share doubles; the bytes become 4 times as many.",
            "c": "The share stays the same; the bytes double.",
            "d": "The share becomes 4 times as large, as all of attention does.",
        },
        right="a",
        remarks={
            "a": (
                "One product on top of six, at every N. What it saves is N x N. "
                "So the longer the sequence, the better the trade."
            ),
            "b": (
                "All products grow alike, with N x N x d, the extra one too. "
                "One on top of six stays one on top of six."
            ),
            "c": "P is N x N: twice the N is 4 times the bytes. Only L grows as N.",
            "d": (
                "The number of operations grows 4 times, for the extra product and for the other "
                "six. The share is their ratio."
            ),
        },
    ),
]
