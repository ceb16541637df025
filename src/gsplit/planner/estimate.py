"""Seconds of every stage of a step, from counts, the shape of a model and the constants of a machine.

The stages are those of telemetry. ``shuffle`` is the shuffle of the forward pass; ``backward`` contains the shuffle of
gradients and their averaging. The formulas are in docs/planner-formulas.md. The seconds of a rank are its own work. The
latency of collectives is added once per step; between the processes of a host it is CPU work of every rank. If a
strategy exchanges rows, ranks wait for each other in every stage, so a stage takes as long as its slowest rank.
Otherwise ranks wait only when gradients are averaged, so the step takes as long as its slowest rank. On devices,
mini-batches that are made ahead are made while the one before is trained: the step takes as long as the longer of both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import sqrt

from gsplit.planner.counts import RankCounts, StrategyCounts
from gsplit.planner.hardware import Hardware
from gsplit.planner.placement import Placement
from gsplit.planner.shapes import LayerWork, PlannedModel, layer_work

__all__ = ["StageSeconds", "StepEstimate", "estimate_step"]

_FLOAT_BYTES = 4
_ID_BYTES = 8
_OPTIMIZER_PASSES = 10  # over every weight: Adam reads and writes weight, gradient and two moments


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of each stage of a step."""

    sample: float
    split: float
    exchange_ids: float
    load: float
    exchange_features: float
    shuffle: float
    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of all stages."""
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """The seconds by name of the stage, in the order of a step."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The estimate of a step under one strategy.

    ``stages`` and ``wall_s`` are wall time. ``ranks`` is the work of every rank and ``cpu_s`` their sum, without waits.
    ``bytes_sent``: of the rank that sends the most. ``imbalance``: the work of the busiest rank over the mean.
    """

    counts: StrategyCounts
    stages: StageSeconds
    ranks: tuple[StageSeconds, ...]
    wall_s: float
    cpu_s: float
    bytes_sent: float
    imbalance: float


def estimate_step(
    counts: StrategyCounts,
    shape: PlannedModel,
    hardware: Hardware,
    placement: Placement,
    *,
    threads: int | None = None,
    hosts: int = 1,
    share_between: float | None = None,
) -> StepEstimate:
    """Estimate one step. ``threads``: of each rank; by default what the launcher sets. ``hosts``: with equal ranks.

    ``share_between``: the share of the rows exchanged in a replica that go to other hosts; by default, all peers are
    sent as many.
    """
    num_ranks = len(counts.ranks)
    if share_between is None:
        share_between = _share_between(num_ranks, counts.replicas, hosts)
    machine = _Machine(hardware, num_ranks, threads, share_between, hosts)
    levels = counts.exchanged_levels
    ranks = tuple(_estimate_rank(rank, counts, shape, machine, placement) for rank in counts.ranks)
    waits = _latencies(levels, shape, hardware.latency(num_ranks), exchanges_inputs=counts.exchanges_inputs)
    if hardware.cores is not None:  # between processes of a host, the latency of a collective is CPU work
        ranks = tuple(StageSeconds(**{name: rank.by_name()[name] + waits[name] for name in waits}) for rank in ranks)
        waits = dict.fromkeys(waits, 0.0)
    waits["load"] += _disk_wait(hardware, placement)
    by_stage = {name: hardware.wall([rank.by_name()[name] for rank in ranks]) + wait for name, wait in waits.items()}
    stages = StageSeconds(**by_stage)
    totals = [rank.total for rank in ranks]
    if bool(levels) and num_ranks > 1:
        wall_s = _overlap(stages, hardware, placement)
    elif hardware.cores is None:
        waited = [StageSeconds(**{name: rank.by_name()[name] + waits[name] for name in waits}) for rank in ranks]
        wall_s = max(_overlap(rank, hardware, placement) for rank in waited)
    else:
        wall_s = hardware.wall(totals) + sum(waits.values())
    return StepEstimate(
        counts=counts,
        stages=stages,
        ranks=ranks,
        wall_s=wall_s,
        cpu_s=sum(totals),
        bytes_sent=max(_bytes_sent(rank, shape, num_ranks) for rank in counts.ranks),
        imbalance=max(totals) * num_ranks / sum(totals),
    )


def _overlap(stages: StageSeconds, hardware: Hardware, placement: Placement) -> float:
    """Seconds of a step whose mini-batch was made ahead, in several threads, while the one before was trained.

    On the host, making and training share the cores, so nothing is saved.
    """
    if hardware.cores is not None or not placement.prefetch:
        return stages.total
    drawn = stages.sample + stages.split + stages.exchange_ids
    brought = stages.load + stages.exchange_features
    threads = min(placement.sampling_threads, placement.prefetch)
    return max(drawn / threads + brought, stages.total - drawn - brought)


def _share_between(num_ranks: int, replicas: int, hosts: int) -> float:
    """The share of the rows exchanged in a replica that go to other hosts, if all peers are sent as many.

    >>> _share_between(8, 1, 2), _share_between(8, 2, 2), _share_between(8, 1, 1)
    (0.5714285714285714, 0.0, 0.0)
    """
    peers = num_ranks // replicas - 1
    near = num_ranks // hosts - 1
    return max(0, peers - near) / max(1, peers)


def _latencies(
    levels: tuple[int, ...], shape: PlannedModel, latency: float, *, exchanges_inputs: bool
) -> dict[str, float]:
    """The latency of the collectives of every stage, without the time to transfer data."""
    hidden = sum(1 for level in levels if level)
    return {
        "sample": 0.0,
        "split": 0.0,
        "exchange_ids": 2 * latency * len(levels),  # counts, then ids
        "load": 0.0,
        "exchange_features": latency if 0 in levels and exchanges_inputs else 0.0,
        "shuffle": latency * hidden,
        "forward": 0.0,
        "backward": latency * (hidden + shape.num_layers),  # gradients of rows; about one bucket of weights per layer
        "optimizer": 0.0,
    }


class _Machine:
    """Hardware that a number of ranks run on."""

    def __init__(
        self, hardware: Hardware, num_ranks: int, threads: int | None, share_between: float, hosts: int
    ) -> None:
        self.hardware = hardware
        self.num_ranks = num_ranks
        self._share_between = share_between
        self._hosts = hosts
        self._threads = threads or hardware.threads(num_ranks)

    def compute(self, work: LayerWork) -> float:
        """Seconds of one pass through a layer. Attention on the host uses one thread."""
        hardware = self.hardware
        gain = 1.0 + hardware.thread_gain * (self._threads - 1)
        reach = hardware.reach(work.reach_bytes)
        shared = work.flops / hardware.flops_per_s + work.row_bytes / hardware.row_bytes_per_s
        shared += work.aggregate_bytes / (hardware.aggregate_bytes_per_s * reach)
        return shared / gain + work.attention_values / (hardware.attention_values_per_s * sqrt(reach))

    def exchange(self, rows_sent: float, rows_received: float, row_bytes: float) -> float:
        """Seconds of one exchange of rows: sent rows are gathered, received rows are copied to their places."""
        if self.num_ranks == 1:
            return 0.0
        num_bytes = (rows_sent + rows_received) / 2 * row_bytes
        between = self._share_between * num_bytes
        # the two links work at the same time
        return max(
            (num_bytes - between) / self.hardware.exchange_bytes_per_s, between / self.hardware.between_bytes_per_s
        )

    def reduce(self, num_bytes: float) -> float:
        """Seconds of an all-reduce in a ring, which is as fast as its slowest link."""
        rate = self.hardware.reduce_bytes_per_s
        return num_bytes / (rate if self._hosts == 1 else min(rate, self.hardware.between_bytes_per_s))


def _estimate_rank(
    rank: RankCounts, counts: StrategyCounts, shape: PlannedModel, machine: _Machine, placement: Placement
) -> StageSeconds:
    """Seconds of the work of one rank."""
    hardware = machine.hardware
    levels = counts.exchanged_levels
    forward, backward = _compute(rank, shape, machine)
    fixed = hardware.attention_step_s if shape.attends else hardware.step_s
    shuffle = sum(_shuffle(rank, level, shape, machine) for level in levels if 0 < level < shape.num_layers)
    shuffle += machine.exchange(rank.endpoints_sent, rank.endpoints_received, _FLOAT_BYTES * shape.num_classes)
    edges_per_s = hardware.sample_edges_per_s if placement.near_graph else hardware.far_sample_edges_per_s
    if placement.host_samples:
        edges_per_s = hardware.host_sample_edges_per_s
    ids = rank.ids_sent + rank.ids_received
    return StageSeconds(
        sample=rank.edges_drawn / edges_per_s + hardware.sample_s,
        split=ids / hardware.split_ids_per_s + (hardware.split_s if levels and machine.num_ranks > 1 else 0.0),
        exchange_ids=machine.exchange(rank.ids_sent, rank.ids_received, _ID_BYTES),
        load=_load(rank, hardware, placement),
        exchange_features=_exchange_features(rank, counts, shape, machine) if 0 in levels else 0.0,
        shuffle=shuffle,
        forward=forward + fixed / 3,
        backward=backward + shuffle + _gradients(shape, machine) + fixed * 2 / 3,
        optimizer=_OPTIMIZER_PASSES * _FLOAT_BYTES * shape.num_parameters / hardware.row_bytes_per_s
        + hardware.optimizer_s,
    )


def _compute(rank: RankCounts, shape: PlannedModel, machine: _Machine) -> tuple[float, float]:
    """Seconds of the forward pass and of the backward pass through all layers."""
    forward = 0.0
    backward = 0.0
    for layer in range(shape.num_layers):
        for edges, destinations, sources, source_type in _relations(rank, shape, layer):
            there, back = layer_work(
                shape, layer, edges=edges, destinations=destinations, sources=sources, source_type=source_type
            )
            forward += machine.compute(there)
            backward += machine.compute(back)
    return forward, backward


def _relations(rank: RankCounts, shape: PlannedModel, layer: int) -> Iterator[tuple[float, float, float, int]]:
    """Edges, destinations, sources and source type of every relation at a layer; of the whole layer without types.

    Relations between types without input rows are not computed.
    """
    if rank.types is None or shape.types is None:
        yield rank.edges[layer], rank.destinations[layer], rank.sources[layer], 0
        return
    for relation, (src, dst) in enumerate(shape.types.ends):
        if layer or (shape.types.widths[src] and shape.types.widths[dst]):
            destinations = rank.types.destinations[layer][dst]
            yield rank.types.edges[layer][relation], destinations, rank.types.sources[layer][src], src


def _total(rows: Sequence[float], sizes: Sequence[float]) -> float:
    """Rows of all types, each times the size of its type."""
    return sum(count * size for count, size in zip(rows, sizes, strict=True))


def _exchange_features(rank: RankCounts, counts: StrategyCounts, shape: PlannedModel, machine: _Machine) -> float:
    """Seconds to exchange input rows. ``data_cached`` also copies a rank's own rows; a split loads them in place."""
    if not counts.exchanges_inputs:
        return 0.0
    if counts.spec.split_layers == 0:
        return _shuffle(rank, 0, shape, machine)
    inputs = rank.inputs
    sent = _total(inputs.sent, shape.input_widths)
    received = _total(inputs.received, shape.input_widths)
    return machine.exchange(sent, received, _FLOAT_BYTES)


def _shuffle(rank: RankCounts, level: int, shape: PlannedModel, machine: _Machine) -> float:
    """Seconds to exchange the rows of one layer in one direction. Own rows are copied into the mixed tensor too."""
    if machine.num_ranks == 1:
        return 0.0
    if level:
        width = shape.widths[level]
        sent = rank.rows_sent[level] * width
        received = rank.rows_received[level] * width
        mixed = rank.sources[level] * width
    else:
        sent, received, mixed = (_total(rows, shape.input_widths) for rows in rank.inputs[1:])
    own = max(0.0, mixed - received)
    return machine.exchange(sent, received, _FLOAT_BYTES) + 2 * own * _FLOAT_BYTES / machine.hardware.row_bytes_per_s


def _load(rank: RankCounts, hardware: Hardware, placement: Placement) -> float:
    """Seconds to read rows from the cache and from memory. Rows on disk are copied from the kernel's page cache.

    Rows in place are counted as if they were copied, which a model does whose first layer needs a tensor of them.
    """
    num_bytes = _total(rank.inputs.loaded, placement.row_bytes)
    cost = num_bytes + rank.rows_loaded * hardware.row_overhead_bytes
    missed = 1.0 - placement.hit_rate
    memory = hardware.load_bytes_per_s * hardware.reach(num_bytes)
    near = placement.hit_rate / hardware.cache_bytes_per_s
    return cost * (near + missed / memory) + hardware.load_s * missed


def _disk_wait(hardware: Hardware, placement: Placement) -> float:
    """Seconds that all ranks wait for the disk, which reads each page once."""
    if placement.disk is None:
        return 0.0
    disk = placement.disk.reads / hardware.disk_reads_per_s + placement.disk.num_bytes / hardware.disk_bytes_per_s
    return disk * (1.0 - placement.disk_hit_rate)


def _gradients(shape: PlannedModel, machine: _Machine) -> float:
    """Seconds to average gradients."""
    return machine.reduce(_gradient_bytes(shape, machine.num_ranks))


def _gradient_bytes(shape: PlannedModel, num_ranks: int) -> float:
    """Bytes that a ring all-reduce of all gradients sends from each rank."""
    return 2 * (num_ranks - 1) / num_ranks * _FLOAT_BYTES * shape.num_parameters


def _bytes_sent(rank: RankCounts, shape: PlannedModel, num_ranks: int) -> float:
    """Bytes of ids, of rows and their gradients, and of the gradients of weights."""
    rows = _total(rank.inputs.sent, shape.input_widths) * _FLOAT_BYTES
    for level in range(1, shape.num_layers):
        rows += (rank.rows_sent[level] + rank.rows_received[level]) * _FLOAT_BYTES * shape.widths[level]
    rows += (rank.endpoints_sent + rank.endpoints_received) * _FLOAT_BYTES * shape.num_classes
    return rows + rank.ids_sent * _ID_BYTES + _gradient_bytes(shape, num_ranks)
