"""Rows for a device: the host finds out where they are, the device puts them together, and neither waits.

``locate`` is work of the host alone and may run ahead in another thread; ``gather`` is launched on the device.
``StagedRows`` has the host read the rows from any source into the batch's pinned buffer.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gsplit.features.protocol import RowSource, RowsRead, take_rows

__all__ = ["DeviceRows", "StagedRows"]


class DeviceRows(Protocol):
    """Rows of one array, by id, for a device."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the rows."""

    def locate(self, ids: Tensor) -> tuple[Any, RowsRead]:
        """On the host: where the rows of some ids are, as a dataclass of host tensors, and what reading them costs."""

    def gather(self, located: Any, out: Tensor) -> None:
        """On the device: copy the rows into ``out``, from what ``locate`` gave, its tensors moved to the device."""


@dataclass(frozen=True)
class _Staged:
    rows: Tensor


class StagedRows:
    """See the module."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self.row_shape, self.dtype = source.row_shape, source.dtype

    def locate(self, ids: Tensor) -> tuple[_Staged, RowsRead]:
        rows = take_rows(self._source, ids, torch.device("cpu"))
        return _Staged(rows), RowsRead(ids.numel(), rows.nbytes)

    def gather(self, located: _Staged, out: Tensor) -> None:
        out.copy_(located.rows)
