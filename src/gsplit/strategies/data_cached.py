"""Data parallelism over features that are spread over the ranks: each input row is read once, by its owner.

Ranks sample and compute their micro-batches as in ``data``. Of the input rows a rank reads those it owns, for everybody
who needs them, and fetches the others from their owners, so that the ranks' memory and caches hold each row once (what
Quiver does on GPUs). Vertices of the upper layers are still computed by every rank that needs them. Needs the whole
topology on every rank, and the features of its own vertices only.
"""

from contextlib import closing
from typing import ClassVar

from gsplit.boundary import BoundaryExchange, ask_owners
from gsplit.exchange import IdentityExchange
from gsplit.kernels.buffers import BufferPool
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.strategies.protocol import LocalFrontier, RowsRead, SampledStep
from gsplit.strategies.setup import StrategyBase, StrategySetup
from gsplit.telemetry import StepTelemetry

__all__ = ["DataCachedStrategy"]


class DataCachedStrategy(StrategyBase):
    """See ``protocol.Strategy``."""

    needs_whole_graph: ClassVar[bool] = True
    reads: ClassVar[RowsRead] = "own rows"

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        mesh, views = setup.mesh, setup.views
        self._sampler, self._own_sampler = setup.make_sampler(views.sampled), setup.make_sampler(views.owned)
        self._ownership = views.owned.ownership
        self._pool = setup.loader.pool if mesh.sample_device == mesh.device else BufferPool(mesh.device)

    def sample(self, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        setup = self._setup
        targets, global_batch_size = self._own_targets(key, telemetry)
        with telemetry.span("sample"):
            sample = sample_minibatch(self._sampler, targets, setup.num_neighbors, key)
        ids, num_dst = sample.input_ids, sample.blocks[0].num_dst
        where = (self._own_sampler, self._ownership, setup.groups.ids)
        frontier, index = ask_owners(ids, num_dst, 0, *where, key, telemetry)
        with closing(frontier):
            read_ids = frontier.ids(frontier.num_rows)
        telemetry.count("rows_sent", index.shuffle.num_sent)
        telemetry.count("rows_received", index.shuffle.num_received)
        telemetry.count("collectives", 2)  # counts and ids
        telemetry.record_max("sampler_bytes", self._sampler.num_bytes + self._own_sampler.num_bytes)
        return SampledStep(
            key=key,
            targets=targets,
            global_batch_size=global_batch_size,
            blocks=sample.blocks,
            read_ids=read_ids,
            frontiers=(LocalFrontier(0, ids),),
            loading_exchange=BoundaryExchange(index, setup.groups.inputs, key.step, 0, self._pool, False),
            exchanges=tuple(IdentityExchange(block.num_src, block.num_dst) for block in sample.blocks),
            telemetry=telemetry,
        )
