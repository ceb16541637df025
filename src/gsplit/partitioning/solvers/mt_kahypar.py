"""Mt-KaHyPar, the multi-threaded partitioner of the KaHyPar project, as an optional extra.

Its Python lists cost about 128 bytes per edge, so the graph is handed over as a METIS file instead. Balances one
constraint. Its weights are 32 bits wide: where their sum is not, all are divided by the same number and rounded up.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.partitioning.weighted_graph import WeightedGraph

__all__ = ["ORDERED", "check", "estimate_bytes", "solve"]

ORDERED = False
_BYTES_PER_ENTRY, _BYTES_PER_VERTEX = 60, 100
_LINES = 1 << 14
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
        raise MissingDependencyError(explain("Mt-KaHyPar", "the package mtkahypar", "none", fix)) from error
    return mtkahypar


def estimate_bytes(num_vertices: int, num_entries: int, num_constraints: int) -> int:
    """Anonymous memory, measured."""
    return _BYTES_PER_ENTRY * num_entries + _BYTES_PER_VERTEX * num_vertices + (32 << 20)


def solve(graph: WeightedGraph, parts: int, tolerance: float, seed: int) -> npt.NDArray[np.int32]:
    """The part of every vertex."""
    mtkahypar = _package()
    mtk = mtkahypar.initialize(len(os.sched_getaffinity(0)))
    mtkahypar.set_seed(seed & 0x7FFFFFFF)
    context = mtk.context_from_preset(mtkahypar.PresetType.DEFAULT)
    context.set_partitioning_parameters(parts, tolerance - 1.0, mtkahypar.Objective.CUT)
    context.logging = False
    with tempfile.TemporaryDirectory(prefix="gsplit-") as folder:
        path = Path(folder) / "graph.metis"
        _write(graph, path)
        loaded = mtk.graph_from_file(str(path), context, mtkahypar.FileFormat.METIS)
        result = loaded.partition(context)
    return np.array([result.block_id(vertex) for vertex in range(graph.num_vertices)], np.int32)


def _scale(weights: npt.NDArray[np.int64]) -> int:
    """What to divide weights by so that their sum, rounded up, fits.

    >>> _scale(np.array([5, 7])), _scale(np.array([1 << 31, 1 << 31]))
    (1, 3)
    """
    return 1 + int(weights.sum()) // max(1, _LARGEST - weights.size)


def _write(graph: WeightedGraph, path: Path) -> None:
    """METIS's text form: a line per vertex with its weight and its neighbours and their weights, from 1."""
    with path.open("w") as stream:
        weighted = graph.edge_weights.size > 0
        vertex_scale = _scale(graph.vertex_weights)
        edge_scale = _scale(graph.edge_weights)
        stream.write(f"{graph.num_vertices} {graph.adjncy.size // 2} 0{'11' if weighted else '10'}\n")
        for first in range(0, graph.num_vertices, _LINES):
            lines = []
            for vertex in range(first, min(first + _LINES, graph.num_vertices)):
                row = slice(int(graph.xadj[vertex]), int(graph.xadj[vertex + 1]))
                entries = graph.adjncy[row].astype(np.int64) + 1
                if weighted:
                    weights = -(-graph.edge_weights[row] // edge_scale)
                    entries = np.stack([entries, weights], axis=1).reshape(-1)
                weight = -(-int(graph.vertex_weights[vertex, 0]) // vertex_scale)
                lines.append(" ".join(map(str, [weight, *entries.tolist()])))
            stream.write("\n".join(lines) + "\n")
