"""The labels of a run's targets: their form, and which losses and metrics take it.

The targets of a heterogeneous graph are of one vertex type, named before them ("paper/train"). Labels are those of the
type. The command line checks their form before it imports torch.
"""

from dataclasses import dataclass

import numpy as np

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.inference.metric_names import ERRORS_OF_FLOATS
from gsplit.store.reader import Store

__all__ = ["BALANCED", "OTHER_LABELS", "TargetLabels", "labels_of"]

BALANCED = "balanced"
"""The name of class weights by the numbers of targets."""

OTHER_LABELS = "import the labels in another form, or choose another --loss"
"""What to do about labels that a loss does not take."""


@dataclass(frozen=True)
class TargetLabels:
    """The labels of the vertices that targets are of."""

    name: str
    array: Array
    dtype: str
    num_classes: int
    class_names: tuple[str, ...]

    @property
    def form(self) -> str:
        """Type and shape, for messages."""
        return f"{self.dtype} {list(self.array.shape)}"

    @property
    def num_columns(self) -> int:
        """Labels of a vertex."""
        return 1 if self.array.ndim == 1 else int(self.array.shape[1])

    @property
    def is_classes(self) -> bool:
        """Whether each vertex has one integer."""
        whole = bool(np.issubdtype(self.array.dtype, np.integer)) and self.dtype != "bfloat16"
        return self.array.ndim == 1 and whole

    @property
    def is_float(self) -> bool:
        return bool(np.issubdtype(self.array.dtype, np.floating))

    def check_form(self, loss: str) -> None:
        """Refuse labels of another form than a loss takes."""
        has_columns = self.array.ndim <= 2
        if loss == "cross_entropy":
            expected = "one class per vertex, as integers,"
            fits = self.is_classes
        elif loss == "bce":
            expected = "columns of 0 and 1"
            fits = has_columns and self.dtype != "bfloat16"
        else:
            expected = "columns of floats"
            fits = has_columns and self.is_float
        if not fits:
            raise InputError(explain(self.name, f"{expected} for --loss {loss}", self.form, OTHER_LABELS))

    def check_metric(self, metric: str, loss: str | None) -> None:
        """Refuse errors of floats as a metric of other labels. ``loss``: None if it is not known yet."""
        if metric in ERRORS_OF_FLOATS and (loss == "cross_entropy" or not self.is_float):
            fix = "choose accuracy, f1_micro, f1_macro or roc_auc"
            raise InputError(explain(f"metric {metric}", "float labels", self.dtype, fix))

    def parse_weights(self, class_weights: str) -> list[float]:
        """One number per class from the text of ``--class-weights``, which is not ``BALANCED``."""
        try:
            weights = [float(part) for part in class_weights.split(",")]
        except ValueError:
            weights = []
        if len(weights) != self.num_classes:
            expected = f"{BALANCED}, or {self.num_classes} numbers, one per class"
            raise InputError(explain("class_weights", expected, class_weights, "write them as 1,2.5,1"))
        return weights

    def rows(self, store: Store, ids: Ids) -> Array:
        """The labels of vertices by internal id."""
        places = ids - store.vertex_range[0]
        if store.types is not None:
            import torch

            places = store.types.rows(torch.from_numpy(np.array(ids))).numpy()  # a copy: ids may be a read-only map
        found: Array = self.array[places]
        return found


def labels_of(store: Store, targets: str) -> TargetLabels:
    """The labels of some targets; refused if there are none."""
    vertex_type = targets.rpartition("/")[0] if store.types is not None else ""
    if store.types is not None:
        store.stored_array(f"targets/{targets}")  # refuses names without a type, and unknown types
    name = f"y/{vertex_type}" if vertex_type else "y"
    if name not in store.names:
        what = f"labels of {vertex_type} to train on" if vertex_type else "labels to train on"
        raise InputError(explain("the store", what, ", ".join(sorted(store.names)), "import labels with the graph"))
    num_classes = store.num_classes
    class_names = store.class_names
    if store.types is not None:
        entry = store.manifest.vertex_types[store.types.number(vertex_type)]
        num_classes = entry.num_classes
        class_names = tuple(entry.class_names)
    return TargetLabels(name, store.stored_array(name), store.dtype(name), num_classes, class_names)
