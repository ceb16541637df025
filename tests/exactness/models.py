"""The models of the exactness harness, of three layers, in float64, with the same weights in every process."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, ModuleDict, ModuleList
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GraphConv,
    HeteroConv,
    HGTConv,
    RGATConv,
    RGCNConv,
    SAGEConv,
    to_hetero,
)

from gsplit.run import models as stock
from tests.exactness.case import Case
from tests.exactness.graphs import CLASSES, EDGE_WIDTH, WIDTH, make_data, target_type

__all__ = ["call_model", "make_model", "widths_of"]

LAYERS, HIDDEN, DROPOUT = 3, 8, 0.3


def widths_of(types: str) -> dict[str, int]:
    """The columns of every vertex type."""
    data = make_data(types)
    return {name: data[name].x.size(1) for name in data.node_types}


class Hetero(Module):
    """HeteroConv as in PyG's documentation, with dropout on hidden rows and in attention; rows of papers or of all
    types.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.dropout = DROPOUT
        self.of_pairs = case.is_of_pairs
        self.takes_values = case.values == "stored"
        self.target = target_type(case.types)
        self.data = [make_data(case.types)]  # in a list: not a part of the model
        widths = widths_of(case.types)
        hidden = dict.fromkeys(widths, HIDDEN)
        self.convs = ModuleList(self._layers(case, widths, hidden))
        self.norms = ModuleDict({name: BatchNorm1d(HIDDEN) for name in widths if case.model == "batch_norm"})
        self.lin = Linear(HIDDEN, CLASSES)

    def _layers(self, case: Case, widths: dict[str, int], hidden: dict[str, int]) -> Iterator[HeteroConv]:
        """Without the relations whose sources the layer below does not compute."""
        relations = self.data[0].edge_types
        for w in (widths, *[hidden] * (LAYERS - 1)):
            with warnings.catch_warnings(action="ignore"):  # of types that are sources only
                yield HeteroConv({relation: self._conv(case, relation, w) for relation in relations}, aggr="sum")
            computed = {relation[2] for relation in relations}
            relations = [relation for relation in relations if relation[0] in computed]

    def _conv(self, case: Case, relation: tuple[str, str, str], w: dict[str, int]) -> Module:
        ends = (w[relation[0]], w[relation[2]])
        values = self.data[0][relation]
        if case.values == "stored" and "edge_weight" in values:
            return GraphConv(ends, HIDDEN)  # type: ignore[no-any-return]
        if case.values == "stored" and "edge_attr" in values:
            return GATv2Conv(ends, HIDDEN, add_self_loops=False, edge_dim=EDGE_WIDTH)  # type: ignore[no-any-return]
        if case.model == "gat":
            return GATConv(ends, HIDDEN // 2, heads=2, dropout=DROPOUT, add_self_loops=False)  # type: ignore[no-any-return]
        return SAGEConv(ends, HIDDEN)  # type: ignore[no-any-return]

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: Any, edge_attr_dict: Any = None, edge_weight_dict: Any = None
    ) -> Any:
        given = {"edge_attr_dict": edge_attr_dict, "edge_weight_dict": edge_weight_dict} if self.takes_values else {}
        for number, conv in enumerate(self.convs):
            x_dict = conv(x_dict, edge_index_dict, **given)
            if self.norms and number == 0:
                x_dict = {name: self.norms[name](x) for name, x in x_dict.items()}
            x_dict = {name: F.dropout(x.relu(), self.dropout, self.training) for name, x in x_dict.items()}
        return x_dict if self.of_pairs else self.lin(x_dict[self.target])


class Hgt(Module):
    """HGTConv behind encoders by type."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = DROPOUT
        self.lins = ModuleDict({name: Linear(width, HIDDEN) for name, width in widths_of("three").items()})
        metadata = make_data("three").metadata()
        self.convs = ModuleList(HGTConv(HIDDEN, HIDDEN, metadata, heads=2) for _ in range(LAYERS))
        self.lin = Linear(HIDDEN, CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Any:
        x_dict = {name: self.lins[name](x).relu() for name, x in x_dict.items()}
        for conv in self.convs:
            x_dict = {
                name: F.dropout(x, self.dropout, self.training) for name, x in conv(x_dict, edge_index_dict).items()
            }
        return self.lin(x_dict["paper"])


class Fused(Module):
    """Encoders by type, then layers on one tensor of the rows of all types."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dropout = DROPOUT
        self.lins = ModuleDict({name: Linear(width, HIDDEN) for name, width in widths_of("three").items()})
        num_relations = len(make_data("three").edge_types)
        layer: Any = RGCNConv if kind == "rgcn" else RGATConv
        options = {} if kind == "rgcn" else {"dropout": DROPOUT}
        widths = [HIDDEN] * LAYERS + [CLASSES]
        self.convs = ModuleList(
            layer(widths[number], widths[number + 1], num_relations, **options) for number in range(LAYERS)
        )
        conv: Any
        for conv in self.convs if kind == "rgat" else ():
            torch.nn.init.constant_(conv.l2, 1 / conv.out_channels)  # unused; PyG leaves it uninitialised

    def forward(self, batch: Any) -> Tensor:
        x: Tensor = batch.to_homogeneous({name: self.lins[name](x) for name, x in batch.x_dict.items()})
        for number, conv in enumerate(self.convs):
            x = conv(x, batch.edge_index, batch.edge_type)
            if number < LAYERS - 1:
                x = F.dropout(x.relu(), self.dropout, self.training)
        return x


class Untyped(Module):
    """What ``to_hetero`` makes a model by type of; its sizes are found from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = SAGEConv((-1, -1), HIDDEN)
        self.conv2 = SAGEConv((-1, -1), HIDDEN)
        self.conv3 = SAGEConv((-1, -1), CLASSES)
        self.dropout = torch.nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.dropout(self.conv1(x, edge_index).relu())
        return self.conv3(self.conv2(x, edge_index).relu(), edge_index)  # type: ignore[no-any-return]


class Decoder(Module):
    """Decodes pairs itself, with parameters, and dropout on the rows of endpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = stock.make_model(
            "sage", in_channels=WIDTH, hidden_channels=HIDDEN, num_layers=LAYERS, out_channels=HIDDEN, dropout=DROPOUT
        )
        self.dropout = DROPOUT
        self.lin = Linear(HIDDEN, HIDDEN)

    def forward(self, batch: Any) -> Tensor:
        z = batch.endpoints(self.encoder(batch.x, batch.edge_index))
        return self.lin(F.dropout(z, self.dropout, self.training))  # type: ignore[no-any-return]


def make_model(case: Case) -> Module:
    """The model of a case."""
    torch.manual_seed(0)
    model = _make(case)
    if case.dropout == "off":
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0  # type: ignore[assignment]
    return model.double()


def _make(case: Case) -> Module:
    if case.model == "decoder":
        return Decoder()
    if case.model == "hgt":
        return Hgt()
    if case.model in ("rgcn", "rgat"):
        return Fused(case.model)
    if case.model == "to_hetero":
        return to_hetero(Untyped(), make_data(case.types).metadata())  # type: ignore[no-any-return]
    if case.types != "one":
        return Hetero(case)
    normed = case.model == "batch_norm"
    return stock.make_model(
        "sage" if normed else case.model,
        in_channels=WIDTH,
        hidden_channels=HIDDEN,
        num_layers=LAYERS,
        out_channels=6 if case.is_of_pairs else CLASSES,
        dropout=DROPOUT,
        jk=None if case.jk == "none" else case.jk,
        norm="batch_norm" if normed else None,
        heads=2,
        degrees=torch.arange(1, 6),
        edge_dim=EDGE_WIDTH if case.values == "stored" and case.model in stock.EDGE_FEATURE_MODELS else None,
    )


def call_model(case: Case, model: Module, batch: Any, owned: dict[str, Any]) -> Any:
    """The output of a model for a mini-batch. ``owned``: embeddings by vertex type, "" without types."""
    if case.model in ("decoder", "rgcn", "rgat"):
        return model(batch)
    if case.types != "one":
        values = (batch.edge_attr_dict, batch.edge_weight_dict) if case.values == "stored" else ()
        rows = {name: table(batch) for name, table in owned.items()}
        out = model({**batch.x_dict, **rows}, batch.edge_index_dict, *values)
        return out[target_type(case.types)] if isinstance(out, dict) and not case.is_of_pairs else out
    x = owned[""](batch) if owned else batch.x
    if case.values == "none":
        return model(x, batch.edge_index)
    if case.model in stock.EDGE_WEIGHT_MODELS:
        return model(x, batch.edge_index, edge_weight=batch.edge_weight)
    return model(x, batch.edge_index, edge_attr=batch.edge_attr)
