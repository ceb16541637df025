"""How a model is called with a batch: by the names of its forward's parameters."""

import inspect
from typing import Any

from torch.nn import Module

from gsplit.nn.layers import layers_of, takes_weights
from gsplit.strategies.batch import Batch
from gsplit.strategies.handles import EdgeHandle, WeightHandle

__all__ = ["call_model", "needs_weights"]


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
