"""Data parallelism: each rank takes some targets of the mini-batch and computes their whole neighbourhood.

The sample is the same keyed one that ``split`` takes (law 1), so loss and gradients are the same; vertices that
several ranks need are sampled, loaded and computed by each of them. Nothing crosses between ranks but gradients. Needs
the whole graph and all features on every rank, memory-mapped or not. Targets go to the ranks in turn, or to their
owners: neighbourhoods of one rank's targets then have more in common.
"""

from typing import ClassVar

from gsplit.exchange import IdentityExchange
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.strategies.protocol import LocalFrontier, RowsRead, SampledStep
from gsplit.strategies.setup import StrategyBase, StrategySetup
from gsplit.telemetry import StepTelemetry

__all__ = ["DataStrategy"]


class DataStrategy(StrategyBase):
    """See ``protocol.Strategy``."""

    needs_whole_graph: ClassVar[bool] = True
    reads: ClassVar[RowsRead] = "all rows"

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self._sampler = setup.make_sampler(setup.views.sampled)

    def sample(self, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        """See ``Strategy``; no other rank is asked for anything."""
        targets, global_batch_size = self._own_targets(key, telemetry)
        with telemetry.span("sample"):
            sample = sample_minibatch(self._sampler, targets, self._setup.num_neighbors, key)
        telemetry.record_max("sampler_bytes", self._sampler.num_bytes)
        exchanges = tuple(IdentityExchange(block.num_src, block.num_dst) for block in sample.blocks)
        return SampledStep(
            key=key,
            targets=targets,
            global_batch_size=global_batch_size,
            blocks=sample.blocks,
            read_ids=sample.input_ids,
            frontiers=(LocalFrontier(0, sample.input_ids),),
            loading_exchange=exchanges[0],
            exchanges=exchanges,
            telemetry=telemetry,
        )
