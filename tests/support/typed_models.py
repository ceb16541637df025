"""A small heterogeneous graph, and a model of every kind that GSplit wraps for it, in float64."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, ModuleDict, ModuleList
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, HGTConv, RGATConv, RGCNConv, SAGEConv, to_hetero

from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.store.in_memory import MemoryStore, typed_store

__all__ = [
    "BATCH",
    "CITED_BY",
    "CITES",
    "COUNTS",
    "FANOUTS",
    "Fused",
    "MODELS",
    "RELATIONS",
    "TRAINED",
    "WIDTHS",
    "WRITES",
    "WRITTEN_BY",
    "Hetero",
    "make_data",
    "make_model",
    "make_store",
    "run_model",
]

CITES = ("paper", "cites", "paper")
CITED_BY = ("paper", "cited_by", "paper")
WRITES = ("author", "writes", "paper")
WRITTEN_BY = ("paper", "written_by", "author")
OF = ("field", "of", "paper")
HAS = ("paper", "has", "field")
NEVER = ("author", "never", "field")  # a relation without edges
RELATIONS = (CITES, CITED_BY, WRITES, WRITTEN_BY, OF, HAS, NEVER)
COUNTS = {"paper": 150, "author": 90, "field": 12}
WIDTHS = {"paper": 7, "author": 5, "field": 3}
FANOUTS = {
    CITES: [3, 2],
    CITED_BY: [2, 2],
    WRITES: [4, 3],
    WRITTEN_BY: [3, -1],
    OF: [0, 2],
    HAS: [2, 4],
    NEVER: [1, 1],
}
BATCH = 24
TRAINED = np.arange(0, COUNTS["paper"], 2)


def make_data() -> HeteroData:
    """Hubs, vertices without in-edges, and a relation without edges."""
    rng = np.random.default_rng(3)
    data = HeteroData()
    for name, count in COUNTS.items():
        data[name].x = torch.from_numpy(rng.normal(size=(count, WIDTHS[name])))
    data["paper"].y = torch.from_numpy(rng.integers(0, 4, COUNTS["paper"]))
    for relation in RELATIONS:
        size = 0 if relation == NEVER else 600
        src = rng.integers(0, COUNTS[relation[0]], size)
        dst = (rng.random(size) ** 2 * COUNTS[relation[2]]).astype(np.int64)
        kept = np.unique(np.stack([src, dst])[:, dst % 7 != 3], axis=1)
        data[relation].edge_index = torch.from_numpy(kept)
    return data


def make_store(num_parts: int) -> MemoryStore:
    """The graph in parts. The last part has no fields, so a rank may have none."""
    data = make_data()
    rng = np.random.default_rng(9)
    parts = {name: rng.integers(0, num_parts, count) for name, count in COUNTS.items()}
    parts["field"] = parts["field"] % max(1, num_parts - 1)
    edges = {relation: tuple(data[relation].edge_index.numpy()) for relation in RELATIONS}
    arrays: dict[str, Any] = {f"features/{name}/x": (data[name].x.numpy(), "float64") for name in COUNTS}
    arrays["y/paper"] = (data["paper"].y.numpy(), "int64")
    return typed_store(COUNTS, edges, parts, arrays, {"paper/train": TRAINED})


class Hetero(Module):
    """HeteroConv as in PyG's documentation, with dropout on inputs, hidden rows and attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        hidden = dict.fromkeys(WIDTHS, 8)

        def conv(widths: tuple[int, int]) -> Module:
            if kind == "sage":
                return SAGEConv(widths, 8)  # type: ignore[no-any-return]
            return GATConv(widths, 4, heads=2, dropout=0.4, add_self_loops=False)  # type: ignore[no-any-return]

        self.dropout = 0.5

        self.convs = ModuleList(
            HeteroConv({relation: conv((w[relation[0]], w[relation[2]])) for relation in RELATIONS}, aggr="sum")
            for w in (WIDTHS, hidden)
        )
        self.lin = Linear(8, 4)

    def encode(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> dict[str, Tensor]:
        """The rows of all types after the last layer."""
        x_dict = {name: F.dropout(x, self.dropout / 2, self.training) for name, x in x_dict.items()}
        for conv in self.convs:
            x_dict = {
                name: F.dropout(x.relu(), self.dropout, self.training)
                for name, x in conv(x_dict, edge_index_dict).items()
            }
        return x_dict

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Any:
        return self.lin(self.encode(x_dict, edge_index_dict)["paper"])


class Deep(Module):
    """Three layers: at a boundary in the middle, destinations are not the first local rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.3
        self.lins = ModuleDict({name: Linear(width, 6) for name, width in WIDTHS.items()})
        self.convs = ModuleList(
            HeteroConv({relation: SAGEConv((6, 6), 6) for relation in RELATIONS}, aggr="mean") for _ in range(3)
        )
        self.lin = Linear(6, 4)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        x_dict = {name: self.lins[name](x) for name, x in x_dict.items()}
        for conv in self.convs:
            x_dict = {
                name: F.dropout(x.tanh(), self.dropout, self.training)
                for name, x in conv(x_dict, edge_index_dict).items()
            }
        return self.lin(x_dict["paper"])  # type: ignore[no-any-return]


class _Homogeneous(Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = SAGEConv((-1, -1), 8)
        self.dropout = torch.nn.Dropout(0.5)
        self.conv2 = SAGEConv((-1, -1), 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.dropout(self.conv1(x, edge_index).relu()), edge_index)  # type: ignore[no-any-return]


class Hgt(Module):
    """HGTConv with encoders by type, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.5
        self.lins = ModuleDict({name: Linear(width, 8) for name, width in WIDTHS.items()})
        self.convs = ModuleList(HGTConv(8, 8, (list(COUNTS), list(RELATIONS)), heads=2) for _ in range(2))
        self.lin = Linear(8, 4)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        x_dict = {name: self.lins[name](x).relu() for name, x in x_dict.items()}
        for conv in self.convs:
            x_dict = {
                name: F.dropout(x, self.dropout, self.training) for name, x in conv(x_dict, edge_index_dict).items()
            }
        return self.lin(x_dict["paper"])  # type: ignore[no-any-return]


class Fused(Module):
    """Encoders by type, then layers on one tensor of all rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dropout = 0.5
        self.lins = ModuleDict({name: Linear(width, 8) for name, width in WIDTHS.items()})
        layer: Any = RGCNConv if kind == "rgcn" else RGATConv
        options = {} if kind == "rgcn" else {"dropout": 0.3}
        self.conv1 = layer(8, 8, len(RELATIONS), **options)
        self.conv2 = layer(8, 4, len(RELATIONS), **options)
        if kind == "rgat":
            for conv in (self.conv1, self.conv2):
                torch.nn.init.constant_(
                    conv.l2, 1 / conv.out_channels
                )  # unused here; PyG 2.8.1 leaves it uninitialised

    def encode(self, x_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.lins[name](x) for name, x in x_dict.items()}

    def run(self, x: Tensor, edge_index: Any, edge_type: Any) -> Tensor:
        x = F.dropout(self.conv1(x, edge_index, edge_type).relu(), self.dropout, self.training)
        return self.conv2(x, edge_index, edge_type)  # type: ignore[no-any-return]

    def forward(self, batch: TypedBatch) -> Tensor:
        return self.run(batch.to_homogeneous(self.encode(batch.x_dict)), batch.edge_index, batch.edge_type)


class Normed(Module):
    """BatchNorm by type between layers, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Hetero("sage").convs[0]
        self.norms = ModuleDict({name: BatchNorm1d(8) for name in COUNTS})
        self.second = HeteroConv({relation: SAGEConv(8, 8) for relation in RELATIONS}, aggr="mean")
        self.lin = Linear(8, 4)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        h_dict = {name: self.norms[name](h).relu() for name, h in self.first(x_dict, edge_index_dict).items()}
        out = self.second(h_dict, edge_index_dict)["paper"]
        return self.lin(out + h_dict["paper"][: out.size(0)])  # type: ignore[no-any-return]


def make_model(kind: str) -> Module:
    """A model with the same weights in every process, in float64. That of "to_hetero" has sizes to be found."""
    torch.manual_seed(1)
    if kind in ("sage", "gat"):
        return Hetero(kind).double()
    if kind == "hgt":
        return Hgt().double()
    if kind == "norm":
        return Normed().double()
    if kind == "deep":
        return Deep().double()
    if kind == "to_hetero":
        return to_hetero(_Homogeneous(), (list(COUNTS), list(RELATIONS))).double()  # type: ignore[no-any-return]
    return Fused(kind).double()


MODELS = ("sage", "gat", "to_hetero", "rgcn", "hgt")


def run_model(model: Module, batch: TypedBatch) -> Tensor:
    """The model's outputs for this rank's targets."""
    out = model(batch) if isinstance(model, Fused) else model(batch.x_dict, batch.edge_index_dict)
    found: Tensor = out["paper"] if isinstance(out, dict) else out
    return found
