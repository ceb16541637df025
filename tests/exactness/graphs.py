"""The graphs of the exactness harness: with one vertex type, with three, and odd ones, in memory and as stores on disk.

They have hubs, self-loops, parallel edges, edges in both directions, vertices without edges, equal times and weights of
zero; with types, a relation without edges. Input rows are integers up to 127 times a power of two, of which one is 127,
so that int8 and bfloat16 hold them exactly.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import gsplit
from gsplit.store.feature_types import write_with_features
from gsplit.store.shard import host_range, write_shard
from tests.exactness.case import Case

__all__ = [
    "CITED_BY",
    "CITES",
    "CLASSES",
    "COUNTS",
    "RELATIONS",
    "VERTICES",
    "WEIGHTED",
    "WIDTH",
    "WIDTHS",
    "WITH_ATTR",
    "WRITES",
    "WRITTEN_BY",
    "ends_of_pairs",
    "make_data",
    "partition_of",
    "seeds",
    "open_store",
    "target_type",
    "write_stores",
]

VERTICES, EDGES, WIDTH, CLASSES, EDGE_WIDTH = 90, 900, 5, 4, 3
PARTS = 5
CITES = ("paper", "cites", "paper")
CITED_BY = ("paper", "cited_by", "paper")
WRITES = ("author", "writes", "paper")
WRITTEN_BY = ("paper", "written_by", "author")
OF = ("field", "of", "paper")
HAS = ("paper", "has", "field")
NEVER = ("author", "never", "field")  # has no edges
RELATIONS = (CITES, CITED_BY, WRITES, WRITTEN_BY, OF, HAS, NEVER)
COUNTS = {"paper": 90, "author": 50, "field": 12}
WIDTHS = {"paper": 7, "author": 5, "field": 3}
WITH_ATTR = (CITES, WRITES, WRITTEN_BY)
WEIGHTED = (CITED_BY,)
PAIR_TYPE, REVERSE_TYPE = WRITES, WRITTEN_BY
_TO, _BACK, _WITH, _FAR, _PEER = (
    ("a", "to", "b"),
    ("b", "back", "a"),
    ("b", "with", "b"),
    ("c", "far", "a"),
    ("a", "peer", "a"),
)
ODD: dict[str, tuple[dict[str, int], dict[tuple[str, str, str], int]]] = {
    "no vertices of a type": ({"a": 0, "b": 80}, {_TO: 0, _BACK: 0, _WITH: 240}),
    "fewer vertices than ranks": ({"a": 1, "b": 9, "c": 2}, {_TO: 9, _BACK: 9, _FAR: 2}),
    "no way to a type below the first layer": ({"a": 40, "b": 80, "c": 9}, {_TO: 140, _BACK: 140, _WITH: 60, _FAR: 30}),
    "targets that are no source": ({"a": 40, "b": 80}, {_TO: 200, _PEER: 140}),
}
"""Graphs with little in them: vertices by type, edges by relation. Targets are all vertices of type b."""


def _rows(rng: np.random.Generator, count: int, width: int) -> Tensor:
    numbers = rng.integers(-127, 128, (count, width))
    numbers[np.arange(count), rng.integers(0, width, count)] = 127
    return torch.from_numpy(numbers * 2.0 ** rng.integers(-8, -5, (count, 1))).float()


def _edges(rng: np.random.Generator, num_src: int, num_dst: int, count: int) -> Tensor:
    src = (num_src * rng.random(count) ** 2).astype(np.int64)
    dst = (num_dst * rng.random(count) ** 1.5).astype(np.int64)
    return torch.from_numpy(np.stack([src, dst]))


def _set_edge_values(edges: Any, rng: np.random.Generator, *, attr: bool, weight: bool) -> None:
    count = edges.edge_index.size(1)
    edges.time = torch.from_numpy(rng.integers(0, 60, count))
    edges.chance = torch.from_numpy(rng.random(count) * (rng.random(count) > 0.2))
    if attr:
        edges.edge_attr = torch.from_numpy(rng.normal(size=(count, EDGE_WIDTH)))
    if weight:
        edges.edge_weight = torch.from_numpy(rng.random(count) + 0.1)


@cache
def make_data(types: str) -> Any:
    """The graph as PyG has it, in its original order."""
    rng = np.random.default_rng(3)
    if types == "one":
        data = Data(x=_rows(rng, VERTICES, WIDTH), y=torch.from_numpy(rng.integers(0, CLASSES, VERTICES)))
        data.edge_index = _edges(rng, VERTICES, VERTICES, EDGES)
        data.edge_index[:, :100] = data.edge_index[:, 100:200].flip(0)
        data.edge_index[0, 200:210] = data.edge_index[1, 200:210]
        _set_edge_values(data, rng, attr=True, weight=True)
        order = rng.permutation(VERTICES)
        data.train_mask = torch.zeros(VERTICES, dtype=torch.bool)
        data.train_mask[order[:60]] = True
        data.val_mask = ~data.train_mask
        return data
    if types in ODD:
        return _odd_data(types)
    typed = HeteroData()
    for name, count in COUNTS.items():
        typed[name].x = _rows(rng, count, WIDTHS[name])
    typed["paper"].y = torch.from_numpy(rng.integers(0, CLASSES, COUNTS["paper"]))
    typed["paper"].train_mask = torch.from_numpy(rng.permutation(COUNTS["paper"]) < 60)
    typed["paper"].val_mask = ~typed["paper"].train_mask
    for relation in RELATIONS:
        src, _, dst = relation
        typed[relation].edge_index = _edges(rng, COUNTS[src], COUNTS[dst], 0 if relation == NEVER else 350)
    typed[CITED_BY].edge_index = typed[CITES].edge_index.flip(0)
    typed[WRITTEN_BY].edge_index = typed[WRITES].edge_index.flip(0)
    for relation in RELATIONS:
        _set_edge_values(typed[relation], rng, attr=relation in WITH_ATTR, weight=relation in WEIGHTED)
    return typed


def _odd_data(name: str) -> HeteroData:
    rng = np.random.default_rng(5)
    counts, sizes = ODD[name]
    data = HeteroData()
    for kind, count in counts.items():
        data[kind].x = _rows(rng, count, 4 + len(data.node_types)) if count else torch.zeros(0, 4)
    data["b"].y = torch.from_numpy(rng.integers(0, CLASSES, counts["b"]))
    data["b"].train_mask = torch.ones(counts["b"], dtype=torch.bool)
    data["b"].val_mask = torch.arange(counts["b"]) % 2 == 0
    for relation, size in sizes.items():
        data[relation].edge_index = _edges(rng, counts[relation[0]], counts[relation[2]], size)
    return data


def target_type(types: str) -> str:
    """The vertex type of the targets; empty in the graph with one."""
    return {"one": "", "three": "paper"}.get(types, "b")


@cache
def ends_of_pairs(types: str) -> Tensor:
    """Edges, pairs that are not edges, one twice and, with one type, a vertex with itself."""
    rng = np.random.default_rng(4)
    data = make_data(types)
    edges = data.edge_index if types == "one" else data[WRITES].edge_index
    some = edges[:, torch.from_numpy(rng.permutation(edges.size(1))[:34])]
    most = np.array([VERTICES, VERTICES] if types == "one" else [COUNTS["author"], COUNTS["paper"]])
    others = torch.from_numpy((rng.random((2, 10)) * most[:, None]).astype(np.int64))
    return torch.cat([some, others, torch.tensor([[7, 7, 3, 3], [7, 9, 4, 4]])], dim=1)


@cache
def seeds() -> tuple[Tensor, Tensor]:
    """Targets in no order, some at two times, some before all edges; and their times."""
    rng = np.random.default_rng(4)
    ids = np.concatenate([rng.permutation(VERTICES)[:60], np.arange(10)])
    times = np.concatenate([rng.integers(-1, 60, 60), np.arange(100, 110)])
    return torch.from_numpy(ids), torch.from_numpy(times)


def partition_of(case: Case) -> Any:
    """The part of every vertex, or of every vertex of a type, for a graph in memory; None: ids stay as they are."""
    if case.ownership == "original order":
        return None
    data = make_data(case.types)
    if case.types == "one":
        return _parts(case, VERTICES, is_target=True)
    target = target_type(case.types)
    parts = {name: _parts(case, data[name].num_nodes, is_target=name == target) for name in data.node_types}
    if case.types == "three" and case.ownership == "random":
        parts["field"] %= PARTS - 1  # the last part has none
    return parts


def _parts(case: Case, count: int, *, is_target: bool) -> Tensor:
    rng = np.random.default_rng(9)
    num_splits = case.num_splits
    if case.ownership == "nearly all on rank 0":
        return torch.where(torch.arange(count) < count - 3 * is_target, 0, num_splits - 1)
    if case.ownership == "no targets on rank 1":
        parts = torch.from_numpy(rng.integers(0, num_splits, count))
        return torch.where(parts == 1, 0, parts) if is_target else parts
    return torch.from_numpy(rng.integers(0, PARTS, count))


def open_store(folder: Path, case: Case, rank: int) -> gsplit.Store:
    """The store on disk of a case's tier; ``rank``: that of a shard."""
    kind = case.tier if case.tier in ("int8", "bfloat16") else "mapped"
    if case.tier == "shard":
        kind = f"shard-{rank}-of-{case.num_splits}"
    return gsplit.open(folder / f"{case.types}-{kind}.gsplit")


def write_stores(folder: Path) -> None:
    """The graphs as partitioned stores, with rows in float32, bfloat16 and int8, and as shards of 2 and of 3 ranks."""
    for types in ("one", "three"):
        plain = gsplit.from_pyg(make_data(types), folder / f"{types}.gsplit")
        path = folder / f"{types}-mapped.gsplit"
        targets = "train" if types == "one" else "paper/train"
        store = gsplit.partition(plain, path, PARTS, [4, 3, 3], targets, batch_size=24, solver="restream", epochs=2)
        for dtype in ("int8", "bfloat16"):
            write_with_features(store, folder / f"{types}-{dtype}.gsplit", dtype)
        for ranks in (2, 3) if types == "one" else ():
            for rank in range(ranks):
                write_shard(store, folder / f"one-shard-{rank}-of-{ranks}.gsplit", *host_range(store, rank, ranks))
