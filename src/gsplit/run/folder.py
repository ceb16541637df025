"""A training run on disk: its settings and history as JSON, the model's weights as arrays. No pickles (law 8).

RUN/1/settings.json  what was asked for, and the shape of the graph's input and output
RUN/1/weights.safetensors  the state dict
RUN/1/history.json   losses and seconds of every step, accuracies of every evaluation
RUN/1/steps-rank-R.jsonl   telemetry, a line per step
RUN/1/checkpoints/   states to go on from

``run.layout`` says which numbered folder is the run: an older one stays until the new one is whole. A folder that holds
these files itself is a run, too.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from torch import Tensor
from torch.nn import Module

from gsplit.errors import InputError, explain
from gsplit.files.atomic import TEMPORARY_SUFFIX, write_atomic
from gsplit.files.untrusted import open_regular
from gsplit.run.config import TrainSettings
from gsplit.run.layout import (
    checkpoint_folder,
    finish_training,
    finished_folder,
    is_administration,
    latest_checkpoint,
    list_trainings,
    new_training,
    remove_trainings,
    training_folder,
)
from gsplit.run.results import ModelShape, history_as_dict
from gsplit.run.saved_files import read_settings, read_weights
from gsplit.training.checkpoints.files import list_checkpoints, remove_unused
from gsplit.training.checkpoints.tensor_file import write_tensor_file
from gsplit.training.train_state import History

__all__ = [
    "begin_run",
    "check_new_run",
    "continue_run",
    "finish_run",
    "history_path",
    "load_run",
    "load_weights",
    "telemetry_files",
    "telemetry_path",
    "write_settings",
]

_FILES = ("settings.json", "weights.safetensors", "history.json")
_MAX_LINE_BYTES = 1 << 20  # of telemetry; 256 spans take a fiftieth


def telemetry_path(run: Path, rank: int) -> Path:
    """Where a rank writes its steps while the run is on."""
    return training_folder(run) / f"steps-rank-{rank}.jsonl"


def telemetry_files(run: Path) -> list[Path]:
    """The telemetry of a finished run, a file per rank."""
    return sorted(finished_folder(run).glob("steps-rank-*.jsonl"))


def history_path(run: Path) -> Path:
    """Losses, seconds and evaluations of a finished run."""
    return finished_folder(run) / "history.json"


def check_new_run(run: Path, *, overwrite: bool) -> None:
    """Refuse a place that holds a run, finished or not, unless it may be replaced, or anything else."""
    if not run.exists():
        return
    kind = _kind(run)
    if kind == "nothing" or (overwrite and kind in (_FINISHED, _UNFINISHED)):
        return
    fixes = {
        _FINISHED: "choose another --out, or pass --overwrite",
        _UNFINISHED: f"go on with --resume {run}, choose another --out, or pass --overwrite",
    }
    raise InputError(explain(run, "an empty or new folder", kind, fixes.get(kind, "choose another --out")))


_FINISHED, _UNFINISHED = "a run", "an unfinished run with checkpoints"


def _kind(run: Path) -> str:
    """What lies at the place of a run; a training that was cut off without a checkpoint is nothing."""
    if not run.is_dir():
        return "a file"
    if not all(_is_ours(path) for path in run.iterdir()):
        return "other files"
    if finished_folder(run) != run or (run / _FILES[0]).exists():
        return _FINISHED
    return "nothing" if latest_checkpoint(run) is None else _UNFINISHED


def _is_ours(path: Path) -> bool:
    if path in list_trainings(path.parent):
        return all(_is_file_of_run(inner.name) or inner == checkpoint_folder(path) for inner in path.iterdir())
    return _is_file_of_run(path.name) or is_administration(path.name)


def _is_file_of_run(name: str) -> bool:
    name = name.removesuffix(TEMPORARY_SUFFIX)  # of a training that was killed while writing it
    return name in _FILES or name.startswith("steps-rank-")


def begin_run(run: Path) -> None:
    """Make the folder of a new training; what a training that was cut off left goes."""
    run.mkdir(parents=True, exist_ok=True)
    remove_trainings(run, keep=finished_folder(run))
    new_training(run)


def continue_run(run: Path, position: tuple[int, int]) -> None:
    """Make a run ready to go on from its latest checkpoint, at (epoch, step): telemetry behind it goes.

    A finished run stays as it is until it has been finished again: it goes on in another folder.
    """
    training = training_folder(run)
    if checkpoint_folder(training).is_symlink():  # checkpoints of another run would be removed
        fix = "put the folder itself there"
        raise InputError(explain(checkpoint_folder(training), "a folder", "a link", fix))
    if training == finished_folder(run):
        training = new_training(run, lambda folder: _copy_training(training, folder))
    for path in training.glob("steps-rank-*.jsonl"):
        with _open_own(path) as stream:
            write_atomic(path, (line for line in _lines(stream) if _is_before(line, position)))


def _copy_training(source: Path, folder: Path) -> None:
    """Give a new training the files it goes on from, none of which is ever changed in place: links will do."""
    checkpoint_folder(folder).mkdir()
    for path in (source / "settings.json", *source.glob("steps-rank-*.jsonl")):
        _link_or_copy(path, folder / path.name)
    for path in list_checkpoints(checkpoint_folder(source)):
        _link_or_copy(path, checkpoint_folder(folder) / path.name)


def _link_or_copy(source: Path, target: Path) -> None:
    with _open_own(source) as stream:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:  # a file system without links
            with target.open("xb") as copy:
                shutil.copyfileobj(stream, copy)


def _open_own(path: Path) -> BinaryIO:
    """A file of a run, which may be a stranger's: a link, a named pipe or a device is refused."""
    try:
        return os.fdopen(open_regular(path, follow=False), "rb")
    except OSError as error:
        raise InputError(explain(path, "a regular file", error.strerror, "remove it")) from None


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines, or pieces of those that are too long to be telemetry."""
    return iter(lambda: stream.readline(_MAX_LINE_BYTES), b"")


def _is_before(line: bytes, position: tuple[int, int]) -> bool:
    """Whether a line of telemetry is whole and of a step before this one."""
    try:
        record = json.loads(line)
        return line.endswith(b"\n") and (record["epoch"], record["step"]) < position
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def write_settings(run: Path, settings: TrainSettings, shape: ModelShape) -> None:
    """Write what a training was asked for: when it begins, so that it can be resumed, and when it ends."""
    document = {"settings": settings.model_dump(), "shape": asdict(shape)}
    text = json.dumps(document, indent=1, allow_nan=False)
    write_atomic(training_folder(run) / "settings.json", [text.encode()])


def finish_run(
    run: Path, settings: TrainSettings, shape: ModelShape, weights: Mapping[str, Tensor], history: History
) -> None:
    """Write the trained model and make it the run, in one step."""
    training = training_folder(run)
    write_tensor_file(training / "weights.safetensors", weights, {})
    write_atomic(training / "history.json", [json.dumps(history_as_dict(history), allow_nan=False).encode()])
    write_settings(run, settings, shape)
    remove_unused(checkpoint_folder(training))
    finish_training(training)
    for path in run.iterdir():
        if _is_file_of_run(path.name):  # of a run that had no numbered folder
            path.unlink()


def load_run(run: Path) -> tuple[TrainSettings, ModelShape]:
    """The settings of a run and the shape of its graph."""
    return read_settings(finished_folder(run) / "settings.json")


def load_weights(run: Path, model: Module) -> None:
    """Put a run's weights into its model."""
    read_weights(finished_folder(run) / "weights.safetensors", model)
