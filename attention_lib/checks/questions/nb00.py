"""Questions of notebook 00, Start here."""

from attention_lib.checks.kinds import Choice, Number
from attention_lib.traffic import attention_memory


def _bytes(N, d):
    """Bytes of Q alone and of S alone, one head."""
    parts = attention_memory(N, d, 1, method="standard")
    return parts["QKVO"] / 4, parts["S"]


def _ratio(N, d):
    Q, S = _bytes(N, d)
    return S / Q


QUESTIONS = [
    Number(
        id="p00-1",
        text=(
            "N = 4096 tokens, d = 64 numbers for each. Q is N x d. The score matrix\n"
            "S = Q K^T is N x N. How many times as many numbers does S hold as Q?"
        ),
        unit="how many times as many",
        truth=lambda: _ratio(4096, 64),
        why="N x N over N x d is N / d. The next cell shows what happens as N grows.",
        hint="Write both sizes as products, N x N and N x d, then cancel what they share.",
        slips={
            "against-all-four": (
                lambda: _ratio(4096, 64) / 4,
                "You probably compared S with Q, K, V and O together. It is about Q alone.",
            ),
            "S-and-P": (
                lambda: 2 * _ratio(4096, 64),
                "You probably counted two N x N matrices, S and P. The question is about S alone.",
            ),
            "N-times": (
                lambda: 4096,
                "That is N, the width of S. Q is not one number wide: it is d numbers wide.",
            ),
            "numbers-not-ratio": (
                lambda: 4096 * 4096,
                "That is how many numbers S holds. The question asks how many times Q that is.",
            ),
        },
    ),
    Number(
        id="p00-2",
        text=(
            "Now N = 16,384, still d = 64. How many times as many numbers does S hold as Q?\n"
            "Answer before you compute."
        ),
        unit="how many times as many",
        truth=lambda: _ratio(16384, 64),
        why="N is 4 times what it was. S grew 16-fold and Q 4-fold, so the ratio grew 4-fold.",
        hint="The ratio is N / d. What changed since N = 4096?",
        slips={
            "grew-as-S": (
                lambda: 16 * _ratio(4096, 64),
                "You probably let the ratio grow as S does, with the square of N. Q grows too.",
            ),
            "did-not-grow": (
                lambda: _ratio(4096, 64),
                "That is the ratio at N = 4096. It depends on N: S grows faster than Q.",
            ),
            "N-times": (
                lambda: 16384,
                "That is N. Q is d numbers wide, so divide by d.",
            ),
        },
    ),
    Choice(
        id="p00-3",
        text=(
            "You time the tiled attention of this course on a laptop, in NumPy, and it is\n"
            "slower than standard attention. What does that say about a GPU?"
        ),
        options={
            "a": "Nothing. Compare what the two move and what they store.",
            "b": "FlashAttention is slower on a GPU too.",
            "c": "FlashAttention is faster on a GPU, by the same factor.",
            "d": "The library has a bug: the tiled version must be faster everywhere.",
        },
        right="a",
        remarks={
            "a": (
                "A NumPy loop on a CPU has other costs than a GPU kernel, which pays for bytes. "
                "That is why this course counts bytes, and quotes times only with their device."
            ),
            "b": (
                "It is the first thing that a stopwatch suggests. But it timed NumPy on a CPU, and "
                "a GPU kernel has other costs."
            ),
            "c": "The two times have different causes, so no factor carries over.",
            "d": (
                "It computes the right numbers. With other blocks it can be faster. Both times "
                "belong to a CPU and to NumPy."
            ),
        },
    ),
]
