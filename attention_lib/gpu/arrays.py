"""Arrays of torch or CuPy as a launch sees them: pointer, shape, strides, stream.

To turn each tensor into a CuPy array and back takes longer than a decode step does on the GPU. So
both libraries are asked directly, and what follows from the shapes is worked out once (`layout` is
hashable, and a cache can take it). New arrays come from the library's own memory pool, so that a
graph of torch can be captured around a call.
"""

import functools
import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

from attention_lib.gpu import _require


class Dtype(NamedTuple):
    name: str


@dataclass(frozen=True)
class Header:
    """What launch.check asks an array for. strides count elements; device: an int on a GPU."""

    shape: tuple
    strides: tuple
    dtype: Dtype
    device: object

    @property
    def ndim(self):
        return len(self.shape)

    def readable(self):
        """True if every row starts at 16 bytes, where the array does, and d is contiguous."""
        rows = zip(self.strides[:3], self.shape[:3], strict=True)
        return self.strides[3] == 1 and not any(s % 8 for s, n in rows if n > 1)


class Stream(NamedTuple):
    ptr: int


class OfTorch:
    """Tensors of torch. layout refuses one that asks for a gradient, unless grad is True."""

    def __init__(self):
        _require()
        import cupy
        import torch

        self.torch, self.pointer, self.Device = torch, torch.Tensor.data_ptr, cupy.cuda.Device
        # As Triton does: torch.cuda.current_stream first makes an object, in 2 microseconds.
        self.raw_stream = torch._C._cuda_getCurrentRawStream
        self.capturing = torch.cuda.is_current_stream_capturing

    def layout(self, name, x, grad=False):
        if not isinstance(x, self.torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; accepted: a CUDA tensor, as Q is")
        if not grad and x.requires_grad and self.torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, and these kernels give none; pass .detach()"
            )
        return x.shape, x.stride(), x.dtype, x.device

    @staticmethod
    def header(name, layout):
        shape, strides, dtype, device = layout
        if device.type != "cuda":
            raise TypeError(f"{name} is on {device}; accepted: a CUDA tensor")
        return Header(tuple(shape), strides, Dtype(str(dtype).removeprefix("torch.")), device.index)

    def empty(self, shape, dtype, device):
        return self.torch.empty(shape, dtype=dtype, device=device)

    def like(self, x):
        """An array like x, in order whatever the order of x: half the time of `empty`."""
        return self.torch.empty_like(x, memory_format=self.torch.contiguous_format)

    def dtype(self, name):
        return getattr(self.torch, name)

    def copy(self, x):
        return x.clone(memory_format=self.torch.contiguous_format)

    @staticmethod
    def fill(x, value):
        x.fill_(value)

    def on(self, device):
        """A context in which the GPU of these arrays is the current one."""
        return self.Device(device.index)

    def stream(self, device):
        return Stream(self.raw_stream(device.index))


class OfCuPy:
    """Arrays of CuPy."""

    def __init__(self):
        _require()
        import cupy

        self.cupy, self.on = cupy, cupy.cuda.Device

    def layout(self, name, x, grad=False):
        if not isinstance(x, self.cupy.ndarray):
            raise TypeError(
                f"{name} is a {type(x).__name__}; accepted: a CuPy array or a CUDA tensor"
            )
        return x.shape, x.strides, x.dtype, x.data.device_id

    @staticmethod
    def header(name, layout):
        shape, strides, dtype, device = layout
        elements = tuple(s // dtype.itemsize for s in strides)
        return Header(shape, elements, Dtype(dtype.name), device)

    @staticmethod
    def pointer(x):
        return x.data.ptr

    def empty(self, shape, dtype, device):
        return self.cupy.empty(shape, dtype)

    def like(self, x):
        return self.cupy.empty(x.shape, x.dtype)

    def dtype(self, name):
        return self.cupy.dtype(name)

    @staticmethod
    def copy(x):
        return x.copy(order="C")

    @staticmethod
    def fill(x, value):
        x.fill(value)

    def stream(self, device):
        return self.cupy.cuda.get_current_stream()

    def capturing(self):
        return self.cupy.cuda.get_current_stream().is_capturing()


@functools.cache
def _once(kind):
    return kind()


def library(Q):
    """The functions for arrays of the kind that Q is. Raises NoGPU where nothing can run."""
    torch = sys.modules.get("torch")
    return _once(OfTorch if torch is not None and isinstance(Q, torch.Tensor) else OfCuPy)


def readable(lib, name, x):
    """x, or a contiguous copy where a kernel could not read its rows in pieces of 16 bytes."""
    header = lib.header(name, lib.layout(name, x, grad=True))
    return x if header.readable() and lib.pointer(x) % 16 == 0 else lib.copy(x)


def contiguous(shape):
    """The strides of an array in order, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
