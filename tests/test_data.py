"""The Q, K and V of a trained model that the library carries: what the notebooks rely on."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest

from attention_lib import data

FOLDER = Path(data.__file__).parent
FILE = FOLDER / "minilm_qkv.npz"
TEXT = FOLDER.parents[1] / "tools" / "extract_qkv_text.txt"
PLACES = [(layer, head) for layer in (0, 2, 4) for head in (0, 2, 8, 11)]


def weights(layer, head):
    Q, K, _ = data.real_qkv(layer, head, np.float64)
    S = Q @ K.T / math.sqrt(32)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return S, P / P.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("layer", "head"), PLACES)
def test_every_head_is_there_finite_and_its_own(layer, head):
    Q, K, V = data.real_qkv(layer, head)
    for X in (Q, K, V):
        assert X.shape == (512, 32) and X.dtype == np.float32 and X.flags.c_contiguous
        assert np.isfinite(X).all() and X.std() > 0.1
    assert not np.array_equal(Q, K) and not np.array_equal(K, V)
    others = [place for place in PLACES if place != (layer, head)]
    assert not any(np.array_equal(Q, data.real_qkv(*place)[0]) for place in others)


@pytest.mark.parametrize(("layer", "head"), PLACES)
def test_scores_are_not_degenerate(layer, head):
    S, P = weights(layer, head)
    assert S.std() > 0.5 and np.linalg.matrix_rank(S) == 32
    # Neither uniform nor all on one key for all rows, and the rows differ.
    assert P.max() > 0.1
    assert P.mean(axis=0).max() < 0.5
    assert np.abs(P - P.mean(axis=0)).sum(axis=1).mean() > 0.1


def test_heads_do_what_the_readme_says():
    assert np.diagonal(weights(0, 2)[1], -1).mean() > 0.7  # the token before
    assert np.diagonal(weights(2, 8)[1], 1).mean() > 0.3  # the next
    assert np.diagonal(weights(2, 11)[1], -1).mean() > 0.4  # the one before
    for head in (2, 8):
        assert (weights(4, head)[1].argmax(axis=1) == 0).mean() > 0.9  # [CLS]
    assert 70 < np.abs(weights(0, 2)[0]).max() < 80


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, "float32"])
def test_dtype(dtype):
    for X, stored in zip(data.real_qkv(0, 11, dtype), data.real_qkv(0, 11, "f2"), strict=True):
        assert X.dtype == np.dtype(dtype)
        assert np.array_equal(X, stored)  # widening adds nothing


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert data.real_qkv(dtype=ml_dtypes.bfloat16)[0].dtype == ml_dtypes.bfloat16


def test_a_caller_may_write_on_what_it_gets():
    for dtype in (np.float16, np.float32):  # float16 is how it is stored: no view may leak
        first = data.real_qkv(dtype=dtype)[0]
        first[:] = 0
        assert data.real_qkv(dtype=dtype)[0].any()
    data.provenance()["layers"].append(1)
    data.tokens()[0] = ""
    assert data.provenance()["layers"] == [0, 2, 4] and data.tokens()[0] == "[CLS]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 1}, r"^layer=1: the file holds layers 0, 2, 4$"),
        ({"layer": -1}, r"^layer=-1: "),
        ({"layer": "2"}, r"^layer='2': "),
        ({"head": 12}, r"^head=12: the file holds heads 0, 2, 8, 11$"),
        ({"head": None}, r"^head=None: "),
        ({"dtype": int}, r"^dtype=.*int.*: a float type is needed, such as numpy.float32$"),
        ({"dtype": "complex64"}, r"^dtype='complex64': "),
        ({"dtype": "nonsense"}, r"^dtype='nonsense': "),
    ],
)
def test_errors_name_the_argument_what_came_and_what_is_accepted(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.real_qkv(**arguments)


def test_tokens():
    tokens = data.tokens()
    assert len(tokens) == 512
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
    assert tokens.count("[CLS]") == tokens.count("[SEP]") == 1 and "[UNK]" not in tokens


def test_provenance():
    said = data.provenance()
    assert said["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert said["licence"] == "Apache-2.0"
    assert "Apache License" in (FOLDER / "LICENSE-APACHE-2.0.txt").read_text(encoding="utf-8")
    # Whoever edits the text has to run tools/extract_qkv.py again.
    text = TEXT.read_text(encoding="utf-8")
    assert said["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_the_file_is_small_and_the_one_the_readme_describes():
    held = FILE.read_bytes()
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert 1e6 < len(held) < 2e6
    assert f"{len(held):,} bytes" in readme
    assert hashlib.sha256(held).hexdigest() in readme
