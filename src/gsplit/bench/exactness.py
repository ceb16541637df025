"""Same answer everywhere (law 2), measured: every model, strategy, mesh and ownership against one process.

Each case trains a small model in float64 for a few steps of Adam on one process and on W real ranks, and compares the
outputs of every target in every step, the gradient of every parameter in every step and the weights at the end.
``gsplit bench exactness`` runs the whole matrix; the tests run a covering part of it.
"""

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn import Module

from gsplit.batch import Batch
from gsplit.bench.exactness_report import (
    TOLERANCE,
    Case,
    Differences,
    ExactnessReport,
    ExactnessRow,
    TrainedCase,
    compare,
    tolerance_of,
    worst_of,
)
from gsplit.distributed.mesh import Mesh, solo_mesh
from gsplit.errors import InputError, explain
from gsplit.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize
from gsplit.ownership import Ownership
from gsplit.progress import Progress, silent
from gsplit.run import models
from gsplit.run.models import EDGE_FEATURE_MODELS, EDGE_WEIGHT_MODELS, MODELS
from gsplit.store.memory import MemoryStore, renumbered_store
from gsplit.testing import run_ranks

__all__ = [
    "MESHES",
    "TOLERANCE",
    "Case",
    "Differences",
    "ExactnessReport",
    "TrainedCase",
    "all_cases",
    "compare",
    "make_model",
    "run_exactness",
    "small_store",
    "train_cases",
]

OWNERSHIPS = ("random", "all on rank 0", "no targets on rank 1", "original order")
"""Who owns what; in original order the graph is not renumbered."""
MESHES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2))
"""Replicas and splits."""
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
    """Train every case on this mesh."""
    return [_train(mesh, case, num_splits, steps) for case in cases]


def _train(mesh: Mesh, case: Case, num_splits: int, steps: int) -> TrainedCase:
    store, ownership = small_store(case.ownership, num_splits)
    model = parallelize(make_model(case), mesh)
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


def all_cases(replicas: int, splits: int) -> Iterator[Case]:
    """Every case that can run on a mesh: batch norm only where each vertex is computed once."""
    alone = replicas * splits == 1
    for model, strategy, dropout, jk, norm in product(
        PLAIN_MODELS, ("split", "data"), (0.0, 0.5), (None, "max"), (None, "batch_norm")
    ):
        if norm is not None and not alone and (strategy == "data" or replicas > 1):
            continue
        for ownership in OWNERSHIPS[:3] if strategy == "split" and not alone else OWNERSHIPS[:1]:
            yield Case(model, strategy, ownership, dropout, jk, norm)
    for model, strategy, dropout, jk, ownership in product(
        PLAIN_MODELS, OTHER_STRATEGIES, (0.0, 0.5), (None, "max"), OWNERSHIPS[:1] if alone else OWNERSHIPS[:3]
    ):
        yield Case(model, strategy, ownership, dropout, jk, None)
    for model, strategy, dropout, ownership in product(
        EDGE_MODELS,
        ("split", "data", *OTHER_STRATEGIES),
        (0.0, 0.5),
        ("random", "no targets on rank 1", "original order"),
    ):
        yield Case(model, strategy, ownership, dropout, None, None, edge_values=True)


def run_exactness(
    meshes: list[tuple[int, int]], models: list[str], progress: Progress = silent, *, device: str = "cpu"
) -> ExactnessReport:
    """The matrix on some meshes: every case with its largest differences.

    Ranks on the CPU are compared with one process; ranks on a device with the same ranks on the CPU, one by one.
    """
    for model in models:
        if model not in MODELS:
            raise InputError(explain("model", f"one of {', '.join(MODELS)}", model, "choose one of these"))
    rows: list[ExactnessRow] = []
    for number, (replicas, splits) in enumerate(meshes):
        progress("meshes", number, len(meshes))
        cases = [case for case in all_cases(replicas, splits) if case.model in models]
        run = functools.partial(
            run_ranks, train_cases, replicas * splits, cases, splits, replicas=replicas, timeout_s=6000.0
        )
        many = run(device=device)
        on_host = None if device == "cpu" else run()
        for place, case in enumerate(cases):
            found = [rank[place] for rank in many]
            if on_host is None:
                differences = compare(_train(solo_mesh(), case, splits, STEPS), found)
            else:
                pairs = zip(on_host, found, strict=True)
                differences = worst_of([compare(rank[place], [there]) for rank, there in pairs])
            rows.append(ExactnessRow(replicas, splits, case, differences, tolerance_of(case, device)))
    progress("meshes", len(meshes), len(meshes))
    return ExactnessReport(rows)
