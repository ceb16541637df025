"""The problem of a partitioner: an undirected graph with integer weights, on disk.

| objective | balanced | cut |
|---|---|---|
| gsplit | c_v k_v + c_e e_v, the expected work | k of both directions, summed; edges never drawn are dropped |
| node | the same | number of edges |
| edge | stored in-edges, and targets: two constraints | number of edges |
| random | nothing | nothing: the graph has no edges |

k, e are the counts of ``presample``. Weights are int64 and so are METIS's: sums of counts cannot overflow and nothing
is scaled, except where c_v or c_e is a fraction: then c_v k_v + c_e e_v is multiplied by 1024 and rounded.

The graph is symmetrised here, self-loops and parallel edges are merged. Arrays are memory maps in a folder, which is
also how a solver in another process reads them: except for the counts, 4 bytes per edge, nothing of the size of the
edges is held in anonymous memory.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array
from gsplit.errors import InputError, StoreError, explain
from gsplit.graph.graph import Graph
from gsplit.kernels.jit import kernel
from gsplit.partitioning.presample import Counts
from gsplit.partitioning.weighted_graph import WeightedGraph, place_array

__all__ = [
    "NUM_CONSTRAINTS",
    "check_columns",
    "check_costs",
    "check_objective",
    "check_total_work",
    "merge_directions",
    "sort_columns",
    "vertex_work",
    "weigh",
    "weigh_vertices",
    "work_scale",
]

NUM_CONSTRAINTS = {"gsplit": 1, "node": 1, "edge": 2, "random": 1}
"""How many balance constraints each objective has."""

_FRACTIONS = 1024
_LEAST = 0.01
_MOST = 1_000_000
_LARGEST_SUM = 1 << 62
_WINDOW_EDGES = 1 << 27


def work_scale(c_v: float, c_e: float) -> int:
    """What work is multiplied by to be whole."""
    return 1 if float(c_v).is_integer() and float(c_e).is_integer() else _FRACTIONS


def vertex_work(counts: Counts, c_v: float, c_e: float) -> npt.NDArray[np.int64]:
    """c_v k_v + c_e e_v in integers, times ``work_scale``."""
    check_costs(c_v, c_e)
    work = c_v * counts.computed.astype(np.float64) + c_e * counts.edges_drawn.astype(np.float64)
    work *= work_scale(c_v, c_e)
    check_total_work(float(work.sum()), c_v, c_e)
    return np.rint(work).astype(np.int64)


def check_total_work(total: float, c_v: float, c_e: float) -> None:
    """Refuse work that 64 bits cannot add up."""
    if total > _LARGEST_SUM:
        raise InputError(explain("c_v, c_e", f"work that sums to less than {_LARGEST_SUM}", (c_v, c_e), "choose less"))


def check_costs(c_v: float, c_e: float) -> None:
    """Refuse costs that give no weights."""
    if not all(cost == 0 or _LEAST <= cost <= _MOST for cost in (c_v, c_e)) or c_v + c_e == 0:
        expected = f"two numbers, 0 or {_LEAST} to {_MOST}, not both 0"
        raise InputError(explain("c_v, c_e", expected, (c_v, c_e), "see docs/partition.md"))


def weigh(
    objective: str, graph: Graph, counts: Counts, targets: npt.NDArray[np.int64], folder: Path, c_v: float, c_e: float
) -> WeightedGraph:
    """Write the weighted graph of an objective into a folder and open it. Columns of ``graph`` ascend."""
    check_objective(objective)
    check_columns(graph)
    folder.mkdir(parents=True, exist_ok=True)
    vertex_weights = weigh_vertices(objective, graph, counts, targets, folder, c_v, c_e)
    if objective == "random":
        graph = Graph(np.zeros(graph.num_vertices + 1, np.int64), graph.indices[:0], graph.num_vertices)
    edge_counts = counts.edges if objective == "gsplit" else np.empty(0, np.uint32)
    xadj, adjncy, edge_weights = _write_undirected(graph, edge_counts, folder)
    return WeightedGraph(xadj, adjncy, edge_weights, vertex_weights)


def weigh_vertices(
    objective: str, graph: Graph, counts: Counts, targets: npt.NDArray[np.int64], folder: Path, c_v: float, c_e: float
) -> npt.NDArray[np.int64]:
    """What each vertex that a graph holds weighs, a column per balance constraint, in a map of the folder."""
    columns = [vertex_work(counts, c_v, c_e)]
    if objective == "edge":
        is_target = np.zeros(graph.indptr.size - 1, np.int64)
        is_target[targets - graph.first_vertex] = 1
        columns = [graph.in_degrees(), is_target]
    vertex_weights = place_array(folder, "vertex_weights", (graph.indptr.size - 1, len(columns)), np.int64)
    vertex_weights[...] = np.stack(columns, axis=1)
    return vertex_weights


def check_objective(objective: str) -> None:
    """Refuse an unknown objective."""
    if objective not in NUM_CONSTRAINTS:
        raise InputError(explain("objective", f"one of {', '.join(NUM_CONSTRAINTS)}", objective, "choose one of these"))


def _write_undirected(
    graph: Graph, edge_counts: npt.NDArray[np.uint32], folder: Path
) -> tuple[Array, Array, npt.NDArray[np.int64]]:
    """Both directions merged: offsets, neighbours and weights, in maps; without counts no weights."""
    n, id_type = graph.num_vertices, np.int32 if graph.num_vertices < 1 << 31 else np.int64
    starts = np.zeros(n + 1, np.int64)
    _count_sources(graph.indptr, graph.indices, starts)
    ids = place_array(folder, "out_ids", (graph.num_edges,), id_type)
    weights = place_array(folder, "out_weights", (edge_counts.size,), np.uint32)
    cursor = starts.copy()
    for first, stop in _windows(starts):  # out-edges, a counting sort
        _scatter(graph.indptr, graph.indices, edge_counts, first, stop, cursor, ids, weights)
    return merge_directions(graph, edge_counts, starts, ids, weights, folder)


def _windows(starts: Array) -> Iterator[tuple[int, int]]:
    """Ranges of vertices whose out-edges stay in memory while they are written in random order.

    A wider range is written to the disk over and over: the system flushes every page that was changed some time ago.
    """
    stop = 0
    while stop < starts.size - 1:
        first = stop
        stop = max(first + 1, int(np.searchsorted(starts, starts[first] + _WINDOW_EDGES, side="right")) - 1)
        yield first, stop


def merge_directions(
    graph: Graph, edge_counts: npt.NDArray[np.uint32], starts: Array, ids: Array, weights: Array, folder: Path
) -> tuple[Array, Array, npt.NDArray[np.int64]]:
    """In-edges and out-edges of the vertices that a graph holds as one list of neighbours each, in maps.

    ``ids[starts[row] : starts[row + 1]]`` are the destinations of a vertex's out-edges, ascending, ``weights`` their
    weights; both lie in the folder and are removed.
    """
    held, first = graph.indptr.size - 1, graph.first_vertex
    xadj = place_array(folder, "xadj", (held + 1,), np.int64)
    _count_merged(graph.indptr, graph.indices, edge_counts, first, starts, ids, weights, xadj)
    adjncy = place_array(folder, "adjncy", (int(xadj[-1]),), ids.dtype)
    edge_weights = place_array(folder, "edge_weights", (int(xadj[-1]) if edge_counts.size else 0,), np.int64)
    _fill_merged(graph.indptr, graph.indices, edge_counts, first, starts, ids, weights, xadj, adjncy, edge_weights)
    for name in ("out_ids", "out_weights"):
        (folder / f"{name}.npy").unlink()
    return xadj, adjncy, edge_weights


@kernel
def _count_sources(indptr: Array, indices: Array, starts: Array) -> None:
    """``starts[u]`` becomes where u's out-edges begin."""
    for edge in range(indptr[0], indptr[indptr.size - 1]):
        starts[indices[edge] + 1] += 1
    for vertex in range(starts.size - 1):
        starts[vertex + 1] += starts[vertex]


@kernel
def _scatter(
    indptr: Array, indices: Array, counts: Array, first: int, stop: int, cursor: Array, ids: Array, weights: Array
) -> None:
    """Write the out-edges of the vertices from ``first`` to ``stop - 1``, each at the cursor of its source."""
    for vertex in range(indptr.size - 1):
        for edge in range(indptr[vertex], indptr[vertex + 1]):
            source = indices[edge]
            if first <= source < stop:
                place = cursor[source]
                cursor[source] += 1
                ids[place] = vertex
                if counts.size:
                    weights[place] = counts[edge]


def sort_columns(
    graph: Graph, edge_counts: npt.NDArray[np.uint32], folder: Path
) -> tuple[Graph, npt.NDArray[np.uint32]]:
    """A graph with every column in ascending order and its counts along, as maps in a folder. All ids are valid.

    The columns of a heterogeneous graph are ordered by relation first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    indices = place_array(folder, "sorted_indices", graph.indices.shape, graph.indices.dtype)
    counts = place_array(folder, "sorted_counts", edge_counts.shape, np.uint32)
    if damage := graph.describe_damage():
        raise StoreError(explain("the store", "edges between its vertices", damage, "run gsplit inspect --verify"))
    _sort_columns(graph.indptr, graph.indices, edge_counts, indices, counts)
    return Graph(graph.indptr, indices, graph.num_vertices), counts


@kernel
def _sort_columns(indptr: Array, indices: Array, counts: Array, sorted_indices: Array, sorted_counts: Array) -> None:
    for vertex in range(indptr.size - 1):
        start, stop = indptr[vertex], indptr[vertex + 1]
        order = np.argsort(indices[start:stop], kind="mergesort")
        for i in range(order.size):
            sorted_indices[start + i] = indices[start + order[i]]
            sorted_counts[start + i] = counts[start + order[i]]


def check_columns(graph: Graph) -> None:
    """Every id in range, every column ascending: what the kernels here and after rely on."""
    if not _ascends(graph.indptr, graph.indices, graph.num_vertices):
        expected = "edges between its vertices, columns ascending"
        got = graph.describe_damage() or "a column out of order"
        raise StoreError(explain("the store", expected, got, "run gsplit inspect --verify"))


@kernel
def _ascends(indptr: Array, indices: Array, num_vertices: int) -> bool:
    for vertex in range(indptr.size - 1):
        if not 0 <= indptr[vertex] <= indptr[vertex + 1] <= indices.size:
            return False
        previous = np.int64(0)
        for edge in range(indptr[vertex], indptr[vertex + 1]):
            if not previous <= indices[edge] < num_vertices:
                return False
            previous = np.int64(indices[edge])
    return True


@kernel
def _merge_one(
    vertex: int,
    indptr: Array,
    indices: Array,
    counts: Array,
    first: int,
    starts: Array,
    ids: Array,
    out_weights: Array,
    adjncy: Array,
    edge_weights: Array,
    place: int,
) -> int:
    """Merge the in-edges and out-edges of a row, both ascending; returns the number of neighbours that are kept.

    Writes them at ``place`` unless that is negative. The row is that of vertex ``first + vertex``.
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
        if neighbour != first + vertex and weight > 0:
            if place >= 0:
                adjncy[place + kept] = neighbour
                if counts.size:
                    edge_weights[place + kept] = weight
            kept += 1
    return kept


@kernel
def _count_merged(
    indptr: Array, indices: Array, counts: Array, first: int, starts: Array, ids: Array, out_weights: Array, xadj: Array
) -> None:
    xadj[0] = 0
    for vertex in range(indptr.size - 1):
        kept = _merge_one(vertex, indptr, indices, counts, first, starts, ids, out_weights, ids, xadj, -1)
        xadj[vertex + 1] = xadj[vertex] + kept


@kernel
def _fill_merged(
    indptr: Array,
    indices: Array,
    counts: Array,
    first: int,
    starts: Array,
    ids: Array,
    out_weights: Array,
    xadj: Array,
    adjncy: Array,
    edge_weights: Array,
) -> None:
    for vertex in range(indptr.size - 1):
        _merge_one(vertex, indptr, indices, counts, first, starts, ids, out_weights, adjncy, edge_weights, xadj[vertex])
