"""The training loop of the exactness harness, on the public API, and its oracle: one process on the same mini-batches.

A case is trained for some steps of Adam in float64. Compared are the outputs of all targets or pairs in every step, the
loss and all gradients of every step, weights and trained rows at the end, exact scores, and the number of sampled
edges. The reference has the graph in its original order, in memory; the ranks have another numbering of its vertices.
"""

import copy
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn import Module

import gsplit
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from tests.exactness.case import Case
from tests.exactness.graphs import (
    PAIR_TYPE,
    REVERSE_TYPE,
    WIDTH,
    ends_of_pairs,
    make_data,
    open_store,
    partition_of,
    seeds,
    target_type,
)
from tests.exactness.models import call_model, make_model, widths_of
from tests.exactness.users import UserRows, coin_sampler

__all__ = ["BOUND", "Run", "difference", "reference", "train_case", "train_cases"]

BOUND = 1e-9
STEPS, RESUME_AT, BATCH = 4, 2, 25
FANOUTS = [4, 3, 3]
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "layer_dependency": {"layer_dependency": True},
    "replace": {"replace": True},
    "labor": {"sampler": "labor"},
    "weighted": {"weight_attr": "chance"},
    "weighted labor": {"sampler": "labor", "weight_attr": "chance"},
    "user's": {"sampler": coin_sampler},
}
TIERS: dict[str, dict[str, Any]] = {
    "files": {"features_on_disk": True},
    "cache": {"cache": 600},
    "copies": {"copies": 600},
    "user's": {"features": UserRows()},
}
NEGATIVES: dict[str, Any] = {
    "binary": {"mode": "binary", "amount": 0.5},
    "triplet": {"mode": "triplet", "amount": 2},
    "joint": {"mode": "joint", "amount": 7},
    "in_batch": "in_batch",
    "labels": None,
}
EXCLUDED: dict[str, Any] = {"reverse": "reverse", "themselves": True, "none": False}
PREFETCH: dict[str, dict[str, int]] = {
    "0": {"prefetch": 0},
    "2": {"prefetch": 2},
    "4 in 2 threads": {"prefetch": 4, "sampling_threads": 2},
}
DEVICES = {"host": ("cpu", None), "sim": ("sim:0", None), "sim samples": ("sim:0", "sim:0")}
"""Of the model, and of sampling where it is not the host."""
Rows = dict[int, Any]


@dataclass
class Run:
    """What one rank has computed. ``outputs``: by target, or by the position of a pair or of a target with a time."""

    outputs: list[Rows] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    edges: list[int] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Rows] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


def _graph(case: Case, mesh: Mesh, folder: Path | None) -> Any:
    if case.tier in ("memory", "user's"):
        return make_data(case.types)
    assert folder is not None
    return open_store(folder, case, mesh.split_rank)


def _options(case: Case, graph: Any, mesh: Mesh) -> dict[str, Any]:
    options: dict[str, Any] = {"mesh": mesh, "strategy": case.strategy, "seed": 5, "shuffle": True}
    options |= SAMPLERS[case.sampler] | TIERS.get(case.tier, {}) | PREFETCH[case.prefetch]
    if case.tier in ("memory", "user's") and mesh.size > 1:
        options["partition"] = partition_of(case)
    elif case.ownership == "nearly all on rank 0":
        count = graph.num_vertices
        options["ownership"] = gsplit.Ownership((0, *[count - 3] * (mesh.num_splits - 1), count))
    if case.rows == "owned":
        options["features"] = None if case.types == "one" else {"paper": "x"}
    if case.times != "none":
        options |= {"time_attr": "time", "temporal_strategy": case.times}
    return options


def make_loader(case: Case, graph: Any, mesh: Mesh) -> Any:
    """The loader of a case."""
    options = _options(case, graph, mesh)
    if not case.is_of_pairs:
        nodes: Any = "train"
        if case.times != "none":
            nodes, options["input_time"] = seeds()
        if case.types != "one":
            nodes = (target_type(case.types), nodes)
        return gsplit.NeighborLoader(graph, FANOUTS, nodes, batch_size=BATCH, **options)
    pairs: Any = ends_of_pairs(case.types)
    if case.task == "labels":
        options["edge_label"] = torch.arange(pairs.size(1)) % 2
    if case.times != "none":
        options["edge_label_time"] = (torch.arange(pairs.size(1)) * 7) % 60
    if case.types == "three":
        pairs = (PAIR_TYPE, pairs)
        options["reverse_edge_types"] = {PAIR_TYPE: REVERSE_TYPE} if case.excluded == "reverse" else None
    options |= {"neg_sampling": NEGATIVES[case.task], "exclude_seed_edges": EXCLUDED[case.excluded]}
    return gsplit.LinkNeighborLoader(graph, FANOUTS, pairs, batch_size=20, **options)


@dataclass
class Training:
    """A model, its embeddings and optimizers, and a loader, at some step."""

    case: Case
    mesh: Mesh
    model: Module
    graph: Any

    def __post_init__(self) -> None:
        self.loader = make_loader(self.case, self.graph, self.mesh)
        self.owned: dict[str, Any] = {}
        if self.case.rows == "owned":
            widths = {"": WIDTH}
            if self.case.types == "three":
                widths = {name: widths_of("three")[name] for name in ("author", "field")}
            options: dict[str, Any] = {"mesh": self.mesh, "seed": 7, "dtype": torch.float64}
            options["partition"] = partition_of(self.case) if self.mesh.size > 1 else None
            self.owned = {
                name: gsplit.OwnedEmbedding(self.graph, width, name or None, **options)
                for name, width in widths.items()
            }
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(self.model.parameters(), lr=1e-3, eps=1e-4)]
        for table in self.owned.values():
            self.optimizers.append(torch.optim.SparseAdam(list(table.parameters()), lr=1e-2))

    def save(self, folder: Path) -> list[Any]:
        """What a program saves to go on: states, of which this is a copy, and the rows of embeddings in files."""
        for (name, table), optimizer in zip(self.owned.items(), self.optimizers[1:], strict=True):
            table.save(folder / f"rows-{name}", optimizer)
        return [copy.deepcopy(part.state_dict()) for part in (self.model, self.optimizers[0], self.loader)]

    def load(self, folder: Path, states: list[Any]) -> None:
        """Go on from what ``save`` has saved."""
        for (name, table), optimizer in zip(self.owned.items(), self.optimizers[1:], strict=True):
            table.load(folder / f"rows-{name}", optimizer)
        for part, state in zip((self.model, self.optimizers[0], self.loader), states, strict=True):
            part.load_state_dict(state)

    def batches(self) -> Generator[Any, None, None]:
        """The mini-batches from the loader's position on."""
        while True:
            yield from self.loader

    def step(self, batch: Any, run: Run) -> None:
        batch = batch.cast(torch.float64)
        out = call_model(self.case, self.model, batch, self.owned)
        loss = _loss(self.case, out, batch)
        loss.backward()
        run.outputs.append(_outputs(self.case, out, batch))
        run.losses.append(float(loss.detach()))
        run.gradients.append(
            {
                name: None if p.grad is None else p.grad.numpy(force=True).copy()
                for name, p in self.model.named_parameters()
            }
        )
        run.edges.append(batch.telemetry.counts["edges"])
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _loss(case: Case, out: Any, batch: Any) -> Any:
    if not case.is_of_pairs:
        return batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
    loss_of = gsplit.losses.bpr if case.task in ("triplet", "joint") else gsplit.losses.link_cross_entropy
    found = loss_of(out, batch)
    return batch.mean(*found) if isinstance(found, tuple) else batch.mean(found)


def _outputs(case: Case, out: Any, batch: Any) -> Rows:
    if case.is_of_pairs:
        count = batch.input_id.numel()
        if case.task in ("binary", "labels"):
            src, dst = batch.edge_label_index[:, :count]
        else:
            src, dst = batch.src_index, batch.dst_pos_index
        ends = (out, out) if isinstance(out, torch.Tensor) else (out["author"], out["paper"])
        rows, keys = torch.cat([ends[0][src], ends[1][dst]], dim=1), batch.input_id
    else:
        rows, keys = out, batch.n_id[: batch.batch_size] if case.times == "none" else batch.input_id
    return dict(zip(keys.tolist(), rows.numpy(force=True).copy(), strict=True))


def _has_scores(case: Case) -> bool:
    """Whether inference has all that the model takes. Replicas of shards have not: there they are one replica."""
    return case.rows == "stored" and case.times == "none" and not (case.tier == "shard" and case.num_replicas > 1)


def _scores(case: Case, training: Training) -> dict[str, float]:
    """Exact scores of the trained model."""
    graph = training.graph
    features: dict[str, Any] = {"features": UserRows()} if case.tier == "user's" else {}
    if case.is_of_pairs:
        if case.model == "decoder":
            features["decoder"] = lambda a, b: (a * b).sum(-1)
        pairs: Any = ends_of_pairs(case.types)
        listed = pairs if case.types == "one" else (PAIR_TYPE, pairs)
        return gsplit.evaluate_links(training.model, graph, listed, num_negatives=5, metrics=("mrr",), **features)
    prefix = "" if case.types == "one" else f"{target_type(case.types)}/"
    return gsplit.evaluate(training.model, graph, f"{prefix}val", **features)


class WrappedModels:
    """Wrapped models with their first weights: to wrap a model takes longer than a case's training."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[Module, dict[str, torch.Tensor]]] = {}

    def of(self, case: Case, mesh: Mesh, number: int) -> Module:
        """The model of a case at its first weights. ``number``: of several that a case has."""
        key = (case.task, case.types, case.model, case.values, case.dropout, case.jk, id(mesh), number)
        if key not in self._kept:
            graph = None if case.types == "one" else make_data(case.types)
            model = gsplit.parallelize(make_model(case), mesh, graph=graph, verify_every=0)
            self._kept[key] = model, copy.deepcopy(model.state_dict())
        model, weights = self._kept[key]
        model.load_state_dict(weights)
        return model.train()


def train_case(case: Case, mesh: Mesh, folder: Path | None, models: WrappedModels) -> Run:
    """Train a case on this mesh."""
    graph = _graph(case, mesh, folder)
    training = Training(case, mesh, models.of(case, mesh, 0), graph)
    run = Run()
    batches = training.batches()
    for step in range(STEPS):
        if step == RESUME_AT and case.resume == "yes":
            assert folder is not None
            states = training.save(folder)
            batches.close()
            training = Training(case, mesh, models.of(case, mesh, 1), graph)
            training.load(folder, states)
            batches = training.batches()
        training.step(next(batches), run)
    batches.close()
    run.weights = {name: value.numpy(force=True).copy() for name, value in training.model.state_dict().items()}
    for name, table in training.owned.items():
        run.tables[name] = dict(zip(table.row_ids.tolist(), table.weight.detach().numpy().copy(), strict=True))
    if _has_scores(case):
        run.scores = _scores(case, training)
    return run


def train_cases(mesh: Mesh, cases: list[Case], folder: Path) -> list[Run | str]:
    """Train cases on the meshes of one start of ranks; the error of a case in place of its result."""
    meshes: dict[str, Mesh] = {}
    models = WrappedModels()
    found: list[Run | str] = []
    for case in cases:
        if case.device not in meshes:
            device, samples = DEVICES[case.device]
            meshes[case.device] = gsplit.init(
                device, sample_device=samples, replicas=case.num_replicas, timeout_s=120.0
            )
        try:
            found.append(train_case(case, meshes[case.device], folder, models))
        except gsplit.InputError as error:
            found.append(str(error))
    return found


@cache
def reference(case: Case) -> Run:
    """What one process computes."""
    return train_case(case.reference, solo_mesh(), None, WrappedModels())


def _distance(a: Any, b: Any) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if np.shape(a) != np.shape(b):
        return float("inf")
    distance = float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max(initial=0.0))
    return distance if np.isfinite(distance) else float("inf")


def _distance_of_rows(of_ranks: list[Rows], wanted: Rows, num_copies: int = 1) -> float:
    """Infinite if a row is on other ranks than it should, or on none."""
    if sorted(key for rows in of_ranks for key in rows) != sorted([*wanted] * num_copies):
        return float("inf")
    return max((_distance(row, wanted[key]) for rows in of_ranks for key, row in rows.items()), default=0.0)


def difference(case: Case, ranks: list[Run]) -> float:
    """The largest difference between one process and all ranks; infinite if something is missing."""
    one = reference(case)
    found = [0.0]
    for step, outputs in enumerate(one.outputs):
        found.append(_distance_of_rows([rank.outputs[step] for rank in ranks], outputs))
        edges = sum(rank.edges[step] for rank in ranks)
        is_once = case.strategy == "split" and case.num_replicas == 1
        if edges != one.edges[step] if is_once else edges < one.edges[step]:
            found.append(float("inf"))
    for rank in ranks:
        found.append(_distance(rank.losses, one.losses))
        for got, wanted in zip([*rank.gradients, rank.weights], [*one.gradients, one.weights], strict=True):
            found += [float("inf")] if got.keys() != wanted.keys() else [_distance(got[k], wanted[k]) for k in wanted]
        wanted_scores = [*one.scores.values()] if _has_scores(case) else []
        found.append(_distance([*rank.scores.values()], wanted_scores))
    for name, table in one.tables.items():
        found.append(_distance_of_rows([rank.tables[name] for rank in ranks], table, case.num_replicas))
    return max(found)
