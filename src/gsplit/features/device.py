"""Rows for a device: the hottest ones in its own memory, the others in host memory or on disk.

The host locates rows (``locate``), which may run ahead in another thread. The device gathers them (``gather``). The
host does not wait for the device. Positions are those of ``HotOrder``: a row is in the memory of the device if its
position is smaller than the number of cached rows. There are two ways to get the other rows:

- ``RegisteredRows``: all rows are in host memory that the device can read. One kernel gathers hot rows from the memory
  of the device and cold rows over the bus. The host does not touch them. Needs Triton.
- ``StagedRows``: the host reads cold rows from any source, such as a disk, into the pinned memory of the batch, which
is
  copied to the device. Uses torch operations only.
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
    """The rows of one array, by id, for a device."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the rows."""

    def locate(self, ids: Tensor) -> tuple[Any, RowsRead]:
        """On the host: the locations of rows, as a dataclass of host tensors, and the rows and bytes to transfer."""

    def gather(self, located: Any, out: Tensor) -> None:
        """On the device: copy the rows to ``out``. ``located``: from ``locate``, with its tensors on the device."""

    def describe(self) -> str:
        """Where the rows are, in a few words."""


@dataclass(frozen=True)
class _Positions:
    positions: Tensor


class RegisteredRows:
    """See the module. ``rows``: all rows, in registered host memory; ``cached``: the first of them, on the device."""

    def __init__(self, rows: Tensor, cached: Tensor, order: HotOrder) -> None:
        self._rows = rows.flatten(1)
        self._cached = cached.flatten(1)
        self._order = order
        self.row_shape = tuple(rows.shape[1:])
        self.dtype = rows.dtype

    def locate(self, ids: Tensor) -> tuple[_Positions, RowsRead]:
        positions = torch.from_numpy(self._order.positions(ids.numpy()))
        hits = int((positions < self._order.num_cached).sum())
        row_bytes = self._rows.size(1) * self.dtype.itemsize
        read = RowsRead(rows=ids.numel(), num_bytes=(ids.numel() - hits) * row_bytes, hits=hits)
        return _Positions(positions), read

    def gather(self, located: _Positions, out: Tensor) -> None:
        from gsplit.kernels.triton.gather import gather_rows

        gather_rows(self._cached, self._rows, located.positions, out.view(out.size(0), self._rows.size(1)))

    def describe(self) -> str:
        return f"{_describe(self._cached, self._rows.size(0))}, the others are read over the bus"


@dataclass(frozen=True)
class _Staged:
    """Row ``missed[i]`` goes to ``out[missed_rows[i]]``, cached row ``hit_positions[i]`` to ``out[hit_rows[i]]``."""

    missed: Tensor
    missed_rows: Tensor
    hit_positions: Tensor
    hit_rows: Tensor


@dataclass(frozen=True)
class _AllStaged:
    rows: Tensor


class StagedRows:
    """See the module. ``cached``: the first rows of an order, on the device, and the order; None: no cache."""

    def __init__(self, source: RowSource, cached: tuple[Tensor, HotOrder] | None = None) -> None:
        self._source = source
        self._cached = cached
        self.row_shape = source.row_shape
        self.dtype = source.dtype

    def locate(self, ids: Tensor) -> tuple[_Staged | _AllStaged, RowsRead]:
        if self._cached is None:
            rows = take_rows(self._source, ids, _HOST)
            return _AllStaged(rows), RowsRead(ids.numel(), rows.nbytes)
        order = self._cached[1]
        positions = torch.from_numpy(order.positions(ids.numpy()))
        is_hit = positions < order.num_cached
        missed_rows = (~is_hit).nonzero().view(-1)
        hit_rows = is_hit.nonzero().view(-1)
        missed = take_rows(self._source, ids[missed_rows], _HOST)
        located = _Staged(missed=missed, missed_rows=missed_rows, hit_positions=positions[hit_rows], hit_rows=hit_rows)
        return located, RowsRead(rows=ids.numel(), num_bytes=missed.nbytes, hits=hit_rows.numel())

    def gather(self, located: _Staged | _AllStaged, out: Tensor) -> None:
        if isinstance(located, _AllStaged):
            out.copy_(located.rows)
            return
        assert self._cached is not None
        out.index_copy_(0, located.hit_rows, self._cached[0].index_select(0, located.hit_positions))
        out.index_copy_(0, located.missed_rows, located.missed)

    def describe(self) -> str:
        if self._cached is None:
            return "the host reads all rows"
        return f"{_describe(self._cached[0], self._cached[1].num_vertices)}, the host reads the others"


def _describe(cached: Tensor, num_rows: int) -> str:
    return f"{cached.size(0):,} of {num_rows:,} rows in its memory ({cached.nbytes / 1e9:.1f} GB)"
