"""Exercise 9: right backward passes in any style pass, wrong ideas are called by their name.

The programs here are written from the task alone, in other styles than the registry's mistakes.
"""

import math
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest

from attention_lib import flash_attention_q_outer, standard_backward
from attention_lib.backward import flash_backward
from attention_lib.checks import check
from attention_lib.checks.exercises import ex09
from attention_lib.checks.kinds import Choice, Number
from attention_lib.checks.programs import check_program

PROGRAM = ex09.BACKWARD
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


# ---------------------------------------------------------------- right


def q_blocks_outside(Q, K, V, O, L, dO, Br, Bc, causal=False):
    """The other order, everything in place."""
    Nq, d = Q.shape
    Nk = K.shape[0]
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    finite = np.where(L > -np.inf, L, 0)
    for i in range(0, Nq, Br):
        q, g = Q[i : i + Br], dO[i : i + Br]
        D = np.einsum("nd,nd->n", g, O[i : i + Br])
        for j in range(0, Nk, Bc):
            k, v = K[j : j + Bc], V[j : j + Bc]
            p = q @ k.T
            p /= math.sqrt(d)
            p -= finite[i : i + Br, None]
            if causal:
                p[
                    np.add.outer(-np.arange(i, i + len(q)), np.arange(j, j + len(k))) > Nk - Nq
                ] = -np.inf
            np.exp(p, out=p)
            dV[j : j + Bc] += p.T @ g
            s = g @ v.T
            s -= D[:, None]
            s *= p
            s /= math.sqrt(d)
            dQ[i : i + Br] += s @ k
            dK[j : j + Bc] += s.T @ q
    return dQ, dK, dV


def scaled_queries_in_columns(Q, K, V, O, L, dO, Br, Bc, causal=False):
    """The scale goes into Q first; K/V blocks as lists, concatenated at the end."""
    (Nq, d), Nk = Q.shape, len(K)
    q = Q * d**-0.5
    D = np.array([g @ o for g, o in zip(dO, O, strict=True)])
    dq, dks, dvs = np.zeros((Nq, d)), [np.zeros((0, d))], [np.zeros((0, d))]
    for cols in np.array_split(np.arange(Nk), range(Bc, Nk, Bc)):
        dk, dv = 0, 0
        for rows in np.array_split(np.arange(Nq), range(Br, Nq, Br)):
            see = cols[None] - rows[:, None] <= (Nk - Nq if causal else Nk)
            if not see.any():
                continue
            log_p = q[rows] @ K[cols].T - np.nan_to_num(L[rows], neginf=0.0)[:, None]
            p = np.exp(log_p) * see if not causal else np.where(see, np.exp(log_p), 0.0)
            dv = dv + p.T @ dO[rows]
            ds = p * (dO[rows] @ V[cols].T - D[rows, None])
            dk = dk + ds.T @ q[rows]
            dq[rows] += ds @ K[cols] * d**-0.5
        dks.append(dk + np.zeros((len(cols), d)))
        dvs.append(dv + np.zeros((len(cols), d)))
    return dq, np.concatenate(dks), np.concatenate(dvs)


def two_passes(Q, K, V, O, L, dO, Br, Bc, causal=False):
    """One loop for dQ with Q outside, one for dK and dV with K/V outside; nothing shared."""
    (Nq, d), Nk = Q.shape, len(K)

    def tile(i, j):
        q, k = Q[i : i + Br], K[j : j + Bc]
        S = q @ k.T / math.sqrt(d)
        if causal:
            S[~np.tri(*S.shape, i - j + Nk - Nq, dtype=bool)] = -np.inf
        l = L[i : i + Br, None]
        P = np.exp(np.where(np.isinf(l), -np.inf, S - np.where(np.isinf(l), 0, l)))
        D = (O[i : i + Br] * dO[i : i + Br]).sum(-1, keepdims=True)
        return P, P * (dO[i : i + Br] @ V[j : j + Bc].T) - P * D

    dQ = [sum(tile(i, j)[1] @ K[j : j + Bc] for j in range(0, Nk, Bc)) for i in range(0, Nq, Br)]
    dK = [sum(tile(i, j)[1].T @ Q[i : i + Br] for i in range(0, Nq, Br)) for j in range(0, Nk, Bc)]
    dV = [sum(tile(i, j)[0].T @ dO[i : i + Br] for i in range(0, Nq, Br))
          for j in range(0, Nk, Bc)]  # fmt: skip
    return np.vstack(dQ) / math.sqrt(d), np.vstack(dK) / math.sqrt(d), np.vstack(dV)


def a_recursion(Q, K, V, O, L, dO, Br, Bc, causal=False):
    """Halve the longer side until a tile is small enough."""
    dQ, dK, dV = (np.zeros(x.shape) for x in (Q, K, V))
    shift, c = len(K) - len(Q), 1 / math.sqrt(Q.shape[1])

    def visit(i, i_end, j, j_end):
        if causal and j > i_end - 1 + shift:
            return
        if i_end - i > Br:
            visit(i, (i + i_end) // 2, j, j_end)
            visit((i + i_end) // 2, i_end, j, j_end)
        elif j_end - j > Bc:
            visit(i, i_end, j, (j + j_end) // 2)
            visit(i, i_end, (j + j_end) // 2, j_end)
        else:
            for r in range(i, i_end):
                end = min(j_end, r + shift + 1) if causal else j_end
                if end <= j:
                    continue
                w = np.exp(c * (K[j:end] @ Q[r]) - L[r])
                dV[j:end] += w[:, None] * dO[r]
                w = w * (V[j:end] @ dO[r] - O[r] @ dO[r]) * c
                dQ[r] += w @ K[j:end]
                dK[j:end] += np.outer(w, Q[r])

    visit(0, len(Q), 0, len(K))
    return dQ, dK, dV


RIGHT = [q_blocks_outside, scaled_queries_in_columns, two_passes, a_recursion]


@pytest.mark.parametrize("program", RIGHT)
def test_right_programs_pass_in_any_style(program):
    for seed in range(2):  # test_checks_seeds.py has many more
        result = check_program(PROGRAM, program, seed)
        assert result.status == "passed", (seed, result)


# ---------------------------------------------------------------- wrong

# The text of a right program, written once more; each wrong idea changes one line of it.
SOURCE = """
def backward(Q, K, V, O, L, dO, Br, Bc, causal=False):
    Nq, d = Q.shape
    Nk = len(K)
    tau = 1 / d ** 0.5
    delta = np.sum(dO * O, axis=-1)
    gQ, gK, gV = np.zeros((Nq, d)), np.zeros((Nk, d)), np.zeros((Nk, d))
    for b in range(-(-Nk // Bc)):
        c = slice(b * Bc, min(Nk, (b + 1) * Bc))
        for a in range(-(-Nq // Br)):
            r = slice(a * Br, min(Nq, (a + 1) * Br))
            s = tau * np.einsum("id,jd->ij", Q[r], K[c])
            if causal:
                i, j = np.ogrid[r, c]
                s = np.where(j > i + Nk - Nq, -np.inf, s)
            lse = np.where(np.isneginf(L[r]), 0, L[r])
            p = np.exp(s - lse[:, None])
            gV[c] += p.T @ dO[r]
            dp = dO[r] @ V[c].T
            ds = p * (dp - delta[r, None])
            gQ[r] += tau * ds @ K[c]
            gK[c] += tau * ds.T @ Q[r]
    return gQ, gK, gV
"""
WRONG = [
    ("D-forgotten", "(dp - delta[r, None])", "dp"),
    ("D-not-weighted", "delta[r, None]", "np.sum(dp, 1, keepdims=True)"),
    ("D-not-weighted", "delta[r, None]", "np.mean(dp, 1, keepdims=True)"),
    ("D-not-weighted", "np.sum(dO * O, axis=-1)", "np.sum(dO @ V.T, axis=-1)"),
    ("D-in-the-tile", "delta[r, None]", "np.einsum('ij,ij->i', p, dp)[:, None]"),
    ("D-added", "dp - delta", "dp + delta"),
    ("D-outside-P", "p * (dp - delta[r, None])", "p * dp - delta[r, None]"),
    ("D-of-a-wrong-pair", "np.sum(dO * O", "np.sum(O ** 2"),
    ("D-of-a-wrong-pair", "np.sum(dO * O", "np.sum(dO ** 2"),
    ("D-one-for-all", "np.sum(dO * O, axis=-1)", "np.full(Nq, np.vdot(dO, O))"),
    ("D-mean-over-d", "np.sum(dO * O", "np.mean(dO * O"),
    ("D-scaled", "np.sum(dO * O", "tau * np.sum(dO * O"),
    ("P-forgotten-in-dS", "p * (dp", "(dp"),
    ("P-times-one-minus-P", "p * (dp - delta[r, None])", "(p - p ** 2) * dp"),
    ("gradients-not-scaled", "tau * ds", "ds"),
    ("dQ-not-scaled", "tau * ds @ K", "ds @ K"),
    ("dK-not-scaled", "tau * ds.T", "ds.T"),
    ("scaled-twice", "ds = p *", "ds = tau * p *"),
    ("scores-not-scaled", "s = tau * np", "s = np"),
    ("scaled-by-d", "1 / d ** 0.5", "1 / d"),
    ("P-not-normalised", "s - lse[:, None]", "s"),
    ("P-not-normalised", "s - lse[:, None]", "s - np.fmax(-1e300, s.max(-1, keepdims=True))"),
    ("P-normalised-in-the-tile", "np.exp(s - lse[:, None])",
     "(lambda e: e / e.sum(-1, keepdims=True))(np.exp(s - s.max(-1, keepdims=True)))"),
    ("divided-by-L", "np.exp(s - lse[:, None])", "np.exp(s) / lse[:, None]"),
    ("L-added", "s - lse", "s + lse"),
    ("dV-with-S", "p.T @ dO[r]", "s.T @ dO[r]"),
    ("dV-with-dS", "p.T @ dO[r]", "(p * (dO[r] @ V[c].T - delta[r, None])).T @ dO[r]"),
    ("dP-with-K", "V[c].T", "K[c].T"),
    ("dQ-with-V", "ds @ K[c]", "ds @ V[c]"),
    ("dK-with-dO", "ds.T @ Q[r]", "ds.T @ dO[r]"),
    ("dK-with-P", "ds.T @ Q[r]", "p.T @ Q[r]"),
    ("O-for-dO", "dp = dO[r]", "dp = O[r]"),
    ("O-for-dO", "p.T @ dO[r]", "p.T @ O[r]"),
    ("O-for-dO", "delta = ", "dO, O = O, dO; delta = "),
    ("dQ-overwritten", "gQ[r] +=", "gQ[r] ="),
    ("dK-dV-overwritten", "gK[c] +=", "gK[c] ="),
    ("dK-dV-overwritten", ("gK[c] +=", "gV[c] +="), ("gK[c] =", "gV[c] =")),
    ("last-kv-block-lost", "range(-(-Nk // Bc))", "range(Nk // Bc)"),
    ("last-q-block-lost", "range(-(-Nq // Br))", "range(Nq // Br)"),
    ("mask-forgotten", "if causal:", "if False:"),
    ("mask-forgotten", ("if causal:", "s = tau"),
     ("if False:", "if causal and c.start > r.stop - 1 + Nk - Nq: continue\n            s = tau")),
    ("upper-left", "i + Nk - Nq", "i"),
    ("own-key-hidden", "j > i", "j >= i"),
    ("next-key-seen", "j > i", "j > 1 + i"),
    ("no-guard", "np.where(np.isneginf(L[r]), 0, L[r])", "L[r]"),
    ("no-guard", ("np.where(np.isneginf(L[r]), 0, L[r])", "s = tau"),
     ("L[r]", "if causal and c.start > r.stop - 1 + Nk - Nq: continue\n            s = tau")),
]  # fmt: skip


def program(old=(), new=()):
    source = SOURCE
    pairs = [(old, new)] if isinstance(old, str) else zip(old, new, strict=True)
    for before, after in pairs:
        assert before in source, before
        source = source.replace(before, after)
    scope = {"np": np}
    exec(compile(source, "answer", "exec"), scope)
    return scope["backward"]


def test_the_text_is_right():
    assert check("ex09-backward", program()).status == "passed"


@pytest.mark.parametrize("name, old, new", WRONG)
def test_wrong_ideas_get_their_name(name, old, new):
    for seed in range(3):
        result = check_program(PROGRAM, program(old, new), seed)
        assert (result.status, result.misconception) == ("not yet", name), (seed, result)
        lines = repr(result).splitlines()
        assert len(lines) <= 5 and max(map(len, lines)) <= 88, result
        assert "Read: notebook" in lines[-1]


def test_every_mistake_is_tried():
    assert {name for name, _, _ in WRONG} == {m.id for m in PROGRAM.mistakes}


def standard(Q, K, V, O, L, dO, Br, Bc, causal=False):
    S = Q @ K.T / math.sqrt(Q.shape[1])
    if causal:
        S = np.where(np.tri(*S.shape, len(K) - len(Q), dtype=bool), S, -np.inf)
    P = np.exp(S - np.where(np.isinf(L), 0, L)[:, None])
    dS = P * (dO @ V.T - (dO * O).sum(1)[:, None]) / math.sqrt(Q.shape[1])
    return dS @ K, dS.T @ Q, P.T @ dO


def own_D(Q, K, V, O, L, dO, Br, Bc, causal=False):
    """D from one more pass over all keys; O is not read."""
    S = np.zeros_like(O)
    for r in range(len(Q)):
        end = max(0, min(len(K), r + 1 + len(K) - len(Q))) if causal else len(K)
        S[r] = np.exp(K[:end] @ Q[r] / math.sqrt(Q.shape[1]) - L[r]) @ V[:end] if end else 0
    return q_blocks_outside(Q, K, V, S, L, dO, Br, Bc, causal)


def own_L(Q, K, V, O, L, dO, Br, Bc, causal=False):
    new = np.full(len(Q), -np.inf)
    for r in range(len(Q)):
        end = max(0, min(len(K), r + 1 + len(K) - len(Q))) if causal else len(K)
        if end:
            s = K[:end] @ Q[r] / math.sqrt(Q.shape[1])
            new[r] = s.max() + math.log(np.exp(s - s.max()).sum())
    return q_blocks_outside(Q, K, V, O, new, dO, Br, Bc, causal)


def the_library(Q, K, V, O, L, dO, Br, Bc, causal=False):
    return flash_backward(Q, K, V, O, L, dO, Br, Bc, causal=causal)


@pytest.mark.parametrize(
    "name, answer",
    [
        ("makes-n-by-n", standard),
        ("D-from-a-second-pass", own_D),
        ("forward-pass-again", own_L),
        ("calls-the-library", the_library),
    ],
)
def test_the_claims(name, answer):
    result = check("ex09-backward", answer)
    assert (result.status, result.misconception) == ("not yet", name), result


def test_a_transposed_product_raises_and_the_line_is_shown():
    result = check("ex09-backward", program("p.T @ dO[r]", "p @ dO[r]"))
    assert result.status == "raised" and "matmul" in result.message


def test_other_states():
    assert check("ex09-backward", ...).status == "not attempted"
    assert check("ex09-backward", lambda **k: None).status == "not attempted"
    assert check("ex09-backward", 3).status == "not yet"
    two = check("ex09-backward", lambda Q, K, V, O, L, dO, Br, Bc, causal=False: (Q, K))
    assert two.status == "not yet" and "dQ, dK, dV" in two.message


def test_numbers_and_choices():
    for q in ex09.QUESTIONS:
        if isinstance(q, Number):
            assert check(q.id, q.truth()).status == "passed"
            for name, (wrong, _) in q.slips.items():
                result = check(q.id, wrong())
                assert result.misconception == name and len(repr(result).splitlines()) <= 5
        if isinstance(q, Choice):
            assert check(q.id, q.right).status == "passed"
            assert all(check(q.id, x).status == "not yet" for x in q.options if x != q.right)
    assert check("ex09-before", 30 * 4096 * 64 - 4096).status == "passed"


def test_the_expected_answer_is_independent_of_the_loops():
    """The oracle is the definition; and it agrees with nudging one element."""
    a = ex09.case(np.random.default_rng(0), 5, 6, 3, 2, 2, causal=True)
    up, down = (a["Q"].copy() for _ in range(2))
    up[3, 1] += 1e-5
    down[3, 1] -= 1e-5
    ends = [
        (flash_attention_q_outer(Q, a["K"], a["V"], 2, 2, causal=True)[0] * a["dO"]).sum()
        for Q in (up, down)
    ]
    want = standard_backward(a["Q"], a["K"], a["V"], a["dO"], causal=True)[0][3, 1]
    assert abs((ends[0] - ends[1]) / 2e-5 - want) < 1e-7


def test_where_to_read_exists():
    text = {}
    for m in PROGRAM.mistakes:
        number, heading = re.fullmatch(r"notebook (\d\d), '(.+)'", m.read).groups()
        if number not in text:
            (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
            nb = nbformat.read(path, as_version=4)
            text[number] = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
        assert f"## {heading}" in text[number], m.read
