"""The bottom layer on some columns of its input, for layers that are linear in it (``partial_sums``).

A layer that is linear in x gives, on columns c of x and the same columns of its weights, its share of the output; the
shares of all columns add up to it, and the bias is added once:

    out = b + sum over c of layer(x[:, c]; W[:, c], b = 0)

The layer itself is called, with slices of its own weights in their place, so gradients flow to it.
"""

from torch import Tensor
from torch.func import functional_call
from torch.nn import Module
from torch_geometric import nn as pyg

from gsplit.errors import InputError, explain
from gsplit.nn.calls import LayerCall
from gsplit.nn.hooks import is_hooked_by_others
from gsplit.nn.layers import has_message_hooks
from gsplit.partial_sums import PartialSums

__all__ = ["check_linear", "run_on_columns"]

_PARAMETERS = {
    pyg.SAGEConv: {"lin_l.weight", "lin_l.bias", "lin_r.weight"},
    pyg.GCNConv: {"lin.weight", "bias"},
    pyg.GraphConv: {"lin_rel.weight", "lin_rel.bias", "lin_root.weight"},
}
"""Layers that are linear in their input, and all the parameters they may have; at most one of them is a bias."""


def check_linear(name: str, layer: Module) -> None:
    """Refuse a layer whose output is not a sum over the columns of its input."""
    if _is_linear(layer):
        return
    expected = "a bottom layer that is linear in its input: SAGEConv, GCNConv or GraphConv with a mean or sum"
    reason = "attention needs whole rows" if "GAT" in type(layer).__name__ else "its output is no sum over columns"
    got = f"{type(layer).__name__}: {reason}"
    raise InputError(explain(f"strategy='push_pull', {name}", expected, got, "use another strategy"))


def _is_linear(layer: Module) -> bool:
    """One of the layers known to be, untouched: with its own parameters and projections, and hooks of nobody else."""
    known = _PARAMETERS.get(type(layer))
    if known is None or not {name for name, _ in layer.named_parameters()} <= known:
        return False
    projections = [module for name, module in layer.named_children() if name.startswith("lin")]
    touched = has_message_hooks(layer) or any(map(is_hooked_by_others, (layer, *projections)))
    own = all(type(module) is pyg.Linear for module in projections)
    bends = bool(getattr(layer, "normalize", False) and type(layer) is pyg.SAGEConv) or getattr(layer, "project", False)
    return own and not touched and not bends and getattr(layer, "aggr", None) in ("mean", "sum", "add")


def run_on_columns(layer: Module, call: LayerCall, sums: PartialSums) -> tuple[Tensor, Tensor | None]:
    """What a rank's columns contribute to the layer's output, and the bias that is to be added to the sum."""
    columns = slice(sums.first_column, sums.stop_column)
    parameters, bias = dict[str, Tensor](), None
    for name, value in layer.named_parameters():
        if value.dim() == 2:
            parameters[name] = value[:, columns]
        else:
            assert bias is None, name  # these layers have one
            bias, parameters[name] = value, value.detach().new_zeros(value.shape)
    partial: Tensor = functional_call(layer, parameters, *call)
    return partial, bias
