"""Predictions and checkpoint questions of notebook 18, the framework call on a GPU."""

from attention_lib.checks.kinds import Choice, Number

HEADS, KV_HEADS, N, D = 32, 8, 4096, 128


def _kv(heads):
    """MB of K and V, float16."""
    return 2 * 2 * heads * N * D / 1e6


QUESTIONS = [
    Choice(
        id="p18-1",
        text=(
            "torch 2.11 on an H200, the package built for CUDA 13. The call has float16, d = 64,\n"
            "no mask, no dropout, and says nothing about a backend. Which one runs?"
        ),
        options={"a": "flash", "b": "cudnn", "c": "efficient", "d": "math"},
        right="b",
        remarks={
            "a": "The best known one, and the first in the order on an A100. Not on this GPU.",
            "b": "On H100, H200 and B200 the order begins with cudnn, if that library is new.",
            "c": "It can run the call. But others come first in the order.",
            "d": "It is the last resort. Here every other backend can run the call.",
        },
    ),
    Number(
        id="p18-2",
        text=(
            "The profiler names flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, ...>>.\n"
            "The numbers are d, the rows of a Q block, the rows of a K/V block, and warps.\n"
            "N = 16,384. How often does this kernel load all of K, for one head?"
        ),
        unit="times",
        truth=lambda: 16_384 // 128,
        why="Once for each block of Q, and a block has 128 rows.",
        hint="FlashAttention-2 has Q outside. How many blocks of Q are there?",
        slips={
            "d-taken": (lambda: 16_384 // 64, "You divided by 64: that is d. It stands first."),
            "once": (
                lambda: 1,
                "Once is what DRAM sees. The kernel loads K again for each block of Q.",
            ),
            "each-row": (lambda: 16_384, "Not for each row: a block of rows shares a load."),
        },
        tolerance=0,
    ),
    Choice(
        id="p18-3",
        text=(
            "A mask, a dtype or a head dimension can make the call fall back to math. N = 16,384,\n"
            "d = 64, no causal mask. How many times slower than flash is it?"
        ),
        options={
            "a": "about 2 times",
            "b": "about 6 times",
            "c": "about 17 times",
            "d": "about 250 times, as the DRAM bytes are",
        },
        right="c",
        remarks={
            "a": "That is the step from flash to efficient.",
            "b": "More: S and P are written in float32, and the products do not run in 16 bits.",
            "c": "Products in float32, and S and P through HBM with 4 bytes an element.",
            "d": "Bytes are not time: notebook 17. Arithmetic and shared memory set the pace.",
        },
    ),
    Number(
        id="p18-4",
        text=(
            "One new query, 4096 keys in the cache: Nq = 1, Nk = 4096. You call torch with\n"
            "is_causal=True. How many keys does the query see?"
        ),
        unit="keys",
        truth=lambda: 1,
        why="Upper left: query 0 sees key 0, the oldest of all.",
        hint="In torch the triangle sits in the upper left corner. Which row of it is query 0?",
        slips={
            "lower-right": (
                lambda: 4096,
                "So it should be, and so it is with the triangle at the lower right.",
            ),
            "none": (lambda: 0, "The diagonal belongs to what is seen: key 0."),
        },
        tolerance=0,
    ),
    Number(
        id="p18-5",
        text=(
            "32 heads of Q, 8 heads of K and V, N = 4096, d = 128, float16, batch 1. Somebody\n"
            "repeats K and V to 32 heads before the call. How many MB are written for that?"
        ),
        unit="MB",
        truth=lambda: _kv(HEADS),
        why="Two arrays of 32 heads. They are read again by the kernel, too.",
        hint="How large are K and V after the repeat?",
        slips={
            "before": (
                lambda: _kv(KV_HEADS),
                "That is K and V before the repeat, with 8 heads.",
            ),
            "K-alone": (lambda: _kv(HEADS) / 2, "Half: V is repeated as well."),
            "elements": (
                lambda: _kv(HEADS) / 2 / 1.048576,
                "Elements, or MiB of one array? 2 bytes each, K and V, and 1 MB is 10^6.",
            ),
        },
        slip_tolerance=0.005,
    ),
    Choice(
        id="p18-6",
        text=(
            "Two ways, both with float16 inputs. Three calls: S and P are rounded to float16.\n"
            "Fused: S stays in float32, P is rounded for the second product. Which one is nearer\n"
            "to float64?"
        ),
        options={
            "a": "three calls: each step is the plain formula",
            "b": "fused: it rounds less on the way",
            "c": "the same: inputs and output are float16 in both",
            "d": "three calls: the online rescaling adds errors, tile by tile",
        },
        right="b",
        remarks={
            "a": "The formula is the same. What is kept between the steps is not.",
            "b": "A score rounded to 11 bits is a factor on P. Fused kernels keep it whole.",
            "c": "That would be so if only inputs and output were rounded.",
            "d": "It does, in float32, where it cannot be seen beside float16.",
        },
    ),
    Choice(
        id="q52",
        text=(
            "A model became 2 times slower in attention after somebody added a mask for padding.\n"
            "float16, d = 64, an A100. What happened, most likely?"
        ),
        options={
            "a": "the mask made the call fall back to math",
            "b": "attn_mask rules out flash, so efficient runs",
            "c": "reading the mask takes half of the time",
        },
        right="b",
        remarks={
            "a": "Then it would be far more than twice. Efficient takes masks.",
            "b": "See the kernel's name in a profile. If texts are packed, no mask is needed.",
            "c": "The mask is read, and takes some time. But look first which kernel runs.",
        },
    ),
    Choice(
        id="q53",
        text=(
            "You compare gpu.attention(Q, K, V, causal=True) with torch and is_causal=True.\n"
            "Equal for Nq = Nk. Quite different for Nq = 100, Nk = 300. Which one is wrong?"
        ),
        options={
            "a": "torch: it ignores the mask if Nq and Nk differ",
            "b": "gpu.attention: it does not handle Nq below Nk",
            "c": "neither: they align the triangle at different corners",
        },
        right="c",
        remarks={
            "a": "It applies one. To which corner?",
            "b": "It does. Ask it for the other corner and compare again.",
            "c": "align='upper-left' gives torch's. For a cache you want the lower right.",
        },
    ),
    Choice(
        id="q54",
        text=(
            "gpu.attention gets Q of a layer as x.view(batch, N, heads, d).transpose(1, 2).\n"
            "What is copied before the kernel starts?"
        ),
        options={
            "a": "nothing: it reads the strides",
            "b": "Q, since the kernel needs (batch, heads, N, d) without gaps",
            "c": "Q, from torch to CuPy",
        },
        right="a",
        remarks={
            "a": "Only d must be contiguous, and rows start at multiples of 16 bytes.",
            "b": "The shape is that, and each axis has a stride of its own.",
            "c": "DLPack hands over an address. Both libraries then see the same memory.",
        },
    ),
]
