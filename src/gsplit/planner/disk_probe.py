"""What the disk does per second, through the reader of training: scattered pages, and long reads.

By the clock, on a new file that the kernel was asked to forget: one run of scattered rows and one of adjacent rows.
The two counts of reads and bytes, and the two times, give both rates.
"""

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch

from gsplit.features.disk import DiskRows
from gsplit.planner.disk_reads import PAGE_BYTES, DiskReads, reads_of

__all__ = ["DiskRates", "measure_disk", "solve"]

_SCATTERED = 8  # one row of so many


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Names are those of ``Hardware``, less ``disk_``."""

    reads_per_s: float
    bytes_per_s: float


def measure_disk(folder: Path, num_rows: int = 50_000) -> DiskRates:
    """Rows of a page each in a folder: the first half scattered, the second half all."""
    half, width = num_rows // 2, PAGE_BYTES // 4
    chosen = np.random.default_rng(1).choice(half, max(1, half // _SCATTERED), replace=False)
    with TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "rows.bin"
        _write(path, num_rows, width)
        descriptor = os.open(path, os.O_RDONLY)
        rows = DiskRows(
            str(path), descriptor, offset=0, num_rows=num_rows, row_shape=(width,), dtype=torch.float32, first_id=0
        )
        with closing(rows):
            _read(rows, np.array([half]))  # compiles
            scattered = _read(rows, np.sort(chosen).astype(np.int64))
            adjacent = _read(rows, np.arange(half + 64, num_rows))  # beyond what was read ahead
    return solve(scattered, adjacent)


def _write(path: Path, num_rows: int, width: int) -> None:
    with path.open("wb") as file:
        file.write(np.random.default_rng(0).random((num_rows, width), np.float32).tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(rows: DiskRows, ids: npt.NDArray[np.int64]) -> tuple[DiskReads, float]:
    out = torch.empty(ids.size, *rows.row_shape)
    start = time.perf_counter()
    rows.read(torch.from_numpy(ids), out)
    return reads_of(ids, PAGE_BYTES), time.perf_counter() - start


def solve(scattered: tuple[DiskReads, float], adjacent: tuple[DiskReads, float]) -> DiskRates:
    """Both rates from two measurements; the few calls of the long reads count as bytes.

    >>> solve((DiskReads(100, 1e6), 1.1), (DiskReads(0, 1e7), 1.0))
    DiskRates(reads_per_s=100.0, bytes_per_s=10000000.0)
    """
    (few, slow), (many, quick) = scattered, adjacent
    bytes_per_s = many.num_bytes / max(quick, 1e-9)
    rest = max(slow - few.num_bytes / bytes_per_s, 1e-3 * slow, 1e-9)
    return DiskRates(max(1.0, few.reads) / rest, bytes_per_s)
