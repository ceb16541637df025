"""Blocks: the edges of one layer of a mini-batch on one rank, and the vertices that its rows are.

The destinations of layer l are the local frontier of layer l + 1, its sources the mixed frontier of layer l, which a
``Route`` makes from the local ones. Destinations are a prefix of the mixed frontier (law 4).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gsplit.kernels.csr import destination_rows

__all__ = ["Block", "FrontierIds", "count_self_loops"]


@dataclass(frozen=True, slots=True)
class Block:
    """Edges of one layer on one rank, grouped by destination: all sampled in-edges of each destination (law 3).

    ``src_rows[indptr[i] : indptr[i + 1]]`` are rows of the mixed frontier (``num_src`` of them) that point at
    destination row i. ``edge_ids`` are the edges' rows in the store's per-edge arrays, where the sampler was asked for
    them. ``num_self_loops`` is counted in advance for blocks on a device, so that the host need not wait for it later.

    >>> block = Block(torch.tensor([0, 2]), torch.tensor([1, 2]), num_src=3)
    >>> block.edge_index().tolist()
    [[1, 2], [0, 0]]
    """

    indptr: Tensor
    src_rows: Tensor
    num_src: int
    edge_ids: Tensor | None = None
    num_self_loops: int | None = None

    @property
    def num_dst(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.src_rows.numel()

    def edge_index(self) -> Tensor:
        """The edges in PyG's form: source rows above destination rows."""
        return torch.stack([self.src_rows, destination_rows(self.indptr, self.num_edges)])

    def to(self, device: torch.device) -> "Block":
        """The same block on a device."""
        edge_ids = None if self.edge_ids is None else self.edge_ids.to(device)
        return Block(self.indptr.to(device), self.src_rows.to(device), self.num_src, edge_ids, self.num_self_loops)


def count_self_loops(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """The blocks with their numbers of self-loops; one wait for all of them."""
    edges = [block.edge_index() for block in blocks]
    counts = torch.stack([(src == dst).sum() for src, dst in edges]).tolist()
    return tuple(replace(block, num_self_loops=count) for block, count in zip(blocks, counts, strict=True))


@dataclass(frozen=True, slots=True)
class FrontierIds:
    """The vertices of a rank's local frontiers, each a prefix of the one below it, from level ``level`` up.

    Level l is the input of layer l. ``n_id``: original ids. ``ids``: the same in the store's numbering. Local frontiers
    [7, 8, 6] at level 0 and [7] at level 1 are ``FrontierIds(0, [7, 8, 6], ...)``.
    """

    level: int
    n_id: Tensor
    ids: Tensor
