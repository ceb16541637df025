"""A log file of bounded size: PATH has the newest lines, and PATH.1 those before them."""

import os
import sys
from pathlib import Path
from typing import IO

__all__ = ["RotatedFile", "older_file"]


def older_file(path: Path) -> Path:
    """PATH.1, with the lines before those of ``path``; it may not exist."""
    return path.with_name(f"{path.name}.1")


class RotatedFile:
    """Appends lines. A file that would have more than ``max_bytes`` is renamed to PATH.1, and a new one begins.

    What is not a regular file, such as a link or /dev/stdout, is never renamed. logging's RotatingFileHandler renames
    links, and prints an error of the disk instead of raising it. Several objects of a thread may write to one path.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._open()
        if path.is_symlink() or not path.is_file():
            self._max_bytes = sys.maxsize

    def _open(self) -> None:
        self._stream: IO[str] = self.path.open("a", buffering=1)
        self._num_bytes = os.fstat(self._stream.fileno()).st_size

    def write(self, line: str) -> None:
        """Append an ASCII line."""
        if self._num_bytes and self._num_bytes + len(line) > self._max_bytes:
            ours = os.fstat(self._stream.fileno())
            self._stream.close()
            if self.path.exists() and os.path.samestat(ours, self.path.stat()):  # not renamed by another writer
                self.path.replace(older_file(self.path))
            self._open()
        self._stream.write(line)
        self._num_bytes += len(line)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
