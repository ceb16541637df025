"""Counts the work of every rank in one step of a strategy, in one process, with the sampler and the split of training.

Nothing is loaded or sent, and no ranks are started. A mini-batch is sampled once per way to distribute its targets. The
counts of all strategies follow from it, because the neighbours drawn for a vertex at a layer depend only on the key of
that layer (law 1): the upper layers of ``hybrid(k)`` are the upper layers of ``data``, and its lower layers are the
split of the vertices that the upper layers read. Memory: twice the four bytes per vertex of a sampler.

A heterogeneous graph is counted on its fused graph, and also by type (``type_counts``).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.split import Split, split_in_one_process
from gsplit.minibatch.strategy_names import StrategySpec, parse_strategy
from gsplit.partitioning.presample import Workload
from gsplit.planner.type_counts import TypeCounter, TypeCounts, mean_types, stack_types
from gsplit.progress import Progress, silent
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler

__all__ = ["RankCounts", "StrategyCounts", "count_strategies"]

_NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RankCounts:
    """The work of one rank in a step, averaged over the counted steps. Tuples are per layer, from the input up.

    Layer l computes ``destinations[l]`` rows from ``sources[l]`` rows along ``edges[l]`` edges. ``rows_sent[l]`` and
    ``rows_received[l]`` are source rows of layer l that are exchanged between ranks (layer 0: input rows). In the
    backward pass their gradients are exchanged in the other direction. ``rows_loaded`` are read from memory or disk,
    by ``rows_loaded`` or ``rows_in_place`` of telemetry.
    ``ids_sent`` are requests for rows of other ranks. ``edges_drawn`` are sampled by this rank. ``endpoints_sent`` and
    ``endpoints_received`` are rows of the model's output, of pairs under ``split``. ``types``: the same by vertex type
    in a heterogeneous graph, where input rows that are loaded and exchanged are those of types with features.
    """

    targets: float
    edges: tuple[float, ...]
    destinations: tuple[float, ...]
    sources: tuple[float, ...]
    rows_loaded: float
    rows_sent: tuple[float, ...]
    rows_received: tuple[float, ...]
    ids_sent: float
    ids_received: float
    edges_drawn: float
    endpoints_sent: float = 0.0
    endpoints_received: float = 0.0
    types: TypeCounts | None = None

    @property
    def inputs(self) -> "InputRows":
        """Input rows by vertex type."""
        if self.types is not None:
            types = self.types
            return InputRows(types.rows_loaded, types.rows_sent, types.rows_received, types.sources[0])
        return InputRows((self.rows_loaded,), (self.rows_sent[0],), (self.rows_received[0],), (self.sources[0],))


class InputRows(NamedTuple):
    """Input rows of every vertex type, of one without types. ``mixed``: those that layer 0 reads."""

    loaded: tuple[float, ...]
    sent: tuple[float, ...]
    received: tuple[float, ...]
    mixed: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StrategyCounts:
    """The work of all ranks in a step. ``exchanges_inputs``: input rows are read by owners and exchanged."""

    spec: StrategySpec
    replicas: int
    ranks: tuple[RankCounts, ...]
    num_steps: int
    exchanges_inputs: bool = True

    def in_place(self) -> "StrategyCounts":
        """The same if every rank reads all its input rows itself, from features that the ranks of a host share."""
        ranks = [
            replace(
                rank,
                rows_loaded=rank.sources[0],
                rows_sent=(0.0, *rank.rows_sent[1:]),
                rows_received=(0.0, *rank.rows_received[1:]),
            )
            for rank in self.ranks
        ]
        return replace(self, ranks=tuple(ranks), exchanges_inputs=False)

    @property
    def exchanged_levels(self) -> tuple[int, ...]:
        """The layers whose source rows are exchanged; the rows of endpoints are those above the last layer."""
        levels = self.spec.exchanged_levels
        has_endpoints = any(rank.endpoints_received for rank in self.ranks)
        return (*levels, len(self.ranks[0].edges)) if has_endpoints else levels

    @property
    def num_edges(self) -> float:
        """Edges of all ranks and layers."""
        return sum(sum(rank.edges) for rank in self.ranks)

    @property
    def rows_loaded(self) -> float:
        """Input rows read by all ranks, copied or in place."""
        return sum(rank.rows_loaded for rank in self.ranks)

    @property
    def rows_sent(self) -> float:
        """Rows exchanged between ranks, in all layers."""
        return sum(sum(rank.rows_sent) + rank.endpoints_sent for rank in self.ranks)

    @property
    def edge_imbalance(self) -> float:
        """Edges of the rank with the most, over the mean."""
        return max(sum(rank.edges) for rank in self.ranks) * len(self.ranks) / (self.num_edges or 1.0)


def count_strategies(
    workload: Workload,
    ownership: Ownership,
    strategies: Sequence[str],
    *,
    replicas: int = 1,
    epoch: int = 0,
    steps: int = 3,
    featured: Collection[str] | None = None,
    progress: Progress = silent,
) -> list[StrategyCounts]:
    """Count the first ``steps`` steps of an epoch under every strategy.

    ``ownership`` is that within one replica. Replica r takes every ``replicas``-th target or pair, from position r on.
    ``featured``: the vertex types of a heterogeneous graph with features, whose input rows are read; None for all.
    """
    if not 1 <= steps <= workload.steps_per_epoch or replicas < 1:
        expected = f"1 to {workload.steps_per_epoch} steps and at least one replica"
        raise InputError(explain("counting", expected, f"{steps} steps and {replicas} replicas", "count fewer steps"))
    specs = [parse_strategy(name, len(workload.num_neighbors)) for name in strategies]
    samplers = _Samplers(workload, ownership, featured)
    found: list[list[list[RankCounts]]] = [[] for _ in specs]  # by strategy, step and rank
    for number in range(steps):
        key = workload.key(epoch, number)
        shares = _shares(workload, key, replicas, samplers)
        parts = [_Part(samplers, share, key) for share in shares]
        for spec, of_spec in zip(specs, found, strict=True):
            of_spec.append([rank for part in parts for rank in part.count(spec)])
        progress("count strategies", number + 1, steps)
    return [
        StrategyCounts(spec, replicas, _average(by_step), steps) for spec, by_step in zip(specs, found, strict=True)
    ]


@dataclass(frozen=True)
class _Share:
    """The targets of one replica in a step: all, and those of every rank, by owners or in turn.

    ``of_pairs``: they are endpoints, which several ranks may have, and whose rows ``split`` exchanges.
    """

    targets: Tensor
    owned: list[Tensor]
    strided: list[Tensor]
    of_pairs: bool = False


def _shares(workload: Workload, key: StepKey, replicas: int, samplers: "_Samplers") -> list[_Share]:
    """The targets of all replicas in a step. The samplers leave out the edges of its pairs."""
    ownership = samplers.ownership
    ranks = range(ownership.num_ranks)
    if workload.pairs is None:
        targets, _ = workload.step_targets(key)
        found = []
        for own in (targets[replica::replicas].contiguous() for replica in range(replicas)):
            owners = ownership.owners(own)
            by_owner = [own[owners == rank] for rank in ranks]
            found.append(_Share(own, by_owner, [own[rank :: len(ranks)] for rank in ranks]))
        return found
    pairs = workload.pairs
    step = pairs.for_step(key, workload.batch_size)
    samplers.exclude(pairs.excluded(step))
    places = torch.arange(step.num_pairs)
    owners = ownership.owners(pairs.to_internal(step.src))
    shares = []
    for replica in range(replicas):
        mine = places % replicas == replica
        turns = places // replicas % len(ranks)
        shares.append(
            _Share(
                targets=pairs.endpoints(step, mine),
                owned=[pairs.endpoints(step, mine & (owners == rank)) for rank in ranks],
                strided=[pairs.endpoints(step, mine & (turns == rank)) for rank in ranks],
                of_pairs=True,
            )
        )
    return shares


class _Samplers:
    """A sampler of the whole graph, and for every rank a sampler of its own vertices."""

    def __init__(self, workload: Workload, ownership: Ownership, featured: Collection[str] | None) -> None:
        graph = workload.graph
        original = workload.original_ids
        self.ownership = ownership
        self.num_neighbors = workload.fanouts
        self.types: TypeCounter | None = None
        edge_type = workload.edge_type
        if workload.types is not None and workload.types.num_relations and edge_type is not None:
            self.types = TypeCounter(workload.types, edge_type, featured)

        def sampler_of(first: int, stop: int) -> HostNeighborSampler:
            ids = original[first:stop] if original.size else _NO_IDS
            return workload.sampler_of(graph.restrict(first, stop), ids)

        self.whole = workload.sampler_of(graph, original)
        self.own = [sampler_of(first, stop) for first, stop in map(ownership.range_of, range(ownership.num_ranks))]

    def exclude(self, excluded: ExcludedEdges | None) -> None:
        """Leave these edges out of the mini-batches that follow."""
        for sampler in (self.whole, *self.own):
            sampler.excluded = excluded


class _Part:
    """The part of one replica in a step. Mini-batches that several strategies share are sampled once."""

    def __init__(self, samplers: _Samplers, share: _Share, key: StepKey) -> None:
        self._samplers = samplers
        self._share = share
        self._key = key
        self._num_layers = len(samplers.num_neighbors)
        self._num_ranks = samplers.ownership.num_ranks

    def count(self, spec: StrategySpec) -> list[RankCounts]:
        """The counts of every rank under a strategy."""
        if spec.split_layers == self._num_layers:
            found = [self._of_split(split) for split in self._split(self._share.targets, self._num_layers)]
            return self._with_endpoints(found) if self._share.of_pairs else found
        batches = self._owned if spec.targets == "owner" else self._strided
        if spec.split_layers is None:
            return [self._of_batch(batch) for batch in batches]
        return self._join(batches, spec.split_layers)

    @cached_property
    def _strided(self) -> list[MiniBatch]:
        return self._sample(self._share.strided)

    @cached_property
    def _owned(self) -> list[MiniBatch]:
        return self._sample(self._share.owned)

    def _sample(self, targets: Iterable[Tensor]) -> list[MiniBatch]:
        """The micro-batches of all ranks, with all layers."""
        samplers = self._samplers
        return [sample_minibatch(samplers.whole, own, samplers.num_neighbors, self._key) for own in targets]

    def _split(self, targets: Tensor, num_layers: int) -> list[Split]:
        """Split the ``num_layers`` layers nearest the input. ``targets`` are the destinations of the highest one."""
        samplers = self._samplers
        fanouts = samplers.num_neighbors[self._num_layers - num_layers :]
        return split_in_one_process(samplers.own, targets, fanouts, self._key, samplers.ownership)

    def _join(self, batches: list[MiniBatch], level: int) -> list[RankCounts]:
        """Count the layers from ``level`` up in micro-batches, and the layers below it in a split."""
        ownership = self._samplers.ownership
        frontiers = [_frontier(batch, level) for batch in batches]
        sent, received = _count_exchanged(frontiers, ownership)
        union = torch.unique(torch.cat(frontiers))
        if level:
            below = [self._of_split(split) for split in self._split(union, level)]
        else:
            below = [self._of_loading(frontiers, rank, union) for rank in range(self._num_ranks)]
        return [
            _stack(below[rank], self._of_batch(batch, level), sent=sent[rank], received=received[rank])
            for rank, batch in enumerate(batches)
        ]

    def _of_batch(self, batch: MiniBatch, bottom: int = 0) -> RankCounts:
        """The layers from ``bottom`` up of a micro-batch, which one rank computes alone."""
        counts = _of_batch(batch, bottom)
        counter = self._samplers.types
        if counter is None:
            return counts
        return _with_types(counts, counter.of_blocks(batch.blocks[bottom:], batch.input_ids))

    def _of_split(self, split: Split) -> RankCounts:
        counts = _of_split(split)
        counter = self._samplers.types
        return counts if counter is None else _with_types(counts, counter.of_split(split))

    def _of_loading(self, frontiers: list[Tensor], rank: int, union: Tensor) -> RankCounts:
        """The input rows that a rank reads for all ranks; ``frontiers`` are those that every rank needs."""
        ownership = self._samplers.ownership
        read = union[ownership.owners(union) == rank]
        counts = _only_loading(read.numel())
        counter = self._samplers.types
        if counter is None:
            return counts
        owners = [ownership.owners(ids) for ids in frontiers]
        sent = [frontiers[peer][owners[peer] == rank] for peer in range(self._num_ranks) if peer != rank]
        return _with_types(counts, counter.of_loading(read, sent, frontiers[rank][owners[rank] != rank]))

    def _with_endpoints(self, below: list[RankCounts]) -> list[RankCounts]:
        """The counts of a split with the rows of endpoints, which ranks request for their pairs."""
        sent, received = _count_exchanged(self._share.owned, self._samplers.ownership)
        return [
            replace(
                counts,
                endpoints_sent=sent[rank],
                endpoints_received=received[rank],
                ids_sent=counts.ids_sent + received[rank],
                ids_received=counts.ids_received + sent[rank],
            )
            for rank, counts in enumerate(below)
        ]


def _count_exchanged(wanted_ids: list[Tensor], ownership: Ownership) -> tuple[list[int], list[int]]:
    """The rows that every rank sends and receives, if each requests some vertices from their owners."""
    wanted = torch.stack([_count_owners(ids, ownership) for ids in wanted_ids])  # [rank, owner]
    kept = wanted.diagonal()
    return (wanted.sum(0) - kept).tolist(), (wanted.sum(1) - kept).tolist()


def _frontier(batch: MiniBatch, level: int) -> Tensor:
    """The source vertices of layer ``level``."""
    return batch.input_ids[: batch.blocks[level].num_src]


def _count_owners(ids: Tensor, ownership: Ownership) -> Tensor:
    return torch.bincount(ownership.owners(ids), minlength=ownership.num_ranks)


def _of_batch(batch: MiniBatch, bottom: int = 0) -> RankCounts:
    """The layers from ``bottom`` up of a micro-batch, which one rank computes alone."""
    blocks = batch.blocks[bottom:]
    nothing = (0.0,) * len(blocks)
    return RankCounts(
        targets=batch.num_targets,
        edges=tuple(block.num_edges for block in blocks),
        destinations=tuple(block.num_dst for block in blocks),
        sources=tuple(block.num_src for block in blocks),
        rows_loaded=blocks[0].num_src,
        rows_sent=nothing,
        rows_received=nothing,
        ids_sent=0,
        ids_received=0,
        edges_drawn=sum(block.num_edges for block in blocks),
    )


def _of_split(split: Split) -> RankCounts:
    """One rank's split. The rank sends a request for every row that it receives."""
    blocks = [layer.block for layer in split.layers]
    routes = [layer.route for layer in split.layers]
    sent = tuple(route.num_sent for route in routes)
    received = tuple(route.num_received for route in routes)
    return RankCounts(
        targets=split.num_targets,
        edges=tuple(block.num_edges for block in blocks),
        destinations=tuple(block.num_dst for block in blocks),
        sources=tuple(block.num_src for block in blocks),
        rows_loaded=split.input_ids.numel(),
        rows_sent=sent,
        rows_received=received,
        ids_sent=sum(received),
        ids_received=sum(sent),
        edges_drawn=sum(block.num_edges for block in blocks),
    )


def _with_types(counts: RankCounts, types: TypeCounts) -> RankCounts:
    """Counts with those by type. The ids of all types are requested, but only types with features have input rows."""
    return replace(
        counts,
        rows_loaded=sum(types.rows_loaded),
        rows_sent=(sum(types.rows_sent), *counts.rows_sent[1:]),
        rows_received=(sum(types.rows_received), *counts.rows_received[1:]),
        types=types,
    )


def _only_loading(rows: int) -> RankCounts:
    """Counts without any layer: only the rows that a rank reads for all ranks."""
    return RankCounts(
        targets=0,
        edges=(),
        destinations=(),
        sources=(),
        rows_loaded=rows,
        rows_sent=(),
        rows_received=(),
        ids_sent=0,
        ids_received=0,
        edges_drawn=0,
    )


def _stack(below: RankCounts, above: RankCounts, sent: float, received: float) -> RankCounts:
    """Join lower and upper layers. ``sent`` and ``received`` are the rows exchanged at the boundary between them."""
    types = None
    rows_sent = sent
    rows_received = received
    if below.types is not None and above.types is not None:
        types = stack_types(below.types, above.types)
        if not below.edges:  # the boundary is at the input rows
            rows_sent = sum(types.rows_sent)
            rows_received = sum(types.rows_received)
    return RankCounts(
        targets=above.targets,
        edges=below.edges + above.edges,
        destinations=below.destinations + above.destinations,
        sources=below.sources + above.sources,
        rows_loaded=below.rows_loaded,
        rows_sent=(*below.rows_sent[: len(below.edges)], rows_sent, *above.rows_sent[1:]),
        rows_received=(*below.rows_received[: len(below.edges)], rows_received, *above.rows_received[1:]),
        ids_sent=below.ids_sent + received,
        ids_received=below.ids_received + sent,
        edges_drawn=below.edges_drawn + above.edges_drawn,
        types=types,
    )


def _average(by_step: list[list[RankCounts]]) -> tuple[RankCounts, ...]:
    """The mean over the steps, for every rank."""
    return tuple(_mean(list(of_rank)) for of_rank in zip(*by_step, strict=True))


def _mean(counts: list[RankCounts]) -> RankCounts:
    def each(name: str) -> tuple[float, ...]:
        columns = zip(*(getattr(count, name) for count in counts), strict=True)
        return tuple(sum(column) / len(counts) for column in columns)

    def one(name: str) -> float:
        return float(sum(getattr(count, name) for count in counts)) / len(counts)

    types = [count.types for count in counts if count.types is not None]
    return RankCounts(
        targets=one("targets"),
        edges=each("edges"),
        destinations=each("destinations"),
        sources=each("sources"),
        rows_loaded=one("rows_loaded"),
        rows_sent=each("rows_sent"),
        rows_received=each("rows_received"),
        ids_sent=one("ids_sent"),
        ids_received=one("ids_received"),
        edges_drawn=one("edges_drawn"),
        endpoints_sent=one("endpoints_sent"),
        endpoints_received=one("endpoints_received"),
        types=mean_types(types) if types else None,
    )
