"""Copies of the hottest rows of other ranks, so that they are not exchanged at layer 0.

Partitioning sorts the vertices of a part by hotness: how often presampling loaded them, hottest first. One threshold of
hotness for the whole graph gives the length of the prefix of every run of vertices that all other ranks copy. A run is
the vertices of one part that one rank owns. Sender and receiver compute from these lengths which rows are not
exchanged: those with ``position in the run < length of the copied prefix``. There is no map of the vertices and no list
of copied rows (law 6).

The copies are made once, when the loader opens, with collectives of the loading group. A rank has the hotness of its
own vertices only, as in a shard.
"""

import operator
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call, Comm
from gsplit.features.protocol import RowSource, take_rows
from gsplit.graph.ownership import Ownership

__all__ = ["CopiedPrefixes", "ForeignCopies", "choose_prefixes", "fetch_copies"]

_HOTTEST = 1 << 32  # hotness is stored from uint32
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class CopiedPrefixes:
    """The copied vertices: the first ``lengths[i]`` of run i, which is ``boundaries[i] .. boundaries[i + 1] - 1``.

    Two runs, 0..3 and 4..5. The first two vertices of the first and the first of the second are copied:

    >>> CopiedPrefixes((0, 4, 6), (2, 1)).hold(torch.tensor([0, 1, 2, 4, 5])).tolist()
    [True, True, False, True, False]
    """

    boundaries: tuple[int, ...]
    lengths: tuple[int, ...]

    def runs_of(self, ids: Tensor) -> Tensor:
        """The run of each vertex."""
        return torch.searchsorted(
            torch.tensor(self.boundaries[1:-1], dtype=ids.dtype, device=ids.device), ids, right=True
        )

    def hold(self, ids: Tensor) -> Tensor:
        """Whether each vertex is copied, so that all ranks but its owner have a copy of its row."""
        ends = [first + length for first, length in zip(self.boundaries, self.lengths, strict=False)]
        return ids < torch.tensor(ends, dtype=ids.dtype, device=ids.device)[self.runs_of(ids)]

    def of_rank(self, ownership: Ownership, rank: int) -> list[range]:
        """The copied prefixes of a rank's own runs."""
        low, high = ownership.range_of(rank)
        return [
            range(first, first + length)
            for first, length in zip(self.boundaries, self.lengths, strict=False)
            if low <= first < high
        ]

    def num_held(self, ownership: Ownership, rank: int) -> int:
        """The number of rows that a rank has copies of: the copied rows of all other ranks."""
        return sum(self.lengths) - sum(len(run) for run in self.of_rank(ownership, rank))


def choose_prefixes(
    hotness: npt.NDArray[np.int64], first: int, part_boundaries: list[int], ownership: Ownership, rows: int, comm: Comm
) -> CopiedPrefixes:
    """Choose the hottest rows of the whole graph, as many as possible with at most ``rows`` copies on any rank.

    ``hotness`` is that of this rank's vertices, which start at ``first``. Rows that are exactly as hot as the threshold
    are taken from all runs in the same proportion. A collective.
    """
    boundaries = tuple(sorted({*part_boundaries, *ownership.boundaries}))
    owners = ownership.owners(torch.tensor(boundaries[:-1])).numpy()
    own = [
        (run, hotness[start - first : stop - first])
        for run, (start, stop) in enumerate(pairwise(boundaries))
        if first <= start and stop <= first + hotness.shape[0]
    ]

    def count_hotter(threshold: int) -> npt.NDArray[np.int64]:
        """The number of rows of every run with a larger hotness. A collective."""
        counts = torch.zeros(len(boundaries) - 1, dtype=torch.int64)
        for run, falling in own:
            counts[run] = bisect_left(falling, -threshold, key=operator.neg)
        summed = counts.to(comm.device)
        comm.all_reduce(Call("count hot rows"), summed).wait()  # all ranks: the bisection has the same steps on each
        found: npt.NDArray[np.int64] = summed.cpu().numpy()
        return found

    def foreign(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of these rows that each rank would have copies of."""
        own_counts = np.zeros(ownership.num_ranks, np.int64)
        np.add.at(own_counts, owners, counts)
        others: npt.NDArray[np.int64] = counts.sum() - own_counts
        return others

    low = -1
    high = _HOTTEST
    while low < high:
        middle = (low + high) // 2
        if int(foreign(count_hotter(middle)).max()) <= rows:
            high = middle
        else:
            low = middle + 1
    hotter = count_hotter(low)
    tied = count_hotter(low - 1) - hotter
    room = rows - foreign(hotter)
    wanted = foreign(tied)
    shares = [Fraction(int(free), int(needed)) for free, needed in zip(room, wanted, strict=True) if needed]
    share = min([Fraction(1), *shares])
    taken = [int(count) + int(share * int(more)) for count, more in zip(hotter, tied, strict=True)]
    return CopiedPrefixes(boundaries, tuple(taken))


class ForeignCopies:
    """The copies of one rank: the copied prefixes of the runs of all other ranks, concatenated."""

    def __init__(self, prefixes: CopiedPrefixes, ownership: Ownership, rank: int, rows: Tensor) -> None:
        low, high = ownership.range_of(rank)
        held = [
            0 if low <= first < high else length
            for first, length in zip(prefixes.boundaries, prefixes.lengths, strict=False)
        ]
        offsets = [0, *accumulate(held)][:-1]
        shifts = [offset - first for offset, first in zip(offsets, prefixes.boundaries, strict=False)]
        self.prefixes = prefixes
        self.rows = rows
        self._shifts = torch.tensor(shifts, dtype=torch.int64, device=rows.device)

    @property
    def num_bytes(self) -> int:
        """The memory of the copies."""
        return self.rows.nbytes

    def places_of(self, ids: Tensor) -> Tensor:
        """The rows of some copied vertices in ``rows``."""
        return ids + self._shifts[self.prefixes.runs_of(ids)]

    def move_rows(self, device: torch.device) -> "ForeignCopies":
        """Move the rows to a device. Ids are still looked up on the host."""
        self.rows = self.rows.to(device)
        return self


def fetch_copies(prefixes: CopiedPrefixes, ownership: Ownership, features: RowSource, comm: Comm) -> ForeignCopies:
    """Read the copied prefixes of this rank's runs and send them to all other ranks, in pieces. A collective."""
    device = comm.device
    rank = comm.rank
    size = comm.size
    rows = torch.empty(prefixes.num_held(ownership, rank), *features.row_shape, dtype=features.dtype, device=device)
    lengths = [sum(len(run) for run in prefixes.of_rank(ownership, peer)) for peer in range(size)]
    starts = [0, *accumulate(0 if peer == rank else length for peer, length in enumerate(lengths))]
    piece = max(1, _PIECE_BYTES // (size * max(1, prod(features.row_shape) * features.dtype.itemsize)))
    mine = [torch.arange(run.start, run.stop) for run in prefixes.of_rank(ownership, rank)]
    own_ids = torch.cat([torch.empty(0, dtype=torch.int64), *mine]).to(device)
    for done in range(0, max(lengths) if size > 1 else 0, piece):  # all ranks: they have the same lengths
        sizes = [min(piece, max(0, length - done)) for length in lengths]
        sent = take_rows(features, own_ids[done : done + piece], device).repeat(size - 1, *[1] * (rows.dim() - 1))
        send_counts = tuple(0 if peer == rank else sizes[rank] for peer in range(size))
        recv_counts = tuple(0 if peer == rank else sizes[peer] for peer in range(size))
        received = torch.empty(sum(recv_counts), *features.row_shape, dtype=features.dtype, device=device)
        comm.all_to_all(Call("fetch copies"), received, sent, recv_counts, send_counts).wait()
        for peer, arrived in enumerate(received.split(recv_counts)):
            rows[starts[peer] + done : starts[peer] + done + arrived.size(0)] = arrived
    return ForeignCopies(prefixes, ownership, rank, rows)
