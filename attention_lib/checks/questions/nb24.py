"""Predictions and checkpoint questions of notebook 24, a small GPT trained with these kernels."""

import math

from attention_lib.checks.kinds import Choice, Number
from attention_lib.gpu import recordings
from attention_lib.show.gpu_training import kinds, smooth

ROWS = recordings.read("train")["rows"]


def last_loss(attention="ours", seed=0):
    """Mean of the last 20 losses of the first recorded run, natural logarithm."""
    row = next(r for r in ROWS if (r["attention"], r["seed"]) == (attention, seed))
    return float(smooth(row["losses"])[-1])


STARTS = [kinds(ROWS, seed) for seed in (0, 1)]
TWICE = [x for start in STARTS for x in start["ours, twice"]]
APART = max(x for start in STARTS for x in start["ours and one of torch's"])
QUESTIONS = [
    Number(
        id="p24-1",
        text=(
            "The model names the next byte of a text: one of 256. Its loss is -ln of the\n"
            "probability that it gave to the right one. At first it knows nothing and gives all\n"
            "bytes the same. What is the loss?"
        ),
        unit="nats",
        truth=lambda: math.log(256),
        why="-ln(1/256).",
        hint="Which probability does the right byte get? Take the natural logarithm.",
        slips={
            "bits": (lambda: 8, "That is in bits, log2. The loss is a natural logarithm."),
            "log-10": (lambda: math.log10(256), "That is log10. Use the natural one."),
        },
    ),
    Choice(
        id="p24-2",
        text=(
            "The same training twice: our kernels, the same first weights, the same batches,\n"
            "300 steps in bfloat16. How far apart are the two loss curves at most, as means of\n"
            "20 steps?"
        ),
        options={
            "a": "not at all: the same program gives the same bits",
            "b": "about 0.001 or less, but not 0",
            "c": "about 0.05, as two starts with other random weights",
            "d": "about 1: small differences grow",
        },
        right="b",
        remarks={
            "a": (
                "The backward pass adds to dQ in the order in which the blocks come. Another\n"
                "order gives other last bits, and the next step starts from them."
            ),
            "b": (
                "Rounding moves the weights a little, and the loss hardly. Recorded, pairs of\n"
                f"runs from two starts: {min(TWICE):.5f} to {max(TWICE):.5f}."
            ),
            "c": "Other weights and other batches do much more than rounding.",
            "d": "They do grow. But both are pulled to where the loss is low, at the same pace.",
        },
    ),
    Number(
        id="p24-3",
        text=(
            f"At the end the loss is {last_loss():.2f}, a natural logarithm a byte. "
            "A compressor that uses the\n"
            "model's probabilities could store the text with how many bits a byte?"
        ),
        unit="bits a byte",
        truth=lambda: last_loss() / math.log(2),
        why="A loss over ln 2.",
        hint="8 bits a byte is no compression, and a loss of ln 256. So one bit is which loss?",
        slips={
            "as-it-is": (last_loss, "That is in nats. A bit is ln 2 = 0.69 of them."),
            "times-ln-2": (
                lambda: last_loss() * math.log(2),
                "The other way round: a bit is smaller than a nat, so there are more of them.",
            ),
        },
    ),
    Choice(
        id="p24-4",
        text=(
            "In the small training the backward pass forgets D: dS = P * dP. What does its loss\n"
            "curve look like?"
        ),
        options={
            "a": "it becomes NaN, or grows",
            "b": "it stays where it began",
            "c": "it falls, but more slowly",
            "d": "it is within rounding of the right one",
        },
        right="c",
        remarks={
            "a": "The gradient is wrong, not infinite. Adam keeps the steps small.",
            "b": "dV is still right, and dQ and dK point roughly the right way.",
            "c": "So a falling loss is no proof that a backward pass is right.",
            "d": "D is as large as the numbers that it is taken from.",
        },
    ),
    Choice(
        id="q70",
        text=(
            "Which call of scaled_dot_product_attention goes to the framework although\n"
            "`gpu.registered()` is active?"
        ),
        options={
            "a": "bfloat16, d = 128, is_causal=True, with gradients",
            "b": "float16, d = 64, with dropout_p=0.1",
            "c": "float32 inputs under autocast to bfloat16, d = 64",
        },
        right="b",
        remarks={
            "a": "That is what the kernels are for.",
            "b": "No kernel of the course has dropout. The Counter says so: 'dropout'.",
            "c": "The replacement casts as the framework does, and takes it.",
        },
    ),
    Choice(
        id="q71",
        text=f"What makes a difference of {APART:.4f} between two loss curves large or small?",
        options={
            "a": "whether it is below 0.1%",
            "b": "how far apart runs of right implementations are, with the same start and batches",
            "c": "how far apart two starts with other random weights are",
        },
        right="b",
        remarks={
            "a": "A small percentage can still be a mistake, and a large one rounding.",
            "b": "That is the noise, and it takes several runs. Rounding explains what is within.",
            "c": "That is much more, and would hide a mistake.",
        },
    ),
    Choice(
        id="q72",
        text="A new backward kernel trains a model: the loss falls for 300 steps. What is shown?",
        options={
            "a": "the kernel is right",
            "b": "little: wrong gradients make it fall too; compare with a right one, within noise",
            "c": "the kernel is fast",
        },
        right="b",
        remarks={
            "a": "The small training's loss fell with D forgotten, and with an L in another unit.",
            "b": "And before that, compare the gradients themselves.",
            "c": "A loss does not tell the time.",
        },
    ),
]
