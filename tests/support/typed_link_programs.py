"""Users, items and tags, with pairs to predict, and training of a heterogeneous encoder on any mesh."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch_geometric.nn import HeteroConv, SAGEConv

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.minibatch.typed_batch import TypedLinkBatch
from gsplit.store.in_memory import MemoryStore, typed_store

RATES = ("user", "rates", "item")
RATED_BY = ("item", "rev_rates", "user")
VIEWS = ("user", "views", "item")  # the same edges as RATES, which must not be excluded with it
LIKE = ("item", "like", "item")
TAGS = ("tag", "of", "item")
TAGGED = ("item", "rev_of", "tag")
RELATIONS = (RATES, RATED_BY, VIEWS, LIKE, TAGS, TAGGED)
COUNTS = {"user": 40, "tag": 5, "item": 60}
WIDTHS = {"user": 3, "tag": 2, "item": 4}
STRATEGIES = ("split", "data", "data_cached", "hybrid(1)")
NEGATIVES: dict[str, Any] = {
    "binary": {"mode": "binary", "amount": 2},
    "triplet": {"mode": "triplet", "amount": 3},
    "joint": {"mode": "joint", "amount": 4},
    "in_batch": "in_batch",
    "decoded": {"mode": "binary", "amount": 1},
}
"""By name; ``decoded`` is trained with a model that decodes pairs itself."""


def rated() -> np.ndarray[Any, Any]:
    """The edges of RATES [2, n], each once."""
    rng = np.random.default_rng(2)
    src = (COUNTS["user"] * rng.random(300) ** 2).astype(np.int64)
    return np.unique(np.stack([src, rng.integers(0, COUNTS["item"], 300)]), axis=1)


def link_graph() -> tuple[dict[Any, Any], dict[str, Any]]:
    """The edges of every relation, and the features of every type."""
    rng = np.random.default_rng(6)
    ends = rated()
    like = rng.integers(0, COUNTS["item"], (2, 150))
    tags = np.stack([rng.integers(0, COUNTS["tag"], 80), rng.integers(0, COUNTS["item"], 80)])
    edges = {
        RATES: (ends[0], ends[1]),
        RATED_BY: (ends[1], ends[0]),
        VIEWS: (ends[0], ends[1]),
        LIKE: (like[0], like[1]),
        TAGS: (tags[0], tags[1]),
        TAGGED: (tags[1], tags[0]),
    }
    return edges, {name: rng.normal(size=(count, WIDTHS[name])) for name, count in COUNTS.items()}


def link_store(num_parts: int) -> MemoryStore:
    """The graph in parts. Tags are in one part only."""
    rng = np.random.default_rng(7)
    edges, features = link_graph()
    arrays: dict[str, Any] = {f"features/{name}/x": (x, "float64") for name, x in features.items()}
    parts = {name: rng.integers(0, num_parts, count) for name, count in COUNTS.items()}
    parts["tag"] = 0 * parts["tag"]
    return typed_store(COUNTS, edges, parts, arrays, {})


class Encoder(Module):
    """Two layers of all relations with dropout; returns rows of all types."""

    def __init__(self) -> None:
        super().__init__()
        hidden = dict.fromkeys(WIDTHS, 6)
        self.convs = ModuleList(
            HeteroConv({r: SAGEConv((w[r[0]], w[r[2]]), 6) for r in RELATIONS}, aggr="mean") for w in (WIDTHS, hidden)
        )

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> dict[str, Tensor]:
        for conv in self.convs:
            x_dict = {k: F.dropout(h.tanh(), 0.3, self.training) for k, h in conv(x_dict, edge_index_dict).items()}
        return x_dict


class PairModel(Module):
    """Decodes pairs of users and items by layers of its own, with dropout on the endpoints and on the pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.hidden = Linear(12, 5)
        self.last = Linear(5, 1)

    def score(self, src: Tensor, dst: Tensor) -> Tensor:
        hidden = F.dropout(self.hidden(torch.cat([src, dst], dim=-1)).tanh(), 0.3, self.training)
        return self.last(hidden).view(-1)  # type: ignore[no-any-return]

    def forward(self, batch: TypedLinkBatch) -> Tensor:
        z_dict = batch.endpoints(self.encoder(batch.x_dict, batch.edge_index_dict))
        users, items = (F.dropout(z_dict[name], 0.3, self.training) for name in ("user", "item"))
        return self.score(users[batch.edge_label_index[0]], items[batch.edge_label_index[1]])


def make_pair_model() -> PairModel:
    torch.manual_seed(2)
    return PairModel().double()


def make_encoder() -> Module:
    torch.manual_seed(1)
    return Encoder().double()


def link_loader(mesh: Mesh, mode: str, strategy: str, num_parts: int, **options: Any) -> gsplit.LinkNeighborLoader:
    given: dict[str, Any] = {"batch_size": 16, "seed": 4, "num_neighbors": [3, 2], "neg_sampling": NEGATIVES[mode]}
    given["edge_label_index"] = (RATES, torch.from_numpy(rated()[:, ::4]))
    return gsplit.LinkNeighborLoader(
        link_store(num_parts),
        strategy=strategy,
        mesh=mesh,
        **(given | options),
    )


def _pairs_of(batch: TypedLinkBatch, z_dict: dict[str, Tensor] | None) -> set[tuple[int, int]]:
    """This rank's pairs by the ids of their rows, without negatives."""
    ids = batch.endpoint_id_dict
    if z_dict is not None:
        assert set(z_dict) == {"user", "item"} and all(z_dict[name].size(0) == ids[name].numel() for name in ids)
    index = batch.pair_rows.index[:, : batch.input_id.numel()]
    return set(zip(ids["user"][index[0]].tolist(), ids["item"][index[1]].tolist(), strict=True))


METRICS = ("mrr", "hits@1", "hits@5")


def plain_rows(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of PyG's model on the whole graph, by type."""
    edges, features = link_graph()
    plain = Encoder().double().eval()
    plain.load_state_dict(weights)
    edge_index_dict = {of: torch.from_numpy(np.stack(ends)) for of, ends in edges.items()}
    with torch.no_grad():
        found: dict[str, Tensor] = plain({of: torch.from_numpy(x) for of, x in features.items()}, edge_index_dict)
    return found


def with_stored_negatives(store: MemoryStore) -> MemoryStore:
    """The graph with stored pairs "test" and 7 fixed negatives of each, by ids in the types."""
    pairs = rated()[:, ::3]
    negatives = np.random.default_rng(9).integers(0, COUNTS["item"], (pairs.shape[1], 7))
    negatives[:, 3] = pairs[1]  # a tie
    arrays = store.arrays | {"pairs/test": pairs.T, "pair_negatives/test": negatives}
    return MemoryStore(store.graph, store.part_boundaries, arrays, store.dtypes, types=store.types)
