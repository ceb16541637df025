"""Gather, dropout, spread and merge as compiled: every bit of the host's kernels, for odd shapes. Sums over edges."""

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from same_bits import assert_same_bits

from gsplit.kernels import rows as host_rows
from gsplit.kernels.sums import EdgeSums
from gsplit.kernels.triton import dropout, gather, rows, words
from gsplit.keys import scalar
from gsplit.nn.dropout import keyed_dropout

pytestmark = pytest.mark.usefixtures("compiled")
FEW = settings(max_examples=8)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
@FEW
def test_words_go_through_in_two_halves(numbers: list[int]) -> None:
    for number in numbers:
        high, low = words.word_halves(number)
        assert -(2**31) <= high < 2**31 and -(2**31) <= low < 2**31
        assert ((high << 32) | (low & 0xFFFFFFFF)) & scalar.MASK == number


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "num_rows, width, num_cached, stride",
    [(33, 24, 30, 40), (9, 1, 0, 1), (5, 150, 50, 150), (0, 4, 10, 4), (3, 0, 10, 0)],
)
def test_rows_come_from_the_cache_or_from_the_store(
    num_rows: int, width: int, num_cached: int, stride: int, dtype: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    stored = torch.randn(50, width, generator=generator).to(DTYPES[dtype])
    positions = torch.randint(0, 50, (num_rows,), generator=generator)
    positions[:2] = torch.tensor([min(num_cached, 49), max(num_cached - 1, 0)])[:num_rows]  # both sides of the border
    stored_cold = stored.clone()
    stored_cold[:num_cached] = 77  # a hot row must not come from here
    behind = torch.full((num_rows, stride), 5.0).to(DTYPES[dtype])
    gather.gather_rows(stored[:num_cached].clone(), stored_cold, positions, behind[:, :width])
    assert_same_bits(behind[:, :width], stored[positions])
    assert bool((behind[:, width:] == 5).all())


@pytest.mark.parametrize("num_rows, width, num_cached, stride", [(33, 24, 30, 40), (9, 1, 0, 1), (5, 150, 50, 150)])
def test_rows_of_int8_are_scaled_as_on_the_host(num_rows: int, width: int, num_cached: int, stride: int) -> None:
    rng = np.random.default_rng(1)
    stored = rng.integers(-128, 128, (50, width)).astype(np.int8)
    scales = (rng.normal(size=50) * np.geomspace(1e-30, 1e30, 50)).astype(np.float32)
    positions = rng.integers(0, 50, num_rows)
    wanted = torch.empty(num_rows, width)
    host_rows.copy_rows(stored, positions, host_rows.NO_PLACES, wanted.view(-1).numpy(), width, scales)
    cold = stored.copy()
    cold[:num_cached] = 77  # a hot row must not come from here
    behind = torch.full((num_rows, stride), 5.0)
    hot_rows, all_rows, rows_wanted = (torch.from_numpy(array) for array in (stored[:num_cached], cold, positions))
    gather.gather_rows(hot_rows, all_rows, rows_wanted, behind[:, :width], torch.from_numpy(scales))
    assert_same_bits(behind[:, :width], wanted)
    assert bool((behind[:, width:] == 5).all())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape, p", [((9, 65), 0.37), ((3, 1), 0.5), ((40, 2), 0.1), ((2, 130), 1.0), ((5, 3), 1e-12)])
def test_dropout_is_the_hosts_bit_for_bit(shape: tuple[int, int], p: float, dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if x.numel() > 4:
        x.view(-1)[:4] = torch.tensor([-0.0, float("inf"), float("nan"), 3.3e38])
    x = x.to(DTYPES[dtype])
    keys = torch.randint(-(2**63), 2**63 - 1, (shape[0],), generator=generator)
    want = keyed_dropout(x, keys, p)
    got = torch.full_like(want, 7.0)
    dropout.scale_kept(x, keys, int(p * 2**32), 1.0 / (1.0 - p) if p < 1 else 0.0, got)
    numbers = ~want.isnan()
    assert torch.equal(numbers, ~got.isnan())
    assert_same_bits(got[numbers], want[numbers])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "counts, width, weighted",
    [([3, 0, 17, 1], 5, False), ([2, 2], 300, True), ([], 4, False), ([0, 0], 1, True), ([40], 64, True)],
)
def test_sums_over_edges_are_those_of_a_dense_matrix(counts: list[int], width: int, weighted: bool, dtype: str) -> None:
    """Sums and their gradients, by the kernel and by torch's operations, against a dense matrix in float64."""
    generator = torch.Generator().manual_seed(1)
    num_src = len(counts) + 5
    indptr = torch.tensor([0, *np.cumsum(counts)])
    src_rows = torch.randint(0, num_src, (int(indptr[-1]),), generator=generator)
    weights = torch.rand(src_rows.numel(), generator=generator).double() if weighted else None
    x = torch.randn(num_src, width, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
    g = torch.randn(len(counts), width, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
    dense = torch.zeros(len(counts), num_src, dtype=torch.float64)
    dst_rows = torch.repeat_interleave(torch.arange(len(counts)), indptr.diff())
    summands = torch.ones(src_rows.numel()).double() if weights is None else weights
    dense.index_put_((dst_rows, src_rows), summands, accumulate=True)
    for kernel, mean in itertools.product(("triton", "torch"), (False, True)):
        matrix = dense / indptr.diff().clamp(min=1).unsqueeze(1) if mean else dense
        rows = x.clone().requires_grad_()
        with patch("gsplit.kernels.sums.kernel_for", return_value=kernel):
            out = EdgeSums(indptr, src_rows, num_src, weights)(rows, mean=mean)
            out.backward(g)
        assert rows.grad is not None and out.dtype == rows.grad.dtype == x.dtype
        for got, want in ((out, matrix @ x.double()), (rows.grad, matrix.t() @ g.double())):
            torch.testing.assert_close(got.double(), want, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    st.integers(0, 9),
    st.integers(0, 30),
    st.sampled_from([(1,), (5,), (2, 3), (130,), (0,)]),
    st.integers(0, 9),
    st.integers(0, 2**16),
)
@example(num_rows=6, num_sent=3, row_shape=(5,), num_dst=1, seed=0)
@FEW
def test_spread_and_merge_are_the_hosts_bit_for_bit(
    dtype: str, num_rows: int, num_sent: int, row_shape: tuple[int, ...], num_dst: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    send_rows = torch.randint(0, max(num_rows, 1), (num_sent if num_rows else 0,), generator=generator)
    h, g_mixed, g_dst, returned = (
        torch.randn(count, *row_shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
        for count in (num_rows, num_rows + 3, min(num_dst, num_rows), send_rows.numel())
    )
    g_mixed[..., :1] = -0.0  # a row to which nothing returns keeps its sign
    got = [torch.full_like(t, 7.0) for t in (h, returned, h)]
    want = [torch.full_like(t, 7.0) for t in (h, returned, h)]
    host_rows.copy_and_gather(h, send_rows, want[0], want[1])
    host_rows.merge_gradient(g_mixed, g_dst, send_rows, (returned,), want[2])
    rows.copy_and_gather(h, send_rows, got[0], got[1])
    rows.merge_gradient(g_mixed, g_dst, send_rows, returned, got[2])
    for one, two in zip(got, want, strict=True):
        assert_same_bits(one, two)
