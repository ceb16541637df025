"""Properties of PyG's layers: how each is called on a block, and which edge values it takes."""

import inspect

import torch
from torch.nn import Module
from torch_geometric import nn as pyg

__all__ = [
    "adds_self_loops",
    "edge_features_are_weights",
    "edge_features_of",
    "has_message_hooks",
    "has_own_methods",
    "is_attention",
    "is_deterministic",
    "is_layer",
    "is_single_input",
    "layers_of",
    "reduction_of",
    "takes_csr",
    "takes_edge_weight",
]

_SINGLE_INPUT = (pyg.GCNConv, pyg.PNAConv)
_INNER = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
_MESSAGE_HOOKS = [f"_{name}_forward_{kind}" for name in _INNER for kind in ("pre_hooks", "hooks")]
_METHODS = {"propagate", "edge_updater", "edge_update", "message", "message_and_aggregate", "aggregate", "update"}
_HOST_DTYPES = (torch.float32, torch.float64)
_DEVICE_DTYPES = (*_HOST_DTYPES, torch.bfloat16, torch.float16)
_CSR = (pyg.SAGEConv, pyg.GraphConv, pyg.GINConv, pyg.SimpleConv, pyg.GCNConv)
"""Layers whose results on a CSR matrix equal those on ``edge_index`` (measured), and that are faster there."""


def is_layer(module: Module) -> bool:
    """Whether a module is a message-passing layer."""
    return isinstance(module, pyg.MessagePassing)


def layers_of(model: Module) -> dict[str, Module]:
    """The message-passing layers of a model by name; a layer within a layer belongs to the outer one."""
    found: dict[str, Module] = {}
    for name, module in model.named_modules():
        outer = any(name.startswith(f"{above}.") or above == "" for above in found)
        if is_layer(module) and not outer:
            found[name] = module
    return found


def is_attention(layer: Module) -> bool:
    """Whether a layer is PyG's GATConv, GATv2Conv or TransformerConv itself; a subclass may do anything."""
    return type(layer) in (pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv)


def adds_self_loops(layer: Module) -> bool:
    """Whether an attention layer adds self-loops; TransformerConv does not have the option."""
    return bool(getattr(layer, "add_self_loops", False))


def is_deterministic(layer: Module) -> bool:
    """Whether a layer's class is known to compute the same in training and evaluation, without dropout or norms."""
    return type(layer) in (pyg.SAGEConv, pyg.GraphConv, pyg.GCNConv, pyg.SimpleConv)


def is_single_input(layer: Module) -> bool:
    """Whether a layer takes one tensor of rows only, not (sources, destinations)."""
    return isinstance(layer, _SINGLE_INPUT)


def takes_edge_weight(layer: Module) -> bool:
    """Whether a layer can be called with one weight per edge."""
    return "edge_weight" in inspect.signature(layer.forward).parameters


def edge_features_are_weights(layer: Module) -> bool:
    """Whether edge features would be used as weights: the layer takes weights and no other edge values."""
    return takes_edge_weight(layer) and "edge_attr" not in inspect.signature(layer.forward).parameters


def edge_features_of(layer: Module) -> int | None:
    """Number of features per edge that a layer takes; None if it takes none or does not declare it."""
    if isinstance(layer, pyg.GINEConv):
        linear = [
            m for m in (layer.lin or layer.nn).modules() if hasattr(m, "in_features") or hasattr(m, "in_channels")
        ]
        width = next((getattr(m, "in_features", getattr(m, "in_channels", None)) for m in linear), None)
    else:
        width = getattr(layer, "edge_dim", None)
    return width if isinstance(width, int) and width > 0 else None


def has_message_hooks(layer: Module) -> bool:
    """Whether a layer has hooks inside its message passing (PyG's ``register_message_forward_hook`` and others)."""
    return any(map(vars(layer).get, _MESSAGE_HOOKS))


def has_own_methods(layer: Module) -> bool:
    """Whether a method of message passing was replaced in this one layer, by an attribute of the instance."""
    return bool(_METHODS & vars(layer).keys())


def reduction_of(layer: Module) -> str | None:
    """``"sum"``, ``"mean"`` or ``"max"``, if a layer aggregates by PyG's module of that name; None otherwise."""
    kinds = {"sum": pyg.aggr.SumAggregation, "mean": pyg.aggr.MeanAggregation, "max": pyg.aggr.MaxAggregation}
    name = "sum" if layer.aggr == "add" else layer.aggr
    return name if isinstance(name, str) and type(layer.aggr_module) is kinds.get(name) else None


def takes_csr(layer: Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a layer is exact and faster on a CSR matrix: its sum or mean is then one sparse product.

    On the CPU under autocast only for a mean of the input rows: torch would compute other products in bfloat16, which
    it does not support for CSR matrices. On devices rows may have 16 bits.
    """
    on_host = device.type == "cpu"
    autocast = on_host and torch.is_autocast_enabled(device.type)
    if autocast and (layer.aggr != "mean" or getattr(layer, "project", False)):
        return False
    plain = reduction_of(layer) in ("sum", "mean") and bool(layer.fuse)
    adds_loops = getattr(layer, "combine_root", None) == "self_loop"  # SimpleConv: fails on a matrix that is not square
    known = type(layer) in _CSR and not (has_message_hooks(layer) or adds_loops or layer.explain)
    return known and plain and dtype in (_HOST_DTYPES if on_host else _DEVICE_DTYPES)
