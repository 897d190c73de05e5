"""GPUs as data: how fast they compute, how fast they load, how much they keep on chip.

Two questions are answered here, both with a division or a sum:

    roofline     is this work limited by arithmetic or by memory traffic, and by how much?
                 Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
    SRAM         which tile of attention fits in the shared memory of one thread block?
                 rule "real": the arithmetic of the tiles themselves; rule "registers":
                 FlashAttention-2, arXiv 2307.08691, section 3.3; rule "article": as a well-read
                 article counts them, which forgets one tile.

Units: bytes, bytes per second, FLOP per second. KiB, MiB and GiB are powers of 1024. The makers
print "40 GB" for a memory of 40 GiB and "192 KB" for 192 KiB; bandwidths are powers of 1000.

Every figure stands beside its source, and every source says how far it was followed:
"(read)"              that text, or a stored copy of it, was read for this file (November 2026)
"(quoted, read)"      the maker's document was not read, but a text that quotes it was
"not re-read"         the number is the maker's as generally known; nothing was opened
"""

from bisect import bisect_right
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from numbers import Real
from typing import NamedTuple

from attention_lib.inputs import check_choice, check_positive_int

KiB, MiB, GiB = 1024, 1024**2, 1024**3

UNITS = {"tensor": "tensor_flops", "fp32": "fp32_flops"}
RULES = ("article", "real", "registers")
RESERVED_PER_BLOCK = 1 * KiB  # CUDA keeps this much shared memory for itself in every block


def _amount(name, value, above_zero=False):
    """A finite number, at least zero (or above it)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    if not isfinite(value) or value < 0 or (above_zero and value == 0):
        least = "above 0" if above_zero else "0 or more"
        raise ValueError(f"{name} is {value!r}; accepted: a finite number, {least}")


@dataclass(frozen=True)
class GPU:
    """One GPU. All figures are peaks from documents: no program reaches every one of them.

    A figure that is not a positive number, or on-chip sizes that contradict each other (a block
    cannot have more shared memory than its SM), raise TypeError or ValueError.
    """

    name: str
    tensor_flops: float  # FLOP/s, dense (no sparsity) fp16 or bf16, accumulating in fp32
    fp32_flops: float  # FLOP/s of the ordinary cores: softmax runs here, not on tensor cores
    bandwidth: float  # bytes/s between the GPU's memory (HBM; GDDR6X on the RTX 4090) and the chip
    memory: float  # bytes of that memory
    sms: int  # streaming multiprocessors
    sram_per_sm: float  # bytes of shared memory in one SM, when set to its maximum
    sram_per_block: float  # bytes of it that one thread block may use (dynamic, by opt-in)
    l1_per_sm: float  # bytes of L1 cache and shared memory together: one SRAM, divided at run time
    l2: float  # bytes of L2 cache, shared by all SMs
    sources: dict = field(repr=False, compare=False)  # field -> where its figure is from

    def __post_init__(self):
        for name in FIGURES:
            _amount(name, getattr(self, name), above_zero=True)
        check_positive_int("sms", self.sms)
        if not self.sram_per_block <= self.sram_per_sm <= self.l1_per_sm:
            raise ValueError(
                f"sram_per_block={self.sram_per_block}, sram_per_sm={self.sram_per_sm}, "
                f"l1_per_sm={self.l1_per_sm}: each must be at most the next (bytes)"
            )
        if set(self.sources) != set(FIGURES):
            raise ValueError(
                f"sources has {sorted(self.sources)}; accepted: one for each of {sorted(FIGURES)}"
            )


FIGURES = tuple(f.name for f in fields(GPU) if f.name not in ("name", "sources"))


def _gpu(name, **facts):
    """A GPU from field=(value, source) pairs, so that no number is written without its source."""
    values = {key: value for key, (value, _) in facts.items()}
    return GPU(name, **values, sources={key: source for key, (_, source) in facts.items()})


# ---------------------------------------------------------------- what one SM keeps on chip
# These belong to the architecture (compute capability), not to the product.

_CUDA = "NVIDIA, CUDA Programming Guide 13, Compute Capabilities, "

_SM80 = dict(
    sram_per_sm=(164 * KiB, _CUDA + "Table 31, column 8.0 (read)"),
    sram_per_block=(163 * KiB, _CUDA + "Table 31, column 8.0 (read)"),
    l1_per_sm=(192 * KiB, "NVIDIA, Ampere Tuning Guide, section 1.4.2.3 (read)"),
)
_SM89 = dict(
    sram_per_sm=(100 * KiB, _CUDA + "Table 31, column 8.9 (read)"),
    sram_per_block=(99 * KiB, _CUDA + "Table 31, column 8.9 (read)"),
    l1_per_sm=(128 * KiB, _CUDA + "Table 32, row 8.9 (read)"),
)
_SM90 = dict(
    sram_per_sm=(228 * KiB, "NVIDIA, Hopper Tuning Guide, section 1.4.1.1 (read)"),
    sram_per_block=(227 * KiB, "NVIDIA, Hopper Tuning Guide, section 1.4.1.1 (read)"),
    l1_per_sm=(256 * KiB, _CUDA + "Table 32, row 9.0 (read)"),
)
_SM100 = dict(
    sram_per_sm=(228 * KiB, "NVIDIA, Blackwell Tuning Guide, section 1.4.1.1 (read)"),
    sram_per_block=(227 * KiB, "NVIDIA, Blackwell Tuning Guide, section 1.4.1.1 (read)"),
    l1_per_sm=(256 * KiB, "NVIDIA, Blackwell Tuning Guide, section 1.4.2.3 (read)"),
)

# ---------------------------------------------------------------- the products

_GA100 = "NVIDIA developer blog, NVIDIA Ampere Architecture In-Depth (May 2020), Table 3 (read)"
_A100_80 = "NVIDIA, A100 80GB datasheet: from the vendor's datasheet, not re-read; "
_GH100 = "NVIDIA, H100 Tensor Core GPU Architecture whitepaper (quoted, read: "
_H100_CARD = "NVIDIA, H100 SXM specification table (quoted, read: HPC Tech product page, H100)"
_H200_CARD = "NVIDIA, H200 datasheet: from the vendor's datasheet, not re-read; "
_SCALING = "J. Austin et al., How to Scale Your Model, part 12 (Aug 2025), GPU specs table (read)"
_H200_SELF = "one H200, asked through CUDA: recordings/h200_device.json, 2026-11-29 (read)"
_HGX_B200 = "NVIDIA, Blackwell datasheet, HGX B200, per GPU (quoted, read: zdszero, Hardware)"
_AD102 = "NVIDIA, Ada GPU Architecture whitepaper v2.1, Appendix A (quoted, read: course notes)"

GPUS = {
    "A100-40": _gpu(
        "NVIDIA A100 40GB SXM",
        tensor_flops=(312e12, _GA100 + ", FP16 with FP32 accumulate; 624 is with sparsity"),
        fp32_flops=(19.5e12, _GA100),
        bandwidth=(1555e9, _GA100),
        memory=(40 * GiB, _GA100 + "; binary, since such a card reports 42,405,855,232 B"),
        sms=(108, _GA100),
        l2=(40 * MiB, _GA100 + ": 40960 KB"),
        **_SM80,
    ),
    "A100-80": _gpu(
        "NVIDIA A100 80GB SXM",
        tensor_flops=(312e12, _GA100 + ", for the 40 GB card: the same chip and clock"),
        fp32_flops=(19.5e12, _GA100 + ", for the 40 GB card: the same chip and clock"),
        bandwidth=(2039e9, _A100_80 + "same figure in Thunder Compute, A100 specs guide (read)"),
        memory=(80 * GiB, _A100_80 + "same figure in Thunder Compute, A100 specs guide (read)"),
        sms=(108, _GA100 + ", for the 40 GB card: the same chip"),
        l2=(40 * MiB, "NVIDIA, Ampere Tuning Guide, section 1.4.2.2 (read)"),
        **_SM80,
    ),
    "H100": _gpu(
        "NVIDIA H100 SXM",
        tensor_flops=(989.4e12, _GH100 + "G. Lockwood, H100 page); 1979 is with sparsity"),
        fp32_flops=(66.9e12, _GH100 + "Modal, GPU Glossary, peak rate)"),
        bandwidth=(3.35e12, _H100_CARD),
        memory=(80 * GiB, "NVIDIA, Hopper Tuning Guide, section 1.4.2.1 (read)"),
        sms=(132, _GH100 + "Modal, GPU Glossary, peak rate)"),
        l2=(50 * MiB, "NVIDIA, Hopper Tuning Guide, section 1.4.2.2 (read)"),
        **_SM90,
    ),
    "H200": _gpu(
        "NVIDIA H200 SXM",
        tensor_flops=(989.4e12, _H200_CARD + "the H100's chip, 9.9e14 in " + _SCALING),
        fp32_flops=(66.9e12, _H200_CARD + "the H100's chip and clock, so the H100's figure"),
        bandwidth=(4.8e12, _H200_CARD + "same figure in " + _SCALING),
        memory=(141 * GiB, _H200_CARD + "same figure in " + _SCALING),
        sms=(132, _H200_SELF),
        l2=(60 * MiB, _H200_SELF + "; documents on the H100's chip say 50"),
        **_SM90
        | {"sram_per_sm": (228 * KiB, _H200_SELF), "sram_per_block": (227 * KiB, _H200_SELF)},
    ),
    # The B200 of an 8-GPU board (HGX, 1000 W). In a GB200 the same chip may draw 1200 W and is
    # listed with 2.5e15 FLOP/s and 8 TB/s; "4.5 PFLOPS" and "5 PFLOPS" are with sparsity.
    "B200": _gpu(
        "NVIDIA B200 SXM (HGX)",
        tensor_flops=(2.25e15, _HGX_B200 + ": 4.5 PFLOPS with sparsity; half of it is dense"),
        fp32_flops=(75e12, _HGX_B200),
        bandwidth=(7.7e12, _HGX_B200),
        memory=(180 * GiB, "NVIDIA, Blackwell Tuning Guide, section 1.4.2.1 (read)"),
        sms=(148, _SCALING),
        l2=(126 * MiB, "NVIDIA, Blackwell Tuning Guide, section 1.4.2.2, of the GB200 (read)"),
        **_SM100,
    ),
    "RTX4090": _gpu(
        "NVIDIA GeForce RTX 4090",
        tensor_flops=(165.2e12, _AD102 + ", FP16 with FP32 accumulate; 330.3 is with FP16"),
        fp32_flops=(82.6e12, _AD102),
        bandwidth=(1008e9, _AD102),
        memory=(24 * GiB, _AD102),
        sms=(128, _AD102),
        l2=(72 * MiB, _AD102 + ": 73728 KB; the uncut AD102 chip has 98304 KB"),
        **_SM89,
    ),
}


def find_gpu(gpu):
    """The GPU itself, or the row of GPUS with that name. ValueError for an unknown name."""
    if isinstance(gpu, GPU):
        return gpu
    if not isinstance(gpu, str):
        raise TypeError(
            f"gpu must be a GPU or one of {', '.join(GPUS)}, got {type(gpu).__name__} {gpu!r}"
        )
    if gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}; accepted: {', '.join(GPUS)}, or a your_gpu(...)")
    return GPUS[gpu]


def your_gpu(like="A100-80", **changes):
    """A copy of a known GPU with your own figures, e.g. your_gpu("H200", bandwidth=4.3e12).

    Changed figures have the source "yours"; the others keep the figure and source of `like`.
    ValueError names a field that does not exist or a figure that is impossible.
    """
    base = find_gpu(like)
    unknown = sorted(set(changes) - set(FIGURES) - {"name"})
    if unknown:
        raise ValueError(
            f"{unknown[0]}={changes[unknown[0]]!r}: no such figure; "
            f"accepted: name,  {', '.join(FIGURES)}"
        )
    changes.setdefault("name", f"your GPU, like {base.name}")
    sources = base.sources | {key: "yours" for key in changes if key != "name"}
    return replace(base, **changes, sources=sources)


# ---------------------------------------------------------------- roofline


def peak(gpu, unit="tensor"):
    """FLOP/s of the tensor cores (dense, fp32 accumulate) or of the fp32 cores."""
    check_choice("unit", unit, tuple(UNITS))
    return getattr(find_gpu(gpu), UNITS[unit])


def ridge(gpu, unit="tensor"):
    """FLOP per byte at which computing and loading take equally long (the machine balance)."""
    return peak(gpu, unit) / find_gpu(gpu).bandwidth


def roofline(gpu, intensity, unit="tensor"):
    """The most FLOP/s that work of this intensity (FLOP per byte moved) can reach."""
    _amount("intensity", intensity)
    return min(peak(gpu, unit), find_gpu(gpu).bandwidth * intensity)


class TimeBound(NamedTuple):
    """Lower bounds in seconds. If loading and computing overlap perfectly, the larger one is it."""

    compute: float
    memory: float
    limit: str  # "compute" or "memory": the larger of the two (at the ridge, "compute")


def time_bound(gpu, flops, moved, unit="tensor"):
    """How long `flops` FLOP and `moved` bytes take at least: TimeBound(compute, memory, limit)."""
    _amount("flops", flops)
    _amount("moved", moved)
    compute = flops / peak(gpu, unit)
    memory = moved / find_gpu(gpu).bandwidth
    return TimeBound(compute, memory, "memory" if memory > compute else "compute")


# ---------------------------------------------------------------- which tiles fit on chip


def sram_use(Br, Bc, d, *, rule="real", element_bytes=2, O_bytes=None):
    """Bytes of shared memory for the tiles of one thread block: Q K V O S stats, and total.

    rule "article"    Q, K, V and O in the input's type, m and l in fp32; S is forgotten
         "real"       S counted too, in fp32, and O as the fp32 accumulator that it is; P can
                      take the place of S
         "registers"  FlashAttention-2: S, O, m and l live in registers, so shared memory holds
                      only Q, K and V (one copy each; a pipeline that loads ahead needs more)
    O_bytes is the size of an element of O, if not element_bytes ("article") or 4 ("real"); with
    O in registers it changes nothing.
    """
    for name, value in dict(Br=Br, Bc=Bc, d=d, element_bytes=element_bytes).items():
        check_positive_int(name, value)
    check_choice("rule", rule, RULES)
    if O_bytes is None:
        O_bytes = element_bytes if rule == "article" else 4
    check_positive_int("O_bytes", O_bytes)

    use = dict(Q=Br * d * element_bytes, K=Bc * d * element_bytes, V=Bc * d * element_bytes)
    in_registers = rule == "registers"
    use["O"] = 0 if in_registers else Br * d * O_bytes
    use["S"] = Br * Bc * 4 if rule == "real" else 0
    use["stats"] = 0 if in_registers else 2 * Br * 4  # m and l: one fp32 number each per row
    use["total"] = sum(use.values())
    return use


def optimal_block(sram_bytes, d, *, rule="real", step=None, element_bytes=2, O_bytes=None):
    """The largest square block B (Br = Bc = B) whose tiles fit in sram_bytes.

    step=None tries what the rule's author would: powers of two for "article", otherwise
    multiples of 16, the side of a tensor-core tile. step=1 tries every integer.
    ValueError if not even the smallest candidate fits.
    """
    _amount("sram_bytes", sram_bytes, above_zero=True)

    def total(block):
        options = dict(rule=rule, element_bytes=element_bytes, O_bytes=O_bytes)
        return sram_use(block, block, d, **options)["total"]

    smallest = step if step is not None else 1 if rule == "article" else 16
    check_positive_int("step", smallest)
    if total(smallest) > sram_bytes:
        raise ValueError(
            f"sram_bytes={sram_bytes}: a block of {smallest} at d={d} already needs "
            f"{total(smallest)} bytes by rule {rule!r}"
        )
    block = smallest
    while total(2 * block) <= sram_bytes:
        block *= 2
    if step is None and rule == "article":
        return block
    # The answer is below 2 * block, and use grows with the block: bisect among the multiples.
    multiples = range(smallest, 2 * block, smallest)
    return multiples[bisect_right(multiples, sram_bytes, key=total) - 1]


def blocks_per_sm(gpu, Br, Bc, d, *, rule="real", element_bytes=2, O_bytes=None):
    """How many such thread blocks one SM holds at a time, by shared memory alone.

    0 means that the kernel cannot be launched: shared memory does not spill anywhere. Registers
    and threads limit the number too and are not looked at here.
    """
    gpu = find_gpu(gpu)
    need = sram_use(Br, Bc, d, rule=rule, element_bytes=element_bytes, O_bytes=O_bytes)["total"]
    if need > gpu.sram_per_block:
        return 0
    return int(gpu.sram_per_sm // (need + RESERVED_PER_BLOCK))


def fits(gpu, Br, Bc, d, *, rule="real", element_bytes=2, O_bytes=None):
    """True if a thread block with these tiles can run on the GPU. Options as in sram_use."""
    options = dict(rule=rule, element_bytes=element_bytes, O_bytes=O_bytes)
    return blocks_per_sm(gpu, Br, Bc, d, **options) > 0


# ---------------------------------------------------------------- for notebooks


def table(gpus=None):
    """One dict a GPU with the unit in each column's name. gpus: names or GPUs; None is all."""
    return [_row(find_gpu(gpu)) for gpu in (GPUS if gpus is None else gpus)]


def _row(gpu):
    return {
        "GPU": gpu.name,
        "tensor TFLOP/s": gpu.tensor_flops / 1e12,
        "fp32 TFLOP/s": gpu.fp32_flops / 1e12,
        "bandwidth GB/s": gpu.bandwidth / 1e9,
        "memory GiB": gpu.memory / GiB,
        "SMs": gpu.sms,
        "shared KiB/SM": gpu.sram_per_sm / KiB,
        "shared KiB/block": gpu.sram_per_block / KiB,
        "L1+shared KiB/SM": gpu.l1_per_sm / KiB,
        "L2 MiB": gpu.l2 / MiB,
        "ridge FLOP/byte": ridge(gpu),
        "fp32 ridge FLOP/byte": ridge(gpu, "fp32"),
    }


def markdown_table(rows):
    """The rows of table() as a Markdown table: text as it is, numbers to one decimal."""
    rows = list(rows)
    if not rows:
        raise ValueError("rows is empty; accepted: one row of table() or more")
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value):
    return value if isinstance(value, str) else f"{round(value, 1):g}"
