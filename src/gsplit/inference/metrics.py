"""Metrics by name: what ``gsplit.evaluate(metrics=...)`` and ``gsplit train --metric`` count.

A metric is a function of sums that can be added over chunks of targets and over ranks, so it is exact however the
targets are divided. ``roc_auc`` alone is none: it needs the order of all scores (``inference.tallies`` gathers them).

Outputs are logits. Labels are one class per target (integers, outputs of several columns), or entries of one or several
columns: 0 and 1, where an output above 0 says 1, or floats. Labels of NaN, and integers below 0, are left out. Outputs
that are not finite say no class, and NaN neither 0 nor 1: such targets count as wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, explain

__all__ = [
    "DEFAULT_METRICS",
    "METRICS",
    "Metric",
    "Scored",
    "check_metrics",
    "is_classes",
    "is_labelled",
    "predicted_classes",
    "rank_area",
    "score_columns",
]


@dataclass(frozen=True)
class Scored:
    """Targets with at least one label: float64 ``out`` [n, C], and ``y`` [n] of classes or [n, C] of entries."""

    out: Tensor
    y: Tensor

    @property
    def is_classes(self) -> bool:
        """Whether each target has one class; else entries are judged one by one."""
        return self.y.dim() == 1

    @property
    def labelled(self) -> Tensor:
        """Which entries have a label."""
        return is_labelled(self.y)


@dataclass(frozen=True)
class Metric:
    """``count`` makes sums of some targets; ``finish`` makes the score of the sums of all. None: needs all at once."""

    name: str
    higher_is_better: bool
    count: Callable[[Scored], Tensor] | None
    finish: Callable[[Tensor], float]

    def is_better(self, score: float, than: float) -> bool:
        """Whether a score is better than another."""
        return score > than if self.higher_is_better else score < than


def is_classes(y: Tensor, num_columns: int) -> bool:
    """Whether labels are one class per target, for a model of so many outputs."""
    return y.dim() == 1 and not y.is_floating_point() and num_columns > 1


def is_labelled(y: Tensor) -> Tensor:
    """Which labels are there."""
    return ~y.isnan() if y.is_floating_point() else y >= 0


def predicted_classes(out: Tensor) -> Tensor:
    """The class with the largest of each row of outputs; -1 where that is NaN or infinite, and so none is.

    >>> predicted_classes(torch.tensor([[0.1, 0.7], [float("nan"), 1.0], [-float("inf"), 1.0]])).tolist()
    [1, -1, 1]
    """
    largest, classes = out.max(dim=1)
    return torch.where(largest.isfinite(), classes, -1)


def _zeros_and_ones(targets: Scored) -> tuple[Tensor, Tensor, Tensor]:
    """Of labelled entries: what the model says, what is true, and which they are."""
    y, labelled = targets.y, targets.labelled
    strange = labelled & (y != 0) & (y != 1)
    if strange.any():
        fix = "choose rmse or mae"
        raise InputError(explain("y", "classes, or 0 and 1, for this metric", float(y[strange][0]), fix))
    return labelled & (targets.out > 0), labelled & (y == 1), labelled


def _count_right(targets: Scored) -> Tensor:
    if targets.is_classes:
        right, all_of_them = predicted_classes(targets.out) == targets.y, torch.ones_like(targets.y)
    else:
        said, true, all_of_them = _zeros_and_ones(targets)
        right = (said == true) & all_of_them & ~targets.out.isnan()
    return torch.stack([right.sum(), all_of_them.sum()]).double()


def _count_confusion(targets: Scored) -> Tensor:
    """For every class or column: right ones, those that are said, those that are true; [C, 3]."""
    if targets.is_classes:
        width, said, true = targets.out.size(1), predicted_classes(targets.out), targets.y
        counted = (said[said == true], said[said >= 0], true)
        found = [torch.bincount(values, minlength=width) for values in counted]
    else:
        are_said, are_true, _ = _zeros_and_ones(targets)
        found = [entries.sum(0) for entries in (are_said & are_true, are_said, are_true)]
    return torch.stack(found, dim=1).double()


def _errors(power: int) -> Callable[[Scored], Tensor]:
    def count(targets: Scored) -> Tensor:
        if targets.is_classes or not targets.y.is_floating_point():
            fix = "choose accuracy, f1_micro, f1_macro or roc_auc"
            raise InputError(explain("y", "float labels for this metric", str(targets.y.dtype), fix))
        errors = (targets.out - targets.y)[targets.labelled].abs() ** power
        return torch.stack([errors.sum(), targets.labelled.sum().double()])

    return count


def _ratio(sums: Tensor) -> float:
    return float(sums[0] / sums[1])


def _micro(sums: Tensor) -> float:
    right, said, true = sums.sum(0).tolist()
    return float(2 * right / (said + true)) if said + true else 0.0


def _macro(sums: Tensor) -> float:
    met = sums[:, 1] + sums[:, 2] > 0  # classes that are neither said nor true do not count
    right, said, true = sums[met].unbind(1)
    return float((2 * right / (said + true)).mean()) if met.any() else 0.0


def _mean_area(areas: Tensor) -> float:
    """The mean over columns with both kinds of targets."""
    known = areas[areas[:, 1] > 0, 0]
    if not known.numel():
        fix = "choose another metric, or other targets"
        raise InputError(explain("roc_auc", "targets of both kinds", "only one", fix))
    return float(known.mean())


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", True, _count_right, _ratio),
        Metric("f1_micro", True, _count_confusion, _micro),
        Metric("f1_macro", True, _count_confusion, _macro),
        Metric("roc_auc", True, None, _mean_area),
        Metric("rmse", False, _errors(2), lambda sums: _ratio(sums) ** 0.5),
        Metric("mae", False, _errors(1), _ratio),
    )
}
"""Every metric by its name."""

DEFAULT_METRICS = {"cross_entropy": "accuracy", "bce": "f1_micro", "mse": "rmse", "l1": "mae", "huber": "rmse"}
"""The metric that fits a loss."""


def check_metrics(names: Sequence[str]) -> list[Metric]:
    """Metrics by name, the first of which decides what is best."""
    for name in names:
        if name not in METRICS:
            raise InputError(explain("metric", f"one of {', '.join(METRICS)}", name, "choose one of these"))
    if not names or len(set(names)) < len(names):
        raise InputError(explain("metric", "at least one, each once", ", ".join(names) or "none", "name them once"))
    return [METRICS[name] for name in names]


def score_columns(targets: Scored) -> list[tuple[Tensor, Tensor]]:
    """What ``roc_auc`` ranks: scores and whether they are of positives, one pair for every column.

    Two classes are one column. Of more classes each is told from all others by its softmax probability.
    """
    out, y = targets.out, targets.y
    if not targets.is_classes:
        _, true, labelled = _zeros_and_ones(targets)
        return [(out[has, c], true[has, c]) for c, has in enumerate(labelled.unbind(1))]
    if out.size(1) == 2:
        return [(out[:, 1] - out[:, 0], y == 1)]
    return [(scores, y == c) for c, scores in enumerate(out.softmax(dim=1).unbind(1))]


def rank_area(scores: npt.NDArray[np.float64], positive: npt.NDArray[np.bool_]) -> float | None:
    """The area under the ROC curve by ranks (Mann and Whitney): ties count half; None without both kinds.

    NaN if any score is NaN, which has no place in the order.

    >>> rank_area(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return None
    if np.isnan(scores).any():
        return float("nan")
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / num_positive / num_negative)
