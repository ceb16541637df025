"""Host kernels of the other draws: LABOR and weighted, which take the k smallest numbers of a column, and replacement.

Equal numbers, as those of parallel edges in LABOR, are ordered by position. Picks are written in order of position, so
blocks do not depend on how the k smallest are found:

1. One pass over the column collects the numbers below a bound that somewhat more than k are expected to pass.
2. The bound is moved down, by interpolation, until exactly k of the collected are below it.

If too few pass, or equal numbers straddle k, a heap finds them, at two to three times the cost. Hashes are computed
ahead for a chunk of a column, and loops have few branches. As in ``kernels_numba``, nothing read from a file is used as
an index before it was checked.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Ids
from gsplit.kernels.jit import kernel
from gsplit.keys.kernels_numba import bounded, mix, neg_log2
from gsplit.sampling.kernels_numba import DAMAGED, MAX_DEGREE, OK, TOO_MANY

__all__ = ["count_replace", "count_weighted", "draw_labor", "draw_replace", "draw_weighted", "find_bad_weight"]

LEAST_WEIGHT = 1e-290
"""The least weight above 0: -log2(u), of up to 2**46 units, divided by less may be infinite."""

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[Any]
_CHUNK = 256
_ROUNDS = 40
"""Counts after which the bound is given up: interpolation takes three or four."""
_LARGEST = np.uint64(2**64 - 1)
_U_BITS = np.uint64(11)
_SCALE = 1.44 * 2.0**-13
"""-log2(u) is at least 1.44 (1 - u): from units of 2**-53 of u to units of ``neg_log2``."""
_SLACK = 4.0
"""More than the rounding of ``neg_log2`` and of a product, in the same units."""


@kernel
def find_bad_weight(weights: Numbers) -> int:
    """The place of the first weight that cannot be drawn by, see ``LEAST_WEIGHT``; -1 if there is none."""
    for e in range(weights.size):
        if weights[e] != 0.0 and not LEAST_WEIGHT <= weights[e] < np.inf:
            return e
    return -1


@kernel
def count_replace(indptr: Ids, num_indices: int, first: int, frontier: Ids, fanout: int, out_indptr: Ids) -> int:
    """As ``count_layer``: ``fanout`` in-edges of every row that has any."""
    out_indptr[0] = 0
    for i in range(frontier.size):
        local = frontier[i] - first
        start, stop = indptr[local], indptr[local + 1]
        if not 0 <= start <= stop <= num_indices:
            return DAMAGED
        if stop - start >= MAX_DEGREE:
            return TOO_MANY
        out_indptr[i + 1] = out_indptr[i] + (fanout if stop > start else 0)
    return OK


@kernel
def draw_replace(
    indptr: Ids, first: int, original: Ids, key: np.uint64, frontier: Ids, out_indptr: Ids, places: Ids
) -> None:
    """Slot i of a row takes any of its in-edges."""
    for i in range(frontier.size):
        local = frontier[i] - first
        start, degree = indptr[local], np.uint64(indptr[local + 1] - indptr[local])
        begin = out_indptr[i]
        word = mix(key, np.uint64(original[local] if original.size else frontier[i]))
        for slot in range(out_indptr[i + 1] - begin):
            places[begin + slot] = start + np.int64(bounded(mix(word, np.uint64(slot)), degree))


@kernel
def _sink(values: Numbers, positions: Ids, size: int) -> None:
    """Restore the heap after its root was replaced."""
    at = 0
    value, position = values[0], positions[0]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            values[other] > values[child] or (values[other] == values[child] and positions[other] > positions[child])
        ):
            child = other
        if values[child] < value or (values[child] == value and positions[child] < position):
            break
        values[at], positions[at] = values[child], positions[child]
        at = child
    values[at], positions[at] = value, position


@kernel
def _append(values: Numbers, positions: Ids, at: int) -> None:
    """Restore the heap after an element was added at its end."""
    value, position = values[at], positions[at]
    while at > 0:
        parent = (at - 1) // 2
        if values[parent] > value or (values[parent] == value and positions[parent] > position):
            break
        values[at], positions[at] = values[parent], positions[parent]
        at = parent
    values[at], positions[at] = value, position


@kernel
def _write_sorted(start: int, positions: Ids, places: Ids, begin: int, count: int) -> None:
    """Write the picks of a row in order of position."""
    for i in range(count):
        position = positions[i]
        at = begin + i
        while at > begin and places[at - 1] > start + position:
            places[at] = places[at - 1]
            at -= 1
        places[at] = start + position


@kernel
def _source_words(key: np.uint64, indices: Numbers, start: int, count: int, source_ids: Numbers, words: Words) -> bool:
    """Hash the original ids of some sources; False if a source is not a vertex."""
    sources = indices[start : start + count]  # a slice of its own: numba then need not wrap negative indices
    if source_ids.size == 0:
        for j in range(sources.size):
            words[j] = mix(key, np.uint64(sources[j]))
        return True
    for j in range(sources.size):
        if not 0 <= sources[j] < source_ids.size:
            return False
        words[j] = mix(key, np.uint64(source_ids[np.uint64(sources[j])]))
    return True


@kernel
def _largest(out_indptr: Ids) -> int:
    largest = 0
    for i in range(out_indptr.size - 1):
        largest = max(largest, out_indptr[i + 1] - out_indptr[i])
    return largest


@kernel
def _num_expected(count: int) -> float:
    """Numbers to collect, so that in most columns there are at least ``count``."""
    return count + 2.5 * math.sqrt(count) + 2.0


@kernel
def _count_below(values: Numbers, bound: Any) -> int:
    count = 0
    for i in range(values.size):
        count += 1 if values[i] < bound else 0
    return count


@kernel
def _write_smallest(values: Numbers, positions: Ids, bound: Any, start: int, places: Ids, count: int) -> bool:
    """Write the ``count`` smallest of the collected numbers; False if no bound below ``bound`` has just as many."""
    low, high = values.dtype.type(0), bound
    below_low, below_high = 0, values.size
    for _ in range(_ROUNDS):
        if below_high == count:
            break
        share = np.float64(count - below_low) / (below_high - below_low)
        middle = low + values.dtype.type((high - low) * share)
        if not low < middle < high:
            return False
        below = _count_below(values, middle)
        if below >= count:
            high, below_high = middle, below
        else:
            low, below_low = middle, below
    if below_high != count:
        return False
    at = 0
    for i in range(values.size):
        if values[i] < high:
            places[at] = start + positions[i]
            at += 1
    return True


@kernel
def _collect_labor(
    key: np.uint64,
    indices: Numbers,
    start: int,
    degree: int,
    source_ids: Numbers,
    bound: np.uint64,
    words: Words,
    values: Words,
    positions: Ids,
) -> int:
    """Collect the hashes of sources below a bound; how many, or -1 if there are too many or a source is no vertex."""
    found = 0
    for chunk in range(0, degree, _CHUNK):
        size = min(_CHUNK, degree - chunk)
        if found + size > values.size or not _source_words(key, indices, start + chunk, size, source_ids, words):
            return -1
        for j in range(size):
            values[found] = words[j]
            positions[found] = chunk + j
            found += 1 if words[j] < bound else 0
    return found


@kernel
def _heap_labor(
    key: np.uint64,
    indices: Numbers,
    start: int,
    degree: int,
    source_ids: Numbers,
    words: Words,
    values: Words,
    positions: Ids,
) -> bool:
    """Find the positions of the ``values.size`` smallest hashes of sources; False if a source is not a vertex."""
    count = values.size
    for chunk in range(0, degree, _CHUNK):
        size = min(_CHUNK, degree - chunk)
        if not _source_words(key, indices, start + chunk, size, source_ids, words):
            return False
        filled = min(max(count - chunk, 0), size)
        for j in range(filled):
            values[chunk + j], positions[chunk + j] = words[j], chunk + j
            _append(values, positions, chunk + j)
        for j in range(filled, size):
            if words[j] < values[0]:  # equal: the earlier position stays
                values[0], positions[0] = words[j], chunk + j
                _sink(values, positions, count)
    return True


@kernel
def draw_labor(
    indptr: Ids,
    indices: Numbers,
    first: int,
    source_ids: Numbers,
    key: np.uint64,
    frontier: Ids,
    out_indptr: Ids,
    places: Ids,
) -> int:
    """The k in-edges of every row whose sources have the smallest hashes. ``count_layer`` has checked the columns."""
    largest = _largest(out_indptr)
    values = np.empty(2 * largest + 2 * _CHUNK, np.uint64)
    positions = np.empty(values.size, np.int64)
    words = np.empty(_CHUNK, np.uint64)
    for i in range(frontier.size):
        local = frontier[i] - first
        start, degree = indptr[local], indptr[local + 1] - indptr[local]
        begin = out_indptr[i]
        count = out_indptr[i + 1] - begin
        if count == degree:
            for j in range(count):
                places[begin + j] = start + j
            continue
        share = _num_expected(count) / degree
        bound = np.uint64(share * 2.0**64) if share < 0.99 else _LARGEST
        found = _collect_labor(key, indices, start, degree, source_ids, bound, words, values, positions)
        if found >= count and _write_smallest(
            values[:found], positions, bound, start, places[begin : begin + count], count
        ):
            continue
        if not _heap_labor(key, indices, start, degree, source_ids, words, values[:count], positions):
            return DAMAGED
        _write_sorted(start, positions, places, begin, count)
    return OK


@kernel
def count_weighted(
    indptr: Ids, first: int, weights: Numbers, first_edge: int, frontier: Ids, fanout: int, out_indptr: Ids
) -> int:
    """As ``count_layer``; an edge of weight 0 is not drawn. ``weights[0]`` is that of edge ``first_edge``."""
    out_indptr[0] = 0
    for i in range(frontier.size):
        local = frontier[i] - first
        start, stop = indptr[local] - first_edge, indptr[local + 1] - first_edge
        if not 0 <= start <= stop <= weights.size:
            return DAMAGED
        if stop - start >= MAX_DEGREE:
            return TOO_MANY
        positive = 0
        for e in range(start, stop):
            if weights[e] > 0:
                positive += 1
                if positive == fanout:
                    break
        out_indptr[i + 1] = out_indptr[i] + positive
    return OK


@kernel
def _column_words(
    by_source: bool,
    key: np.uint64,
    row_key: np.uint64,
    indices: Numbers,
    start: int,
    first: int,
    count: int,
    source_ids: Numbers,
    words: Words,
) -> bool:
    """Hash ``count`` in-edges of a row from position ``first`` on: their sources, or their positions."""
    if by_source:
        return _source_words(key, indices, start + first, count, source_ids, words)
    for j in range(count):
        words[j] = mix(row_key, np.uint64(first + j))
    return True


@kernel
def _weighted_bound(weights: Numbers, count: int) -> float:
    """A bound that somewhat more than ``count`` edges of a column are expected to pass."""
    total = 0.0
    for j in range(weights.size):
        total += weights[j]
    share = min(_num_expected(count) / weights.size, 0.95)
    return -math.log2(1.0 - share) * 2.0**40 * weights.size / total


@kernel
def _collect_weighted(
    weights: Numbers,
    first: int,
    bound: float,
    table: Ids,
    words: Words,
    values: npt.NDArray[np.float64],
    positions: Ids,
    found: int,
) -> int:
    """Add the numbers of a chunk that are below a bound to the ``found`` ones; how many there are now.

    -log2(u) is at least 1.44 (1 - u), so most logarithms of a long column need not be taken.
    """
    begin = found
    for j in range(weights.size):
        below_one = np.float64((1 << 53) - 1 - np.int64(words[j] >> _U_BITS))
        words[found - begin] = words[j]
        values[found] = weights[j]
        positions[found] = first + j
        found += 1 if below_one * _SCALE <= bound * weights[j] + _SLACK and weights[j] > 0 else 0
    kept = begin
    for i in range(begin, found):
        value = np.float64(neg_log2(words[i - begin], table)) / values[i]
        values[kept], positions[kept] = value, positions[i]
        kept += 1 if value < bound else 0
    return kept


@kernel
def _add_to_heap(
    weights: Numbers,
    first: int,
    table: Ids,
    words: Words,
    values: npt.NDArray[np.float64],
    positions: Ids,
    held: int,
) -> int:
    """Add a chunk of a column to a heap of ``held`` numbers, of at most ``values.size``; how many it holds now."""
    for j in range(weights.size):
        if not weights[j] > 0:
            continue
        value = np.float64(neg_log2(words[j], table)) / np.float64(weights[j])
        if held < values.size:
            values[held], positions[held] = value, first + j
            _append(values, positions, held)
            held += 1
        elif value < values[0]:  # equal: the earlier position stays
            values[0], positions[0] = value, first + j
            _sink(values, positions, held)
    return held


@kernel
def _write_positive(weights: Numbers, start: int, places: Ids) -> None:
    """Write all edges of positive weight."""
    at = 0
    for j in range(weights.size if places.size else 0):
        if weights[j] > 0:
            places[at] = start + j
            at += 1


@kernel
def draw_weighted(
    indptr: Ids,
    indices: Numbers,
    first: int,
    original: Ids,
    source_ids: Numbers,
    by_source: bool,
    weights: Numbers,
    first_edge: int,
    table: Ids,
    key: np.uint64,
    frontier: Ids,
    fanout: int,
    out_indptr: Ids,
    places: Ids,
) -> int:
    """The k in-edges of every row with the smallest -log2(u) / weight; u by source (LABOR), or by (row, position).

    ``count_weighted`` has checked the columns.
    """
    most = 2 * _largest(out_indptr) + 2 * _CHUNK
    values = np.empty(most, np.float64)
    positions = np.empty(most, np.int64)
    words = np.empty(_CHUNK + 1, np.uint64)
    for i in range(frontier.size):
        local = frontier[i] - first
        start, degree = indptr[local], indptr[local + 1] - indptr[local]
        begin = out_indptr[i]
        count = out_indptr[i + 1] - begin
        column = weights[start - first_edge : start - first_edge + degree]
        if count != fanout:
            _write_positive(column, start, places[begin : begin + count])
            continue
        row_key = mix(key, np.uint64(original[local] if original.size else frontier[i]))
        bound = _weighted_bound(column, count)
        found = 0
        for chunk in range(0, degree, _CHUNK):
            size = min(_CHUNK, degree - chunk)
            if not _column_words(by_source, key, row_key, indices, start, chunk, size, source_ids, words):
                return DAMAGED
            part = column[chunk : chunk + size]
            found = _collect_weighted(part, chunk, bound, table, words, values, positions, found)
            if found + _CHUNK >= most:
                break
        if count <= found < most - _CHUNK and _write_smallest(
            values[:found], positions, bound, start, places[begin : begin + count], count
        ):
            continue
        found = 0
        for chunk in range(0, degree, _CHUNK):
            size = min(_CHUNK, degree - chunk)
            _column_words(by_source, key, row_key, indices, start, chunk, size, source_ids, words)
            part = column[chunk : chunk + size]
            found = _add_to_heap(part, chunk, table, words, values[:count], positions, found)
        _write_sorted(start, positions, places, begin, count)
    return OK
