"""Sums in lanes: right for every length, in the order that is written down, and nothing beside the rows is touched."""

from typing import Any

import numpy as np
import pytest
import torch
from numba.core.errors import TypingError
from torch import Tensor

from gsplit.kernels.jit import kernel
from gsplit.kernels.lanes import add_rows, add_scaled, copy_row, dot, prefetch_row, row_at, with_scale
from gsplit.kernels.rows import stored_words


@kernel
def _dots(a: Any, b: Any, out: Any) -> None:
    for i in range(a.shape[0]):
        out[i] = dot(a[i], b[i])


@kernel
def _add(target: Any, factor: Any, rows: Any) -> None:
    for i in range(rows.shape[0]):
        add_scaled(target[i], factor, rows[i])


@kernel
def _add_at(target: Any, addresses: Any) -> None:
    for i in range(addresses.size):
        add_rows(target[i], row_at(addresses[i], target[i]), row_at(addresses[i], target[i]))


@kernel
def _dot_of_columns(a: Any, b: Any) -> Any:
    return dot(a[:, 0], b[:, 0])


def _in_lanes(a: Any, b: Any) -> Any:
    """The definition, one number at a time."""
    count = 64 // a.dtype.itemsize
    whole = a.size // count * count
    lanes = np.zeros(count, a.dtype)
    for c in range(whole):
        lanes[c % count] += a[c] * b[c]
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    total = lanes[0]
    for c in range(whole, a.size):
        total += a[c] * b[c]
    return total


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [0, 1, 7, 8, 15, 16, 17, 64, 133])
def test_dot_has_the_order_that_is_written_down(dtype: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    a, b = (rng.normal(size=(5, width)).astype(dtype) for _ in range(2))
    out = np.empty(5, dtype)
    _dots(a, b, out)
    assert out.tolist() == [_in_lanes(x, y) for x, y in zip(a, b, strict=True)]
    assert np.allclose(out, (a.astype(np.float64) * b).sum(1), atol=1e-4 if dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [0, 1, 7, 16, 17, 133])
def test_add_scaled_adds_to_its_row_only(dtype: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    target, rows = rng.normal(size=(6, width)).astype(dtype), rng.normal(size=(3, width)).astype(dtype)
    before = target.copy()
    _add(target, dtype(0.3), rows)
    assert np.array_equal(target[:3], before[:3] + dtype(0.3) * rows)
    assert np.array_equal(target[3:], before[3:])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [0, 1, 7, 16, 17, 133])
def test_rows_at_addresses_are_added_to_their_row_only(dtype: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    target, rows = rng.normal(size=(6, width)).astype(dtype), rng.normal(size=(3, width)).astype(dtype)
    before = target.copy()
    _add_at(target, np.array([rows[i].ctypes.data for i in (2, 0)]))
    assert np.array_equal(target[:2], before[:2] + rows[[2, 0]] + rows[[2, 0]])
    assert np.array_equal(target[2:], before[2:])


@kernel
def _add_decoded(target: Any, factor: Any, rows: Any, scales: Any) -> None:
    for i in range(rows.shape[0]):
        row = with_scale(rows[i], scales, i)
        copy_row(target[i], row)
        add_rows(target[i], row, row)
        add_scaled(target[i], factor, row)


def _all_words(dtype: torch.dtype) -> Tensor:
    """Every number that 16 bits can hold, in rows of 30: zeros, subnormal numbers, infinities and NaN among them."""
    words = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    return words[: words.numel() // 30 * 30].view(-1, 30)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_words_of_16_bits_are_decoded_as_torch_does(stored: torch.dtype, dtype: Any) -> None:
    rows = _all_words(stored)
    target = np.empty(rows.shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        _add_decoded(target, dtype(0.3), stored_words(rows), None)
        want = rows.to(torch.from_numpy(target).dtype).numpy()
        want = want + want + want + dtype(0.3) * want
    assert np.array_equal(target, want, equal_nan=True)
    numbers = ~np.isnan(want)
    assert np.array_equal(np.signbit(target[numbers]), np.signbit(want[numbers]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [0, 1, 16, 133])
def test_int8_is_decoded_with_the_scale_of_its_row(width: int, dtype: Any) -> None:
    rng = np.random.default_rng(width)
    rows, scales = rng.integers(-128, 128, (5, width)).astype(np.int8), rng.normal(size=5).astype(np.float32)
    target = np.empty((5, width), dtype)
    _add_decoded(target, dtype(0.3), rows, scales)
    want = (rows.astype(np.float32) * scales[:, None]).astype(dtype)
    assert np.array_equal(target, want + want + want + dtype(0.3) * want)


def test_int8_without_scales_is_refused() -> None:
    with pytest.raises(TypingError):
        _add_decoded(np.ones((3, 3)), 1.0, np.ones((3, 3), np.int8), None)


def test_rows_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(TypingError):
        _dot_of_columns(np.ones((3, 3)), np.ones((3, 3)))


@kernel
def _gather_ahead(matrix: Any, rows: Any, out: Any) -> None:
    for i in range(rows.size):
        prefetch_row(matrix, rows[i] + 1_000_000)  # no such row
        prefetch_row(matrix, rows[rows.size - 1 - i])
        for j in range(out.shape[1]):
            out[i, j] = matrix[rows[i], j]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_prefetching_any_row_changes_nothing(dtype: Any) -> None:
    wide = np.arange(70).reshape(7, 10).astype(dtype)
    for matrix in (wide, wide[:, 2:5]):
        before, rows, out = matrix.copy(), np.array([6, 0, 3]), np.empty((3, matrix.shape[1]), dtype)
        _gather_ahead(matrix, rows, out)
        assert np.array_equal(out, before[rows]) and np.array_equal(matrix, before)
