"""Exercise 4: break the causal case on purpose, then repair it.

Algorithm 1 (FlashAttention, arXiv 2205.14135) visits the K/V blocks from first to last. With a
causal mask every row then meets key 0 first, which it sees. From last to first, a row may meet a
tile first in which all is hidden from it. `visit` is that loop, with a switch for each idea of
what repairs it.
"""

import functools
import math

import numpy as np

from attention_lib.checks.judge import observe
from attention_lib.checks.kinds import Choice, Mistake, Number, Probe, Program
from attention_lib.checks.programs import rounding
from attention_lib.reference import standard_attention
from attention_lib.tiled import blocks

GUARDS = "notebook 02, 'A chunk in which nothing is visible'"
CAUSAL = "notebook 03, 'Causal: tiles that are never computed'"
CORNERS = "notebook 03, 'Two corners for one mask'"
LINES = "notebook 03, 'Algorithm 1, line by line'"

N0, BR0, BC0 = 300, 64, 100  # the run that the exercise is about


def visit(Q, K, V, Br, Bc, guard_max=False, guard_l=False, hidden=-math.inf, keep_clamped=False,
          keep_one=False, skip_any=False, max_of_all=False, own_key=True, shift=None):  # fmt: skip
    """Algorithm 1, causal, K/V blocks from the last to the first; as it comes, it is broken.

    Returns O and l. Both guards on: right. The other switches are wrong ideas.
    """
    (Nq, d), Nk = Q.shape, len(K)
    offset = Nk - Nq if shift is None else shift
    O, l, m = np.zeros((Nq, d)), np.zeros(Nq), np.full(Nq, -math.inf)
    for cols in reversed(blocks(Nk, Bc)):
        for rows in blocks(Nq, Br):
            if cols.start > rows.stop - 1 + offset:
                continue
            i, j = np.arange(rows.start, rows.stop), np.arange(cols.start, cols.stop)
            seen = j[None, :] - i[:, None] <= offset - (not own_key)
            if skip_any and not seen.any(axis=1).all():
                continue
            S_all = Q[rows] @ K[cols].T / math.sqrt(d)
            S = np.where(seen, S_all, hidden)
            m_tile = (S_all if max_of_all else S).max(axis=1)
            m_new = np.maximum(m[rows], m_tile)
            safe = np.where(np.isneginf(m_new), 0.0, m_new) if guard_max else m_new
            P = np.exp(S - safe[:, None])
            old = np.exp(m[rows] - safe)
            l_new = old * l[rows] + P.sum(axis=1)
            l_safe = np.where(l_new == 0, 1.0, l_new) if guard_l else l_new
            O[rows] = ((old * l[rows])[:, None] * O[rows] + P @ V[cols]) / l_safe[:, None]
            l[rows] = l_safe if keep_one else l_new
            m[rows] = safe if keep_clamped else m_new
    return O, l


# ---------------------------------------------------------------- how many rows are NaN, and which


def broken_rows(N, Br, Bc):
    """The rows that really come out as NaN: the loop is run, and looked at."""
    return _broken_rows(
        N, Br, Bc
    )  # a call of a cached function is no call of Python code: not seen


@functools.cache
def _broken_rows(N, Br, Bc):
    x = np.random.default_rng(0).standard_normal((N, 1))
    with np.errstate(invalid="ignore"):
        O, _ = visit(x, x, x, Br, Bc)
    return np.flatnonzero(np.isnan(O[:, 0]))


def count_rows(N, Br, Bc, slip=None):
    """The rule, or a wrong one: in each Q block, the rows before the last K/V block that it meets.

    That block starts at the largest multiple of Bc that is not beyond the Q block's last row.
    """
    if slip == "none":
        return 0
    if slip == "every-row":
        return N
    if slip == "br-and-bc-swapped":
        return count_rows(N, Bc, Br)
    if slip == "rows-that-miss-the-last-block":
        return (N - 1) // Bc * Bc
    if slip == "any-boundary-counts":
        return sum(1 for start in range(Bc, N, Bc) if start % Br)
    total = 0
    for first in range(0, N, Br):
        last = (first + Br if slip == "last-block-full" else min(first + Br, N)) - 1
        start = last // Bc * Bc  # the first key of the last K/V block that is not skipped
        if slip == "first-boundary-only":
            start = min(-(-first // Bc) * Bc, start)
        hit = start > first
        n = max(0, min(start, N) - first)
        if slip == "whole-q-blocks":
            n = hit * (last + 1 - first)
        if slip == "rows-that-see-it":
            n = hit * (last + 1 - start)
        if slip == "off-by-one":
            n += hit
        if slip == "partly-hidden":  # all rows for which some key of that block is hidden
            n = sum(r < min(start + Bc, N) - 1 for r in range(first, last + 1))
        total += n
        if slip == "first-band-only" and n:
            break
    return total


def _count(id, says, read=CAUSAL):
    return Mistake(id, functools.partial(count_rows, slip=id), says, read)


def count_probes(seed):
    rng = np.random.default_rng(seed)
    fixed = [(300, 64, 100), (40, 16, 10), (1000, 64, 196), (300, 128, 100), (60, 25, 7),
             (41, 9, 20), (100, 40, 30), (64, 8, 16), (7, 10, 3), (1, 1, 1),
             (4096, 64, 196)]  # fmt: skip
    drawn = [tuple(map(int, rng.integers((1, 1, 1), (90, 40, 40)))) for _ in range(8)]
    return [
        Probe(f"N = {N}, Br = {Br}, Bc = {Bc}", {"N": N, "Br": Br, "Bc": Bc}, (0.0,))
        for N, Br, Bc in fixed + drawn
    ]


COUNT = Program(
    id="ex04-nan-rows",
    text="Write nan_rows(N, Br, Bc): how many rows of O the reversed loop turns into NaN.",
    outputs=("rows",),
    right=lambda N, Br, Bc: len(broken_rows(N, Br, Bc)),
    probes=count_probes,
    read=CAUSAL,
    mistakes=(
        _count(
            "none",
            "always 0? Skipped tiles do no harm. A tile that is hidden from some rows of its "
            "block is not skipped.",
        ),
        _count(
            "every-row",
            "you let every row fail. A NaN stays in its row: no row reads another row's O, l or m.",
        ),
        _count(
            "br-and-bc-swapped",
            "you took Br for Bc and Bc for Br. The rows go in blocks of Br, the keys in Bc.",
        ),
        _count(
            "rows-that-miss-the-last-block",
            "you counted the rows that see nothing of the last K/V block. Most of them skip it.",
        ),
        _count(
            "any-boundary-counts",
            "you counted the Q blocks that a K/V block begins in. The question is about rows.",
        ),
        _count(
            "last-block-full",
            "the last Q block may be short: its last row is min(i + Br, N) - 1.",
        ),
        _count(
            "first-boundary-only",
            "a Q block may hold the starts of several K/V blocks. The last one is met first.",
        ),
        _count(
            "whole-q-blocks",
            "you counted whole Q blocks. A row that sees the first key of its first tile is fine.",
        ),
        _count(
            "rows-that-see-it",
            "you counted the other rows of the block: those that do see a key of the first tile.",
        ),
        _count(
            "off-by-one",
            "one row too many in each band: the row of the tile's first key sees that key.",
        ),
        _count(
            "partly-hidden",
            "one visible key is enough. Only a row from which the whole tile is hidden fails.",
        ),
        _count(
            "first-band-only",
            "you stopped after the first band of rows. Every Q block can have its own.",
        ),
    ),
)

# ---------------------------------------------------------------- the repair


def right(Q, K, V, Br, Bc):
    """O and l by the definition, all keys at once."""
    O, S, _ = standard_attention(Q, K, V, causal=True)
    m = S.max(axis=1, initial=-math.inf)
    l = np.exp(S - np.where(np.isneginf(m), 0.0, m)[:, None]).sum(axis=1)
    return O, l


def repair_probes(seed):
    rng = np.random.default_rng(seed)

    def probe(says, Nq, Nk, Br, Bc, stage=0, rise=0.0, level=0.0, d=3):
        Q, K, V = (rng.standard_normal((n, d)) for n in (Nq, Nk, Nk))
        K[:, 0] = (level + rise * np.linspace(0, 1, Nk)) * math.sqrt(d) + 0.5 * K[:, 0]
        Q[:, 0] = 1 + 0.1 * rng.random(Nq)
        size = float((np.abs(Q) @ np.abs(K).T).max()) / math.sqrt(d)
        for_O, for_weight = rounding(2 * size, Nk, V)  # twice: the scores are sums of d products
        shape = f"{Nq} rows, {Nk} keys" if Nq != Nk else f"N = {Nq}"
        arguments = {"Q": Q, "K": K, "V": V, "Br": Br, "Bc": Bc}
        says = f"{shape}, Br = {Br}, Bc = {Bc}{says}"
        return Probe(says, arguments, (for_O, Nk * for_weight), stage)

    return [
        probe("", 12, 12, 4, 5),
        probe("", 12, 12, 4, 4),
        probe("", 14, 14, 6, 4),
        probe(": scores rise by 40", 12, 12, 4, 5, rise=40),
        probe(": scores fall by 40", 12, 12, 4, 5, rise=-40),
        probe(": all scores near -1000", 12, 12, 4, 5, level=-1000),
        probe("", 10, 10, 10, 3),
        probe("", 60, 60, 13, 20),
        probe("", 5, 12, 2, 5, stage=1),
        probe(": 3 rows see no key", 9, 6, 4, 4, stage=2),
        probe(": 5 rows see no key", 9, 4, 4, 3, stage=2),
    ]


def _repair(id, says, read=GUARDS, program=None, **switches):
    def run(Q, K, V, Br, Bc):
        return visit(Q, K, V, Br, Bc, **switches)

    return Mistake(id, program or run, says, read)


def _zero_at_the_end(both):
    def run(Q, K, V, Br, Bc):
        O, l = visit(Q, K, V, Br, Bc)
        return np.nan_to_num(O), np.nan_to_num(l) if both else l

    return run


class Watched(np.ndarray):
    """An array that notes, in `log`, each part of it that goes into a matrix product."""

    def __array_finalize__(self, parent):
        self.log = getattr(parent, "log", None)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        if ufunc is np.matmul:
            self._note(inputs)
        inputs = [_plain(x) for x in inputs]
        if out is not None:
            kwargs["out"] = tuple(_plain(x) for x in out)
        return getattr(ufunc, method)(*inputs, **kwargs)

    def __array_function__(self, function, types, args, kwargs):
        if function in (np.dot, np.einsum, np.inner, np.tensordot):
            self._note(args)
        return super().__array_function__(function, types, args, kwargs)

    def _note(self, parts):
        for part in parts:
            if isinstance(part, Watched) and part.log is not None:
                part.log.append(_plain(part).copy())


def _plain(x):
    return x.view(np.ndarray) if isinstance(x, Watched) else x


def forward_order(answer):
    """None, or the finding that the first keys to be multiplied were the first ones."""
    K = np.zeros((12, 2))
    K[:, 0] = np.arange(1, 13)  # a key tells by its value which one it is
    watched, log = K.view(Watched), []
    watched.log = log
    observe(answer, {"Q": np.ones((1, 2)), "K": watched, "V": np.ones((12, 2)), "Br": 1, "Bc": 4})
    keys = log[0][log[0] >= 1] if log else []
    if 0 < len(keys) < 12 and min(keys) == 1:
        return (
            "forward-order",
            "O is right, but your loop takes the first K/V block first. Reverse the order: the "
            "repair has to hold where a row's first tile is hidden from it.",
            CAUSAL,
        )
    return None


def big(seed):
    Q, K, V = np.random.default_rng(seed).standard_normal((3, 1024, 8))
    return {"Q": Q, "K": K, "V": V, "Br": 64, "Bc": 16}


REPAIR = Program(
    id="ex04-repair",
    text="Write flash_attention_reversed(Q, K, V, Br, Bc) -> O, l: causal attention in tiles,\n"
    "K/V blocks from the last to the first, right for every row.",
    outputs=("O", "l"),
    right=right,
    probes=repair_probes,
    read=GUARDS,
    library=frozenset({"blocks", "nothing_visible", "hide", "causal_offset"}),
    big=big,
    memory=lambda a: len(a["Q"]) * len(a["K"]),  # one byte an entry: less than a boolean mask
    claims=(forward_order,),
    mistakes=(
        _repair(
            "max-not-guarded",
            "l is NaN: -inf - (-inf) in the maximum. Skipping hidden tiles, or a guard on l alone, "
            "comes too late.",
        ),
        _repair(
            "max-guarded-only",
            "the guarded maximum made l right, and O is NaN still: after a hidden tile l is 0, and "
            "line 12 divides 0 by 0.",
            guard_max=True,
        ),
        _repair(
            "nan-made-0-at-the-end",
            "you put 0 where NaN was, at the end. These rows do see keys: their answer is not 0.",
            program=_zero_at_the_end(both=False),
        ),
        _repair(
            "nan-made-0-at-the-end",
            "you put 0 where NaN was, at the end. These rows do see keys: their answer is not 0.",
            program=_zero_at_the_end(both=True),
        ),
        _repair(
            "hidden-scores-0",
            "hidden scores are 0 in your loop, and exp(0 - m) is a weight. Hidden means -inf.",
            hidden=0.0,
            guard_max=True,
            guard_l=True,
        ),
        _repair(
            "clamped-max-kept",
            "you stored the clamped maximum. Then 0 is a maximum that the row never had: clamp a "
            "copy, for the exponents only.",
            guard_max=True,
            guard_l=True,
            keep_clamped=True,
        ),
        _repair(
            "tile-dropped",
            "you skip a tile as soon as one row sees nothing of it. Other rows of the block do.",
            CAUSAL,
            guard_max=True,
            guard_l=True,
            skip_any=True,
        ),
        _repair(
            "max-of-hidden-scores",
            "your maximum is taken over hidden scores too. Hide them first, then take the maximum.",
            guard_max=True,
            guard_l=True,
            max_of_all=True,
        ),
        _repair(
            "own-key-hidden",
            "query i does not see key i in your loop. Only j > i + Nk - Nq is hidden.",
            CORNERS,
            guard_max=True,
            guard_l=True,
            own_key=False,
        ),
        _repair(
            "upper-left",
            "with Nq and Nk different, the last query belongs to the last key: j <= i + Nk - Nq.",
            CORNERS,
            guard_max=True,
            guard_l=True,
            shift=0,
        ),
        _repair(
            "finite-mask",
            "a large negative number hides a key only beside a visible one. This row sees none: "
            "its weights came out equal, O is a mean of V.",
            hidden=-1e9,
        ),
        _repair(
            "l-kept-at-1",
            "you stored the guarded l. A row that has seen nothing has l = 0: guard the division "
            "only.",
            guard_max=True,
            guard_l=True,
            keep_one=True,
        ),
    ),
)

QUESTIONS = [
    Number(
        "ex04-count",
        f"N = {N0}, Br = {BR0}, Bc = {BC0}, causal, K/V blocks from the last to the first.\n"
        "How many rows of O come out as NaN?",
        "rows",
        truth=lambda: len(broken_rows(N0, BR0, BC0)),
        why="Two bands of rows, one in each Q block that a K/V block begins in.",
        hint="Go through the Q blocks. Which K/V block is the first one that is not skipped, and "
        "which rows of the block see no key of it?",
        tolerance=0.0,
        slips={
            "none": (
                lambda: 0,
                "Tiles that are hidden as a whole are skipped, yes. A tile that one row of the "
                "block sees is computed, for all its rows.",
            ),
            "every-row": (
                lambda: N0,
                "A NaN stays in its row: no row reads another row's O, l or m.",
            ),
            "rows-that-miss-the-last-block": (
                lambda: count_rows(N0, BR0, BC0, "rows-that-miss-the-last-block"),
                "These are all rows that see nothing of the last K/V block. Where the whole Q "
                "block sees nothing of it, the tile is skipped and does no harm.",
            ),
            "first-band-only": (
                lambda: count_rows(N0, BR0, BC0, "first-band-only"),
                "That is the first band. There is a second one: look at the last K/V block.",
            ),
            "second-band-only": (
                lambda: count_rows(N0, BR0, BC0) - count_rows(N0, BR0, BC0, "first-band-only"),
                "That is the band at the last K/V block. The middle one begins inside a Q block "
                "as well.",
            ),
            "whole-q-blocks": (
                lambda: count_rows(N0, BR0, BC0, "whole-q-blocks"),
                "You counted whole Q blocks. The rows that see a key of their first tile are fine.",
            ),
            "rows-that-see-it": (
                lambda: count_rows(N0, BR0, BC0, "rows-that-see-it"),
                "These are the other rows of the two blocks, those that see a key of their first "
                "tile.",
            ),
            "last-block-full": (
                lambda: count_rows(N0, BR0, BC0, "last-block-full"),
                "You let a K/V block begin at key 300, in the last Q block. There are keys 0 to "
                "299.",
            ),
            "off-by-one": (
                lambda: count_rows(N0, BR0, BC0, "off-by-one"),
                "One too many in each band: row 100 sees key 100.",
            ),
        },
    ),
    Number(
        "ex04-first",
        "The same run. Which row is the first that comes out as NaN? (Rows count from 0.)",
        "a row number",
        truth=lambda: int(broken_rows(N0, BR0, BC0)[0]),
        why="Q block 1 is rows 64 to 127. Its last row sees key 100, so the tile is computed, and "
        "rows 64 to 99 see nothing of it.",
        hint="Find the first Q block whose last row reaches into a K/V block that its first row "
        "does not reach.",
        tolerance=0.0,
        slips={
            "first-row": (
                lambda: 0,
                "Row 0 is in Q block 0, rows 0 to 63. It meets K/V block 0 only, and sees key 0.",
            ),
            "first-key-of-the-block": (
                lambda: BC0,
                "Row 100 sees key 100, the first of its first tile. The rows above it are the ones "
                "that see nothing.",
            ),
            "one-block-late": (
                lambda: int(broken_rows(N0, BR0, BC0)[-1]) // BR0 * BR0,
                "That is the first row of the second band. An earlier Q block has one too.",
            ),
        },
    ),
    Number(
        "ex04-last",
        "The same run. Which row is the last that comes out as NaN?",
        "a row number",
        truth=lambda: int(broken_rows(N0, BR0, BC0)[-1]),
        why="Q block 3 is rows 192 to 255. Its last row reaches K/V block 2, keys 200 to 299; rows "
        "192 to 199 see nothing of it.",
        hint="Which Q block holds the row where the last K/V block begins?",
        tolerance=0.0,
        slips={
            "first-band-only": (
                lambda: BC0 - 1,
                "That is the end of the first band. K/V block 2 makes another one.",
            ),
            "one-too-far": (
                lambda: 2 * BC0,
                "Row 200 sees key 200, so its first tile has something for it.",
            ),
            "end-of-the-q-block": (
                lambda: 4 * BR0 - 1,
                "That is the end of the Q block. Its last rows see keys of K/V block 2.",
            ),
            "last-row": (
                lambda: N0 - 1,
                "Row 299 sees every key, those of the last K/V block too.",
            ),
        },
    ),
    COUNT,
    Choice(
        "ex04-clamp",
        "Replace an infinite maximum by 0, and change nothing else. The loop that divides once, at "
        "the end, is then right for these rows. Algorithm 1 is not. Why?",
        {
            "a": "Algorithm 1 stores m in HBM, so that the next pass overwrites the clamped value",
            "b": "In Algorithm 1 the clamped maximum makes exp overflow",
            "c": "Algorithm 1 divides by l after every tile, and after the hidden one l is 0",
            "d": "The loop that divides once never meets a tile that is hidden from a row",
        },
        "c",
        {
            "a": "What is stored is -inf, in both loops, and should be: nothing was seen yet.",
            "b": "Hidden scores are -inf, and exp(-inf - 0) is 0. Nothing overflows.",
            "c": "0/0 is NaN, and the next step multiplies it by 0, which stays NaN. At the end "
            "of the row l is at least 1, so one division there is safe.",
            "d": "It meets the same tiles in the same order. It does not divide there.",
        },
    ),
    REPAIR,
    Choice(
        "ex04-finite",
        "A colleague hides scores with -1e9 in place of -inf, and the NaN is gone. Which row is "
        "now wrong without a warning?",
        {
            "a": "A row that sees no key at all: it gets a mean of V instead of 0",
            "b": "A row whose first tile is hidden: the -1e9 stays in its sum",
            "c": "None: exp(-1e9) is exactly 0",
            "d": "A row with one visible key: each hidden one takes a part of its weight",
        },
        "a",
        {
            "a": "Its maximum is -1e9 too, so each hidden score has exp(0) = 1, and all weights "
            "are equal.",
            "b": "When a visible key comes, the old part is multiplied by exp(-1e9 - m) = 0. It "
            "leaves nothing behind.",
            "c": "exp(-1e9) is 0. But the exponent is the score minus the row's maximum, and that "
            "can be -1e9 as well.",
            "d": "The visible key is the maximum, and exp(-1e9 - m) is exactly 0.",
        },
    ),
]
