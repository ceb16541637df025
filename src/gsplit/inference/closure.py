"""The vertices that must be computed at each level so that the outputs of some targets are exact.

Level L, the output, needs the targets; the level below needs these and all their in-neighbours, and so on down to the
input. Below a level that needs more than half of the graph, all vertices are computed, because finding those that can
be left out would cost about as much.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gsplit.array_types import Ids
from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh
from gsplit.graph.graph import Graph
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.minibatch.split import split_minibatch
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import LayerSampler
from gsplit.telemetry import StepTelemetry

__all__ = [
    "CHUNK_EDGES",
    "CHUNK_ROWS",
    "RequiredVertices",
    "all_vertices",
    "edge_chunks",
    "num_rounds",
    "row_chunks",
    "targets_closure",
]

CHUNK_EDGES = 1 << 17
CHUNK_ROWS = 1 << 15
_LARGE = 0.5


@dataclass(frozen=True)
class RequiredVertices:
    """``levels[l]``: this rank's vertices (internal ids, ascending) whose rows at level l are needed; 0 is the input.

    ``num_edges`` and ``full_num_edges`` count the edges computed over all layers and ranks: for these vertices, and
    for all. ``all_below``: from some level down all vertices are computed.
    """

    levels: tuple[Ids, ...]
    num_edges: int
    full_num_edges: int
    all_below: bool


def edge_chunks(ids: Ids, graph: Graph) -> list[Ids]:
    """Cut vertices into chunks of at most CHUNK_EDGES in-edges and CHUNK_ROWS rows, but at least one vertex.

    >>> graph = Graph(np.array([0, 3, 5, 9]), np.zeros(9, np.int64), num_vertices=3)
    >>> [chunk.tolist() for chunk in edge_chunks(np.array([0, 2]), graph)]
    [[0, 2]]
    """
    rows = ids - graph.first_vertex
    ends = np.cumsum(graph.indptr[rows + 1] - graph.indptr[rows])
    chunks = []
    low = 0
    while low < ids.size:
        done = int(ends[low - 1]) if low else 0
        high = int(np.searchsorted(ends, done + CHUNK_EDGES, side="right"))
        high = min(max(high, low + 1), low + CHUNK_ROWS)
        chunks.append(ids[low:high])
        low = high
    return chunks


def row_chunks(ids: Ids) -> Iterator[Ids]:
    """Cut vertices into chunks of CHUNK_ROWS; at least one chunk, so that a rank without vertices gets the shapes."""
    for low in range(0, max(ids.size, 1), CHUNK_ROWS):
        yield ids[low : low + CHUNK_ROWS]


def num_rounds(chunks: list[Ids], mesh: Mesh) -> int:
    """The largest number of chunks of any rank, at least 1. A collective."""
    ours = (max(len(chunks), 1),) * mesh.num_splits
    return max(mesh.loading.all_to_all_counts(Call("count chunks"), ours))


def _total(amount: int, mesh: Mesh) -> int:
    """A number summed over all ranks. A collective."""
    total = torch.tensor([amount], dtype=torch.int64)
    mesh.control.all_reduce(Call("sum counts"), total).wait()  # all ranks: once per level
    return int(total)


def _num_edges(ids: Ids, graph: Graph) -> int:
    rows = ids - graph.first_vertex
    return int((graph.indptr[rows + 1] - graph.indptr[rows]).sum())


def all_vertices(local: LocalGraph, mesh: Mesh, num_layers: int) -> RequiredVertices:
    """Every vertex at every level. A collective."""
    every = np.arange(local.first, local.stop)
    whole = num_layers * _total(local.graph.num_edges, mesh)
    return RequiredVertices((every,) * (num_layers + 1), whole, whole, all_below=True)


def targets_closure(
    targets: Ids, local: LocalGraph, sampler: LayerSampler, mesh: Mesh, num_layers: int
) -> RequiredVertices:
    """The vertices that the outputs of all ranks' targets need. A collective."""
    every = np.arange(local.first, local.stop)
    levels = [np.sort(targets)]
    edges = 0
    all_below = False
    for _ in range(num_layers):
        edges += _total(_num_edges(levels[0], local.graph), mesh)
        if _total(levels[0].size, mesh) > _LARGE * local.store.num_vertices:
            levels.insert(0, every)
            all_below = True
        else:
            levels.insert(0, _with_neighbours(levels[0], local, sampler, mesh))
    whole = num_layers * _total(local.graph.num_edges, mesh)
    return RequiredVertices(tuple(levels), edges, whole, all_below)


def _with_neighbours(ids: Ids, local: LocalGraph, sampler: LayerSampler, mesh: Mesh) -> Ids:
    """This rank's vertices among the given ones of all ranks and their in-neighbours. A collective."""
    marked = np.zeros(local.stop - local.first, bool)
    chunks = edge_chunks(ids, local.graph)
    nothing = np.empty(0, np.int64)
    for number in range(num_rounds(chunks, mesh)):  # all ranks: as many rounds as the rank with most chunks needs
        chunk = torch.from_numpy(chunks[number] if number < len(chunks) else nothing)
        split = split_minibatch(sampler, chunk, [-1], StepKey(0, 0, 0), local.ownership, mesh.loading, StepTelemetry())
        marked[split.input_ids.cpu().numpy() - local.first] = True
    return local.first + np.flatnonzero(marked)
