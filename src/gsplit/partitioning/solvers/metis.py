"""METIS by recursive bisection, through the library that pymetis ships.

pymetis passes one balance constraint only and takes Python sequences; the library itself takes several and arrays.
Its integers are 64 bits wide there, its reals 32. Parts come out in the order of the bisections, so neighbouring
numbers are close: runs of parts make good larger parts.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.partitioning.weighted_graph import WeightedGraph

__all__ = ["ORDERED", "THREADED", "check", "estimate_bytes", "solve"]

ORDERED = True
THREADED = False
_NUM_OPTIONS = 40  # METIS_NOPTIONS, the length of the array in every METIS 5
_TRIES = 4  # bisections tried at each level, the best kept: 3 to 5 % fewer cross edges than one (benchmarks/lab-log.md)
_ERRORS = {-2: "its input is wrong", -3: "it ran out of memory", -4: "it failed"}
_BYTES_PER_ENTRY = 100
_BYTES_PER_VERTEX = 150


def check(num_constraints: int) -> None:
    """Refuse what it cannot do."""
    _library()


def estimate_bytes(num_vertices: int, num_entries: int, num_constraints: int) -> int:
    """Anonymous memory METIS will take, measured: most of it is the coarser graphs."""
    return _BYTES_PER_ENTRY * num_entries + _BYTES_PER_VERTEX * num_vertices * max(1, num_constraints)


def _library() -> Any:
    try:
        import pymetis._internal as internal
    except ImportError as error:
        fix = "pip install pymetis, or choose another solver"
        raise MissingDependencyError(explain("METIS", "the package pymetis", error, fix)) from error
    if internal._idx_type_width() != 64:
        fix = "install a pymetis wheel with 64-bit integers, or choose another solver"
        raise MissingDependencyError(explain("METIS", "64-bit integers", internal._idx_type_width(), fix))
    return ctypes.CDLL(internal.__file__)


def _options(seed: int) -> npt.NDArray[np.int64]:
    """Options by their names in pymetis: their numbers differ between versions of METIS."""
    from pymetis import OptionKey

    options = np.full(_NUM_OPTIONS, -1, np.int64)
    options[OptionKey.NCUTS] = _TRIES
    options[OptionKey.NUMBERING] = 0
    options[OptionKey.SEED] = 1 + seed % 0x7FFFFFFF  # the C library treats seeds 0 and 1 as equal
    return options


def solve(graph: WeightedGraph, parts: int, tolerance: float, seed: int, threads: int = 1) -> npt.NDArray[np.int32]:
    """The part of every vertex; each constraint's largest part at most ``tolerance`` times the mean, if it can be."""
    library = _library()
    if parts == 1:  # METIS counts from 1 then
        return np.zeros(graph.num_vertices, np.int32)
    arrays = [np.ascontiguousarray(a, np.int64) for a in (graph.xadj, graph.adjncy, graph.vertex_weights)]
    edge_weights = np.ascontiguousarray(graph.edge_weights, np.int64) if graph.edge_weights.size else None
    constraints = graph.vertex_weights.shape[1]
    options = _options(seed)
    # a bisection's error is multiplied by those below it: each level gets its root of the tolerance
    per_level = tolerance ** (1 / max(1.0, np.log2(parts)))
    ubvec = np.full(constraints, per_level, np.float32)
    result = np.zeros(graph.num_vertices, np.int64)
    cut = ctypes.c_int64()

    def number(value: int) -> Any:
        return ctypes.byref(ctypes.c_int64(value))

    def pointer(array: npt.NDArray[Any] | None) -> Any:
        return None if array is None else array.ctypes.data_as(ctypes.c_void_p)

    xadj, adjncy, vertex_weights = arrays
    status = library.METIS_PartGraphRecursive(
        number(graph.num_vertices),
        number(constraints),
        pointer(xadj),
        pointer(adjncy),
        pointer(vertex_weights),
        None,
        pointer(edge_weights),
        number(parts),
        None,
        pointer(ubvec),
        pointer(options),
        ctypes.byref(cut),
        pointer(result),
    )
    if status != 1:
        raise InputError(explain("METIS", "a partition", _ERRORS.get(status, status), "choose another solver"))
    return result.astype(np.int32)
