"""Predictions and checkpoint questions of notebook 16, the hardware's counters."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.gpu import ladder
from attention_lib.gpu.counters import predicted_dram

HEADS = 16
GB, MB = 1e9, 1e6


def _unfused(N=16_384, d=64):
    return predicted_dram(ladder.rung("unfused"), N, HEADS, d) / GB


def _arrays(count, N=4096, d=64, heads=HEADS):
    """MB of `count` arrays of N x d, in float16."""
    return 2 * count * N * d * heads / MB


def _loop(Br, N=16_384, d=64):
    """GB that the loop with Q outside moves, with blocks of Br rows."""
    return (2 * HEADS * (2 * N * d + -(-N // Br) * 2 * N * d) + 4 * HEADS * N) / GB


def _state(element_bytes=4, heads=HEADS, N=4096, d=128):
    """MB of O, l and m."""
    return element_bytes * heads * N * (d + 2) / MB


QUESTIONS = [
    Number(
        id="p16-1",
        text=(
            "Rung 0 has three kernels. S and P are N x N and go through HBM. N = 16,384,\n"
            "16 heads, d = 64, 2 bytes an element. How many GB cross between L2 and DRAM, reads\n"
            "and writes together? (1 GB is 10^9 bytes.)"
        ),
        unit="GB",
        truth=_unfused,
        why="4N² + 4Nd elements a head. The four crossings of N x N are 99.6% of it.",
        hint="Four crossings of N x N a head: S out and in, P out and in. Then 2 bytes each.",
        slips={
            "elements": (
                lambda: _unfused() / 2,
                "Half. You counted elements, or each of S and P only one way.",
            ),
            "one-head": (lambda: _unfused() / HEADS, "That is one head. There are 16."),
            "one-crossing": (
                lambda: _unfused() / 4,
                "A quarter: N x N once. S is written and read, and so is P.",
            ),
        },
    ),
    Number(
        id="p16-2",
        text=(
            "Now a fused rung: N = 4096, 16 heads, d = 64. How many MB are read from DRAM, if L2\n"
            "serves every repeat? Only reads. (1 MB is 10^6 bytes.)"
        ),
        unit="MB",
        truth=lambda: _arrays(3),
        why="Q, K and V, once each: 3Nd elements a head. O is not read.",
        hint="Which arrays does it read? How often, if a repeat never gets past L2?",
        slips={
            "O-too": (lambda: _arrays(4), "You counted four arrays. O is written, not read."),
            "one-head": (lambda: _arrays(3, heads=1), "That is one head. There are 16."),
            "loop": (
                lambda: 1000 * _loop(64, 4096),
                "You let every load of the loop reach DRAM. Here L2 serves the repeats.",
            ),
        },
    ),
    Choice(
        id="p16-3",
        text=(
            "The same run ends by storing O, 8.4 MB. How much is written to DRAM before the\n"
            "kernel ends? The L2 holds 60 MiB."
        ),
        options={
            "a": "8.4 MB: what a kernel stores is in DRAM when it ends",
            "b": "clearly less: part of O is still in L2",
            "c": "clearly more: O is written once for each tile",
            "d": "nothing: 8.4 MB fit in L2 with room to spare",
        },
        right="b",
        remarks={
            "a": "A store is done when L2 has it. L2 writes to DRAM later, when it likes.",
            "b": "L2 writes behind. The count below shows how much it still held.",
            "c": "That is Algorithm 1. With Q outside a block stores its rows of O once.",
            "d": "A good guess. But L2 does not wait until it is full: it begins to write early.",
        },
    ),
    Number(
        id="p16-4",
        text=(
            "Rung 5, d = 64: a block takes 128 rows of Q and passes over all of K and V.\n"
            "N = 16,384, 16 heads. How many GB go in and out of the SMs?"
        ),
        unit="GB",
        truth=lambda: _loop(128),
        why="Tr = 128 passes over K and V, 2Nd elements each; Q and O once are 1% of it.",
        hint="How many blocks does a head have? Each reads all of K and all of V.",
        slips={
            "Br-64": (lambda: _loop(64), "Twice too much: blocks of 64 rows. Rung 5 has 128."),
            "K-alone": (
                lambda: (2 * HEADS * (2 + 128) * 16_384 * 64) / GB,
                "Half. K and V both pass, 2Nd elements each time.",
            ),
            "each-once": (
                lambda: _arrays(4, 16_384) / 1000,
                "That is each array once: what DRAM sees. The SMs ask again for every block.",
            ),
        },
    ),
    Number(
        id="p16-5",
        text=(
            "Rung 1 is Algorithm 1. Between two K/V blocks O, l and m of every row wait outside\n"
            "the chip, in float32. N = 4096, 16 heads, d = 128. How many MB are that?"
        ),
        unit="MB",
        truth=_state,
        why="N(d + 2) numbers a head, 4 bytes each. In every pass all of it is read and written.",
        hint="How many numbers does a row keep? How many rows are there, in all heads?",
        slips={
            "16-bit": (
                lambda: _state(2),
                "Half. O is kept in float32: a 16-bit O would be rounded in every pass.",
            ),
            "one-head": (lambda: _state(heads=1), "One head. All 16 are under way together."),
            "both-ways": (
                lambda: 2 * _state(),
                "You counted read and write. The question is how much has to stay somewhere.",
            ),
        },
        tolerance=0.017,
    ),
    Choice(
        id="p16-6",
        text=(
            "One head, d = 128, N = 65,536. K and V have 33.6 MB. L2 has 62.9 MB. Two waves of\n"
            "blocks run one after the other, and each wave needs all of K and V. How often are K\n"
            "and V read from DRAM?"
        ),
        options={
            "a": "once: 33.6 MB fit in 62.9 MB",
            "b": "twice: once for each wave",
            "c": "512 times: once for each block of Q",
        },
        right="b",
        remarks={
            "a": "So says the size of L2. The counter says otherwise: see below.",
            "b": "The second wave finds nothing left of the first. Why, is the question below.",
            "c": "That is what the SMs ask for. The blocks of a wave run side by side and share.",
        },
    ),
    Number(
        id="p16-7",
        text=(
            "Shared memory has 32 banks of 4 bytes. A tile of rung 3 has d = 64, so its rows are\n"
            "128 bytes apart. ldmatrix takes 16 bytes from each of eight rows, all in the same\n"
            "column. One pass serves each bank once. How many passes for these 128 bytes?"
        ),
        unit="passes",
        truth=lambda: 8,
        why="All eight pieces begin in the same bank, so each pass serves one row.",
        hint="In which banks does row 0 lie? And row 1, 128 bytes further on?",
        slips={
            "no-conflict": (
                lambda: 1,
                "One pass would do if the rows lay in different banks. 128 bytes further on is "
                "the same bank again.",
            ),
            "each-lane": (
                lambda: 32,
                "You let every 4 bytes wait. The four banks of one row are served together.",
            ),
        },
    ),
    Choice(
        id="q46",
        text=(
            "A profiler shows 0.13 GB at DRAM for a fused kernel. The loop on paper moves 8.7 GB.\n"
            "Which is the first thing to look at?"
        ),
        options={
            "a": "the formula: it is 65 times too large",
            "b": "the counter between the SMs and L2",
            "c": "the clock of the memory",
            "d": "whether the kernel skipped tiles",
        },
        right="b",
        remarks={
            "a": "Perhaps it is right, for another place. Where does the loop's load go first?",
            "b": "The loop loads from L2 for the most part. There the count should be found.",
            "c": "A clock changes times. It does not change bytes.",
            "d": "A good check. But without a mask no tile may be skipped.",
        },
    ),
    Choice(
        id="q47",
        text=(
            "You take rung 4 and copy its tiles with ordinary loads again, which may use L1. The\n"
            "swizzle stays, and so do blocks and tiles. N = 16,384, d = 64. Which number falls?"
        ),
        options={
            "a": "the DRAM reads: L1 is one more cache",
            "b": "the bytes between L2 and the SMs",
            "c": "the passes through shared memory",
            "d": "none: the loop is the same",
        },
        right="b",
        remarks={
            "a": "Those are at 3Nd already: L2 catches the repeats. What lies before L2?",
            "b": "Blocks on one SM then share in L1, as in rung 3. The counter lies behind L1.",
            "c": "They depend on where a piece lies in shared memory, not on how it came there.",
            "d": "The loop asks for the same. But who answers? Compare rungs 3 and 4.",
        },
    ),
    Choice(
        id="q48",
        text=(
            "So far each doubling of N doubled the DRAM bytes of a fused kernel. The next one\n"
            "brings four times as many. What is the likeliest reason?"
        ),
        options={
            "a": "FlashAttention is quadratic in N, so four times is expected",
            "b": "the S matrix has begun to spill to HBM",
            "c": "K and V have outgrown L2: each wave of blocks reads them from DRAM",
            "d": "bank conflicts",
        },
        right="c",
        remarks={
            "a": "The loop's count is. But why then only twofold before?",
            "b": "A fused kernel has no S matrix to spill.",
            "c": "Twice the bytes for each wave of blocks, and twice as many waves.",
            "d": "Those cost passes through shared memory. DRAM does not see them.",
        },
    ),
]
