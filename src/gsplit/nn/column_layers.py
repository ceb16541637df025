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
from gsplit.partial_sums import PartialSums

__all__ = ["check_linear", "run_on_columns"]

_LINEAR = (pyg.SAGEConv, pyg.GCNConv, pyg.GraphConv)


def check_linear(name: str, layer: Module) -> None:
    """Refuse a layer whose output is not a sum over the columns of its input."""
    plain = getattr(layer, "aggr", None) in ("mean", "sum", "add")
    bends = type(layer) is pyg.SAGEConv and bool(layer.normalize or layer.project)
    if type(layer) in _LINEAR and plain and not bends:
        return
    expected = "a bottom layer that is linear in its input: SAGEConv, GCNConv or GraphConv with a mean or sum"
    reason = "attention needs whole rows" if "GAT" in type(layer).__name__ else "its output is no sum over columns"
    got = f"{type(layer).__name__}: {reason}"
    raise InputError(explain(f"strategy='push_pull', {name}", expected, got, "use another strategy"))


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
