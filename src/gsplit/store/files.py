"""Array files of a store: plain ``.npy`` files that are not trusted.

Headers are compared, not parsed. The dtype and shape of the manifest determine the header byte for byte; the file must
begin with it and have exactly the length that follows. So a file cannot request a pickle, another dtype or more memory.
Files are opened relative to the directory's descriptor, one component at a time and without following links, so no
path leads out of the directory.
"""

import functools
import io
import os
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from gsplit.array_types import Array
from gsplit.errors import StoreError, explain
from gsplit.files.mapped_files import map_file
from gsplit.files.untrusted import open_regular

__all__ = [
    "DTYPES",
    "Array",
    "ArrayFile",
    "expected_bytes",
    "npy_header",
    "ordered_bits",
    "open_inside",
    "plain_header",
    "raw_bytes",
    "read_exactly",
    "read_inside",
    "storage_dtype",
    "write_all",
    "write_bytes",
]

DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""Names of element types. numpy has no bfloat16: its 16 bits are stored as uint16."""


def storage_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype of elements of type ``name`` on disk."""
    assert name in DTYPES, name
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


@functools.lru_cache(maxsize=256)
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The header that numpy would write. Its length does not depend on the first extent.

    >>> len(npy_header("int32", (7,))), len(npy_header("int32", (2**40,)))
    (128, 128)
    """
    return plain_header(storage_dtype(dtype), shape)


def plain_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """As ``npy_header``, for any numpy dtype."""
    stream = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def expected_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Length of the whole file, header included."""
    return len(npy_header(dtype, shape)) + prod(shape) * storage_dtype(dtype).itemsize


def raw_bytes(array: Array) -> memoryview:
    """The elements of an array as bytes, copied only if they are not contiguous."""
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat).cast("B")


def write_all(path: Path, array: Array) -> None:
    """Append an array's elements to a file. A full disk is an error, not a shorter file."""
    with path.open("ab", buffering=0) as stream:
        write_bytes(stream, raw_bytes(array))


def write_bytes(stream: io.FileIO, data: memoryview) -> None:
    """Write all bytes. One system call moves at most 2 GiB."""
    written = 0
    while written < data.nbytes:
        written += stream.write(data[written:])


def read_exactly(path: Path, dtype: np.dtype[Any], start: int, count: int) -> Array:
    """Read ``count`` elements from element ``start`` on. A shorter file is an error."""
    found: Array = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
    if found.size != count:
        fix = "free disk space and run it again"
        raise StoreError(explain(path.name, f"{count} elements", found.size, fix))
    return found


def ordered_bits(rows: Array, dtype: str) -> Array:
    """Integers, one column per element of a row, that sort like the values and differ wherever their bits differ."""
    flat = np.ascontiguousarray(rows).reshape(rows.shape[0], prod(rows.shape[1:]))
    if not dtype.endswith(("float16", "float32", "float64")):
        return flat
    bits = flat.view(f"u{flat.itemsize}")
    sign = bits.dtype.type(1 << (8 * flat.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def open_inside(root: int, relative: str) -> int:
    """Open a regular file below the directory descriptor ``root`` for reading, without following links."""
    parts = PurePosixPath(relative).parts
    assert parts and ".." not in parts and not relative.startswith("/"), relative
    directory = os.dup(root)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = below
        return open_regular(parts[-1], directory=directory, follow=False)
    except OSError as error:
        raise StoreError(
            explain(relative, "a regular file inside the store, not a link", error.strerror, _AGAIN)
        ) from None
    finally:
        os.close(directory)


_AGAIN = "restore the file from a copy, or import the graph again"


def read_inside(root: int, relative: str, limit: int) -> bytes:
    """The whole content of a small file."""
    file = open_inside(root, relative)
    with os.fdopen(file, "rb") as stream:
        size = os.fstat(file).st_size
        if size > limit:
            raise StoreError(explain(relative, f"at most {limit} bytes", size, _AGAIN))
        return stream.read(limit)


class ArrayFile:
    """An open array file whose header and length have been checked. Close it after use."""

    def __init__(self, root: int, relative: str, dtype: str, shape: tuple[int, ...]) -> None:
        header = npy_header(dtype, shape)
        self._dtype = storage_dtype(dtype)
        self._shape = shape
        self._length = expected_bytes(dtype, shape)
        self._offset = len(header)
        self._relative = relative
        self._file = open_inside(root, relative)
        try:
            found = os.pread(self._file, len(header), 0)
            size = os.fstat(self._file).st_size
            if found != header:
                expected = f"a .npy file of {dtype} {list(shape)}"
                raise StoreError(explain(relative, expected, _describe(found), _AGAIN))
            if size != self._length:
                expected = f"{self._length} bytes for {dtype} {list(shape)}"
                raise StoreError(explain(relative, expected, f"{size} bytes", _AGAIN))
        except StoreError:
            self.close()
            raise

    @property
    def size(self) -> int:
        return prod(self._shape)

    def read(self, start: int, stop: int) -> Array:
        """Read some elements without the map, which would make megabytes around each of them resident."""
        begin = self._offset + start * self._dtype.itemsize
        end = self._offset + stop * self._dtype.itemsize
        pieces = list[bytes]()
        while begin < end:
            pieces.append(os.pread(self._file, end - begin, begin))
            if not pieces[-1]:
                raise StoreError(explain(self._relative, f"{self._length} bytes, as when it was opened", begin, _AGAIN))
            begin += len(pieces[-1])
        return np.frombuffer(b"".join(pieces), self._dtype)

    def map(self, directory: Path) -> Array:
        """The whole array as a read-only memory map, which outlives this object. ``directory`` is the store's."""
        buffer = map_file(self._file, self._length, directory / self._relative)
        return np.frombuffer(buffer, self._dtype, self.size, self._offset).reshape(self._shape)

    def detach(self) -> tuple[int, int]:
        """The descriptor, which the caller must close from now on, and the offset of the elements in bytes."""
        return self._file, self._offset

    def close(self) -> None:
        """Close the file. Maps stay valid."""
        os.close(self._file)


def _describe(found: bytes) -> str:
    """A wrong header as text for a message."""
    text = found[10:].split(b"\n")[0].rstrip().decode("latin-1", "replace")
    return f"header {text!r}" if found.startswith(b"\x93NUMPY") else f"a file that begins with {found[:8]!r}"
