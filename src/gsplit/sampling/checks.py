"""What samplers check before they read: the graph's offsets and ids, and that requested vertices are this rank's.

The host's kernels check as they go. A device sampler copies its range of the graph once, and it is checked then: a
check during sampling would make the host wait for the device.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, StoreError, explain
from gsplit.graph.graph import Graph
from gsplit.sampling.kernels_numba import DAMAGED, MAX_DEGREE, OK, TOO_MANY

__all__ = ["OwnEdges", "check_own", "cut_own_edges", "not_own", "raise_status"]


def raise_status(status: int, graph: Graph) -> None:
    """Raise what a kernel found wrong with the graph, if anything."""
    if status == DAMAGED:
        fix = "run gsplit inspect --verify, then restore the store or import it again"
        raise StoreError(explain("the graph", "offsets and ids in range", graph.describe_damage(), fix))
    if status == TOO_MANY:
        degrees = graph.in_degrees()
        got = f"{degrees.max()} at vertex {graph.first_vertex + int(degrees.argmax())}"
        raise StoreError(explain("the graph", "fewer than 2**32 in-edges per vertex", got, "cut the hub's edges"))


def not_own(smallest: int, largest: int, first: int, stop: int) -> InputError:
    """The error if ids, given by the smallest and the largest, are not all of ``first .. stop - 1``."""
    got, fix = f"{smallest}..{largest}", "open the same store on every rank"
    return InputError(explain("ids", f"vertices of this rank, {first}..{stop - 1}", got, fix))


def check_own(ids: npt.NDArray[np.int64], first: int, stop: int) -> None:
    """Refuse ids that are not vertices of this rank."""
    if ids.size and not first <= int(ids.min()) <= int(ids.max()) < stop:
        raise not_own(int(ids.min()), int(ids.max()), first, stop)


@dataclass(frozen=True, slots=True)
class OwnEdges:
    """In-edges of a range of vertices in arrays of their own: ``indptr`` begins at 0.

    Edge i of ``indices`` is at place ``first_edge + i`` of the graph that the range was cut from.
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[Any]
    first_edge: int


def cut_own_edges(graph: Graph) -> OwnEdges:
    """A copy of the edges that a graph holds, which shares its arrays with a larger one; checked in the same pass."""
    if int(graph.in_degrees().max(initial=0)) >= MAX_DEGREE:
        raise_status(TOO_MANY if graph.indices.size >= int(graph.indptr.max()) else DAMAGED, graph)
    raise_status(OK if graph.describe_damage() is None else DAMAGED, graph)
    first = int(graph.indptr[0])
    stop = int(graph.indptr[-1])
    return OwnEdges(np.array(graph.indptr) - first, np.array(graph.indices[first:stop]), first)
