"""KaMinPar on a contracted graph, for graphs that it cannot hold: clusters of vertices become vertices.

Clusters are found by label propagation: a vertex joins the cluster with the largest weight of its neighbours there, as
long as the cluster is small against a part (Meyerhenke, Sanders and Schulz, SEA 2014). The graph of clusters lies in
memory maps as well; if it is still large, it is clustered again. Its parts are those of the vertices, which the last
passes of ``restream`` then improve. Memory: some numbers per vertex, and KaMinPar's for the contracted graph.
"""

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array
from gsplit.errors import InputError, explain
from gsplit.files.host_limits import free_bytes
from gsplit.kernels.jit import kernel
from gsplit.partitioning.solvers import kaminpar
from gsplit.partitioning.solvers.restream import BLOCK_SIZE, order_blocks, refine
from gsplit.partitioning.weighted_graph import WeightedGraph, place_array

__all__ = ["ORDERED", "THREADED", "check", "estimate_bytes", "solve"]

ORDERED = True
THREADED = True
_JOIN_PASSES = 5
_LARGEST_CLUSTER = 0.03
"""Of the mean weight of a part."""
_MOST_ENTRIES = 1 << 26
"""Of a contracted graph that is not clustered again, if it could be much smaller."""
_BYTES_PER_VERTEX = 32


def check(num_constraints: int) -> None:
    """Refuse what KaMinPar cannot do."""
    kaminpar.check(num_constraints)


def estimate_bytes(num_vertices: int, num_entries: int, num_constraints: int) -> int:
    """Anonymous memory, if clustering leaves a quarter of a small graph and ``_MOST_ENTRIES`` of a large one."""
    contracted = kaminpar.estimate_bytes(num_vertices // 4, min(num_entries // 4, _MOST_ENTRIES), num_constraints)
    return _BYTES_PER_VERTEX * num_vertices + contracted + (64 << 20)


def solve(graph: WeightedGraph, parts: int, tolerance: float, seed: int, threads: int = 1) -> npt.NDArray[np.int32]:
    """The part of every vertex."""
    largest = max(1, int(_LARGEST_CLUSTER * int(graph.vertex_weights.sum()) / parts))
    clusters = _find_clusters(graph, largest, seed)
    with tempfile.TemporaryDirectory(prefix="gsplit-") as folder:
        contracted = _contract(graph, clusters, Path(folder))
        is_smaller = contracted.num_vertices < 0.9 * graph.num_vertices
        if contracted.adjncy.size > _MOST_ENTRIES and is_smaller:
            found = solve(contracted, parts, tolerance, seed, threads)
        else:
            _check_memory(contracted)
            found = kaminpar.solve(contracted, parts, tolerance, seed, threads)
    result = found[clusters]
    del clusters
    refine(graph, result, parts, tolerance, seed)
    return result


def _check_memory(contracted: WeightedGraph) -> None:
    estimate = kaminpar.estimate_bytes(contracted.num_vertices, contracted.adjncy.size, 1)
    free = free_bytes()
    if estimate > free:
        expected = f"about {estimate / 1e9:.1f} GB of memory for a graph that hardly contracts"
        fix = "use --solver restream, which needs less, or a larger machine"
        raise InputError(explain("cluster", expected, f"{free / 1e9:.1f} GB free", fix))


def _find_clusters(graph: WeightedGraph, largest: int, seed: int) -> Array:
    """The cluster of every vertex, numbered from 0."""
    n = graph.num_vertices
    clusters = np.arange(n, dtype=graph.adjncy.dtype)
    weights = graph.vertex_weights[:, 0].copy()
    gains = np.zeros(n, np.int64)
    for number in range(_JOIN_PASSES):
        order = order_blocks(-(-n // BLOCK_SIZE), seed + number)
        _join(
            graph.xadj,
            graph.adjncy,
            graph.edge_weights,
            graph.vertex_weights,
            order,
            BLOCK_SIZE,
            largest,
            clusters,
            weights,
            gains,
        )
    del weights, gains
    is_used = np.zeros(n, np.bool_)
    is_used[clusters] = True
    numbers = np.cumsum(is_used, dtype=clusters.dtype)
    numbers -= 1
    numbered: Array = numbers[clusters]
    return numbered


def _contract(graph: WeightedGraph, clusters: Array, folder: Path) -> WeightedGraph:
    """The graph of clusters, its edges in maps of the folder."""
    sizes = np.bincount(clusters)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    members = np.argsort(clusters, kind="stable").astype(clusters.dtype)
    gains = np.zeros(sizes.size, np.int64)
    xadj = np.zeros(sizes.size + 1, np.int64)
    _count_neighbours(graph.xadj, graph.adjncy, clusters, starts, members, gains, xadj)
    adjncy = place_array(folder, "adjncy", (int(xadj[-1]),), clusters.dtype)
    edge_weights = place_array(folder, "edge_weights", adjncy.shape, np.int64)
    gains[:] = 0
    _fill_neighbours(
        graph.xadj,
        graph.adjncy,
        graph.edge_weights,
        clusters,
        starts,
        members,
        gains,
        xadj[:-1].copy(),
        adjncy,
        edge_weights,
    )
    vertex_weights = np.zeros((sizes.size, 1), np.int64)
    np.add.at(vertex_weights, clusters, graph.vertex_weights)
    return WeightedGraph(xadj, adjncy, edge_weights, vertex_weights)


@kernel
def _join(
    xadj: Array,
    adjncy: Array,
    edge_weights: Array,
    vertex_weights: Array,
    order: Array,
    block_size: int,
    largest: int,
    clusters: Array,
    weights: Array,
    gains: Array,
) -> None:
    """One pass of label propagation. ``weights`` are those of the clusters; ``gains`` are 0 before and after.

    Vertices without neighbours join each other.
    """
    n, lonely = xadj.size - 1, np.int64(-1)
    for block in order:
        for vertex in range(block * block_size, min(n, (block + 1) * block_size)):
            weight, own = vertex_weights[vertex, 0], np.int64(clusters[vertex])
            best = own
            if xadj[vertex] == xadj[vertex + 1]:
                if lonely >= 0 and weights[lonely] + weight <= largest:
                    best = lonely
                lonely = best
            for entry in range(xadj[vertex], xadj[vertex + 1]):
                gains[clusters[adjncy[entry]]] += edge_weights[entry] if edge_weights.size else 1
            for entry in range(xadj[vertex], xadj[vertex + 1]):
                cluster = np.int64(clusters[adjncy[entry]])
                if gains[cluster] > gains[best] and weights[cluster] + weight <= largest:
                    best = cluster
            for entry in range(xadj[vertex], xadj[vertex + 1]):
                gains[clusters[adjncy[entry]]] = 0
            clusters[vertex] = best
            weights[own] -= weight
            weights[best] += weight


@kernel
def _count_neighbours(
    xadj: Array, adjncy: Array, clusters: Array, starts: Array, members: Array, last_seen: Array, offsets: Array
) -> None:
    """``offsets[c]`` becomes where the neighbours of cluster c begin. ``last_seen`` is 0 everywhere."""
    for cluster in range(starts.size - 1):
        last_seen[cluster] = cluster + 1
        count = 0
        for place in range(starts[cluster], starts[cluster + 1]):
            vertex = members[place]
            for entry in range(xadj[vertex], xadj[vertex + 1]):
                other = clusters[adjncy[entry]]
                if last_seen[other] != cluster + 1:
                    last_seen[other] = cluster + 1
                    count += 1
        offsets[cluster + 1] = offsets[cluster] + count


@kernel
def _fill_neighbours(
    xadj: Array,
    adjncy: Array,
    edge_weights: Array,
    clusters: Array,
    starts: Array,
    members: Array,
    gains: Array,
    cursor: Array,
    out_adjncy: Array,
    out_weights: Array,
) -> None:
    """Each cluster is written into the rows of its neighbours, so that rows ascend; ``gains`` is 0 everywhere."""
    for cluster in range(starts.size - 1):
        for place in range(starts[cluster], starts[cluster + 1]):
            vertex = members[place]
            for entry in range(xadj[vertex], xadj[vertex + 1]):
                gains[clusters[adjncy[entry]]] += edge_weights[entry] if edge_weights.size else 1
        gains[cluster] = 0
        for place in range(starts[cluster], starts[cluster + 1]):
            vertex = members[place]
            for entry in range(xadj[vertex], xadj[vertex + 1]):
                other = clusters[adjncy[entry]]
                if gains[other] > 0:
                    out_adjncy[cursor[other]] = cluster
                    out_weights[cursor[other]] = gains[other]
                    cursor[other] += 1
                    gains[other] = 0
