"""What ranks load and compute, counted without ranks: every rank of a mini-batch is worked out in this process.

The sampler and the split are those of training (``split_in_one_process``, ``sample_minibatch``); nothing is loaded and
nothing sent. One pass over the mini-batches counts, for every vertex, how often its row is read and how often it
crosses between ranks at layer 0, so that any cache and any set of copies can be judged afterwards.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.ownership import Ownership
from gsplit.partitioning.presample import Workload
from gsplit.progress import Progress, silent
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.targets import LocalTargets
from gsplit.split import split_in_one_process

__all__ = ["LoadingCounts", "count_data", "count_split"]

_NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class LoadingCounts:
    """Over all ranks and ``num_batches`` mini-batches.

    ``loaded``: for every vertex, how often its row was read. ``received``: how often a rank received it at layer 0.
    ``edges``: edges computed, of all layers.
    """

    num_batches: int
    edges: int
    loaded: npt.NDArray[np.int64]
    received: npt.NDArray[np.int64]

    @property
    def rows(self) -> int:
        """Input rows read."""
        return int(self.loaded.sum())

    @property
    def rows_received(self) -> int:
        """Input rows that cross between ranks."""
        return int(self.received.sum())


def count_split(
    workload: Workload, ownership: Ownership, epoch: int = 0, *, steps: int | None = None, progress: Progress = silent
) -> LoadingCounts:
    """Split parallelism: every rank samples and loads what it owns. ``steps``: of the epoch, all unless given."""
    graph, original = workload.graph, workload.original_ids
    samplers = [
        HostNeighborSampler(graph.restrict(first, stop), original[first:stop] if original.size else _NO_IDS)
        for first, stop in map(ownership.range_of, range(ownership.num_ranks))
    ]
    counts, edges, steps = _Counter(workload), 0, steps or workload.steps_per_epoch
    for key, targets in _steps(workload, epoch, steps, 0, 1):
        for split in split_in_one_process(samplers, targets, workload.num_neighbors, key, ownership):
            edges += sum(layer.block.num_edges for layer in split.layers)
            counts.add(split.input_ids, split.layers[0].foreign_ids)
        progress(f"split, {ownership.num_ranks} ranks", key.step + 1, steps)
    return counts.finish(steps, edges)


def count_data(
    workload: Workload, num_ranks: int, epoch: int = 0, *, steps: int | None = None, progress: Progress = silent
) -> LoadingCounts:
    """Data parallelism: every rank takes a strided cut of the targets and its whole neighbourhood.

    On one rank this is the mini-batch itself.
    """
    sampler = HostNeighborSampler(workload.graph, workload.original_ids)
    counts, edges, nothing = _Counter(workload), 0, torch.empty(0, dtype=torch.int64)
    steps = steps or workload.steps_per_epoch
    for rank in range(num_ranks):
        for key, targets in _steps(workload, epoch, steps, rank, num_ranks):
            sample = sample_minibatch(sampler, targets, workload.num_neighbors, key)
            edges += sum(block.num_edges for block in sample.blocks)
            counts.add(sample.input_ids, nothing)
        progress(f"data, {num_ranks} ranks", rank + 1, num_ranks)
    return counts.finish(steps, edges)


def _steps(workload: Workload, epoch: int, steps: int, rank: int, num_ranks: int) -> Iterator[tuple[StepKey, Tensor]]:
    """Every step's key, and the targets in a rank's strided cut of it."""
    targets, size, seed = workload.targets, workload.batch_size, workload.seed
    local = LocalTargets(np.arange(targets.size), targets, targets.size)
    for step in range(steps):
        yield StepKey(seed, epoch, step), local.for_step(seed, epoch, step, size, shuffle=True, cut=(rank, num_ranks))


class _Counter:
    """Ids come once per rank and step, so they are added by indexing."""

    def __init__(self, workload: Workload) -> None:
        self._loaded, self._received = (np.zeros(workload.graph.num_vertices, np.int64) for _ in range(2))

    def add(self, loaded_ids: Tensor, received_ids: Tensor) -> None:
        self._loaded[loaded_ids.numpy()] += 1
        self._received[received_ids.numpy()] += 1

    def finish(self, num_batches: int, edges: int) -> LoadingCounts:
        return LoadingCounts(num_batches, edges, self._loaded, self._received)
