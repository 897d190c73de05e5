"""Algorithm 1 with gaps, for exercise 2, faded: the loops are here, a gap is a learner's function.

A gap of which only the docstring is there is open. With every gap open the loop returns None, which
a check reports as "not attempted"; with some open it says which.
"""

import functools
import math

import numpy as np

from attention_lib.reference import finite_or_zero
from attention_lib.tiled import blocks


def _only_a_docstring():
    """."""


def _nothing():
    pass


EMPTY = {f.__code__.co_code for f in (_only_a_docstring, _nothing)}


def filled(loop, *gaps):
    """The loop, once every gap is filled. All open: it returns None. Some: NameError names one."""
    is_open = [gap.__name__ for gap in gaps if gap.__code__.co_code in EMPTY]

    @functools.wraps(loop)
    def call(*args, **kwargs):
        if len(is_open) == len(gaps):
            return None
        if is_open:
            raise NameError(f"no line makes {is_open[0]} yet: fill that gap too")
        return loop(*args, **kwargs)

    return call


def two_gaps(old, O_sum):
    """Algorithm 1, K/V blocks outside, around old and O_sum. Returns flash_attention."""

    def flash_attention(Q, K, V, Br, Bc, causal=False):
        (Nq, d), Nk = Q.shape, len(K)
        O, l, m = np.zeros((Nq, d)), np.zeros(Nq), np.full(Nq, -math.inf)
        for cols in blocks(Nk, Bc):
            Kj, Vj = K[cols], V[cols]  # load
            for rows in blocks(Nq, Br):
                Qi, Oi, li, mi = Q[rows], O[rows], l[rows], m[rows]
                S = Qi @ Kj.T / math.sqrt(d)  # score
                i, j = np.ogrid[rows, cols]
                S[causal & (j > i + Nk - Nq)] = -math.inf
                m_tile = S.max(axis=1)
                P = np.exp(S - finite_or_zero(m_tile)[:, None])
                l_tile = P.sum(axis=1)
                m_new = np.maximum(mi, m_tile)  # rescale
                keep = old(mi, m_new)  # gap 1
                new = np.exp(m_tile - finite_or_zero(m_new))
                l_new = keep * li + new * l_tile
                total = O_sum(keep, new, li, Oi, P, Vj)  # gap 2: accumulate
                O[rows] = total / np.where(l_new == 0, 1, l_new)[:, None]
                l[rows], m[rows] = l_new, m_new  # store
        return O, l, m

    return filled(flash_attention, old, O_sum)


def five_gaps(load, exponentials, l_new, O_sum, stored):
    """Algorithm 1, K/V blocks outside, around one gap a subgoal. Returns flash_attention."""

    def flash_attention(Q, K, V, Br, Bc, causal=False):
        (Nq, d), Nk = Q.shape, len(K)
        O, l, m = np.zeros((Nq, d)), np.zeros(Nq), np.full(Nq, -math.inf)
        for cols in blocks(Nk, Bc):
            Kj, Vj = load(K, V, cols)  # gap 1: load
            for rows in blocks(Nq, Br):
                Qi, Oi, li, mi = Q[rows], O[rows], l[rows], m[rows]
                S = Qi @ Kj.T / math.sqrt(d)
                i, j = np.ogrid[rows, cols]
                S[causal & (j > i + Nk - Nq)] = -math.inf
                m_tile = S.max(axis=1)
                P = exponentials(S, m_tile)  # gap 2: score
                m_new = np.maximum(mi, m_tile)
                old = np.exp(mi - finite_or_zero(m_new))
                new = np.exp(m_tile - finite_or_zero(m_new))
                l_all = l_new(old, new, li, P.sum(axis=1))  # gap 3: rescale
                total = O_sum(old, new, li, Oi, P, Vj)  # gap 4: accumulate
                O[rows], l[rows], m[rows] = stored(total, l_all, m_new)  # gap 5: store
        return O, l, m

    return filled(flash_attention, load, exponentials, l_new, O_sum, stored)
