"""Hybrid: the k layers nearest the input are split, those above are data parallel.

Each rank samples the upper layers of its own targets, which are those it owns, by itself. The vertices it then needs
rows of are asked of their owners (``boundary``); what anybody asks of an owner is computed by it once, in the lower
layers, which are split as usual. So each layer is done where it is cheapest: redundancy lies mostly in the lower
layers, and the upper ones have few rows. With k = 0 this would be ``data_cached``, with all layers ``split``. Needs the
whole topology on every rank, and the features of its own vertices only.
"""

from contextlib import closing
from typing import ClassVar

from gsplit.boundary import BoundaryExchange, ask_owners
from gsplit.exchange import IdentityExchange
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.split import split_below
from gsplit.strategies.protocol import LocalFrontier, RowsRead, SampledStep
from gsplit.strategies.setup import StrategyBase, StrategySetup
from gsplit.strategies.split import SplitExchanges
from gsplit.telemetry import StepTelemetry

__all__ = ["HybridStrategy"]


class HybridStrategy(StrategyBase):
    """See ``protocol.Strategy``."""

    needs_whole_graph: ClassVar[bool] = True
    reads: ClassVar[RowsRead] = "own rows"

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        views, fanouts = setup.views, setup.num_neighbors
        self._num_split = setup.spec.num_split_layers
        first = len(fanouts) - self._num_split
        self._upper_fanouts, self._lower_fanouts = fanouts[:first], fanouts[first:]
        self._sampler, self._own_sampler = setup.make_sampler(views.sampled), setup.make_sampler(views.owned)
        self._ownership = views.owned.ownership
        self._exchanges = SplitExchanges(
            setup.mesh, setup.groups, setup.loader.pool, deterministic=setup.deterministic, copies=setup.copies
        )

    def sample(self, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        level, comm, ownership = self._num_split, self._setup.groups.ids, self._ownership
        targets, global_batch_size = self._own_targets(key, telemetry)
        with telemetry.span("sample"):
            upper = sample_minibatch(self._sampler, targets, self._upper_fanouts, key, bottom_layer=level)
        where = (upper.blocks[0].num_dst, level, self._own_sampler, ownership, comm)
        frontier, index = ask_owners(upper.input_ids, *where, key, telemetry)
        with closing(frontier):
            lower = split_below(frontier, self._lower_fanouts, key, ownership, comm, telemetry)
        loading, below = self._exchanges.connect(lower, key, telemetry)
        telemetry.count("rows_sent", index.shuffle.num_sent)
        telemetry.count("rows_received", index.shuffle.num_received)
        telemetry.count("collectives", 2)  # counts and ids at the boundary
        telemetry.record_max("sampler_bytes", self._sampler.num_bytes + self._own_sampler.num_bytes)
        how = (self._exchanges.pool, self._exchanges.deterministic)
        boundary = BoundaryExchange(index, self._mesh.shuffles, key.step, level, *how)
        above = [IdentityExchange(block.num_src, block.num_dst) for block in upper.blocks[1:]]
        return SampledStep(
            key=key,
            targets=targets,
            global_batch_size=global_batch_size,
            blocks=(*(layer.block for layer in lower.layers), *upper.blocks),
            read_ids=lower.input_ids,
            frontiers=(LocalFrontier(0, lower.input_ids), LocalFrontier(level + 1, upper.input_ids)),
            loading_exchange=loading,
            exchanges=(*below, boundary, *above),
            telemetry=telemetry,
        )
