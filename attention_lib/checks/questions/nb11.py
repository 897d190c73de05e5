"""Predictions, cards and checkpoint questions of notebook 11, one number, three answers."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.hardware import GPUS
from attention_lib.traffic import ACCOUNTS, general_traffic, standard_traffic

PLACES = {
    "a": "between the shared memory and the registers of each SM",
    "b": "between the L2 cache and the SMs",
    "c": "between DRAM and the L2 cache, if L2 serves the repeats",
    "d": "nowhere: no place on a GPU carries that amount",
}


def _reduction(N, d, Br, account="K and V again"):
    """Standard over an account, as one of the sources computes it."""
    return standard_traffic(N, d) / general_traffic(N, d, **ACCOUNTS[account](-(-N // Br), 1))


def _outgrows(arrays=2):
    """The N at which K and V of one head, d = 64 in fp16, fill the L2 cache of an A100."""
    return GPUS["A100-80"].l2 / (arrays * 64 * 2)


def _card(name, belief, right, true, false, depends):
    return Choice(
        id=f"myth-{name}",
        text=belief,
        options={"a": "true", "b": "false", "c": "it depends"},
        right=right,
        remarks={"a": true, "b": false, "c": depends},
    )


QUESTIONS = [
    Choice(
        id="p11-1",
        text=(
            "First account: Q, K, V are each read once and O is written once, 4Nd. If it is\n"
            "right, where was it counted?"
        ),
        options=PLACES,
        right="c",
        remarks={
            "a": (
                "There every tile product fetches its operands. That is the busiest place of all."
            ),
            "b": "An SM keeps a block of Q and asks for K and V. The next block asks for them too.",
            "c": "Every byte has to come from DRAM once. If L2 keeps it, once is enough.",
            "d": "It is the least possible at one place: where the data first comes from.",
        },
    ),
    Choice(
        id="p11-2",
        text=(
            "The other two accounts: the loads of the loop, K and V once for each block of Q, or\n"
            "Q and O once for each block of K and V. Where were they counted?"
        ),
        options=PLACES,
        right="b",
        remarks={
            "a": (
                "In an SM the warps fetch the same tile of K and V several times, and Q and P too."
            ),
            "b": "It is what the loop asks for. L2 sees each request, whether it has the data or "
            "not.",
            "c": "If L2 serves the repeats, DRAM does not see them. Then Tr would not show there.",
            "d": "The loop does ask for it. Who receives the requests first?",
        },
    ),
    Number(
        id="p11-3",
        text=(
            "d = 128, blocks of 64 queries, N = 65,536. By the account in which K and V are read\n"
            "once for each Q block: how many times less than standard attention (4Nd + 4N^2)?"
        ),
        unit="a factor",
        truth=lambda: _reduction(65_536, 128, 64),
        why="A pass over K and V for each 64 queries costs as much as four crossings of S.",
        hint="Standard is about 4N^2. This account is about 2Nd*N/Br. Divide.",
        slips={
            "each-once": (
                lambda: _reduction(65_536, 128, 64, "each once"),
                "You read K and V once. In this account they come again for each of the 1,024 "
                "blocks.",
            ),
            "blocks-of-128": (
                lambda: _reduction(65_536, 128, 128),
                "That is for blocks of 128 queries. Here they have 64.",
            ),
            "K-only": (
                lambda: 2 * _reduction(65_536, 128, 64),
                "You counted one of K and V.",
            ),
        },
    ),
    Number(
        id="p11-4",
        text=(
            "An A100 has 40 MiB of L2. From which N on do K and V of one head, d = 64 in fp16,\n"
            "not fit in it?"
        ),
        unit="tokens",
        truth=_outgrows,
        why="256 bytes a token, into 40 MiB.",
        hint="Bytes of K and V for one token: two arrays, d elements each, 2 bytes an element.",
        slips={
            "half-the-bytes": (
                lambda: _outgrows(arrays=1),
                "128 bytes a token: one of K and V is missing, or an element was taken for a byte.",
            ),
            "twice-the-bytes": (
                lambda: _outgrows(arrays=4),
                "512 bytes a token: you counted Q and O too, or took d = 128.",
            ),
        },
    ),
    _card(
        "less-of-K-and-V",
        'Belief: "Tiling does not gain by loading K and V less often."',
        "a",
        "Standard attention reads K and V once. The tiled loop reads them more often, and gains on "
        "S and P.",
        "It sounds odd that a method which saves traffic should read its inputs more often. Look "
        "at the counts by name.",
        "With one Q block the two are equal. With more, in which direction do they differ?",
    ),
    _card(
        "Q-in-the-loop",
        'Belief: "If the pseudo-code loads Q_i inside the K/V loop, no harm is done: Q is still\n'
        'read once."',
        "b",
        "A compiler may lift the load out of the loop, a count may not. Run it.",
        "Q then comes once for each K/V block: Nd becomes Nd*Tc.",
        "For Tc = 1 it is the same. The belief is about a loop.",
    ),
    _card(
        "bytes-are-time",
        'Belief: "DRAM moves over two hundred times fewer bytes, so attention is over two\n'
        'hundred times faster."',
        "b",
        "Time follows bytes only while bytes are the limit.",
        "Once the bytes are gone, the arithmetic is the limit, and it did not shrink.",
        "In this size range it never holds. The recording has both bytes and times.",
    ),
    _card(
        "GQA-quarter",
        'Belief: "With 8 K/V heads for 32 query heads, the prefill moves a quarter of the K/V\n'
        'bytes."',
        "c",
        "The arrays are a quarter of the size. The requests of the SMs are not fewer: each query "
        "head asks.",
        "At one of the places it is so. Which one sees each K/V head once?",
        "DRAM: yes. L2 to SMs: only if a kernel serves a group from one load.",
    ),
    _card(
        "hundreds-of-kB",
        'Belief: "One thread block has hundreds of kB on chip for its tiles."',
        "c",
        "On some GPUs. Look at all of them.",
        "On some GPUs it has. Look at all of them.",
        "From 99 KiB to 227 KiB. And the M of the formulas is in elements: half of that in fp16.",
    ),
    _card(
        "break-even-chip",
        'Belief: "At d = 64, N = 4096 Algorithm 1 moves less than standard attention from\n'
        'M = 12,289 on. So 12,289 elements on chip are enough."',
        "b",
        "The first sentence is right. Does the step run with that much memory?",
        "The rule's tiles take more than M there: the break-even chip cannot hold them.",
        "The belief has one M. Give a run that budget.",
    ),
    _card(
        "clamp",
        (
            'Belief: "A tile may hold no visible key for some row. Put 0 where the running\n'
            'maximum is -inf, and such a tile gives no NaN."'
        ),
        "c",
        "In one form of the loop. Algorithm 1 divides in every tile.",
        "In one form of the loop it does help.",
        "With O un-scaled it suffices. Algorithm 1 also divides 0 by 0: l needs a guard as well.",
    ),
    _card(
        "skip-is-enough",
        'Belief: "A causal loop that skips the hidden tiles never computes -inf - (-inf)."',
        "b",
        "From the first K/V block on it is so: every row sees key 0. Take the blocks from the last "
        "one.",
        "A tile can be hidden for one of its rows and not for the others.",
        "It goes well for some orders and block sizes. 'Never' is another word.",
    ),
    _card(
        "half-statistics",
        'Belief: "m and l may be kept in float16, like Q and K: they are only two numbers a row."',
        "b",
        "They are small in memory. How large can l be?",
        "l can be as large as the number of keys, and float16 ends at 65,504.",
        "It fails for long rows of near-equal scores. A kernel has to survive them.",
    ),
    _card(
        "figure-2-speed",
        'Belief: "75.2 GFLOPs in 7.3 ms: the kernel of Figure 2 reached 10 TFLOP/s, 3% of an\n'
        'A100."',
        "b",
        "The division is right. Is 75.2 the work of the stated workload?",
        "The stated workload has 12.8 times as many FLOPs in its matrix products alone. "
        "Read as causal it has half of those: 66 TFLOP/s (notebook 13).",
        "Work out the FLOPs of seven products for 64 x 16 heads of N = 1024.",
    ),
    Choice(
        id="q31",
        text="Two texts give 0.13 GB and 8.7 GB for one kernel. What do you do first?",
        options={
            "a": "Take the mean: such counts are estimates.",
            "b": "Ask at which place each was counted.",
            "c": "Take the larger one, since traffic can be overlooked but not invented.",
            "d": "Run it on a CPU and time it.",
        },
        right="b",
        remarks={
            "a": "Both are exact, at their places. Their mean is the traffic of no place.",
            "b": "L2 to DRAM the one, SMs to L2 the other. The counters confirm both.",
            "c": "The larger one is not truer. It is about another wire.",
            "d": "A time on another machine decides nothing about bytes on this one.",
        },
    ),
    Choice(
        id="q32",
        text="In T = R_Q(c_Q N d + c_s N) + R_KV 2 N d + sigma N^2: what is sigma for any tiled "
        "loop?",
        options={
            "a": "0",
            "b": "4, as in standard attention, but on chip.",
            "c": "1/Br, since S exists one block at a time.",
            "d": "N/Bc",
        },
        right="a",
        remarks={
            "a": "No N x N matrix crosses. What is still quadratic comes from R_Q or R_KV.",
            "b": "On chip it is not counted here. T is what crosses.",
            "c": "A tile of S is made and dropped on chip. None of it crosses.",
            "d": "That is Tc, a value of R_Q.",
        },
    ),
    Choice(
        id="q33",
        text=(
            "N grows until K and V of the heads in flight no longer fit in L2. Which counter\n"
            "changes its law?"
        ),
        options={
            "a": "SMs to L2: it falls, as there are fewer repeats to serve.",
            "b": "L2 to DRAM: from 4Nd towards the loop's count.",
            "c": "Both stay as they are.",
            "d": "Shared memory: the tiles spill into L2.",
        },
        right="b",
        remarks={
            "a": "The SMs ask for what the loop needs. They do not know the size of L2.",
            "b": "Repeats that miss in L2 go to DRAM. The two accounts then become one.",
            "c": "The requests stay. Who answers them changes.",
            "d": "The tiles have a fixed size, and shared memory does not spill.",
        },
    ),
]
