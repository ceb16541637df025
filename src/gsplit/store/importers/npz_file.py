"""Arrays inside a ``.npz`` file, read as streams out of the zip archive and never whole.

Pickled (object) members are refused by their header; damage inside the archive is an ``InputError``.
"""

import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.store.files import Array
from gsplit.store.source import RowChunk, RowStream, ValueType, row_slices

__all__ = ["NpzMember", "npz_members"]

_SAVE_AGAIN = "write it again with numpy.savez from plain arrays"


@dataclass(frozen=True)
class NpzMember:
    """One array, known by its header alone."""

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
        """``count`` elements in file order from ``first`` on, at most ``step`` at a time."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.name}.npy") as stream:
                _read_header(stream, self.where)
                stream.seek(first * self.dtype.itemsize, 1)
                for start in range(0, count, step):
                    take = min(step, count - start) * self.dtype.itemsize
                    data = stream.read(take)
                    if len(data) != take:
                        found = start + len(data) // self.dtype.itemsize
                        raise InputError(explain(self.where, f"{count} elements", found, _SAVE_AGAIN))
                    yield np.frombuffer(data, self.dtype)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise InputError(explain(self.where, "a sound zip member", error, _SAVE_AGAIN)) from None

    def read(self) -> Array:
        """The whole array, for small members."""
        count = prod(self.shape)
        flat = np.concatenate([np.empty(0, self.dtype), *self.elements(0, count, max(count, 1))])
        return flat.reshape(self.shape, order="F" if self.fortran_order else "C")

    def integers(self) -> npt.NDArray[np.int64]:
        """The whole array as ids: whole numbers in one dimension."""
        if self.dtype.kind not in "iu" or len(self.shape) > 1:
            got = f"{self.dtype} {list(self.shape)}"
            fix = "save numpy.flatnonzero(mask)" if self.dtype.kind == "b" else "save integers"
            raise InputError(explain(self.where, "integers in one dimension", got, fix))
        return self.read().astype(np.int64).reshape(-1)

    def rows(self, dtype: str) -> RowStream:
        """The member as a per-vertex array, stored with element type ``dtype``."""
        if self.fortran_order and len(self.shape) > 1:
            fix = "save numpy.ascontiguousarray(array)"
            raise InputError(explain(self.where, "rows one after the other (C order)", "Fortran order", fix))
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


def npz_members(path: Path) -> dict[str, NpzMember]:
    """The headers of all members of a ``.npz`` file."""
    members = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for file in archive.namelist():
                if not file.endswith(".npy"):
                    raise InputError(explain(path, "members ending in .npy", file, _SAVE_AGAIN))
                name = file.removesuffix(".npy")
                with archive.open(file) as stream:
                    members[name] = NpzMember(path, name, *_read_header(stream, f"{path}: {name}"))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise InputError(explain(path, "a .npz file", error, f"check the path, or {_SAVE_AGAIN}")) from None
    return members


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
        raise InputError(explain(where, "plain numbers", "pickled objects, which are never opened", _SAVE_AGAIN))
    return dtype, shape, fortran_order
