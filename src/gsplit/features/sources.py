"""Sources of rows: memory maps, scaled and concatenated rows, user-defined sources, and a tensor on a device.

A source writes rows directly into a given tensor. An expression such as ``array[rows]`` allocates new memory instead,
and most of its time is page faults. Ids and the length of mapped files are checked before rows are read.
"""

import functools
import operator
import threading
import warnings
from collections.abc import Callable
from math import prod
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.features.protocol import HostSource, RowSource, RowsRead
from gsplit.files.mapped_files import check_files, files_behind
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.rows import NO_PLACES, copy_rows, flat_rows

__all__ = [
    "ConcatRows",
    "DeviceTensorRows",
    "MappedRows",
    "ScaledRows",
    "UserRows",
    "check_ids",
    "describe_rows",
    "kernel_places",
    "read_to_device",
    "stored_form",
    "torch_dtype",
]

_ONE_AT_A_TIME = threading.Lock()
"""Sources of programs need not be made for threads: evaluation, and checks, may read while a loader reads ahead."""


def read_to_device(source: HostSource, ids: Tensor, out: Tensor) -> RowsRead:
    """Implements ``RowSource.read`` for a host source. Rows for another device are copied there."""
    host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
    read = source.place(ids.cpu().numpy(), None, host)
    if host is not out:
        out.copy_(host)
    return read


def check_ids(name: str, ids: Ids, first_id: int, num_rows: int) -> None:
    """Refuse ids of rows that a source does not have."""
    if ids.size and not first_id <= int(ids.min()) <= int(ids.max()) < first_id + num_rows:
        expected = f"ids in {first_id}..{first_id + num_rows - 1}, which are held here"
        raise InputError(explain(name, expected, f"{ids.min()}..{ids.max()}", "open the store that has them"))


def kernel_places(places: Ids | None) -> Ids:
    """Places in the form that kernels take: an empty array if row k goes to place k."""
    return NO_PLACES if places is None else places


def torch_dtype(name: str) -> torch.dtype:
    """The torch type for the name of a stored element type."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class MappedRows:
    """The rows of an array in memory or in a memory map (``protocol.HostSource``). Row i is for id ``first_id + i``."""

    def __init__(self, name: str, array: npt.NDArray[Any], dtype: torch.dtype, first_id: int) -> None:
        self._name = name
        self._first = first_id
        self._files = files_behind(array)
        self._bits = np.dtype(f"u{array.itemsize}")  # rows are copied as bits, because numba does not support float16
        self._array = array.view(self._bits).reshape(array.shape[0], prod(array.shape[1:]))
        self.row_shape = tuple(array.shape[1:])
        self.dtype = dtype

    @functools.cached_property
    def matrix(self) -> Tensor:
        """All rows as a tensor over the same memory, which may be read-only: writing to it would end the process."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # torch has no read-only tensors
            words = torch.from_numpy(self._array)
        return words.view(self.dtype).view(words.size(0), *self.row_shape)

    def rows_of(self, ids: Tensor) -> Tensor:
        """The rows of ``matrix`` for some ids, which are checked."""
        check_ids(self._name, ids.numpy(), self._first, self._array.shape[0])
        return ids - self._first if self._first else ids

    def check_files(self) -> None:
        """Raise ``StoreError`` if the file of the rows became shorter, before rows of ``matrix`` are read."""
        check_files(self._files)

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None, out: Tensor) -> RowsRead:
        check_ids(self._name, ids, self._first, self._array.shape[0])
        check_files(self._files)
        flat, stride = flat_rows(out, self._bits)
        copy_rows(self._array, ids - self._first, kernel_places(places), flat, stride)
        return RowsRead(rows=ids.size, num_bytes=ids.size * self._array.shape[1] * self._array.itemsize)


class ScaledRows:
    """Rows of float32 that are stored as int8 with one scale per row, in a quarter of the bytes.

    Row v is ``float32(stored[v]) * scale[v]``, on every rank. ``scales[i]`` belongs to id ``first_id + i`` of
    ``source``. ``stored_form`` is for devices, which multiply by themselves.
    """

    def __init__(self, name: str, source: HostSource, scales: npt.NDArray[np.float32], first_id: int) -> None:
        assert source.dtype == torch.int8 and scales.dtype == np.float32, (source.dtype, scales.dtype)
        self._name = name
        self._source = source
        self._scales = scales
        self._first = first_id
        self._files = files_behind(scales)
        self._pool = BufferPool(torch.device("cpu"))
        self.row_shape = source.row_shape
        self.dtype = torch.float32
        self.stored_form = source, MappedRows(f"scales of {name}", scales, torch.float32, first_id)

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        check_ids(self._name, ids, self._first, self._scales.size)
        check_files(self._files)
        stored = self._pool.empty((ids.size, *self.row_shape), torch.int8)
        read = self._source.place(ids, None, stored)
        flat, stride = flat_rows(out, np.dtype(np.float32))
        scales = self._scales[ids - self._first]
        copy_rows(stored.numpy(), np.arange(ids.size), kernel_places(places), flat, stride, scales)
        return read


@overload
def stored_form(source: HostSource) -> tuple[HostSource, HostSource | None]: ...


@overload
def stored_form(source: RowSource) -> tuple[RowSource, RowSource | None]: ...


def stored_form(source: RowSource) -> tuple[RowSource, RowSource | None]:
    """Rows in the type in which they are stored, and the number that each is multiplied by, if there is one."""
    return source.stored_form if isinstance(source, ScaledRows) else (source, None)


class ConcatRows:
    """The concatenated rows of several sources, each of which writes directly to its columns.

    Columns are in the order of the sources. The type is that of ``torch.cat``. Without sources, rows have no columns.
    """

    def __init__(self, sources: list[HostSource]) -> None:
        if wrong := [source.row_shape for source in sources if len(source.row_shape) != 1]:
            got = f"rows of {list(wrong[0])}"
            fix = "flatten them, or load them alone"
            raise InputError(explain("features", "rows of one dimension to concatenate", got, fix))
        self._sources = sources
        self._pool = BufferPool(torch.device("cpu"))
        self.row_shape = (sum(source.row_shape[0] for source in sources),)
        self.dtype = functools.reduce(torch.promote_types, [source.dtype for source in sources] or [torch.float32])

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        column = 0
        num_bytes = 0
        hits = ids.size if self._sources else 0
        for source in self._sources:
            columns = out[:, column : column + source.row_shape[0]]
            read = self._place(source, ids, places, columns)
            column += source.row_shape[0]
            num_bytes += read.num_bytes
            hits = min(hits, read.hits)
        return RowsRead(rows=ids.size, num_bytes=num_bytes, hits=hits)

    def _place(self, source: HostSource, ids: Ids, places: Ids | None, columns: Tensor) -> RowsRead:
        if source.dtype == self.dtype:
            return source.place(ids, places, columns)
        rows = self._pool.empty((ids.size, *source.row_shape), source.dtype)
        read = source.place(ids, None, rows)
        if places is None:
            columns.copy_(rows)
        else:
            columns[torch.from_numpy(places)] = rows.to(self.dtype)
        return read


def describe_rows(source: RowSource) -> str:
    """A short text to compare a source between ranks and with a checkpoint, with its ``fingerprint`` if it has one."""
    dtype = str(source.dtype).removeprefix("torch.")
    fingerprint = getattr(source, "fingerprint", None)
    text = f"{type(source).__qualname__} {list(source.row_shape)} {dtype}"
    return text if fingerprint is None else f"{text} {fingerprint}"


class UserRows:
    """The rows of a user-defined source, such as a database, an object store or a decoder; one call at a time.

    The loader uses ids of the store, which partitioning changes. ``to_original_ids`` converts them to original ids,
    with which ``source`` is called. Its tensors are in host memory, and the list of ids is never empty.
    """

    def __init__(self, source: RowSource, to_original_ids: Callable[[Tensor], Tensor]) -> None:
        self._source = source
        self._to_original_ids = to_original_ids
        self._pool = BufferPool(torch.device("cpu"))
        self.row_shape = tuple(source.row_shape)
        self.dtype = source.dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        if not ids.size:
            return RowsRead(rows=0, num_bytes=0)
        direct = places is None and out.is_contiguous()
        rows = out if direct else self._pool.empty((ids.size, *self.row_shape), self.dtype)
        original = self._to_original_ids(torch.from_numpy(ids.copy()))
        with _ONE_AT_A_TIME:
            read = self._source.read(original, rows)
        if not isinstance(read, RowsRead) or not _has_integers(read) or read.rows != ids.size:
            expected = f"read to return RowsRead({ids.size}, bytes)"
            fix = "return gsplit.extending.RowsRead"
            raise InputError(explain(type(self._source).__qualname__, expected, read, fix))
        if places is not None:
            out[torch.from_numpy(places)] = rows
        elif rows is not out:
            out.copy_(rows)
        return RowsRead(ids.size, operator.index(read.num_bytes), operator.index(read.hits))  # NumPy's as Python's


def _has_integers(read: RowsRead) -> bool:
    return all(hasattr(value, "__index__") for value in (read.rows, read.num_bytes, read.hits))


class DeviceTensorRows:
    """The rows of a tensor on a device (``protocol.RowSource``). Row i belongs to id ``first_id + i``.

    For small numbers that every step needs, such as degrees. Ids are on the device and are not checked, because the
    host would have to wait for them. They come from a sampler.
    """

    def __init__(self, rows: Tensor, first_id: int) -> None:
        self._rows = rows
        self._first = first_id
        self.row_shape = tuple(rows.shape[1:])
        self.dtype = rows.dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        torch.index_select(self._rows, 0, ids - self._first, out=out)
        return RowsRead(rows=ids.numel(), num_bytes=out.nbytes)
