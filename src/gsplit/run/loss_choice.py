"""Which loss a run has: the one it was told, or the one that fits the stored labels; and what does not fit is refused.

classes (one integer per vertex) -> cross_entropy; several columns of 0 and 1 -> bce; other floats -> mse.
"""

from collections.abc import Iterator

import numpy as np
import torch

from gsplit.distributed.comm import Call
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, StoreError, explain
from gsplit.inference.layerwise import flat_mesh, inference_ownership
from gsplit.local_graph import LocalGraph
from gsplit.metrics import DEFAULT_METRICS
from gsplit.run.config import TrainSettings
from gsplit.run.results import RunView
from gsplit.sampling.targets import StoredTargets
from gsplit.store.files import Array
from gsplit.store.reader import Store

__all__ = ["check_labels", "choose_loss", "fitting_loss", "is_binary", "is_labelled", "num_outputs", "own_labels"]

_VERIFY = "run gsplit inspect --verify, then restore the store or import it again"
_CONVERT = "import the labels in another form, or choose another --loss"


def choose_loss(settings: TrainSettings, store: Store, mesh: Mesh, view: RunView | None = None) -> TrainSettings:
    """The settings with a loss and a metric in place of None; the view is told which. A collective."""
    if settings.loss is not None:
        return settings.model_copy(update={"metric": settings.metric or DEFAULT_METRICS[settings.loss]})
    loss = fitting_loss(store, settings.targets)
    others = torch.tensor([loss != "bce"], dtype=torch.int64, device=mesh.device)
    mesh.world.all_reduce(Call("choose the loss"), others).wait()  # ranks may hold different parts of the labels
    if loss == "bce" and int(others):
        loss = "mse"
    metric = settings.metric or DEFAULT_METRICS[loss]
    (view or RunView()).note(f"loss {loss}, metric {metric}: y holds {_describe(store, loss)} (--loss, --metric)")
    return settings.model_copy(update={"loss": loss, "metric": metric})


def fitting_loss(store: Store, targets: str) -> str:
    """The loss that fits the labels of these targets, as far as they are held here."""
    if "y" not in store.names:
        raise InputError(explain("the store", "labels to train on", "none", "import labels with the graph"))
    if _is_classes(store):
        return "cross_entropy"
    if _num_columns(store) > 1 and all(is_binary(rows).all() for rows in _label_rows(store, targets)):
        return "bce"
    if not _is_float(store):
        raise InputError(explain("y", "classes, columns of 0 and 1, or floats", _form(store), _CONVERT))
    return "mse"


def num_outputs(store: Store, loss: str) -> int:
    """Columns of the model's output: one per class, or one per column of labels."""
    _check_form(store, loss)
    return store.num_classes if loss == "cross_entropy" else _num_columns(store)


def check_labels(store: Store, targets: str, loss: str) -> None:
    """Refuse targets without a label that the loss takes, as far as they are held here."""
    _check_form(store, loss)
    if store.stored_targets(targets)[2] == 0:
        raise InputError(explain(f"targets/{targets}", "at least one target", "none", "name other targets"))
    unlabelled = 0
    for rows in _label_rows(store, targets):
        unlabelled += int((~is_labelled(rows).reshape(rows.shape[0], -1).any(axis=1)).sum())
        if loss == "cross_entropy" and int(rows.max()) >= store.num_classes:
            raise StoreError(explain("y", f"classes 0..{store.num_classes - 1}", int(rows.max()), _VERIFY))
        if loss == "bce" and not is_binary(rows).all():
            other = rows[~is_binary(rows)][0]
            raise InputError(explain("y", "0, 1 or no label everywhere for --loss bce", other, _CONVERT))
        if np.isinf(rows).any():
            raise InputError(explain("y", "finite values", "an infinite one", "import other labels"))
    if unlabelled:
        fix = "leave unlabelled vertices out of the targets"
        raise InputError(explain(f"targets/{targets}", "a label of every target", f"{unlabelled} without", fix))


def _check_form(store: Store, loss: str) -> None:
    if "y" not in store.names:
        raise InputError(explain("the store", "labels to train on", "none", "import labels with the graph"))
    if loss == "cross_entropy":
        expected, fits = "one class per vertex, as integers,", _is_classes(store)
    elif loss == "bce":
        expected, fits = "columns of 0 and 1", store.stored_array("y").ndim <= 2 and store.dtype("y") != "bfloat16"
    else:
        expected, fits = "columns of floats", store.stored_array("y").ndim <= 2 and _is_float(store)
    if not fits:
        raise InputError(explain("y", f"{expected} for --loss {loss}", _form(store), _CONVERT))


def _form(store: Store) -> str:
    return f"{store.dtype('y')} {list(store.stored_array('y').shape)}"


def _is_classes(store: Store) -> bool:
    labels = store.stored_array("y")
    return labels.ndim == 1 and bool(np.issubdtype(labels.dtype, np.integer)) and store.dtype("y") != "bfloat16"


def _is_float(store: Store) -> bool:
    return bool(np.issubdtype(store.stored_array("y").dtype, np.floating))


def _num_columns(store: Store) -> int:
    labels = store.stored_array("y")
    return 1 if labels.ndim == 1 else int(labels.shape[1])


def own_labels(store: Store, targets: str, mesh: Mesh) -> Array:
    """Labels of the targets that this rank owns; each target is owned by one rank. A collective."""
    ranks = flat_mesh(mesh)
    local = LocalGraph(store, ranks, inference_ownership(store, ranks, None))
    rows: Array = store.stored_array("y")[local.targets(targets).ids - store.vertex_range[0]]
    return rows


def _label_rows(store: Store, targets: str) -> Iterator[Array]:
    labels, first = store.stored_array("y"), store.vertex_range[0]
    for _, ids in StoredTargets(targets, *store.stored_targets(targets), store.vertex_range).pieces():
        yield labels[ids - first]


def is_labelled(rows: Array) -> Array:
    """Entries that have a label."""
    return ~np.isnan(rows) if np.issubdtype(rows.dtype, np.floating) else rows >= 0


def is_binary(rows: Array) -> Array:
    """Entries that are 0, 1 or without a label."""
    missing = np.isnan(rows) if np.issubdtype(rows.dtype, np.floating) else rows == -1
    found: Array = missing | (rows == 0) | (rows == 1)
    return found


def _describe(store: Store, loss: str) -> str:
    if loss == "cross_entropy":
        return f"{store.num_classes} classes"
    return f"{_num_columns(store)} column(s) of {'0 and 1' if loss == 'bce' else store.dtype('y')}"
