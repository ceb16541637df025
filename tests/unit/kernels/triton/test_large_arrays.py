"""Positions beyond 2**31 elements: compiled kernels count in 64 bits. Pages of the arrays are made where touched."""

import pytest
import torch

from gsplit.device.devices import new_pages
from gsplit.kernels.triton.gather import gather_rows
from gsplit.kernels.triton.sampling import count_layer, draw_sources
from gsplit.kernels.triton.sums import sum_rows

pytestmark = pytest.mark.usefixtures("compiled")


def test_rows_are_gathered_and_added() -> None:
    """A table of 3.6e9 elements, 14 GB of addresses."""
    x = new_pages((28_000_000, 128), torch.float32, huge=False)
    positions = torch.tensor([0, 1, 16_777_215, 16_777_216, 16_777_217, 27_999_998, 27_999_999])
    for position in positions:
        x[position] = position + torch.arange(128) / 256
    out = torch.empty(7, 128)
    gather_rows(torch.empty(0, 128), x, positions, out)
    assert torch.equal(out, x[positions])
    sums = sum_rows(torch.tensor([0, 3, 7]), positions, None, x, torch.float32)
    torch.testing.assert_close(sums, torch.stack([x[positions[:3]].sum(0), x[positions[3:]].sum(0)]))


@pytest.mark.parametrize("fanout", [-1, 7])
def test_edges_are_drawn(fanout: int) -> None:
    """A rank with 2.3e9 edges, which are numbered from 5e9."""
    base, first_edge = 2_299_999_900, 5_000_000_000
    indices = new_pages((2_300_000_000,), torch.int32, huge=False)
    indices[base:] = torch.arange(100, dtype=torch.int32)
    indptr = torch.tensor([0, 2_147_483_600, base, base + 60, base + 100])
    frontier = torch.tensor([2, 3])
    drawn = count_layer(indptr, 0, frontier, fanout)
    sources, edge_ids = draw_sources(
        indptr,
        indices[:0],
        indices,
        0,
        torch.empty(0, dtype=torch.int64),
        key=(1 << 63) + 12345,
        frontier=frontier,
        fanout=fanout,
        out_indptr=drawn,
        most_edges=int(drawn[-1]),
        first_edge=first_edge,
    )
    assert drawn.tolist() == ([0, 60, 100] if fanout < 0 else [0, 7, 14])
    assert edge_ids is not None and bool((edge_ids >= first_edge + base).all())
    assert torch.equal(indices[edge_ids - first_edge].long(), sources)
