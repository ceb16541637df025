"""PyG's stock models by name, for the command line and the measurements."""

from typing import Any

import torch
from torch.nn import Module
from torch_geometric.nn import GAT, GCN, GIN, PNA, EdgeCNN, GraphConv, GraphSAGE, TransformerConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from gsplit.errors import InputError, explain

__all__ = ["MODELS", "make_model"]

MODELS = ("sage", "sage_max", "gat", "gatv2", "gin", "pna", "transformer", "graphconv", "edgecnn", "gcn")


class Transformer(BasicGNN):  # type: ignore[misc]
    """TransformerConv as a model of PyG's family."""

    supports_edge_weight = supports_edge_attr = False

    def init_conv(self, in_channels: int, out_channels: int, heads: int = 1, **kwargs: Any) -> Module:
        """One layer; the last one's heads are averaged."""
        last = getattr(self, "_is_conv_to_out", False)
        width = out_channels if last else out_channels // heads
        conv: Module = TransformerConv(
            in_channels, width, heads=heads, concat=not last, dropout=self.dropout.p, **kwargs
        )
        return conv


class Convolutions(BasicGNN):  # type: ignore[misc]
    """GraphConv as a model of PyG's family."""

    supports_edge_weight = supports_edge_attr = False

    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> Module:
        """One layer."""
        conv: Module = GraphConv(in_channels, out_channels, **kwargs)
        return conv


def make_model(
    kind: str,
    *,
    in_channels: int,
    hidden_channels: int,
    num_layers: int,
    out_channels: int,
    dropout: float = 0.0,
    jk: str | None = None,
    norm: str | None = None,
    heads: int = 1,
    degrees: torch.Tensor | None = None,
) -> Module:
    """A model of ``MODELS``. ``degrees`` is PNA's histogram of in-degrees."""
    if kind not in MODELS:
        raise InputError(explain("model", f"one of {', '.join(MODELS)}", kind, "choose one, or write a script"))
    if kind in ("gat", "gatv2", "transformer") and hidden_channels % heads:
        raise InputError(explain("hidden", f"a multiple of {heads} heads", hidden_channels, "change one of them"))
    common: dict[str, Any] = {
        "in_channels": in_channels,
        "hidden_channels": hidden_channels,
        "num_layers": num_layers,
        "out_channels": out_channels,
        "dropout": dropout,
        "jk": jk,
        "norm": norm,
        "norm_kwargs": {"mode": "node"} if norm == "layer_norm" else None,
    }
    pna = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "deg": degrees}
    classes: dict[str, tuple[Any, dict[str, Any]]] = {
        "sage": (GraphSAGE, {}),
        "sage_max": (GraphSAGE, {"aggr": "max"}),
        "gat": (GAT, {"heads": heads}),
        "gatv2": (GAT, {"heads": heads, "v2": True}),
        "gin": (GIN, {}),
        "pna": (PNA, pna),
        "transformer": (Transformer, {"heads": heads}),
        "graphconv": (Convolutions, {}),
        "edgecnn": (EdgeCNN, {}),
        "gcn": (GCN, {"normalize": False}),
    }
    model_class, options = classes[kind]
    model: Module = model_class(**common, **options)
    return model
