"""Metrics by name, for ``gsplit.evaluate(metrics=...)`` and ``gsplit train --metric``.

A metric is a function of sums that can be added over chunks of targets and over ranks, so it is exact however the
targets are divided. The exception is ``roc_auc``: it needs the order of all scores, which evaluation gathers.

Outputs are logits. Labels are one class per target (integers, outputs of several columns), or entries of one or several
columns: 0 and 1, where an output above 0 predicts 1, or floats. Labels of NaN, and integers below 0, are left out. A
row whose largest output is not finite predicts no class, and NaN predicts neither 0 nor 1: such targets count as wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.inference.metric_names import check_metric_names

__all__ = [
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
        """Whether each target has one class; otherwise entries are scored one by one."""
        return self.y.dim() == 1

    @property
    def labelled(self) -> Tensor:
        return is_labelled(self.y)


@dataclass(frozen=True)
class Metric:
    """``count`` sums over some targets, ``finish`` computes the score from the sums of all. None: needs all at once."""

    name: str
    higher_is_better: bool
    count: Callable[[Scored], Tensor] | None
    finish: Callable[[Tensor], float]

    def is_better(self, score: float, than: float) -> bool:
        return score > than if self.higher_is_better else score < than


def is_classes(y: Tensor, num_columns: int) -> bool:
    """Whether labels are one class per target, for a model with ``num_columns`` outputs."""
    return y.dim() == 1 and not y.is_floating_point() and num_columns > 1


def is_labelled(y: Tensor) -> Tensor:
    """Which entries have a label."""
    return ~y.isnan() if y.is_floating_point() else y >= 0


def predicted_classes(out: Tensor) -> Tensor:
    """The class with the largest output of each row; -1 where that output is NaN or infinite.

    >>> predicted_classes(torch.tensor([[0.1, 0.7], [float("nan"), 1.0], [-float("inf"), 1.0]])).tolist()
    [1, -1, 1]
    """
    largest, classes = out.max(dim=1)
    return torch.where(largest.isfinite(), classes, -1)


def _zeros_and_ones(targets: Scored) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the entries that are predicted to be 1, that are 1, and that have a label."""
    y = targets.y
    labelled = targets.labelled
    others = labelled & (y != 0) & (y != 1)
    if others.any():
        fix = "choose rmse or mae"
        raise InputError(explain("y", "classes, or 0 and 1, for this metric", float(y[others][0]), fix))
    return labelled & (targets.out > 0), labelled & (y == 1), labelled


def _count_right(targets: Scored) -> Tensor:
    if targets.is_classes:
        counted = torch.ones_like(targets.y)
        right = predicted_classes(targets.out) == targets.y
    else:
        predicted, true, counted = _zeros_and_ones(targets)
        right = (predicted == true) & counted & ~targets.out.isnan()
    return torch.stack([right.sum(), counted.sum()]).double()


def _count_confusion(targets: Scored) -> Tensor:
    """For every class or column: right, predicted and true ones; [C, 3]. Classes that have no output are one more."""
    if targets.is_classes:
        num_classes = targets.out.size(1)
        predicted = predicted_classes(targets.out)
        true = targets.y.clamp(max=num_classes)
        counted = (predicted[predicted == true], predicted[predicted >= 0], true)
        found = [torch.bincount(values, minlength=num_classes + 1) for values in counted]
    else:
        predicted, true, _ = _zeros_and_ones(targets)
        found = [entries.sum(0) for entries in (predicted & true, predicted, true)]
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
    right, predicted, true = sums.sum(0).tolist()
    return float(2 * right / (predicted + true)) if predicted + true else 0.0


def _macro(sums: Tensor) -> float:
    occurs = sums[:, 1] + sums[:, 2] > 0  # classes that are neither predicted nor true do not count
    right, predicted, true = sums[occurs].unbind(1)
    return float((2 * right / (predicted + true)).mean()) if occurs.any() else 0.0


def _mean_area(areas: Tensor) -> float:
    """The mean over columns with both kinds of targets."""
    known = areas[areas[:, 1] > 0, 0]
    if not known.numel():
        fix = "choose another metric, or other targets"
        raise InputError(explain("roc_auc", "targets of both kinds", "targets of one kind in every column", fix))
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


def check_metrics(names: Sequence[str], *, of_pairs: bool = False) -> list[Metric]:
    """Look up metrics by name; the first one determines the best evaluation. Those of pairs: mrr and hits@K.

    >>> [metric.name for metric in check_metrics(["mrr", "hits@10"], of_pairs=True)]
    ['mrr', 'hits@10']
    """
    check_metric_names(names, of_pairs=of_pairs)
    return [Metric(name, True, None, float) if of_pairs else METRICS[name] for name in names]


def score_columns(targets: Scored) -> list[tuple[Tensor, Tensor]]:
    """What ``roc_auc`` ranks: scores, and which of them are of positives, one pair for every column.

    Two classes are one column. With more classes, each is ranked against all others by its softmax probability.
    """
    out = targets.out
    y = targets.y
    if not targets.is_classes:
        _, true, labelled = _zeros_and_ones(targets)
        return [(out[has, c], true[has, c]) for c, has in enumerate(labelled.unbind(1))]
    if out.size(1) == 2:
        return [(out[:, 1] - out[:, 0], y == 1)]
    return [(scores, y == c) for c, scores in enumerate(out.softmax(dim=1).unbind(1))]


def rank_area(scores: npt.NDArray[np.float64], positive: npt.NDArray[np.bool_]) -> float | None:
    """The area under the ROC curve by ranks (Mann and Whitney): ties count half; None without both kinds.

    NaN if any score is NaN, which cannot be ordered.

    >>> rank_area(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    num_positive = int(positive.sum())
    num_negative = int((~positive).sum())
    if not num_positive or not num_negative:
        return None
    if np.isnan(scores).any():
        return float("nan")
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / num_positive / num_negative)
