"""DGL 1.1.3 as its users run it: ``NeighborSampler``, blocks, ``dgl.nn`` layers; DDP is in ``ddp``.

What differs from our models is the record's note: DGL adds self-loops neither to GAT's nor to GCN's blocks, so it has
that much less to do, and GCN is normalised by the degrees of the block.
"""

import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.run.models import make_model
from gsplit.sampling.minibatch import StepKey
from gsplit.store.reader import Store
from gsplit_bench.peers.ddp import PeerSample, load_csc
from gsplit_bench.train_study import Scenario

__all__ = ["DglPeer", "load_dgl", "to_dgl"]

INSTALL = "pip install --no-deps dgl==1.1.3, and psutil, requests, tqdm, networkx and scipy (benchmarks/README.md)"
_NOTES = {
    "gat": "DGL adds no self-loops to the blocks, ours does",
    "gcn": "DGL normalises by the degrees of the block, without self-loops; ours by those of the graph, with self-loops",
}


def load_dgl() -> Any:
    """The package, with torch as its backend; refused with what to install where it is missing."""
    if find_spec("dgl") is None:
        raise MissingDependencyError(explain("system dgl", "the package dgl", "none", INSTALL))
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import dgl
        import dgl.nn
    return dgl


def to_dgl(indptr: Tensor, indices: Tensor) -> Any:
    """The whole graph in DGL's form, with 64-bit ids as DGL makes them."""
    csc = (indptr, indices, torch.empty(0, dtype=torch.int64))
    return load_dgl().graph(("csc", csc), num_nodes=indptr.numel() - 1)


class DglPeer:
    """See ``ddp.Peer``."""

    def __init__(self, scenario: Scenario, store: Store, device: torch.device) -> None:
        dgl = load_dgl()
        _check_device(dgl, device)
        dgl.seed(scenario.seed)
        self.note = _NOTES.get(scenario.model, "")
        self._graph = to_dgl(*load_csc(store.path))
        self._sampler = dgl.dataloading.NeighborSampler(list(reversed(scenario.fanout)))  # the input's layer first
        torch.manual_seed(scenario.seed)
        self.model: Module = _Model(_layers(dgl, scenario, store.num_features, store.num_classes))

    def sample(self, targets: Tensor, key: StepKey) -> PeerSample:
        """Blocks, and the rows that the first one reads."""
        input_ids, _, blocks = self._sampler.sample_blocks(self._graph, targets)
        return PeerSample(blocks, input_ids, sum(int(block.num_edges()) for block in blocks))

    def move_edges(self, edges: Any, device: torch.device) -> Any:
        """Blocks on the device."""
        return [block.to(device) for block in edges]


def _check_device(dgl: Any, device: torch.device) -> None:
    """Refuse a device that this DGL was not built for."""
    try:
        dgl.graph(([0], [0])).to(device)
    except (dgl.DGLError, RuntimeError, ValueError, TypeError) as error:
        got = str(error).strip().splitlines()[0]
        fix = "install DGL's wheel for this CUDA, or leave dgl out"
        raise InputError(explain("system dgl", f"a DGL for {device}", got, fix)) from None


class _Model(Module):
    """Layers with ReLU between them; the heads of attention are joined, those of the last layer averaged."""

    def __init__(self, layers: list[Module]) -> None:
        super().__init__()
        self.layers = ModuleList(layers)

    def forward(self, x: Tensor, blocks: list[Any]) -> Tensor:
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x)
            last = number == len(self.layers) - 1
            if x.dim() == 3:
                x = x.mean(1) if last else x.flatten(1)
            x = x if last else x.relu()
        return x


def _layers(dgl: Any, scenario: Scenario, num_features: int, num_classes: int) -> list[Module]:
    """The layers of PyG's GraphSAGE, GCN, GIN and GAT of the same widths; GIN's MLPs are those of PyG's model."""
    hidden, heads, depth = scenario.hidden, scenario.heads, len(scenario.fanout)
    ins = [num_features, *[hidden] * (depth - 1)]
    outs = [*[hidden] * (depth - 1), num_classes]
    if scenario.model == "sage":
        return [dgl.nn.SAGEConv(i, o, "mean") for i, o in zip(ins, outs, strict=True)]
    if scenario.model == "gat":
        widths = [*[hidden // heads] * (depth - 1), num_classes]
        return [dgl.nn.GATConv(i, o, heads, allow_zero_in_degree=True) for i, o in zip(ins, widths, strict=True)]
    if scenario.model == "gcn":
        return [dgl.nn.GraphConv(i, o, norm="both", allow_zero_in_degree=True) for i, o in zip(ins, outs, strict=True)]
    if scenario.model == "gin":
        gin: Any = make_model(
            "gin", in_channels=num_features, hidden_channels=hidden, num_layers=depth, out_channels=num_classes
        )
        return [dgl.nn.GINConv(conv.nn, "sum") for conv in gin.convs]
    fix = "measure one of these, or leave dgl out"
    raise InputError(explain("system dgl", "sage, gcn, gin or gat", scenario.model, fix))
