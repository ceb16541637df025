"""Random rows out of a large .npy file: page faults of a memory map, ``pread`` from compiled threads, ``os.preadv`` from Python threads, io_uring.

python -m gsplit_bench disk-reads --work /tmp/work --out benchmarks/results/DATE-disk-reads

Every read asks for the same rows into the same buffer. ``warm``: the file is in the page cache. ``cold``: it is dropped from it before every read by
posix_fadvise(DONTNEED), with nothing mapping it; a disk's own cache and the host of a virtual machine keep what they have. io_uring needs `pip install liburing`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gsplit.array_types import Ids
from gsplit.features import disk
from gsplit.features.disk import DiskRows
from gsplit.features.sources import MappedRows

__all__ = ["main"]

Read = Callable[[], None]


def make_file(path: Path, num_rows: int, columns: int) -> None:
    if path.exists() and path.stat().st_size == 128 + num_rows * columns * 4:
        return
    array = np.lib.format.open_memmap(path, "w+", np.float32, (num_rows, columns))
    for first in range(0, num_rows, 1 << 16):
        array[first : first + (1 << 16)] = np.random.default_rng(first).random(
            array[first : first + (1 << 16)].shape, np.float32
        )
    array.flush()


def by_map(path: Path, ids: Ids, out: torch.Tensor) -> Read:
    wanted = torch.from_numpy(ids)

    def read() -> None:  # mapped anew: a map keeps the file in the page cache
        array = np.load(path, mmap_mode="r")
        MappedRows("x", array, torch.float32, 0).read(wanted, out)

    return read


def by_threads(path: Path, ids: Ids, out: torch.Tensor, threads: int) -> Read:
    rows = DiskRows(
        str(path),
        os.open(path, os.O_RDONLY),
        offset=128,
        num_rows=1 << 40,
        row_shape=(out.size(1),),
        dtype=torch.float32,
        threads=threads,
    )
    wanted = torch.from_numpy(ids)

    def read() -> None:
        rows.read(wanted, out)

    return read


def _runs(ids: Ids, row_bytes: int) -> tuple[Ids, Ids, Ids, Ids]:
    """Sorted rows, where they go, and the first and last place of every run that is read at once."""
    order = np.argsort(ids)
    rows = ids[order]
    starts = np.flatnonzero(np.append(True, np.diff(rows) > disk.GAP_BYTES // row_bytes + 1))
    return rows, order, starts, np.append(starts[1:], rows.size)


def by_python(path: Path, ids: Ids, out: torch.Tensor, threads: int) -> Read:
    file, size, target, pool = (
        os.open(path, os.O_RDONLY),
        out.size(1) * 4,
        out.numpy().view(np.uint8),
        ThreadPoolExecutor(threads),
    )

    def piece(rows: Ids, order: Ids, starts: Ids, stops: Ids) -> None:
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            first, num_rows = int(rows[start]), int(rows[stop - 1] - rows[start]) + 1
            if num_rows == 1:
                os.preadv(file, [target[order[start]].data], 128 + first * size)
                continue
            together = np.empty((num_rows, size), np.uint8)
            os.preadv(file, [together.data], 128 + first * size)
            target[order[start:stop]] = together[rows[start:stop] - first]

    def read() -> None:
        rows, order, starts, stops = _runs(ids, size)
        cuts = np.linspace(0, starts.size, 4 * threads + 1).astype(int)
        list(
            pool.map(
                lambda k: piece(rows, order, starts[cuts[k] : cuts[k + 1]], stops[cuts[k] : cuts[k + 1]]),
                range(4 * threads),
            )
        )

    return read


def by_uring(path: Path, ids: Ids, out: torch.Tensor, depth: int) -> Read | None:
    try:
        import liburing as uring  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    file, size, target = os.open(path, os.O_RDONLY), out.size(1) * 4, out.numpy().view(np.uint8)
    ring = uring.Ring()
    uring.io_uring_queue_init(depth, ring)

    def read() -> None:
        rows, order, starts, stops = _runs(ids, size)
        for first in range(0, starts.size, depth):
            chosen = range(first, min(first + depth, starts.size))
            buffers = [
                bytearray(int(rows[stops[k] - 1] - rows[starts[k]] + 1) * size) for k in chosen
            ]  # it reads into these only
            for k, buffer in zip(chosen, buffers, strict=True):
                uring.io_uring_prep_read(uring.io_uring_get_sqe(ring), file, buffer, 128 + int(rows[starts[k]]) * size)
            uring.io_uring_submit_and_wait(ring, len(buffers))
            uring.io_uring_cq_advance(ring, len(buffers))
            for k, buffer in zip(chosen, buffers, strict=True):
                run = slice(starts[k], stops[k])
                target[order[run]] = np.frombuffer(buffer, np.uint8).reshape(-1, size)[rows[run] - rows[starts[k]]]

    return read


def measure(
    path: Path, ways: list[tuple[str, int, Read]], out: torch.Tensor, want: npt.NDArray[Any], times: int
) -> list[dict[str, Any]]:
    """Every way in turn, so that what else the machine does meets all of them alike."""
    records: list[dict[str, Any]] = [
        {"way": way, "threads_or_depth": number, "warm_ms": [], "cold_ms": []} for way, number, _ in ways
    ]
    for turn in range(times + 1):  # the first compiles, and fills the page cache
        for kind in ("cold_ms", "warm_ms"):
            for record, (_, _, read) in zip(records, ways, strict=True):
                if kind == "cold_ms":
                    drop(path)
                out.zero_()
                start = time.perf_counter()
                read()
                if turn:
                    record[kind].append(round(1000 * (time.perf_counter() - start), 2))
                assert np.array_equal(out.numpy(), want)
    return records


def drop(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for files of 1 GB, on the disk to measure")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of every read")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="where to write .json and .md")
    options = parser.parse_args(arguments)
    records: list[dict[str, Any]] = []
    for columns in (128, 512):
        path, num_rows = options.work / f"rows-{columns}.npy", (1 << 30) // (4 * columns)
        make_file(path, num_rows, columns)
        ids = np.random.default_rng(1).choice(num_rows, options.rows, replace=False)
        out = torch.zeros(ids.size, columns)
        with path.open("rb") as stream:
            want = np.fromfile(stream, np.float32, offset=128).reshape(num_rows, columns)[ids]
        ways: list[tuple[str, int, Read | None]] = [("memory map", 1, by_map(path, ids, out))]
        ways += [("pread, compiled threads", n, by_threads(path, ids, out, n)) for n in (1, 2, 4, 8, 16, 32)]
        ways += [("os.preadv, Python threads", n, by_python(path, ids, out, n)) for n in (1, 4, 16)]
        ways += [("io_uring (liburing)", n, by_uring(path, ids, out, n)) for n in (16, 256)]
        there = [(way, number, read) for way, number, read in ways if read is not None]
        records += [{"columns": columns} | record for record in measure(path, there, out, want, options.times)]
        print(report({"records": records}), flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    versions = {"python": sys.version.split()[0], "numpy": np.__version__, "kernel": os.uname().release}
    settings = {
        "rows": options.rows,
        "file_bytes": 1 << 30,
        "gap_bytes": disk.GAP_BYTES,
        "cold": "posix_fadvise(DONTNEED)",
    }
    document = {"commit": commit, "versions": versions, "settings": settings, "records": records}
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(report(document))


def report(document: dict[str, Any]) -> str:
    """The table of a record; words are added by hand above it."""
    lines = ["| columns | way | threads, depth | warm, ms | cold, ms |", "|---|---|---|---|---|"]
    for record in document["records"]:
        middle = [statistics.median(record[f"{kind}_ms"]) for kind in ("warm", "cold")]
        lines.append(
            f"| {record['columns']} | {record['way']} | {record['threads_or_depth']} | {middle[0]:.0f} | {middle[1]:.0f} |"
        )
    return "\n".join(lines) + "\n"
