"""Rows for a device: the hottest in its own memory, the rest in the host's, and no wait between the two.

The host finds out where each wanted row is (``locate``), which may run ahead in another thread; the device puts them
together (``gather``). Positions are those of ``HotOrder``: a row is in the device's memory if its position is below the
number of cached rows. Two ways for the rows that are not:

- ``RegisteredRows``: all rows lie in host memory that the device can read by itself. One kernel takes hot rows from the
  device and cold ones over the bus; the host touches none of them. Needs Triton.
- ``StagedRows``: the host reads cold rows from any source, such as a disk, into the batch's pinned buffer, with which
  they cross. Plain torch operations.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gsplit.features.cache import HotOrder
from gsplit.features.protocol import RowSource, RowsRead, take_rows

__all__ = ["DeviceRows", "RegisteredRows", "StagedRows"]

_HOST = torch.device("cpu")


class DeviceRows(Protocol):
    """Rows of one array, by id, for a device."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the rows."""

    def locate(self, ids: Tensor) -> tuple[Any, RowsRead]:
        """On the host: where the rows of some ids are, as a dataclass of host tensors, and what crosses the bus."""

    def gather(self, located: Any, out: Tensor) -> None:
        """On the device: copy the rows into ``out``, from what ``locate`` gave, its tensors moved to the device."""


@dataclass(frozen=True)
class _Positions:
    positions: Tensor


class RegisteredRows:
    """See the module. ``rows``: all rows in hot order, in registered host memory; ``cached``: the first of them."""

    def __init__(self, rows: Tensor, cached: Tensor, order: HotOrder) -> None:
        self._rows, self._cached, self._order = rows.flatten(1), cached.flatten(1), order
        self.row_shape, self.dtype = tuple(rows.shape[1:]), rows.dtype

    def locate(self, ids: Tensor) -> tuple[_Positions, RowsRead]:
        positions = torch.from_numpy(self._order.positions(ids.numpy()))
        hits = int((positions < self._order.num_cached).sum())
        row_bytes = self._rows.size(1) * self.dtype.itemsize
        return _Positions(positions), RowsRead(ids.numel(), (ids.numel() - hits) * row_bytes, hits)

    def gather(self, located: _Positions, out: Tensor) -> None:
        from gsplit.kernels.triton.gather import gather_rows

        gather_rows(self._cached, self._rows, located.positions, out.view(out.size(0), self._rows.size(1)))


@dataclass(frozen=True)
class _Staged:
    """Rows that crossed with the batch, and where they belong; cached ones and where they belong."""

    missed: Tensor
    missed_rows: Tensor
    hit_positions: Tensor
    hit_rows: Tensor


@dataclass(frozen=True)
class _AllStaged:
    rows: Tensor


class StagedRows:
    """See the module. ``cached``: the first rows in the order, on the device; None: nothing is cached."""

    def __init__(self, source: RowSource, cached: tuple[Tensor, HotOrder] | None = None) -> None:
        self._source, self._cached = source, cached
        self.row_shape, self.dtype = source.row_shape, source.dtype

    def locate(self, ids: Tensor) -> tuple[_Staged | _AllStaged, RowsRead]:
        if self._cached is None:
            rows = take_rows(self._source, ids, _HOST)
            return _AllStaged(rows), RowsRead(ids.numel(), rows.nbytes)
        order = self._cached[1]
        positions = torch.from_numpy(order.positions(ids.numpy()))
        is_hit = positions < order.num_cached
        missed_rows, hit_rows = (~is_hit).nonzero().view(-1), is_hit.nonzero().view(-1)
        missed = take_rows(self._source, ids[missed_rows], _HOST)
        read = RowsRead(ids.numel(), missed.nbytes, hit_rows.numel())
        return _Staged(missed, missed_rows, positions[hit_rows], hit_rows), read

    def gather(self, located: _Staged | _AllStaged, out: Tensor) -> None:
        if isinstance(located, _AllStaged):
            out.copy_(located.rows)
            return
        assert self._cached is not None
        out.index_copy_(0, located.hit_rows, self._cached[0].index_select(0, located.hit_positions))
        out.index_copy_(0, located.missed_rows, located.missed)
