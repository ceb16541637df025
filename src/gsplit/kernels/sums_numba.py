"""Host kernels of layers that sum rows over edges (``kernels.sums``) and multiply the sums (``nn.fused_layers``).

Rows are float32 or float64, sums run in the order of the edges, and every kernel computes a range of rows, so that
several threads give the bits of one. The row that is read ``AHEAD`` edges later is prefetched.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gsplit.array_types import Ids
from gsplit.kernels.jit import kernel
from gsplit.kernels.lanes import add_scaled, prefetch_row

__all__ = [
    "NO_ROWS",
    "add_bias",
    "are_rows",
    "copy_rows_to",
    "group_edges",
    "mask_gradient",
    "run_in_threads",
    "sum_rows",
]

Floats = npt.NDArray[Any]
AHEAD = 8
_BLOCK = 512
_LEAST_ROWS = 4096
NO_ROWS: Ids = np.empty(0, np.int64)
"""For kernels: row i is row i."""


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads)


def run_in_threads(num_rows: int, run: Callable[[int, int], None]) -> None:
    """Call ``run(first, stop)`` for all rows, cut into as many ranges as torch has threads."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or num_rows < _LEAST_ROWS:
        run(0, num_rows)
        return
    cuts = [num_rows * thread // num_threads for thread in range(num_threads + 1)]
    list(_threads(num_threads).map(run, cuts[:-1], cuts[1:]))


@kernel
def are_rows(rows: Ids, num_rows: int) -> bool:
    """Whether all numbers are in [0, num_rows)."""
    inside = True
    for k in range(rows.size):
        inside &= 0 <= rows[k] < num_rows
    return inside


@kernel
def sum_rows(
    offsets: Ids,
    rows: Ids,
    weights: Floats,
    x: Floats,
    start: Floats,
    start_column: int,
    mean: bool,
    out: Floats,
    width: int,
    first: int,
    stop: int,
) -> None:
    """out[i, :width] = start[i] + the sum of weights[e] * x[rows[e]] over the edges e of i, for i in [first, stop).

    The first columns of x are read, and those of ``start`` from ``start_column`` on. Rows beyond those of ``start``
    start at 0; without weights all are 1. ``mean``: divided by the number of edges, if there are any. Rows have been
    checked.
    """
    num_edges = rows.size
    for i in range(first, stop):
        begin, end = offsets[i], offsets[i + 1]
        target = out[i][:width]
        for e in range(begin + AHEAD, min(end + AHEAD, num_edges)):
            prefetch_row(x, rows[e])
        e = begin
        if i < start.shape[0]:
            source = start[i][start_column : start_column + width]
            for j in range(width):
                target[j] = source[j]
        elif begin < end and not weights.size:
            source = x[rows[begin]][:width]
            for j in range(width):
                target[j] = source[j]
            e += 1
        else:
            for j in range(width):
                target[j] = 0
        if weights.size:
            while e < end:
                add_scaled(target, weights[e], x[rows[e]][:width])
                e += 1
        while e + 1 < end:
            one, other = x[rows[e]][:width], x[rows[e + 1]][:width]
            for j in range(width):
                target[j] = target[j] + one[j] + other[j]
            e += 2
        if e < end:
            one = x[rows[e]][:width]
            for j in range(width):
                target[j] += one[j]
        if mean and end - begin > 1:
            inverse = x.dtype.type(1.0) / x.dtype.type(end - begin)
            for j in range(width):
                target[j] *= inverse


@kernel
def copy_rows_to(x: Floats, rows: Ids, out: Floats, column: int, first: int, stop: int) -> None:
    """out[i, column:] = x[rows[i]], or x[i] without rows, for i in [first, stop). Rows have been checked."""
    for i in range(first, stop):
        if rows.size and i + AHEAD < stop:
            prefetch_row(x, rows[i + AHEAD])
        source = x[rows[i] if rows.size else i]
        target = out[i][column : column + source.size]
        for j in range(source.size):
            target[j] = source[j]


@kernel
def add_bias(out: Floats, bias: Floats, relu: bool, first: int, stop: int) -> None:
    """out += bias if there is one, then max(out, 0) if ``relu``; NaN stays NaN. In place, for rows [first, stop)."""
    zero = out.dtype.type(0)
    for i in range(first, stop):
        row = out[i]
        if bias.size and relu:
            for j in range(row.size):
                value = row[j] + bias[j]
                row[j] = zero if value <= zero else value
        elif relu:
            for j in range(row.size):
                row[j] = zero if row[j] <= zero else row[j]
        else:
            for j in range(row.size):
                row[j] += bias[j]


@kernel
def mask_gradient(g: Floats, out: Floats, scale: float, masked: Floats, sums: Floats) -> None:
    """masked = scale * g where out is not 0 (the gradient of ReLU and dropout), and sums = its columns added up.

    Without ``out`` nothing is masked or written, and ``sums`` are those of g. Sums of 512 rows are added to each other,
    so that no digits of a long sum are lost.
    """
    part = np.zeros(g.shape[1], g.dtype)
    sums[:] = 0
    zero = g.dtype.type(0)
    factor = g.dtype.type(scale)
    for i in range(g.shape[0]):
        row = g[i]
        if out.size:
            kept, target = out[i], masked[i]
            for j in range(row.size):
                value = zero if kept[j] == zero else row[j] * factor
                target[j] = value
                part[j] += value
        else:
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
