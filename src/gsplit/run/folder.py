"""A training run on disk: its settings and history as JSON, the model's weights as arrays. No pickles (law 8).

RUN/settings.json  what was asked for, and the shape of the graph's input and output
RUN/weights.npz    the state dict, array by array
RUN/history.json   losses and seconds of every step, accuracies of every evaluation
RUN/steps-rank-R.jsonl   telemetry, a line per step

All of it is made in RUN.partial, which takes RUN's place when it is whole: an older run stays until then, and a run
that is cut off leaves its telemetry there, until the next one begins.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Module

from gsplit.errors import InputError, explain
from gsplit.run.config import TrainSettings
from gsplit.run.results import ModelShape, history_as_dict
from gsplit.run.saved_files import read_settings, read_weights
from gsplit.train_state import History

__all__ = [
    "begin_run",
    "check_new_run",
    "finish_run",
    "history_path",
    "load_run",
    "load_weights",
    "telemetry_files",
    "telemetry_path",
]

_FILES = ("settings.json", "weights.npz", "history.json")


def telemetry_path(run: Path, rank: int) -> Path:
    """Where a rank writes its steps while the run is on."""
    return _partial(run) / f"steps-rank-{rank}.jsonl"


def telemetry_files(run: Path) -> list[Path]:
    """The telemetry of a finished run, a file per rank."""
    return sorted(run.glob("steps-rank-*.jsonl"))


def history_path(run: Path) -> Path:
    """Losses, seconds and evaluations of a finished run."""
    return run / "history.json"


def _partial(run: Path) -> Path:
    return run.with_name(f"{run.name}.partial")


def check_new_run(run: Path, *, overwrite: bool) -> None:
    """Refuse a place that holds a run, unless it may be replaced, or anything else."""
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return
    kind = "a run" if run.is_dir() and _is_run(run) else "other files" if run.is_dir() else "a file"
    if not (kind == "a run" and overwrite):
        fix = "choose another --out" + (", or pass --overwrite" if kind == "a run" else "")
        raise InputError(explain(run, "an empty or new folder", kind, fix))


def _is_run(folder: Path) -> bool:
    return all(path.name in _FILES or path.name.startswith("steps-rank-") for path in folder.iterdir())


def begin_run(run: Path) -> None:
    """Make the folder that a run is made in; what an earlier one left there goes."""
    partial = _partial(run)
    if partial.exists():
        if not (partial.is_dir() and _is_run(partial)):
            raise InputError(explain(partial, "nothing, or what a run left", "other files", "choose another --out"))
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def finish_run(
    run: Path, settings: TrainSettings, shape: ModelShape, weights: Mapping[str, Tensor], history: History
) -> None:
    """Write the trained model and put the run in its place."""
    partial = _partial(run)
    arrays: dict[str, Any] = {name: value.numpy(force=True) for name, value in weights.items()}
    np.savez(partial / "weights.npz", **arrays)
    (partial / "history.json").write_text(json.dumps(history_as_dict(history), allow_nan=False))
    document = {"settings": settings.model_dump(), "shape": asdict(shape)}
    (partial / "settings.json").write_text(json.dumps(document, indent=1, allow_nan=False))
    old = run.with_name(f"{run.name}.old")  # whenever we are killed, one whole run has a name
    shutil.rmtree(old, ignore_errors=True)
    if run.exists():
        run.rename(old)
    partial.rename(run)
    shutil.rmtree(old, ignore_errors=True)


def load_run(run: Path) -> tuple[TrainSettings, ModelShape]:
    """The settings of a run and the shape of its graph."""
    return read_settings(run / "settings.json")


def load_weights(run: Path, model: Module) -> None:
    """Put a run's weights into its model."""
    read_weights(run / "weights.npz", model)
