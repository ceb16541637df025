"""The vertex and edge types of a heterogeneous graph, which is stored as ONE graph.

Original ids are fused: the vertices of type t have the ids ``offsets[t] .. offsets[t + 1] - 1``, so keys, owners and
exchanges need no types. Each edge has a type, called a relation, and a column of the graph lists in-edges by (relation,
original id of the source).

Internal ids are ordered by part, and in a part by type. The vertices of a type in a part are a range, so a table of
ranges gives the type of a vertex, and its row in the arrays of its type. There is no map of all vertices (law 6).
"""

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain

if TYPE_CHECKING:  # a store has types, and opening one does not import torch
    import torch
    from torch import Tensor

__all__ = ["EdgeType", "GraphTypes", "order_by_part_and_type"]

EdgeType = tuple[str, str, str]
"""Source type, name, destination type, as in PyG."""


@dataclass(frozen=True)
class GraphTypes:
    """Names of the types, and the ranges of their vertices.

    ``offsets``: first original id of every type, then the number of vertices. ``boundaries``: first internal id of
    every range, then the number of vertices; range i has vertices of type i modulo the number of types.

    Three authors and four papers in two parts. Part 0 has authors 0..1 and paper 2, part 1 has author 3 and papers
    4..6, in internal ids:

    >>> import torch
    >>> types = GraphTypes(("author", "paper"), (("author", "writes", "paper"),), (0, 3, 7), (0, 2, 3, 4, 7))
    >>> types.of(torch.tensor([0, 2, 3, 4])).tolist(), types.rows(torch.tensor([0, 2, 3, 4])).tolist()
    ([0, 1, 0, 1], [0, 0, 2, 1])
    """

    vertex_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    offsets: tuple[int, ...]
    boundaries: tuple[int, ...]
    edge_values: tuple[tuple[str, ...], ...] = ()
    """The names of the values that the edges of every edge type have; empty if no edge has values."""

    def __post_init__(self) -> None:
        known = set(self.vertex_types)
        if not known or len(known) != len(self.vertex_types) or len(set(self.edge_types)) != len(self.edge_types):
            names = f"{self.vertex_types}, {self.edge_types}"
            raise InputError(explain("types", "different names, at least one vertex type", names, "rename them"))
        for src, name, dst in self.edge_types:
            if src not in known or dst not in known:
                fix = f"use {', '.join(self.vertex_types)}"
                raise InputError(explain("edge type", "two vertex types of the graph", (src, name, dst), fix))
        sizes = np.diff(self.boundaries).reshape(-1, len(self.vertex_types)) if self._fits() else None
        if sizes is None or np.any(sizes < 0) or sizes.sum(0).tolist() != [b - a for a, b in pairwise(self.offsets)]:
            got = f"offsets {self.offsets}, boundaries {self.boundaries}"
            fix = "give a range for every part and type"
            raise InputError(explain("types", "ascending ranges that contain every vertex once", got, fix))

    def _fits(self) -> bool:
        num_types = len(self.vertex_types)
        num_ranges = len(self.boundaries) - 1
        starts_at_0 = self.offsets[:1] == (0,) and self.boundaries[:1] == (0,)
        return starts_at_0 and len(self.offsets) == num_types + 1 and num_ranges > 0 and num_ranges % num_types == 0

    @property
    def num_types(self) -> int:
        """Number of vertex types."""
        return len(self.vertex_types)

    @property
    def num_relations(self) -> int:
        """Number of edge types."""
        return len(self.edge_types)

    def metadata(self) -> tuple[list[str], list[EdgeType]]:
        """PyG's metadata: vertex types and edge types."""
        return list(self.vertex_types), list(self.edge_types)

    def with_values(self, name: str | None) -> list[EdgeType]:
        """The edge types whose edges have values of a name."""
        return [found for found, names in zip(self.edge_types, self.edge_values, strict=False) if name in names]

    def number(self, vertex_type: str) -> int:
        """The number of a vertex type."""
        if vertex_type not in self.vertex_types:
            fix = "choose one of these"
            raise InputError(explain("vertex type", f"one of {', '.join(self.vertex_types)}", vertex_type, fix))
        return self.vertex_types.index(vertex_type)

    def count(self, vertex_type: str) -> int:
        """Number of vertices of a type."""
        number = self.number(vertex_type)
        return self.offsets[number + 1] - self.offsets[number]

    def ends(self) -> Ids:
        """The numbers of the source and the destination type of every edge type [2, relations]."""
        numbers = [[self.number(src), self.number(dst)] for src, _, dst in self.edge_types]
        return np.array(numbers, np.int64).reshape(-1, 2).T

    def of_host(self, ids: Array) -> Ids:
        """As ``of``, for numpy arrays."""
        return np.searchsorted(np.asarray(self.boundaries[1:-1]), ids, side="right") % self.num_types

    def ranges(self, vertex_type: str) -> list[tuple[int, int]]:
        """First internal id and one past the last of every range of a type, part by part."""
        return list(pairwise(self.boundaries))[self.number(vertex_type) :: self.num_types]

    def of(self, ids: "Tensor") -> "Tensor":
        """The number of the type of each vertex, from internal ids."""
        numbers = tuple(range(self.num_types)) * ((len(self.boundaries) - 1) // self.num_types)
        return _on_device(numbers, ids.dtype, ids.device)[self._ranges(ids)]

    def of_original(self, ids: "Tensor") -> "Tensor":
        """The number of the type of each vertex, from original ids."""
        import torch

        return torch.searchsorted(_on_device(self.offsets[1:-1], ids.dtype, ids.device), ids, right=True)

    def rows(self, ids: "Tensor") -> "Tensor":
        """The row of each vertex in the arrays of its type, from internal ids."""
        ranges = self._ranges(ids)
        return ids - _on_device(self._shifts, ids.dtype, ids.device)[ranges]

    def _ranges(self, ids: "Tensor") -> "Tensor":
        import torch

        return torch.searchsorted(_on_device(self.boundaries[1:-1], ids.dtype, ids.device), ids, right=True)

    @functools.cached_property
    def _shifts(self) -> tuple[int, ...]:
        """First internal id of every range, minus the row of its first vertex in the arrays of its type."""
        sizes = np.diff(self.boundaries).reshape(-1, self.num_types)
        first_rows = np.cumsum(sizes, axis=0) - sizes
        return tuple((np.asarray(self.boundaries[:-1]) - first_rows.reshape(-1)).tolist())

    def row_range(self, vertex_type: str, first: int, stop: int) -> tuple[int, int]:
        """The rows of a type's vertices among the internal ids ``first .. stop - 1``, which are whole parts or all."""
        number = self.number(vertex_type)
        starts = np.asarray(self.boundaries[:-1])[number :: self.num_types]
        ends = np.asarray(self.boundaries[1:])[number :: self.num_types]
        before = np.clip(first - starts, 0, ends - starts).sum()
        inside = np.clip(stop - starts, 0, ends - starts).sum()
        return int(before), int(inside)


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], dtype: "torch.dtype", device: "torch.device") -> "Tensor":
    """A table on a device. Cached, so that it is copied once."""
    import torch

    return torch.tensor(numbers, dtype=dtype, device=device)


def order_by_part_and_type(parts: Ids, types: Ids, num_parts: int, num_types: int) -> tuple[Ids, tuple[int, ...]]:
    """The vertices by part, then type, then original id, and the boundaries of the (part, type) ranges.

    >>> order, boundaries = order_by_part_and_type(np.array([1, 0, 0]), np.array([0, 0, 1]), 2, 2)
    >>> order.tolist(), boundaries
    ([1, 2, 0], (0, 1, 2, 3, 3))
    """
    order = np.lexsort([types, parts])  # stable: equal keys stay in original order
    counts = np.bincount(parts * num_types + types, minlength=num_parts * num_types)
    return order, (0, *np.cumsum(counts).tolist())
