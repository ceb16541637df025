"""What takes part in a measurement: a system that makes one training step at a time, and the loop of a DDP script.

All systems mark the same stages in the step's telemetry: ``sample`` (from targets to edges and the ids of input rows),
``load_features``, ``forward`` with the loss, ``backward`` with the gradients' all-reduce, ``optimizer``.

``DdpSystem`` is data parallel: every rank has its own targets, every W-th of the shuffled list's next B, so that the
global mini-batch has the size of ours. It computes their whole neighbourhood from features gathered by ``x[n_id]``, and
averages gradients with torch's DistributedDataParallel. On one rank there is nothing to wrap. For a device the host
samples and gathers, and copies edges and rows to it from pinned memory.
"""

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from gsplit.distributed.comm.mesh import Mesh
from gsplit.graph.graph import Graph
from gsplit.sampling.minibatch import StepKey
from gsplit.store.reader import Store, open_store
from gsplit.telemetry import StepTelemetry
from gsplit_bench.train_study import Scenario

__all__ = ["DdpSystem", "Peer", "PeerSample", "ShuffledTargets", "System", "load_csc", "stored_tensor", "to_csc"]


class System(Protocol):
    """Something to be measured. Every rank makes one, and calls the same methods in the same order."""

    @property
    def note(self) -> str:
        """What somebody who reads its record has to know; empty if there is nothing."""

    def train_step(self, epoch: int, step: int) -> StepTelemetry:
        """One whole step, from the targets to the new weights; its numbers on this rank, with the loss.

        On a device it is only launched; ``StepTelemetry.synchronize`` waits for it.
        """


@dataclass(frozen=True)
class PeerSample:
    """What a peer has sampled for a rank's targets: ``edges`` is for its own model."""

    edges: Any
    input_ids: Tensor
    num_edges: int


class Peer(Protocol):
    """Another system's sampler and layers; the loop around them is the same for all (``ddp``)."""

    note: str
    model: Module
    """Called as ``model(x, edges)``; gives a row for every target."""

    def sample(self, targets: Tensor, key: StepKey) -> PeerSample:
        """Draw the neighbourhood of some vertices, on the host."""

    def move_edges(self, edges: Any, device: torch.device) -> Any:
        """The edges of a sample on the device of the model."""


class DdpSystem:
    """See ``System``."""

    def __init__(self, peer: Peer, scenario: Scenario, store: Store, mesh: Mesh) -> None:
        self._peer, self._scenario, self._mesh = peer, scenario, mesh
        self._model: Module
        self._features = stored_tensor(store, "features/x")
        self._labels = stored_tensor(store, "y")
        self._targets = ShuffledTargets(scenario, store)
        self._model = peer.model.to(mesh.device)
        if mesh.size > 1:
            group = torch.distributed.new_group(backend="nccl") if mesh.device.type == "cuda" else None
            self._model = DistributedDataParallel(self._model, process_group=group)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=scenario.learning_rate)

    @property
    def note(self) -> str:
        return self._peer.note

    def train_step(self, epoch: int, step: int) -> StepTelemetry:
        """One step of the script."""
        device = self._mesh.device
        telemetry = StepTelemetry(epoch, step, device)
        targets = self._targets.of_rank(epoch, step, self._mesh)
        with telemetry.span("sample"):
            sample = self._peer.sample(targets, StepKey(self._scenario.seed, epoch, step))
        with telemetry.span("load_features"):
            x = _to_device(self._features[sample.input_ids].float(), device)
            y = _to_device(self._labels[targets], device)
            edges = self._peer.move_edges(sample.edges, device)
        with telemetry.span("forward"):
            loss = F.cross_entropy(self._model(x, edges), y)
        with telemetry.span("backward"):
            loss.backward()
        with telemetry.span("optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad()
        telemetry.record("loss", loss.detach())
        telemetry.count("targets", targets.numel())
        telemetry.count("edges", sample.num_edges)
        telemetry.count("input_rows", x.size(0))
        telemetry.count("rows_loaded", x.size(0))
        telemetry.count("bytes_loaded", x.size(0) * self._features[:1].nbytes)
        return telemetry


class ShuffledTargets:
    """The targets of every step: those of an epoch in a random order, dealt out as torch's DistributedSampler does."""

    def __init__(self, scenario: Scenario, store: Store) -> None:
        self._seed = scenario.seed
        self._batch_size = scenario.batch_size
        self._targets = torch.from_numpy(np.array(store.stored_array(f"targets/{scenario.targets}")))
        self._order: tuple[int, Tensor] | None = None

    def of_rank(self, epoch: int, step: int, mesh: Mesh) -> Tensor:
        """Every W-th target of the epoch's next mini-batch."""
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = (epoch, torch.randperm(self._targets.numel(), generator=generator))
        size = self._batch_size
        return self._targets[self._order[1][step * size : (step + 1) * size][mesh.rank :: mesh.size]]

    def num_in_step(self, step: int) -> int:
        """Targets of the global mini-batch."""
        return min(self._batch_size, self._targets.numel() - step * self._batch_size)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@functools.lru_cache(maxsize=1)
def load_csc(path: Path) -> tuple[Tensor, Tensor]:
    """The graph of a store as peers sample it: one copy in memory for all peers of a rank."""
    return to_csc(open_store(path).graph)


def to_csc(graph: Graph) -> tuple[Tensor, Tensor]:
    """``indptr`` and ``indices`` with 64-bit ids."""
    return torch.from_numpy(np.array(graph.indptr, np.int64)), torch.from_numpy(np.array(graph.indices, np.int64))


def stored_tensor(store: Store, name: str) -> Tensor:
    """A stored array where it lies, memory-mapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it cannot be written to; nobody does
        return torch.from_numpy(np.asarray(store.stored_array(name)))
