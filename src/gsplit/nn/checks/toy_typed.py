"""Toy mini-batches of heterogeneous graphs, on which models run when they are wrapped.

Rows are of a type and edges of a relation, so there are many row spaces: about 70 for 4 types, 7 relations and 3
layers. A random batch would not have 70 different sizes. ``_Sizes`` takes them from a counter, and the batch of the dry
run is made to measure. The others are sampled from a graph in which each relation has the edges of a toy graph without
types (``toy``).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.graph.blocks import Block, FrontierIds
from gsplit.graph.ownership import Ownership
from gsplit.graph.types import EdgeType, GraphTypes
from gsplit.kernels.buffers import BufferPool
from gsplit.minibatch.batch import Batch, BatchContext, BatchLayer
from gsplit.minibatch.local_graph import ArrayNames, LocalGraph
from gsplit.minibatch.route import Route
from gsplit.minibatch.typed import StepRows
from gsplit.minibatch.typed_batch import TypedBatch, cut_batch
from gsplit.nn.checks.toy import ALL_TARGETS, PAIRS, ToyLinkBatch, num_toy_vertices, toy_sources, toy_targets
from gsplit.nn.checks.toy_typed_pairs import pair_typed_batch, pair_typed_targets
from gsplit.nn.forward_plan import RowSpace, num_rows
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.relations import HostRelationSampler
from gsplit.store.in_memory import MemoryStore, typed_store

__all__ = ["TypedExample"]

_KEY = StepKey(0, 0, 0)
_HALVES = (ALL_TARGETS, slice(0, PAIRS), slice(PAIRS, 2 * PAIRS))


@dataclass(frozen=True)
class TypedExample:
    """The types of a graph and the shape of the input rows of each type that has some; see ``toy.Toys``.

    ``counts``: the vertices of every type of the graph. Ids in ``n_id_dict`` are below them, so that an embedding of
    the graph's vertices takes them. ``edge_values``: the names of the values of every edge type, and ``value_shapes``
    their shapes, for one edge. ``pair_type``: the edge type of the pairs that the model decodes, if it does.
    """

    vertex_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    counts: tuple[int, ...]
    row_shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    edge_values: tuple[tuple[str, ...], ...] = ()
    value_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_edge_features: int | None = None
    pair_type: EdgeType | None = None

    def to(self, dtype: torch.dtype) -> "TypedExample":
        """The same with rows of another dtype."""
        return replace(self, dtype=dtype)

    def batch(self, num_layers: int) -> tuple[TypedBatch, dict[int, RowSpace]]:
        """A batch in which no two row spaces have the same number of rows, and the row space of each number."""
        sizes = _Sizes(self, num_layers)
        frontier = sizes.frontier()
        routes: list[Route | None] = []
        mixed_ids: list[Tensor] = []
        blocks: list[Block] = []
        kinds: list[Tensor] = []
        for layer in range(num_layers):
            route = sizes.route(layer, frontier)
            routes.append(route)
            local = frontier[: route.num_local]
            mixed_ids.append(torch.cat([local, local[route.send_rows]]))
            block, kind = sizes.block(layer, mixed_ids[-1])
            blocks.append(block)
            kinds.append(kind)
        num_targets = sum(sizes.local[num_layers])
        foreign_ids = [ids[sum(local) :] for ids, local in zip(mixed_ids, sizes.local, strict=False)]
        made = self._assemble(sizes.types, blocks, kinds, routes, foreign_ids, [(0, frontier)], num_targets)
        spaces = _row_spaces(sizes.types, num_layers)
        return made, {num_rows(made, space): space for space in spaces}

    def empty(self, num_layers: int) -> TypedBatch:
        """A mini-batch without rows on this rank."""
        return self._sampled(num_layers, slice(0, 0))

    def halves(self, num_layers: int) -> list[tuple[Batch, slice]]:
        """A mini-batch of all targets of every type, of the first half and of the second; see ``toy.toy_halves``."""
        return [(self._sampled(num_layers, half), half) for half in _HALVES]

    def pair_batch(self, num_layers: int, kind: str) -> tuple[ToyLinkBatch, dict[int, RowSpace]]:
        """See ``toy.Toys``."""
        assert self.pair_type is not None
        return pair_typed_batch(*self.batch(num_layers), kind, self.pair_type)

    def with_pairs(self, batch: Batch, kind: str) -> ToyLinkBatch:
        """See ``toy.Toys``."""
        assert self.pair_type is not None and isinstance(batch, TypedBatch)
        return pair_typed_targets(batch, kind, self.pair_type)

    def boundary(self, num_layers: int, level: int) -> TypedBatch:
        """The mini-batch of all targets with a boundary: below it all rows but the targets' are in another order."""
        store, sampler = _toy_store(self.vertex_types, self.edge_types, num_layers)
        upper = self._sample(sampler, num_layers, ALL_TARGETS, num_layers - level, level)
        num_rows, num_targets = upper.input_ids.numel(), upper.num_targets
        places = torch.cat([torch.arange(num_targets), torch.arange(num_rows - 1, num_targets - 1, -1)])
        fanouts = [(-1,) * len(self.edge_types)] * level
        lower = sample_minibatch(sampler, upper.input_ids[places], fanouts, _KEY)
        nothing = places[:0]
        num_dst = upper.blocks[0].num_dst
        boundary = Route(nothing, (0,), (0,), num_rows, num_dst, own_places=places, recv_places=nothing)
        routes: list[Route | None] = [*[None] * level, boundary, *[None] * (num_layers - level - 1)]
        frontiers = [(0, lower.input_ids), (level + 1, upper.input_ids)]
        return self._of_store(store, [*lower.blocks, *upper.blocks], routes, frontiers)

    def _sampled(self, num_layers: int, part: slice) -> TypedBatch:
        """All in-edges of some targets of every type, hop after hop."""
        store, sampler = _toy_store(self.vertex_types, self.edge_types, num_layers)
        sample = self._sample(sampler, num_layers, part, num_layers, 0)
        routes: list[Route | None] = [None] * num_layers
        return self._of_store(store, list(sample.blocks), routes, [(0, sample.input_ids)])

    def _sample(
        self, sampler: HostRelationSampler, num_layers: int, part: slice, num_hops: int, bottom_layer: int
    ) -> MiniBatch:
        count = num_toy_vertices(num_layers)
        targets = torch.arange(2 * PAIRS)[part]
        halves = [targets[targets < PAIRS], targets[targets >= PAIRS]]  # each with all types, so that halves are runs
        offsets = count * torch.arange(len(self.vertex_types))
        fused = torch.cat([(offsets[:, None] + toy_targets(num_layers)[half]).view(-1) for half in halves])
        fanouts = [(-1,) * len(self.edge_types)] * num_hops
        return sample_minibatch(sampler, fused, fanouts, _KEY, bottom_layer=bottom_layer)

    def _of_store(
        self,
        store: MemoryStore,
        blocks: list[Block],
        routes: list[Route | None],
        frontiers: list[tuple[int, Tensor]],
    ) -> TypedBatch:
        assert store.types is not None
        edge_type = torch.from_numpy(store.stored_array("edge_type")).long()
        kinds = []
        for block in blocks:
            assert block.edge_ids is not None
            kinds.append(edge_type[block.edge_ids])
        return self._assemble(store.types, blocks, kinds, routes, [], frontiers, blocks[-1].num_dst)

    def _assemble(
        self,
        types: GraphTypes,
        blocks: list[Block],
        kinds: list[Tensor],
        routes: list[Route | None],
        foreign_ids: list[Tensor],
        frontiers: list[tuple[int, Tensor]],
        num_targets: int,
    ) -> TypedBatch:
        """A batch of some blocks, on the model's device."""
        device = self.device
        mesh = solo_mesh(device)
        store, _ = _toy_store(self.vertex_types, self.edge_types, 1)
        local = LocalGraph(store, mesh, Ownership((0, store.num_vertices)))
        types = replace(types, edge_values=self.edge_values)
        arrays = ArrayNames(store, "x", None, None)
        for name in self.value_shapes:
            setattr(arrays, name, name)
        context = BatchContext(
            mesh, _KEY, local, arrays, "split", each_vertex_once=True, pool=BufferPool(device), deterministic=True
        )
        fused = Batch(
            x=torch.empty(0, device=device),
            labels=None,
            frontiers=tuple(FrontierIds(level, ids.to(device), ids.to(device)) for level, ids in frontiers),
            layers=tuple(
                BatchLayer(b.to(device), _moved(r, device), **self._values(b))
                for b, r in zip(blocks, routes, strict=True)
            ),
            num_targets=num_targets,
            global_batch_size=num_targets,
            context=context,
        )
        moved = [ids.to(device) for ids in foreign_ids]
        routes_there = [layer.route for layer in fused.layers]
        rows = StepRows.of(fused.frontiers, fused.blocks, routes_there, moved, types)
        ids = torch.cat([fused.frontiers[0].ids[: fused.layers[0].num_local], *moved[:1]])
        x_dict = {}
        for name, shape in self.row_shapes.items():
            number = types.number(name)
            table = _toy_rows(number, types.count(name), shape).to(device, self.dtype)
            x_dict[name] = table[types.rows(ids)[rows.mixed[0].rows()[number]]]
        made = cut_batch(fused, types, rows, tuple(kind.to(device) for kind in kinds), x_dict, ids)
        counts = dict(zip(self.vertex_types, self.counts, strict=True))
        folded = {name: n_id % max(1, counts[name]) for name, n_id in made.n_id_dict.items()}
        return replace(made, n_id_dict=folded)

    def _values(self, block: Block) -> dict[str, Tensor]:
        """Values of the edges of a block, in (0, 1)."""
        ids = torch.arange(block.num_edges) if block.edge_ids is None else block.edge_ids
        found = {}
        for name, shape in self.value_shapes.items():
            table = _toy_rows(0, int(ids.max()) + 1 if ids.numel() else 0, shape)
            found[name] = table[ids].to(self.device, self.dtype)
        return found


def _moved(route: Route | None, device: torch.device) -> Route | None:
    if route is None:
        return None
    return replace(
        route,
        send_rows=route.send_rows.to(device),
        own_places=None if route.own_places is None else route.own_places.to(device),
        recv_places=None if route.recv_places is None else route.recv_places.to(device),
    )


def _toy_rows(number: int, count: int, shape: tuple[int, ...]) -> Tensor:
    """Input rows of the vertices of a type, in (0, 1)."""
    generator = torch.Generator().manual_seed(number)
    return torch.rand(count, *shape, generator=generator, dtype=torch.float64)


@functools.lru_cache(maxsize=16)
def _toy_store(
    vertex_types: tuple[str, ...], edge_types: tuple[EdgeType, ...], num_layers: int
) -> tuple[MemoryStore, HostRelationSampler]:
    """A graph in which each relation has the edges of a toy graph, and its sampler."""
    counts = dict.fromkeys(vertex_types, num_toy_vertices(num_layers))
    edges = {}
    for seed, relation in enumerate(edge_types):
        sources = toy_sources(num_layers, seed)
        src = np.array([u for found in sources for u in found], np.int64)
        edges[relation] = (src, np.repeat(np.arange(len(sources)), [len(found) for found in sources]))
    parts: dict[str, Any] = {name: np.zeros(count, np.int64) for name, count in counts.items()}
    store = typed_store(counts, edges, parts, {}, {})
    return store, HostRelationSampler(store.graph, np.empty(0, np.int64), store.stored_array("edge_type"))


def _row_spaces(types: GraphTypes, num_layers: int) -> list[RowSpace]:
    """All row spaces. Those of all types come first: if there is only one type, its name is kept."""
    found = []
    for of in (None, *types.vertex_types):
        found += [RowSpace("local", level, of) for level in range(num_layers + 1)]
        found += [RowSpace("mixed", layer, of) for layer in range(num_layers)]
    for relation in (None, *types.edge_types):
        found += [RowSpace("edges", layer, relation) for layer in range(num_layers)]
        if relation is None or relation[0] == relation[2]:
            found += [RowSpace("looped edges", layer, relation) for layer in range(num_layers)]
    return found


class _Sizes:
    """Sizes of a batch's row spaces, no two of which are equal, and the batch's pieces with these sizes.

    ``local[l][t]``, ``mixed[l][t]``: rows of type t in the local and the mixed frontier of level l. ``edges[l][r]``:
    edges of relation r. Vertex i of a type is the i-th that the frontiers contain. No edge is a self-loop.
    """

    def __init__(self, like: TypedExample, num_layers: int) -> None:
        self._used: set[int] = set()
        self._num_types = len(like.vertex_types)
        self.local: list[list[int]] = [[] for _ in range(num_layers + 1)]
        self.mixed: list[list[int]] = [[] for _ in range(num_layers)]
        self.edges: list[list[int]] = [[] for _ in range(num_layers)]
        self.local[num_layers] = self._take([2] * self._num_types)
        for level in reversed(range(num_layers)):
            self.local[level] = self._take([size + 1 for size in self.local[level + 1]])
            self.mixed[level] = self._take([size + 1 for size in self.local[level]])
        offsets = tuple(np.cumsum([0, *self.local[0]]).tolist())
        self.types = GraphTypes(like.vertex_types, like.edge_types, offsets, offsets)
        self._src = [self.types.number(relation[0]) for relation in like.edge_types]
        self._dst = [self.types.number(relation[2]) for relation in like.edge_types]
        for layer in range(num_layers):
            above = self.local[layer + 1]
            loops = [above[d] if s == d else 0 for s, d in zip(self._src, self._dst, strict=True)]
            self.edges[layer] = self._take([1] * len(like.edge_types), loops, sum(above))

    def _take(self, least: list[int], loops: list[int] | None = None, all_loops: int = 0) -> list[int]:
        """Unused sizes, each at least ``least[i]``, with an unused sum.

        ``loops``: the rows that are added to them in another row space, whose size must be unused too; 0 if there is
        none. ``all_loops``: the same for the sum.
        """
        found: list[int] = []
        for place, (size, added) in enumerate(zip(least, loops or [0] * len(least), strict=True)):
            while True:
                total = sum(found) + size
                wanted = [size, *([size + added] if added else [])]
                if place == len(least) - 1:
                    wanted += [total] if found else []
                    wanted += [total + all_loops] if all_loops and (found or all_loops != added) else []
                if len(set(wanted)) == len(wanted) and self._used.isdisjoint(wanted):
                    break
                size += 1
            self._used |= set(wanted)
            found.append(size)
        return found

    def frontier(self) -> Tensor:
        """The ids of the input level's local frontier, of which those of the levels above are prefixes."""
        ids = []
        before = [0] * self._num_types
        for sizes in reversed(self.local):
            for number, (first, stop) in enumerate(zip(before, sizes, strict=True)):
                ids.append(torch.arange(first, stop) + self.types.offsets[number])
            before = sizes
        return torch.cat(ids)

    def route(self, layer: int, frontier: Tensor) -> Route:
        """A route that appends copies of own rows, so that mixed frontiers differ from local ones."""
        num_local = sum(self.local[layer])
        types = self.types.of(frontier[:num_local])
        send = []
        for number in range(self._num_types):
            own = torch.nonzero(types == number).view(-1)
            send.append(own[torch.arange(self.mixed[layer][number] - own.numel()) % own.numel()])
        rows = torch.cat(send)
        return Route(rows, (rows.numel(),), (rows.numel(),), num_local=num_local, num_dst=sum(self.local[layer + 1]))

    def block(self, layer: int, mixed_ids: Tensor) -> tuple[Block, Tensor]:
        """Edges of every relation, from sources that are not destinations, and their relations."""
        num_dst = sum(self.local[layer + 1])
        types = self.types.of(mixed_ids)
        rows = [torch.nonzero(types == number).view(-1) for number in range(self._num_types)]
        generator = torch.Generator().manual_seed(layer)
        edges = []
        for relation, count in enumerate(self.edges[layer]):
            sources = rows[self._src[relation]][self.local[layer + 1][self._src[relation]] :]
            destinations = rows[self._dst[relation]][: self.local[layer + 1][self._dst[relation]]]
            src = sources[torch.randint(sources.numel(), (count,), generator=generator)]
            dst = destinations[torch.randint(destinations.numel(), (count,), generator=generator)]
            edges.append(torch.stack([dst, torch.full_like(dst, relation), src]))
        dst, kinds, src = torch.cat(edges, dim=1).unbind()
        order = torch.argsort(dst * len(edges) + kinds, stable=True)
        degrees = torch.bincount(dst, minlength=num_dst)
        indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
        return Block(indptr, src[order], num_src=mixed_ids.numel()), kinds[order]
