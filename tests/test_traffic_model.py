"""One traffic model: every closed form is a case of it, exactly, for all shapes."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_lib import (
    flash_backward_traffic,
    flash_traffic,
    q_outer_traffic,
    standard_backward_traffic,
    standard_traffic,
)
from attention_lib.recordings import recording
from attention_lib.traffic import ACCOUNTS, RULES, general_traffic, layer_traffic

SIZES = st.integers(1, 300)
shapes = st.tuples(SIZES, SIZES, st.integers(1, 70), st.integers(1, 80), st.integers(1, 80))


def model(account, N, d, Br, Bc, Nk=None):
    Tr, Tc = math.ceil(N / Br), math.ceil((N if Nk is None else Nk) / Bc)
    return general_traffic(N, d, Nk=Nk, **ACCOUNTS[account](Tr, Tc))


@given(shapes)
@settings(max_examples=500, deadline=None)
def test_forward_forms_are_cases(shape):
    N, Nk, d, Br, Bc = shape
    args = (N, d, Br, Bc)
    assert model("standard", *args, Nk) == standard_traffic(N, d, Nk=Nk)
    assert model("Algorithm 1", *args, Nk) == flash_traffic(*args, Nk=Nk)
    assert model("Q outside", *args, Nk) == q_outer_traffic(*args, Nk=Nk)
    layer = dict(method="q-outer", Br=Br, Bc=Bc, element_bytes=1)
    again = layer_traffic(N, d, 1, **layer, rule="article, K and V again")
    assert model("K and V again", *args) == again
    once = layer_traffic(N, d, 1, **layer, rule=RULES[1])
    assert model("each once", *args) == once == 4 * N * d
    assert all(isinstance(model(a, *args, Nk), int) for a in ACCOUNTS)


@given(shapes, st.sampled_from(("lower-right", "upper-left")))
@settings(max_examples=500, deadline=None)
def test_causal_forms_are_cases_with_mean_passes(shape, align):
    N, Nk, d, Br, Bc = shape
    offset = Nk - N if align == "lower-right" else 0
    # Counted tile by tile: rows that pass for some K/V block, keys that pass for some Q block.
    rows = keys = 0
    for r in range(0, N, Br):
        for c in range(0, Nk, Bc):
            if c <= min(r + Br, N) - 1 + offset:
                rows += min(Br, N - r)
                keys += min(Bc, Nk - c)
    options = dict(causal=True, Nk=Nk, align=align)
    flash = general_traffic(N, d, Nk=Nk, R_Q=Fraction(rows, N), c_Q=3, c_s=4)
    assert flash == flash_traffic(N, d, Br, Bc, **options)
    q_outer = general_traffic(N, d, Nk=Nk, c_s=1, R_KV=Fraction(keys, Nk))
    assert q_outer == q_outer_traffic(N, d, Br, Bc, **options)
    assert isinstance(flash, int) and isinstance(q_outer, int)


@given(shapes)
@settings(max_examples=300, deadline=None)
def test_backward_forms_are_cases(shape):
    N, Nk, d, Br, Bc = shape
    Tc = math.ceil(Nk / Bc)
    # K, V in and dK, dV out are two passes over two arrays of Nk x d.
    standard = general_traffic(N, d, Nk=Nk, c_Q=4, R_KV=2, sigma=7)
    assert standard == standard_backward_traffic(N, d, Nk=Nk)
    four = general_traffic(N, d, Nk=Nk, R_Q=Tc, c_Q=5, c_s=2, R_KV=2)
    assert four == flash_backward_traffic(N, d, Br, Bc, Nk=Nk, variant="Algorithm 4")
    before_the_loop = general_traffic(N, d, Nk=Nk, c_s=1, R_KV=0)  # O, dO in, D out
    loop = general_traffic(N, d, Nk=Nk, R_Q=Tc, c_Q=4, c_s=2, R_KV=2)
    assert before_the_loop + loop == flash_backward_traffic(N, d, Br, Bc, Nk=Nk)


# N = 4096, elements of one head at d = 64 and d = 128: derived by hand, account by account.
@pytest.mark.parametrize(
    "account, blocks, elements",
    [
        ("standard", [(1, 1)] * 2, (68_157_440, 69_206_016)),
        ("Algorithm 1", [(64, 196), (98, 98)], (17_383_424, 67_796_992)),
        ("Algorithm 1", [(64, 384), (128, 192)], (9_355_264, 36_012_032)),
        ("Q outside", [(64, 64)] * 2, (34_082_816, 68_161_536)),
        ("Q outside", [(128, 128)] * 2, (17_305_600, 34_607_104)),
        ("K and V again", [(64, 64)] * 2, (34_078_720, 68_157_440)),
        ("K and V again", [(128, 128)] * 2, (17_301_504, 34_603_008)),
        ("K and V again", [(1024, 1024)] * 2, (2_621_440, 5_242_880)),  # 8 blocks of 128 share
        ("each once", [(1, 1)] * 2, (1_048_576, 2_097_152)),
    ],
)
def test_worked_rows(account, blocks, elements):
    for d, (Br, Bc), expected in zip((64, 128), blocks, elements, strict=True):
        assert model(account, 4096, d, Br, Bc) == expected


def test_the_counters_decide_which_account_is_counted_where():
    record = recording("h200_sdpa_counters")
    H, d = record["heads"], record["d"]
    for row in record["rows"]:
        if row["step"] != "fused":
            continue
        N = row["N"]
        size = {a: 2 * H * model(a, N, d, 128, 128) for a in ACCOUNTS}

        dram = row["dram_read"] + row["dram_write"]
        off = {a: abs(math.log(dram / moved)) for a, moved in size.items()}
        assert min(off, key=off.get) == "each once"
        # Algorithm 1 is another loop; at square tiles it would ask L2 for half as much again.
        assert 1.4 < size["Algorithm 1"] / size["Q outside"] < 1.6
        assert 1.0 < row["l2_bytes"] / size["Q outside"] < 1.15
        read = 2 * H * 3 * N * d  # Q, K, V
        assert row["dram_read"] == pytest.approx(read, rel=0.01)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(R_Q=1.5), "R_Q must be an int or a Fraction, got 1.5"),
        (dict(R_KV=True), "R_KV must be an int or a Fraction, got True"),
        (dict(sigma=-1), "sigma is -1; accepted: 0 or more"),
        (dict(Nk=-1), "Nk is -1; accepted: 0 or more"),
    ],
)
def test_refusals(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        general_traffic(8, 4, **wrong)


def test_a_mean_that_is_not_whole_stays_exact():
    assert general_traffic(1, 1, R_Q=Fraction(1, 3), c_Q=1, R_KV=0) == Fraction(1, 3)
