"""Plain PyG as its users run it: stock layers on ``edge_index``; DDP is in ``ddp``.

Samples with PyG's own sampler, that of its ``NeighborLoader``, where pyg-lib or torch-sparse is installed: each vertex
is drawn for once, and every layer runs on the union of all hops. Without them PyG cannot sample; then our sampler
draws layer by layer, and the record says so.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.run.models import make_model
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.store.reader import Store
from gsplit_bench.peers.ddp import PeerSample
from gsplit_bench.train_study import Scenario

__all__ = ["PygPeer", "has_pyg_sampler"]

_OUR_SAMPLER = "pyg samples with our sampler: neither pyg-lib nor torch-sparse is installed"


def has_pyg_sampler() -> bool:
    """Whether PyG can sample neighbours by itself."""
    from torch_geometric import typing

    return bool(typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE)


class PygPeer:
    """See ``ddp.Peer``."""

    def __init__(self, scenario: Scenario, store: Store) -> None:
        torch.manual_seed(scenario.seed)
        stock = make_model(
            scenario.model,
            in_channels=store.num_features,
            hidden_channels=scenario.hidden,
            num_layers=len(scenario.fanout),
            out_channels=store.num_classes,
            heads=scenario.heads,
        )
        own = has_pyg_sampler()
        self.note = "" if own else _OUR_SAMPLER
        self.model: Module = _OnUnion(stock) if own else _OnBlocks(stock)
        self._sampler: _Sampler = _UnionSampler(scenario, store) if own else _BlockSampler(scenario, store)

    def sample(self, targets: Tensor, key: StepKey) -> PeerSample:
        """Edges as the model takes them, and the rows that they join."""
        return self._sampler.sample(targets, key)

    def move_edges(self, edges: Any, device: torch.device) -> Any:
        """Edge tensors on the device; the numbers beside them stay."""
        if isinstance(edges, list):
            return [(edge_index.to(device), num_dst) for edge_index, num_dst in edges]
        return edges[0].to(device), edges[1]


class _Sampler(Protocol):
    def sample(self, targets: Tensor, key: StepKey) -> PeerSample: ...


class _UnionSampler:
    """PyG's own sampler, on the graph as it is stored, grouped by destination."""

    def __init__(self, scenario: Scenario, store: Store) -> None:
        from torch_geometric.data import Data
        from torch_geometric.sampler import NeighborSampler

        graph = store.graph
        src = torch.from_numpy(np.asarray(graph.indices, np.int64))
        dst = torch.from_numpy(np.repeat(np.arange(graph.num_vertices), graph.in_degrees()))
        data = Data(edge_index=torch.stack([src, dst]), num_nodes=graph.num_vertices)
        torch.manual_seed(scenario.seed)
        self._sampler = NeighborSampler(data, list(scenario.fanout), is_sorted=True)

    def sample(self, targets: Tensor, key: StepKey) -> PeerSample:
        from torch_geometric.sampler import NodeSamplerInput

        drawn = self._sampler.sample_from_nodes(NodeSamplerInput(None, targets))
        edges = torch.stack([drawn.row, drawn.col])
        return PeerSample((edges, targets.numel()), drawn.node, edges.size(1))


class _OnUnion(Module):
    """A stock model on the union of all hops; the targets are its first rows."""

    def __init__(self, stock: Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, x: Tensor, edges: tuple[Tensor, int]) -> Tensor:
        edge_index, num_targets = edges
        out: Tensor = self.stock(x, edge_index)
        return out[:num_targets]


class _BlockSampler:
    """Our sampler, and the blocks as edge tensors."""

    def __init__(self, scenario: Scenario, store: Store) -> None:
        original = np.asarray(store.original_ids()) if store.is_renumbered else np.empty(0, np.int64)
        self._sampler, self._fanout = HostNeighborSampler(store.graph, original), list(scenario.fanout)

    def sample(self, targets: Tensor, key: StepKey) -> PeerSample:
        drawn = sample_minibatch(self._sampler, targets, self._fanout, key)
        edges = [(block.edge_index(), block.num_dst) for block in drawn.blocks]
        return PeerSample(edges, drawn.input_ids, sum(block.num_edges for block in drawn.blocks))


class _OnBlocks(Module):
    """A stock model's layers, each on a block of its own: what PyG documents for bipartite mini-batches."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.convs = stock.convs

    def forward(self, x: Tensor, edges: list[tuple[Tensor, int]]) -> Tensor:
        for number, (conv, (edge_index, num_dst)) in enumerate(zip(self.convs, edges, strict=True)):
            x = conv((x, x[:num_dst]), edge_index)
            x = x if number == len(edges) - 1 else x.relu()
        return x
