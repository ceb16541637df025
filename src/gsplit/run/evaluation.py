"""When a run evaluates: every so many epochs, or as often as exact evaluation costs no more than training.

Both costs are counted in edges, over all layers and ranks: those that training has sampled, and those that one exact
evaluation computes. Counts are the same on every rank, so all ranks decide the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gsplit.metrics import Metric
from gsplit.train_state import Evaluation, TrainState

__all__ = ["EvaluationSchedule", "has_stalled"]


@dataclass(frozen=True)
class EvaluationSchedule:
    """``every``: epochs between evaluations, 0 for never, None for auto. ``cost``: edges of one evaluation."""

    every: int | None
    cost: int

    def is_due(self, state: TrainState, *, last: bool) -> bool:
        """Whether to evaluate now, at the end of an epoch; always after the last, unless never.

        Auto: what evaluation has cost so far and this one together must not exceed what training has cost.
        """
        if self.every == 0 or last:
            return self.every != 0
        if self.every is not None:
            return state.epoch % self.every == 0
        return state.evaluation_edges + self.cost <= state.train_edges

    def describe(self, state: TrainState) -> str:
        """What auto means for this run, after its first epoch."""
        each = max(1, -(-self.cost // max(1, state.train_edges)))
        when = "after every epoch" if each == 1 else f"after about every {each} epochs, and after the last"
        why = f"one computes {self.cost:,} edges, an epoch of training {state.train_edges:,}"
        return f"exact evaluation {when}: {why}" + ("" if each == 1 else " (--evaluate-every N to choose)")


def has_stalled(evaluations: Sequence[Evaluation], patience: int | None, metric: Metric) -> bool:
    """Whether the last ``patience`` evaluations were no better on val than one before; a function of the history."""
    scores = [evaluation.scores["val"] for evaluation in evaluations if "val" in evaluation.scores]
    if patience is None or len(scores) <= patience:
        return False
    best = max if metric.higher_is_better else min
    return not metric.is_better(best(scores[-patience:]), best(scores[:-patience]))
