"""Saves and restores the state of a ``Trainer``: what a checkpoint contains, and what must be equal to continue.

Every rank has the whole state, so only rank 0 writes. Only rank 0 reads, and it broadcasts the bytes to the others: all
ranks continue from the same state, also on hosts that do not share a file system.
"""

import hashlib
import importlib.metadata
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from gsplit.distributed.comm.comm import Call, Comm, run_on_rank_zero
from gsplit.errors import InputError, explain
from gsplit.training.checkpoints.files import (
    Checkpoint,
    CheckpointManifest,
    CheckpointWriter,
    find_readable,
    parse_checkpoint,
)
from gsplit.training.checkpoints.state_check import check_fit, check_form
from gsplit.training.train_state import TrainState

__all__ = ["StateSaver", "describe_training", "read_on_all_ranks", "restore_state"]

_LONGEST = 200  # characters of a value in a message
_LOG = logging.getLogger(__name__)
_VERSIONS = ("gsplit", "torch")
_KERNELS_OF_OPTIMIZERS = ("foreach", "fused", "capturable")  # how a step is computed, not what


class StateSaver:
    """Saves the states of one training into a folder. Every rank makes one."""

    def __init__(self, state: TrainState, folder: Path, keep: int, description: Mapping[str, str]) -> None:
        """``keep``: how many checkpoints are kept. ``description``: what else must be equal to continue from them."""
        self._state = state
        self._comm = state.loader.mesh.control
        self._description = description
        self._writer: CheckpointWriter | None = None  # on rank 0 only

        def open_folder() -> None:
            self._writer = CheckpointWriter(folder, keep)

        run_on_rank_zero(self._comm, "open checkpoints", open_folder)

    def save(self) -> None:
        """Copy the state and have it written while training goes on. A collective.

        Rank 0 copies and writes. If that fails, or the write before has failed, all ranks raise the error.
        """
        run_on_rank_zero(self._comm, "save the state", self._save)

    def _save(self) -> None:
        state = self._state
        manifest = describe_training(state, self._description)
        best_steps = None if state.best is None else state.best.num_steps
        self._on_rank_zero().save(state.num_steps, state.state_dict(), manifest, best_steps)

    def finish(self) -> None:
        """Wait until what was saved is on the disk. A collective."""
        run_on_rank_zero(self._comm, "finish checkpoints", lambda: self._on_rank_zero().finish())

    def set_newer_aside(self) -> None:
        """Rename the folder's checkpoints of later steps than the state's. A collective."""
        steps = self._state.num_steps
        run_on_rank_zero(self._comm, "set newer checkpoints aside", lambda: self._on_rank_zero().set_newer_aside(steps))

    def _on_rank_zero(self) -> CheckpointWriter:
        assert self._writer is not None
        return self._writer


def describe_training(state: TrainState, more: Mapping[str, str]) -> CheckpointManifest:
    """The settings that determine the steps of a training, and how it is run."""
    loader = state.loader
    optimizer = state.optimizer
    scheduler = "none" if state.lr_scheduler is None else type(state.lr_scheduler).__name__
    fixed = {**loader.description, "optimizer": type(optimizer).__name__, "lr_scheduler": scheduler, **more}
    for name, value in optimizer.defaults.items():
        if name not in _KERNELS_OF_OPTIMIZERS:  # a scheduler changes a learning rate that is a tensor in place
            fixed[f"optimizer {name}"] = "a tensor" if isinstance(value, Tensor) else str(value)
    fixed |= _describe_groups(state) | _describe_model(state.model)
    free = {
        "ranks": str(loader.mesh.size),
        "replicas": str(loader.mesh.num_replicas),
        "strategy": loader.strategy,
        "prefetch": str(loader.prefetch),
        "sampling_threads": str(loader.sampling_threads),
        "gsplit": importlib.metadata.version("gsplit"),
        "torch": torch.__version__,
    }
    return CheckpointManifest(fixed, free)


def _describe_groups(state: TrainState) -> dict[str, str]:
    """The parameters of every group in their order: the optimizer's state is assigned by position."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    found = {}
    for number, group in enumerate(state.optimizer.param_groups):
        text = ", ".join(names.get(id(parameter), "not of the model") for parameter in group["params"])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        short = text if len(text) <= _LONGEST else f"of {len(group['params'])} parameters ({digest})"
        found[f"optimizer group {number}"] = short
    return found


def _describe_model(model: Module) -> dict[str, str]:
    """Types and shapes of all weights, and which of them are frozen."""
    frozen = {name for name, value in model.named_parameters(remove_duplicate=False) if not value.requires_grad}
    found = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            got, fix = type(value).__name__, "return a tensor from get_extra_state"
            raise InputError(explain(f"model {name}", "a tensor", got, fix))
        text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        found[f"model {name}"] = f"{text} frozen" if name in frozen else text
    return found


def restore_state(state: TrainState, checkpoint: Checkpoint, description: Mapping[str, str]) -> None:
    """Load a checkpoint into a training with the same settings; differences are listed in the error.

    One of another version of gsplit or torch is loaded with a note: its steps may differ in the last digits.
    """
    now = describe_training(state, description)
    checkpoint.manifest.compare(now, checkpoint.path)
    saved = {name: checkpoint.manifest.free.get(name, "of an unknown version") for name in _VERSIONS}
    if state.loader.mesh.rank == 0 and any(saved[name] != now.free[name] for name in _VERSIONS):
        texts = [", ".join(f"{name} {each[name]}" for name in _VERSIONS) for each in (saved, now.free)]
        _LOG.warning("%s was saved with %s and is continued with %s", checkpoint.path, *texts)
    check_form(checkpoint.state, checkpoint.path)
    check_fit(checkpoint.state, state, checkpoint.path)
    try:
        state.load_state_dict(checkpoint.state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(
            explain(checkpoint.path, "the state of this training", got, "use another checkpoint")
        ) from None


def read_on_all_ranks(comm: Comm, place: Path) -> Checkpoint:
    """A checkpoint, or the newest of a folder that can be read, from rank 0's disk. A collective."""
    found: list[tuple[Path, bytes, tuple[str, ...]]] = []
    run_on_rank_zero(comm, "read a checkpoint", lambda: found.append(find_readable(place)))
    path, data, damaged = found[0] if found else (place, b"", ())
    data = _broadcast(comm, data)
    names = comm.gather_text(Call("name the checkpoint"), str(path))
    checkpoint = parse_checkpoint(data, Path(names[0]), damaged)
    check_form(checkpoint.state, checkpoint.path)
    return checkpoint


def _broadcast(comm: Comm, data: bytes) -> bytes:
    if comm.size == 1:
        return data
    length = torch.tensor([len(data)], device=comm.device)
    comm.broadcast(Call("length of the checkpoint"), length)
    raw = torch.empty(int(length), dtype=torch.uint8, device=comm.device)
    if comm.rank == 0:
        raw.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast(Call("the checkpoint"), raw)
    return raw.numpy(force=True).tobytes()
