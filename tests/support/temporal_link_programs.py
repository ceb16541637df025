"""What ranks run in the tests of pairs with times: some steps of training, and the edges they saw."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from link_programs import loss_of
from temporal_programs import VERTICES, named_edges, temporal_edges, temporal_store
from torch import Tensor

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.keys.kernels_torch import mix
from gsplit.minibatch.link_batch import LinkBatch

SEED, FANOUTS = 5, (4, 3)
NEGATIVES: dict[str, Any] = {
    "none": None,
    "binary": {"mode": "binary", "amount": 1.5},
    "triplet": {"mode": "triplet", "amount": 2},
    "decoded": {"mode": "binary", "amount": 1},
}
"""By name; ``decoded`` is trained with a model that decodes pairs itself."""
Row = tuple[int, int]
"""A vertex and a time."""


@dataclass(frozen=True)
class TimedLinkCase:
    strategy: str = "split"
    temporal_strategy: str = "uniform"
    negatives: str = "binary"
    exclude: Any = "reverse"
    parts: str = "mixed"
    prefetch: int = 0
    batch_size: int = 20


@dataclass
class TimedLinkResult:
    """Of one rank: what all ranks share (losses, gradients), and what this rank had, for every step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[npt.NDArray[np.float64]] = field(default_factory=list)
    edges: list[list[tuple[int, Row, Row, int]]] = field(default_factory=list)
    """Layer, source, destination, time of the edge."""
    pairs: list[list[tuple[Row, Row]]] = field(default_factory=list)
    """Pairs, then their binary negatives, or (source, negative) of triplets."""
    positions: list[list[int]] = field(default_factory=list)


def timed_pairs() -> tuple[Tensor, Tensor]:
    """Edges at their own time, pairs that are not edges, a pair at two times and twice at one, a vertex with itself."""
    rng = np.random.default_rng(4)
    src, dst, time = temporal_edges()
    some = rng.permutation(src.size)[:30]
    others = rng.integers(0, VERTICES, (2, 12))
    pairs = np.concatenate([np.stack([src[some], dst[some]]), others, [[7, 3, 3, 3], [7, 4, 4, 4]]], axis=1)
    times = np.concatenate([time[some], rng.integers(-1, 70, 12), [20, 30, 50, 50]])
    return torch.from_numpy(pairs), torch.from_numpy(times)


def timed_link_loader(mesh: Mesh, case: TimedLinkCase, **options: Any) -> gsplit.LinkNeighborLoader:
    store, owners = temporal_store(case.parts)
    pairs, times = timed_pairs()
    given: dict[str, Any] = {"num_neighbors": list(FANOUTS), "neg_sampling": NEGATIVES[case.negatives]}
    return gsplit.LinkNeighborLoader(
        store,
        edge_label_index=pairs,
        edge_label_time=times,
        time_attr="time",
        temporal_strategy=case.temporal_strategy,
        exclude_seed_edges=case.exclude,
        batch_size=case.batch_size,
        mesh=mesh,
        strategy=case.strategy,
        ownership=owners[mesh.num_splits],
        prefetch=case.prefetch,
        sampling_threads=max(1, case.prefetch) if mesh.sample_device.type == "cpu" else 1,
        seed=SEED,
        **(given | options),
    )


def _train(mesh: Mesh, model: Any, case: TimedLinkCase, steps: int) -> TimedLinkResult:
    loader = timed_link_loader(mesh, case)
    result = TimedLinkResult()
    for step in range(steps):
        batch = loader.make_batch(1, step)
        if case.negatives == "decoded":
            values = torch.nn.functional.softplus(model(batch) * (1 - 2 * batch.edge_label))
        else:
            z = model(batch.x, batch.edge_index)
            values = loss_of(z, batch) if case.negatives != "none" else (z[batch.edge_label_index].prod(0)).sum(-1) ** 2
        loss = batch.mean(values)
        loss.backward()
        result.losses.append(float(loss.detach()))
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            result.gradients.append(gradient.numpy(force=True).copy())
        model.zero_grad()
        if batch.x.device.type == "cpu":
            record_step(batch, result)
    return result


def record_step(batch: LinkBatch, result: TimedLinkResult) -> None:
    """Rows are found by their names, hashes of vertex and time."""
    vertices = torch.arange(VERTICES)
    row_of: dict[int, Row] = {}
    for time in timed_pairs()[1].unique().tolist():
        names = mix(vertices, torch.full_like(vertices, time)).tolist()
        row_of |= {name: (vertex, time) for vertex, name in enumerate(names)}
    found = [(layer, row_of[src], row_of[dst], time) for layer, src, dst, time in named_edges(batch)]
    result.edges.append(sorted(found))
    rows = batch.pair_rows
    assert rows.time is not None
    ends = list(zip(rows.n_id.tolist(), rows.time.tolist(), strict=True))
    if rows.mode == "binary":
        columns = rows.index.T.tolist()
        times = batch.edge_label_time.tolist()
    else:
        columns = [
            [s, n] for s, d, of in zip(*rows.index.tolist(), rows.negatives.tolist(), strict=True) for n in (d, *of)
        ]
        times = [t for t in batch.seed_time.tolist() for _ in range(3)]
    assert [ends[s][1] for s, _ in columns] == times == [ends[d][1] for _, d in columns]
    result.pairs.append(sorted((ends[s], ends[d]) for s, d in columns))
    result.positions.append(batch.input_id.tolist())
