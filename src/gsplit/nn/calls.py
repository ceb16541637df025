"""How a model is called with a batch, and what its layers get in place of the batch's handles."""

import inspect
from typing import Any

import torch
from torch.nn import Module

from gsplit.batch import Batch, EdgeHandle, WeightHandle
from gsplit.nn.layers import layers_of, takes_weights

__all__ = ["LayerCall", "call_model", "dtype_of", "needs_weights", "rows_of", "substitute"]

LayerCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""


def needs_weights(model: Module) -> bool:
    """Whether a model's layers want GCN's weights, and its forward takes them."""
    named = "edge_weight" in inspect.signature(model.forward).parameters
    return named and any(takes_weights(layer) for layer in layers_of(model).values())


def call_model(model: Module, batch: Batch) -> Any:
    """Call a model as a training loop does: ``(x, edge_index)``, with ``edge_weight`` for a GCN, or ``(batch)``."""
    if next(iter(inspect.signature(model.forward).parameters), None) == "batch":
        return model(batch)
    if needs_weights(model):
        return model(batch.x, EdgeHandle(batch), edge_weight=WeightHandle(batch))
    return model(batch.x, EdgeHandle(batch))


def dtype_of(model: Module) -> torch.dtype:
    """The type of a model's rows: that of its first parameter of real numbers."""
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.get_default_dtype())


def rows_of(call: LayerCall) -> Any:
    """The rows a layer was called with: its first argument, or ``x``."""
    args, kwargs = call
    return args[0] if args else kwargs.get("x")


def substitute(call: LayerCall, rows: Any, edges: Any, weights: Any) -> LayerCall:
    """A layer's call with other rows, and with edges and weights in place of the handles."""
    given = rows_of(call)

    def swap(value: Any) -> Any:
        if value is given:
            return rows
        if isinstance(value, EdgeHandle):
            return edges
        return weights if isinstance(value, WeightHandle) else value

    return tuple(map(swap, call[0])), {name: swap(value) for name, value in call[1].items()}
