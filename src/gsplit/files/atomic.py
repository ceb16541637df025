"""Atomic files and folders, fsync and file locks.

A file is written under a temporary name of its writer, flushed to the disk and renamed, and its folder is flushed:
after a crash or a loss of power the name refers to the complete new file or to what was there before. A temporary file
is locked while it is being written; one without a lock is of a process that was killed, and the next writer removes it.
A folder that is complete and flushed replaces another one by two renames, which are undone if the second one fails.

Locks are advisory (``flock``) and end with the process that holds them. Some shared file systems have no locks; there,
callers continue without one.
"""

import fcntl
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gsplit.errors import InputError, explain

__all__ = [
    "LOCK",
    "TEMPORARY_SUFFIX",
    "fsync_folder",
    "lock_folder",
    "locked",
    "open_atomic",
    "open_lock",
    "remove_abandoned",
    "replace_folder",
    "target_of",
    "try_lock",
    "write_atomic",
]

TEMPORARY_SUFFIX = ".tmp"
"""At the end of the name of a file while it is being written."""
LOCK = "lock"
"""The file in a folder that is locked by the process that writes there."""
_PROCESS = "process "
_TEMPORARY = re.compile(rf"(.+)\.[0-9a-f]{{8}}{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL)


def write_atomic(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that appears complete, or leave what was there before."""
    with open_atomic(path) as stream:
        for piece in pieces:
            stream.write(piece)


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name when the block ends without an error.

    Of two that write the same file, the one that ends last stays. A symbolic link at ``path`` is replaced and never
    followed.
    """
    remove_abandoned(path.parent, path.name.__eq__)
    temporary, descriptor = _open_temporary(path)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            temporary.replace(path)  # while it is locked
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def _open_temporary(path: Path) -> tuple[Path, int]:
    """A new temporary file for ``path``, open and locked."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        descriptor = os.open(temporary, flags, 0o666)
        if try_lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # another process has just taken it for one of a killed process, and removes it


def target_of(name: str) -> str | None:
    """The name that a temporary file gets when it is complete; None for other names.

    >>> target_of("history.json.1f2e3d4c.tmp")
    'history.json'
    """
    found = _TEMPORARY.fullmatch(name)
    return None if found is None else found[1]


def remove_abandoned(folder: Path, is_target: Callable[[str], object]) -> None:
    """Remove the temporary files of such names that processes left which were killed."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        target = target_of(name)
        if target is None or not is_target(target):
            continue
        with suppress(OSError):  # renamed or removed meanwhile, or a link
            descriptor = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if try_lock(descriptor):
                    (folder / name).unlink()
            finally:
                os.close(descriptor)


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


def lock_folder(folder: Path, fix: str, *, shares: bool = False) -> int | None:
    """Make a folder and lock it for this process until the returned descriptor is closed, or the process ends.

    Raises an error if another process holds the lock. ``shares``: None if it is this process itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    try:
        descriptor = open_lock(path)
    except OSError as error:  # a link, a folder, a read-only disk
        got = error.strerror
        raise InputError(explain(path, "a file to lock", got, "remove it, or check the permissions")) from None
    process = f"{_PROCESS}{os.getpid()} on {socket.gethostname()}"
    is_ours = try_lock(descriptor) is not False
    holder = os.pread(descriptor, 300, 0).decode(errors="replace")
    if is_ours:
        if holder != process and (not holder or holder.startswith(_PROCESS)):  # otherwise it is a file of the user
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, process.encode(), 0)
        return descriptor
    os.close(descriptor)
    if shares and holder == process:
        return None
    raise InputError(explain(folder, "a folder that no other training writes to", f"one locked by {holder}", fix))
