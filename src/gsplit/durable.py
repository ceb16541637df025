"""Files that are whole or not there: written under another name, flushed to the disk, renamed, the folder flushed."""

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["TEMPORARY_SUFFIX", "flush_folder", "write_whole"]

TEMPORARY_SUFFIX = ".tmp"
"""What a file that is being written is called in addition."""


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that is there with all of it, also after a loss of power, or is what it was before.

    A link at its place, or at that of the temporary file, is replaced, never followed.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a stranger's link to a file of ours
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:  # of the disk, or of whoever makes the pieces
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
