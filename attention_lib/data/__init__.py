"""Q, K and V as a trained model makes them, for everything that random numbers do not show.

Twelve heads of all-MiniLM-L6-v2 over one page of prose. README.md beside this file says how they
were made and what was left out; tools/extract_qkv.py makes them again.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np

__all__ = ["provenance", "real_qkv", "tokens"]


@cache
def _file():
    with np.load(Path(__file__).with_name("minilm_qkv.npz")) as file:
        return dict(file)


def _place(name, value):
    """Where `value` stands among the layers or heads that the file holds."""
    held = _file()[name + "s"].tolist()
    if value not in held:
        raise ValueError(f"{name}={value!r}: the file holds {name}s {', '.join(map(str, held))}")
    return held.index(value)


def real_qkv(layer=2, head=0, dtype=np.float32):
    """Q, K, V, each (512, 32), of one head of a trained model. Yours to change: they are copies.

    Row i belongs to tokens()[i]. The numbers are what the layer's three linear maps give, biases
    included and without unit; they are not scaled, so S = Q K^T / sqrt(32) is the model's own.
    Each was rounded to float16 once and is given in `dtype` (any float type).

    Source: all-MiniLM-L6-v2, Apache-2.0; provenance() has the rest.
    Raises ValueError for a layer or head that the file does not hold, or a dtype that is no float.
    """
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = None
    # ml_dtypes' bfloat16 is a float to us but not to NumPy, so it is asked for by name.
    if kind is None or not (kind.kind == "f" or kind.name == "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: a float type is needed, such as numpy.float32")
    at = _place("layer", layer), _place("head", head)
    return tuple(_file()[name][at].astype(kind) for name in "QKV")


def tokens():
    """The 512 wordpieces the rows stand for: [CLS], the text, [SEP]. '##' continues a word."""
    return _file()["tokens"].tolist()


def provenance():
    """Where the numbers come from, as a dict: model, licence, package, hashes, versions, rounding.

    `layers` and `heads` are what real_qkv() accepts.
    """
    held = {name: _file()[name].tolist() for name in ("layers", "heads")}
    return json.loads(str(_file()["provenance"])) | held
