"""Toy mini-batches of pairs of an edge type, for models of heterogeneous graphs that decode pairs themselves.

They are the toy batches of ``toy_typed`` with pairs of their targets. The endpoints of every type are rows of their
own, as in ``TypedLinkBatch``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gsplit.graph.types import EdgeType
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.route import Route
from gsplit.minibatch.typed_batch import TypedBatch, TypedLinkBatch
from gsplit.nn.checks.toy import ToyLinkBatch, received_endpoints, toy_pair_rows, toy_pairs
from gsplit.nn.forward_plan import RowSpace

__all__ = ["pair_typed_batch", "pair_typed_targets"]

B = TypeVar("B", bound=Batch)


@dataclass(frozen=True, repr=False, kw_only=True)
class _ToyTypedLinkBatch(TypedLinkBatch, ToyLinkBatch):
    def endpoints(self, h: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        self.encoded.append(h)
        return super().endpoints(h)


def _link_batch(
    batch: TypedBatch, kind: str, edge_type: EdgeType, index: Tensor, ends: Mapping[str, tuple[int, Route | None]]
) -> _ToyTypedLinkBatch:
    """A batch with these pairs. ``ends``: the number of endpoints of the types of both ends, and their routes."""
    pairs = toy_pair_rows(kind, index, index[1], ends[edge_type[2]][0], route=None)
    nothing = replace(pairs, n_id=pairs.n_id[:0])
    parts: dict[str | EdgeType, Batch] = dict(batch.parts)
    for name in batch.types.vertex_types:
        of_type = nothing
        if name in ends:
            count, route = ends[name]
            of_type = replace(pairs, n_id=torch.arange(count, device=index.device), route=route)
        parts[name] = _become(batch.parts[name], LinkBatch, pairs=of_type)
    return _become(batch, _ToyTypedLinkBatch, pairs=pairs, parts=parts, pair_type=edge_type)


def _become(batch: Batch, kind: type[B], **changes: Any) -> B:
    """The same batch as one of another class, with some fields changed or added."""
    return kind(**({each.name: getattr(batch, each.name) for each in fields(batch)} | changes))


def pair_typed_targets(batch: TypedBatch, kind: str, edge_type: EdgeType) -> ToyLinkBatch:
    """One pair for every target of the source type; see ``toy.with_pairs``. All types have as many targets."""
    count = batch.part(edge_type[0]).num_targets
    ends: dict[str, tuple[int, Route | None]] = dict.fromkeys((edge_type[0], edge_type[2]), (count, None))
    return _link_batch(batch, kind, edge_type, toy_pairs(count, batch.x.device), ends)


def pair_typed_batch(
    batch: TypedBatch, space_of: dict[int, RowSpace], kind: str, edge_type: EdgeType
) -> tuple[ToyLinkBatch, dict[int, RowSpace]]:
    """The batch of a dry run with pairs; see ``toy.toy_link_batch``."""
    depth = batch.num_layers
    spaces: dict[int, RowSpace] = {}
    ends: dict[str, tuple[int, Route | None]] = {}
    for name in dict.fromkeys((edge_type[0], edge_type[2])):
        count = max([*space_of, *spaces]) + 1
        spaces[count] = RowSpace("endpoints", depth, name)
        ends[name] = (count, received_endpoints(batch.part(name).num_targets, count, batch.x.device))
    num_pairs = max(spaces) + 1
    spaces[num_pairs] = RowSpace("pairs", depth)
    first = torch.arange(num_pairs, device=batch.x.device)
    index = torch.stack([first % ends[edge_type[0]][0], (7 * first + 3) % ends[edge_type[2]][0]])
    return _link_batch(batch, kind, edge_type, index, ends), space_of | spaces
