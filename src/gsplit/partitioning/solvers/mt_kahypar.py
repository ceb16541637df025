"""Mt-KaHyPar, the multi-threaded partitioner of the KaHyPar project, as an optional extra.

The graph is passed in memory, as numpy arrays: the bindings read them as sequences, and Python lists would take three
times the memory. Balances one constraint. Weights are 32 bits wide: if their sum does not fit, all are divided by the
same number and rounded up.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.partitioning.weighted_graph import WeightedGraph

__all__ = ["ORDERED", "THREADED", "check", "estimate_bytes", "solve"]

ORDERED = False
THREADED = True
_BYTES_PER_ENTRY = 60
_BYTES_PER_VERTEX = 100
_LARGEST = (1 << 31) - 1


def check(num_constraints: int) -> None:
    """Refuse what it cannot do."""
    _package()
    if num_constraints > 1:
        fix = "use METIS or restreaming for this objective"
        raise InputError(explain("Mt-KaHyPar", "one balance constraint", num_constraints, fix))


def _package() -> Any:
    try:
        import mtkahypar
    except ImportError as error:
        fix = "pip install 'gsplit[mtkahypar]', or choose another solver"
        raise MissingDependencyError(explain("Mt-KaHyPar", "the package mtkahypar", error, fix)) from error
    return mtkahypar


def estimate_bytes(num_vertices: int, num_entries: int, num_constraints: int) -> int:
    """Anonymous memory, measured."""
    return _BYTES_PER_ENTRY * num_entries + _BYTES_PER_VERTEX * num_vertices + (32 << 20)


def solve(graph: WeightedGraph, parts: int, tolerance: float, seed: int, threads: int = 1) -> npt.NDArray[np.int32]:
    """The part of every vertex."""
    mtkahypar = _package()
    mtk = mtkahypar.initialize(threads)
    mtkahypar.set_seed(seed & 0x7FFFFFFF)
    context = mtk.context_from_preset(mtkahypar.PresetType.DEFAULT)
    context.set_partitioning_parameters(parts, tolerance - 1.0, mtkahypar.Objective.CUT)
    context.logging = False
    edges, edge_weights = _undirected_edges(graph)
    vertex_weights = _fit(graph.vertex_weights[:, 0])
    loaded = mtk.create_graph(context, graph.num_vertices, edge_weights.size, edges, vertex_weights, edge_weights)
    return np.array(loaded.partition(context).get_partition(), np.int32)


def _undirected_edges(graph: WeightedGraph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every edge once, [num_edges, 2], and its weight."""
    rows = np.repeat(np.arange(graph.num_vertices), np.diff(graph.xadj))
    once = rows < graph.adjncy
    edges = np.stack([rows[once], graph.adjncy[once]], axis=1)
    if not graph.edge_weights.size:
        return edges, np.ones(edges.shape[0], np.int64)
    return edges, _fit(graph.edge_weights[once])


def _fit(weights: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Divide weights so that their sum, each rounded up, fits in 32 bits.

    >>> _fit(np.array([5, 7])).tolist(), _fit(np.array([1 << 31, 1])).tolist()
    ([5, 7], [1073741824, 1])
    """
    scale = 1 + int(weights.sum()) // max(1, _LARGEST - weights.size)
    return -(-weights // scale)
