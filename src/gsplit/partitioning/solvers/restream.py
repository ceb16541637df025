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
    "refine",
    "solve",
    "stream_blocks",
]

Weights = npt.NDArray[np.int64]

ORDERED = False
THREADED = False
PASSES = 10
LAST_PASSES = 10
_REFINE_PASSES = 5
BLOCK_SIZE = 1 << 10


def check(num_constraints: int) -> None:
    """Refuse nothing."""


def estimate_bytes(num_vertices: int, num_entries: int, num_constraints: int) -> int:
    """Anonymous memory: a part per vertex, with room; nothing per edge."""
    return 24 * num_vertices + (64 << 20)


def solve(graph: WeightedGraph, parts: int, tolerance: float, seed: int, threads: int = 1) -> npt.NDArray[np.int32]:
    """The part of every vertex."""
    result = np.full(graph.num_vertices, -1, np.int32)
    _stream_passes(graph, result, parts, tolerance, seed, range(PASSES + LAST_PASSES))
    return result


def refine(graph: WeightedGraph, result: npt.NDArray[np.int32], parts: int, tolerance: float, seed: int) -> None:
    """Some more of the last passes, for the parts of another solver: cut less, and balance what is not."""
    _stream_passes(graph, result, parts, tolerance, seed, range(PASSES, PASSES + _REFINE_PASSES))


def _stream_passes(
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
    """The part of a vertex and those of its neighbours are tried first; all others only if none of these will do."""
    n, parts = xadj.size - 1, loads.shape[0]
    gains, no_gains = np.zeros(parts, np.float64), np.zeros(parts, np.float64)
    tried, all_parts = np.empty(parts, np.int32), np.arange(parts, dtype=np.int32)
    last_tried = np.full(parts, -1, np.int64)
    for block in order:
        for vertex in range(block * block_size, min(n, (block + 1) * block_size)):
            own, work, num_tried = result[first + vertex], vertex_weights[vertex], 0
            if own >= 0:
                for c in range(caps.size):
                    loads[own, c] -= work[c]
                last_tried[own], gains[own], tried[0], num_tried = vertex, 0.0, own, 1
            for entry in range(xadj[vertex], xadj[vertex + 1]):
                part = result[adjncy[entry]]
                if part < 0:
                    continue
                if last_tried[part] != vertex:
                    last_tried[part], gains[part], tried[num_tried] = vertex, 0.0, part
                    num_tried += 1
                gains[part] += edge_weights[entry] if edge_weights.size else 1.0
            best, score = _choose(tried[:num_tried], gains, own, work, caps, limits, loads, strict)
            if score <= 0.0 and not (strict and best >= 0):
                best, score = _choose(all_parts, no_gains, own, work, caps, limits, loads, strict)
            if best < 0:  # no part has room: the least loaded of the first constraint
                best = int(np.argmin(loads[:, 0]))
            result[first + vertex] = best
            for c in range(caps.size):
                loads[best, c] += work[c]


@kernel
def _choose(
    candidates: npt.NDArray[Any],
    gains: npt.NDArray[Any],
    own: int,
    work: npt.NDArray[Any],
    caps: npt.NDArray[Any],
    limits: npt.NDArray[Any],
    loads: npt.NDArray[Any],
    strict: bool,
) -> tuple[int, float]:
    """The candidate with the best score of those with room, and its score; -1 if none has room."""
    best, best_score, best_room = -1, -1.0, -1.0
    for part in candidates:
        room = 1.0
        for c in range(caps.size):
            left = limits[part, c] - loads[part, c] - work[c]
            room = min(room, left / caps[c])
        if room < 0.0:
            continue
        score = gains[part] if strict else gains[part] * (room + 1e-9)
        stays = strict and part == own
        if score > best_score or (score == best_score and (stays or (room > best_room and best != own))):
            best, best_score, best_room = int(part), score, room
    return best, best_score
