"""Exercise 2: right programs in any style pass, wrong ones are named, in any style.

The wrong programs here are made from right ones by changing lines. Those are written in another
way than the registry's loop: Q blocks outside, O as a plain sum, one row at a time.
"""

import ast
import itertools
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attention_lib.checks.exercises import ex02, ex02_faded, ex02_parsons
from attention_lib.checks.gaps import filled, two_gaps
from attention_lib.checks.judge import as_arrays, copies, first_difference, same
from attention_lib.checks.parsons import Line, Parsons, check_parsons
from attention_lib.checks.programs import check_program
from attention_lib.checks.result import NOT_ATTEMPTED, NOT_YET, PASSED, RAISED
from attention_lib.reference import finite_or_zero

ROOT = Path(__file__).parent.parent
QUICK = replace(ex02.FLASH, memory=None)  # the memory claim has its own test
SEEDS = range(2)  # test_checks_seeds.py has many more


# ---- right programs


def k_outer(Q, K, V, Br, Bc, causal=False):
    """Algorithm 1 as printed, with both guards; hidden tiles are skipped."""
    Nq, Nk = len(Q), len(K)
    O, l, m = np.zeros_like(Q), np.zeros(Nq), np.full(Nq, -np.inf)
    for j in range(0, Nk, Bc):
        for i in range(0, Nq, Br):
            last = min(i + Br, Nq) - 1
            if causal and j > last + Nk - Nq:
                continue
            S = Q[i : i + Br] @ K[j : j + Bc].T / np.sqrt(Q.shape[1])
            if causal:
                S = np.where(np.tri(*S.shape, i + Nk - Nq - j, dtype=bool), S, -np.inf)
            mt = S.max(1)
            fixed = np.where(mt == -np.inf, 0, mt)
            P = np.exp(S - fixed[:, None])
            lt, mi, li = P.sum(1), m[i : i + Br].copy(), l[i : i + Br].copy()
            mn = np.maximum(mi, mt)
            ref = np.where(mn == -np.inf, 0, mn)
            a, b = np.exp(mi - ref), np.exp(mt - ref)
            ln = a * li + b * lt
            den = ln + (ln == 0)
            O[i : i + Br] = (a * li / den)[:, None] * O[i : i + Br] + (b / den)[:, None] * (
                P @ V[j : j + Bc]
            )
            l[i : i + Br], m[i : i + Br] = ln, mn
    return O, l, m


Q_OUTER = """
def flash_attention(Q, K, V, Br, Bc, causal=False):
    (Nq, d), Nk = Q.shape, K.shape[0]
    out, sums, tops = np.zeros_like(Q), np.zeros(Nq), np.full(Nq, -np.inf)
    for a in range(-(-Nq // Br)):
        first = a * Br
        q = Q[first : first + Br] * (1 / math.sqrt(d))
        acc, tot, top = np.zeros_like(q), np.zeros(len(q)), np.full(len(q), -np.inf)
        for b in range(-(-Nk // Bc)):
            k, v = K[b * Bc : (b + 1) * Bc], V[b * Bc : (b + 1) * Bc]
            x = np.inner(q, k)
            if causal:
                for r in range(len(q)):
                    x[r, max(0, first + r + Nk - Nq + 1 - b * Bc) :] = -np.inf
            new = np.maximum(top, x.max(axis=1))
            ref = np.where(np.isfinite(new), new, 0.0)
            w = np.exp(x - ref[:, None])
            keep = np.exp(top - ref)
            tot = tot * keep + w.sum(axis=1)
            acc = acc * keep[:, None] + w @ v
            top = new
        out[first : first + Br] = acc / np.where(tot > 0, tot, 1.0)[:, None]
        sums[first : first + Br], tops[first : first + Br] = tot, top
    return out, sums, tops
"""

ONE_ROW = """
def flash_attention(Q, K, V, Br, Bc, causal=False):
    Nq, Nk, d = len(Q), len(K), Q.shape[1]
    O, l, m = [], [], []
    for i in range(Nq):
        top, total, acc = -math.inf, 0.0, np.zeros(d)
        for j0 in range(0, Nk, Bc):
            keys = [j for j in range(j0, min(j0 + Bc, Nk)) if not causal or j <= i + Nk - Nq]
            if not keys:
                break
            s = [float(sum(Q[i] * K[j])) / math.sqrt(d) for j in keys]
            new = max([top, *s])
            p = [math.exp(x - new) for x in s]
            total = math.exp(top - new) * total + sum(p)
            acc = math.exp(top - new) * acc + sum(x * V[j] for x, j in zip(p, keys))
            top = new
        O.append(acc / total if total else acc)
        l.append(total)
        m.append(top)
    return np.array(O), np.array(l), np.array(m)
"""

STEP_BY_ROW = """
def inner_step(Qi, Kj, Vj, Oi, li, mi):
    O, l, m = np.empty(Oi.shape), np.empty(li.shape), np.empty(mi.shape)
    for r in range(len(Qi)):
        s = Kj @ Qi[r] * Qi.shape[1] ** -0.5
        new = max(mi[r], s.max())
        p = np.exp(s - new)
        keep = np.exp(mi[r] - new)
        l[r] = keep * li[r] + p.sum()
        O[r] = (keep * li[r] * Oi[r] + p @ Vj) / l[r]
        m[r] = new
    return O, l, m
"""


def made(source, *changes):
    """The function in the source after its lines were changed; each change must apply."""
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    names = {"np": np, "math": math}
    exec(compile(source, "<a learner>", "exec"), names)
    return names[ast.parse(source).body[0].name]


def all_rows_at_once(Q, K, V, Br, Bc, causal=False):
    """One K/V block against every query: Br is not used."""
    O, l = np.zeros(Q.shape), np.zeros(len(Q))
    m = np.full(len(Q), -np.inf)
    for j in range(0, len(K), Bc):
        S = Q @ K[j : j + Bc].T / Q.shape[1] ** 0.5
        if causal:
            S[np.arange(j, j + S.shape[1]) > np.arange(len(Q))[:, None] + len(K) - len(Q)] = -np.inf
        m_new = np.maximum(m, S.max(axis=1))
        seen = np.isfinite(m_new)
        P = np.exp(S[seen] - m_new[seen, None])
        old = np.exp(m[seen] - m_new[seen])
        l[seen] = old * l[seen] + P.sum(axis=1)
        O[seen] = old[:, None] * O[seen] + P @ V[j : j + Bc]
        m = m_new
    return O / np.maximum(l, np.finfo(float).tiny)[:, None], l, m


def in_place(Q, K, V, Br, Bc, causal=False):
    """Buffers that are made once, and every operation with out= or an assignment operator."""
    Nq, Nk = len(Q), len(K)
    O, l, m = np.zeros(Q.shape), np.zeros(Nq), np.full(Nq, -np.inf)
    buffer = np.empty((Br, Bc))
    for j in range(0, Nk, Bc):
        for i in range(0, Nq, Br):
            q, k, v, o = Q[i : i + Br], K[j : j + Bc], V[j : j + Bc], O[i : i + Br]
            S = buffer[: len(q), : len(k)]
            np.matmul(q, k.T, out=S)
            S /= math.sqrt(Q.shape[1])
            for r in range(len(q)):
                if causal:
                    S[r, max(0, i + r + Nk - Nq + 1 - j) :] = -np.inf
                top = max(m[i + r], S[r].max())
                if top == -np.inf:
                    continue
                S[r] -= top
                np.exp(S[r], out=S[r])
                keep = l[i + r] * np.exp(m[i + r] - top)
                l[i + r] = keep + S[r].sum()
                m[i + r] = top
                o[r] *= keep
                o[r] += S[r] @ v
                o[r] /= l[i + r]
    return O, l, m


def by_halves(Q, K, V, Br, Bc, causal=False, shift=None):
    """Recursion over the keys: two halves, and the merge of two finished answers."""
    shift = len(K) - len(Q) if shift is None else shift
    if len(K) > Bc:
        half = len(K) // 2
        left = by_halves(Q, K[:half], V[:half], Br, Bc, causal, shift)
        right = by_halves(Q, K[half:], V[half:], Br, Bc, causal, shift - half)
        m = np.maximum(left[2], right[2])
        ref = np.nan_to_num(m, neginf=0.0)
        wa, wb = (x[1] * np.exp(x[2] - ref) for x in (left, right))
        l = wa + wb
        O = wa[:, None] * left[0] + wb[:, None] * right[0]
        return np.divide(O, l[:, None], out=np.zeros_like(O), where=l[:, None] > 0), l, m
    O, l, m = np.zeros(Q.shape), np.zeros(len(Q)), np.full(len(Q), -np.inf)
    for i in range(len(Q)):
        n = min(len(K), max(0, i + shift + 1)) if causal else len(K)
        if n:
            s = K[:n] @ Q[i] / math.sqrt(Q.shape[1])
            m[i] = s.max()
            p = np.exp(s - m[i])
            l[i] = p.sum()
            O[i] = p @ V[:n] / l[i]
    return O, l, m


def two_passes(Q, K, V, Br, Bc, causal=False):
    """All maxima first, then the sums, K/V blocks from the last to the first."""
    Nq, Nk, d = len(Q), len(K), Q.shape[1]

    def scores(i, j):
        S = Q[i : i + Br] @ K[j : j + Bc].T * d**-0.5
        a, b = np.indices(S.shape)
        return np.where(b + j <= a + i + Nk - Nq, S, -np.inf) if causal else S

    O, l, m = np.zeros(Q.shape), np.zeros(Nq), np.full(Nq, -np.inf)
    for j in reversed(range(0, Nk, Bc)):
        for i in range(0, Nq, Br):
            m[i : i + Br] = np.maximum(m[i : i + Br], scores(i, j).max(axis=1))
    ref = np.where(np.isneginf(m), 0.0, m)
    for j in reversed(range(0, Nk, Bc)):
        for i in range(0, Nq, Br):
            P = np.exp(scores(i, j) - ref[i : i + Br, None])
            l[i : i + Br] += P.sum(axis=1)
            O[i : i + Br] += P @ V[j : j + Bc]
    O[l > 0] /= l[l > 0, None]
    return O, l, m


RIGHT = {
    "K/V outside": k_outer,
    "Q outside": made(Q_OUTER),
    "one row": made(ONE_ROW),
    "all rows": all_rows_at_once,
    "in place": in_place,
    "recursion": by_halves,
    "two passes": two_passes,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes_in_any_style(name):
    for seed in SEEDS:
        result = check_program(QUICK, RIGHT[name], seed)
        assert result.status == PASSED, (seed, result)


@pytest.mark.parametrize(
    "name", ["K/V outside", "Q outside", "all rows", "recursion", "two passes"]
)
def test_it_holds_no_n_by_n_array(name):
    assert check_program(ex02.FLASH, RIGHT[name]).status == PASSED


def step_as_a_merge(Qi, Kj, Vj, Oi, li, mi):
    """Two partial results with one weight each."""
    S = np.einsum("rd,cd->rc", Qi, Kj) / math.sqrt(Kj.shape[1])
    m = np.stack([mi, S.max(axis=1)])
    P = np.exp(S - m[1][:, None])
    w = np.exp(m - m.max(axis=0)) * np.stack([li, P.sum(axis=1)])
    share = w / w.sum(axis=0)
    tile = (P / P.sum(axis=1, keepdims=True)) @ Vj
    return share[0][:, None] * Oi + share[1][:, None] * tile, w.sum(axis=0), m.max(axis=0)


def step_key_by_key(Qi, Kj, Vj, Oi, li, mi):
    """The tile in pieces of one key, by recursion."""
    if len(Kj) > 1:
        Oi, li, mi = step_key_by_key(Qi, Kj[:-1], Vj[:-1], Oi, li, mi)
    s = (Qi * Kj[-1]).sum(axis=1) / math.sqrt(len(Kj[-1]))
    m = np.where(s > mi, s, mi)
    keep = li * np.exp(mi - m)
    l = keep + np.exp(s - m)
    return (keep[:, None] * Oi + np.outer(np.exp(s - m), Vj[-1])) / l[:, None], l, m


RIGHT_STEPS = {
    "one row": made(STEP_BY_ROW),
    "merge": step_as_a_merge,
    "key by key": step_key_by_key,
}


@pytest.mark.parametrize("name", RIGHT_STEPS)
def test_a_right_step_passes_in_any_style(name):
    for seed in SEEDS:
        result = check_program(ex02.INNER_STEP, RIGHT_STEPS[name], seed)
        assert result.status == PASSED, (seed, result)


# ---- wrong programs, in another style than the registry's

SCORE = "x = np.inner(q, k)"
NEW = "new = np.maximum(top, x.max(axis=1))"
REF = "ref = np.where(np.isfinite(new), new, 0.0)"
W = "w = np.exp(x - ref[:, None])"
KEEP = "keep = np.exp(top - ref)"
TOT = "tot = tot * keep + w.sum(axis=1)"
ACC = "acc = acc * keep[:, None] + w @ v"
OUT = "acc / np.where(tot > 0, tot, 1.0)[:, None]"
HIDE = "x[r, max(0, first + r + Nk - Nq + 1 - b * Bc) :] = -np.inf"
MASK = "first + r + Nk - Nq + 1 - b * Bc"
START = "np.zeros(len(q)), np.full(len(q), -np.inf)"
KV = "k, v = K[b * Bc : (b + 1) * Bc], V[b * Bc : (b + 1) * Bc]"
TILES = "for b in range(-(-Nk // Bc)):"
IF_SKIP = "\n            if causal and b * Bc > "
LATE_MASK = "\n            if causal: w = w * np.tri(*w.shape, first + Nk - Nq - b * Bc)"
OWN = "own = x.max(axis=1); w = np.exp(x - own[:, None])"
RETURN = "return out, sums, tops"
ROW_P, ROW_ACC = "p = [math.exp(x - new) for x in s]", "acc = math.exp(top - new) * acc"
ROW_TOTAL, ROW_END = (
    "total = math.exp(top - new) * total",
    "O.append(acc / total if total else acc)",
)
VISIBLE = "j <= i + Nk - Nq"

WRONG = [
    ("no-max", Q_OUTER, (W, "w = np.exp(x)"), (KEEP, "keep = np.ones(len(q))")),
    ("no-max", ONE_ROW, ("new = max([top, *s])", "new = 0.0")),
    ("no-max", Q_OUTER, (W, "w = np.exp(x)"), (KEEP, "keep = np.ones(len(q))"),
     (RETURN, "return out, sums * np.exp(-tops), tops")),
    ("max-of-this-tile", Q_OUTER, (NEW, "new = x.max(axis=1)")),
    ("max-of-this-tile", ONE_ROW, ("new = max([top, *s])", "new = max(s)")),
    ("max-of-first-tile", Q_OUTER, (NEW, "new = top if b else x.max(axis=1)")),
    ("max-of-first-tile", ONE_ROW, ("new = max([top, *s])", "new = top if j0 else max(s)")),
    ("max-of-the-whole-tile", Q_OUTER, (NEW, "new = np.maximum(top, np.max(x))")),
    ("nothing-rescaled", Q_OUTER, (KEEP, "keep = np.ones(len(q))")),
    ("nothing-rescaled", ONE_ROW, (ROW_ACC, "acc = acc"), (ROW_TOTAL, "total = total")),
    ("O-not-rescaled", Q_OUTER, (ACC, "acc += w @ v")),
    ("O-not-rescaled", ONE_ROW, (ROW_ACC, "acc = acc")),
    ("l-not-rescaled", Q_OUTER, (TOT, "tot += w.sum(axis=1)")),
    ("l-not-rescaled", ONE_ROW, (ROW_TOTAL, "total = total")),
    ("l-not-rescaled", Q_OUTER, ("top = new\n", "top = new; wrong = w.sum(axis=1) * np.exp("
     "ref - x.max(axis=1)) + (wrong if b else 0)\n"), ("= tot, top", "= wrong, top")),
    ("l-of-the-last-tile", Q_OUTER, ("= tot, top", "= (np.exp(x - x.max(axis=1, keepdims=True))"
     ".sum(axis=1) if Nk else tot), top")),
    ("rescale-inverted", Q_OUTER, (KEEP, "keep = np.exp(ref - top)")),
    ("rescale-inverted", Q_OUTER, (KEEP, "keep = np.exp(ref - top) if b else np.ones(len(q))")),
    ("rescale-inverted", ONE_ROW, ("math.exp(top - new)", "(math.exp(new - top) if j0 else 0)")),
    ("O-rescale-inverted", Q_OUTER, (ACC, "acc = acc / keep[:, None] + w @ v")),
    ("O-rescale-inverted", Q_OUTER, (ACC, "acc = (acc / keep[:, None] if b else 0) + w @ v")),
    ("factors-swapped", Q_OUTER, (W, OWN), (KEEP, "keep = np.exp(own - ref)"),
     (ACC, "w = w * np.exp(top - ref)[:, None]; tot = tot0 * keep + w.sum(axis=1); " + ACC),
     (TOT + "\n", "tot0 = tot\n")),
    ("l-old-forgotten", Q_OUTER, (ACC, "acc = (acc * keep[:, None] + w @ v) / np.where(tot > 0, "
     "tot, 1)[:, None]"), (OUT, "acc")),
    ("l-old-forgotten", ONE_ROW, ("top = new\n", "top = new; acc = acc / total\n"),
     (ROW_END, "O.append(acc)")),
    ("never-divided", Q_OUTER, (OUT, "acc")),
    ("never-divided", ONE_ROW, (ROW_END, "O.append(acc)")),
    ("tile-not-at-new-max", Q_OUTER, (W, OWN)),
    ("tile-not-at-new-max", ONE_ROW, (ROW_P, "p = [math.exp(x - max(s)) for x in s]")),
    ("tile-O-not-at-new-max", Q_OUTER, (ACC, OWN + "; " + ACC)),
    ("tile-l-not-at-new-max", Q_OUTER, (TOT, OWN + "; " + TOT), (ACC, W + "; " + ACC)),
    ("normalised-in-each-tile", Q_OUTER, (ACC, "acc = acc + w / w.sum(axis=1)[:, None] @ v"),
     (OUT, "acc")),
    ("normalised-in-each-tile", ONE_ROW, (ROW_ACC, "p = [x / sum(p) for x in p]; acc = acc"),
     (ROW_END, "O.append(acc)")),
    ("normalised-in-each-tile", ONE_ROW, (ROW_ACC, "p = [x / sum(p) for x in p]; acc = acc"),
     (ROW_END, "O.append(acc / -(-Nk // Bc))")),
    ("scale-forgotten", Q_OUTER, (" * (1 / math.sqrt(d))", "")),
    ("scale-forgotten", ONE_ROW, (" / math.sqrt(d)", "")),
    ("scale-by-d", Q_OUTER, ("(1 / math.sqrt(d))", "(1 / d)")),
    ("scale-by-d", ONE_ROW, ("math.sqrt(d)", "d")),
    ("scale-by-d-plus-1", Q_OUTER, ("math.sqrt(d)", "math.sqrt(d + 1)")),
    ("scale-multiplied", Q_OUTER, ("(1 / math.sqrt(d))", "math.sqrt(d)")),
    ("l-and-m-swapped", Q_OUTER, (RETURN, "return out, tops, sums")),
    ("L-instead-of-m", Q_OUTER, (RETURN, "return out, sums, np.log(sums) + tops")),
    ("L-instead-of-l", Q_OUTER, (RETURN, "return out, np.log(sums) + tops, tops")),
    ("divided-twice", Q_OUTER, (RETURN, "return out / sums[:, None], sums, tops")),
    ("plain-sum-times-l", Q_OUTER, (TOT, "was = tot; " + TOT),
     (ACC, "acc = acc * (keep * was)[:, None] + w @ v")),
    ("max-starts-at-0", Q_OUTER, (START, "np.zeros(len(q)), np.zeros(len(q))")),
    ("max-starts-at-0", ONE_ROW, ("top, total, acc = -math.inf", "top, total, acc = 0.0")),
    ("l-starts-at-1", Q_OUTER, (START, "np.ones(len(q)), np.full(len(q), -np.inf)")),
    ("l-starts-at-1", ONE_ROW, ("-math.inf, 0.0,", "-math.inf, 1.0,")),
    ("l-and-m-not-stored", ONE_ROW, ("new = max([top, *s])", "top, total = -math.inf, 0; "
     "acc = acc * 0; new = max(s)"), ("l.append(total)", "l.append(0)"), ("m.append(top)",
     "m.append(-math.inf)")),
    ("nothing-stored", Q_OUTER, ("        out[first", "        0 * out[first"),
     ("] = acc / np.where(tot > 0, tot, 1.0)[:, None]", "]"),
     ("        sums[first : first + Br], tops[first : first + Br] = tot, top\n", "")),
    ("reset-in-each-block", ONE_ROW, ("new = max([top, *s])", "top, total = -math.inf, 0; "
     "acc = acc * 0; new = max(s)")),
    ("V-by-the-Q-block", Q_OUTER, (KV, "k, v = K[b * Bc : (b + 1) * Bc], V[first : first + Br]")),
    ("K-and-V-by-the-Q-block", Q_OUTER, (KV, KV.replace("b * Bc", "a * Br").replace(
        "(b + 1) * Bc", "(a + 1) * Br"))),
    ("padding-scored-0", Q_OUTER, (KV, KV + "; z = np.zeros((Bc - len(k), d)); "
     "k, v = np.concatenate([k, z]), np.concatenate([v, z])")),
    ("padding-scored-0", ONE_ROW, ("s = [float(", "gone = Bc - len(keys); s = [0.0] * gone + "
     "[float("), ("zip(p, keys)", "zip(p[gone:], keys)")),
    ("last-K-tile-lost", Q_OUTER, (TILES, "for b in range(Nk // Bc):")),
    ("last-K-tile-lost", ONE_ROW, ("range(0, Nk, Bc)", "range(0, Nk - Bc + 1, Bc)")),
    ("last-Q-tile-lost", Q_OUTER, ("range(-(-Nq // Br))", "range(Nq // Br)")),
    ("last-tiles-lost", Q_OUTER, ("range(-(-Nq // Br))", "range(Nq // Br)"),
     (TILES, "for b in range(Nk // Bc):")),
    ("last-K-tile-overlaps", Q_OUTER, (KV, "k, v = K[-Bc:], V[-Bc:]\n            if (b + 1) * Bc "
     "<= Nk:\n                " + KV)),
    ("one-N-for-both", ONE_ROW, ("len(Q), len(K), Q.shape[1]", "len(Q), len(Q), Q.shape[1]"),
     ("min(j0 + Bc, Nk)", "min(j0 + Bc, Nk, len(K))")),
    ("one-N-for-both", Q_OUTER, ("range(-(-Nq // Br))", "range(-(-Nk // Br))")),
    ("causal-off-by-one", Q_OUTER, (MASK, "first + r + Nk - Nq - b * Bc")),
    ("causal-off-by-one", ONE_ROW, (VISIBLE, "j < i + Nk - Nq")),
    ("causal-one-too-many", Q_OUTER, (MASK, "first + r + Nk - Nq + 2 - b * Bc")),
    ("causal-one-too-many", ONE_ROW, (VISIBLE, "j <= i + 1 + Nk - Nq")),
    ("causal-reversed", Q_OUTER, (HIDE, "x[r, : max(0, first + r + Nk - Nq - b * Bc)] = -np.inf")),
    ("causal-reversed", ONE_ROW, (VISIBLE, "j >= i")),
    ("causal-upper-left", Q_OUTER, (MASK, "first + r + 1 - b * Bc")),
    ("causal-upper-left", ONE_ROW, (VISIBLE, "j <= i")),
    ("causal-shift-reversed", Q_OUTER, (MASK, "first + r + Nq - Nk + 1 - b * Bc")),
    ("causal-shift-reversed", ONE_ROW, (VISIBLE, "j <= i + Nq - Nk")),
    ("causal-inside-each-tile", Q_OUTER, (HIDE, "x[r, r + 1 :] = -np.inf")),
    ("causal-inside-each-tile", Q_OUTER, (HIDE, "x[r, max(0, r + 1 + Nk - Nq) :] = -np.inf")),
    ("causal-inside-each-tile", ONE_ROW, (VISIBLE, "j - j0 <= i % Br")),
    ("causal-on-whole-tiles-only", Q_OUTER, ("if causal:", "if causal and b * Bc > min(first + Br,"
     " Nq) - 1 + Nk - Nq:"), ("for r in range(len(q)):", "break"),
     ("                    " + HIDE, "")),
    ("mask-after-exp", Q_OUTER, (HIDE, "pass"), (KEEP, KEEP + LATE_MASK)),
    ("hidden-keys-in-l", Q_OUTER, (HIDE, "pass"), (TOT, TOT + LATE_MASK)),
    ("hidden-scores-0", Q_OUTER, (HIDE, HIDE.replace("-np.inf", "0"))),
    ("skips-a-tile-it-needs", Q_OUTER, (SCORE, SCORE + IF_SKIP + "first + Nk - Nq: break")),
    ("skips-a-tile-it-needs", Q_OUTER, (SCORE, SCORE + IF_SKIP + "first: continue")),
    ("hidden-tile-ends-the-loop", ONE_ROW, ("keys = [", "if causal and j0 > min(Br, Nq) - 1 + Nk - "
     "Nq: break\n            keys = [")),
    ("no-guard", Q_OUTER, (REF, "ref = new")),
    ("no-guard", Q_OUTER, (REF, "ref = new"), (OUT, "acc / tot[:, None]")),
    ("no-guard", Q_OUTER, (W, OWN + " * np.exp(own - ref)[:, None]"), (OUT, "acc / tot[:, None]")),
    ("no-guard-for-l", Q_OUTER, (OUT, "acc / tot[:, None]")),
    ("no-guard-for-l", ONE_ROW, (ROW_END, "O.append(acc / np.float64(total))")),
    ("hidden-by-a-finite-number", Q_OUTER, ("] = -np.inf", "] = -1e9")),
    ("hidden-by-a-finite-number", Q_OUTER, ("] = -np.inf", "] = np.finfo(np.float32).min"),
     (REF, "ref = new"), (OUT, "acc / tot[:, None]")),
    ("hidden-by-a-finite-number", Q_OUTER, ("] = -np.inf", "] -= 1e9")),
    ("max-starts-finite", Q_OUTER, (START, "np.zeros(len(q)), np.full(len(q), -1e30)")),
    ("max-starts-finite", ONE_ROW, ("top, total, acc = -math.inf", "top, total, acc = -1e9")),
]  # fmt: skip


@pytest.mark.parametrize("id, source, changes", [(x[0], x[1], x[2:]) for x in WRONG],
                         ids=[f"{x[0]}-{i}" for i, x in enumerate(WRONG)])  # fmt: skip
def test_a_wrong_program_is_named(id, source, changes):
    for seed in range(4):
        result = check_program(QUICK, made(source, *changes), seed)
        assert (result.status, result.misconception) == (NOT_YET, id), (seed, result)
        assert len(repr(result).splitlines()) <= 5, result


def test_every_misconception_of_the_loop_has_a_wrong_program_here():
    assert {x[0] for x in WRONG} == {m.id for m in ex02.FLASH.mistakes}
    assert len({x[0] for x in WRONG}) >= 18


STEP_NEW, STEP_P, STEP_KEEP = (
    "new = max(mi[r], s.max())",
    "p = np.exp(s - new)",
    "keep = np.exp(mi[r] - new)",
)
STEP_L = "l[r] = keep * li[r] + p.sum()"
STEP_O = "O[r] = (keep * li[r] * Oi[r] + p @ Vj) / l[r]"
STEP_OWN = "p = np.exp(s - s.max())"
WRONG_STEPS = [
    ("no-max", (STEP_P, "p = np.exp(s)"), (STEP_KEEP, "keep = 1")),
    ("no-max", (STEP_P, "p = np.exp(s)"), (STEP_KEEP, "keep = 1"), ("m[r] = new", "m[r] = mi[r]")),
    ("max-of-this-tile", (STEP_NEW, "new = s.max()")),
    ("max-of-first-tile", (STEP_NEW, "new = mi[r] if li[r] else s.max()")),
    ("max-of-the-whole-tile",
     (STEP_NEW, "new = max(mi[r], (Qi @ Kj.T).max() / len(Vj[0]) ** 0.5)")),
    ("nothing-rescaled", (STEP_KEEP, "keep = 1")),
    ("O-not-rescaled", (STEP_O, STEP_O.replace("keep * ", ""))),
    ("l-not-rescaled", (STEP_L, STEP_L.replace("keep * ", ""))),
    ("rescale-inverted", (STEP_KEEP, "keep = np.exp(new - mi[r])")),
    ("rescale-inverted", (STEP_KEEP, "keep = np.exp(new - mi[r]) if li[r] else 0")),
    ("O-rescale-inverted", (STEP_O, STEP_O.replace("keep *", "1 / keep *"))),
    ("factors-swapped", (STEP_P, STEP_OWN + " * np.exp(mi[r] - new)"),
     (STEP_KEEP, "keep = np.exp(s.max() - new)")),
    ("l-old-forgotten", (STEP_O, STEP_O.replace("li[r] * ", ""))),
    ("never-divided", (STEP_O, STEP_O.replace(" / l[r]", ""))),
    ("never-divided", (STEP_O, "O[r] = keep * Oi[r] + p @ Vj")),
    ("tile-not-at-new-max", (STEP_P, STEP_OWN)),
    ("tile-O-not-at-new-max", (STEP_O, STEP_OWN + "; " + STEP_O)),
    ("tile-l-not-at-new-max", (STEP_L, STEP_OWN + "; " + STEP_L + "; " + STEP_P)),
    ("normalised-in-each-tile", (STEP_L, STEP_OWN + "; p = p / p.sum() * np.exp(s.max() - new); "
     + STEP_L)),
    ("scale-forgotten", (" * Qi.shape[1] ** -0.5", "")),
    ("scale-by-d", ("** -0.5", "** -1.0")),
    ("scale-by-d-plus-1", ("Qi.shape[1] **", "(Qi.shape[1] + 1) **")),
    ("scale-multiplied", ("** -0.5", "** 0.5")),
    ("l-and-m-swapped", ("return O, l, m", "return O, m, l")),
    ("m-not-renewed", ("m[r] = new", "m[r] = mi[r]")),
    ("l-not-renewed", ("m[r] = new", "m[r] = new; l[r] = li[r]")),
]  # fmt: skip


@pytest.mark.parametrize("id, changes", [(x[0], x[1:]) for x in WRONG_STEPS],
                         ids=[f"{x[0]}-{i}" for i, x in enumerate(WRONG_STEPS)])  # fmt: skip
def test_a_wrong_step_is_named(id, changes):
    for seed in range(4):
        result = check_program(ex02.INNER_STEP, made(STEP_BY_ROW, *changes), seed)
        assert (result.status, result.misconception) == (NOT_YET, id), (seed, result)
        assert len(repr(result).splitlines()) <= 5, result


def test_every_misconception_of_the_step_has_a_wrong_program_here():
    assert {x[0] for x in WRONG_STEPS} == {m.id for m in ex02.INNER_STEP.mistakes}


# ---- the registry itself


@pytest.mark.parametrize("q", [QUICK, ex02.INNER_STEP], ids=lambda q: q.id)
def test_no_registered_mistake_passes_or_is_taken_for_another(q):
    """Every variant fails some stage, and on that stage no variant of another id looks the same."""
    for seed in (0, 1):
        stages = {}
        for probe in q.probes(seed):
            want = as_arrays(q.right(**probe.arguments), 3)
            stages.setdefault(probe.stage, []).append((probe, want))
        found = {
            s: [outputs(m.program, probes) for m in q.mistakes] for s, probes in stages.items()
        }
        wrong = {s: [is_wrong(x, probes) for x in found[s]] for s, probes in stages.items()}
        for k, mistake in enumerate(q.mistakes):
            stage = next((s for s in stages if wrong[s][k]), None)
            assert stage is not None, (mistake.id, "passes", seed)
            assert "raised" not in found[stage][k], (mistake.id, seed)
            assert not all_same(found[stage][k], [w for _, w in stages[stage]]), mistake.id
            for j, other in enumerate(q.mistakes):
                if other.id != mistake.id and wrong[stage][j]:
                    alike = all_same(found[stage][j], found[stage][k])
                    assert not alike, (mistake.id, other.id, seed)


def outputs(program, probes):
    """What a program gives on each probe; "raised" where it raises."""
    found = []
    for probe, _ in probes:
        with np.errstate(all="ignore"):
            try:
                found.append(as_arrays(program(**copies(probe.arguments)), 3))
            except (ValueError, IndexError):
                found.append("raised")
    return found


def all_same(a, b):
    return all(isinstance(x, list) and isinstance(y, list) and same(x, y)
               for x, y in zip(a, b, strict=True))  # fmt: skip


def is_wrong(found, probes):
    for got, (probe, want) in zip(found, probes, strict=True):
        if got == "raised":
            return True
        for g, w, tolerance in zip(got, want, probe.tolerance, strict=True):
            if g.shape != w.shape or first_difference(g, w, tolerance) is not None:
                return True
    return False


def test_every_reading_place_is_a_heading():
    reads = {m.read for q in (ex02.FLASH, ex02.INNER_STEP) for m in q.mistakes}
    reads |= {line.read for q in ex02_parsons.QUESTIONS for line in q.lines if line.read}
    reads |= {ex02.FLASH.read, ex02.INNER_STEP.read, ex02_parsons.SUM.read}
    for read in reads:
        number, heading = re.fullmatch(r"notebook (\d\d), '(.+)'", read).groups()
        (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        assert f'"## {heading}' in path.read_text(encoding="utf-8"), read


# ---- the claims


def n_by_n(Q, K, V, Br, Bc, causal=False):
    S = Q @ K.T / math.sqrt(Q.shape[1])
    if causal:
        S[~np.tri(*S.shape, len(K) - len(Q), dtype=bool)] = -np.inf
    m = S.max(axis=1, initial=-np.inf)
    P = np.exp(S - np.where(m == -np.inf, 0, m)[:, None])
    l = P.sum(axis=1)
    return P @ V / np.where(l == 0, 1, l)[:, None], l, m


def a_mask_for_all(Q, K, V, Br, Bc, causal=False):
    """Tiles, but the causal mask is made whole: N x N of True and False."""
    may_see = np.tri(len(Q), len(K), len(K) - len(Q), dtype=bool) if causal else None
    O, l, m = np.zeros(Q.shape), np.zeros(len(Q)), np.full(len(Q), -np.inf)
    for j in range(0, len(K), Bc):
        S = Q @ K[j : j + Bc].T / math.sqrt(Q.shape[1])
        S = S if may_see is None else np.where(may_see[:, j : j + Bc], S, -np.inf)
        new = np.maximum(m, S.max(axis=1))
        ref = np.where(np.isneginf(new), 0, new)
        P, keep = np.exp(S - ref[:, None]), np.exp(m - ref)
        l, O, m = keep * l + P.sum(axis=1), keep[:, None] * O + P @ V[j : j + Bc], new
    return O / np.where(l == 0, 1, l)[:, None], l, m


@pytest.mark.parametrize("program", [n_by_n, a_mask_for_all])
def test_an_n_by_n_array_is_found(program):
    result = check_program(ex02.FLASH, program)
    assert (result.status, result.misconception) == (NOT_YET, "makes-n-by-n")
    assert "At N = 1,024" in result.message


def test_the_librarys_loop_is_not_an_answer():
    from attention_lib.tiled import flash_attention

    def borrowed(Q, K, V, Br, Bc, causal=False):
        return flash_attention(Q, K, V, Br, Bc, causal=causal)

    assert check_program(ex02.FLASH, borrowed).misconception == "calls-the-library"


def test_float32_in_between_is_not_right():
    def single(Q, K, V, Br, Bc, causal=False):
        return k_outer(*(x.astype(np.float32) for x in (Q, K, V)), Br, Bc, causal)

    assert check_program(QUICK, single).status == NOT_YET


def test_inputs_stay_as_they_are():
    def scales_q(Q, K, V, Br, Bc, causal=False):
        Q /= math.sqrt(Q.shape[1])
        return k_outer(Q * math.sqrt(Q.shape[1]), K, V, Br, Bc, causal)

    assert check_program(QUICK, scales_q).misconception == "mutates-its-input"


# ---- faded


def test_the_faded_versions_are_judged_as_the_exercise_is():
    for q in ex02_faded.QUESTIONS:
        assert check_program(q, lambda Q, K, V, Br, Bc, causal=False: None).status == NOT_ATTEMPTED
        assert check_program(q, made(Q_OUTER)).status == PASSED
        wrong = check_program(q, made(Q_OUTER, (KEEP, "keep = np.ones(len(q))")))
        assert wrong.misconception == "nothing-rescaled" and wrong.message.startswith(q.id)


def test_a_function_with_all_gaps_open_returns_none_and_with_some_says_which():
    def a(x):
        """Open."""

    def b(x):
        pass

    def full(x):
        return [x for _ in range(2)]

    def loop(x):
        """Doc."""
        return lambda: (x, full(x))

    assert filled(loop, a, b)(1) is None
    with pytest.raises(NameError, match="no line makes b yet"):
        filled(loop, full, b)(1)
    assert filled(loop, full)(1)() == (1, [1, 1]) and filled(loop, full).__doc__ == "Doc."
    q = ex02_faded.QUESTIONS[0]

    def old(mi, m_new):
        return np.exp(mi - finite_or_zero(m_new))

    def O_sum(old, new, li, Oi, P, Vj):
        """Open."""

    assert check_program(q, two_gaps(a, O_sum)).status == NOT_ATTEMPTED
    result = check_program(q, two_gaps(old, O_sum))
    assert result.status == RAISED and "no line makes O_sum yet" in result.message


def test_a_wrong_gap_gets_its_name():
    def old(mi, m_new):
        return np.exp(mi - finite_or_zero(m_new))

    def kept(mi, m_new):
        return np.ones(len(mi))

    def O_sum(old, new, li, Oi, P, Vj):
        return (old * li)[:, None] * Oi + new[:, None] * (P @ Vj)

    q = ex02_faded.QUESTIONS[0]
    assert check_program(q, two_gaps(old, O_sum)).status == PASSED
    assert check_program(q, two_gaps(kept, O_sum)).misconception == "nothing-rescaled"


# ---- Parsons

SUM, LOOP = ex02_parsons.QUESTIONS
SOLUTION = {SUM.id: "FDHAC", LOOP.id: "KFCPIMSAOGR"}


def makers(q):
    """Which of the right lines must come before which: those that make the names it uses."""
    lines = {x: ast.parse(line.code) for x, line in q.letters.items() if not line.mistake}
    names = {x: [n for n in ast.walk(t) if isinstance(n, ast.Name)] for x, t in lines.items()}
    made_by = {n.id: x for x, ns in names.items() for n in ns if isinstance(n.ctx, ast.Store)}
    return {x: {made_by[n.id] for n in ns if n.id in made_by and made_by[n.id] != x}
            for x, ns in names.items()}  # fmt: skip


def test_the_solution_passes_however_it_is_written():
    for q in (SUM, LOOP):
        letters = SOLUTION[q.id]
        for answer in (
            letters,
            letters.lower(),
            " ".join(letters),
            ", ".join(letters),
            list(letters),
        ):
            assert check_parsons(q, answer).status == PASSED, answer


def test_every_order_that_computes_the_right_thing_passes():
    """Orders drawn at random among those in which each name is made before it is used."""
    rng, before = random.Random(0), makers(LOOP)
    seen = set()
    for _ in range(25):
        order, left = "", set(before)
        while left:
            ready = sorted(x for x in left if not before[x] & left)
            order += rng.choice(ready)
            left.discard(order[-1])
        seen.add(order)
        assert check_parsons(LOOP, order).status == PASSED, order
    assert len(seen) >= 15


def test_of_all_orders_of_the_warm_up_two_pass():
    passed = {"".join(x) for x in itertools.permutations("FDHAC")
              if check_parsons(SUM, "".join(x)).status == PASSED}  # fmt: skip
    assert passed == {"FDHAC", "FDHCA"}


def alternatives(q):
    """For each line of the solution: it, and the wrong lines that make the same thing."""

    def makes(line):
        return ast.unparse(ast.parse(line.code).body[0].targets[0]), line.goal

    wrong = [(x, makes(line)) for x, line in q.letters.items() if line.mistake]
    return [[x] + [w for w, made in wrong if made == makes(q.letters[x])] for x in SOLUTION[q.id]]


@pytest.mark.parametrize("q", [SUM, LOOP], ids=lambda q: q.id)
def test_no_choice_of_wrong_lines_passes(q):
    choices = alternatives(q)
    assert sum(len(c) - 1 for c in choices) == sum(bool(line.mistake) for line in q.lines)
    for choice in itertools.product(*choices):
        result = check_parsons(q, "".join(choice))
        wrong = [q.letters[x].mistake for x in choice if q.letters[x].mistake]
        assert result.status == (NOT_YET if wrong else PASSED)
        assert result.misconception == (wrong[0] if wrong else None)
        assert len(repr(result).splitlines()) <= 5
        if len(wrong) == 1:  # what was wrong, on which input, expected and got, where to read
            assert all(x in result.message for x in ("line ", "On: ", "expected", "Read: "))


def test_a_line_too_early_is_shown():
    before, right = makers(LOOP), SOLUTION[LOOP.id]
    for first, second in itertools.combinations(right, 2):
        if first in before[second]:  # the second moves to just before the first
            early = right.replace(second, "").replace(first, second + first)
            result = check_parsons(LOOP, early)
            assert result.misconception == "used-before-made", early
            assert f"line {second}, your number {early.index(second) + 1}," in result.message
            assert "makes it, too late." in result.message
            assert len(repr(result).splitlines()) <= 5
    result = check_parsons(LOOP, "KFPCIMSAOGR")
    assert "uses m_tile before a line makes it. Line C makes it, too late." in result.message


@pytest.mark.parametrize("q", [SUM, LOOP], ids=lambda q: q.id)
def test_a_missing_line_is_reported(q):
    for letter in SOLUTION[q.id]:
        result = check_parsons(q, SOLUTION[q.id].replace(letter, ""))
        assert result.status == NOT_YET
        assert result.misconception in ("used-before-made", "subgoal-missing")
        if result.misconception == "subgoal-missing":
            assert f"'{q.letters[letter].goal}'" in result.message
    assert "no line for 'store'" in check_parsons(LOOP, SOLUTION[LOOP.id][:-2]).message


def test_the_order_is_judged_by_what_it_computes():
    late = check_parsons(SUM, "FDAHC")
    assert late.misconception == "rescaled-after-adding"
    for order in ("FDCHA", "FDCAH", "FDACH"):
        assert check_parsons(SUM, order).misconception == "nothing-rescaled"


def test_a_wrong_line_without_effect_passes_and_is_asked_to_go():
    result = check_parsons(SUM, "FGDHAC")  # G's m_new is replaced by D's
    assert result.status == PASSED and result.misconception is None
    assert "right, but line G does nothing here: leave it out" in result.message
    result = check_parsons(SUM, "FDGHAC")  # and here D's by G's: that is the wrong idea
    assert (result.status, result.misconception) == (NOT_YET, "max-of-this-tile")


@pytest.mark.parametrize("answer", ["", " ", "Z", "FF", "1", 3, 1.5, [], {}, b"F", object(), True,
                                    np.zeros(3), ["F", 1], "a long answer in words"])  # fmt: skip
def test_odd_answers_get_a_sentence(answer):
    for q in (SUM, LOOP):
        result = check_parsons(q, answer)
        assert result.status == NOT_YET and result.misconception is None
        assert len(repr(result).splitlines()) <= 5


def test_a_wrong_line_needs_a_reason():
    with pytest.raises(ValueError, match="a wrong one says why"):
        Parsons(
            "x", "", "def f():", (Line("a = 1", "load", "slip"),), "    return a", ex02_parsons.SUM
        )
