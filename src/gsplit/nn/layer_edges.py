"""A block's edges as layers need them: without self-loops or with one per destination, and GCN's normalisation.

Destinations are the first sources of a block, so a self-loop is an edge between equal rows. Where the model runs on a
device, the loader has counted the self-loops of a block (``Block.num_self_loops``), so that nothing here makes the host
wait for the device. GCN's degrees are those of the whole graph (``graph.degrees``).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric import nn as pyg
from torch_geometric.utils import add_self_loops as add_loops

from gsplit.array_types import Ids
from gsplit.graph.blocks import Block
from gsplit.kernels.csr import LOOP, make_csr_edges
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.jit import kernel

__all__ = [
    "GcnOptions",
    "LoopedBlock",
    "gcn_options",
    "loop_once",
    "looped_edges",
    "normalised_edges",
    "num_other_edges",
    "other_edges",
]

Floats = npt.NDArray[Any]


def other_edges(block: Block) -> Tensor:
    """Positions of the edges that are not self-loops, in order."""
    is_other = block.src_rows != block.dst_rows()
    return _positions(block, is_other, is_other.cumsum(0))


def _positions(block: Block, is_other: Tensor, num_so_far: Tensor) -> Tensor:
    """The positions of the edges that are not self-loops; ``num_so_far``: their number up to each edge."""
    if block.num_self_loops is None:  # on the CPU, where nothing waits
        return torch.nonzero(is_other).squeeze(1)
    num_other = block.num_edges - block.num_self_loops
    places = torch.arange(block.num_edges, device=is_other.device)
    targets = torch.where(is_other, num_so_far - 1, num_other)  # self-loops go to a place that is cut off
    return places.new_empty(num_other + 1).scatter_(0, targets, places)[:num_other]


def num_other_edges(block: Block) -> int:
    """Number of edges that are not self-loops."""
    known = block.num_self_loops
    return other_edges(block).numel() if known is None else block.num_edges - known


@dataclass(frozen=True, slots=True)
class LoopedBlock:
    """A block whose self-loops were replaced by one per destination, the last of the destination's edges.

    ``others``: the edges that were kept, as positions in the original block. ``other_places``, ``loop_places``: the
    positions of these and of the self-loops in the new block.
    """

    block: Block
    others: Tensor
    other_places: Tensor
    loop_places: Tensor

    def merge(self, of_edges: Tensor, of_loops: Tensor) -> Tensor:
        """Values of the new block's edges, from those of the original edges and of the self-loops."""
        merged = of_edges.new_empty(self.block.num_edges, *of_edges.shape[1:])
        merged[self.other_places] = of_edges[self.others]
        merged[self.loop_places] = of_loops
        return merged


def loop_once(block: Block) -> LoopedBlock:
    """Replace the self-loops of a block by one per destination."""
    src = block.src_rows
    dst = block.dst_rows()
    is_other = src != dst
    num_so_far = is_other.cumsum(0)
    others = _positions(block, is_other, num_so_far)
    ends = torch.cat([others.new_zeros(1), num_so_far])[block.indptr]  # other edges before a destination
    indptr = ends + torch.arange(block.num_dst + 1, device=src.device)  # and one self-loop per earlier destination
    other_places = torch.arange(others.numel(), device=src.device) + dst[others]
    loop_places = indptr[1:] - 1
    rows = src.new_empty(others.numel() + block.num_dst)
    rows[other_places] = src[others]
    rows[loop_places] = torch.arange(block.num_dst, device=src.device)
    return LoopedBlock(Block(indptr, rows, block.num_src), others, other_places, loop_places)


def looped_edges(block: Block, edge_attr: Tensor | None, layer: Module) -> tuple[Tensor, Tensor | None]:
    """``edge_index`` and edge features as PyG's attention layers make them with ``add_self_loops``."""
    places = other_edges(block)
    others = None if edge_attr is None else edge_attr.index_select(0, places)
    edges = block.edge_index().index_select(1, places)
    looped: tuple[Tensor, Tensor | None] = add_loops(
        edges, others, fill_value=layer.fill_value, num_nodes=block.num_dst
    )
    return looped


@dataclass(frozen=True)
class GcnOptions:
    """How a GCN layer normalises: ``fill_value`` is the weight of a self-loop that is not stored."""

    add_self_loops: bool
    fill_value: float


def gcn_options(layer: Module) -> GcnOptions | None:
    """The normalisation a GCNConv asks for; None for other layers and for ``normalize=False``."""
    if not isinstance(layer, pyg.GCNConv) or not layer.normalize:
        return None
    return GcnOptions(bool(layer.add_self_loops), 2.0 if layer.improved else 1.0)


def normalised_edges(
    block: Block,
    deg_inv_sqrt: Tensor,
    edge_weight: Tensor | None = None,
    loop_weight: Tensor | None = None,
    *,
    add_self_loops: bool = True,
) -> tuple[Block, Tensor]:
    """GCN's edges and their weights: PyG's ``gcn_norm`` of the full graph, restricted to a block.

    ``deg_inv_sqrt`` has one number per source row, ``edge_weight`` one per edge, ``loop_weight`` one per destination
    (see ``graph.degrees``; both None for a graph without weights). With ``add_self_loops`` the sampled self-loops are
    replaced by one per destination (``loop_once``); otherwise the block stays as it is.
    """
    if add_self_loops:
        assert (edge_weight is None) == (loop_weight is None), "weights of edges and of self-loops come together"
    if kernel_for("sum rows", deg_inv_sqrt.device, deg_inv_sqrt.dtype) == "numba":
        return _normalise_on_host(block, deg_inv_sqrt, edge_weight, loop_weight, add_self_loops=add_self_loops)
    if add_self_loops:
        looped = loop_once(block)
        block = looped.block
        if edge_weight is not None and loop_weight is not None:
            edge_weight = looped.merge(edge_weight, loop_weight.to(edge_weight.dtype))
    of_src = deg_inv_sqrt[block.src_rows]
    weights = of_src if edge_weight is None else of_src * edge_weight
    return block, weights * deg_inv_sqrt[block.dst_rows()]


@kernel
def _weigh_edges(
    indptr: Ids, edges: tuple[Ids, Ids, Ids], degrees: Floats, edge_weight: Floats, loop_weight: Floats
) -> Floats:
    """The weights of edges, and of the self-loops among them; ``places`` count from ``indptr``, as in ``kernels.csr``.

    Without weights of edges and of self-loops all are 1. Rows have been checked.
    """
    offsets, src_rows, places = edges
    weights = np.empty(src_rows.size, degrees.dtype)
    for i in range(offsets.size - 1):
        for e in range(offsets[i], offsets[i + 1]):
            weight = degrees[src_rows[e]]
            if places[e] == LOOP:
                weight *= loop_weight[i] if loop_weight.size else degrees.dtype.type(1)
            elif edge_weight.size:
                weight *= edge_weight[indptr[i] + places[e]]
            weights[e] = weight * degrees[i]
    return weights


def _normalise_on_host(
    block: Block,
    deg_inv_sqrt: Tensor,
    edge_weight: Tensor | None,
    loop_weight: Tensor | None,
    *,
    add_self_loops: bool,
) -> tuple[Block, Tensor]:
    """``normalised_edges`` in compiled loops."""
    edges = make_csr_edges(block.indptr, block.src_rows, block.num_src, add_self_loops=add_self_loops)
    none = deg_inv_sqrt.new_empty(0)
    of_edges, of_loops = (
        none if values is None else values.detach().to(deg_inv_sqrt.dtype) for values in (edge_weight, loop_weight)
    )
    assert of_edges.numel() in (0, block.num_edges) and of_loops.numel() in (0, block.num_dst)
    arrays = (edges.indptr.numpy(), edges.src_rows.numpy(), edges.places.numpy())
    weights = _weigh_edges(block.indptr.numpy(), arrays, deg_inv_sqrt.numpy(), of_edges.numpy(), of_loops.numpy())
    looped = Block(edges.indptr, edges.src_rows, block.num_src) if add_self_loops else block
    return looped, torch.from_numpy(weights)
