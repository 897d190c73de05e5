"""Questions of notebook 07, The framework call."""

import numpy as np

from attention_lib.checks.kinds import Choice, Number
from attention_lib.framework import CALLS, choice
from attention_lib.reference import standard_attention
from attention_lib.traffic import attention_memory

MiB = 2**20


def _seen(align, query):
    """How many of 100 keys one of 4 queries sees, under a causal mask in that corner."""
    Q, K = np.ones((4, 8)), np.ones((100, 8))
    P = standard_attention(Q, K, K, causal=True, align=align)[2]
    return int(np.count_nonzero(P[query]))


def _on_flash(**changes):
    """How many of CALLS run on flash, if each call is changed so first."""
    return sum(choice(**(call | changes)) == "flash" for call in CALLS.values())


def _squares(heads, names):
    parts = attention_memory(4096, 64, heads, method="standard")
    return sum(parts[name] for name in names) / MiB


QUESTIONS = [
    Number(
        id="p07-1",
        text=(
            "A chat has 100 keys in its cache. The last 4 of them belong to 4 new tokens, whose\n"
            "queries come now: Nq = 4, Nk = 100. Call torch with is_causal=True.\n"
            "How many keys does the last of the 4 queries see?"
        ),
        unit="keys",
        truth=lambda: _seen("upper-left", 3),
        why="torch puts the first query on the first key, so query i sees keys 0 to i, no more.",
        hint="The mask is a triangle of ones. In which corner of the 4 x 100 matrix does it sit?",
        slip_tolerance=0.0005,
        slips={
            "lower-right": (
                lambda: _seen("lower-right", 3),
                "That is what a chat needs, and what this library does: the last query sees every "
                "key. torch puts the triangle into the other corner.",
            ),
            "first-query": (
                lambda: _seen("upper-left", 0),
                "That is what the first of the 4 queries sees. The last one is 3 rows below.",
            ),
            "new-tokens-hidden": (
                lambda: _seen("lower-right", 3) - 4,
                "You probably took away the new tokens. A query may see its own key, and the "
                "keys before it.",
            ),
        },
    ),
    Number(
        id="p07-2",
        text=(
            "On an NVIDIA A100, torch tries flash first. Above are 8 calls.\n"
            "In how many of them does flash run?"
        ),
        unit="calls",
        truth=lambda: _on_flash(),
        why="Flash takes 16-bit types, d up to 256, no mask, and a causal triangle only if square.",
        hint="Go through the 8 calls one by one. Each rule in the text above excludes some.",
        tolerance=0.01,
        slips={
            "always-flash": (
                lambda: len(CALLS),
                "That is all of them: the belief that torch always uses FlashAttention.",
            ),
            "any-mask": (
                lambda: _on_flash(mask=False),
                "You probably let flash take an attn_mask. It takes none, only is_causal.",
            ),
            "never-with-dropout": (
                lambda: _on_flash() - 1,
                "You probably excluded dropout. On a GPU flash can do dropout.",
            ),
        },
    ),
    Number(
        id="p07-3",
        text=(
            "Q, K and V have shape (2, 16, 4096, 64): batch 2, 16 heads. dtype is float16.\n"
            "How many MiB do S and P take together, if an implementation makes both?"
        ),
        unit="MiB",
        truth=lambda: _squares(2 * 16, "SP"),
        why="2 x 16 heads, each with two matrices of 4096 x 4096 elements of 2 bytes.",
        hint="One matrix is N x N x 2 bytes. How many of them are there for each head?",
        slips={
            "one-matrix-or-one-batch": (
                lambda: _squares(2 * 16, "S"),
                "You probably counted one matrix a head, or one of the two sequences of the batch.",
            ),
            "one-head": (
                lambda: _squares(1, "SP"),
                "That is one head of one sequence. There are 2 x 16 of them.",
            ),
            "one-sequence-one-matrix": (
                lambda: _squares(16, "S"),
                "That is S alone for one sequence. P comes on top, and the second sequence.",
            ),
            "float32": (
                lambda: 2 * _squares(2 * 16, "SP"),
                "You probably took 4 bytes an element. torch's math does so too, but the question "
                "asks for float16: 2 bytes.",
            ),
        },
    ),
    Choice(
        id="q19",
        text=(
            "A batch of float16 sequences with padding runs on an A100. The padding goes in as\n"
            "attn_mask. Which statement is right?"
        ),
        options={
            "a": "Flash runs, since dtype and head dimension fit.",
            "b": "Flash runs, and leaves the padding out by itself.",
            "c": "The math implementation runs, and makes S and P.",
            "d": "A fused kernel runs, but it is not flash.",
        },
        right="d",
        remarks={
            "a": (
                "That is the belief that torch always uses FlashAttention. One more rule: flash "
                "takes no attn_mask."
            ),
            "b": (
                "The call does not know which keys are padding except by the mask, and with a mask "
                "flash is out."
            ),
            "c": (
                "Losing flash is not losing fusion. One fused implementation comes before math in "
                "the order, and it takes masks."
            ),
            "d": (
                "The memory-efficient implementation takes masks, and is fused as well: no N x N "
                "matrix is stored."
            ),
        },
    ),
    Choice(
        id="q20",
        text=(
            "`pad` is True at padding: what nn.MultiheadAttention takes as key_padding_mask.\n"
            "What do you pass to scaled_dot_product_attention?"
        ),
        options={
            "a": "attn_mask=pad",
            "b": "attn_mask=~pad, with axes for heads and queries added",
            "c": "attn_mask=pad as float, 1.0 at padding and 0.0 elsewhere",
            "d": "is_causal=True, which hides the padding at the end",
        },
        right="b",
        remarks={
            "a": (
                "Then every query sees the padding and nothing else. No error tells you: the "
                "shapes fit."
            ),
            "b": "True means: take part. So the padding must be False.",
            "c": (
                "A float mask is added to the scores. Padding would get a bonus of 1 instead of "
                "being hidden."
            ),
            "d": (
                "It hides every later key, real ones too: that is another attention. Only in a "
                "model that is causal anyway do real queries never reach padding at the end."
            ),
        },
    ),
    Choice(
        id="q21",
        text='"FlashAttention reaches 75% of the peak." Where does that number belong?',
        options={
            "a": "FlashAttention-3, float16, forward pass, on an H100",
            "b": "FlashAttention-3, FP8, on an H100",
            "c": "FlashAttention-3, bfloat16, on an A100",
            "d": "FlashAttention-2, training a model, on A100s",
        },
        right="a",
        remarks={
            "a": "740 of 989 TFLOP/s. In FP8 the peak doubles, and the share is lower.",
            "b": "In FP8 it reaches more TFLOP/s, but of a peak twice as high: about 61%.",
            "c": (
                "FlashAttention-3 is made for Hopper, and no such figure is published for an A100. "
                "The 73% on an A100 are FlashAttention-2's."
            ),
            "d": (
                "Training reached 72%, of a whole model and not of attention alone. It is a "
                "different measurement."
            ),
        },
    ),
]
