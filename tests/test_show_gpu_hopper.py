"""Notebooks 19 and 20: the stand-ins against independent calculations, and show_diff."""

import itertools
import re

import numpy as np
import pytest

from attention_lib import gpu
from attention_lib.checks.questions import nb19, nb20
from attention_lib.gpu import fragments, ladder, nvrtc, recordings
from attention_lib.show import gpu as show
from attention_lib.show import gpu_hopper as stand
from attention_lib.show.gpu_hopper import Barrier, Ring, Wait, Work, simulate

# ---------------------------------------------------------------- show_diff


def test_show_diff_turns_one_file_into_the_other(capsys):
    show.show_diff("wgmma", "specialised", lines=10_000)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "rung6_wgmma.cu (-) and rung7_specialised.cu (+)"
    old, new = (ladder._read(f).splitlines() for f in ("rung6_wgmma.cu", "rung7_specialised.cu"))
    gone, come = ([x[1:] for x in lines if x[:1] == sign] for sign in "-+")
    assert sorted(set(old) - set(new)) == sorted(set(gone) - set(new))
    assert sorted(set(new) - set(old)) == sorted(set(come) - set(old))
    assert [x for x in old if x in gone] and lines[0] == "-" + old[0]


def test_show_diff_begins_at_the_marker(capsys):
    show.show_diff("wgmma", "specialised", "give_registers", lines=2)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "+        give_registers<40>();",
        "+        if (threadIdx.x > 0 || tiles == 0) return;",
    ]
    with pytest.raises(ValueError, match="marker is 'nowhere'"):
        show.show_diff("wgmma", "specialised", "nowhere")
    with pytest.raises(ValueError, match="kernel is 'rung9'"):
        show.show_diff("wgmma", "rung9")


# ---------------------------------------------------------------- TMA and wgmma


def test_land_is_rung_4s_swizzle_and_free_of_conflicts():
    places = {(r, c): stand.land(r, c) for r in range(128) for c in range(64)}
    assert sorted(places.values()) == list(range(0, 128 * 128, 2))
    assert all(a == fragments.swizzled(r, c, 64) for (r, c), a in places.items())
    for top, c in itertools.product(range(0, 128, 8), range(0, 64, 8)):
        assert fragments.passes([places[top + r, c] for r in range(8)]) == 1


def test_a_box_by_element():
    tensor = np.arange(1, 11 * 70 + 1, dtype=np.float16).reshape(11, 70)
    memory = np.full(1024, 0xFFFF, np.uint16)
    assert stand.tma_load(memory, 1024, tensor, 8, 64, rows=8) == 8 * 128
    assert (memory[:512] == 0xFFFF).all()  # nothing before the box
    for r, c in np.ndindex(8, 64):
        value = memory[(1024 + stand.land(r, c)) // 2 :][:1].view(np.float16)[0]
        inside = 8 + r < 11 and 64 + c < 70
        assert value == (tensor[8 + r, 64 + c] if inside else 0)


def test_the_descriptor_is_the_headers_and_its_fields_do_not_meet():
    text = ladder._read("hopper.cuh")
    body = re.search(r"u64 matrix\(u32 address, int lead = 0\) \{\s*return (.*?);", text, re.S)[1]
    python = re.sub(r"\(u64\)|ull", "", " ".join(body.split()))
    for address, lead in ((0, 0), (16_416, 0), (2**18 - 16, 16_384)):
        want = eval(python, {"address": address, "lead": lead})
        assert stand.matrix(address, lead) == want < 2**64
    used = [b for low, n in stand.FIELDS.values() for b in range(low, low + n)]
    assert len(used) == len(set(used)) and max(used) == 63


@pytest.mark.parametrize("at", [0, 2048])
def test_fetch_reads_the_columns_that_it_names(at):
    tensor = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float16)
    memory = np.zeros(2 * 128 * 64, np.uint16)
    stand.tma_load(memory, at, tensor, 0, 0, 128)
    for x in range(4):
        got = stand.fetch(memory, stand.matrix(at + 32 * x), 128)
        assert np.array_equal(got, tensor[:, 16 * x : 16 * x + 16])


@pytest.mark.parametrize("M, N, K", [(128, 128, 64), (150, 130, 72), (1, 1, 8)])
def test_matmul_tile(M, N, K):
    rng = np.random.default_rng(M)
    A, B = (rng.standard_normal((n, K)).astype(np.float16) for n in (M, N))
    true = np.zeros((256, 256))
    true[:M, :N] = A.astype(np.float64) @ B.astype(np.float64).T
    for row0, col0 in itertools.product((0, 128), repeat=2):
        block = stand.matmul_tile(A, B, row0, col0)
        assert np.allclose(block, true[row0 : row0 + 128, col0 : col0 + 128], atol=1e-4)


def test_the_constants_are_those_of_matmul():
    text = ladder._read("matmul.cu")
    assert "TILE_M = 128, TILE_N = 128, TILE_K = 64" in text


def test_wgmma_reads_are_what_the_counter_saw():
    """Operands once a warpgroup, and the shuffles of two row maxima: 2 x 2 a warp and tile."""
    rows = recordings.read("counters")["rows"]
    rows = [r for r in rows if r["kernel"] in ("wgmma", "specialised")]
    assert len(rows) == 8
    for r in rows:
        warp_tiles = r["heads"] * (r["N"] // 128) ** 2 * 8
        counted = r["shared_bytes"] / 128 / warp_tiles
        assert counted == pytest.approx(stand.operand_passes(r["d"]) / 4 + 4, rel=0.01)


def test_live_only_where_hopper_is(monkeypatch):
    monkeypatch.setattr(gpu, "available", lambda: False)
    assert stand.on_hopper(len) is None
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(stand.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "choose", lambda d: ("pipeline", "an A100"))
    assert stand.on_hopper(len) is None
    monkeypatch.setattr(gpu, "choose", lambda d: ("overlap", "an H200"))
    assert stand.on_hopper(len) is len


# ---------------------------------------------------------------- barriers and the ring


def test_a_phase_needs_arrivals_and_bytes():
    b = Barrier("b", 2)
    assert b.ended(1) and not b.ended(0)
    b.arrive(expecting=100)
    b.arrive()
    assert not b.ended(0)  # all have arrived, the bytes have not
    b.count(60)
    b.count(40)
    assert b.ended(0) and not b.ended(1) and b.phase == 1
    b.arrive()
    b.arrive()
    assert b.phase == 2
    c = Barrier("c", 1)
    c.arrive(expecting=1)
    with pytest.raises(RuntimeError, match="more than 1 arrivals"):
        c.arrive()


def loader(ring, times, flip=1, look=True):
    for j, time in enumerate(times):
        if look:
            yield Wait(ring.empty[j % ring.stages], j // ring.stages % 2 ^ flip)
        yield from ring.copy(j % ring.stages, j, time)


def reader(who, ring, times, parity=lambda j, stages: j // stages % 2):
    for j, time in enumerate(times):
        yield Wait(ring.full[j % ring.stages], parity(j, ring.stages))
        yield from ring.read(who, j % ring.stages, j, time)
        ring.empty[j % ring.stages].arrive()


def finish(loads, computes, stages):
    """The same by recurrence: a load waits for the slowest reader of the tile `stages` before."""
    there, done = [], [[] for _ in computes]
    for j, load in enumerate(loads):
        free = max((d[j - stages] for d in done), default=0) if j >= stages else 0
        there.append(max(there[-1] if there else 0, free) + load)
        for d, times in zip(done, computes, strict=True):
            d.append(max(there[-1], d[-1] if d else 0) + times[j])
    return max(d[-1] for d in done)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_the_ring_is_right_at_any_speed(stages, readers):
    rng = np.random.default_rng(10 * stages + readers)
    loads = rng.integers(1, 9, 40).tolist()
    computes = rng.integers(1, 9, (readers, 40)).tolist()
    ring = Ring(stages, readers)
    warps = {f"r{n}": reader(f"r{n}", ring, t) for n, t in enumerate(computes)}
    run = simulate({"loader": loader(ring, loads)} | warps)
    assert not run.stuck and not ring.wrong
    assert run.end == finish(loads, computes, stages)
    assert run.busy("loader") == sum(loads)


def test_each_forgotten_thing_shows():
    def go(load, compute, readers=1, arrivals=None, **how):
        ring = Ring(2, arrivals or readers)
        mine = {k: how.pop(k) for k in ("parity",) if k in how}
        warps = {f"r{n}": reader(f"r{n}", ring, [compute + n] * 8, **mine) for n in range(readers)}
        return simulate({"loader": loader(ring, [load] * 8, **how)} | warps), ring

    assert go(1, 5, look=False)[1].wrong  # the loader forgets `empty`
    assert not go(5, 1, look=False)[1].wrong  # and nobody sees it if loading is slow
    run, ring = go(2, 3, flip=0)  # parity instead of parity ^ 1
    assert run.end == 0 and set(run.stuck) == {"loader", "r0"} and not ring.wrong
    run, _ = go(2, 3, parity=lambda j, stages: 0)
    assert run.stuck["r0"] == "full[0], parity 0"
    assert go(1, 4, readers=2, arrivals=1)[1].wrong  # `empty` opens at the first reader
    run, ring = go(2, 3, readers=2)
    assert not run.stuck and not ring.wrong


def test_a_unit_is_used_by_one_at_a_time():
    def warp(n):
        for _ in range(5):
            yield Work(n, "x", "tensor cores")
            yield Work(1, "y")

    run = simulate({"a": warp(2), "b": warp(3)})
    used = sorted((begin, end) for _, what, begin, end in run.log if what == "x")
    assert len(used) == 10 and all(a[1] <= b[0] for a, b in itertools.pairwise(used))


@pytest.mark.parametrize("p, s", [(4, 3), (3, 3), (2, 7)])
def test_two_readers_by_hand(p, s):
    tiles = 20
    assert stand.two_readers(p, s, tiles, True).end == tiles * (2 * p + s)
    # apart: the tensor cores are never idle, or each reader is alone for most of its softmax
    apart = stand.two_readers(p, s, tiles, False).end
    assert apart == (2 * p * tiles + s if s <= p else tiles * (p + s) + p)


# ---------------------------------------------------------------- registers, questions


def quoted(id):
    return " ".join(next(q for q in nb20.QUESTIONS if q.id == id).text.split())


def test_the_budget_is_what_the_kernel_says():
    text = ladder._read("rung7_specialised.cu")
    assert f"give_registers<{nb20.LOADER}>" in text and "take_registers<232>" in text
    (at_launch,) = nb20.launched()
    assert at_launch == nb20.LAUNCH == 65_536 // 384 // 8 * 8
    assert nb20._reader() == 232 and 3 * at_launch == nb20.LOADER + 2 * 232


def test_the_numbers_that_questions_quote_are_so():
    rows = [r for r in recordings.read("nvrtc")["rows"] if r["kernel"] == "wgmma"]
    used = {r["registers"] for r in rows if r["d"] == 128 and not r["causal"]}
    assert used == {196} and "used 196" in quoted("p20-6")
    for stages, waited in ((1, 48), (2, 2), (4, 2)):
        assert finish([2] * 24, [[3] * 24], stages) - 24 * 3 == waited
    assert "waits 48" in quoted("p20-3") and "it waits 2" in quoted("p20-3")
    bench = stand.pick(recordings.read("bench")["rows"], 16_384)
    for d in (64, 128):  # p19-4 and p20-7 say about how much
        old, six, seven = (bench[k, d]["tflops"] for k in ("pipeline", "wgmma", "specialised"))
        assert 5 <= round(100 * (seven / six - 1)) <= 11
        assert (1.4 < six / old < 1.6) if d == 128 else (1 < six / old < 1.1)


@pytest.mark.skipif(not nvrtc.available(), reason="needs Linux: NVRTC has no package here")
def test_rung_7_would_do_without_setmaxnreg_and_rung_8_would_not():
    registers, spilled = stand.without_setmaxnreg("specialised", 128)
    assert registers <= 168 and spilled == 0
    assert stand.without_setmaxnreg("overlap", 128)[1] > 100


def test_the_task_of_notebook_19():
    def right(x):
        return {
            name: (x >> low & 2**bits - 1) * (1 if name == "swizzle" else 16)
            for name, (low, bits) in stand.FIELDS.items()
        }

    def units(x):
        return {name: x >> low & 2**bits - 1 for name, (low, bits) in stand.FIELDS.items()}

    assert nb19.check_decode(right).status == "passed"
    assert nb19.check_decode(units).misconception == "not-in-bytes"
    assert nb19.check_decode(lambda x: ...).status == "not attempted"
    assert nb19.check_decode(lambda x: right(x) | {"stride": x >> 32}).status == "not yet"
    assert "raised" in nb19.check_decode(lambda: None).message


# ---------------------------------------------------------------- the time budget


@pytest.mark.parametrize("causal", [False, True])
def test_a_budget_by_hand(causal):
    """989.4 TFLOP/s, 132 SMs, 1.98 GHz; 16 heads of 16,384 tokens with d = 128."""
    row = stand.pick(recordings.read("bench")["rows"], 16_384, causal)["wgmma", 128]
    part, half = stand.budget(row), 2 if causal else 1
    flops = 4 * 16_384**2 * 128 * 16 / half
    assert part["products, at the peak"] == pytest.approx(1e3 * flops / 989.4e12)
    assert part["exp"] == pytest.approx(1e3 * 16 * 16_384**2 / half / (132 * 16 * 1.98e9))
    assert sum(part.values()) == pytest.approx(flops / row["tflops"] / 1e9)
