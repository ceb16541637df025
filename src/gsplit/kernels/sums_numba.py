"""Host kernels of layers that sum rows over edges (``kernels.sums``) and multiply the sums (``nn.fused_layers``).

Sums are float32 or float64 and run in the order of the edges, and every kernel computes a range of rows, so that
several threads give the bits of one. The row that is read ``AHEAD`` edges later is prefetched.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gsplit.array_types import Ids
from gsplit.kernels.jit import kernel
from gsplit.kernels.lanes import add_rows, add_scaled, copy_row, prefetch_at, prefetch_row, row_at, with_scale

__all__ = [
    "NOTHING_OWN",
    "NOTHING_RETURNED",
    "add_bias",
    "are_rows",
    "group_edges",
    "mask_gradient",
    "max_rows",
    "run_in_threads",
    "sum_max_gradients",
    "sum_rows",
]

Floats = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
AHEAD = 8
_BLOCK = 512
_LEAST_ROWS = 4096
NOTHING_OWN: tuple[Ids, float] = (np.empty(0, np.int64), 1.0)
NOTHING_RETURNED: tuple[Ids, Ids, Ids] = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


@cache
def _threads(num_threads: int, process: int) -> ThreadPoolExecutor:
    """The threads of a process: a fork of it has none."""
    return ThreadPoolExecutor(num_threads)


def run_in_threads(num_rows: int, run: Callable[[int, int], None]) -> None:
    """Call ``run(first, stop)`` for all rows, cut into as many ranges as torch has threads."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or num_rows < _LEAST_ROWS:
        run(0, num_rows)
        return
    cuts = [num_rows * thread // num_threads for thread in range(num_threads + 1)]
    list(_threads(num_threads, os.getpid()).map(run, cuts[:-1], cuts[1:]))


@kernel
def are_rows(rows: Ids, num_rows: int) -> bool:
    """Whether all numbers are in [0, num_rows)."""
    inside = True
    for k in range(rows.size):
        inside &= 0 <= rows[k] < num_rows
    return inside


@kernel
def copy_scaled(target: Floats, factor: float, source: Floats) -> None:
    """Copy a row times a factor into another of the same length."""
    scale = target.dtype.type(factor)
    for j in range(target.size):
        target[j] = scale * source[j]


@kernel
def _row(number: int, addresses: Ids, like: Floats, scales: Floats | None) -> Any:
    """A row by its number, as ``lanes`` takes it."""
    return with_scale(row_at(addresses[number], like), scales, number)


@kernel
def sum_rows(
    offsets: Ids,
    rows: Ids,
    weights: Floats,
    addresses: Ids,
    like: Floats,
    scales: Floats | None,
    own: tuple[Ids, float],
    returned: tuple[Ids, Ids, Ids],
    mean: bool,
    out: Floats,
    width: int,
    first: int,
    stop: int,
) -> None:
    """out[i - first] = own(i) + the sum of weights[e] * row(rows[e]) over the edges e of i, for i in [first, stop).

    Row r has ``width`` numbers and begins at ``addresses[r]``; the first columns of ``out`` are written. The type of
    the rows is that of ``like``, an array of ``width``; ``lanes`` decodes them, int8 with ``scales[r]``. Without
    weights all are 1. ``own``: the addresses of the rows, of the type of ``out``, that the first sums start with, and a
    factor; the others start at 0. ``returned``: rows that are added to some i (``heads[i]`` is the first of them,
    ``following[k]`` the one after k, -1 at the end) and their addresses; may be empty. ``mean``: divided by the number
    of edges, if there are any. Rows and addresses have been checked.
    """
    starts, factor = own
    heads, following, places = returned
    num_bytes = width * like.itemsize
    for i in range(first, stop):
        begin, end = offsets[i], offsets[i + 1]
        target = out[i - first][:width]
        for e in range(begin + AHEAD, min(end + AHEAD, rows.size)):
            prefetch_at(addresses[rows[e]], num_bytes)
        e = begin
        if i + 1 < starts.size:
            prefetch_at(starts[i + 1], num_bytes)
        if i < starts.size:
            copy_scaled(target, factor, row_at(starts[i], target))
        elif begin < end and not weights.size:
            copy_row(target, _row(rows[begin], addresses, like, scales))
            e += 1
        else:
            target[:] = 0
        if weights.size:
            while e < end:
                add_scaled(target, weights[e], _row(rows[e], addresses, like, scales))
                e += 1
        while e + 1 < end:
            one = _row(rows[e], addresses, like, scales)
            add_rows(target, one, _row(rows[e + 1], addresses, like, scales))
            e += 2
        if e < end:
            add_scaled(target, out.dtype.type(1), _row(rows[e], addresses, like, scales))
        if heads.size:
            k = heads[i]
            while k >= 0:
                add_scaled(target, out.dtype.type(1), row_at(places[k], target))
                k = following[k]
        if mean and end - begin > 1:
            inverse = out.dtype.type(1.0) / out.dtype.type(end - begin)
            for j in range(width):
                target[j] *= inverse


@kernel
def max_rows(
    offsets: Ids, rows: Ids, addresses: Ids, out: Floats, width: int, counts: Floats, first: int, stop: int
) -> None:
    """out[i] = the largest number of every column of row(rows[e]) over the edges e of i, for i in [first, stop).

    Rows as in ``sum_rows``. 0 without edges, NaN if any number is. ``counts[i]``: by what torch's ``scatter_reduce``
    divides the gradient, how many are equal to the largest, and one more where that is 0; empty if not needed.
    """
    num_bytes = width * out.itemsize
    for i in range(first, stop):
        begin, end = offsets[i], offsets[i + 1]
        target = out[i][:width]
        for e in range(begin + AHEAD, min(end + AHEAD, rows.size)):
            prefetch_at(addresses[rows[e]], num_bytes)
        if begin == end:
            target[:] = 0
        else:
            copy_scaled(target, 1.0, row_at(addresses[rows[begin]], target))
        for e in range(begin + 1, end):
            row = row_at(addresses[rows[e]], target)
            for j in range(width):
                target[j] = row[j] if (row[j] > target[j]) | (row[j] != row[j]) else target[j]
        if counts.size:
            count = counts[i]
            for j in range(width):
                count[j] = target[j] == 0
            for e in range(begin, end):
                row = row_at(addresses[rows[e]], target)
                for j in range(width):
                    count[j] += row[j] == target[j]


@kernel
def sum_max_gradients(
    offsets: Ids,
    rows: Ids,
    x: Floats,
    largest: Floats,
    g: Floats,
    own: tuple[Ids, float],
    out: Floats,
    first: int,
    stop: int,
) -> None:
    """out[s] = own(s) + the sum of g[i] where x[s] is ``largest[i]``, over the edges from s to i = rows[e].

    For s in [first, stop); ``own`` as in ``sum_rows``. A product with 0 elsewhere, as in torch: infinite gradients, as
    those of NaN are, give NaN. Rows have been checked.
    """
    starts, factor = own
    zero, one = out.dtype.type(0), out.dtype.type(1)
    for s in range(first, stop):
        begin, end = offsets[s], offsets[s + 1]
        target, row = out[s], x[s]
        for e in range(begin + AHEAD, min(end + AHEAD, rows.size)):
            prefetch_row(largest, rows[e])
            prefetch_row(g, rows[e])
        if s < starts.size:
            copy_scaled(target, factor, row_at(starts[s], target))
        else:
            target[:] = 0
        for e in range(begin, end):
            most, share = largest[rows[e]], g[rows[e]]
            for j in range(target.size):
                target[j] += share[j] * (one if row[j] == most[j] else zero)


@kernel
def add_bias(out: Floats, bias: Floats, relu: bool, kept: Mask, first: int, stop: int) -> None:
    """out += bias if there is one, then max(out, 0) if ``relu``, in place, for rows [first, stop); NaN stays NaN.

    ``kept``: where the ReLU leaves a number as it is; empty if that is not needed.
    """
    zero = out.dtype.type(0)
    for i in range(first, stop):
        row = out[i]
        if bias.size:
            for j in range(row.size):
                row[j] += bias[j]
        if relu and kept.size:
            is_kept = kept[i]
            for j in range(row.size):
                is_kept[j] = not row[j] <= zero
        if relu:
            for j in range(row.size):
                row[j] = zero if row[j] <= zero else row[j]


@kernel
def mask_gradient(g: Floats, kept: Mask, masked: Floats, sums: Floats) -> None:
    """masked = g where it is kept, else 0 (the gradient of a ReLU), and sums = its columns added up.

    Without ``kept`` nothing is masked or written, and ``sums`` are those of g. Sums of 512 rows are added to each
    other, so that no digits of a long sum are lost.
    """
    part = np.zeros(g.shape[1], g.dtype)
    sums[:] = 0
    zero = g.dtype.type(0)
    for i in range(g.shape[0]):
        row = g[i]
        if kept.size:
            is_kept, target = kept[i], masked[i]
            for j in range(row.size):
                target[j] = row[j] if is_kept[j] else zero
            row = target
        for j in range(row.size):
            part[j] += row[j]
        if i % _BLOCK == _BLOCK - 1:
            for j in range(part.size):
                sums[j] += part[j]
                part[j] = 0
    for j in range(part.size):
        sums[j] += part[j]


@kernel
def group_edges(indptr: Ids, src_rows: Ids, num_src: int) -> tuple[Ids, Ids, Ids]:
    """The edges of every source, in the order of their destinations: ``csr.EdgesBySource``. Rows have been checked."""
    offsets = np.zeros(num_src + 1, np.int64)
    for e in range(src_rows.size):
        offsets[src_rows[e] + 1] += 1
    for s in range(num_src):
        offsets[s + 1] += offsets[s]
    free = offsets[:-1].copy()
    places = np.empty(src_rows.size, np.int64)
    dst_rows = np.empty(src_rows.size, np.int64)
    for i in range(indptr.size - 1):
        for e in range(indptr[i], indptr[i + 1]):
            place = free[src_rows[e]]
            places[place], dst_rows[place] = e, i
            free[src_rows[e]] = place + 1
    return offsets, places, dst_rows
