"""What a training tells those who follow it: progress bars, logs, experiment trackers.

``Trainer(callbacks=[...])`` calls them on every rank that has some; what should be written once is made on rank 0 alone
(examples/wandb_callback.py).
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
        """Scores whose names all say their metric.

        >>> EvaluationReport(1, 10, ("rmse", "mae"), {"val": 0.5, "val mae": 0.3}).named_scores
        {'val/rmse': 0.5, 'val/mae': 0.3}
        """
        first = self.metrics[0]
        return {key.replace(" ", "/") if " " in key else f"{key}/{first}": score for key, score in self.scores.items()}


class Callback:
    """Follows a training; a subclass overrides what it wants to know."""

    def on_start(self, num_steps: int) -> None:
        """Training goes on after so many steps: 0, or those of a checkpoint. What is known of later ones is void."""

    def on_step(self, report: StepReport) -> None:
        """An optimizer step is over."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """An evaluation is over. One whose checkpoint was not finished is made again, with the same scores."""
