"""Sampling with relabelling on one core, against DGL's ``NeighborSampler`` where DGL is installed.

Both sides draw from the same planted graph, held in memory, for the same targets, batch after batch in turn. The third
column is the whole split path on one rank: the same kernels plus the (empty) exchanges.
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

from gsplit.distributed.comm.comm import SoloComm
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.split import split_minibatch
from gsplit.progress import Progress, silent
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.telemetry import StepTelemetry
from gsplit_bench.peers.dgl_ddp import load_dgl, to_dgl

__all__ = ["Peer", "SamplingReport", "bench_sampling"]

WARM_UP = 2


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
    progress: Progress = silent,
) -> SamplingReport:
    """Measure all sides, mini-batch after mini-batch, on the same targets."""
    with TemporaryDirectory() as folder:
        planted = PlantedGraph(num_vertices, num_edges, num_features=0)
        store = build_store(synthetic_source(planted), Path(folder) / "g.gsplit", progress=progress)
        graph = Graph(np.array(store.graph.indptr), np.array(store.graph.indices), num_vertices)
        targets = torch.from_numpy(np.array(store.stored_array("targets/train")))
    ways = _ways(graph, list(num_neighbors))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    generator = torch.Generator().manual_seed(0)
    with _one_core():
        for step in range(steps + WARM_UP):
            batch = targets[torch.randperm(targets.numel(), generator=generator)[:batch_size]]
            for name, draw in ways.items():
                start = time.perf_counter()
                edges = draw(batch, step)
                seconds = time.perf_counter() - start
                if step >= WARM_UP:
                    rates[name].append(edges / seconds)
            progress("sample", step + 1, steps + WARM_UP)
    ours, split = rates["ours"], rates["split"]
    return SamplingReport(
        num_vertices,
        num_edges,
        num_neighbors,
        batch_size,
        steps,
        edges_per_s=median(ours),
        edges_per_s_range=(min(ours), max(ours)),
        split_edges_per_s=median(split),
        split_to_plain=median(s / o for s, o in zip(split, ours, strict=True)),
        peer=_peer(ours, rates["peer"]) if "peer" in rates else None,
    )


def _ways(graph: Graph, fanouts: list[int]) -> dict[str, Callable[[Tensor, int], int]]:
    plain, split = (HostNeighborSampler(graph, np.empty(0, np.int64)) for _ in range(2))
    everything, comm, telemetry = Ownership((0, graph.num_vertices)), SoloComm(), StepTelemetry()

    def ours(targets: Tensor, step: int) -> int:
        return sum(b.num_edges for b in sample_minibatch(plain, targets, fanouts, StepKey(0, 0, step)).blocks)

    def ours_split(targets: Tensor, step: int) -> int:
        key = StepKey(0, 0, step)
        made = split_minibatch(split, targets, fanouts, key, everything, comm, telemetry)
        return sum(layer.block.num_edges for layer in made.layers)

    ways: dict[str, Callable[[Tensor, int], int]] = {"ours": ours, "split": ours_split}
    if find_spec("dgl") is not None:
        ways["peer"] = _dgl(graph, fanouts)
    return ways


def _dgl(graph: Graph, fanouts: list[int]) -> Callable[[Tensor, int], int]:
    peer, sampler = to_dgl(graph), load_dgl().dataloading.NeighborSampler(fanouts)

    def draw(targets: Tensor, step: int) -> int:
        _, _, blocks = sampler.sample_blocks(peer, targets)
        return sum(int(block.num_edges()) for block in blocks)

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
