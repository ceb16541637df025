"""Rows of a file that is read, not mapped, for features that are larger than memory.

Ids are sorted. Rows that are close together are one read. Threads issue many reads at once, because a disk needs a deep
queue. A single row is read directly to its place; rows that are read together are copied to their places. A truncated
file or a failing disk is an exception here, where a memory map would raise SIGBUS. The defaults below come from
``python -m gsplit_bench disk-reads``, which compares ways to read.

The loops are compiled and call ``pread`` of the C library without the GIL. A row that ``pread`` does not read
completely is read again by ``os.preadv``, which raises the error.
"""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import StoreError, explain
from gsplit.features.protocol import RowsRead
from gsplit.features.sources import check_ids, read_to_device
from gsplit.kernels.file_rows import read_rows
from gsplit.kernels.rows import flat_rows

__all__ = ["GAP_BYTES", "READ_BYTES", "THREADS", "DiskRows", "sort_rows"]

THREADS = 16
GAP_BYTES = 4096  # the size of a page, which is the smallest read
READ_BYTES = 256 << 10  # the largest read of several rows: its buffer fits into the cache of a core
_PIECES_PER_THREAD = 4
_ROWS_PER_PIECE = 64


class DiskRows:
    """The rows of a file (``protocol.HostSource``). Row i belongs to id ``first_id + i``. Can be read from any thread.

    ``descriptor``: the open file, which this object closes. ``offset``: the byte at which the rows start.
    """

    def __init__(
        self,
        path: str,
        descriptor: int,
        *,
        offset: int,
        num_rows: int,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        first_id: int = 0,
        threads: int = THREADS,
    ) -> None:
        self._path = path
        self._file = descriptor
        self._offset = offset
        self._num_rows = num_rows
        self.row_shape = row_shape
        self.dtype = dtype
        self._first = first_id
        self._row_bytes = prod(row_shape) * dtype.itemsize
        self._num_pieces = threads * _PIECES_PER_THREAD if threads > 1 else 1
        self._threads = ThreadPoolExecutor(threads, f"read {path}")  # starts threads when they are needed
        self._closing = weakref.finalize(self, _close, descriptor, self._threads)

    def close(self) -> None:
        """End the threads and close the file. May be called twice; done automatically when the object is deleted."""
        self._closing()

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        assert self._closing.alive, f"{self._path} has been closed"
        check_ids(self._path, ids, self._first, self._num_rows)
        if ids.size == 0 or self._row_bytes == 0:
            return RowsRead(rows=ids.size, num_bytes=0)
        rows, order = sort_rows(ids - self._first)
        flat, stride = flat_rows(out, np.dtype(np.uint8))
        read = _Read(rows=rows, places=order if places is None else places[order], flat=flat, stride=stride)
        num_pieces = max(1, min(self._num_pieces, rows.size // _ROWS_PER_PIECE))
        if num_pieces == 1:
            self._read_piece(read, 0, rows.size)
        else:
            self._read_pieces(read, num_pieces)
        return RowsRead(rows=ids.size, num_bytes=ids.size * self._row_bytes)

    def _read_pieces(self, read: "_Read", num_pieces: int) -> None:
        cuts = [read.rows.size * piece // num_pieces for piece in range(num_pieces + 1)]
        try:
            pieces = [self._threads.submit(self._read_piece, read, first, stop) for first, stop in pairwise(cuts)]
        except RuntimeError:  # the interpreter is shutting down and has ended the threads
            self._read_piece(read, 0, read.rows.size)
            return
        try:
            for piece in pieces:
                piece.result()
        finally:  # no thread writes to ``out`` after this
            wait(pieces)

    def _read_piece(self, read: "_Read", first: int, stop: int) -> None:
        size = self._row_bytes
        gap = GAP_BYTES // size
        most = max(1, READ_BYTES // size)
        while first < stop:
            first = read_rows(
                self._file, self._offset, size, gap, most, read.rows, read.places, first, stop, read.flat, read.stride
            )
            if first < stop:
                self._read_row(read, first)
                first += 1

    def _read_row(self, read: "_Read", at: int) -> None:
        """Read one row, with as many system calls as it takes, or raise the error."""
        begin = self._offset + int(read.rows[at]) * self._row_bytes
        target = int(read.places[at]) * read.stride
        done = 0
        while done < self._row_bytes:
            try:
                buffer = read.flat[target + done : target + self._row_bytes]
                got = os.preadv(self._file, [buffer.data], begin + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._path) from error
            if got == 0:
                expected = f"{self._offset + self._num_rows * self._row_bytes} bytes, as when it was opened"
                found = f"its end at byte {os.fstat(self._file).st_size}"
                fix = "restore the file from a copy, or import the graph again"
                raise StoreError(explain(self._path, expected, found, fix))
            done += got


@dataclass(frozen=True, slots=True)
class _Read:
    """Row ``rows[i]`` of the file goes to byte ``places[i] * stride`` of ``flat``. Rows are ascending."""

    rows: Ids
    places: Ids
    flat: npt.NDArray[np.uint8]
    stride: int


def sort_rows(rows: Ids) -> tuple[Ids, Ids]:
    """Rows in ascending order and their former positions; packed into one number each, which is faster to sort."""
    shift = rows.size.bit_length()
    if int(rows.max()).bit_length() + shift > 63:
        order = np.argsort(rows, kind="stable")
        return rows[order], order
    packed = (rows << shift) | np.arange(rows.size)
    packed.sort()
    return packed >> shift, packed & ((1 << shift) - 1)


def _close(descriptor: int, threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False)
    os.close(descriptor)
