"""What one step reads from disk: the reads and bytes of its distinct input rows, by the rule of the reader.

All strategies compute the same step, so the ranks of a host read the same distinct rows between them, whatever the
strategy: a row that several ranks ask for comes from disk once and from the kernel's page cache afterwards. Rows that
lie close together become one read, so a partition that keeps neighbours together makes fewer.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gsplit.features.disk import GAP_BYTES, READ_BYTES
from gsplit.partitioning.presample import Workload
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.targets import LocalTargets

__all__ = ["PAGE_BYTES", "DiskReads", "count_reads", "reads_of"]

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DiskReads:
    """Calls that go to the disk, and bytes of the pages that come from it."""

    reads: float
    num_bytes: float


def count_reads(workload: Workload, row_bytes: int, *, epoch: int = 0, steps: int = 3) -> DiskReads:
    """Of a step, on average over the first ``steps`` of an epoch."""
    sampler = HostNeighborSampler(workload.graph, workload.original_ids)
    local = LocalTargets(np.arange(workload.targets.size), workload.targets, workload.targets.size)
    found = []
    for number in range(steps):
        key = StepKey(workload.seed, epoch, number)
        targets = local.for_step(key.seed, key.epoch, key.step, workload.batch_size, shuffle=True)
        batch = sample_minibatch(sampler, targets, workload.num_neighbors, key)
        found.append(reads_of(np.sort(batch.input_ids.numpy()), row_bytes))
    return DiskReads(sum(read.reads for read in found) / steps, sum(read.num_bytes for read in found) / steps)


def reads_of(rows: npt.NDArray[np.int64], row_bytes: int) -> DiskReads:
    """Of ascending rows. Pages of the gaps inside a read come with it.

    >>> reads_of(np.array([0, 1, 1000]), 4096)
    DiskReads(reads=2.0, num_bytes=12288.0)
    """
    if rows.size == 0 or row_bytes == 0:
        return DiskReads(0.0, 0.0)
    apart = np.flatnonzero(np.diff(rows) > GAP_BYTES // row_bytes + 1)
    first, last = rows[np.append(0, apart + 1)], rows[np.append(apart, rows.size - 1)]
    begin, end = first * row_bytes // PAGE_BYTES, -(-(last + 1) * row_bytes // PAGE_BYTES)
    pages = end - begin
    pages[1:] -= begin[1:] < end[:-1]  # a page that the read before has brought
    longest = np.maximum(1, -(-(last - first + 1) * row_bytes // READ_BYTES))
    return DiskReads(float(longest.sum()), float(pages.sum() * PAGE_BYTES))
