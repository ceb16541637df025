"""Reads from disk: how many one step needs, and how many this disk does per second.

A step reads its distinct input rows, in the reads that ``features.disk`` makes of them: rows that are close together in
the file are one read. All strategies compute the same step, so the ranks of a host together read the same distinct rows
under every strategy. If several ranks need a row, the first read fetches it from disk and the others get it from the
kernel's page cache. A partition that keeps neighbours together needs fewer reads.

The two rates of a disk, reads and bytes per second, follow from the wall times of two runs over a new file that is not
in the page cache: scattered rows, then adjacent rows.
"""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from gsplit.array_types import Ids
from gsplit.features.disk import GAP_BYTES, READ_BYTES, DiskRows
from gsplit.partitioning.presample import Workload
from gsplit.sampling.minibatch import sample_minibatch

__all__ = ["PAGE_BYTES", "DiskRates", "DiskReads", "count_reads", "measure_disk", "reads_of", "solve"]

PAGE_BYTES = 4096
_SCATTERED = 8  # every eighth row is read


@dataclass(frozen=True, slots=True)
class DiskReads:
    """The number of reads, and the bytes of the pages that they fetch."""

    reads: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class DiskRates:
    """``Hardware.disk_reads_per_s`` and ``Hardware.disk_bytes_per_s``."""

    reads_per_s: float
    bytes_per_s: float


def count_reads(workload: Workload, row_bytes: Sequence[int], *, epoch: int = 0, steps: int = 3) -> DiskReads:
    """The reads of one step, averaged over the first ``steps`` steps of an epoch.

    ``row_bytes``: the size of a stored row of every vertex type, each of which has its own files; one without types.
    """
    sampler = workload.sampler_of(workload.graph, workload.original_ids)
    found = []
    for number in range(steps):
        key = workload.key(epoch, number)
        targets, sampler.excluded = workload.step_targets(key)
        ids = sample_minibatch(sampler, targets, workload.fanouts, key).input_ids
        types = workload.types
        rows = [ids] if types is None else [types.rows(ids[types.of(ids) == t]) for t in range(types.num_types)]
        found += [reads_of(np.sort(of.numpy()), size) for of, size in zip(rows, row_bytes, strict=True)]
    reads = sum(read.reads for read in found) / steps
    num_bytes = sum(read.num_bytes for read in found) / steps
    return DiskReads(reads=reads, num_bytes=num_bytes)


def reads_of(rows: Ids, row_bytes: int) -> DiskReads:
    """The reads of rows in ascending order. A read also fetches the pages of the gaps between its rows.

    >>> reads_of(np.array([0, 1, 1000]), 4096)
    DiskReads(reads=2.0, num_bytes=12288.0)
    """
    if rows.size == 0 or row_bytes == 0:
        return DiskReads(reads=0.0, num_bytes=0.0)
    apart = np.flatnonzero(np.diff(rows) > GAP_BYTES // row_bytes + 1)
    first = rows[np.append(0, apart + 1)]
    last = rows[np.append(apart, rows.size - 1)]
    begin = first * row_bytes // PAGE_BYTES
    end = -(-(last + 1) * row_bytes // PAGE_BYTES)
    pages = end - begin
    pages[1:] -= begin[1:] < end[:-1]  # a page that the previous read has fetched
    calls = np.maximum(1, -(-(last - first + 1) * row_bytes // READ_BYTES))
    return DiskReads(reads=float(calls.sum()), num_bytes=float(pages.sum() * PAGE_BYTES))


def measure_disk(folder: Path, num_rows: int = 50_000) -> DiskRates:
    """Measure the disk of a folder with a file of rows of one page: scattered in the first half, all of the second."""
    half = num_rows // 2
    width = PAGE_BYTES // 4
    chosen = np.random.default_rng(1).choice(half, max(1, half // _SCATTERED), replace=False)
    with TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "rows.bin"
        _write_rows(path, num_rows, width)
        rows = DiskRows(
            str(path),
            os.open(path, os.O_RDONLY),
            offset=0,
            num_rows=num_rows,
            row_shape=(width,),
            dtype=torch.float32,
            first_id=0,
        )
        with closing(rows):
            _time_read(rows, np.array([half]))  # compiles the kernel
            scattered = _time_read(rows, np.sort(chosen).astype(np.int64))
            adjacent = _time_read(rows, np.arange(half + 64, num_rows))  # behind what the kernel has read ahead
    return solve(scattered, adjacent)


def _write_rows(path: Path, num_rows: int, width: int) -> None:
    """Write random rows and drop them from the page cache."""
    with path.open("wb") as file:
        file.write(np.random.default_rng(0).random((num_rows, width), np.float32).tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _time_read(rows: DiskRows, ids: Ids) -> tuple[DiskReads, float]:
    """The reads of some rows, and their wall time in seconds."""
    out = torch.empty(ids.size, *rows.row_shape)
    start = time.perf_counter()
    rows.read(torch.from_numpy(ids), out)
    return reads_of(ids, PAGE_BYTES), time.perf_counter() - start


def solve(scattered: tuple[DiskReads, float], adjacent: tuple[DiskReads, float]) -> DiskRates:
    """Both rates from two measurements. The few calls of the adjacent run are neglected.

    >>> solve((DiskReads(100, 1e6), 1.1), (DiskReads(0, 1e7), 1.0))
    DiskRates(reads_per_s=100.0, bytes_per_s=10000000.0)
    """
    short_reads, scattered_s = scattered
    long_reads, adjacent_s = adjacent
    bytes_per_s = long_reads.num_bytes / max(adjacent_s, 1e-9)
    reading_s = max(scattered_s - short_reads.num_bytes / bytes_per_s, 1e-3 * scattered_s, 1e-9)
    return DiskRates(reads_per_s=max(1.0, short_reads.reads) / reading_s, bytes_per_s=bytes_per_s)
