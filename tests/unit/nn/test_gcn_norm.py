"""GCN's normalisation on blocks is PyG's ``gcn_norm`` on the full graph, for every option, with and without weights."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import GCN, GCNConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gsplit.errors import InputError
from gsplit.graph.blocks import Block
from gsplit.graph.degrees import gcn_degrees
from gsplit.graph.graph import Graph
from gsplit.nn.checks.modules import check_modules
from gsplit.nn.layer_edges import GcnOptions, gcn_options, normalised_edges

Edges = list[tuple[int, int, float]]

EDGES: st.SearchStrategy[tuple[int, Edges]] = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1), st.sampled_from([0.0, 0.25, 1.0, 3.0])), max_size=25
        ),
    )
)
LOOPS: Edges = [(0, 0, 2.0), (1, 0, 1.0), (0, 0, 3.0), (0, 0, 0.25), (2, 1, 0.0), (2, 1, 0.0)]


def _tensors(edges: Edges) -> tuple[Tensor, Tensor]:
    edge_index = torch.tensor([[u for u, _, _ in edges], [v for _, v, _ in edges]], dtype=torch.int64)
    return edge_index, torch.tensor([w for _, _, w in edges], dtype=torch.float64)


def _graph(num_vertices: int, edges: Edges) -> tuple[Graph, np.ndarray[Any, Any]]:
    """In-edges by destination, then by source; duplicates in the order given, as a store has them."""
    ordered = sorted(edges, key=lambda edge: (edge[1], edge[0]))
    counts = np.bincount([v for _, v, _ in ordered], minlength=num_vertices)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    indices = np.array([u for u, _, _ in ordered], np.int64)
    return Graph(indptr, indices, num_vertices), np.array([w for _, _, w in ordered], np.float64)


def _as_list(edge_index: Tensor, weights: Tensor) -> list[tuple[int, int, float]]:
    rows = zip(*edge_index.tolist(), weights.tolist(), strict=True)
    return sorted((v, u, weight) for u, v, weight in rows)


@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("add_self_loops", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@given(case=EDGES)
@example(case=(4, LOOPS))
@example(case=(3, []))
def test_on_all_edges_it_is_pygs_gcn_norm(
    case: tuple[int, Edges], weighted: bool, add_self_loops: bool, improved: bool
) -> None:
    n, edges = case
    edge_index, edge_weight = _tensors(edges)
    want = gcn_norm(
        edge_index, edge_weight if weighted else None, n, improved, add_self_loops, "source_to_target", torch.float64
    )
    graph, weights = _graph(n, edges)
    fill_value = 2.0 if improved else 1.0
    degrees = gcn_degrees(graph, weights if weighted else None, add_self_loops=add_self_loops, fill_value=fill_value)
    block = Block(torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices), n)
    got_block, got = normalised_edges(
        block,
        torch.from_numpy(degrees.deg_inv_sqrt),
        torch.from_numpy(weights) if weighted else None,
        None if degrees.loop_weight is None else torch.from_numpy(degrees.loop_weight),
        add_self_loops=add_self_loops,
    )
    assert (got_block is block) == (not add_self_loops)
    wanted = _as_list(*want)
    found = _as_list(got_block.edge_index(), got)
    assert [edge[:2] for edge in found] == [edge[:2] for edge in wanted]
    np.testing.assert_allclose([edge[2] for edge in found], [edge[2] for edge in wanted], rtol=0, atol=1e-12)


@given(case=EDGES, cut=st.tuples(st.integers(0, 7), st.integers(0, 7)), weighted=st.booleans())
def test_a_range_of_vertices_has_the_degrees_of_the_whole_graph(
    case: tuple[int, Edges], cut: tuple[int, int], weighted: bool
) -> None:
    graph, weights = _graph(*case)
    first, stop = sorted(min(place, graph.num_vertices) for place in cut)
    given_weights = weights.astype(np.float32) if weighted else None  # 0.25, 1 and 3 are exact in any type
    whole = gcn_degrees(graph, given_weights, add_self_loops=True, fill_value=2.0)
    part = gcn_degrees(graph.restrict(first, stop), given_weights, add_self_loops=True, fill_value=2.0)
    np.testing.assert_array_equal(part.deg_inv_sqrt, whole.deg_inv_sqrt[first:stop])
    assert part.deg_inv_sqrt.dtype == np.float64
    assert (part.loop_weight is not None) == weighted
    if part.loop_weight is not None and whole.loop_weight is not None:
        np.testing.assert_array_equal(part.loop_weight, whole.loop_weight[first:stop])


def test_a_negative_degree_is_nan_as_in_pyg() -> None:
    graph, weights = _graph(2, [(0, 1, -2.0), (1, 0, 0.0)])
    degrees = gcn_degrees(graph, weights, add_self_loops=False, fill_value=1.0)
    np.testing.assert_array_equal(degrees.deg_inv_sqrt, [0.0, np.nan])
    _, weights_of_pyg = gcn_norm(torch.tensor([[0, 1], [1, 0]]), torch.tensor([-2.0, 0.0]), 2, add_self_loops=False)
    assert weights_of_pyg.isnan().all()


def test_the_last_edge_of_a_destination_is_its_self_loop() -> None:
    block = Block(torch.tensor([0, 3, 3]), torch.tensor([0, 2, 1]), num_src=3)
    looped, weights = normalised_edges(block, torch.tensor([1.0, 0.5, 0.25]))
    assert looped.edge_index().tolist() == [[2, 1, 0, 1], [0, 0, 0, 1]]
    assert weights.tolist() == [0.25, 0.5, 1.0, 0.25]


def test_weights_of_edges_come_with_weights_of_self_loops() -> None:
    block = Block(torch.tensor([0, 1]), torch.tensor([0]), num_src=1)
    with pytest.raises(AssertionError, match="come together"):
        normalised_edges(block, torch.ones(1), torch.ones(1))


def test_a_graph_takes_one_weight_per_edge() -> None:
    graph, _ = _graph(3, LOOPS)
    with pytest.raises(AssertionError, match="one weight per edge"):
        gcn_degrees(graph, np.ones(2), add_self_loops=True, fill_value=1.0)


@pytest.mark.parametrize(
    "layer, options",
    [
        (GCNConv(2, 2), GcnOptions(True, 1.0)),
        (GCNConv(2, 2, improved=True), GcnOptions(True, 2.0)),
        (GCNConv(2, 2, add_self_loops=False), GcnOptions(False, 1.0)),
        (GCNConv(2, 2, normalize=False), None),
        (SAGEConv(2, 2), None),
    ],
    ids=["default", "improved", "no loops", "not normalised", "sage"],
)
def test_a_layer_says_how_it_normalises(layer: torch.nn.Module, options: GcnOptions | None) -> None:
    assert gcn_options(layer) == options
    check_modules(layer)


def test_cached_edges_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"convs.0 \(GCNConv\): .*cached=True, which keeps the edges of its first call"
    ):
        check_modules(GCN(2, 2, 2, cached=True))
