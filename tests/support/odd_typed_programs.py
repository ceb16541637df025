"""Heterogeneous graphs with little in them, and one step of training on any mesh, by strategy."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Embedding, Linear, Module, ModuleDict, ModuleList
from torch_geometric.nn import GATConv, HeteroConv, SAGEConv

from gsplit.array_types import Ids
from gsplit.distributed.comm.mesh import Mesh
from gsplit.graph.types import EdgeType
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.parallelize import parallelize
from gsplit.store.in_memory import MemoryStore, typed_store

TO = ("a", "to", "b")
BACK = ("b", "back", "a")
WITH = ("b", "with", "b")
FAR = ("c", "far", "a")
Counts = dict[str, int]
Edges = dict[EdgeType, int]
Fanouts = Any
ODD: dict[str, tuple[Counts, Edges, Fanouts]] = {
    "no vertices of a type": ({"a": 0, "b": 20}, {TO: 0, BACK: 0, WITH: 60}, [2, 2]),
    "fewer vertices than ranks": ({"a": 1, "b": 9, "c": 2}, {TO: 9, BACK: 9, FAR: 2}, [2, -1]),
    "fanout 0": ({"a": 12, "b": 20}, {TO: 40, BACK: 40, WITH: 40}, [0, 0]),
    "one layer only": (
        {"a": 12, "b": 20, "c": 9},
        {TO: 40, BACK: 40, WITH: 60, FAR: 30},
        {TO: [3, 0], BACK: [0, 2], WITH: [2, 1], FAR: [0, 2]},
    ),
    "targets are nobody's source": ({"a": 12, "b": 20}, {TO: 60, ("a", "peer", "a"): 40}, [2, 2]),
    "relation without edges": ({"a": 12, "b": 20}, {TO: 0, BACK: 50, WITH: 50}, [2, 2]),
}
STRATEGIES = ("split", "data", "data_cached", "hybrid(1)", "data(owner)")


def odd_store(name: str, num_parts: int) -> MemoryStore:
    """Type a has features of width 3, b of width 4, and c none."""
    counts, sizes, _ = ODD[name]
    rng = np.random.default_rng(5)
    edges: dict[EdgeType, tuple[Ids, Ids]] = {
        relation: (
            rng.integers(0, max(1, counts[relation[0]]), size),
            rng.integers(0, max(1, counts[relation[2]]), size),
        )
        for relation, size in sizes.items()
    }
    arrays: dict[str, Any] = {
        f"features/{kind}/x": (rng.normal(size=(counts[kind], width)), "float64")
        for kind, width in (("a", 3), ("b", 4))
    }
    arrays["y/b"] = (rng.integers(0, 3, counts["b"]), "int64")
    parts = {kind: rng.integers(0, num_parts, count) for kind, count in counts.items()}
    return typed_store(counts, edges, parts, arrays, {})


class OddModel(Module):
    """An encoder for types with features, an embedding for c, and dropout of rows and of attention."""

    def __init__(self, counts: Counts, relations: list[EdgeType]) -> None:
        super().__init__()
        self.lins = ModuleDict({"a": Linear(3, 4), "b": Linear(4, 4)})
        self.c = Embedding(counts.get("c", 1), 4)
        self.first = HeteroConv({r: GATConv((4, 4), 4, add_self_loops=False, dropout=0.3) for r in relations})
        computed = {relation[2] for relation in relations}
        upper = [r for r in relations if r[0] in computed]
        self.layers = ModuleList([self.first, HeteroConv({r: SAGEConv((4, 4), 3) for r in upper})])

    def forward(self, batch: TypedBatch) -> Tensor:
        h = {kind: self.lins[kind](x) for kind, x in batch.x_dict.items()}
        if "c" in batch.n_id_dict:
            h["c"] = self.c(batch.n_id_dict["c"])
        for layer in self.layers:
            h = {
                kind: F.dropout(rows.tanh(), 0.4, self.training)
                for kind, rows in layer(h, batch.edge_index_dict).items()
            }
        out: Tensor = h["b"]
        return out


def train_odd(mesh: Mesh, num_parts: int, strategies: tuple[str, ...] = STRATEGIES) -> dict[str, list[Any]]:
    """The losses and gradients of two steps of every graph and strategy."""
    found = {}
    for name, (counts, sizes, fanouts) in ODD.items():
        store = odd_store(name, num_parts)
        torch.manual_seed(1)
        model = parallelize(OddModel(counts, list(sizes)).double(), mesh, graph=store)
        for strategy in strategies:
            loader = NeighborLoader(
                store, fanouts, ("b", None), batch_size=7, mesh=mesh, strategy=strategy, seed=3, prefetch=1
            )
            values: list[Any] = []
            for batch in list(loader)[:2]:
                loss = batch.mean(F.cross_entropy(model(batch), batch.y, reduction="none"))
                loss.backward()
                values.append(float(loss.detach()))
                values += [np.zeros(1) if p.grad is None else p.grad.numpy().copy() for p in model.parameters()]
                model.zero_grad()
            found[f"{name}, {strategy}"] = values
    return found
