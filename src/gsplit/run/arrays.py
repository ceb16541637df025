"""The arrays of a store that a run reads: input features, and the labels of its targets.

The targets of a heterogeneous graph are of one vertex type, named before them ("paper/train"). Labels are those of the
type. ``--features x,z`` are those of x and z that a type has.
"""

from dataclasses import dataclass
from math import prod
from typing import TypedDict

import numpy as np
import torch

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.minibatch.local_graph import ArrayNames
from gsplit.run.config import TrainSettings
from gsplit.store.reader import Store

__all__ = ["ArrayOptions", "TargetLabels", "array_names", "feature_arrays", "labels_of", "typed_widths"]


@dataclass(frozen=True)
class TargetLabels:
    """The labels of the vertices that targets are of."""

    name: str
    array: Array
    dtype: str
    num_classes: int
    class_names: tuple[str, ...]

    def rows(self, store: Store, ids: Ids) -> Array:
        """The labels of vertices by internal id."""
        places = ids - store.vertex_range[0]
        if store.types is not None:
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


class ArrayOptions(TypedDict):
    """Names of stored arrays, as keyword arguments of the loader, inference and verification."""

    features: list[str] | dict[str, list[str]]
    edge_attr: str | None
    edge_weight: str | None


def array_names(settings: TrainSettings, store: Store) -> ArrayOptions:
    """The stored arrays that a run trains from; features by vertex type in a heterogeneous graph."""
    features: list[str] | dict[str, list[str]] = settings.feature_names
    if store.types is not None:
        found = {
            name: [each for each in settings.feature_names if f"features/{name}/{each}" in store.names]
            for name in store.types.vertex_types
        }
        features = {name: names for name, names in found.items() if names}
    return {"features": features, "edge_attr": settings.edge_attr, "edge_weight": settings.edge_weight}


def feature_arrays(settings: TrainSettings, store: Store) -> list[str]:
    """The features of a run by their names in the store, such as "x" or "paper/x"."""
    return ArrayNames(store, array_names(settings, store)["features"], None, None).stored_features


def typed_widths(settings: TrainSettings, store: Store) -> dict[str, int]:
    """Columns of the features of every vertex type that has edges; a type without features is refused."""
    assert store.types is not None
    features = array_names(settings, store)["features"]
    assert isinstance(features, dict)
    widths = {
        name: sum(prod(store.shape(f"features/{name}/{each}")[1:]) for each in names)
        for name, names in features.items()
    }
    ends = {end for src, _, dst in store.types.edge_types for end in (src, dst)}
    missing = [name for name in store.types.vertex_types if name in ends and name not in widths]
    if missing:
        expected = f"features {settings.features} of every vertex type with edges"
        fix = "import features of them, or train in a program with gsplit.OwnedEmbedding (docs/heterogeneous.md)"
        raise InputError(explain("features", expected, f"none of {', '.join(missing)}", fix))
    return {name: widths[name] for name in widths if name in ends}
