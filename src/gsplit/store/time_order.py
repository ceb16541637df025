"""The order of a column's edges by time, as positions relative to its first edge: what temporal sampling bisects.

Columns themselves are ordered by source, whatever the times. Positions do not change when vertices are renumbered, so
partitioning and shards copy ``time_order/NAME``, the order by the times ``edges/NAME``, like any per-edge array.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Ids
from gsplit.errors import InputError, StoreError, explain
from gsplit.graph.graph import Graph
from gsplit.kernels.jit import kernel
from gsplit.store.protocol import GraphStore

__all__ = ["order_by_time", "orders_by_time", "stored_times"]

_COLUMNS_AT_ONCE = 1 << 16
_TYPES = ("int8", "uint8", "int16", "int32", "int64")


def stored_times(store: GraphStore, name: str) -> Ids:
    """The times ``edges/NAME`` of all edges held. Other arrays than one integer per edge are refused."""
    if name not in store.edge_names:
        got = f"{name!r}; stored are {', '.join(store.edge_names) or 'none'}"
        fix = "store a time per edge; for times of vertices: data.time = vertex_time[data.edge_index[0]]"
        raise InputError(explain("time_attr", "the name of a stored per-edge array", got, fix))
    array = store.stored_array(f"edges/{name}")
    if array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1) or store.dtype(f"edges/{name}") not in _TYPES:
        got = f"{store.dtype(f'edges/{name}')} {list(array.shape)}"
        fix = "store times as integers, such as seconds"
        raise InputError(explain(f"edges/{name}", "one integer per edge", got, fix))
    return array.reshape(-1)


def order_by_time(graph: Graph, time: Ids, first_edge: int) -> npt.NDArray[np.int32]:
    """The positions of every column's edges, relative to its first one, by time; of equal times the first comes first.

    ``time`` has the times of the graph's edges from ``first_edge`` on.
    """
    order = np.empty(time.size, np.int32)
    row = _order_columns(graph.indptr, time, first_edge, order)
    if row >= 0:
        got = f"{graph.indptr[row]}..{graph.indptr[row + 1]} of vertex {graph.first_vertex + row}"
        fix = "run gsplit inspect --verify, then restore the store or import it again"
        raise StoreError(explain("the graph", "offsets that rise, by less than 2**31", got, fix))
    return order


def orders_by_time(graph: Graph, time: Ids) -> Iterator[tuple[slice, npt.NDArray[np.int32]]]:
    """``order_by_time`` of a whole store, some columns at a time, with the edges of these columns."""
    for first in range(graph.first_vertex, graph.stop_vertex, _COLUMNS_AT_ONCE):
        part = graph.restrict(first, min(first + _COLUMNS_AT_ONCE, graph.stop_vertex))
        edges = slice(int(part.indptr[0]), int(part.indptr[-1]))
        yield edges, order_by_time(part, np.asarray(time[edges]), edges.start)


@kernel
def _order_columns(indptr: Ids, time: Ids, first_edge: int, order: npt.NDArray[np.int32]) -> int:
    """Returns the first column with wrong offsets, or -1."""
    for row in range(indptr.size - 1):
        start = indptr[row] - first_edge
        stop = indptr[row + 1] - first_edge
        if not 0 <= start <= stop <= time.size or stop - start >= 1 << 31:
            return row
        ordered = True
        for at in range(start, stop):
            order[at] = at - start
            ordered &= at == start or time[at - 1] <= time[at]
        if not ordered:
            order[start:stop] = np.argsort(time[start:stop], kind="mergesort")
    return -1
