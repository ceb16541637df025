"""The arrays of a store that a run trains from: input features, and values of edges.

In a heterogeneous graph, ``--features x,z`` are those of x and z that a vertex type has.
"""

from math import prod
from typing import TypedDict

from gsplit.errors import InputError, explain
from gsplit.run.config import TrainSettings
from gsplit.store.reader import Store

__all__ = ["ArrayOptions", "array_names", "feature_arrays", "typed_widths"]


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
    from gsplit.minibatch.local_graph import ArrayNames  # torch, only when used

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
