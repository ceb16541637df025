"""Samplers of the program's own: a draw makes a whole sampler, and a wrong draw is refused before it is used."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from extending_programs import DictSampler, keyed_sampler

from gsplit.errors import InputError, StoreError
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.split import split_in_one_process
from gsplit.sampling.drawn import DrawnSampler
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.protocol import SampledRange

ALL = 20  # a key by which the coins of ``keyed_sampler`` draw every edge of PART
NONE, CPU, KEY = np.empty(0, np.int64), torch.device("cpu"), StepKey(3, 0, 1)
# in-edges of the vertices 2..4 of six; 0, 1 and 5 are another rank's
PART = SampledRange(
    Graph(np.array([4, 6, 7, 9]), np.array([9, 9, 9, 9, 3, 0, 5, 2, 0]), 6, 2), NONE, CPU, edge_ids=True
)


def _random_graph(num_vertices: int = 60) -> Graph:
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 12, num_vertices)
    indptr = np.concatenate([[0], degrees.cumsum()])
    return Graph(indptr, rng.integers(0, num_vertices, int(indptr[-1])), num_vertices)


def test_a_draw_makes_the_layers_of_a_whole_sampler() -> None:
    part, targets = SampledRange(_random_graph(), np.arange(60)[::-1].copy(), CPU, True), torch.tensor([7, 3, 50])
    one, two = (sample_minibatch(make(part), targets, [4, -1], KEY) for make in (keyed_sampler, DictSampler))
    assert torch.equal(one.input_ids, two.input_ids)
    for ours, theirs in zip(one.blocks, two.blocks, strict=True):
        assert torch.equal(ours.indptr, theirs.indptr) and torch.equal(ours.src_rows, theirs.src_rows)
        assert ours.edge_ids is not None and theirs.edge_ids is not None and torch.equal(ours.edge_ids, theirs.edge_ids)
    assert one.blocks[0].num_edges > one.blocks[1].num_edges > 0


def test_a_draw_serves_several_ranks() -> None:
    """Three ranks in one process: foreign vertices are asked for, found and put in place."""
    graph, ownership = _random_graph(), Ownership((0, 11, 11, 60))
    parts = [SampledRange(graph.restrict(*ownership.range_of(rank)), NONE, CPU, True) for rank in range(3)]
    targets = torch.tensor([40, 2, 11, 9])
    oracle = split_in_one_process([DictSampler(part) for part in parts], targets, [3, 3], KEY, ownership)
    drawn = split_in_one_process([keyed_sampler(part) for part in parts], targets, [3, 3], KEY, ownership)
    assert sum(layer.foreign_ids.numel() for found in drawn for layer in found.layers) > 5
    for ours, theirs in zip(drawn, oracle, strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids)
        for one, two in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(one.block.src_rows, two.block.src_rows)
            assert torch.equal(one.foreign_ids, two.foreign_ids)
            assert one.block.edge_ids is not None and two.block.edge_ids is not None
            assert torch.equal(one.block.edge_ids, two.block.edge_ids)


def test_vertices_of_other_ranks_are_refused() -> None:
    sampler = keyed_sampler(PART)
    with pytest.raises(InputError, match="ids: expected vertices of this rank, 2..4 .got 4..5"):
        sampler.start(torch.tensor([4, 5]))
    with pytest.raises(InputError, match="vertices of this rank, 2..4 .got 0..0"):
        sampler.start(torch.tensor([4])).locate(torch.tensor([0]))


def test_a_damaged_source_is_refused() -> None:
    graph = Graph(np.array([0, 1]), np.array([7]), num_vertices=1)
    sampler = DrawnSampler(SampledRange(graph, NONE, CPU), lambda ids, key, fanout: (torch.tensor([1]), ids))
    with pytest.raises(StoreError, match="offsets and ids in range .got ids 7..7, of 1 vertices"):
        sampler.start(torch.tensor([0])).sample_layer(0, 1)


def test_edges_are_returned_only_where_they_are_wanted() -> None:
    frontier = keyed_sampler(replace(PART, edge_ids=False)).start(torch.tensor([4, 2, 3]))
    assert frontier.sample_layer(ALL, -1).edge_ids is None


@pytest.mark.parametrize("drawn", [None, 3, (torch.tensor([1, 1]),), ([1, 1], [7, 4])])
def test_a_draw_that_is_not_a_pair_of_tensors_is_refused(drawn: Any) -> None:
    frontier = DrawnSampler(PART, lambda ids, key, fanout: drawn).start(torch.tensor([4, 2]))
    with pytest.raises(InputError, match="draw: expected 2 counts and a row of edges, both int64 on cpu"):
        frontier.sample_layer(0, 2)


@pytest.mark.parametrize(
    "drawn, message",
    [
        (([1.0, 1.0], [7, 4]), "2 counts and a row of edges, both int64 on cpu .got torch.float32"),
        (([1], [7]), "2 counts and a row of edges"),
        (
            ([1, 2], [7, 4]),
            "as many edges as the sum of the counts, none below 0 .got 2 edges .* sum to 3",
        ),
        (([3, -1], [7, 4]), "none below 0"),
        (([1, 1], [4, 7]), r"edges of vertex 4 in 7..8 .got 4"),
        (([1, 1], [9, 4]), r"edges of vertex 4 in 7..8 .got 9"),
    ],
)
def test_a_wrong_draw_is_refused(drawn: tuple[list[int], list[int]], message: str) -> None:
    counts, edges = map(torch.tensor, drawn)
    frontier = DrawnSampler(PART, lambda ids, key, fanout: (counts, edges)).start(torch.tensor([4, 2]))
    with pytest.raises(InputError, match=message):
        frontier.sample_layer(0, 2)
