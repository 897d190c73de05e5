"""Closed forms: what each loop moves, without running it, and what it must store.

`*_traffic` give elements of one head and equal the count of the loop in `tiled` exactly, for every
size, ragged or not. A mask array comes on top, as reads_by["mask"]; causality needs no array.
(FlashAttention, arXiv 2205.14135, Theorem 2 gives the order of growth; the exact forms are counted
from its Algorithms 0 and 1, and from FlashAttention-2's Algorithm 1, arXiv 2307.08691.)

`general_traffic` is one formula with five numbers; ACCOUNTS has the numbers of each closed form.

The calculators below them take a whole layer and give bytes. Each answers a question that a
well-read article on the subject answered too, with rules that are not all right. rule="article"
gives that article's number, so that you can see where it comes from; the default is corrected.
1 GiB is 2**30 bytes, 1 GB is 10**9.
"""

import math
from fractions import Fraction
from numbers import Rational

from attention_lib.inputs import ALIGN, check_bool, check_choice, check_positive_int
from attention_lib.reference import causal_offset

RULES = ("corrected", "article")


def _check(**sizes):
    """The sizes as ints, in order; lengths (N, Nk) may be 0, all others start at 1."""
    return [check_positive_int(k, v, 0 if k in ("N", "Nk") else 1) for k, v in sizes.items()]


def _offset(N, Nk, causal, align):
    check_bool("causal", causal)
    check_choice("align", align, ALIGN)
    return causal_offset(N, Nk, align) if causal else None


def standard_traffic(N, d, *, Nk=None):
    """Elements that three kernels move: read Q, K, write S; read S, write P; read P, V, write O.

    4Nd + 4N^2 for Nk = N: the least that three separate kernels can move, with each input read
    once. Equals the count of `unfused_attention`. N, Nk: queries, keys (default: N). d: head
    dimension.
    """
    N, d, Nk = _check(N=N, d=d, Nk=N if Nk is None else Nk)
    return 2 * N * d + 2 * Nk * d + 4 * N * Nk


def flash_traffic(N, d, Br, Bc, causal=False, *, Nk=None, align="lower-right"):
    """Elements that Algorithm 1 (K/V outside) moves; equals the count of `flash_attention`.

    K and V once; then, for each K/V block, every Q block that sees some of it: read Q, O, l, m and
    write O, l, m. Not causal: 2Nd + Tc(3Nd + 4N), whatever Br. Causal: the rows above the first Q
    block that reaches the K/V block are skipped.
    """
    N, d, Br, Bc, Nk = _check(N=N, d=d, Br=Br, Bc=Bc, Nk=N if Nk is None else Nk)
    offset = _offset(N, Nk, causal, align)
    if offset is None:
        return 2 * Nk * d + (3 * d + 4) * N * math.ceil(Nk / Bc)
    rows = 0
    for first_key in range(0, Nk, Bc):
        first_row = max(0, first_key - offset)
        rows += N - Br * (first_row // Br) if first_row < N else 0
    return 2 * Nk * d + (3 * d + 4) * rows


def q_outer_traffic(N, d, Br, Bc, causal=False, *, Nk=None, align="lower-right"):
    """Elements that the swapped order (Q outside) moves; equals `flash_attention_q_outer`'s count.

    Read Q, write O and L, once each; then K and V once for each Q block, up to its last visible
    block. Not causal, Nk = N: 2Nd + N + 2Nd*Tr, whatever Bc.
    """
    N, d, Br, Bc, Nk = _check(N=N, d=d, Br=Br, Bc=Bc, Nk=N if Nk is None else Nk)
    offset = _offset(N, Nk, causal, align)
    if offset is None:
        return 2 * N * d + N + 2 * d * Nk * math.ceil(N / Br)
    keys = 0
    for first_row in range(0, N, Br):
        last_row = min(first_row + Br, N) - 1
        visible = min(max(0, last_row + offset + 1), Nk)
        keys += min(Nk, Bc * -(-visible // Bc))
    return 2 * N * d + N + 2 * d * keys


# What each account says: R_Q, c_Q, c_s, R_KV, sigma of `general_traffic` from Tr and Tc. What is
# left out has its default, so "each once" is the empty one.
ACCOUNTS = {
    "standard": lambda Tr, Tc: dict(sigma=4),
    "Algorithm 1": lambda Tr, Tc: dict(R_Q=Tc, c_Q=3, c_s=4),
    "Q outside": lambda Tr, Tc: dict(c_s=1, R_KV=Tr),
    "K and V again": lambda Tr, Tc: dict(R_KV=Tr),
    "each once": lambda Tr, Tc: dict(),
}


def general_traffic(N, d, *, R_Q=1, c_Q=2, c_s=0, R_KV=1, sigma=0, Nk=None):
    """Elements of R_Q(c_Q*N*d + c_s*N) + R_KV*2*Nk*d + sigma*N*Nk: every account is a case of it.

    R_Q: passes over what belongs to the queries; c_Q: arrays of N x d in such a pass (Q, O, ...);
    c_s: row statistics in it (l, m, L). R_KV: passes over K and V. sigma: crossings of N x N.
    N, Nk: queries, keys (default: N). ACCOUNTS holds the values of each account.
    A causal loop visits some blocks less often than others. Then R_Q and R_KV are mean numbers of
    passes: give a Fraction, and the result is exact. It is an int if it is whole.
    Raises TypeError and ValueError that name the argument. A kernel that moves two groups of
    arrays a different number of times is a sum of two such terms.
    """
    N, d, Nk = _check(N=N, d=d, Nk=N if Nk is None else Nk)
    for name, value in dict(R_Q=R_Q, c_Q=c_Q, c_s=c_s, R_KV=R_KV, sigma=sigma).items():
        if isinstance(value, bool) or not isinstance(value, Rational):
            raise TypeError(f"{name} must be an int or a Fraction, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} is {value}; accepted: 0 or more")
    moved = Fraction(R_Q * (c_Q * N * d + c_s * N) + R_KV * 2 * Nk * d + sigma * N * Nk)
    return moved.numerator if moved.denominator == 1 else moved


def tile_elements(Br, Bc, d):
    """On-chip elements of one step of either order: K, V, Q, O, S tiles, and l, m of each row.

    Equals the peak_on_chip of a run with no mask whose N = Nk is at least Br and Bc. S and P share
    one tile.
    """
    Br, Bc, d = _check(Br=Br, Bc=Bc, d=d)
    return 2 * Bc * d + 2 * Br * d + Br * Bc + 2 * Br


def attention_memory(N, d, heads, *, method, element_bytes=2, rule="corrected"):
    """Bytes that the arrays of one attention layer take in HBM: a dict of parts, and "total".

    method "standard": Q, K, V, O and the N x N matrices, S and P. "flash": Q, K, V, O and the
    row statistics, l and m in float32.
    rule "article": one N x N matrix only, and the statistics at element_bytes.
    """
    N, d, heads, element_bytes = _check(N=N, d=d, heads=heads, element_bytes=element_bytes)
    check_choice("method", method, ("standard", "flash"))
    check_choice("rule", rule, RULES)
    parts = {"QKVO": 4 * heads * N * d * element_bytes}
    if method == "standard":
        names = ("S",) if rule == "article" else ("S", "P")
        parts |= {name: heads * N * N * element_bytes for name in names}
    else:
        parts["l, m"] = 2 * heads * N * (element_bytes if rule == "article" else 4)
    return parts | {"total": sum(parts.values())}


def largest_context(budget, d, heads, *, method, element_bytes=2, rule="corrected"):
    """The largest N whose `attention_memory` fits in `budget` bytes.

    rule "corrected": every array of attention_memory counts, and N is any int.
    rule "one matrix": the article's memory model (S alone, or Q, K, V, O alone), exact N.
    rule "article": that model again, but N only from the powers of two 2,048 to 262,144.
    """
    budget, d, heads, element_bytes = _check(
        budget=budget, d=d, heads=heads, element_bytes=element_bytes
    )
    check_choice("method", method, ("standard", "flash"))
    check_choice("rule", rule, ("corrected", "one matrix", "article"))

    def need(N):
        if rule == "corrected":
            return attention_memory(N, d, heads, method=method, element_bytes=element_bytes)[
                "total"
            ]
        return heads * N * (N if method == "standard" else 4 * d) * element_bytes

    if rule == "article":
        return max((N for N in (2**k for k in range(11, 19)) if need(N) <= budget), default=0)
    low, high = 0, 1
    while need(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= budget else (low, middle)
    return low


def layer_traffic(N, d, heads, *, method, Br=128, Bc=128, element_bytes=2, rule="corrected"):
    """Bytes that the forward pass of one attention layer moves between HBM and the chip.

    method "standard", "flash" (Algorithm 1) or "q-outer"; Br and Bc as in those loops. All rules
    agree on "standard".
    rule "article": the account in which Q, K, V and O are each touched once, 4Nd, for any tiled
    method. It is the least possible, and it is what DRAM sees when every repeated read of K and V
    hits the L2 cache; the loop itself asks for more.
    rule "article, K and V again": the same article's other formula, 2Nd + 2Nd*Tr.
    """
    N, d, heads, element_bytes = _check(N=N, d=d, heads=heads, element_bytes=element_bytes)
    Br, Bc = _check(Br=Br, Bc=Bc)
    check_choice("method", method, ("standard", "flash", "q-outer"))
    check_choice("rule", rule, (*RULES, "article, K and V again"))
    if method == "standard":
        elements = standard_traffic(N, d)
    elif rule == "article":
        elements = 4 * N * d
    elif rule == "article, K and V again":
        elements = 2 * N * d + 2 * N * d * math.ceil(N / Br)
    else:
        elements = (flash_traffic if method == "flash" else q_outer_traffic)(N, d, Br, Bc)
    return heads * elements * element_bytes


def arithmetic_intensity(N, d, Br, *, element_bytes=2, rule="corrected"):
    """FLOPs per byte between HBM and chip in the Q-outer order, with blocks of Br queries.

    rule "corrected": the whole forward pass, 4N^2d FLOPs over `q_outer_traffic`.
    rule "article": one inner step, where only K and V move: 2 Br / element_bytes, whatever N.
    """
    N, d, Br, element_bytes = _check(N=N, d=d, Br=Br, element_bytes=element_bytes)
    check_positive_int("N", N)
    check_choice("rule", rule, RULES)
    if rule == "article":
        return 2 * Br / element_bytes
    return 4 * N * N * d / (element_bytes * q_outer_traffic(N, d, Br, Br))
