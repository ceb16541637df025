"""Steps of a heterogeneous graph against steps of the same graph without its types.

The graph is generated: papers, authors, institutions and fields, eight relations, one width of features. Each side
trains two layers of GraphSAGE, the typed side with a SAGEConv for every relation. Both take single steps in turn, so
that whatever the machine does meanwhile falls on both. Fanouts are such that both draw about as many edges; costs are
compared per drawn edge. The layers of the typed side do more work for an edge (weights for every relation), so making a
batch and the model's part are reported separately, and the model's part also against PyG's layers called by hand on the
blocks of the same mini-batch.
"""

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList
from torch_geometric.nn import GraphSAGE, HeteroConv, SAGEConv

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.graph.types import EdgeType
from gsplit.store.in_memory import MemoryStore, typed_store
from gsplit_bench.ranks import run_ranks

__all__ = ["TypedCost", "bench_typed_steps", "make_stores", "train_both"]

COUNTS = {"paper": 200_000, "author": 250_000, "institution": 7_000, "field": 10_000}
RELATIONS: dict[EdgeType, int] = {
    ("paper", "cites", "paper"): 1_500_000,
    ("paper", "cited_by", "paper"): 1_500_000,
    ("author", "writes", "paper"): 900_000,
    ("paper", "written_by", "author"): 900_000,
    ("author", "works_at", "institution"): 250_000,
    ("institution", "employs", "author"): 250_000,
    ("field", "topic_of", "paper"): 1_200_000,
    ("paper", "has_topic", "field"): 1_200_000,
}
FANOUTS = {"typed": [5, 5], "untyped": [20, 15]}
_WIDTH, _HIDDEN, _CLASSES, _WARM_UP = 128, 256, 40, 2


@dataclass(frozen=True)
class TypedCost:
    """Medians over the steps, summed over the ranks. Ratios: typed to untyped, per drawn edge.

    ``bare_ratio``: the model's part of a typed step to the same layers on plain tensors; 0 on several ranks.
    """

    ranks: int
    steps: int
    typed_edges: float
    untyped_edges: float
    typed_cpu_s: float
    untyped_cpu_s: float
    batch_ratio: float
    model_ratio: float
    step_ratio: float
    bare_ratio: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def make_stores(num_parts: int, scale: float = 1.0) -> dict[str, MemoryStore]:
    """The graph with its types, and the same vertices, numbering and edges without them."""
    rng = np.random.default_rng(0)
    counts = {name: max(1, int(number * scale)) for name, number in COUNTS.items()}
    edges = {
        relation: (
            rng.integers(0, counts[relation[0]], int(number * scale)),
            (rng.random(int(number * scale)) ** 1.5 * counts[relation[2]]).astype(np.int64),
        )
        for relation, number in RELATIONS.items()
    }
    x = {name: rng.random((number, _WIDTH), dtype=np.float32) for name, number in counts.items()}
    y = rng.integers(0, _CLASSES, counts["paper"])
    parts = {name: rng.integers(0, num_parts, number) for name, number in counts.items()}
    arrays = {f"features/{name}/x": (rows, "float32") for name, rows in x.items()}
    typed = typed_store(
        counts, edges, parts, {**arrays, "y/paper": (y, "int64")}, {"paper/train": np.arange(counts["paper"])}
    )
    original = typed.original_ids()
    labels = np.zeros(original.size, np.int64)
    labels[: y.size] = y
    untyped = MemoryStore(
        typed.graph,
        typed.part_boundaries,
        {
            "original_ids": original,
            "features/x": np.concatenate(list(x.values()))[original],
            "y": labels[original],
            "targets/train": typed.stored_array("targets/paper/train"),
        },
        {"features/x": "float32", "y": "int64"},
    )
    return {"typed": typed, "untyped": untyped}


class _RelationSage(Module):
    """Two layers of HeteroConv with a SAGEConv for every relation; the second computes papers only."""

    def __init__(self) -> None:
        super().__init__()
        of_papers = [relation for relation in RELATIONS if relation[2] == "paper"]
        self.convs = ModuleList(
            [
                HeteroConv({relation: SAGEConv((_WIDTH, _WIDTH), _HIDDEN) for relation in RELATIONS}),
                HeteroConv({relation: SAGEConv((_HIDDEN, _HIDDEN), _CLASSES) for relation in of_papers}),
            ]
        )

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[EdgeType, Tensor]) -> Tensor:
        hidden = {name: rows.relu() for name, rows in self.convs[0](x_dict, edge_index_dict).items()}
        out: Tensor = self.convs[1](hidden, edge_index_dict)["paper"]
        return out


def _run_bare(convs: Any, batch: Any) -> None:
    """Forward and backward of PyG's layers on the blocks of a batch of one process."""
    rows = dict(batch.x_dict)
    for layer, conv in enumerate(convs):
        blocks = {relation: batch.part(relation).blocks[layer] for relation in RELATIONS}
        kept = {relation[2]: block.num_dst for relation, block in blocks.items()}
        edges = {relation: block.edge_index() for relation, block in blocks.items()}
        rows = {
            name: torch.stack(
                [
                    conv.convs[relation]((rows[relation[0]], rows[name][: kept[name]]), edges[relation])
                    for relation in RELATIONS
                    if relation[2] == name and relation in conv.convs
                ]
            )
            .sum(0)
            .relu()
            for name in {relation[2] for relation in RELATIONS if relation in conv.convs}
        }
    F.cross_entropy(rows["paper"], batch.y).backward()


def train_both(mesh: Mesh, steps: int, batch_size: int, scale: float) -> dict[str, list[tuple[float, float, int]]]:
    """CPU seconds of making a batch and of the model's part, and the drawn edges, of this rank, step by step.

    On one rank also ``bare``, see ``TypedCost``.
    """
    sides: dict[str, tuple[Any, Module, Any]] = {}
    bare = _RelationSage()
    for side, store in make_stores(mesh.size, scale).items():
        torch.manual_seed(0)
        plain = _RelationSage() if side == "typed" else GraphSAGE(_WIDTH, _HIDDEN, 2, _CLASSES)
        model = gsplit.parallelize(plain, mesh, graph=store if side == "typed" else None)
        targets = ("paper", "train") if side == "typed" else "train"
        loader = gsplit.NeighborLoader(store, FANOUTS[side], targets, batch_size=batch_size, mesh=mesh)
        sides[side] = (loader, model, torch.optim.Adam(model.parameters(), lr=1e-3))
    found: dict[str, list[tuple[float, float, int]]] = {side: [] for side in (*sides, "bare")}
    for step in range(steps + _WARM_UP):
        for side, (loader, model, optimizer) in sides.items():
            start = time.process_time()
            batch = loader.make_batch(0, step)
            made = time.process_time()
            inputs = (batch.x_dict, batch.edge_index_dict) if side == "typed" else (batch.x, batch.edge_index)
            loss = batch.mean(F.cross_entropy(model(*inputs), batch.y, reduction="none"))
            loss.backward()
            trained = time.process_time()
            optimizer.step()
            optimizer.zero_grad()
            edges = batch.telemetry.counts["edges"]
            found[side].append((made - start, trained - made, edges))
            if side == "typed" and mesh.size == 1:
                start = time.process_time()
                _run_bare(bare.convs, batch)
                found["bare"].append((0.0, time.process_time() - start, edges))
                bare.zero_grad()
    return {side: costs[_WARM_UP:] for side, costs in found.items()}


def bench_typed_steps(ranks: int, *, steps: int = 10, batch_size: int = 1024, scale: float = 1.0) -> TypedCost:
    """Train on ``ranks`` ranks and add up their costs."""
    each = run_ranks(train_both, ranks, steps, batch_size, scale, timeout_s=3000.0)
    typed, untyped, bare = (
        [
            median(sum(rank[side][step][k] for rank in each) for step in range(steps)) if each[0][side] else 0
            for k in range(3)
        ]
        for side in ("typed", "untyped", "bare")
    )
    per_edge = untyped[2] / typed[2]
    return TypedCost(
        ranks=ranks,
        steps=steps,
        typed_edges=typed[2],
        untyped_edges=untyped[2],
        typed_cpu_s=typed[0] + typed[1],
        untyped_cpu_s=untyped[0] + untyped[1],
        batch_ratio=typed[0] / untyped[0] * per_edge,
        model_ratio=typed[1] / untyped[1] * per_edge,
        step_ratio=(typed[0] + typed[1]) / (untyped[0] + untyped[1]) * per_edge,
        bare_ratio=typed[1] / bare[1] if bare[1] else 0.0,
    )
