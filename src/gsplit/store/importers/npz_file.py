"""Arrays inside a ``.npz`` file, read from the zip archive as streams.

Pickled (object) members are refused by their header. Damage inside the archive is an ``InputError``.
"""

import lzma
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from gsplit.array_types import Array, Ids
from gsplit.errors import GSplitError, InputError, explain
from gsplit.files.host_limits import free_bytes
from gsplit.files.untrusted import open_regular
from gsplit.store.source import RowChunk, RowStream, ValueType, row_slices

__all__ = ["NpzMember", "npz_members"]

_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    struct.error,
)
"""Errors of the zip reader for damaged, encrypted or unsupported archives."""
_MAX_COMPRESSION = 1100  # bytes that deflate can encode in one
_SAVE_AGAIN = "write it again with numpy.savez from plain arrays"


@dataclass(frozen=True)
class NpzMember:
    """One array of a ``.npz`` file. Only its header has been read."""

    path: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool

    @property
    def where(self) -> str:
        """File and member, for messages."""
        return f"{self.path}: {self.name}"

    def elements(self, first: int, count: int, step: int) -> Iterator[Array]:
        """Read ``count`` elements in file order from ``first`` on, at most ``step`` at a time."""
        try:
            with _open_archive(self.path) as archive, archive.open(f"{self.name}.npy") as stream:
                _read_header(stream, self.where)
                stream.seek(first * self.dtype.itemsize, 1)
                for start in range(0, count, step):
                    take = min(step, count - start) * self.dtype.itemsize
                    data = stream.read(take)
                    if len(data) != take:
                        found = start + len(data) // self.dtype.itemsize
                        raise InputError(explain(self.where, f"{count} elements", found, _SAVE_AGAIN))
                    yield np.frombuffer(data, self.dtype)
        except GSplitError:
            raise
        except _DAMAGE as error:
            raise InputError(explain(self.where, "an intact zip member", error, _SAVE_AGAIN)) from None

    def read(self) -> Array:
        """Read the whole array, for small members."""
        count = prod(self.shape)
        free = free_bytes()
        if count * self.dtype.itemsize > free // 2:
            got = f"{count * self.dtype.itemsize} bytes"
            fix = "save fewer elements, or use a larger machine"
            raise InputError(explain(self.where, f"at most half of the {free} bytes of memory free", got, fix))
        flat = np.concatenate([np.empty(0, self.dtype), *self.elements(0, count, max(count, 1))])
        return flat.reshape(self.shape, order="F" if self.fortran_order else "C")

    def integers(self) -> Ids:
        """Read the whole array as ids: integers in one dimension."""
        if self.dtype.kind not in "iu" or len(self.shape) > 1:
            got = f"{self.dtype} {list(self.shape)}"
            fix = "save numpy.flatnonzero(mask)" if self.dtype.kind == "b" else "save integers"
            raise InputError(explain(self.where, "integers in one dimension", got, fix))
        return self.read().astype(np.int64).reshape(-1)

    def require_rows(self) -> None:
        """Refuse a matrix that is stored by columns."""
        if self.fortran_order and len(self.shape) > 1:
            fix = "save numpy.ascontiguousarray(array)"
            raise InputError(explain(self.where, "rows one after the other (C order)", "Fortran order", fix))

    def rows(self, dtype: str) -> RowStream:
        """The member as a per-vertex array, stored with element type ``dtype``."""
        self.require_rows()
        if not 1 <= len(self.shape) <= 2:
            raise InputError(explain(self.where, "one or two dimensions", list(self.shape), "save one row per vertex"))
        width = prod(self.shape[1:])

        def chunks() -> Iterator[RowChunk]:
            if not width:  # rows without columns: nothing to read
                yield RowChunk(slice(0, self.shape[0]), np.empty(self.shape, self.dtype))
                return
            pieces = list(row_slices(self.shape[0], width * self.dtype.itemsize))
            step = (pieces[0].stop if pieces else 1) * max(width, 1)
            for piece, flat in zip(pieces, self.elements(0, prod(self.shape), step), strict=False):
                yield RowChunk(piece, flat.reshape(-1, *self.shape[1:]))

        return RowStream(ValueType(dtype, self.shape[1:]), chunks)


@contextmanager
def _open_archive(path: Path, *, follow: bool = True) -> Iterator[zipfile.ZipFile]:
    with os.fdopen(open_regular(path, follow=follow), "rb") as file, zipfile.ZipFile(file) as archive:
        yield archive


def npz_members(path: Path, *, follow: bool = True) -> dict[str, NpzMember]:
    """Read the headers of all members of a ``.npz`` file. Without ``follow``, a link is refused."""
    members = {}
    try:
        with _open_archive(path, follow=follow) as archive:
            for info in archive.infolist():
                if not info.filename.endswith(".npy"):
                    raise InputError(explain(path, "members ending in .npy", info.filename[:80], _SAVE_AGAIN))
                name = info.filename.removesuffix(".npy")
                with archive.open(info) as stream:
                    dtype, shape, fortran_order = _read_header(stream, f"{path}: {name}")
                    member = NpzMember(path, name, dtype, shape, fortran_order)
                    _check_size(member, stream.tell(), info)
                members[name] = member
    except GSplitError:
        raise
    except _DAMAGE as error:
        raise InputError(explain(path, "a .npz file", error, f"check the path, or {_SAVE_AGAIN}")) from None
    return members


def _check_size(member: NpzMember, header_bytes: int, info: zipfile.ZipInfo) -> None:
    """Refuse an array that is larger than its bytes in the archive can encode, before memory is allocated."""
    num_bytes = header_bytes + prod(member.shape) * member.dtype.itemsize
    most = info.compress_size * (_MAX_COMPRESSION if info.compress_type == zipfile.ZIP_DEFLATED else 1)
    known = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if not known or num_bytes != info.file_size or num_bytes > most:
        expected = f"{num_bytes} bytes, for {member.dtype} {list(member.shape)}"
        got = f"{info.file_size}, packed into {info.compress_size}"
        raise InputError(explain(member.where, expected, got, _SAVE_AGAIN))


def _read_header(stream: IO[bytes], where: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
        else:
            shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(stream)
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError) as error:
        raise InputError(explain(where, "an array in .npy form", error, _SAVE_AGAIN)) from None
    if any(not isinstance(extent, int) or extent < 0 for extent in shape):
        raise InputError(explain(where, "a shape", shape, _SAVE_AGAIN))
    if dtype.hasobject:
        raise InputError(explain(where, "plain numbers", "pickled objects, which are not opened", _SAVE_AGAIN))
    return dtype, shape, fortran_order
