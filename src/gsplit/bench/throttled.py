"""A source of rows as slow as a bus or a network disk: reads take at least as long as their bytes at a given rate.

For measurements on a machine that has neither. Rows that a cache above answers do not come through here.
"""

import time

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gsplit.features.protocol import HostSource, RowsRead
from gsplit.features.sources import read_to_device

__all__ = ["ThrottledRows"]


class ThrottledRows:
    """See ``protocol.HostSource``. What ``source`` reads faster than ``bytes_per_s`` is waited for."""

    def __init__(self, source: HostSource, bytes_per_s: float) -> None:
        self._source, self._bytes_per_s = source, bytes_per_s
        self.row_shape, self.dtype = source.row_shape, source.dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None, out: Tensor) -> RowsRead:
        start = time.perf_counter()
        read = self._source.place(ids, places, out)
        left = read.num_bytes / self._bytes_per_s - (time.perf_counter() - start)
        if left > 0:
            time.sleep(left)
        return read
