"""Exercise 1: online softmax from scratch, and the merge of two partial results."""

import math

import numpy as np

from attention_lib import online
from attention_lib.checks.judge import observe
from attention_lib.checks.kinds import Choice, Mistake, Probe, Program
from attention_lib.checks.programs import rounding

RESCALE = "notebook 02, 'Carry two numbers: m and l'"
OUTPUT = "notebook 02, 'The output is carried the same way'"
GUARDS = "notebook 02, 'A chunk in which nothing is visible'"
MERGE = "notebook 02, 'Merge: one operation behind all of it'"


def attend(S, V, chunk, *, m_start=-math.inf, use_max=True, frozen=False, chunk_max=False,
           l_power=1.0, O_power=1.0, each_chunk=False, divide=True, lse=True, guard=True,
           drop_ragged=False, from_first=False, empty_L=None):  # fmt: skip
    """The right loop, with a switch for each wrong idea. Returns O and L."""
    m = np.full(len(S), m_start)
    l, O = np.zeros(len(S)), np.zeros((len(S), V.shape[1]))
    end = len(V) - len(V) % chunk if drop_ragged else len(V)
    for k in range(0, end, chunk):
        s, v = S[:, k : k + chunk], V[k : k + chunk]
        m_old = m
        if use_max and not (frozen and k):
            m = s.max(axis=1) if chunk_max else np.maximum(m, s.max(axis=1))
        if not use_max:
            m = np.zeros(len(S))
        safe = np.where(np.isneginf(m), 0.0, m) if guard else m
        p = np.exp(s - safe[:, None])
        alpha = np.where(l == 0, 0.0, np.exp(m_old - safe)) if guard else np.exp(m_old - safe)
        if from_first and not k:  # the first chunk is taken without any factor
            alpha = np.ones(len(S))
        l = (alpha**l_power if l_power else 1.0) * l + p.sum(axis=1)
        O = (alpha[:, None] ** O_power if O_power else 1.0) * O + p @ v
        if each_chunk:
            O = O / l[:, None]
    l_safe = np.where(l == 0, 1.0, l) if guard else l
    O = O / l_safe[:, None] if divide and not each_chunk else O
    L = np.log(l_safe) + (m if lse else 0.0)
    return O, L if empty_L is None else np.where(l == 0, empty_L, L)


def right(S, V, chunk):
    """All keys at once, in the library: the answer for any chunk."""
    state = online.update(online.start(len(S), V.shape[1]), S, V)
    return online.finish(state)


def probes(seed):
    rng = np.random.default_rng(seed)

    def probe(says, S, keys, chunk, stage=0, d=3):
        V = rng.standard_normal((keys, d))
        size = float(np.abs(S[np.isfinite(S)]).max(initial=0.0))
        return Probe(says, {"S": S, "V": V, "chunk": chunk}, rounding(size, keys, V), stage)

    plain = rng.standard_normal((3, 12)) * 3
    ramp = np.linspace(0, 40, 12) + rng.random((3, 12))
    hidden = ramp.copy()  # rising, so that a wrong rescale shows here too
    hidden[0, :4] = -np.inf  # nothing visible in the first chunk
    hidden[1, 4:8] = -np.inf
    empty = hidden.copy()
    empty[2] = -np.inf
    return [
        probe("3 rows, 12 keys, chunks of 4", plain, 12, 4),
        probe("the maximum rises by 40 along the row", ramp, 12, 4),
        probe("the maximum comes first and falls by 40", ramp[:, ::-1].copy(), 12, 4),
        probe("the maximum rises by 2400 along the row", 60 * ramp, 12, 4),
        probe("the maximum comes first and falls by 2400", 60 * ramp[:, ::-1], 12, 4),
        probe("10 keys in chunks of 4: the last chunk is short", ramp[:, 2:], 10, 4),
        probe("all scores near -1000", plain - 1000, 12, 4),
        probe("scores near 800: exp of them overflows", plain + 800, 12, 4),
        probe("one chunk holds all keys", plain, 12, 12),
        probe("chunks of 1", ramp, 12, 1),
        probe("whole chunks are hidden (-inf) from some rows", hidden, 12, 4, 1),
        probe("one row sees no key at all: O = 0, L = -inf", empty, 12, 4, 1),
    ]


def one_chunk_at_a_time(answer):
    """The claim behind the chunks: no array as large as all scores. (One copy of S may be made.)"""
    rng = np.random.default_rng(0)
    S, V = rng.standard_normal((4, 4096)), rng.standard_normal((4096, 2))
    seen = observe(answer, {"S": S, "V": V, "chunk": 64}, measure=True)
    if seen.error or seen.timed_out:
        problem = seen.error or "it did not end in time"
        return None, f"with 4,096 keys in chunks of 64 your code fails: {problem}", RESCALE
    if seen.peak <= 1.5 * S.nbytes:
        return None
    text = (
        f"right numbers, but from all keys at once: {seen.peak / S.nbytes:.1f} times the size of S "
        "is allocated. Take `chunk` keys at a time."
    )
    return "all-keys-at-once", text, RESCALE


def _mistake(id, says, read, *variants):
    """One idea may be written in several ways that give different numbers: one Mistake for each."""

    def program(switches):
        return lambda S, V, chunk: attend(S, V, chunk, **switches)

    return [Mistake(id, program(switches), says, read) for switches in variants]


ATTEND = Program(
    id="ex01-attend",
    text="Write attend(S, V, chunk) -> O, L: softmax(S) @ V and the log-sum-exp of each row of S,\n"
    "taking `chunk` keys at a time and never looking back.",
    outputs=("O", "L"),
    right=right,
    probes=probes,
    read=OUTPUT,
    mistakes=(
        *_mistake(
            "no-max",
            "you take exp of the bare scores: no maximum is subtracted.",
            "notebook 02, 'A row needs its largest score and its sum'",
            {"use_max": False},
            {"use_max": False, "guard": False},
            {"use_max": False, "empty_L": -math.inf},
        ),
        *_mistake(
            "max-starts-at-0",
            "your running maximum starts at 0, a score that the row may never have. Start at -inf.",
            RESCALE,
            {"m_start": 0.0},
            {"m_start": 0.0, "guard": False},
        ),
        *_mistake(
            "max-of-first-chunk",
            "your maximum is the first chunk's for ever; later chunks may be larger.",
            RESCALE,
            {"frozen": True},
        ),
        *_mistake(
            "max-of-this-chunk",
            "your new maximum is this chunk's alone. Take the larger of it and the old one.",
            RESCALE,
            {"chunk_max": True},
        ),
        *_mistake(
            "nothing-rescaled",
            "neither l nor O is rescaled when the maximum rises.",
            RESCALE,
            {"l_power": 0, "O_power": 0},
        ),
        *_mistake(
            "O-not-rescaled",
            "l is rescaled when the maximum rises, O is not. Both hold old exponentials.",
            OUTPUT,
            {"O_power": 0},
        ),
        *_mistake(
            "l-not-rescaled",
            "O is rescaled when the maximum rises, l is not. Both hold old exponentials.",
            OUTPUT,
            {"l_power": 0},
        ),
        *_mistake(
            "rescale-inverted",
            "your rescale factor is upside down: it is e^(m_old - m_new), at most 1.",
            RESCALE,
            {"l_power": -1, "O_power": -1},
            {"l_power": -1, "O_power": -1, "from_first": True},
        ),
        *_mistake(
            "normalised-in-each-chunk",
            "you divide by l in every chunk, so O no longer is the sum that l belongs to.",
            OUTPUT,
            {"each_chunk": True},
        ),
        *_mistake(
            "never-divided",
            "O is the un-scaled sum: divide by l once, at the end.",
            OUTPUT,
            {"divide": False},
        ),
        *_mistake(
            "L-without-m",
            "L is log(l) alone. The sum was taken relative to m, so L = m + log(l).",
            MERGE,
            {"lse": False},
        ),
        *_mistake(
            "last-chunk-lost",
            "the last, shorter chunk is never visited.",
            RESCALE,
            {"drop_ragged": True},
        ),
        *_mistake(
            "no-guard",
            "-inf - (-inf) is NaN: guard the maximum and the division of a row with nothing seen.",
            GUARDS,
            {"guard": False},
        ),
    ),
    library=frozenset(),
    claims=(one_chunk_at_a_time,),
)


def merge(m1, l1, O1, m2, l2, O2, *, top=np.maximum, to=None, rescale=(1, 1), sign=1,
          crossed=False, bare=False, l_too=True, O_too=True, half=(1, 1), weigh=False,
          divide=False, guard=True, empty_m=-math.inf, empty_l=0.0):  # fmt: skip
    """The right merge, with a switch for each wrong idea. Returns m, l and O, not yet divided."""
    m = top(m1, m2)
    common = to(m1, m2) if to else m
    safe = np.where(np.isneginf(common), 0.0, common) if guard else common
    sides = (m1, m2)
    w1, w2 = (np.exp(x) / np.exp(safe) if bare else np.exp(sign * (x - safe)) for x in sides)
    if crossed:
        w1, w2 = w2, w1
    w1, w2 = (w if use else np.ones_like(w) for w, use in zip((w1, w2), rescale, strict=True))
    l = w1 * l1 + w2 * l2 if l_too else l1 + l2
    if not O_too:
        w1, w2 = np.ones_like(w1), np.ones_like(w2)
    if weigh:  # as if O1 and O2 were divided already
        w1, w2 = w1 * l1, w2 * l2
    O = w1[:, None] * O1 + w2[:, None] * O2
    if divide:
        O = O / np.where(l == 0, 1.0, l)[:, None]
    empty = np.isneginf(m) & guard
    return np.where(empty, empty_m, m), np.where(empty, empty_l, half[0] * l), half[1] * O


def right_merge(m1, l1, O1, m2, l2, O2):
    """The library's merge."""
    return tuple(online.merge(online.State(m1, l1, O1), online.State(m2, l2, O2)))


def merge_probes(seed):
    rng = np.random.default_rng(seed)

    def piece(S):
        """m, l and O of some keys with scores S: what a worker has who has seen these alone."""
        state = online.start(len(S), 3)
        return online.update(state, S, rng.standard_normal((S.shape[1], 3)))

    def probe(says, S1, S2, stage=0):
        (m1, l1, O1), (m2, l2, O2) = piece(S1), piece(S2)
        # m is one of two numbers, so it is exact. A weight e^x is off by about eps * |x|; on the
        # way through logarithms |x| may be as large as the scores, whatever their differences.
        size = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in (m1, m2))
        relative = 3 * float(np.finfo(np.float64).eps) * (4 * size + 16)
        most = [float((np.abs(x) + np.abs(y)).max()) for x, y in ((l1, l2), (O1, O2))]
        arguments = {"m1": m1, "l1": l1, "O1": O1, "m2": m2, "l2": l2, "O2": O2}
        tolerance = (0.0, relative * most[0], relative * most[1])
        return Probe(says, arguments, tolerance, stage)

    few, many = rng.standard_normal((6, 2)) * 2, rng.standard_normal((6, 7)) * 2
    level = few - 20
    level[:, 1] = many.max(axis=1)  # the same maximum, to the last bit
    some, other = few.copy(), many.copy()
    some[0], other[1] = -np.inf, -np.inf
    none, neither = some.copy(), other.copy()
    none[2], neither[2] = -np.inf, -np.inf
    return [
        probe("2 keys on the left, 7 on the right", few, many),
        probe("7 keys on the left, 2 on the right", many, few),
        probe("the right maximum is larger by 40", few, many + 40),
        probe("the left maximum is larger by 40", few + 40, many),
        probe("both maxima are equal", level, many),
        probe("all scores near -1000: exp of them is 0", few - 1000, many - 1000),
        probe("scores near 800: exp of them overflows", few + 800, many + 801),
        probe("one side is larger by 1600", few - 800, many + 800),
        probe("row 0 is empty on the left, row 1 on the right", some, other, 1),
        probe("row 2 is empty on both sides: m = -inf, l = 0, O = 0", none, neither, 1),
    ]


def _merge_mistake(id, says, read, *variants):
    def program(switches):
        return lambda m1, l1, O1, m2, l2, O2: merge(m1, l1, O1, m2, l2, O2, **switches)

    return [Mistake(id, program(switches), says, read) for switches in variants]


def _outputs_averaged(l_rescaled, share):
    """O of each side divided by its l, then added with equal shares."""

    def program(m1, l1, O1, m2, l2, O2):
        m, l, _ = merge(m1, l1, O1, m2, l2, O2)
        O = share * (O1 / l1[:, None] + O2 / l2[:, None])
        return m, l if l_rescaled else l1 + l2, O

    return program


def _l_weighted(l_rescaled, weigh, divide):
    """O of each side weighted by l, and m forgotten."""

    def program(m1, l1, O1, m2, l2, O2):
        m, l, _ = merge(m1, l1, O1, m2, l2, O2)
        w1, w2 = (l1, l2) if weigh else (np.ones_like(l1), np.ones_like(l2))
        O = w1[:, None] * O1 + w2[:, None] * O2
        return m, l if l_rescaled else l1 + l2, O / (l1 + l2)[:, None] if divide else O

    return program


def _left(x, y):
    return x


def _right(x, y):
    return y


def _zero(x, y):
    return np.zeros_like(x)


def _mean(x, y):
    return (x + y) / 2


MERGE_PIECES = Program(
    id="ex01-merge",
    text="Write merge(m1, l1, O1, m2, l2, O2) -> m, l, O: the state over the keys of both pieces.\n"
    "m and l have one number a row, O has d; O is the sum that is not yet divided by l.",
    outputs=("m", "l", "O"),
    right=right_merge,
    probes=merge_probes,
    read=MERGE,
    mistakes=(
        *_merge_mistake(
            "added-without-rescale",
            "you add the two sums as they are. Each is relative to its own m: bring both to the "
            "larger one first.",
            MERGE,
            {"rescale": (0, 0)},
        ),
        *_merge_mistake(
            "averaged",
            "you take a mean. l and O are sums over keys, so the two sides are added, not halved.",
            MERGE,
            {"half": (0.5, 0.5)},
            {"half": (1, 0.5)},
            {"half": (0.5, 0.5), "rescale": (0, 0)},
            {"half": (1, 0.5), "rescale": (0, 0)},
            {"half": (1, 0.5), "O_too": False},
            {"half": (0.5, 0.5), "rescale": (0, 0), "top": _mean},
            {"top": _mean},
        ),
        *_merge_mistake(
            "one-side-rescaled",
            "you rescale one side only. Either side may have the smaller maximum: both need their "
            "factor.",
            MERGE,
            {"rescale": (1, 0)},
            {"rescale": (0, 1)},
        ),
        *_merge_mistake(
            "one-maximum-taken",
            "you bring both sides to the maximum of one fixed side. It may be the smaller one: "
            "take the larger, row by row.",
            MERGE,
            {"top": _left},
            {"top": _right},
            {"to": _left},
            {"to": _right},
        ),
        *(
            Mistake(
                "normalised-outputs-averaged",
                _outputs_averaged(l_rescaled, share),
                "you divide each O by its own l and then add. That gives both sides the same "
                "weight, however large their sums are.",
                MERGE,
            )
            for l_rescaled in (True, False)
            for share in (0.5, 1.0)
        ),
        *(
            Mistake(
                "l-weighted-without-m",
                _l_weighted(l_rescaled, weigh, divide),
                "you weight the sides by l alone. l is relative to m: the weight of a side is "
                "l e^m.",
                MERGE,
            )
            for l_rescaled in (True, False)
            for weigh, divide in ((True, True), (True, False), (False, True))
        ),
        *_merge_mistake(
            "O-taken-as-divided",
            "you multiply O by l, as for an O that was divided by it. Here O is the sum itself.",
            OUTPUT,
            {"weigh": True},
            {"weigh": True, "divide": True},
        ),
        *_merge_mistake(
            "divided-in-the-merge",
            "you divide O by l. A state keeps the sum, so that it can be merged again; divide "
            "once, at the end.",
            OUTPUT,
            {"divide": True},
        ),
        *_merge_mistake(
            "sum-of-maxima",
            "your m is the sum of the two maxima. The largest of all scores is the larger of them.",
            MERGE,
            {"top": np.add},
            {"top": np.add, "to": np.maximum},
        ),
        *_merge_mistake(
            "smaller-maximum",
            "you bring both sides to the smaller maximum. Then a factor is above 1 and can "
            "overflow; the larger one keeps all at most 1.",
            MERGE,
            {"top": np.minimum},
            {"to": np.minimum},
        ),
        *_merge_mistake(
            "factor-inverted",
            "your factor is upside down: it is e^(m_side - m), at most 1.",
            MERGE,
            {"sign": -1},
        ),
        *_merge_mistake(
            "factors-crossed",
            "each side gets the other side's factor. Its own is e^(m_side - m).",
            MERGE,
            {"crossed": True},
        ),
        *_merge_mistake(
            "O-not-rescaled",
            "l is rescaled, O is not. Both hold exponentials relative to the old m.",
            OUTPUT,
            {"O_too": False},
        ),
        *_merge_mistake(
            "l-not-rescaled",
            "O is rescaled, l is not. Both hold exponentials relative to the old m.",
            OUTPUT,
            {"l_too": False},
        ),
        *_merge_mistake(
            "relative-to-zero",
            "your factors are e^m of each side: that removes the maximum. The result has to be "
            "relative to the new m.",
            MERGE,
            {"to": _zero},
            {"top": _zero},
        ),
        *_merge_mistake(
            "bare-exponentials",
            "you take exp of the maxima themselves. It overflows, or is 0; take exp of the "
            "difference.",
            MERGE,
            {"bare": True},
        ),
        *_merge_mistake(
            "no-guard",
            "-inf - (-inf) is NaN: a row that is empty on both sides needs a guard on the maximum.",
            GUARDS,
            {"guard": False},
        ),
        *_merge_mistake(
            "guard-leaks",
            "your guard is in the result: a row that is empty on both sides keeps m = -inf and "
            "l = 0.",
            GUARDS,
            {"empty_m": 0.0},
            {"empty_l": 1.0},
            {"empty_m": 0.0, "empty_l": 1.0},
        ),
    ),
)

QUESTIONS = [
    ATTEND,
    MERGE_PIECES,
    Choice(
        "ex01-associative",
        "Is the merge of partial results associative, so that any grouping gives the same O?",
        {
            "a": "No: the left one's maximum is used first, so the grouping decides the result.",
            "b": "Yes in real arithmetic; in floating point the groupings agree up to rounding.",
            "c": "Yes, bit for bit, in floating point too.",
            "d": "Only if all partial results have the same maximum.",
        },
        "b",
        {
            "a": "The maximum cancels: (m, l, O) stands for the sums l e^m and O e^m, and sums add "
            "up in any grouping.",
            "b": "It stands for a sum, and sums are associative in real arithmetic. That is why "
            "split-KV decoding and ring attention may merge in any order.",
            "c": "Floating-point addition is not associative, and the rescale rounds too: the last "
            "bits may differ.",
            "d": "Different maxima are what the rescale is for: both sides go to the larger one.",
        },
    ),
]
