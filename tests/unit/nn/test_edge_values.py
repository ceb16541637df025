"""Stored edge features and weights reach the layers: blocks with all neighbours give what plain PyG gives on the graph.

Graphs have duplicate edges with values of their own, and self-loops. Several ranks are in tests/exactness.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from small_graph import EDGE_MODELS, EDGE_WIDTH, VERTICES, WIDTH, Case, make_model, small_store
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GCNConv, GINEConv, GraphConv

import gsplit
from gsplit import InputError, NeighborLoader, infer, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.run.models import EDGE_WEIGHT_MODELS
from gsplit.store.in_memory import MemoryStore


def _full(store: MemoryStore) -> dict[str, Any]:
    """The store's graph in original numbering, as PyG takes it."""
    graph, original = store.graph, store.original_ids()
    dst = original[np.repeat(np.arange(graph.num_vertices), graph.in_degrees())]
    x = torch.empty(VERTICES, WIDTH, dtype=torch.float64)
    x[original] = torch.from_numpy(store.stored_array("features/x"))
    values = {name: torch.from_numpy(store.stored_array(f"edges/{name}")) for name in ("edge_attr", "edge_weight")}
    return {"x": x, "edge_index": torch.from_numpy(np.stack([original[graph.indices], dst])), **values}


def _name(kind: str) -> str:
    return "edge_weight" if kind in EDGE_WEIGHT_MODELS else "edge_attr"


@pytest.mark.parametrize("strategy", ["split", "data"])
@pytest.mark.parametrize("ownership", ["random", "original order"])
@pytest.mark.parametrize("kind", EDGE_MODELS)
def test_all_neighbours_give_the_full_graph_forward_and_gradients(kind: str, ownership: str, strategy: str) -> None:
    case = Case(kind, strategy, ownership, 0.0, None, None, edge_values=True)
    store, _ = small_store(ownership, 1)
    model, plain = parallelize(make_model(case), solo_mesh()), make_model(case)
    loader = NeighborLoader(store, [-1, -1, -1], None, batch_size=VERTICES, strategy=strategy, shuffle=False)
    batch = loader.make_batch(0, 0)
    out = model(batch.x, batch.edge_index, **{_name(kind): getattr(batch, _name(kind))})
    full = _full(store)
    want = plain(full["x"], full["edge_index"], **{_name(kind): full[_name(kind)]})
    assert torch.allclose(out, want[batch.n_id[:VERTICES]], rtol=0, atol=1e-10)
    batch.mean(out.square().sum(1)).backward()
    want.square().sum(1).mean().backward()
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and expected.grad is not None
        assert torch.allclose(got.grad, expected.grad, rtol=1e-9, atol=1e-9)
    without = make_model(case).eval()
    if kind in EDGE_WEIGHT_MODELS:  # the values matter
        assert not torch.allclose(without(full["x"], full["edge_index"]), want, atol=1e-3)


@pytest.mark.parametrize("kind", EDGE_MODELS)
def test_inference_uses_them_as_training_did(kind: str) -> None:
    case = Case(kind, "split", "random", 0.0, None, None, edge_values=True)
    store, _ = small_store("random", 1)
    model, plain = parallelize(make_model(case), solo_mesh()), make_model(case).eval()
    full = _full(store)
    want = plain(full["x"], full["edge_index"], **{_name(kind): full[_name(kind)]}).detach().numpy()
    assert np.abs(infer(model, store) - want).max() < 1e-10
    if kind in EDGE_WEIGHT_MODELS:  # trained without weights: inference leaves them out too
        batch = NeighborLoader(store, [2, 2, 2], "train", batch_size=8).make_batch(0, 0)
        model(batch.x, batch.edge_index)
        want = plain(full["x"], full["edge_index"]).detach().numpy()
        assert np.abs(infer(model, store) - want).max() < 1e-10


def test_a_data_object_brings_its_edge_values() -> None:
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 2, 3, 3, 1, 1], [1, 2, 0, 0, 1, 3, 1, 0]])  # duplicates and self-loops
    data = Data(x=torch.randn(4, 3), edge_index=edges, edge_weight=torch.rand(8) + 0.5, y=torch.arange(4))
    plain = GCN(3, 4, 2, 2).eval()
    model = parallelize(GCN(3, 4, 2, 2), solo_mesh())
    model.load_state_dict(plain.state_dict())
    model.eval()
    batch = NeighborLoader(data, [-1, -1], None, batch_size=4, partition=torch.tensor([1, 0, 1, 0])).make_batch(0, 0)
    assert batch.has_edge_weight and not batch.has_edge_attr
    got = model(batch.x, batch.edge_index, batch.edge_weight)
    want = plain(data.x, data.edge_index, data.edge_weight)
    assert torch.allclose(got, want[batch.n_id[:4]], atol=1e-6)
    assert not torch.allclose(want, plain(data.x, data.edge_index), atol=1e-3)
    with pytest.raises(
        InputError, match=r"batch.edge_attr: expected a graph with stored .*got a store that has edge_w"
    ):
        _ = batch.edge_attr


def test_an_edge_array_of_another_name_is_loaded_when_named(tmp_path: Any) -> None:
    data = Data(x=torch.randn(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]), capacity=torch.tensor([2.0, 3.0]))
    store = gsplit.from_pyg(data, tmp_path / "g.gsplit")
    assert not NeighborLoader(store, [1], None, batch_size=3).make_batch(0, 0).has_edge_weight
    batch = NeighborLoader(store, [1], None, batch_size=3, shuffle=False, edge_weight="capacity").make_batch(0, 0)
    assert batch.layers[0].edge_weight is not None and batch.layers[0].edge_weight.tolist() == [2.0, 3.0]
    with pytest.raises(InputError, match=r"edge_weight: expected the name of a stored per-edge array .got 'speed'"):
        NeighborLoader(store, [1], None, batch_size=3, edge_weight="speed")


def test_the_number_of_edge_features_can_be_said() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GINEConv(torch.nn.Identity())

        def forward(self, x: Any, edge_index: Any, edge_attr: Any) -> Any:
            return self.conv(x, edge_index, edge_attr)

    with pytest.raises(InputError, match="the model"):
        parallelize(Own(), solo_mesh(), num_features=EDGE_WIDTH)
    model = parallelize(Own(), solo_mesh(), num_features=EDGE_WIDTH, num_edge_features=EDGE_WIDTH)
    data = Data(
        x=torch.randn(5, EDGE_WIDTH),
        edge_index=torch.tensor([[0, 1, 4], [1, 2, 2]]),
        edge_attr=torch.randn(3, EDGE_WIDTH),
    )
    batch = NeighborLoader(data, [-1], None, batch_size=5, shuffle=False).make_batch(0, 0)
    got = model(batch.x, batch.edge_index, batch.edge_attr)
    want = Own()(data.x, data.edge_index, data.edge_attr)
    assert torch.allclose(got, want[batch.n_id[:5]])


def _weighted_data(dtype: torch.dtype = torch.float32) -> Data:
    torch.manual_seed(1)
    edges = torch.randint(0, 20, (2, 80))
    edges = edges[:, edges[0] != edges[1]]
    values = (torch.rand(edges.size(1)) * 4 + 1).to(dtype)
    return Data(x=torch.randn(20, WIDTH), edge_index=edges, edge_weight=values, w2=values + 1, y=torch.arange(20) % 3)


@pytest.mark.parametrize("layer", [GraphConv(WIDTH, 3), GCNConv(WIDTH, 3), GCNConv(WIDTH, 3, normalize=False)])
def test_edge_features_are_not_taken_for_weights(layer: torch.nn.Module) -> None:
    model = parallelize(Sequence(layer), solo_mesh())
    data = _weighted_data()
    batch = NeighborLoader(data, [-1], None, batch_size=20, edge_attr="w2").make_batch(0, 0)
    with pytest.raises(InputError, match=r"layer: expected weights of edges .got batch.edge_attr.*edge_weight=NAME"):
        model(batch.x, batch.edge_index, batch.edge_attr)


class Sequence(torch.nn.Module):
    """One layer; the argument of its edge values has a name of its own."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any, edge_index: Any, w: Any = None) -> Any:
        return self.layer(x, edge_index, w)


def test_inference_repeats_the_call_of_training_whatever_the_names() -> None:
    data, plain = _weighted_data(), Sequence(GraphConv(WIDTH, 3))
    model = parallelize(copy.deepcopy(plain), solo_mesh())
    batch = NeighborLoader(data, [-1], None, batch_size=20, edge_weight="w2").make_batch(0, 0)
    model(batch.x, batch.edge_index, batch.edge_weight)
    want = plain(data.x, data.edge_index, data.w2).detach().numpy()
    assert np.abs(infer(model, data, edge_weight="w2") - want).max() < 1e-5
    assert np.abs(infer(copy.deepcopy(model), data, edge_weight="w2") - want).max() < 1e-5  # a copy remembers too
    assert gsplit.verify(model, data, [2], None, batch_size=5, edge_weight="w2", steps=1).ok
    del data.edge_weight
    with pytest.raises(InputError, match=r"batch.edge_weight: expected a graph with stored values"):
        infer(model, data)  # not silently without


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_weights_of_any_type_are_numbers(dtype: torch.dtype) -> None:
    data = _weighted_data(dtype)
    for layer in (GCNConv(WIDTH, 3), GraphConv(WIDTH, 3)):
        model = parallelize(Sequence(copy.deepcopy(layer)), solo_mesh())
        batch = NeighborLoader(data, [-1], None, batch_size=20).make_batch(0, 0)
        got = model(batch.x, batch.edge_index, batch.edge_weight)
        want = layer(data.x, data.edge_index, data.edge_weight.float())
        assert torch.allclose(got, want[batch.n_id[:20]], atol=1e-4)


def test_a_table_of_values_is_no_weight() -> None:
    data = _weighted_data()
    column, data.edge_weight = data.edge_weight, data.edge_weight.unsqueeze(1)
    batch = NeighborLoader(data, [-1], None, batch_size=20, shuffle=False).make_batch(0, 0)
    assert batch.layers[0].edge_weight is not None and batch.layers[0].edge_weight.dim() == 1
    data.edge_weight = torch.stack([column, column], 1)
    with pytest.raises(InputError, match=r"edges/edge_weight: expected one weight per edge .got \[\d+, 2\]"):
        NeighborLoader(data, [-1], None, batch_size=20)


def test_a_model_that_returns_a_parameter_trains() -> None:
    class WithParameter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = GraphConv(WIDTH, 3), torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.conv(x, edge_index) * self.scale, self.scale

    model, loader = parallelize(WithParameter(), solo_mesh()), NeighborLoader(_weighted_data(), [2], None, batch_size=7)
    for batch in loader:
        out, scale = model(batch.x, batch.edge_index)
        (batch.mean(out.sum(1)) + scale.sum()).backward()
    assert model.scale.grad is not None
