"""Questions of notebook 12, Decode and beyond."""

import functools
import math

import numpy as np

from attention_lib.checks.kinds import Choice, Number
from attention_lib.decode import (
    packed_attention,
    ring_link_traffic,
    split_kv_traffic,
    window_traffic,
)
from attention_lib.memory import HBM
from attention_lib.traffic import q_outer_traffic, standard_traffic

D = 128
N = 4096
LONG, SPLITS = 65_536, 64
HEADS, KV_HEADS = 32, 8
LENGTHS, PAGE = (5, 70, 33), 16
WINDOW, SINKS, CONTEXT = 1024, 4, 100_000
DEVICES = 8
MIB_ELEMENTS = 2**19  # elements of 2 bytes in a MiB


def _intensity(elements):
    return 4 * N * D / elements


def _tiled():
    return q_outer_traffic(1, D, 128, 128, Nk=N)


@functools.cache
def _packed_mib():
    """K and V of a packed GQA decode step, run and counted."""
    rng, hbm = np.random.default_rng(0), HBM()
    Q = rng.standard_normal((HEADS, 1, D), dtype=np.float32)
    K = rng.standard_normal((KV_HEADS, N, D), dtype=np.float32)
    packed_attention(Q, K, K, Bc=1024, hbm=hbm)
    return (hbm.reads_by["K"] + hbm.reads_by["V"]) / MIB_ELEMENTS


QUESTIONS = [
    Number(
        "p12-1",
        f"One query against {N:,} keys, d = {D}, fp16. The two products take 4Nd FLOPs. K and V "
        "are read once, and that is nearly all that moves. How many FLOPs is that for each byte?",
        "FLOPs per byte",
        truth=lambda: _intensity(2 * _tiled()),
        why="4Nd FLOPs over 2Nd elements of 2 bytes: N and d cancel.",
        hint="Write down the FLOPs and the bytes with N and d in them, and divide.",
        slips={
            "elements-not-bytes": (
                lambda: _intensity(2 * N * D),
                "You divided by elements. An fp16 element has two bytes.",
            ),
            "one-product-only": (
                lambda: 2 * N * D / (4 * N * D),
                "You counted one product, or a multiply and an add as one. QK, PV: 2Nd each.",
            ),
            "a-whole-q-block": (
                lambda: 128.0,
                "That is the intensity of a block of 128 queries. Here one query uses each key.",
            ),
        },
    ),
    Number(
        "p12-2",
        f"The same query: N = {N:,} keys, d = {D}. Standard attention writes and reads S and P "
        "between its kernels. By how many percent does it move more elements than the tiled loop?",
        "percent",
        truth=lambda: 100 * (standard_traffic(1, D, Nk=N) / _tiled() - 1),
        why="S and P are one row each: 4N elements beside 2Nd, so 2/d.",
        hint="S and P are (Nq, Nk), and Nq is 1. What do they add to 2Nd?",
        slips={
            "as-in-prefill": (
                lambda: 100 * (standard_traffic(N, D) / q_outer_traffic(N, D, 128, 128) - 1),
                "That is the gain with N queries. With one there is no N x N matrix.",
            ),
            "one-crossing-each": (
                lambda: 100 * 2 * N / (2 * N * D),
                "You counted S and P once each. Each is written and read: four crossings.",
            ),
            "fraction-not-percent": (
                lambda: standard_traffic(1, D, Nk=N) / _tiled() - 1,
                "That is the fraction. The answer is in percent.",
            ),
        },
    ),
    Number(
        "p12-3",
        f"N = {LONG:,} keys, d = {D}, one query. Each split reads Q and stores m, l and O; the "
        f"merge reads these. How many elements do {SPLITS} splits move more than one split?",
        "elements",
        truth=lambda: split_kv_traffic(LONG, D, SPLITS) - split_kv_traffic(LONG, D, 1),
        why="3d + 4 for each further split. K and V are read once, however they are cut.",
        hint="What does one more split read and write for itself, and what does the merge read?",
        slips={
            "k-and-v-again": (
                lambda: (SPLITS - 1) * 2 * LONG * D,
                "You let every split read all of K and V. Each reads its own part.",
            ),
            "one-d-missing": (
                lambda: (SPLITS - 1) * (2 * D + 4),
                "One d is missing for each split: it reads Q, it stores O, and the merge reads O.",
            ),
            "m-and-l-forgotten": (
                lambda: (SPLITS - 1) * 3 * D,
                "Q and O are right. m and l are stored and read as well: 4 numbers for each split.",
            ),
            "the-first-split-too": (
                lambda: SPLITS * (3 * D + 4),
                "That is what all the splits cost. One split had that cost once already.",
            ),
        },
        tolerance=0.001,
    ),
    Number(
        "p12-4",
        f"{HEADS} query heads share {KV_HEADS} heads of K and V. N = {N:,}, d = {D}, fp16, one "
        "query. The heads of a group are packed in one tile. How many MiB of K and V are loaded?",
        "MiB",
        truth=_packed_mib,
        why="Each of the 8 heads of K and V is loaded once: 8 x 2Nd elements of 2 bytes.",
        hint="How many tiles are there, and what does each one load?",
        slips={
            "once-for-each-query-head": (
                lambda: HEADS * 2 * N * D / MIB_ELEMENTS,
                "You loaded K and V once for each query head, as happens without packing.",
            ),
            "k-only": (
                lambda: KV_HEADS * N * D / MIB_ELEMENTS,
                "That is K alone. V is as large.",
            ),
            "one-head-for-all": (
                lambda: 2 * N * D / MIB_ELEMENTS,
                "That is one head of K and V for all queries: MQA.",
            ),
        },
    ),
    Number(
        "p12-5",
        f"Three sequences hold {LENGTHS[0]}, {LENGTHS[1]} and {LENGTHS[2]} tokens. A page has "
        f"{PAGE} slots. How many pages do they take in all?",
        "pages",
        truth=lambda: sum(math.ceil(n / PAGE) for n in LENGTHS),
        why="Each sequence rounds up on its own: a page belongs to one sequence.",
        hint="Round each sequence up to whole pages, then add.",
        slips={
            "one-queue": (
                lambda: math.ceil(sum(LENGTHS) / PAGE),
                "You put all tokens in one queue. A page holds tokens of one sequence only.",
            ),
            "rounded-down": (
                lambda: sum(n // PAGE for n in LENGTHS),
                "You counted full pages. The last, part-filled page of each is taken as well.",
            ),
            "the-longest-for-all": (
                lambda: len(LENGTHS) * math.ceil(max(LENGTHS) / PAGE),
                "You reserved room for the longest in each. Pages are taken when they are needed.",
            ),
        },
        tolerance=0.001,
    ),
    Number(
        "p12-6",
        f"A window of {WINDOW:,} tokens and {SINKS} sinks, d = {D}. The text has {CONTEXT:,} "
        "tokens so far. How many elements of K and V does the next query load, for one head?",
        "elements",
        truth=lambda: window_traffic(1, D, WINDOW, SINKS, Nk=CONTEXT) - (2 * D + 1),
        why="2d for each token that is kept, and the length of the text is not in it.",
        hint="How many tokens are visible, and what does each one bring?",
        slips={
            "sinks-forgotten": (
                lambda: 2 * D * WINDOW,
                "You counted the window. The sinks are loaded, too.",
            ),
            "the-whole-text": (
                lambda: 2 * D * CONTEXT,
                "That is full attention. Keys before the window are neither loaded nor kept.",
            ),
            "k-only": (
                lambda: D * (WINDOW + SINKS),
                "That is K alone. V is as large.",
            ),
        },
        tolerance=0.001,
    ),
    Number(
        "p12-7",
        f"A ring of {DEVICES} devices, N = {LONG:,} tokens in equal slices, one head, d = {D}, "
        "fp16. How many MiB of K and V does one device send to its neighbour, all steps together?",
        "MiB",
        truth=lambda: ring_link_traffic(LONG, D, DEVICES)[0] / MIB_ELEMENTS,
        why="In each of the 7 steps a device passes on one block of K and V.",
        hint="How many blocks pass through one link, and how large is a block of K and of V?",
        slips={
            "own-block-once": (
                lambda: 2 * LONG // DEVICES * D / MIB_ELEMENTS,
                "That is the device's own block. It also passes on the blocks of the others.",
            ),
            "a-full-circle": (
                lambda: 2 * LONG * D / MIB_ELEMENTS,
                "You sent in every step. After the last one nobody needs a block any more.",
            ),
            "the-whole-ring": (
                lambda: sum(ring_link_traffic(LONG, D, DEVICES)) / MIB_ELEMENTS,
                "That is all links together. The question is about one.",
            ),
        },
    ),
    Choice(
        "q34",
        "A model writes its next token: one query, a cache of 64K keys. Tiling brings almost "
        "nothing here. Why?",
        {
            "a": "One query's scores are a row: there is little to keep on chip.",
            "b": "The cache is too large for SRAM, so tiles cannot be used.",
            "c": "The online softmax needs more than one query.",
            "d": "The products are too small for the GPU's arithmetic to keep up.",
        },
        "a",
        {
            "a": "All but 2/d of the traffic is K and V, and every exact method has to read these.",
            "b": "Tiles are for this case: K and V go through SRAM block by block. It works. It "
            "saves little, because what moves is K and V themselves.",
            "c": "Each row has its own m and l. One row works as well as a thousand.",
            "d": "Arithmetic is idle: about one FLOP for each byte, where the GPU could do 150 or "
            "more. It waits for memory.",
        },
    ),
    Choice(
        "q35",
        "What does split-KV change for one query against a long cache?",
        {
            "a": "It reads fewer bytes, as each split reads only a part of the keys.",
            "b": "It lets more SMs read at the same time. The bytes grow a little.",
            "c": "It makes the result approximate, as each split has a maximum of its own.",
            "d": "It raises the intensity, as each split reuses its keys.",
        },
        "b",
        {
            "a": "Each split reads less, and together they read the same K and V. The partials "
            "come on top.",
            "b": "One block of queries keeps one SM busy for each head. Splits give work to the "
            "rest.",
            "c": "The merge brings all partials to one maximum: exact, up to rounding.",
            "d": "Each key is used once, by the one query. To reuse keys, put more queries in the "
            "tile: the heads of a group.",
        },
    ),
    Choice(
        "q36",
        "Causal ring attention, each device holds one run of neighbouring tokens. What is wrong "
        "with it?",
        {
            "a": "The result is wrong where a block arrives before its keys are visible.",
            "b": "The device with the last tokens receives most of the link traffic.",
            "c": "It waits: in most steps some tiles are full and others empty.",
            "d": "Blocks that are hidden cannot be passed on, so the ring breaks.",
        },
        "c",
        {
            "a": "A hidden key gets the score minus infinity whenever it comes, and merging does "
            "not depend on order.",
            "b": "All links carry the same: every block travels past every device, seen or not.",
            "c": "A step takes as long as its busiest device. With every D-th token on a device "
            "all tiles are about half full, and the wait is gone.",
            "d": "Passing on and working are two things. A device passes on what it does not use.",
        },
    ),
]
