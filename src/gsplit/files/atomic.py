"""Atomic files and folders, fsync and file locks.

A file is written under a temporary name, flushed to the disk and renamed, and its folder is flushed: after a crash or a
loss of power the name refers to the complete new file or to what was there before. A folder that is complete and
flushed replaces another one by two renames, which are undone if the second one fails.

Locks are advisory (``flock``) and end with the process that holds them. Some shared file systems have no locks; there,
callers continue without one.
"""

import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "TEMPORARY_SUFFIX",
    "fsync_folder",
    "locked",
    "open_atomic",
    "open_lock",
    "replace_folder",
    "try_lock",
    "write_atomic",
]

TEMPORARY_SUFFIX = ".tmp"
"""Appended to the name of a file while it is being written."""


def write_atomic(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that appears complete, or leave what was there before."""
    with open_atomic(path) as stream:
        for piece in pieces:
            stream.write(piece)


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name when the block ends without an error.

    A symbolic link at ``path``, or at the temporary name, is replaced and never followed.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)  # left by a process that was killed, or a link to another file
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(new: Path, path: Path) -> Path | None:
    """Rename a complete and flushed folder to ``path``; returns the folder it replaced, for the caller to remove.

    An existing folder is first renamed to ``.NAME.old-*``. If the process is killed before the second rename, that is
    the only complete one, and the next writer should rename it back. Once replaced, it is named ``.NAME.tmp-*``.
    """
    token = secrets.token_hex(4)
    old = path.with_name(f".{path.name}.old-{token}")
    replaces = path.exists()
    try:
        if replaces:
            path.rename(old)
        new.rename(path)
    except BaseException:
        if replaces and old.exists() and not path.exists():
            old.rename(path)
        raise
    fsync_folder(path.parent)
    return old.rename(path.with_name(f".{path.name}.tmp-{token}")) if replaces else None


def open_lock(path: Path) -> int:
    """Open a file to be locked, created if it does not exist. A symbolic link is refused with an ``OSError``."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file. False if another process holds the lock, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file or folder and hold it; without locks, continue at once."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY) if path.is_dir() else open_lock(path)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
