"""Toy mini-batches on which models run when they are wrapped.

The toy graph is made of chains with side edges, self-loops and vertices without in-edges. In ``toy_batch`` all row
spaces differ in size, so a tensor's size identifies its row space; ``toy_halves`` are mini-batches with targets in
common. They are sampled on the host, once per number of layers, and then copied to the model's device.

A model that decodes pairs itself runs on the same batches with pairs of their targets.
"""

import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import explain
from gsplit.features.protocol import take_rows
from gsplit.graph.blocks import Block, FrontierIds
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.kernels.buffers import BufferPool
from gsplit.minibatch.batch import Batch, BatchContext, BatchLayer
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.local_graph import ArrayNames, LocalGraph
from gsplit.minibatch.pair_rows import PairRows
from gsplit.minibatch.route import Route
from gsplit.nn.forward_plan import RowSpace, num_rows
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.neighbor import TorchNeighborSampler
from gsplit.store.in_memory import MemoryStore

__all__ = [
    "ALL_TARGETS",
    "PAIRS",
    "PAIR_KINDS",
    "ExampleInput",
    "ToyLinkBatch",
    "Toys",
    "explain_rows",
    "num_toy_vertices",
    "received_endpoints",
    "toy_batch",
    "toy_boundary",
    "toy_empty",
    "toy_halves",
    "toy_link_batch",
    "toy_pair_rows",
    "toy_pairs",
    "toy_sources",
    "toy_targets",
]

PAIRS = 4
ALL_TARGETS = slice(0, 2 * PAIRS)  # targets
_TRIES = 200
_KEY = StepKey(0, 0, 0)
PAIR_KINDS = ("binary", "triplet", "triplets", "joint", "in_batch")
"""The modes of negatives; ``triplets`` has several negatives per pair."""


def explain_rows(where: str, x: Tensor) -> str:
    """The message for rows that do not belong to a frontier."""
    fix = (
        "hand batch.x and the layers' outputs on as they are; a residual is x[:h.size(0)] + h, "
        "because a layer keeps its destinations only"
    )
    return explain(where, "rows of one frontier of the mini-batch", f"{list(x.shape)}", fix)


@dataclass(frozen=True)
class ExampleInput:
    """A row like the model's input rows, and the number of features per edge; None if its layers take none."""

    row: Tensor
    num_edge_features: int | None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.row.device

    def to(self, dtype: torch.dtype) -> "ExampleInput":
        """The same with rows of another dtype."""
        return replace(self, row=self.row.to(dtype))

    def batch(self, num_layers: int) -> tuple[Batch, dict[int, RowSpace]]:
        """See ``toy_batch``."""
        return toy_batch(num_layers, self)

    def empty(self, num_layers: int) -> Batch:
        """See ``toy_empty``."""
        return toy_empty(num_layers, self)

    def boundary(self, num_layers: int, level: int) -> Batch:
        """See ``toy_boundary``."""
        return toy_boundary(num_layers, self, level)

    def halves(self, num_layers: int) -> list[tuple[Batch, slice]]:
        """See ``toy_halves``."""
        return toy_halves(num_layers, self)

    def pair_batch(self, num_layers: int, kind: str) -> "tuple[ToyLinkBatch, dict[int, RowSpace]]":
        """See ``toy_link_batch``."""
        return toy_link_batch(num_layers, self, kind)

    def with_pairs(self, batch: Batch, kind: str) -> "ToyLinkBatch":
        """A batch with one pair for every target, with the next one of the same half of all targets."""
        return _with_pairs(batch, kind)


class Toys(Protocol):
    """Toy mini-batches like those of a model's graph: ``ExampleInput``, or ``TypedExample`` with types."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""

    @property
    def num_edge_features(self) -> int | None:
        """The number of features per edge; None if the model takes none."""

    def to(self, dtype: torch.dtype) -> "Toys":
        """The same with rows of another dtype."""

    def batch(self, num_layers: int) -> tuple[Batch, dict[int, RowSpace]]:
        """A batch in which no two row spaces have the same number of rows, and the row space of each number."""

    def empty(self, num_layers: int) -> Batch:
        """A mini-batch without rows on this rank."""

    def boundary(self, num_layers: int, level: int) -> Batch:
        """The mini-batch of all targets with a boundary."""

    def halves(self, num_layers: int) -> list[tuple[Batch, slice]]:
        """A mini-batch of all targets, of the first half and of the second, and their positions in the whole."""

    def pair_batch(self, num_layers: int, kind: str) -> "tuple[ToyLinkBatch, dict[int, RowSpace]]":
        """``batch`` with a kind of pairs, whose endpoints and number differ in size from all other row spaces."""

    def with_pairs(self, batch: Batch, kind: str) -> "ToyLinkBatch":
        """A batch with one pair for every target, with the next one of the same half of all targets."""


def _padded(block: Block, num_more: int) -> Route:
    """A route that appends copies of own rows, so that mixed frontiers differ from local ones."""
    rows = torch.arange(num_more) % max(1, block.num_src)
    return Route(rows, (num_more,), (num_more,), num_local=block.num_src, num_dst=block.num_dst)


def _spacing(num_layers: int) -> int:
    return 4 * num_layers + 8  # further apart than a walk of all layers reaches


def num_toy_vertices(num_layers: int) -> int:
    """Vertices of the toy graph; their ids are smaller."""
    return PAIRS * _spacing(num_layers)


@functools.cache
def _toy_graph(num_layers: int, seed: int) -> tuple[Graph, Tensor]:
    """Chains with side edges, self-loops and vertices without in-edges; targets in neighbouring pairs."""
    n = num_toy_vertices(num_layers)
    sources = toy_sources(num_layers, seed)
    indptr = np.concatenate([[0], np.cumsum([len(s) for s in sources])]).astype(np.int64)
    graph = Graph(indptr, np.array([u for s in sources for u in s], np.int64), n)
    return graph, toy_targets(num_layers)


def toy_sources(num_layers: int, seed: int) -> list[list[int]]:
    """The in-neighbours of every vertex of a toy graph."""
    rng = np.random.default_rng(seed)
    spacing, n = _spacing(num_layers), num_toy_vertices(num_layers)
    sources: list[list[int]] = []
    for v in range(n):
        near = [v + 1, v + 2, v + 3] if v % 5 else [v, v + 1]
        sources.append([u for u in near[: 1 + int(rng.integers(0, 3))] if u < n and (v + 1) % spacing])
    return sources


def toy_targets(num_layers: int) -> Tensor:
    """The targets of the toy graph."""
    firsts = _spacing(num_layers) * np.arange(PAIRS)
    return torch.from_numpy(np.stack([firsts, firsts + 1]).reshape(-1))


def _toy_store(graph: Graph, like: ExampleInput) -> MemoryStore:
    """The toy graph with features, edge weights, and edge features if the model takes some."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        values: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = torch.randn(
            *shape, generator=generator, dtype=torch.float64
        ).numpy()
        return values

    arrays = {"features/x": 1 / (1 + np.exp(draw(graph.num_vertices, *like.row.shape[1:])))}  # in (0, 1)
    arrays["edges/edge_weight"] = np.abs(draw(graph.num_edges))
    if like.num_edge_features is not None:
        arrays["edges/edge_attr"] = draw(graph.num_edges, like.num_edge_features)
    return MemoryStore(graph, [0, graph.num_vertices], arrays, dict.fromkeys(arrays, "float64"))


@functools.cache
@torch.inference_mode(False)  # cached, so it must not be an inference tensor
def _toy_sample(num_layers: int, seed: int, first: int, stop: int) -> MiniBatch:
    """All in-edges of the targets ``first`` to ``stop``, hop after hop."""
    graph, targets = _toy_graph(num_layers, seed)
    return sample_minibatch(_toy_sampler(graph), targets[first:stop], [-1] * num_layers, _KEY)


def _batch_of(num_layers: int, like: ExampleInput, extra: list[int], part: slice, seed: int = 0) -> Batch:
    """A mini-batch of some targets of a toy graph on one process; layer l has ``extra[l]`` rows too many."""
    sample = _toy_sample(num_layers, seed, part.start, part.stop)
    routes: list[Route | None] = [_padded(block, more) for block, more in zip(sample.blocks, extra, strict=True)]
    return _assemble(_toy_graph(num_layers, seed)[0], like, sample.blocks, routes, [(0, sample.input_ids)])


def _toy_sampler(graph: Graph) -> TorchNeighborSampler:
    return TorchNeighborSampler(graph, np.empty(0, np.int64), torch.device("cpu"), edge_ids=True)


def _assemble(
    graph: Graph,
    like: ExampleInput,
    blocks: tuple[Block, ...],
    routes: list[Route | None],
    frontiers: list[tuple[int, Tensor]],
) -> Batch:
    """A batch of some blocks, on the model's device; rows without a vertex are zero."""
    device = like.row.device
    mesh = solo_mesh(device)
    local = LocalGraph(_toy_store(graph, like), mesh, Ownership((0, graph.num_vertices)))
    has_attr = like.num_edge_features is not None
    layers: list[BatchLayer] = []
    for block, route in zip(blocks, routes, strict=True):
        assert block.edge_ids is not None
        layers.append(
            BatchLayer(
                replace(block.to(device), num_src=block.num_src if route is None else route.num_mixed),
                None if route is None else replace(route, send_rows=route.send_rows.to(device)),
                take_rows(local.edge_rows("edge_attr"), block.edge_ids, device) if has_attr else None,
                take_rows(local.edge_rows("edge_weight"), block.edge_ids, device),
            )
        )
    x = take_rows(local.rows("features/x"), frontiers[0][1], device).to(like.row.dtype)
    arrays = ArrayNames(local.store, "x", "edge_attr", "edge_weight")
    context = BatchContext(
        mesh, _KEY, local, arrays, "split", each_vertex_once=True, pool=BufferPool(device), deterministic=True
    )
    num_targets = blocks[-1].num_dst
    return Batch(
        x=torch.cat([x, x.new_zeros(layers[0].block.num_src - x.size(0), *x.shape[1:])]),
        labels=None,
        frontiers=tuple(FrontierIds(level, ids.to(device), ids.to(device)) for level, ids in frontiers),
        layers=tuple(layers),
        num_targets=num_targets,
        global_batch_size=num_targets,
        context=context,
    )


def _row_spaces(num_layers: int) -> list[RowSpace]:
    spaces = [RowSpace(space, layer) for layer in range(num_layers) for space in ("mixed", "edges", "looped edges")]
    return [*(RowSpace("local", level) for level in range(num_layers + 1)), *spaces]


def toy_batch(num_layers: int, like: ExampleInput) -> tuple[Batch, dict[int, RowSpace]]:
    """A batch in which no two row spaces have the same number of rows, and the row space of each number."""
    seed, extra = _distinct_sizes(num_layers)
    batch = _batch_of(num_layers, like, list(extra), ALL_TARGETS, seed)
    return batch, {num_rows(batch, space): space for space in _row_spaces(num_layers)}


@functools.cache
def _distinct_sizes(num_layers: int) -> tuple[int, tuple[int, ...]]:
    """The toy graph and the extra rows with which all row spaces differ in size."""
    like, spaces = ExampleInput(torch.zeros(1, 1), None), _row_spaces(num_layers)
    for seed in range(_TRIES):
        rng = np.random.default_rng(1000 + seed)
        extra = [int(more) for more in rng.integers(1, 40 * num_layers, num_layers)]
        batch = _batch_of(num_layers, like, extra, ALL_TARGETS, seed)
        if len({num_rows(batch, space) for space in spaces}) == len(spaces):
            return seed, tuple(extra)
    raise AssertionError(f"no toy batch of {num_layers} layers found")


def toy_empty(num_layers: int, like: ExampleInput) -> Batch:
    """A mini-batch without rows on this rank."""
    return _batch_of(num_layers, like, [0] * num_layers, slice(0, 0))


def toy_boundary(num_layers: int, like: ExampleInput, level: int) -> Batch:
    """The toy mini-batch of all targets with a boundary: below it all rows but the targets' are in another order."""
    device = like.row.device
    upper, lower, places = _toy_parts(num_layers, level)
    num_rows, num_dst = places.numel(), upper.blocks[0].num_dst
    places = places.to(device)
    nothing = places[:0]
    boundary = Route(nothing, (0,), (0,), num_rows, num_dst, own_places=places, recv_places=nothing)
    routes: list[Route | None] = [*[None] * len(lower.blocks), boundary, *[None] * (len(upper.blocks) - 1)]
    frontiers = [(0, lower.input_ids), (level + 1, upper.input_ids)]
    return _assemble(_toy_graph(num_layers, 0)[0], like, (*lower.blocks, *upper.blocks), routes, frontiers)


@functools.cache
@torch.inference_mode(False)  # cached, so it must not be an inference tensor
def _toy_parts(num_layers: int, level: int) -> tuple[MiniBatch, MiniBatch, Tensor]:
    """The layers above a boundary, those below it, and the rows of the lower part that the upper part reads."""
    graph, targets = _toy_graph(num_layers, 0)
    sampler = _toy_sampler(graph)
    upper = sample_minibatch(sampler, targets, [-1] * (num_layers - level), _KEY, bottom_layer=level)
    num_rows, num_targets = upper.input_ids.numel(), targets.numel()
    places = torch.cat([torch.arange(num_targets), torch.arange(num_rows - 1, num_targets - 1, -1)])
    return upper, sample_minibatch(sampler, upper.input_ids[places], [-1] * level, _KEY), places


def toy_halves(num_layers: int, like: ExampleInput) -> list[tuple[Batch, slice]]:
    """A toy mini-batch of all targets, of the first half and of the second, and their positions in the whole.

    Targets of the first half have in-neighbours among those of the second, but not the other way round: mixing along
    either direction of the edges, or along the rows in either direction, changes the outputs of one half.
    """
    halves = [ALL_TARGETS, slice(0, PAIRS), slice(PAIRS, 2 * PAIRS)]
    return [(_batch_of(num_layers, like, [0] * num_layers, half), half) for half in halves]


@dataclass(frozen=True, repr=False)
class ToyLinkBatch(LinkBatch):
    """A toy batch of pairs. ``encoded``: the rows that the model gave to ``endpoints``."""

    encoded: list[Any] = field(default_factory=list)

    def endpoints(self, h: Tensor) -> Tensor:
        self.encoded.append(h)
        return super().endpoints(h)


def toy_pair_rows(kind: str, index: Tensor, others: Tensor, num_endpoints: int, route: Route | None) -> PairRows:
    """Pairs of endpoints. Pair (u, v) has the negatives ``others`` and v, in turn."""
    num_pairs = index.size(1)
    negatives = {
        "binary": others[:0],
        "triplet": others,
        "triplets": torch.stack([others, index[1]], dim=1),
        "joint": others[:3],
        "in_batch": index[1],
    }[kind]
    return PairRows(
        mode="triplet" if kind == "triplets" else kind,
        input_id=torch.arange(num_pairs, device=index.device),
        index=index,
        negatives=negatives,
        own_columns=torch.arange(num_pairs, device=index.device),
        label=torch.ones(num_pairs, device=index.device),
        n_id=torch.arange(num_endpoints, device=index.device),
        value_keys=torch.arange(num_pairs, device=index.device),
        num_values=num_pairs,
        route=route,
    )


def toy_pairs(num_targets: int, device: torch.device) -> Tensor:
    """One pair for every target, with the next one of the same half of all targets."""
    first = torch.arange(num_targets, device=device)
    return torch.stack([first, first // PAIRS * PAIRS + (first + 1) % PAIRS])


def received_endpoints(num_targets: int, num_endpoints: int, device: torch.device) -> Route:
    """A route that appends copies of targets' rows, so that endpoints are not rows of the last layer's output."""
    received = torch.arange(num_targets, num_endpoints, device=device)
    count = received.numel()
    return Route(
        send_rows=received % num_targets,
        send_counts=(count,),
        recv_counts=(count,),
        num_local=num_targets,
        num_dst=0,
        own_places=torch.arange(num_targets, device=device),
        recv_places=received,
    )


def _link_batch(batch: Batch, kind: str, index: Tensor, num_endpoints: int, route: Route | None) -> ToyLinkBatch:
    """A batch with these pairs of endpoints. The negatives of pair (u, v) are u and v, in turn."""
    pairs = toy_pair_rows(kind, index, index[0], num_endpoints, route)
    held = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return ToyLinkBatch(**(held | {"pairs": pairs}))


def _with_pairs(batch: Batch, kind: str) -> ToyLinkBatch:
    """One pair for every target."""
    return _link_batch(batch, kind, toy_pairs(batch.num_targets, batch.x.device), batch.num_targets, route=None)


def toy_link_batch(num_layers: int, like: ExampleInput, kind: str) -> tuple[ToyLinkBatch, dict[int, RowSpace]]:
    """``toy_batch`` with pairs. The numbers of endpoints and of pairs differ from those of all other row spaces.

    Some endpoints are received from other ranks, so pairs are not rows of the last layer's output.
    """
    batch, space_of = toy_batch(num_layers, like)
    device = batch.x.device
    num_endpoints = max(space_of) + 1
    num_pairs = max(space_of) + 2
    route = received_endpoints(batch.num_targets, num_endpoints, device)
    first = torch.arange(num_pairs, device=device) % num_endpoints
    index = torch.stack([first, (7 * first + 3) % num_endpoints])
    spaces = {num_endpoints: RowSpace("endpoints", num_layers), num_pairs: RowSpace("pairs", num_layers)}
    return _link_batch(batch, kind, index, num_endpoints, route), space_of | spaces
