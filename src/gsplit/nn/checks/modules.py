"""Modules that cannot be exact on blocks, refused by name when a model is wrapped, with what to use instead.

A layer is exact on blocks if a destination's output depends only on its own row, its sampled in-edges and their
sources' rows. Modules that are not known by name are tried on toy mini-batches (``nn.checks.row_independence``).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch_geometric import nn as pyg
from torch_geometric.nn import aggr

from gsplit.errors import InputError, explain
from gsplit.nn.layer_edges import gcn_options
from gsplit.nn.layers import is_layer
from gsplit.nn.owned_embedding import OwnedEmbedding

__all__ = ["check_modules"]

_HOPS = "it reaches further than one hop, and a block holds one"
_GRAPH = "it mixes all vertices of the graph, and a mini-batch has only some"
_NODE = "use a row-wise norm, such as LayerNorm(mode='node') or torch.nn.LayerNorm, or BatchNorm"
_ONE_HOP = "use one-hop layers, such as SAGEConv, GATConv or GCNConv"
_DEGREES = "it normalises by degrees, and a block does not have all edges"

_REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("SGConv", "SSGConv", "TAGConv", "ChebConv", "ARMAConv", "APPNP", "MixHopConv", "GatedGraphConv", "DNAConv"),
        (_HOPS, _ONE_HOP),
    ),
    **dict.fromkeys(("LabelPropagation", "CorrectAndSmooth"), (_HOPS, "run it on the output of gsplit.infer")),
    **dict.fromkeys(("GPSConv", "SGFormer", "Polynormer", "PerformerAttention"), (_GRAPH, _ONE_HOP)),
    **dict.fromkeys(("GCN2Conv", "LGConv", "ClusterGCNConv", "FAConv", "DirGNNConv"), (_DEGREES, _ONE_HOP)),
    "HANConv": ("it averages over all vertices of a type, and a mini-batch has only some", "use HGTConv or HeteroConv"),
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
_TYPED = ("HeteroConv", "RGCNConv", "RGATConv", "HGTConv")
_GIVE_GRAPH = "wrap it with gsplit.parallelize(model, mesh, graph=graph), where graph is a heterogeneous graph"
_AGGREGATIONS = (aggr.LSTMAggregation, aggr.MedianAggregation, aggr.QuantileAggregation, aggr.GRUAggregation)


@dataclass(frozen=True)
class _Finding:
    where: str
    reason: str
    fix: str


def check_modules(model: Module, *, typed: bool = False) -> None:
    """Refuse a model with a module that cannot be exact on blocks, with the reason and what to use instead.

    ``typed``: the graph is heterogeneous, and sizes that are not given come from it.
    """
    for name, module in model.named_modules():
        finding = _check_module(name or "the model", module, typed=typed)
        if finding is not None:
            where = f"{finding.where} ({type(module).__name__})"
            raise InputError(explain(where, "a layer that is exact on blocks", finding.reason, finding.fix))


def _check_module(name: str, module: Any, *, typed: bool) -> _Finding | None:
    for kind in type(module).__mro__:
        if kind.__name__ in _REFUSED and kind.__module__.startswith(("torch_geometric.", "torch.nn.")):
            return _Finding(name, *_REFUSED[kind.__name__])
        if not typed and kind.__name__ in _TYPED and kind.__module__.startswith("torch_geometric."):
            return _Finding(name, "it takes types of edges, and no graph with types was given", _GIVE_GRAPH)
    if not typed and any(
        isinstance(p, torch.nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)
    ):
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
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None:
        fix = "leave max_norm out, and normalise the rows that you read"
        return _Finding(name, "max_norm, by which a rank changes only the rows that it reads", fix)
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
        fix = "use sparse=False, or gsplit.OwnedEmbedding beside the model"
        return _Finding(name, "sparse gradients cannot be averaged", fix)
    if isinstance(module, OwnedEmbedding):
        fix = "keep it beside the model, and pass embedding(batch) to the model"
        return _Finding(name, "it has the rows of one rank, which are not averaged over ranks", fix)
    return _check_layer(name, module) if is_layer(module) else None


def _check_layer(name: str, layer: Any) -> _Finding | None:
    if gcn_options(layer) is not None and layer.cached:
        return _Finding(name, "cached=True, which keeps the edges of its first call", "make it with cached=False")
    if layer.flow != "source_to_target":
        return _Finding(name, f"flow={layer.flow!r}", "leave flow at 'source_to_target'")
    for module in layer.modules():
        if isinstance(module, _AGGREGATIONS):
            kind = type(module).__name__
            return _Finding(
                name, f"{kind}, which fails on vertices without edges", "aggregate by mean, sum, max or std"
            )
    return None
