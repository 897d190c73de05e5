"""Predictions and checkpoint questions of notebook 13, what the papers measured."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.hardware import GPUS
from attention_lib.papers import model_flops, table

TOKENS = (1024, 2048, 4096)
N_ABLATION, PAIRS_ABLATION = 8448, 4 * 16  # batch and heads
GPT3 = "GPT3-2.7B, 8k"


def _days():
    """Days at the three context lengths of Table 4."""
    return [table("context").value(f"FlashAttention, {n // 1024}k", "days") for n in TOKENS]


def _extrapolated(power):
    """Days at 4k, from 1k and 2k, if the part that grows does so as N to this power."""
    first, second, _ = _days()
    return first + (second - first) * (4**power - 1) / (2**power - 1)


def _ablation_rate(products=2, pairs=PAIRS_ABLATION):
    """TFLOP/s of FlashAttention-3 in its Table 2, from the time there."""
    flop = products * 2 * N_ABLATION**2 * 128 * pairs
    return flop / (table("ablation").value("FlashAttention-3", "ms") * 1e-3) / 1e12


def _memory_ratio(N):
    """Rebuilt bytes of PyTorch's attention over the printed ones of FlashAttention."""
    rebuilt = 128 * 2 * (4 * N**2 + 10 * N * 64) / 2**20
    return rebuilt / table("memory").value("FlashAttention", N)


def _share(attention, weights=1.0):
    """Percent of an A100's peak in Table 1's last row, if the parts are counted so."""
    size = table("sizes").row("GPT3-2.7B")
    dense, full = model_flops(**size, context=8192)
    counted = (weights * dense + attention * full) / (dense + full)
    reached = table("training").value(GPT3, "FA2") * 1e12
    return 100 * counted * reached / GPUS["A100-80"].tensor_flops


def _pytorch():
    return table("fa2, d = 64").value("PyTorch", 8192)


QUESTIONS = [
    Number(
        id="p13-1",
        text=(
            "GPT-2 small with FlashAttention trains 2.7 days with a context of 1k and 3.0 days\n"
            "with 2k. Take the same number of tokens in all runs. How many days with 4k?"
        ),
        unit="days",
        truth=lambda: _extrapolated(1),
        why=(
            "For each token, attention looks at N others; all else does not depend on N. So the "
            "time is a + b*N, and b*1k is 0.3 days."
        ),
        hint=(
            "Split the time of a token in two: what does not depend on the context, and attention. "
            "How does the second part grow, for one token?"
        ),
        slips={
            "one-more-step": (
                lambda: 2 * _days()[1] - _days()[0],
                "You added 0.3 once more. From 1k to 2k are 1k tokens, from 2k to 4k twice as "
                "many.",
            ),
            "quadratic": (
                lambda: _extrapolated(2),
                "You let the part that grows do so with N². For a whole sequence that is right. "
                "Here the tokens are given, and each looks at N others.",
            ),
            "all-of-it-grows": (
                lambda: 4 * _days()[0],
                "You multiplied the whole time by 4. Most of it is not attention: compare 1k with "
                "2k.",
            ),
        },
    ),
    Choice(
        id="p13-2",
        text=(
            "N = 1024, forward and backward. With padding mask and dropout, FlashAttention is\n"
            "3.3 times faster than PyTorch. How many times without both?"
        ),
        options={
            "a": "3.3: mask and dropout are cheap beside the products",
            "b": "1.6",
            "c": "5: there is less that could slow the fused kernel down",
            "d": "0.9: there is nothing left to fuse",
        },
        right="b",
        remarks={
            "a": "They have few FLOPs. But in PyTorch each is a kernel that moves N x N numbers.",
            "b": "The mask and dropout kernels of the baseline are gone, about half of its time.",
            "c": (
                "The fused kernel gets a little faster, the baseline much. Who had the separate "
                "kernels?"
            ),
            "d": "S and P still go through memory in PyTorch, and not in the fused kernel.",
        },
    ),
    Number(
        id="p13-3",
        text=(
            "The memory table: PyTorch's attention takes 10.6 times that of FlashAttention at\n"
            "N = 2,048 and 20.4 times at N = 4,096. At 8,192 it does not fit any more. If it\n"
            "did, how many times at N = 16,384?"
        ),
        unit="a factor",
        truth=lambda: _memory_ratio(16_384),
        why="One grows as N², the other as N, so the ratio doubles with N: twice two doublings.",
        hint="How does each of the two grow with N? How then does their ratio?",
        slips={
            "last-printed": (
                lambda: _memory_ratio(4096),
                "That is the last row in which both fit. The ratio ends there because the baseline "
                "does.",
            ),
            "one-doubling": (
                lambda: _memory_ratio(8192),
                "One doubling is missing: 4,096, 8,192, 16,384.",
            ),
            "ratio-quadratic": (
                lambda: 16 * _memory_ratio(4096),
                "You let the ratio grow as N². FlashAttention's memory grows too, as N.",
            ),
        },
    ),
    Number(
        id="p13-4",
        text=(
            "FlashAttention-3, forward, no mask: batch 4, 16 heads, N = 8448, d = 128, in\n"
            "3.538 ms. How many TFLOP/s?"
        ),
        unit="TFLOP/s",
        truth=_ablation_rate,
        why="4 N² d for each of the 64 heads, over the time.",
        hint=(
            "FLOPs first: two products of N x N x d for each head, a multiplication and an "
            "addition each. How many heads are there in the batch?"
        ),
        slips={
            "one-product": (
                lambda: _ablation_rate(products=1),
                "Half. Either one of the two products is missing, or the addition in each of them.",
            ),
            "batch-forgotten": (
                lambda: _ablation_rate(pairs=16),
                "You counted 16 heads. There are 16 in each of 4 sequences.",
            ),
            "heads-forgotten": (
                lambda: _ablation_rate(pairs=4),
                "You counted one head for each of the 4 sequences. There are 16.",
            ),
            "with-backward": (
                lambda: _ablation_rate(products=7),
                "Seven products are forward and backward. This is the forward pass.",
            ),
        },
    ),
    Number(
        id="p13-5",
        text=(
            "PyTorch's attention, forward and backward, d = 64, N = 8,192: 46 TFLOP/s without a\n"
            "mask. With a causal mask it computes all of S as before and then hides half. The\n"
            "paper counts half the FLOPs. If the mask itself cost no time, which figure would\n"
            "stand there?"
        ),
        unit="TFLOP/s",
        truth=lambda: _pytorch() / 2,
        why="The same time, half the count.",
        hint="A rate is a count over a time. Which of the two changes, and how?",
        slips={
            "unchanged": (
                _pytorch,
                "The time is the same. But the count over it is half.",
            ),
            "doubled": (
                lambda: 2 * _pytorch(),
                "You let the time be half. This program does all the work and hides half of it.",
            ),
        },
    ),
    Number(
        id="p13-6",
        text=(
            "GPT3-2.7B with 8k context: 225 TFLOP/s for each A100, 72% of the peak. A third of\n"
            "the count is attention, with all keys for each query. The model is causal. What\n"
            "share of the peak, if attention counts half?"
        ),
        unit="percent",
        truth=lambda: _share(0.5),
        why="A sixth of the count goes. The time does not change.",
        hint="Only the attention part is halved. Which part of the whole count goes?",
        slips={
            "nothing-halved": (
                lambda: _share(1),
                "That is with the full count. A sixth of it is for scores that the mask hides.",
            ),
            "all-halved": (
                lambda: _share(0.5, 0.5),
                "You halved everything. The products with the weights have no mask.",
            ),
            "no-attention": (
                lambda: _share(0),
                "You took all of the attention away. Half of it is really computed.",
            ),
        },
    ),
    Choice(
        id="p13-7",
        text=(
            "FlashAttention stands on arXiv (v2, June 2022) and in the proceedings of a\n"
            "conference (end of 2022). One of these is printed differently. Which?"
        ),
        options={
            "a": "the minutes of BERT-large",
            "b": "the days of GPT-2",
            "c": "the perplexity of GPT-2 with 4k context",
            "d": "the accuracies of Long Range Arena",
        },
        right="c",
        remarks={
            "a": "20.0 and 17.4 in both.",
            "b": "All six are the same.",
            "c": "17.5 in one, 17.2 in the other. Both abstracts say 0.7 better, which fits 17.5.",
            "d": "All of the table is the same.",
        },
    ),
    Choice(
        id="q37",
        text=(
            "A kernel is listed with 330 TFLOP/s without a mask and with 300 TFLOP/s causal, at\n"
            "the same N, d and heads. The causal count is half, as usual. Which call takes\n"
            "longer, and by how much?"
        ),
        options={
            "a": "the causal one, by 10%",
            "b": "the one without a mask: the causal one takes 55% of its time",
            "c": "the one without a mask, by 10%",
            "d": "the same: it is one kernel on one GPU",
        },
        right="b",
        remarks={
            "a": "That would be so for equal counts. The causal count is half.",
            "b": "Half the count over a rate that is 10/11: 0.5 * 330/300.",
            "c": "You see the direction. Put the counts in: time is count over rate.",
            "d": "Then the causal figure would be half of the other, as in PyTorch.",
        },
    ),
    Choice(
        id="q38",
        text=(
            "FlashAttention trains GPT-2 3.5 times faster than HuggingFace. FlashAttention-2 is\n"
            "2 times faster than FlashAttention. So GPT-2 trains 7 times faster than HuggingFace.\n"
            "Where is the mistake?"
        ),
        options={
            "a": "nowhere: ratios with a common middle term multiply",
            "b": "the GPUs are different ones",
            "c": "the 2 is for the attention kernel, the 3.5 for the whole training",
            "d": "3.5 is wrong: it is 1.7",
        },
        right="c",
        remarks={
            "a": "They do if it is the same thing. Is the middle term the same thing in both?",
            "b": "Both are A100s. Ask what was timed.",
            "c": "In FlashAttention-2's training table the gain over the first is 1.04 to 1.29.",
            "d": "1.7 is over Megatron-LM. Both are right, each for its baseline.",
        },
    ),
    Choice(
        id="q39",
        text=(
            "Two versions of a paper print 17.5 and 17.2 for the same experiment. You need the\n"
            "number in a text of your own. What do you write?"
        ),
        options={
            "a": "the number of the version that you read, with that version beside it",
            "b": "the mean of both",
            "c": "the lower one: later versions are corrected",
            "d": "17.5 without a version: it is on arXiv, which everybody reads",
        },
        right="a",
        remarks={
            "a": "Then a reader can find it again, and can see why another text says otherwise.",
            "b": "Nobody measured the mean.",
            "c": "Perhaps. Neither text says what changed, and the lower is not always the later.",
            "d": "A reader of the other version will think that you copied it wrongly.",
        },
    ),
]
