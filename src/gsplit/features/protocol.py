"""What a source of rows is: where input features, labels and per-edge values come from.

Loading goes through this protocol only, so that memory maps, files, caches and devices can stand behind it without
anybody above knowing. Rows are named by ids of the store: vertices, or edges.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["HostSource", "RowSource", "RowsRead", "take_rows"]


@dataclass(frozen=True, slots=True)
class RowsRead:
    """What one read cost: rows, their size as they are stored, and how many of them came out of a cache."""

    rows: int
    num_bytes: int
    hits: int = 0


@runtime_checkable
class RowSource(Protocol):
    """Rows of one array, by id."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the rows."""

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        """Copy the rows of some ids into ``out``, a tensor on any device with as many rows."""


class HostSource(RowSource, Protocol):
    """A source that writes to the host's memory, each row where it is wanted; sources are put together of these."""

    def place(self, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None, out: Tensor) -> RowsRead:
        """Copy the row of ``ids[k]`` to ``out[places[k]]``, or to ``out[k]`` without places.

        ``out`` lies on the host; its rows may be some columns of a wider tensor. Places have been checked.
        """


def take_rows(source: RowSource, ids: Tensor, device: torch.device) -> Tensor:
    """The rows of some ids as a new tensor."""
    out = torch.empty(ids.numel(), *source.row_shape, dtype=source.dtype, device=device)
    source.read(ids, out)
    return out
