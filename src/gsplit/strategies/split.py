"""Split parallelism: the ranks share one mini-batch, each sampling, loading and computing the vertices it owns.

Everything a rank holds is of the size of its range of vertices or of a batch (law 6). With several replicas each takes
a strided cut of the mini-batch's targets, and splits that.
"""

from typing import ClassVar

from torch import Tensor

from gsplit.distributed.mesh import LoadingGroups, Mesh
from gsplit.exchange import Exchange, PremixedExchange, ShuffleExchange, leave_out_copies
from gsplit.features.copies import ForeignCopies
from gsplit.kernels.buffers import BufferPool
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import LayerSampler
from gsplit.split import Split, split_minibatch
from gsplit.strategies.protocol import LocalFrontier, RowsRead, SampledStep
from gsplit.strategies.setup import StrategyBase, StrategySetup
from gsplit.telemetry import StepTelemetry

__all__ = ["SplitExchanges", "SplitSampler", "SplitStrategy"]


class SplitExchanges:
    """Makes the exchanges of the layers of a split.

    ``pool`` is the loader's: hidden rows take the place of input rows that are gone.
    """

    def __init__(
        self, mesh: Mesh, groups: LoadingGroups, pool: BufferPool, *, deterministic: bool, copies: ForeignCopies | None
    ) -> None:
        self._mesh, self._groups, self._copies, self.deterministic = mesh, groups, copies, deterministic
        self.pool = pool if mesh.sample_device == mesh.device else BufferPool(mesh.device)

    def connect(self, split: Split, key: StepKey, telemetry: StepTelemetry) -> tuple[Exchange, list[Exchange]]:
        """How input rows cross in the loader, and the exchanges of the layers. A collective where rows are copied."""
        loading, indices = self._loading_exchange(split, key, telemetry), [layer.index for layer in split.layers]
        travelling = [(loading.num_sent, loading.num_received)]  # of the whole step: hidden layers in forward
        travelling += [(index.num_sent, index.num_received) for index in indices[1:]]
        telemetry.count("rows_sent", sum(sent for sent, _ in travelling))
        telemetry.count("rows_received", sum(received for _, received in travelling))
        telemetry.count("collectives", 2 * len(indices))  # counts and ids of every layer
        shared = (self.pool, self.deterministic)
        exchanges: list[Exchange] = [
            ShuffleExchange(index, self._mesh.shuffles, key.step, layer, *shared) for layer, index in enumerate(indices)
        ]
        return loading, [PremixedExchange(exchanges[0]), *exchanges[1:]]

    def _loading_exchange(self, split: Split, key: StepKey, telemetry: StepTelemetry) -> Exchange:
        comm, bottom = self._groups.inputs, split.layers[0]
        if self._copies is None:
            return ShuffleExchange(bottom.index, comm, key.step, 0, self.pool, self.deterministic)
        with telemetry.span("split"):
            ids = (split.input_ids, bottom.foreign_ids)
            exchange = leave_out_copies(bottom.index, *ids, self._copies, comm, key.step, self.pool)
        telemetry.count("rows_copied", exchange.num_copied)
        return exchange


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
        self._sampler, self._ownership, self._device = sampler, ownership, mesh.sample_device
        self._comm, self._num_neighbors = groups.ids, num_neighbors
        self._exchanges = SplitExchanges(mesh, groups, pool, deterministic=deterministic, copies=copies)

    def sample(self, targets: Tensor, key: StepKey, global_batch_size: int, telemetry: StepTelemetry) -> SampledStep:
        """This rank's part of a step. A collective of the loading group."""
        targets, sampler = targets.to(self._device), self._sampler
        split = split_minibatch(sampler, targets, self._num_neighbors, key, self._ownership, self._comm, telemetry)
        loading, exchanges = self._exchanges.connect(split, key, telemetry)
        telemetry.record_max("sampler_bytes", sampler.num_bytes)
        return SampledStep(
            key=key,
            targets=targets,
            global_batch_size=global_batch_size,
            blocks=tuple(layer.block for layer in split.layers),
            read_ids=split.input_ids,
            frontiers=(LocalFrontier(0, split.input_ids),),
            loading_exchange=loading,
            exchanges=tuple(exchanges),
            telemetry=telemetry,
        )


class SplitStrategy(StrategyBase):
    """See ``protocol.Strategy``."""

    needs_whole_graph: ClassVar[bool] = False
    reads: ClassVar[RowsRead] = "own rows"

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        sampler, owned = setup.make_sampler(setup.views.owned), setup.views.owned
        self._splitter = SplitSampler(
            sampler,
            owned.ownership,
            setup.mesh,
            setup.groups,
            setup.num_neighbors,
            setup.loader.pool,
            deterministic=setup.deterministic,
            copies=setup.copies,
        )
        self._range_bytes = max(sampler.num_range_bytes, setup.targets.largest_bytes)

    @staticmethod
    def computes_each_vertex_once(mesh: Mesh) -> bool:
        """Within a replica: others have mini-batches of their own, with vertices in common."""
        return mesh.num_replicas == 1

    def sample(self, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        own, global_batch_size = self._own_targets(key, telemetry)
        telemetry.record_max("largest_range_array_bytes", max(self._range_bytes, self._targets.largest_bytes))
        return self._splitter.sample(own, key, global_batch_size, telemetry)
