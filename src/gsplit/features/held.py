"""Rows held in a device's memory: small numbers that every step needs, read without waiting for it."""

import torch
from torch import Tensor

from gsplit.features.protocol import RowsRead

__all__ = ["HeldRows"]


class HeldRows:
    """See ``protocol.RowSource``. Row i of the tensor belongs to id ``first_id + i``; ids are those of own vertices.

    Ids lie on the device and are not checked: that would mean waiting for them. They come from a sampler.
    """

    def __init__(self, rows: Tensor, first_id: int) -> None:
        self._rows, self._first = rows, first_id
        self.row_shape, self.dtype = tuple(rows.shape[1:]), rows.dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        torch.index_select(self._rows, 0, ids - self._first, out=out)
        return RowsRead(ids.numel(), out.nbytes)
