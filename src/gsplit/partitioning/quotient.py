"""The graph of parts: what runs between them, and an order in which neighbouring parts are close.

METIS and KaMinPar number parts in the order of their bisections. The parts of other solvers are bisected recursively by
what runs between them (Kernighan and Lin 1970), so that runs of parts make good larger parts. METIS would be faster
here, but does not balance graphs of a few vertices.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.graph.graph import Graph
from gsplit.kernels.jit import kernel
from gsplit.keys.kernels_numba import permute

__all__ = ["bisection_order", "count_links"]

Matrix = npt.NDArray[np.int64]
_TRIES = 8


def count_links(graph: Graph, edge_counts: npt.NDArray[Any], parts: npt.NDArray[Any], num_parts: int) -> Matrix:
    """``links[p, q]``: how often an edge from part q into part p was drawn, of the in-edges that a graph holds.

    ``parts`` are those of all vertices.
    """
    links = np.zeros((num_parts, num_parts), np.int64)
    _count(graph.indptr, graph.indices, edge_counts, graph.first_vertex, parts, links)
    return links


@kernel
def _count(
    indptr: npt.NDArray[Any],
    indices: npt.NDArray[Any],
    edge_counts: npt.NDArray[Any],
    first: int,
    parts: npt.NDArray[Any],
    links: npt.NDArray[Any],
) -> None:
    for vertex in range(indptr.size - 1):
        part = parts[first + vertex]
        for edge in range(indptr[vertex], indptr[vertex + 1]):
            links[part, parts[indices[edge]]] += edge_counts[edge]


def bisection_order(links: Matrix, seed: int = 0) -> npt.NDArray[np.int64]:
    """All parts, neighbours close: halves of halves, each cut where the least runs across.

    >>> two_pairs = np.array([[0, 0, 9, 0], [0, 0, 0, 9], [9, 0, 0, 1], [0, 9, 1, 0]])
    >>> bisection_order(two_pairs).tolist()
    [0, 2, 1, 3]
    """
    both_ways = links + links.T

    def bisect(parts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if parts.size < 2:
            return parts
        in_second = _halve(both_ways[np.ix_(parts, parts)], seed)
        return np.concatenate([bisect(parts[~in_second]), bisect(parts[in_second])])

    return bisect(np.arange(links.shape[0]))


def _halve(weights: Matrix, seed: int) -> npt.NDArray[np.bool_]:
    """The best of several bisections into equal halves; the first vertex is in the first half."""
    n = weights.shape[0]
    tries = []
    for number in range(_TRIES):
        in_second = permute(np.arange(n), n, seed + number) < n // 2
        while _improve(weights, in_second):
            pass
        tries.append(in_second ^ in_second[0])
    return min(tries, key=lambda half: (int(weights[np.ix_(half, ~half)].sum()), half.tolist()))


@kernel
def _improve(weights: Matrix, in_second: npt.NDArray[np.bool_]) -> bool:
    """One pass of Kernighan and Lin: swap pairs, each vertex once, and keep the swaps up to the best sum of gains."""
    n = in_second.size
    gains = np.zeros(n, np.int64)
    for v in range(n):
        for u in range(n):
            if u != v:
                gains[v] += weights[v, u] if in_second[v] != in_second[u] else -weights[v, u]
    is_free, current = np.ones(n, np.bool_), in_second.copy()
    total, best_total = 0, 0
    for _ in range(n // 2):
        a, b, gain = -1, -1, 0
        for v in range(n):
            if is_free[v] and not current[v]:
                for u in range(n):
                    if is_free[u] and current[u]:
                        found = gains[v] + gains[u] - 2 * weights[v, u]
                        if a < 0 or found > gain:
                            a, b, gain = v, u, found
        current[a] = True
        current[b] = False
        is_free[a] = False
        is_free[b] = False
        for v in range(n):
            change = 2 * (weights[v, b] - weights[v, a])
            gains[v] += change if current[v] else -change
        total += gain
        if total > best_total:
            best_total = total
            in_second[:] = current
    return best_total > 0
