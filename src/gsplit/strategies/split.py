"""Split parallelism: the ranks share one mini-batch, each sampling, loading and computing the vertices it owns.

Everything a rank holds is of the size of its range of vertices or of a batch (law 6). With several replicas each takes
a strided cut of the mini-batch's targets, and splits that.
"""

from typing import ClassVar

from torch import Tensor

from gsplit.batch import Batch
from gsplit.distributed.mesh import LoadingGroups, Mesh
from gsplit.exchange import Exchange, PremixedExchange, ShuffleExchange, leave_out_copies
from gsplit.features.copies import ForeignCopies
from gsplit.kernels.buffers import BufferPool
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import LayerSampler
from gsplit.sampling.targets import LocalTargets
from gsplit.split import Split, split_minibatch
from gsplit.strategies.loading import StepLoader
from gsplit.strategies.protocol import LoadedStep, SampledStep
from gsplit.telemetry import StepTelemetry

__all__ = ["SplitSampler", "SplitStrategy"]


class SplitSampler:
    """Samples and splits a mini-batch from this rank's targets down; the ranks of a replica do so together."""

    def __init__(
        self,
        sampler: LayerSampler,
        ownership: Ownership,
        mesh: Mesh,
        groups: LoadingGroups,
        num_neighbors: list[int],
        pool: BufferPool,
        *,
        deterministic: bool = False,
        copies: ForeignCopies | None = None,
    ) -> None:
        """``pool`` is the loader's: hidden rows take the place of input rows that are gone."""
        self._sampler, self._ownership, self._mesh, self._groups = sampler, ownership, mesh, groups
        self._num_neighbors, self._deterministic, self._copies = num_neighbors, deterministic, copies
        self._pool = pool if mesh.sample_device == mesh.device else BufferPool(mesh.device)

    def sample(self, targets: Tensor, key: StepKey, global_batch_size: int, telemetry: StepTelemetry) -> SampledStep:
        """This rank's part of a step. A collective of the loading group."""
        mesh = self._mesh
        targets = targets.to(mesh.sample_device)
        split = split_minibatch(
            self._sampler, targets, self._num_neighbors, key, self._ownership, self._groups.ids, telemetry
        )
        indices = [layer.index for layer in split.layers]
        loading = self._loading_exchange(split, key, telemetry)
        travelling = [(loading.num_sent, loading.num_received)]  # of the whole step: hidden layers in forward
        travelling += [(index.num_sent, index.num_received) for index in indices[1:]]
        telemetry.count("rows_sent", sum(sent for sent, _ in travelling))
        telemetry.count("rows_received", sum(received for _, received in travelling))
        telemetry.count("collectives", 2 * len(indices))  # counts and ids of every layer
        telemetry.peak("sampler_bytes", self._sampler.num_bytes)
        shared = (self._pool, self._deterministic)
        exchanges: list[Exchange] = [
            ShuffleExchange(index, mesh.shuffles, key.step, layer, *shared) for layer, index in enumerate(indices)
        ]
        return SampledStep(
            key=key,
            targets=targets,
            global_batch_size=global_batch_size,
            blocks=tuple(layer.block for layer in split.layers),
            input_ids=split.input_ids,
            loading_exchange=loading,
            exchanges=(PremixedExchange(exchanges[0]), *exchanges[1:]),
            telemetry=telemetry,
        )

    def _loading_exchange(self, split: Split, key: StepKey, telemetry: StepTelemetry) -> Exchange:
        """How input rows cross, in the loader."""
        comm, bottom = self._groups.inputs, split.layers[0]
        if self._copies is None:
            return ShuffleExchange(bottom.index, comm, key.step, 0, self._pool, self._deterministic)
        with telemetry.span("split"):
            ids = (split.input_ids, bottom.foreign_ids)
            exchange = leave_out_copies(bottom.index, *ids, self._copies, comm, key.step, self._pool)
        telemetry.count("rows_copied", exchange.num_copied)
        return exchange


class SplitStrategy:
    """See ``protocol.Strategy``."""

    name: ClassVar[str] = "split"
    needs_whole_graph: ClassVar[bool] = False

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
        self._splitter = SplitSampler(
            sampler, ownership, mesh, groups, num_neighbors, loader.pool, deterministic=deterministic, copies=copies
        )
        self._range_bytes = max(sampler.num_range_bytes, targets.largest_bytes)
        self._targets, self._loader, self._mesh = targets, loader, mesh
        self._batch_size, self._shuffle = batch_size, shuffle

    @staticmethod
    def computes_each_vertex_once(mesh: Mesh) -> bool:
        """Within a replica: others have mini-batches of their own, with vertices in common."""
        return mesh.num_replicas == 1

    @property
    def num_targets(self) -> int:
        return self._targets.num_targets

    def sample(self, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        targets, size = self._targets, self._batch_size
        cut = (self._mesh.replica, self._mesh.num_replicas)
        own = targets.for_step(key.seed, key.epoch, key.step, size, shuffle=self._shuffle, cut=cut)
        telemetry.peak("targets_bytes", targets.num_bytes)
        telemetry.peak("largest_range_array_bytes", max(self._range_bytes, targets.largest_bytes))
        return self._splitter.sample(own, key, targets.size_of_step(key.step, size), telemetry)

    def load(self, sampled: SampledStep) -> LoadedStep:
        return self._loader.load(sampled)

    def finish(self, loaded: LoadedStep) -> Batch:
        once = self.computes_each_vertex_once(self._mesh)
        return self._loader.finish(loaded, strategy=self.name, each_vertex_once=once)
