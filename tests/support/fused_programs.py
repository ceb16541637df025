"""Models whose layers host kernels compute, on ranks and as PyG's layers on the whole graph in one process."""

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from nn_models import CLASSES, WIDTH, N, Stack, make_data
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, ReLU, Sequential
from torch_geometric.nn import MLP, GINConv, GraphConv, SAGEConv

from gsplit import NeighborLoader, parallelize
from gsplit.distributed.comm.mesh import Mesh
from gsplit.nn.fused_layers import LayerRows

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
