"""Exercise 11: right programs in any style pass, wrong ideas are called by their name.

The programs here are written from the tasks alone, in other styles than the registry's mistakes.
"""

import math
from functools import reduce

import numpy as np
import pytest

from attention_lib.checks import _QUESTIONS, check
from attention_lib.checks.kinds import Program
from attention_lib.checks.programs import check_program
from attention_lib.decode import split_kv_attention


# right: merge_all
def r1(partials):
    m = reduce(np.maximum, [p[0] for p in partials])
    b = np.where(m == -np.inf, 0, m)
    l = sum(np.exp(p[0] - b) * p[1] for p in partials)
    O = sum(np.exp(p[0] - b)[:, None] * p[2] for p in partials)
    z = l == 0
    return O / np.where(z, 1, l)[:, None], np.where(z, -np.inf, b + np.log(np.where(z, 1, l)))


def r2(partials):
    def two(x, y):
        m = np.maximum(x[0], y[0])
        s = np.nan_to_num(m, neginf=0.0)
        return (
            m,
            x[1] * np.exp(x[0] - s) + y[1] * np.exp(y[0] - s),
            x[2] * np.exp(x[0] - s)[:, None] + y[2] * np.exp(y[0] - s)[:, None],
        )

    m, l, O = reduce(two, partials)
    l = np.where(l == 0, 1, l)
    return O / l[:, None], m + np.log(l)


def r3(partials):
    # through L, recursive halves
    def go(ps):
        if len(ps) == 1:
            m, l, O = ps[0]
            s = np.where(l == 0, 1, l)
            return O / s[:, None], np.where(l == 0, -np.inf, m + np.log(s))
        (a, A), (b, B) = go(ps[: len(ps) // 2]), go(ps[len(ps) // 2 :])
        L = np.logaddexp(A, B)
        Ls = np.where(np.isneginf(L), 0, L)
        return np.exp(A - Ls)[:, None] * a + np.exp(B - Ls)[:, None] * b, L

    return go(list(partials))


def r4(partials):
    # rows in python
    rows, d = partials[0][2].shape
    Os = np.zeros((rows, d))
    Ls = []
    for r in range(rows):
        seen = [(m[r], l[r], O[r]) for m, l, O in partials if l[r] > 0]
        if not seen:
            Ls.append(-math.inf)
            continue
        t = max(m for m, _, _ in seen)
        l = sum(math.exp(m - t) * x for m, x, _ in seen)
        Os[r] = sum(math.exp(m - t) * o for m, _, o in seen) / l
        Ls.append(t + math.log(l))
    return Os, np.array(Ls)


# right split
def s1(q, K, V, splits):
    ps = []
    for k, v in zip(np.array_split(K, splits), np.array_split(V, splits), strict=True):
        s = k @ q / math.sqrt(len(q))
        m = s.max() if len(s) else -np.inf
        p = np.exp(s - m)
        ps.append((np.array([m]), np.array([p.sum()]), (p @ v)[None]))
    O, L = r1(ps)
    return O[0], L[0]


def s2(q, K, V, splits):
    n = -(-len(K) // splits) or 1
    m, l, O = -np.inf, 0.0, np.zeros(len(q))
    for a in range(0, len(K), n):
        s = K[a : a + n] @ q * len(q) ** -0.5
        t = max(m, s.max())
        c = math.exp(m - t)
        p = np.exp(s - t)
        m, l, O = t, l * c + p.sum(), O * c + p @ V[a : a + n]
    return (O / l, m + math.log(l)) if l else (O, -np.inf)


def s3(q, K, V, splits):
    e = np.linspace(0, len(K), splits + 1).astype(int)
    parts = []
    for a, b in zip(e[:-1], e[1:], strict=True):
        if a == b:
            continue
        s = K[a:b] @ q / np.sqrt(q.size)
        L = np.logaddexp.reduce(s)
        parts.append((np.exp(s - L) @ V[a:b], L))
    if not parts:
        return np.zeros_like(q), -np.inf
    L = np.logaddexp.reduce([x[1] for x in parts])
    return sum(np.exp(l - L) * o for o, l in parts), L


# wrong, other style
def w_avg(partials):
    return np.mean([O / l[:, None] for m, l, O in partials], 0), np.logaddexp.reduce(
        [m + np.log(l) for m, l, O in partials]
    )


def w_two(partials):
    return r2(partials[:2])


def w_sum(partials):
    l = sum(p[1] for p in partials)
    return sum(p[2] for p in partials) / l[:, None], np.max([p[0] for p in partials], 0) + np.log(l)


def w_Lw(partials):
    L = np.array([m + np.log(l) for m, l, O in partials])
    w = L / L.sum(0)
    return sum(
        x[:, None] * O / l[:, None] for x, (m, l, O) in zip(w, partials, strict=True)
    ), np.logaddexp.reduce(L)


def w_nan(partials):
    L = np.array([m + np.log(l) for m, l, O in partials])
    T = np.logaddexp.reduce(L)
    return sum(
        np.exp(x - T)[:, None] * O / l[:, None] for x, (m, l, O) in zip(L, partials, strict=True)
    ), T


def w_noguard(partials):
    m = np.max([p[0] for p in partials], 0)
    l = sum(np.exp(p[0] - m) * p[1] for p in partials)
    return sum(np.exp(p[0] - m)[:, None] * p[2] for p in partials) / l[:, None], m + np.log(l)


def w_f32(partials):
    return tuple(
        x.astype(np.float64) for x in r1([tuple(a.astype(np.float32) for a in p) for p in partials])
    )


def w_lastm(partials):
    O, L = r1(partials)
    m = np.max([p[0] for p in partials], 0)
    return O, L - m + partials[-1][0]


def v_lost(q, K, V, splits):
    n = len(K) // splits
    return s2(q, K[: n * splits], V[: n * splits], splits)


def v_keys(q, K, V, splits):
    out = []
    for k, v in zip(np.array_split(K, splits), np.array_split(V, splits), strict=True):
        s = k @ q / math.sqrt(len(q))
        L = np.logaddexp.reduce(s)
        out.append((len(s), np.exp(s - L) @ v, L))
    N = sum(o[0] for o in out)
    return sum(o[0] * o[1] for o in out) / N, np.logaddexp.reduce([o[2] for o in out])


def v_avg(q, K, V, splits):
    out = []
    for k, v in zip(np.array_split(K, splits), np.array_split(V, splits), strict=True):
        s = k @ q / math.sqrt(len(q))
        L = np.logaddexp.reduce(s)
        out.append((np.exp(s - L) @ v, L))
    return sum(o[0] for o in out) / splits, sum(o[1] for o in out) / splits


def v_scale(q, K, V, splits):
    return s2(q * math.sqrt(len(q)), K, V, splits)


def v_nan(q, K, V, splits):
    out = []
    for i in range(splits):
        a, b = i * len(K) // splits, (i + 1) * len(K) // splits
        s = K[a:b] @ q / math.sqrt(len(q))
        m = s.max(initial=-np.inf)
        p = np.exp(s - m)
        l = p.sum()
        out.append((p @ V[a:b] / l, m + np.log(l)))
    L = np.logaddexp.reduce([o[1] for o in out])
    return sum(np.exp(o[1] - L) * o[0] for o in out), L


def v_all(q, K, V, splits):
    O, L = split_kv_attention(q[None], K, V, splits)
    return O[0], L[0]


def v_allown(q, K, V, splits):
    return s2(q, K, V, 1)


def v_max(q, K, V, splits):
    s = 0
    l = 0
    for k, v in zip(np.array_split(K, splits), np.array_split(V, splits), strict=True):
        p = np.exp(k @ q / math.sqrt(len(q)))
        l += p.sum()
        s = s + p @ v
    return s / l, np.log(l)


def v_Lw(q, K, V, splits):
    parts = []
    for i in range(splits):
        a, b = i * len(K) // splits, (i + 1) * len(K) // splits
        s = K[a:b] @ q / math.sqrt(len(q))
        L = np.logaddexp.reduce(s)
        parts.append((np.exp(s - L) @ V[a:b], L))
    whole = sum(L for _, L in parts)
    return sum(L * o for o, L in parts) / whole, np.logaddexp.reduce([L for _, L in parts])


# Two right programs as texts, one row or one key at a time; a wrong idea is a change in its lines.
MERGE_TEXT = """
def merge_all(partials):
    rows, d = partials[0][2].shape
    O, L = np.zeros((rows, d)), np.full(rows, -np.inf)
    for r in range(rows):
        top, total, acc = -np.inf, 0.0, np.zeros(d)
        for m, l, o in partials:
            new = max(top, m[r])
            if new == -np.inf:
                continue
            x, y = np.exp(top - new), np.exp(m[r] - new)
            total = x * total + y * l[r]
            acc = x * acc + y * o[r]
            top = new
        if total:
            O[r] = acc / total
            L[r] = top + np.log(total)
    return O, L
"""
SPLIT_TEXT = """
def split_kv(q, K, V, splits):
    N, scale = len(K), len(q) ** -0.5
    ends = [N * i // splits for i in range(splits + 1)]
    top, total, acc = -np.inf, 0.0, np.zeros(len(q))
    for a, b in zip(ends, ends[1:]):
        if a == b:
            continue
        s = [float(K[j] @ q) * scale for j in range(a, b)]
        m = max(s)
        p = np.exp(np.array(s) - m)
        l, o = p.sum(), p @ V[a:b]
        new = max(top, m)
        x, y = np.exp(top - new), np.exp(m - new)
        total, acc, top = x * total + y * l, x * acc + y * o, new
    if not total:
        return acc, -np.inf
    return acc / total, top + np.log(total)
"""


def made(source, *changes):
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    scope = {"np": np}
    exec(compile(source, "answer", "exec"), scope)
    return scope["merge_all" if source.startswith("\ndef merge_all") else "split_kv"]


MERGE_CHANGES = {
    "never-divided": [("acc / total", "acc")],
    "l-not-rescaled": [("x * total + y * l[r]", "total + l[r]")],
    "O-not-rescaled": [("x * acc + y * o[r]", "acc + o[r]")],
    "nothing-rescaled": [("np.exp(top - new), np.exp(m[r] - new)", "1.0, 1.0")],
    "one-side-rescaled": [("np.exp(m[r] - new)", "1.0")],
    "factor-inverted": [
        ("np.exp(top - new)", "np.exp(new - top) if total else 0.0"),
        ("np.exp(m[r] - new)", "np.exp(new - m[r])"),
    ],
    "one-m-for-all": [("new = max(top, m[r])", "new = partials[-1][0][r]")],
    "L-without-m": [("top + np.log(total)", "np.log(total)")],
    "L-not-merged": [("top + np.log(total)", "max(a[r] + np.log(b[r]) for a, b, _ in partials)")],
    "third-partial-lost": [("in partials:", "in partials[:2]:")],
}
EMPTY = "x = np.exp(top - max(top, 0.0)); total, acc, top = x * total, x * acc, max(top, 0.0)"
SPLIT_CHANGES = {
    "empty-m-is-0": [("            continue", f"            {EMPTY}; continue")],
    "nothing-rescaled": [("np.exp(top - new), np.exp(m - new)", "1.0, 1.0")],
    "last-split-lost": [("range(splits + 1)", "range(splits)")],
    "boundary-key-twice": [("range(a, b)", "range(a, min(b + 1, N))"), ("V[a:b]", "V[a : b + 1]")],
    "boundary-key-lost": [("if a == b:", "b -= b < N\n        if a == b:")],
    "not-scaled": [(" ** -0.5", " ** 0")],
    "scaled-by-d": [("** -0.5", "** -1.0")],
    "no-max": [("m = max(s)", "m = 0.0"), ("max(top, m)", "0.0")],
    "one-side-rescaled": [("np.exp(m - new)", "1.0")],
    "last-m-in-L": [("top + np.log(total)", "m + np.log(total)")],
    "L-without-m": [("top + np.log(total)", "np.log(total)")],
    "L-not-merged": [("top + np.log(total)", "m + np.log(l)")],
    "never-divided": [("acc / total", "acc")],
}  # fmt: skip


MERGE_RIGHT, SPLIT_RIGHT = [r1, r2, r3, r4, made(MERGE_TEXT)], [s1, s2, s3, made(SPLIT_TEXT)]


@pytest.mark.parametrize(
    "id, program",
    [("ex11-merge-all", f) for f in MERGE_RIGHT] + [("ex11-split-kv", f) for f in SPLIT_RIGHT],
)
def test_right_programs_pass(id, program):
    for seed in range(2):  # test_checks_seeds.py has many more
        result = check_program(_QUESTIONS[id], program, seed)
        assert result.status == "passed", (seed, result)


WRONG = [
    ("ex11-merge-all", w_avg, "outputs-averaged"),
    ("ex11-merge-all", w_two, "third-partial-lost"),
    ("ex11-merge-all", w_sum, "nothing-rescaled"),
    ("ex11-merge-all", w_Lw, "L-without-exponent"),
    ("ex11-merge-all", w_nan, "empty-gives-nan"),
    ("ex11-merge-all", w_noguard, "empty-gives-nan"),
    ("ex11-merge-all", w_lastm, "last-m-in-L"),
    ("ex11-merge-all", w_f32, None),
    ("ex11-split-kv", v_lost, "last-keys-lost"),
    ("ex11-split-kv", v_keys, "weighted-by-keys"),
    ("ex11-split-kv", v_avg, "outputs-averaged"),
    ("ex11-split-kv", v_scale, "not-scaled"),
    ("ex11-split-kv", v_nan, "empty-gives-nan"),
    ("ex11-split-kv", v_max, "no-max"),
    ("ex11-split-kv", v_all, "calls-the-library"),
    ("ex11-split-kv", v_allown, "all-keys-at-once"),
    ("ex11-split-kv", v_Lw, "L-without-exponent"),
    *(("ex11-merge-all", made(MERGE_TEXT, *c), name) for name, c in MERGE_CHANGES.items()),
    *(("ex11-split-kv", made(SPLIT_TEXT, *c), name) for name, c in SPLIT_CHANGES.items()),
]


def wrong(id):
    """(name, program) for each wrong program of an exercise."""
    return [(name, program) for of, program, name in WRONG if of == id]


@pytest.mark.parametrize("id, program, name", WRONG)
def test_wrong_programs_are_called_by_their_name(id, program, name):
    for seed in range(3):
        result = check_program(_QUESTIONS[id], program, seed)
        assert (result.status, result.misconception) == ("not yet", name), (seed, result)
        lines = repr(result).splitlines()
        assert len(lines) <= 5 and max(map(len, lines)) <= 88


@pytest.mark.parametrize("id", ["ex11-merge-all", "ex11-split-kv"])
def test_every_idea_has_a_program_here(id):
    known = {m.id for m in _QUESTIONS[id].mistakes}
    assert known == {name for name, _ in wrong(id)} & known


@pytest.mark.parametrize("id", ["ex11-merge-all", "ex11-split-kv"])
def test_every_mistake_is_recognised_as_itself(id):
    exercise = _QUESTIONS[id]
    assert isinstance(exercise, Program) and len({m.id for m in exercise.mistakes}) >= 8
    for mistake in exercise.mistakes:
        assert check_program(exercise, mistake.program, 0).misconception == mistake.id


def test_the_inputs_of_a_merge_stay_as_they_are():
    def in_place(partials):
        m, l, O = partials[0]
        O *= 2
        return r1(partials)

    result = check("ex11-merge-all", in_place)
    assert result.misconception == "mutates-its-input" and "input partials" in result.message
