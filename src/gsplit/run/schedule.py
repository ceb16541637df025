"""The schedules of a run: the learning rate of a step, when to evaluate, and when to stop early.

Evaluation is due every so many epochs, or as often as it costs no more than training. Both costs are counted in edges,
over all layers and ranks, and counts are the same on every rank, so all ranks decide the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gsplit.inference.metrics import Metric
from gsplit.run.config import TrainSettings
from gsplit.training.train_state import Evaluation, TrainState

__all__ = ["EvaluationSchedule", "has_stalled", "learning_rate"]


def learning_rate(settings: TrainSettings, num_steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at every step: a linear start, then constant or half a cosine."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        if settings.lr_scheduler == "constant":
            return 1.0
        done = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


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
