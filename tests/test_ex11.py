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


@pytest.mark.parametrize(
    "id, program",
    [("ex11-merge-all", f) for f in (r1, r2, r3, r4)]
    + [("ex11-split-kv", f) for f in (s1, s2, s3)],
)
def test_right_programs_pass(id, program):
    for seed in range(8):
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
]


@pytest.mark.parametrize("id, program, name", WRONG)
def test_wrong_programs_are_called_by_their_name(id, program, name):
    for seed in range(3):
        result = check_program(_QUESTIONS[id], program, seed)
        assert (result.status, result.misconception) == ("not yet", name), (seed, result)
        lines = repr(result).splitlines()
        assert len(lines) <= 5 and max(map(len, lines)) <= 88


@pytest.mark.parametrize("id", ["ex11-merge-all", "ex11-split-kv"])
def test_every_mistake_is_recognised_as_itself(id):
    exercise = _QUESTIONS[id]
    assert isinstance(exercise, Program) and len({m.id for m in exercise.mistakes}) >= 8
    for mistake in exercise.mistakes:
        assert check_program(exercise, mistake.program, 0).misconception == mistake.id


def test_the_inputs_of_a_merge_cannot_be_changed():
    def in_place(partials):
        m, l, O = partials[0]
        O *= 2
        return r1(partials)

    result = check("ex11-merge-all", in_place)
    assert result.status == "raised" and "read-only" in result.message
