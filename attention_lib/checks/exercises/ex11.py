"""Exercise 11: split-KV with an empty split, and the merge of many partials."""

import math

import numpy as np

from attention_lib import online
from attention_lib.checks.judge import observe
from attention_lib.checks.kinds import Choice, Mistake, Number, Probe, Program
from attention_lib.checks.programs import rounding
from attention_lib.decode import cut, split_kv_traffic

MERGE = "notebook 02, 'Merge: one operation behind all of it'"
GUARDS = "notebook 02, 'A chunk in which nothing is visible'"
SPLIT = "notebook 12, 'Split-KV: more readers, not fewer bytes'"
ERRORS = "notebook 12, 'Common mistakes'"


def combine(partials, *, how="sum", keys=None, L_how="right", sign=1, l_power=1, O_power=1,
            base=np.max, divide=True, guard=True, skip=None):  # fmt: skip
    """The right merge of many partials, with a switch for each wrong idea. Returns O and L."""
    m, l, O = (np.stack(x) for x in list(zip(*partials, strict=True)))
    if skip is not None:  # partials that are never looked at
        m, l, O = m[skip], l[skip], O[skip]
    top = base(m, axis=0)
    safe = np.where(np.isneginf(top), 0.0, top) if guard else top
    w = np.exp(sign * (m - safe))
    l_all = np.sum(w**l_power * l if l_power else l, axis=0)
    l_safe = np.where(l_all == 0, 1.0, l_all) if guard else l_all
    L_each = m + np.log(l)
    if how == "sum":
        O_all = np.sum(w[..., None] ** O_power * O if O_power else O, axis=0)
        O_all = O_all / l_safe[:, None] if divide else O_all
    else:
        share = {
            "mean": np.ones_like(l),
            "keys": np.ones_like(l) if keys is None else np.array(keys)[:, None] + 0 * l,
            "l": l,
            "L": L_each,
            "weighted": w * l,  # right, but for 0/0 where a partial is empty
        }[how]
        O_all = np.sum(share[..., None] * (O / l[..., None]), axis=0) / share.sum(axis=0)[:, None]
    L = {
        "right": top + np.log(l_safe),
        "empty gives -inf": np.where(l_all == 0, -np.inf, top + np.log(l_safe)),
        "none": np.log(l_safe),
        "last m": m[-1] + np.log(l_safe),
        "last": L_each[-1],
        "mean": L_each.mean(axis=0),
        "sum": L_each.sum(axis=0),
        "largest": L_each.max(axis=0),
    }[L_how]
    return O_all, L


def _one_sided(partials, guard=True):
    """Merged in order, where only what was there before is rescaled."""
    m, l, O = partials[0]
    for m2, l2, O2 in partials[1:]:
        top = np.maximum(m, m2)
        w = np.exp(m - (np.where(np.isneginf(top), 0.0, top) if guard else top))
        m, l, O = top, w * l + l2, w[:, None] * O + O2
    l_safe = np.where(l == 0, 1.0, l)
    return O / l_safe[:, None], m + np.log(l_safe)


def _in_order_no_guard(partials):
    """Right, merged in order, but without a guard: two empty partials in a row give NaN."""
    m, l, O = partials[0]
    for m2, l2, O2 in partials[1:]:
        top = np.maximum(m, m2)
        a, b = np.exp(m - top), np.exp(m2 - top)
        m, l, O = top, a * l + b * l2, a[:, None] * O + b[:, None] * O2
    return O / l[:, None], m + np.log(l)


def _last(m, axis):
    return m[-1]


def _first(m, axis):
    return m[0]


# ---------------------------------------------------------------- merge_all


def right_merge_all(partials):
    """The library's merge, from left to right."""
    states = [online.State(*p) for p in partials]
    whole = states[0]
    for state in states[1:]:
        whole = online.merge(whole, state)
    return online.finish(whole)


def merge_probes(seed):
    rng = np.random.default_rng(seed)

    def probe(says, pieces, stage=0):
        partials, largest, size = [], 0.0, 0.0
        for S in pieces:
            V = rng.standard_normal((S.shape[1], 3))
            state = online.update(online.start(len(S), 3), S, V)
            partials.append(tuple(state))
            size = max(size, float(np.abs(S[np.isfinite(S)]).max(initial=0.0)))
            largest = max(largest, float(np.abs(V).max(initial=0.0)))
        keys = sum(S.shape[1] for S in pieces)
        tolerance = rounding(size, keys, np.array([largest]))
        return Probe(says, {"partials": tuple(partials)}, tolerance, stage)

    def scores(*keys):
        return [rng.standard_normal((4, n)) * 2 for n in keys]

    plain = scores(2, 7, 4)
    rising = [S + 40 * i for i, S in enumerate(scores(3, 3, 3))]
    first, early, last, none = (scores(3, 5, 4) for _ in range(4))
    first[0][0] = -np.inf
    last[2][1] = -np.inf
    early[0][2] = early[1][2] = -np.inf
    for S in none:
        S[3] = -np.inf
    return [
        probe("three partials, of 2, 7 and 4 keys", plain),
        probe("the maximum rises by 40 from partial to partial", rising),
        probe("the maximum falls by 40 from partial to partial", rising[::-1]),
        probe("five partials, of 1 to 5 keys", scores(3, 1, 5, 2, 4)),
        probe("one partial alone", scores(6)),
        probe("all scores near -1000", [S - 1000 for S in plain]),
        probe("scores near 800: exp of them overflows", [S + 800 for S in plain]),
        probe("the last maximum is lower by 1600", [plain[0], plain[1], plain[2] - 1600]),
        probe("the first maximum is lower by 1600", [plain[0] - 1600, plain[1], plain[2]]),
        probe("row 0 is empty in the first partial", first, 1),
        probe("row 1 is empty in the last partial", last, 1),
        probe("row 2 is empty in the first two partials", early, 1),
        probe("row 3 is empty in all: O = 0, L = -inf", none, 1),
    ]


def _merging(id, says, read, *variants):
    """One idea may be written in several ways that give different numbers: a Mistake for each."""

    def program(switches):
        if callable(switches):
            return lambda partials: switches(partials)
        return lambda partials: combine(partials, **switches)

    return [Mistake(id, program(switches), says, read) for switches in variants]


def _of_the_end(mistakes, part):
    """Ideas about L and the division that both exercises have. mistakes: what makes them of one."""
    return [
        *mistakes(
            "last-m-in-L",
            f"L is taken with the m of the last {part}. The sum is relative to the largest m.",
            MERGE,
            {"L_how": "last m"},
        ),
        *mistakes(
            "L-without-m",
            "L is log(l) alone. The sum is relative to m, so L = m + log(l).",
            MERGE,
            {"L_how": "none"},
        ),
        *mistakes(
            "L-not-merged",
            "O is right, L is not: a mean, a sum or the largest of the L. The sums e^L are added.",
            MERGE,
            *({"L_how": x} for x in ("mean", "sum", "largest", "last")),
        ),
        *mistakes(
            "never-divided",
            "O is the sum that is not yet divided: divide by l once, at the end.",
            MERGE,
            {"divide": False},
        ),
    ]


LSES = ("right", "mean", "sum", "largest", "last", "none")

AVERAGED = "you take the mean of the divided outputs. Each has its own weight, l e^m: add with it."
L_BARE = "you weight with L itself. L is a logarithm: the weight is e^(L - the largest L)."
NOT_RESCALED = (
    "you add the sums as they are. Each is relative to its own m: bring all to the largest first."
)
NO_GUARD = (
    "-inf - (-inf), or 0/0, is NaN: guard the maximum where all is empty, and never divide a "
    "partial by its own l."
)

MERGE_ALL = Program(
    id="ex11-merge-all",
    text="Write merge_all(partials) -> O, L: attention over the keys of all partials (m, l, O).\n"
    "m, l: (rows,); O: (rows, d), not yet divided by l. The O returned is divided.",
    outputs=("O", "L"),
    right=right_merge_all,
    probes=merge_probes,
    read=MERGE,
    mistakes=(
        *_merging(
            "outputs-averaged", AVERAGED, SPLIT, *({"how": "mean", "L_how": x} for x in LSES)
        ),
        *_merging("L-without-exponent", L_BARE, SPLIT, *({"how": "L", "L_how": x} for x in LSES)),
        *_merging(
            "nothing-rescaled",
            NOT_RESCALED,
            MERGE,
            *({"l_power": 0, "O_power": 0, "L_how": x} for x in ("right", "none", "last m")),
            *({"how": "l", "L_how": x} for x in ("mean", "sum", "largest")),
        ),
        *_merging(
            "O-not-rescaled",
            "l is rescaled, O is not. Both hold exponentials relative to the old m.",
            MERGE,
            {"O_power": 0},
        ),
        *_merging(
            "l-not-rescaled",
            "O is rescaled, l is not. Both hold exponentials relative to the old m.",
            MERGE,
            {"l_power": 0},
        ),
        *_merging(
            "factor-inverted",
            "your factor is upside down: it is e^(m_i - m), at most 1.",
            MERGE,
            {"sign": -1},
        ),
        *_merging(
            "one-side-rescaled",
            "you rescale what was there, not what comes. Either may have the smaller maximum.",
            MERGE,
            _one_sided,
            lambda partials: _one_sided(partials, guard=False),
        ),
        *_merging(
            "one-m-for-all",
            "all is taken relative to the m of one fixed partial. It may be the smallest, and the "
            "factors overflow.",
            MERGE,
            {"base": _last},
            {"base": _first},
            {"base": _last, "guard": False},
            {"base": _first, "guard": False},
        ),
        *_of_the_end(_merging, "partial"),
        *_merging(
            "third-partial-lost",
            "only two partials are merged. Go on with the result, until none is left.",
            MERGE,
            {"skip": slice(0, 2)},
            {"skip": [0, -1]},
        ),
        *_merging(
            "empty-gives-nan",
            NO_GUARD,
            GUARDS,
            {"guard": False},
            {"how": "weighted"},
            {"how": "weighted", "guard": False},
            _in_order_no_guard,
        ),
    ),
)


# ---------------------------------------------------------------- split_kv


def split_loop(q, K, V, splits, *, scale=None, cutting="even", use_max=True, empty_m=-math.inf,
               **merging):  # fmt: skip
    """The right split-KV, with a switch for each wrong idea. The rest goes to `combine`."""
    N, d = K.shape
    parts = cut(N, splits)
    if cutting == "longer first":  # as np.array_split does
        ends = [i * (N // splits) + min(i, N % splits) for i in range(splits + 1)]
        parts = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    elif cutting == "rounded up":  # the last one is short, or empty
        n = -(-N // splits)
        parts = [slice(min(i * n, N), min(i * n + n, N)) for i in range(splits)]
    elif cutting == "rest lost":
        parts = [slice(i * (N // splits), (i + 1) * (N // splits)) for i in range(splits)]
    elif cutting == "twice":  # the key at a boundary belongs to both sides
        parts = [slice(p.start, p.stop + 1) for p in parts]
    elif cutting == "gap":  # and here to neither
        parts = [slice(p.start, p.stop - (p.stop < N)) for p in parts]
    elif cutting == "last split lost":
        parts = parts[:-1] or [slice(0, 0)]
    partials, keys = [], []
    for part in parts:
        s = (K[part] @ q) * (1 / math.sqrt(d) if scale is None else scale(d))
        m = s.max(initial=-math.inf) if use_max else 0.0
        m = empty_m if np.isneginf(m) else m
        p = np.exp(s - m)
        partials.append((np.array([m]), np.array([p.sum()]), (p @ V[part])[None]))
        keys.append(len(s))
    O, L = (merging.pop("by", combine))(partials, **({"keys": keys} | merging))
    return O[0], L[0]


def right_split_kv(q, K, V, splits):
    """All keys at once, in the library: the answer for any number of splits."""
    S = (K @ q / math.sqrt(len(q)))[None]
    O, L = online.finish(online.update(online.start(1, len(q)), S, V))
    return O[0], L[0]


def split_probes(seed):
    rng = np.random.default_rng(seed)
    d = 6

    def probe(says, N, splits, first=0.0, last=0.0, stage=0):
        q, V = rng.standard_normal(d), rng.standard_normal((N, d))
        K = rng.standard_normal((N, d))
        # Set the scores along the row: from about `first` to about `last`.
        want = np.linspace(first, last, N) * math.sqrt(d)
        K += (want[:, None] * q) / (q @ q)
        size = float(np.abs(K @ q).max(initial=0.0)) / math.sqrt(d)
        size += float((np.abs(K) @ np.abs(q)).max(initial=0.0))  # the products round as well
        arguments = {"q": q, "K": K, "V": V, "splits": splits}
        return Probe(says, arguments, rounding(size, N, V), stage)

    return [
        probe("12 keys in 3 splits", 12, 3),
        probe("13 keys in 4 splits: they cannot be equal", 13, 4),
        probe("the scores rise by 40 along the keys", 14, 4, 0, 40),
        probe("the scores fall by 40 along the keys", 14, 4, 40, 0),
        probe("one split", 9, 1),
        probe("a split for each key", 5, 5),
        probe("all scores near -1000", 11, 3, -1000, -1000),
        probe("scores near 800: exp of them overflows", 11, 3, 800, 800),
        probe("3 keys in 5 splits: some splits are empty", 3, 5, stage=1),
        probe("2 keys in 9 splits: most are empty", 2, 9, stage=1),
        probe("2 keys in 9 splits, scores near -1000", 2, 9, -1000, -1000, stage=1),
        probe("no keys at all: O = 0, L = -inf", 0, 3, stage=1),
    ]


def one_split_at_a_time(answer):
    """The claim behind the splits: no array as long as the cache."""
    rng, N = np.random.default_rng(0), 65_536
    K, V = rng.standard_normal((2, N, 2))
    arguments = {"q": rng.standard_normal(2), "K": K, "V": V, "splits": 64}
    seen = observe(answer, arguments, measure=True)
    if seen.error or seen.timed_out:
        problem = seen.error or "it did not end in time"
        return None, f"with {N:,} keys in 64 splits your code fails: {problem}", SPLIT
    if seen.peak <= N * 8 // 2:
        return None
    text = (
        f"right numbers, but from all keys at once: {seen.peak / 2**10:.0f} KiB are allocated, "
        "where one split's scores take 8. Take one split at a time."
    )
    return "all-keys-at-once", text, SPLIT


def _splitting(id, says, read, *variants):
    def program(switches):
        return lambda q, K, V, splits: split_loop(q, K, V, splits, **switches)

    return [Mistake(id, program(switches), says, read) for switches in variants]


def _however_cut(id, says, read, *variants):
    """For ideas whose numbers depend on where the keys are cut: all three honest ways to cut."""
    ways = ("even", "longer first", "rounded up")
    return _splitting(id, says, read, *({"cutting": c} | v for v in variants for c in ways))


SPLIT_KV = Program(
    id="ex11-split-kv",
    text="Write split_kv(q, K, V, splits) -> O, L: one query against the cache, each split on its\n"
    "own, then the merge. q: (d,); K, V: (N, d). O: (d,), L: a number. Scale: 1/sqrt(d).",
    outputs=("O", "L"),
    right=right_split_kv,
    probes=split_probes,
    read=SPLIT,
    mistakes=(
        # These are right where every split has keys, so they come before ideas that never are.
        *_splitting(
            "empty-gives-nan",
            NO_GUARD,
            ERRORS,
            {"how": "weighted"},
            {"how": "weighted", "guard": False},
            {"guard": False},
            {"by": lambda partials, keys: _in_order_no_guard(partials)},
        ),
        *_splitting(
            "empty-m-is-0",
            "an empty split has m = 0 here. That is a score nobody had: where all are far below, "
            "everything underflows. It is -inf.",
            GUARDS,
            {"empty_m": 0.0},
            {"empty_m": 0.0, "guard": False},
            {"empty_m": 0.0, "L_how": "empty gives -inf"},
        ),
        *_however_cut(
            "outputs-averaged", AVERAGED, SPLIT, *({"how": "mean", "L_how": x} for x in LSES)
        ),
        *_however_cut(
            "weighted-by-keys",
            "you weight each split by its number of keys. The weight is the sum of e^score, l e^m.",
            SPLIT,
            *({"how": "keys", "L_how": x} for x in LSES),
        ),
        *_splitting("L-without-exponent", L_BARE, SPLIT, *({"how": "L", "L_how": x} for x in LSES)),
        *_however_cut(
            "nothing-rescaled",
            NOT_RESCALED,
            MERGE,
            *({"l_power": 0, "O_power": 0, "L_how": x} for x in ("right", "none", "last m")),
            *({"how": "l", "L_how": x} for x in ("mean", "sum", "largest")),
        ),
        *_splitting(
            "last-keys-lost",
            "N // splits keys in each split: the rest belongs to nobody. Cut at i * N // splits.",
            ERRORS,
            {"cutting": "rest lost"},
            {"cutting": "rest lost", "guard": False},
        ),
        *_splitting(
            "last-split-lost",
            "the last split is never taken: `splits` splits have splits + 1 ends.",
            SPLIT,
            {"cutting": "last split lost"},
        ),
        *_splitting(
            "boundary-key-twice",
            "a key at a boundary is in two splits. A slice ends before its stop: [a:b], [b:c].",
            SPLIT,
            {"cutting": "twice"},
        ),
        *_splitting(
            "boundary-key-lost",
            "a key at a boundary is in no split. A slice ends before its stop: [a:b], [b:c].",
            SPLIT,
            {"cutting": "gap"},
        ),
        *_splitting(
            "not-scaled",
            "the scores are not scaled: S = q K^T / sqrt(d).",
            SPLIT,
            {"scale": lambda d: 1.0},
        ),
        *_splitting(
            "scaled-by-d",
            "the scores are divided by d. It is the square root of d.",
            SPLIT,
            {"scale": lambda d: 1 / d},
        ),
        *_splitting(
            "no-max",
            "you take exp of the bare scores: no maximum is subtracted.",
            "notebook 02, 'A row needs its largest score and its sum'",
            {"use_max": False},
            {"use_max": False, "guard": False},
            {"use_max": False, "L_how": "empty gives -inf"},
        ),
        *_however_cut(
            "one-side-rescaled",
            "you rescale what was there, not what comes. Either may have the smaller maximum.",
            MERGE,
            {"by": lambda partials, keys: _one_sided(partials)},
        ),
        *_of_the_end(_however_cut, "split"),
    ),
    claims=(one_split_at_a_time,),
)


QUESTIONS = [
    MERGE_ALL,
    SPLIT_KV,
    Number(
        "ex11-price",
        "N = 32,768 keys, d = 64, one query, 128 splits. How many elements does the run move,\n"
        "the merge included? (A partial is m, l and O; every split reads the query.)",
        "elements",
        truth=lambda: split_kv_traffic(32_768, 64, 128),
        why="2Nd for K and V, 3d + 4 for each split, d + 1 for O and L.",
        hint="Three lines: K and V; what a split reads and stores for itself, and what the merge "
        "reads of it; the result.",
        slips={
            "one-kernel": (
                lambda: 2 * 32_768 * 64 + 2 * 64 + 1,
                "That is one block without splits: the partials are missing.",
            ),
            "k-and-v-for-each-split": (
                lambda: 128 * 2 * 32_768 * 64,
                "Each split reads its own keys, not all of them.",
            ),
        },
        tolerance=0.0001,
    ),
    Choice(
        "ex11-empty",
        "Three partials are merged from left to right: the first two are empty, the third is not. "
        "Without any guard the result is NaN. Where does it come from?",
        {
            "a": "From the third partial: all before it has m = -inf, so its l is rescaled by "
            "e^(-inf).",
            "b": "From the first merge: both maxima are -inf, and -inf - (-inf) is NaN.",
            "c": "From the division at the end: l is 0.",
            "d": "From O of the empty partials: 0 times -inf.",
        },
        "b",
        {
            "a": "The third has the largest m, so its factor is e^0 = 1. What it is added to is "
            "NaN already.",
            "b": "NaN then goes through every later merge. With one maximum over all three first, "
            "no guard would be needed in this row.",
            "c": "l is not 0: the third partial has keys. The division would be the place in a row "
            "that is empty in all three.",
            "d": "O is multiplied by a factor e^x, which is 0 or NaN, never -inf.",
        },
    ),
]
