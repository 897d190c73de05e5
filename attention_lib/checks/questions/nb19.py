"""Predictions and checkpoint questions of notebook 19, Hopper's instructions; and its open task."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.show import gpu_hopper

QUESTIONS = [
    Number(
        id="p19-1",
        text=(
            "A box has rows of 64 numbers of 2 bytes. TMA swizzles it. At which byte of the box\n"
            "does element (row 13, column 20) lie?"
        ),
        unit="bytes from the box's start",
        truth=lambda: gpu_hopper.land(13, 20),
        why="Row 13 begins at 1664. Column 20 is in piece 2; 2 XOR 5 = 7; and 8 bytes into it.",
        hint="Three parts: 128 bytes a row; the piece of 16 bytes, moved; the bytes inside it.",
        slips={
            "plain": (
                lambda: 128 * 13 + 2 * 20,
                "That is the place without the swizzle. Piece 2 moves to another place in the row.",
            ),
            "row-not-mod-8": (
                lambda: 128 * 13 + 16 * (2 ^ 13) + 8,
                "You took the XOR with 13. That leaves the row: the pattern repeats after 8 rows.",
            ),
            "elements": (
                lambda: gpu_hopper.land(13, 20) // 2,
                "Half of it: you counted numbers. Each has 2 bytes.",
            ),
        },
        tolerance=1e-6,
        slip_tolerance=1e-6,
    ),
    Number(
        id="p19-2",
        text=(
            "A tile begins at byte 16,384 of shared memory. wgmma multiplies 16 columns at a\n"
            "time. Which number stands in the address field for the second 16 columns?"
        ),
        unit="the field's value",
        truth=lambda: gpu_hopper.matrix(16_384 + 32) & 0x3FFF,
        why="16 columns are 32 bytes further on, and the field counts in 16 bytes.",
        hint="First the byte address: how many bytes are 16 numbers? Then the field's unit.",
        slips={
            "bytes": (
                lambda: 16_384 + 32,
                "That is the byte address. The field leaves its last four bits out.",
            ),
            "elements": (
                lambda: (16_384 + 16) >> 4,
                "You went on by 16 bytes. 16 numbers of 2 bytes are 32.",
            ),
            "one-row": (
                lambda: (16_384 + 128) >> 4,
                "That is the next row. The next columns lie in the same rows.",
            ),
        },
        tolerance=1e-6,
        slip_tolerance=1e-6,
    ),
    Number(
        id="p19-3",
        text=(
            "A has 300 rows and 72 columns. A block asks for the box of 128 rows and 64 columns\n"
            "that begins at row 256, column 64. How many bytes does the barrier count for it?"
        ),
        unit="bytes",
        truth=lambda: 128 * 64 * 2,
        why="The whole box arrives, zeros too. So each step expects the same number.",
        hint="What lies outside the tensor arrives as zeros. Does a zero arrive or not?",
        slips={
            "inside-only": (
                lambda: 44 * 8 * 2,
                "Those are the bytes inside the tensor. The zeros are written, and counted.",
            ),
            "rows-only": (
                lambda: 44 * 64 * 2,
                "You left out the rows outside, but not the columns. All of the box counts.",
            ),
            "elements": (lambda: 128 * 64, "Half: each number has 2 bytes."),
        },
    ),
    Choice(
        id="p19-4",
        text="Rung 6 against rung 5, N = 16,384, no mask. What does it bring?",
        options={
            "a": "about 1.5 times at d = 128, hardly anything at d = 64",
            "b": "about 1.5 times at both",
            "c": "hardly anything at d = 128, about 1.5 times at d = 64",
        },
        right="a",
        remarks={
            "a": "The products got faster, and at d = 128 there is twice as much of them a score.",
            "b": "wgmma helps the products alone. Are they the same share at both d?",
            "c": "Turn it around: each score costs one exp at any d, and 4d FLOP of products.",
        },
    ),
    Number(
        id="p19-5",
        text=(
            "wgmma reads its operands in shared memory. For one tile of 128 keys, d = 64, one\n"
            "warpgroup reads its 64 rows of Q, and K, and V, 2 bytes each number. How many passes\n"
            "of 128 bytes, if each operand is read once?"
        ),
        unit="passes",
        truth=lambda: gpu_hopper.operand_passes(64),
        why="64 + 128 + 128 rows of 128 bytes. P comes from registers.",
        hint="A row of d = 64 is one pass. Which rows are read?",
        slips={
            "without-Q": (
                lambda: 2 * 128,
                "You left out Q. It is in shared memory too, and is read again for each tile.",
            ),
            "both-warpgroups": (
                lambda: 2 * gpu_hopper.operand_passes(64),
                "That is two warpgroups. The question asks for one.",
            ),
            "P-too": (
                lambda: gpu_hopper.operand_passes(64) + 128,
                "You added P, 64 x 128. It is in registers.",
            ),
        },
    ),
    Number(
        id="p19-6",
        text=(
            "L2 and the SMs exchange sectors of 32 bytes. In rung 6 four lanes together store 16\n"
            "bytes in a row. If every such store crosses as a sector of its own, how many times\n"
            "the size of O crosses?"
        ),
        unit="times",
        truth=lambda: 32 / 16,
        why="Half of each sector is used. The counter will be below, if some stores join.",
        hint="How many useful bytes are in a sector of 32?",
        slips={
            "one-lane": (
                lambda: 32 / 4,
                "That is a sector for each lane. The four lanes of a row store side by side.",
            ),
            "full": (lambda: 1, "That is with full sectors. 16 bytes are half of one."),
        },
    ),
    Choice(
        id="q55",
        text="Why is one thread enough to load a tile on Hopper?",
        options={
            "a": "It runs the loop over the rows faster than 128 threads that must agree.",
            "b": "It only asks. A copy engine computes addresses, copies, and counts the bytes.",
            "c": "The tile is small enough for one thread's registers.",
        },
        right="b",
        remarks={
            "a": "There is no loop. One instruction names a box.",
            "b": "The tensor map says where rows lie, so a box needs four coordinates.",
            "c": "The bytes go to shared memory directly. No register sees them.",
        },
    ),
    Choice(
        id="q56",
        text=(
            "TMA wrote a tile with the 128-byte swizzle. The descriptor says swizzle 0, none.\n"
            "What does wgmma compute?"
        ),
        options={
            "a": "the right product: the hardware knows how the tile was written",
            "b": "the right product, with bank conflicts",
            "c": "a wrong product: it takes pieces of 16 bytes from wrong places",
        },
        right="c",
        remarks={
            "a": "Nothing in shared memory tells. Map and descriptor must say the same.",
            "b": "The addresses differ, not only the speed.",
            "c": "And nothing warns. Compare with numpy, on more than one shape.",
        },
    ),
    Choice(
        id="q57",
        text="What does rung 6 wait for most, at d = 64?",
        options={
            "a": "DRAM: K and V are read again by every block",
            "b": "shared memory: its operands take more passes than rung 5's fragments",
            "c": "itself: while softmax runs, the tensor cores of the SM have little to do",
        },
        right="c",
        remarks={
            "a": "K and V come from L2. DRAM sees them once.",
            "b": "It takes fewer: the counter fell.",
            "c": "Products at the peak plus exp are less than the time: parts take turns.",
        },
    ),
]


def check_decode(decode):
    """Judge decode(descriptor): a dict of address, lead, stride (bytes) and swizzle (code)."""
    from attention_lib.checks import NOT_ATTEMPTED, NOT_YET, PASSED, Result

    for address, lead in ((1024, 0), (16_384 + 96, 0), (2**18 - 1024, 16_384)):
        try:
            found = decode(gpu_hopper.matrix(address, lead))
        except Exception as error:
            return Result(NOT_YET, f"your function raised {type(error).__name__}: {error}")
        if found is ...:
            return Result(NOT_ATTEMPTED, "return a dict with address, lead, stride and swizzle.")
        right = {"address": address, "lead": lead, "stride": 1024, "swizzle": 1}
        if not isinstance(found, dict) or set(found) != set(right):
            return Result(NOT_YET, f"a dict with the keys {', '.join(right)} is wanted.")
        for name, value in right.items():
            if found[name] * 16 == value != 0:
                return Result(NOT_YET, f"{name} is 16 times too small: bytes.", "not-in-bytes")
            if found[name] != value:
                return Result(
                    NOT_YET,
                    f"matrix({address:,}, {lead:,}): your {name} is {found[name]}. Shift the field "
                    "to bit 0 first, then keep its bits only.",
                )
    return Result(PASSED, "every field of three descriptors.")
