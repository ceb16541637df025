"""The protocols of sources of rows, which input features, labels and per-edge values are read from.

Memory maps, files, caches and devices implement the same protocol. Rows are numbered by vertex ids or edge ids of the
store.
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
    """The cost of one read: the number of rows, their bytes as stored, and how many were in a cache."""

    rows: int
    num_bytes: int
    hits: int = 0


@runtime_checkable
class RowSource(Protocol):
    """The rows of one array, by id."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the rows."""

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        """Copy the row of ``ids[k]`` to ``out[k]``. ``out`` may be on any device."""


class HostSource(RowSource, Protocol):
    """A source that writes rows to given places in host memory. Sources can be built on top of other such sources."""

    def place(self, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None, out: Tensor) -> RowsRead:
        """Copy the row of ``ids[k]`` to ``out[places[k]]``, or to ``out[k]`` without places.

        ``out`` is on the host. Its rows may be some columns of a wider tensor. The caller has checked the places.
        """


def take_rows(source: RowSource, ids: Tensor, device: torch.device) -> Tensor:
    """The rows of some ids as a new tensor."""
    out = torch.empty(ids.numel(), *source.row_shape, dtype=source.dtype, device=device)
    source.read(ids, out)
    return out
