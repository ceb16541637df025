"""Layers by host kernels on real ranks: loss and gradients of PyG's layers on the whole graph in one process."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from nn_models import CLASSES, WIDTH, N, Stack, make_data
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, ReLU, Sequential
from torch_geometric.nn import MLP, GINConv, GraphConv, SAGEConv

from gsplit import NeighborLoader, parallelize
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.nn.fused_layers import LayerRows
from gsplit_bench.ranks import run_ranks

HIDDEN = 7


def _two_layers(self: Any, x: Tensor, edge_index: Any) -> Any:
    return self.two(F.relu(self.one(x, edge_index)), edge_index)


def make_models() -> dict[str, Module]:
    """Two layers each, in float64."""
    torch.manual_seed(0)
    networks = {
        "gin": (
            Sequential(Linear(WIDTH, HIDDEN), ReLU(), Linear(HIDDEN, HIDDEN)),
            MLP([HIDDEN, HIDDEN, CLASSES], norm=None),
        ),
        "gin with a norm": (
            Sequential(Linear(WIDTH, HIDDEN), BatchNorm1d(HIDDEN), ReLU(), Linear(HIDDEN, HIDDEN)),
            Linear(HIDDEN, CLASSES),
        ),
    }
    layers: dict[str, dict[str, Module]] = {
        name: {"one": GINConv(one, 0.3, train_eps=True), "two": GINConv(two, -0.4, train_eps=True)}
        for name, (one, two) in networks.items()
    }
    layers["max"] = {"one": SAGEConv(WIDTH, HIDDEN, "max"), "two": GraphConv(HIDDEN, CLASSES, "max")}
    return {name: Stack(_two_layers, **found).double() for name, found in layers.items()}


def train_on_ranks(mesh: Mesh, owner: list[int]) -> list[tuple[float, list[Tensor], int]]:
    """The loss and the gradients of every model, and how many layers the kernels have computed."""
    found = []
    for model in make_models().values():
        wrapped = parallelize(model, mesh, verify_every=0)
        loader = NeighborLoader(
            make_data(), [-1, -1], torch.arange(N), batch_size=N, mesh=mesh, partition=torch.tensor(owner)
        )
        batch = loader.make_batch(0, 0)
        with patch.object(LayerRows, "aggregate", autospec=True, side_effect=LayerRows.aggregate) as calls:
            loss = batch.sum(wrapped(batch.x, batch.edge_index).square().sum(1))
        loss.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in wrapped.parameters()]
        found.append((loss.item(), gradients, calls.call_count))
    return found


def train_by_pyg() -> list[tuple[float, list[Tensor]]]:
    """The same by PyG's layers."""
    data = make_data()
    found = []
    for model in make_models().values():
        loss = model(data.x, data.edge_index).square().sum()
        loss.backward()
        found.append((loss.item(), [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]))
    return found


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.weekly)])
@pytest.mark.parametrize("ownership", ["in turn", "all on rank 0"])
def test_loss_and_gradients_are_those_of_pyg(ranks: int, ownership: str) -> None:
    owner = [vertex % ranks if ownership == "in turn" else 0 for vertex in range(N)]
    every = [train_on_ranks(solo_mesh(), owner)] if ranks == 1 else run_ranks(train_on_ranks, ranks, owner)
    wanted = train_by_pyg()
    for found in every:
        for name, (loss, gradients, num_fused), (want, wants) in zip(make_models(), found, wanted, strict=True):
            assert num_fused == 2, name
            assert loss == pytest.approx(want, rel=1e-11), name
            largest = max(float(g.abs().max()) for g in wants)
            assert all(map(partial(torch.allclose, rtol=0, atol=1e-11 * largest), gradients, wants)), name
