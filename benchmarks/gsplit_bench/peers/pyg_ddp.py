"""Plain PyG as its users run it: stock layers on ``edge_index``; DDP is in ``ddp``.

``UnionPeer`` (the system ``pyg``) samples as PyG's ``NeighborLoader`` does: each vertex is drawn for once, the sample is
the union of all hops, and every layer runs on what the layers above it need (``trim_to_layer``). It takes torch-sparse,
for the graph's form and, where pyg-lib is not installed, for sampling.

``BlockPeer`` (the system ``pyg_our_sampler``) samples with our sampler, layer by layer, and runs each layer on a block.
"""

import warnings
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.errors import MissingDependencyError, explain
from gsplit.run.models import make_model
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.store.reader import Store
from gsplit_bench.peers.ddp import PeerSample, load_csc
from gsplit_bench.train_study import Scenario

__all__ = ["BlockPeer", "UnionPeer", "hop_sizes"]

_INSTALL = "pip install torch-scatter torch-sparse (benchmarks/README.md), or measure pyg_our_sampler"
_NOTES = {"gcn": "PyG normalises by the degrees of the sample; ours by those of the graph"}


class UnionPeer:
    """See ``ddp.Peer``: PyG with its own sampler."""

    def __init__(self, scenario: Scenario, store: Store) -> None:
        if find_spec("torch_sparse") is None:
            raise MissingDependencyError(explain("system pyg", "the package torch-sparse", "none", _INSTALL))
        from torch_geometric.data import Data
        from torch_geometric.sampler import NeighborSampler
        from torch_geometric.typing import SparseTensor

        indptr, indices = load_csc(store.path)
        size = (store.num_vertices, store.num_vertices)
        adj_t = SparseTensor(rowptr=indptr, col=indices, sparse_sizes=size, is_sorted=True, trust_data=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using 'NeighborSampler' without a 'pyg-lib'")  # that is in the note
            self._sampler = NeighborSampler(Data(adj_t=adj_t, num_nodes=store.num_vertices), list(scenario.fanout))
        self._num_hops = len(scenario.fanout)
        engine = "pyg-lib" if find_spec("pyg_lib") else "torch-sparse; pyg-lib is not installed"
        self.note = "; ".join(filter(None, (f"PyG samples with {engine}", _NOTES.get(scenario.model))))
        self.model: Module = _OnUnion(_stock_model(scenario, store))

    def sample(self, targets: Tensor, key: StepKey) -> PeerSample:
        """The union of all hops, with the numbers of its vertices and edges by hop."""
        from torch_geometric.sampler import NodeSamplerInput

        drawn = self._sampler.sample_from_nodes(NodeSamplerInput(None, targets))
        sizes = (drawn.num_sampled_nodes, drawn.num_sampled_edges)
        if drawn.num_sampled_nodes is None:
            sizes = hop_sizes(drawn.row, drawn.col, targets.numel(), self._num_hops)
        edges = torch.stack([drawn.row, drawn.col])
        return PeerSample((edges, *sizes), drawn.node, edges.size(1))

    def move_edges(self, edges: Any, device: torch.device) -> Any:
        """Edge tensors on the device; the numbers beside them stay."""
        edge_index, num_nodes, num_edges = edges
        return edge_index.to(device), num_nodes, num_edges


def hop_sizes(row: Tensor, col: Tensor, num_targets: int, num_hops: int) -> tuple[list[int], list[int]]:
    """Numbers of vertices and edges by hop, which pyg-lib counts and torch-sparse does not.

    Both number vertices in the order in which they are found, and draw for them in that order: ``col`` ascends.

    >>> hop_sizes(torch.tensor([1, 2, 0, 3]), torch.tensor([0, 0, 1, 2]), num_targets=1, num_hops=2)
    ([1, 2, 1], [2, 2])
    """
    vertices, edges = [0, num_targets], [0]
    for _ in range(num_hops):
        edges.append(int(torch.searchsorted(col, vertices[-1])))
        found = row[edges[-2] : edges[-1]]
        vertices.append(max(vertices[-1], int(found.max()) + 1 if found.numel() else 0))
    return [b - a for a, b in pairwise(vertices)], [b - a for a, b in pairwise(edges)]


class _OnUnion(Module):
    """A stock model on the union of all hops; the targets are its first rows."""

    def __init__(self, stock: Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, x: Tensor, edges: tuple[Tensor, list[int], list[int]]) -> Tensor:
        edge_index, num_nodes, num_edges = edges
        out: Tensor = self.stock(
            x, edge_index, num_sampled_nodes_per_hop=num_nodes, num_sampled_edges_per_hop=num_edges
        )
        return out[: num_nodes[0]]


class BlockPeer:
    """See ``ddp.Peer``: PyG with our sampler."""

    def __init__(self, scenario: Scenario, store: Store) -> None:
        original = np.asarray(store.original_ids()) if store.is_renumbered else np.empty(0, np.int64)
        self._sampler, self._fanout = HostNeighborSampler(store.graph, original), list(scenario.fanout)
        self.note = _NOTES.get(scenario.model, "")
        self.model: Module = _OnBlocks(_stock_model(scenario, store))

    def sample(self, targets: Tensor, key: StepKey) -> PeerSample:
        """Blocks as edge tensors, with the numbers of their destinations."""
        drawn = sample_minibatch(self._sampler, targets, self._fanout, key)
        edges = [(block.edge_index(), block.num_dst) for block in drawn.blocks]
        return PeerSample(edges, drawn.input_ids, sum(block.num_edges for block in drawn.blocks))

    def move_edges(self, edges: Any, device: torch.device) -> Any:
        """Edge tensors on the device; the numbers beside them stay."""
        return [(edge_index.to(device), num_dst) for edge_index, num_dst in edges]


class _OnBlocks(Module):
    """A stock model's layers, each on a block of its own: what PyG documents for bipartite mini-batches.

    GCNConv takes one set of rows: it runs on all source rows, and those of the destinations are kept.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.convs = stock.convs

    def forward(self, x: Tensor, edges: list[tuple[Tensor, int]]) -> Tensor:
        from torch_geometric.nn import GCNConv

        for number, (conv, (edge_index, num_dst)) in enumerate(zip(self.convs, edges, strict=True)):
            if isinstance(conv, GCNConv):
                x = conv(x, edge_index)[:num_dst]
            else:
                x = conv((x, x[:num_dst]), edge_index)
            x = x if number == len(edges) - 1 else x.relu()
        return x


def _stock_model(scenario: Scenario, store: Store) -> Module:
    """The model that our strategies train, with the same weights."""
    torch.manual_seed(scenario.seed)
    return make_model(
        scenario.model,
        in_channels=store.num_features,
        hidden_channels=scenario.hidden,
        num_layers=len(scenario.fanout),
        out_channels=store.num_classes,
        heads=scenario.heads,
    )
