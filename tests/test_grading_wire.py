"""What crosses between a worker and the grader, and what is done about what should not."""

import fractions
import io
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.grading import sandbox, wire

VALUES = [
    None, ..., True, 0, -(10**30), 1.5, math.inf, "b", (1, (2.0, "x")), [1, [2]], {"a": 1, 2: (3,)},
    slice(1, None, 2), fractions.Fraction(1, 3), np.float64(2.5), np.int32(7), np.bool_(True),
]  # fmt: skip
ARRAYS = [
    np.arange(6.0).reshape(2, 3)[:, ::-1], np.ones(3, np.float16), np.zeros((0, 4)),
    np.array([True, False]), np.arange(3, dtype=">i4"), np.array(3.0), np.array([1 + 2j]),
]  # fmt: skip


def there_and_back(value):
    return wire.unpack(wire.read_frame(io.BytesIO(wire.pack({"value": value}))))["value"]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_arrive(value):
    got = there_and_back(value)
    assert got == value and type(got) is type(value)
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_arrays_arrive_as_they_are(array):
    got = there_and_back([array])[0]
    assert np.array_equal(got, array) and got.shape == array.shape
    assert got.dtype == array.dtype.newbyteorder("=") and got.flags.writeable


class Odd:
    def __repr__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    "value",
    [Odd(), object(), {1, 2}, b"bytes", np.array([object()]), np.array(["text"]), print, int],
)
def test_what_has_no_plain_form_arrives_as_its_name(value):
    got = there_and_back(value)
    assert isinstance(got, wire.Opaque) and type(got).__name__ == type(value).__name__
    assert len(repr(got)) <= 200


def test_a_subclass_arrives_as_what_it_stands_for():
    class Str(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    class Float(float):
        pass

    assert type(there_and_back(Str("a"))) is str and there_and_back(Str("a")) != "b"
    assert type(there_and_back(Float(2.0))) is float
    assert type(there_and_back(np.arange(3.0).view(np.recarray))) is np.ndarray


def test_what_is_too_much_is_cut_off():
    deep = value = []
    for _ in range(100):
        value.append([])
        value = value[0]
    assert isinstance(there_and_back(deep), list)
    assert len(there_and_back("x" * 10**6)) == wire.MOST_TEXT
    assert isinstance(there_and_back(10**9000), wire.Opaque)
    many = there_and_back(list(range(wire.MOST_ITEMS + 10)))
    assert isinstance(many[-1], wire.Opaque)


HEADERS = [
    "", "[", "1", "[]", "[1, 2]", "[{}, {}]", '[[], []]', '[{"a": [1]}, []]',
    '[{"a": {"$": "array", "at": 0}}, []]',
    '[{"a": {"$": "array", "at": -1}}, [["<f8", [0]]]]',
    '[{"a": {"$": "array", "at": true}}, [["|O", [1]]]]',
    '[{}, [["|O", [1]]]]', '[{}, [["<f8", [1000000000000]]]]', '[{}, [["<f8", [-1]]]]',
    '[{}, [["<f8", [1.5]]]]', '[{}, [["<f8", [true]]]]', '[{}, [["<f8", 3]]]',
    '[{}, [[["<f8"], [1]]]]',
    '[{}, [["<f8", [1], 3]]]', '[{}, [["S100000", [1]]]]', '[{}, [["<f8", [2]]]]',
    '[{"a": {"$": "tuple"}}, []]', '[{"a": {"$": "tuple", "of": 3}}, []]',
    '[{"a": {"$": "slice", "of": [1]}}, []]', '[{"a": {"$": "fraction", "of": [1, 0]}}, []]',
    '[{"a": {"$": "dict", "of": [[1]]}}, []]', '[{"a": {"$": "nothing of ours"}}, []]',
    '[{"a": {}}, []]',
    '[{"a": ' + '{"$": "list", "of": [' * 500 + "]}" * 500 + "}, []]",
    "[" * 100_000,
    '[{"a": ' + "9" * 10_000 + "}, []]",
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=lambda h: h[:50])
def test_a_frame_that_is_no_message_is_refused(header):
    with pytest.raises(wire.WireError):
        wire.unpack((header.encode(), b"12345678"))


@pytest.mark.parametrize(
    "data",
    [b"x", b"\0" * 11, wire.LENGTHS.pack(2**31, 0), wire.LENGTHS.pack(4, 2**60),
     wire.LENGTHS.pack(10, 0) + b"short"],
)  # fmt: skip
def test_lengths_are_checked_before_memory_is_taken(data):
    with pytest.raises(wire.WireError):
        wire.read_frame(io.BytesIO(data))
    assert wire.read_frame(io.BytesIO(b"")) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["array", "scalar", "tuple", "dict", "slice", "opaque", "<f8", "|b1"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["$", "of", "at", "name", "text", "a"]), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(JSON, JSON, st.binary(max_size=16))
def test_any_json_is_a_message_or_refused(body, about, blobs):
    try:
        message = wire.unpack((json.dumps([{"value": body}, about]).encode(), blobs))
    except wire.WireError:
        return
    assert set(message) == {"value"}


# ---- whether there is a sandbox


def reason(monkeypatch, path):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: path)
    with sandbox.Sandbox() as box:
        assert not box.isolated
        return box.reason


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_without_bubblewrap_there_is_a_reason(monkeypatch, tmp_path):
    assert "bwrap is not installed" in reason(monkeypatch, None)
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_environment", lambda *a: {"PATH": str(tmp_path)})
    assert "Permission denied" in reason(monkeypatch, str(fake))


def test_isolation_can_be_turned_off():
    with sandbox.Sandbox(isolate=False) as box:
        assert not box.isolated and box.reason == "it was turned off"
        kept = {p.name for p in (box.folder / "library" / "attention_lib" / "checks").iterdir()}
        assert "questions" not in kept and "judge.py" in kept
        there = box.folder / "library" / "attention_lib" / "checks" / "exercises"
        assert [p.name for p in there.glob("*.py")] == ["__init__.py"]  # no answer goes along
    assert not box.folder.exists()
