"""What is known about PyG's layers: how each is called on a block, and which cannot be exact there.

A layer is exact on blocks if a destination's output depends on nothing but its own row, its sampled in-edges and their
sources' rows. Layers that break this are refused when the model is wrapped, by name where the reason is known; any
other is found out by trying (``nn.checks.row_independence``).
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric import nn as pyg
from torch_geometric.nn import aggr

from gsplit.blocks import Block
from gsplit.errors import InputError, explain

__all__ = [
    "check_modules",
    "is_layer",
    "is_single_input",
    "layers_of",
    "normalised_edges",
    "takes_csr",
    "takes_weights",
    "to_csr",
]

_HOPS = "it reaches further than one hop, and a block holds one"
_GRAPH = "it mixes all vertices of the graph, and a mini-batch has only some"
_NODE = "use a row-wise norm, such as LayerNorm(mode='node') or torch.nn.LayerNorm, or BatchNorm"
_ONE_HOP = "use one-hop layers, such as SAGEConv, GATConv or GCNConv(normalize=False)"
_DEGREES = "it normalises by degrees, and a block has not all edges"

_REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("SGConv", "SSGConv", "TAGConv", "ChebConv", "ARMAConv", "APPNP", "MixHopConv", "GatedGraphConv", "DNAConv"),
        (_HOPS, _ONE_HOP),
    ),
    **dict.fromkeys(("LabelPropagation", "CorrectAndSmooth"), (_HOPS, "run it on the output of gsplit.infer")),
    **dict.fromkeys(("GPSConv", "SGFormer", "Polynormer", "PerformerAttention"), (_GRAPH, _ONE_HOP)),
    **dict.fromkeys(("GCN2Conv", "LGConv", "ClusterGCNConv", "FAConv", "DirGNNConv"), (_DEGREES, _ONE_HOP)),
    **dict.fromkeys(("HeteroConv", "RGCNConv", "HGTConv", "HANConv"), ("graphs here have one kind of edge", _ONE_HOP)),
    **dict.fromkeys(
        ("GraphNorm", "GraphSizeNorm", "PairNorm", "MeanSubtractionNorm", "DiffGroupNorm", "InstanceNorm"),
        (_GRAPH, _NODE),
    ),
    **dict.fromkeys(("InstanceNorm1d", "InstanceNorm2d", "HeteroBatchNorm", "HeteroLayerNorm"), (_GRAPH, _NODE)),
    **dict.fromkeys(
        ("TopKPooling", "SAGPooling", "ASAPooling", "EdgePooling", "MemPooling", "GraphUNet"),
        (_GRAPH, "predict per vertex, without pooling"),
    ),
}
_AGGREGATIONS = (aggr.LSTMAggregation, aggr.MedianAggregation, aggr.QuantileAggregation, aggr.GRUAggregation)
_SINGLE_INPUT = (pyg.GCNConv, pyg.PNAConv)
_INNER = ("_propagate", "_message", "_aggregate", "_update", "_edge_update")
_CSR = (pyg.SAGEConv, pyg.GraphConv, pyg.GINConv, pyg.SimpleConv, pyg.GCNConv)
"""Layers that give the same through a CSR matrix as through ``edge_index`` (measured), and are faster."""


def is_layer(module: Module) -> bool:
    """Whether edges are passed to this module."""
    return isinstance(module, pyg.MessagePassing)


def layers_of(model: Module) -> dict[str, Module]:
    """The message-passing layers of a model by name; a layer within a layer belongs to the outer one."""
    found: dict[str, Module] = {}
    for name, module in model.named_modules():
        outer = any(name.startswith(f"{above}.") or above == "" for above in found)
        if is_layer(module) and not outer:
            found[name] = module
    return found


def is_single_input(layer: Module) -> bool:
    """Whether a layer takes one tensor of rows only, not (sources, destinations)."""
    return isinstance(layer, _SINGLE_INPUT)


def takes_weights(layer: Module) -> bool:
    """Whether a layer wants GCN's normalisation handed to it."""
    return isinstance(layer, pyg.GCNConv)


def takes_csr(layer: Module, dtype: torch.dtype) -> bool:
    """Whether a layer is exact and faster on a CSR matrix: its sum or mean is then one sparse product."""
    plain = isinstance(layer.aggr, str) and layer.aggr in ("mean", "sum", "add") and bool(layer.fuse)
    watched = any(hooks for name, hooks in vars(layer).items() if name.endswith("_hooks") and name.startswith(_INNER))
    adds_loops = getattr(layer, "combine_root", None) == "self_loop"  # SimpleConv: on a matrix that is not single_input
    known = type(layer) in _CSR and not (watched or adds_loops or layer.explain)
    return known and plain and dtype in (torch.float32, torch.float64)


def to_csr(block: Block, values: Tensor) -> Tensor:
    """The block as a matrix of destinations x sources."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls CSR a beta once per process
        size = (block.num_dst, block.num_src)
        return torch.sparse_csr_tensor(block.indptr, block.src_rows, values, size, check_invariants=False)


def normalised_edges(block: Block, factors: Tensor) -> tuple[Block, Tensor]:
    """GCN's edges and weights: no sampled self-loop, one self-loop per destination, and both ends' factors.

    What PyG's ``gcn_norm`` makes of the full graph, restricted to the sampled edges.
    """
    src, dst = block.edge_index()
    kept = (src != dst).nonzero().squeeze(1)  # device sync
    src, dst = src[kept], dst[kept]
    rows = torch.arange(block.num_dst, device=src.device)
    counts = torch.bincount(dst, minlength=block.num_dst) + 1
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    sources = torch.empty(src.numel() + block.num_dst, dtype=src.dtype, device=src.device)
    sources[torch.arange(src.numel(), device=src.device) + dst] = src  # one self-loop has gone before, per destination
    sources[indptr[1:] - 1] = rows
    looped = Block(indptr, sources, block.num_src)
    return looped, factors[sources] * factors[looped.edge_index()[1]]


@dataclass(frozen=True)
class _Finding:
    where: str
    reason: str
    fix: str


def check_modules(model: Module) -> None:
    """Refuse a model with a module that cannot be exact on blocks, saying which, why and what to use instead."""
    for name, module in model.named_modules():
        finding = _look_at(name or "the model", module)
        if finding is not None:
            where = f"{finding.where} ({type(module).__name__})"
            raise InputError(explain(where, "a layer that is exact on blocks", finding.reason, finding.fix))


def _look_at(name: str, module: Any) -> _Finding | None:
    for kind in type(module).__mro__:
        if kind.__name__ in _REFUSED and kind.__module__.startswith(("torch_geometric.", "torch.nn.")):
            return _Finding(name, *_REFUSED[kind.__name__])
    if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
        return _Finding(name, "its size is not known yet", "give the number of input channels instead of -1")
    if isinstance(module, pyg.LayerNorm) and module.mode == "graph":
        return _Finding(name, f"mode='graph': {_GRAPH}", _NODE)
    if isinstance(module, pyg.BatchNorm) and module.allow_single_element:
        return _Finding(name, "allow_single_element depends on the rows of one rank", "leave that option out")
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not module.track_running_stats:
        return _Finding(name, "it keeps no running statistics, so evaluation depends on the batch", "keep them")
    if isinstance(module, torch.nn.SyncBatchNorm):
        return _Finding(name, "it has a process group of its own", "use torch.nn.BatchNorm1d, which is made exact here")
    if isinstance(module, torch.nn.RNNBase) and module.dropout > 0:
        return _Finding(name, "its inner dropout cannot be keyed", "set its dropout to 0")
    if isinstance(module, torch.nn.Embedding) and module.sparse:
        return _Finding(name, "sparse gradients cannot be averaged", "use sparse=False")
    return _look_at_layer(name, module) if is_layer(module) else None


def _look_at_layer(name: str, layer: Any) -> _Finding | None:
    if isinstance(layer, pyg.GCNConv) and layer.normalize:
        fix = (
            "make it with normalize=False, the loader with gcn_norm=True, and call "
            "model(batch.x, batch.edge_index, batch.edge_weight)"
        )
        return _Finding(name, f"normalize=True: {_DEGREES}", fix)
    if layer.flow != "source_to_target":
        return _Finding(name, f"flow={layer.flow!r}", "leave flow at 'source_to_target'")
    for module in layer.modules():
        if isinstance(module, _AGGREGATIONS):
            kind = type(module).__name__
            return _Finding(
                name, f"{kind}, which fails on vertices without edges", "aggregate by mean, sum, max or std"
            )
    return None
