"""Rows of int8 with one scale per row, as float32: a quarter of the bytes to keep and to read.

Row v is ``float32(stored[v]) * scale[v]``, on every rank and in every order, so results stay the same everywhere. The
scales of the rows held, four bytes each, are in memory.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.features.host import check_ids, flat_rows, kernel_places, read_to_device
from gsplit.features.protocol import HostSource, RowsRead
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.rows import scale_rows
from gsplit.mapped_files import check_files, files_behind

__all__ = ["ScaledRows"]

Ids = npt.NDArray[np.int64]


class ScaledRows:
    """See ``protocol.HostSource``. ``scales[i]`` belongs to id ``first_id + i`` of ``source``, rows of int8."""

    def __init__(self, name: str, source: HostSource, scales: npt.NDArray[np.float32], first_id: int) -> None:
        assert source.dtype == torch.int8 and scales.dtype == np.float32, (source.dtype, scales.dtype)
        self._name, self._source, self._scales, self._first = name, source, scales, first_id
        self._files = files_behind(scales)
        self._pool = BufferPool(torch.device("cpu"))
        self.row_shape, self.dtype = source.row_shape, torch.float32

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        check_ids(self._name, ids, self._first, self._scales.size)
        check_files(self._files)
        stored = self._pool.empty((ids.size, *self.row_shape), torch.int8)
        read = self._source.place(ids, None, stored)
        flat, stride = flat_rows(out, np.dtype(np.float32))
        scale_rows(stored.numpy(), self._scales, ids - self._first, kernel_places(places), flat, stride)
        return read
