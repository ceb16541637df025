"""What ranks run in the tests of link prediction: some steps of training on pairs, and what they saw."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.sampling.pairs import StoredPairs, parse_negatives
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.in_memory import MemoryStore, renumbered_store
from gsplit.store.reader import Store

VERTICES, WIDTH, BATCH, SEED = 90, 5, 16, 5
NEGATIVES: dict[str, Any] = {
    "binary": {"mode": "binary", "amount": 2},
    "fraction": {"mode": "binary", "amount": 0.5},
    "triplet": {"mode": "triplet", "amount": 2},
    "joint": {"mode": "joint", "amount": 7},
    "in_batch": "in_batch",
    "labels": None,
}

__all__ = [
    "LinkCase",
    "LinkResult",
    "PLANNED",
    "PairScores",
    "TripletScores",
    "count_links",
    "link_loader",
    "link_store",
    "pairs_of",
    "store_with_pairs",
    "train_links",
    "train_piece_of_links",
    "train_pieces_of_links",
    "verify_links",
]


@dataclass(frozen=True)
class LinkCase:
    """``parts``: how vertices are numbered, "original", "mixed", or "first" with all on the first rank but few."""

    strategy: str = "split"
    negatives: str = "binary"
    exclude: Any = "reverse"
    prefetch: int = 0
    parts: str = "mixed"
    batch_size: int = BATCH
    sampler: str = "uniform"


@dataclass
class LinkResult:
    """Of one rank: what all ranks share (losses, gradients), and what this rank had."""

    losses: list[float] = field(default_factory=list)
    gradients: list[npt.NDArray[np.float64]] = field(default_factory=list)
    num_edges: int = 0
    counts: list[tuple[int, int, int]] = field(default_factory=list)
    """Targets, pairs and values of every step."""
    edges: list[list[tuple[int, int]]] = field(default_factory=list)
    """All edges of all layers of every step, by original id."""
    pairs: list[dict[int, list[int]]] = field(default_factory=list)
    """For every step: the original ids of the endpoints of a pair, by its list position; negatives last."""


@cache
def _edges() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    rng = np.random.default_rng(3)
    count = 8 * VERTICES
    src = (VERTICES * rng.random(count) ** 2).astype(np.int64)
    dst = (VERTICES * rng.random(count) ** 1.5).astype(np.int64)
    return np.concatenate([src, dst[:100]]), np.concatenate([dst, src[:100]])  # some in both directions


def pairs_of() -> Tensor:
    """Edges, pairs that are not edges, a vertex with itself, and a pair twice; by original id."""
    rng = np.random.default_rng(4)
    src, dst = _edges()
    some = rng.permutation(src.size)[:30]
    others = rng.integers(0, VERTICES, (2, 12))
    pairs = np.concatenate([np.stack([src[some], dst[some]]), others, [[7, 7, 3, 3], [7, 9, 4, 4]]], axis=1)
    return torch.from_numpy(pairs)


def link_store(parts: str) -> tuple[MemoryStore, dict[int, Ownership]]:
    """The graph in a numbering, and the owners for a number of ranks."""
    rng = np.random.default_rng(1)
    src, dst = _edges()
    arrays = {"features/x": (rng.normal(size=(VERTICES, WIDTH)), "float64")}
    order = np.zeros(VERTICES, np.int64) if parts == "original" else np.random.default_rng(8).permutation(VERTICES)
    store = renumbered_store(src, dst, order, arrays, {})
    cuts = {2: (0, 33, 90), 3: (0, 20, 61, 90), 4: (0, 20, 20, 61, 90)}
    if parts == "first":
        cuts = {2: (0, 90, 90), 3: (0, 86, 86, 90), 4: (0, 88, 88, 88, 90)}
    owners = {1: Ownership((0, VERTICES))} | {ranks: Ownership(found) for ranks, found in cuts.items()}
    return MemoryStore(store.graph, [0, VERTICES], store.arrays, store.dtypes), owners


def store_with_pairs(path: Path, num_vertices: int = 300, num_pairs: int = 200) -> Store:
    """A store without labels whose edges are also pairs: train, val, test, and some with labels of 0 and 1."""
    planted = PlantedGraph(num_vertices, 8 * num_vertices, num_features=WIDTH, seed=3)
    store = build_store(replace(synthetic_source(planted), y=None, class_names=(), targets={}), path)
    graph = store.graph
    dst = np.repeat(np.arange(num_vertices), graph.in_degrees())
    edges = np.stack([np.asarray(graph.indices, np.int64), dst])
    edges = edges[:, np.random.default_rng(0).permutation(graph.num_edges)]
    for number, name in enumerate(("train", "val", "test", "labelled")):
        labels = np.arange(num_pairs) % 2 if name == "labelled" else None
        pairs = edges[:, number * num_pairs : (number + 1) * num_pairs]
        store = gsplit.add_pairs(store, name, pairs, labels=labels)
    return store


def link_loader(mesh: Mesh, case: LinkCase) -> gsplit.LinkNeighborLoader:
    store, owners = link_store(case.parts)
    pairs = pairs_of()
    label = torch.arange(pairs.size(1)) % 2 if case.negatives == "labels" else None
    return gsplit.LinkNeighborLoader(
        store,
        [4, 3],
        pairs,
        edge_label=label,
        neg_sampling=NEGATIVES[case.negatives],
        exclude_seed_edges=case.exclude,
        batch_size=case.batch_size,
        mesh=mesh,
        strategy=case.strategy,
        ownership=owners[mesh.num_splits],
        prefetch=case.prefetch,
        sampling_threads=max(1, case.prefetch),
        sampler="uniform" if case.sampler == "replace" else case.sampler,
        replace=case.sampler == "replace",
        seed=SEED,
    )


def loss_of(z: Tensor, batch: LinkBatch) -> Tensor:
    """One value per value of the batch."""
    mode = batch.pair_rows.mode
    if mode == "binary":
        score = (z[batch.edge_label_index[0]] * z[batch.edge_label_index[1]]).sum(-1)
        return F.binary_cross_entropy_with_logits(score, batch.edge_label.to(z.dtype), reduction="none")
    src = z[batch.src_index]
    if mode == "in_batch":
        return F.cross_entropy(src @ z[batch.candidates].T, batch.own_columns, reduction="none")
    positive = (src * z[batch.dst_pos_index]).sum(-1, keepdim=True)
    if mode == "joint":
        return F.softplus(src @ z[batch.dst_neg_index].T - positive).mean(1)
    return F.softplus((src.unsqueeze(1) * z[batch.dst_neg_index]).sum(-1) - positive).mean(1)


def train_links(mesh: Mesh, cases: list[LinkCase], steps: int = 3) -> list[LinkResult]:
    """Train every case; all ranks return the same losses and gradients."""
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(WIDTH, 8, 2, 6, dropout=0.3).double(), mesh)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    results = []
    for case in cases:
        model.load_state_dict(weights)
        results.append(_train(mesh, model, case, steps))
    return results


def _train(mesh: Mesh, model: torch.nn.Module, case: LinkCase, steps: int) -> LinkResult:
    loader = link_loader(mesh, case)
    loader.load_state_dict({"epoch": 1, "step": 0})
    result = LinkResult()
    for number, batch in enumerate(loader):
        if number == steps:
            break
        z = model(batch.x, batch.edge_index)
        loss = batch.mean(loss_of(z, batch))
        loss.backward()
        result.losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                result.gradients.append(parameter.grad.numpy().copy())
                parameter.sub_(parameter.grad, alpha=0.05)
        model.zero_grad()
        _record(batch, z, result)
    return result


def _record(batch: LinkBatch, z: Tensor, result: LinkResult) -> None:
    edges: list[tuple[int, int]] = []
    for layer, block in enumerate(batch.blocks):
        src, dst = block.edge_index()
        src_ids = batch.mixed_ids(layer)[src]  # all ranks: once per layer
        edges += zip(src_ids.tolist(), batch.destinations(layer).n_id[dst].tolist(), strict=True)
    result.edges.append(edges)
    result.num_edges += len(edges)
    rows = batch.pair_rows
    result.counts.append((batch.num_targets, rows.input_id.numel(), batch.num_values))
    assert z.size(0) == batch.endpoint_ids.numel()
    ids = batch.endpoint_ids
    found = {}
    n = rows.input_id.numel()
    for number, position in enumerate(rows.input_id.tolist()):
        ends = ids[rows.index[:, number]].tolist()
        if rows.mode == "triplet":
            ends += ids[rows.negatives[number]].tolist()
        if rows.mode == "joint":
            ends += ids[rows.negatives].tolist()
        found[position] = ends
    if rows.mode == "binary":
        found[-1] = sorted(zip(*ids[rows.index[:, n:]].tolist(), strict=True))
    result.pairs.append(found)


class PairScores(torch.nn.Module):
    """Decodes pairs itself, with parameters, and dropout on endpoints and on pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = GraphSAGE(WIDTH, 8, 2, 6, dropout=0.2)
        self.hidden = torch.nn.Linear(6, 5)
        self.out = torch.nn.Linear(5, 1)

    def forward(self, batch: LinkBatch) -> Tensor:
        z = F.dropout(batch.endpoints(self.encoder(batch.x, batch.edge_index)), 0.3, self.training)
        return self.score(z[batch.edge_label_index[0]], z[batch.edge_label_index[1]])

    def score(self, src: Tensor, dst: Tensor) -> Tensor:
        h = F.dropout(self.hidden(src * dst).relu(), 0.3, self.training)
        return self.out(h).squeeze(-1)  # type: ignore[no-any-return]


class TripletScores(torch.nn.Module):
    """Decodes pairs and their negatives itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = GraphSAGE(WIDTH, 8, 2, 6)
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, batch: LinkBatch) -> tuple[Tensor, Tensor]:
        z = batch.endpoints(self.encoder(batch.x, batch.edge_index))
        src = z[batch.src_index] * self.weight
        return (src * z[batch.dst_pos_index]).sum(-1), (src.unsqueeze(1) * z[batch.dst_neg_index]).sum(-1)


def _triplet_loss(out: tuple[Tensor, Tensor], batch: LinkBatch) -> Tensor:
    return F.softplus(out[1] - out[0].unsqueeze(1)).mean(1)


def verify_links(mesh: Mesh) -> list[tuple[str, float, float, bool]]:
    """``gsplit.verify`` of encoders and of models that decode, with losses by name; the largest errors."""
    store, _ = link_store("mixed")
    torch.manual_seed(1)
    encoder = GraphSAGE(WIDTH, 8, 2, 6, dropout=0.2)
    runs: list[tuple[str, torch.nn.Module, str, Any, str]] = [
        ("encoder", encoder, "in_batch", "cross_entropy", "split"),
        ("encoder", encoder, "triplet", "bpr", "data"),
        ("encoder", encoder, "joint", "cross_entropy", "hybrid(1)"),
        ("pairs", PairScores(), "binary", "cross_entropy", "split"),
        ("pairs", PairScores(), "fraction", "cross_entropy", "data"),
        ("pairs", PairScores(), "binary", "cross_entropy", "hybrid(1)"),
        ("triplets", TripletScores(), "triplet", _triplet_loss, "split"),
        ("triplets", TripletScores(), "triplet", _triplet_loss, "data_cached"),
    ]
    results = []
    for name, model, negatives, loss, strategy in runs:
        found = gsplit.verify(
            model,
            store,
            [4, 3],
            edge_label_index=pairs_of(),
            neg_sampling=NEGATIVES[negatives],
            batch_size=BATCH,
            mesh=mesh,
            strategy=strategy,
            loss_fn=loss,
        )
        assert found.largest_gradient > 0
        results.append((f"{name} {negatives} {strategy}", found.max_loss_error, found.max_grad_error, found.ok))
    return results


def train_piece_of_links(
    mesh: Mesh, stop: int, begin_from: Path | None = None, save_to: Path | None = None, prefetch: int = 0
) -> tuple[list[float], list[npt.NDArray[np.float64]]]:
    """Steps of a training of pairs up to step ``stop``, from a checkpoint or from the start."""
    loader = link_loader(mesh, LinkCase("split", "binary", prefetch=prefetch))
    torch.manual_seed(0)
    model = gsplit.parallelize(PairScores().double(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = gsplit.Trainer(model, optimizer, loader, max_grad_norm=1.0, save_to=save_to)
    if begin_from is not None:
        trainer.load(begin_from)
    while trainer.state.num_steps < stop:
        trainer.train_epoch(stop - trainer.state.num_steps)
    if save_to is not None:
        trainer.save()
    return trainer.state.history.losses.tolist(), [p.numpy(force=True).copy() for p in model.parameters()]


def train_pieces_of_links(
    mesh: Mesh, pieces: list[dict[str, Any]]
) -> list[tuple[list[float], list[npt.NDArray[np.float64]]]]:
    """Several pieces, one after the other."""
    return [train_piece_of_links(mesh, **piece) for piece in pieces]


METRICS = ("mrr", "hits@1", "hits@10")


PLANNED = StoredPairs("train", parse_negatives({"mode": "triplet", "amount": 2}))


def count_links(mesh: Mesh, path: str, strategies: list[str]) -> list[list[Any]]:
    """For every strategy, the counts of two steps: edges, destinations and rows of this rank, and what crosses.

    Last: the rows of its own vertices, and all rows that it sends.
    """
    store = gsplit.open(path)
    found = []
    for strategy in strategies:
        loader = gsplit.LinkNeighborLoader(
            store, [4, 3], "train", neg_sampling=PLANNED.negatives, batch_size=50, mesh=mesh, strategy=strategy
        )
        steps: list[Any] = []
        for step in range(2):
            batch = loader.make_batch(0, step)
            route = batch.pair_rows.route
            steps.append(
                (
                    [block.num_edges for block in batch.blocks],
                    [block.num_dst for block in batch.blocks],
                    batch.telemetry.counts["rows_in_place"],
                    (0, 0) if route is None else (route.num_sent, route.num_received),
                    batch.telemetry.counts["input_rows"],
                    batch.telemetry.counts["rows_sent"],
                )
            )
        found.append(steps)
    return found
