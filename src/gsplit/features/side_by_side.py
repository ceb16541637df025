"""Several arrays as one: their rows side by side, each written straight into its columns."""

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.features.host import read_to_device
from gsplit.features.protocol import HostSource, RowsRead
from gsplit.kernels.buffers import BufferPool

__all__ = ["SideBySideRows"]

Ids = npt.NDArray[np.int64]


class SideBySideRows:
    """See ``protocol.HostSource``. Columns in the order of the sources; the type is that of ``torch.cat``."""

    def __init__(self, sources: list[HostSource]) -> None:
        if wrong := [source.row_shape for source in sources if len(source.row_shape) != 1]:
            got, fix = f"rows of {list(wrong[0])}", "flatten them, or load them alone"
            raise InputError(explain("features", "rows of one dimension to put side by side", got, fix))
        self._sources = sources
        self._pool = BufferPool(torch.device("cpu"))
        self.row_shape = (sum(source.row_shape[0] for source in sources),)
        self.dtype = functools.reduce(torch.promote_types, (source.dtype for source in sources))

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        column, num_bytes, hits = 0, 0, ids.size
        for source in self._sources:
            columns = out[:, column : column + source.row_shape[0]]
            read = self._place(source, ids, places, columns)
            column += source.row_shape[0]
            num_bytes, hits = num_bytes + read.num_bytes, min(hits, read.hits)
        return RowsRead(ids.size, num_bytes, hits)

    def _place(self, source: HostSource, ids: Ids, places: Ids | None, columns: Tensor) -> RowsRead:
        if source.dtype == self.dtype:
            return source.place(ids, places, columns)
        rows = self._pool.empty((ids.size, *source.row_shape), source.dtype)
        read = source.place(ids, None, rows)
        if places is None:
            columns.copy_(rows)
        else:
            columns[torch.from_numpy(places)] = rows.to(self.dtype)
        return read
