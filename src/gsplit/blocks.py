"""What a mini-batch is made of on one rank: blocks of edges and indices of the shuffles, both frozen.

Layer l of a mini-batch has a block, whose destinations are the local frontier of layer l + 1 and whose sources are the
mixed frontier of layer l, and a shuffle index, which makes the mixed frontier from the local ones (law 4):
mixed = [local frontier | rows received, grouped by owner], and destinations are a prefix of it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gsplit.kernels.csr import destination_rows

__all__ = ["Block", "FrontierIds", "ShuffleIndex", "count_self_loops"]


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
class ShuffleIndex:
    """How rows move between ranks at one layer: which local rows go to which rank, and how many arrive from each.

    ``send_rows`` are rows of the local frontier, peer after peer, ``send_counts[p]`` of them to rank p; they are unique
    per peer. ``recv_counts[p]`` rows arrive from rank p and follow the ``num_local`` own ones.
    """

    send_rows: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    num_local: int
    num_dst: int

    @property
    def num_sent(self) -> int:
        return self.send_rows.numel()

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)

    @property
    def num_mixed(self) -> int:
        return self.num_local + self.num_received


@dataclass(frozen=True, slots=True)
class FrontierIds:
    """The vertices of a rank's local frontiers, each a prefix of the one below it, from level ``level`` up.

    Level l is the input of layer l. ``n_id``: original ids. ``ids``: the same in the store's numbering.
    """

    level: int
    n_id: Tensor
    ids: Tensor
