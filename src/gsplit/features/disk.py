"""Rows out of a file, read and not mapped: for features that are larger than memory.

Ids are sorted, rows that lie close together become one read, and threads keep many reads in flight: a disk wants a deep
queue. A row alone goes straight to its place; of several rows read together each is copied there. Reading makes errors
of what would be SIGBUS in a memory map: a file that was cut off, a disk that fails. benchmarks/disk_reads.py compares
the ways to read; the defaults below come from there.

The loops run compiled and call ``pread`` of the C library without the interpreter's lock. What it does not read whole
is read again by ``os.preadv``, which says what is wrong.
"""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import StoreError, explain
from gsplit.features.protocol import RowsRead
from gsplit.features.sources import check_ids, flat_rows, read_to_device
from gsplit.kernels.file_rows import read_rows

__all__ = ["GAP_BYTES", "READ_BYTES", "THREADS", "DiskRows"]

Ids = npt.NDArray[np.int64]
THREADS = 16
GAP_BYTES = 4096  # a page comes anyway
READ_BYTES = 256 << 10  # the largest read of several rows: what it passes through stays in a core's cache
_PIECES_PER_THREAD = 4
_ROWS_PER_PIECE = 64


class DiskRows:
    """See ``protocol.HostSource``. Row i of the file belongs to id ``first_id + i``. Reads from any thread.

    ``descriptor`` is that of the open file and belongs to this object from now on; rows begin at byte ``offset``.
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
        self._path, self._file, self._offset, self._num_rows = path, descriptor, offset, num_rows
        self.row_shape, self.dtype = row_shape, dtype
        self._first, self._row_bytes = first_id, prod(row_shape) * dtype.itemsize
        self._num_pieces = threads * _PIECES_PER_THREAD if threads > 1 else 1
        self._threads = ThreadPoolExecutor(threads, f"read {path}")  # starts a thread when it is first needed
        self._closing = weakref.finalize(self, _close, descriptor, self._threads)

    def close(self) -> None:
        """End the threads and let go of the file; harmless if that has been done. Happens by itself when dropped."""
        self._closing()

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        assert self._closing.alive, f"{self._path} has been closed"
        check_ids(self._path, ids, self._first, self._num_rows)
        if ids.size == 0 or self._row_bytes == 0:
            return RowsRead(ids.size, 0)
        rows, order = _sort(ids - self._first)
        flat, stride = flat_rows(out, np.dtype(np.uint8))
        read = _Read(rows, order if places is None else places[order], flat, stride)
        num_pieces = max(1, min(self._num_pieces, rows.size // _ROWS_PER_PIECE))
        cuts = [rows.size * piece // num_pieces for piece in range(num_pieces + 1)]
        if num_pieces == 1:
            self._read_piece(read, 0, rows.size)
            return RowsRead(ids.size, ids.size * self._row_bytes)
        try:
            pieces = [self._threads.submit(self._read_piece, read, *cuts[k : k + 2]) for k in range(num_pieces)]
        except RuntimeError:  # the interpreter is ending, and pools before it
            self._read_piece(read, 0, rows.size)
            return RowsRead(ids.size, ids.size * self._row_bytes)
        try:
            for piece in pieces:
                piece.result()
        finally:  # nobody writes into ``out`` any more when this returns or raises
            wait(pieces)
        return RowsRead(ids.size, ids.size * self._row_bytes)

    def _read_piece(self, read: "_Read", first: int, stop: int) -> None:
        size, gap, most = self._row_bytes, GAP_BYTES // self._row_bytes, max(1, READ_BYTES // self._row_bytes)
        while first < stop:
            first = read_rows(
                self._file, self._offset, size, gap, most, read.rows, read.places, first, stop, read.flat, read.stride
            )
            if first < stop:
                self._read_row(read, first)
                first += 1

    def _read_row(self, read: "_Read", at: int) -> None:
        """Read a row by itself, however many calls of the system it takes, or say what is wrong."""
        begin, target = self._offset + int(read.rows[at]) * self._row_bytes, int(read.places[at]) * read.stride
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


class _Read:
    """Rows to read, ascending, and where they go."""

    def __init__(self, rows: Ids, places: Ids, flat: npt.NDArray[np.uint8], stride: int) -> None:
        self.rows, self.places, self.flat, self.stride = rows, places, flat, stride


def _sort(rows: Ids) -> tuple[Ids, Ids]:
    """Rows in ascending order, and where they stood; packed into one number each, which sorts several times faster."""
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
