"""The degrees of GCN, of the whole graph, so that the edges of a block have the same weights as in the whole graph.

PyG's ``gcn_norm`` weights edge u -> v by ``deg_inv_sqrt[u] * w * deg_inv_sqrt[v]``, where deg is the sum of the weights
of a vertex's in-edges. A mini-batch has only some of these edges. So the degrees are computed here, once, from all
in-edges of the rank's vertices, and ``nn.layer_edges.normalised_edges`` applies them to a block.

As in PyG (2.8, on an ``edge_index`` tensor), ``add_self_loops`` gives every vertex exactly one self-loop: with the
weight of its last stored self-loop, or with ``fill_value`` (1, or 2 for ``improved=True``) if it has none. Without
stored weights all edges have weight 1, also these self-loops, so ``improved`` has no effect.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.graph.graph import Graph
from gsplit.kernels.jit import kernel

__all__ = ["GcnDegrees", "gcn_degrees"]


@dataclass(frozen=True)
class GcnDegrees:
    """One number per vertex of a graph, in its order.

    ``deg_inv_sqrt`` is 0 for a degree of 0 and NaN for a negative degree, as in PyG. ``loop_weight`` is the weight of
    the vertex's self-loop before normalisation; None if all of them are 1 or no self-loops are added.
    """

    deg_inv_sqrt: npt.NDArray[np.float64]
    loop_weight: npt.NDArray[np.float64] | None


def gcn_degrees(
    graph: Graph, weights: npt.NDArray[Any] | None, *, add_self_loops: bool, fill_value: float
) -> GcnDegrees:
    """The degrees of ``gcn_norm`` for every vertex of a graph. ``weights[e]`` belongs to edge ``graph.indices[e]``.

    >>> graph = Graph(np.array([0, 2, 3]), np.array([0, 1, 0]), num_vertices=2)  # 0 -> 0, 1 -> 0, 0 -> 1
    >>> gcn_degrees(graph, None, add_self_loops=True, fill_value=2.0)
    GcnDegrees(deg_inv_sqrt=array([0.70710678, 0.70710678]), loop_weight=None)
    >>> gcn_degrees(graph, np.array([3.0, 1.0, 2.0]), add_self_loops=True, fill_value=2.0)
    GcnDegrees(deg_inv_sqrt=array([0.5, 0.5]), loop_weight=array([3., 2.]))
    """
    assert weights is None or weights.shape == graph.indices.shape, "one weight per edge"
    loop_weight = np.full(graph.indptr.size - 1, 1.0 if weights is None else fill_value)
    degrees = _sum_weights(graph.indptr, graph.indices, weights, graph.first_vertex, add_self_loops, loop_weight)
    with np.errstate(invalid="ignore", divide="ignore"):
        deg_inv_sqrt = np.where(degrees == 0.0, 0.0, 1.0 / np.sqrt(degrees))
    return GcnDegrees(deg_inv_sqrt, loop_weight if add_self_loops and weights is not None else None)


@kernel
def _sum_weights(
    indptr: npt.NDArray[np.int64],
    indices: npt.NDArray[Any],
    weights: npt.NDArray[Any] | None,
    first_vertex: int,
    add_self_loops: bool,
    loop_weight: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Sum the weights of the in-edges of each vertex. Added self-loops are filled in ``loop_weight`` and added once."""
    degrees = np.zeros(indptr.size - 1)
    for row in range(degrees.size):
        for edge in range(max(indptr[row], 0), min(indptr[row + 1], indices.size)):
            weight = 1.0 if weights is None else float(weights[edge])
            if add_self_loops and indices[edge] == first_vertex + row:
                loop_weight[row] = weight  # of several self-loops PyG keeps the last
            else:
                degrees[row] += weight
        if add_self_loops:
            degrees[row] += loop_weight[row]
    return degrees
