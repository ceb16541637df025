"""Write a store atomically: it exists whole or not at all.

All files, spill files included, go into a hidden sibling ``.NAME.tmp-*``. ``commit`` flushes it to disk and renames it
into place. A killed writer leaves only that sibling, and the next writer of the same store removes it: a file in the
sibling is locked as long as its writer lives. The parent directory is locked while siblings are made, removed and
renamed.
"""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from gsplit.array_types import Array
from gsplit.errors import InputError, StoreError, explain
from gsplit.files.atomic import fsync_folder, locked, replace_folder, try_lock
from gsplit.files.mapped_files import create_mapped, flush
from gsplit.files.objects import as_url
from gsplit.files.untrusted import Expected, read_document
from gsplit.progress import Progress
from gsplit.store.files import npy_header, raw_bytes, storage_dtype, write_bytes
from gsplit.store.manifest import MAX_MANIFEST_BYTES, ArrayEntry, Manifest, file_of
from gsplit.store.source import row_slices

__all__ = ["ArrayAppender", "StoreWriter", "check_output", "is_store", "put_in_place", "work_folder"]

LOCK = "lock"
SPILL = "spill"
_MANIFEST = Expected("the manifest of a store", "choose another name")


class ArrayAppender:
    """An array of known type and row shape that is written front to back, and hashed on the way."""

    def __init__(self, path: Path, dtype: str, row_shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._row_shape = row_shape
        self._rows = 0
        self._hash = hashlib.sha256()
        self._stream = path.open("xb", buffering=0)
        self._stream.write(npy_header(dtype, (0, *row_shape)))

    def append(self, rows: Array) -> None:
        """Add rows, converted to the array's type."""
        assert rows.shape[1:] == self._row_shape, (rows.shape, self._row_shape)
        data = raw_bytes(rows.astype(storage_dtype(self._dtype), copy=False))
        self._hash.update(data)
        write_bytes(self._stream, data)
        self._rows += rows.shape[0]

    def close(self) -> None:
        """Close the file. May be called again."""
        self._stream.close()

    def finish(self) -> ArrayEntry:
        """Write the final header, flush to disk and describe the array."""
        shape = (self._rows, *self._row_shape)
        self._stream.seek(0)
        self._stream.write(npy_header(self._dtype, shape))
        os.fsync(self._stream.fileno())
        self.close()
        return ArrayEntry(dtype=self._dtype, shape=shape, sha256=self._hash.hexdigest())


class StoreWriter:
    """Writes one store; a context manager. Leaving it without ``commit`` removes all files."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = _follow(path)
        self._overwrite = overwrite
        self._appenders: dict[str, ArrayAppender] = {}
        self._placed: dict[str, tuple[str, Array]] = {}
        self._linked: dict[str, ArrayEntry] = {}

    def __enter__(self) -> Self:
        check_output(self.path, overwrite=self._overwrite)
        with locked(self.path.parent):
            self._sweep()
            check_output(self.path, overwrite=self._overwrite)
            self._work, self._lock = _make_work_folder(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for appender in self._appenders.values():
            appender.close()
        self._lock.close()
        shutil.rmtree(self._work, ignore_errors=True)  # after a commit it is no longer there

    def _sweep(self) -> None:
        """Remove the leftovers of killed writers. A store that was moved aside is restored if it is the only one."""
        for left in self._siblings("old"):
            if os.path.lexists(self.path) or not is_store(left):
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.rename(self.path)
        for left in self._siblings("tmp"):
            with suppress(FileNotFoundError), (left / LOCK).open("r+") as lock:
                if try_lock(lock.fileno()) is False:
                    continue  # its writer lives
            shutil.rmtree(left, ignore_errors=True)

    def _siblings(self, kind: str) -> list[Path]:
        pattern = re.compile(re.escape(f".{self.path.name}.{kind}-") + "[0-9a-f]{8}")
        return [p for p in self.path.parent.iterdir() if pattern.fullmatch(p.name)]

    @property
    def spill_directory(self) -> Path:
        """A directory for temporary files, removed with the writer."""
        directory = self._work / SPILL
        directory.mkdir(exist_ok=True)
        return directory

    def _file(self, name: str) -> Path:
        assert name not in self._appenders and name not in self._placed and name not in self._linked, name
        file = self._work / file_of(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def append(self, name: str, dtype: str, row_shape: tuple[int, ...] = ()) -> ArrayAppender:
        """Start an array that is written in order."""
        appender = ArrayAppender(self._file(name), dtype, row_shape)
        self._appenders[name] = appender
        return appender

    def write(self, name: str, dtype: str, array: Array) -> None:
        """Write a whole array."""
        self.append(name, dtype, array.shape[1:]).append(array)

    def copy(self, name: str, dtype: str, rows: Array, progress: Progress) -> None:
        """Write a whole array in pieces, such as a memory map that does not fit into memory."""
        appender = self.append(name, dtype, rows.shape[1:])
        for piece in row_slices(rows.shape[0], rows[:1].nbytes):
            appender.append(rows[piece])
            progress(f"copy {name}", piece.stop, rows.shape[0])

    def link(self, name: str, entry: ArrayEntry, store: Path) -> None:
        """Take the file of an array from another store as it is, without a copy where the file system has links."""
        file = self._file(name)
        source = store / file_of(name)
        try:
            os.link(source, file, follow_symlinks=False)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, file, follow_symlinks=False)
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        self._linked[name] = entry

    def place(self, name: str, dtype: str, shape: tuple[int, ...]) -> Array:
        """Start an array of known shape that is written in any order, through a memory map of zeros."""
        mapped = create_mapped(self._file(name), storage_dtype(dtype), shape, npy_header(dtype, shape))
        self._placed[name] = (dtype, mapped)
        return mapped

    def finish_arrays(self) -> dict[str, ArrayEntry]:
        """Complete all arrays. Returns their entries for the manifest."""
        entries = self._linked | {name: appender.finish() for name, appender in self._appenders.items()}
        for name, (dtype, mapped) in self._placed.items():
            flush(mapped)
            digest = hashlib.sha256(raw_bytes(mapped)).hexdigest()
            entries[name] = ArrayEntry(dtype=dtype, shape=mapped.shape, sha256=digest)
        return dict(sorted(entries.items()))

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, flush all files and rename the store into place."""
        shutil.rmtree(self._work / SPILL, ignore_errors=True)
        with (self._work / "manifest.json").open("x", encoding="utf-8") as stream:
            stream.write(manifest.as_json())
            stream.flush()
            os.fsync(stream.fileno())
        for directory in [self._work, *(d for d in self._work.rglob("*") if d.is_dir())]:
            fsync_folder(directory)
        put_in_place(self._work, self.path, overwrite=self._overwrite)


def put_in_place(work: Path, path: Path, *, overwrite: bool) -> None:
    """Let a store that is complete and flushed appear under its name; one that it replaces stays if that fails."""
    with locked(path.parent):
        check_output(path, overwrite=overwrite)
        (work / LOCK).unlink(missing_ok=True)
        replaced = replace_folder(work, path)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def is_store(path: Path) -> bool:
    """Whether a directory has the manifest of a store of any version."""
    try:
        found = read_document(path / "manifest.json", _MANIFEST, limit=MAX_MANIFEST_BYTES, follow=False)
    except InputError:
        return False
    return found.get("format") == "gsplit-store"


def _follow(path: Path) -> Path:
    """Where a store is written, and what its writers leave is looked for: not beside a symbolic link to it."""
    return path.resolve() if path.is_symlink() else path


def _make_work_folder(path: Path) -> tuple[Path, TextIO]:
    """A hidden folder beside a store, and its lock, which is held while the file is open."""
    folder = path.parent / f".{path.name}.tmp-{secrets.token_hex(4)}"
    folder.mkdir()
    lock = (folder / LOCK).open("w")
    try_lock(lock.fileno())
    return folder, lock


@contextmanager
def work_folder(path: Path) -> Iterator[Path]:
    """A folder for what is needed to write a store; if this process is killed, the store's next writer removes it."""
    path = _follow(path)
    with locked(path.parent):
        folder, lock = _make_work_folder(path)
    try:
        yield folder
    finally:
        lock.close()
        shutil.rmtree(folder, ignore_errors=True)


def check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse a name that cannot become a store, before any work is done."""
    if (url := as_url(path)) is not None:
        fix = "write it to a disk, then copy it there with gsplit upload"
        raise StoreError(explain(url, "a folder of this host: stores are not written to object storage", "a URL", fix))
    if path.suffix != ".gsplit" or path.name == ".gsplit":
        raise StoreError(explain(path, "NAME.gsplit", path.name, "give the store a name that ends in .gsplit"))
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        got = "a directory that cannot be written" if path.parent.is_dir() else "no such directory"
        raise StoreError(explain(path.parent, "a directory to write in", got, "create it, or choose another output"))
    if os.path.lexists(path) and not (overwrite and is_store(path)):
        fix = "choose another name, or ask to overwrite it (--overwrite replaces stores only, nothing else)"
        got = "a store" if is_store(path) else "another file or directory"
        raise StoreError(explain(path, "no file or directory of this name", got, fix))
