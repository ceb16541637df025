"""Gather, dropout, spread and merge: every bit of the host's kernels, for odd shapes, in any order. Sums over edges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_process import Run

FEW = settings(max_examples=8)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
@FEW
def test_words_go_through_in_two_halves(interpreter: Run, words: list[int]) -> None:
    interpreter("triton_programs.check_words", words)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "num_rows, width, num_cached, stride",
    [(33, 24, 30, 40), (9, 1, 0, 1), (5, 150, 50, 150), (0, 4, 10, 4), (3, 0, 10, 0)],
)
def test_rows_come_from_the_cache_or_from_the_store(
    interpreter: Run, num_rows: int, width: int, num_cached: int, stride: int, dtype: str
) -> None:
    interpreter("triton_programs.check_gather", num_rows, width, num_cached, stride, dtype, 1)


@pytest.mark.parametrize("num_rows, width, num_cached, stride", [(33, 24, 30, 40), (9, 1, 0, 1), (5, 150, 50, 150)])
def test_rows_of_int8_are_scaled_as_on_the_host(
    interpreter: Run, num_rows: int, width: int, num_cached: int, stride: int
) -> None:
    interpreter("triton_programs.check_scaled_gather", num_rows, width, num_cached, stride, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape, p", [((9, 65), 0.37), ((3, 1), 0.5), ((40, 2), 0.1), ((2, 130), 1.0), ((5, 3), 1e-12)])
def test_dropout_is_the_hosts_bit_for_bit(interpreter: Run, shape: tuple[int, int], p: float, dtype: str) -> None:
    interpreter("triton_programs.check_dropout", shape, p, dtype, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "counts, width, weighted",
    [([3, 0, 17, 1], 5, False), ([2, 2], 300, True), ([], 4, False), ([0, 0], 1, True), ([40], 64, True)],
)
def test_sums_over_edges_are_those_of_a_dense_matrix(
    interpreter: Run, counts: list[int], width: int, weighted: bool, dtype: str
) -> None:
    interpreter("triton_programs.check_sums", counts, width, dtype, weighted, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    st.integers(0, 9),
    st.integers(0, 30),
    st.sampled_from([(1,), (5,), (2, 3), (130,), (0,)]),
    st.integers(0, 9),
    st.integers(0, 2**16),
)
@FEW
def test_spread_and_merge_are_the_hosts_bit_for_bit(
    interpreter: Run, dtype: str, num_rows: int, num_sent: int, row_shape: tuple[int, ...], num_dst: int, seed: int
) -> None:
    interpreter("triton_programs.check_rows", num_rows, num_sent, row_shape, num_dst, dtype, seed)
