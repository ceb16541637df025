"""Presampling by ranks: mini-batches are drawn together, as in split training, and everyone counts what it owns.

A mini-batch does not depend on the number of ranks (law 1), and a rank draws the in-edges of its own vertices. So the
counts of a rank are those that one process would have for the vertices of its range. Memory is that of ``presample``
with the rank's vertices and in-edges.
"""

import operator
from dataclasses import dataclass
from typing import Self

from gsplit.minibatch.split import split_minibatch
from gsplit.partitioning.defaults import EPOCHS
from gsplit.partitioning.presample import Counts, Tally, check_batches, check_epochs, drawn_by
from gsplit.partitioning.sharded.held_shard import HeldShard
from gsplit.progress import Progress, silent
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import HostNeighborSampler, check_fanouts
from gsplit.sampling.targets import LocalTargets
from gsplit.telemetry import StepTelemetry

__all__ = ["ShardWorkload", "presample_shard"]


@dataclass(frozen=True)
class ShardWorkload:
    """What will be trained, as one rank sees it: its shard, its targets and how mini-batches are drawn."""

    held: HeldShard
    targets: LocalTargets
    num_neighbors: list[int]
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_batches(self.num_neighbors, self.batch_size, self.seed, self.targets.num_targets)

    @classmethod
    def of_shard(
        cls, held: HeldShard, input_nodes: str | None, num_neighbors: list[int], batch_size: int, seed: int = 0
    ) -> Self:
        """``input_nodes``: the name of stored targets, or None for every vertex."""
        check_fanouts(num_neighbors)
        fanouts = [operator.index(fanout) for fanout in num_neighbors]
        return cls(held, held.targets(input_nodes), fanouts, batch_size, seed)

    @property
    def steps_per_epoch(self) -> int:
        """Mini-batches of one epoch."""
        return -(-self.targets.num_targets // self.batch_size)


def presample_shard(workload: ShardWorkload, *, epochs: int = EPOCHS, progress: Progress = silent) -> Counts:
    """Count for the vertices held and their in-edges over the mini-batches of ``epochs`` epochs. A collective."""
    check_epochs(epochs)
    held, size, seed = workload.held, workload.batch_size, workload.seed
    sampler = HostNeighborSampler(held.graph, held.store.original_ids()[:0], edge_ids=True)
    tally, steps = Tally(held.graph), workload.steps_per_epoch
    for epoch in range(epochs):
        for step in range(steps):
            targets = workload.targets.for_step(seed, epoch, step, size, shuffle=True)
            key, telemetry = StepKey(seed, epoch, step), StepTelemetry(epoch, step)
            split = split_minibatch(sampler, targets, workload.num_neighbors, key, held.ownership, held.comm, telemetry)
            tally.add(drawn_by([layer.block for layer in split.layers], split.input_ids.numpy()))
            progress("presample", epoch * steps + step + 1, epochs * steps)
    return tally.counts(epochs * steps)
