"""The graph of parts: what runs between them, and an order in which neighbouring parts are close.

METIS numbers parts in the order of its bisections. For a solver that does not, parts are bisected again and again by
what runs between them (Kernighan and Lin's method, networkx's), so that runs of parts make good larger parts.
"""

from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
from networkx.algorithms.community import kernighan_lin_bisection

from gsplit.graph import Graph
from gsplit.kernels.jit import kernel

__all__ = ["bisection_order", "count_links"]

Matrix = npt.NDArray[np.int64]
_TRIES = 8


def count_links(graph: Graph, edge_counts: npt.NDArray[np.uint32], parts: npt.NDArray[Any], num_parts: int) -> Matrix:
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

    def bisect(parts: list[int]) -> list[int]:
        if len(parts) < 2:
            return parts
        tries = [_halve(both_ways, parts, seed + number) for number in range(_TRIES)]
        left, right = min(tries, key=lambda halves: (int(both_ways[np.ix_(*halves)].sum()), halves))
        return bisect(left) + bisect(right)

    return np.array(bisect(list(range(links.shape[0]))), np.int64)


def _halve(weights: Matrix, parts: list[int], seed: int) -> tuple[list[int], list[int]]:
    """Two sorted halves, the one with the smallest part first."""
    graph = nx.Graph()
    graph.add_nodes_from(parts)
    graph.add_weighted_edges_from((p, q, int(weights[p, q])) for p in parts for q in parts if p < q and weights[p, q])
    halves = sorted(sorted(half) for half in kernighan_lin_bisection(graph, weight="weight", seed=seed))
    return halves[0], halves[1]
