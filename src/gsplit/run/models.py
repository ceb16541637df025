"""Stock models of PyG by name, for the command line and benchmarks."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm1d, LayerNorm, Module, ModuleList
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    MLP,
    PNA,
    EdgeCNN,
    GATConv,
    GATv2Conv,
    GINEConv,
    GraphConv,
    GraphSAGE,
    HeteroConv,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.nn.module_dict import ModuleDict

from gsplit.errors import InputError, explain
from gsplit.files.host_limits import free_bytes
from gsplit.graph.types import EdgeType
from gsplit.run.config import MODELS, TYPED_MODELS, check_heads

__all__ = [
    "EDGE_FEATURE_MODELS",
    "EDGE_WEIGHT_MODELS",
    "MODELS",
    "make_model",
    "make_typed_model",
    "relations_of_layers",
]

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
    check_heads(kind, hidden_channels, heads)
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


class TypedModel(Module):
    """A model of a heterogeneous graph: layers of every relation, whose outputs are added (PyG's HeteroConv).

    Between layers as in PyG's stock models: norm, ReLU and dropout. Returns rows of ``vertex_type``.
    """

    def __init__(
        self,
        kind: str,
        widths: Mapping[str, int],
        layers: Sequence[Sequence[EdgeType]],
        vertex_type: str,
        hidden_channels: int,
        out_channels: int,
        dropout: float,
        norm: str | None,
        heads: int,
    ) -> None:
        super().__init__()
        self.vertex_type = vertex_type
        self.dropout = dropout
        self.convs = ModuleList()
        self.norms = ModuleList()
        for number, relations in enumerate(layers):
            is_last = number == len(layers) - 1
            width = out_channels if is_last else hidden_channels
            convs = {
                relation: _typed_conv(
                    kind, _channels(relation, widths), width, heads=heads, dropout=dropout, is_last=is_last
                )
                for relation in relations
            }
            with warnings.catch_warnings():  # types that are not needed above are not computed, which PyG warns of
                warnings.filterwarnings("ignore", message="There exist node types")
                self.convs.append(HeteroConv(convs, aggr="sum"))
            widths = {dst: width for _, _, dst in relations}
            if norm is not None and not is_last:
                kinds = {"batch_norm": BatchNorm1d, "layer_norm": LayerNorm}
                self.norms.append(ModuleDict({name: kinds[norm](width) for name in widths}))

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[EdgeType, Any]) -> Tensor:
        for number, conv in enumerate(self.convs):
            x_dict = conv(x_dict, edge_index_dict)
            if number < len(self.convs) - 1:
                x_dict = {name: self._normed(number, name, x).relu() for name, x in x_dict.items()}
                x_dict = {name: F.dropout(x, self.dropout, self.training) for name, x in x_dict.items()}
        return x_dict[self.vertex_type]

    def _normed(self, number: int, name: str, x: Tensor) -> Tensor:
        norms: Any = self.norms
        return norms[number][name](x) if len(norms) else x


def _channels(relation: EdgeType, widths: Mapping[str, int]) -> int | tuple[int, int]:
    src, _, dst = relation
    return widths[src] if src == dst else (widths[src], widths[dst])


def _typed_conv(
    kind: str, channels: int | tuple[int, int], width: int, *, heads: int, dropout: float, is_last: bool
) -> Module:
    """One layer of one relation. The heads of the last layer are averaged, as in the models above."""
    conv: Module
    if kind in ("sage", "sage_max"):
        conv = SAGEConv(channels, width, aggr="max" if kind == "sage_max" else "mean")
    elif kind == "graphconv":
        conv = GraphConv(channels, width)
    else:
        layer = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}[kind]
        options = {} if kind == "transformer" else {"add_self_loops": False}  # a relation is between two types
        columns = width if is_last else width // heads
        conv = layer(channels, columns, heads=heads, concat=not is_last, dropout=dropout, **options)
    return conv


def make_typed_model(
    kind: str,
    *,
    widths: Mapping[str, int],
    edge_types: Sequence[EdgeType],
    vertex_type: str,
    hidden_channels: int,
    num_layers: int,
    out_channels: int,
    dropout: float = 0.0,
    norm: str | None = None,
    heads: int = 1,
) -> Module:
    """A model of ``TYPED_MODELS`` for the targets of one vertex type. ``widths``: input columns by vertex type."""
    if kind not in TYPED_MODELS:
        expected = f"one of {', '.join(TYPED_MODELS)} for a heterogeneous graph"
        raise InputError(explain("model", expected, kind, "choose one, or write a script"))
    check_heads(kind, hidden_channels, heads)
    options = {
        "kind": kind,
        "widths": widths,
        "layers": relations_of_layers(widths, edge_types, vertex_type, num_layers),
        "vertex_type": vertex_type,
        "hidden_channels": hidden_channels,
        "out_channels": out_channels,
        "dropout": dropout,
        "norm": norm,
        "heads": heads,
    }
    _check_fits(TypedModel, options)
    return TypedModel(**options)  # type: ignore[arg-type]


def relations_of_layers(
    types: Collection[str], edge_types: Sequence[EdgeType], vertex_type: str, num_layers: int
) -> list[list[EdgeType]]:
    """The relations that every layer computes: both ends have rows, and the outputs for ``vertex_type`` need them.

    ``types`` have input rows. Above a layer, the types have rows that receive messages there.

    >>> writes, cites = ("author", "writes", "paper"), ("paper", "cites", "paper")
    >>> relations_of_layers(["author", "paper"], [writes, cites], "paper", 2) == [[writes, cites], [cites]]
    True
    """
    has_rows = set(types)
    layers = []
    for _ in range(num_layers):
        layers.append([each for each in edge_types if each[0] in has_rows and each[2] in has_rows])
        has_rows = {dst for _, _, dst in layers[-1]}
    if vertex_type not in has_rows:
        got = f"{vertex_type}, which is the destination of no such type"
        fix = "import reverse edges, or use fewer layers"
        raise InputError(explain("edge types", f"some into the targets' type at each of {num_layers} layers", got, fix))
    needed = {vertex_type}
    for number in reversed(range(num_layers)):
        layers[number] = [each for each in layers[number] if each[2] in needed]
        needed |= {src for src, _, _ in layers[number]}
    return layers
