"""Whether the metrics of a run can be computed from its labels: asked before it trains, not after hours of it."""

from collections.abc import Sequence

import numpy as np
import torch

from gsplit.distributed.comm import Call
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.metrics import Metric
from gsplit.run.loss_choice import is_binary, is_labelled, own_labels
from gsplit.store.files import Array
from gsplit.store.reader import Store

__all__ = ["check_metric_labels"]

_ERRORS = ("rmse", "mae")


def check_metric_labels(store: Store, names: Sequence[str], metrics: Sequence[Metric], loss: str, mesh: Mesh) -> None:
    """Refuse metrics that do not fit the labels of these lists, the first of which decides. A collective."""
    is_float = np.issubdtype(store.stored_array("y").dtype, np.floating)
    for metric in metrics:
        if metric.name in _ERRORS and (loss == "cross_entropy" or not is_float):
            fix = "choose accuracy, f1_micro, f1_macro or roc_auc"
            raise InputError(explain(f"metric {metric.name}", "float labels", store.dtype("y"), fix))
    of_kinds = [metric.name for metric in metrics if metric.name not in _ERRORS]
    for place, name in enumerate(names):
        rows = own_labels(store, name, mesh)
        labelled, others = _sum(mesh, [is_labelled(rows).sum(), (~is_binary(rows)).sum()])
        if place == 0 and not labelled:
            fix = "import other labels, or train with --evaluate-every 0"
            raise InputError(explain(f"targets/{name}", "at least one label", "none", fix))
        if of_kinds and loss != "cross_entropy" and others:
            what = f"metric {of_kinds[0]}"
            raise InputError(explain(what, "labels of 0 and 1", f"others in targets/{name}", "choose rmse or mae"))
        if place == 0 and "roc_auc" in of_kinds and not _has_both_kinds(rows, store, loss, mesh):
            fix = "choose another metric, or other targets"
            raise InputError(explain("metric roc_auc", f"targets/{name} of both kinds", "only one", fix))


def _has_both_kinds(rows: Array, store: Store, loss: str, mesh: Mesh) -> bool:
    """Whether there are two classes, or a column with both 0 and 1. A collective."""
    if loss == "cross_entropy":
        counts = _sum(mesh, np.bincount(rows[rows >= 0], minlength=store.num_classes))
        return sum(count > 0 for count in counts) > 1
    columns = rows.reshape(rows.shape[0], -1)
    zeros, ones = (_sum(mesh, (columns == kind).sum(axis=0)) for kind in (0, 1))
    return any(zero and one for zero, one in zip(zeros, ones, strict=True))


def _sum(mesh: Mesh, counts: Sequence[int] | Array) -> list[int]:
    total = torch.tensor(np.asarray(counts), dtype=torch.int64, device=mesh.device)
    mesh.world.all_reduce(Call("count labels of a metric"), total).wait()
    found: list[int] = total.tolist()
    return found
