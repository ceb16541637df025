"""Rows of features that stay on object storage, with the hottest ones of a rank on the disk of its host.

Rows are read in the blocks that the store has checksums of; adjacent blocks are one request, and threads issue several
requests at once. The hottest rows are fetched once per host, to a file that is mapped (``cache.CachedRows``).
"""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.features.cache import CachedRows, HotOrder, fill_in_order
from gsplit.features.disk import sort_rows
from gsplit.features.protocol import HostSource, RowsRead
from gsplit.features.sources import check_ids, read_to_device
from gsplit.files.atomic import TEMPORARY_SUFFIX, fsync_folder, locked
from gsplit.files.mapped_files import create_mapped, flush, map_file
from gsplit.kernels.rows import copy_rows, flat_rows
from gsplit.store.remote import BLOCK_BYTES, RowBlocks

__all__ = ["RemoteRows", "cache_on_disk"]

THREADS = 8
READ_BYTES = 8 << 20  # the largest request: more does not make object storage faster


class RemoteRows:
    """The rows of an array on object storage (``protocol.HostSource``). Row i belongs to id ``first_id + i``."""

    def __init__(
        self, blocks: RowBlocks, row_shape: tuple[int, ...], dtype: torch.dtype, first_id: int, threads: int = THREADS
    ) -> None:
        self._blocks = blocks
        self.row_shape = row_shape
        self.dtype = dtype
        self._first = first_id
        self._bits = np.dtype(f"u{dtype.itemsize}")  # rows are copied as bits, because numba does not support float16
        self._threads = ThreadPoolExecutor(threads, f"read {blocks.where}")
        weakref.finalize(self, self._threads.shutdown, wait=False)

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: Ids, places: Ids | None, out: Tensor) -> RowsRead:
        check_ids(self._blocks.where, ids, self._first, self._blocks.num_rows)
        num_bytes = ids.size * self._blocks.row_bytes
        if num_bytes:
            rows, order = sort_rows(ids - self._first)
            flat, stride = flat_rows(out, self._bits)
            targets = order if places is None else places[order]
            requests = [
                self._threads.submit(self._place_blocks, first, stop, rows, targets, flat, stride)
                for first, stop in _requests(rows // self._blocks.block_rows)
            ]
            try:
                for request in requests:
                    request.result()
            finally:  # no thread writes to ``out`` after this
                for request in requests:
                    request.cancel()
                wait(requests)
        return RowsRead(rows=ids.size, num_bytes=num_bytes)

    def _place_blocks(
        self, first: int, stop: int, rows: Ids, targets: Ids, flat: npt.NDArray[np.unsignedinteger], stride: int
    ) -> None:
        """Read the blocks ``first .. stop - 1`` and copy those of ``rows`` that are in them; rows are ascending."""
        begin = first * self._blocks.block_rows
        low, high = np.searchsorted(rows, (begin, stop * self._blocks.block_rows))
        found = self._blocks.read(first, stop).view(self._bits)
        copy_rows(found, rows[low:high] - begin, targets[low:high], flat, stride)


def _requests(blocks: Ids) -> list[tuple[int, int]]:
    """Ranges of blocks to request, from the ascending blocks of all rows. Adjacent blocks are one range.

    >>> _requests(np.array([0, 0, 1, 4, 4]))
    [(0, 2), (4, 5)]
    """
    needed = np.unique(blocks)
    most = max(1, READ_BYTES // BLOCK_BYTES)
    found: list[tuple[int, int]] = []
    for run in np.split(needed, np.flatnonzero(np.diff(needed) != 1) + 1):
        first, stop = int(run[0]), int(run[-1]) + 1
        found += [(begin, min(begin + most, stop)) for begin in range(first, stop, most)]
    return found


def cache_on_disk(source: HostSource, order: HotOrder, folder: Path, name: str) -> CachedRows:
    """Keep the first rows of an order in a file of ``folder``, which ranks with the same order share.

    The rank that comes first fetches them, and the file gets its name when it is complete. ``name``: that of the array.
    """
    shape = (order.num_cached, *source.row_shape)
    rows = f"{order.first_id}-{order.part_boundaries[-1]}-{order.num_cached}"
    path = folder / f"{name}-{rows}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if order.num_cached and not path.exists():
        with locked(path.with_name(f"{path.name}.lock")):
            if not path.exists():
                _fill_file(source, order, path, shape)
    held = torch.empty(shape, dtype=source.dtype)
    if order.num_cached:
        held = _map_rows(path, shape, source.dtype)
    return CachedRows(source, order, held)


def _fill_file(source: HostSource, order: HotOrder, path: Path, shape: tuple[int, ...]) -> None:
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)  # left by a process that was killed
    try:
        words = create_mapped(temporary, np.dtype(f"u{source.dtype.itemsize}"), shape, b"")
        fill_in_order(source, order, torch.from_numpy(words).view(source.dtype))
        flush(words)
        temporary.rename(path)
    except OSError as error:
        fix = "free disk space, choose a smaller cache_bytes, or another folder with GSPLIT_CACHE_DIR"
        raise InputError(explain(path, "room for the hottest rows", error.strerror or error, fix)) from None
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def _map_rows(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with path.open("rb+") as stream:  # torch has no read-only tensors; nothing writes to these rows
        buffer = map_file(stream.fileno(), os.fstat(stream.fileno()).st_size, path, writable=True)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
