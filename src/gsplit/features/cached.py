"""The hot cache: a rank's hottest rows in memory, over a source that is slower.

The rows lie as they are stored, so a cache under a conversion holds as many as its bytes allow. Filling reads the hot
prefixes once, front to back.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.features.host import flat_rows, kernel_places, read_to_device
from gsplit.features.hot_order import HotOrder
from gsplit.features.protocol import HostSource, RowsRead
from gsplit.kernels.rows import copy_cached

__all__ = ["CachedRows", "fill_in_order"]

Ids = npt.NDArray[np.int64]
_FILL_BYTES = 16 << 20


def fill_in_order(source: HostSource, order: HotOrder, out: Tensor) -> None:
    """Read the first rows in an order, as many as ``out`` has, piece by piece."""
    step = max(1, _FILL_BYTES // max(1, out[:1].nbytes))
    for start in range(0, out.size(0), step):
        stop = min(start + step, out.size(0))
        source.place(order.ids(start, stop), None, out[start:stop])


class CachedRows:
    """See ``protocol.HostSource``. ``order`` says which rows are held here; the others come from ``source``."""

    def __init__(self, source: HostSource, order: HotOrder) -> None:
        self._source, self._order = source, order
        self.row_shape, self.dtype = source.row_shape, source.dtype
        held = torch.empty(order.num_cached, *source.row_shape, dtype=source.dtype)
        fill_in_order(source, order, held)
        self._bits = np.dtype(f"u{held.element_size()}")
        self._columns = held[:1].numel() if order.num_cached else 0
        self._held = flat_rows(held, self._bits)[0].reshape(order.num_cached, self._columns)
        self._row_bytes = self._columns * held.element_size()

    @property
    def num_bytes(self) -> int:
        """Memory that the cached rows take."""
        return self._held.nbytes

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        positions, missed = self._order.positions(ids), np.empty(ids.size, np.int64)
        flat, stride = flat_rows(out, self._bits)
        num_missed = copy_cached(self._held, positions, kernel_places(places), flat, stride, missed)
        missed = missed[:num_missed]
        rest = self._source.place(ids[missed], missed if places is None else places[missed], out)
        hits = ids.size - num_missed
        return RowsRead(ids.size, rest.num_bytes + hits * self._row_bytes, rest.hits + hits)
