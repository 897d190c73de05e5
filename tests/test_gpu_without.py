"""What of the GPU part holds on any machine: the ladder's data, the recordings, the compiler."""

import json
import re
import sys

import numpy as np
import pytest

from attention_lib import HBM, flash_attention_q_outer, gpu
from attention_lib.backward import flash_backward
from attention_lib.gpu import bench, counters, decoding, ladder, nvrtc, recordings
from attention_lib.traffic import flash_traffic, q_outer_traffic

KERNELS = gpu.kernels()
OF = {  # recording -> the kernels that ran for it
    "bench": [*KERNELS, "backward.cu", "backward_wgmma.cu"],
    "counters": [*KERNELS, "backward.cu", "backward_wgmma.cu", "decode.cu"],
    "sanitizer": recordings.kernels(),
    "decode": ["decode.cu"],
    "train": ["overlap", "backward_wgmma.cu"],
    "nvrtc": KERNELS,
}
MEASURED = [name for name in OF if name != "nvrtc"]  # on a GPU


def test_each_rung_has_its_file_and_its_idea():
    assert len({k.file for k in ladder.LADDER}) == len({k.idea for k in ladder.LADDER})
    assert [int(re.match(r"rung(\d+)_", k.file)[1]) for k in ladder.LADDER] == list(
        range(len(KERNELS))
    )
    for name in KERNELS:
        assert not re.search(r'#include "', ladder.source(name))


@pytest.mark.skipif(gpu.available(), reason="needs a GPU to be absent")
def test_without_a_gpu_one_line_says_what_is_missing_and_what_still_works():
    Q = np.zeros((1, 1, 4, 64), np.float16)
    with pytest.raises(gpu.NoGPU, match=r"no kernel can run.*attention_lib\.tiled") as error:
        gpu.attention(Q, Q, Q)
    assert "\n" not in str(error.value)
    for module in (bench, counters):
        with pytest.raises(SystemExit, match="--recorded"):
            module.main([])


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="kernel is 'fastest'; accepted: 'unfused'"):
        ladder.rung("fastest")


# ---------------------------------------------------------------- compiled without a GPU

needs_nvrtc = pytest.mark.skipif(
    not nvrtc.available(), reason="needs Linux: NVRTC has no package for this system"
)


@needs_nvrtc
@pytest.mark.parametrize(
    "name, architecture", [(k.name, a) for k in ladder.LADDER for a in k.architectures()]
)
def test_it_compiles_without_a_spill_and_as_recorded(name, architecture):
    record = recordings.read("nvrtc")
    cases = [c for c in nvrtc.cases(name) if c[-1] == architecture]
    found = [row for case in cases for row in nvrtc.rows(name, *case)]
    assert len(found) == len(cases) * len(ladder.rung(name).entries) > 0
    for row in found:
        # 64 Ki registers an SM: one block must fit, and the instruction can name 255.
        limit = min(255, 65_536 // ladder.rung(name).threads(row["d"]))
        assert row["spill_bytes"] == 0 and row["registers"] <= limit, row
        assert row["shared"] <= 163 * 1024 or architecture != "sm_80"  # of a block on an A100
    if nvrtc.version() == record["nvrtc"]:
        kept = [r for r in record["rows"] if r["kernel"] == name]
        assert found == [r for r in kept if r["architecture"] == architecture]


@needs_nvrtc
def test_a_kernel_that_does_not_compile_shows_the_compilers_words(monkeypatch):
    monkeypatch.setattr(ladder, "source", lambda name: "int x = no_such_thing;")
    with pytest.raises(RuntimeError, match="no_such_thing"):
        nvrtc.compile("pipeline", 64, "float16", False, "sm_90")


def test_the_shared_memory_of_the_launch_is_the_struct_of_the_kernel():
    for kernel in ladder.LADDER:
        asks = any(kernel.shared(d) for d in kernel.heads_d)
        checked = "<=" if kernel.box else "=="  # on TMA with room for barriers
        says = f"static_assert(sizeof(Shared) {checked} SHARED)" in ladder.source(kernel.name)
        assert asks == says and max(map(kernel.shared, kernel.heads_d)) <= 227 * 1024


def test_the_rows_of_a_block_are_those_of_the_kernel():
    """ladder.py says how many rows of Q a block takes; the source says Br."""
    expected = {"algorithm_1": "Br = 256", "q_outer": "Br = 64", "unfused": "TILE = 64"}
    for name, text in expected.items():
        assert text in ladder.source(name)
        assert ladder.rung(name).rows(64) == int(text.split()[-1])
    for name in ("tensor_cores", "swizzle"):
        assert "WARPS = 4, Br = 16 * WARPS" in ladder.source(name)
        assert ladder.rung(name).rows(64) == 64


# ---------------------------------------------------------------- recordings


@pytest.mark.parametrize("name", OF)
def test_a_recording_is_of_the_kernels_that_are_here(name):
    now = {k: recordings.sha256(k) for k in OF[name]}
    assert recordings.read(name)["kernel_sha256"] == now, (
        f"a kernel has changed since {name}.json was recorded: make record, on a GPU"
    )


@pytest.mark.parametrize("name", MEASURED)
def test_a_recording_says_where_it_is_from(name):
    record = recordings.read(name)
    sentence = recordings.said(record)
    for key in ("device", "driver", "cuda", "cupy", "torch", "date", "command"):
        assert record[key] and record[key] in sentence
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])


def test_an_unknown_recording_is_named():
    with pytest.raises(ValueError, match="name is 'speed'; accepted: .*bench"):
        recordings.read("speed")


def test_the_bench_has_every_rung_and_shape():
    rows = recordings.read("bench")["rows"]
    shapes = {(d, N, c) for d in bench.HEADS_D for N in bench.SIZES for c in (False, True)}
    for name in KERNELS:
        mine = [r for r in rows if r["kernel"] == name and r["dtype"] == "float16"]
        assert {(r["d"], r["N"], r["causal"]) for r in mine} == shapes
        assert all(r["pass"] == "forward" and r["tflops"] > 0 and r["flash"] > 0 for r in mine)


def test_the_last_mma_sync_rung_keeps_up_with_the_frameworks_kernel():
    """The claim of the notebook, from the recording: at least 0.90 of it in every shape."""
    rows = [r for r in recordings.read("bench")["rows"] if r["kernel"] == "pipeline"]
    assert len(rows) == 24 and min(r["tflops"] / r["flash"] for r in rows) >= 0.90


def counted(**wanted):
    rows = recordings.read("counters")["rows"]
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def of_rungs():
    return [r for r in counted() if r["kernel"] in KERNELS]


def test_the_predictions_of_the_counters_are_the_closed_forms():
    for r in of_rungs():
        kernel, (N, heads, d) = ladder.rung(r["kernel"]), (r["N"], r["heads"], r["d"])
        assert r["predicted_dram"] == counters.predicted_dram(kernel, N, heads, d)
        assert r["predicted_l2"] == counters.predicted_l2(kernel, N, heads, d)
        Br = kernel.rows(d)
        if kernel.name not in ("unfused", "algorithm_1"):  # L has 4 bytes, the rest 2
            elements = q_outer_traffic(N, d, Br, 64) - N
            assert r["predicted_l2"] == heads * (2 * elements + 4 * N)
    # Algorithm 1 in elements: Q in 16 bits, O, l and m in 32, and a last pass that rounds O.
    N, d = 4096, 64
    loop = flash_traffic(N, d, 256, 32)
    assert loop == 2 * N * d + 128 * (3 * N * d + 4 * N)
    row = counters.predicted_l2(ladder.rung("algorithm_1"), N, 1, d)
    assert row == 2 * 2 * N * d + 128 * (2 * N * d + 4 * (2 * N * d + 4 * N)) + (
        2 * 4 * N * (d + 2) + 2 * N * d + 4 * N
    )


def test_what_unfused_moves_through_dram_is_s_and_p():
    for r in counted(kernel="unfused"):
        N, heads, d = r["N"], r["heads"], r["d"]
        moved = r["dram_read"] + r["dram_write"]
        assert moved == pytest.approx(2 * heads * (4 * N * N + 4 * N * d), rel=0.05)


def test_what_the_fused_rungs_move_into_the_sms_is_the_count_of_their_loop():
    for r in of_rungs():
        if r["kernel"] not in ("unfused", "algorithm_1", "tensor_cores"):
            outputs = r["heads"] * r["N"] * (2 * r["d"] + 4)  # O and L
            assert r["l2_read"] == pytest.approx(r["predicted_l2"] - outputs, rel=0.005)
            assert r["l2_bytes"] == r["l2_read"] + r["l2_write"]
            # A warp that writes O itself writes 16 bytes in a row, half of what L2 takes at a time:
            # counted up to twice. The copy engine writes whole lines.
            assert 0.999 < r["l2_write"] / outputs < (1.002 if r["kernel"] == "overlap" else 2)


def test_what_the_fused_rungs_read_from_dram_is_each_tensor_once():
    for r in of_rungs():
        fused = r["kernel"] not in ("unfused", "algorithm_1")
        if fused and r["N"] == 4096:  # where the L2 holds all; O may still be in it at the end
            assert r["dram_read"] == pytest.approx(3 * 2 * r["heads"] * 4096 * r["d"], rel=0.03)


def test_dram_follows_the_other_account_once_k_and_v_outgrow_l2():
    ratio = {}
    for r in counted(kernel="pipeline", heads=1):
        ratio[r["N"]] = r["dram_read"] / (3 * 2 * r["N"] * r["d"])
    assert ratio[262_144] > ratio[131_072] > ratio[65_536] > 1 and ratio[262_144] > 5


def test_the_bytes_of_the_backward_kernels_are_those_of_the_counted_loop():
    """`prepare` and `keys` are the two launches of flash_backward, whose dQ is added to in HBM."""
    N, d = 512, 64
    rng = np.random.default_rng(0)
    Q, K, V, dO = rng.standard_normal((4, N, d), dtype=np.float32)
    O, L = flash_attention_q_outer(Q, K, V, 64, 64)
    hbm = HBM()
    flash_backward(Q, K, V, O, L, dO, 64, 128, hbm=hbm)
    came, went, row = hbm.reads_by, hbm.writes_by, 4 * N
    made = counters.backward_bytes("backward_mma", N, d)
    # The kernel reads L once to make L2, and stores it; and it clears dQ.
    assert made["prepare"] == (
        2 * (came["O"] + N * d) + row,
        4 * went["D"] + row + 4 * N * d,
    )
    assert made["keys"] == (
        2 * (came["Q"] + came["K"] + came["V"] + came["dO"] - N * d) + 4 * (came["L"] + came["D"]),
        2 * (went["dK"] + went["dV"]) + 4 * went["dQ"],
    )
    assert made["finish"] == (4 * N * d, 2 * N * d)
    # Q outside, as the forward pass: K and V pass once for each block of 128 rows.
    hbm = HBM()
    flash_attention_q_outer(Q, K, V, 128, 64, hbm=hbm)
    passes = hbm.reads_by
    made = counters.backward_bytes("backward_deterministic", N, d)
    assert made["queries"] == (
        2 * (2 * passes["Q"] + passes["K"] + passes["V"]) + 2 * row,
        2 * N * d,
    )
    assert made["keys"][1] == 2 * (went["dK"] + went["dV"])


def test_what_the_backward_kernels_move_is_their_count():
    """In, to the byte or nearly. Out, a store of 16 bytes in a row counts as the 32 that L2 takes:
    dK, dV, and dQ of `queries`; and L2 and D leave as 4 bytes alone. Runs differ by up to 0.3%."""
    for kernel in bench.BACKWARD:
        assert len(counted(kernel=kernel)) == 4
        for r in counted(kernel=kernel):
            N, heads, d = r["N"], r["heads"], r["d"]
            dram, l2 = counters.predicted_backward(kernel, N, heads, d)
            assert (r["predicted_dram"], r["predicted_l2"]) == (dram, l2)
            sums = zip(*counters.backward_bytes(kernel, N, d).values(), strict=True)
            came, went = (heads * sum(x) for x in sums)
            assert came + went == l2
            assert r["l2_read"] == pytest.approx(came, rel=1e-6)
            tensors = 3 if kernel == "backward_deterministic" else 2
            at_most = heads * (tensors * 2 * N * d + 2 * 28 * N)
            assert 0.75 * at_most < r["l2_write"] - went < at_most + 0.01 * went


def test_what_the_backward_kernels_read_from_dram():
    """Each launch each of its tensors once, as long as L2 holds what a head's blocks share."""
    for r in (r for kernel in bench.BACKWARD for r in counted(kernel=kernel)):
        N, heads, d = r["N"], r["heads"], r["d"]
        added = 0 if r["kernel"] == "backward_deterministic" else 4 * N * d
        launches = counters.backward_bytes(r["kernel"], N, d, 1).values()
        once = heads * (sum(came for came, _ in launches) + added)
        if (N, d) == (16_384, 128):
            assert 1.05 < r["dram_read"] / once < 1.35
        else:
            assert r["dram_read"] == pytest.approx(once, rel=0.02)


def test_what_a_decoding_step_moves_is_its_cache_and_its_states():
    reach = tuple(recordings.read("counters")["reach"])
    rows = counted(kernel="decode")
    assert len(rows) == len(counters.STEPS)
    for r in rows:
        shape = r["N"], r["heads"], r["d"], r["kv_heads"]
        dram, l2 = counters.predicted_decode(*shape, reach)
        assert (r["predicted_dram"], r["predicted_l2"]) == (dram, l2)
        small = r["N"] == 4096 and r["kv_heads"] == 1  # 1 or 2 MB: m, l and the code count
        assert r["dram_read"] == pytest.approx(dram, rel=0.03 if small else 0.005)
        assert 1 <= r["l2_bytes"] / l2 < (1.025 if small else 1.005)
        # What blocks of a cluster read from each other is counted where it leaves an SM, and where
        # it enters one.
        rows_of_a_tile = r["heads"] // r["kv_heads"]
        splits, cluster = decoding.cut(r["kv_heads"], r["N"] // 64, rows_of_a_tile, reach)
        exchanged = r["kv_heads"] * splits // cluster * (cluster - 1) * 4 * rows_of_a_tile * r["d"]
        if cluster == 8:
            assert exchanged / l2 > 0.02 and r["l2_bytes"] / (l2 - exchanged) > 1.02


def test_the_checkers_found_nothing_in_any_kernel():
    rows = recordings.read("sanitizer")["rows"]
    assert [r["tool"] for r in rows] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    every = [*KERNELS, "matmul.cu", "backward.cu", "backward_wgmma.cu", "decode.cu"]
    for row in rows:
        assert row["errors"] == 0 and row["kernels"] == every


@pytest.mark.parametrize("module", [bench, counters])
def test_recorded_rows_as_json(module, capsys):
    module.main(["--recorded", "--json"])
    name = module.__name__.rpartition(".")[2]
    assert json.loads(capsys.readouterr().out) == recordings.read(name)["rows"]
    module.main(["--recorded"])
    assert recordings.said(recordings.read(name)) in capsys.readouterr().out


def test_nothing_of_this_imports_cupy_or_torch():
    import subprocess

    code = (
        "import sys; from attention_lib.gpu import bench, counters, nvrtc, recordings, sanitize; "
        "assert not {'cupy', 'torch', 'cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
