"""Sampling draws what the definition says, on the host and in torch alike, and evenly."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from simulated import CPU, NONE, memory_store, one_process, shaped_graphs, simulate_split

from gsplit.errors import InputError, StoreError
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import own_equally
from gsplit.keys import scalar
from gsplit.sampling.minibatch import StepKey, epoch_positions
from gsplit.sampling.neighbor import HostNeighborSampler, TorchNeighborSampler, check_fanouts, make_sampler

FANOUTS = st.lists(st.one_of(st.just(-1), st.integers(1, 9), st.just(70)), min_size=1, max_size=4)


def defined_picks(key: int, degree: int, fanout: int) -> list[int]:
    """Floyd's method by the book, on Python integers."""
    if fanout < 0 or degree <= fanout:
        return list(range(degree))
    picks: list[int] = []
    for slot in range(fanout):
        last = degree - fanout + slot
        pick = scalar.bounded(scalar.mix(key, slot), last + 1)
        picks.append(last if pick in picks else pick)
    return picks


@given(shaped_graphs(), FANOUTS, st.integers(0, 2**63 - 1), st.data())
def test_blocks_are_what_the_definition_says(
    graph: tuple[int, Any, Any], fanouts: list[int], seed: int, data: Any
) -> None:
    n, src, dst = graph
    order = np.array(data.draw(st.permutations(range(n))), np.int64)
    store = memory_store(n, src, dst, order)
    targets = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=8)), dtype=torch.int64)
    key = StepKey(seed, 3, 5)
    batch = one_process(store, targets, fanouts, key)
    original = store.original_ids()
    frontier = targets.tolist()
    for hop, fanout in enumerate(fanouts):
        layer = len(fanouts) - 1 - hop
        block = batch.blocks[layer]
        found, rows = list(frontier), {v: i for i, v in enumerate(frontier)}
        want: list[int] = []
        for v in frontier:
            sources = np.sort(src[dst == original[v]])  # by original id, whatever the numbering
            for pick in defined_picks(scalar.mix(key.layer(layer), int(original[v])), sources.size, fanout):
                u = int(np.flatnonzero(original == sources[pick])[0])
                if u not in rows:
                    rows[u] = len(found)
                    found.append(u)
                want.append(rows[u])
        assert block.num_dst == len(frontier)
        assert block.src_rows.tolist() == want
        assert block.num_src == len(found)
        frontier = found
    assert batch.input_ids.tolist() == frontier


@given(shaped_graphs(), FANOUTS, st.integers(0, 2**63 - 1), st.integers(1, 7), st.data())
def test_host_and_torch_give_equal_layers(
    graph: tuple[int, Any, Any], fanouts: list[int], seed: int, num_ranks: int, data: Any
) -> None:
    n, src, dst = graph
    store = memory_store(n, src, dst, np.array(data.draw(st.permutations(range(n))), np.int64))
    targets = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=8)), dtype=torch.int64)
    arguments = (store, targets, fanouts, StepKey(seed, 0, 1), own_equally(n, num_ranks))
    for host, device in zip(
        simulate_split(*arguments, use_torch=False), simulate_split(*arguments, use_torch=True), strict=True
    ):
        assert torch.equal(host.input_ids, device.input_ids)
        for one, two in zip(host.layers, device.layers, strict=True):
            assert torch.equal(one.block.indptr, two.block.indptr)
            assert torch.equal(one.block.src_rows, two.block.src_rows)
            assert torch.equal(one.route.send_rows, two.route.send_rows)
            assert one.route.send_counts == two.route.send_counts
            assert one.route.recv_counts == two.route.recv_counts


@given(shaped_graphs(), FANOUTS, st.integers(0, 2**63 - 1), st.data())
def test_renumbering_changes_nothing_in_original_ids(
    graph: tuple[int, Any, Any], fanouts: list[int], seed: int, data: Any
) -> None:
    n, src, dst = graph
    targets = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=8)), np.int64)
    seen = []
    for order in (np.arange(n), np.array(data.draw(st.permutations(range(n))), np.int64)):
        store = memory_store(n, src, dst, order)
        original = torch.from_numpy(store.original_ids())
        internal = np.argsort(store.original_ids())
        batch = one_process(store, torch.from_numpy(internal[targets]), fanouts, StepKey(seed, 0, 0))
        ids = original[batch.input_ids]
        seen.append([(ids[b.src_rows].tolist(), b.indptr.tolist()) for b in batch.blocks] + [ids.tolist()])
    assert seen[0] == seen[1]


def _draws(degree: int, fanout: int, count: int, num_vertices: int, *, use_torch: bool = False) -> np.ndarray:
    """Picks of vertices with the same ``degree`` in-neighbours, in as many steps as ``count`` of them take."""
    stop = num_vertices * degree
    indptr = np.concatenate([np.arange(0, stop, degree), np.full(degree + 1, stop)])
    neighbours = np.tile(np.arange(num_vertices, num_vertices + degree, dtype=np.int32), num_vertices)
    graph = Graph(indptr, neighbours, num_vertices + degree)
    sampler = TorchNeighborSampler(graph, NONE, CPU) if use_torch else HostNeighborSampler(graph, NONE)
    out = np.empty((count // num_vertices, num_vertices * fanout), np.int64)
    for step, row in enumerate(out):
        frontier = sampler.start(torch.arange(num_vertices))
        drawn = frontier.sample_layer(StepKey(1, 0, step).layer(0), fanout)
        row[:] = frontier.ids(frontier.num_rows)[drawn.sources].numpy() - num_vertices
        frontier.close()
    return out.reshape(count, fanout)


def _uniform(counts: np.ndarray, expected: float, variance_share: float = 1.0, lost: int = 1) -> None:
    statistic = float(((counts - expected) ** 2 / (expected * variance_share)).sum())
    assert 1e-4 < chi2.sf(statistic, counts.size - lost) < 1 - 1e-4


@pytest.mark.parametrize("degree, fanout", [(6, 2), (6, 3), (70, 2), (100, 15)])
def test_inclusion_and_pairs_match_theory(degree: int, fanout: int) -> None:
    count = 40_000
    draws = _draws(degree, fanout, count, 200)
    assert all(len(set(row)) == fanout for row in draws[:1000])
    included = np.bincount(draws.reshape(-1), minlength=degree)
    share = fanout / degree  # each vertex is in a sample with this probability; inclusions are negatively correlated
    _uniform(included, count * share, (1 - share) * degree / (degree - 1))
    pairs = np.zeros((degree, degree), np.int64)
    for a, b in combinations(range(fanout), 2):
        np.add.at(pairs, (np.minimum(draws[:, a], draws[:, b]), np.maximum(draws[:, a], draws[:, b])), 1)
    expected = count * fanout * (fanout - 1) / (degree * (degree - 1))
    found = pairs[np.triu_indices(degree, 1)]
    if fanout == 2:  # pairs of one sample are then a multinomial
        _uniform(found, expected)
    else:
        assert found.mean() == pytest.approx(expected)
        assert abs(found - expected).max() < 6 * np.sqrt(expected)


def test_every_subset_is_equally_likely() -> None:
    subsets = {frozenset(c): i for i, c in enumerate(combinations(range(7), 3))}
    draws = _draws(7, 3, 35_000, 100)
    _uniform(np.bincount([subsets[frozenset(row)] for row in draws.tolist()], minlength=35), 1000)


@pytest.mark.parametrize("use_torch", [False, True])
def test_a_vertex_with_a_million_neighbours(use_torch: bool) -> None:
    draws = _draws(1_000_000, 15, 300, 1, use_torch=use_torch)
    assert all(len(set(row)) == 15 for row in draws)
    _uniform(np.bincount(draws.reshape(-1) // 50_000, minlength=20), draws.size / 20)


def test_neighbouring_vertices_steps_and_layers_draw_independently() -> None:
    degree, fanout = 32, 1
    n = 2000
    indptr = np.arange(0, n * degree + 1, degree)
    graph = Graph(
        np.concatenate([indptr, np.full(degree, n * degree)]), np.tile(np.arange(n, n + degree), n), n + degree
    )
    sampler = HostNeighborSampler(graph, NONE)

    def picks(key: StepKey, layer: int) -> np.ndarray:
        frontier = sampler.start(torch.arange(n))
        drawn = frontier.sample_layer(key.layer(layer), fanout)
        out: np.ndarray = frontier.ids(frontier.num_rows)[drawn.sources].numpy() - n
        frontier.close()
        return out

    first = picks(StepKey(0, 0, 0), 0)
    others = [
        first[1:],
        *(
            picks(k, level)
            for k, level in ((StepKey(0, 0, 1), 0), (StepKey(0, 1, 0), 0), (StepKey(1, 0, 0), 0), (StepKey(0, 0, 0), 1))
        ),
    ]
    for other in others:
        table = np.bincount(first[: other.size] // 4 * 8 + other // 4, minlength=64)
        _uniform(table, other.size / 64)


@pytest.mark.parametrize("num_targets, batch_size", [(1, 1), (10, 3), (1000, 64), (997, 1000)])
def test_an_epoch_is_a_permutation_and_epochs_differ(num_targets: int, batch_size: int) -> None:
    epochs = [epoch_positions(np.arange(num_targets), num_targets, 5, e, shuffle=True) for e in range(3)]
    for positions in epochs:
        assert np.array_equal(np.sort(positions), np.arange(num_targets))
    if num_targets >= 10:
        assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(epoch_positions(np.arange(5), 5, 1, 1, shuffle=False), np.arange(5))


def test_a_damaged_graph_is_a_message_not_a_stray_read() -> None:
    good = [0, 2, 3, 3]
    for indptr, indices, got in (
        ([0, 2**62, 3, 3], [1, 2, 0], f"offsets 0..{2**62} at vertex 0, of 3 edges"),
        ([0, -5, 3, 3], [1, 2, 0], "offsets 0..-5 at vertex 0, of 3 edges"),
        ([0, 2, 1, 3], [1, 2, 0], "offsets 2..1 at vertex 1, of 3 edges"),
        (good, [1, 99, 0], "ids 0..99, of 3 vertices"),
        (good, [1, -1, 0], "ids -1..1, of 3 vertices"),
    ):
        frontier = HostNeighborSampler(Graph(np.array(indptr), np.array(indices), 3), NONE).start(torch.tensor([0, 1]))
        with pytest.raises(StoreError, match=f".got {got}.*gsplit inspect --verify"):
            frontier.sample_layer(1, 2)
    huge = Graph(np.array([0, 2**33]), np.broadcast_to(np.zeros(1, np.int32), 2**33), 1)
    with pytest.raises(StoreError, match=r"fewer than 2\*\*32 in-edges per vertex .got 8589934592 at vertex 0"):
        HostNeighborSampler(huge, NONE).start(torch.tensor([0])).sample_layer(1, 2)


def test_sampler_recovers_after_an_error_and_refuses_foreign_targets() -> None:
    graph = Graph(np.array([0, 1, 1]), np.array([1]), 4, first_vertex=1)
    sampler = HostNeighborSampler(graph, NONE)
    sampler.start(torch.tensor([1, 2]))  # never closed
    frontier = sampler.start(torch.tensor([2]))
    assert frontier.ids(frontier.num_rows).tolist() == [2]
    with pytest.raises(InputError, match=r"expected vertices of this rank, 1..2 .got 3..3"):
        frontier.locate(torch.tensor([3]))
    assert isinstance(make_sampler(graph, NONE, CPU), HostNeighborSampler)


def test_the_torch_sampler_holds_its_own_edges_and_names_them_by_their_place_in_the_graph() -> None:
    n = 40
    rng = np.random.default_rng(0)
    store = memory_store(n, rng.integers(0, n, 1000), rng.integers(0, n, 1000))
    held = 0
    for first, stop in ((0, 10), (10, 25), (25, 25), (25, 40)):
        part = store.graph.restrict(first, stop)
        samplers = HostNeighborSampler(part, NONE, edge_ids=True), TorchNeighborSampler(part, NONE, CPU, edge_ids=True)
        assert samplers[1].indices.numel() == part.num_edges
        held += samplers[1].indices.numel()
        layers = [s.start(torch.arange(first, stop)).sample_layer(5, 4) for s in samplers]
        assert layers[0].edge_ids is not None and layers[1].edge_ids is not None
        assert torch.equal(layers[0].edge_ids, layers[1].edge_ids)
        assert torch.equal(layers[0].sources, layers[1].sources)
    assert held == store.graph.num_edges == 1000


def test_the_torch_sampler_refuses_what_the_host_refuses() -> None:
    sampler = TorchNeighborSampler(Graph(np.array([0, 1, 1]), np.array([1]), 4, first_vertex=1), NONE, CPU)
    with pytest.raises(InputError, match=r"expected vertices of this rank, 1..2 .got 0..1"):
        sampler.start(torch.tensor([1, 0]))
    with pytest.raises(InputError, match=r"expected vertices of this rank, 1..2 .got 3..3"):
        sampler.start(torch.tensor([1])).locate(torch.tensor([3]))
    for indptr, indices, got in (([0, 5, 1], [1], "offsets 0..5 at vertex 1"), ([0, 1, 1], [4], "ids 4..4, of 4")):
        with pytest.raises(StoreError, match=f".got {got}.*gsplit inspect --verify"):
            TorchNeighborSampler(Graph(np.array(indptr), np.array(indices), 4, first_vertex=1), NONE, CPU)
    huge = Graph(np.array([0, 2**33]), np.broadcast_to(np.zeros(1, np.int32), 2**33), 1)
    with pytest.raises(StoreError, match=r"fewer than 2\*\*32 in-edges per vertex .got 8589934592 at vertex 0"):
        TorchNeighborSampler(huge, NONE, CPU)


@pytest.mark.parametrize("fanouts", [[], [0], [-2], [3, 0], [1 << 17], [1.5]])
def test_fanouts_that_cannot_be_drawn_are_refused(fanouts: list[Any]) -> None:
    with pytest.raises(InputError, match="num_neighbors: expected"):
        check_fanouts(fanouts)
