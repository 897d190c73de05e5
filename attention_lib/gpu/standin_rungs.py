"""Two rungs of the ladder as kernels of the stand-in: the same threads, barriers and guards.

One head, float32, no mask. What a thread does alone is written with numpy: a row of d numbers at a
time where the CUDA kernel has a loop over d.
"""

import math

import numpy as np


def algorithm_1(t, Q, K, V, O, l, m, Bc):
    """Rung 1 on the stand-in, for one head: one block, K/V outside, one thread a row.

    Q, O: (Nq, d); K, V: (Nk, d); l, m: (Nq,); O, l, m may hold anything before. See
    kernels/rung1_algorithm_1.cu.
    """
    (Nq, d), (Nk, _) = Q.shape, K.shape
    Kj, Vj = t.shared("Kj", Bc, d), t.shared("Vj", Bc, d)
    for i in range(t.threadIdx, Nq, t.blockDim):
        O[i, :], l[i], m[i] = 0, 0, -math.inf
    for j0 in range(0, Nk, Bc):
        yield  # nobody reads the last tile any more
        for j in range(t.threadIdx, Bc, t.blockDim):  # load
            Kj[j, :] = K[j0 + j, :] if j0 + j < Nk else 0
            Vj[j, :] = V[j0 + j, :] if j0 + j < Nk else 0
        yield  # the tile is there
        for i in range(t.threadIdx, Nq, t.blockDim):
            q = Q[i, :] / math.sqrt(d)
            S = [q @ Kj[j, :] if j0 + j < Nk else -math.inf for j in range(Bc)]
            S = np.array(S, np.float32)
            m_new = max(m[i], S.max())  # score above, rescale here
            P = np.exp(S - m_new)
            old = l[i] * math.exp(m[i] - m_new)
            PV = sum(P[j] * Vj[j, :] for j in range(Bc))
            O[i, :] = (old * O[i, :] + PV) / (old + P.sum())  # accumulate
            l[i], m[i] = old + P.sum(), m_new  # store


def q_outer(t, Q, K, V, O, L, Br, Bc):
    """Rung 2 on the stand-in, for one head: a block for each Br rows of Q; O stays in registers.

    Thread r of a block keeps row r (the CUDA kernel gives a thread a 4 x d/16 piece). Q, O:
    (Nq, d); K, V: (Nk, d); L: (Nq,). See kernels/rung2_q_outer.cu.
    """
    (Nq, d), (Nk, _) = Q.shape, K.shape
    r, i = t.threadIdx, t.blockIdx * Br + t.threadIdx
    Kj, Vj = t.shared("Kj", Bc, d), t.shared("Vj", Bc, d)
    q = Q[i, :] / math.sqrt(d) if i < Nq else np.zeros(d, np.float32)
    o, l, m = np.zeros(d, np.float32), 0.0, -math.inf  # registers: nobody else sees them
    for j0 in range(0, Nk, Bc):
        yield
        for j in range(r, Bc, t.blockDim):  # load
            Kj[j, :] = K[j0 + j, :] if j0 + j < Nk else 0
            Vj[j, :] = V[j0 + j, :] if j0 + j < Nk else 0
        yield
        S = [q @ Kj[j, :] if j0 + j < Nk else -math.inf for j in range(Bc)]  # score
        S = np.array(S, np.float32)
        m_new = max(m, S.max())
        P, rescale = np.exp(S - m_new), math.exp(m - m_new)  # rescale
        l, m = l * rescale + P.sum(), m_new
        o = o * rescale + sum(P[j] * Vj[j, :] for j in range(Bc))  # accumulate
    if i < Nq:  # store
        O[i, :], L[i] = o / l, m + math.log(l)
