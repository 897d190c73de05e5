"""Exercises 1, 3, 5 and 7: right programs in any style pass, wrong ideas are called by their name.

The programs here are written from the tasks alone, in other styles than the registry's mistakes.
"""

import bisect
import math
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest

from attention_lib import block_sizes, flash_traffic, online, standard_traffic
from attention_lib.checks import _QUESTIONS, check
from attention_lib.checks.exercises import ex01, ex03, ex05, ex07
from attention_lib.checks.kinds import Choice, Number, Program
from attention_lib.checks.programs import check_program
from attention_lib.hardware import time_bound

SEEDS = range(2)  # test_checks_seeds.py has many more
FEW = range(3)
MINE = [q for module in (ex01, ex03, ex05, ex07) for q in module.QUESTIONS]
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def passes(id, program, seeds=SEEDS):
    for seed in seeds:
        result = check_program(_QUESTIONS[id], program, seed)
        assert result.status == "passed", (seed, result)


def is_called(id, name, program, seeds=FEW):
    for seed in seeds:
        result = check_program(_QUESTIONS[id], program, seed)
        assert (result.status, result.misconception) == ("not yet", name), (seed, result)
        lines = repr(result).splitlines()
        assert len(lines) <= 5 and max(map(len, lines)) <= 88 and "Read: notebook" in lines[-1]


# ---------------------------------------------------------------- exercise 1: attend, right


def attend_in_place(S, V, chunk):
    m, l, O = np.full(len(S), -np.inf), np.zeros(len(S)), np.zeros((len(S), V.shape[1]))
    for first in range(0, S.shape[1], chunk):
        part = np.array(S[:, first : first + chunk])
        top = np.maximum(m, part.max(1))
        shift = np.where(top > -np.inf, top, 0)
        part -= shift[:, None]
        np.exp(part, out=part)
        m -= shift
        np.exp(m, out=m)
        l *= m
        O *= m[:, None]
        l += part.sum(1)
        O += part @ V[first : first + chunk]
        m = top
    empty = l == 0
    l[empty] = 1
    O /= l[:, None]
    return O, m + np.log(l)


def attend_row_by_row(S, V, chunk):
    """Scalars and lists only; the chunk decides when the maximum is taken again."""
    outs, sums = [], []
    for row in S:
        m, l, O = -math.inf, 0.0, [0.0] * V.shape[1]
        for first in range(0, len(row), chunk):
            part = range(first, min(first + chunk, len(row)))
            top = max(m, *(row[j] for j in part)) if len(part) else m
            if top == -math.inf:
                continue
            factor = math.exp(m - top)
            weights = [math.exp(row[j] - top) for j in part]
            l = l * factor + math.fsum(weights)
            O = [
                x * factor + sum(w * V[j, k] for w, j in zip(weights, part, strict=True))
                for k, x in enumerate(O)
            ]
            m = top
        outs.append([x / l for x in O] if l else O)
        sums.append(m + math.log(l) if l else -math.inf)
    return np.array(outs), np.array(sums)


def attend_divided_each_time(S, V, chunk):
    """As Algorithm 1 does it: O is divided in every step, and multiplied by the old l first."""
    rows, keys = S.shape
    L = np.full(rows, -np.inf)
    O = np.zeros((rows, V.shape[1]))
    for j in range(-(-keys // chunk)):
        s, v = S[:, j * chunk : (j + 1) * chunk], V[j * chunk : (j + 1) * chunk]
        top = s.max(axis=1, keepdims=True)
        p = np.exp(s - np.where(np.isinf(top), 0.0, top))
        l = p.sum(axis=1)
        L_part = np.where(l > 0, np.log(np.where(l > 0, l, 1)) + top[:, 0], -np.inf)
        L_new = np.logaddexp(L, L_part)
        seen = L_new > -np.inf
        old, new = np.zeros(rows), np.zeros(rows)
        old[seen], new[seen] = np.exp((L - L_new)[seen]), np.exp((L_part - L_new)[seen])
        O = old[:, None] * O + new[:, None] * ((p @ v) / np.where(l > 0, l, 1)[:, None])
        L = L_new
    return O, L


def attend_halves(S, V, chunk):
    """Recursion: the two halves of the chunks, then one merge."""

    def state(first, last):
        if last - first <= chunk:
            s = S[:, first:last]
            m = s.max(axis=1)
            p = np.exp(s - np.where(m == -np.inf, 0, m)[:, None])
            return m, p.sum(axis=1), p @ V[first:last]
        middle = first + chunk * ((last - first + chunk - 1) // chunk // 2)
        (ma, la, Oa), (mb, lb, Ob) = state(first, middle), state(middle, last)
        m = np.maximum(ma, mb)
        finite = np.where(m == -np.inf, 0, m)
        a, b = np.exp(ma - finite), np.exp(mb - finite)
        return m, a * la + b * lb, a[:, None] * Oa + b[:, None] * Ob

    m, l, O = state(0, len(V))
    with np.errstate(divide="ignore"):
        return O / np.maximum(l, 1e-300)[:, None], m + np.log(np.where(l == 0, 1, l))


def attend_one_more_column(S, V, chunk):
    """l rides along as one more column of O, whose value is 1."""
    ones = np.ones((len(V), 1))
    m, state = np.full((len(S), 1), -np.inf), np.zeros((len(S), V.shape[1] + 1))
    starts = list(range(0, len(V), chunk))
    while starts:
        k = starts.pop(0)
        s = S[:, k : k + chunk]
        new = np.max(np.concatenate([m, s], axis=1), axis=1, keepdims=True)
        shift = np.nan_to_num(new, neginf=0.0)
        values = np.concatenate([V[k : k + chunk], ones[k : k + chunk]], axis=1)
        state = state * np.exp(m - shift) + np.exp(s - shift) @ values
        m = new
    O, l = state[:, :-1], state[:, -1]
    L = np.full(len(S), -np.inf)
    L[l > 0] = m[l > 0, 0] + np.log(l[l > 0])
    return np.divide(O, l[:, None], out=np.zeros_like(O), where=l[:, None] > 0), L


ATTEND_RIGHT = [attend_in_place, attend_row_by_row, attend_divided_each_time, attend_halves,
                attend_one_more_column]  # fmt: skip


@pytest.mark.parametrize("program", ATTEND_RIGHT)
def test_ex01_attend_passes_in_any_style(program):
    passes("ex01-attend", program)


# ---------------------------------------------------------------- exercise 1: attend, wrong


def row_wise(S, V, chunk, *, row):
    """row takes the chunks of one row, as (scores, values) pairs, and gives its O and L."""
    cuts = range(chunk, S.shape[1], chunk)
    pairs = [row(list(zip(np.split(s, cuts), np.split(V, cuts), strict=True))) for s in S]
    return np.array([O for O, _ in pairs]), np.array([L for _, L in pairs])


def wrong_no_max(chunks):
    l = sum(np.exp(s).sum() for s, _ in chunks)
    return sum((np.exp(s)[:, None] * v).sum(0) for s, v in chunks) / l, np.log(l)


def wrong_zero(chunks):
    tops = np.maximum.accumulate([0.0, *(s.max() for s, _ in chunks)])
    return _finished(chunks, tops[1:], tops[:-1])


def _finished(chunks, tops, before, l_on=True, O_on=True, sign=1):
    l, O = 0.0, 0.0
    for (s, v), top, old in zip(chunks, tops, before, strict=True):
        factor = np.exp(sign * (old - top))
        l = l * (factor if l_on else 1) + np.exp(s - top).sum()
        O = O * (factor if O_on else 1) + np.exp(s - top) @ v
    return O / l, tops[-1] + np.log(l)


def _tops(chunks):
    tops = np.maximum.accumulate([s.max() for s, _ in chunks])
    return tops, np.concatenate([[-np.inf], tops[:-1]])


def wrong_first(chunks):
    top = chunks[0][0].max()
    return _finished(chunks, [top] * len(chunks), [top] * len(chunks))


def wrong_own_maximum(chunks):
    tops = [s.max() for s, _ in chunks]
    return _finished(chunks, tops, [-np.inf, *tops[:-1]])


def wrong_each_chunk(chunks):
    m, l, O = -np.inf, 0.0, 0.0
    for s, v in chunks:
        top = max(m, s.max())
        l = l * np.exp(m - top) + np.exp(s - top).sum()
        O = (O * np.exp(m - top) + np.exp(s - top) @ v) / l
        m = top
    return O, m + np.log(l)


def wrong_not_divided(chunks):
    O, L = _finished(chunks, *_tops(chunks))
    return O * np.exp(L - _tops(chunks)[0][-1]), L


def wrong_L(chunks):
    O, L = _finished(chunks, *_tops(chunks))
    return O, L - _tops(chunks)[0][-1]


def wrong_last_chunk(chunks):
    whole = [c for c in chunks if len(c[0]) == len(chunks[0][0])]
    return _finished(whole, *_tops(whole))


ATTEND_WRONG = {
    "no-max": wrong_no_max,
    "max-starts-at-0": wrong_zero,
    "max-of-first-chunk": wrong_first,
    "max-of-this-chunk": wrong_own_maximum,
    "nothing-rescaled": lambda c: _finished(c, *_tops(c), l_on=False, O_on=False),
    "O-not-rescaled": lambda c: _finished(c, *_tops(c), O_on=False),
    "l-not-rescaled": lambda c: _finished(c, *_tops(c), l_on=False),
    "rescale-inverted": lambda c: _finished(c, *_tops(c), sign=-1),
    "normalised-in-each-chunk": wrong_each_chunk,
    "never-divided": wrong_not_divided,
    "L-without-m": wrong_L,
    "last-chunk-lost": wrong_last_chunk,
    "no-guard": lambda c: _finished(c, *_tops(c)),
}


def test_ex01_no_max_is_named_however_an_empty_sum_is_guarded():
    def program(S, V, chunk):
        l, O = np.zeros(len(S)), np.zeros((len(S), V.shape[1]))
        for k in range(0, len(V), chunk):
            e = np.exp(S[:, k : k + chunk])
            l, O = l + e.sum(axis=1), O + e @ V[k : k + chunk]
        L = np.full(len(S), -np.inf)
        np.log(l, out=L, where=l > 0)
        return O / np.where(l > 0, l, 1)[:, None], L

    is_called("ex01-attend", "no-max", program)


@pytest.mark.parametrize("name", ATTEND_WRONG)
def test_ex01_attend_names_the_idea(name):
    def program(S, V, chunk):
        return row_wise(S, V, chunk, row=ATTEND_WRONG[name])

    is_called("ex01-attend", name, program)


def test_ex01_attend_wants_one_chunk_at_a_time():
    def all_at_once(S, V, chunk):
        m = S.max(axis=1)
        e = np.exp(S - np.where(m == -np.inf, 0, m)[:, None])
        l = e.sum(axis=1)
        return e @ V / np.where(l == 0, 1, l)[:, None], m + np.log(np.where(l == 0, 1, l))

    is_called("ex01-attend", "all-keys-at-once", all_at_once)


def test_ex01_attend_may_not_call_the_library():
    def borrowed(S, V, chunk):
        state = online.start(len(S), V.shape[1])
        for k in range(0, len(V), chunk):
            state = online.update(state, S[:, k : k + chunk], V[k : k + chunk])
        return online.finish(state)

    is_called("ex01-attend", "calls-the-library", borrowed)


# ---------------------------------------------------------------- exercise 1: merge, right


def merge_by_the_larger(m1, l1, O1, m2, l2, O2):
    """The larger side first, then one factor: e^-|m1 - m2|."""
    swap = m2 > m1
    big_m, small_m = np.where(swap, m2, m1), np.where(swap, m1, m2)
    big_l, small_l = np.where(swap, l2, l1), np.where(swap, l1, l2)
    big_O, small_O = np.where(swap[:, None], O2, O1), np.where(swap[:, None], O1, O2)
    factor = np.zeros_like(big_m)
    seen = np.isfinite(small_m)
    factor[seen] = np.exp(small_m[seen] - big_m[seen])
    return big_m, big_l + factor * small_l, big_O + factor[:, None] * small_O


def merge_in_logs(m1, l1, O1, m2, l2, O2):
    """Through L = m + log l of each side, and back."""
    with np.errstate(divide="ignore"):
        L = np.logaddexp(m1 + np.log(l1), m2 + np.log(l2))
    m = np.maximum(m1, m2)
    base = np.where(m == -np.inf, 0.0, m)
    scaled = [np.exp(x - base)[:, None] * y for x, y in ((m1, O1), (m2, O2))]
    return m, np.exp(L - base), scaled[0] + scaled[1]


def merge_rows(m1, l1, O1, m2, l2, O2):
    m, l, O = [], [], []
    for a, b in zip(zip(m1, l1, O1, strict=True), zip(m2, l2, O2, strict=True), strict=True):
        if a[1] == 0:
            row = b
        elif b[1] == 0:
            row = a
        else:
            top = max(a[0], b[0])
            x, y = math.exp(a[0] - top), math.exp(b[0] - top)
            row = top, x * a[1] + y * b[1], x * a[2] + y * b[2]
        for to, value in zip((m, l, O), row, strict=True):
            to.append(value)
    return np.array(m), np.array(l), np.array(O)


def merge_stacked(m1, l1, O1, m2, l2, O2):
    """Softmax over the two sides, as two keys."""
    m = np.stack([m1, m2])
    top = m.max(axis=0)
    w = np.exp(m - np.nan_to_num(top, neginf=0))
    both = np.stack([np.column_stack([O1, l1]), np.column_stack([O2, l2])])
    total = np.einsum("sr,srd->rd", w, both)
    return top, total[:, -1], total[:, :-1]


MERGE_RIGHT = [merge_by_the_larger, merge_in_logs, merge_rows, merge_stacked]


@pytest.mark.parametrize("program", MERGE_RIGHT)
def test_ex01_merge_passes_in_any_style(program):
    passes("ex01-merge", program)


# ---------------------------------------------------------------- exercise 1: merge, wrong


def by_row(row):
    """row(a, b) -> m, l, O, each of a and b a row's (m, l, O)."""

    def program(m1, l1, O1, m2, l2, O2):
        a, b = zip(m1, l1, O1, strict=True), zip(m2, l2, O2, strict=True)
        out = [row(x, y) for x, y in zip(a, b, strict=True)]
        return tuple(np.array(column) for column in zip(*out, strict=True))

    return program


def _with(a, b, x, y, m=None):
    """The sums with weights x and y: m is the larger maximum unless given."""
    return max(a[0], b[0]) if m is None else m, x * a[1] + y * b[1], x * a[2] + y * b[2]


def _weights(a, b, top=None):
    top = max(a[0], b[0]) if top is None else top
    return np.exp(a[0] - top), np.exp(b[0] - top)


def merge_of_means(a, b):
    m, l, O = _with(a, b, *_weights(a, b))
    return m, l, l * (a[2] / a[1] + b[2] / b[1]) / 2 / l


def merge_l_weighted(a, b):
    m, l, _ = _with(a, b, *_weights(a, b))
    return m, l, (a[1] * a[2] + b[1] * b[2]) / (a[1] + b[1])


def merge_taken_as_divided(a, b):
    m, l, _ = _with(a, b, *_weights(a, b))
    x, y = _weights(a, b)
    return m, l, (x * a[1] * a[2] + y * b[1] * b[2]) / l


def merge_divided(a, b):
    m, l, O = _with(a, b, *_weights(a, b))
    return m, l, O / l


def merge_guard_leaks(a, b):
    top = max(a[0], b[0])
    top = 0.0 if top == -np.inf else top
    return _with(a, b, *_weights(a, b, top), m=top)


def merge_l_one(a, b):
    top = max(a[0], b[0])
    m, l, O = _with(a, b, *_weights(a, b, 0.0 if top == -np.inf else top))
    return m, l or 1.0, O


MERGE_WRONG = {
    "added-without-rescale": [lambda a, b: _with(a, b, 1.0, 1.0)],
    "averaged": [
        lambda a, b: _with(a, b, 0.5, 0.5),
        lambda a, b: _with(a, b, 0.5, 0.5, m=(a[0] + b[0]) / 2),
        lambda a, b: _with(a, b, *(w / 2 for w in _weights(a, b))),
    ],
    "one-side-rescaled": [
        lambda a, b: _with(a, b, _weights(a, b)[0], 1.0),
        lambda a, b: _with(a, b, 1.0, _weights(a, b)[1]),
    ],
    "one-maximum-taken": [
        lambda a, b: _with(a, b, np.exp(a[0] - b[0]), 1.0, m=b[0]),
        lambda a, b: _with(a, b, 1.0, np.exp(b[0] - a[0])),
    ],
    "normalised-outputs-averaged": [merge_of_means],
    "l-weighted-without-m": [merge_l_weighted],
    "O-taken-as-divided": [merge_taken_as_divided],
    "divided-in-the-merge": [merge_divided],
    "sum-of-maxima": [
        lambda a, b: _with(a, b, np.exp(-b[0]), np.exp(-a[0]), m=a[0] + b[0]),
        lambda a, b: _with(a, b, *_weights(a, b), m=a[0] + b[0]),
    ],
    "smaller-maximum": [
        lambda a, b: _with(a, b, *_weights(a, b, min(a[0], b[0])), m=min(a[0], b[0]))
    ],
    "factor-inverted": [lambda a, b: _with(a, b, *(1 / w for w in _weights(a, b)))],
    "factors-crossed": [lambda a, b: _with(a, b, *_weights(b, a))],
    "O-not-rescaled": [lambda a, b: (*_with(a, b, *_weights(a, b))[:2], a[2] + b[2])],
    "l-not-rescaled": [
        lambda a, b: (max(a[0], b[0]), a[1] + b[1], _with(a, b, *_weights(a, b))[2])
    ],
    "relative-to-zero": [
        lambda a, b: _with(a, b, np.exp(a[0]), np.exp(b[0])),
        lambda a, b: _with(a, b, np.exp(a[0]), np.exp(b[0]), m=0.0),
    ],
    "bare-exponentials": [
        lambda a, b: _with(a, b, *(np.exp(x[0]) / np.exp(max(a[0], b[0])) for x in (a, b)))
    ],
    "no-guard": [lambda a, b: _with(a, b, *_weights(a, b))],
    "guard-leaks": [merge_guard_leaks, merge_l_one],
}


@pytest.mark.parametrize("name", MERGE_WRONG)
def test_ex01_merge_names_the_idea(name):
    for row in MERGE_WRONG[name]:
        is_called("ex01-merge", name, by_row(row))


def test_every_idea_of_ex01_has_a_program_here():
    assert set(ATTEND_WRONG) == {m.id for m in ex01.ATTEND.mistakes}
    assert set(MERGE_WRONG) == {m.id for m in ex01.MERGE_PIECES.mistakes}


# ---------------------------------------------------------------- exercise 3


def search(N, d, moved, standard=None, start=1, step=lambda M: M + 1):
    """The plain search that most people write: one M after the other."""
    standard = 4 * N * d + 4 * N * N if standard is None else standard
    M = start
    while moved(M) > standard:
        M = step(M)
    return M


def tiled(N, d, Tc, per_pass=None, once=None):
    per_pass = 3 * N * d + 4 * N if per_pass is None else per_pass
    return (2 * N * d if once is None else once) + Tc * per_pass


def Tc(N, d, M):
    Bc = math.ceil(M / (4 * d))
    return math.ceil(N / Bc)


def even_by_search(N, d):
    return search(N, d, lambda M: tiled(N, d, Tc(N, d, M)))


def even_by_library(N, d):
    def wins(M):
        return flash_traffic(N, d, *block_sizes(M, d)) <= standard_traffic(N, d)

    return 1 + bisect.bisect_left(range(1, 4 * d * N), True, key=wins)


def even_by_bisection(N, d):
    low, high = 1, 4 * d * N
    while low < high:
        M = (low + high) // 2
        if tiled(N, d, Tc(N, d, M)) <= 4 * N * (N + d):
            high = M
        else:
            low = M + 1
    return low


def even_by_rows(N, d):
    """Over Bc, then the first M that gives it; as a float on purpose."""
    for Bc in range(1, N + 1):
        if tiled(N, d, -(-N // Bc)) <= 4 * N * d + 4 * N**2:
            return float(4 * d * (Bc - 1) + 1)


def even_recursive(N, d, low=0, high=None):
    high = 8 * d * N if high is None else high
    if high - low == 1:
        return high
    M = (low + high) // 2
    wins = standard_traffic(N, d) >= tiled(N, d, Tc(N, d, M))
    return even_recursive(N, d, low, M) if wins else even_recursive(N, d, M, high)


EVEN_RIGHT = [even_by_search, even_by_library, even_by_bisection, even_by_rows, even_recursive]


@pytest.mark.parametrize("program", EVEN_RIGHT)
def test_ex03_break_even_passes_in_any_style(program):
    passes("ex03-break-even", program)


def even_that_fits(N, d):
    def fits(M):
        Br, Bc = block_sizes(M, d)
        return 2 * Bc * d + 2 * Br * d + Br * Bc <= M

    M = even_by_bisection(N, d)
    while not fits(M):
        M += 1
    return M


def q_outer_search(N, d):
    def moved(M):
        Br = min(math.ceil(M / (4 * d)), d)
        return 2 * N * d + N + 2 * N * d * math.ceil(N / Br)

    return search(N, d, moved)


EVEN_WRONG = {
    "Bc-rounded-down": [
        lambda N, d: search(
            N, d, lambda M: tiled(N, d, math.ceil(N / (M // (4 * d)))), start=4 * d
        ),
        lambda N, d: search(
            N, d, lambda M: tiled(N, d, Tc(N, d, M)), start=4 * d, step=lambda M: M + 4 * d
        ),
    ],
    "Bc-not-rounded": [lambda N, d: search(N, d, lambda M: tiled(N, d, math.ceil(N * 4 * d / M)))],
    "passes-not-rounded": [
        lambda N, d: search(N, d, lambda M: tiled(N, d, N / math.ceil(M / (4 * d))))
    ],
    "nothing-rounded": [lambda N, d: search(N, d, lambda M: tiled(N, d, 4 * N * d / M))],
    "asymptotic": [
        lambda N, d: d * (3 * d + 4),
        lambda N, d: search(N, d, lambda M: 12 * d * d * N * N / M, standard=4 * N * N),
    ],
    "order-without-constants": [
        lambda N, d: search(N, d, lambda M: N * N * d * d / M, standard=N * N)
    ],
    "one-short": [lambda N, d: even_by_search(N, d) - 1],
    "one-over": [lambda N, d: even_by_search(N, d) + 1],
    "bytes": [lambda N, d: even_by_search(N, d) * 2],
    "only-N-squared": [
        lambda N, d: search(N, d, lambda M: tiled(N, d, Tc(N, d, M)), standard=4 * N**2)
    ],
    "S-and-P-once": [
        lambda N, d: search(
            N, d, lambda M: tiled(N, d, Tc(N, d, M)), standard=2 * N * N + 4 * N * d
        )
    ],
    "K-and-V-forgotten": [lambda N, d: search(N, d, lambda M: tiled(N, d, Tc(N, d, M), once=0))],
    "l-and-m-forgotten": [
        lambda N, d: search(N, d, lambda M: tiled(N, d, Tc(N, d, M), per_pass=3 * N * d))
    ],
    "O-not-read-back": [
        lambda N, d: search(N, d, lambda M: tiled(N, d, Tc(N, d, M), per_pass=2 * N * d + 4 * N))
    ],
    "powers-of-two": [
        lambda N, d: search(N, d, lambda M: tiled(N, d, Tc(N, d, M)), step=lambda M: 2 * M)
    ],
    "q-outer": [q_outer_search],
    "tiles-must-fit": [even_that_fits],
}


@pytest.mark.parametrize("name", EVEN_WRONG)
def test_ex03_break_even_names_the_idea(name):
    for program in EVEN_WRONG[name]:
        is_called("ex03-break-even", name, program, range(2))


def test_every_idea_of_ex03_has_a_program_here():
    assert set(EVEN_WRONG) == {m.id for m in ex03.BREAK_EVEN.mistakes}


def test_ex03_numbers_are_the_worked_answers():
    truth = {q.id: q.truth() for q in ex03.QUESTIONS if isinstance(q, Number)}
    assert truth["ex03-smallest"] == 12_289 and truth["ex03-bytes"] == 24_578
    assert truth["ex03-wide"] == 49_665 and truth["ex03-need"] == 14_945
    assert check("ex03-fits", 8 * 64**2).status == "passed"
    assert check("ex03-fits", 8 * 64**2 + 9 * 64).status == "passed"  # with the rounding
    found = {N: ex03.right(N, 64) for N in (512, 1024, 2048, 8192, 16384)}
    assert found == {512: 11_777, 1024: 12_289, 2048: 12_289, 8192: 12_545, 16384: 12_289}


# ---------------------------------------------------------------- exercise 7


def time_in_two_lines(gpu, N, d, heads):
    moved, flops = 2 * heads * standard_traffic(N, d), heads * 4 * N * N * d
    return max(moved / gpu.bandwidth, flops / gpu.tensor_flops)


def time_by_the_roof(gpu, N, d, heads):
    """Work over what the roofline lets it reach."""
    intensity = N * d / (2 * (N + d))
    reached = min(gpu.tensor_flops, gpu.bandwidth * intensity)
    return heads * 4 * N**2 * d / reached


def time_by_kernel(gpu, N, d, heads):
    """Adds up three kernels, each a dict of what it does, for each head."""
    flops = bytes_ = 0.0
    for _ in range(heads):
        for arrays, work in (
            (((N, d), (N, d), (N, N)), 2.0 * N * N * d),
            (((N, N), (N, N)), 0.0),
            (((N, N), (N, d), (N, d)), 2.0 * N * N * d),
        ):
            bytes_ += sum(2 * rows * columns for rows, columns in arrays)
            flops += work
    loading, computing = bytes_ / gpu.bandwidth, flops / gpu.tensor_flops
    return loading if loading > computing else computing


def time_in_arrays(gpu, N, d, heads):
    """In TFLOP and TB, vectorised over the two limits, with a numpy result."""
    work = np.array([heads * 4 * N * N * d, 8 * heads * N * (N + d)]) / 1e12
    return np.max(work / (np.array([gpu.tensor_flops, gpu.bandwidth]) / 1e12))


TIME_RIGHT = [time_in_two_lines, time_by_the_roof, time_by_kernel, time_in_arrays]


@pytest.mark.parametrize("program", TIME_RIGHT)
def test_ex07_attention_time_passes_in_any_style(program):
    passes("ex07-attention-time", program)


def limits(gpu, N, d, heads, elements=None, size=2, work=None):
    elements = 4 * N * (N + d) if elements is None else elements
    work = 4 * N * N * d if work is None else work
    return heads * elements * size / gpu.bandwidth, heads * work / gpu.tensor_flops


def kernel_bounds(gpu, N, d, heads):
    total = 0.0
    for elements, work in ((2 * N * d + N * N, 2 * N * N * d), (2 * N * N, 0)):
        total += (2 if work else 1) * max(limits(gpu, N, d, heads, elements, work=work))
    return total


def score_roof(gpu, N, d, heads):
    per_byte = 2 * N * N * d / (2 * (2 * N * d + N * N))
    return heads * 4 * N * N * d / min(gpu.tensor_flops, per_byte * gpu.bandwidth)


TIME_WRONG = {
    "elements-for-bytes": [lambda *a: max(limits(*a, size=1))],
    "four-bytes": [lambda *a: max(limits(*a, size=4))],
    "half-the-computing": [
        lambda gpu, N, d, h: max(limits(gpu, N, d, h, work=2 * N * N * d)),
        lambda gpu, N, d, h: max(  # the peak with sparsity
            limits(gpu, N, d, h)[0], 4 * N * N * d * h / (2 * gpu.tensor_flops)
        ),
    ],
    "sum-of-both": [lambda *a: sum(limits(*a))],
    "shorter-of-both": [lambda *a: min(limits(*a))],
    "loading-only": [lambda *a: limits(*a)[0]],
    "computing-only": [lambda *a: limits(*a)[1]],
    "gib-for-gb": [
        lambda gpu, N, d, h: max(
            (8 * h * N * (N + d) / 2**30) / (gpu.bandwidth / 1e9), limits(gpu, N, d, h)[1]
        )
    ],
    "one-head": [lambda gpu, N, d, h: max(limits(gpu, N, d, 1))],
    "d-shared-by-heads": [
        lambda gpu, N, d, h: max(limits(gpu, N, d / h, h)),
        lambda gpu, N, d, h: max(limits(gpu, N, d // h, h)),
    ],
    "fp32-cores": [
        lambda gpu, N, d, h: max(limits(gpu, N, d, h)[0], 4 * N * N * d * h / gpu.fp32_flops)
    ],
    "scores-only": [
        lambda gpu, N, d, h: max(limits(gpu, N, d, h, elements=N * (N + 2 * d), work=2 * N * N * d))
    ],
    "kernel-by-kernel": [kernel_bounds],
    "S-once": [lambda gpu, N, d, h: max(limits(gpu, N, d, h, elements=N * N + 4 * N * d))],
    "softmax-left-out": [
        score_roof,
        lambda gpu, N, d, h: max(limits(gpu, N, d, h, elements=2 * N * (N + 2 * d))),
    ],
    "three-crossings": [
        lambda gpu, N, d, h: max(limits(gpu, N, d, h, elements=3 * N * N + 4 * N * d))
    ],
    "inputs-forgotten": [lambda gpu, N, d, h: max(limits(gpu, N, d, h, elements=4 * N * N))],
    "already-fused": [lambda gpu, N, d, h: max(limits(gpu, N, d, h, elements=4 * N * d))],
    "milliseconds": [lambda *a: 1000 * max(limits(*a))],
}


@pytest.mark.parametrize("name", TIME_WRONG)
def test_ex07_attention_time_names_the_idea(name):
    for program in TIME_WRONG[name]:
        is_called(
            "ex07-attention-time",
            name,
            lambda gpu, N, d, heads, program=program: program(gpu, N, d, heads),
        )


def test_every_idea_of_ex07_has_a_program_here():
    assert set(TIME_WRONG) == {m.id for m in ex07.ATTENTION_TIME.mistakes}


def test_ex07_wants_the_roofline_written_out():
    def borrowed(gpu, N, d, heads):
        return max(time_bound(gpu, heads * 4 * N * N * d, 2 * heads * standard_traffic(N, d))[:2])

    is_called("ex07-attention-time", "calls-the-library", borrowed)


def test_ex07_numbers_are_the_worked_answers():
    truth = {q.id: q.truth() for q in ex07.QUESTIONS if isinstance(q, Number)}
    rounded = {id: round(value, 2) for id, value in truth.items()}
    assert rounded["ex07-bytes"] == 4.43 and rounded["ex07-flops"] == 274.88
    assert rounded["ex07-intensity"] == 62.06 and rounded["ex07-ridge"] == 206.12
    assert rounded["ex07-time-a100"] == 2.17 and rounded["ex07-time-h200"] == 0.92
    assert rounded["ex07-fused"] == 124.11 and rounded["ex07-gain"] == 3.32


# ---------------------------------------------------------------- numbers: slips by hand

SLIPS = [
    ("ex03-smallest", 12_288, "one-short"),
    ("ex03-smallest", 3 * 64**2 + 4 * 64, "Bc-rounded-down"),
    ("ex03-smallest", 12_289 * 2, "bytes"),
    ("ex03-smallest", 16_384, "power-of-two"),
    ("ex03-smallest", 7_937, "q-outer"),
    ("ex03-smallest", 4_096, "d-squared"),
    ("ex03-smallest", 24_833, "S-and-P-once"),
    ("ex03-bytes", 12_289, "elements"),
    ("ex03-bytes", 49_156, "four-bytes"),
    ("ex03-bytes", 24_576, "from-12288"),
    ("ex03-bytes", 24.6, "in-kB"),
    ("ex03-bytes", 24.0, "in-KiB"),
    ("ex03-wide", 49_664, "one-short"),
    ("ex03-wide", 50_176, "Bc-rounded-down"),
    ("ex03-wide", 4 * 12_289, "four-times"),
    ("ex03-wide", 2 * 12_289, "twice"),
    ("ex03-wide", 99_330, "bytes"),
    ("ex03-need", 12_544, "S-forgotten"),
    ("ex03-need", 15_043, "l-and-m-counted"),
    ("ex03-need", 17_346, "S-and-P"),
    ("ex03-need", 17_600, "Br-is-d"),
    ("ex03-need", 12_289, "the-budget"),
    ("ex03-fits", 14_945, "the-need-is-the-answer"),
    ("ex03-fits", 16_384, "end-of-square-blocks"),
    ("ex03-fits", 20_480, "worst-need"),
    ("ex03-fits", 65_536, "bytes"),
    ("ex05-both", 25, "backward-alone"),
    ("ex05-both", 14.3, "over-the-new-total"),
    ("ex05-both", 33.3, "whole-forward-again"),
    ("ex05-both", 50, "over-the-forward"),
    ("ex05-backward", 16.7, "both-passes"),
    ("ex05-backward", 20, "over-the-new-total"),
    ("ex05-backward", 50, "whole-forward-again"),
    ("ex05-backward", 150, "against-the-forward"),
    ("ex05-printed", 11.4, "over-the-new-total"),
    ("ex05-printed", 8.6, "the-difference"),
    ("ex05-printed", 16.7, "by-count"),
    ("ex05-printed", 112.9, "the-ratio"),
    ("ex05-unit", 4.29, "one-flop-for-two"),
    ("ex05-unit", 0.134, "one-pair"),
    ("ex05-unit", 137.4, "all-pairs"),
    ("ex05-unit", 8.0, "binary-giga"),
    ("ex05-saved", 25.9, "standard-alone"),
    ("ex05-saved", 2.83, "flash-alone"),
    ("ex05-saved", 35.9 * 1.073741824 / 1.555, "gib-for-gb"),
    ("ex05-saved", 35.9 / 2.039, "other-card"),
    ("ex05-saved", 0.0231, "seconds"),
    ("ex05-saved", 23_087, "microseconds"),
    ("ex05-price", 8.6 / 312, "64-pairs"),
    ("ex05-price", 0.22, "half-of-it"),
    ("ex05-price", 3.08, "all-seven"),
    ("ex05-price", 137.4 / 19.5, "fp32-cores"),
    ("ex05-price", 0.00044, "seconds"),
    ("ex05-largest-d", 76.5, "one-byte-an-element"),
    ("ex05-largest-d", 306, "one-flop-for-two"),
    ("ex05-largest-d", 200.6, "other-card"),
    ("ex05-largest-d", 9.56, "fp32-cores"),
    ("ex07-bytes", 2.21, "elements-for-bytes"),
    ("ex07-bytes", 8.86, "four-bytes"),
    ("ex07-bytes", 4.125, "gib-for-gb"),
    ("ex07-bytes", 0.138, "one-head"),
    ("ex07-bytes", 1.21, "S-once"),
    ("ex07-bytes", 2.28, "written-not-read"),
    ("ex07-bytes", 4.295, "inputs-forgotten"),
    ("ex07-bytes", 0.134, "already-fused"),
    ("ex07-flops", 137.4, "half-of-it"),
    ("ex07-flops", 68.7, "quarter-of-it"),
    ("ex07-flops", 8.59, "one-head"),
    ("ex07-flops", 962, "with-backward"),
    ("ex07-intensity", 124, "per-element"),
    ("ex07-intensity", 120.5, "scores-only"),
    ("ex07-intensity", 31, "half-of-it"),
    ("ex07-intensity", 274.88 / 4.125, "gib-for-gb"),
    ("ex07-intensity", 2048, "already-fused"),
    ("ex07-ridge", 1979 / 4.8, "sparse-peak"),
    ("ex07-ridge", 295, "H100"),
    ("ex07-ridge", 153, "A100"),
    ("ex07-ridge", 66.9 / 4.8, "fp32-cores"),
    ("ex07-ridge", 221, "gib-for-gb"),
    ("ex07-ridge", 0.00485, "upside-down"),
    ("ex07-time-a100", 0.88, "computing-only"),
    ("ex07-time-a100", 3.05, "sum-of-both"),
    ("ex07-time-a100", 1.086, "elements-for-bytes"),
    ("ex07-time-a100", 4.125 / 2.039, "gib-for-gb"),
    ("ex07-time-a100", 4.43 / 1.555, "other-card"),
    ("ex07-time-a100", 0.0679, "one-head"),
    ("ex07-time-h200", 0.278, "computing-only"),
    ("ex07-time-h200", 1.2, "sum-of-both"),
    ("ex07-time-h200", 2.172 * 312 / 989.4, "scaled-by-flops"),
    ("ex07-time-h200", 4.125 / 4.8, "gib-for-gb"),
    ("ex07-time-h200", 4.43 / 3.35, "H100"),
    ("ex07-fused", 128, "one-step"),
    ("ex07-fused", 2048, "each-once"),
    ("ex07-fused", 62.06, "standard"),
    ("ex07-fused", 241, "K-without-V"),
    ("ex07-fused", 248.2, "per-element"),
    ("ex07-gain", 33, "bytes-are-time"),
    ("ex07-gain", 2.47, "A100"),
    ("ex07-gain", 2, "no-cache"),
    ("ex07-gain", 4.32, "sum-before"),
]


@pytest.mark.parametrize(("id", "answer", "name"), SLIPS)
def test_a_slip_is_called_by_its_name(id, answer, name):
    result = check(id, answer)
    assert (result.status, result.misconception) == ("not yet", name), result
    assert len(repr(result).splitlines()) <= 5


def test_every_slip_has_a_number_here():
    here = {(id, name) for id, _, name in SLIPS}
    assert here == {(q.id, name) for q in MINE if isinstance(q, Number) for name in q.slips}


def test_ex05_numbers_are_the_worked_answers():
    right = {"both": 16.7, "backward": 25, "printed": 12.9, "unit": 8.59, "saved": 23.1,
             "price": 0.44, "largest-d": 153}  # fmt: skip
    assert {f"ex05-{name}" for name in right} == {
        q.id for q in ex05.QUESTIONS if isinstance(q, Number)
    }
    for name, answer in right.items():
        assert check(f"ex05-{name}", answer).status == "passed", name


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("q", [q for q in MINE if isinstance(q, Choice)], ids=lambda q: q.id)
def test_a_choice_fits_on_five_lines(q):
    for letter in q.options:
        assert len(repr(check(q.id, letter)).splitlines()) <= 5


def test_where_to_read_is_a_heading_of_a_notebook():
    headings = {}
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
        headings[path.stem[:2]] = set(re.findall(r"^## (.+)$", text, re.MULTILINE))
    for q in MINE:
        if isinstance(q, Program):
            for read in {q.read, *(m.read for m in q.mistakes)}:
                number, quote, heading = re.fullmatch(
                    r"notebook (\d\d), (['\"])(.+)\2", read
                ).groups()
                assert heading in headings[number], read
