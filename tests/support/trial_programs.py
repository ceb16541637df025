"""Programs of ranks that time setups, and that train with strategy="auto"."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from gsplit.distributed.comm.mesh import Mesh
from gsplit.planner import auto
from gsplit.planner.hardware import PRESETS
from gsplit.planner.plan import Setup
from gsplit.run import trial
from gsplit.run.config import TrainSettings
from gsplit.run.recipe import shape_of
from gsplit.run.results import RunView
from gsplit.run.training import train_run
from gsplit.run.trial import TimedSteps, time_setups
from gsplit.store.reader import open_store

SETTINGS = TrainSettings(
    hidden=8, fanout=[3, 3], batch_size=32, epochs=1, evaluate_every=0, strategy="auto", trial_steps=2
)
HOST = replace(PRESETS["v100-nvlink"], cores=2)
SETUPS = [Setup("split", 2, 1), Setup("split", 2, 2), Setup("hybrid(7)", 2, 1), Setup("split", 1, 1)]


def time_all(mesh: Mesh, path: str) -> TimedSteps:
    store = open_store(Path(path))
    settings = SETTINGS.model_copy(update={"loss": "cross_entropy"})
    return time_setups(SETUPS, settings, shape_of(store, settings), store, mesh)


class _Notes(RunView):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def train_auto(
    mesh: Mesh, path: str, out: str, strategy: str, *, least_ratio: int = 0
) -> tuple[str, list[float], list[str]]:
    """The strategy, the losses and the notes on the strategy of a run. ``least_ratio``: see ``gsplit.run.trial``."""
    settings = SETTINGS.model_copy(update={"strategy": strategy})
    notes = _Notes()
    with patch.object(auto, "known_machine", lambda: HOST), patch.object(trial, "_LEAST_RATIO", least_ratio):
        found = train_run(settings, open_store(Path(path)), mesh, Path(out), view=notes)
    return found.strategy, found.history.losses.tolist(), [text for text in notes.texts if text.startswith("strategy")]
