"""Compiled row moves equal the torch operations they replace, rows that go to several peers included."""

import subprocess
import sys
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsplit.kernels import rows as rows_module
from gsplit.kernels.rows import copy_and_gather, copy_cached, copy_rows, merge_gradient


@given(
    st.integers(1, 8),
    st.lists(st.integers(0, 7), max_size=30),
    st.integers(0, 3),
    st.integers(0, 8),
    st.booleans(),
    st.integers(0, 30),
)
def test_spread_and_merge(num_rows: int, picks: list[int], width: int, num_dst: int, single: bool, cut: int) -> None:
    dtype = torch.float32 if single else torch.float64
    rows = torch.tensor([p % num_rows for p in picks], dtype=torch.int64)
    num_dst = min(num_dst, num_rows)
    generator = torch.Generator().manual_seed(0)
    h, g_mixed, g_dst, returned = (
        torch.randn(count, width, generator=generator, dtype=dtype)
        for count in (num_rows, num_rows + 5, num_dst, len(picks))
    )
    own, leaving = torch.empty_like(h), torch.empty_like(returned)
    copy_and_gather(h, rows, own, leaving)
    assert torch.equal(own, h)
    assert torch.equal(leaving, h[rows])
    out, before = torch.empty_like(h), g_mixed.clone()
    cut = min(cut, len(picks))
    merge_gradient(g_mixed, g_dst, rows, (returned[:cut].clone(), returned[:0], returned[cut:].clone()), out)
    want = g_mixed[:num_rows].clone().index_add_(0, rows, returned)
    want[:num_dst] += g_dst
    assert torch.allclose(out, want, atol=1e-5 if single else 1e-12)
    assert torch.equal(g_mixed, before)


def test_a_row_wanted_by_three_peers_gets_all_three_back() -> None:
    out = torch.empty(2, 1, dtype=torch.float64)
    values = torch.tensor([[1.0], [10.0], [100.0], [1000.0]], dtype=torch.float64)
    merge_gradient(
        torch.zeros(3, 1).double(), torch.zeros(0, 1).double(), torch.tensor([0, 1, 0, 0]), values.split((2, 1, 1)), out
    )
    assert out.tolist() == [[1101.0], [10.0]]


def test_merging_is_compiled_once_for_any_number_of_pieces() -> None:
    compiled = cast(Any, rows_module._merge).signatures
    returned = torch.randn(12, 3)
    rows = torch.arange(12) % 5
    found = []
    for sizes in ((12,), (6, 6), (1, 0, 4, 2, 5), (1,) * 12):
        out = torch.empty(5, 3)
        merge_gradient(torch.zeros(5, 3), torch.zeros(0, 3), rows, returned.split(sizes), out)
        found.append((len(compiled), out.tolist()))
    assert found == [found[0]] * 4


@pytest.mark.parametrize(
    "piece", [torch.zeros(2, 4), torch.zeros(2, 3).double(), torch.zeros(3, 2).t(), torch.zeros(2, 3, device="meta")]
)
def test_pieces_of_another_form_never_reach_the_kernel(piece: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        merge_gradient(torch.zeros(2, 3), torch.zeros(0, 3), torch.arange(2), (piece,), torch.empty(2, 3))


@pytest.mark.parametrize("width", [0, 1, 33, 300])  # rows of 300 numbers are not prefetched
@pytest.mark.parametrize("count", [0, 3, 8, 50])
def test_rows_are_gathered_from_an_array_and_from_a_cache(width: int, count: int) -> None:
    array = np.arange(20 * width, dtype=np.uint32).reshape(20, width)
    positions = np.random.default_rng(count).integers(-1, 21, count)  # -1 and 20 are not cached
    held = (positions >= 0) & (positions < 20)
    rows = positions[held]
    places = np.flatnonzero(held)
    out, missed = np.zeros(count * width, np.uint32), np.empty(count, np.int64)
    num_missed = copy_cached(array, positions, np.empty(0, np.int64), out, width, missed)
    assert np.array_equal(missed[:num_missed], np.flatnonzero(~held))
    want = np.zeros((count, width), np.uint32)
    want[places] = array[rows]
    assert np.array_equal(out.reshape(count, width), want)
    placed = np.zeros(count * width, np.uint32)
    copy_rows(array, rows, places, placed, width)
    assert np.array_equal(placed, out)


def test_kernels_are_refused_without_the_assertions_that_check_their_arguments() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", "import gsplit.kernels"], capture_output=True, text=True)
    assert "InputError: python -O: expected assertions" in done.stderr
