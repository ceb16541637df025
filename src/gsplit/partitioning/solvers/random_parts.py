"""Random parts: a keyed hash of the vertex, the baseline without any information."""

import numpy as np
import numpy.typing as npt

from gsplit.keys.kernels_numba import mix_array
from gsplit.partitioning.weighted_graph import WeightedGraph

__all__ = ["ORDERED", "THREADED", "check", "estimate_bytes", "solve"]

ORDERED = True  # no order is better than another
THREADED = False


def check(num_constraints: int) -> None:
    """Refuse nothing."""


def estimate_bytes(num_vertices: int, num_entries: int, num_constraints: int) -> int:
    """A hash and a part per vertex."""
    return 24 * num_vertices + (64 << 20)


def solve(graph: WeightedGraph, parts: int, tolerance: float, seed: int, threads: int = 1) -> npt.NDArray[np.int32]:
    """The part of every vertex."""
    words = mix_array(seed, np.arange(graph.num_vertices))
    return ((words >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)).astype(np.int32)
