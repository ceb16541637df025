"""Moving rows on the host: gather them, copy and gather for a shuffle, merge a gradient from its parts; one pass each.

Compiled, because on a host that computes, memory traffic is what a shuffle costs: torch operations would pass over the
gradient once to copy it and once more to add. Where ``dispatch`` chooses torch, callers use torch operations with the
same result.
"""

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.kernels.jit import kernel
from gsplit.kernels.lanes import add_scaled, copy_row, prefetch_row, row_at, with_scale

__all__ = [
    "copy_rows",
    "copy_cached",
    "flat_rows",
    "merge_gradient",
    "copy_and_gather",
    "gather",
    "list_places",
    "stored_words",
    "NO_PLACES",
]

Matrix = npt.NDArray[Any]
NO_PLACES: npt.NDArray[np.int64] = np.empty(0, np.int64)
"""For ``copy_rows``: row i goes to place i."""

_AHEAD = 8
"""Rows between the one that a gather copies and the one that it prefetches."""
_LONG_ROW = 1024
"""Bytes. Longer rows are not prefetched: the processor itself reads ahead within a row."""


@kernel
def copy_rows(
    array: Matrix,
    rows: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    out: npt.NDArray[Any],
    stride: int,
    scales: npt.NDArray[np.float32] | None = None,
) -> None:
    """Row ``rows[i]`` of the array to element ``places[i] * stride`` of ``out``, or ``i * stride`` without places.

    ``lanes`` decodes rows if ``out`` has another type, int8 with ``scales[rows[i]]``. Rows and places have been
    checked.
    """
    ahead = _AHEAD if array.shape[1] * array.itemsize <= _LONG_ROW else rows.size
    for i in range(rows.size):
        if i + ahead < rows.size:
            prefetch_row(array, rows[i + ahead])
        source, begin = array[rows[i]], (places[i] if places.size else i) * stride
        target = out[begin : begin + source.size]
        copy_row(target, with_scale(source, scales, rows[i]))


@kernel
def copy_cached(
    cached: Matrix,
    positions: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    out: npt.NDArray[Any],
    stride: int,
    missed: npt.NDArray[np.int64],
) -> int:
    """As ``copy_rows`` where a position is that of a cached row; the others are listed in ``missed`` and counted."""
    num_missed = 0
    ahead = _AHEAD if cached.shape[1] * cached.itemsize <= _LONG_ROW else positions.size
    for i in range(positions.size):
        if i + ahead < positions.size:
            prefetch_row(cached, positions[i + ahead])
        if 0 <= positions[i] < cached.shape[0]:
            source, begin = cached[positions[i]], (places[i] if places.size else i) * stride
            target = out[begin : begin + source.size]
            for j in range(source.size):
                target[j] = source[j]
        else:
            missed[num_missed] = i
            num_missed += 1
    return num_missed


@kernel
def list_places(rows: npt.NDArray[np.int64], num_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The places k of each row in ``rows``: the first for every row, and for every k the next; -1 at the end."""
    head, following = np.full(num_rows, -1, np.int64), np.empty(rows.size, np.int64)
    for k in range(rows.size - 1, -1, -1):
        following[k] = head[rows[k]]
        head[rows[k]] = k
    return head, following


@kernel
def _copy_and_gather(h: Matrix, rows: npt.NDArray[np.int64], own: Matrix, sent: Matrix) -> None:
    head, following = list_places(rows, h.shape[0])
    for i in range(h.shape[0]):
        for j in range(h.shape[1]):
            own[i, j] = h[i, j]
        k = head[i]
        while k >= 0:
            for j in range(h.shape[1]):
                sent[k, j] = own[i, j]
            k = following[k]


@kernel
def _merge(
    g_mixed: Matrix,
    g_dst: Matrix,
    rows: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    addresses: npt.NDArray[np.int64],
    out: Matrix,
) -> None:
    """Rows ``begins[p] .. begins[p + 1] - 1`` of what returned lie one after the other from ``addresses[p]`` on."""
    head, following = list_places(rows, out.shape[0])
    row_bytes = out.shape[1] * out.itemsize
    for i in range(out.shape[0]):
        target, own, k, p = out[i], g_mixed[i], head[i], 0
        for j in range(target.size):
            target[j] = own[j]
        while k >= 0:
            while k >= begins[p + 1]:
                p += 1
            add_scaled(target, out.dtype.type(1), row_at(addresses[p] + (k - begins[p]) * row_bytes, target))
            k = following[k]
        if i < g_dst.shape[0]:
            for j in range(target.size):
                target[j] += g_dst[i, j]


def _matrix(tensor: Tensor, like: Tensor) -> Matrix:
    flat: Matrix = tensor.detach().reshape(tensor.size(0), like[0].numel()).numpy()
    return flat


def copy_and_gather(h: Tensor, rows: Tensor, own: Tensor, sent: Tensor) -> None:
    """``own = h`` and ``sent[k] = h[rows[k]]``, reading ``h`` once."""
    if h.size(0):
        _copy_and_gather(_matrix(h, h), rows.numpy(), _matrix(own, h), _matrix(sent, h))


def stored_words(rows: Tensor) -> npt.NDArray[Any]:
    """The memory of a host tensor as kernels take it, which know the types of ``lanes``."""
    words = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.bool: torch.uint8}
    found: npt.NDArray[Any] = rows.detach().view(words.get(rows.dtype, rows.dtype)).numpy()
    return found


def flat_rows(out: Tensor, bits: np.dtype[Any]) -> tuple[npt.NDArray[Any], int]:
    """The memory of a host tensor as a flat array of words of type ``bits``, and the stride of its rows in words.

    >>> wide = torch.zeros(3, 5)
    >>> flat, stride = flat_rows(wide[:, 1:3], np.dtype(np.uint32))
    >>> flat.shape, stride
    ((12,), 5)
    """
    rows = out.size(0)
    columns = prod(out.shape[1:])
    assert out.device.type == "cpu" and (rows == 0 or out[0].is_contiguous()), (out.device, out.stride())
    stride = out.stride(0) if rows > 1 and columns else columns
    flat = out.as_strided((max(0, rows - 1) * stride + columns if rows else 0,), (1,))
    return stored_words(flat).view(bits), stride * out.element_size() // bits.itemsize


def gather(h: Tensor, rows: Tensor, out: Tensor, scales: Tensor | None = None) -> None:
    """``out[k] = h[rows[k]]`` on the host, in the type of ``out``; ``rows`` are rows of ``h``.

    ``scales``: the scale of every row of ``h``, if these are int8. ``out`` may be some columns of a wider matrix.
    """
    if rows.numel():
        words = stored_words(h).reshape(h.size(0), prod(h.shape[1:]))
        flat, stride = flat_rows(out, stored_words(out[:0]).dtype)
        copy_rows(words, rows.numpy(), NO_PLACES, flat, stride, None if scales is None else scales.numpy())


def merge_gradient(g_mixed: Tensor, g_dst: Tensor, rows: Tensor, returned: tuple[Tensor, ...], out: Tensor) -> None:
    """``out = g_mixed[:len(out)]``, with row k of what returned added to row ``rows[k]`` and ``g_dst`` to the first.

    ``returned`` is in one or several pieces. Every sum is made in one order, so the result does not depend on threads.
    ``rows`` are rows of ``out``.
    """
    begins = np.cumsum([0, *(piece.size(0) for piece in returned)])
    assert begins[-1] == rows.numel()
    if out.size(0):
        shape = out.shape[1:]
        for piece in returned:  # the kernel gets addresses only
            assert piece.shape[1:] == shape and piece.dtype == out.dtype, (piece.shape, piece.dtype)
            assert piece.is_contiguous() and piece.device.type == "cpu", (piece.stride(), piece.device)
        addresses = np.array([piece.data_ptr() for piece in returned], np.int64)
        _merge(_matrix(g_mixed, out), _matrix(g_dst, out), rows.numpy(), begins, addresses, _matrix(out, out))
