"""Edges grouped by destination: what is counted in them, against every edge written out."""

import pytest
import torch

from gsplit.graph.blocks import Block, count_self_loops


@pytest.mark.parametrize("num_dst, num_src, degree", [(0, 0, 0), (1, 1, 3), (40, 60, 5), (50, 50, 0)])
def test_self_loops_are_counted_without_the_edges_written_out(
    num_dst: int, num_src: int, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over the sources: a loader counts them in every batch for a device."""
    drawn = torch.Generator().manual_seed(num_dst)
    counts = torch.randint(0, degree + 1, (num_dst,), generator=drawn)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    sources = torch.randint(0, max(1, num_src), (int(indptr[-1]),), generator=drawn)
    block = Block(indptr, sources, num_src)
    src, dst = block.edge_index()
    wanted = int((src == dst).sum())

    def refuse(block: Block) -> None:
        raise AssertionError("edges written out")

    monkeypatch.setattr(Block, "dst_rows", refuse)
    found = count_self_loops((block, block))
    assert [each.num_self_loops for each in found] == [wanted] * 2
