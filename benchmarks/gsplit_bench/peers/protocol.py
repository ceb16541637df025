"""What takes part in a measurement: a system that makes one training step at a time on this rank.

All systems mark the same stages in the step's telemetry: ``sample`` (from targets to edges and the ids of input rows),
``load_features``, ``forward`` with the loss, ``backward`` with the gradients' all-reduce, ``optimizer``.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from gsplit.sampling.minibatch import StepKey
from gsplit.telemetry import StepTelemetry

__all__ = ["Peer", "PeerSample", "System"]


class System(Protocol):
    """Something to be measured. Every rank makes one, and calls the same methods in the same order."""

    @property
    def note(self) -> str:
        """What somebody who reads its record has to know; empty if there is nothing."""

    def train_step(self, epoch: int, step: int) -> StepTelemetry:
        """One whole step, from the targets to the new weights; its numbers on this rank, with the loss."""


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
        """Draw the neighbourhood of some vertices."""
