"""Data that a run passes to the command line: the shape of its model, progress and results.

``as_dict`` converts results to the documents of ``--json`` and ``history.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsplit.training.callbacks import Callback

if TYPE_CHECKING:  # the command line imports this module before torch
    from gsplit.inference.infer import Predictions
    from gsplit.training.train_state import Evaluation, History

__all__ = ["EpochReport", "InferenceResult", "ModelShape", "RunView", "TrainResult", "history_as_dict"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a stock model. ``num_classes``: its outputs, one per class or per column of y.

    ``widths``: input columns of every vertex type of a heterogeneous graph, in place of ``num_features``, which is then
    0; and its edge types.
    """

    num_features: int
    num_classes: int
    num_edge_features: int | None = None
    class_names: tuple[str, ...] = ()
    feature_columns: tuple[str, ...] = ()
    widths: Mapping[str, int] = field(default_factory=dict)
    edge_types: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class EpochReport:
    """A finished epoch. ``scores`` is None if it was not evaluated; ``metric`` is the first metric."""

    epoch: int
    mean_loss: float
    seconds: float
    scores: dict[str, float] | None
    metric: str = "accuracy"


class RunView(Callback):
    """Follows a training run on rank 0. This base class shows nothing."""

    def begin(self, total_steps: int, done_steps: int) -> None:
        """Called before the first step, which compiles. ``done_steps``: steps of a resumed run until now."""

    def epoch(self, report: EpochReport) -> None:
        """Called after an epoch and its evaluation, if any."""

    def note(self, text: str) -> None:
        """Show a line of text once."""


def _flat(evaluation: "Evaluation") -> dict[str, float]:
    return {"epoch": evaluation.epoch, **evaluation.scores}


def history_as_dict(history: "History") -> dict[str, Any]:
    """The history as a JSON document."""
    evaluations = [_flat(evaluation) for evaluation in history.evaluations]
    return {
        "losses": history.losses.tolist(),
        "step_seconds": history.step_seconds.tolist(),
        "evaluations": evaluations,
    }


@dataclass(frozen=True)
class TrainResult:
    """A training run. ``best`` is None if nothing was evaluated, ``out`` is None if no files were written.

    ``finished`` is False if the run was stopped; it can be resumed. ``straggler``: the rank that the others waited for,
    if there was one.
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
    """A file of predictions and the number of ranks."""

    predictions: "Predictions"
    ranks: int

    def as_dict(self) -> dict[str, Any]:
        made = self.predictions
        return {
            "out": str(made.path),
            "what": made.what,
            "rows": made.num_rows,
            "columns": list(made.columns),
            "rows_without_class": made.num_without_class,
            "ranks": self.ranks,
        }
