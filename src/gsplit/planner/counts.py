"""What one step of a strategy does on every rank, counted in one process by the sampler and the split of training.

Nothing is loaded and nothing sent; the ranks need not exist. One mini-batch is sampled once per way of giving out its
targets, and the strategies are read off it: what a rank draws for a vertex at a layer depends on that layer's key
alone (law 1), so the upper layers of ``hybrid(k)`` are the upper layers of ``data``, and its lower ones are the split
of what the ranks ask the owners for. Memory: a sampler's four bytes per vertex, twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.split import Split, split_in_one_process
from gsplit.minibatch.strategy_names import StrategySpec, parse_strategy
from gsplit.partitioning.presample import Workload
from gsplit.progress import Progress, silent
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.targets import LocalTargets

__all__ = ["RankCounts", "StrategyCounts", "count_strategies"]

_NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RankCounts:
    """One rank's part of a step, on average over the steps counted. Tuples are per layer, from the input up.

    Layer l computes ``destinations[l]`` rows from ``sources[l]`` rows along ``edges[l]``. ``rows_sent[l]`` and
    ``rows_received[l]`` are source rows of layer l that cross between ranks (layer 0: input rows; backwards their
    gradients go the other way). ``rows_loaded`` are read from memory or disk. ``ids_sent`` asks others for rows.
    ``edges_drawn`` are sampled here: all that the rank computes on, in every strategy of this project.
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


@dataclass(frozen=True, slots=True)
class StrategyCounts:
    """All ranks' parts of a step.

    Two fields describe other systems: ``slices``, into how many the columns of input rows are cut, and
    ``bottom_passes``, how often layer 0 is called in a step.
    """

    spec: StrategySpec
    replicas: int
    ranks: tuple[RankCounts, ...]
    num_steps: int
    slices: int = 1
    bottom_passes: int = 1

    @property
    def num_edges(self) -> float:
        """Edges computed, over all ranks and layers."""
        return sum(sum(rank.edges) for rank in self.ranks)

    @property
    def rows_loaded(self) -> float:
        """Input rows read, over all ranks, in whole rows."""
        return sum(rank.rows_loaded for rank in self.ranks) / self.slices

    @property
    def rows_sent(self) -> float:
        """Rows that cross between ranks, over all ranks and layers."""
        return sum(sum(rank.rows_sent) for rank in self.ranks)

    @property
    def edge_imbalance(self) -> float:
        """Largest over mean of the ranks' edges."""
        return max(sum(rank.edges) for rank in self.ranks) * len(self.ranks) / (self.num_edges or 1.0)


def count_strategies(
    workload: Workload,
    ownership: Ownership,
    strategies: Sequence[str],
    *,
    replicas: int = 1,
    epoch: int = 0,
    steps: int = 3,
    progress: Progress = silent,
) -> list[StrategyCounts]:
    """Count the first ``steps`` steps of an epoch under every strategy.

    ``ownership`` is that of one replica's ranks; each replica takes a strided cut of the targets.
    """
    if not 1 <= steps <= workload.steps_per_epoch or replicas < 1:
        expected = f"1 to {workload.steps_per_epoch} steps and at least one replica"
        raise InputError(explain("counting", expected, f"{steps} and {replicas}", "count fewer steps"))
    specs = [parse_strategy(name, len(workload.num_neighbors)) for name in strategies]
    samplers = _Samplers(workload, ownership)
    found: list[list[list[RankCounts]]] = [[] for _ in specs]  # by strategy, step and rank
    for number in range(steps):
        key = StepKey(workload.seed, epoch, number)
        parts = [_Part(samplers, _targets(workload, key, replica, replicas), key) for replica in range(replicas)]
        for spec, of_spec in zip(specs, found, strict=True):
            of_spec.append([rank for part in parts for rank in part.count(spec)])
        progress("count strategies", number + 1, steps)
    return [
        StrategyCounts(spec, replicas, _average(by_step), steps) for spec, by_step in zip(specs, found, strict=True)
    ]


def _targets(workload: Workload, key: StepKey, replica: int, replicas: int) -> Tensor:
    """One replica's targets of a step."""
    local = LocalTargets(np.arange(workload.targets.size), workload.targets, workload.targets.size)
    cut = (replica, replicas)
    return local.for_step(key.seed, key.epoch, key.step, workload.batch_size, shuffle=True, cut=cut)


class _Samplers:
    """A sampler of the whole graph, and one per rank of its own vertices."""

    def __init__(self, workload: Workload, ownership: Ownership) -> None:
        graph, original = workload.graph, workload.original_ids
        self.ownership, self.num_neighbors = ownership, workload.num_neighbors
        self.whole = HostNeighborSampler(graph, original)
        self.own = [
            HostNeighborSampler(graph.restrict(first, stop), original[first:stop] if original.size else _NO_IDS)
            for first, stop in map(ownership.range_of, range(ownership.num_ranks))
        ]


class _Part:
    """One replica's part of a step; what several strategies have in common is sampled once."""

    def __init__(self, samplers: _Samplers, targets: Tensor, key: StepKey) -> None:
        self._samplers, self._targets, self._key = samplers, targets, key
        self._num_layers, self._num_ranks = len(samplers.num_neighbors), samplers.ownership.num_ranks

    def count(self, spec: StrategySpec) -> list[RankCounts]:
        """Every rank's counts."""
        if spec.split_layers == self._num_layers:
            return [_of_split(split) for split in self._split(self._targets, self._num_layers)]
        batches = self._owned if spec.targets == "owner" else self._strided
        return [_of_batch(batch) for batch in batches] if spec.split_layers is None else self._join(batches, spec)

    @cached_property
    def _strided(self) -> list[MiniBatch]:
        return self._sample(self._targets[rank :: self._num_ranks] for rank in range(self._num_ranks))

    @cached_property
    def _owned(self) -> list[MiniBatch]:
        owners = self._samplers.ownership.owners(self._targets)
        return self._sample(self._targets[owners == rank] for rank in range(self._num_ranks))

    def _sample(self, cuts: Iterable[Tensor]) -> list[MiniBatch]:
        """Every rank's micro-batch, all layers of it."""
        samplers = self._samplers
        return [sample_minibatch(samplers.whole, cut, samplers.num_neighbors, self._key) for cut in cuts]

    def _split(self, targets: Tensor, num_layers: int) -> list[Split]:
        """The ``num_layers`` layers nearest the input, split; ``targets`` are the destinations of the top one."""
        samplers = self._samplers
        fanouts = samplers.num_neighbors[self._num_layers - num_layers :]
        return split_in_one_process(samplers.own, targets, fanouts, self._key, samplers.ownership)

    def _join(self, batches: list[MiniBatch], spec: StrategySpec) -> list[RankCounts]:
        """Layers from k up as the micro-batches have them; their source rows come from a split of the k below."""
        level, ownership = spec.split_layers or 0, self._samplers.ownership
        frontiers = [_frontier(batch, level) for batch in batches]
        wanted = torch.stack([_count_owners(frontier, ownership) for frontier in frontiers])  # [rank, owner]
        kept = wanted.diagonal()
        received, sent = (wanted.sum(1) - kept).tolist(), (wanted.sum(0) - kept).tolist()
        union = torch.unique(torch.cat(frontiers))
        below = (
            [_of_split(split) for split in self._split(union, level)]
            if level
            else [_only_loading(rows) for rows in _count_owners(union, ownership).tolist()]
        )
        return [
            _stack(below[rank], _of_batch(batch, level), sent[rank], received[rank])
            for rank, batch in enumerate(batches)
        ]


def _frontier(batch: MiniBatch, level: int) -> Tensor:
    """The vertices whose rows are the sources of layer ``level``."""
    return batch.input_ids[: batch.blocks[level].num_src]


def _count_owners(ids: Tensor, ownership: Ownership) -> Tensor:
    return torch.bincount(ownership.owners(ids), minlength=ownership.num_ranks)


def _of_batch(batch: MiniBatch, bottom: int = 0) -> RankCounts:
    """The layers from ``bottom`` up of a mini-batch that one rank computes alone."""
    blocks, nothing = batch.blocks[bottom:], (0.0,) * (len(batch.blocks) - bottom)
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
    """One rank's split: it asks for every row that it receives."""
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


def _only_loading(rows: int) -> RankCounts:
    """No layer at all: rows that a rank reads for itself and others."""
    return RankCounts(0, (), (), (), rows, (), (), 0, 0, 0)


def _stack(below: RankCounts, above: RankCounts, sent: float, received: float) -> RankCounts:
    """Layers on top of others; ``sent`` and ``received`` are the rows that cross at the boundary, asked for by id."""
    return RankCounts(
        targets=above.targets,
        edges=below.edges + above.edges,
        destinations=below.destinations + above.destinations,
        sources=below.sources + above.sources,
        rows_loaded=below.rows_loaded,
        rows_sent=(*below.rows_sent, sent, *above.rows_sent[1:]),
        rows_received=(*below.rows_received, received, *above.rows_received[1:]),
        ids_sent=below.ids_sent + received,
        ids_received=below.ids_received + sent,
        edges_drawn=below.edges_drawn + above.edges_drawn,
    )


def _average(by_step: list[list[RankCounts]]) -> tuple[RankCounts, ...]:
    """Every rank's mean over the steps."""
    return tuple(_mean(list(of_rank)) for of_rank in zip(*by_step, strict=True))


def _mean(counts: list[RankCounts]) -> RankCounts:
    def each(name: str) -> tuple[float, ...]:
        columns = zip(*(getattr(count, name) for count in counts), strict=True)
        return tuple(sum(column) / len(counts) for column in columns)

    def one(name: str) -> float:
        return float(sum(getattr(count, name) for count in counts)) / len(counts)

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
    )
