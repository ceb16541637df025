"""Stock models of PyG by name, for the command line and benchmarks."""

from typing import Any

import torch
from torch.nn import Module
from torch_geometric.nn import GAT, GCN, GIN, MLP, PNA, EdgeCNN, GINEConv, GraphConv, GraphSAGE, TransformerConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from gsplit.errors import InputError, explain
from gsplit.files.free_memory import free_bytes
from gsplit.run.config import MODELS

__all__ = ["EDGE_FEATURE_MODELS", "EDGE_WEIGHT_MODELS", "MODELS", "make_model"]

EDGE_FEATURE_MODELS = ("gat", "gatv2", "pna", "transformer", "gine")
"""Models whose layers take features of edges."""
EDGE_WEIGHT_MODELS = ("gcn", "graphconv")
"""Models whose layers take a weight per edge."""


class Transformer(BasicGNN):  # type: ignore[misc]
    """A model of TransformerConv layers."""

    supports_edge_weight = False
    supports_edge_attr = True

    def init_conv(self, in_channels: int, out_channels: int, heads: int = 1, **kwargs: Any) -> Module:
        """Make one layer. The heads of the last layer are averaged."""
        last = getattr(self, "_is_conv_to_out", False)
        width = out_channels if last else out_channels // heads
        conv: Module = TransformerConv(
            in_channels, width, heads=heads, concat=not last, dropout=self.dropout.p, **kwargs
        )
        return conv


class Convolutions(BasicGNN):  # type: ignore[misc]
    """A model of GraphConv layers."""

    supports_edge_weight = True
    supports_edge_attr = False

    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> Module:
        conv: Module = GraphConv(in_channels, out_channels, **kwargs)
        return conv


class GINE(BasicGNN):  # type: ignore[misc]
    """A model of GINEConv layers, which add edge features to messages."""

    supports_edge_weight = False
    supports_edge_attr = True

    def init_conv(self, in_channels: int, out_channels: int, edge_dim: int, **kwargs: Any) -> Module:
        mlp = MLP([in_channels, out_channels, out_channels], act=self.act, norm=None)
        conv: Module = GINEConv(mlp, edge_dim=edge_dim, **kwargs)
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
    edge_dim: int | None = None,
) -> Module:
    """A model of ``MODELS``. ``degrees`` is PNA's histogram of in-degrees; ``edge_dim`` the number of edge features."""
    if kind not in MODELS:
        raise InputError(explain("model", f"one of {', '.join(MODELS)}", kind, "choose one, or write a script"))
    if kind in ("gat", "gatv2", "transformer") and hidden_channels % heads:
        raise InputError(explain("hidden", f"a multiple of {heads} heads", hidden_channels, "change one of them"))
    if (edge_dim is not None and kind not in EDGE_FEATURE_MODELS) or (edge_dim is None and kind == "gine"):
        expected = (
            "edge features" if kind == "gine" else f"no edge features, which {', '.join(EDGE_FEATURE_MODELS)} take"
        )
        raise InputError(explain(f"model {kind}", expected, edge_dim, "choose another model, or other edge values"))
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
        "gcn": (GCN, {}),
        "gine": (GINE, {}),
    }
    model_class, options = classes[kind]
    options = {**common, **options} if edge_dim is None else {**common, **options, "edge_dim": edge_dim}
    _check_fits(model_class, options)
    model: Module = model_class(**options)
    return model


def _check_fits(model_class: Any, options: dict[str, Any]) -> None:
    """Refuse a model whose weights do not fit into free memory, before they are allocated."""
    free = free_bytes()
    fix = "take fewer or narrower layers, or labels with fewer classes"
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):  # the random state stays unchanged
            needed = sum(value.nbytes for value in model_class(**options).state_dict().values())
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes that no tensor can have
        got = str(error).splitlines()[0]
        raise InputError(explain("the model", "weights that fit into memory", got, fix)) from error
    if needed > free:
        raise InputError(explain("the model", f"at most {free} bytes of weights, as are free", needed, fix))
