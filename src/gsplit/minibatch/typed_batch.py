"""The mini-batch of a heterogeneous graph on one rank: a fused batch, and a part of it for every type and relation.

The fused batch has the rows of all types and the edges of all relations, as sampling and splitting made them. Losses,
keys and telemetry are those of ``Batch``. Its parts are batches as well (``typed``): the part of a vertex type has the
rows of that type, with a route for them at every layer, and no edges. The part of a relation has its edges, between
rows of its source type and rows of its destination type.

A model wrapped by ``gsplit.parallelize`` takes ``(batch.x_dict, batch.edge_index_dict)``. A layer that takes the edges
of all relations at once, such as RGCNConv, takes ``batch.edge_index`` and ``batch.edge_type``, with rows that
``batch.to_homogeneous`` made. A model written against the batch calls ``batch.part("paper").shuffle(l, h)`` for every
layer and type, and its layers on ``batch.part(relation).blocks[l]``.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.graph.blocks import Block, FrontierIds
from gsplit.graph.types import EdgeType, GraphTypes
from gsplit.minibatch.batch import Batch, BatchLayer
from gsplit.minibatch.edge_handles import EdgeAttrHandle, EdgeHandle, EdgeTypeHandle, EdgeWeightHandle
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.pair_rows import PairRows
from gsplit.minibatch.route import Route
from gsplit.minibatch.typed import RowTypes, StepRows, cut_block, cut_route

__all__ = ["RelationItems", "TypedBatch", "TypedLinkBatch", "VertexItems", "cut_batch"]


@dataclass(frozen=True)
class VertexItems:
    """``batch["paper"]``: the input rows of a vertex type and their ids in the type; labels of its targets.

    ``x`` and ``y`` are None if the graph has none. ``batch_size``: the targets of this rank, which are the first rows.
    """

    x: Tensor | None
    n_id: Tensor
    y: Tensor | None
    batch_size: int


@dataclass(frozen=True)
class RelationItems:
    """``batch["author", "writes", "paper"]``: a placeholder for the edges of a relation."""

    edge_index: EdgeHandle[Batch]


@dataclass(frozen=True, repr=False, kw_only=True)
class TypedBatch(Batch):
    """See the module.

    ``x_dict``: the mixed input rows of every type with features. ``n_id_dict``: the original ids of the mixed input
    rows of every type, counted in the type. ``kinds``: the relation of every edge, layer by layer. ``rows``: the types
    of the mixed input rows. ``parts``: by vertex type and by relation. ``x`` is empty.
    """

    types: GraphTypes
    x_dict: dict[str, Tensor]
    n_id_dict: dict[str, Tensor]
    kinds: tuple[Tensor, ...]
    rows: RowTypes
    parts: Mapping[str | EdgeType, Batch]
    _fused: ClassVar[weakref.ref[Tensor] | None] = None

    def _inputs(self) -> tuple[Tensor, ...]:
        return tuple(self.x_dict.values())

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in self.x_dict.items())
        text = super().__repr__().replace(f"x {list(self.x.shape)}", f"x {{{shapes}}}")
        return f"{type(self).__name__}{text[text.index('(') :]}"

    def part(self, of: str | EdgeType | None) -> Batch:
        """The rows of a vertex type, or the edges of a relation; None: the fused batch."""
        if of is None:
            return self
        if of not in self.parts:
            names = ", ".join(map(str, self.parts))
            raise InputError(explain("batch", f"a type of the graph: {names}", of, "use one of these"))
        return self.parts[of]

    def __getitem__(self, of: str | EdgeType) -> VertexItems | RelationItems:
        found = self.part(of)
        if isinstance(of, tuple):
            return RelationItems(EdgeHandle(self, of))
        return VertexItems(self.x_dict.get(of), self.n_id_dict[of], found.labels, found.num_targets)

    @property
    def edge_index_dict(self) -> dict[EdgeType, EdgeHandle[Batch]]:
        """A placeholder for the edges of every relation, for models wrapped by ``gsplit.parallelize``."""
        return {relation: EdgeHandle(self, relation) for relation in self.types.edge_types}

    @property
    def edge_type(self) -> EdgeTypeHandle[Batch]:
        """A placeholder for the relation of every edge, next to ``edge_index``."""
        return EdgeTypeHandle(self)

    @property
    def edge_attr_dict(self) -> dict[EdgeType, EdgeAttrHandle[Batch]]:
        """A placeholder for the features of the edges of every relation that has some."""
        _ = self.edge_attr  # refuses a graph without them
        return {of: EdgeAttrHandle(self, of) for of in self.types.with_values(self.context.arrays.edge_attr)}

    @property
    def edge_weight_dict(self) -> dict[EdgeType, EdgeWeightHandle[Batch]]:
        """A placeholder for the weights of the edges of every relation that has some."""
        _ = self.edge_weight  # refuses a graph without them
        return {of: EdgeWeightHandle(self, of) for of in self.types.with_values(self.context.arrays.edge_weight)}

    @property
    def node_type(self) -> Tensor:
        """The type of every fused input row, such as those of ``to_homogeneous``."""
        return self.rows.types

    @property
    def fused_x(self) -> Tensor:
        """The input rows of all types as one tensor, if all types have features of one width."""
        return self.to_homogeneous(self.x_dict)

    def to_homogeneous(self, rows_of: Mapping[str, Tensor]) -> Tensor:
        """The input rows of all types, or rows computed from them, as one tensor for ``edge_index``. Differentiable."""
        missing = [name for name in self.types.vertex_types if name not in rows_of]
        widths = {(tuple(rows.shape[1:]), rows.dtype) for rows in rows_of.values()}
        if missing or len(widths) != 1:
            got = f"no rows of {', '.join(missing)}" if missing else f"rows of {sorted(map(str, widths))}"
            fix = "encode every type to one width, an embedding of batch.n_id_dict where a type has no features"
            raise InputError(explain("to_homogeneous", "rows of every vertex type, of one width", got, fix))
        first = next(iter(rows_of.values()))
        fused = first.new_empty(self.rows.types.numel(), *first.shape[1:])
        for name, places in zip(self.types.vertex_types, self.rows.rows(), strict=True):
            fused = fused.index_copy(0, places, rows_of[name])
        if all(rows is self.x_dict.get(name) for name, rows in rows_of.items()):
            object.__setattr__(self, "_fused", weakref.ref(fused))
        return fused

    def is_fused(self, rows: Tensor) -> bool:
        """Whether a tensor is the last ``fused_x``, which was not written to."""
        return self._fused is not None and rows is self._fused() and rows._version == 0

    def _refuse_input_gradients(self) -> None:
        for name, x in self.x_dict.items():
            if x.requires_grad:
                fix = "train an embedding of your own instead; stored features have no gradient"
                raise InputError(explain(f"batch.x_dict[{name!r}]", "requires_grad=False", x.requires_grad, fix))

    def cast(self, dtype: torch.dtype) -> "TypedBatch":
        """The batch with its input rows converted to a type."""
        return self._keep_written(replace(self, x_dict={name: x.to(dtype) for name, x in self.x_dict.items()}))

    def _arrays(self) -> list[Tensor]:
        cut = [block.src_rows for of in self.types.edge_types for block in self.parts[of].blocks]
        return [*super()._arrays(), *self.x_dict.values(), *self.kinds, *cut]


@dataclass(frozen=True, repr=False, kw_only=True)
class TypedLinkBatch(TypedBatch, LinkBatch):
    """The mini-batch of pairs of an edge type, ``pair_type``, such as ("user", "rates", "item").

    Rows of pairs are counted in the types of their ends, as in PyG: with ``z_dict``, the output of the wrapped model,

        z_src, z_dst = z_dict["user"], z_dict["item"]
        score = (z_src[batch.edge_label_index[0]] * z_dst[batch.edge_label_index[1]]).sum(-1)
    """

    pair_type: EdgeType

    def endpoints(self, h: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        """The final rows of the endpoints of this rank's pairs, by vertex type. A collective for each type."""
        ends = [name for name in self.types.vertex_types if name in (self.pair_type[0], self.pair_type[2])]
        if not isinstance(h, Mapping) or any(not isinstance(h.get(name), Tensor) for name in ends):
            got = list(h) if isinstance(h, Mapping) else type(h).__name__
            fix = "let forward return {vertex type: rows}"
            raise InputError(explain("the model's output", f"rows of {' and '.join(ends)}", got, fix))
        found = {}
        for name in ends:  # all ranks: in the order of the types
            part = self.parts[name]
            assert isinstance(part, LinkBatch)
            found[name] = part.endpoints(h[name])
        return found

    @property
    def endpoint_id_dict(self) -> dict[str, Tensor]:
        """The ids, counted in the type, of the rows that ``endpoints`` returns."""
        found = {}
        for name in (self.pair_type[0], self.pair_type[2]):
            pairs = self.parts[name].pairs
            assert pairs is not None
            found[name] = pairs.n_id - self.types.offsets[self.types.number(name)]
        return found

    def fuse_pairs(self, z_dict: Mapping[str, Tensor]) -> tuple[Tensor, LinkBatch]:
        """The rows of both types as one tensor, of one width, and a batch whose pairs are rows of it."""
        src, _, dst = self.pair_type
        pairs = self.pair_rows
        first = 0 if src == dst else z_dict[src].size(0)
        rows = z_dict[dst] if src == dst else torch.cat([z_dict[src], z_dict[dst]])
        index = torch.stack([pairs.index[0], pairs.index[1] + first])
        return rows, replace(self, pairs=replace(pairs, index=index, negatives=pairs.negatives + first))


def cut_batch(
    fused: Batch,
    types: GraphTypes,
    rows: StepRows,
    kinds: tuple[Tensor, ...],
    x_dict: dict[str, Tensor],
    n_id: Tensor,
    target_type: str | None = None,
    pair_type: EdgeType | None = None,
    inputs: Sequence[tuple[Tensor, Route | None]] = (),
) -> TypedBatch:
    """Cut a batch by types. No communication.

    ``rows``: the types of its rows. ``kinds``: the relation of every edge, layer by layer.
    ``n_id``: the original ids of the mixed input rows. ``target_type``: the type that has the labels. ``pair_type``:
    the edge type of the pairs, if it has some. ``inputs``: the vertices of every type whose input rows this rank has
    read, and the route of these rows.
    """
    frontiers = rows.frontiers
    mixed = rows.mixed
    of_level = {found.level: of_rows for found, of_rows in zip(fused.frontiers, frontiers, strict=True)}
    layers_of = [
        _rows_of_types(layer, of_level[fused.frontier(number).level], of_rows, types)
        for number, (layer, of_rows) in enumerate(zip(fused.layers, mixed, strict=True))
    ]
    kept = [of_rows.rows() for of_rows in frontiers]
    input_rows = mixed[0].rows()
    num_targets = frontiers[-1].counts(fused.num_targets)
    pairs, pairs_of = _cut_pairs(fused, types, frontiers[-1])
    parts: dict[str | EdgeType, Batch] = {}
    for number, name in enumerate(types.vertex_types):
        parts[name] = replace(
            fused,
            x=x_dict.get(name, fused.x),
            labels=fused.labels if name == target_type else None,
            frontiers=tuple(
                FrontierIds(found.level, found.n_id[mine[number]], found.ids[mine[number]])
                for found, mine in zip(fused.frontiers, kept, strict=True)
            ),
            layers=tuple(layers[number] for layers in layers_of),
            num_targets=num_targets[number],
            pairs=pairs_of[number],
            of=name,
            requested=inputs[number] if fused.requested is not None else None,
        )
    blocks = [
        cut_block(block, kind, of_rows, types) for block, kind, of_rows in zip(fused.blocks, kinds, mixed, strict=True)
    ]
    for relation, of in enumerate(types.edge_types):
        source = parts[of[0]]
        layers = tuple(
            _with_edges(layer, cut[relation], stored, kind == relation)
            for layer, cut, stored, kind in zip(source.layers, blocks, fused.layers, kinds, strict=True)
        )
        parts[of] = replace(source, layers=layers, of=str(of))
    n_id_dict = {
        name: n_id[input_rows[number]] - types.offsets[number] for number, name in enumerate(types.vertex_types)
    }
    content: dict[str, Any] = {field.name: getattr(fused, field.name) for field in fields(fused)}
    content |= {"types": types, "x_dict": x_dict, "n_id_dict": n_id_dict, "kinds": kinds, "pairs": pairs}
    content |= {"rows": mixed[0], "parts": parts}
    return TypedBatch(**content) if pair_type is None else TypedLinkBatch(**content, pair_type=pair_type)


def _cut_pairs(
    fused: Batch, types: GraphTypes, frontier: RowTypes
) -> tuple[PairRows | None, Sequence[PairRows | None]]:
    """The pairs with rows that are counted in the types of their ends, and the endpoints of every type."""
    pairs = fused.pairs
    if pairs is None:
        return None, [None] * types.num_types
    ends = RowTypes.of(types.of_original(pairs.n_id), types.num_types)
    mine = ends.rows()
    routes: Sequence[Route | None] = [None] * types.num_types
    if pairs.route is not None:
        routes = cut_route(pairs.route, frontier.prefix(fused.num_targets), ends, types)
    counted = replace(pairs, index=ends.places[pairs.index], negatives=ends.places[pairs.negatives])
    return counted, [replace(counted, n_id=pairs.n_id[mine[t]], route=routes[t]) for t in range(types.num_types)]


def _with_edges(layer: BatchLayer, block: Block, stored: BatchLayer, mine: Tensor) -> BatchLayer:
    """A layer with the edges of a relation, which are the edges ``mine`` of the fused layer, and their values."""
    attr = None if stored.edge_attr is None else stored.edge_attr[mine]
    weight = None if stored.edge_weight is None else stored.edge_weight[mine]
    return replace(layer, block=block, edge_attr=attr, edge_weight=weight)


def _rows_of_types(layer: BatchLayer, local: RowTypes, mixed: RowTypes, types: GraphTypes) -> list[BatchLayer]:
    """A layer with the rows of one type and no edges, for every type."""
    num_mixed = mixed.counts()
    num_dst = mixed.counts(layer.block.num_dst)
    nothing = layer.block.src_rows[:0]
    routes = [None] * mixed.num_types if layer.route is None else cut_route(layer.route, local, mixed, types)
    return [
        BatchLayer(block=Block(nothing.new_zeros(num_dst[number] + 1), nothing, num_mixed[number]), route=route)
        for number, route in enumerate(routes)
    ]
