"""However the vertices are owned, the splits are the one-process mini-batch, cut without overlap (laws 1, 3, 4)."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import cut_points, edges_in_ids, memory_store, mixed_ids, one_process, shaped_graphs, simulate_split

from gsplit.errors import InputError
from gsplit.graph.ownership import Ownership, own_equally, own_parts
from gsplit.minibatch.split import Split
from gsplit.sampling.minibatch import StepKey

FANOUTS = st.lists(st.one_of(st.just(-1), st.integers(1, 6)), min_size=1, max_size=4)


def assert_splits_are_the_minibatch(
    store: Any, targets: Any, fanouts: list[int], key: StepKey, ownership: Ownership
) -> None:
    whole = one_process(store, targets, fanouts, key)
    splits: list[Split] = simulate_split(store, targets, fanouts, key, ownership)
    for layer in range(len(fanouts)):
        block = whole.blocks[layer]
        want = edges_in_ids(block, whole.input_ids, whole.input_ids)
        got: list[tuple[int, int]] = []
        for split, mixed in zip(splits, mixed_ids(splits, layer), strict=True):
            part, route = split.layers[layer].block, split.layers[layer].route
            got += edges_in_ids(part, mixed, split.input_ids)
            assert part.num_src == route.num_mixed == mixed.numel()
            assert part.num_dst == route.num_dst <= route.num_local
            assert (
                part.src_rows.numel() == 0 or 0 <= int(part.src_rows.min()) <= int(part.src_rows.max()) < part.num_src
            )
            if layer + 1 < len(fanouts):  # law 4: destinations are the local frontier above
                assert part.num_dst == split.layers[layer + 1].route.num_local
            else:
                assert part.num_dst == split.num_targets
            assert mixed.unique().numel() == mixed.numel()
            assert torch.equal(split.layers[layer].foreign_ids, mixed[route.num_local :])
            for rows in route.send_rows.split(route.send_counts):
                assert rows.unique().numel() == rows.numel()
        assert sorted(got) == want
        frontier = torch.cat([s.input_ids[: s.layers[layer].route.num_local] for s in splits])
        assert sorted(frontier.tolist()) == sorted(whole.input_ids[: block.num_src].tolist())  # each once, on one rank
    for rank, split in enumerate(splits):
        first, stop = ownership.range_of(rank)
        assert ((split.input_ids >= first) & (split.input_ids < stop)).all()


@given(shaped_graphs(), FANOUTS, st.sampled_from([1, 2, 3, 4, 7]), st.data())
def test_union_of_splits_is_the_minibatch(
    graph: tuple[int, Any, Any], fanouts: list[int], num_ranks: int, data: Any
) -> None:
    n, src, dst = graph
    order = np.array(data.draw(st.permutations(range(n))), np.int64)
    targets = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=12)), dtype=torch.int64)
    ownership = data.draw(cut_points(n, num_ranks))
    key = StepKey(data.draw(st.integers(0, 2**63 - 1)), 1, 2)
    assert_splits_are_the_minibatch(memory_store(n, src, dst, order), targets, fanouts, key, ownership)


@pytest.mark.parametrize("num_ranks", [16, 64])
def test_union_of_splits_at_many_ranks(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    n = 3000
    src, dst = (n * rng.random(30_000) ** 2).astype(np.int64), (n * rng.random(30_000) ** 2).astype(np.int64)
    store = memory_store(n, src, dst, rng.permutation(n))
    targets = torch.from_numpy(rng.permutation(n)[:200])
    assert_splits_are_the_minibatch(store, targets, [10, 5, -1], StepKey(9, 0, 0), own_equally(n, num_ranks))


@pytest.mark.parametrize(
    "boundaries, message", [((0,), "ascending from 0"), ((1, 2), "ascending from 0"), ((0, 5, 3), "ascending from 0")]
)
def test_wrong_boundaries_are_refused(boundaries: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ownership(boundaries)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=20), st.integers(1, 20))
def test_runs_of_parts_give_every_rank_a_part(sizes: list[int], num_ranks: int) -> None:
    cuts = [0, *np.cumsum(sizes).tolist()]
    if num_ranks > len(sizes):
        with pytest.raises(InputError, match="at most one per part"):
            own_parts(cuts, num_ranks)
        return
    owned = own_parts(cuts, num_ranks)
    assert owned.num_ranks == num_ranks
    assert owned.num_vertices == cuts[-1]
    assert set(owned.boundaries) <= set(cuts)
    even = own_parts([0, *np.cumsum([7] * num_ranks * 3).tolist()], num_ranks)
    assert set(np.diff(even.boundaries)) == {21}
