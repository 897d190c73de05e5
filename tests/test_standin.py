"""The CPU stand-in: it computes what its kernels say, and finds what it claims to find."""

import math

import numpy as np
import pytest

from attention_lib import standard_attention
from attention_lib.gpu.standin import far, i32, poisoned, run_block, run_grid, skip_barriers
from attention_lib.gpu.standin_rungs import algorithm_1, q_outer


def reverse(t, x, y):
    s = t.shared("s", t.blockDim)
    s[t.threadIdx] = x[t.threadIdx]
    yield
    y[t.threadIdx] = s[t.blockDim - 1 - t.threadIdx]


def numbers(n):
    return np.arange(n, dtype=np.float32)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_right_kernel_is_clean_in_any_order(seed):
    x, y = numbers(8), poisoned(8)
    report = run_block(reverse, 8, x, y, seed=seed)
    assert report.clean and report.barriers == 1 and report.found == []
    assert y.tolist() == x[::-1].tolist()
    assert str(report) == "barriers: 1\nnothing found"


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_missing_barrier_is_a_race_in_any_order(seed):
    x, y = numbers(8), poisoned(8)
    report = run_block(skip_barriers(reverse, lambda k: True), 8, x, y, seed=seed)
    (race,) = report.races
    # Elements 0 to 7 are each written by one thread and read by another, in either order.
    assert (race.what, race.array, race.times) == ("race", "s", 8) and not report.out_of_bounds
    assert report.barriers == 0
    # Each pair of threads (k, 7 - k): the first to run finds poison, the other one a number.
    assert np.isnan(y).sum() == 4 and report.unwritten[0].times == 4
    assert all(math.isnan(a) != math.isnan(b) for a, b in zip(y, y[::-1], strict=True))


def test_a_race_that_gives_the_right_answer_is_found_too():
    def shift(t, x, y):
        s = t.shared("s", t.blockDim)
        s[t.threadIdx] = x[t.threadIdx]
        y[t.threadIdx] = s[max(t.threadIdx - 1, 0)]  # in order, the neighbour was there before

    y = poisoned(4)
    report = run_block(shift, 4, numbers(4), y)
    assert y.tolist() == [0, 0, 1, 2] and report.races[0].times == 3


def test_two_writers_are_a_race_and_two_readers_are_not():
    def write(t, x):
        x[0] = t.threadIdx

    def read(t, x, y):
        y[t.threadIdx] = x[0]

    assert run_block(write, 2, numbers(1)).races[0].index == (0,)
    assert run_block(read, 2, numbers(1), poisoned(2)).clean


def test_a_barrier_ends_a_race_only_within_a_block():
    def add(t, x):
        if t.threadIdx == 0:
            x[0] += 1
        yield
        if t.threadIdx == 1:
            x[0] += 1

    x = np.zeros(1, np.float32)
    assert run_block(add, 2, x).clean and x[0] == 2
    report = run_grid(add, 2, 2, x, seed=0)
    assert {r.what for r in report.races} == {"race of blocks"} and x[0] == 6


@pytest.mark.parametrize("n, guarded", [(10, True), (10, False), (12, False)])
def test_the_tail(n, guarded):
    def double(t, x, y, n):
        i = t.blockIdx * t.blockDim + t.threadIdx
        if i < n or not guarded:
            y[i] = 2 * x[i]

    y = poisoned(n)
    report = run_grid(double, 3, 4, numbers(n), y, n)
    assert y.tolist() == (2 * numbers(n)).tolist()
    beyond = 0 if guarded else 12 - n
    assert [f.times for f in report.out_of_bounds] == ([beyond] * 2 if beyond else [])
    assert report.clean == (beyond == 0)


def test_negative_indices_do_not_wrap_as_in_python():
    def last(t, x, y):
        y[0] = x[-1]

    y = poisoned(1)
    report = run_block(last, 1, numbers(3), y)
    assert report.out_of_bounds[0].array == "x" and np.isnan(y[0])


@pytest.mark.parametrize(
    "index, bad",
    [
        ((1, slice(0, 2)), False),
        ((0, slice(1, 3)), True),
        ((2, 0), True),
        ((1, slice(None)), False),
    ],
)
def test_slices_are_watched(index, bad):
    def read(t, x, y):
        y[0] = x[index].sum()

    report = run_block(read, 1, np.ones((2, 2), np.float32), poisoned(1))
    assert bool(report.out_of_bounds) == bad


def test_slices_race_element_by_element():
    def rows(t, x):
        x[slice(t.threadIdx, t.threadIdx + 2)] = 0

    assert run_block(rows, 2, numbers(4)).races[0].index == (1,)
    with pytest.raises(IndexError, match="axes"):
        run_block(lambda t, x: x[0, 0], 1, numbers(2))
    with pytest.raises(IndexError, match="step"):
        run_block(lambda t, x: x[0:2:2], 1, numbers(2))


def test_32_bits_wrap():
    assert i32(2**31 - 1) == 2**31 - 1 and i32(2**31) == -(2**31) and i32(-(2**31) - 1) == 2**31 - 1
    assert i32(3 * 2**32 + 5) == 5 and i32(np.int64(2**31)) == -(2**31)


def test_a_32_bit_offset_is_out_of_bounds_in_a_large_tensor():
    head, size = 2**20, 4096  # head * size is 2^32

    def first(t, x, y, offset):
        y[t.threadIdx] = x[offset(head * size + t.threadIdx)]

    y = poisoned(4)
    assert run_block(first, 4, far(numbers(4), head * size), y, int).clean
    assert y.tolist() == [0, 1, 2, 3]
    report = run_block(first, 4, far(numbers(4), head * size), y, i32)
    assert report.out_of_bounds[0].times == 4 and np.isnan(y).all()


def test_uneven_barriers():
    def some(t, x):
        if t.threadIdx < 2:
            yield
        x[t.threadIdx] = 0

    def two(t, x):
        if t.threadIdx < 2:
            yield
        else:
            yield
        x[t.threadIdx] = 0

    for kernel in (some, two):
        (found,) = run_block(kernel, 4, numbers(4)).uneven
        assert found.what == "uneven barrier"


def test_helpers_may_have_barriers():
    def load(t, s, x):
        s[t.threadIdx] = x[t.threadIdx]
        yield

    def kernel(t, x, y):
        s = t.shared("s", t.blockDim)
        yield from load(t, s, x)
        y[t.threadIdx] = s[0]

    report = run_block(kernel, 4, numbers(4), poisoned(4), seed=5)
    assert report.clean and report.barriers == 1


def test_the_names_of_a_thread():
    def who(t, y):
        y[t.blockIdx * t.blockDim + t.threadIdx] = t.gridDim

    y = poisoned(6)
    assert run_grid(who, 2, 3, y, seed=4).clean and y.tolist() == [2] * 6


def test_bad_input():
    with pytest.raises(ValueError, match="threads is 0"):
        run_block(reverse, 0)
    with pytest.raises(TypeError, match="kernel must be a function"):
        run_block("reverse", 1)
    with pytest.raises(ValueError, match="one axis"):
        far(np.zeros((2, 2)), 0)

    def two_shapes(t):
        t.shared("s", 2 + t.threadIdx)

    with pytest.raises(ValueError, match="shared 's' has shape"):
        run_block(two_shapes, 2)


def inputs(Nq, Nk, d):
    rng = np.random.default_rng(Nq + Nk)
    Q, K, V = (rng.standard_normal((n, d)).astype(np.float32) for n in (Nq, Nk, Nk))
    return Q, K, V, standard_attention(*(x.astype(np.float64) for x in (Q, K, V)))[0]


@pytest.mark.parametrize("Nq, Nk, d", [(10, 7, 4), (4, 8, 2), (1, 1, 3)])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_rungs_compute_attention(Nq, Nk, d, seed):
    Q, K, V, right = inputs(Nq, Nk, d)
    O, l, m = poisoned(Nq, d), poisoned(Nq), poisoned(Nq)
    report = run_block(algorithm_1, 4, Q, K, V, O, l, m, 3, seed=seed)
    assert report.clean and report.barriers == 2 * math.ceil(Nk / 3)
    assert abs(O - right).max() < 1e-6
    O, L = poisoned(Nq, d), poisoned(Nq)
    report = run_grid(q_outer, math.ceil(Nq / 4), 4, Q, K, V, O, L, 4, 3, seed=seed)
    assert report.clean and report.barriers == 2 * math.ceil(Nk / 3)
    assert abs(O - right).max() < 1e-6
    assert abs(L - (m + np.log(l))).max() < 1e-5


@pytest.mark.parametrize("kernel", [algorithm_1, q_outer])
@pytest.mark.parametrize("left_out", [0, 1])
def test_each_barrier_of_the_rungs_is_needed(kernel, left_out):
    Q, K, V, right = inputs(8, 9, 4)
    O, l, m = poisoned(8, 4), poisoned(8), poisoned(8)
    rest = (l, m, 3) if kernel is algorithm_1 else (l, 8, 3)
    broken = skip_barriers(kernel, lambda k: k % 2 == left_out)
    report = run_block(broken, 8, Q, K, V, O, *rest, seed=0)
    assert {r.array for r in report.races} == {"Kj", "Vj"}
    assert not abs(O - right).max() < 1e-3
