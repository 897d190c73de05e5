"""Recordings are real and current, and the physics in them adds up."""

import hashlib
from pathlib import Path

import pytest

from attention_lib import q_outer_traffic
from attention_lib.hardware import GPUS
from attention_lib.recordings import recording, said

ROOT = Path(__file__).parent.parent
GPU_RECORDINGS = ["h200_device", "h200_sdpa_counters", "h200_sdpa_calls"]


@pytest.mark.parametrize("name", GPU_RECORDINGS)
def test_its_script_has_not_changed(name):
    script = (ROOT / "tools/record_gpu.py").read_bytes().replace(b"\r\n", b"\n")
    assert recording(name)["script_sha256"] == hashlib.sha256(script).hexdigest(), (
        "tools/record_gpu.py changed: record again, on a GPU"
    )


@pytest.mark.parametrize("name", GPU_RECORDINGS)
def test_it_says_where_it_is_from(name):
    sentence = said(recording(name))
    for word in ("H200", "2026-", "driver", "torch", "python tools/record_gpu.py"):
        assert word in sentence


def test_unknown_name():
    with pytest.raises(ValueError, match="name is 'nothing'; accepted: .*h200_device"):
        recording("nothing")


def test_the_unfused_steps_move_S_and_P_and_the_fused_call_does_not():
    record = recording("h200_sdpa_counters")
    heads, d = record["heads"], record["d"]
    for N in (4096, 16384):
        rows = {r["step"]: r for r in record["rows"] if r["N"] == N}
        dram = {step: r["dram_read"] + r["dram_write"] for step, r in rows.items()}
        matrix = 2 * heads * N * N  # bytes of S, or of P, in float16
        unfused = dram["S = Q K^T"] + dram["softmax"] + dram["O = P V"]
        assert 0.92 * 4 * matrix < unfused < 1.03 * 4 * matrix  # a little stays in L2 at 4096
        once = 4 * heads * N * d * 2
        assert dram["fused"] < 1.02 * once < matrix
        loop = heads * q_outer_traffic(N, d, 128, 128) * 2
        assert 1.0 < rows["fused"]["l2_bytes"] / loop < 1.15


def test_the_device_agrees_with_the_table():
    record, gpu = recording("h200_device"), GPUS["H200"]
    a = record["attributes"]
    assert a["MultiProcessorCount"] == gpu.sms
    assert a["MaxSharedMemoryPerMultiprocessor"] == gpu.sram_per_sm
    assert a["MaxSharedMemoryPerBlockOptin"] == gpu.sram_per_block
    assert a["L2CacheSize"] == gpu.l2
    # Two transfers a clock over the bus: the bandwidth of the datasheet.
    assert 2 * a["MemoryClockRate"] * 1e3 * a["GlobalMemoryBusWidth"] / 8 == pytest.approx(
        gpu.bandwidth, rel=0.01
    )
    for size, outcome in record["launch_with_shared_memory"].items():
        fits = int(size.split()[0]) * 1024 <= gpu.sram_per_block
        assert (outcome == "ran") == fits


def test_only_the_math_implementation_takes_memory_that_grows_with_n_squared():
    record = recording("h200_sdpa_calls")
    matrix = 2 * 16 * 4096 * 4096 * 2 / 2**20  # MiB of S, or of P, in float16
    output = 2 * 16 * 4096 * 64 * 2 / 2**20
    for name, taken in record["memory_MiB"].items():
        assert taken >= output
        assert (taken > 2 * matrix) == (name == "math"), name
    assert record["picked"]["float64"] == "math"
