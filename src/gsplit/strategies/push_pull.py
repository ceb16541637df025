"""Push-pull (P3): the bottom layer is computed on slices of the feature columns, the layers above are data parallel.

Every rank holds some columns of all rows, so no row of features ever travels. Ranks sample the upper layers of their
own targets and tell each other the vertices of level 1 they need. As neighbours depend on the step and the vertex alone
(law 1), every rank samples the bottom layer of all of these vertices together, each once, computes what its columns
contribute, and the contributions are summed where they are needed (``partial_sums``). The bottom layer must be linear
in its input. Needs the whole topology, and its columns of all features in memory, on every rank.
"""

from contextlib import closing
from typing import ClassVar

from torch import Tensor

from gsplit.blocks import Block
from gsplit.exchange import IdentityExchange
from gsplit.features.columns import column_range
from gsplit.kernels.buffers import BufferPool
from gsplit.partial_sums import PartialSums
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.split import exchange_ids
from gsplit.strategies.protocol import LocalFrontier, RowsRead, SampledStep
from gsplit.strategies.setup import StrategyBase, StrategySetup
from gsplit.telemetry import StepTelemetry

__all__ = ["PushPullStrategy"]


class PushPullStrategy(StrategyBase):
    """See ``protocol.Strategy``."""

    needs_whole_graph: ClassVar[bool] = True
    reads: ClassVar[RowsRead] = "columns"

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        mesh = setup.mesh
        self._sampler = setup.make_sampler(setup.views.sampled)
        self._pool = setup.loader.pool if mesh.sample_device == mesh.device else BufferPool(mesh.device)

    def _gather_ids(self, ids: Tensor, key: StepKey, telemetry: StepTelemetry) -> tuple[Tensor, tuple[int, ...]]:
        """The level-1 vertices of all ranks of the replica, rank after rank. A collective."""
        comm = self._setup.groups.ids
        with telemetry.span("exchange_ids"):  # all ranks: once per step, empty or not
            return exchange_ids(comm, key, 0, ids.repeat(comm.size), (ids.numel(),) * comm.size)

    def sample(self, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        setup, mesh = self._setup, self._mesh
        targets, global_batch_size = self._own_targets(key, telemetry)
        with telemetry.span("sample"):
            upper = sample_minibatch(self._sampler, targets, setup.num_neighbors[:-1], key, bottom_layer=1)
        ids, counts = self._gather_ids(upper.input_ids, key, telemetry)
        with telemetry.span("sample"), closing(self._sampler.start(upper.input_ids)) as frontier:
            send_rows = frontier.locate(ids)
            drawn = frontier.sample_layer(key.layer(0), setup.num_neighbors[-1])
            input_ids = frontier.ids(frontier.num_rows)
        bottom = Block(drawn.indptr, drawn.sources, input_ids.numel(), drawn.edge_ids)
        num_columns = setup.num_columns
        sums = PartialSums(
            send_rows,
            counts,
            upper.input_ids.numel(),
            bottom.num_src,
            bottom.num_dst,
            *column_range(num_columns, mesh.split_rank, mesh.num_splits),
            num_columns,
            mesh.shuffles,
            key.step,
            self._pool,
        )
        telemetry.count("rows_sent", sums.num_sent)
        telemetry.count("rows_received", sums.num_received)
        telemetry.count("collectives", 2)  # counts and ids
        telemetry.record_max("sampler_bytes", self._sampler.num_bytes)
        above = tuple(IdentityExchange(block.num_src, block.num_dst) for block in upper.blocks)
        return SampledStep(
            key=key,
            targets=targets,
            global_batch_size=global_batch_size,
            blocks=(bottom, *upper.blocks),
            read_ids=input_ids,
            frontiers=(LocalFrontier(0, input_ids), LocalFrontier(1, upper.input_ids)),
            loading_exchange=IdentityExchange(bottom.num_src, bottom.num_dst),
            exchanges=(sums, *above),
            telemetry=telemetry,
        )
