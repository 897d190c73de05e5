"""Exercises 4, 6 and 8: right programs in several styles pass, each wrong idea gets its name.

The wrong programs here are not the registry's. Each family has a base program in another style
(scalar, row by row, or summed over the other axis), and a wrong idea is a change in its text.
"""

import dataclasses
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest

from attention_lib.checks import check
from attention_lib.checks.exercises import ex04, ex06, ex08
from attention_lib.checks.kinds import Number, Program
from attention_lib.checks.programs import check_program
from attention_lib.memory import HBM
from attention_lib.tiled import flash_attention, flash_attention_q_outer
from attention_lib.traffic import flash_traffic, q_outer_traffic

ROOT = Path(__file__).parent.parent
SEEDS = range(2)  # test_checks_seeds.py has many more
MODULES = (ex04, ex06, ex08)
PROGRAMS = {q.id: q for m in MODULES for q in m.QUESTIONS if isinstance(q, Program)}
NUMBERS = {q.id: q for m in MODULES for q in m.QUESTIONS if isinstance(q, Number)}


def made(source, *changes, name=None):
    """The function that a text defines, after some changes; each must find its place."""
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    space = {"np": np, "HBM": HBM, "flash_traffic": flash_traffic}
    exec(compile(source, "<answer>", "exec"), space)
    return space[name or re.search(r"^def (\w+)", source, re.MULTILINE).group(1)]


def passes(id, answer, seeds=SEEDS, scalar=False):
    exercise = PROGRAMS[id]
    if scalar:  # pure Python takes long on the big input; the values are what is tested
        exercise = dataclasses.replace(exercise, memory=None)
    for seed in seeds:
        result = check_program(exercise, answer, seed=seed)
        assert result.status == "passed", result


def is_named(id, answer, name, seeds=SEEDS):
    for seed in seeds:
        result = check_program(PROGRAMS[id], answer, seed=seed)
        assert (result.status, result.misconception) == ("not yet", name), result
        lines = repr(result).splitlines()
        assert len(lines) <= 5 and max(map(len, lines)) <= 88, lines


def ids(id):
    return {m.id for m in PROGRAMS[id].mistakes}


# ---------------------------------------------------------------- the registry itself


@pytest.mark.parametrize("id", sorted(set(PROGRAMS) - {"ex08-counters"}))  # that has forward's
def test_every_mistake_of_the_registry_is_told_from_the_others(id):
    for mistake in PROGRAMS[id].mistakes:
        is_named(id, mistake.program, mistake.id, seeds=(0,))


def test_every_place_to_read_is_there():
    headings = {}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
        headings[path.name[:2]] = re.findall(r"^## (.+)$", text, re.MULTILINE)
    places = {m.read for q in PROGRAMS.values() for m in q.mistakes}
    places |= {q.read for q in PROGRAMS.values()} | {read for _, _, read, _ in ex08.SUSPECTS}
    for place in places:
        number, heading = re.fullmatch(r"notebook (\d\d), '(.+)'", place).groups()
        assert heading in headings[number], place


def test_the_predictions_are_the_worked_answers():
    expected = {
        "ex04-count": 44,
        "ex04-first": 64,
        "ex04-last": 199,
        "ex06-guess": 266_240,
        "ex08-flip": 128,
        "ex08-capacity": 10_960_896 / 7_344_128,
    }
    assert {id: q.truth() for id, q in NUMBERS.items()} == pytest.approx(expected, abs=1e-12)


# ---------------------------------------------------------------- 4: how many rows are NaN

NAN_ROWS = """
def nan_rows(N, Br, Bc):
    failed = set()
    for r in range(N):
        top = r // Br * Br
        bottom = min(top + Br, N) - 1
        starts = [j for j in range(0, N, Bc) if j <= bottom]
        if r < starts[-1]:
            failed.add(r)
    return len(failed)
"""


def nan_rows_vectorised(N, Br, Bc):
    r = np.arange(N)
    bottom = np.minimum(r // Br * Br + Br, N) - 1
    return np.sum(r < bottom // Bc * Bc)


def nan_rows_by_key(N, Br, Bc):
    """Walks over the K/V blocks: the rows above each start, in its Q block, counted once."""
    total, covered = 0, 0
    for j in range(Bc, N, Bc):
        top = max(j // Br * Br, covered)
        total, covered = total + max(0, j - top), max(covered, j)
    return float(total)


NAN_ROWS_WRONG = {
    "none": [("return len(failed)", "return 0 * len(failed)")],
    "every-row": [("return len(failed)", "return N")],
    "br-and-bc-swapped": [("    failed = set()", "    Br, Bc = Bc, Br\n    failed = set()")],
    "rows-that-miss-the-last-block": [("if j <= bottom]", "]")],
    "any-boundary-counts": [
        ("failed.add(r)", "failed.add(starts[-1]); failed |= {s for s in starts if s > top}")
    ],
    "last-block-full": [
        ("min(top + Br, N) - 1", "top + Br - 1"),
        ("range(0, N, Bc)", "range(0, N + Br, Bc)"),
    ],
    "first-boundary-only": [("r < starts[-1]", "r < [*[s for s in starts if s >= top], top][0]")],
    "whole-q-blocks": [("r < starts[-1]", "top < starts[-1]")],
    "rows-that-see-it": [("r < starts[-1]", "top < starts[-1] <= r")],
    "off-by-one": [("r < starts[-1]", "top < starts[-1] >= r")],
    "partly-hidden": [("r < starts[-1]", "r < min(starts[-1] + Bc, N) - 1")],
    "first-band-only": [
        ("if r < starts[-1]:", "if r < starts[-1] and r // Br == min(failed, default=r) // Br:")
    ],
}


NAN_ROWS_RIGHT = [made(NAN_ROWS), nan_rows_vectorised, nan_rows_by_key]


@pytest.mark.parametrize("answer", NAN_ROWS_RIGHT)
def test_right_counts_of_rows_pass(answer):
    passes("ex04-nan-rows", answer)


def test_every_wrong_count_of_rows_is_named():
    assert set(NAN_ROWS_WRONG) == ids("ex04-nan-rows")
    for name, changes in NAN_ROWS_WRONG.items():
        is_named("ex04-nan-rows", made(NAN_ROWS, *changes), name)


def test_the_rule_has_the_worked_numbers():
    shapes = {(300, 64, 100): 44, (300, 128, 100): 172, (1000, 64, 196): 60, (4096, 64, 196): 520}
    for shape, rows in shapes.items():
        assert len(ex04.broken_rows(*shape)) == rows == nan_rows_vectorised(*shape)
    for shape in ((300, 64, 128), (512, 64, 64), (100, 10, 50)):
        assert len(ex04.broken_rows(*shape)) == 0
    assert list(ex04.broken_rows(300, 64, 100)) == [*range(64, 100), *range(192, 200)]


# ---------------------------------------------------------------- 4: the repair

REPAIR = """
def flash_attention_reversed(Q, K, V, Br, Bc):
    Nq, Nk = len(Q), len(K)
    shift = Nk - Nq
    O, l, m = np.zeros(Q.shape), np.zeros(Nq), np.full(Nq, -np.inf)
    for k in range((Nk - 1) // Bc * Bc, -1, -Bc):
        for q in range(0, Nq, Br):
            rows = range(q, min(q + Br, Nq))
            if k > rows[-1] + shift:
                continue
            for r in rows:
                s = K[k : k + Bc] @ Q[r] / Q.shape[1] ** 0.5
                s[max(0, r + shift + 1 - k) :] = -np.inf
                top = max(m[r], s.max())
                safe = top if top > -np.inf else 0.0
                p, old = np.exp(s - safe), np.exp(m[r] - safe)
                total = old * l[r] + p.sum()
                out = old * l[r] * O[r] + p @ V[k : k + Bc]
                O[r] = out / (total if total > 0 else 1.0)
                l[r], m[r] = total, top
    return O, l
"""
NO_M = ("top if top > -np.inf else 0.0", "top")
NO_L = ("(total if total > 0 else 1.0)", "total")
REPAIR_WRONG = {
    "max-not-guarded": [NO_M, NO_L],
    "max-guarded-only": [NO_L],
    "nan-made-0-at-the-end": [NO_M, NO_L, ("return O, l", "return np.where(O == O, O, 0.0), l")],
    "hidden-scores-0": [(":] = -np.inf", ":] = 0")],
    "clamped-max-kept": [("l[r], m[r] = total, top", "l[r], m[r] = total, safe")],
    "tile-dropped": [("if k > rows[-1] + shift", "if k > rows[0] + shift")],
    "max-of-hidden-scores": [
        ("s[max(0, r + shift + 1 - k) :] = -np.inf", "seen = k + np.arange(len(s)) <= r + shift"),
        ("p, old = np.exp(s - safe)", "p, old = np.exp(s - safe) * seen"),
    ],
    "own-key-hidden": [("r + shift + 1 - k", "r + shift - k")],
    "upper-left": [("shift = Nk - Nq", "shift = 0")],
    "finite-mask": [NO_M, NO_L, (":] = -np.inf", ":] = -1e30")],
    "l-kept-at-1": [("total = old * l[r] + p.sum()", "total = (old * l[r] + p.sum()) or 1.0")],
}


def unscaled_q_outer(Q, K, V, Br, Bc):
    """Q outside, last K/V block first, one division: the FlashAttention-2 form."""
    d, shift = Q.shape[1], len(K) - len(Q)
    O, l = np.zeros_like(Q), np.zeros(len(Q))
    for q in range(0, len(Q), Br):
        Qi, i = Q[q : q + Br], np.arange(q, min(q + Br, len(Q)))[:, None]
        m, li, Oi = np.full((len(Qi), 1), -np.inf), np.zeros((len(Qi), 1)), np.zeros(Qi.shape)
        for k in reversed(range(0, len(K), Bc)):
            j = np.arange(k, min(k + Bc, len(K)))[None, :]
            S = np.where(j <= i + shift, Qi @ K[k : k + Bc].T / d**0.5, -np.inf)
            new = np.maximum(m, S.max(axis=1, keepdims=True))
            safe = np.nan_to_num(new, neginf=0.0)
            P, a = np.exp(S - safe), np.exp(m - safe)
            m, li, Oi = new, a * li + P.sum(axis=1, keepdims=True), a * Oi + P @ V[k : k + Bc]
        O[q : q + Br], l[q : q + Br] = Oi / np.maximum(li, 1e-300), li[:, 0]
    return O, l


def visible_rows_only(Q, K, V, Br, Bc):
    """A row takes part in a tile only if it sees something of it: no guard is needed."""
    shift = len(K) - len(Q)
    O, l, m = np.zeros(Q.shape), np.zeros(len(Q)), np.full(len(Q), -np.inf)
    for k in range(0, len(K), Bc)[::-1]:
        first = max(0, k - shift)  # the first row that sees key k
        for q in range(first, len(Q), Br):
            r = slice(q, q + Br)
            i, j = np.arange(len(Q))[r, None], np.arange(len(K))[None, k : k + Bc]
            S = np.einsum("id,jd->ij", Q[r], K[k : k + Bc]) / np.sqrt(Q.shape[1])
            S = np.where(j > i + shift, -np.inf, S)
            new = np.maximum(m[r], S.max(axis=1))
            P, w = np.exp(S - new[:, None]), l[r] * np.exp(m[r] - new)
            total = w + P.sum(axis=1)
            O[r] = (w[:, None] * O[r] + np.dot(P, V[k : k + Bc])) / total[:, None]
            l[r], m[r] = total, new
    return O, l


def low_start(Q, K, V, Br, Bc):
    """All rows against one K/V block at a time; m starts at a finite number that no score has."""
    i, j = np.arange(len(Q))[:, None], np.arange(len(K))[None, :]
    l, m, O = np.zeros(len(Q)), np.full(len(Q), -1e300), np.zeros(Q.shape)
    for k in range(0, len(K), Bc)[::-1]:
        S = Q @ K[k : k + Bc].T / Q.shape[1] ** 0.5
        S[j[:, k : k + Bc] > i + len(K) - len(Q)] = -np.inf
        new = np.maximum(m, S.max(axis=1))
        P, a = np.exp(S - new[:, None]), np.exp(m - new)
        m, l, O = new, a * l + P.sum(axis=1), a[:, None] * O + P @ V[k : k + Bc]
    return O / np.where(l > 0, l, 1.0)[:, None], l


REPAIR_RIGHT = [unscaled_q_outer, visible_rows_only, low_start]


@pytest.mark.parametrize("answer", REPAIR_RIGHT)
def test_right_repairs_pass(answer):
    passes("ex04-repair", answer)


def test_a_right_scalar_repair_passes():
    passes("ex04-repair", made(REPAIR), scalar=True)


def test_every_wrong_repair_is_named():
    assert set(REPAIR_WRONG) == ids("ex04-repair")
    for name, changes in REPAIR_WRONG.items():
        is_named("ex04-repair", made(REPAIR, *changes), name)


@pytest.mark.parametrize("value", [-1e4, -1e9, float(np.finfo(np.float32).min)])
def test_a_finite_mask_is_named_whatever_its_value(value):
    answer = made(REPAIR, NO_M, NO_L, (":] = -np.inf", f":] = {value!r}"))
    is_named("ex04-repair", answer, "finite-mask", seeds=(0,))


FORWARD_AGAIN = ("range((Nk - 1) // Bc * Bc, -1, -Bc)", "range(0, Nk, Bc)")


def test_the_order_is_looked_at():
    vectorised = (
        lambda Q, K, V, Br, Bc: flash_attention(Q, K, V, Br, Bc, causal=True)[:2],
        lambda Q, K, V, Br, Bc: (
            flash_attention_q_outer(Q, K, V, Br, Bc, causal=True)[0],
            ex04.right(Q, K, V, Br, Bc)[1],
        ),
    )
    assert ex04.forward_order(made(REPAIR, FORWARD_AGAIN))[0] == "forward-order"
    assert ex04.forward_order(vectorised[0]) is None  # copies a tile: nothing seen, nothing said
    for answer in (made(REPAIR), unscaled_q_outer, visible_rows_only, low_start):
        assert ex04.forward_order(answer) is None


def test_an_n_by_n_mask_is_seen():
    def with_mask(Q, K, V, Br, Bc):
        np.tri(len(Q), len(K), dtype=bool)
        return low_start(Q, K, V, Br, Bc)

    is_named("ex04-repair", with_mask, "makes-n-by-n", seeds=(0,))


# ---------------------------------------------------------------- 6: the causal count

# Walks over the Q blocks, where the registry walks over the K/V blocks.
CAUSAL = """
def flash_causal_traffic(N, d, Br, Bc):
    passes = 0
    for i in range(0, N, Br):
        r = min(Br, N - i)
        seen = (i + r - 1) // Bc + 1
        passes += r * seen
    kv = 2 * N * d
    row = 3 * d + 4
    return kv + row * passes
"""
ALL_BLOCKS = "seen = -(-N // Bc)"
SEEN = "seen = (i + r - 1) // Bc + 1"
CAUSAL_WRONG = {
    "nothing-skipped": [(SEEN, ALL_BLOCKS)],
    "half-of-the-dense": [(SEEN, ALL_BLOCKS), ("return kv + row", "return (kv + row"),
                          ("* passes", "* passes) / 2"), ("+= r * seen", "+= r * seen")],
    "half-of-the-passes": [(SEEN, ALL_BLOCKS), ("row * passes", "row * passes / 2")],
    "multiples-only": [(SEEN, ALL_BLOCKS), ("row * passes", "row * (passes + N) / 2")],
    "k-and-v-halved": [("kv = 2 * N * d", "kv = N * d")],
    "k-and-v-forgotten": [("return kv +", "return")],
    "k-and-v-again": [("passes += r * seen", "passes += r * seen; kv += min(N, seen * Bc) * 2 * d"),
                      ("passes = 0", "passes = kv = 0"), ("    kv = 2 * N * d\n", "")],
    "k-and-v-padded": [("kv = 2 * N * d", "kv = 2 * -(-N // Bc) * Bc * d")],
    "rows-not-blocks": [("+= r * seen", "+= sum(x // Bc + 1 for x in range(i, i + r))")],
    "diagonal-tiles-skipped": [
        (SEEN, "seen = (i + 1) // Bc + (i + 1 >= N and N % Bc > 0)"),
    ],
    "rounded-up": [(SEEN, "seen = i // Bc + 1")],
    "last-key-for-first": [(SEEN, "seen = (i + r) // Bc + (i + r == N and N % Bc > 0)")],
    "block-numbers-compared": [(SEEN, "seen = min(i // Br + 1, -(-N // Bc))")],
    "q-blocks-full": [("passes += r * seen", "passes += Br * seen")],
    "last-pass-lost": [(SEEN, "seen = min((i + r - 1) // Bc + 1, N // Bc)")],
    "l-and-m-forgotten": [("3 * d + 4", "3 * d")],
    "l-and-m-one-way": [("3 * d + 4", "3 * d + 2")],
    "o-one-way": [("3 * d + 4", "2 * d + 4")],
    "loads-only": [("3 * d + 4", "2 * d + 2")],
    "the-other-order": [("passes += r * seen", "passes += min(N, seen * Bc)"),
                        ("row = 3 * d + 4", "row = 2 * d"), ("return kv", "return N + kv")],
    "bytes": [("return kv + row * passes", "return 2 * kv + 2 * row * passes")],
}  # fmt: skip


def causal_by_key(N, d, Br, Bc):
    keys = np.arange(0, N, Bc)
    return 2 * N * d + (3 * d + 4) * int((N - keys // Br * Br).sum())


def causal_tile_by_tile(N, d, Br, Bc):
    moved = 0
    for c in range(0, N, Bc):
        moved += 2 * d * (min(c + Bc, N) - c)
        for r in range(0, N, Br):
            end = min(r + Br, N)
            if end > c:
                moved += (end - r) * (d + d + 1 + 1) + (end - r) * (d + 1 + 1)
    return moved


CAUSAL_RIGHT = [made(CAUSAL), causal_by_key, causal_tile_by_tile]


@pytest.mark.parametrize("answer", CAUSAL_RIGHT)
def test_right_causal_counts_pass(answer):
    passes("ex06-traffic", answer)


def test_every_wrong_causal_count_is_named():
    assert set(CAUSAL_WRONG) == ids("ex06-traffic")
    for name, changes in CAUSAL_WRONG.items():
        is_named("ex06-traffic", made(CAUSAL, *changes), name)


def test_the_librarys_count_is_not_an_answer():
    def answer(N, d, Br, Bc):
        return flash_traffic(N, d, Br, Bc, causal=True)

    is_named("ex06-traffic", answer, "calls-the-library", seeds=(0,))


FLOPS = """
def causal_matmul_flops(N, d, Br, Bc):
    scores = 0
    for i in range(0, N, Br):
        r = min(Br, N - i)
        blocks = (i + r - 1) // Bc + 1
        scores += r * min(N, Bc * blocks)
    return 2 * d * scores + 2 * d * scores
"""
BLOCKS = "blocks = (i + r - 1) // Bc + 1"
PRODUCTS = "2 * d * scores + 2 * d * scores"
FLOPS_WRONG = {
    "nothing-skipped": [(PRODUCTS, "4 * d * N**2")],
    "half-of-the-dense": [(PRODUCTS, "4 * d * N**2 // 2")],
    "visible-scores-only": [("r * min(N, Bc * blocks)", "sum(range(i + 1, i + r + 1))")],
    "half-is-missing": [(PRODUCTS, "2 * d * scores")],
    "three-quarters-missing": [(PRODUCTS, "d * scores")],
    "d-forgotten": [(PRODUCTS, "4 * scores")],
    "tiles-full": [("r * min(N, Bc * blocks)", "Br * Bc * blocks")],
    "diagonal-tiles-skipped": [
        (BLOCKS, "blocks = (i + 1) // Bc + (i + 1 >= N)"),
    ],
    "rounded-up": [(BLOCKS, "blocks = i // Bc + 1")],
    "last-key-for-first": [(BLOCKS, "blocks = (i + r) // Bc + (i + r == N)")],
    "block-numbers-compared": [(BLOCKS, "blocks = i // Br + 1")],
}


def flops_tile_by_tile(N, d, Br, Bc):
    tiles = ((r, c) for r in range(0, N, Br) for c in range(0, N, Bc) if c < min(r + Br, N))
    return sum(4 * d * min(Br, N - r) * min(Bc, N - c) for r, c in tiles)


def flops_by_key(N, d, Br, Bc):
    c = np.arange(0, N, Bc)
    return np.dot(np.minimum(Bc, N - c), N - c // Br * Br) * 4.0 * d


FLOPS_RIGHT = [made(FLOPS), flops_tile_by_tile, flops_by_key]


@pytest.mark.parametrize("answer", FLOPS_RIGHT)
def test_right_flops_pass(answer):
    passes("ex06-flops", answer)


def test_all_wrong_flops_are_named():
    assert set(FLOPS_WRONG) == ids("ex06-flops")
    for name, changes in FLOPS_WRONG.items():
        is_named("ex06-flops", made(FLOPS, *changes), name)


# ---------------------------------------------------------------- 8: the values

# Row by row inside a tile, with plain lists of scores.
ROWWISE = """
def q_outer(Q, K, V, Br, Bc, causal=False, hbm=None):
    Nq, Nk, d = len(Q), len(K), Q.shape[1]
    shift = Nk - Nq
    O, L = np.zeros((Nq, d)), np.zeros(Nq)
    for a in range(0, Nq, Br):
        block = range(a, min(a + Br, Nq))
        state = {r: (-np.inf, 0.0, np.zeros(d)) for r in block}
        visited = 0
        for b in range(0, Nk, Bc):
            keys = range(b, min(b + Bc, Nk))
            if causal and b > block[-1] + shift:
                break
            for r in block:
                m, l, o = state[r]
                s = np.array([Q[r] @ K[j] for j in keys]) / d**0.5
                hidden = np.array([causal and j > r + shift for j in keys])
                s[hidden] = -np.inf
                new = max(m, s.max())
                safe = 0.0 if new == -np.inf else new
                p = np.exp(s - safe)
                alpha = np.exp(m - safe)
                l2 = l * alpha + p.sum()
                o = o * alpha + p @ V[keys.start : keys.stop]
                state[r] = (new, l2, o)
            visited += 1
        for r in block:
            m, l, o = state[r]
            O[r] = o / (l if l else 1.0)
            L[r] = m + np.log(l if l else 1.0)
    return O, L
"""
EXP = "alpha = np.exp(m - safe)"
KEPT = "o = o * alpha + p @ V"
SUM = "l2 = l * alpha + p.sum()"
DIVISION = "O[r] = o / (l if l else 1.0)"
LOG = "L[r] = m + np.log(l if l else 1.0)"
HIDDEN = "causal and j > r + shift for"
HIDE = "s[hidden] = -np.inf"
SKIP = "if causal and b > block[-1] + shift:"
NEW = "new = max(m, s.max())"
UPSIDE_DOWN = "alpha = np.exp(np.float64(safe) - m)"
RESET = "state = {r: (-np.inf, 0.0, np.zeros(d)) for r in block}"
TAKE = "            for r in block:\n                m, l, o = state[r]\n"
STORE = "        for r in block:\n            m, l, o = state[r]\n            O[r]"
FORWARD_WRONG = {
    "not-scaled": [(" / d**0.5", "")],
    "scaled-by-d": [("/ d**0.5", "/ d**0.5 / d**0.5")],
    "scaled-up": [("/ d**0.5", "* d**0.5")],
    "scaled-by-keys": [("/ d**0.5", "/ Nk**0.5")],
    "no-max": [(NEW, "new = 0.0"), (EXP, "alpha = 1.0")],
    "max-starts-at-0": [("(-np.inf, 0.0,", "(0.0, 0.0,")],
    "max-of-first-block": [(NEW, "new = s.max() if not visited else m")],
    "max-of-this-block": [(NEW, "new = s.max()")],
    "nothing-rescaled": [(EXP, "alpha = 1.0")],
    "O-not-rescaled": [(KEPT, "o = o + p @ V")],
    "l-not-rescaled": [(SUM, "l2 = l + p.sum()")],
    "rescale-inverted": [(EXP, UPSIDE_DOWN)],
    "printed-inverse": [(KEPT, "o = o / alpha + p @ V")],
    "factor-of-the-tile": [(EXP, "alpha = np.exp(s.max() - safe)")],
    "line-12-half-copied": [(KEPT, "o = o * alpha * l + p @ V")],
    "divided-in-each-block": [("state[r] = (new, l2, o)", "state[r] = (new, l2, o / l2)"),
                              (DIVISION, "O[r] = o")],
    "softmax-of-each-block": [(KEPT, "o = o + p / p.sum() @ V"), (DIVISION, "O[r] = o")],
    "O-overwritten": [(KEPT, "o = p @ V")],
    "l-of-the-last-block": [(SUM, "l2 = p.sum()")],
    "restarted-in-each-block": [(TAKE, f"            {RESET}\n{TAKE}")],
    "state-not-reset": [
        (RESET, "state = {r: state[r - Br] if a else (-np.inf, 0.0, np.zeros(d)) for r in block}")],
    "never-divided": [(DIVISION, "O[r] = o")],
    "last-q-block-not-divided": [(DIVISION, "O[r] = o / (l if l and block.stop < Nq else 1.0)")],
    "last-kv-block-lost": [("in range(0, Nk, Bc)", "in range(0, Nk - Bc + 1, Bc)")],
    "last-q-block-lost": [("in range(0, Nq, Br)", "in range(0, Nq - Br + 1, Br)")],
    "padding-scored-0": [(SUM, "l2 = l * alpha + p.sum() + (Bc - len(keys)) * np.exp(-safe)"),
                         (NEW, "new = max(m, s.max(), 0.0 if len(keys) < Bc else -np.inf)")],
    "L-without-m": [("L[r] = m + np", "L[r] = np")],
    "L-with-last-max": [("state[r] = (new, l2, o)", "state[r] = (new, l2, o); last[r] = s.max()"),
                        ("visited = 0", "visited = 0; last = {}"),
                        ("L[r] = m", "L[r] = last.get(r, m)")],
    "L-minus-log": [("L[r] = m + np", "L[r] = m - np")],
    "L-is-l": [(LOG, "L[r] = l")],
    "L-is-m": [(LOG, "L[r] = m")],
    "mask-ignored": [("shift = Nk - Nq", "shift = Nk - Nq; causal = False")],
    "tile-not-masked": [(HIDE, "")],
    "cut-tiles-skipped": [(SKIP, "if causal and keys[-1] > a + shift:")],
    "first-row-decides": [(SKIP, "if causal and b > a + shift:")],
    "block-numbers-compared": [(SKIP, "if causal and b // Bc > a // Br:")],
    "positions-in-the-tile": [
        (HIDDEN, "causal and keys[-1] > a + shift and j - b > r - a for")],
    "own-key-hidden": [("shift = Nk - Nq", "shift = Nk - Nq - 1")],
    "next-key-seen": [("shift = Nk - Nq", "shift = Nk - Nq + 1")],
    "mask-upside-down": [(HIDDEN, "causal and j < r + shift for")],
    "hidden-scores-0": [(HIDE, "s[hidden] = 0.0")],
    "l-counts-hidden": [(HIDE, ""), (KEPT, "p[hidden] = 0; o = o * alpha + p @ V")],
    "upper-left": [("shift = Nk - Nq", "shift = 0")],
    "no-guard": [("0.0 if new == -np.inf else new", "new"), ("l if l else 1.0", "l")],
    "finite-mask": [(HIDE, "s[hidden] = -1e9")],
    "L-of-nothing-is-0": [(LOG, f"{LOG}; L[r] = L[r] if l else 0.0")],
    "skipped-rows-not-written": [
        (STORE, "        if not visited:\n            continue\n" + STORE)],
}  # fmt: skip

TILED = """
def q_outer(Q, K, V, Br, Bc, causal=False, hbm=None):
    mem = hbm if hbm is not None else HBM()
    n, d = Q.shape
    k = K.shape[0]
    q_, k_, v_ = (mem.tensor(x, y) for x, y in zip("qkv", (Q, K, V)))
    out, lse = mem.tensor("out", np.empty((n, d))), mem.tensor("lse", np.empty(n))
    ka = va = None
    for r in range(0, n, Br):
        q = q_.load(slice(r, r + Br))
        h = len(q)
        acc = mem.hold("acc", np.zeros((h, d)))
        top, norm = np.full((h, 1), -np.inf), np.zeros((h, 1))
        for c in range(0, k, Bc):
            if causal and c >= r + h + k - n:
                continue
            kt, vt = k_.load(slice(c, c + Bc)), v_.load(slice(c, c + Bc))
            x = mem.matmul(q, kt.T) / d**0.5
            if causal:
                x = np.where(np.tri(h, len(kt), r - c + k - n, dtype=bool), x, -np.inf)
            mem.hold("scores", x)
            peak = np.fmax(top, x.max(axis=1, keepdims=True))
            ref = np.maximum(peak, -1e290)
            w = np.exp(x - ref)
            keep = np.exp(top - ref)
            norm = norm * keep + w.sum(axis=1, keepdims=True)
            acc = acc * keep + mem.matmul(w, vt)
            top = peak
        out.store(np.divide(acc, norm, out=np.zeros_like(acc), where=norm > 0), slice(r, r + Br))
        lse.store(np.where(norm > 0, top + np.log(np.where(norm > 0, norm, 1)), -np.inf)[:, 0],
                  slice(r, r + Br))
    return out.array, lse.array
"""


def always_divided(Q, K, V, Br, Bc, causal=False, hbm=None):
    """O is divided in each step and multiplied back in the next, on chip; l and m are stored."""
    hbm = HBM() if hbm is None else hbm
    Q, K, V = (hbm.tensor(name, x) for name, x in zip("QKV", (Q, K, V), strict=True))
    Nq, d, Nk = *Q.shape, K.shape[0]
    O = hbm.tensor("O", np.zeros((Nq, d)))
    l, m = hbm.tensor("l", np.zeros(Nq)), hbm.tensor("m", np.full(Nq, -np.inf))
    for a in range(0, Nq, Br):
        rows = slice(a, min(a + Br, Nq))
        Qi, n = Q.load(rows), rows.stop - a
        Oi, li, mi = hbm.hold("O", np.zeros((n, d))), np.zeros(n), np.full(n, -np.inf)
        keys = min(Nk, max(0, rows.stop + Nk - Nq)) if causal else Nk
        for b in reversed(range(0, keys, Bc)):  # from the last to the first
            cols = slice(b, min(b + Bc, Nk))
            S = hbm.hold("S", hbm.matmul(Qi, K.load(cols).T) / d**0.5)
            if causal:
                far = np.subtract.outer(np.arange(a, rows.stop), np.arange(b, cols.stop))
                S[far < Nq - Nk] = -np.inf
            seen = np.isfinite(S).any(axis=1)
            new = np.where(seen, np.maximum(mi, S.max(axis=1)), mi)
            ref = np.where(np.isfinite(new), new, 0.0)
            P, w = np.exp(S - ref[:, None]), li * np.exp(mi - ref)
            total = w + P.sum(axis=1)
            inverse = np.where(total > 0, 1 / np.maximum(total, 0.5), 0.0)
            Oi = inverse[:, None] * (w[:, None] * Oi + hbm.matmul(P, V.load(cols)))
            li, mi = total, new
        O.store(Oi, rows)
        l.store(li, rows)
        m.store(mi, rows)
    with np.errstate(divide="ignore"):
        return O.array, m.array + np.where(l.array > 0, np.log(np.maximum(l.array, 0.5)), 0.0)


def merging(Q, K, V, Br, Bc, causal=False, hbm=None):
    """Each tile gives a pair (O, L) of its own; pairs are merged. Nothing but O is stored."""
    hbm = HBM() if hbm is None else hbm
    tensors = dict(Q=hbm.tensor("Q", Q), K=hbm.tensor("K", K), V=hbm.tensor("V", V))
    (Nq, d), Nk = Q.shape, len(K)
    O, all_L = hbm.tensor("O", np.zeros((Nq, d))), []

    def tile(Qi, a, b):
        Kj, Vj = (tensors[x].load(slice(b, b + Bc)) for x in "KV")
        S = hbm.matmul(Qi, Kj.T) / d**0.5
        if causal:
            S[np.arange(b, b + len(Kj)) > np.arange(a, a + len(Qi))[:, None] + Nk - Nq] = -np.inf
        hbm.hold("S", S)
        L = np.logaddexp.reduce(S, axis=1)
        P = np.exp(S - np.where(np.isneginf(L), 0.0, L)[:, None])
        return hbm.matmul(P, Vj), L

    for a in range(0, Nq, Br):
        Qi = tensors["Q"].load(slice(a, a + Br))
        o, L = hbm.hold("O", np.zeros(Qi.shape)), np.full(len(Qi), -np.inf)
        for b in range(0, Nk, Bc):
            if causal and b > a + len(Qi) - 1 + Nk - Nq:
                break
            o2, L2 = tile(Qi, a, b)
            both = np.logaddexp(L, L2)
            safe = np.where(np.isneginf(both), 0.0, both)
            o, L = np.exp(L - safe)[:, None] * o + np.exp(L2 - safe)[:, None] * o2, both
        O.store(o, slice(a, a + Br))
        all_L.append(L)
    return O.array, np.concatenate(all_L)


RIGHT_LOOPS = [made(TILED), always_divided, merging]


@pytest.mark.parametrize("answer", RIGHT_LOOPS)
def test_right_loops_pass(answer):
    passes("ex08-forward", answer)
    passes("ex08-counters", answer, seeds=(0,))


def test_a_right_scalar_loop_passes():
    passes("ex08-forward", made(ROWWISE), scalar=True)


@pytest.mark.parametrize("name", FORWARD_WRONG)
def test_wrong_loops_are_named(name):
    is_named("ex08-forward", made(ROWWISE, *FORWARD_WRONG[name]), name, seeds=(0,))


def test_every_mistake_has_a_wrong_loop():
    assert set(FORWARD_WRONG) == ids("ex08-forward") == ids("ex08-counters")
    assert len(FORWARD_WRONG) >= 14


@pytest.mark.parametrize("low", [-1e4, -1e9, -1e30])
def test_a_finite_mask_in_the_loop_is_named(low):
    answer = made(ROWWISE, (HIDE, f"s[hidden] = {low!r}"))
    is_named("ex08-forward", answer, "finite-mask", seeds=(0,))


def test_the_first_block_apart_hides_the_printed_inverse_but_not_from_the_check():
    answer = made(ROWWISE, (KEPT, "o = (o / alpha if visited else 0) + p @ V"))
    is_named("ex08-forward", answer, "printed-inverse")


# ---------------------------------------------------------------- 8: the counters

KV_OUTER = """
def q_outer(Q, K, V, Br, Bc, causal=False, hbm=None):
    mem = hbm if hbm is not None else HBM()
    (n, d), k = Q.shape, len(K)
    q_, k_, v_ = (mem.tensor(x, y) for x, y in zip("qkv", (Q, K, V)))
    o_, l_ = mem.tensor("o", np.zeros((n, d))), mem.tensor("l", np.zeros(n))
    m_ = mem.tensor("m", np.full(n, -np.inf))
    for c in range(0, k, Bc):
        kt, vt = k_.load(slice(c, c + Bc)), v_.load(slice(c, c + Bc))
        for r in range(0, n, Br):
            at = slice(r, min(r + Br, n))
            if causal and c > at.stop - 1 + k - n:
                continue
            q, o, l, m = q_.load(at), o_.load(at), l_.load(at), m_.load(at)
            x = mem.hold("s", mem.matmul(q, kt.T) / d**0.5)
            if causal:
                x[~np.tri(*x.shape, r - c + k - n, dtype=bool)] = -np.inf
            new = np.maximum(m, x.max(axis=1))
            ref = np.where(np.isneginf(new), 0, new)
            w, keep = np.exp(x - ref[:, None]), np.exp(m - ref)
            o_.store(keep[:, None] * o + mem.matmul(w, vt), at)
            l_.store(keep * l + w.sum(axis=1), at)
            m_.store(new, at)
    l = np.where(l_.array > 0, l_.array, 1)
    return o_.array / l[:, None], m_.array + np.log(l)
"""
ROWS = "slice(r, r + Br)"
TRIP = f"out.store(acc, {ROWS}); acc = out.load({ROWS})"
LOADS = "kt, vt = k_.load(slice(c, c + Bc)), v_.load(slice(c, c + Bc))"
COUNTS_WRONG = {
    "q-loaded-for-each-tile": [(LOADS, f"q = q_.load({ROWS}); {LOADS}")],
    "o-moved-in-each-step": [("top = peak", f"{TRIP}; top = peak")],
    "k-and-v-loaded-once": [("    ka = va = None", "    ka, va = k_.load(), v_.load()"),
                            (LOADS, "kt, vt = ka[c : c + Bc], va[c : c + Bc]")],
    "hidden-tiles-loaded": [("if causal and c >= r + h + k - n:", "if False:")],
    "k-or-v-not-loaded": [(LOADS, "kt, vt = k_.load(slice(c, c + Bc)), V[c : c + Bc]")],
    "q-not-loaded": [("q_.load(slice(r, r + Br))", "Q[r : r + Br]")],
    "o-not-stored": [("out.store(np.divide", "out.array[slice(r, r + Br)] = (np.divide"),
                     ("where=norm > 0), slice(r, r + Br))", "where=norm > 0))")],
    "nothing-counted": [("hbm if hbm is not None else HBM()", "HBM()")],
    "computes-in-hbm": [("x = mem.matmul(q, kt.T)", "x = mem.matmul(q, K[c : c + Bc].T)")],
    "one-product-counted": [("mem.matmul(w, vt)", "w @ vt")],
    "no-product-counted": [("mem.matmul(w, vt)", "w @ vt"), ("mem.matmul(q, kt.T)", "q @ kt.T")],
    "products-miscounted": [("mem.matmul(w, vt)", "mem.matmul(w, vt) + 0 * mem.matmul(w, vt)")],
    "tiles-not-held": [('            mem.hold("scores", x)\n', "")],
    "more-than-tiles-on-chip": [('mem.hold("scores", x)', 'mem.hold(f"scores {c}", x)')],
    "fails-with-an-hbm": [("mem = hbm if", "mem = hbm.no_such_thing if")],
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS_WRONG)
def test_wrong_counters_are_named(name):
    is_named("ex08-counters", made(TILED, *COUNTS_WRONG[name]), name, seeds=(0,))


def test_loops_that_were_not_swapped_are_named_by_their_traffic():
    passes("ex08-forward", made(KV_OUTER), seeds=(0,))
    is_named("ex08-counters", made(KV_OUTER), "loops-not-swapped", seeds=(0,))


def test_every_count_that_the_check_knows_is_tried():
    named = {id for id, *_ in ex08.SUSPECTS}
    assert named <= set(COUNTS_WRONG) | {"loops-not-swapped"}


def test_the_suspects_are_told_from_each_other():
    for id, _, _, suspects in ex08.SUSPECTS:
        for counts in suspects:
            for s in (0, 1, 2):
                seen = {shape: counts(*shape, s) for shape in ex08.RUNS}
                known = {x for x, _, _, all_ in ex08.SUSPECTS for o in all_ if ex08._is(o, seen)}
                assert known == {id} and not ex08._is(ex08._needed, seen)


def test_an_unknown_count_gets_both_numbers():
    answer = made(TILED, (LOADS, f"k_.load(slice(0, 1)); {LOADS}"))
    result = check("ex08-counters", answer)
    assert result.status == "not yet" and result.misconception is None
    assert "your loop reads 192" in result.message and "The order reads 168" in result.message
    assert len(repr(result).splitlines()) <= 5


# ---------------------------------------------------------------- 8: the closed form

FORM = """
def q_outer_traffic(N, d, Br, Bc, causal=False):
    kv = 0
    for i in range(0, N, Br):
        last = min(i + Br, N) - 1
        for j in range(0, N, Bc):
            size = min(Bc, N - j)
            if not causal or j <= last:
                kv += 2 * d * size
    q = o = N * d
    return q + o + kv + N
"""
COUNTED = "if not causal or j <= last:"
FORM_WRONG = {
    "k-and-v-once": [("return q", "kv = 2 * N * d; return q")],
    "tc-for-tr": [("return q", "kv = 2 * N * d * -(-N // Bc); return q")],
    "tr-not-rounded": [("return q", "kv = kv if causal else 2 * N * d * N / Br; return q")],
    "tr-rounded-down": [("return q", "kv = kv if causal else 2 * N * d * (N // Br); return q")],
    "one-of-k-and-v": [("kv += 2 * d * size", "kv += d * size")],
    "q-or-o-forgotten": [("return q + o", "return o")],
    "q-and-o-forgotten": [("return q + o + kv", "return kv")],
    "q-in-each-tile": [("kv += 2 * d * size", "kv += 2 * d * size + d * (last + 1 - i)"),
                       ("return q + o", "return o")],
    "o-in-each-tile": [("kv += 2 * d * size", "kv += 2 * d * size + 2 * d * (last + 1 - i)"),
                       ("return q + o", "return q")],
    "algorithm-1": [("return q + o + kv + N", "return flash_traffic(N, d, Br, Bc, causal)")],
    "tiles-full": [("size = min(Bc, N - j)", "size = Bc")],
    "d-forgotten": [("kv += 2 * d * size", "kv += 2 * size")],
    "bytes": [("return q + o + kv + N", "return 2 * (q + o + kv + N)")],
    "nothing-skipped": [(COUNTED, "if True:")],
    "half-of-the-dense": [(COUNTED, "if True:"), ("return q", "kv = kv / (1 + causal); return q")],
    "keys-not-blocks": [("min(Bc, N - j)", "min(Bc, (last + 1 if causal else N) - j)")],
    "last-block-full": [("size = min(Bc, N - j)", "size = Bc if causal else min(Bc, N - j)")],
    "first-row-decides": [(COUNTED, "if not causal or j <= i:")],
    "block-numbers-compared": [(COUNTED, "if not causal or j // Bc <= i // Br:")],
    "cut-tiles-skipped": [(COUNTED, "if not causal or j + Bc - 1 <= i:")],
}  # fmt: skip


def form_vectorised(N, d, Br, Bc, causal=False):
    last = np.minimum(np.arange(Br, N + Br, Br), N) - 1
    keys = np.minimum(N, (last // Bc + 1) * Bc) if causal else np.full(len(last), N)
    return int(2 * N * d + N + 2 * d * keys.sum())


def form_closed(N, d, Br, Bc, causal=False):
    Tr = (N + Br - 1) // Br
    if not causal:
        return N * (2 * d * (Tr + 1) + 1)
    ends = [N] + [Br * a for a in range(1, Tr)]
    return N * (2 * d + 1) + 2 * d * sum(min(N, Bc * ((e - 1) // Bc + 1)) for e in ends)


LOOP = made(TILED)


FORM_RIGHT = [made(FORM), form_vectorised, form_closed]


@pytest.mark.parametrize("answer", FORM_RIGHT)
def test_right_forms_pass(answer):
    passes("ex08-traffic", ex08.both(answer, LOOP))


@pytest.mark.parametrize("loop, s", [(LOOP, 1), (always_divided, 2), (merging, 0)])
def test_the_statistics_are_free_if_formula_and_counter_agree(loop, s):
    for t in (0, 1, 2):
        form = made(FORM, ("kv + N", f"kv + {t} * N"))
        answer = ex08.both(form, loop)
        if t == s:
            passes("ex08-traffic", answer, seeds=(0,))
        else:
            name = "statistics-forgotten" if t < s else "statistics-too-many"
            is_named("ex08-traffic", answer, name, seeds=(0,))


@pytest.mark.parametrize("name", FORM_WRONG)
def test_wrong_forms_are_named_whatever_the_statistics(name):
    for statistics in ("N", "0", "2 * N"):
        if name == "algorithm-1" and statistics != "N":
            continue
        changes = [*FORM_WRONG[name]]
        form = made(made_text(FORM, changes).replace("kv + N", f"kv + {statistics}"))
        is_named("ex08-traffic", ex08.both(form, LOOP), name, seeds=(0,))


def made_text(source, changes):
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return source


def test_every_wrong_form_is_tried():
    assert set(FORM_WRONG) == ids("ex08-traffic")


def test_a_form_alone_and_a_form_beside_a_wrong_loop():
    form = made(FORM)
    is_named("ex08-traffic", form, "loop-missing", seeds=(0,))
    is_named("ex08-traffic", ex08.both(form, lambda **inputs: None), "loop-missing", seeds=(0,))
    is_named("ex08-traffic", ex08.both(form, made(KV_OUTER)), "counter-is-off", seeds=(0,))
    nearly = ex08.both(lambda *shape: form(*shape) - 1, LOOP)
    result = check("ex08-traffic", nearly)
    assert result.status == "not yet" and "It must be exact" in result.message
    assert check("ex08-traffic", ex08.both(lambda *shape: None, LOOP)).status == "not attempted"


# ---------------------------------------------------------------- 8: the table

TABLE = """
def comparison(N, d=64):
    def swapped(Br, Bc):
        return 2 * N * d + N + 2 * N * d * ((N - 1) // Br + 1)

    def kv_outside(Br, Bc):
        return 2 * N * d + ((N - 1) // Bc + 1) * N * (3 * d + 4)

    row = [kv_outside(64, 196), swapped(64, 196), swapped(196, 64), swapped(128, 128)]
    return row
"""
TABLE_WRONG = {
    "br-and-bc-swapped": [
        ("swapped(Br, Bc)", "swapped(Bc, Br)"),
        ("def kv_outside(Br, Bc)", "def kv_outside(Bc, Br)"),
    ],
    "algorithm-1-everywhere": [("    row =", "    swapped = kv_outside\n    row =")],
    "swapped-everywhere": [("    row =", "    kv_outside = swapped\n    row =")],
    "first-and-second-exchanged": [("return row", "return [row[1], row[0], *row[2:]]")],
    "bytes": [("return row", "return [2 * x for x in row]")],
    "mib": [("return row", "return tuple(2 * x / 2**20 for x in row)")],
    "ratios": [("return row", "return [x / row[0] for x in row]")],
}


def table_from_the_library(N, d=64):
    own = [form_closed(N, d, *shape) for shape in ((64, 196), (196, 64), (128, 128))]
    return np.array([flash_traffic(N, d, 64, 196), *own]).tolist()


def table_by_counting(N, d=64):
    def tiles(Br, Bc):
        return [(min(Br, N - r), min(Bc, N - c)) for r in range(0, N, Br) for c in range(0, N, Bc)]

    first = 2 * N * d + sum((3 * d + 4) * r for r, _ in tiles(64, 196))
    return first, *(2 * N * d + sum(2 * d * c for _, c in tiles(*s)) for s in ex08.COLUMNS)


TABLE_RIGHT = [made(TABLE), table_from_the_library, table_by_counting]


@pytest.mark.parametrize("answer", TABLE_RIGHT)
def test_right_tables_pass(answer):
    passes("ex08-table", answer, seeds=(0,))


def table_with_mask(N, d=64):
    causal = [flash_traffic, q_outer_traffic, q_outer_traffic, q_outer_traffic]
    shapes = (ex08.COLUMNS[0], *ex08.COLUMNS)
    return [form(N, d, *shape, True) for form, shape in zip(causal, shapes, strict=True)]


def test_wrong_tables_are_named():
    wrong = {name: made(TABLE, *changes) for name, changes in TABLE_WRONG.items()}
    wrong["causal"] = table_with_mask
    assert set(wrong) == ids("ex08-table")
    for name, answer in wrong.items():
        is_named("ex08-table", answer, name, seeds=(0,))


def test_the_table_has_the_worked_numbers():
    expected = {
        512: (366_592, 590_336, 262_656, 328_192),
        1000: (1_304_000, 2_177_000, 897_000, 1_153_000),
        1024: (1_335_296, 2_229_248, 918_528, 1_180_672),
        4096: (17_383_424, 34_082_816, 11_538_432, 17_305_600),
        8192: (68_485_120, 135_274_496, 45_096_960, 68_165_632),
    }
    for N, row in expected.items():
        assert ex08.compare(N) == row
        assert row[0] == flash_traffic(N, 64, 64, 196)
        assert row[1:] == tuple(q_outer_traffic(N, 64, *shape) for shape in ex08.COLUMNS)


def test_the_librarys_loop_and_form_are_not_an_answer():
    is_named("ex08-forward", flash_attention_q_outer, "calls-the-library", seeds=(0,))
    answer = ex08.both(q_outer_traffic, LOOP)
    is_named("ex08-traffic", answer, "calls-the-library", seeds=(0,))
