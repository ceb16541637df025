"""A restreaming partitioner, for graphs that METIS cannot hold: a weighted form of Nishimura and Ugander's (KDD 2013).

Vertices are placed one after another, again and again. In the first passes a vertex goes to the part with the largest
weight of its neighbours there times the room left (linear deterministic greedy); in the last ones it goes where its
neighbours are, as long as there is room. A part is full at ``tolerance`` times the mean, for every constraint. Memory:
the parts, their loads and a row of gains; the graph is read through its maps.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.kernels.jit import kernel
from gsplit.keys.kernels_numba import permute
from gsplit.partitioning.weighted_graph import WeightedGraph

__all__ = [
    "BLOCK_SIZE",
    "LAST_PASSES",
    "ORDERED",
    "PASSES",
    "THREADED",
    "check",
    "estimate_bytes",
    "find_caps",
    "order_blocks",
    "solve",
    "stream_blocks",
    "stream_passes",
]

Weights = npt.NDArray[np.int64]

ORDERED = False
THREADED = False
PASSES = 10
LAST_PASSES = 10
BLOCK_SIZE = 1 << 10


def check(num_constraints: int) -> None:
    """Refuse nothing."""


def estimate_bytes(num_vertices: int, num_entries: int, num_constraints: int) -> int:
    """Anonymous memory: a part per vertex, with room; nothing per edge."""
    return 24 * num_vertices + (64 << 20)


def solve(graph: WeightedGraph, parts: int, tolerance: float, seed: int, threads: int = 1) -> npt.NDArray[np.int32]:
    """The part of every vertex."""
    result = np.full(graph.num_vertices, -1, np.int32)
    stream_passes(graph, result, parts, tolerance, seed, range(PASSES + LAST_PASSES))
    return result


def stream_passes(
    graph: WeightedGraph, result: npt.NDArray[np.int32], parts: int, tolerance: float, seed: int, passes: range
) -> None:
    """Some passes over the graph, in blocks of vertices that are in random order; ``result`` changes.

    Those from ``PASSES`` on place a vertex where its neighbours are.
    """
    n = graph.num_vertices
    weights = np.asarray(graph.vertex_weights)
    caps = find_caps(weights.sum(axis=0), weights.max(axis=0, initial=0), parts, tolerance)
    loads = np.zeros((parts, caps.size), np.int64)
    placed = result >= 0
    np.add.at(loads, result[placed], weights[placed])
    limits = np.tile(caps, (parts, 1))
    for number in passes:
        order = order_blocks(-(-n // BLOCK_SIZE), seed + number)
        stream_blocks(graph, order, BLOCK_SIZE, 0, caps, limits, loads, result, strict=number >= PASSES)


def find_caps(totals: Weights, largest: Weights, parts: int, tolerance: float) -> Weights:
    """When a part is full: ``tolerance`` times the mean, but with room for the heaviest vertex."""
    return np.maximum(np.floor(tolerance * totals / parts), np.maximum(largest, 1)).astype(np.int64)


def order_blocks(blocks: int, key: int) -> npt.NDArray[np.int64]:
    """The order of a pass."""
    return permute(np.arange(blocks), blocks, key) if blocks else np.empty(0, np.int64)


def stream_blocks(
    graph: WeightedGraph,
    order: npt.NDArray[np.int64],
    block_size: int,
    first: int,
    caps: Weights,
    limits: Weights,
    loads: Weights,
    result: npt.NDArray[Any],
    *,
    strict: bool,
) -> None:
    """Place the vertices of some blocks; ``loads`` and ``result`` change.

    Row i of the graph is vertex ``first + i``, and ``result`` has the parts of all vertices, -1 where there is none.
    ``limits`` are the loads that parts may reach in this call, ``caps`` what they are measured by.
    """
    _place(
        graph.xadj,
        graph.adjncy,
        graph.edge_weights,
        graph.vertex_weights,
        order,
        block_size,
        first,
        caps,
        limits,
        loads,
        result,
        strict,
    )


@kernel
def _place(
    xadj: npt.NDArray[Any],
    adjncy: npt.NDArray[Any],
    edge_weights: npt.NDArray[Any],
    vertex_weights: npt.NDArray[Any],
    order: npt.NDArray[Any],
    block_size: int,
    first: int,
    caps: npt.NDArray[Any],
    limits: npt.NDArray[Any],
    loads: npt.NDArray[Any],
    result: npt.NDArray[Any],
    strict: bool,
) -> None:
    n, (parts, constraints) = xadj.size - 1, loads.shape
    gains = np.zeros(parts, np.float64)
    for block in order:
        for vertex in range(block * block_size, min(n, (block + 1) * block_size)):
            gains[:] = 0.0
            for entry in range(xadj[vertex], xadj[vertex + 1]):
                part = result[adjncy[entry]]
                if part >= 0:
                    gains[part] += edge_weights[entry] if edge_weights.size else 1.0
            own = result[first + vertex]
            if own >= 0:
                for c in range(constraints):
                    loads[own, c] -= vertex_weights[vertex, c]
            best, best_score, best_room = -1, -1.0, -1.0
            for part in range(parts):
                room = 1.0
                for c in range(constraints):
                    left = limits[part, c] - loads[part, c] - vertex_weights[vertex, c]
                    room = min(room, left / caps[c])
                if room < 0.0:
                    continue
                score = gains[part] if strict else gains[part] * (room + 1e-9)
                stays = strict and part == own
                if score > best_score or (score == best_score and (stays or (room > best_room and best != own))):
                    best, best_score, best_room = part, score, room
            if best < 0:  # no part has room: the least loaded of the first constraint
                best = 0
                for part in range(1, parts):
                    if loads[part, 0] < loads[best, 0]:
                        best = part
            result[first + vertex] = best
            for c in range(constraints):
                loads[best, c] += vertex_weights[vertex, c]
