"""Counts of a step on a heterogeneous graph by vertex type and by relation, for one rank.

Sampling and splitting use fused ids, so a strategy is counted on the fused graph (``counts``). Types differ in the
width of their input rows, and every relation has a layer of its own. So rows are also counted by type, and edges by
relation, from the ids of the same mini-batches.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsplit.array_types import Array
from gsplit.graph.blocks import Block
from gsplit.graph.types import GraphTypes
from gsplit.minibatch.split import Split

__all__ = ["TypeCounter", "TypeCounts", "mean_types", "stack_types"]

Row = tuple[float, ...]
Table = tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class TypeCounts:
    """The counts of ``RankCounts`` by vertex type. ``edges[l]`` are by relation; tables are per layer, from the input.

    ``rows_loaded``, ``rows_sent`` and ``rows_received`` are input rows, which only types with features have.
    """

    edges: Table
    destinations: Table
    sources: Table
    rows_loaded: Row
    rows_sent: Row
    rows_received: Row


class TypeCounter:
    """Counts ids by type and edges by relation. ``featured``: the types with features; None for all."""

    def __init__(self, types: GraphTypes, edge_type: Array, featured: Collection[str] | None) -> None:
        self._types = types
        self._edge_type = edge_type
        self._has_rows = [featured is None or name in featured for name in types.vertex_types]

    def count(self, ids: Tensor) -> Row:
        """The vertices of every type."""
        return tuple(torch.bincount(self._types.of(ids), minlength=self._types.num_types).tolist())

    def count_rows(self, ids: Tensor) -> Row:
        """The input rows of every type: 0 for types without features."""
        return tuple(count if has else 0 for count, has in zip(self.count(ids), self._has_rows, strict=True))

    def _count_edges(self, block: Block) -> Row:
        assert block.edge_ids is not None  # a sampler of relations returns them
        kinds = np.asarray(self._edge_type[block.edge_ids.numpy()], np.int64)
        return tuple(np.bincount(kinds, minlength=self._types.num_relations).tolist())

    def of_blocks(self, blocks: Sequence[Block], input_ids: Tensor) -> TypeCounts:
        """A micro-batch, or its upper layers; ``input_ids`` are the rows of the lowest of them."""
        nothing = (0.0,) * self._types.num_types
        return TypeCounts(
            edges=tuple(self._count_edges(block) for block in blocks),
            destinations=tuple(self.count(input_ids[: block.num_dst]) for block in blocks),
            sources=tuple(self.count(input_ids[: block.num_src]) for block in blocks),
            rows_loaded=self.count_rows(input_ids[: blocks[0].num_src]),
            rows_sent=nothing,
            rows_received=nothing,
        )

    def of_split(self, split: Split) -> TypeCounts:
        """One rank's split."""
        ids = split.input_ids
        bottom = split.layers[0]
        return TypeCounts(
            edges=tuple(self._count_edges(layer.block) for layer in split.layers),
            destinations=tuple(self.count(ids[: layer.block.num_dst]) for layer in split.layers),
            sources=tuple(
                self.count(torch.cat([ids[: layer.route.num_local], layer.foreign_ids])) for layer in split.layers
            ),
            rows_loaded=self.count_rows(ids),
            rows_sent=self.count_rows(ids[bottom.route.send_rows]),
            rows_received=self.count_rows(bottom.foreign_ids),
        )

    def of_loading(self, ids: Tensor, sent: Sequence[Tensor], received: Tensor) -> TypeCounts:
        """No layers: input rows that a rank reads for all ranks, those it sends, and those it receives."""
        return TypeCounts(
            edges=(),
            destinations=(),
            sources=(),
            rows_loaded=self.count_rows(ids),
            rows_sent=self.count_rows(torch.cat([*sent, received[:0]])),
            rows_received=self.count_rows(received),
        )


def stack_types(below: TypeCounts, above: TypeCounts) -> TypeCounts:
    """Join lower and upper layers; input rows are those of the lower ones."""
    return TypeCounts(
        edges=below.edges + above.edges,
        destinations=below.destinations + above.destinations,
        sources=below.sources + above.sources,
        rows_loaded=below.rows_loaded,
        rows_sent=below.rows_sent,
        rows_received=below.rows_received,
    )


def mean_types(counts: Sequence[TypeCounts]) -> TypeCounts:
    """The mean over steps."""

    def mean(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(mean(column) for column in zip(*values, strict=True))
        return sum(values) / len(values)

    return TypeCounts(
        **{field.name: mean([getattr(one, field.name) for one in counts]) for field in fields(TypeCounts)}
    )
