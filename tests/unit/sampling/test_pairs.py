"""Pairs, negatives and excluded edges are what their definitions say, whatever the batch size and the numbering."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from simulated import CPU, memory_store, shaped_graphs
from torch_geometric.sampler import NegativeSampling

from gsplit.errors import InputError
from gsplit.keys import scalar
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import HostNeighborSampler, TorchNeighborSampler
from gsplit.sampling.pairs import ListedPairs, Negatives, draw_vertices, parse_negatives

SEEDS = st.integers(0, 2**63 - 1)


def _list(num_pairs: int, num_vertices: int) -> ListedPairs:
    return ListedPairs.listed(np.random.default_rng(num_pairs).integers(0, num_vertices, (num_pairs, 2)))


@given(SEEDS, st.integers(0, 9), st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 2, 0.5, 1.5]))
def test_an_epoch_has_every_pair_once_and_negatives_by_definition(
    seed: int, epoch: int, num_pairs: int, batch_size: int, amount: float
) -> None:
    n = 50
    pairs = _list(num_pairs, n)
    seen: list[int] = []
    for step in range(-(-num_pairs // batch_size)):
        found = pairs.for_step(StepKey(seed, epoch, step), batch_size, Negatives("binary", amount), n)
        seen += found.positions.tolist()
        assert found.neg_dst.numel() == found.neg_src.numel() == math.ceil(amount * found.num_pairs)
        assert found.num_values == found.num_pairs + found.neg_dst.numel()
        for m in range(found.neg_dst.numel()):
            assert (int(found.neg_pair[m]), int(found.neg_slot[m])) == (m % found.num_pairs, m // found.num_pairs)
            position = int(found.positions[found.neg_pair[m]])
            word = scalar.mix(seed, 3, epoch, position)
            slot = int(found.neg_slot[m])
            assert int(found.neg_dst[m]) == scalar.bounded(scalar.mix(word, 2 * slot), n)
            assert int(found.neg_src[m]) == scalar.bounded(scalar.mix(word, 2 * slot + 1), n)
    assert sorted(seen) == list(range(num_pairs))


@given(SEEDS, st.integers(1, 30), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_triplets_do_not_depend_on_the_batch_size(seed: int, num_pairs: int, one: int, other: int, amount: int) -> None:
    def by_position(batch_size: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for step in range(-(-num_pairs // batch_size)):
            key = StepKey(seed, 2, step)
            pairs = _list(num_pairs, 99).for_step(key, batch_size, Negatives("triplet", amount), 99)
            for m, pair in enumerate(pairs.neg_pair.tolist()):
                found.setdefault(int(pairs.positions[pair]), []).append(int(pairs.neg_dst[m]))
        return found

    assert by_position(one) == by_position(other)


def test_joint_and_in_batch_negatives_are_of_the_step() -> None:
    pairs = _list(20, 1000)
    keys = [StepKey(1, 0, step) for step in range(2)]
    joint = [pairs.for_step(key, 8, Negatives("joint", 5), 1000) for key in keys]
    assert [found.neg_dst.numel() for found in joint] == [5, 5] and joint[0].num_values == 8
    assert not torch.equal(joint[0].neg_dst, joint[1].neg_dst)
    in_batch = pairs.for_step(keys[0], 8, Negatives("in_batch"), 1000)
    assert in_batch.neg_dst.numel() == 0 and in_batch.num_values == 8


def test_without_shuffling_pairs_come_in_the_order_of_the_list() -> None:
    pairs = _list(10, 9)
    assert pairs.for_step(StepKey(1, 4, 1), 4, None, 9, shuffle=False).positions.tolist() == [4, 5, 6, 7]
    assert pairs.for_step(StepKey(1, 4, 2), 4, None, 9).num_values == 2


def test_negatives_are_uniform() -> None:
    drawn = draw_vertices(7, torch.arange(70_000), torch.zeros(70_000, dtype=torch.int64), 7)
    counts = torch.bincount(drawn, minlength=7).double()
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 22.5  # chi-square, 6 degrees of freedom: 99.9 %


def test_negatives_are_uniform_over_billions_of_vertices() -> None:
    """Random words of 32 bits, times 3 * 2**30, would give some vertices twice as often as others."""
    num_draws = 300_000
    drawn = draw_vertices(5, torch.arange(num_draws), torch.zeros(num_draws, dtype=torch.int64), 3 << 30)
    assert int(drawn.min()) >= 0 and int(drawn.max()) < 3 << 30
    assert chisquare(torch.bincount(drawn % 3)).pvalue > 1e-4


def test_every_edge_of_a_graph_is_a_pair() -> None:
    graph = memory_store(4, np.array([3, 1, 0, 1]), np.array([0, 2, 2, 3])).graph
    src, dst = ListedPairs.edges_of(graph).read(np.arange(4))
    assert list(zip(src.tolist(), dst.tolist(), strict=True)) == [(3, 0), (0, 2), (1, 2), (1, 3)]


def test_negative_sampling_is_given_as_in_pyg() -> None:
    assert parse_negatives(None) is None
    assert parse_negatives("triplet") == Negatives("triplet", 1)
    assert parse_negatives({"mode": "binary", "amount": 0.5}) == Negatives("binary", 0.5)
    assert parse_negatives(NegativeSampling("triplet", 3)) == Negatives("triplet", 3)
    assert parse_negatives({"mode": "triplet", "amount": np.int64(2)}) == Negatives("triplet", 2)
    assert str(Negatives("binary", 2)) == "binary 2" and str(Negatives("in_batch")) == "in_batch"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hard", "neg_sampling: expected one of binary, triplet, joint, in_batch, with an amount .got hard"),
        ({"mode": "binary", "ratio": 2}, "neg_sampling: expected one of .*ratio"),
        ({"mode": "triplet", "amount": 0.5}, "expected 1 to 1048576, for triplet .got 0.5"),
        ({"mode": "binary", "amount": 0}, "expected a number up to 1048576, above 0 .got 0"),
        ({"mode": "binary", "amount": 1e15}, "a number up to 1048576, above 0 .got 1000000000000000.0"),
        ({"mode": "joint", "amount": "2"}, "1 to 1048576, for joint .got '2'"),
        (NegativeSampling("binary", dst_weight=torch.ones(3)), "dst_weight=None .got dst_weight of type Tensor"),
        ({"mode": "binary", "src_weight": 3}, "src_weight=None .got src_weight of type int"),
    ],
)
def test_other_negative_sampling_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_negatives(given)


def test_pairs_without_negatives_may_be_of_any_number_of_vertices() -> None:
    assert ListedPairs.listed(np.array([[0, 1]])).for_step(StepKey(0, 0, 0), 2, None, 1 << 33).num_pairs == 1


def test_excluding_the_edges_of_a_hub_takes_a_bisection_for_each() -> None:
    """By a search through all excluded edges of the hub it would be 4e10 comparisons: minutes."""
    n = 200_000
    graph = memory_store(n, np.arange(1, n), np.zeros(n - 1, np.int64)).graph
    sampler = HostNeighborSampler(graph, np.empty(0, np.int64))
    leaves = torch.arange(1, n, 2)
    sampler.excluded = ExcludedEdges.of(leaves, torch.zeros_like(leaves), reverse=True)
    drawn = sampler.start(torch.tensor([0])).sample_layer(1, -1)
    assert drawn.num_edges == n - 1 - leaves.numel()


def test_ids_outside_the_graph_are_refused() -> None:
    with pytest.raises(InputError, match=r"edge_label_index: expected 0..4 \(got 0..7\)"):
        ListedPairs.listed(np.array([[0, 1], [7, 2]])).for_step(StepKey(0, 0, 0), 2, None, 5)
    with pytest.raises(InputError, match="fewer than 4294967296 vertices"):
        draw_vertices(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1 << 32)


@given(shaped_graphs(), st.sampled_from([1, 3, -1]), SEEDS, st.booleans(), st.booleans(), st.data())
def test_excluded_edges_are_removed_from_the_draw_and_no_others(
    graph: tuple[int, Any, Any], fanout: int, seed: int, reverse: bool, edge_ids: bool, data: Any
) -> None:
    n, src, dst = graph
    store = memory_store(n, src, dst, np.array(data.draw(st.permutations(range(n))), np.int64))
    vertices = st.lists(st.integers(0, n - 1), max_size=6)
    some = torch.tensor(data.draw(vertices), dtype=torch.int64)
    ends = torch.tensor(data.draw(st.permutations(some.tolist())), dtype=torch.int64)
    if store.num_edges:  # edges that the graph has
        picks = np.array(data.draw(st.lists(st.integers(0, store.num_edges - 1), max_size=8)), np.int64)
        of_edges = np.repeat(np.arange(n), store.graph.in_degrees())
        some = torch.cat([some, torch.from_numpy(store.graph.indices[picks].astype(np.int64))])
        ends = torch.cat([ends, torch.from_numpy(of_edges[picks])])
    excluded = ExcludedEdges.of(some, ends, reverse=reverse)
    left_out = set(zip(some.tolist(), ends.tolist(), strict=True))
    left_out |= {(v, u) for u, v in left_out} if reverse else set()
    targets = torch.tensor(sorted({0, n - 1, n // 2}))
    first, stop = data.draw(st.sampled_from([(0, n), (0, n - n // 3), (n // 3, n)]))
    targets = targets[(targets >= first) & (targets < stop)]
    part = store.graph.restrict(first, stop)
    original = store.original_ids(first, stop)
    samplers: list[Any] = [
        HostNeighborSampler(part, original, edge_ids=edge_ids),
        TorchNeighborSampler(part, original, CPU, edge_ids=edge_ids),
    ]
    drawn: list[list[list[tuple[int, int]]]] = []
    for sampler in samplers:
        plain = _edges(sampler, targets, seed, fanout)
        sampler.excluded = excluded
        drawn.append(_edges(sampler, targets, seed, fanout))
        assert drawn[-1][0] == [edge for edge in plain[0] if edge not in left_out]
        assert not left_out & set(drawn[-1][1])
        sampler.excluded = None
        assert _edges(sampler, targets, seed, fanout) == plain
    assert drawn[0] == drawn[1]


def _edges(sampler: Any, targets: torch.Tensor, seed: int, fanout: int) -> list[list[tuple[int, int]]]:
    """The edges of two layers, as vertices."""
    frontier = sampler.start(targets)
    layers = []
    for layer in range(2):
        drawn = frontier.sample_layer(scalar.mix(seed, layer), fanout)
        ids = frontier.ids(frontier.num_rows).tolist()
        dst = np.repeat(np.arange(drawn.num_dst), np.diff(drawn.indptr.numpy()))
        sources = [ids[row] if row >= 0 else int(drawn.foreign_ids[-1 - row]) for row in drawn.sources.tolist()]
        layers.append([(u, ids[v]) for u, v in zip(sources, dst.tolist(), strict=True)])
        if drawn.edge_ids is not None:
            assert drawn.edge_ids.numel() == drawn.num_edges
    frontier.close()
    return layers
