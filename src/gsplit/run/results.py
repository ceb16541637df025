"""What a run hands on: the shape of its model, what it tells while it goes on, and what came out.

``as_dict`` is the one place where results become the documents of ``--json`` and ``history.json``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsplit.training.callbacks import Callback

if TYPE_CHECKING:  # the command line imports this module before torch
    from gsplit.inference.infer import Predictions
    from gsplit.training.train_state import Evaluation, History

__all__ = ["EpochReport", "InferenceResult", "ModelShape", "RunView", "TrainResult", "history_as_dict"]


@dataclass(frozen=True)
class ModelShape:
    """What a stock model must know of the graph; ``num_classes`` outputs, or as many as y has columns."""

    num_features: int
    num_classes: int
    num_edge_features: int | None = None
    class_names: tuple[str, ...] = ()
    feature_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class EpochReport:
    """An epoch that has ended; ``scores`` are None if it was not evaluated. ``metric``: the first of them."""

    epoch: int
    mean_loss: float
    seconds: float
    scores: dict[str, float] | None
    metric: str = "accuracy"


class RunView(Callback):
    """Follows a training run on rank 0. This base class shows nothing."""

    def begin(self, total_steps: int, done_steps: int) -> None:
        """Called before the first step, which compiles; ``done_steps`` were done by the run that is resumed."""

    def epoch(self, report: EpochReport) -> None:
        """Called after an epoch and its evaluation, if there was one."""

    def note(self, text: str) -> None:
        """Show a line of text once."""


def _flat(evaluation: "Evaluation") -> dict[str, float]:
    return {"epoch": evaluation.epoch, **evaluation.scores}


def history_as_dict(history: "History") -> dict[str, Any]:
    """For JSON."""
    evaluations = [_flat(evaluation) for evaluation in history.evaluations]
    return {"losses": history.losses, "step_seconds": history.step_seconds, "evaluations": evaluations}


@dataclass(frozen=True)
class TrainResult:
    """A training run. ``best`` is None if nothing was evaluated, ``out`` if nothing was kept.

    ``finished`` is False if it was told to stop; it can be resumed then. ``straggler``: which rank kept the others
    waiting, if one did.
    """

    ranks: int
    replicas: int
    strategy: str
    history: "History"
    best: "Evaluation | None"
    out: Path | None
    metric: str = "accuracy"
    finished: bool = True
    straggler: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ranks": self.ranks,
            "replicas": self.replicas,
            "strategy": self.strategy,
            "steps": len(self.history.losses),
            **history_as_dict(self.history),
            "metric": self.metric,
            "best": None if self.best is None else _flat(self.best),
            "run": None if self.out is None else str(self.out),
            "finished": self.finished,
            "straggler": self.straggler,
        }


@dataclass(frozen=True)
class InferenceResult:
    """A file of predictions, and the ranks that made it."""

    predictions: "Predictions"
    ranks: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        made = self.predictions
        shown = {"out": str(made.path), "what": made.what, "rows": made.num_rows, "columns": list(made.columns)}
        return {**shown, "rows_without_class": made.num_without_class, "ranks": self.ranks}
