"""Decode and beyond: the merge of `online`, reused.

Attention over some keys is a state (m, l, O), and states merge. So the keys may be cut into splits,
kept in pages, dropped outside a window, or travel around a ring of devices: the loop is the same,
and only where the next keys lie is different. `attend` is that loop.

    split_kv_attention   one query against a long cache: many splits, then the merge
    packed_attention     the query heads that share K and V (GQA, MQA) in one tile
    PagedKVCache         K and V in pages of fixed size, found through a block table
    window_attention     a sliding window, and the first tokens as attention sinks
    SinkCache            the same, one token at a time, in memory that does not grow
    ring_attention       devices in a ring, each with a slice of Q, K and V; counted links

The closed form of each count stands below its loop. Counts are elements.

Sources: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023, pytorch.org/blog/flash-decoding);
PagedAttention, arXiv 2309.06180; MQA, arXiv 1911.02150; GQA, arXiv 2305.13245; StreamingLLM,
arXiv 2309.17453; Ring Attention, arXiv 2310.01889; Striped Attention, arXiv 2311.09431.
"""

import math
from collections import Counter

import numpy as np

from attention_lib import online
from attention_lib.heads import for_each_head
from attention_lib.inputs import (
    ALIGN,
    FLOATS,
    check_bool,
    check_choice,
    check_float_array,
    check_positive_int,
    check_qkv,
    compute_dtype,
)
from attention_lib.memory import HBM
from attention_lib.reference import causal_offset, hide
from attention_lib.tiled import blocks, load_mask, place


def attend(hbm, Qi, K, V, places, hide_keys=None):
    """The loop: a tile of queries against blocks of keys, wherever these lie. Returns the State.

    Qi: (rows, d), on chip. K, V: tensors in HBM. places: for each block, the positions of its keys
    in the sequence, and the index at which K and V hold them. hide_keys(S, positions) sets to -inf,
    in place, what may not be seen; None hides nothing.
    """
    state = online.start(*Qi.shape, Qi.dtype)
    for name, tile in zip(("m", "l", "O"), state, strict=True):
        hbm.hold(name, tile)
    for positions, index in places:
        S = hbm.hold("S", hbm.matmul(Qi, K.load(*index, dtype=Qi.dtype).T))  # load, score
        S *= 1 / math.sqrt(Qi.shape[1])
        if hide_keys is not None:
            hide_keys(S, positions)
        Vj = V.load(*index, dtype=Qi.dtype)  # load
        # rescale, accumulate
        state = online.update(state, S, Vj, overwrite=True, matmul=hbm.matmul)
        del S, Vj  # or they would stand beside the next tiles
    return state


def cut(N, parts):
    """`parts` slices that cover 0..N, as even as can be. With parts > N some are empty."""
    return [slice(i * N // parts, (i + 1) * N // parts) for i in range(parts)]


def pieces(part, B):
    """A slice, in slices of at most B; none if it is empty."""
    return [slice(a, min(a + B, part.stop)) for a in range(part.start, part.stop, B)]


def beyond(S, queries, keys):
    """Hide, in place, the keys whose position comes after the query's. Positions are arrays."""
    np.copyto(S, -math.inf, where=keys[None, :] > queries[:, None])


# ---------------------------------------------------------------- split-KV


@for_each_head
def split_kv_attention(
    Q, K, V, splits, *, Bc=128, group=1, causal=False, mask=None, hbm=None, align="lower-right"
):
    """Flash-Decoding: each split of the keys gives a partial (m, l, O); a second kernel merges.

    Q: (..., Nq, d), all rows in one tile; K, V: (..., Nk, d), with the leading axes of Q, or fewer
    heads. splits: parts of the keys, even up to one key; more splits than keys leave some empty.
    Bc: keys at a time inside a split. group: the rows of Q are the queries of so many heads, one
    head after the other (packed_attention does that). The rest as in standard_attention.
    Returns O (..., Nq, d) in the dtype of Q and L (..., Nq), as flash_attention_q_outer does.
    Splits would run at the same time on a GPU; here one after the other, with the same traffic.
    """
    splits, group = check_positive_int("splits", splits), check_positive_int("group", group)
    dtype, out_dtype, (rows, d), Nk = compute_dtype(Q.dtype), Q.dtype, Q.shape, K.shape[0]
    if rows % group:
        raise ValueError(f"group is {group}; accepted: a divisor of the {rows} rows of Q")
    Nq = rows // group
    offset = causal_offset(Nq, Nk, align) if causal else None
    queries = np.arange(rows) % max(Nq, 1) + (offset or 0)
    end = Nk if offset is None else Nq + offset  # keys from here on are hidden from every row
    Q, K, V, mask = place(hbm, Q=Q, K=K, V=V, mask=mask)
    parts = [
        hbm.tensor(f"partial {name}", np.empty((splits, rows, *more), dtype))
        for name, more in (("m", ()), ("l", ()), ("O", (d,)))
    ]
    O, L = hbm.tensor("O", np.empty((rows, d), out_dtype)), hbm.tensor("L", np.empty(rows, dtype))

    def hide_keys(S, keys):
        if causal:
            beyond(S, queries, np.arange(keys.start, keys.stop))
        hide(S, 0, 0, None, load_mask(mask, slice(None), keys))

    for s, part in enumerate(cut(Nk, splits)):  # in parallel: a kernel's blocks
        hbm.launch()
        places = [(keys, (keys,)) for keys in pieces(part, Bc) if keys.start < end]
        state = attend(hbm, Q.load(dtype=dtype), K, V, places, hide_keys)
        for tensor, tile in zip(parts, state, strict=True):
            tensor.store(tile, s)
    hbm.launch()  # the second kernel
    state = online.start(rows, d, dtype)
    for name, tile in zip(("m", "l", "O"), state, strict=True):
        hbm.hold(name, tile)
    for s in range(splits):
        state = online.merge(state, online.State(*(tensor.load(s) for tensor in parts)))
    for tensor, tile in zip((O, L), online.finish(state), strict=True):
        tensor.store(tile)
    return O.array, L.array


def split_kv_traffic(Nk, d, splits, *, Nq=1, group=1, Bc=128, causal=False, align="lower-right"):
    """Elements that split_kv_attention moves for one head, exactly (a mask comes on top).

    Not causal: 2 Nk d + rows (splits (3d + 4) + d + 1), with rows = group * Nq. The 3d + 4 are
    Algorithm 1's: per split read Q, write m, l, O, and read these again.
    """
    Nk, Nq = check_positive_int("Nk", Nk, 0), check_positive_int("Nq", Nq, 0)
    d, splits, Bc = (
        check_positive_int(name, x) for name, x in (("d", d), ("splits", splits), ("Bc", Bc))
    )
    rows = check_positive_int("group", group) * Nq
    check_bool("causal", causal)
    check_choice("align", align, ALIGN)
    end = Nq + causal_offset(Nq, Nk, align) if causal else Nk
    keys = 0
    for part in cut(Nk, splits):
        seen = max(0, min(part.stop, end) - part.start)
        keys += min(part.stop - part.start, Bc * -(-seen // Bc))
    return 2 * keys * d + rows * (splits * (3 * d + 4) + d + 1)


def packed_attention(Q, K, V, splits=1, *, Bc=128, causal=False, hbm=None, align="lower-right"):
    """Grouped-query attention with K and V loaded once for each group of query heads.

    Q: (..., heads, Nq, d); K, V: (..., kv_heads, Nk, d), where kv_heads divides heads (1 is MQA).
    The queries of a group's heads become the rows of one tile. Returns O and L, as
    split_kv_attention(Q, K, V, splits) does, which loads K and V for every query head.
    """
    check_qkv(Q, K, V)
    if Q.ndim < 3 or Q.shape[-3] == 0:
        raise ValueError(f"Q has shape {Q.shape}; accepted: (..., heads, Nq, d)")
    *lead, heads, Nq, d = Q.shape
    kv_heads = K.shape[-3]
    tile = Q.reshape(*lead, kv_heads, heads // kv_heads * Nq, d)
    O, L = split_kv_attention(
        tile, K, V, splits, group=heads // kv_heads, Bc=Bc, causal=causal, hbm=hbm, align=align
    )
    return O.reshape(Q.shape), L.reshape(Q.shape[:-1])


# ---------------------------------------------------------------- pages


class OutOfPages(ValueError):
    """The cache has fewer free pages than the tokens need."""


class PagedKVCache:
    """K and V of many sequences in pages of a fixed size. PagedAttention (arXiv 2309.06180).

    pages: how many there are; page_size: tokens in each; heads: KV heads, or None for arrays
    without that axis. table[seq] lists the pages of a sequence, in the order of its tokens: any
    pages, wherever they lie. Only a sequence's last page can have empty slots.
    """

    def __init__(self, pages, page_size, d, *, heads=None, dtype=np.float32):
        pages, d = check_positive_int("pages", pages), check_positive_int("d", d)
        self.page_size = check_positive_int("page_size", page_size)
        name = np.dtype(dtype).name
        if name not in FLOATS:
            raise TypeError(f"dtype is {name}; accepted: {', '.join(FLOATS)}")
        self.lead = () if heads is None else (check_positive_int("heads", heads),)
        shape = (pages, *self.lead, self.page_size, d)
        self.K, self.V = np.full(shape, math.nan, dtype), np.full(shape, math.nan, dtype)
        self.free = list(range(pages))  # the next page taken is the last of these
        self.table, self.length = {}, {}

    def append(self, seq, K, V):
        """Add tokens to the end of a sequence, a new one if seq is: K, V of shape (heads, n, d).

        Takes a page from `free` whenever the last one is full. Raises OutOfPages, and adds
        nothing, if there are too few.
        """
        self.check_tokens(K, V)
        old, n = self.length.get(seq, 0), K.shape[-2]
        table = self.table.get(seq, [])
        need = -(-(old + n) // self.page_size) - len(table)
        if need > len(self.free):
            raise OutOfPages(
                f"K has {n} tokens for seq {seq!r}, which need {need} pages more; "
                f"{len(self.free)} of {len(self.K)} are free: release(seq) gives pages back"
            )
        table = self.table[seq] = table + [self.free.pop() for _ in range(need)]
        self.length[seq] = old + n
        for t in range(n):
            page, slot = divmod(old + t, self.page_size)
            self.K[table[page]][..., slot, :] = K[..., t, :]
            self.V[table[page]][..., slot, :] = V[..., t, :]

    def release(self, seq):
        """Forget a sequence; its pages are free again."""
        self._check(seq)
        self.free += self.table.pop(seq)
        del self.length[seq]

    def attention(self, seq, Q, *, causal=False, hbm=None):
        """Q against the tokens of one sequence, page by page. Returns O and L.

        Q: (heads, Nq, d), its heads a multiple of the cache's, packed as in packed_attention; its
        queries are the last Nq tokens (causal=True: each sees itself and what came before).
        """
        self._check(seq)
        check_bool("causal", causal)
        hbm = HBM() if hbm is None else hbm
        if not isinstance(hbm, HBM):
            raise TypeError(f"hbm must be an HBM or None, got {type(hbm).__name__}")
        length, d = self.length[seq], self.K.shape[-1]
        like = np.broadcast_to(self.K.dtype.type(0), (*self.lead, length, d))
        check_qkv(Q, like, like)
        dtype, Nq, heads = compute_dtype(Q.dtype), Q.shape[-2], (self.lead or (1,))[0]
        rows = Q.size // (heads * d)
        tiles = Q.reshape(heads, rows, d)
        queries = np.arange(rows) % max(Nq, 1) + length - Nq
        O, L = np.empty(tiles.shape, Q.dtype), np.empty(tiles.shape[:2], dtype)
        Q_, K, V, O_, L_ = place(hbm, Q=tiles, K=self.K, V=self.V, O=O, L=L)
        table = hbm.tensor("table", np.array(self.table[seq], np.int64))

        def places(head):
            for i, keys in enumerate(blocks(length, self.page_size)):
                index = (int(table.load(i)), *head, slice(0, keys.stop - keys.start))
                yield np.arange(keys.start, keys.stop), index

        def hide_keys(S, keys):
            if causal:
                beyond(S, queries, keys)

        with np.errstate(under="ignore"):
            for h in range(heads):
                hbm.launch()
                head = (h,) if self.lead else ()
                state = attend(hbm, Q_.load(h, dtype=dtype), K, V, places(head), hide_keys)
                for tensor, tile in zip((O_, L_), online.finish(state), strict=True):
                    tensor.store(tile, h)
        return O.reshape(Q.shape), L.reshape(Q.shape[:-1])

    def check_tokens(self, K, V):
        """Raise unless K and V can be appended: (heads, n, d), the cache's dtype, finite."""
        like = (*self.lead, "n", self.K.shape[-1])
        for name, x in (("K", K), ("V", V)):
            check_float_array(name, x, ndim=len(like))
            if x.dtype.name != self.K.dtype.name:
                raise TypeError(
                    f"{name} has dtype {x.dtype.name}; accepted: {self.K.dtype.name}, the cache's"
                )
            if (*x.shape[:-2], "n", x.shape[-1]) != like or x.shape != K.shape:
                accepted = str(like).replace("'", "")
                raise ValueError(f"{name} has shape {x.shape}; accepted: {accepted}, K as V")
            if not np.isfinite(x).all():
                raise ValueError(f"{name} has NaN or infinity; accepted: finite numbers")

    def _check(self, seq):
        if seq not in self.table:
            known = ", ".join(repr(s) for s in self.table) or "none yet"
            raise ValueError(f"seq is {seq!r}; accepted: a sequence in the cache ({known})")


def paged_traffic(length, d, page_size, *, rows=1):
    """Elements that PagedKVCache.attention moves for one KV head, exactly.

    2 * length * d for K and V, an entry of the block table for each page, and Q, O, L of the rows
    (query heads of a group, times queries). Empty slots of the last page are not read.
    """
    length, rows = check_positive_int("length", length, 0), check_positive_int("rows", rows, 0)
    d, page_size = check_positive_int("d", d), check_positive_int("page_size", page_size)
    return 2 * length * d + -(-length // page_size) + rows * (2 * d + 1)


# ---------------------------------------------------------------- window and sinks


def visible_keys(first, last, Nk, window, sinks, causal=True):
    """The keys that the queries at positions first..last see, together: two slices.

    A query at p sees the keys of p - window < j <= p, and j < sinks with j <= p; without causal,
    also p < j < p + window, and all sinks. The second slice starts where the first one ends, or
    later: no key is loaded twice.
    """
    stop = min(Nk, max(0, last + (1 if causal else window)))
    sink_stop = min(sinks, stop if causal else Nk)
    start = max(sink_stop, min(stop, first - window + 1))
    return slice(0, sink_stop), slice(start, max(start, stop))


@for_each_head
def window_attention(
    Q, K, V, window, sinks=0, *, Br=128, Bc=128, causal=True, mask=None, hbm=None,
    align="lower-right",
):  # fmt: skip
    """Sliding-window attention with sinks: each query sees the last `window` keys, itself among
    them, and the first `sinks` keys (StreamingLLM, arXiv 2309.17453). See `visible_keys`.

    Q blocks outside, as in flash_attention_q_outer, but only the keys that some query of the block
    sees are loaded. Returns O and L. Other arguments as there; causal=False looks ahead as far as
    back.
    """
    window, sinks = check_positive_int("window", window), check_positive_int("sinks", sinks, 0)
    dtype, out_dtype, (Nq, d), Nk = compute_dtype(Q.dtype), Q.dtype, Q.shape, K.shape[0]
    offset = causal_offset(Nq, Nk, align)
    Q, K, V, mask = place(hbm, Q=Q, K=K, V=V, mask=mask)
    O, L = hbm.tensor("O", np.empty((Nq, d), out_dtype)), hbm.tensor("L", np.empty(Nq, dtype))
    hbm.launch()
    for rows in blocks(Nq, Br):
        queries = np.arange(rows.start, rows.stop) + offset

        def hide_keys(S, keys, rows=rows, queries=queries):
            p, j = queries[:, None], np.arange(keys.start, keys.stop)[None, :]
            ahead = j > p if causal else (j >= p + window) & (j >= sinks)
            np.copyto(S, -math.inf, where=ahead | ((j <= p - window) & (j >= sinks)))
            hide(S, 0, 0, None, load_mask(mask, rows, keys))

        seen = visible_keys(queries[0], queries[-1], Nk, window, sinks, causal)
        places = [(keys, (keys,)) for part in seen for keys in pieces(part, Bc)]
        state = attend(hbm, Q.load(rows, dtype=dtype), K, V, places, hide_keys)
        for tensor, tile in zip((O, L), online.finish(state), strict=True):
            tensor.store(tile, rows)
    return O.array, L.array


def window_traffic(N, d, window, sinks=0, *, Br=128, causal=True, Nk=None, align="lower-right"):
    """Elements that window_attention moves for one head, exactly, whatever Bc.

    One query at the end of Nk keys: 2d min(Nk, window + sinks) + 2d + 1. N, Nk: queries, keys.
    """
    N, Nk = check_positive_int("N", N, 0), check_positive_int("Nk", N if Nk is None else Nk, 0)
    d, window, Br = (
        check_positive_int(name, x) for name, x in (("d", d), ("window", window), ("Br", Br))
    )
    sinks = check_positive_int("sinks", sinks, 0)
    check_bool("causal", causal)
    check_choice("align", align, ALIGN)
    offset, keys = causal_offset(N, Nk, align), 0
    for rows in blocks(N, Br):
        first, last = rows.start + offset, rows.stop - 1 + offset
        for part in visible_keys(first, last, Nk, window, sinks, causal):
            keys += part.stop - part.start
    return 2 * N * d + N + 2 * d * keys


class SinkCache:
    """K and V of the first `sinks` tokens and of the last `window` others: it never grows.

    A new token takes the slot of the one that leaves the window, so the window is stored in turned
    order. Attention does not mind: the merge is commutative. (Positions that a model adds to Q and
    K are not modelled.)
    """

    def __init__(self, window, sinks, d, *, dtype=np.float32):
        self.window = check_positive_int("window", window)
        self.sinks = check_positive_int("sinks", sinks, 0)
        self.cache = PagedKVCache(1, self.window + self.sinks, d, dtype=dtype)
        self.tokens = 0

    def append(self, K, V):
        """Add tokens, K and V of shape (n, d), one after the other."""
        self.cache.check_tokens(K, V)
        for t in range(len(K)):
            if self.tokens < self.window + self.sinks:
                self.cache.append("it", K[t : t + 1], V[t : t + 1])
            else:
                slot = self.sinks + (self.tokens - self.sinks) % self.window
                self.cache.K[0, slot], self.cache.V[0, slot] = K[t], V[t]
            self.tokens += 1

    def attention(self, Q, *, hbm=None):
        """Q (rows, d), all at the position of the last token, against what is kept: O and L."""
        if not self.tokens:
            raise ValueError("the cache is empty; accepted: attention after an append")
        return self.cache.attention("it", Q, hbm=hbm)


# ---------------------------------------------------------------- ring


class Links:
    """What a ring of devices did. sent: elements by sending device. work: (step, device) -> visible
    scores that the device computed in that step (heads add up)."""

    def __init__(self):
        self.sent, self.work = Counter(), Counter()

    @property
    def total(self):
        """Elements sent over all links."""
        return sum(self.sent.values())

    def slowest(self):
        """Scores on the critical path: in each step everybody waits for the busiest device."""
        steps = {step for step, _ in self.work}
        return sum(max(n for (s, _), n in self.work.items() if s == step) for step in steps)


def ring_positions(N, devices, striped):
    """The positions that each device holds: a slice each, or every devices-th token."""
    if striped:
        return [slice(i, N, devices) for i in range(devices)]
    return cut(N, devices)


def visible_scores(queries, keys, causal):
    """How many (query, key) pairs are not hidden by causality; keys are in rising order."""
    if causal:
        return int(np.searchsorted(keys, queries, side="right").sum())
    return len(queries) * len(keys)


@for_each_head
def ring_attention(
    Q, K, V, devices, *, striped=False, Bc=128, causal=False, mask=None, links=None, hbm=None,
    align="lower-right",
):  # fmt: skip
    """Ring Attention (arXiv 2310.01889): K/V blocks travel, each device merges what passes by.

    devices: each holds a slice of Q, and one of K and V; in step t device i works on the block that
    started at device i - t, and then sends it to device i + 1. striped: device i holds every
    devices-th token (Striped Attention, arXiv 2311.09431). A block that causality hides as a whole
    is passed on, but not worked on.
    links: a Links that counts what is sent, or None. hbm counts what all devices load and store
    from their own memories. Query heads are taken one at a time, each with its own journey of K, V.
    Returns O and L.
    """
    devices = check_positive_int("devices", devices)
    check_bool("striped", striped)
    links = Links() if links is None else links
    if not isinstance(links, Links):
        raise TypeError(f"links must be a Links or None, got {type(links).__name__}")
    dtype, out_dtype, (Nq, d), Nk = compute_dtype(Q.dtype), Q.dtype, Q.shape, K.shape[0]
    offset = causal_offset(Nq, Nk, align)
    Q, K, V, mask = place(hbm, Q=Q, K=K, V=V, mask=mask)
    start = online.start(Nq, d, dtype)
    so_far = [hbm.tensor(f"partial {n}", x) for n, x in zip("mlO", start, strict=True)]
    O, L = hbm.tensor("O", np.empty((Nq, d), out_dtype)), hbm.tensor("L", np.empty(Nq, dtype))
    q_at, k_at = ring_positions(Nq, devices, striped), ring_positions(Nk, devices, striped)

    for step in range(devices):
        for i in range(devices):  # at the same time
            rows, block = q_at[i], k_at[(i - step) % devices]
            queries, keys = np.arange(Nq)[rows] + offset, np.arange(Nk)[block]
            if step < devices - 1:
                links.sent[i] += 2 * len(keys) * d  # to device i + 1, while this one computes
            seen = visible_scores(queries, keys, causal)
            links.work[step, i] += seen
            if seen == 0:
                continue

            def hide_keys(S, positions, rows=rows, queries=queries):
                if causal:
                    beyond(S, queries, positions)
                hide(S, 0, 0, None, None if mask is None else load_mask(mask, rows, positions))

            hbm.launch()
            places = [(keys[c], (keys[c],)) for c in blocks(len(keys), Bc)]
            new = attend(hbm, Q.load(rows, dtype=dtype), K, V, places, hide_keys)
            old = online.State(*(tensor.load(rows) for tensor in so_far))
            for tensor, tile in zip(so_far, online.merge(old, new), strict=True):
                tensor.store(tile, rows)
    for rows in q_at:
        hbm.launch()
        state = online.State(*(tensor.load(rows) for tensor in so_far))
        for tensor, tile in zip((O, L), online.finish(state), strict=True):
            tensor.store(tile, rows)
    return O.array, L.array


def ring_link_traffic(Nk, d, devices, *, striped=False):
    """Elements that each device sends, as a list: all of K and V but the block it works on last.

    2d (Nk - n) with n the keys that started one device ahead; in all 2 Nk d (devices - 1).
    """
    Nk, d = check_positive_int("Nk", Nk, 0), check_positive_int("d", d)
    devices = check_positive_int("devices", devices)
    check_bool("striped", striped)
    held = [len(range(Nk)[part]) for part in ring_positions(Nk, devices, striped)]
    return [2 * d * (Nk - held[(i + 1) % devices]) * (devices > 1) for i in range(devices)]


def ring_traffic(N, d, devices, *, striped=False, causal=False, Nk=None, align="lower-right"):
    """Elements that all devices of ring_attention load and store, for one head, exactly.

    Each pair of a Q slice and a K/V block in which something is visible: (3d + 4) for each query
    (read Q, read and write m, l, O) and 2d for each key. At the end 2d + 3 for each query.
    """
    N, Nk = check_positive_int("N", N, 0), check_positive_int("Nk", N if Nk is None else Nk, 0)
    d, devices = check_positive_int("d", d), check_positive_int("devices", devices)
    for name, x in (("striped", striped), ("causal", causal)):
        check_bool(name, x)
    check_choice("align", align, ALIGN)
    offset, total = causal_offset(N, Nk, align), N * (2 * d + 3)
    for rows in ring_positions(N, devices, striped):
        for block in ring_positions(Nk, devices, striped):
            queries, keys = np.arange(N)[rows] + offset, np.arange(Nk)[block]
            if visible_scores(queries, keys, causal):
                total += (3 * d + 4) * len(queries) + 2 * d * len(keys)
    return total


def ring_overlap(flops, link_bandwidth, *, element_bytes=2):
    """The fewest tokens a device must hold for a step to hide the sending of its block.

    A step computes 4 n^2 d FLOPs and sends 2 n d elements: n >= element_bytes * flops / (2 *
    link_bandwidth), whatever d. flops and link_bandwidth (bytes/s, one way) are the device's own.
    """
    element_bytes = check_positive_int("element_bytes", element_bytes)
    for name, x in (("flops", flops), ("link_bandwidth", link_bandwidth)):
        if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x < math.inf:
            raise ValueError(f"{name} is {x!r}; accepted: a number above 0")
    return math.ceil(element_bytes * flops / (2 * link_bandwidth))
