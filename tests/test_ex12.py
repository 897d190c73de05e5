"""Exercise 12: right programs in any style pass, wrong ideas are called by their name.

The programs here are written from the tasks alone, in other styles than the registry's mistakes.
"""

import math
import os

import numpy as np
import pytest

from attention_lib import HBM, block_sparse_attention_q_outer, online, sparse
from attention_lib.checks import _QUESTIONS, check
from attention_lib.checks.kinds import Program
from attention_lib.checks.programs import check_program, fails_on
from attention_lib.tiled import blocks

SEEDS = range(int(os.environ.get("COURSE_SEEDS", "40")))

# ------------------------------------------------------------------ right masks


def by_digits(T, k):
    """Count the digits in which i and j differ; the highest that may differ is digit k."""
    mask = np.zeros((T, T), dtype=bool)
    for i in range(T):
        for j in range(T):
            differ = [n for n in range(T.bit_length()) if (i >> n) % 2 != (j >> n) % 2]
            mask[i, j] = not differ or (len(differ) == 1 and differ[0] < k)
    return mask


def by_flipping(T, k):
    """In each row: the block itself, and the block with one of the first k digits flipped."""
    mask = np.zeros((T, T), dtype=int)
    for i in range(T):
        mask[i, [i, *(i ^ (1 << n) for n in range(k))]] = 1
    return mask


def by_kronecker(T, k):
    """The pair mask [[0, 1], [1, 0]] at digit n, the identity at all others; then their union."""
    mask = np.eye(T)
    for n in range(k):
        mask += np.kron(np.kron(np.eye(T >> (n + 1)), [[0, 1], [1, 0]]), np.eye(1 << n))
    return mask > 0


def by_the_trick(T, k):
    """x & (x - 1) is 0 for a power of two, and for 0."""
    x = np.bitwise_xor.outer(np.arange(T), np.arange(T))
    return ((x & (x - 1)) == 0) & (x < 1 << k)


def by_recursion(T, k):
    """Two smaller butterflies, with a diagonal from one half to the other if that stride is in."""
    if T == 1:
        return np.ones((1, 1), bool)
    half, layers = T // 2, T.bit_length() - 1
    small = by_recursion(half, min(k, layers - 1))
    across = np.eye(half, dtype=bool) if k == layers else np.zeros((half, half), bool)
    return np.block([[small, across], [across, small]])


MASK_RIGHT = [by_digits, by_flipping, by_kronecker, by_the_trick, by_recursion]

# ------------------------------------------------------------------ wrong masks


def rowwise(partners, diagonal=True):
    """A mask from a rule that lists the partners of a row; those outside are dropped."""

    def program(T, k):
        mask = np.zeros((T, T), bool)
        for i in range(T):
            for j in partners(i, k, T):
                if 0 <= j < T:
                    mask[i, j] = True
            if diagonal:
                mask[i, i] = True
        return mask

    return program


def product_of_layers(T, k):
    reach = np.eye(T, dtype=int)
    for n in range(k):
        layer = np.array([[i == j or i ^ j == 1 << n for j in range(T)] for i in range(T)])
        reach = layer.astype(int) @ reach
    return reach > 0


def lower(T, k):
    return np.tril(by_flipping(T, k)) > 0


def upper(T, k):
    return np.triu(by_kronecker(T, k))


def complement(T, k):
    return 1 - by_flipping(T, k)


def by_or(T, k):
    return np.array(
        [[i == j or (i | j) in [1 << n for n in range(k)] for j in range(T)] for i in range(T)]
    )


def by_and(T, k):
    return np.array(
        [[i == j or (i & j) in [1 << n for n in range(k)] for j in range(T)] for i in range(T)]
    )


MASK_WRONG = [
    ("diagonal-forgotten", rowwise(lambda i, k, T: [i ^ 2**n for n in range(k)], False)),
    ("diagonal-forgotten", lambda T, k: by_kronecker(T, k) ^ np.eye(T, dtype=bool)),
    ("below-not-power", product_of_layers),
    ("below-not-power", rowwise(lambda i, k, T: [i ^ x for x in range(2**k)])),
    (
        "distance-not-xor",
        rowwise(lambda i, k, T: [i + s * 2**n for n in range(k) for s in (-1, 1)]),
    ),
    ("distance-not-xor", rowwise(lambda i, k, T: [i - 2**n for n in range(k)])),
    ("distance-not-xor", rowwise(lambda i, k, T: [(i + 2**n) % T for n in range(k)])),
    ("one-layer-too-many", rowwise(lambda i, k, T: [i ^ 2**n for n in range(k + 1)])),
    ("one-layer-short", rowwise(lambda i, k, T: [i ^ 2**n for n in range(k - 1)])),
    ("stride-1-forgotten", rowwise(lambda i, k, T: [i ^ 2**n for n in range(1, k + 1)])),
    ("stride-1-forgotten", rowwise(lambda i, k, T: [i ^ 2**n for n in range(1, k)])),
    ("only-one-layer", rowwise(lambda i, k, T: [i ^ 2 ** (k - 1)] if k else [])),
    ("k-ignored", lambda T, k: by_kronecker(T, T.bit_length() - 1)),
    (
        "longest-first",
        rowwise(lambda i, k, T: [i ^ (T >> n) for n in range(1, k + 1)]),
    ),
    ("one-half-only", lower),
    ("one-half-only", upper),
    ("wrong-bit-operation", by_or),
    ("wrong-bit-operation", by_and),
    ("numbers-not-powers", rowwise(lambda i, k, T: [i ^ x for x in range(1, k + 1)])),
    ("caret-is-xor", rowwise(lambda i, k, T: [i ^ (2 ^ n) for n in range(k)])),
    ("inverted", complement),
    (None, lambda T, k: np.zeros((T, T), bool)),
    (None, lambda T, k: by_flipping(T, k)[::-1]),
    (None, lambda T, k: by_flipping(T, k)[:-1]),
]

# ------------------------------------------------------------------ the loop, as text

ROWWISE = """
def block_sparse(Q, K, V, mask, B):
    hbm = HBM()
    n, d = Q.shape
    q, k, v = hbm.tensor("Q", Q), hbm.tensor("K", K), hbm.tensor("V", V)
    o, lse = hbm.tensor("O", np.zeros((n, d))), hbm.tensor("L", np.zeros(n))
    T = -(-n // B)
    for r in range(T):
        rows = slice(r * B, min(n, r * B + B))
        qi = q.load(rows)
        top = np.full(len(qi), -np.inf)
        total, acc = np.zeros(len(qi)), np.zeros((len(qi), d))
        for c in range(T):
            if not mask[r, c]:
                continue
            cols = slice(c * B, min(n, c * B + B))
            s = qi @ k.load(cols).T * d ** -0.5
            vj = v.load(cols)
            new = np.maximum(top, s.max(axis=1))
            fade, p = np.exp(top - new), np.exp(s - new[:, None])
            total, acc, top = fade * total + p.sum(axis=1), fade[:, None] * acc + p @ vj, new
        ok = total > 0
        total = np.where(ok, total, 1.0)
        o.store(acc / total[:, None], rows)
        lse.store(np.where(ok, top + np.log(total), -np.inf), rows)
    return o.array, lse.array, hbm.reads + hbm.writes
"""


def made(*changes, source=ROWWISE):
    """The function in the text, with (old, new) replaced; each old must be there once."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    space = {"np": np, "HBM": HBM}
    exec(source, space)
    return space["block_sparse"]


def as_in_the_notebook(Q, K, V, mask, B):
    hbm, (N, d) = HBM(), Q.shape
    Q, K, V = hbm.tensor("Q", Q), hbm.tensor("K", K), hbm.tensor("V", V)
    O, L = hbm.tensor("O", np.zeros((N, d))), hbm.tensor("L", np.zeros(N))
    for i, rows in enumerate(blocks(N, B)):
        Qi = Q.load(rows)
        state = online.start(rows.stop - rows.start, d)
        for j, cols in enumerate(blocks(N, B)):
            if mask[i, j]:
                S = Qi @ K.load(cols).T / math.sqrt(d)
                state = online.update(state, S, V.load(cols))
        Oi, Li = online.finish(state)
        O.store(Oi, rows)
        L.store(Li, rows)
    return O.array, L.array, hbm.reads + hbm.writes


def all_tiles_of_a_row(Q, K, V, mask, B):
    """One softmax over the keys of all the tiles that the row sees; the counts as one number."""
    N, d, moved = *Q.shape, 0
    O, L = np.zeros_like(Q), np.full(N, -np.inf)
    for i, row in enumerate(np.asarray(mask, bool)):
        q = Q[i * B : i * B + B]
        moved += 2 * q.size + len(q)
        keys = np.flatnonzero(np.repeat(row, B)[:N])
        moved += 2 * d * len(keys)
        if len(keys):
            s = q @ K[keys].T / np.sqrt(d)
            L[i * B : i * B + B] = np.logaddexp.reduce(s, axis=1)
            O[i * B : i * B + B] = np.exp(s - L[i * B : i * B + B, None]) @ V[keys]
    return O, L, moved


def merged_partials(Q, K, V, mask, B):
    """A partial result for each tile on its own, and a merge at the end of the row."""
    hbm, (N, d) = HBM(), Q.shape
    q, k, v = (hbm.tensor(n, x) for n, x in (("Q", Q), ("K", K), ("V", V)))
    o, lse = hbm.tensor("O", np.empty((N, d))), hbm.tensor("L", np.empty(N))
    spans = [slice(a, min(a + B, N)) for a in range(0, N, B)]
    for i, rows in enumerate(spans):
        qi, parts = q.load(rows), []
        for cols in (spans[j] for j in np.flatnonzero(mask[i])):
            s = qi @ k.load(cols).T / d**0.5
            each = np.logaddexp.reduce(s, axis=1)
            parts.append((each, np.exp(s - each[:, None]) @ v.load(cols)))
        whole = np.full(len(qi), -np.inf)
        for each, _ in parts:
            whole = np.logaddexp(whole, each)
        out = sum((np.exp(each - whole)[:, None] * x for each, x in parts), np.zeros((len(qi), d)))
        o.store(out, rows)
        lse.store(whole, rows)
    return o.array, lse.array, hbm.reads + hbm.writes


SKIP_RIGHT = [made(), as_in_the_notebook, all_tiles_of_a_row, merged_partials]

SKIP = "            if not mask[r, c]:\n                continue\n"
SCORE = "            s = qi @ k.load(cols).T * d ** -0.5\n"
COLS = "            cols = slice(c * B, min(n, c * B + B))\n"
HIDE = (
    SCORE
    + "            if not mask[r, c]:\n                v.load(cols)\n                continue\n"
)
EMPTY = "        if not mask[r].any():\n            continue\n"
GUARD = (
    ("        total = np.where(ok, total, 1.0)\n", ""),
    ("np.where(ok, top + np.log(total), -np.inf)", "top + np.log(total)"),
)
SKIP_WRONG = [
    ("mask-forgotten", [(SKIP, "")]),
    ("hides-not-skips", [(SKIP, ""), (SCORE, HIDE)]),
    (
        "hides-not-skips",
        [
            (SKIP, ""),
            (
                "            new =",
                "            s = np.where(mask[r, c], s, -np.inf)\n            new =",
            ),
            (
                "np.exp(top - new), np.exp(s - new[:, None])",
                "np.exp(top - z), np.exp(s - z[:, None])",
            ),
            (
                "            fade,",
                "            z = np.where(np.isneginf(new), 0, new)\n            fade,",
            ),
        ],
    ),
    (
        "loads-before-the-test",
        [
            (SKIP + COLS, COLS + "            kj = k.load(cols)\n" + SKIP),
            ("k.load(cols).T", "kj.T"),
        ],
    ),
    (
        "loads-before-the-test",
        [
            (SKIP + COLS, COLS + "            vj = v.load(cols)\n" + SKIP),
            ("            vj = v.load(cols)\n            new", "            new"),
        ],
    ),
    ("indices-swapped", [("mask[r, c]", "mask[c, r]")]),
    ("inverted-test", [("if not mask[r, c]", "if mask[r, c]")]),
    ("stops-at-the-first", [("continue", "break")]),
    ("whole-columns-only", [("not mask[r, c]", "not mask[:, c].any()")]),
    ("causal-by-habit", [("not mask[r, c]", "c > r or not mask[r, c]")]),
    ("causal-by-habit", [("for c in range(T)", "for c in range(r + 1)")]),
    ("diagonal-by-habit", [("not mask[r, c]", "r != c and not mask[r, c]")]),
    (
        "skipped-score-is-0",
        [(SKIP, ""), ("d ** -0.5\n", "d ** -0.5 * mask[r, c]\n")],
    ),
    (
        "skipped-score-is-0",
        [
            (SKIP, ""),
            ("d ** -0.5\n", "d ** -0.5 * mask[r, c]\n"),
            ("p @ vj", "p @ (vj * mask[r, c])"),
        ],
    ),
    ("last-block-lost", [("T = -(-n // B)", "T = n // B")]),
    ("reads-only", [("hbm.reads + hbm.writes", "hbm.reads")]),
    ("k-or-v-not-counted", [("k.load(cols)", "K[cols]")]),
    ("k-or-v-not-counted", [("v.load(cols)", "V[cols]")]),
    ("empty-row-not-stored", [("        qi =", EMPTY + "        qi =")]),
    ("empty-row-not-stored", [("        top =", EMPTY + "        top =")]),
    ("empty-row-gives-nan", GUARD),
    (None, [("d ** -0.5", "1")]),
    (None, [("fade * total", "total")]),
]


def library_answer(Q, K, V, mask, B):
    hbm = HBM()
    O, L = block_sparse_attention_q_outer(Q, K, V, mask, B, B, hbm=hbm)
    return O, L, hbm.reads + hbm.writes


def skip_wrong():
    return [(name, made(*changes)) for name, changes in SKIP_WRONG]


RIGHT = {"ex12-butterfly": MASK_RIGHT, "ex12-skip": SKIP_RIGHT}
WRONG = {"ex12-butterfly": MASK_WRONG, "ex12-skip": skip_wrong()}
CASES = [(id, name, p) for id in WRONG for name, p in WRONG[id]]


@pytest.mark.parametrize("id", RIGHT)
def test_right_programs_pass(id):
    for program in RIGHT[id]:
        for seed in range(4):
            result = check_program(_QUESTIONS[id], program, seed)
            assert result.status == "passed", (seed, program, result)


@pytest.mark.parametrize("id, name, program", CASES, ids=[f"{i}-{n}" for i, n, _ in CASES])
def test_wrong_programs_are_called_by_their_name(id, name, program):
    for seed in range(3):
        result = check_program(_QUESTIONS[id], program, seed)
        assert (result.status, result.misconception) == ("not yet", name), (seed, result)
        lines = repr(result).splitlines()
        assert len(lines) <= 5 and max(map(len, lines)) <= 88


@pytest.mark.parametrize("id", RIGHT)
def test_no_verdict_depends_on_the_seed(id):
    """COURSE_SEEDS=1000 was run once; every run does some."""
    exercise = _QUESTIONS[id]
    for seed in SEEDS:
        for program in RIGHT[id]:
            assert fails_on(exercise, program, seed) is None, (seed, program)
        for name, program in WRONG[id]:
            assert fails_on(exercise, program, seed) is not None, (seed, name)


@pytest.mark.parametrize("id", RIGHT)
def test_every_mistake_is_recognised_as_itself_and_met_from_outside(id):
    exercise = _QUESTIONS[id]
    assert isinstance(exercise, Program)
    names = {m.id for m in exercise.mistakes}
    assert len(names) >= 12 and names == {name for name, _ in WRONG[id]} - {None}
    for mistake in exercise.mistakes:
        assert check_program(exercise, mistake.program, 5).misconception == mistake.id


def test_the_librarys_answer_is_no_answer():
    assert check("ex12-butterfly", sparse.butterfly).misconception == "calls-the-library"
    assert check("ex12-skip", library_answer).misconception == "calls-the-library"


def test_float32_is_not_enough():
    def narrow(Q, K, V, mask, B):
        return made()(*(x.astype(np.float32).astype(np.float64) for x in (Q, K, V)), mask, B)

    assert check("ex12-skip", narrow).status == "not yet"


def test_the_stubs_are_not_attempted():
    assert check("ex12-butterfly", lambda T, k: None).status == "not attempted"
    assert check("ex12-skip", lambda Q, K, V, mask, B: None).status == "not attempted"


def test_the_answer_to_the_last_question_by_running_it():
    """Swapped indices pass every butterfly; the three others do not."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, 16, 3))
    right, programs = SKIP_RIGHT[1], dict(skip_wrong())

    def notices(program):
        return any(
            not all(
                np.allclose(a, b)
                for a, b in zip(program(Q, K, V, m, 2), right(Q, K, V, m, 2), strict=True)
            )
            for m in (sparse.butterfly(8, k) for k in range(4))
        )

    assert not notices(programs["indices-swapped"])
    for name in ("loads-before-the-test", "stops-at-the-first", "causal-by-habit"):
        assert notices(programs[name]), name
