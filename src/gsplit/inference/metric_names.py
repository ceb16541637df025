"""The names of metrics, for evaluation, reports and the command line, which checks them before it imports torch."""

from collections.abc import Sequence

from gsplit.errors import InputError, explain

__all__ = ["DEFAULT_METRICS", "ERRORS_OF_FLOATS", "METRIC_NAMES", "check_metric_names"]

ERRORS_OF_FLOATS = ("rmse", "mae")
"""Metrics of float labels; the others are of classes, or of columns of 0 and 1."""

METRIC_NAMES = ("accuracy", "f1_micro", "f1_macro", "roc_auc", *ERRORS_OF_FLOATS)
"""Metrics of vertices; ``inference.metrics`` computes them. Those of pairs are mrr and hits@K."""

DEFAULT_METRICS = {"cross_entropy": "accuracy", "bce": "f1_micro", "mse": "rmse", "l1": "mae", "huber": "rmse"}
"""The default metric of each loss."""


def check_metric_names(names: Sequence[str], *, of_pairs: bool) -> None:
    """Refuse metrics that do not exist, and lists without a metric or with one twice."""
    for name in names:
        number = name[5:] if isinstance(name, str) and name.startswith("hits@") else ""
        ranks = name == "mrr" or (number.isdecimal() and int(number) > 0)
        if not (ranks if of_pairs else name in METRIC_NAMES):
            expected = "mrr or hits@K for pairs" if of_pairs else f"one of {', '.join(METRIC_NAMES)}"
            raise InputError(explain("metric", expected, name, "choose one of these"))
    if not names or len(set(names)) < len(names):
        got = ", ".join(names) or "an empty list"
        raise InputError(explain("metric", "at least one, each once", got, "name each once"))
