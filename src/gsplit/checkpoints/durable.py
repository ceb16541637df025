"""Files that are whole or not there: written under another name, flushed to the disk, renamed, the folder flushed."""

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["TEMPORARY_SUFFIX", "flush_folder", "write_whole"]

TEMPORARY_SUFFIX = ".tmp"
"""What a file that is being written is called in addition."""


def write_whole(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """Write a file that is there with all of it, also after a loss of power, or is what it was before."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
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
