"""What a partitioner is asked: an undirected graph with integer weights, on disk.

| strategy | balanced | cut |
|---|---|---|
| gsplit | c_v k_v + c_e e_v, the expected work | k of both directions, summed; edges never drawn are dropped |
| node | the same | number of edges |
| edge | stored in-edges, and targets: two constraints | number of edges |

k, e are the counts of ``presample``. Weights are int64 and so are METIS's: sums of counts cannot overflow and nothing
is scaled, but that c_v and c_e may be fractions: then c_v k_v + c_e e_v is multiplied by 1024 and rounded.

The graph is symmetrised here, self-loops and parallel edges are merged. Arrays are memory maps in a folder, which is
also how a solver in another process gets them: nothing of the size of the edges is held in anonymous memory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.graph import Graph
from gsplit.jit import kernel
from gsplit.partition.presample import Counts

__all__ = ["STRATEGIES", "WeightedGraph", "open_weighted", "vertex_work", "weigh"]

Array = npt.NDArray[Any]
STRATEGIES = ("gsplit", "node", "edge", "random")
_FRACTIONS = 1024
_NAMES = ("xadj", "adjncy", "edge_weights", "vertex_weights")


@dataclass(frozen=True)
class WeightedGraph:
    """Neighbours of v are ``adjncy[xadj[v] : xadj[v + 1]]``, ascending, each once, both ways; weights beside them.

    ``edge_weights`` is empty where all are one. ``vertex_weights`` has a column per balance constraint.
    """

    xadj: npt.NDArray[np.int64]
    adjncy: Array
    edge_weights: npt.NDArray[np.int64]
    vertex_weights: npt.NDArray[np.int64]

    @property
    def num_vertices(self) -> int:
        """Vertices."""
        return int(self.xadj.size - 1)


def _place(folder: Path, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    if 0 in shape:  # an empty file cannot be mapped
        np.save(folder / f"{name}.npy", np.empty(shape, dtype))
        return np.empty(shape, dtype)
    return np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)


def open_weighted(folder: Path) -> WeightedGraph:
    """The graph that ``weigh`` left in a folder."""
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _NAMES]
    return WeightedGraph(*arrays)


def vertex_work(counts: Counts, c_v: float, c_e: float) -> npt.NDArray[np.int64]:
    """c_v k_v + c_e e_v in integers."""
    if not (c_v >= 0 and c_e >= 0 and c_v + c_e > 0):
        raise InputError(explain("c_v, c_e", "two numbers from 0, not both 0", (c_v, c_e), "see docs/partition.md"))
    whole = float(c_v).is_integer() and float(c_e).is_integer()
    work = c_v * counts.computed.astype(np.float64) + c_e * counts.edges_drawn.astype(np.float64)
    return np.rint(work * (1 if whole else _FRACTIONS)).astype(np.int64)


def weigh(
    strategy: str, graph: Graph, counts: Counts, targets: npt.NDArray[np.int64], folder: Path, c_v: float, c_e: float
) -> WeightedGraph:
    """Write the weighted graph of a strategy into a folder and open it. Ids in ``graph`` may be in any order."""
    n = graph.num_vertices
    id_type = np.int32 if n < 1 << 31 else np.int64
    weighted = strategy == "gsplit"
    folder.mkdir(parents=True, exist_ok=True)
    starts, rows = _transpose(graph, counts.edges if weighted else None, folder, id_type)
    ids, weights = rows
    if not _ascending(graph.indptr, graph.indices):  # a renumbered store lists neighbours by original id
        raise InputError(explain("the store", "one that has not been renumbered", "a partitioned one", _REPARTITION))
    given = counts.edges if weighted else np.empty(0, np.uint32)
    xadj = _place(folder, "xadj", (n + 1,), np.int64)
    _count_merged(graph.indptr, graph.indices, given, starts, ids, weights, xadj)
    adjncy = _place(folder, "adjncy", (int(xadj[-1]),), id_type)
    edge_weights = _place(folder, "edge_weights", (int(xadj[-1]) if weighted else 0,), np.int64)
    _fill_merged(graph.indptr, graph.indices, given, starts, ids, weights, xadj, adjncy, edge_weights)
    for name in ("out_ids", "out_weights"):
        (folder / f"{name}.npy").unlink()
    columns = [vertex_work(counts, c_v, c_e)]
    if strategy == "edge":
        is_target = np.zeros(n, np.int64)
        is_target[targets] = 1
        columns = [graph.in_degrees(), is_target]
    vertex_weights = _place(folder, "vertex_weights", (n, len(columns)), np.int64)
    vertex_weights[...] = np.stack(columns, axis=1)
    return WeightedGraph(xadj, adjncy, edge_weights, vertex_weights)


_REPARTITION = "partition the store that it was made from"


def _transpose(
    graph: Graph, edge_counts: npt.NDArray[np.uint32] | None, folder: Path, id_type: Any
) -> tuple[npt.NDArray[np.int64], tuple[Array, Array]]:
    """The out-edges of every vertex, destinations ascending, with their counts: a counting sort into maps."""
    starts = np.zeros(graph.num_vertices + 1, np.int64)
    _count_sources(graph.indptr, graph.indices, starts)
    ids = _place(folder, "out_ids", (graph.num_edges,), id_type)
    given = np.empty(0, np.uint32) if edge_counts is None else edge_counts
    weights = _place(folder, "out_weights", (given.size,), np.uint32)
    _scatter(graph.indptr, graph.indices, given, starts.copy(), ids, weights)
    return starts, (ids, weights)


@kernel
def _count_sources(indptr: Array, indices: Array, starts: Array) -> None:
    """``starts[u]`` becomes where u's out-edges begin."""
    base, n = indptr[0], starts.size - 1
    for edge in range(base, indptr[indptr.size - 1]):
        source = indices[edge]
        if 0 <= source < n:
            starts[source + 1] += 1
    for vertex in range(n):
        starts[vertex + 1] += starts[vertex]


@kernel
def _scatter(indptr: Array, indices: Array, counts: Array, cursor: Array, ids: Array, weights: Array) -> None:
    for vertex in range(indptr.size - 1):
        for edge in range(indptr[vertex], indptr[vertex + 1]):
            place = cursor[indices[edge]]
            cursor[indices[edge]] += 1
            ids[place] = vertex
            if counts.size:
                weights[place] = counts[edge]


@kernel
def _ascending(indptr: Array, indices: Array) -> bool:
    for vertex in range(indptr.size - 1):
        for edge in range(indptr[vertex] + 1, indptr[vertex + 1]):
            if indices[edge] < indices[edge - 1]:
                return False
    return True


@kernel
def _merge_one(
    vertex: int,
    indptr: Array,
    indices: Array,
    counts: Array,
    starts: Array,
    ids: Array,
    out_weights: Array,
    adjncy: Array,
    edge_weights: Array,
    place: int,
) -> int:
    """Merge a vertex's in-edges and out-edges, both ascending; returns the number of neighbours that are kept.

    Writes them at ``place`` unless that is negative.
    """
    a, a_stop = indptr[vertex], indptr[vertex + 1]
    b, b_stop = starts[vertex], starts[vertex + 1]
    kept = 0
    while a < a_stop or b < b_stop:
        if a < a_stop and (b == b_stop or indices[a] <= ids[b]):
            neighbour = np.int64(indices[a])
        else:
            neighbour = np.int64(ids[b])
        weight = np.int64(0)
        while a < a_stop and indices[a] == neighbour:
            weight += np.int64(counts[a]) if counts.size else 1
            a += 1
        while b < b_stop and ids[b] == neighbour:
            weight += np.int64(out_weights[b]) if counts.size else 1
            b += 1
        if neighbour != vertex and weight > 0:
            if place >= 0:
                adjncy[place + kept] = neighbour
                if counts.size:
                    edge_weights[place + kept] = weight
            kept += 1
    return kept


@kernel
def _count_merged(
    indptr: Array, indices: Array, counts: Array, starts: Array, ids: Array, out_weights: Array, xadj: Array
) -> None:
    xadj[0] = 0
    for vertex in range(indptr.size - 1):
        kept = _merge_one(vertex, indptr, indices, counts, starts, ids, out_weights, ids, xadj, -1)
        xadj[vertex + 1] = xadj[vertex] + kept


@kernel
def _fill_merged(
    indptr: Array,
    indices: Array,
    counts: Array,
    starts: Array,
    ids: Array,
    out_weights: Array,
    xadj: Array,
    adjncy: Array,
    edge_weights: Array,
) -> None:
    for vertex in range(indptr.size - 1):
        _merge_one(vertex, indptr, indices, counts, starts, ids, out_weights, adjncy, edge_weights, xadj[vertex])
