"""Host kernels of the other draws: LABOR and weighted, which take the k smallest numbers of a column, and replacement.

A column of d in-edges is scanned once; a heap holds the k smallest (number, position) so far, the largest first. Equal
numbers, as those of parallel edges in LABOR, are ordered by position. Picks are written in order of position, so the
blocks do not depend on how the k smallest were found. Hashes are computed ahead for a chunk of a column: that loop is
vectorised. As in ``kernels_numba``, nothing read from a file is used as an index before it was checked.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Ids
from gsplit.kernels.jit import kernel
from gsplit.keys.kernels_numba import bounded, mix, neg_log2
from gsplit.sampling.kernels_numba import DAMAGED, MAX_DEGREE, OK, TOO_MANY

__all__ = ["count_replace", "count_weighted", "draw_labor", "draw_replace", "draw_weighted", "find_bad_weight"]

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[Any]
_CHUNK = 256
_U_BITS = np.uint64(11)
_SCALE = 1.44 * 2.0**-13
"""-log2(u) is at least 1.44 (1 - u): from units of 2**-53 of u to units of ``neg_log2``."""
_SLACK = 4.0
"""More than the rounding of ``neg_log2`` and of a product, in the same units."""


@kernel
def find_bad_weight(weights: Numbers) -> int:
    """The place of the first weight that is negative, infinite or NaN; -1 if there is none."""
    for e in range(weights.size):
        if not 0.0 <= weights[e] < np.inf:
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
    if source_ids.size == 0:
        for j in range(count):
            words[j] = mix(key, np.uint64(indices[start + j]))
        return True
    valid = True
    for j in range(count):
        valid &= 0 <= indices[start + j] < source_ids.size
    if not valid:
        return False
    for j in range(count):
        words[j] = mix(key, np.uint64(source_ids[indices[start + j]]))
    return True


@kernel
def _largest(out_indptr: Ids) -> int:
    largest = 0
    for i in range(out_indptr.size - 1):
        largest = max(largest, out_indptr[i + 1] - out_indptr[i])
    return largest


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
    values = np.empty(largest, np.uint64)
    positions = np.empty(largest, np.int64)
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
        for chunk in range(0, degree, _CHUNK):
            size = min(_CHUNK, degree - chunk)
            if not _source_words(key, indices, start + chunk, size, source_ids, words):
                return DAMAGED
            filled = min(max(count - chunk, 0), size)
            for j in range(filled):
                values[chunk + j], positions[chunk + j] = words[j], chunk + j
                _append(values, positions, chunk + j)
            for j in range(filled, size):
                if words[j] < values[0]:  # equal: the earlier position stays
                    values[0], positions[0] = words[j], chunk + j
                    _sink(values, positions, count)
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

    ``count_weighted`` has checked the columns. A number that is clearly too large is not divided, nor its logarithm
    taken: most numbers of a long column are.
    """
    largest = _largest(out_indptr)
    values = np.empty(largest, np.float64)
    positions = np.empty(largest, np.int64)
    words = np.empty(_CHUNK, np.uint64)
    for i in range(frontier.size):
        local = frontier[i] - first
        start, degree = indptr[local], indptr[local + 1] - indptr[local]
        begin = out_indptr[i]
        count = out_indptr[i + 1] - begin
        own = start - first_edge
        if count != fanout:  # all edges of positive weight
            at = begin
            for j in range(degree if count else 0):
                if weights[own + j] > 0:
                    places[at] = start + j
                    at += 1
            continue
        row_key = mix(key, np.uint64(original[local] if original.size else frontier[i]))
        held = 0
        for chunk in range(0, degree, _CHUNK):
            size = min(_CHUNK, degree - chunk)
            if by_source:
                if not _source_words(key, indices, start + chunk, size, source_ids, words):
                    return DAMAGED
            else:
                for j in range(size):
                    words[j] = mix(row_key, np.uint64(chunk + j))
            for j in range(size):
                weight = np.float64(weights[own + chunk + j])
                if not weight > 0:
                    continue
                if held < count:
                    values[held] = np.float64(neg_log2(words[j], table)) / weight
                    positions[held] = chunk + j
                    _append(values, positions, held)
                    held += 1
                    continue
                below_one = np.float64((1 << 53) - 1 - np.int64(words[j] >> _U_BITS))
                if below_one * _SCALE > values[0] * weight + _SLACK:
                    continue
                value = np.float64(neg_log2(words[j], table)) / weight
                if value < values[0]:
                    values[0], positions[0] = value, chunk + j
                    _sink(values, positions, count)
        _write_sorted(start, positions, places, begin, count)
    return OK
