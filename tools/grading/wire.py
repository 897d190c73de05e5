"""What crosses the pipe between the grader and a worker: JSON, and arrays as plain bytes.

Both sides use this file, and neither believes the other: every length, dtype and shape is checked
before memory is taken, nothing is unpickled, and what has no plain form arrives as an `Opaque` that
knows the name of its type.

A frame: two lengths (4 bytes, 8 bytes), a JSON header [message, [[dtype, shape], ...]], the arrays.
"""

import fractions
import json
import math
import numbers
import struct

import numpy as np

LENGTHS = struct.Struct(">IQ")
MOST_HEADER = 8 * 2**20
MOST_BYTES = 256 * 2**20
MOST_ITEMS, MOST_DEPTH, MOST_TEXT = 200_000, 20, 100_000
DTYPES = {"|b1", "|i1", "|u1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"}
DTYPES |= {"<c8", "<c16"}


class WireError(Exception):
    """What arrived is not a message."""


class Opaque:
    """A value that does not cross: only its type's name and a short text did."""

    def __init__(self, name, text):
        self.name, self.text = name, text

    def __repr__(self):
        return self.text


def opaque(name, text):
    """An Opaque whose type has the name of the real one, for messages that quote it."""
    name = name if name.isidentifier() else "object"
    return type(name, (Opaque,), {})(name, text)


# ---- values to JSON: {"$": kind, ...} for all that JSON has no word for


class Encoder:
    """special(value, encode) -> {"$": kind, ...} or None: what else the two ends agree on."""

    def __init__(self, special=lambda value, encode: None):
        self.special, self.arrays, self.items = special, [], 0

    def encode(self, value, depth=0):
        self.items += 1
        if self.items > MOST_ITEMS or depth > MOST_DEPTH:
            return self.name(value)
        if value is None or isinstance(value, (bool, str)):
            return value[:MOST_TEXT] if type(value) is str else self.plain(value)
        special = self.special(value, lambda x: self.encode(x, depth + 1))
        if special is not None:
            return special
        if isinstance(value, (int, float)) and not isinstance(value, np.generic):
            return self.plain(value)
        if value is ...:
            return {"$": "dots"}
        if isinstance(value, (tuple, list)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {"$": kind, "of": [self.encode(x, depth + 1) for x in value]}
        if isinstance(value, dict):
            pairs = [
                [self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in value.items()
            ]
            return {"$": "dict", "of": pairs}
        if isinstance(value, slice):
            parts = [self.encode(x, depth + 1) for x in (value.start, value.stop, value.step)]
            return {"$": "slice", "of": parts}
        if isinstance(value, fractions.Fraction):
            return {"$": "fraction", "of": [int(value.numerator), int(value.denominator)]}
        return self.array(value)

    def plain(self, value):
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            return int(value) if value.bit_length() < 10_000 else self.name(value)
        if isinstance(value, float):
            return float(value)
        return str(value)[:MOST_TEXT]

    def array(self, value):
        if not (isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__array__")):
            return self.name(value)
        try:
            array = np.asarray(value)
            array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        except Exception:
            return self.name(value)
        if array.dtype.str not in DTYPES or array.nbytes > MOST_BYTES:
            return self.name(value)
        self.arrays.append(array)
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return {"$": kind, "at": len(self.arrays) - 1}

    def name(self, value):
        try:
            text = repr(value)[:200]
        except BaseException:
            text = "..."
        return {"$": "opaque", "name": type(value).__name__[:60], "text": text}


class Decoder:
    """special(kind, item, decode) -> value, for the kinds that this end knows, or KeyError."""

    def __init__(self, arrays, special=None):
        self.arrays, self.special = arrays, special

    def decode(self, item, depth=0):
        if depth > MOST_DEPTH + 1:
            raise WireError("nested too deep")
        if not isinstance(item, dict):
            if isinstance(item, list):
                raise WireError("a bare list")
            return item
        kind = item.get("$")

        def of():
            parts = item.get("of")
            if not isinstance(parts, list):
                raise WireError(f"{kind} without parts")
            return [self.decode(x, depth + 1) for x in parts]

        if kind in ("array", "scalar"):
            at = item.get("at")
            if not (isinstance(at, int) and 0 <= at < len(self.arrays)):
                raise WireError("no such array")
            return self.arrays[at] if kind == "array" else self.arrays[at].reshape(())[()]
        if kind == "tuple":
            return tuple(of())
        if kind == "list":
            return of()
        if kind == "dots":
            return ...
        if kind == "slice":
            return slice(*_exactly(3, of()))
        if kind == "fraction":
            top, bottom = _exactly(2, of())
            if not (isinstance(top, int) and isinstance(bottom, int) and bottom):
                raise WireError("not a fraction")
            return fractions.Fraction(top, bottom)
        if kind == "dict":
            result = {}
            for pair in item.get("of", ()):
                key, value = (self.decode(x, depth + 1) for x in _exactly(2, pair))
                if not isinstance(key, (str, numbers.Real, type(None))):
                    key = repr(key)
                result[key] = value
            return result
        if kind == "opaque":
            return opaque(str(item.get("name")), str(item.get("text"))[:200])
        if self.special is not None:
            try:
                return self.special(kind, item, lambda x: self.decode(x, depth + 1))
            except (KeyError, TypeError) as error:
                raise WireError(f"a wrong {kind!r}: {error}") from None
        raise WireError(f"unknown kind {kind!r}")


def _exactly(count, parts):
    if not isinstance(parts, list) or len(parts) != count:
        raise WireError(f"expected {count} parts")
    return parts


# ---- frames


def pack(message, special=lambda value, encode: None):
    """The frame of {word: value, ...}."""
    encoder = Encoder(special)
    body = {word: encoder.encode(value) for word, value in message.items()}
    about = [[a.dtype.str, list(a.shape)] for a in encoder.arrays]
    header = json.dumps([body, about]).encode("ascii")
    blobs = b"".join(a.tobytes() for a in encoder.arrays)
    if len(header) > MOST_HEADER or len(blobs) > MOST_BYTES:
        raise WireError("the message is too large")
    return LENGTHS.pack(len(header), len(blobs)) + header + blobs


def read_frame(stream):
    """(header, blobs) from a binary stream, or None at its end. Nothing is interpreted yet."""
    start = _read(stream, LENGTHS.size)
    if not start:
        return None
    header, blobs = LENGTHS.unpack(start)
    if header > MOST_HEADER or blobs > MOST_BYTES:
        raise WireError("the message is too large")
    return _read(stream, header, True), _read(stream, blobs, True)


def _read(stream, count, whole=False):
    """count bytes; b"" if the stream ends before the first one (and whole is False)."""
    parts, have = [], 0
    while have < count:
        part = stream.read(min(count - have, 2**20))
        if not part:
            if whole or have:
                raise WireError("the stream ended within a message")
            return b""
        parts.append(part)
        have += len(part)
    return b"".join(parts)


def unpack(frame, special=None):
    """The message of a frame."""
    header, blobs = frame
    try:
        body, about = json.loads(header)
        if not isinstance(body, dict) or not isinstance(about, list):
            raise WireError("not a message")
        arrays, at = [], 0
        for dtype, shape in about:
            count = _count(dtype, shape, len(blobs))
            size = count * np.dtype(dtype).itemsize
            if size > len(blobs) - at:
                raise WireError("an array is longer than its bytes")
            array = np.frombuffer(blobs, dtype, count, at).reshape(shape)
            arrays.append(array.copy())
            at += size
        decoder = Decoder(arrays, special)
        return {word: decoder.decode(item) for word, item in body.items()}
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError, OverflowError) as error:
        raise WireError(f"not a message: {type(error).__name__}") from None


def _count(dtype, shape, most):
    if dtype not in DTYPES:
        raise WireError(f"dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > 32:
        raise WireError("shape")
    if not all(type(n) is int and 0 <= n <= MOST_BYTES for n in shape):
        raise WireError("shape")
    count = math.prod(shape)
    if count > most:
        raise WireError("an array is longer than its bytes")
    return count
