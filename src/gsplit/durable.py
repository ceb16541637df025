"""Files that are whole or not there: written under another name, flushed to the disk, renamed, the folder flushed."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["TEMPORARY_SUFFIX", "flush_folder", "open_whole", "write_whole"]

TEMPORARY_SUFFIX = ".tmp"
"""What a file that is being written is called in addition."""


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that is there with all of it, also after a loss of power, or is what it was before."""
    with open_whole(path) as stream:
        for piece in pieces:
            stream.write(piece)


@contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name when the block ends without an error.

    A link at its place, or at that of the temporary file, is replaced, never followed.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a stranger's link to a file of ours
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:  # of the disk, or of whoever writes
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
