"""Rows out of an array in memory or in a memory map, straight into a given tensor.

Reading into a buffer that exists is what makes this fast: on the host most of a plain ``array[rows]`` is page
faults on new memory. Ids are checked before they become addresses.
"""

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.features.protocol import RowsRead
from gsplit.kernels.rows import copy_rows

__all__ = ["MappedRows", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a stored element type."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class MappedRows:
    """See ``protocol.RowSource``. Row i of the array belongs to id ``first_id + i``."""

    def __init__(self, name: str, array: npt.NDArray[Any], dtype: torch.dtype, first_id: int) -> None:
        self._name, self._first = name, first_id
        self._bits = np.dtype(f"u{array.itemsize}")  # rows are moved as bits: numba knows no float16
        self._array = array.view(self._bits).reshape(array.shape[0], prod(array.shape[1:]))
        self.row_shape, self.dtype = tuple(array.shape[1:]), dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        rows = ids.cpu().numpy() - self._first
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self._array.shape[0]:
            expected = f"ids in {self._first}..{self._first + self._array.shape[0] - 1}, which are held here"
            got = f"{int(rows.min()) + self._first}..{int(rows.max()) + self._first}"
            raise InputError(explain(self._name, expected, got, "open the store that holds them"))
        host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
        flat = host.view(torch.uint16) if host.dtype == torch.bfloat16 else host  # bfloat16 lies as uint16 on disk
        target = flat.view(rows.size, self._array.shape[1]).numpy().view(self._bits)
        copy_rows(self._array, rows, target)
        if host is not out:
            out.copy_(host)
        return RowsRead(rows.size, target.nbytes)
