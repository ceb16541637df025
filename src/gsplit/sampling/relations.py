"""Draws by relation, for heterogeneous graphs: each relation of a vertex is drawn as in a graph of its own.

A column lists in-edges by (relation, source), so the edges of a relation are a run of it, found by bisection over
``edge_type``. Relation r of a vertex is the uniform draw of ``neighbor`` from that run, with the key mix(layer key, r);
a single relation has the layer key itself, so that its draws are those of a graph without types.
A layer's fanout is one number per relation; 0 leaves a relation out. There is a compiled version for the host and a
version in torch operations for devices, which give equal layers.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.files.mapped_files import files_behind
from gsplit.graph.graph import Graph
from gsplit.graph.types import EdgeType, GraphTypes
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.jit import kernel
from gsplit.keys import scalar
from gsplit.keys.kernels_numba import mix
from gsplit.sampling.checks import raise_status
from gsplit.sampling.kernels_numba import DAMAGED, MAX_DEGREE, OK, TOO_MANY, pick_positions
from gsplit.sampling.kernels_torch import draw_from_runs, find_ends
from gsplit.sampling.neighbor import MAX_FANOUT, HostNeighborSampler, TorchNeighborSampler
from gsplit.sampling.protocol import Fanout, LayerSampler

__all__ = [
    "HostRelationSampler",
    "RelationFanouts",
    "TorchRelationSampler",
    "relation_sampler",
    "resolve_relation_fanouts",
]

RelationFanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]
"""A number per layer, which counts for every relation, or a number per layer for each relation, as in PyG."""


def resolve_relation_fanouts(num_neighbors: RelationFanouts, types: GraphTypes) -> list[tuple[int, ...]]:
    """A number for every relation of every layer.

    >>> types = GraphTypes(("a",), (("a", "to", "a"), ("a", "of", "a")), (0, 3), (0, 3))
    >>> resolve_relation_fanouts({("a", "to", "a"): [4, 2], ("a", "of", "a"): [0, -1]}, types)
    [(4, 0), (2, -1)]
    """
    given: list[Any]
    if isinstance(num_neighbors, Mapping):
        if set(num_neighbors) != set(types.edge_types):
            expected = f"a list for each of {list(types.edge_types)}"
            fix = "add the missing edge types, [0, 0, ...] leaves one out, and remove the others"
            raise InputError(explain("num_neighbors", expected, list(num_neighbors), fix))
        given = [num_neighbors[relation] for relation in types.edge_types]
    else:
        given = [num_neighbors] * types.num_relations
    for column in given:
        if isinstance(column, str) or not isinstance(column, Sequence):
            fix = "write [10, 5], or {edge type: [10, 5]}"
            raise InputError(explain("num_neighbors", "a list with a number for every layer", repr(column), fix))
    if not given:
        fix = "import edges, or use a graph without types"
        raise InputError(explain("num_neighbors", "a graph with edge types", "a graph without edge types", fix))
    columns = [list(column) for column in given]
    depths = sorted({len(column) for column in columns})
    if len(depths) != 1 or depths[0] == 0:
        fix = "give one number per layer of the model"
        raise InputError(explain("num_neighbors", "as many numbers for each edge type, at least one", depths, fix))
    for fanout in [fanout for column in columns for fanout in column]:
        if not hasattr(fanout, "__index__") or not -1 <= fanout <= MAX_FANOUT:
            fix = "give a number, 0 to leave an edge type out, or -1 for all neighbours"
            raise InputError(explain("num_neighbors", f"-1 to {MAX_FANOUT} for every layer", fanout, fix))
    return [tuple(map(operator.index, layer)) for layer in zip(*columns, strict=True)]


def relation_sampler(graph: Graph, original_ids: Ids, device: torch.device, edge_type: Array) -> LayerSampler:
    """The sampler of a heterogeneous graph. ``edge_type`` has the relation of every edge of the store."""
    if kernel_for("sample", device) == "numba":
        return HostRelationSampler(graph, original_ids, edge_type)
    return TorchRelationSampler(graph, original_ids, device, edge_type)


def _relation_keys(key: int, num_relations: int) -> list[int]:
    """The key of every relation. A single one is drawn as in a graph without types."""
    return [key] if num_relations == 1 else [scalar.mix(key, relation) for relation in range(num_relations)]


@kernel
def _end_of_run(edge_type: npt.NDArray[Any], start: int, stop: int) -> int:
    """One past the last edge of a column that has the type of the edge at ``start``."""
    relation = edge_type[start]
    while start < stop:
        middle = (start + stop) >> 1
        if edge_type[middle] <= relation:
            start = middle + 1
        else:
            stop = middle
    return start


@kernel
def _count_relations(
    indptr: Ids, edge_type: npt.NDArray[Any], first: int, frontier: Ids, fanouts: Ids, out_indptr: Ids
) -> int:
    """Fill ``out_indptr`` with the number of in-edges that each row will draw."""
    out_indptr[0] = 0
    for i in range(frontier.size):
        at = indptr[frontier[i] - first]
        stop = indptr[frontier[i] - first + 1]
        if not 0 <= at <= stop <= edge_type.size:
            return DAMAGED
        if stop - at >= MAX_DEGREE:
            return TOO_MANY
        count = 0
        while at < stop:
            relation = edge_type[at]
            if not 0 <= relation < fanouts.size:
                return DAMAGED
            end = _end_of_run(edge_type, at, stop)
            fanout = fanouts[relation]
            count += end - at if fanout < 0 or end - at <= fanout else fanout
            at = end
        out_indptr[i + 1] = out_indptr[i] + count
    return OK


@kernel
def _draw_relations(
    indptr: Ids,
    edge_type: npt.NDArray[Any],
    first: int,
    original: Ids,
    keys: npt.NDArray[np.uint64],
    frontier: Ids,
    fanouts: Ids,
    out_indptr: Ids,
    places: Ids,
) -> None:
    """Write the positions of all drawn in-edges. ``_count_relations`` has checked the same columns."""
    picks = np.empty(max(0, fanouts.max()), np.uint64)
    for i in range(frontier.size):
        at = indptr[frontier[i] - first]
        stop = indptr[frontier[i] - first + 1]
        name = np.uint64(original[frontier[i] - first] if original.size else frontier[i])
        out = out_indptr[i]
        while at < stop:
            relation = edge_type[at]
            end = _end_of_run(edge_type, at, stop)
            fanout = fanouts[relation]
            if fanout < 0 or end - at <= fanout:
                for j in range(end - at):
                    places[out + j] = at + j
                out += end - at
            else:
                pick_positions(mix(keys[relation], name), end - at, fanout, picks)
                for j in range(fanout):
                    places[out + j] = at + np.int64(picks[j])
                out += fanout
            at = end


class HostRelationSampler(HostNeighborSampler):
    """Draws by relation with compiled kernels. The layers have the positions of their edges."""

    def __init__(self, graph: Graph, original_ids: Ids, edge_type: Array) -> None:
        super().__init__(graph, original_ids, edge_ids=True)
        self._edge_type = edge_type
        self._files = files_behind(graph.indptr, graph.indices, original_ids, edge_type)

    def draw_layer(self, key: int, frontier: Ids, fanout: Fanout) -> tuple[Ids, Ids]:
        """See the base; ``fanout`` has a number for every relation."""
        assert isinstance(fanout, tuple)
        graph = self._graph
        first = graph.first_vertex
        fanouts = np.array(fanout, np.int64)
        indptr = np.empty(frontier.size + 1, np.int64)
        raise_status(_count_relations(graph.indptr, self._edge_type, first, frontier, fanouts, indptr), graph)
        places = np.empty(int(indptr[-1]), np.int64)
        keys = np.array(_relation_keys(key, len(fanout)), np.uint64)
        _draw_relations(graph.indptr, self._edge_type, first, self._original, keys, frontier, fanouts, indptr, places)
        return indptr, places

    def name_sources(self, sources: Ids, places: Ids) -> Ids:
        """See the base. An edge is excluded by its relation, source and destination (``typed_pairs``)."""
        return sources + self._edge_type[places].astype(np.int64) * self._graph.num_vertices

    def sources_of(self, names: Ids) -> Ids:
        """See the base."""
        return names % self._graph.num_vertices


class TorchRelationSampler(TorchNeighborSampler):
    """Draws by relation with torch operations. The layers have the positions of their edges."""

    def __init__(self, graph: Graph, original_ids: Ids, device: torch.device, edge_type: Array) -> None:
        super().__init__(graph, original_ids, device, edge_ids=True)
        own = edge_type[self.first_edge : self.first_edge + self.indices.numel()]
        self._edge_type = torch.from_numpy(np.array(own)).to(device)
        self._num_vertices = graph.num_vertices
        self._max_degree = int(graph.in_degrees().max(initial=0))

    def draw_layer(self, key: int, ids: Tensor, fanout: Fanout) -> tuple[Tensor, Tensor]:
        """See the base; ``fanout`` has a number for every relation."""
        assert isinstance(fanout, tuple)
        rows = ids - self.first
        names = self.original_ids[rows]
        at = self.indptr[rows]
        stops = self.indptr[rows + 1]
        drawn: list[tuple[Tensor, Tensor]] = []
        keys = _relation_keys(key, len(fanout))
        for relation, number in enumerate(fanout):
            end = find_ends(self._edge_type, at, stops, relation, self._max_degree)
            degrees = end - at
            counts = degrees if number < 0 else degrees.clamp(max=number)
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            places = draw_from_runs(at, degrees, names, keys[relation], offsets) if number else at[:0]
            drawn.append((offsets, places))
            at = end
        return _interleave(drawn)

    def name_sources(self, sources: Tensor, edge_ids: Tensor | None) -> Tensor:
        """See the base. An edge is excluded by its relation, source and destination (``typed_pairs``)."""
        assert edge_ids is not None
        return sources + self._edge_type[edge_ids - self.first_edge].long() * self._num_vertices


def _interleave(drawn: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Offsets and places of all relations, vertex after vertex, from those of every relation."""
    indptr = torch.stack([offsets for offsets, _ in drawn]).sum(0)
    places = indptr.new_empty(sum(found.numel() for _, found in drawn))
    begins = indptr[:-1]
    for offsets, found in drawn:
        counts = offsets.diff()
        shifts = torch.repeat_interleave(begins - offsets[:-1], counts)
        places[torch.arange(found.numel(), device=found.device) + shifts] = found
        begins = begins + counts
    return indptr, places
