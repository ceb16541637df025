"""The loop of a DDP script, around a peer's sampler and layers.

Data parallel: every rank has its own targets, every W-th of the shuffled list's next B, so that the global mini-batch
is of the size of ours; it computes their whole neighbourhood from features gathered by ``x[n_id]``, and averages
gradients with torch's DistributedDataParallel. On one rank there is nothing to wrap.
"""

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from gsplit.bench.peers.protocol import Peer
from gsplit.bench.train_study import Scenario
from gsplit.distributed.mesh import Mesh
from gsplit.sampling.minibatch import StepKey
from gsplit.store.reader import Store
from gsplit.telemetry import StepTelemetry

__all__ = ["DdpSystem"]


class DdpSystem:
    """See ``protocol.System``."""

    def __init__(self, peer: Peer, scenario: Scenario, store: Store, mesh: Mesh) -> None:
        self._peer, self._scenario, self._mesh = peer, scenario, mesh
        self._features, self._labels = (_as_tensor(store, name) for name in ("features/x", "y"))
        self._targets = torch.from_numpy(np.array(store.stored_array(f"targets/{scenario.targets}")))
        self._model: Module = peer.model if mesh.size == 1 else DistributedDataParallel(peer.model)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=scenario.learning_rate)
        self._order: tuple[int, Tensor] | None = None

    @property
    def note(self) -> str:
        return self._peer.note

    def train_step(self, epoch: int, step: int) -> StepTelemetry:
        """One step of the script."""
        telemetry, targets = StepTelemetry(epoch, step), self._targets_of(epoch, step)
        with telemetry.span("sample"):
            sample = self._peer.sample(targets, StepKey(self._scenario.seed, epoch, step))
        with telemetry.span("load_features"):
            x = self._features[sample.input_ids].float()
            y = self._labels[targets]
        with telemetry.span("forward"):
            loss = F.cross_entropy(self._model(x, sample.edges), y)
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

    def _targets_of(self, epoch: int, step: int) -> Tensor:
        """Every W-th target of the epoch's next mini-batch, as torch's DistributedSampler deals them out."""
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._scenario.seed + epoch)
            self._order = (epoch, torch.randperm(self._targets.numel(), generator=generator))
        size = self._scenario.batch_size
        return self._targets[self._order[1][step * size : (step + 1) * size][self._mesh.rank :: self._mesh.size]]


def _as_tensor(store: Store, name: str) -> Tensor:
    """A stored array where it lies, memory-mapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it cannot be written to; nobody does
        return torch.from_numpy(np.asarray(store.stored_array(name)))
