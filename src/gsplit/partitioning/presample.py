"""Presampling: how often vertices and edges are in a mini-batch, by the sampler of training (paper 4).

Runs the mini-batches of some epochs at the real global batch size and counts, for every vertex, k (times among the
destinations of a layer), e (in-edges drawn for it) and i (times among the input rows), and for every stored edge how
often it was drawn. Divided by the number of mini-batches these are the expectations that partitioning balances and
cuts.

Threads draw and count (kernels release the interpreter lock), each its own mini-batches. They share the counts: the
edges are cut into about as many ranges as there are threads, and one thread at a time counts in a range, so that sums
are exact in any order. Memory: four bytes per edge for the counts, and per thread four bytes per vertex and two
mini-batches.
"""

import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, StoreError, explain
from gsplit.files.host_limits import usable_cores
from gsplit.graph.blocks import Block
from gsplit.graph.graph import Graph
from gsplit.graph.types import GraphTypes
from gsplit.kernels.jit import kernel
from gsplit.minibatch.pair_rows import own_pairs
from gsplit.partitioning.settings import EPOCHS
from gsplit.progress import Progress, silent
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.draws import UNIFORM, Draw, open_draw
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.minibatch import StepKey, epoch_positions, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler, check_fanouts
from gsplit.sampling.pairs import ListedPairs, StepPairs, StoredPairs
from gsplit.sampling.protocol import Fanout
from gsplit.sampling.relations import HostRelationSampler, resolve_relation_fanouts
from gsplit.sampling.targets import LocalTargets
from gsplit.store.reader import Store

__all__ = [
    "Counts",
    "Drawn",
    "PairWorkload",
    "PresampleCounter",
    "Workload",
    "check_batches",
    "check_epochs",
    "draw_epochs",
    "drawn_by",
    "held_out_epochs",
    "presample",
    "stage_of",
]

T = TypeVar("T")
_HELD_PER_THREAD = 2
_LEAST_HELD_OUT = 16
"""Mini-batches: the share of cross edges of one deviates by 2 %, that of 16 by half a percent (docs/decisions/0005)."""


def check_batches(num_neighbors: list[int], batch_size: int, seed: int, num_targets: int) -> None:
    """Refuse settings that give no mini-batches."""
    check_fanouts(num_neighbors)
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise InputError(explain("seed", "0 to 2**63 - 1", seed, "choose another seed"))
    if num_targets == 0:
        raise InputError(explain("targets", "at least one", num_targets, "name targets that the store has"))
    if not isinstance(batch_size, int) or batch_size < 1:
        fix = "give the size of the global mini-batch of training"
        raise InputError(explain("batch_size", "a positive number", batch_size, fix))


@dataclass(frozen=True)
class PairWorkload:
    """The pairs that will be trained on, and the internal id of every vertex by original id; empty if these are equal.

    The targets of a step are the endpoints of its pairs and negatives, each once.
    """

    listed: ListedPairs
    drawn: StoredPairs
    internal_ids: Array
    num_vertices: int

    def for_step(self, key: StepKey, batch_size: int) -> StepPairs:
        """The pairs of a step, by original id."""
        return self.listed.for_step(key, batch_size, self.drawn.negatives, self.num_vertices)

    def endpoints(self, step: StepPairs, mine: Tensor | None = None) -> Tensor:
        """The endpoints of all pairs of a step, or of some of them."""
        every = torch.ones(step.num_pairs, dtype=torch.bool)
        return self.to_internal(own_pairs(step, every if mine is None else mine, labels=None)[0])

    def excluded(self, step: StepPairs) -> ExcludedEdges | None:
        """The edges that the mini-batch of a step must not have."""
        how = self.drawn.exclude_seed_edges
        if not how:
            return None
        return ExcludedEdges.of(self.to_internal(step.src), self.to_internal(step.dst), reverse=how == "reverse")

    def to_internal(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self.internal_ids[ids.numpy()], np.int64)) if self.internal_ids.size else ids


@dataclass(frozen=True)
class Workload:
    """What will be trained on: a graph, its targets and how mini-batches are drawn.

    ``targets`` are internal ids in the order of their original ids, as stores keep them; ``original_ids`` is empty
    where ids are original. ``types`` and ``edge_type`` are those of a heterogeneous graph, in which ``num_neighbors``
    count for each relation, unless ``relation_fanouts`` has a number for each layer and relation. ``pairs``: for link
    prediction; ``targets`` are then the vertices of the pairs.
    """

    graph: Graph
    original_ids: Ids
    targets: Ids
    num_neighbors: list[int]
    batch_size: int
    seed: int = 0
    draw: Draw = UNIFORM
    types: GraphTypes | None = None
    edge_type: Array | None = None
    pairs: PairWorkload | None = None
    relation_fanouts: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        check_batches(self.num_neighbors, self.batch_size, self.seed, self.targets.size)
        if not 0 <= int(self.targets.min()) <= int(self.targets.max()) < self.graph.num_vertices:
            got = f"{self.targets.min()}..{self.targets.max()}"
            fix = "run gsplit inspect --verify"
            raise StoreError(explain("targets", f"ids in 0..{self.graph.num_vertices - 1}", got, fix))
        order = self.original_ids[self.targets] if self.original_ids.size else self.targets
        if (order[1:] <= order[:-1]).any():
            fix = "run gsplit inspect --verify"
            place = int(np.flatnonzero(order[1:] <= order[:-1])[0])
            got = f"{order[place]} then {order[place + 1]}"
            raise StoreError(explain("targets", "every target once, ordered by original id", got, fix))

    @classmethod
    def of_store(
        cls,
        store: Store,
        input_nodes: str | None,
        num_neighbors: Sequence[Fanout],
        batch_size: int,
        seed: int = 0,
        options: DrawOptions | None = None,
        pairs: StoredPairs | None = None,
    ) -> Self:
        """``input_nodes``: the name of stored targets, or None for every vertex. ``pairs``: in place of targets.

        In a heterogeneous graph a vertex type names all its vertices, and a layer may have a number per relation.
        """
        if store.vertex_range != (0, store.num_vertices):
            raise InputError(explain(store.where, "a whole store", "a host's shard", "use the one it was cut from"))
        renumbered = "original_ids" in store.names
        original = np.asarray(store.original_ids()) if renumbered else np.empty(0, np.int64)
        of_pairs = None if pairs is None else _read_pairs(store, pairs)
        if of_pairs is not None:
            every = torch.from_numpy(np.unique(of_pairs.listed.all_vertices()))
            targets = of_pairs.to_internal(every).numpy()
        elif input_nodes is None:
            targets = np.argsort(original) if renumbered else np.arange(store.num_vertices)
        elif store.types is not None and input_nodes in store.types.vertex_types:
            first = store.types.offsets[store.types.number(input_nodes)]
            targets = np.asarray(store.internal_ids[first : first + store.types.count(input_nodes)], np.int64)
        else:
            targets = np.asarray(store.stored_array(f"targets/{input_nodes}"))
        of_relations = tuple(fanout for fanout in num_neighbors if isinstance(fanout, tuple))
        numbers = [max(fanout) or 1 if isinstance(fanout, tuple) else fanout for fanout in num_neighbors]
        check_fanouts(numbers)
        fanouts = [operator.index(fanout) for fanout in numbers]
        drawn = options or DrawOptions()
        if store.types is not None and str(drawn):
            fix = "leave these options out; every relation is drawn uniformly"
            raise InputError(explain("sampler", "the uniform one for a heterogeneous graph", str(drawn), fix))
        return cls(
            graph=store.graph,
            original_ids=original,
            targets=targets,
            num_neighbors=fanouts,
            batch_size=batch_size,
            seed=seed,
            draw=open_draw(drawn, store, store.graph),
            types=store.types,
            edge_type=store.arrays.get("edge_type"),
            pairs=of_pairs,
            relation_fanouts=of_relations or None,
        )

    def sampler(self) -> HostNeighborSampler:
        """A sampler of the whole graph, whose layers have the positions of their edges."""
        return self.sampler_of(self.graph, self.original_ids, edge_ids=True)

    def sampler_of(self, graph: Graph, original_ids: Ids, *, edge_ids: bool = False) -> HostNeighborSampler:
        """A sampler of the graph, or of a range of its vertices. That of relations always has positions of edges."""
        if self.edge_type is None or not self._relations:
            return HostNeighborSampler(graph, original_ids, edge_ids=edge_ids, draw=self.draw)
        return HostRelationSampler(graph, original_ids, self.edge_type)

    @property
    def fanouts(self) -> Sequence[Fanout]:
        """The fanout of every hop, as the sampler takes it."""
        if self.types is None or not self._relations:
            return self.num_neighbors
        return self.relation_fanouts or resolve_relation_fanouts(self.num_neighbors, self.types)

    @property
    def _relations(self) -> int:
        """Number of relations; without any, a heterogeneous graph has no edges, and is sampled as any other."""
        return self.types.num_relations if self.types is not None else 0

    @property
    def steps_per_epoch(self) -> int:
        num_targets = self.targets.size if self.pairs is None else self.pairs.listed.num_pairs
        return -(-num_targets // self.batch_size)

    def step_targets(self, key: StepKey) -> tuple[Tensor, ExcludedEdges | None]:
        """The targets of a step over all ranks, and the edges that its mini-batch must not have."""
        if self.pairs is not None:
            step = self.pairs.for_step(key, self.batch_size)
            return self.pairs.endpoints(step), self.pairs.excluded(step)
        local = LocalTargets(np.arange(self.targets.size), self.targets, self.targets.size)
        return local.for_step(key.seed, key.epoch, key.step, self.batch_size, shuffle=True), None

    def key(self, epoch: int, step: int) -> StepKey:
        """The key of a step."""
        return StepKey(self.seed, epoch, step, self.draw.options.layer_dependency)


def _read_pairs(store: Store, pairs: StoredPairs) -> PairWorkload:
    """Stored pairs of an untyped graph."""
    if store.types is not None:
        got = f"a graph with the vertex types {', '.join(store.types.vertex_types)}"
        raise InputError(explain("pairs", "a homogeneous graph", got, "name targets"))
    internal = store.internal_ids if store.is_renumbered else np.empty(0, np.int64)
    found = PairWorkload(ListedPairs.listed(store.pairs(pairs.name)), pairs, internal, store.num_vertices)
    ids = found.listed.all_vertices()
    if ids.size == 0:
        raise InputError(explain(f"pairs/{pairs.name}", "at least one pair", "an empty list", "name other pairs"))
    if not 0 <= int(ids.min()) <= int(ids.max()) < store.num_vertices:
        got = f"{ids.min()}..{ids.max()}"
        fix = "run gsplit inspect --verify"
        raise StoreError(explain(f"pairs/{pairs.name}", f"ids in 0..{store.num_vertices - 1}", got, fix))
    return found


@dataclass(frozen=True)
class Drawn:
    """One mini-batch as presampling needs it, layer after layer from the targets down.

    ``frontiers[h]`` are the vertices that hop h drew for, ``counts[h]`` how many in-edges each, ``places[h]`` where
    those edges are in the graph's ``indices``; ``input_ids`` are the rows that would be loaded.
    """

    frontiers: list[Ids]
    counts: list[Ids]
    places: list[Ids]
    input_ids: Ids


@dataclass(frozen=True)
class Counts:
    """Counts over ``num_batches`` mini-batches: computed is k, edges_drawn e, loaded i, edges k per edge."""

    computed: npt.NDArray[np.uint32]
    edges_drawn: npt.NDArray[np.uint64]
    loaded: npt.NDArray[np.uint32]
    edges: npt.NDArray[np.uint32]
    num_batches: int

    @property
    def num_bytes(self) -> int:
        return self.computed.nbytes + self.edges_drawn.nbytes + self.loaded.nbytes + self.edges.nbytes


class PresampleCounter:
    """Counts mini-batches, for the vertices that a graph holds and their in-edges. ``add`` may run in ``threads``."""

    def __init__(self, graph: Graph, threads: int = 1) -> None:
        self._first = graph.first_vertex
        last = max(0, graph.num_edges - 1)
        self._shift = max(0, last.bit_length() - (threads - 1).bit_length())
        self._ranges = [threading.Lock() for _ in range((last >> self._shift) + 1)]  # of edges: place >> shift
        self._computing = threading.Lock()
        self._loading = threading.Lock()
        self._turns = count()
        num_held = graph.indptr.size - 1
        self._computed, self._loaded = (np.zeros(num_held, np.uint32) for _ in range(2))
        self._edges_drawn = np.zeros(num_held, np.uint64)
        self._edges = np.zeros(graph.num_edges, np.uint32)

    def add(self, drawn: Drawn) -> None:
        """Count a mini-batch, or the held part of one."""
        with self._computing:
            for frontier, counts in zip(drawn.frontiers, drawn.counts, strict=True):
                _add_each(self._computed, frontier, self._first)
                _add(self._edges_drawn, frontier, counts, self._first)
        with self._loading:
            _add_each(self._loaded, drawn.input_ids, self._first)
        places = np.concatenate(drawn.places)
        ends = np.array([places.size])
        if len(self._ranges) > 1:
            places, ends = _sort_by_range(places, self._shift, len(self._ranges))
        first = next(self._turns)  # threads begin in different ranges
        for turn in range(len(self._ranges)):
            number = (first + turn) % len(self._ranges)
            start = 0 if number == 0 else ends[number - 1]
            with self._ranges[number]:
                _add_each(self._edges, places[start : ends[number]], 0)

    def counts(self, num_batches: int) -> "Counts":
        """The counts so far, over this many mini-batches."""
        return Counts(self._computed, self._edges_drawn, self._loaded, self._edges, num_batches)


def drawn_by(blocks: Sequence[Block], input_ids: Ids) -> Drawn:
    """A mini-batch, or the part of one that a rank drew, from the targets down; ``blocks`` are from the bottom up."""
    blocks = list(reversed(blocks))
    places = [block.edge_ids.numpy() for block in blocks if block.edge_ids is not None]
    counts = [block.indptr.diff().numpy() for block in blocks]
    return Drawn([input_ids[: block.num_dst] for block in blocks], counts, places, input_ids)


def draw_epochs(workload: Workload, epochs: range, *, threads: int | None = None) -> Iterator[Drawn]:
    """The mini-batches of some epochs, drawn by threads, in order."""
    return _map_epochs(workload, epochs, lambda drawn: drawn, _num_threads(threads))


def _num_threads(threads: int | None) -> int:
    return threads or usable_cores()


def _map_epochs(workload: Workload, epochs: range, use: Callable[[Drawn], T], threads: int) -> Iterator[T]:
    """What ``use`` returns for the mini-batches of some epochs, in order. It is called in the thread that drew one."""
    targets, size, seed = workload.targets, workload.batch_size, workload.seed
    positions = np.arange(targets.size)
    idle: SimpleQueue[HostNeighborSampler] = SimpleQueue()
    for _ in range(threads):
        idle.put(workload.sampler())
    fanouts = workload.fanouts

    def draw(batch: Tensor, key: StepKey, excluded: ExcludedEdges | None) -> T:
        sampler = idle.get()
        try:
            sampler.excluded = excluded
            made = sample_minibatch(sampler, batch, fanouts, key)
        finally:
            idle.put(sampler)
        return use(drawn_by(made.blocks, made.input_ids.numpy()))

    def keys() -> Iterator[tuple[Tensor, StepKey, ExcludedEdges | None]]:
        for epoch in epochs:
            if workload.pairs is not None:
                for step in range(workload.steps_per_epoch):
                    key = workload.key(epoch, step)
                    batch, excluded = workload.step_targets(key)
                    yield batch, key, excluded
                continue
            order = targets[np.argsort(epoch_positions(positions, targets.size, seed, epoch, shuffle=True))]
            for step, first in enumerate(range(0, order.size, size)):
                yield torch.from_numpy(order[first : first + size]), workload.key(epoch, step), None

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[T]] = deque()
        for batch, key, excluded in keys():
            if len(waiting) >= threads * _HELD_PER_THREAD:
                yield waiting.popleft().result()
            waiting.append(pool.submit(draw, batch, key, excluded))
        while waiting:
            yield waiting.popleft().result()


def check_epochs(epochs: int) -> None:
    """Refuse a number below 1."""
    if not isinstance(epochs, int) or epochs < 1:
        raise InputError(explain("epochs", "a positive number", epochs, f"presample {EPOCHS}, as the paper does"))


def held_out_epochs(steps_per_epoch: int) -> int:
    """Epochs after the presampled ones that a forecast is counted on: one, or more if it has few mini-batches.

    >>> held_out_epochs(89), held_out_epochs(6)
    (1, 3)
    """
    return -(-_LEAST_HELD_OUT // steps_per_epoch)


def stage_of(first_epoch: int) -> str:
    """What progress shows: mini-batches that parts are fitted to, or later ones."""
    return "count held-out batches" if first_epoch else "presample"


def presample(
    workload: Workload,
    *,
    epochs: int = EPOCHS,
    first_epoch: int = 0,
    threads: int | None = None,
    progress: Progress = silent,
) -> Counts:
    """Count over the mini-batches of ``epochs`` epochs, by default those that training with this seed begins with."""
    check_epochs(epochs)
    threads = _num_threads(threads)
    counter = PresampleCounter(workload.graph, threads)
    total = epochs * workload.steps_per_epoch
    drawn = _map_epochs(workload, range(first_epoch, first_epoch + epochs), counter.add, threads)
    for number, _ in enumerate(drawn):
        progress(stage_of(first_epoch), number + 1, total)
    return counter.counts(total)


@kernel
def _add_each(totals: npt.NDArray[np.uint32], places: Ids, first: int) -> None:
    for i in range(places.size):
        totals[places[i] - first] += np.uint32(1)


@kernel
def _add(totals: npt.NDArray[np.uint64], places: Ids, amounts: Ids, first: int) -> None:
    for i in range(places.size):
        totals[places[i] - first] += np.uint64(amounts[i])


@kernel
def _sort_by_range(places: Ids, shift: int, num_ranges: int) -> tuple[Ids, Ids]:
    """Places by range, which is ``place >> shift``, and where every range ends among them."""
    ends = np.zeros(num_ranges, np.int64)
    for i in range(places.size):
        ends[places[i] >> shift] += 1
    total = 0
    for number in range(num_ranges):
        size = ends[number]
        ends[number] = total
        total += size
    found = np.empty_like(places)
    for i in range(places.size):
        number = places[i] >> shift
        found[ends[number]] = places[i]
        ends[number] += 1
    return found, ends
