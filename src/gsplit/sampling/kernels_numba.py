"""Host kernels of neighbour sampling: count, draw, relabel.

Without replacement by Floyd's method (Bentley and Floyd, CACM 1987): slot i of k draws t in [0, d - k + i] and takes
t, or d - k + i if t is taken already; every subset of size k is equally likely. Slot i's number is a hash of
(layer key, original id, i), so ``kernels_torch`` finds the same picks in another order of work.

Drawing and relabelling are loops of their own: fused, they ran at half the speed (benchmarks/lab-log.md), because the
loads of neighbour lists no longer overlap. Own sources find their row in ``row_of``, one int32 per vertex of the range,
-1 where the vertex is not in the frontier; foreign ones in a hash table of the size of the batch. Kernels check
what they read from the graph before they use it as an index: a damaged store gives a status, never a stray read.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Ids
from gsplit.kernels.jit import kernel
from gsplit.keys.kernels_numba import bounded, mix

__all__ = [
    "DAMAGED",
    "MAX_DEGREE",
    "OK",
    "TOO_MANY",
    "append_new",
    "copy_sources",
    "count_layer",
    "draw_places",
    "clear_rows",
    "pick_positions",
    "place_foreign",
    "relabel_foreign",
    "relabel_own",
]

Rows = npt.NDArray[np.int32]

OK = 0
DAMAGED = 1
TOO_MANY = 2
MAX_DEGREE = 1 << 32
_ONE = np.uint64(1)


@kernel
def count_layer(indptr: Ids, num_indices: int, first: int, frontier: Ids, fanout: int, out_indptr: Ids) -> int:
    """Fill ``out_indptr`` with the number of in-edges each row will draw; fanout -1 takes them all."""
    out_indptr[0] = 0
    for i in range(frontier.size):
        local = frontier[i] - first
        start, stop = indptr[local], indptr[local + 1]
        if not 0 <= start <= stop <= num_indices:
            return DAMAGED
        degree = stop - start
        if degree >= MAX_DEGREE:
            return TOO_MANY
        out_indptr[i + 1] = out_indptr[i] + (degree if fanout < 0 or degree <= fanout else fanout)
    return OK


@kernel
def pick_positions(key: np.uint64, degree: int, count: int, picks: npt.NDArray[np.uint64]) -> None:
    """Floyd: ``count`` distinct positions in [0, degree), slot by slot. All draws first: that loop is vectorised."""
    before = np.uint64(degree - count)
    for slot in range(count):
        picks[slot] = bounded(mix(key, np.uint64(slot)), before + np.uint64(slot) + _ONE)
    if degree <= 64:  # one bit per position: whether it is taken
        taken = np.uint64(0)
        for slot in range(count):
            if taken & (_ONE << picks[slot]):
                picks[slot] = before + np.uint64(slot)
            taken |= _ONE << picks[slot]
        return
    for slot in range(1, count):
        repeated = False
        for earlier in range(slot):
            repeated |= picks[earlier] == picks[slot]
        if repeated:
            picks[slot] = before + np.uint64(slot)


@kernel
def draw_places(
    indptr: Ids, first: int, original: Ids, key: np.uint64, frontier: Ids, out_indptr: Ids, places: Ids
) -> None:
    """Write where in the graph every row's drawn in-edges stand. ``count_layer`` has checked the same columns."""
    largest = 0
    for i in range(frontier.size):
        largest = max(largest, out_indptr[i + 1] - out_indptr[i])
    picks = np.empty(largest, np.uint64)
    for i in range(frontier.size):
        local = frontier[i] - first
        start, degree = indptr[local], indptr[local + 1] - indptr[local]
        begin = out_indptr[i]
        count = out_indptr[i + 1] - begin
        if count == degree:
            for j in range(count):
                places[begin + j] = start + j
        else:
            pick_positions(mix(key, np.uint64(original[local] if original.size else frontier[i])), degree, count, picks)
            for j in range(count):
                places[begin + j] = start + np.int64(picks[j])


@kernel
def copy_sources(indices: npt.NDArray[Any], places: Ids, sources: Ids) -> None:
    """Write the source ids at some places of the graph; both arrays may be the same."""
    for i in range(places.size):
        sources[i] = indices[places[i]]


@kernel
def relabel_own(
    sources: Ids, first: int, stop: int, num_vertices: int, ids: Ids, num_rows: int, row_of: Rows
) -> tuple[int, int, int]:
    """Replace own source ids by rows, appending new ones to ``ids``, and a foreign id v by -1 - v.

    Returns a status, the new number of rows and the number of foreign edges.
    """
    num_foreign = 0
    for i in range(sources.size):
        vertex = sources[i]
        if first <= vertex < stop:
            row: Any = np.int64(row_of[vertex - first])
            if row < 0:
                row = num_rows
                row_of[vertex - first] = row
                ids[row] = vertex
                num_rows += 1
            sources[i] = row
        elif 0 <= vertex < num_vertices:
            sources[i] = -1 - vertex
            num_foreign += 1
        else:
            return DAMAGED, num_rows, 0
    return OK, num_rows, num_foreign


@kernel
def relabel_foreign(sources: Ids, num_foreign: int) -> Ids:
    """Replace each -1 - v by -1 - slot, slots in order of first occurrence; returns the vertex of every slot."""
    size = 1 << 4
    while size < 2 * num_foreign:
        size *= 2
    table, mask = np.full(size, -1, np.int64), size - 1
    foreign = np.empty(num_foreign, np.int64)
    count = 0
    for i in range(sources.size):
        if sources[i] < 0:
            vertex = -1 - sources[i]
            at = np.int64(mix(np.uint64(0), np.uint64(vertex))) & mask
            while table[at] >= 0 and foreign[table[at]] != vertex:
                at = (at + 1) & mask
            if table[at] < 0:
                table[at] = count
                foreign[count] = vertex
                count += 1
            sources[i] = -1 - table[at]
    return foreign[:count].copy()


@kernel
def append_new(wanted: Ids, first: int, ids: Ids, num_rows: int, row_of: Rows, rows: Ids) -> int:
    """Rows of own vertices, appended where they are new; returns the new number of rows."""
    for i in range(wanted.size):
        row: Any = np.int64(row_of[wanted[i] - first])
        if row < 0:
            row = num_rows
            row_of[wanted[i] - first] = row
            ids[row] = wanted[i]
            num_rows += 1
        rows[i] = row
    return num_rows


@kernel
def place_foreign(sources: Ids, rows: Ids) -> None:
    """Replace ``-1 - slot`` by ``rows[slot]``."""
    if rows.size:
        for i in range(sources.size):
            if sources[i] < 0:
                sources[i] = rows[-1 - sources[i]]


@kernel
def clear_rows(ids: Ids, first: int, row_of: Rows) -> None:
    """Clear ``row_of`` for the next mini-batch, touching only what this one used."""
    for i in range(ids.size):
        row_of[ids[i] - first] = -1
