"""The checkpoints of a folder: a file per saved step, the newest of which is the latest.

    FOLDER/step-00000120.safetensors

A file has that name (``checkpoints.names``) only when it is complete (``files.atomic``), so nothing has to point at the
latest one. The temporary file of a process that was killed is removed by the next one that saves. ``FOLDER/lock`` is
locked by the process that saves there, and others are refused. FOLDER may be on object storage (``files.places``),
without a lock: an object exists only when all of it was uploaded.

Each file contains a state and a manifest: the settings that must be equal to continue from it. These are the graph, the
targets, the batch size, the fanouts, the seed, the model and the optimizer. The number of ranks, the strategy, the
replicas and prefetching do not change the steps; they are recorded for information.
"""

import logging
import os
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from gsplit.errors import GSplitError, InputError, UnavailableError, explain
from gsplit.files.places import claim_folder, is_file, remove
from gsplit.files.untrusted import Expected
from gsplit.training.checkpoints.names import (
    CHECKPOINT_NAME,
    checkpoint_path,
    list_checkpoints,
    num_steps_of,
    set_newer_aside,
)
from gsplit.training.checkpoints.state_tree import Snapshot, rebuild_state, take_snapshot
from gsplit.training.checkpoints.tensor_file import (
    NotOpenedError,
    parse_tensor_file,
    read_tensor_bytes,
    write_tensor_file,
)

__all__ = [
    "Checkpoint",
    "CheckpointManifest",
    "CheckpointWriter",
    "find_readable",
    "parse_checkpoint",
    "read_checkpoint",
    "read_latest",
    "write_checkpoint",
]

_LOG = logging.getLogger(__name__)
_FORMAT = "gsplit checkpoint 1"
_SHOWN = 8  # differences in one message


@checked_dataclass(frozen=True)
class CheckpointManifest:
    """``fixed``: settings that must be equal to continue. ``free``: settings that may differ. Both are short texts."""

    fixed: Mapping[str, str]
    free: Mapping[str, str] = field(default_factory=dict)

    def compare(self, now: "CheckpointManifest", where: object) -> None:
        """Refuse to continue with other settings than those of this manifest."""
        names = [*self.fixed, *(name for name in now.fixed if name not in self.fixed)]
        differences = [
            f"{name} {now.fixed.get(name, 'not set')} instead of {self.fixed.get(name, 'not set')}"
            for name in names
            if self.fixed.get(name) != now.fixed.get(name) and not self._is_of_another_torch(name, now)
        ]
        if differences:
            more = [] if len(differences) <= _SHOWN else [f"{len(differences) - _SHOWN} more"]
            fix = "start it as it was saved; only ranks, strategy, replicas, caches and prefetching may change"
            got = "; ".join([*differences[:_SHOWN], *more])
            raise InputError(explain(where, "the same training", got, fix))

    def _is_of_another_torch(self, name: str, now: "CheckpointManifest") -> bool:
        """Whether only one of two versions of torch has an option of the optimizer; it then has its default."""
        is_option = name.startswith("optimizer ") and not name.startswith("optimizer group")
        is_new = (name in self.fixed) != (name in now.fixed) and self.free.get("torch") != now.free.get("torch")
        return is_option and is_new


_MANIFEST = TypeAdapter(CheckpointManifest)


@dataclass(frozen=True)
class Checkpoint:
    """A state that was read, and its manifest. ``damaged``: newer files that could not be read, and why."""

    path: Path
    manifest: CheckpointManifest
    state: dict[str, Any]
    damaged: tuple[str, ...] = ()


def write_checkpoint(path: Path, snapshot: Snapshot, manifest: CheckpointManifest) -> None:
    """Write a state atomically."""
    manifest_text = _MANIFEST.dump_json(manifest).decode()
    texts = {"format": _FORMAT, "manifest": manifest_text, "state": snapshot.text}
    write_tensor_file(path, snapshot.tensors, texts)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check a checkpoint."""
    return parse_checkpoint(read_tensor_bytes(path), path)


def parse_checkpoint(data: bytes, path: Path, damaged: tuple[str, ...] = ()) -> Checkpoint:
    """Check and rebuild a checkpoint from the bytes of its file."""
    found = parse_tensor_file(data, path)
    if found.texts.get("format") != _FORMAT:
        fix = "give a checkpoint, or save it again with this version"
        raise Expected(_FORMAT, fix).refuse(path, found.texts.get("format", "a file without a format"))
    try:
        state = rebuild_state(found.texts["state"], found.tensors)
        return Checkpoint(path, _MANIFEST.validate_json(found.texts["manifest"]), state, damaged)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        expected = Expected("a state and its manifest", "use another checkpoint")
        raise expected.refuse(path, f"{type(error).__name__}: {error}") from None


def find_readable(place: Path) -> tuple[Path, bytes, tuple[str, ...]]:
    """The bytes of a checkpoint, or of the newest readable one of a folder, and why newer ones are not readable.

    A file that cannot be opened for a reason outside it ends the search: it may be intact and should not be skipped. So
    does object storage that does not answer.
    """
    damaged: list[str] = []
    is_named = is_file(place)  # by the user, who may name a link
    for path in [place] if is_named else list_checkpoints(place):
        try:
            data = read_tensor_bytes(path, follow=is_named)
            parse_checkpoint(data, path)
            return path, data, tuple(damaged)
        except NotOpenedError:
            raise
        except InputError as error:
            damaged.append(str(error))
        except (OSError, MemoryError) as error:  # a bad disk, or memory that other processes took
            got = f"{type(error).__name__}: {error}"
            damaged.append(explain(path, "a file that can be read", got, "check the disk and the free memory"))
    got = "; ".join(damaged) or "no file step-*.safetensors"
    raise InputError(explain(place, "a checkpoint that can be read", got, "train again from the start"))


def read_latest(folder: Path) -> Checkpoint:
    """The newest checkpoint of a folder that can be read."""
    path, data, damaged = find_readable(folder)
    return parse_checkpoint(data, path, damaged)


class CheckpointWriter:
    """Saves into one folder, in a thread, and keeps the newest ``keep`` checkpoints there, and the best.

    ``save`` copies the state and returns; it waits only if the previous file is still being written. An error in the
    thread is logged at once and raised by the next ``save`` or ``finish``; existing checkpoints stay. One thread writes
    all of them: starting a thread without free memory can wait forever (``threading.Thread.start``).
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise InputError(explain("keep", "at least 1 checkpoint", keep, "choose 2, or save nothing"))
        self._folder = folder
        self._lock: int | None = None
        self._claim_folder()
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, "gsplit-checkpoint")
        self._written: Future[None] | None = None
        self._spare: Mapping[str, Tensor] = {}

    def _claim_folder(self) -> None:
        """Lock the folder against other processes, until this is collected or the process ends.

        Writers of one process share the lock. One of them holds it, and when it is gone, the next one that saves.
        """
        if self._lock is None:
            self._lock = claim_folder(self._folder, CHECKPOINT_NAME, "wait for it, or choose another folder")
            if self._lock is not None:
                weakref.finalize(self, os.close, self._lock)

    def save(
        self,
        num_steps: int,
        state: Mapping[str, Any],
        manifest: CheckpointManifest,
        best_steps: int | None = None,
    ) -> None:
        """Copy a state and start to write it; ``best_steps`` is the step of the best checkpoint so far."""
        self.finish()
        self._claim_folder()
        snapshot = take_snapshot(state, self._spare)
        self._spare = snapshot.tensors
        path = checkpoint_path(self._folder, num_steps)
        best = None if best_steps is None else checkpoint_path(self._folder, best_steps)
        self._written = self._thread.submit(self._write, path, snapshot, manifest, best)

    def finish(self) -> None:
        """Wait until what was saved is on the disk."""
        written = self._written
        self._written = None
        if written is not None:
            written.result()

    def set_newer_aside(self, num_steps: int) -> None:
        """Rename the checkpoints that are newer than the state that training continues from."""
        self.finish()
        set_newer_aside(self._folder, num_steps)

    def _write(self, path: Path, snapshot: Snapshot, manifest: CheckpointManifest, best: Path | None) -> None:
        try:
            write_checkpoint(path, snapshot, manifest)
            self._remove_old(path, best)
        except BaseException as error:
            _LOG.error("not saved: %s: %s: %s", path, type(error).__name__, error)
            if isinstance(error, (GSplitError, OSError)):
                raise
            got = f"{type(error).__name__}: {error}"  # as one that all ranks can raise
            raise UnavailableError(explain(path, "a checkpoint that can be written", got, "see the error")) from error

    def _remove_old(self, written: Path, best: Path | None) -> None:
        """Remove all but the checkpoint just written, the ``keep`` - 1 before it, the best one, and newer ones."""
        last = num_steps_of(written.name)
        paths = [path for path in list_checkpoints(self._folder) if num_steps_of(path.name) <= last]
        for path in paths[self._keep :]:
            if path != best:
                remove(path)
