"""Sources of rows in the host's memory: memory maps, scaled and concatenated rows, and sources of the program's own.

A source reads straight into a given tensor. That is what makes it fast: on the host most of a plain ``array[rows]`` is
page faults on new memory. Ids are checked before they become addresses, and so is the length of a mapped file.
``DeviceTensorRows`` alone lies on a device.
"""

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.features.protocol import HostSource, RowSource, RowsRead
from gsplit.files.mapped_files import check_files, files_behind
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.rows import copy_rows, scale_rows

__all__ = [
    "ConcatRows",
    "DeviceTensorRows",
    "MappedRows",
    "ScaledRows",
    "UserRows",
    "check_ids",
    "describe_rows",
    "flat_rows",
    "kernel_places",
    "read_to_device",
    "torch_dtype",
]


def read_to_device(source: HostSource, ids: Tensor, out: Tensor) -> RowsRead:
    """``RowSource.read`` of a host source; rows for another device are copied there."""
    host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
    read = source.place(ids.cpu().numpy(), None, host)
    if host is not out:
        out.copy_(host)
    return read


def check_ids(name: str, ids: Ids, first_id: int, num_rows: int) -> None:
    """Refuse ids of rows that are not held, before they become addresses."""
    if ids.size and not first_id <= int(ids.min()) <= int(ids.max()) < first_id + num_rows:
        expected = f"ids in {first_id}..{first_id + num_rows - 1}, which are held here"
        raise InputError(explain(name, expected, f"{ids.min()}..{ids.max()}", "open the store that holds them"))


def flat_rows(out: Tensor, bits: np.dtype[Any]) -> tuple[npt.NDArray[Any], int]:
    """A host tensor's memory as one row of words of type ``bits``, and how many words its rows are apart.

    >>> wide = torch.zeros(3, 5)
    >>> flat, stride = flat_rows(wide[:, 1:3], np.dtype(np.uint32))
    >>> flat.shape, stride
    ((12,), 5)
    """
    rows, columns = out.size(0), prod(out.shape[1:])
    assert out.device.type == "cpu" and (rows == 0 or out[0].is_contiguous()), (out.device, out.stride())
    stride = out.stride(0) if rows > 1 and columns else columns
    words = out.view(torch.uint16) if out.dtype == torch.bfloat16 else out  # numpy has no bfloat16
    flat = words.as_strided((max(0, rows - 1) * stride + columns if rows else 0,), (1,)).numpy().view(bits)
    return flat, stride * out.element_size() // bits.itemsize


def kernel_places(places: Ids | None) -> Ids:
    """Places as kernels take them: none means that row k goes to place k."""
    return np.empty(0, np.int64) if places is None else places


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a stored element type."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class MappedRows:
    """Rows out of an array in memory or in a memory map (``protocol.HostSource``).

    Row i of the array belongs to id ``first_id + i``.
    """

    def __init__(self, name: str, array: npt.NDArray[Any], dtype: torch.dtype, first_id: int) -> None:
        self._name, self._first, self._files = name, first_id, files_behind(array)
        self._bits = np.dtype(f"u{array.itemsize}")  # rows are moved as bits: numba knows no float16
        self._array = array.view(self._bits).reshape(array.shape[0], prod(array.shape[1:]))
        self.row_shape, self.dtype = tuple(array.shape[1:]), dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None, out: Tensor) -> RowsRead:
        check_ids(self._name, ids, self._first, self._array.shape[0])
        check_files(self._files)
        flat, stride = flat_rows(out, self._bits)
        copy_rows(self._array, ids - self._first, kernel_places(places), flat, stride)
        return RowsRead(ids.size, ids.size * self._array.shape[1] * self._array.itemsize)


class ScaledRows:
    """Rows of int8 with one scale per row, as float32: a quarter of the bytes to keep and to read.

    Row v is ``float32(stored[v]) * scale[v]``, on every rank and in every order. ``scales[i]`` belongs to id
    ``first_id + i`` of ``source``; the scales of the rows held are in memory, four bytes each.
    """

    def __init__(self, name: str, source: HostSource, scales: npt.NDArray[np.float32], first_id: int) -> None:
        assert source.dtype == torch.int8 and scales.dtype == np.float32, (source.dtype, scales.dtype)
        self._name, self._source, self._scales, self._first = name, source, scales, first_id
        self._files = files_behind(scales)
        self._pool = BufferPool(torch.device("cpu"))
        self.row_shape, self.dtype = source.row_shape, torch.float32

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        check_ids(self._name, ids, self._first, self._scales.size)
        check_files(self._files)
        stored = self._pool.empty((ids.size, *self.row_shape), torch.int8)
        read = self._source.place(ids, None, stored)
        flat, stride = flat_rows(out, np.dtype(np.float32))
        scale_rows(stored.numpy(), self._scales, ids - self._first, kernel_places(places), flat, stride)
        return read


class ConcatRows:
    """Rows of several sources side by side, each written straight into its columns.

    Columns are in the order of the sources; the type is that of ``torch.cat``.
    """

    def __init__(self, sources: list[HostSource]) -> None:
        if wrong := [source.row_shape for source in sources if len(source.row_shape) != 1]:
            got, fix = f"rows of {list(wrong[0])}", "flatten them, or load them alone"
            raise InputError(explain("features", "rows of one dimension to put side by side", got, fix))
        self._sources = sources
        self._pool = BufferPool(torch.device("cpu"))
        self.row_shape = (sum(source.row_shape[0] for source in sources),)
        self.dtype = functools.reduce(torch.promote_types, (source.dtype for source in sources))

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        column, num_bytes, hits = 0, 0, ids.size
        for source in self._sources:
            columns = out[:, column : column + source.row_shape[0]]
            read = self._place(source, ids, places, columns)
            column += source.row_shape[0]
            num_bytes, hits = num_bytes + read.num_bytes, min(hits, read.hits)
        return RowsRead(ids.size, num_bytes, hits)

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
    """A source in short, to compare between ranks and with a checkpoint; ``fingerprint`` says more if it has one."""
    dtype, more = str(source.dtype).removeprefix("torch."), getattr(source, "fingerprint", None)
    text = f"{type(source).__qualname__} {list(source.row_shape)} {dtype}"
    return text if more is None else f"{text} {more}"


class UserRows:
    """Rows of a source that the program gave to the loader: a database, an object store, a decoder.

    The loader names vertices by the store's ids, which a partition changes; ``to_original_ids`` turns them into
    original ids, which ``source`` is asked for, with tensors in the host's memory and never with an empty id list.
    """

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


class DeviceTensorRows:
    """Rows in a device's memory (``protocol.RowSource``): small numbers that every step needs, read without a wait.

    Row i of the tensor belongs to id ``first_id + i``; ids are those of own vertices.

    Ids lie on the device and are not checked: that would mean waiting for them. They come from a sampler.
    """

    def __init__(self, rows: Tensor, first_id: int) -> None:
        self._rows, self._first = rows, first_id
        self.row_shape, self.dtype = tuple(rows.shape[1:]), rows.dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        torch.index_select(self._rows, 0, ids - self._first, out=out)
        return RowsRead(ids.numel(), out.nbytes)
