"""Mt-KaHyPar, the multi-threaded partitioner of the KaHyPar project, as an optional extra.

Its Python lists cost about 128 bytes per edge, so the graph is handed over as a METIS file instead. Balances one
constraint.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.partitioning.weighted_graph import WeightedGraph

__all__ = ["estimate_bytes", "solve"]

ORDERED = False
_BYTES_PER_ENTRY = 90
_LINES = 1 << 14


def estimate_bytes(num_vertices: int, num_entries: int, num_constraints: int) -> int:
    """Anonymous memory, measured."""
    return _BYTES_PER_ENTRY * num_entries + 200 * num_vertices + (256 << 20)


def solve(graph: WeightedGraph, parts: int, tolerance: float, seed: int) -> npt.NDArray[np.int32]:
    """The part of every vertex."""
    try:
        import mtkahypar
    except ImportError as error:
        fix = "pip install 'gsplit[mtkahypar]', or choose another solver"
        raise MissingDependencyError(explain("Mt-KaHyPar", "the package mtkahypar", "none", fix)) from error
    if graph.vertex_weights.shape[1] != 1:
        fix = "use METIS or restreaming for this strategy"
        raise InputError(explain("Mt-KaHyPar", "one balance constraint", graph.vertex_weights.shape[1], fix))
    mtk = mtkahypar.initialize(len(os.sched_getaffinity(0)))
    mtkahypar.set_seed(seed)
    context = mtk.context_from_preset(mtkahypar.PresetType.DEFAULT)
    context.set_partitioning_parameters(parts, tolerance - 1.0, mtkahypar.Objective.CUT)
    context.logging = False
    with tempfile.TemporaryDirectory(prefix="gsplit-") as folder:
        path = Path(folder) / "graph.metis"
        _write(graph, path)
        loaded = mtk.graph_from_file(str(path), context, mtkahypar.FileFormat.METIS)
        result = loaded.partition(context)
    return np.array([result.block_id(vertex) for vertex in range(graph.num_vertices)], np.int32)


def _write(graph: WeightedGraph, path: Path) -> None:
    """METIS's text form: a line per vertex with its weight and its neighbours and their weights, from 1."""
    with path.open("w") as stream:
        weighted = graph.edge_weights.size > 0
        stream.write(f"{graph.num_vertices} {graph.adjncy.size // 2} 0{'11' if weighted else '10'}\n")
        for first in range(0, graph.num_vertices, _LINES):
            lines = []
            for vertex in range(first, min(first + _LINES, graph.num_vertices)):
                row = slice(int(graph.xadj[vertex]), int(graph.xadj[vertex + 1]))
                entries = graph.adjncy[row].astype(np.int64) + 1
                if weighted:
                    entries = np.stack([entries, graph.edge_weights[row]], axis=1).reshape(-1)
                lines.append(" ".join(map(str, [int(graph.vertex_weights[vertex, 0]), *entries.tolist()])))
            stream.write("\n".join(lines) + "\n")
