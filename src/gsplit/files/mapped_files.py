"""Memory-mapped files. A full disk and a file that became shorter are exceptions wherever that is possible.

Reading a map beyond the end of its file, or writing to one on a full disk, raises SIGBUS, which ends the process.
Two checks prevent most of it: disk space is reserved before a map is written (``create_mapped``), and a reader compares
the length of the file with its length when it was mapped before it reads rows (``check_files``; about a microsecond).
A file that shrinks between that check and the read still ends the process. Then ``faulthandler`` prints the Python
stack of every thread, so the failing line is visible. No Python code runs in the signal handler: it would need the GIL,
which another thread may hold while it waits for the thread that failed.
"""

import faulthandler
import mmap
import os
import tempfile
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.array_types import Array
from gsplit.errors import InputError, StoreError, explain

__all__ = [
    "MappedFile",
    "check_files",
    "check_workspace",
    "create_mapped",
    "files_behind",
    "fill_mapped",
    "flush",
    "map_file",
    "reserve",
    "temporary_mapped",
]

_FIX = "restore the file from a copy or make it again, and let nothing write to it while it is in use"
_STANDARD_ERROR = 2


class MappedFile(mmap.mmap):
    """A memory map with the path and the required length of its file."""

    path: Path
    num_bytes: int


def map_file(file: int, num_bytes: int, path: Path, *, writable: bool = False) -> MappedFile:
    """Map the first ``num_bytes`` of an open file that is at least that long."""
    buffer = MappedFile(file, num_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    buffer.path = path.absolute()
    buffer.num_bytes = num_bytes
    if not faulthandler.is_enabled():
        faulthandler.enable(_STANDARD_ERROR)
    return buffer


def files_behind(*arrays: Array) -> tuple[MappedFile, ...]:
    """The mapped files that hold the elements of some arrays. Arrays in memory have none."""
    found = {}
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        base = base.obj if isinstance(base, memoryview) else base
        if isinstance(base, MappedFile):
            found[id(base)] = base
    return tuple(found.values())


def check_files(files: Iterable[MappedFile]) -> None:
    """Raise ``StoreError`` if a file became shorter than its map."""
    for file in files:
        size = file.size()  # of the map's own descriptor: a file that was replaced does not matter
        if size < file.num_bytes:
            expected = f"{file.num_bytes} bytes, as when it was opened"
            raise StoreError(explain(file.path, expected, f"{size} bytes", _FIX))


def reserve(file: int, num_bytes: int, path: Path) -> None:
    """Reserve disk space for a whole file. A full disk is an ``OSError`` that names the file."""
    if num_bytes == 0:
        return
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {num_bytes} bytes wanted", str(path)) from None


def create_mapped(path: Path, dtype: Any, shape: tuple[int, ...], header: bytes) -> Array:
    """Create a file of ``header`` and zeros, reserve its space, and map the zeros as a writable array."""
    path.touch(exist_ok=False)
    return fill_mapped(path, dtype, shape, header)


def fill_mapped(path: Path, dtype: Any, shape: tuple[int, ...], header: bytes) -> Array:
    """As ``create_mapped``, in place of the content of an existing file."""
    with path.open("rb+") as stream:
        stream.truncate(0)
        stream.write(header)
        stream.flush()
        return _map_new(stream.fileno(), np.dtype(dtype), shape, len(header), path)


def temporary_mapped(folder: str | Path | None, name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
    """As ``create_mapped`` in an unlinked file, which disappears with the process. ``name`` is used in messages."""
    folder = Path(tempfile.gettempdir() if folder is None else folder)
    with tempfile.TemporaryFile(dir=folder) as stream:
        return _map_new(stream.fileno(), np.dtype(dtype), shape, 0, folder / f"({name})")


def flush(array: Array) -> None:
    """Write the changed pages of a mapped array to its file."""
    for file in files_behind(array):
        file.flush()


def _map_new(file: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, path: Path) -> Array:
    if 0 in shape:  # an empty file cannot be mapped
        return np.empty(shape, dtype)
    num_bytes = offset + prod(shape) * dtype.itemsize
    reserve(file, num_bytes, path)
    return np.frombuffer(map_file(file, num_bytes, path, writable=True), dtype, prod(shape), offset).reshape(shape)


def check_workspace(folder: Path | None) -> None:
    """Refuse a folder for activations that cannot be written to. None is the temporary folder."""
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        got = "a folder without write permission" if folder.is_dir() else "no folder of this name"
        raise InputError(explain(f"workspace {folder}", "a folder to write in", got, "create it, or choose another"))
