"""The counts of the loops equal the closed forms, exactly; the calculators give what they claim."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_lib import (
    HBM,
    OnChipOverflow,
    block_sizes,
    flash_attention,
    flash_attention_q_outer,
    flash_traffic,
    q_outer_traffic,
    standard_traffic,
    traffic,
    unfused_attention,
)
from tests.cases import problems

GiB, MiB = 2**30, 2**20


def mask_elements(loop, p):
    """Elements of the mask that a loop loads, from the tiles it visits: counted by hand."""
    mask, Nq, Nk = p.options["mask"], p.Q.shape[0], p.K.shape[0]
    if mask is None:
        return 0
    if loop is unfused_attention:
        row_tiles = [(r, min(r + p.Br, Nq)) for r in range(0, Nq, p.Br)]
        return sum((b - a if mask.shape[0] > 1 else 1) * mask.shape[1] for a, b in row_tiles)
    total = 0
    for r in range(0, Nq, p.Br):
        for c in range(0, Nk, p.Bc):
            last = min(r + p.Br, Nq) - 1
            shift = Nk - Nq if p.options["align"] == "lower-right" else 0
            if p.options["causal"] and c > last + shift:
                continue
            rows = min(p.Br, Nq - r) if mask.shape[0] > 1 else 1
            cols = min(p.Bc, Nk - c) if mask.shape[1] > 1 else 1
            total += rows * cols
    return total


@given(p=problems())
@settings(max_examples=500, deadline=None)
def test_counts_equal_closed_forms(p):
    Nq, d = p.Q.shape
    options = {k: v for k, v in p.options.items() if k != "mask"} | {"Nk": p.K.shape[0]}
    runs = (
        (flash_attention, (p.Br, p.Bc), flash_traffic(Nq, d, p.Br, p.Bc, **options)),
        (flash_attention_q_outer, (p.Br, p.Bc), q_outer_traffic(Nq, d, p.Br, p.Bc, **options)),
        (unfused_attention, (p.Br,), standard_traffic(Nq, d, Nk=p.K.shape[0])),
    )
    for loop, blocks, closed_form in runs:
        hbm = HBM()
        loop(p.Q, p.K, p.V, *blocks, **p.options, hbm=hbm)
        counted = hbm.reads + hbm.writes - hbm.reads_by["mask"]
        assert counted == closed_form
        assert hbm.reads_by["mask"] == mask_elements(loop, p)


@given(p=problems(masks=False))
@settings(max_examples=200, deadline=None)
def test_matmul_flops_are_those_of_the_visited_tiles(p):
    Nq, d, Nk = *p.Q.shape, p.K.shape[0]
    shift = Nk - Nq if p.options["align"] == "lower-right" else 0
    scores = sum(
        min(p.Br, Nq - r) * min(p.Bc, Nk - c)
        for r in range(0, Nq, p.Br)
        for c in range(0, Nk, p.Bc)
        if not (p.options["causal"] and c > min(r + p.Br, Nq) - 1 + shift)
    )
    for loop in (flash_attention, flash_attention_q_outer):
        hbm = HBM()
        loop(p.Q, p.K, p.V, p.Br, p.Bc, **p.options, hbm=hbm)
        assert hbm.matmul_flops == 4 * d * scores
    hbm = HBM()
    unfused_attention(p.Q, p.K, p.V, p.Br, **p.options, hbm=hbm)
    assert hbm.matmul_flops == 4 * d * Nq * Nk  # it does not skip


def test_heads_add_up():
    rng = np.random.default_rng(0)
    Q = rng.standard_normal((2, 6, 20, 4))
    K, V = rng.standard_normal((2, 2, 2, 20, 4))
    hbm = HBM()
    flash_attention(Q, K, V, 8, 8, hbm=hbm)
    assert hbm.reads + hbm.writes == 2 * 6 * flash_traffic(20, 4, 8, 8)


def test_a_mask_row_that_heads_share_is_loaded_as_one_row():
    Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 3, 20, 4))
    hbm = HBM()
    flash_attention(Q, K, V, 8, 8, mask=np.ones((1, 20), bool), hbm=hbm)
    assert hbm.reads_by["mask"] == 2 * 3 * 3 * 20  # batch, heads, Q blocks, keys


def test_a_new_kernel_starts_with_an_empty_chip():
    x, small = np.zeros((64, 16)), np.zeros((8, 16))
    hbm = HBM()
    unfused_attention(x, x, x, 8, hbm=hbm)
    # The fullest moment: all of K, a block of Q and its row of scores.
    assert hbm.peak_tiles == {"K": 64 * 16, "Q": 8 * 16, "S": 8 * 64}
    assert hbm.on_chip == {"V": 64 * 16, "P": 8 * 64, "O": 8 * 16}
    for loop in (flash_attention, flash_attention_q_outer):
        loop(small, small, small, 4, 4, hbm=hbm)
        assert set(hbm.on_chip) == {"K", "V", "Q", "O", "S", "l", "m"}
        assert sum(hbm.on_chip.values()) == traffic.tile_elements(4, 4, 16)


# The course's worked numbers (elements), each also derivable by hand from 2Nd + Tc(3Nd + 4N),
# 2Nd + N + 2Nd*Tr and 4Nd + 4N^2 with M = 50,000, d = 64, Br = 64, Bc = 196.
WORKED = [
    # N, standard, Algorithm 1, swapped (64, 196), swapped (196, 64), swapped (128, 128)
    (512, 1_179_648, 366_592, 590_336, 262_656, 328_192),
    (1024, 4_456_448, 1_335_296, 2_229_248, 918_528, 1_180_672),
    (4096, 68_157_440, 17_383_424, 34_082_816, 11_538_432, 17_305_600),
    (8192, 270_532_608, 68_485_120, 135_274_496, 45_096_960, 68_165_632),
]


@pytest.mark.parametrize("N, standard, flash, same, mirrored, square", WORKED)
def test_worked_numbers(N, standard, flash, same, mirrored, square):
    assert block_sizes(50_000, 64) == (64, 196)
    assert standard_traffic(N, 64) == standard == 4 * N * 64 + 4 * N * N
    assert flash_traffic(N, 64, 64, 196) == flash
    assert q_outer_traffic(N, 64, 64, 196) == same
    assert q_outer_traffic(N, 64, 196, 64) == mirrored
    assert q_outer_traffic(N, 64, 128, 128) == square


def test_worked_causal_numbers():
    assert flash_traffic(4096, 64, 64, 196, causal=True) == 9_417_984
    assert q_outer_traffic(4096, 64, 64, 196, causal=True) == 18_308_096
    assert q_outer_traffic(4096, 64, 196, 64, causal=True) == 6_410_240
    N, d, B = 4096, 64, 128  # B | N: the sums have closed ends
    assert q_outer_traffic(N, d, B, B, True) == 2 * N * d + N + N * d * (N // B + 1)
    assert flash_traffic(N, d, B, B, True) == 2 * N * d + (3 * d + 4) * N * (N // B + 1) // 2


def test_break_even_of_algorithm_1():
    def moves(M):
        return flash_traffic(4096, 64, *block_sizes(M, 64))

    assert moves(12_289) == 67_960_832 <= standard_traffic(4096, 64) < moves(12_288) == 69_566_464


# ------------------------------------------------------------------ the counted memory


@given(p=problems(masks=False))
@settings(max_examples=200, deadline=None)
def test_peak_on_chip(p):
    Nq, d, Nk = *p.Q.shape, p.K.shape[0]
    if not Nq or not Nk or p.options["causal"]:
        return
    Br, Bc = min(p.Br, Nq), min(p.Bc, Nk)
    for loop in (flash_attention, flash_attention_q_outer):
        hbm = HBM()
        loop(p.Q, p.K, p.V, p.Br, p.Bc, hbm=hbm)
        assert hbm.peak_on_chip == traffic.tile_elements(Br, Bc, d)
        assert hbm.peak_tiles["S"] == Br * Bc


def test_budget_says_by_how_much():
    x = np.zeros((200, 64))
    fits = HBM(budget=45_952)
    flash_attention(x, x, x, 64, 196, hbm=fits)
    assert fits.peak_on_chip == 45_952
    with pytest.raises(OnChipOverflow, match=r"45,952 elements.*budget is 45,951: 1 too many"):
        flash_attention(x, x, x, 64, 196, hbm=HBM(budget=45_951))


def test_nothing_computes_on_hbm():
    A = HBM().tensor("A", np.ones((4, 4)))
    ones = np.ones(4)
    uses = (
        *(lambda: np.exp(A), lambda: A[0], lambda: A @ ones, lambda: ones @ A, lambda: A.T),
        *(lambda: A * 2, lambda: 2 * A, lambda: A + A, lambda: 1 - A, lambda: A / 2, lambda: -A),
        *(lambda: A**2, lambda: sum(A), lambda: A @ A),
    )
    for use in uses:
        with pytest.raises(TypeError, match="A is in HBM: load a tile"):
            use()


def test_load_copies_and_store_counts():
    hbm, array = HBM(), np.zeros((4, 3))
    A = hbm.tensor("A", array)
    tile = A.load(slice(0, 2))
    tile += 1
    assert array.sum() == 0 and (hbm.reads, hbm.writes) == (6, 0)
    A.store(tile, slice(2, 4))
    assert array.sum() == 6 and (hbm.reads, hbm.writes) == (6, 6)
    with pytest.raises(ValueError, match=r"tile for A has shape \(2, 3\).*\(1, 3\)"):
        A.store(tile, slice(0, 1))
    assert hbm.reads_by == {"A": 6} and hbm.writes_by == {"A": 6}


# ------------------------------------------------------------------ the calculators


def test_memory_table_of_the_article():
    d, H = 128, 32
    for N, standard, flash in [
        (512, 32.0, 16.1),
        (1024, 96.0, 32.1),
        (2048, 320.0, 64.2),
        (4096, 1152.0, 128.5),
        (8192, 4352.0, 257.0),
        (16384, 16896.0, 514.0),
        (32768, 66560.0, 1028.0),
    ]:
        s, f = (
            traffic.attention_memory(N, d, H, method=method, rule="article")["total"]
            for method in ("standard", "flash")
        )
        assert round(s / MiB, 1) == standard and abs(f / MiB - flash) <= 0.051
        assert s / f == pytest.approx((1 + N / (4 * d)) / (1 + 1 / (2 * d)), rel=1e-12)


def test_memory_corrected():
    parts = traffic.attention_memory(4096, 128, 32, method="flash")
    assert parts == {"QKVO": 128 * MiB, "l, m": MiB, "total": 129 * MiB}
    parts = traffic.attention_memory(4096, 128, 32, method="standard")
    assert parts["S"] == parts["P"] == GiB and parts["total"] == 2 * GiB + 128 * MiB


def test_largest_context():
    def N(method, rule):
        return traffic.largest_context(20 * GiB, 128, 32, method=method, rule=rule)

    assert (N("standard", "article"), N("flash", "article")) == (16_384, 262_144)
    assert (N("standard", "one matrix"), N("flash", "one matrix")) == (18_317, 655_360)
    for method in ("standard", "flash"):
        best = N(method, "corrected")
        need = [
            traffic.attention_memory(n, 128, 32, method=method)["total"] for n in (best, best + 1)
        ]
        assert need[0] <= 20 * GiB < need[1]
    assert traffic.largest_context(1, 128, 32, method="flash") == 0


@pytest.mark.parametrize("N", [512, 1024, 2048, 4096, 8192, 16384])
def test_layer_traffic_of_the_article(N):
    def bytes_moved(method, rule, Br=128):
        return traffic.layer_traffic(N, 128, 32, method=method, Br=Br, rule=rule)

    standard = bytes_moved("standard", "corrected")
    assert standard / bytes_moved("flash", "article") == 1 + N / 128
    again = "article, K and V again"
    assert standard / bytes_moved("q-outer", again) == pytest.approx(2.0, rel=1e-12)
    if N == 4096:
        assert standard / bytes_moved("q-outer", again, Br=4096) == pytest.approx(33.0)
        assert bytes_moved("q-outer", again) == 2.0625 * GiB
        assert bytes_moved("q-outer", "corrected") == bytes_moved("q-outer", again) + 32 * N * 2
        assert bytes_moved("flash", "corrected") == 32 * 2 * flash_traffic(N, 128, 128, 128)


def test_the_calculators_use_each_argument():
    N, d = 1000, 64  # not a multiple of the blocks; float32; Br and Bc different
    q = traffic.layer_traffic(N, d, 3, method="q-outer", Br=192, Bc=64, element_bytes=4)
    assert q == 3 * 4 * q_outer_traffic(N, d, 192, 64)
    f = traffic.layer_traffic(N, d, 3, method="flash", Br=192, Bc=64, element_bytes=4)
    assert f == 3 * 4 * flash_traffic(N, d, 192, 64)
    again = "article, K and V again"
    assert traffic.layer_traffic(N, d, 1, method="flash", Br=192, rule=again) == 2 * (
        2 * N * d + 2 * N * d * 6
    )
    half, full = (traffic.arithmetic_intensity(N, d, 64, element_bytes=b) for b in (4, 2))
    assert half == full / 2
    for method in ("standard", "flash"):
        exact = traffic.attention_memory(4096, d, 2, method=method)["total"]
        assert traffic.largest_context(exact, d, 2, method=method) == 4096
    small = traffic.largest_context(2 * 1024 * 1024 * 2, d, 2, method="standard", rule="article")
    assert small == 0  # the article's list starts at 2,048


def test_long_sequences_take_no_time():
    N = 10**9
    assert flash_traffic(N, 64, 64, 196) == 2 * N * 64 + math.ceil(N / 196) * (3 * 64 + 4) * N
    assert q_outer_traffic(N, 64, 64, 196) == 2 * N * 64 + N + 2 * N * 64 * math.ceil(N / 64)


def test_arithmetic_intensity():
    assert traffic.arithmetic_intensity(4096, 128, 128, rule="article") == 128
    whole = traffic.arithmetic_intensity(4096, 128, 128)
    assert whole == pytest.approx(4 * 4096**2 * 128 / (2 * 34_607_104))
    assert math.floor(whole) == 124


@given(st.integers(1, 10**6), st.integers(1, 512))
def test_block_sizes(M, d):
    Br, Bc = block_sizes(M, d)
    assert Bc == math.ceil(M / (4 * d)) and Br == min(Bc, d)
