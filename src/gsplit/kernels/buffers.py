"""Buffers for rows that travel or wait, reused without ever being shared.

A buffer belongs to its tensor until the last view of it is gone, those saved in an autograd graph included:
collectives write without notice to autograd, so reuse while a graph still holds the rows would give silently wrong
gradients. The rule needs no bookkeeping by the user: each tensor is made over an array object of its own, torch keeps
that object alive as long as any tensor of the storage lives, and its finalizer brings the buffer back.

Why at all: on the host most of the cost of a fresh tensor of this size is page faults on new memory.
"""

import threading
import weakref
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["SLACK", "BufferPool"]

SLACK = 1.2
_LOOSE = 4  # a small tensor must not hold a large buffer
_SMALL = 1 << 20


@cache
def _stored_as(dtype: torch.dtype) -> np.dtype[Any]:
    """The type in numpy; that of as many bytes for bfloat16, which numpy does not have."""
    return torch.empty(0, dtype=torch.int16 if dtype == torch.bfloat16 else dtype).numpy().dtype


class BufferPool:
    """Host buffers by size. Elsewhere the device's own caching allocator does this, and tensors are simply made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[npt.NDArray[np.uint8]] = []
        self._taking = threading.Lock()  # finalizers only append, which needs none
        self.num_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with undefined contents, whose memory is not shared while it lives."""
        if self._device.type != "cpu" or prod(shape) == 0:
            return torch.empty(shape, dtype=dtype, device=self._device)
        buffer = self._take(prod(shape) * dtype.itemsize)
        array = np.ndarray(shape, _stored_as(dtype), buffer)
        weakref.finalize(array, self._free.append, buffer)
        rows = torch.from_numpy(array)
        # .data: not a view for autograd, which would refuse to modify a layer's output in place
        return rows if rows.dtype == dtype else rows.view(dtype).data

    def _take(self, size: int) -> npt.NDArray[np.uint8]:
        with self._taking:
            return self._take_locked(size)

    def _take_locked(self, size: int) -> npt.NDArray[np.uint8]:
        fitting = [i for i, buffer in enumerate(self._free) if size <= buffer.size <= max(_LOOSE * size, _SMALL)]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i].size))
        if self._free:  # too small from now on
            self.num_bytes -= self._free.pop().size
        buffer = np.empty(-(-int(size * SLACK) // 64) * 64, np.uint8)
        self.num_bytes += buffer.size
        return buffer
