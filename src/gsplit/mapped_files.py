"""Files that are memory maps: nothing is mapped that the disk has no room for, and a file that shrinks is named.

Reading a map beyond the end of its file, or writing one on a full disk, ends a process by SIGBUS: the kernel has no
other way to say it. So space is reserved before a map is written (``create_mapped``), and whoever reads rows of a map
first asks whether the file is still as long as it was (``check_files``; a microsecond). What happens between that
question and the read cannot be made an exception: then a last word names the files that are too short, and the process
ends by SIGBUS as it would have. A handler that is already there, such as ``faulthandler``'s, has its turn after ours.
"""

import ctypes
import mmap
import os
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from gsplit.errors import StoreError, explain

__all__ = [
    "MappedFile",
    "check_files",
    "create_mapped",
    "files_behind",
    "fill_mapped",
    "flush",
    "map_file",
    "reserve",
    "temporary_mapped",
]

Array = npt.NDArray[Any]
_FIX = "restore the file from a copy or make it again, and let nothing write to it while it is in use"


@dataclass(frozen=True)
class MappedFile:
    """A map, the file it is of, and how long that must be."""

    buffer: mmap.mmap
    path: Path
    num_bytes: int

    def describe_loss(self) -> str | None:
        """What is wrong, if the file has become shorter; the map has its own descriptor of it."""
        size = self.buffer.size()
        if size >= self.num_bytes:
            return None
        return explain(self.path, f"{self.num_bytes} bytes, as when it was opened", f"{size} bytes", _FIX)


_maps: WeakKeyDictionary[mmap.mmap, tuple[Path, int]] = WeakKeyDictionary()
"""All maps of this process: a signal handler belongs to the process, too."""
_handler: Any = None


def map_file(file: int, num_bytes: int, path: Path, *, writable: bool = False) -> mmap.mmap:
    """A map of the first ``num_bytes`` of an open file that is at least as long."""
    buffer = mmap.mmap(file, num_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    _maps[buffer] = path.absolute(), num_bytes
    _handle_bus_errors()
    return buffer


def files_behind(*arrays: Array) -> tuple[MappedFile, ...]:
    """The mapped files that hold some arrays; those in memory have none."""
    found = {}
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        base = base.obj if isinstance(base, memoryview) else base
        if isinstance(base, mmap.mmap) and base in _maps:
            found[id(base)] = MappedFile(base, *_maps[base])
    return tuple(found.values())


def check_files(files: Iterable[MappedFile]) -> None:
    """Refuse to read what is no longer there: a ``StoreError`` instead of SIGBUS."""
    for file in files:
        lost = file.describe_loss()
        if lost is not None:
            raise StoreError(lost)


def reserve(file: int, num_bytes: int, path: Path) -> None:
    """Have the disk keep room for a whole file; if it has none, an ``OSError`` that names the file."""
    if num_bytes == 0:
        return
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {num_bytes} bytes wanted", str(path)) from None


def create_mapped(path: Path, dtype: Any, shape: tuple[int, ...], header: bytes) -> Array:
    """A new file of ``header`` and zeros, its space reserved, as a writable map of the zeros."""
    path.touch(exist_ok=False)
    return fill_mapped(path, dtype, shape, header)


def fill_mapped(path: Path, dtype: Any, shape: tuple[int, ...], header: bytes) -> Array:
    """The same in place of what a file holds."""
    with path.open("rb+") as stream:
        stream.truncate(0)
        stream.write(header)
        stream.flush()
        return _map_new(stream.fileno(), np.dtype(dtype), shape, len(header), path)


def temporary_mapped(folder: str | Path | None, name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
    """The same without a header in a file without a name: whatever ends us, it is gone. ``name`` is for messages."""
    folder = Path(tempfile.gettempdir() if folder is None else folder)
    with tempfile.TemporaryFile(dir=folder) as stream:
        return _map_new(stream.fileno(), np.dtype(dtype), shape, 0, folder / f"({name})")


def flush(array: Array) -> None:
    """Write what was written to a map to its file."""
    for file in files_behind(array):
        file.buffer.flush()


def _map_new(file: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, path: Path) -> Array:
    if 0 in shape:  # an empty file cannot be mapped
        return np.empty(shape, dtype)
    num_bytes = offset + prod(shape) * dtype.itemsize
    reserve(file, num_bytes, path)
    return np.frombuffer(map_file(file, num_bytes, path, writable=True), dtype, prod(shape), offset).reshape(shape)


def _handle_bus_errors() -> None:
    """From now on, say which file it was before SIGBUS ends the process.

    Set through the C library: a handler of ``signal.signal`` only runs when the interpreter goes on, and it never does.
    SIGBUS comes where a map is touched, in the middle of no lock of ours, so Python code may run there.
    """
    global _handler
    if _handler is not None:
        return
    library = ctypes.CDLL(None)
    library.signal.restype, library.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    previous: int | None = None

    def say(number: int) -> None:
        library.signal(signal.SIGBUS, previous)  # the same read fails again when this returns, and ends the process
        os.write(2, f"\nSIGBUS: {_last_words()}\n".encode())

    _handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(say)
    previous = library.signal(signal.SIGBUS, ctypes.cast(_handler, ctypes.c_void_p))


def _last_words() -> str:
    files = [MappedFile(buffer, *_maps[buffer]) for buffer in list(_maps)]
    lost = [said for said in (file.describe_loss() for file in files) if said is not None]
    if lost:
        return "\n".join(lost)
    places = sorted({str(file.path.parent) for file in files})
    got = "all are as long as they were: the disk fails or is full"
    return explain("a memory map", "its files to be readable", got, f"check the disk of {', '.join(places)}")
