"""A small graph, mini-batches of it, and models whose forward is given: what tests of wrapped models share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE, MessagePassing, SAGEConv

from gsplit import NeighborLoader
from gsplit.minibatch.batch import Batch

__all__ = [
    "CLASSES",
    "WIDTH",
    "N",
    "OwnSingleInput",
    "Stack",
    "make_batch",
    "make_data",
    "make_loader",
    "sage",
    "single",
    "two_layers",
]

N, WIDTH, CLASSES = 60, 6, 5


def make_data(seed: int = 0) -> Data:
    rng = np.random.default_rng(seed)
    src, dst = (N * rng.random(240) ** 2).astype(np.int64), rng.integers(0, N - 4, 240)
    src[:8] = dst[:8]
    edges = np.unique(np.stack([src, dst]), axis=1)
    x = torch.from_numpy(rng.normal(size=(N, WIDTH)))
    return Data(x=x, edge_index=torch.from_numpy(edges), y=torch.from_numpy(rng.integers(0, CLASSES, N)))


def make_loader(num_layers: int = 3, fanout: int = -1, **options: Any) -> NeighborLoader:
    return NeighborLoader(make_data(), [fanout] * num_layers, torch.arange(0, N, 3), batch_size=20, **options)


def make_batch(num_layers: int = 3, fanout: int = -1, **options: Any) -> Batch:
    return make_loader(num_layers, fanout, **options).make_batch(0, 0)


class Stack(Module):
    """A model whose forward is given."""

    def __init__(self, forward: Callable[..., Any], **modules: Module) -> None:
        super().__init__()
        self._forward = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor, edge_index: Any) -> Any:
        return self._forward(self, x, edge_index)


def two_layers() -> dict[str, Module]:
    return {"a": SAGEConv(WIDTH, WIDTH).double(), "b": SAGEConv(WIDTH, WIDTH).double()}


def sage(**options: Any) -> Module:
    model: Module = GraphSAGE(WIDTH, 8, 3, CLASSES, **options)
    return model


def single(layer: Module) -> Module:
    """A model of one layer."""
    return Stack(lambda self, x, e: self.layer(x, e), layer=layer)


class OwnSingleInput(MessagePassing):  # type: ignore[misc]
    """A layer of the user's that knows one tensor of rows only."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.lin = torch.nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(x) + self.propagate(edge_index, x=x)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return x_j - x_i
