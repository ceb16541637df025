"""Blocks: the edges of one layer of a mini-batch on one rank, and the vertices of its rows.

The sources of layer l are the mixed frontier of layer l: [local frontier of layer l | rows of other ranks]. Its
destinations are the local frontier of layer l + 1, which is a prefix of both (law 4).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gsplit.kernels.csr import EdgesBySource, count_loops, destination_rows, group_by_source

__all__ = ["Block", "FrontierIds", "TimedSeeds", "count_self_loops"]


@dataclass(frozen=True, slots=True)
class Block:
    """The edges of one layer on one rank, grouped by destination: all sampled in-edges of each destination (law 3).

    ``src_rows[indptr[i] : indptr[i + 1]]`` are the sources of destination row i, as rows of the mixed frontier, which
    has ``num_src`` rows. ``edge_ids``: the rows of the edges in the store's per-edge arrays, if the sampler returns
    them. ``num_self_loops``: counted ahead for devices, where counting later would make the host wait. ``by_source``:
    the same edges by source, if a device has grouped them ahead (``transpose``).

    Destination row 0 has two in-edges, from rows 1 and 2 of three mixed rows:

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2]), num_src=3)
    >>> block.edge_index().tolist()
    [[1, 2], [0, 0]]
    """

    indptr: Tensor
    src_rows: Tensor
    num_src: int
    edge_ids: Tensor | None = None
    num_self_loops: int | None = None
    by_source: EdgesBySource | None = None

    @property
    def num_dst(self) -> int:
        """The number of destinations."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.src_rows.numel()

    def dst_rows(self) -> Tensor:
        """The destination row of every edge."""
        return destination_rows(self.indptr, self.num_edges)

    def edge_index(self) -> Tensor:
        """The edges as PyG has them: a tensor [2, E] of source rows and destination rows."""
        return torch.stack([self.src_rows, self.dst_rows()])

    def transpose(self) -> "Block":
        """The block with its edges also grouped by source, for backward."""
        return replace(self, by_source=group_by_source(self.indptr, self.src_rows, self.num_src))

    def to(self, device: torch.device) -> "Block":
        """The same block on a device."""
        edge_ids = None if self.edge_ids is None else self.edge_ids.to(device)
        return Block(self.indptr.to(device), self.src_rows.to(device), self.num_src, edge_ids, self.num_self_loops)


def count_self_loops(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Count the self-loops of all blocks, with a single wait if they are on a device."""
    counts = torch.stack([count_loops(block.indptr, block.src_rows) for block in blocks]).tolist()  # device sync
    return tuple(replace(block, num_self_loops=count) for block, count in zip(blocks, counts, strict=True))


@dataclass(frozen=True)
class FrontierIds:
    """The vertices of a rank's local frontiers from level ``level`` up, where level l is the input of layer l.

    Each local frontier is a prefix of the one below it (law 4), so the ids of the lowest one are enough.
    ``original_ids``: original ids, or the function that gives those of ``ids``, the same vertices in the numbering of
    the store. ``timed``: hashes of (original id, time), in temporal sampling, where a row belongs to a vertex and a
    time.

    Local frontiers [7, 8, 6] at level 0 and [7] at level 1 are ``FrontierIds(level=0, original_ids=[7, 8, 6], ...)``:
    the local frontier of level 1 is its first row.
    """

    level: int
    original_ids: Tensor | Callable[[Tensor], Tensor]
    ids: Tensor
    timed: Tensor | None = None

    @cached_property
    def n_id(self) -> Tensor:
        """Original ids of the vertices. A step that nothing random depends on does not need them."""
        return self.original_ids if isinstance(self.original_ids, Tensor) else self.original_ids(self.ids)

    @property
    def names(self) -> Tensor:
        """What random numbers of the rows depend on: original ids, with the time if there is one."""
        return self.n_id if self.timed is None else self.timed


@dataclass(frozen=True, slots=True)
class TimedSeeds:
    """A rank's targets in temporal sampling: the time of each, and its position in the ``input_nodes`` given."""

    time: Tensor
    input_id: Tensor
