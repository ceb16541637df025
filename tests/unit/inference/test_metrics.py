"""Metrics against their definitions written out, however the targets are cut into chunks; and what does not fit."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from gsplit import InputError
from gsplit.distributed.comm.comm import Call, SoloComm, Work
from gsplit.inference.evaluate import TargetScores
from gsplit.inference.metric_names import DEFAULT_METRICS, METRIC_NAMES
from gsplit.inference.metrics import METRICS, check_metrics, rank_area
from gsplit.training.losses import LOSSES

RNG = np.random.default_rng(3)
CLASS_OUT, CLASS_Y = RNG.normal(size=(40, 4)).round(1), RNG.integers(-1, 3, 40)  # class 3 is said, but never true
ENTRY_OUT = RNG.normal(size=(40, 3)).round(1)
ENTRY_Y = np.where(RNG.random((40, 3)) < 0.2, np.nan, RNG.integers(0, 2, (40, 3)))
VALUES_Y = np.where(RNG.random((40, 3)) < 0.2, np.nan, RNG.normal(size=(40, 3)))


def _scores(names: Sequence[str], out: object, y: object, pieces: int = 3) -> dict[str, float]:
    tally, comm = TargetScores(metrics := check_metrics(names)), SoloComm()
    rows, labels = torch.as_tensor(out), torch.as_tensor(y)
    for some, theirs in zip(rows.tensor_split(pieces), labels.tensor_split(pieces), strict=True):
        tally.add(some, theirs)
    return {metric.name: metric.finish(tally.total(metric, comm)) for metric in metrics}


def _f1(said: np.ndarray, true: np.ndarray) -> float:
    precision = (said & true).sum() / max(1, said.sum())
    recall = (said & true).sum() / max(1, true.sum())
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


@pytest.mark.parametrize("pieces", [1, 7])
def test_scores_of_classes(pieces: int) -> None:
    has = CLASS_Y >= 0
    said, true = CLASS_OUT.argmax(1)[has], CLASS_Y[has]
    found = _scores(["accuracy", "f1_micro", "f1_macro", "roc_auc"], CLASS_OUT, CLASS_Y, pieces)
    assert found["accuracy"] == found["f1_micro"] == pytest.approx((said == true).mean())
    assert found["f1_macro"] == pytest.approx(np.mean([_f1(said == c, true == c) for c in range(4)]))
    exp = np.exp(CLASS_OUT[has])
    shares = exp / exp.sum(1, keepdims=True)
    areas = [_area(shares[:, c], true == c) for c in range(3)]  # none of class 3, which has no area
    assert found["roc_auc"] == pytest.approx(np.mean(areas))


def test_a_class_without_an_output_is_never_right() -> None:
    found = _scores(["accuracy", "f1_micro", "f1_macro"], [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], [0, 1, 2], 3)
    assert found["accuracy"] == found["f1_micro"] == pytest.approx(2 / 3)
    assert found["f1_macro"] == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_outputs_that_are_not_finite_are_wrong_and_not_class_0() -> None:
    nan, inf = float("nan"), float("inf")
    out, y = [[nan, nan], [1.0, 0.0], [0.0, 1.0], [inf, 0.0], [-inf, 0.0]], [0, 0, 1, 0, 1]
    found = _scores(["accuracy", "f1_micro", "f1_macro"], out, y, 1)
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["f1_micro"] == pytest.approx(2 * 3 / (3 + 5))
    assert found["f1_macro"] == pytest.approx((2 * 1 / (1 + 3) + 1) / 2)
    assert _scores(["accuracy"], [[nan], [1.0]], [0.0, 1.0], 1)["accuracy"] == 0.5


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    found = mannwhitneyu(scores[positive], scores[~positive]).statistic
    return float(found / positive.sum() / (~positive).sum())


@pytest.mark.parametrize("pieces", [1, 7])
def test_scores_of_columns_of_zeros_and_ones(pieces: int) -> None:
    has, said, true = ~np.isnan(ENTRY_Y), ENTRY_OUT > 0, ENTRY_Y == 1
    found = _scores(["roc_auc", "accuracy", "f1_micro", "f1_macro"], ENTRY_OUT, ENTRY_Y, pieces)
    assert found["accuracy"] == pytest.approx((said == true)[has].mean())
    assert found["f1_micro"] == pytest.approx(_f1(said[has], true[has]))
    columns = [(has[:, c], said[:, c], true[:, c]) for c in range(3)]
    assert found["f1_macro"] == pytest.approx(np.mean([_f1(s[h], t[h]) for h, s, t in columns]))
    areas = [_area(ENTRY_OUT[h, c], t[h]) for c, (h, _, t) in enumerate(columns)]
    assert found["roc_auc"] == pytest.approx(np.mean(areas))
    assert np.unique(ENTRY_OUT[:, 0]).size < 40  # there are ties


def test_two_classes_are_told_apart_by_one_curve() -> None:
    y = RNG.integers(0, 2, 40)
    want = _area(ENTRY_OUT[:, 1] - ENTRY_OUT[:, 0], y == 1)
    assert _scores(["roc_auc"], ENTRY_OUT[:, :2], y)["roc_auc"] == pytest.approx(want)
    one = _scores(["roc_auc", "accuracy"], ENTRY_OUT[:, :1], y)  # a logit of one column, as bce has
    assert one["roc_auc"] == pytest.approx(_area(ENTRY_OUT[:, 0], y == 1))
    assert one["accuracy"] == pytest.approx(((ENTRY_OUT[:, 0] > 0) == y).mean())
    assert rank_area(np.ones(3), np.ones(3, bool)) is None


def test_one_output_of_nan_makes_the_area_nan() -> None:
    """Sorted as the largest it would count as a positive; its column must not be left out of the mean, either."""
    out = ENTRY_OUT.copy()
    out[3, 1] = np.nan
    y = np.nan_to_num(ENTRY_Y)
    assert np.isfinite(_scores(["roc_auc"], ENTRY_OUT, y)["roc_auc"])
    assert np.isnan(_scores(["roc_auc"], out, y)["roc_auc"])


def test_errors_of_values() -> None:
    has = ~np.isnan(VALUES_Y)
    errors = (ENTRY_OUT - VALUES_Y)[has]
    found = _scores(["rmse", "mae"], ENTRY_OUT, VALUES_Y)
    assert found["rmse"] == pytest.approx(np.sqrt((errors**2).mean()))
    assert found["mae"] == pytest.approx(np.abs(errors).mean())
    column = _scores(["mae"], ENTRY_OUT[:, :1], torch.from_numpy(VALUES_Y[:, 0]))
    assert column["mae"] == pytest.approx(np.nanmean(np.abs(ENTRY_OUT[:, 0] - VALUES_Y[:, 0])))


def test_lower_is_better_for_errors_only() -> None:
    assert [name for name, metric in METRICS.items() if metric.is_better(1.0, 2.0)] == ["rmse", "mae"]
    assert DEFAULT_METRICS.keys() == LOSSES.keys()
    assert tuple(METRICS) == METRIC_NAMES


def test_what_does_not_fit_is_refused() -> None:
    def refuse(match: str, name: str, out: object, y: object) -> None:
        with pytest.raises(InputError, match=match):
            _scores([name], out, y)

    refuse("y: expected classes, or 0 and 1, for this metric", "f1_macro", ENTRY_OUT, VALUES_Y)
    refuse("y: expected float labels for this metric .got torch.int64", "rmse", CLASS_OUT, CLASS_Y)
    refuse(r"output: expected .3. values per vertex.*got .2", "mae", ENTRY_OUT[:, :2], VALUES_Y)
    refuse("roc_auc: expected targets of both kinds .got targets of one kind", "roc_auc", ENTRY_OUT, np.ones((40, 3)))
    refuse("metric: expected one of accuracy, .*got f1", "f1", ENTRY_OUT, ENTRY_Y)
    with pytest.raises(InputError, match="metric: expected at least one, each once .got mae, mae"):
        check_metrics(["mae", "mae"])


def test_a_rank_without_targets_counts_nothing() -> None:
    class Two(SoloComm):
        """Rank 0 of two, whose peer has counted one right answer of two in three classes."""

        def gather_text(self, call: Call, text: str) -> list[str]:
            return [text, "2"]

        def all_reduce(self, call: Call, tensor: Tensor) -> Work:
            tensor += torch.tensor([1.0, 2.0])
            return super().all_reduce(call, tensor)

    (accuracy,) = check_metrics(["accuracy"])
    assert accuracy.finish(TargetScores([accuracy]).total(accuracy, Two())) == 0.5
