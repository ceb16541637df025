"""The sampler on compiled kernels gives the host's layers index by index, holds its own edges, and refuses what the
host does."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from graphs import random_graph
from same_bits import assert_same_bits
from torch import Tensor

from gsplit.errors import InputError
from gsplit.graph.graph import Graph
from gsplit.kernels.triton.launch import set_launcher
from gsplit.keys import scalar
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.draws import Draw
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.neighbor_triton import TritonNeighborSampler, _place_edges

pytestmark = pytest.mark.usefixtures("compiled")
CPU = torch.device("cpu")
NOT_RENUMBERED = np.empty(0, np.int64)
CASES = {
    "renumbered range, edge ids": ((120, 900, 2.0), (20, 90), [4, 3, -1], True, True),
    "whole graph": ((60, 900, 1.5), (0, 60), [15, 2], False, False),
    "hubs, fanouts at powers of two": ((50, 1500, 3.0), (10, 31), [1, 33, 8], True, False),
    "more than registers hold": ((40, 2000, 3.0), (0, 30), [300], True, True),
    "no edges": ((30, 0, 1.0), (5, 25), [3, -1], False, True),
    "one vertex": ((30, 300, 1.0), (7, 8), [3, 2], False, True),
}


def compare_samplers(
    shape: tuple[int, int, float],
    owned: tuple[int, int],
    fanouts: list[int],
    renumbered: bool,
    edge_ids: bool,
    options: DrawOptions,
) -> int:
    """Two mini-batches layer by layer on both samplers, with rows that others ask for; returns the edges compared."""
    rng = np.random.default_rng(1)
    (first, stop), num_edges = owned, 0
    graph = random_graph(*shape, seed=1).restrict(first, stop)
    original = rng.permutation(shape[0])[first:stop] if renumbered else NOT_RENUMBERED
    weights = np.random.default_rng(1).exponential(1.0, graph.indices.size)
    draw = Draw(options, np.arange(shape[0])[::-1] if renumbered else np.arange(0), weights)
    host = HostNeighborSampler(graph, original, edge_ids=edge_ids, draw=draw)
    device = TritonNeighborSampler(graph, original, CPU, edge_ids=edge_ids, draw=draw)
    assert device.edges.indices.numel() == graph.num_edges
    for step in range(2):
        targets = torch.from_numpy(first + rng.permutation(stop - first)[: max(1, (stop - first) // 7)])
        one, two = host.start(targets.clone()), device.start(targets)
        for hop, fanout in enumerate(fanouts):
            key = scalar.mix(1, step, hop)
            a, b = one.sample_layer(key, fanout), two.sample_layer(key, fanout)
            num_edges += a.num_edges
            for name in ("indptr", "sources", "foreign_ids") + (("edge_ids",) if edge_ids else ()):
                assert_same_bits(getattr(b, name), getattr(a, name))
            asked = torch.from_numpy(first + rng.integers(0, stop - first, 9))
            assert_same_bits(two.locate(asked), one.locate(asked))
            placed = torch.arange(a.foreign_ids.numel()) + one.num_rows
            assert_same_bits(two.resolve(b, placed), one.resolve(a, placed).clone())
        assert_same_bits(two.ids(two.num_rows), one.ids(one.num_rows))
        one.close()
        two.close()
        assert bool((device.state == 2**31 - 1).all())
    return num_edges


@pytest.mark.parametrize("case", CASES)
def test_layers_are_the_hosts(case: str) -> None:
    assert (compare_samplers(*CASES[case], DrawOptions()) == 0) == (case == "no edges")


@pytest.mark.parametrize(
    "options", [{"sampler": "labor"}, {"weight_attr": "w"}, {"sampler": "labor", "weight_attr": "w"}, {"replace": True}]
)
def test_other_draws_are_the_hosts(options: dict[str, Any]) -> None:
    assert compare_samplers(*CASES["renumbered range, edge ids"], DrawOptions(**options)) > 0


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    graph = random_graph(60, 900, 1.5, seed=3)
    sampler = TritonNeighborSampler(graph, NOT_RENUMBERED, CPU)
    targets = torch.arange(5)
    frontier = sampler.start(targets)

    def fail(
        kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], writes: Sequence[Tensor]
    ) -> None:
        if kernel.__name__ == "place_kernel":
            raise RuntimeError("out of memory")
        before(kernel, grid, args, constants, writes)

    before = set_launcher(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            frontier.sample_layer(1, 4)
    finally:
        set_launcher(before)
    frontier.close()
    assert bool((sampler.state == 2**31 - 1).all())
    want = HostNeighborSampler(graph, NOT_RENUMBERED).start(targets.clone()).sample_layer(1, 4)
    assert_same_bits(sampler.start(targets).sample_layer(1, 4).sources, want.sources)


@pytest.mark.parametrize(
    "indptr, ids, message",
    [
        ([0, 5, 1], [1], "got offsets 0..5 at vertex 1, of 1 edges"),
        ([0, 1, 1], [4], "got ids 4..4, of 4 vertices"),
    ],
)
def test_a_damaged_graph_is_refused(indptr: list[int], ids: list[int], message: str) -> None:
    graph = Graph(np.array(indptr), np.array(ids), 4, first_vertex=1)
    with pytest.raises(ValueError, match=message):
        TritonNeighborSampler(graph, NOT_RENUMBERED, CPU)


def test_vertices_of_other_ranks_are_refused_and_the_sampler_can_be_used_again() -> None:
    sampler = TritonNeighborSampler(Graph(np.array([0, 1, 1]), np.array([1]), 4, first_vertex=1), NOT_RENUMBERED, CPU)
    frontier = sampler.start(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"expected vertices of this rank, 1..2 \(got 2..3\)"):
        frontier.locate(torch.tensor([2, 3]))
    assert sampler.start(torch.tensor([2])).ids(1).tolist() == [2]


def test_edges_that_neither_fit_nor_can_be_read_are_refused() -> None:
    def register(tensor: Tensor, device: torch.device) -> None:
        return None

    message = "sample_device: expected 8 bytes of meta for edges, or a driver that lets it read host memory"
    with (
        patch("gsplit.sampling.neighbor_triton.free_memory", lambda device: 0),
        patch("gsplit.sampling.neighbor_triton.register_memory", register),
        pytest.raises(InputError, match=message),
    ):
        _place_edges(np.array([1]), torch.device("meta"))
