"""Rows of a source that the program gave to the loader: a database, an object store, a decoder.

Everything in the loader names vertices by the store's ids, which a partition changes; such a source is asked for
original ids, with tensors in the host's memory, and never for nothing.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.features.host import read_to_device
from gsplit.features.protocol import RowSource, RowsRead
from gsplit.kernels.buffers import BufferPool

__all__ = ["GivenRows", "describe_rows"]

Ids = npt.NDArray[np.int64]


def describe_rows(source: RowSource) -> str:
    """A source in short, to compare between ranks and with a checkpoint; ``fingerprint`` says more if it has one."""
    dtype, more = str(source.dtype).removeprefix("torch."), getattr(source, "fingerprint", None)
    text = f"{type(source).__qualname__} {list(source.row_shape)} {dtype}"
    return text if more is None else f"{text} {more}"


class GivenRows:
    """See ``protocol.HostSource``. ``to_original_ids`` turns ids of the store into those that ``source`` knows."""

    def __init__(self, source: RowSource, to_original_ids: Callable[[Tensor], Tensor]) -> None:
        self._source, self._to_original_ids = source, to_original_ids
        self._pool = BufferPool(torch.device("cpu"))
        self.row_shape, self.dtype = tuple(source.row_shape), source.dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        if not ids.size:
            return RowsRead(0, 0)
        straight = places is None and out.is_contiguous()
        rows = out if straight else self._pool.empty((ids.size, *self.row_shape), self.dtype)
        read = self._source.read(self._to_original_ids(torch.from_numpy(ids.copy())), rows)
        if not isinstance(read, RowsRead) or read.rows != ids.size:
            expected, fix = f"read to return RowsRead({ids.size}, bytes)", "return gsplit.extending.RowsRead"
            raise InputError(explain(type(self._source).__qualname__, expected, read, fix))
        if places is not None:
            out[torch.from_numpy(places)] = rows
        elif rows is not out:
            out.copy_(rows)
        return read
