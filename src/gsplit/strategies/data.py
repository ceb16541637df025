"""Data parallelism: each rank takes every W-th target of the mini-batch and computes its whole neighbourhood.

The sample is the same keyed one that ``split`` takes (law 1), so loss and gradients are the same; vertices that
several ranks need are sampled, loaded and computed by each of them. Nothing crosses between ranks but gradients. Needs
the whole graph and all features on every rank, memory-mapped or not.
"""

from typing import ClassVar

from gsplit.batch import Batch
from gsplit.distributed.mesh import LoadingGroups, Mesh
from gsplit.exchange import IdentityExchange
from gsplit.features.copies import ForeignCopies
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.protocol import LayerSampler
from gsplit.sampling.targets import LocalTargets
from gsplit.strategies.loading import StepLoader
from gsplit.strategies.protocol import LoadedStep, SampledStep
from gsplit.telemetry import StepTelemetry

__all__ = ["DataStrategy"]


class DataStrategy:
    """See ``protocol.Strategy``. ``targets`` and ``loader`` are those of the whole graph."""

    name: ClassVar[str] = "data"
    needs_whole_graph: ClassVar[bool] = True

    def __init__(
        self,
        *,
        sampler: LayerSampler,
        ownership: Ownership,
        targets: LocalTargets,
        loader: StepLoader,
        mesh: Mesh,
        groups: LoadingGroups,
        num_neighbors: list[int],
        batch_size: int,
        shuffle: bool,
        deterministic: bool,
        copies: ForeignCopies | None,
    ) -> None:
        """``ownership``, ``groups``, ``deterministic`` and ``copies`` are common arguments, of no effect here."""
        self._sampler, self._targets, self._loader, self._mesh = sampler, targets, loader, mesh
        self._num_neighbors, self._batch_size, self._shuffle = num_neighbors, batch_size, shuffle
        self._cut = (mesh.replica + mesh.num_replicas * mesh.split_rank, mesh.size)

    @staticmethod
    def computes_each_vertex_once(mesh: Mesh) -> bool:
        """On one rank only."""
        return mesh.size == 1

    @property
    def num_targets(self) -> int:
        return self._targets.num_targets

    def sample(self, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        """See ``Strategy``; no other rank is asked for anything."""
        size, device = self._batch_size, self._mesh.sample_device
        targets = self._targets.for_step(key.seed, key.epoch, key.step, size, shuffle=self._shuffle, cut=self._cut)
        targets = targets.to(device)
        with telemetry.span("sample"):
            sample = sample_minibatch(self._sampler, targets, self._num_neighbors, key)
        telemetry.peak("sampler_bytes", self._sampler.num_bytes)
        telemetry.peak("targets_bytes", self._targets.num_bytes)
        exchanges = tuple(IdentityExchange(block.num_src, block.num_dst) for block in sample.blocks)
        return SampledStep(
            key=key,
            targets=targets,
            global_batch_size=self._targets.size_of_step(key.step, size),
            blocks=sample.blocks,
            input_ids=sample.input_ids,
            loading_exchange=exchanges[0],
            exchanges=exchanges,
            telemetry=telemetry,
        )

    def load(self, sampled: SampledStep) -> LoadedStep:
        return self._loader.load(sampled)

    def finish(self, loaded: LoadedStep) -> Batch:
        once = self.computes_each_vertex_once(self._mesh)
        return self._loader.finish(loaded, strategy=self.name, each_vertex_once=once)
