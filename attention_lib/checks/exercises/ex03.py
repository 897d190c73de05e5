"""Exercise 3: the break-even SRAM of Algorithm 1, and why its tiles do not fit there."""

from functools import cache

import numpy as np

from attention_lib.checks.kinds import Choice, Mistake, Number, Probe, Program
from attention_lib.tiled import block_sizes
from attention_lib.traffic import flash_traffic, q_outer_traffic, standard_traffic, tile_elements

TERMS = "notebook 04, 'The formula, term by term'"
MORE_MEMORY = "notebook 04, 'What more memory buys'"
OTHER_ORDER = "notebook 04, 'The other order'"
THREE_KERNELS = "notebook 01, 'Three steps, three kernels'"
RULE = "notebook 03, 'Why the 4 in ceil(M / 4d)'"
OVER = 'notebook 06, "The paper\'s rule goes over its budget"'
BYTES = "notebook 06, 'Elements are not bytes'"


def smallest(wins, high):
    """The smallest M from 1 to high with wins(M), by bisection: once it wins, it wins for ever."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def break_even(N, d, *, Bc_of=None, whole_passes=True, K_and_V=True, per_row=None, standard=None,
               candidates=None):  # fmt: skip
    """The right search, with a switch for each wrong idea.

    Bc_of(M): the rule. per_row: what a pass moves for each of its N rows. standard: what standard
    attention moves. candidates: the M that are tried, or None for all.
    """
    Bc_of = Bc_of or (lambda M: block_sizes(M, d)[1])
    per_row = 3 * d + 4 if per_row is None else per_row
    standard = standard_traffic(N, d) if standard is None else standard

    def wins(M):
        passes = N / Bc_of(M)
        if whole_passes:
            passes = int(np.ceil(passes))
        return (2 * N * d if K_and_V else 0) + passes * per_row * N <= standard

    if candidates is None:
        return smallest(wins, 8 * d * N)
    return next(M for M in candidates if wins(M))


def right(N, d):
    """By the library's closed forms, which equal the counts of the loops."""
    return _right(N, d)  # a call of a cached function is no call of Python code: not seen


@cache
def _right(N, d):
    standard = standard_traffic(N, d)
    return smallest(lambda M: flash_traffic(N, d, *block_sizes(M, d)) <= standard, 4 * d * N)


@cache
def q_outer(N, d):
    standard = standard_traffic(N, d)
    return smallest(lambda M: q_outer_traffic(N, d, *block_sizes(M, d)) <= standard, 4 * d * N)


def five_tiles(M, d):
    """Elements of the K, V, Q, O and S tiles that the rule chooses."""
    Br, Bc = block_sizes(M, d)
    return tile_elements(Br, Bc, d) - 2 * Br


@cache
def fitting(N, d, statistics):
    """The smallest M that wins and whose tiles fit in M."""
    M = right(N, d)
    while five_tiles(M, d) + (2 * block_sizes(M, d)[0] if statistics else 0) > M:
        M += 1
    return M


@cache
def always_fits(d):
    """The smallest M from which on the rule's five tiles fit in every M."""
    overflows = [M for M in range(1, 16 * d * d) if five_tiles(M, d) > M]
    return overflows[-1] + 1


def probes(seed):
    rng = np.random.default_rng(seed)
    sizes = [(256, 8), (300, 16), (512, 64), (1000, 24), (4096, 8), (97, 40), (1024, 64)]
    while len(sizes) < 10:
        N, d = int(rng.integers(100, 2000)), int(rng.integers(4, 24))
        M = right(N, d)
        equal = flash_traffic(N, d, *block_sizes(M, d)) == standard_traffic(N, d)
        sizes += [] if equal else [(N, d)]  # "no more" and "less" then mean the same
    return [Probe(f"N = {N:,}, d = {d}", {"N": N, "d": d}, (0.0,)) for N, d in sizes]


def _mistake(id, says, read, *programs):
    return [Mistake(id, program, says, read) for program in programs]


def _powers(N, d):
    return (2**k for k in range(60))


BREAK_EVEN = Program(
    id="ex03-break-even",
    text="Write break_even(N, d) -> M: the smallest on-chip memory M, in elements, with which\n"
    "Algorithm 1 and its rule for Bc move no more than standard attention does.",
    outputs=("M",),
    right=right,
    probes=probes,
    read=MORE_MEMORY,
    # What a call of block_sizes, flash_traffic or standard_traffic calls in turn is allowed too.
    library=frozenset(
        "block_sizes flash_traffic standard_traffic _check _offset "
        "check_positive_int check_int check_bool check_choice".split()
    ),
    mistakes=(
        *_mistake(
            "Bc-rounded-down",
            "you round Bc down, or try multiples of 4d only. The rule is Bc = ceil(M / 4d): one "
            "element beyond a multiple gives a row more.",
            RULE,
            lambda N, d: break_even(N, d, Bc_of=lambda M: M // (4 * d) or 1e-9),
        ),
        *_mistake(
            "Bc-not-rounded",
            "your Bc is a fraction, M / 4d. A block has whole rows: the rule takes ceil.",
            RULE,
            lambda N, d: break_even(N, d, Bc_of=lambda M: M / (4 * d)),
        ),
        *_mistake(
            "passes-not-rounded",
            "your number of passes is a fraction, N / Bc. The last pass is a whole pass: "
            "Tc = ceil(N / Bc).",
            TERMS,
            lambda N, d: break_even(N, d, whole_passes=False),
        ),
        *_mistake(
            "nothing-rounded",
            "you round neither Bc nor the number of passes. Both are ceil: of M / 4d, and of "
            "N / Bc.",
            TERMS,
            lambda N, d: break_even(N, d, Bc_of=lambda M: M / (4 * d), whole_passes=False),
        ),
        *_mistake(
            "asymptotic",
            "that is the formula for long N, without its rounding. Compare the exact counts.",
            MORE_MEMORY,
            lambda N, d: 3 * d * d + 4 * d,
            lambda N, d: 3 * d * d + 4 * d + 1,
            lambda N, d: 3 * d * d,
            lambda N, d: 3 * d * d + 1,
        ),
        *_mistake(
            "order-without-constants",
            "you compare N^2 d^2 / M with N^2. An order of growth leaves the constants out, about "
            "12 and 4 here.",
            MORE_MEMORY,
            lambda N, d: d * d,
            lambda N, d: d * d + 1,
        ),
        *_mistake(
            "one-short",
            "one too small: your M is the last with which Algorithm 1 moves more.",
            MORE_MEMORY,
            lambda N, d: right(N, d) - 1,
        ),
        *_mistake(
            "one-over",
            "one too large: your M - 1 is enough already. Where does your search stop?",
            MORE_MEMORY,
            lambda N, d: right(N, d) + 1,
        ),
        *_mistake(
            "bytes",
            "you return bytes. M counts elements, as Bc = ceil(M / 4d) does.",
            BYTES,
            lambda N, d: 2 * right(N, d),
        ),
        *_mistake(
            "only-N-squared",
            "you compare with 4N^2. Standard attention moves Q, K, V and O as well: 4Nd more.",
            THREE_KERNELS,
            lambda N, d: break_even(N, d, standard=4 * N * N),
        ),
        *_mistake(
            "S-and-P-once",
            "you count S and P once each. Each is written by one kernel and read by the next: "
            "4N^2.",
            THREE_KERNELS,
            lambda N, d: break_even(N, d, standard=4 * N * d + 2 * N * N),
        ),
        *_mistake(
            "K-and-V-forgotten",
            "your count of Algorithm 1 has no K and V: they are read once, 2Nd.",
            TERMS,
            lambda N, d: break_even(N, d, K_and_V=False),
        ),
        *_mistake(
            "l-and-m-forgotten",
            "your pass has no l and m: each is read and written in each pass, 4N in all.",
            TERMS,
            lambda N, d: break_even(N, d, per_row=3 * d),
        ),
        *_mistake(
            "O-not-read-back",
            "your pass writes O but does not read it. Algorithm 1 reads Q, reads O and writes O: "
            "3Nd.",
            TERMS,
            lambda N, d: break_even(N, d, per_row=2 * d + 4),
        ),
        *_mistake(
            "powers-of-two",
            "you try powers of two only. Any whole number of elements may be M.",
            MORE_MEMORY,
            lambda N, d: break_even(N, d, candidates=_powers(N, d)),
        ),
        *_mistake(
            "q-outer",
            "that is the break-even of the swapped order. Algorithm 1 has K and V outside, and "
            "reads Q, O, l and m again.",
            OTHER_ORDER,
            q_outer,
        ),
        *_mistake(
            "tiles-must-fit",
            "you also ask that the tiles fit in M. That is a later question; here only the "
            "traffic counts.",
            OVER,
            lambda N, d: fitting(N, d, statistics=False),
            lambda N, d: fitting(N, d, statistics=True),
        ),
    ),
)

N, D, WIDE = 4096, 64, 128

QUESTIONS = [
    Number(
        id="ex03-smallest",
        text="N = 4096, d = 64. Algorithm 1 takes Bc = ceil(M / 4d). Which is the smallest M, in\n"
        "elements, with which it moves no more than standard attention?",
        unit="elements, exact",
        truth=lambda: right(N, D),
        why="84 passes are allowed, so Bc = 49 is needed, and 4d * 48 + 1 elements give it.",
        hint="Three steps: how many passes may it be at most, which Bc gives so few, and which "
        "is the smallest M whose ceil(M / 4d) is that Bc?",
        tolerance=0.0,
        slips={
            "one-short": (
                lambda: right(N, D) - 1,
                "12,288 is 4d * 48: it still gives Bc = 48 and 86 passes. One element more, and "
                "ceil gives 49.",
            ),
            "Bc-rounded-down": (
                lambda: 4 * D * block_sizes(right(N, D), D)[1],
                "49 rows of four tiles do take that many. But the rule is ceil(M / 4d): it gives "
                "Bc = 49 earlier. (The formula for long N, 3d^2 + 4d, is the same number here.)",
            ),
            "bytes": (
                lambda: 2 * right(N, D),
                "That is in bytes, at 2 each. M counts elements.",
            ),
            "power-of-two": (
                lambda: 2**14,
                "That is the first power of two that is enough. M may be any whole number.",
            ),
            "q-outer": (
                lambda: q_outer(N, D),
                "That is the break-even of the swapped order, with Q outside. Algorithm 1 reads "
                "Q, O, l and m in each pass.",
            ),
            "d-squared": (
                lambda: D * D,
                "That is d^2: where N^2 d^2 / M meets N^2. The orders of growth leave constants "
                "out; the exact counts have them.",
            ),
            "S-and-P-once": (
                lambda: break_even(N, D, standard=4 * N * D + 2 * N * N),
                "You gave standard attention 2N^2. S and P are written and read: 4N^2.",
            ),
        },
    ),
    Number(
        id="ex03-bytes",
        text="How many bytes is that M, at 2 bytes an element?",
        unit="bytes",
        truth=lambda: 2 * right(N, D),
        why="24.6 kB, or 24.0 KiB: about a quarter of 100 KB.",
        hint="Take the M that passed the check above, times 2.",
        tolerance=0.0,
        slips={
            "elements": (
                lambda: right(N, D),
                "That is the number of elements. Each takes 2 bytes.",
            ),
            "four-bytes": (
                lambda: 4 * right(N, D),
                "You took 4 bytes an element: that is fp32. The question has 2.",
            ),
            "from-12288": (
                lambda: 2 * (right(N, D) - 1),
                "That is twice 12,288, which is one element short.",
            ),
            "in-kB": (
                lambda: 2 * right(N, D) / 1000,
                "That is in kB. The question asks for bytes.",
            ),
            "in-KiB": (
                lambda: 2 * right(N, D) / 1024,
                "That is in KiB, 1024 bytes each. The question asks for bytes.",
            ),
        },
    ),
    BREAK_EVEN,
    Number(
        id="ex03-wide",
        text="N = 4096 again, but heads of d = 128. What is the smallest M now?",
        unit="elements, exact",
        truth=lambda: right(N, WIDE),
        why="About 3d^2: twice the width needs four times the memory. It is 97 KiB at 2 bytes "
        "an element.",
        hint="Call your break_even, or go through the same three steps by hand.",
        tolerance=0.0,
        slips={
            "one-short": (
                lambda: right(N, WIDE) - 1,
                "49,664 gives Bc = 97 and 43 passes, one too many. (It is also 3d^2 + 4d, the "
                "formula for long N.)",
            ),
            "Bc-rounded-down": (
                lambda: 4 * WIDE * block_sizes(right(N, WIDE), WIDE)[1],
                "98 rows of four tiles take that many, but ceil(M / 4d) is 98 earlier.",
            ),
            "four-times": (
                lambda: 4 * right(N, D),
                "You took four times the M of d = 64. The leading term does grow so; the rest, and "
                "the rounding, do not.",
            ),
            "twice": (
                lambda: 2 * right(N, D),
                "Twice the width is not twice the memory: the rows are longer, and Bc has to be "
                "twice as large as well.",
            ),
            "bytes": (
                lambda: 2 * right(N, WIDE),
                "That is in bytes, at 2 each. M counts elements.",
            ),
        },
    ),
    Choice(
        id="ex03-typical",
        text="The FlashAttention paper takes M to be around 100 KB, many times d^2 for d of 64 to\n"
        "128, and concludes that it needs many times fewer accesses. For d = 128 and this\n"
        "algorithm, what do your numbers say? (100 KB at 2 bytes: M = 50,000.)",
        options={
            "a": "About 3 times fewer accesses: M / d^2 is 3.05 at d = 128.",
            "b": "About 4 times fewer, as at d = 64.",
            "c": "Hardly any fewer: 100 KB is just above the break-even.",
            "d": "More accesses than standard attention.",
        },
        right="c",
        remarks={
            "a": "M / d^2 is 3.05, and the order of growth has a constant of its own, about 12 "
            "against 4. Three times too optimistic is what it makes.",
            "b": "Twice the width makes rows twice as long and blocks half as high: a quarter of "
            "the gain.",
            "c": "49,665 of 50,000. It moves 1.02 times less. At d = 64 the same memory gives 3.9 "
            "times less.",
            "d": "Below 49,665 it would. 50,000 is above it, if only by 335 elements.",
        },
    ),
    Number(
        id="ex03-need",
        text="d = 64 again, and the smallest M of the first question. The whole rule is\n"
        "Bc = ceil(M / 4d), Br = min(Bc, d). How many elements do the five tiles K, V, Q, O and\n"
        "S take together? (S is turned into P in place; leave l and m out.)",
        unit="elements, exact",
        truth=lambda: five_tiles(right(N, D), D),
        why="Four tiles of 49 x 64 and one of 49 x 49: more than M.",
        hint="Work out Bc and Br first. K and V have Bc rows, Q and O have Br rows, S is Br x Bc.",
        tolerance=0.0,
        slips={
            "S-forgotten": (
                lambda: 4 * 49 * D,
                "That is K, V, Q and O. The score tile is on chip as well: Br x Bc.",
            ),
            "l-and-m-counted": (
                lambda: tile_elements(49, 49, D),
                "You counted l and m, 2 Br elements. They do take room; the question leaves them "
                "out.",
            ),
            "S-and-P": (
                lambda: 4 * 49 * D + 2 * 49 * 49,
                "You gave S and P a tile each. P takes the place of S.",
            ),
            "Br-is-d": (
                lambda: 2 * 49 * D + 2 * D * D + 49 * D,
                "You took Br = d. The rule is the smaller of Bc and d, and Bc is 49.",
            ),
            "the-budget": (
                lambda: right(N, D),
                "That is M itself. Add up the tiles: they need not be as large as the budget.",
            ),
        },
    ),
    Number(
        id="ex03-fits",
        text="d = 64. From which M on do the five tiles of the rule always fit in M?\n"
        "(Within 2%: what rounding adds may be left out.)",
        unit="elements",
        truth=lambda: always_fits(D),
        why="8d^2, and a little for the rounding of Bc. At d = 64 that is 64 KiB; at d = 128 it "
        "is 256 KiB.",
        hint="Let M = 4d Bc, so that nothing is rounded, and Bc above d, so that Br = d. Write the "
        "sum of the five tiles with Bc and d. When is it at most M?",
        tolerance=0.02,
        slips={
            "the-need-is-the-answer": (
                lambda: five_tiles(right(N, D), D),
                "With a larger M the rule makes larger tiles. At M = 14,945 they need "
                f"{five_tiles(14_945, D):,}.",
            ),
            "end-of-square-blocks": (
                lambda: 4 * D * D,
                "At 4d^2 the block is d x d, and the five tiles take 5d^2. From here on Br stays, "
                "so the sum grows more slowly than M: it needs some more.",
            ),
            "worst-need": (
                lambda: 5 * D * D,
                "5d^2 is what the tiles take at M = 4d^2. At M = 5d^2 they take more than that.",
            ),
            "bytes": (
                lambda: 16 * D * D,
                "That is in bytes, at 2 each.",
            ),
        },
    ),
    Choice(
        id="ex03-trap",
        text="At the break-even M the tiles of the rule do not fit in M. What follows?",
        options={
            "a": "The rule's tiles are of the order of M, not at most M: such a chip needs other "
            "blocks.",
            "b": "The count of the traffic is wrong for that M, since the loop cannot run.",
            "c": "Nothing: S is never written to HBM, so it needs no room.",
            "d": "Break-even is at 14,945 elements, where there is room for the tiles that the "
            "rule made for M.",
        },
        right="a",
        remarks={
            "a": "The traffic depends on Bc alone. Whether a chip can hold the blocks is a second "
            "question, and with a smaller Br the answer is yes.",
            "b": "The count is that of a loop with Bc = 49, and it is right for any chip that "
            "holds its tiles. It is the budget that is too small for these blocks.",
            "c": "It is not written, it is on chip: that is where it needs the room.",
            "d": "The rule makes larger tiles for a larger M, so they do not fit in 14,945 either. "
            "With blocks of your own, less than that is enough.",
        },
    ),
]
