"""In-memory implementation of ``GraphStore``, for data that has not been written to disk."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gsplit.array_types import Array, Ids
from gsplit.graph.graph import Graph
from gsplit.graph.types import EdgeType, GraphTypes, order_by_part_and_type
from gsplit.store.files import ordered_bits, raw_bytes
from gsplit.store.manifest import edge_type_dtype
from gsplit.store.protocol import ArrayStore
from gsplit.store.statistics import count_classes

__all__ = ["MemoryStore", "join_values", "renumbered_store", "typed_store"]


@dataclass(frozen=True)
class MemoryStore(ArrayStore):
    """A whole graph as numpy arrays. ``dtypes`` names the types that numpy does not have, such as bfloat16."""

    graph: Graph
    part_boundaries: list[int]
    arrays: dict[str, Array]
    dtypes: dict[str, str]
    unused: tuple[str, ...] = ()
    types: GraphTypes | None = None

    @property
    def num_vertices(self) -> int:
        return self.graph.num_vertices

    @property
    def num_edges(self) -> int:
        return self.graph.num_edges

    @property
    def vertex_range(self) -> tuple[int, int]:
        return 0, self.num_vertices

    @property
    def part_loads(self) -> None:
        """None: graphs in memory are not presampled."""

    @property
    def num_classes(self) -> int:
        return count_classes(self.arrays["y"], self.dtype("y")) if "y" in self.arrays else 0

    @property
    def class_names(self) -> tuple[str, ...]:
        """Empty: labels in memory are numbers."""
        return ()

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        values = (self.stored_array(f"edges/{name}") for name in self.edge_names)
        kinds = (self.arrays["edge_type"],) if self.types is not None else ()
        for array in (self.graph.indptr, self.graph.indices, self.original_ids(), *kinds, *values):
            digest.update(raw_bytes(array))
        return digest.hexdigest()

    def stored_targets(self, name: str) -> tuple[Array, None, int]:
        """The whole target list."""
        targets = self.stored_array(f"targets/{name}")
        return targets, None, targets.size

    def dtype(self, name: str) -> str:
        return self.dtypes.get(name, self.stored_array(name).dtype.name)


def renumbered_store(
    src: Ids,
    dst: Ids,
    parts: Ids,
    vertex_arrays: Mapping[str, tuple[Array, str]],
    targets: Mapping[str, Ids],
    edge_values: Mapping[str, tuple[Array, str]] | None = None,
    *,
    unused: tuple[str, ...] = (),
) -> MemoryStore:
    """Renumber a graph by parts: the vertices of a part are contiguous, in their original order.

    ``parts[v]`` is the part of original vertex v. Neighbours are ordered by original id and equal edges by their
    values, as in every store. Each array comes with the name of its type.
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


def typed_store(
    counts: Mapping[str, int],
    edges: Mapping[EdgeType, tuple[Ids, Ids]],
    parts: Mapping[str, Ids],
    vertex_arrays: Mapping[str, tuple[Array, str]],
    targets: Mapping[str, Ids],
    *,
    edge_values: Mapping[str, tuple[Mapping[EdgeType, Array], str]] | None = None,
    unused: tuple[str, ...] = (),
) -> MemoryStore:
    """A heterogeneous graph in memory, renumbered by part and type (``graph.types``).

    ``counts``: vertices of every type. ``edges``: source and destination ids in their types. ``parts[type][v]``: the
    part of vertex v of a type. ``vertex_arrays``: by names such as ``features/paper/x`` and ``y/paper``, with the names
    of their types of numbers. ``targets``: ids in the type, by names such as ``paper/train``. ``edge_values``: by name,
    the rows of every edge type that has them, all of one shape, and the name of their type of numbers.
    """
    vertex_types = tuple(counts)
    offsets = np.concatenate([[0], np.cumsum(list(counts.values()))]).astype(np.int64)
    first = dict(zip(vertex_types, offsets.tolist(), strict=False))
    types = np.repeat(np.arange(len(counts)), list(counts.values()))
    part = np.concatenate([parts[name] for name in vertex_types])
    num_parts = int(part.max(initial=0)) + 1
    original, boundaries = order_by_part_and_type(part, types, num_parts, len(counts))
    internal = np.empty_like(original)
    internal[original] = np.arange(original.size)
    empty = np.empty(0, np.int64)
    src = np.concatenate([empty, *(pair[0] + first[relation[0]] for relation, pair in edges.items())])
    dst = np.concatenate([empty, *(pair[1] + first[relation[2]] for relation, pair in edges.items())])
    edge_type = np.repeat(np.arange(len(edges)), np.array([pair[0].size for pair in edges.values()], np.int64))
    values = {
        name: (join_values(found, {relation: pair[0].size for relation, pair in edges.items()}), dtype)
        for name, (found, dtype) in (edge_values or {}).items()
    }
    order = _edge_order(src, internal[dst] * max(1, len(edges)) + edge_type, values)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(internal[dst], minlength=original.size))]).astype(np.int64)
    arrays = {
        "original_ids": original,
        "edge_type": edge_type[order].astype(edge_type_dtype(len(edges))),
    }
    arrays |= {f"edges/{name}": array[order] for name, (array, _) in values.items()}
    for name, (array, _) in vertex_arrays.items():
        vertex_type = name.split("/")[1]
        mine = original[types[original] == vertex_types.index(vertex_type)]
        arrays[name] = array[mine - first[vertex_type]]
    for name, ids in targets.items():
        arrays[f"targets/{name}"] = internal[np.sort(ids) + first[name.split("/")[0]]]
    return MemoryStore(
        graph=Graph(indptr, internal[src[order]], original.size),
        part_boundaries=[0, *np.cumsum(np.bincount(part, minlength=num_parts)).tolist()],
        arrays=arrays,
        dtypes={name: dtype for name, (_, dtype) in vertex_arrays.items()}
        | {f"edges/{name}": dtype for name, (_, dtype) in values.items()},
        unused=unused,
        types=GraphTypes(
            vertex_types,
            tuple(edges),
            tuple(offsets.tolist()),
            boundaries,
            tuple(tuple(n for n, (found, _) in (edge_values or {}).items() if relation in found) for relation in edges),
        ),
    )


def join_values(found: Mapping[EdgeType, Array], sizes: Mapping[EdgeType, int]) -> Array:
    """The values of the edges of all edge types, one after the other; 0 for those of edge types without them."""
    like = next(iter(found.values()))
    return np.concatenate([found.get(of, np.zeros((size, *like.shape[1:]), like.dtype)) for of, size in sizes.items()])


def _edge_order(src: Ids, dst: Ids, values: Mapping[str, tuple[Array, str]]) -> Ids:
    """Order edges by destination, source and, where both are equal, by their values, as ``store.build`` does."""
    order = np.lexsort([src, dst])
    equal = (np.diff(src[order]) == 0) & (np.diff(dst[order]) == 0)
    tied = np.flatnonzero(np.append(equal, False) | np.insert(equal, 0, False))
    if tied.size and values:  # equal edges are adjacent, so sorting among them alone is enough
        edges = order[tied]
        columns = [part for array, dtype in values.values() for part in ordered_bits(array[edges], dtype).T]
        order[tied] = edges[np.lexsort([*reversed(columns), src[edges], dst[edges]])]
    return order
