"""Predictions and checkpoint questions of notebook 23, decoding on a GPU."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.gpu import decoding, recordings
from attention_lib.gpu.bench_decode import best
from attention_lib.hardware import GPUS
from attention_lib.show.gpu_decode import versions

H200 = GPUS["H200"]
HEADS, KV_HEADS, LONG, D = 32, 8, 262_144, 128
RECORD = recordings.read("decode")
COPY, REACH = RECORD["copy_gbs"], tuple(RECORD["reach"])


def _cache_bytes(kv_heads=KV_HEADS, element_bytes=2):
    return 2 * element_bytes * kv_heads * LONG * D


def _reading(cache_bytes):
    """Microseconds at the rate of the recorded copy."""
    return cache_bytes / COPY / 1e3


def _row(heads, kv_heads, Nk, d=D):
    """The recorded row of one sequence."""
    key = (d, 1, heads, kv_heads, Nk)
    return next(
        r for r in RECORD["rows"] if (r["d"], r["batch"], r["heads"], r["kv_heads"], r["Nk"]) == key
    )


def _recorded(kv_heads):
    """Microseconds of our kernel by graph replay, at the longest cache."""
    return _row(HEADS, kv_heads, LONG)["ours_graph"]


def _splits():
    return decoding.cut(KV_HEADS, 1024, HEADS // KV_HEADS, REACH)[0]


def _gap():
    """Microseconds by which the first version was behind torch's best: MQA, 16,384 keys, d = 64."""
    _, first = versions(recordings.read("decode_before")["rows"], [])[0]
    r = next(r for r in first if (r["d"], r["kv_heads"], r["Nk"]) == (64, 1, 16_384))
    return r["ours_graph"] - best(r, "_graph")[0]


SHORT = _row(HEADS, KV_HEADS, 4096)
CLUSTER, ROWS = 8, 16  # of MQA: 16 query heads over one


QUESTIONS = [
    Number(
        "p23-1",
        "One sequence, 32 query heads over 8 heads of K and V, d = 128, 262,144 keys, fp16. On "
        f"the recorded GPU a copy moves {COPY:.0f} GB/s, read and written together. If a step "
        "takes as long as reading the cache once at that rate, how many microseconds is that?",
        "microseconds",
        truth=lambda: _reading(_cache_bytes()),
        why="K and V: 2 x 8 x 262,144 x 128 numbers of 2 bytes, over the rate.",
        hint="Bytes first: two arrays, heads of K and V, keys, d, two bytes. Then divide.",
        slips={
            "keys-only": (
                lambda: _reading(_cache_bytes()) / 2,
                "Half. Either K without V, or one byte a number.",
            ),
            "every-query-head": (
                lambda: _reading(_cache_bytes(HEADS)),
                "You read K and V for each of 32 heads. How many heads does the cache have?",
            ),
            "one-head": (lambda: _reading(_cache_bytes(1)), "One head of K and V. There are 8."),
        },
    ),
    Number(
        "p23-2",
        "One block of threads for each head of K and V: 8 blocks. An H200 has 132 SMs. What "
        "percentage of them reads?",
        "percent",
        truth=lambda: 100 * KV_HEADS / H200.sms,
        why="8 of 132. The others have no block.",
        hint="A block runs on one SM.",
        slips={
            "query-heads": (
                lambda: 100 * HEADS / H200.sms,
                "That is a block for each query head. The group shares a block here.",
            ),
            "two-an-SM": (
                lambda: 50 * KV_HEADS / H200.sms,
                "Two blocks fit on an SM. While others are free, each gets one of its own.",
            ),
        },
    ),
    Choice(
        "p23-3",
        "32 blocks finish in an order that nobody knows, and the one that comes last merges their "
        "32 states. The same call is made 1,000 times. How many different results are there?",
        {
            "a": "several: floating-point sums depend on the order",
            "b": "one: the sums follow the number of the split, not the time of arrival",
            "c": "one: the merge is associative and commutative",
        },
        "b",
        {
            "a": "They do. But who merges, and in what order, are two questions.",
            "b": "Which block merges is chance. Where the states lie, and what it adds, is not.",
            "c": "Of real numbers it is. Rounding breaks that: below it is tried out.",
        },
    ),
    Choice(
        "p23-4",
        "A block stores its state and draws a number from the counter. What can go wrong if there "
        "is no fence between the two?",
        {
            "a": "nothing: a thread's stores are seen by all in the order in which it made them",
            "b": "two blocks draw the same number",
            "c": "the last block reads a state that has not arrived, and merges old memory",
        },
        "c",
        {
            "a": "Seen by itself, yes. Other SMs may see the number first, and the state later.",
            "b": "The draw is atomic, so each number is drawn once. It says nothing of the stores.",
            "c": "It counts 32 states as there. One may still be on its way.",
        },
    ),
    Number(
        "p23-5",
        f"With 8 heads of K and V the longest cache took {_recorded(KV_HEADS):.0f} microseconds. "
        "The same 32 query heads, each with K and V of its own (MHA): how many microseconds?",
        "microseconds",
        truth=lambda: _recorded(HEADS),
        why="Four times the bytes, so about four times the time.",
        hint="What decides the time: the query heads, or the bytes of the cache?",
        slips={
            "same-work": (
                lambda: _recorded(KV_HEADS),
                "The FLOPs are the same. The bytes are not.",
            ),
            "32-times": (
                lambda: 32 * _recorded(KV_HEADS),
                "That would be from one head to 32. It goes from 8 to 32.",
            ),
        },
        tolerance=0.08,  # 4 times the time of the smaller cache is right as well
    ),
    Number(
        "p23-6",
        "8 heads of K and V, 65,536 keys: 1024 tiles of 64 keys a head. An H200 has 132 SMs. Two "
        "blocks can share one, but then each reads half as fast. A block takes whole tiles, and "
        "every split is one more state to merge. Into how many splits does `cut` divide each head?",
        "splits",
        truth=_splits,
        why="8 x 16 = 128 blocks, 64 tiles each. More blocks would read no sooner, and merge more.",
        hint="At most one block an SM, and the heads have equally many.",
        slips={
            "two-an-SM": (
                lambda: 2 * H200.sms // KV_HEADS,
                "That is two blocks an SM. They share its rate: the time to read is the same.",
            ),
            "one-a-tile": (
                lambda: 1024,
                "8192 blocks for 132 SMs, and 1024 states of each head to merge.",
            ),
            "blocks": (
                lambda: _splits() * KV_HEADS,
                "That is the number of blocks. There are 8 heads.",
            ),
        },
        tolerance=0.005,
    ),
    Number(
        "p23-7",
        "A page holds 64 tokens of one head of K and V, d = 128, fp16. The block table has one "
        "entry of 4 bytes for it. For how many bytes of the cache is that entry?",
        "bytes",
        truth=lambda: 2 * 2 * 64 * D,
        why="64 rows of K and 64 of V, 128 numbers of 2 bytes each.",
        hint="Rows of K in the page, rows of V in the page, bytes of a row.",
        slips={
            "keys-only": (lambda: 2 * 64 * D, "Half: K or V, not both. Or one byte a number."),
            "one-token": (lambda: 2 * 2 * D, "That is one token. The page has 64."),
        },
    ),
    Choice(
        "p23-8",
        "4096 keys, 32 heads over 8, d = 128: a cache of "
        f"{SHORT['cache_bytes'] / 1e6:.1f} MB. Calls to PyTorch from Python, "
        f"one after the other, take {best(SHORT)[0]:.0f} microseconds each at best. What "
        "takes most of it?",
        {
            "a": "work on the CPU: Python, the framework and the driver",
            "b": "reading the cache",
            "c": "the two matrix products",
        },
        "a",
        {
            "a": "The GPU needs a small part of it. A replay shows how small.",
            "b": f"At the rate of a copy: {_reading(SHORT['cache_bytes']):.0f} microseconds.",
            "c": "268 million FLOP are less than a microsecond for the tensor cores.",
        },
    ),
    Choice(
        "p23-9",
        "16 query heads over one (MQA), 16,384 keys: the first version was "
        f"{_gap():.0f} microseconds behind cuDNN at d = 64. Suspect: the merge, which reads the "
        "states one after the other. If that is right, what about doubles the gap?",
        {
            "a": "four times the keys",
            "b": "d = 128 instead of 64: the states are twice as long",
            "c": "calls from Python instead of replays",
        },
        "b",
        {
            "a": "That is four times the cache. Splits grow too, but only until the GPU is full.",
            "b": "Twice the reads to merge, in the same number of splits.",
            "c": "Then the CPU's time covers the gap. It is a difference on the GPU.",
        },
    ),
    Number(
        "p23-10",
        f"A cluster of {CLUSTER} blocks has {CLUSTER} states of {ROWS} rows x {D} floats of 4 "
        "bytes. Each block merges an equal slice of the columns. How many KiB of O does a block "
        "read, its own state included?",
        "KiB",
        truth=lambda: 4 * ROWS * D / 1024,
        why="An eighth of the columns, of eight states: as many bytes as one state has.",
        hint="Bytes of one state. A slice of it. Then: slices of how many states?",
        slips={
            "all-of-all": (
                lambda: CLUSTER * 4 * ROWS * D / 1024,
                "That is what one block would read that merges alone.",
            ),
            "one-slice": (
                lambda: 4 * ROWS * D / 1024 / CLUSTER,
                "That is a slice of one state. It needs this slice of all states.",
            ),
        },
    ),
    Choice(
        "p23-11",
        "A counter at each SM counts bytes that enter it from L2 or from elsewhere, and another "
        "one those that leave it. A block reads 1 KB from the shared memory of another block of "
        "its cluster, on another SM. What do the two counters add up, over all SMs?",
        {
            "a": "nothing: shared memory is not memory behind L2",
            "b": "1 KB entered",
            "c": "1 KB left, and 1 KB entered",
        },
        "c",
        {
            "a": "It is another SM's. The bytes must come out of that SM, and into this one.",
            "b": "They came from somewhere: out of another SM.",
            "c": "Out of the one, into the other. A count of both ways has it twice.",
        },
    ),
    Choice(
        "q67",
        "A model changes from 32 heads of K and V to 8, with the same 32 query heads. The cache "
        "is long. What happens to the time of attention in a decoding step?",
        {
            "a": "nothing: there are as many query heads, so as many FLOPs",
            "b": "it falls to a half: K and V are only a part of the traffic",
            "c": "to about a quarter, if the group's queries share one tile",
        },
        "c",
        {
            "a": "FLOPs do not set the time here. One query has about one for each byte.",
            "b": "With a long cache K and V are nearly all of the traffic.",
            "c": "A quarter of the bytes. Without packing each query head would read them again.",
        },
    ),
    Choice(
        "q68",
        "64 sequences are decoded together, 8 heads of K and V each, 4096 keys. The GPU has 132 "
        "SMs. How many splits a head?",
        {
            "a": "one: 512 blocks are there without splitting",
            "b": "16: that fills the GPU",
            "c": "64: one for each tile, so that all blocks are small",
        },
        "a",
        {
            "a": "The batch brings the parallelism. Splits would only add merges.",
            "b": "For one sequence. Here the other sequences fill it.",
            "c": "32,768 blocks, and 64 states a head to merge.",
        },
    ),
    Choice(
        "q69",
        "Called from Python, kernel A takes 24 microseconds and B 80. As replays of a graph A "
        "takes 17 and B 12. An inference engine replays graphs. Which statement is sound?",
        {
            "a": "A is more than three times as fast",
            "b": "the engine is better off with B; A's call costs less on the CPU",
            "c": "one of the two measurements must be wrong",
        },
        "b",
        {
            "a": "Its call is. On the GPU B is done sooner.",
            "b": "Two questions, two answers. Say which one a number is for.",
            "c": "Both are right. They measure different things.",
        },
    ),
]
