"""The structure of a model's forward: its layers, their adapters, and which rows each dropout and batch norm gets.

The dry run (``nn.checks.dry_run``) records it when a model is wrapped; every forward pass follows it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from gsplit.errors import InputError, explain
from gsplit.graph.types import EdgeType
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.typed_batch import TypedBatch, TypedLinkBatch
from gsplit.nn.adapters import Adapter
from gsplit.nn.layer_edges import num_other_edges

__all__ = ["ForwardPlan", "RowSpace", "Space", "check_batch", "num_rows"]

Metadata = tuple[tuple[str, ...], tuple[EdgeType, ...]]
"""Vertex types and edge types."""
Space = Literal["local", "mixed", "edges", "looped edges", "endpoints", "pairs"]


@dataclass(frozen=True)
class RowSpace:
    """What the rows of a tensor are: vertices of a frontier, or edges of a layer.

    ``local`` and ``mixed``: the local or mixed frontier of a level, counted from the input. ``edges``: the edges of a
    layer. ``looped edges``: the edges as GAT makes them, those that are not self-loops and then one self-loop per
    destination. ``RowSpace("local", 2)`` are the rows that come out of layer 1. ``endpoints`` are the rows that
    ``batch.endpoints`` returns, above the last layer, and ``pairs`` the values of a loss of pairs.

    ``of``: the vertex type of the rows, or the relation of the edges, in a heterogeneous graph; None for all of them.
    """

    space: Space
    layer: int
    of: str | EdgeType | None = None


@dataclass(frozen=True)
class ForwardPlan:
    """What the dry run recorded of a model.

    ``layer_of``: the layer of the mini-batch that each module computes, in the order of the calls. ``dropouts``,
    ``norms``: the rows of each dropout and batch norm call. ``layer_dropouts``: the number of dropout calls inside each
    module, which PyG's attention layers skip for a block without edges. ``activations``: the modules whose output
    only a ReLU reads (``fused_layers.Activation``). ``changed_buffers``: those that a forward in training changes.
    ``boundaries``: levels at which the rows of a mini-batch may become those of other vertices, as in ``hybrid(k)``.
    ``pairs``: the kind of pairs that the model decodes itself (``nn.checks.toy.PAIR_KINDS``); empty if its output are
    rows of vertices. ``pair_type``: the edge type of these pairs in a heterogeneous graph. ``types``: the vertex types
    and edge types of the graph, if it has types.
    """

    depth: int
    layer_of: dict[str, int]
    adapters: dict[str, Adapter]
    dropouts: tuple[RowSpace, ...]
    norms: tuple[RowSpace, ...]
    layer_dropouts: dict[str, int] = field(default_factory=dict)
    activations: frozenset[str] = frozenset()
    changed_buffers: tuple[str, ...] = ()
    takes_edge_attr: bool = False
    boundaries: frozenset[int] = frozenset()
    pairs: str = ""
    pair_type: EdgeType | None = None
    types: Metadata | None = None


def num_rows(batch: Batch, rows: RowSpace) -> int:
    """Number of rows of a kind in a batch."""
    batch = batch.part(rows.of)
    if rows.space == "local":
        return batch.num_targets if rows.layer == batch.num_layers else batch.layers[rows.layer].num_local
    if rows.space == "endpoints":
        return 0 if batch.pairs is None else batch.pairs.n_id.numel()
    if rows.space == "pairs":
        return batch.num_values
    block = batch.blocks[rows.layer]
    if rows.space == "mixed":
        return block.num_src
    if rows.space == "edges":
        return block.num_edges
    return num_other_edges(block) + block.num_dst


def _check_types(batch: Batch, plan: ForwardPlan) -> None:
    """Refuse a batch of a graph with other types, or with pairs of other types, than the model was wrapped for."""
    found = None
    if isinstance(batch, TypedBatch):
        found = (batch.types.vertex_types, batch.types.edge_types)
    if _sorted(found) != _sorted(plan.types):
        fix = "wrap the model with the graph of the loader: gsplit.parallelize(model, mesh, graph=graph)"
        raise InputError(explain("the model", f"a batch of a graph with {_named(plan.types)}", _named(found), fix))
    if plan.pair_type is not None and isinstance(batch, TypedLinkBatch) and batch.pair_type[::2] != plan.pair_type[::2]:
        expected = f"pairs from {plan.pair_type[0]} to {plan.pair_type[2]}, which it decodes"
        fix = "give their edge type to gsplit.parallelize(model, mesh, graph=graph, pair_type=...)"
        raise InputError(explain("the model", expected, f"pairs of {batch.pair_type}", fix))


def _sorted(types: Metadata | None) -> Any:
    return None if types is None else (sorted(types[0]), sorted(types[1]))


def _named(types: Metadata | None) -> str:
    if types is None:
        return "no types"
    return f"the vertex types {', '.join(types[0])} and the edge types {', '.join(map(str, types[1]))}"


def check_batch(batch: Batch, plan: ForwardPlan) -> None:
    """Refuse a batch of other types or depth than the model's, or with a boundary that the model joins rows across."""
    _check_types(batch, plan)
    if plan.depth != batch.num_layers:
        expected = f"{plan.depth} numbers, one per layer of the model"
        fix = "make the loader with as many numbers as layers"
        raise InputError(explain("num_neighbors", expected, batch.num_layers, fix))
    if plan.pairs and batch.pairs is None:
        fix = "use LinkNeighborLoader"
        raise InputError(explain("the model", "a batch of pairs, which it decodes", "a batch of vertices", fix))
    for level in [upper.level - 1 for upper in batch.frontiers[1:]]:
        if level not in plan.boundaries:
            expected = f"a model that joins no rows from below layer {level} with rows from above"
            got = "one that does, such as a residual x[:h.size(0)] + h across that layer"
            fix = "use split, data or data_cached"
            raise InputError(explain(f"strategy={batch.context.strategy!r}", expected, got, fix))
