"""Saving while training goes on: the state is copied at once and written by a thread.

A save costs training the copy, and a wait only if the file before is still being written. What goes wrong in the
thread is logged at once and raised by the next ``save`` or by ``finish``; checkpoints that are there stay. One rank
saves: every rank has the whole state.
"""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gsplit.checkpoints.files import (
    checkpoint_path,
    remove_old,
    remove_unfinished,
    set_newer_aside,
    write_checkpoint,
)
from gsplit.checkpoints.manifest import Manifest
from gsplit.checkpoints.state_tree import Snapshot, take_snapshot
from gsplit.errors import InputError, explain

__all__ = ["CheckpointWriter"]

_LOG = logging.getLogger(__name__)


class CheckpointWriter:
    """Saves into one folder and keeps the newest ``keep`` checkpoints there, and the best."""

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise InputError(explain("keep", "at least 1 checkpoint", keep, "choose 2, or save nothing"))
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        self._folder, self._keep = folder, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._spare: Mapping[str, Tensor] = {}

    def save(self, num_steps: int, state: Mapping[str, Any], manifest: Manifest, best_steps: int | None = None) -> None:
        """Copy a state and have it written; ``best_steps`` is the step whose checkpoint is the best so far."""
        self.finish()
        snapshot, path = take_snapshot(state, self._spare), checkpoint_path(self._folder, num_steps)
        self._spare = snapshot.tensors
        best = None if best_steps is None else checkpoint_path(self._folder, best_steps)
        self._thread = threading.Thread(
            target=self._write, args=(path, snapshot, manifest, best), name="gsplit-checkpoint"
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until what was saved is on the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def set_newer_aside(self, num_steps: int) -> None:
        """Rename what is newer than the state that training goes on from."""
        self.finish()
        set_newer_aside(self._folder, num_steps)

    def _write(self, path: Path, snapshot: Snapshot, manifest: Manifest, best: Path | None) -> None:
        try:
            write_checkpoint(path, snapshot, manifest)
            remove_old(path, keep=self._keep, best=best)
        except BaseException as error:  # to be raised by whoever saves, whatever it is
            _LOG.error("not saved: %s: %s: %s", path, type(error).__name__, error)
            self._error = error
