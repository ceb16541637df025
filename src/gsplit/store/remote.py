"""Stores on object storage: what is fetched to this host, and what is read by ranges.

    URL/manifest.json           read whenever the store is opened; written last by ``upload``
    URL/indptr.npy ...          fetched whole to the mirror, when first used
    URL/features/x.blocks       SHA-256 of features/x as in the manifest, then of every block of its rows

    MIRROR/manifest.json        CACHE/NAME-<digest of the manifest>: one folder for each content of the store
    MIRROR/indptr.npy ...       complete and checked: files get their name afterwards
    MIRROR/hot/features/x-...   the hottest rows of a rank (``features.remote``)

The ranks of a host share the mirror. One of them fetches a file while the others wait for its lock. Everything that is
read is compared with checksums: whole arrays with that of the manifest, rows with that of their block. So an object
that is damaged, or replaced while it is in use, is an error.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, StoreError, explain
from gsplit.files.atomic import locked, open_atomic, write_atomic
from gsplit.files.byte_sizes import parse_bytes
from gsplit.files.objects import ObjectFolder
from gsplit.files.places import cache_folder
from gsplit.store.files import expected_bytes, npy_header, storage_dtype
from gsplit.store.manifest import MAX_MANIFEST_BYTES, ArrayEntry, Manifest, file_of, parse_manifest

__all__ = ["BLOCK_BYTES", "Mirror", "RowBlocks", "blocks_of", "open_mirror", "rows_per_block"]

BLOCK_BYTES = 256 << 10
"""Rows are read and checked in blocks of at most so many bytes, and of one row at least."""
_PIECE_BYTES = 8 << 20
_THREADS = 8
_DIGEST_BYTES = 32
_CHANGED = "the object was damaged or replaced: open the store again, or upload it again with gsplit upload"


def blocks_of(name: str) -> str:
    """The name of the object with the digests of an array's blocks."""
    return f"{name}.blocks"


def rows_per_block(row_bytes: int) -> int:
    """The rows of a block."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))


class RowBlocks:
    """The rows of an array on object storage, in blocks that are checked when they are read. For any thread."""

    def __init__(self, objects: ObjectFolder, name: str, entry: ArrayEntry) -> None:
        self.where = objects.where(file_of(name))
        self.num_rows = entry.shape[0]
        self.row_bytes = prod(entry.shape[1:]) * storage_dtype(entry.dtype).itemsize
        self.block_rows = rows_per_block(self.row_bytes)
        self._objects = objects
        self._file = file_of(name)
        self._offset = len(npy_header(entry.dtype, entry.shape))
        self._digests = self._read_digests(blocks_of(name), entry)

    def _read_digests(self, name: str, entry: ArrayEntry) -> bytes:
        num_bytes = _DIGEST_BYTES * (1 + -(-self.num_rows // self.block_rows))
        where = self._objects.where(name)
        try:
            found = self._objects.read(name, num_bytes)
        except FileNotFoundError:
            fix = "upload the store with gsplit upload, or leave cache_bytes out: features are then fetched whole"
            raise StoreError(explain(where, "checksums to read rows by", "no such object", fix)) from None
        if len(found) != num_bytes or found[:_DIGEST_BYTES].hex() != entry.sha256:
            raise StoreError(explain(where, f"checksums of {entry.describe()}", "others", _CHANGED))
        return found[_DIGEST_BYTES:]

    def read(self, first: int, stop: int) -> npt.NDArray[np.uint8]:
        """The rows of the blocks ``first .. stop - 1`` as bytes [rows, row_bytes], in one request."""
        low = first * self.block_rows
        high = min(stop * self.block_rows, self.num_rows)
        num_bytes = (high - low) * self.row_bytes
        data = memoryview(self._objects.read_range(self._file, self._offset + low * self.row_bytes, num_bytes))
        block_bytes = self.block_rows * self.row_bytes
        for block in range(first, stop):
            begin = (block - first) * block_bytes
            found = hashlib.sha256(data[begin : begin + block_bytes]).digest()
            if found != self._digests[block * _DIGEST_BYTES : (block + 1) * _DIGEST_BYTES]:
                expected = f"the bytes that were uploaded, in block {block}"
                raise StoreError(explain(self.where, expected, "others", _CHANGED))
        return np.frombuffer(data, np.uint8).reshape(high - low, self.row_bytes)


class Mirror:
    """The files of a store that this host has fetched. ``cache_bytes``: None if features are fetched like all arrays,
    otherwise the disk of each rank for its hottest rows; others are read by ranges.
    """

    def __init__(self, objects: ObjectFolder, folder: Path, manifest: Manifest, cache_bytes: int | None) -> None:
        self.objects = objects
        self.folder = folder
        self.cache_bytes = cache_bytes
        self._manifest = manifest

    def fetch(self, name: str) -> None:
        """Fetch the file of an array, unless it is here already."""
        path = self.folder / file_of(name)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / "lock"):
            if not path.exists():  # another rank may have fetched it meanwhile
                self._fetch(name, self._manifest.arrays[name], path)

    def _fetch(self, name: str, entry: ArrayEntry, path: Path) -> None:
        file = file_of(name)
        num_bytes = expected_bytes(entry.dtype, entry.shape)
        where = self.objects.where(file)
        size = self.objects.size(file)
        if size != num_bytes:
            got = "no such object" if size is None else f"{size} bytes"
            raise StoreError(explain(where, f"{num_bytes} bytes for {entry.describe()}", got, _CHANGED))
        try:
            with open_atomic(path) as stream:
                digest = self._copy(file, num_bytes, npy_header(entry.dtype, entry.shape), stream)
                if digest != entry.sha256:
                    raise StoreError(explain(where, entry.describe(), f"SHA-256 {digest[:16]}...", _CHANGED))
        except OSError as error:
            fix = "free disk space, or choose another folder with GSPLIT_CACHE_DIR"
            raise StoreError(explain(path, f"room for {num_bytes} bytes", error.strerror or error, fix)) from None

    def _copy(self, file: str, num_bytes: int, header: bytes, stream: BinaryIO) -> str:
        """Copy an object in pieces, several at a time; returns the SHA-256 of its elements, "" for another header."""
        digest = hashlib.sha256()
        begins = range(0, num_bytes, _PIECE_BYTES)
        with ThreadPoolExecutor(_THREADS, "fetch") as pool:
            for at in range(0, len(begins), _THREADS):  # so many pieces are in memory
                futures = [
                    pool.submit(self.objects.read_range, file, begin, min(_PIECE_BYTES, num_bytes - begin))
                    for begin in begins[at : at + _THREADS]
                ]
                for place, future in enumerate(futures, at):
                    data = future.result()
                    stream.write(data)
                    if place == 0 and not data.startswith(header):
                        return ""
                    digest.update(memoryview(data)[len(header) if place == 0 else 0 :])
        return digest.hexdigest()

    def open_blocks(self, name: str) -> RowBlocks | None:
        """The rows of a feature array that is read by ranges; None for an array that is fetched."""
        if self.cache_bytes is None:
            return None
        return RowBlocks(self.objects, name, self._manifest.arrays[name])


def open_mirror(url: str, cache_dir: str | Path | None, cache_bytes: int | str | None) -> tuple[Mirror, Manifest]:
    """Read the manifest of a store on object storage, and open the folder with what this host has fetched of it."""
    objects = ObjectFolder(url)
    try:
        text = objects.read("manifest.json", MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        fix = "check the URL; gsplit upload puts a store there"
        raise StoreError(
            explain(objects.where("manifest.json"), "the manifest of a store", "no such object", fix)
        ) from None
    except InputError as error:
        raise StoreError(str(error)) from None
    manifest = parse_manifest(text)
    root = Path(cache_dir or os.environ.get("GSPLIT_CACHE_DIR") or cache_folder() / "stores")
    size = os.environ.get("GSPLIT_CACHE_BYTES") if cache_bytes is None else cache_bytes
    name = PurePosixPath(objects.url.partition("?")[0]).name
    folder = root / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "manifest.json").exists():
            with locked(folder / "lock"):
                write_atomic(folder / "manifest.json", [text])
    except OSError as error:
        fix = "choose another folder with GSPLIT_CACHE_DIR"
        raise StoreError(explain(folder, "a folder to fetch to", error.strerror, fix)) from None
    return Mirror(objects, folder, manifest, None if size in (None, "") else parse_bytes(size, "cache_bytes")), manifest
