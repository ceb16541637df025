"""KaMinPar, the deep multilevel partitioner of the KaHIP project, on a compressed graph.

Its bindings read graphs from files only: the graph is written in the binary ParHIP format, in the folder of the
solver's process, and compressed while it is read, to a few bytes per edge (TeraPart). Small graphs in few parts are
refined by Jet and not compressed. One balance constraint, 64-bit weights. Consecutive parts are close, as it bisects
recursively. With one thread the same seed gives the same parts; several threads race.
"""

import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array
from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.partitioning.weighted_graph import WeightedGraph

__all__ = ["ORDERED", "THREADED", "check", "estimate_bytes", "solve"]

ORDERED = True
THREADED = True
_BYTES_PER_ENTRY = 32
_BYTES_PER_VERTEX = 100
_SMALL = 1 << 24
_FEW_PARTS = 16
"""Entries and parts up to which Jet refines: it cuts less there, in two to four times the time and more memory."""
_WORK_UNIT = 1 << 10
"""What a unit of work weighs, if the sum fits. Every vertex weighs 1 more: balancing may not end if some weigh 0."""
_LARGEST_SUM = 1 << 61
_OUT_OF_BALANCE = 1.01
"""Times the tolerance: parts with more work are refined."""
_PIECE = 1 << 22
"""Numbers that are converted at a time."""
_NO_EDGE_WEIGHTS, _NARROW_IDS, _NARROW_EDGE_WEIGHTS = 1, 8, 32
"""Bits of a ParHIP file's version: no weights of edges; 32 bits for neighbours, for weights of edges. Others: 64."""


def check(num_constraints: int) -> None:
    """Refuse what it cannot do."""
    _package()
    if num_constraints > 1:
        fix = "use METIS or restreaming for this objective"
        raise InputError(explain("KaMinPar", "one balance constraint", num_constraints, fix))


def _package() -> Any:
    try:
        import kaminpar
    except ImportError as error:
        fix = "pip install kaminpar, or choose another solver"
        raise MissingDependencyError(explain("KaMinPar", "the package kaminpar", error, fix)) from error
    return kaminpar


def estimate_bytes(num_vertices: int, num_entries: int, num_constraints: int) -> int:
    """Anonymous memory, above all measured peaks: most of it is the coarser graphs, which are not compressed."""
    return _BYTES_PER_ENTRY * num_entries + _BYTES_PER_VERTEX * num_vertices + (64 << 20)


def solve(graph: WeightedGraph, parts: int, tolerance: float, seed: int, threads: int = 1) -> npt.NDArray[np.int32]:
    """The part of every vertex."""
    kaminpar = _package()
    if parts == 1 or not graph.vertex_weights.any():
        return (np.arange(graph.num_vertices) % parts).astype(np.int32)
    kaminpar.reseed(seed & 0x7FFFFFFF)
    by_jet = graph.adjncy.size <= _SMALL and parts <= _FEW_PARTS
    with tempfile.NamedTemporaryFile(prefix="gsplit-", suffix=".parhip") as file:
        _write_parhip(graph, file)
        file.flush()
        loaded = kaminpar.load_graph(file.name, kaminpar.GraphFileFormat.PARHIP, compress=not by_jet)
    context = kaminpar.context_by_name("jet") if by_jet else kaminpar.terapart_context()
    solver = kaminpar.KaMinPar(num_threads=threads, ctx=context)
    found = solver.compute_partition(loaded, k=parts, eps=tolerance - 1.0)
    result = np.fromiter(found, np.int32, graph.num_vertices)
    loads = np.bincount(result, graph.vertex_weights[:, 0], parts)
    # KaMinPar may give up, if a vertex is heavier than a part should be.
    if loads.max() > _OUT_OF_BALANCE * tolerance * loads.mean():
        from gsplit.partitioning.solvers.restream import refine  # numba, only when used

        refine(graph, result, parts, tolerance, seed)
    return result


def _write_parhip(graph: WeightedGraph, file: IO[bytes]) -> None:
    """A header, the places of the neighbours of each vertex in bytes of the file, neighbours, weights."""
    num_vertices = graph.num_vertices
    id_type = np.dtype(np.uint32 if num_vertices < 1 << 32 else np.uint64)
    largest = max((int(piece.max()) for piece in _pieces(graph.edge_weights)), default=0)
    weight_type = np.dtype(np.int32 if largest < 1 << 31 else np.int64)
    version = 0 if graph.edge_weights.size else _NO_EDGE_WEIGHTS
    version |= _NARROW_IDS if id_type.itemsize == 4 else 0
    version |= _NARROW_EDGE_WEIGHTS if weight_type.itemsize == 4 else 0
    header = np.array([version, num_vertices, graph.adjncy.size], np.uint64)
    file.write(header.tobytes())
    first = header.nbytes + 8 * graph.xadj.size
    for piece in _pieces(graph.xadj):
        file.write((first + id_type.itemsize * piece).astype(np.uint64).tobytes())
    for piece in _pieces(graph.adjncy):
        file.write(piece.astype(id_type).tobytes())
    for piece in _scaled_weights(graph):
        file.write(piece.tobytes())
    for piece in _pieces(graph.edge_weights):
        file.write(piece.astype(weight_type).tobytes())


def _scaled_weights(graph: WeightedGraph) -> Iterator[npt.NDArray[np.int64]]:
    work = graph.vertex_weights[:, 0]
    total = sum(int(piece.sum(dtype=np.int64)) for piece in _pieces(work))
    most = _LARGEST_SUM - graph.num_vertices
    unit = max(1, min(_WORK_UNIT, most // max(1, total)))
    divisor = 1 if unit > 1 else -(-total // most) or 1
    for piece in _pieces(work):
        yield unit * (piece.astype(np.int64) // divisor) + 1


def _pieces(array: Array) -> Iterator[Array]:
    return (array[begin : begin + _PIECE] for begin in range(0, array.size, _PIECE))
