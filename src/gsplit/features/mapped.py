"""Rows out of an array in memory or in a memory map, straight into a given tensor.

Reading into a buffer that exists is what makes this fast: on the host most of a plain ``array[rows]`` is page
faults on new memory. Ids are checked before they become addresses, and so is the length of a mapped file.
"""

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.features.host import check_ids, flat_rows, kernel_places, read_to_device
from gsplit.features.protocol import RowsRead
from gsplit.kernels.rows import copy_rows
from gsplit.mapped_files import check_files, files_behind

__all__ = ["MappedRows", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a stored element type."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class MappedRows:
    """See ``protocol.HostSource``. Row i of the array belongs to id ``first_id + i``."""

    def __init__(self, name: str, array: npt.NDArray[Any], dtype: torch.dtype, first_id: int) -> None:
        self._name, self._first, self._files = name, first_id, files_behind(array)
        self._bits = np.dtype(f"u{array.itemsize}")  # rows are moved as bits: numba knows no float16
        self._array = array.view(self._bits).reshape(array.shape[0], prod(array.shape[1:]))
        self.row_shape, self.dtype = tuple(array.shape[1:]), dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None, out: Tensor) -> RowsRead:
        check_ids(self._name, ids, self._first, self._array.shape[0])
        check_files(self._files)
        flat, stride = flat_rows(out, self._bits)
        copy_rows(self._array, ids - self._first, kernel_places(places), flat, stride)
        return RowsRead(ids.size, ids.size * self._array.shape[1] * self._array.itemsize)
