"""Where a run lies: a numbered folder for every training, and one file that says which of them is the run.

    RUN/current   the number of the finished training, replaced in one step when another has finished
    RUN/lock      held by the training that is writing here
    RUN/1/        a training: what ``run.folder`` and ``checkpoints`` keep

A training is made in a folder of its own, so an older run stays until the new one is whole; then ``current`` changes
and the older one is removed. Whenever a training is killed, either the old or the new run is there, never none.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from gsplit.errors import InputError, explain
from gsplit.files.atomic import TEMPORARY_SUFFIX, open_lock, try_lock, write_atomic
from gsplit.files.untrusted import Expected, read_bounded
from gsplit.training.checkpoints.files import latest_file

__all__ = [
    "RunLock",
    "checkpoint_folder",
    "finish_training",
    "finished_folder",
    "is_administration",
    "latest_checkpoint",
    "list_trainings",
    "new_training",
    "remove_trainings",
    "training_folder",
]

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_CURRENT, _LOCK, _NEW = "current", "lock", "new"
_NOTE = Expected("the number of a training", "train again")


def list_trainings(run: Path) -> list[Path]:
    """The folders of all trainings of a run, the newest first. A file or a link with a number is none of them."""
    numbers = [int(entry.name) for entry in _numbered(run) if entry.is_dir(follow_symlinks=False)]
    return [run / str(number) for number in sorted(numbers, reverse=True)]


def _numbered(run: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(run) if _NUMBER.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def training_folder(run: Path) -> Path:
    """The folder of the newest training, which is the one that is written."""
    return next(iter(list_trainings(run)), run)


def finished_folder(run: Path) -> Path:
    """The folder of the finished training; RUN itself if it holds the files of one, or nothing is finished."""
    try:
        number = read_bounded(run / _CURRENT, 16, _NOTE, follow=False).decode("ascii", "replace").strip()
    except InputError:
        return run
    return run / number if _NUMBER.fullmatch(number) else run


def checkpoint_folder(training: Path) -> Path:
    """Where a training keeps its checkpoints."""
    return training / "checkpoints"


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run's newest training, finished or not; None if there is none to go on from."""
    return latest_file(checkpoint_folder(training_folder(run)))


def new_training(run: Path, fill: Callable[[Path], None] | None = None) -> Path:
    """Make the folder of another training; ``fill`` puts into it what it begins with. Only for who holds the lock."""
    numbers = [int(entry.name) for entry in _numbered(run)]
    unnamed, folder = run / _NEW, run / str(max(numbers, default=0) + 1)
    shutil.rmtree(unnamed, ignore_errors=True)
    unnamed.mkdir()
    if fill is not None:
        fill(unnamed)
    unnamed.rename(folder)
    return folder


def finish_training(training: Path) -> None:
    """Make a training the run, in one step, and remove the others."""
    write_atomic(training.parent / _CURRENT, [f"{training.name}\n".encode()])
    remove_trainings(training.parent, keep=training)


def remove_trainings(run: Path, keep: Path) -> None:
    """Remove all trainings of a run but one."""
    for training in list_trainings(run):
        if training != keep:
            shutil.rmtree(training)


def is_administration(name: str) -> bool:
    """Whether a file in a run's folder is one of this module's own."""
    return name in (_CURRENT, _LOCK, _NEW, _CURRENT + TEMPORARY_SUFFIX)


class RunLock:
    """One training at a time writes into a run's folder. The lock goes at the end of the block, or with the process."""

    def __init__(self, run: Path) -> None:
        self._run, self._file = run, -1

    def take(self) -> None:
        """Take the lock; refused while another training has it."""
        self._run.mkdir(parents=True, exist_ok=True)
        try:
            file = open_lock(self._run / _LOCK)
        except OSError as error:  # a link, a folder, a disk that is read-only
            fix = "remove it, or check the permissions"
            raise InputError(explain(self._run / _LOCK, "a file to lock", error.strerror, fix)) from None
        if try_lock(file) is False:
            os.close(file)
            fix = "wait for it, or choose another --out"
            raise InputError(explain(self._run, "nobody else writing here", "another training", fix))
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
