"""Which foreign rows are copied: the hottest of the graph, within the budget of every rank, known to all alike."""

from itertools import pairwise
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsplit.distributed.comm.comm import SoloComm
from gsplit.features.copies import CopiedPrefixes, ForeignCopies, choose_prefixes
from gsplit.graph.ownership import Ownership


@st.composite
def parts_and_ranges(draw: st.DrawFn) -> tuple[list[int], Any, Ownership]:
    """Part boundaries, hotness that falls inside every part, and ranges that may cut parts or be empty."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    boundaries = [0, *np.cumsum(sizes).tolist()]
    n = boundaries[-1]
    counts = draw(st.lists(st.integers(0, draw(st.sampled_from([2, 50, 2**32 - 1]))), min_size=n, max_size=n))
    hotness = np.array(counts, np.int64)
    for low, high in pairwise(boundaries):
        hotness[low:high] = -np.sort(-hotness[low:high])
    cuts = sorted(draw(st.lists(st.one_of(st.sampled_from(boundaries), st.integers(0, n)), max_size=4)))
    return boundaries, hotness, Ownership((0, *cuts, n))


def _choose(boundaries: list[int], hotness: Any, ownership: Ownership, rows: int) -> CopiedPrefixes:
    return choose_prefixes(hotness, 0, boundaries, ownership, rows, SoloComm())


@given(parts_and_ranges(), st.integers(0, 80))
def test_copied_rows_are_the_hottest_and_fit_on_every_rank(case: tuple[list[int], Any, Ownership], rows: int) -> None:
    boundaries, hotness, ownership = case
    ids = torch.arange(hotness.size)
    copied = _choose(boundaries, hotness, ownership, rows).hold(ids).numpy()
    owners = ownership.owners(ids).numpy()
    held = [int((copied & (owners != rank)).sum()) for rank in range(ownership.num_ranks)]
    assert max(held) <= rows
    if copied.any() and not copied.all():
        coldest, hottest_left = int(hotness[copied].min()), int(hotness[~copied].max())
        assert coldest >= hottest_left
        left = (~copied) & (hotness == hottest_left)  # one more of the next rows from every run would not have fitted
        runs = np.searchsorted(sorted({*boundaries, *ownership.boundaries}), ids.numpy(), side="right")
        more = copied.copy()
        for run in set(runs[left].tolist()):
            more[np.flatnonzero(left & (runs == run))[0]] = True
        assert any(int((more & (owners != rank)).sum()) > rows for rank in range(ownership.num_ranks))


@given(parts_and_ranges(), st.integers(0, 80))
def test_prefixes_say_who_holds_what(case: tuple[list[int], Any, Ownership], rows: int) -> None:
    boundaries, hotness, ownership = case
    prefixes = _choose(boundaries, hotness, ownership, rows)
    ids, every = torch.arange(hotness.size), torch.arange(hotness.size, dtype=torch.float64)
    copied, owners = prefixes.hold(ids), ownership.owners(ids)
    for rank in range(ownership.num_ranks):
        held = ids[copied & (owners != rank)]
        assert prefixes.num_held(ownership, rank) == held.numel()
        own = [vertex for run in prefixes.of_rank(ownership, rank) for vertex in run]
        assert own == ids[copied & (owners == rank)].tolist()
        copies = ForeignCopies(prefixes, ownership, rank, every[held].unsqueeze(1))
        wanted = held[torch.randperm(held.numel(), generator=torch.Generator().manual_seed(rank))]
        assert copies.rows[copies.places_of(wanted)].flatten().tolist() == wanted.tolist()
        assert copies.num_bytes == 8 * held.numel()


class _Ranks:
    """All-reduce between threads."""

    def __init__(self, size: int) -> None:
        self.barrier, self.tensors = Barrier(size), [torch.empty(0)] * size

    def reduce(self, rank: int, tensor: torch.Tensor) -> None:
        self.tensors[rank] = tensor.clone()
        self.barrier.wait(300)
        tensor.copy_(torch.stack(self.tensors).sum(0))
        self.barrier.wait(300)


class _ThreadComm(SoloComm):
    def __init__(self, ranks: _Ranks, rank: int) -> None:
        super().__init__()
        self.rank, self._ranks = rank, ranks

    def all_reduce(self, call: Any, tensor: Any) -> Any:
        self._ranks.reduce(self.rank, tensor)
        return super().all_reduce(call, tensor)


@pytest.mark.parametrize("rows", [0, 3, 7, 20, 40])
def test_ranks_that_know_their_own_hotness_alone_choose_the_same(rows: int) -> None:
    boundaries, ownership = [0, 10, 18, 40], Ownership((0, 10, 25, 25, 40))
    hotness = np.concatenate([np.arange(20, 0, -2), np.full(8, 5), np.repeat([9, 4, 0], [2, 10, 10])])
    found: dict[int, CopiedPrefixes] = {}
    ranks = _Ranks(4)

    def run(rank: int) -> None:
        low, high = ownership.range_of(rank)
        comm = _ThreadComm(ranks, rank)
        found[rank] = choose_prefixes(hotness[low:high], low, boundaries, ownership, rows, comm)

    threads = [Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    want = _choose(boundaries, hotness, ownership, rows)
    assert [found[rank] for rank in range(4)] == [want] * 4


def test_one_rank_has_nothing_to_copy() -> None:
    prefixes = _choose([0, 3], np.array([3, 2, 1]), Ownership((0, 3)), 0)
    assert prefixes.num_held(Ownership((0, 3)), 0) == 0


def test_ties_are_shared_between_the_runs() -> None:
    prefixes = _choose([0, 10, 20, 30], np.full(30, 7), Ownership((0, 10, 20, 30)), 8)
    assert prefixes.lengths == (4, 4, 4)
