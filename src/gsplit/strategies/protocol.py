"""What a strategy is: a way in which one mini-batch becomes one batch per rank.

All strategies compute the same step from the same sample (law 1); they differ in who samples, loads and computes which
vertex. Three stages: ``sample`` decides what the rank's part is made of and ``load`` reads its rows, both able to run
ahead of training in a thread of their own; ``finish`` makes the batch where the model computes. What a strategy needs
and keeps it declares; nobody asks for its name.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from gsplit.batch import Batch
from gsplit.blocks import Block
from gsplit.distributed.mesh import Mesh
from gsplit.exchange import Exchange
from gsplit.sampling.minibatch import StepKey
from gsplit.telemetry import StepTelemetry

__all__ = ["LoadedStep", "LocalFrontier", "RowsRead", "SampledStep", "Strategy"]

RowsRead = Literal["own rows", "all rows"]
"""Which features a rank reads: those of its own vertices, or of all."""


@dataclass(frozen=True, slots=True)
class LocalFrontier:
    """The vertices of this rank's rows from a level of the mini-batch up; every level's are the first ones of it."""

    level: int
    ids: Tensor


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One rank's part of a step after sampling, before anything was loaded; ids are internal.

    ``read_ids``: the vertices whose input rows this rank reads. ``loading_exchange`` makes the mixed input rows of
    them in the loader, on its own process group; ``exchanges`` are those of the layers, for the forward pass.
    """

    key: StepKey
    targets: Tensor
    global_batch_size: int
    blocks: tuple[Block, ...]
    read_ids: Tensor
    frontiers: tuple[LocalFrontier, ...]
    loading_exchange: Exchange
    exchanges: tuple[Exchange, ...]
    telemetry: StepTelemetry


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """One rank's part of a step with everything read that the host reads; ``parts`` are for the one who loaded it."""

    sampled: SampledStep
    parts: Any


class Strategy(Protocol):
    """Makes one rank's part of every step. All ranks call all stages for the same steps in the same order."""

    needs_whole_graph: ClassVar[bool]
    """Whether a rank samples vertices it does not own, and so needs all edges."""
    reads: ClassVar[RowsRead]

    @staticmethod
    def computes_each_vertex_once(mesh: Mesh) -> bool:
        """Whether no vertex of a mini-batch is computed on two ranks of the mesh: what BatchNorm needs."""

    @property
    def num_targets(self) -> int:
        """Targets of an epoch, over all ranks."""

    def sample(self, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        """Draw this rank's part of a step. A collective of the loading group."""

    def load(self, sampled: SampledStep) -> LoadedStep:
        """Read the rows of a sampled step. A collective of the loading group."""

    def finish(self, loaded: LoadedStep) -> Batch:
        """The batch, where the model computes. A collective if that is a device; called in the thread of training."""
