"""Rows for a device: the hottest ones in its own memory, the others in host memory or on disk.

Rows are located (``locate``), which may run ahead in another thread: by the host, or by the device if it samples. The
device gathers them (``gather``). The host does not wait for the device, except for the ids of rows that it has to read
for a device that samples. Positions are those of ``HotOrder``: a row is in the memory of the device if its
position is smaller than the number of cached rows. There are two ways to get the other rows:

- ``RegisteredRows``: all rows are in host memory that the device can read. One kernel gathers hot rows from the memory
  of the device and cold rows over the bus. The host does not touch them. Needs Triton.
- ``StagedRows``: the host reads cold rows from any source, such as a disk, into the pinned memory of the batch, which
  is copied to the device. Uses torch operations only.

Rows that are stored as int8 stay so in both memories and on the bus, a quarter of the bytes. The device multiplies each
by its scale when it gathers it, to the bits of the host.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gsplit.features.cache import HotOrder
from gsplit.features.protocol import RowSource, take_rows
from gsplit.features.sources import stored_form

__all__ = ["DeviceRows", "RegisteredRows", "RowsLocated", "StagedRows"]

_HOST = torch.device("cpu")


class DeviceRows(Protocol):
    """The rows of one array, by id, for a device."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the rows."""

    def locate(self, ids: Tensor) -> tuple[Any, "RowsLocated"]:
        """The locations of rows, as a dataclass of tensors, and what gathering them will transfer.

        For ids on the host, the tensors are on the host. For ids on the device, each may be here or there.
        """

    def gather(self, located: Any, out: Tensor) -> None:
        """On the device: copy the rows to ``out``. ``located``: from ``locate``, with its tensors on the device."""

    def describe(self) -> str:
        """Where the rows are, in a few words."""


@dataclass(frozen=True, slots=True)
class RowsLocated:
    """Rows to gather, their bytes that are not in the device's memory, and how many rows are there.

    Numbers that the host does not know are tensors on the device.
    """

    rows: int
    num_bytes: int | Tensor
    hits: int | Tensor = 0


@dataclass(frozen=True)
class _Positions:
    positions: Tensor


class RegisteredRows:
    """See the module. ``rows``: all rows, in registered host memory; ``cached``: the first of them, on the device.

    ``scales``: the scale of every row, on the device, for rows of int8.
    """

    def __init__(self, rows: Tensor, cached: Tensor, order: HotOrder, scales: Tensor | None = None) -> None:
        self._rows = rows.flatten(1)
        self._cached = cached.flatten(1)
        self._order = order
        self._scales = scales
        self.row_shape = tuple(rows.shape[1:])
        self.dtype = rows.dtype if scales is None else scales.dtype

    def locate(self, ids: Tensor) -> tuple[_Positions, RowsLocated]:
        hits: int | Tensor
        if ids.device.type == "cpu":
            positions = torch.from_numpy(self._order.positions(ids.numpy()))
            hits = int((positions < self._order.num_cached).sum())
        else:
            positions = self._order.positions_on_device(ids)
            hits = (positions < self._order.num_cached).sum()
        row_bytes = self._rows.size(1) * self._rows.element_size()
        return _Positions(positions), RowsLocated(ids.numel(), (ids.numel() - hits) * row_bytes, hits)

    def gather(self, located: _Positions, out: Tensor) -> None:
        from gsplit.kernels.triton.gather import gather_rows

        flat = out.view(out.size(0), self._rows.size(1))
        gather_rows(self._cached, self._rows, located.positions, flat, self._scales)

    def describe(self) -> str:
        return f"{_describe(self._cached, self._rows.size(0))}, the others are read over the bus"


@dataclass(frozen=True)
class _Staged:
    """Row ``missed[i]`` goes to ``out[missed_rows[i]]``, cached row ``hit_positions[i]`` to ``out[hit_rows[i]]``.

    Then ``out[i]`` is multiplied by ``scales[i]``, if there are scales.
    """

    missed: Tensor
    missed_rows: Tensor
    hit_positions: Tensor
    hit_rows: Tensor
    scales: Tensor | None


@dataclass(frozen=True)
class _AllStaged:
    rows: Tensor
    scales: Tensor | None


class StagedRows:
    """See the module. ``cached``: the first rows of an order, as stored, on the device, and the order; None: none."""

    def __init__(self, source: RowSource, cached: tuple[Tensor, HotOrder] | None = None) -> None:
        self._stored, self._scales = stored_form(source)
        self._cached = cached
        self.row_shape = source.row_shape
        self.dtype = source.dtype

    def locate(self, ids: Tensor) -> tuple[_Staged | _AllStaged, RowsLocated]:
        if self._cached is not None and self._scales is None and ids.device.type != "cpu":
            order = self._cached[1]
            if order.num_cached == order.num_vertices:
                missed = torch.empty(0, *self.row_shape, dtype=self.dtype)
                every = torch.arange(ids.numel(), device=ids.device)
                located = _Staged(missed, ids[:0], order.positions_on_device(ids), every, scales=None)
                return located, RowsLocated(rows=ids.numel(), num_bytes=0, hits=ids.numel())
        ids = ids.cpu()  # device sync, if a device samples
        scales = None if self._scales is None else take_rows(self._scales, ids, _HOST)
        if self._cached is None:
            rows = take_rows(self._stored, ids, _HOST)
            return _AllStaged(rows, scales), RowsLocated(ids.numel(), rows.nbytes)
        order = self._cached[1]
        positions = torch.from_numpy(order.positions(ids.numpy()))
        is_hit = positions < order.num_cached
        missed_rows = (~is_hit).nonzero().view(-1)
        hit_rows = is_hit.nonzero().view(-1)
        missed = take_rows(self._stored, ids[missed_rows], _HOST)
        located = _Staged(missed, missed_rows, hit_positions=positions[hit_rows], hit_rows=hit_rows, scales=scales)
        return located, RowsLocated(rows=ids.numel(), num_bytes=missed.nbytes, hits=hit_rows.numel())

    def gather(self, located: _Staged | _AllStaged, out: Tensor) -> None:
        rows = self._stored_rows(located, out if located.scales is None else None)
        if located.scales is not None:
            torch.mul(rows, located.scales.view(-1, *[1] * len(self.row_shape)), out=out)

    def _stored_rows(self, located: _Staged | _AllStaged, out: Tensor | None) -> Tensor:
        """The rows in the type in which they are stored, in ``out`` or new memory."""
        if isinstance(located, _AllStaged):
            return located.rows if out is None else out.copy_(located.rows)
        assert self._cached is not None
        cached = self._cached[0]
        if out is None:
            out = cached.new_empty(located.hit_rows.numel() + located.missed_rows.numel(), *self.row_shape)
        out.index_copy_(0, located.hit_rows, cached.index_select(0, located.hit_positions))
        return out.index_copy_(0, located.missed_rows, located.missed)

    def describe(self) -> str:
        if self._cached is None:
            return "the host reads all rows"
        return f"{_describe(self._cached[0], self._cached[1].num_vertices)}, the host reads the others"


def _describe(cached: Tensor, num_rows: int) -> str:
    return f"{cached.size(0):,} of {num_rows:,} rows in its memory ({cached.nbytes / 1e9:.1f} GB)"
