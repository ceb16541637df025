"""The folder of a training run: settings and history as JSON, weights as safetensors. No pickles (law 8).

    RUN/current                     the number of the finished training, replaced atomically
    RUN/lock                        locked by the training that writes here
    RUN/1/settings.json             settings, and the sizes of the model's input and output
    RUN/1/weights.safetensors       the state dict
    RUN/1/history.json              loss and seconds of every step, scores of every evaluation
    RUN/1/steps-rank-R.jsonl        telemetry, one line per step; older steps are in steps-rank-R.jsonl.1
    RUN/1/checkpoints/              states to resume from

Each training writes to a numbered folder of its own. When it is complete, ``current`` is replaced and the older folders
are removed. Whenever a process is killed, the old run or the new run is there. A folder such as RUN/1 is a run, too.

A run folder may come from an untrusted source. Links, named pipes and devices are not opened. Every value of the
settings is checked. Weights must have the names, shapes and types of the model, and a file that is larger than the
weights is not read: the memory that a file can take is bounded by the model, whose size ``models.make_model`` limits.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gsplit.errors import InputError, explain
from gsplit.files.atomic import LOCK, lock_folder, target_of, write_atomic
from gsplit.files.objects import as_url
from gsplit.files.untrusted import Expected, open_regular, read_bounded, read_document
from gsplit.run.config import TrainSettings, check_settings
from gsplit.run.results import ModelShape, history_as_dict
from gsplit.store.manifest import MAX_EDGE_TYPES, MAX_VERTEX_TYPES, ClassNames, ColumnNames, Word
from gsplit.training.checkpoints.names import latest_file, list_checkpoints, remove_unused

if TYPE_CHECKING:  # the command line checks a folder before it imports torch
    from torch import Tensor
    from torch.nn import Module

    from gsplit.training.train_state import History

__all__ = [
    "MAX_LINE_BYTES",
    "begin_run",
    "check_new_run",
    "checkpoint_folder",
    "continue_run",
    "finish_run",
    "finished_folder",
    "history_path",
    "latest_checkpoint",
    "list_trainings",
    "load_run",
    "load_weights",
    "lock_run",
    "read_settings",
    "read_weights",
    "run_of_training",
    "telemetry_files",
    "telemetry_path",
    "training_folder",
    "trainings_with_checkpoints",
    "write_settings",
]

_CURRENT = "current"
_NEW = "new"  # the folder of a training until its first files are in place
_SETTINGS = "settings.json"
_WEIGHTS = "weights.safetensors"
_HISTORY = "history.json"
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
MAX_LINE_BYTES = 1 << 20
"""Of a line of telemetry; one with 256 spans takes a fiftieth."""

_FIX = "check the path of the run, or train again with gsplit train --out"
_A_NUMBER = Expected("the number of a training", _FIX)
_SOME_SETTINGS = Expected("the settings of a run", _FIX)
_SOME_WEIGHTS = Expected("weights of this model", _FIX)


# Where files are.


def list_trainings(run: Path) -> list[Path]:
    """The folders of all trainings of a run, the newest first. Files and links with a number as name are left out."""
    numbers = [int(entry.name) for entry in _numbered(run) if entry.is_dir(follow_symlinks=False)]
    return [run / str(number) for number in sorted(numbers, reverse=True)]


def _numbered(run: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(run) if _NUMBER.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def training_folder(run: Path) -> Path:
    """The folder of the newest training, to which a running training writes; RUN itself if there is none."""
    return next(iter(list_trainings(run)), run)


def trainings_with_checkpoints(run: Path) -> list[Path]:
    """The folders of all trainings that can be continued, the newest first."""
    return [training for training in list_trainings(run) if latest_file(checkpoint_folder(training)) is not None]


def run_of_training(folder: Path) -> Path | None:
    """The run that a folder such as RUN/1 is a training of."""
    run = folder.absolute().parent
    is_run = (run / LOCK).exists() or (run / _CURRENT).exists()
    return run if is_run and folder.absolute() in list_trainings(run) else None


def finished_folder(run: Path) -> Path:
    """The folder of the finished training; RUN itself if no training has finished."""
    try:
        number = read_bounded(run / _CURRENT, 16, _A_NUMBER, follow=False).decode("ascii", "replace").strip()
    except InputError:
        return run
    return run / number if _NUMBER.fullmatch(number) else run


def checkpoint_folder(training: Path) -> Path:
    """The folder with the checkpoints of a training."""
    return training / "checkpoints"


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of the newest training, finished or not; None if it has none."""
    return latest_file(checkpoint_folder(training_folder(run)))


def telemetry_path(run: Path, rank: int) -> Path:
    """The telemetry file of a rank in the newest training."""
    return training_folder(run) / f"steps-rank-{rank}.jsonl"


def telemetry_files(run: Path) -> list[Path]:
    """The telemetry of a finished run, one file per rank; ``older_file`` has the steps before those."""
    return sorted(finished_folder(run).glob("steps-rank-*.jsonl"))


def _list_telemetry(training: Path) -> list[Path]:
    return [path for ending in ("jsonl", "jsonl.1") for path in training.glob(f"steps-rank-*.{ending}")]


def history_path(run: Path) -> Path:
    """The file with losses, seconds and evaluations of a finished run."""
    return finished_folder(run) / _HISTORY


# Writing.


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold the lock of a run, so that one training at a time writes to its folder."""
    descriptor = lock_folder(run, "wait for it, or choose another --out")
    assert descriptor is not None
    try:
        yield
    finally:
        os.close(descriptor)


def check_new_run(run: Path, *, overwrite: bool) -> None:
    """Refuse a path with other files, and, without ``overwrite``, one with a run, finished or not.

    A training that was killed before its first checkpoint counts as nothing.
    """
    if (url := as_url(run)) is not None:
        fix = "choose a folder of this host; from Python, Trainer(save_to=URL) puts checkpoints on object storage"
        raise InputError(explain(url, "a run folder on a disk: those on object storage are not built", "a URL", fix))
    if not run.exists():
        return
    fix = "choose another --out"
    others = [path.name for path in run.iterdir() if not _is_ours(path)] if run.is_dir() else []
    if not run.is_dir():
        got = "a file"
    elif others:
        got = f"other files, such as {others[0]}"
    elif overwrite:
        return
    elif finished_folder(run) != run or (run / _SETTINGS).exists():
        got = "a run"
        fix = "choose another --out, or pass --overwrite"
    elif trainings_with_checkpoints(run):
        got = "an unfinished run with checkpoints"
        fix = f"continue with --resume {run}, choose another --out, or pass --overwrite"
    else:
        return
    raise InputError(explain(run, "an empty or new folder", got, fix))


def _is_ours(path: Path) -> bool:
    if path in list_trainings(path.parent):
        return all(_is_file_of_run(inner.name) or inner == checkpoint_folder(path) for inner in path.iterdir())
    name = target_of(path.name) or path.name
    return _is_file_of_run(path.name) or name in (_CURRENT, LOCK, _NEW)


def _is_file_of_run(name: str) -> bool:
    name = target_of(name) or name  # left by a training that was killed while writing it
    return name in (_SETTINGS, _WEIGHTS, _HISTORY) or name.startswith("steps-rank-")


def begin_run(run: Path) -> None:
    """Make the folder of a new training. Requires the lock.

    Until it is finished, the finished training stays, and the newest that can be continued; all others are removed.
    """
    run.mkdir(parents=True, exist_ok=True)
    _remove_trainings(run, [finished_folder(run), *trainings_with_checkpoints(run)[:1]])
    _new_training(run)


def _remove_trainings(run: Path, kept: list[Path]) -> None:
    for training in list_trainings(run):
        if training not in kept:
            shutil.rmtree(training)


def _new_training(run: Path, fill: Callable[[Path], None] | None = None) -> Path:
    """Make the folder of another training; it appears under its number with the files that ``fill`` puts into it."""
    number = max((int(entry.name) for entry in _numbered(run)), default=0) + 1
    unnamed = run / _NEW
    shutil.rmtree(unnamed, ignore_errors=True)
    unnamed.mkdir()
    if fill is not None:
        fill(unnamed)
    return unnamed.rename(run / str(number))


def continue_run(run: Path, position: tuple[int, int]) -> None:
    """Prepare a run to be resumed at (epoch, step), and drop the telemetry of later steps. Requires the lock.

    A finished run continues in a new folder and stays unchanged until that one is finished.
    """
    training = training_folder(run)
    if checkpoint_folder(training).is_symlink():  # checkpoints outside of the run would be removed
        got = f"a link to {checkpoint_folder(training).readlink()}"
        raise InputError(explain(checkpoint_folder(training), "a folder", got, "put the folder itself there"))
    if training == finished_folder(run):
        training = _new_training(run, lambda folder: _link_training(training, folder))
    for path in _list_telemetry(training):
        with _open_own(path) as stream:
            lines = iter(partial(stream.readline, MAX_LINE_BYTES), b"")
            write_atomic(path, (line for line in lines if _is_before(line, position)))


def _link_training(source: Path, folder: Path) -> None:
    """Put the files that a training continues from into a new folder. They are never changed in place: links do."""
    checkpoint_folder(folder).mkdir()
    for path in (source / _SETTINGS, *_list_telemetry(source)):
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
    """Open a regular file of a run; a link, a named pipe or a device is refused."""
    try:
        return os.fdopen(open_regular(path, follow=False), "rb")
    except OSError as error:
        raise InputError(explain(path, "a regular file", error.strerror, "remove it")) from None


def _is_before(line: bytes, position: tuple[int, int]) -> bool:
    """Whether a line of telemetry is complete and of a step before ``position``."""
    try:
        record = json.loads(line)
        return line.endswith(b"\n") and (record["epoch"], record["step"]) < position
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def write_settings(run: Path, settings: TrainSettings, shape: ModelShape) -> None:
    """Write the settings of the newest training: when it begins, so that it can be resumed, and when it ends."""
    document = {"settings": settings.model_dump(), "shape": asdict(shape)}
    text = json.dumps(document, indent=1, allow_nan=False)
    write_atomic(training_folder(run) / _SETTINGS, [text.encode()])


def finish_run(
    run: Path, settings: TrainSettings, shape: ModelShape, weights: "Mapping[str, Tensor]", history: "History"
) -> None:
    """Write the trained model, make its training the current one atomically, and remove the others."""
    from gsplit.training.checkpoints.tensor_file import write_tensor_file

    training = training_folder(run)
    write_tensor_file(training / _WEIGHTS, weights, {})
    write_atomic(training / _HISTORY, [json.dumps(history_as_dict(history), allow_nan=False).encode()])
    write_settings(run, settings, shape)
    remove_unused(checkpoint_folder(training))
    write_atomic(run / _CURRENT, [f"{training.name}\n".encode()])
    _remove_trainings(run, [training])
    for path in run.iterdir():
        if _is_file_of_run(path.name):  # RUN itself was the folder of a training
            path.unlink()


# Reading.

_Size = Annotated[int, Field(ge=0, le=1 << 40)]
_Ends = Annotated[list[Word], Field(min_length=3, max_length=3)]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)

    num_features: _Size
    num_classes: Annotated[_Size, Field(ge=1)]
    num_edge_features: _Size | None
    class_names: ClassNames = []
    feature_columns: ColumnNames = []
    widths: Annotated[dict[Word, _Size], Field(max_length=MAX_VERTEX_TYPES)] = {}
    edge_types: Annotated[list[_Ends], Field(max_length=MAX_EDGE_TYPES)] = []


class _Document(BaseModel):
    settings: dict[str, Any]
    shape: _Shape


def load_run(run: Path) -> tuple[TrainSettings, ModelShape]:
    """The settings of a finished run and the shape of its model."""
    return read_settings(finished_folder(run) / _SETTINGS)


def read_settings(path: Path) -> tuple[TrainSettings, ModelShape]:
    """The settings of a training and the shape of its model, from ``settings.json``."""
    try:
        document = _Document.model_validate(read_document(path, _SOME_SETTINGS, follow=False))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part)[:80] for part in first["loc"])
        raise _SOME_SETTINGS.refuse(path, f"{key}: {first['msg']}") from None
    found = document.shape
    shape = ModelShape(
        num_features=found.num_features,
        num_classes=found.num_classes,
        num_edge_features=found.num_edge_features,
        class_names=tuple(found.class_names),
        feature_columns=tuple(found.feature_columns),
        widths=found.widths,
        edge_types=tuple((src, name, dst) for src, name, dst in found.edge_types),
    )
    return check_settings(document.settings, lambda key: f"{path}: settings.{key}"), shape


def load_weights(run: Path, model: "Module") -> None:
    """Load the weights of a finished run into its model."""
    read_weights(finished_folder(run) / _WEIGHTS, model)


def read_weights(path: Path, model: "Module") -> None:
    """Load ``weights.safetensors`` into a model."""
    from gsplit.training.checkpoints.tensor_file import MAX_HEADER_BYTES, parse_tensor_file

    wanted = model.state_dict()
    limit = sum(tensor.nbytes for tensor in wanted.values()) + MAX_HEADER_BYTES + 8
    weights = parse_tensor_file(read_bounded(path, limit, _SOME_WEIGHTS, follow=False), path).tensors
    for name in sorted(wanted.keys() ^ weights.keys()):
        got = f"{name[:80]!r}, which the model does not have" if name in weights else f"no {name}"
        raise _SOME_WEIGHTS.refuse(path, got)
    for name, tensor in wanted.items():
        expected = f"{_describe(tensor)}, as in this model"
        if _describe(weights[name]) != _describe(tensor):
            raise InputError(explain(f"{path}: {name}", expected, _describe(weights[name]), _FIX))
    for name, _ in model.named_parameters(remove_duplicate=False):
        if weights[name].isnan().any():
            raise _SOME_WEIGHTS.refuse(path, f"NaN in {name}")
    model.load_state_dict(weights)


def _describe(tensor: "Tensor") -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
