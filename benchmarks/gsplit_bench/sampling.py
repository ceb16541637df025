"""Sampling with relabelling on one core: all built-in samplers, against DGL's ``NeighborSampler`` where it is installed.

All draw from the same graph, held in memory, for the same targets, batch after batch in turn: a planted graph, or that
of a store. The split path on one rank is the same kernels plus the (empty) exchanges. The other built-in samplers are
compared with the uniform one: seconds per drawn edge, edges and input rows. Weights are random, of mean 1.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.distributed.comm.comm import SoloComm
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.split import split_minibatch
from gsplit.progress import Progress, silent
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.draws import UNIFORM, Draw
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit.telemetry import StepTelemetry
from gsplit_bench.peers.ddp import to_csc
from gsplit_bench.peers.dgl_ddp import load_dgl, to_dgl

__all__ = ["DrawCost", "Peer", "SamplingReport", "bench_sampling"]

WARM_UP = 2
_DRAWS = {
    "labor": DrawOptions(sampler="labor"),
    "weighted": DrawOptions(weight_attr="random"),
    "labor, weighted": DrawOptions(sampler="labor", weight_attr="random"),
    "replace": DrawOptions(replace=True),
}


@dataclass(frozen=True)
class DrawCost:
    """A built-in sampler over the uniform one: medians over the steps of the time per drawn edge, edges and rows."""

    name: str
    edges_per_s: float
    time_per_edge: float
    edges: float
    rows: float


@dataclass(frozen=True)
class Peer:
    """Another sampler in the same run; ``ratio`` is our rate over its."""

    name: str
    edges_per_s: float
    edges_per_s_range: tuple[float, float]
    ratio: float


@dataclass(frozen=True)
class SamplingReport:
    """Edges per second, medians over the steps with smallest and largest; ``peer`` is None where none is installed."""

    num_vertices: int
    num_edges: int
    num_neighbors: tuple[int, ...]
    batch_size: int
    steps: int
    edges_per_s: float
    edges_per_s_range: tuple[float, float]
    split_edges_per_s: float
    split_to_plain: float
    draws: tuple[DrawCost, ...]
    peer: Peer | None

    @property
    def note(self) -> str | None:
        """Why something is missing."""
        return None if self.peer else "DGL is not installed: nothing to compare with (benchmarks/README.md)"

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``; the peer's keys are there without one, too."""
        peer = self.peer
        return asdict(self) | {
            "peer": peer and peer.name,
            "peer_edges_per_s": peer and peer.edges_per_s,
            "peer_edges_per_s_range": peer and peer.edges_per_s_range,
            "ratio": peer and peer.ratio,
            "note": self.note,
        }


def bench_sampling(
    *,
    num_vertices: int = 1_000_000,
    num_edges: int = 30_000_000,
    num_neighbors: tuple[int, ...] = (15, 15, 15),
    batch_size: int = 1024,
    steps: int = 20,
    store: Store | None = None,
    progress: Progress = silent,
) -> SamplingReport:
    """Measure all sides, mini-batch after mini-batch, on the same targets: of a planted graph, or of a store's train."""
    with TemporaryDirectory() as folder:
        if store is None:
            planted = PlantedGraph(num_vertices, num_edges, num_features=0)
            store = build_store(synthetic_source(planted), Path(folder) / "g.gsplit", progress=progress)
        graph = Graph(np.array(store.graph.indptr), np.array(store.graph.indices), store.num_vertices)
        original = np.array(store.original_ids()) if store.is_renumbered else np.empty(0, np.int64)
        targets = torch.from_numpy(np.array(store.stored_array("targets/train")))
    ways = _ways(graph, original, list(num_neighbors))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in ways}
    generator = torch.Generator().manual_seed(0)
    with _one_core():
        for step in range(steps + WARM_UP):
            batch = targets[torch.randperm(targets.numel(), generator=generator)[:batch_size]]
            for name, draw in ways.items():
                start = time.perf_counter()
                edges, rows = draw(batch, step)
                seconds = time.perf_counter() - start
                if step >= WARM_UP:
                    rates[name].append(edges / seconds)
                    sizes[name].append((edges, rows))
            progress("sample", step + 1, steps + WARM_UP)
    ours, split = rates["ours"], rates["split"]
    return SamplingReport(
        graph.num_vertices,
        graph.num_edges,
        num_neighbors,
        batch_size,
        steps,
        edges_per_s=median(ours),
        edges_per_s_range=(min(ours), max(ours)),
        split_edges_per_s=median(split),
        split_to_plain=median(s / o for s, o in zip(split, ours, strict=True)),
        draws=tuple(_cost(name, rates, sizes) for name in _DRAWS),
        peer=_peer(ours, rates["peer"]) if "peer" in rates else None,
    )


Way = Callable[[Tensor, int], tuple[int, int]]
"""Draws a mini-batch of some targets in a step: how many edges and how many input rows it has."""


def _ways(graph: Graph, original: Ids, fanouts: list[int]) -> dict[str, Way]:
    split = HostNeighborSampler(graph, original)
    everything, comm, telemetry = Ownership((0, graph.num_vertices)), SoloComm(), StepTelemetry()

    def ours_split(targets: Tensor, step: int) -> tuple[int, int]:
        key = StepKey(0, 0, step)
        made = split_minibatch(split, targets, fanouts, key, everything, comm, telemetry)
        return sum(layer.block.num_edges for layer in made.layers), made.input_ids.numel()

    ways: dict[str, Way] = {"ours": _way(graph, original, UNIFORM, fanouts), "split": ours_split}
    weights = np.random.default_rng(0).exponential(1.0, graph.num_edges).astype(np.float32)
    for name, options in _DRAWS.items():
        ways[name] = _way(graph, original, Draw(options, original, weights), fanouts)
    if find_spec("dgl") is not None:
        ways["peer"] = _dgl(graph, fanouts)
    return ways


def _way(graph: Graph, original: Ids, draw: Draw, fanouts: list[int]) -> Way:
    sampler = HostNeighborSampler(graph, original, draw=draw)

    def sample(targets: Tensor, step: int) -> tuple[int, int]:
        made = sample_minibatch(sampler, targets, fanouts, StepKey(0, 0, step))
        return sum(block.num_edges for block in made.blocks), made.input_ids.numel()

    return sample


def _cost(name: str, rates: dict[str, list[float]], sizes: dict[str, list[tuple[int, int]]]) -> DrawCost:
    of_edges, of_rows = (
        median(own[place] / uniform[place] for own, uniform in zip(sizes[name], sizes["ours"], strict=True))
        for place in range(2)
    )
    slower = median(uniform / own for own, uniform in zip(rates[name], rates["ours"], strict=True))
    return DrawCost(name, median(rates[name]), time_per_edge=slower, edges=of_edges, rows=of_rows)


def _dgl(graph: Graph, fanouts: list[int]) -> Way:
    peer, sampler = to_dgl(*to_csc(graph)), load_dgl().dataloading.NeighborSampler(fanouts)

    def draw(targets: Tensor, step: int) -> tuple[int, int]:
        rows, _, blocks = sampler.sample_blocks(peer, targets)
        return sum(int(block.num_edges()) for block in blocks), int(rows.numel())

    return draw


class _one_core:  # noqa: N801
    """One thread on one core for everybody inside."""

    def __enter__(self) -> None:
        self._cores, self._threads = os.sched_getaffinity(0), torch.get_num_threads()
        os.sched_setaffinity(0, {min(self._cores)})
        torch.set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        os.sched_setaffinity(0, self._cores)
        torch.set_num_threads(self._threads)


def _peer(ours: list[float], theirs: list[float]) -> Peer:
    ratio = median(o / p for o, p in zip(ours, theirs, strict=True))
    return Peer("DGL NeighborSampler", median(theirs), (min(theirs), max(theirs)), ratio)
