"""A training run on disk: its settings and history as JSON, the model's weights as arrays. No pickles (law 8).

RUN/settings.json  what was asked for, and the shape of the graph's input and output
RUN/weights.npz    the state dict, array by array
RUN/history.json   losses of every step, accuracies of every evaluation
RUN/steps-rank-R.jsonl   telemetry, a line per step

The weights are written to a temporary name and renamed, so a run that is cut off has whole ones or none.
"""

import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch.nn import Module

from gsplit.config import TrainSettings
from gsplit.errors import InputError, explain
from gsplit.trainer import History

__all__ = ["check_new_run", "load_run", "load_weights", "save_run", "telemetry_path"]

_FILES = ("settings.json", "weights.npz", "history.json")
_FIX = "train again with gsplit train --out"


def telemetry_path(run: Path, rank: int) -> Path:
    """Where a rank writes its steps."""
    return run / f"steps-rank-{rank}.jsonl"


def check_new_run(run: Path, *, overwrite: bool) -> None:
    """Make the folder; refuse one that holds a run, or anything else."""
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        ours = run.is_dir() and all(p.name in _FILES or p.name.startswith("steps-rank-") for p in run.iterdir())
        if not (ours and overwrite):
            fix = "choose another --out" + (", or pass --overwrite" if ours else "")
            raise InputError(explain(run, "an empty or new folder", "a run" if ours else "other files", fix))
        for path in run.iterdir():
            path.unlink()
    run.mkdir(parents=True, exist_ok=True)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


def save_run(
    run: Path, settings: TrainSettings, shape: dict[str, int], state: dict[str, Any], history: History
) -> None:
    """Write a trained model; ``shape`` is the number of input features and of classes."""
    partial = run / "weights.partial.npz"
    np.savez(partial, **{name: value.numpy(force=True) for name, value in state.items()})
    partial.rename(run / "weights.npz")
    _replace(run / "history.json", json.dumps(asdict(history)))
    _replace(run / "settings.json", json.dumps({"settings": settings.model_dump(), "shape": shape}, indent=1))


def load_run(run: Path) -> tuple[TrainSettings, dict[str, int]]:
    """The settings of a run and the shape of its graph."""
    path = run / "settings.json"
    try:
        document = json.loads(path.read_text())
        return TrainSettings(**document["settings"]), dict(document["shape"])
    except OSError as error:
        raise InputError(explain(path, "the settings of a run", error.strerror, _FIX)) from error
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise InputError(explain(path, "the settings of a run", f"others ({type(error).__name__})", _FIX)) from error


def load_weights(run: Path, model: Module) -> None:
    """Put a run's weights into its model."""
    path = run / "weights.npz"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            state = {name: torch.from_numpy(np.array(arrays[name])) for name in arrays.files}
        model.load_state_dict(state)
    except OSError as error:
        raise InputError(explain(path, "the weights of a run", error.strerror or error, _FIX)) from error
    except (ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise InputError(explain(path, "weights of this model", str(error).splitlines()[0], _FIX)) from error
