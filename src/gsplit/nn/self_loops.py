"""Self-loops of a block: told apart from the other edges, and given by attention layers to every destination.

Destinations are the first sources of a block, so a self-loop is an edge between equal rows. How many a block has, the
loader has counted (``Block.num_self_loops``) where the model runs on a device: nothing here makes the host wait for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.utils import add_self_loops

from gsplit.blocks import Block
from gsplit.nn.layers import is_attention

__all__ = ["LoopedBlock", "adds_self_loops", "loop_once", "looped_edges", "num_other_edges", "other_edges"]


def other_edges(block: Block) -> Tensor:
    """Places of the edges that are no self-loops, in order."""
    src, dst = block.edge_index()
    is_other = src != dst
    if block.num_self_loops is None:  # on the CPU, where nothing waits
        return torch.nonzero(is_other).squeeze(1)
    num_other = block.num_edges - block.num_self_loops
    places = torch.arange(block.num_edges, device=src.device)
    targets = torch.where(is_other, is_other.cumsum(0) - 1, num_other)  # self-loops go to a place that is cut off
    return places.new_empty(num_other + 1).scatter_(0, targets, places)[:num_other]


def num_other_edges(block: Block) -> int:
    """How many edges are no self-loops."""
    known = block.num_self_loops
    return other_edges(block).numel() if known is None else block.num_edges - known


@dataclass(frozen=True, slots=True)
class LoopedBlock:
    """A block with one self-loop per destination, which stands last among its edges, in place of all others.

    ``others`` are the edges that were kept, by their places in the block before; ``other_places`` and ``loop_places``
    say where these and the self-loops stand now.
    """

    block: Block
    others: Tensor
    other_places: Tensor
    loop_places: Tensor

    def merge(self, of_edges: Tensor, of_loops: Tensor) -> Tensor:
        """Values of the edges before and of the self-loops, for the edges as they are now."""
        merged = of_edges.new_empty(self.block.num_edges, *of_edges.shape[1:])
        merged[self.other_places], merged[self.loop_places] = of_edges[self.others], of_loops
        return merged


def loop_once(block: Block) -> LoopedBlock:
    """Put one self-loop per destination in place of the self-loops of a block."""
    src, dst = block.edge_index()
    others = other_edges(block)
    ends = torch.cat([others.new_zeros(1), (src != dst).cumsum(0)])[block.indptr]  # other edges before a destination
    indptr = ends + torch.arange(block.num_dst + 1, device=src.device)  # and one self-loop per earlier destination
    other_places = torch.arange(others.numel(), device=src.device) + dst[others]
    loop_places = indptr[1:] - 1
    rows = src.new_empty(others.numel() + block.num_dst)
    rows[other_places], rows[loop_places] = src[others], torch.arange(block.num_dst, device=src.device)
    return LoopedBlock(Block(indptr, rows, block.num_src), others, other_places, loop_places)


def adds_self_loops(layer: Module) -> bool:
    """Whether a layer is an attention layer of PyG that puts one self-loop per destination in place of all others."""
    return is_attention(layer) and bool(layer.add_self_loops)


def looped_edges(block: Block, edge_attr: Tensor | None, layer: Module) -> tuple[Tensor, Tensor | None]:
    """The edges that such a layer would make of a block, in PyG's form, and their features."""
    places = other_edges(block)
    others = None if edge_attr is None else edge_attr.index_select(0, places)
    edges = block.edge_index().index_select(1, places)
    looped: tuple[Tensor, Tensor | None] = add_self_loops(
        edges, others, fill_value=layer.fill_value, num_nodes=block.num_dst
    )
    return looped
