"""GCN's normalisation on a block: what PyG's ``gcn_norm`` makes of the full graph, restricted to the sampled edges.

The degrees are those of the whole graph (``gsplit.degrees``); the forward pass asks the batch for them.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module
from torch_geometric import nn as pyg

from gsplit.blocks import Block
from gsplit.nn.self_loops import loop_once

__all__ = ["GcnOptions", "gcn_options", "normalised_edges"]


def normalised_edges(
    block: Block,
    deg_inv_sqrt: Tensor,
    edge_weight: Tensor | None = None,
    loop_weight: Tensor | None = None,
    *,
    add_self_loops: bool = True,
) -> tuple[Block, Tensor]:
    """GCN's edges and their weights: what PyG's ``gcn_norm`` makes of the full graph, restricted to a block.

    ``deg_inv_sqrt`` has one number per source row, ``edge_weight`` one per edge, ``loop_weight`` one per destination
    (see ``gsplit.degrees``; both None for a graph without weights). With ``add_self_loops`` the sampled self-loops give
    way to one per destination, which stands last among its edges; otherwise the block stays as it is.
    """
    if add_self_loops:
        assert (edge_weight is None) == (loop_weight is None), "weights of edges and of self-loops come together"
        looped = loop_once(block)
        block = looped.block
        if edge_weight is not None and loop_weight is not None:
            edge_weight = looped.merge(edge_weight, loop_weight.to(edge_weight.dtype))
    src, dst = block.edge_index()
    weights = deg_inv_sqrt[src] if edge_weight is None else deg_inv_sqrt[src] * edge_weight
    return block, weights * deg_inv_sqrt[dst]


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
