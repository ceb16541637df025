"""A graph in memory with the face of an opened store, for data that has not been written to disk."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gsplit.graph import Graph
from gsplit.store.files import Array, ordered_bits, raw_bytes
from gsplit.store.original_order import OriginalOrder
from gsplit.store.protocol import edge_value_names, missing_array
from gsplit.store.statistics import count_classes

__all__ = ["MemoryStore", "renumbered_store"]


@dataclass(frozen=True)
class MemoryStore:
    """See ``protocol.GraphStore`` and ``reader.Store``: the same names, with arrays instead of memory maps."""

    graph: Graph
    part_boundaries: list[int]
    arrays: dict[str, Array]
    dtypes: dict[str, str]
    unused: tuple[str, ...] = ()

    @property
    def num_vertices(self) -> int:
        """Vertices of the whole graph."""
        return self.graph.num_vertices

    @property
    def num_edges(self) -> int:
        """Edges of the whole graph."""
        return self.graph.num_edges

    @property
    def vertex_range(self) -> tuple[int, int]:
        """All vertices."""
        return 0, self.num_vertices

    @property
    def part_loads(self) -> None:
        """Not known."""

    @property
    def num_features(self) -> int:
        """Columns of the feature array ``x``; 0 without one."""
        return int(self.arrays["features/x"].shape[1]) if "features/x" in self.arrays else 0

    @property
    def num_classes(self) -> int:
        """Largest label plus one; 0 without integer labels."""
        return count_classes(self.arrays["y"], self.dtype("y")) if "y" in self.arrays else 0

    @property
    def class_names(self) -> tuple[str, ...]:
        """Not known: labels in memory are numbers."""
        return ()

    @property
    def is_renumbered(self) -> bool:
        """Whether internal ids may differ from original ids."""
        return "original_ids" in self.arrays

    @property
    def fingerprint(self) -> str:
        """The graph in short, to compare between ranks."""
        digest = hashlib.sha256()
        values = (self.stored_array(f"edges/{name}") for name in self.edge_names)
        for array in (self.graph.indptr, self.graph.indices, self.original_ids(), *values):
            digest.update(raw_bytes(array))
        return digest.hexdigest()

    @property
    def names(self) -> list[str]:
        """Names of all arrays."""
        return sorted(self.arrays)

    @property
    def edge_names(self) -> list[str]:
        """Names of the per-edge values."""
        return edge_value_names(self.arrays)

    @cached_property
    def _by_original_id(self) -> OriginalOrder:
        return OriginalOrder(self, "graph")

    def array(self, name: str) -> Array:
        """One array by name: row v for original vertex v, targets as ascending original ids."""
        return self._by_original_id.array(name)

    def rows(self, name: str, ids: npt.ArrayLike) -> Array:
        """The rows of some vertices by original id."""
        return self._by_original_id.rows(name, ids)

    def stored_array(self, name: str) -> Array:
        """One array by name, in internal order."""
        if name not in self.arrays:
            raise missing_array("graph", name, self.names)
        return self.arrays[name]

    def stored_targets(self, name: str) -> tuple[Array, None, int]:
        """A target list, all of it."""
        targets = self.stored_array(f"targets/{name}")
        return targets, None, targets.size

    def dtype(self, name: str) -> str:
        """The element type of an array, by its logical name."""
        return self.dtypes.get(name, self.stored_array(name).dtype.name)

    def original_ids(self, first: int | None = None, stop: int | None = None) -> Array:
        """The ids that vertices (all, or a range of them) had before they were renumbered."""
        if not self.is_renumbered:
            return np.arange(first or 0, self.num_vertices if stop is None else stop)
        return self.arrays["original_ids"][first:stop]


def renumbered_store(
    src: npt.NDArray[np.int64],
    dst: npt.NDArray[np.int64],
    parts: npt.NDArray[np.int64],
    vertex_arrays: Mapping[str, tuple[Array, str]],
    targets: Mapping[str, npt.NDArray[np.int64]],
    edge_values: Mapping[str, tuple[Array, str]] | None = None,
    *,
    unused: tuple[str, ...] = (),
) -> MemoryStore:
    """A graph renumbered by parts: vertices of a part are contiguous, in their original order.

    ``parts[v]`` is the part of original vertex v. Neighbours are ordered by original id and equal edges by their
    values, as in every store; arrays come with the names of their types.
    """
    edge_values = edge_values or {}
    num_vertices = parts.size
    original = np.argsort(parts, kind="stable")
    internal = np.empty_like(original)
    internal[original] = np.arange(num_vertices)
    order = _edge_order(src, internal[dst], edge_values)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(internal[dst], minlength=num_vertices))]).astype(np.int64)
    counts = np.bincount(parts, minlength=int(parts.max(initial=0)) + 1)
    arrays = {"original_ids": original}
    arrays |= {name: array[original] for name, (array, _) in vertex_arrays.items()}
    arrays |= {f"edges/{name}": array[order] for name, (array, _) in edge_values.items()}
    arrays |= {f"targets/{name}": internal[np.sort(ids)] for name, ids in targets.items()}
    dtypes = {name: dtype for name, (_, dtype) in vertex_arrays.items()}
    dtypes |= {f"edges/{name}": dtype for name, (_, dtype) in edge_values.items()}
    graph = Graph(indptr, internal[src[order]], num_vertices)
    return MemoryStore(graph, [0, *np.cumsum(counts).tolist()], arrays, dtypes, unused)


def _edge_order(
    src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64], values: Mapping[str, tuple[Array, str]]
) -> npt.NDArray[np.int64]:
    """Edges by destination, source and, where both are equal, by their values: the order of ``store.build``."""
    order = np.lexsort([src, dst])
    equal = (np.diff(src[order]) == 0) & (np.diff(dst[order]) == 0)
    tied = np.flatnonzero(np.append(equal, False) | np.insert(equal, 0, False))
    if tied.size and values:  # equal edges are adjacent, so sorting among them alone is enough
        edges = order[tied]
        columns = [part for array, dtype in values.values() for part in ordered_bits(array[edges], dtype).T]
        order[tied] = edges[np.lexsort([*reversed(columns), src[edges], dst[edges]])]
    return order
