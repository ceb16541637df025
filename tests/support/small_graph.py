"""A small graph, PyG's models on it, and their training on ranks: what unit tests and tests of devices share."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from gsplit.distributed.comm.mesh import Mesh
from gsplit.graph.ownership import Ownership
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.batch import Batch
from gsplit.nn.parallelize import parallelize
from gsplit.run import models
from gsplit.run.models import EDGE_FEATURE_MODELS, EDGE_WEIGHT_MODELS, MODELS
from gsplit.store.in_memory import MemoryStore, renumbered_store

__all__ = [
    "BATCH",
    "CLASSES",
    "EDGE_MODELS",
    "EDGE_WIDTH",
    "OTHER_STRATEGIES",
    "PLAIN_MODELS",
    "VERTICES",
    "WIDTH",
    "Case",
    "Differences",
    "TrainedCase",
    "compare",
    "make_model",
    "small_store",
    "train_cases",
]


@dataclass(frozen=True)
class Case:
    """One model on one graph, and how it is run."""

    model: str
    strategy: str
    ownership: str
    dropout: float
    jk: str | None
    norm: str | None
    edge_values: bool = False
    """Whether the model takes the stored features or weights of edges."""


@dataclass(frozen=True)
class TrainedCase:
    """What one rank has seen of a case: outputs of its targets by original id, losses and gradients of every step."""

    outputs: list[dict[int, Any]]
    losses: list[float]
    gradients: list[list[Any]]
    state: dict[str, Any]


@dataclass(frozen=True)
class Differences:
    """The largest differences of a case, or of all, from one process."""

    output: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    weights: float = 0.0

    @property
    def largest(self) -> float:
        """Of all four."""
        return max(self.output, self.loss, self.gradient, self.weights)


def _distance(a: Any, b: Any) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    distance = float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max(initial=0.0))
    return distance if np.isfinite(distance) else float("inf")


def compare(one: TrainedCase, ranks: list[TrainedCase]) -> Differences:
    """The largest differences between one process and all ranks; infinite if something is missing."""
    assert all(rank.state.keys() == one.state.keys() for rank in ranks)
    pairs = [(rank.gradients[step], want) for rank in ranks for step, want in enumerate(one.gradients)]
    return Differences(
        output=_compare_outputs(one, ranks),
        loss=max(_distance(rank.losses, one.losses) for rank in ranks),
        gradient=max(_distance(g, w) for got, want in pairs for g, w in zip(got, want, strict=True)),
        weights=max(_distance(rank.state[name], want) for rank in ranks for name, want in one.state.items()),
    )


def _compare_outputs(one: TrainedCase, ranks: list[TrainedCase]) -> float:
    """Infinite if a target is computed by no rank or by two."""
    worst = 0.0
    for step, want in enumerate(one.outputs):
        computed = [vertex for rank in ranks for vertex in rank.outputs[step]]
        if sorted(computed) != sorted(want):
            return float("inf")
        got = {vertex: row for rank in ranks for vertex, row in rank.outputs[step].items()}
        worst = max([worst, *(_distance(got[vertex], row) for vertex, row in want.items())])
    return worst


STEPS, BATCH, VERTICES, WIDTH, CLASSES, EDGE_WIDTH = 5, 12, 90, 6, 5, 3
OTHER_STRATEGIES = ("data(owner)", "data_cached", "data_cached(strided)", "hybrid(1)", "hybrid(2)")
"""Beside split and data; none of them computes each vertex once."""
PLAIN_MODELS = tuple(model for model in MODELS if model != "gine")
EDGE_MODELS = (*EDGE_FEATURE_MODELS, *EDGE_WEIGHT_MODELS)


def make_model(case: Case) -> Module:
    """The case's model, three layers, in float64, the same on every rank."""
    torch.manual_seed(0)
    return models.make_model(
        case.model,
        in_channels=WIDTH,
        hidden_channels=8,
        num_layers=3,
        out_channels=CLASSES,
        dropout=case.dropout,
        jk=case.jk,
        norm=case.norm,
        heads=2,
        degrees=torch.arange(1, 6),
        edge_dim=EDGE_WIDTH if case.edge_values and case.model in models.EDGE_FEATURE_MODELS else None,
    ).double()


def small_store(ownership: str, num_splits: int) -> tuple[MemoryStore, Ownership]:
    """A small graph with hubs, self-loops, duplicates and isolated vertices, renumbered at random."""
    rng = np.random.default_rng(7)
    n, edges = VERTICES, 6 * VERTICES
    src, dst = (n * rng.random(edges) ** 2).astype(np.int64), (n * rng.random(edges) ** 1.5).astype(np.int64)
    src[: n // 9] = dst[: n // 9]  # self-loops
    order = rng.permutation(n) if ownership != "original order" else np.zeros(n, np.int64)
    cuts = (0, *sorted(rng.integers(1, n, num_splits - 1).tolist()), n)
    if ownership == "all on rank 0":
        cuts = (0, *[n] * num_splits)
    targets = rng.permutation(n)
    if ownership == "no targets on rank 1" and num_splits > 1:
        targets = targets[(order[targets] < cuts[1]) | (order[targets] >= cuts[2])]
    targets = targets[: STEPS * BATCH - 3]
    targets = targets[: targets.size - (targets.size % BATCH == 1)]  # batch norm needs two rows
    arrays = {"features/x": (rng.normal(size=(n, WIDTH)), "float64"), "y": (rng.integers(0, CLASSES, n), "int64")}
    edge_arrays = {
        "edge_attr": (rng.normal(size=(edges, EDGE_WIDTH)), "float64"),
        "edge_weight": (rng.random(edges) + 0.1, "float64"),
    }
    store = renumbered_store(src, dst, order, arrays, {"train": targets}, edge_arrays)
    return MemoryStore(store.graph, [0, n], store.arrays, store.dtypes), Ownership(cuts)


def train_cases(mesh: Mesh, cases: list[Case], num_splits: int, steps: int = STEPS) -> list[TrainedCase]:
    """Train every case on this mesh. A model is wrapped once, which takes longer than its training."""
    models: dict[Case, tuple[Module, dict[str, Tensor]]] = {}
    found = []
    for case in cases:
        name = replace(case, strategy="", ownership="")
        if name not in models:
            model = parallelize(make_model(case), mesh, verify_every=0)
            models[name] = model, {key: value.clone() for key, value in model.state_dict().items()}
        model, weights = models[name]
        model.load_state_dict(weights)
        found.append(_train(model, mesh, case, num_splits, steps))
    return found


def _train(model: Module, mesh: Mesh, case: Case, num_splits: int, steps: int) -> TrainedCase:
    store, ownership = small_store(case.ownership, num_splits)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = NeighborLoader(
        store,
        [4, 3, -1],
        "train",
        batch_size=BATCH,
        strategy=case.strategy,
        mesh=mesh,
        seed=3,
        ownership=ownership if mesh.size > 1 else None,
    )
    outputs: list[dict[int, Any]] = []
    losses: list[float] = []
    gradients: list[list[Any]] = []
    while len(losses) < steps:
        for batch in loader:
            out = model(batch.x, batch.edge_index, **_edge_values(case, batch))
            loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
            loss.backward()
            ids = batch.n_id[: batch.batch_size].tolist()
            outputs.append(dict(zip(ids, out.detach().numpy(force=True).copy(), strict=True)))
            losses.append(float(loss.detach()))
            gradients.append([None if p.grad is None else p.grad.numpy(force=True).copy() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            if len(losses) == steps:
                break
    state = {name: value.numpy(force=True).copy() for name, value in model.state_dict().items()}
    return TrainedCase(outputs, losses, gradients, state)


def _edge_values(case: Case, batch: Batch) -> dict[str, Any]:
    """What the case's model takes of edges, as a training loop passes it."""
    if not case.edge_values:
        return {}
    if case.model in models.EDGE_WEIGHT_MODELS:
        return {"edge_weight": batch.edge_weight}
    return {"edge_attr": batch.edge_attr}
