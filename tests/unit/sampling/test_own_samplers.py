"""Samplers of the program's own: a draw makes a whole sampler, and what one does wrong is said before it is used."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from extending_programs import DictSampler, keyed_sampler
from torch import Tensor

from gsplit.errors import InputError
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.split import split_in_one_process
from gsplit.sampling.checked import CheckedSampler
from gsplit.sampling.drawn import DrawnSampler
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import uniform_sampler
from gsplit.sampling.protocol import Frontier, SampledLayer, SampledRange

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


def test_checks_let_a_right_sampler_through_unchanged() -> None:
    """Three ranks in one process: foreign vertices are asked for, found and put in place."""
    graph, ownership = _random_graph(), Ownership((0, 11, 11, 60))
    parts = [SampledRange(graph.restrict(*ownership.range_of(rank)), NONE, CPU, True) for rank in range(3)]
    targets = torch.tensor([40, 2, 11, 9])
    plain = split_in_one_process([uniform_sampler(part) for part in parts], targets, [3, 3], KEY, ownership)
    checked = [CheckedSampler(uniform_sampler(part), part) for part in parts]
    for ours, theirs in zip(split_in_one_process(checked, targets, [3, 3], KEY, ownership), plain, strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids)
        for one, two in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(one.block.src_rows, two.block.src_rows)
            assert torch.equal(one.foreign_ids, two.foreign_ids)
            assert one.block.edge_ids is not None and two.block.edge_ids is not None
            assert torch.equal(one.block.edge_ids, two.block.edge_ids)
    assert checked[0].num_bytes > checked[0].num_range_bytes == 4 * 11


class _Mistaken(DictSampler):
    """A right sampler whose layers and frontiers are changed."""

    def __init__(self, layer: Callable[[SampledLayer], Any] = lambda drawn: drawn, **methods: Any) -> None:
        super().__init__(PART)
        self._layer, self._methods = layer, methods

    def start(self, targets: Tensor) -> Frontier:
        frontier: Any = super().start(targets)
        drawn = frontier.sample_layer
        frontier.sample_layer = lambda key, fanout: self._layer(drawn(key, fanout))
        for name, method in self._methods.items():
            setattr(frontier, name, method(frontier))
        return frontier  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda drawn: 3, "sample_layer to return a SampledLayer .got int"),
        (lambda drawn: replace(drawn, indptr=drawn.indptr[:-1]), "indptr of 3 rows"),
        (lambda drawn: replace(drawn, indptr=drawn.indptr.flip(0)), "indptr of 3 rows, rising from 0"),
        (lambda drawn: replace(drawn, indptr=drawn.indptr.int()), "indptr as one dimension of int64"),
        (lambda drawn: replace(drawn, sources=drawn.sources.tolist()), "sources as one dimension .*got list"),
        (lambda drawn: replace(drawn, sources=drawn.sources + 9), "sources in -2..2"),
        (lambda drawn: replace(drawn, sources=drawn.sources - 9), "sources in -2..2"),
        (lambda drawn: replace(drawn, foreign_ids=drawn.foreign_ids + 6), "foreign_ids in 0..5"),
        (lambda drawn: replace(drawn, foreign_ids=torch.full_like(drawn.foreign_ids, 4)), "vertices of this rank"),
        (lambda drawn: replace(drawn, edge_ids=None), "edge_ids of all edges drawn .got none.*edge_attr=None"),
        (lambda drawn: replace(drawn, edge_ids=drawn.edge_ids[1:]), r"edge_ids of all edges drawn .got \d of \d"),
        (lambda drawn: replace(drawn, edge_ids=drawn.edge_ids - 4), "edge_ids in 4..8"),
    ],
)
def test_a_wrong_layer_is_refused(change: Callable[[SampledLayer], Any], message: str) -> None:
    sampler = CheckedSampler(_Mistaken(change), PART)
    frontier = sampler.start(torch.tensor([4, 2, 3]))
    with pytest.raises(InputError, match=f"sampler: .*{message}"):
        frontier.sample_layer(ALL, -1)


def test_a_wrong_frontier_is_refused() -> None:
    targets = torch.tensor([4, 2])
    with pytest.raises(InputError, match="a function that returns a LayerSampler .got one that returns dict"):
        CheckedSampler({}, PART)  # type: ignore[arg-type]
    swapped = _Mistaken(ids=lambda found: lambda num_rows: torch.tensor([2, 4]))
    with pytest.raises(InputError, match="a frontier that starts with the targets, in their order"):
        CheckedSampler(swapped, PART).start(targets)
    foreign = _Mistaken(ids=lambda found: lambda num_rows: torch.tensor([4, 5]))
    with pytest.raises(InputError, match="ids of the frontier in 2..4 .got 4..5"):
        CheckedSampler(foreign, PART).start(targets)
    elsewhere = _Mistaken(locate=lambda found: lambda ids: torch.zeros_like(ids))
    with pytest.raises(InputError, match="locate to return the rows of the ids it was given"):
        CheckedSampler(elsewhere, PART).start(targets).locate(torch.tensor([2]))
    with pytest.raises(InputError, match="rows of locate in 0..1 .got 7..7"):
        CheckedSampler(_Mistaken(locate=lambda found: lambda ids: ids + 5), PART).start(targets).locate(targets[1:])
    moving = CheckedSampler(DictSampler(PART), PART).start(targets)
    moving._frontier._row_of = {2: 0, 4: 1}  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="rows that are only appended"):
        moving.locate(targets)


@pytest.mark.parametrize(
    "drawn, message",
    [
        (([1.0, 1.0], [7, 4]), "2 counts and a row of edges, both int64 .got torch.float32"),
        (([1], [7]), "2 counts and a row of edges"),
        (([1, 2], [7, 4]), "as many edges as the counts say, none below 0 .got 2 edges for counts that sum to 3"),
        (([3, -1], [7, 4]), "none below 0"),
        (([1, 1], [4, 7]), "an edge of another vertex"),
        (([1, 1], [9, 4]), "an edge of another vertex"),
    ],
)
def test_a_wrong_draw_is_refused(drawn: tuple[list[int], list[int]], message: str) -> None:
    counts, edges = map(torch.tensor, drawn)
    frontier = DrawnSampler(PART, lambda ids, key, fanout: (counts, edges)).start(torch.tensor([4, 2]))
    with pytest.raises(InputError, match=message):
        frontier.sample_layer(0, 2)
