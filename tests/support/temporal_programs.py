"""What ranks run in the tests of temporal sampling: some steps of training, and the edges they saw."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GAT, GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.graph.ownership import Ownership
from gsplit.keys.kernels_torch import mix
from gsplit.minibatch.batch import Batch
from gsplit.store.in_memory import MemoryStore, renumbered_store

VERTICES, WIDTH, CLASSES, EDGES = 90, 5, 3, 900

__all__ = [
    "TemporalCase",
    "TemporalResult",
    "seed_targets",
    "temporal_edges",
    "temporal_loader",
    "temporal_store",
    "train_temporal",
]


@dataclass(frozen=True)
class TemporalCase:
    """``parts``: how vertices are numbered, "original", "mixed", or "first" with all on the first rank but few."""

    strategy: str = "split"
    temporal_strategy: str = "uniform"
    model: str = "sage"
    prefetch: int = 0
    parts: str = "mixed"
    batch_size: int = 25


@dataclass
class TemporalResult:
    """Of one rank: what all ranks share (losses, gradients), and what this rank had."""

    losses: list[float] = field(default_factory=list)
    gradients: list[npt.NDArray[np.float64]] = field(default_factory=list)
    outputs: list[dict[int, list[float]]] = field(default_factory=list)
    """For every step: the model's output by the position of a target in the input."""
    edges: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    """For every step: (layer, name of the source, name of the destination, time of the edge)."""
    late: int = 0
    """Edges that are later than the time of their row."""


def temporal_edges() -> tuple[Any, Any, Any]:
    """Source, destination and time of every edge: hubs, parallel edges, many equal times."""
    rng = np.random.default_rng(3)
    src = (VERTICES * rng.random(EDGES) ** 2).astype(np.int64)
    dst = (VERTICES * rng.random(EDGES) ** 1.5).astype(np.int64)
    return src, dst, rng.integers(0, 60, EDGES)


def seed_targets() -> tuple[Tensor, Tensor]:
    """Targets in no order, some at two times, some before all edges; and their times."""
    rng = np.random.default_rng(4)
    ids = np.concatenate([rng.permutation(VERTICES)[:60], np.arange(10)])
    times = np.concatenate([rng.integers(-1, 60, 60), np.arange(100, 110)])
    return torch.from_numpy(ids), torch.from_numpy(times)


def temporal_store(parts: str) -> tuple[MemoryStore, dict[int, Ownership]]:
    """The graph in a numbering, and the owners for a number of ranks."""
    rng = np.random.default_rng(1)
    src, dst, time = temporal_edges()
    arrays: dict[str, Any] = {"features/x": (rng.normal(size=(VERTICES, WIDTH)), "float64")}
    arrays["y"] = (rng.integers(0, CLASSES, VERTICES), "int64")
    order = np.zeros(VERTICES, np.int64) if parts == "original" else np.random.default_rng(8).permutation(VERTICES)
    values = {"time": (time, "int64"), "edge_attr": (time[:, None] / 60.0, "float64")}
    store = renumbered_store(src, dst, order, arrays, {}, values)
    cuts = {2: (0, 33, 90), 3: (0, 20, 61, 90), 4: (0, 20, 20, 61, 90)}
    if parts == "first":
        cuts = {2: (0, 90, 90), 3: (0, 86, 86, 90), 4: (0, 88, 88, 88, 90)}
    owners = {1: Ownership((0, VERTICES))} | {ranks: Ownership(found) for ranks, found in cuts.items()}
    return MemoryStore(store.graph, [0, VERTICES], store.arrays, store.dtypes), owners


def temporal_loader(mesh: Mesh, case: TemporalCase) -> gsplit.NeighborLoader:
    store, owners = temporal_store(case.parts)
    ids, times = seed_targets()
    return gsplit.NeighborLoader(
        store,
        [4, 3],
        ids,
        input_time=times,
        time_attr="time",
        temporal_strategy=case.temporal_strategy,
        batch_size=case.batch_size,
        mesh=mesh,
        strategy=case.strategy,
        ownership=owners[mesh.num_splits],
        prefetch=case.prefetch,
        sampling_threads=max(1, case.prefetch),
        seed=5,
    )


def _models(mesh: Mesh) -> dict[str, Any]:
    torch.manual_seed(0)
    sage = GraphSAGE(WIDTH, 8, 2, CLASSES, dropout=0.3)
    gat = GAT(WIDTH, 8, 2, CLASSES, dropout=0.3, heads=2, edge_dim=1)
    return {name: gsplit.parallelize(model.double(), mesh) for name, model in (("sage", sage), ("gat", gat))}


def train_temporal(mesh: Mesh, cases: list[TemporalCase], steps: int = 3) -> list[TemporalResult]:
    """Train every case; all ranks return the same losses and gradients."""
    models = _models(mesh)
    weights = {
        name: {key: value.clone() for key, value in model.state_dict().items()} for name, model in models.items()
    }
    results = []
    for case in cases:
        models[case.model].load_state_dict(weights[case.model])
        results.append(_train(mesh, models[case.model], case, steps))
    return results


def _train(mesh: Mesh, model: torch.nn.Module, case: TemporalCase, steps: int) -> TemporalResult:
    loader = temporal_loader(mesh, case)
    loader.load_state_dict({"epoch": 1, "step": 0})
    result = TemporalResult()
    for number, batch in enumerate(loader):
        if number == steps:
            break
        loss, out = _loss(model, batch, case)
        loss.backward()
        result.losses.append(float(loss.detach()))
        result.outputs.append(dict(zip(batch.input_id.tolist(), out.tolist(), strict=True)))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                result.gradients.append(parameter.grad.numpy(force=True).copy())
                parameter.sub_(parameter.grad, alpha=0.05)
        model.zero_grad()
        _record(batch, result)
    return result


def _loss(model: torch.nn.Module, batch: Batch, case: TemporalCase) -> tuple[Tensor, Tensor]:
    edges = {"edge_attr": batch.edge_attr} if case.model == "gat" else {}
    out = model(batch.x, batch.edge_index, **edges)
    assert torch.equal(batch.seed_time, seed_targets()[1].to(batch.x.device)[batch.input_id])
    assert torch.equal(batch.n_id[: batch.num_targets], seed_targets()[0].to(batch.x.device)[batch.input_id])
    return batch.mean(F.cross_entropy(out, batch.y, reduction="none")), out.detach()


def named_edges(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """Layer, names of source and destination, and time of every edge; ``edge_attr`` has the times. A collective."""
    for layer, block in enumerate(batch.blocks):
        src, dst = block.edge_index()
        src_names = batch.mixed_names(layer)[src]  # all ranks: once per layer
        dst_names = batch.destinations(layer).names[dst]
        values = batch.layers[layer].edge_attr
        assert values is not None
        edge_times = (values[:, 0] * 60).round().long()
        for s, d, t in zip(src_names.tolist(), dst_names.tolist(), edge_times.tolist(), strict=True):
            yield layer, s, d, t


def _record(batch: Batch, result: TemporalResult) -> None:
    """A row's time is found by its name, a hash of vertex and time."""
    _, times = seed_targets()
    vertices = torch.arange(VERTICES)
    time_of = {int(name): int(t) for t in times.tolist() for name in mix(vertices, torch.full_like(vertices, t))}
    found = list(named_edges(batch))
    result.late += sum(time > time_of[dst] for _, _, dst, time in found)
    result.edges.append(found)
