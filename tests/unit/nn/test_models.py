"""Wrapped models on one process compute what PyG computes on the full graph, in forward and in backward.

Real ranks are in tests/exactness/test_exactness.py.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nn_models import (
    CLASSES,
    WIDTH,
    OwnSingleInput,
    Stack,
    make_batch,
    make_data,
    two_layers,
)
from small_graph import PLAIN_MODELS, Case, make_model
from torch import Tensor
from torch.nn import Module
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn import GIN, EdgeCNN, GATConv, GCNConv, GraphSAGE

from gsplit import NeighborLoader, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError


@pytest.mark.parametrize("strategy", ["split", "data"])
@pytest.mark.parametrize("kind", PLAIN_MODELS)
@pytest.mark.parametrize("jk", [None, "cat", "lstm"])
def test_with_all_neighbours_it_is_pyg_on_the_full_graph(kind: str, jk: str | None, strategy: str) -> None:
    data, case = make_data(), Case(kind, strategy, "random", 0.0, jk, None)
    plain, ours = make_model(case), parallelize(make_model(case), solo_mesh())
    batch = make_batch(strategy=strategy)
    targets = batch.n_id[: batch.batch_size]
    want = plain(data.x, data.edge_index)[targets]
    out = ours(batch.x, batch.edge_index)
    assert torch.allclose(out, want, atol=1e-11)
    F.cross_entropy(want, data.y[targets]).backward()
    batch.mean(F.cross_entropy(out, batch.y, reduction="none")).backward()
    for got, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None)
        if got.grad is not None and wanted.grad is not None:
            assert torch.allclose(got.grad, wanted.grad, atol=1e-11)


def test_hand_written_models_with_branches_encoders_and_trimmed_residuals() -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        x = F.dropout(self.encode(x), 0.0, self.training)
        h = self.a(x, edge_index) + self.side(x, edge_index)
        h = x[: h.size(0)] + h.relu()
        out: Tensor = self.b(h, edge_index)
        kept: Tensor = h[: out.size(0)]
        return kept + out

    model = Stack(
        forward, encode=torch.nn.Linear(WIDTH, WIDTH).double(), side=GATConv(WIDTH, WIDTH).double(), **two_layers()
    )
    plain = copy.deepcopy(model)
    ours, data, batch = parallelize(model, solo_mesh()), make_data(), make_batch(2)
    want = plain(data.x, data.edge_index)[batch.n_id[: batch.batch_size]]
    out = ours(batch.x, batch.edge_index)
    assert torch.allclose(out, want, atol=1e-12)
    batch.sum(out.square().sum(1)).backward()
    want.square().sum().backward()
    for got, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and wanted.grad is not None
        assert torch.allclose(got.grad, wanted.grad, atol=1e-11)


class ByBatch(Module):
    """Takes the batch itself, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, CLASSES).double()

    def forward(self, data: Any) -> Tensor:
        return self.conv(data.x, data.edge_index)  # type: ignore[no-any-return]


def test_a_model_can_take_the_batch() -> None:
    model, data = parallelize(ByBatch(), solo_mesh()), make_data()
    batch = make_batch(1)
    full = GCNConv(WIDTH, CLASSES).double()
    full.load_state_dict(model.conv.state_dict())
    assert torch.allclose(model(batch), full(data.x, data.edge_index)[batch.n_id[: batch.batch_size]], atol=1e-12)


def test_layers_of_the_users_are_tried_with_one_tensor_too() -> None:
    model = Stack(lambda self, x, e: self.b(self.a(x, e), e), a=OwnSingleInput(), b=OwnSingleInput())
    plain, data, batch = copy.deepcopy(model), make_data(), make_batch(2)
    out = parallelize(model, solo_mesh(), num_features=WIDTH)(batch.x, batch.edge_index)
    assert torch.allclose(out, plain(data.x, data.edge_index)[batch.n_id[: batch.batch_size]], atol=1e-12)


class OwnGCN(GCNConv):  # type: ignore[misc]
    """A subclass is not given a CSR matrix, which would hold the weights of normalisation."""


class GCNWithoutWeights(GCNConv):  # type: ignore[misc]
    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        out: Tensor = super().forward(x, edge_index)
        return out


@pytest.mark.parametrize("call", [(), (None,)])
def test_a_subclass_of_gcn_is_normalised_without_stored_weights(call: tuple[None, ...]) -> None:
    def forward(self: Any, x: Tensor, edge_index: Any) -> Tensor:
        h: Tensor = self.b(self.a(x, edge_index, *call).relu(), edge_index, *call)
        return h

    model = Stack(forward, a=OwnGCN(WIDTH, 8), b=OwnGCN(8, CLASSES)).double()
    data, batch = make_data(), make_batch(2)
    want = model(data.x, data.edge_index)[batch.n_id[: batch.batch_size]]
    got = parallelize(model, solo_mesh())(batch.x, batch.edge_index)
    assert torch.allclose(got, want, atol=1e-11)


def test_gcn_is_normalised_in_bfloat16() -> None:
    model, batch = pyg.GCN(WIDTH, 8, 2, CLASSES).float(), make_batch(2)
    ours = parallelize(model, solo_mesh())
    want = ours(batch.x.float(), batch.edge_index)
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(batch.x.float(), batch.edge_index)
    assert torch.allclose(got.float(), want, atol=0.05 * float(want.detach().abs().max()))


def test_a_subclass_of_gcn_that_takes_no_weights_is_refused() -> None:
    model = Stack(lambda self, x, e: self.conv(x, e), conv=GCNWithoutWeights(WIDTH, 8))
    with pytest.raises(InputError, match="conv: expected a GCNConv whose forward takes edge_weight .got .x"):
        parallelize(model, solo_mesh())


def test_hooks_on_messages_and_added_self_loops_are_kept() -> None:
    data, batch = make_data(), make_batch(2)
    watched: Any = Stack(lambda self, x, e: self.b(self.a(x, e), e), **two_layers())
    watched.a.register_message_forward_hook(lambda module, inputs, out: 2 * out)
    looped = Stack(
        lambda self, x, e: self.b(self.a(x, e), e), a=pyg.SimpleConv("mean", "self_loop"), b=two_layers()["b"]
    )
    for model in (watched, looped):
        want = model(data.x, data.edge_index)[batch.n_id[: batch.batch_size]]
        got = parallelize(model, solo_mesh(), num_features=WIDTH)(batch.x, batch.edge_index)
        assert torch.allclose(got, want, atol=1e-12)


class Named(Module):
    """Jumping knowledge by a named argument, behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = two_layers()["a"], two_layers()["b"]
        self.norm, self.jk = torch.nn.BatchNorm1d(WIDTH).double(), pyg.JumpingKnowledge("cat")

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        h = self.norm(self.a(x, edge_index))
        return self.jk(xs=[h, self.b(h, edge_index)])  # type: ignore[no-any-return]


def test_frozen_batch_norm_and_named_jumping_knowledge() -> None:
    model: Any = parallelize(Named(), solo_mesh())
    batch = make_batch(2)
    model.norm.eval()
    before = model.norm.running_mean.clone()
    assert model(batch.x, batch.edge_index).shape == (20, 2 * WIDTH)
    assert torch.equal(model.norm.running_mean, before)


@pytest.mark.parametrize("make", [GraphSAGE, GIN, EdgeCNN])
def test_batches_without_targets_edges_or_inputs_pass(make: Any) -> None:
    data = Data(
        x=torch.ones(5, WIDTH), edge_index=torch.empty(2, 0, dtype=torch.int64), y=torch.zeros(5, dtype=torch.int64)
    )
    batch = NeighborLoader(data, [2, 2], torch.tensor([1]), batch_size=1).make_batch(0, 0)
    model = parallelize(make(WIDTH, 8, 2, CLASSES), solo_mesh())
    batch.sum(model(batch.x, batch.edge_index).sum(1)).backward()
    assert all(p.grad is not None for p in model.parameters())
