"""Whole files by path, on this host or on object storage: ``Path("s3://BUCKET/FOLDER/NAME")``.

A file appears under its name when it is complete. On this host it is written under a temporary name, flushed and
renamed; an object is uploaded in parts and exists when the last request has succeeded.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gsplit.errors import InputError, explain
from gsplit.files.atomic import lock_folder, open_atomic, remove_abandoned, write_atomic
from gsplit.files.objects import ObjectFolder, as_url

__all__ = [
    "cache_folder",
    "claim_folder",
    "find_object",
    "is_file",
    "list_names",
    "open_whole",
    "remove",
    "rename",
    "write_whole",
]

_COPIED_BYTES = 8 << 20


def cache_folder() -> Path:
    """For files of this user and host that can be made again: ``$XDG_CACHE_HOME/gsplit``, or ``~/.cache/gsplit``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "gsplit"


def _as_folder(path: Path) -> ObjectFolder | None:
    url = as_url(path)
    if url is not None and "?" in url:
        fix = "set AWS_ENDPOINT_URL and AWS_REGION in the environment"
        raise InputError(explain(url.partition("?")[0], "the URL of a folder or file, without a query", "one", fix))
    return None if url is None else ObjectFolder(url)


def find_object(path: Path) -> tuple[ObjectFolder, str] | None:
    """The folder on object storage and the name in it; None for a path of this host."""
    folder = _as_folder(path.parent) if as_url(path) is not None else None
    return None if folder is None else (folder, path.name)


def claim_folder(folder: Path, names: re.Pattern[str], fix: str) -> int | None:
    """Make a folder, lock it (``lock_folder``), and remove what killed processes left of files of such names.

    None on object storage, which has neither folders nor locks, and if this process holds the lock already.
    """
    if _as_folder(folder) is not None:
        return None
    descriptor = lock_folder(folder, fix, shares=True)
    remove_abandoned(folder, names.fullmatch)
    return descriptor


def list_names(folder: Path) -> list[str]:
    """The names of the files in a folder; empty if it does not exist."""
    objects = _as_folder(folder)
    if objects is not None:
        return objects.list()
    try:
        return [entry.name for entry in os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_file(path: Path) -> bool:
    """Whether there is a file, or an object, at a path."""
    found = find_object(path)
    return path.is_file() if found is None else found[0].size(found[1]) is not None


def write_whole(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """Write a file that appears complete, or leave what was there before."""
    found = find_object(path)
    if found is None:
        write_atomic(path, pieces)
    else:
        found[0].write(found[1], pieces)


@contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name when the block ends without an error."""
    found = find_object(path)
    if found is None:
        with open_atomic(path) as stream:
            yield stream
        return
    with tempfile.TemporaryFile() as stream:
        yield stream
        stream.seek(0)
        found[0].write(found[1], list(iter(lambda: stream.read(_COPIED_BYTES), b"")))


def rename(path: Path, name: str) -> None:
    """Give a file another name in its folder."""
    found = find_object(path)
    if found is None:
        path.replace(path.with_name(name))
    else:
        found[0].rename(found[1], name)


def remove(path: Path) -> None:
    """Remove a file, if it exists."""
    found = find_object(path)
    if found is None:
        path.unlink(missing_ok=True)
    else:
        found[0].remove(found[1])
