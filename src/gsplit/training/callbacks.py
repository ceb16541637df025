"""Callbacks of a training, for progress bars, logs and experiment trackers.

``Trainer(callbacks=[...])`` calls them on every rank that was given some. A callback that writes files belongs on
rank 0 only (examples/wandb_callback.py).
"""

from dataclasses import dataclass

__all__ = ["Callback", "EvaluationReport", "StepReport"]


@dataclass(frozen=True)
class StepReport:
    """An optimizer step. ``epoch`` counts from 0, and so does ``step`` in each epoch of ``num_steps`` steps.

    ``number`` counts steps from 1 in all.

    ``num_edges`` are the sampled edges of this rank, over all layers. ``stages``: seconds of this rank by stage.
    """

    epoch: int
    step: int
    num_steps: int
    loss: float
    num_targets: int
    seconds: float
    stages: dict[str, float]
    number: int
    learning_rate: float
    num_edges: int


@dataclass(frozen=True)
class EvaluationReport:
    """An exact evaluation after ``number`` steps; scores by target list, as ``Trainer.evaluate`` returns them.

    ``epoch``: epochs begun, so 1 in and after the first.
    """

    epoch: int
    number: int
    metrics: tuple[str, ...]
    scores: dict[str, float]

    @property
    def named_scores(self) -> dict[str, float]:
        """Scores by names that contain their metric.

        >>> EvaluationReport(1, 10, ("rmse", "mae"), {"val": 0.5, "val mae": 0.3}).named_scores
        {'val/rmse': 0.5, 'val/mae': 0.3}
        """
        first = self.metrics[0]
        return {key.replace(" ", "/") if " " in key else f"{key}/{first}": score for key, score in self.scores.items()}


class Callback:
    """Follows a training; a subclass overrides the methods it needs."""

    def on_start(self, num_steps: int) -> None:
        """Called when training starts after ``num_steps`` steps: 0, or those of a checkpoint. Later steps are void."""

    def on_step(self, report: StepReport) -> None:
        """Called after an optimizer step."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Called after an evaluation. If its checkpoint was not finished, it is repeated, with the same scores."""
