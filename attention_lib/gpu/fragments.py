"""One warp's view of a tensor core, in numpy: fragments, mma, ldmatrix, and the banks.

A fragment is a small matrix spread over the 32 lanes of a warp. Lane = 4 g + t. Here a fragment is
an array (32, n): row k is what lane k holds, in the order of its registers.
Source: NVIDIA, PTX ISA, "Matrix fragments for mma.m16n8k16", "ldmatrix", "Shared memory banks" of
the CUDA C++ Programming Guide. The kernels use the same places: kernels/ptx.cuh.
"""

import math

import numpy as np

from attention_lib.gpu import ladder
from attention_lib.inputs import check_choice, check_positive_int

LANES = 32
SHAPES = {"A": (16, 16), "B": (16, 8), "C": (16, 8)}  # C += A B


def places(which):
    """(row, column) of each number that each lane holds of A, B or C: (32, n, 2), ints."""
    check_choice("which", which, SHAPES)
    g, t = np.divmod(np.arange(LANES), 4)
    if which == "B":
        spots = [(2 * t + x % 2 + x // 2 * 8, g) for x in range(4)]
    else:
        n = 8 if which == "A" else 4
        spots = [(g + x // 2 % 2 * 8, 2 * t + x % 2 + x // 4 * 8) for x in range(n)]
    return np.moveaxis(np.array(spots), 2, 0)


def split(which, matrix):
    """The fragment of a matrix of the shape SHAPES[which]: (32, n)."""
    if matrix.shape != SHAPES[which]:
        raise ValueError(f"matrix has shape {matrix.shape}; accepted for {which}: {SHAPES[which]}")
    rows, columns = np.moveaxis(places(which), 2, 0)
    return matrix[rows, columns]


def join(which, fragment):
    """The matrix that a fragment holds: the inverse of split."""
    matrix = np.zeros(SHAPES[which], fragment.dtype)
    rows, columns = np.moveaxis(places(which), 2, 0)
    matrix[rows, columns] = fragment
    return matrix


def mma(c, a, b):
    """What mma.sync.m16n8k16 computes: the fragment of C + A B, in float32."""
    A, B = join("A", a).astype(np.float32), join("B", b).astype(np.float32)
    return c + split("C", A @ B)


def ldmatrix(tile, rows, columns, transposed=False):
    """Four 8 x 8 matrices of tile. Lane 8 q + r says where row r of matrix q begins.

    rows, columns: 32 ints each. Returns (32, 8): two numbers for each of four registers, as mma
    wants them; with transposed, each matrix is turned over on the way.
    """
    matrices = [
        np.array([tile[rows[k], columns[k] : columns[k] + 8] for k in range(q, q + 8)])
        for q in range(0, LANES, 8)
    ]
    g, t = np.divmod(np.arange(LANES), 4)
    if transposed:
        matrices = [x.T for x in matrices]
    return np.stack([x[g, 2 * t + e] for x in matrices for e in range(2)], axis=1)


def across_row(combine, x):
    """Combine what the four lanes of a group hold: exchange with lane XOR 1, then with XOR 2."""
    lane = np.arange(LANES)
    x = combine(x, x[lane ^ 1])
    return combine(x, x[lane ^ 2])


def warp_attention(Q, K, V):
    """Rung 3's warp for one tile: softmax(Q K^T / sqrt(d)) V of 16 queries, all in fragments.

    Q: (16, d), K and V: (Nk, d), float16; d and Nk multiples of 16. Returns O (16, d), float32.
    """
    (_, d), (Nk, _), lane = Q.shape, K.shape, np.arange(LANES)
    S = np.zeros((Nk // 8, LANES, 4), np.float32)  # score: pieces of 16 x 8
    for k in range(0, d, 16):
        a = ldmatrix(Q, lane % 16, k + lane // 16 * 8)
        for n in range(0, Nk, 16):  # B for two pieces: column j of B is row j of K
            b = ldmatrix(K, n + lane % 8 + lane // 16 * 8, k + lane // 8 % 2 * 8)
            S[n // 8] = mma(S[n // 8], a, b[:, :4])
            S[n // 8 + 1] = mma(S[n // 8 + 1], a, b[:, 4:])
    rows = S.reshape(-1, LANES, 2, 2) / np.float32(math.sqrt(d))  # of lane: row g or g + 8
    m = across_row(np.maximum, rows.max(axis=(0, 3)))
    P = np.exp(rows - m[:, :, None])
    l = across_row(np.add, P.sum(axis=(0, 3)))
    P = P.reshape(-1, LANES, 4).astype(np.float16)  # what `pack` does
    O = np.zeros((d // 8, LANES, 4), np.float32)
    for k in range(0, Nk, 16):
        a = np.concatenate([P[k // 8], P[k // 8 + 1]], axis=1)  # two C fragments are one A
        for n in range(0, d, 16):
            b = ldmatrix(V, k + lane % 16, n + lane // 16 * 8, transposed=True)
            O[n // 8] = mma(O[n // 8], a, b[:, :4])
            O[n // 8 + 1] = mma(O[n // 8 + 1], a, b[:, 4:])
    O = O / np.repeat(l, 2, axis=1)
    return np.concatenate([join("C", piece) for piece in O], axis=1)


# ---------------------------------------------------------------- banks


def plain(r, c, d):
    """Byte address of element (r, c) of a tile of 16-bit numbers with d columns."""
    return 2 * (r * d + c)


def swizzled(r, c, d):
    """The same, with the 16-byte pieces of a row in the order of `at` in kernels/rung4_swizzle.cu.

    Piece number XOR r % 8; with d = 32 a row is half of 128 bytes, and it is XOR r // 2 % 4.
    """
    key = r % 8 if d >= 64 else r // 2 % 4
    return plain(r, (c // 8 ^ key) * 8 + c % 8, d)


def passes(addresses):
    """How often shared memory is passed to read pieces of 16 bytes that begin at these addresses.

    One pass gives each of the 32 banks, 4 bytes wide, one address. So a piece takes 4 banks, and
    two pieces in the same banks take two passes, unless they are the same piece.
    """
    banks = [a // 16 % 8 for a in set(addresses)]
    return max(banks.count(b) for b in set(banks))


def ldmatrix_passes(rows, columns, d, layout):
    """Passes of one ldmatrix of four matrices: each matrix is read on its own."""
    a = [layout(int(r), int(c), d) for r, c in zip(rows, columns, strict=True)]
    return sum(passes(a[q : q + 8]) for q in range(0, LANES, 8))


def tile_passes(name, d):
    """Passes that one warp of a rung makes to read the fragments for one block of K and V."""
    check_choice("name", name, ("tensor_cores", "swizzle", "pipeline"))
    layout = plain if name == "tensor_cores" else swizzled
    wide, Bc, lane = _wide(name, d), _Bc(name, d), np.arange(LANES)
    read_Q = not (name == "pipeline" and d <= 64)  # else Q stays in registers
    total = 0
    for k in range(0, d, 16):
        for i in range(wide if read_Q else 0):
            total += ldmatrix_passes(16 * i + lane % 16, k + lane // 16 * 8, d, layout)
        for n in range(0, Bc, 16):
            keys = n + lane % 8 + lane // 16 * 8
            total += ldmatrix_passes(keys, k + lane // 8 % 2 * 8, d, layout)
            total += ldmatrix_passes(n + lane % 16, k + lane // 16 * 8, d, layout)  # V
    return total


def _wide(name, d):
    return 2 if name == "pipeline" and d <= 128 else 1


def _Bc(name, d):
    return 64 if name != "pipeline" or d <= 64 else 48 if d <= 128 else 32


def fragment_bytes(name, N, heads, d):
    """Bytes that shared memory passes, 128 each, to read fragments of K, V and Q in one launch."""
    check_positive_int("N", N)
    kernel = ladder.rung(name)
    warps = kernel.threads(d) // 32 * -(-N // kernel.rows(d)) * heads
    return 128 * tile_passes(name, d) * -(-N // _Bc(name, d)) * warps


def bytes_per_mma(name, d):
    """Bytes of K and V fragments that a warp of a rung reads for one mma, without conflicts."""
    return 4 * 128 // (2 * _wide(name, d))  # one ldmatrix of four matrices feeds so many


# ---------------------------------------------------------------- lazy rescale


def lazy_softmax_sum(S, V, Bc, threshold=0.0, weights=np.float32):
    """Rung 5's loop over K/V blocks: O is rescaled only when a maximum grew by more than threshold.

    S: (rows, N) scores, to be used as exponents of 2; V: (N, d); threshold: 0 rescales whenever
    the maximum grows. weights: the dtype that P is rounded to. Returns (O, rescales): the second
    counts, for each row, the blocks after the first in which it was rescaled.
    """
    rows, N = S.shape
    m, l = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
    O, rescales = np.zeros((rows, V.shape[1]), np.float32), np.zeros(rows, int)
    for j in range(0, N, Bc):
        tile = S[:, j : j + Bc].astype(np.float32)
        m_new = np.maximum(m, tile.max(axis=1))  # score
        grew = np.isneginf(m) | (m_new - m > threshold)  # rescale, or not
        factor = np.where(grew, np.exp2(m - m_new), 1).astype(np.float32)
        rescales += grew & ~np.isneginf(m)
        m = np.where(grew, m_new, m)
        with np.errstate(over="ignore", invalid="ignore"):
            P = np.exp2(tile - m[:, None])
            l = l * factor + P.sum(axis=1)
            O = O * factor[:, None] + P.astype(weights).astype(np.float32) @ V[j : j + Bc]
    with np.errstate(invalid="ignore"):
        return O / l[:, None], rescales
