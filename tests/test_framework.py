"""The framework call: the recording is fresh and right, and where torch is, it says the same."""

import re
import subprocess

import numpy as np
import pytest

from attention_lib import doctor, standard_attention
from attention_lib import framework as fw

needs_torch = pytest.mark.skipif(not fw.installed(), reason="needs torch 2.5 or newer")
RECORDED = fw.recorded()


@pytest.fixture
def fresh():
    """results() runs once; a test that changes what it finds must not leave that behind."""
    fw.results.cache_clear()
    yield
    fw.results.cache_clear()


@pytest.fixture
def from_recording(monkeypatch, fresh):
    monkeypatch.setattr(fw, "installed", lambda: False)


# ---------------------------------------------------------------- the recording


def test_recording_belongs_to_these_cases():
    assert RECORDED["definitions"] == fw.definitions(), f"stale: run {fw.COMMAND}"
    assert set(RECORDED["outputs"]) == {*fw.CASES, fw.MODULE}


def test_recording_says_where_it_is_from():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", RECORDED["date"])
    assert RECORDED["command"] == fw.COMMAND
    assert set(RECORDED["versions"]) == {"python", "numpy", "torch"}
    assert all(RECORDED["device"].values())


def ours(name):
    """What this library gives for a case, written without torch and without framework.py."""
    Q, K, V, mask = fw.inputs(name)
    if "scale" in name:
        Q = Q * np.float32(np.sqrt(Q.shape[-1]))
    if name == "mask and causal":
        mask = mask & np.tril(np.ones((4, 6), bool))
        return standard_attention(Q, K, V, mask=mask)[0]
    causal = name.startswith("causal")
    return standard_attention(Q, K, V, mask=mask, causal=causal, align="upper-left")[0]


def check_outputs():
    refused = {"grouped heads, not enabled", "mask and causal, math"}
    for name in fw.CASES:
        said = fw.torch_says(name)
        if name in refused:
            assert isinstance(said, str) and said.startswith("RuntimeError: "), name
        elif name == "dropout":
            assert said.shape == ours(name).shape and not fw.same(said, ours(name))
        else:
            assert said.dtype == ours(name).dtype
            assert fw.same(said, ours(name)), name
    assert fw.same(fw.torch_says(fw.MODULE)[None], ours("padding")[:, :1])
    assert not fw.same(fw.torch_says(fw.MODULE)[None], ours("padding, the wrong way round")[:, :1])


def check_kernels():
    for name, kernel in fw.results()["kernels"].items():
        if fw.CASES[name].layout:  # what `backends` leaves out
            assert kernel == "attention_math"
            continue
        options = fw.CASES[name].options
        dropout, causal = options.get("dropout_p", 0), options.get("is_causal", False)
        chosen = fw.choice(device="cpu", dropout=dropout, is_causal=causal)
        ran = {"flash": "flash_attention_for_cpu", "math": "attention_math"}
        assert kernel == ran[chosen] == fw.kernel(name), name


def check_memory():
    for N in fw.PROFILED:
        matrix, O = 4 * N * N, 4 * N * 64
        assert 2 * matrix < fw.peak_bytes(N, "MATH") < 3 * matrix
        assert O < fw.peak_bytes(N, "FLASH_ATTENTION") < O + 2**20
    first, _, last = fw.PROFILED
    assert fw.peak_bytes(last, "MATH") > 15 * fw.peak_bytes(first, "MATH")
    assert fw.peak_bytes(last, "FLASH_ATTENTION") < 4 * fw.peak_bytes(first, "FLASH_ATTENTION")


def test_recording_equals_this_library(from_recording):
    check_outputs()


def test_recorded_kernels_are_the_expected(from_recording):
    check_kernels()


def test_recorded_memory_tells_them_apart(from_recording):
    check_memory()


def test_empty_rows_and_finite_fill(from_recording):
    for name in ("empty row", "empty row, math"):
        assert not fw.torch_says(name)[:, :, 2].any()
    V = fw.inputs("finite fill")[2]
    assert fw.same(fw.torch_says("finite fill")[:, :, 2], V.mean(axis=2))


def test_origin_without_torch(from_recording):
    assert fw.origin().startswith(f"recorded on {RECORDED['date']}, torch ")
    assert fw.COMMAND in fw.origin()


def test_a_torch_that_does_not_start_is_no_reason_to_stop(monkeypatch, fresh):
    def fails(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr="line\nImportError: libgomp.so.1\n")

    monkeypatch.setattr(fw, "installed", lambda: True)
    monkeypatch.setattr(fw.subprocess, "run", fails)
    assert fw.origin().startswith("recorded on ")
    assert fw.origin().endswith("torch is installed but did not run: ImportError: libgomp.so.1")
    assert fw.torch_says("plain").shape == (1, 2, 4, 8)


def test_the_doctor_asks_for_the_same_torch():
    name, [(sign, version)] = doctor.parse(doctor.TORCH)
    assert (name, sign, version) == ("torch", ">=", fw.OLDEST_TORCH)


@pytest.mark.parametrize(
    ("version", "enough"), [("2.4.1", False), ("2.5.0+cpu", True), ("2.13.0", True), ("3.0", True)]
)
def test_old_versions_count_as_missing(monkeypatch, version, enough):
    monkeypatch.setattr(fw.metadata, "version", lambda name: version)
    assert fw.installed() is enough


def test_the_command_refuses_what_it_does_not_know():
    with pytest.raises(SystemExit, match="accepted: nothing, or --record; got --recrod"):
        fw.main(["--recrod"])


# ---------------------------------------------------------------- torch itself


@needs_torch
def test_live_equals_the_library_and_the_recording(fresh):
    assert fw.origin().startswith("live, torch ")
    check_outputs()
    check_kernels()
    check_memory()
    live = {name: fw.torch_says(name) for name in fw.CASES}
    for name, answer in live.items():
        then = RECORDED["outputs"][name]
        if name == "dropout":  # random, and not the same in every version
            continue
        if isinstance(then, str):
            assert answer.split(":")[0] == then.split(":")[0]
        else:
            assert fw.same(answer, np.array(then, answer.dtype)), name


# ---------------------------------------------------------------- helpers of the notebook


def test_call_text():
    assert fw.call_text("causal") == "scaled_dot_product_attention(Q, K, V, is_causal=True)"
    assert fw.call_text("padding") == "scaled_dot_product_attention(Q, K, V, attn_mask=mask)"


def test_same_knows_nan_shape_and_type():
    x = np.ones((2, 3))
    assert fw.same(x, x + 1e-13) and not fw.same(x, x + 1e-11)
    assert fw.same(x, (x + 1e-6).astype("f4")) and not fw.same(x, (x + 1e-4).astype("f4"))
    assert not fw.same(x, x * np.nan) and not fw.same(x * np.nan, x * np.nan)
    assert not fw.same(x, x[:1]) and not fw.same(x, None) and not fw.same("RuntimeError: ", x)


def right(Q, K, V, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if scale is not None:
        Q = Q * np.float32(scale * np.sqrt(Q.shape[-1]))
    align = "upper-left"
    return standard_attention(Q, K, V, mask=attn_mask, causal=is_causal, align=align)[0]


def test_agreement(from_recording, capsys):
    assert all(fw.agreement(right).values())
    assert not any(fw.agreement(lambda *qkv, **options: None).values())
    assert capsys.readouterr().out == ""

    def wrong_corner(Q, K, V, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        if scale is not None:
            raise KeyError("scale")
        return standard_attention(Q, K, V, mask=attn_mask, causal=is_causal)[0]

    failed = {name for name, agrees in fw.agreement(wrong_corner).items() if not agrees}
    assert failed == {"causal", "scale"}
    assert capsys.readouterr().out == "scale: KeyError: 'scale'\n"


# ---------------------------------------------------------------- which implementation


@pytest.mark.parametrize(
    ("call", "default", "hopper"),
    [
        ("float16", "flash", "cudnn"),
        ("bfloat16, is_causal, Nq = Nk", "flash", "cudnn"),
        ("float16, dropout_p=0.1", "flash", "flash"),
        ("float16, attn_mask", "efficient", "cudnn"),
        ("float16, is_causal, Nq != Nk", "efficient", "cudnn"),
        ("float16, d = 320", "efficient", "efficient"),
        ("float32", "efficient", "efficient"),
        ("float64", "math", "math"),
    ],
)
def test_choice_on_a_gpu(call, default, hopper):
    assert fw.choice(**fw.CALLS[call]) == default
    assert fw.choice(fw.ORDER_HOPPER, **fw.CALLS[call]) == hopper


def test_every_call_has_a_row():
    assert len(fw.CALLS) == 8
    assert fw.choice(dropout=0.125) == "flash"
    assert fw.choice(fw.ORDER_HOPPER, dropout=0.125) == "cudnn"
    assert fw.choice(d=66) == "flash" and fw.choice(d=66, mask=True) == "math"
    assert set(fw.backends()) == set(fw.ORDER) == set(fw.ORDER_HOPPER)
