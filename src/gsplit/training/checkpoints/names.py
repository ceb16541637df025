"""The names of checkpoints in a folder: which there are, which is the latest, and which are not used any more.

Newer files that could not be read are renamed to ``.unused`` when training continues from an older one. Nothing here
imports torch: the command line looks for checkpoints before it does.
"""

import re
from contextlib import suppress
from pathlib import Path

from gsplit.files.places import list_names, rename

__all__ = [
    "CHECKPOINT_NAME",
    "checkpoint_path",
    "latest_file",
    "list_checkpoints",
    "num_steps_of",
    "remove_unused",
    "set_newer_aside",
]

CHECKPOINT_NAME = re.compile(r"step-(\d{8,12})\.safetensors")
_UNUSED_SUFFIX = ".unused"


def checkpoint_path(folder: Path, num_steps: int) -> Path:
    """The file of the state after ``num_steps`` steps."""
    return folder / f"step-{num_steps:08d}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first; empty if the folder does not exist."""
    names = [name for name in list_names(folder) if CHECKPOINT_NAME.fullmatch(name)]
    return [folder / name for name in sorted(names, key=num_steps_of, reverse=True)]


def num_steps_of(name: str) -> int:
    """The steps before the checkpoint of this file name."""
    found = CHECKPOINT_NAME.fullmatch(name)
    assert found is not None
    return int(found[1])


def latest_file(folder: Path) -> Path | None:
    """The newest checkpoint of a folder, or None."""
    return next(iter(list_checkpoints(folder)), None)


def set_newer_aside(folder: Path, num_steps: int) -> None:
    """Rename the checkpoints after the step that training continues from: unreadable, or no longer part of it."""
    for path in list_checkpoints(folder):
        if num_steps_of(path.name) > num_steps:
            rename(path, path.name + _UNUSED_SUFFIX)


def remove_unused(folder: Path) -> None:
    """Remove what was set aside, when a training has finished without it."""
    for path in folder.glob(f"step-*{_UNUSED_SUFFIX}"):
        if CHECKPOINT_NAME.fullmatch(path.name.removesuffix(_UNUSED_SUFFIX)):
            with suppress(IsADirectoryError):  # not a file of ours
                path.unlink()
