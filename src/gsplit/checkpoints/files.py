"""The checkpoints of a folder: a file per saved step, the newest of which is the latest.

    FOLDER/step-00000120.safetensors

A file has that name only when it is whole (``tensor_file``), so nothing has to point at the latest one, and nothing can
point at half of one. What a killed process was writing has another name and is removed by the next one that saves.
Newer files that could not be read are set aside as ``.unused`` when training goes on from an older one.
"""

import io
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gsplit.checkpoints.manifest import Manifest, parse_manifest
from gsplit.checkpoints.state_tree import Snapshot, rebuild_state
from gsplit.checkpoints.tensor_file import (
    NotOpenedError,
    check_tensor_file,
    open_tensor_file,
    read_tensor_file,
    write_tensor_file,
)
from gsplit.errors import InputError, explain
from gsplit.files.atomic import TEMPORARY_SUFFIX
from gsplit.untrusted import Expected

__all__ = [
    "Checkpoint",
    "checkpoint_path",
    "find_readable",
    "latest_file",
    "list_checkpoints",
    "parse_checkpoint",
    "read_checkpoint",
    "read_latest",
    "remove_old",
    "remove_unfinished",
    "remove_unused",
    "set_newer_aside",
    "write_checkpoint",
]

_NAME = re.compile(r"step-(\d{8,12})\.safetensors")
_UNUSED_SUFFIX = ".unused"
_FORMAT = "gsplit checkpoint 1"


@dataclass(frozen=True)
class Checkpoint:
    """A state that was read, and what it was saved from. ``damaged``: newer files that could not be read, and why."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    damaged: tuple[str, ...] = ()


def checkpoint_path(folder: Path, num_steps: int) -> Path:
    """Where the state after so many steps is kept."""
    return folder / f"step-{num_steps:08d}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first; none if there is no such folder."""
    try:
        names = [entry.name for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names, key=_num_steps, reverse=True)]


def _num_steps(name: str) -> int:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1])


def latest_file(folder: Path) -> Path | None:
    """The newest checkpoint of a folder, None if there is none."""
    return next(iter(list_checkpoints(folder)), None)


def write_checkpoint(path: Path, snapshot: Snapshot, manifest: Manifest) -> None:
    """Write a state; the file is there with all of it, or not at all."""
    texts = {"format": _FORMAT, "manifest": manifest.text, "state": snapshot.text}
    write_tensor_file(path, snapshot.tensors, texts)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check a checkpoint."""
    stream, size = open_tensor_file(path)
    with stream:
        return parse_checkpoint(stream, size, path)


def parse_checkpoint(stream: BinaryIO, size: int, path: Path, damaged: tuple[str, ...] = ()) -> Checkpoint:
    """A checkpoint from its bytes."""
    found = read_tensor_file(stream, size, path)
    if found.texts.get("format") != _FORMAT:
        fix = "give a checkpoint, or save it again with this version"
        raise Expected(_FORMAT, fix).refuse(path, found.texts.get("format", "none"))
    try:
        state = rebuild_state(found.texts["state"], found.tensors)
        return Checkpoint(path, parse_manifest(found.texts["manifest"]), state, damaged)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        expected = Expected("a state and its manifest", "use another checkpoint")
        raise expected.refuse(path, f"{type(error).__name__}: {error}") from None


def find_readable(place: Path) -> tuple[Path, bytes, tuple[str, ...]]:
    """The bytes of a checkpoint, or of the newest of a folder that can be read; and why newer ones cannot be.

    One that cannot be opened for a reason outside it ends the search: training would go on without it for no reason.
    """
    damaged: list[str] = []
    is_named = place.is_file()  # by the user, who may name a link
    for path in [place] if is_named else list_checkpoints(place):
        try:
            stream, size = open_tensor_file(path, follow=is_named)
            with stream:
                check_tensor_file(stream, size, path)
                data = stream.read(size)
            parse_checkpoint(io.BytesIO(data), len(data), path)
            return path, data, tuple(damaged)
        except NotOpenedError:
            raise
        except InputError as error:
            damaged.append(str(error))
        except (OSError, MemoryError) as error:  # a bad disk; a file that grew, or memory that others took
            got = f"{type(error).__name__}: {error}"
            damaged.append(explain(path, "a file that can be read", got, "check the disk and the free memory"))
    got = "; ".join(damaged) or "none"
    raise InputError(explain(place, "a checkpoint that can be read", got, "train again from the start"))


def read_latest(folder: Path) -> Checkpoint:
    """The newest checkpoint of a folder that can be read; what is damaged in newer ones is told with it."""
    path, data, damaged = find_readable(folder)
    return parse_checkpoint(io.BytesIO(data), len(data), path, damaged)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process was writing; only for whoever saves here."""
    for entry in os.scandir(folder):
        if _NAME.fullmatch(entry.name.removesuffix(TEMPORARY_SUFFIX)) and entry.name.endswith(TEMPORARY_SUFFIX):
            Path(entry.path).unlink()


def remove_old(written: Path, *, keep: int, best: Path | None) -> None:
    """Leave a checkpoint that was just written, the ``keep`` - 1 before it, the best one, and what is newer."""
    last = _num_steps(written.name)
    paths = [path for path in list_checkpoints(written.parent) if _num_steps(path.name) <= last]
    for path in paths[keep:]:
        if path != best:
            path.unlink(missing_ok=True)


def set_newer_aside(folder: Path, num_steps: int) -> None:
    """Rename the checkpoints behind the step that training goes on from: unreadable, or not of it any more."""
    for path in list_checkpoints(folder):
        if _num_steps(path.name) > num_steps:
            path.replace(path.with_name(path.name + _UNUSED_SUFFIX))


def remove_unused(folder: Path) -> None:
    """Remove what was set aside, when a training has finished without it."""
    for path in folder.glob(f"step-*{_UNUSED_SUFFIX}"):
        if _NAME.fullmatch(path.name.removesuffix(_UNUSED_SUFFIX)):
            with suppress(IsADirectoryError):  # a stranger's, and in nobody's way
                path.unlink()
