"""Reads and bytes of a step, against the reader's own rule and against the pages themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsplit.features.disk import GAP_BYTES, READ_BYTES
from gsplit.graph.graph import Graph
from gsplit.partitioning.presample import Workload
from gsplit.planner.disk import PAGE_BYTES, DiskReads, count_reads, reads_of


@given(
    st.lists(st.integers(0, 400), unique=True, max_size=60).map(sorted), st.sampled_from([100, 512, 4096, 6000, 40_000])
)
def test_reads_and_pages_are_those_of_the_reader(rows: list[int], row_bytes: int) -> None:
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row - runs[-1][1] <= GAP_BYTES // row_bytes + 1:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    touched = {
        page
        for first, last in runs
        for page in range(first * row_bytes // PAGE_BYTES, ((last + 1) * row_bytes - 1) // PAGE_BYTES + 1)
    }
    found = reads_of(np.array(rows, np.int64), row_bytes)
    assert found.num_bytes == len(touched) * PAGE_BYTES
    assert len(runs) <= found.reads <= len(runs) + found.num_bytes / READ_BYTES + 1


def test_a_step_that_needs_every_row_reads_the_file_once() -> None:
    ring = Graph(np.arange(1001), (np.arange(1000) + 1) % 1000, 1000)
    workload = Workload(ring, np.empty(0, np.int64), np.arange(1000), [1], 1000)
    assert count_reads(workload, [512], steps=1) == DiskReads(2.0, 1000 * 512)


@pytest.mark.parametrize("row_bytes", [0, 512])
def test_nothing_is_read_for_no_rows(row_bytes: int) -> None:
    assert reads_of(np.empty(0, np.int64), row_bytes) == DiskReads(0.0, 0.0)
