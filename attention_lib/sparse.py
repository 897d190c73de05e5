"""Block-sparse attention: masks over tiles, and the tiled loops that skip what a mask leaves out.

A block mask is a small boolean array (Tr, Tc): True where a tile of scores is computed. What it
leaves out is neither loaded nor multiplied, so traffic and FLOPs fall with the number of tiles. The
result is the attention of the mask, exactly, and not that of all keys.

    causal, local, butterfly, strided, fixed   the patterns, over T blocks or over T tokens
    expand, touched                            from a block mask to tokens, and back
    block_sparse_attention (and _q_outer)      the loops of attention_lib.tiled, with a block mask
    block_sparse_traffic (and _q_outer, _flops)  what they move and multiply, exactly

Sources: FlashAttention, arXiv 2205.14135 (v2), section 3.3, Algorithm 5 and Proposition 4; Sparse
Transformer, arXiv 1904.10509, section 4.3 (strided, fixed); Pixelated Butterfly, arXiv 2112.00029
(the flat block butterfly).
"""

import numpy as np

from attention_lib.inputs import (
    ALIGN,
    check_array,
    check_bool,
    check_choice,
    check_positive_int,
)
from attention_lib.reference import causal_offset
from attention_lib.tiled import flash_attention, flash_attention_q_outer, which_tiles

# ---------------------------------------------------------------- patterns


def _rows_and_columns(T):
    T = check_positive_int("T", T)
    return np.arange(T)[:, None], np.arange(T)[None, :]


def causal(T):
    """Row i sees column j when j <= i. Boolean (T, T), as all patterns here."""
    i, j = _rows_and_columns(T)
    return j <= i


def local(T, window):
    """Row i sees itself and the `window` columns before it."""
    i, j = _rows_and_columns(T)
    window = check_positive_int("window", window, 0)
    return (i - window <= j) & (j <= i)


def butterfly(T, k=None):
    """Row i sees j when i == j, or i xor j is one of 1, 2, 4, ..., 2^(k-1): k layers in one mask.

    i xor j is a power of two when the binary numbers i and j differ in one digit. T: a power of
    two; k: up to log2 T, all layers if None. T(1 + k) entries are True. Not causal.
    Pixelated Butterfly (arXiv 2112.00029): the flat block butterfly.
    """
    i, j = _rows_and_columns(T)
    layers = _layers(T)
    k = layers if k is None else check_positive_int("k", k, 0)
    if k > layers:
        raise ValueError(f"k is {k}; accepted: at most log2 T = {layers}")
    return (i == j) | np.isin(i ^ j, 2 ** np.arange(k))


def butterfly_layer(T, layer):
    """One layer alone: i == j, or i xor j == 2^(layer-1). layer: 1 to log2 T."""
    i, j = _rows_and_columns(T)
    layers, layer = _layers(T), check_positive_int("layer", layer)
    if layer > layers:
        raise ValueError(f"layer is {layer}; accepted: at most log2 T = {layers}")
    return (i == j) | (i ^ j == 2 ** (layer - 1))


def _layers(T):
    layers = int(T).bit_length() - 1
    if 2**layers != T:
        raise ValueError(f"T is {T}; accepted: a power of two")
    return layers


def strided(T, l):
    """The two masks of the strided pattern: A1, the l columns before; A2, every l-th one before.

    Both see themselves. A1 | A2 is the merged head. Sparse Transformer (arXiv 1904.10509),
    section 4.3, where l is the stride, about sqrt(T).
    """
    i, j = _rows_and_columns(T)
    l = check_positive_int("l", l)
    return local(T, l), (j <= i) & ((i - j) % l == 0)


def fixed(T, l, c=1):
    """The two masks of the fixed pattern: A1, one's own run of l; A2, the last c of each run.

    Only columns j <= i. Sparse Transformer (arXiv 1904.10509), section 4.3. The paper prints the
    positions of A2 as l-c to l within a run; a position modulo l is never l, so they are c.
    """
    i, j = _rows_and_columns(T)
    l, c = check_positive_int("l", l), check_positive_int("c", c)
    if c > l:
        raise ValueError(f"c is {c}; accepted: at most l = {l}")
    return (j <= i) & (i // l == j // l), (j <= i) & (j % l >= l - c)


def density(mask):
    """The fraction of a mask that is True: s in the paper. An empty mask has 0."""
    _check_bool_mask("mask", mask)
    return float(mask.mean()) if mask.size else 0.0


def expand(block_mask, Nq, Nk, Br, Bc):
    """The mask over tokens (Nq, Nk) that a block mask stands for; the last tiles may be short."""
    Nq, Nk = check_positive_int("Nq", Nq, 0), check_positive_int("Nk", Nk, 0)
    Br, Bc = check_positive_int("Br", Br), check_positive_int("Bc", Bc)
    check_array("block_mask", block_mask)
    block_mask = which_tiles(block_mask, Nq, Nk, Br, Bc)
    return block_mask.repeat(Br, axis=0).repeat(Bc, axis=1)[:Nq, :Nk]


def touched(mask, Br, Bc):
    """The block mask of the tiles in which a token mask (Nq, Nk) lets somebody see something."""
    _check_bool_mask("mask", mask)
    Br, Bc = check_positive_int("Br", Br), check_positive_int("Bc", Bc)
    for axis, B in enumerate((Br, Bc)):
        mask = np.logical_or.reduceat(mask, np.arange(0, mask.shape[axis], B), axis)
    return mask


def _check_bool_mask(name, mask):
    check_array(name, mask)
    if mask.dtype != bool:
        raise TypeError(f"{name} has dtype {mask.dtype.name}; accepted: bool")
    if mask.ndim != 2:
        raise ValueError(f"{name} has shape {mask.shape}; accepted: 2 axes")


# ---------------------------------------------------------------- attention


def block_sparse_attention(
    Q, K, V, block_mask, Br, Bc, *, causal=False, mask=None, hbm=None, align="lower-right"
):
    """FlashAttention's Algorithm 5: Algorithm 1, with tiles that the block mask skips (line 8).

    block_mask: boolean (Tr, Tc) with Tr = ceil(Nq / Br) and Tc = ceil(Nk / Bc), the same for all
    heads. causal and mask hide single keys on top. All else, and what is returned (O, l, m), as in
    flash_attention. K_j and V_j are loaded before the test, so for an empty column too.
    """
    check_array("block_mask", block_mask)
    return flash_attention(
        Q, K, V, Br, Bc, causal=causal, mask=mask, hbm=hbm, align=align, block_mask=block_mask
    )


def block_sparse_attention_q_outer(
    Q, K, V, block_mask, Br, Bc, *, causal=False, mask=None, hbm=None, align="lower-right"
):
    """The same with Q blocks outside: K_j and V_j are loaded only for tiles that are computed.

    Arguments as in block_sparse_attention. Returns O and L, as flash_attention_q_outer does.
    """
    check_array("block_mask", block_mask)
    return flash_attention_q_outer(
        Q, K, V, Br, Bc, causal=causal, mask=mask, hbm=hbm, align=align, block_mask=block_mask
    )


# ---------------------------------------------------------------- closed forms


def _visits(N, d, block_mask, Br, Bc, causal, Nk, align):
    """Checked sizes; the tiles that are computed; the rows and the columns of each block."""
    N, Nk = check_positive_int("N", N, 0), check_positive_int("Nk", N if Nk is None else Nk, 0)
    d, Br, Bc = (check_positive_int(n, x) for n, x in (("d", d), ("Br", Br), ("Bc", Bc)))
    check_bool("causal", causal)
    check_choice("align", align, ALIGN)
    check_array("block_mask", block_mask)
    tiles = which_tiles(block_mask, N, Nk, Br, Bc)
    first_row, first_col = np.arange(0, N, Br), np.arange(0, Nk, Bc)
    rows, cols = np.minimum(Br, N - first_row), np.minimum(Bc, Nk - first_col)
    if causal:
        last_key = first_row + rows - 1 + causal_offset(N, Nk, align)  # that the block may see
        tiles = tiles & (first_col[None, :] <= last_key[:, None])
    return N, d, Nk, tiles, rows, cols


def block_sparse_traffic(N, d, block_mask, Br, Bc, causal=False, *, Nk=None, align="lower-right"):
    """Elements that block_sparse_attention moves for one head, exactly (a mask comes on top).

    K and V once, and 3d + 4 for each row of each computed tile. With blocks that fit and without
    causality: 2Nd + s Tc (3Nd + 4N), with s the density of the block mask.
    """
    N, d, Nk, tiles, rows, _ = _visits(N, d, block_mask, Br, Bc, causal, Nk, align)
    return 2 * Nk * d + (3 * d + 4) * int(rows @ tiles.sum(axis=1))


def block_sparse_q_outer_traffic(
    N, d, block_mask, Br, Bc, causal=False, *, Nk=None, align="lower-right"
):
    """Elements that block_sparse_attention_q_outer moves for one head, exactly.

    Q, O and L once, and 2d for each column of each computed tile. With blocks that fit and without
    causality: 2Nd + N + 2 Bc d tiles.
    """
    N, d, _, tiles, _, cols = _visits(N, d, block_mask, Br, Bc, causal, Nk, align)
    return 2 * N * d + N + 2 * d * int(tiles.sum(axis=0) @ cols)


def block_sparse_flops(N, d, block_mask, Br, Bc, causal=False, *, Nk=None, align="lower-right"):
    """FLOPs of the matrix products of either order, for one head: 4d for each score computed."""
    N, d, _, tiles, rows, cols = _visits(N, d, block_mask, Br, Bc, causal, Nk, align)
    return 4 * d * int(rows @ (tiles @ cols))
