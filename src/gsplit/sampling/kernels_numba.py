"""Host kernels of neighbour sampling: draw and relabel in one pass.

Without replacement by Floyd's method (Bentley and Floyd, CACM 1987): slot i of k draws t in [0, d - k + i] and takes
t, or d - k + i if t is taken already; every subset of size k is equally likely. Slot i's number is a hash of
(layer key, original id, i), so ``kernels_torch`` finds the same picks in another order of work.

Own sources find their row in ``row_of``, one int32 per vertex of the range, -1 where the vertex is not in the frontier;
foreign ones in a hash table of the size of the batch. Kernels check what they read from the graph before they use it
as an index: a damaged store gives a status, never a stray read.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.jit import kernel
from gsplit.keys.kernels_numba import bounded, mix

__all__ = ["DAMAGED", "OK", "TOO_MANY", "append_new", "count_layer", "fill_layer", "forget_rows", "place_foreign"]

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]

OK, DAMAGED, TOO_MANY = 0, 1, 2
_MAX_DEGREE = 1 << 32
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
        if degree >= _MAX_DEGREE:
            return TOO_MANY
        out_indptr[i + 1] = out_indptr[i] + (degree if fanout < 0 or degree <= fanout else fanout)
    return OK


@kernel
def _pick(key: np.uint64, degree: int, picks: Ids) -> None:
    """Floyd: fill ``picks`` with distinct positions in [0, degree), slot by slot."""
    count = picks.size
    taken = np.uint64(0)
    for slot in range(count):
        last = degree - count + slot
        pick: Any = np.int64(bounded(mix(key, np.uint64(slot)), np.uint64(last + 1)))
        if degree <= 64:
            if (taken >> np.uint64(pick)) & _ONE:
                pick = last
            taken |= _ONE << np.uint64(pick)
        else:
            for earlier in range(slot):
                if picks[earlier] == pick:
                    pick = last
                    break
        picks[slot] = pick


@kernel
def _grow_table(table: Ids, foreign: Ids, num_foreign: int) -> Ids:
    """A table twice as large with the same slots in it."""
    larger = np.full(2 * table.size, -1, np.int64)
    mask = larger.size - 1
    for slot in range(num_foreign):
        at = np.int64(mix(np.uint64(0), np.uint64(foreign[slot]))) & mask
        while larger[at] >= 0:
            at = (at + 1) & mask
        larger[at] = slot
    return larger


@kernel
def fill_layer(
    indptr: Ids,
    indices: npt.NDArray[Any],
    first: int,
    stop: int,
    num_vertices: int,
    original: Ids,
    key: np.uint64,
    out_indptr: Ids,
    ids: Ids,
    num_rows: int,
    row_of: Rows,
    sources: Ids,
) -> tuple[int, int, Ids]:
    """Draw for rows 0 .. len(out_indptr) - 2; append new own sources to ``ids``.

    Returns a status, the new number of rows and the foreign ids. ``count_layer`` has checked the same columns.
    """
    largest = 0
    for i in range(out_indptr.size - 1):
        largest = max(largest, out_indptr[i + 1] - out_indptr[i])
    picks, found, rows = np.empty(largest, np.int64), np.empty(largest, np.int64), np.empty(largest, np.int32)
    table, foreign, num_foreign = np.full(1 << 10, -1, np.int64), np.empty(1 << 9, np.int64), 0
    for i in range(out_indptr.size - 1):
        local = ids[i] - first
        start, degree = indptr[local], indptr[local + 1] - indptr[local]
        begin = out_indptr[i]
        count = out_indptr[i + 1] - begin
        if count == degree:
            for j in range(count):
                found[j] = indices[start + j]
        else:
            _pick(mix(key, np.uint64(original[local] if original.size else ids[i])), degree, picks[:count])
            for j in range(count):  # its own loop: these loads miss the cache together, not one after the other
                found[j] = indices[start + picks[j]]
        for j in range(count):
            own = first <= found[j] < stop
            rows[j] = row_of[found[j] - first] if own else -2
        for j in range(count):
            vertex = found[j]
            row: Any = np.int64(rows[j])
            if row == -1:
                row = np.int64(row_of[vertex - first])  # a duplicate edge may have added it just now
                if row < 0:
                    row = num_rows
                    row_of[vertex - first] = row
                    ids[row] = vertex
                    num_rows += 1
            elif row == -2:
                if not 0 <= vertex < num_vertices:
                    return DAMAGED, num_rows, foreign[:0]
                mask = table.size - 1
                at = np.int64(mix(np.uint64(0), np.uint64(vertex))) & mask
                while table[at] >= 0 and foreign[table[at]] != vertex:
                    at = (at + 1) & mask
                if table[at] < 0:
                    table[at] = num_foreign
                    foreign[num_foreign] = vertex
                    num_foreign += 1
                row = -1 - table[at]
                if num_foreign == foreign.size:
                    table = _grow_table(table, foreign, num_foreign)
                    foreign = np.concatenate((foreign, np.empty(foreign.size, np.int64)))
            sources[begin + j] = row
    return OK, num_rows, foreign[:num_foreign].copy()


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
def forget_rows(ids: Ids, first: int, row_of: Rows) -> None:
    """Clear ``row_of`` for the next mini-batch, touching only what this one used."""
    for i in range(ids.size):
        row_of[ids[i] - first] = -1
