"""The counters and the scheduler of notebooks 09 and 11."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_lib import flash_attention, flash_attention_q_outer, unfused_attention
from attention_lib.memory import HBM
from attention_lib.show.accounts import CachedHBM
from attention_lib.show.loop_order import Metered, makespan, schedule


def test_metered_counts_elementwise_work_and_nothing_else():
    ops = Counter()
    x = Metered.of(np.ones((3, 4)), ops)
    y = np.exp(x) * 2 - x.sum(axis=1, keepdims=True)
    y @ np.ones((4, 2))
    y += 1
    assert ops == {"exp": 12, "multiply": 12, "subtract": 12, "add": 12}
    assert np.allclose(np.asarray(y), 2 * np.e - 3)


def test_metered_does_not_count_what_is_done_with_plain_arrays():
    ops = Counter()
    x = Metered.of(np.ones(5), ops)
    np.asarray(x) * 2
    assert ops == {}
    x / np.arange(1, 6)
    assert ops == {"divide": 5}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_schedule_runs_each_block_once_and_none_at_the_same_time(lengths, sms):
    plan = schedule(lengths, sms)
    assert [length for _, _, length in plan] == lengths
    for sm in range(sms):
        mine = sorted((start, start + length) for s, start, length in plan if s == sm)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:], strict=False))
    work = sum(lengths)
    # No idle SM while blocks wait: the bound of list scheduling.
    assert max(work / sms, max(lengths)) <= makespan(plan) <= work / sms + max(lengths)


def test_equal_blocks_run_in_waves():
    assert makespan(schedule([6] * 12, 8)) == 12
    assert makespan(schedule([64] * 1024, 108)) == 10 * 64  # ten waves: 1024 / 108 = 9.5


LOOPS = [(flash_attention, (5, 7)), (flash_attention_q_outer, (5, 7)), (unfused_attention, (5,))]


@given(st.integers(1, 40), st.sampled_from(LOOPS), st.integers(0, 900))
@settings(max_examples=150, deadline=None)
def test_a_cache_never_adds_traffic_and_changes_no_count(N, loop, cache):
    run, blocks = loop
    Q, K, V = np.random.default_rng(N).standard_normal((3, N, 4))
    plain, cached = HBM(), CachedHBM(cache)
    same = run(Q, K, V, *blocks, hbm=plain)[0] == run(Q, K, V, *blocks, hbm=cached)[0]
    assert same.all()
    assert (cached.reads_by, cached.writes_by) == (plain.reads_by, plain.writes_by)
    asked = plain.reads + plain.writes
    assert 3 * N * 4 <= cached.flush() <= asked
    if cache == 0:
        assert cached.dram_reads == plain.reads and cached.dram_writes == plain.writes


def test_a_cache_that_holds_all_leaves_each_array_once():
    Q, K, V = np.random.default_rng(0).standard_normal((3, 40, 4))
    big = CachedHBM(10**6)
    flash_attention_q_outer(Q, K, V, 5, 7, hbm=big)
    assert big.flush() == 4 * 40 * 4 + 40
    assert big.dram_reads == 3 * 40 * 4
    big = CachedHBM(10**6)
    flash_attention(Q, K, V, 5, 7, hbm=big)
    # O, l and m are read before they are written, and written once, at the end.
    assert (big.flush(), big.dram_writes) == (3 * 160 + 2 * (160 + 80), 160 + 80)


def test_the_cache_drops_what_was_used_longest_ago():
    hbm = CachedHBM(4)
    A = hbm.tensor("A", np.zeros((6, 2)))
    for row in (0, 1, 0, 2, 0, 1):  # two rows fit
        A.load(slice(row, row + 1))
    assert hbm.dram_reads == 2 * 4  # 0, 1, 2, and 1 again: 0 was always in use
    A.store(np.ones((1, 2)), slice(0, 1))
    assert hbm.dram_writes == 0
    A.load(slice(3, 4)), A.load(slice(4, 5))
    assert hbm.dram_writes == 2


def test_cache_size_is_checked():
    with pytest.raises(ValueError, match="cache is -1; accepted: 0 or more"):
        CachedHBM(-1)
