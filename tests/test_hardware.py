"""attention_lib.hardware: the figures against the chips' own arithmetic, the calculators against
the article's tables, and every refusal with the argument's name in it."""

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_lib import hardware as hw
from attention_lib.hardware import GPUS, KiB, MiB
from attention_lib.traffic import arithmetic_intensity

FIGURES = [f.name for f in dataclasses.fields(hw.GPU) if f.name not in ("name", "sources")]
names = st.sampled_from(sorted(GPUS))
units = st.sampled_from(["tensor", "fp32"])
intensities = st.floats(0, 1e6)


# ------------------------------------------------------------------ the figures


def test_the_promised_rows_are_there():
    assert list(GPUS) == ["A100-40", "A100-80", "H100", "H200", "B200", "RTX4090"]


@pytest.mark.parametrize("key", GPUS)
def test_every_figure_has_a_source_that_says_how_far_it_was_followed(key):
    gpu = GPUS[key]
    assert set(gpu.sources) == set(FIGURES)
    for figure, source in gpu.sources.items():
        assert re.search(r"\(read\)|\(quoted, read|not re-read", source), (figure, source)


# A peak is units x clock. FLOP per clock and SM, and the boost clock in Hz, from the architecture:
# cores per SM x 2 (a fused multiply-add), and the tensor cores' rate.
CLOCKS = [
    # key, fp32 cores per SM, clock of those, tensor FLOP per clock and SM, clock of those
    ("A100-40", 64, 1410e6, 4 * 512, 1410e6),
    ("A100-80", 64, 1410e6, 4 * 512, 1410e6),
    ("H100", 128, 1980e6, 4 * 1024, 1830e6),
    ("H200", 128, 1980e6, 4 * 1024, 1830e6),
    ("RTX4090", 128, 2520e6, 4 * 128, 2520e6),
]


@pytest.mark.parametrize("key, cores, clock, tensor, tensor_clock", CLOCKS)
def test_peaks_are_units_times_clock(key, cores, clock, tensor, tensor_clock):
    gpu = GPUS[key]
    assert gpu.fp32_flops == pytest.approx(gpu.sms * cores * 2 * clock, rel=2e-3)
    assert gpu.tensor_flops == pytest.approx(gpu.sms * tensor * tensor_clock, rel=2e-3)


def test_b200_tensor_figure_is_dense():
    # 8192 FLOP per clock and SM, twice Hopper's: a sparse figure would need a clock of 3.7 GHz.
    clock = GPUS["B200"].tensor_flops / (GPUS["B200"].sms * 8192)
    assert 1.7e9 < clock < 2.0e9


@pytest.mark.parametrize(
    "key, bits, transfers", [("A100-40", 5120, 2 * 1215e6), ("RTX4090", 384, 21e9)]
)
def test_bandwidth_is_bus_width_times_transfer_rate(key, bits, transfers):
    assert GPUS[key].bandwidth == pytest.approx(bits / 8 * transfers, rel=1e-3)


@pytest.mark.parametrize("key", GPUS)
def test_a_block_gets_all_of_the_sm_but_the_reserved_kib(key):
    assert GPUS[key].sram_per_sm - GPUS[key].sram_per_block == 1024


def test_on_chip_sizes():
    per_block = {key: gpu.sram_per_block / 1024 for key, gpu in GPUS.items()}
    assert per_block == {
        "A100-40": 163,
        "A100-80": 163,
        "H100": 227,
        "H200": 227,
        "B200": 227,
        "RTX4090": 99,
    }
    assert [GPUS[k].l1_per_sm / 1024 for k in ("A100-80", "H100", "RTX4090")] == [192, 256, 128]


def test_rows_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPUS["H100"].bandwidth = 1.0
    assert len(set(GPUS.values())) == 6  # hashable, and all different


# ------------------------------------------------------------------ roofline


@pytest.mark.parametrize(
    "key, unit, expected, digits",
    [
        ("A100-80", "tensor", 153.02, 2),
        ("A100-40", "tensor", 200.6, 1),
        ("H200", "tensor", 206, 0),
        ("H100", "tensor", 295, 0),
        ("A100-80", "fp32", 9.6, 1),
    ],
)
def test_ridge(key, unit, expected, digits):
    assert round(hw.ridge(key, unit), digits) == expected


def test_softmax_on_both_units():
    # In fp16, 5 FLOP (max, subtract, exp, add, divide) for one element read and one written.
    intensity = 5 / (2 + 2)
    share = {
        unit: hw.roofline("A100-80", intensity, unit) / hw.peak("A100-80", unit)
        for unit in ("tensor", "fp32")
    }
    assert share["tensor"] == pytest.approx(0.00817, abs=5e-6)
    assert share["fp32"] == pytest.approx(0.13, abs=1e-3)


def test_time_bound_of_standard_attention_errata_16():
    N, d, heads = 4096, 128, 32
    flops = heads * 2 * (2 * N * N * d)  # QK^T and PV
    moved = heads * 2 * (4 * N * d + 4 * N * N)  # fp16: Q K V O, and S and P written and read
    bound = hw.time_bound("A100-80", flops, moved)
    assert round(1e3 * bound.compute, 2) == 0.88
    assert round(1e3 * bound.memory, 2) == 2.17
    assert bound.limit == "memory"
    assert bound.memory / bound.compute == pytest.approx(2.4, abs=0.1)  # 2.4x is all one can win


@given(names, units, intensities)
def test_roofline_is_the_lower_of_the_two_roofs(name, unit, intensity):
    gpu = GPUS[name]
    roofs = {gpu.bandwidth * intensity, hw.peak(gpu, unit)}
    assert hw.roofline(name, intensity, unit) == min(roofs)


@given(names, units, intensities, intensities)
def test_roofline_rises_and_then_stays(name, unit, a, b):
    low, high = sorted([a, b])
    assert hw.roofline(name, low, unit) <= hw.roofline(name, high, unit)
    past = hw.ridge(name, unit) * (1 + 1e-12) + high
    assert hw.roofline(name, past, unit) == hw.peak(name, unit)


@given(names, units, st.floats(1, 1e18), st.floats(1, 1e15))
def test_time_bound_agrees_with_the_roofline(name, unit, flops, moved):
    bound = hw.time_bound(name, flops, moved, unit)
    seconds = max(bound.compute, bound.memory)
    assert getattr(bound, bound.limit) == seconds
    assert flops / seconds == pytest.approx(hw.roofline(name, flops / moved, unit))


def test_names_and_gpus_are_interchangeable():
    assert hw.ridge(GPUS["H100"]) == hw.ridge("H100")
    assert hw.find_gpu("H100") is hw.find_gpu(GPUS["H100"]) is GPUS["H100"]


# ------------------------------------------------------------------ your GPU


def test_your_gpu_marks_what_is_yours_and_leaves_the_original():
    mine = hw.your_gpu("H200", l2=50 * MiB, bandwidth=4.0e12)
    assert (mine.l2, mine.bandwidth, mine.sms) == (50 * MiB, 4.0e12, 132)
    assert {key for key, source in mine.sources.items() if source == "yours"} == {"l2", "bandwidth"}
    assert mine.sources["sms"] == GPUS["H200"].sources["sms"]
    assert GPUS["H200"].l2 == 60 * MiB and "yours" not in GPUS["H200"].sources.values()
    assert "H200" in mine.name and hw.your_gpu(name="lab").name == "lab"
    assert hw.your_gpu(mine, sms=100).sources["l2"] == "yours"


def test_your_gpu_works_everywhere_a_name_does():
    slow = hw.your_gpu("A100-80", bandwidth=2039e9 / 2)
    assert hw.ridge(slow) == pytest.approx(2 * 153.02, abs=0.01)
    assert hw.table([slow])[0]["bandwidth GB/s"] == 1019.5
    assert not hw.fits(
        hw.your_gpu("A100-80", sram_per_block=63 * KiB), 128, 64, 128, rule="registers"
    )


# ------------------------------------------------------------------ tiles on chip


@pytest.mark.parametrize(
    "block, kib", [(16, 16.1), (32, 32.2), (64, 64.5), (128, 129.0), (256, 258.0), (512, 516.0)]
)
def test_article_rule_gives_its_table(block, kib):
    use = hw.sram_use(block, block, 128, rule="article")
    assert round(use["total"] / 1024, 1) == kib
    assert use["S"] == 0 and use["K"] + use["V"] == 2 * use["Q"] == 2 * use["O"]
    assert arithmetic_intensity(4096, 128, block, rule="article") == block


@pytest.mark.parametrize(
    "options, kib",
    [
        (dict(rule="article"), 129),
        (dict(rule="real", O_bytes=2), 193),  # + S: 128 * 128 * 4
        (dict(rule="real"), 225),  # + O in fp32 instead of fp16: 128 * 128 * 2
        (dict(), 225),
    ],
)
def test_what_the_article_forgets_errata_8(options, kib):
    assert hw.sram_use(128, 128, 128, **options)["total"] == kib * 1024


def test_flashattention_2_tile_on_a100():
    use = hw.sram_use(128, 64, 128, rule="registers")
    assert use == dict(Q=32 * KiB, K=16 * KiB, V=16 * KiB, O=0, S=0, stats=0, total=64 * KiB)
    assert hw.fits("A100-80", 128, 64, 128, rule="registers")
    assert hw.blocks_per_sm("A100-80", 128, 64, 128, rule="registers") == 2


@given(*[st.integers(1, 300)] * 3, st.sampled_from([1, 2, 4]))
def test_tiles_add_up_to_arrays_of_that_shape(Br, Bc, d, size):
    kinds = {1: np.int8, 2: np.float16, 4: np.float32}
    of = {"Q": (Br, d), "K": (Bc, d), "V": (Bc, d)}
    use = hw.sram_use(Br, Bc, d, rule="real", element_bytes=size)
    for tile, shape in of.items():
        assert use[tile] == np.empty(shape, kinds[size]).nbytes
    for tile, shape in {"O": (Br, d), "S": (Br, Bc), "stats": (2, Br)}.items():
        assert use[tile] == np.empty(shape, np.float32).nbytes
    assert use.pop("total") == sum(use.values())


@pytest.mark.parametrize("kib, power, integer", [(96, 64, 95), (192, 128, 190), (384, 256, 381)])
def test_optimal_block_of_source_c(kib, power, integer):
    assert hw.optimal_block(kib * 1024, 128, rule="article") == power
    assert hw.optimal_block(kib * 1024, 128, rule="article", step=1) == integer
    # Solved by hand: a block of B rows costs B * (8d + 8) bytes.
    assert integer == kib * 1024 // (8 * 128 + 8)


@pytest.mark.parametrize("key, block", [("A100-80", 96), ("H100", 128), ("RTX4090", 64)])
def test_optimal_block_when_s_and_the_accumulator_count(key, block):
    assert hw.optimal_block(GPUS[key].sram_per_block, 128) == block


@given(
    st.integers(100, 2**20),
    st.integers(1, 256),
    st.sampled_from(hw.RULES),
    st.sampled_from([None, 1, 7, 16]),
)
def test_optimal_block_fits_and_the_next_does_not(sram, d, rule, step):
    def total(block):
        return hw.sram_use(block, block, d, rule=rule)["total"]

    powers = rule == "article" and step is None
    first = step or (1 if powers else 16)
    if total(first) > sram:
        with pytest.raises(ValueError, match="sram_bytes"):
            hw.optimal_block(sram, d, rule=rule, step=step)
        return
    block = hw.optimal_block(sram, d, rule=rule, step=step)
    following = 2 * block if powers else block + first
    assert total(block) <= sram < total(following)
    assert math.log2(block).is_integer() if powers else block % first == 0


def test_a_block_too_large_cannot_launch_and_129_kib_leaves_room_for_one():
    assert hw.blocks_per_sm("A100-80", 128, 128, 128, rule="article") == 1  # errata 9
    assert hw.blocks_per_sm("A100-80", 256, 256, 128, rule="article") == 0  # errata 10
    # Two blocks of 82 KiB would be 164 KiB, all there is, but each takes one more KiB for CUDA.
    assert hw.sram_use(128, 100, 128, rule="registers")["total"] == 82 * KiB
    assert hw.blocks_per_sm("A100-80", 128, 100, 128, rule="registers") == 1
    assert not hw.fits("A100-80", 128, 128, 128)  # 225 KiB do not fit in 163
    assert hw.fits("H100", 128, 128, 128)  # they do in 227


@given(names, *[st.integers(1, 300)] * 3, st.sampled_from(hw.RULES))
def test_fits_is_the_limit_of_one_block(name, Br, Bc, d, rule):
    total = hw.sram_use(Br, Bc, d, rule=rule)["total"]
    assert hw.fits(name, Br, Bc, d, rule=rule) == (total <= GPUS[name].sram_per_block)


# ------------------------------------------------------------------ tables


def test_table_has_one_row_a_gpu_with_units_in_the_names():
    rows = hw.table()
    assert [row["GPU"] for row in rows] == [gpu.name for gpu in GPUS.values()]
    a100 = hw.table(["A100-80"])[0]
    assert (a100["bandwidth GB/s"], a100["memory GiB"], a100["shared KiB/block"]) == (2039, 80, 163)
    assert round(a100["ridge FLOP/byte"], 2) == 153.02


def test_markdown_table_is_rectangular():
    lines = hw.markdown_table(hw.table()).splitlines()
    assert len(lines) == 2 + len(GPUS)
    assert len({line.count("|") for line in lines}) == 1
    assert "2250" in lines[-2] and "e+" not in "".join(lines)


# ------------------------------------------------------------------ refusals

BAD = [
    (lambda: hw.ridge("A100"), ValueError, "gpu.*'A100'.*A100-40.*RTX4090"),
    (lambda: hw.ridge(100), TypeError, "gpu.*A100-40.*100"),
    (lambda: hw.peak("H100", "fp64"), ValueError, "unit.*'fp64'.*tensor.*fp32"),
    (lambda: hw.peak("H100", ["fp32"]), ValueError, "unit.*.*tensor.*fp32"),
    (lambda: hw.roofline("H100", -1), ValueError, "intensity.*-1"),
    (lambda: hw.roofline("H100", math.nan), ValueError, "intensity.*nan"),
    (lambda: hw.roofline("H100", "1"), TypeError, "intensity.*'1'"),
    (lambda: hw.time_bound("H100", -1.0, 1), ValueError, "flops.*-1.0"),
    (lambda: hw.time_bound("H100", 1, math.inf), ValueError, "moved.*inf"),
    (lambda: hw.time_bound("H100", 1, None), TypeError, "moved.*None"),
    (lambda: hw.your_gpu("A100-90"), ValueError, "A100-90.*accepted.*A100-80"),
    (lambda: hw.your_gpu(bandwith=1e12), ValueError, "bandwith=.*bandwidth"),
    (lambda: hw.your_gpu(sources={}), ValueError, "sources"),
    (lambda: hw.your_gpu(bandwidth=0), ValueError, "bandwidth.*0.*above 0"),
    (lambda: hw.your_gpu(bandwidth="2 TB/s"), TypeError, "bandwidth.*'2 TB/s'"),
    (lambda: hw.your_gpu(l2=True), TypeError, "l2.*True"),
    (lambda: hw.your_gpu(sms=10.5), TypeError, "sms.*10.5.*"),
    (lambda: hw.your_gpu(sram_per_block=200 * KiB), ValueError, "sram_per_block.*204800"),
    (lambda: hw.GPU("x", *[1] * 9, sources={}), ValueError, "sources.*bandwidth"),
    (lambda: hw.sram_use(0, 64, 64), ValueError, "Br.*0"),
    (lambda: hw.sram_use(64, 64.0, 64), TypeError, "Bc.*64.0"),
    (lambda: hw.sram_use(64, 64, True), TypeError, "d.*True"),
    (lambda: hw.sram_use(64, 64, 64, element_bytes=0), ValueError, "element_bytes.*0"),
    (lambda: hw.sram_use(64, 64, 64, O_bytes="4"), TypeError, "O_bytes.*'4'"),
    (lambda: hw.sram_use(64, 64, 64, rule="paper"), ValueError, "rule.*'paper'.*article.*real"),
    (lambda: hw.optimal_block(0, 64), ValueError, "sram_bytes.*0"),
    (lambda: hw.optimal_block(1000, 64), ValueError, "sram_bytes.*1000.*block of 16 at d.*64"),
    (lambda: hw.optimal_block(99 * KiB, 64, step=0), ValueError, "step.*0"),
    (lambda: hw.optimal_block(99 * KiB, -1), ValueError, "d.*-1"),
    (lambda: hw.fits("H100", 64, -64, 64), ValueError, "Bc.*-64"),
    (lambda: hw.markdown_table([]), ValueError, "rows is empty"),
]




@pytest.mark.parametrize("call, kind, message", BAD)
def test_refusals_name_the_argument(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_numpy_scalars_are_numbers():
    assert hw.sram_use(np.int64(128), np.int64(64), 128, rule="registers")["total"] == 64 * KiB
    assert hw.roofline("H100", np.float32(2.0)) == 6.7e12
