"""Seconds of every stage of a step, from counts, a model's shape and a machine's constants.

Stages have the names and boundaries of telemetry: ``shuffle`` is that of forward; ``backward`` has the shuffle back and
the averaging of gradients in it. Formulas are in docs/planner.md. A rank's seconds are its own work; the latency of
collectives is added once, or, on a host, is work of every rank. A strategy in which ranks wait for each other at every
exchange takes the slowest rank of every stage, one that meets only at the gradients takes the slowest rank of the step.
"""

from dataclasses import dataclass, fields
from math import sqrt

from gsplit.planner.counts import RankCounts, StrategyCounts
from gsplit.planner.disk_reads import DiskReads
from gsplit.planner.hardware import Hardware
from gsplit.planner.shapes import LayerWork, PlannedModel, layer_work

__all__ = ["Placement", "StageSeconds", "StepEstimate", "estimate_step"]

_FLOAT_BYTES, _ID_BYTES = 4, 8
_OPTIMIZER_PASSES = 10  # of every weight: Adam reads and writes weight, gradient and two moments


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a step finds its rows. ``hit_rate``: share of them that the cache answers; the rest is in the host's
    memory, or, with ``disk``, read from there. ``near_graph``: edges are in the memory of the rank's device.
    ``row_bytes``: of a stored row.
    """

    row_bytes: float
    disk: DiskReads | None = None
    hit_rate: float = 0.0
    near_graph: bool = False


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a step by stage."""

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
        """Of all stages."""
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """The stages in the order of a step."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One strategy's step. ``wall_s``: by the clock; ``cpu_s``: all ranks' own seconds, waits apart.

    ``stages``: what each stage takes by the clock, ``ranks``: every rank's own seconds. ``bytes_sent``: the most that
    any rank sends to others in a step. ``imbalance``: largest over mean of the ranks' own seconds.
    """

    counts: StrategyCounts
    stages: StageSeconds
    ranks: tuple[StageSeconds, ...]
    wall_s: float
    cpu_s: float
    bytes_sent: float
    imbalance: float


def estimate_step(
    counts: StrategyCounts, shape: PlannedModel, hardware: Hardware, placement: Placement, *, threads: int | None = None
) -> StepEstimate:
    """``threads`` of each rank; by default what the launcher gives it."""
    pace = _Pace(hardware, len(counts.ranks), threads)
    ranks = tuple(_estimate_rank(rank, counts, shape, pace, placement) for rank in counts.ranks)
    waits = _latencies(counts.spec.exchanged_levels, shape, pace.latency)
    if hardware.cores is not None:  # between processes of a host a collective's latency is work of its cores
        ranks = tuple(StageSeconds(**{name: rank.by_name()[name] + waits[name] for name in waits}) for rank in ranks)
        waits = dict.fromkeys(waits, 0.0)
    waits["load"] += _disk_wait(hardware, placement)
    by_stage = {name: pace.wall([rank.by_name()[name] for rank in ranks]) + wait for name, wait in waits.items()}
    stages, totals = StageSeconds(**by_stage), [rank.total for rank in ranks]
    meets = bool(counts.spec.exchanged_levels) and len(ranks) > 1
    wall = stages.total if meets else pace.wall(totals) + sum(waits.values())
    sent = max(_bytes_sent(rank, counts, shape, placement, len(ranks)) for rank in counts.ranks)
    return StepEstimate(counts, stages, ranks, wall, sum(totals), sent, max(totals) * len(totals) / sum(totals))


def _latencies(levels: tuple[int, ...], shape: PlannedModel, latency: float) -> dict[str, float]:
    """What collectives take however little they move, by stage: no rank works in that time."""
    hidden = sum(1 for level in levels if level)
    return {
        "sample": 0.0,
        "split": 0.0,
        "exchange_ids": 2 * latency * len(levels),  # counts, then ids
        "load": 0.0,
        "exchange_features": latency if 0 in levels else 0.0,
        "shuffle": latency * hidden,
        "forward": 0.0,
        "backward": latency * (hidden + shape.num_layers),  # rows back, and gradients, about one bucket per layer
        "optimizer": 0.0,
    }


class _Pace:
    """A machine with a number of ranks on it."""

    def __init__(self, hardware: Hardware, num_ranks: int, threads: int | None) -> None:
        self.hardware, self.num_ranks = hardware, num_ranks
        self._threads = threads or hardware.threads(num_ranks)
        self.latency = hardware.latency(num_ranks)

    def wall(self, seconds: list[float]) -> float:
        return self.hardware.wall(seconds)

    def compute(self, work: LayerWork) -> float:
        """One pass through a layer. Attention on the host is one thread's."""
        hardware = self.hardware
        gain, reach = 1.0 + hardware.thread_gain * (self._threads - 1), hardware.reach(work.reach_bytes)
        shared = work.flops / hardware.flops_per_s + work.row_bytes / hardware.row_bytes_per_s
        shared += work.aggregate_bytes / (hardware.aggregate_bytes_per_s * reach)
        return shared / gain + work.attention_values / (hardware.attention_values_per_s * sqrt(reach))

    def exchange(self, rows_sent: float, rows_received: float, row_bytes: float) -> float:
        """One exchange of rows; what leaves is gathered, what arrives is put in place."""
        if self.num_ranks == 1:
            return 0.0
        return (rows_sent + rows_received) / 2 * row_bytes / self.hardware.exchange_bytes_per_s


def _estimate_rank(
    rank: RankCounts, counts: StrategyCounts, shape: PlannedModel, pace: _Pace, placement: Placement
) -> StageSeconds:
    hardware, levels = pace.hardware, counts.spec.exchanged_levels
    forward, backward = _compute(rank, counts, shape, pace)
    fixed = hardware.attention_step_s if shape.attends else hardware.step_s
    fixed *= (shape.num_layers - 1 + counts.bottom_passes) / shape.num_layers
    shuffle = sum(_shuffle(rank, level, shape, pace) for level in levels if level)
    edges_per_s = hardware.sample_edges_per_s if placement.near_graph else hardware.far_sample_edges_per_s
    ids = rank.ids_sent + rank.ids_received
    return StageSeconds(
        sample=rank.edges_drawn / edges_per_s + hardware.sample_s,
        split=ids / hardware.split_ids_per_s + (hardware.split_s if levels and pace.num_ranks > 1 else 0.0),
        exchange_ids=ids / 2 * _ID_BYTES / hardware.exchange_bytes_per_s if pace.num_ranks > 1 else 0.0,
        load=_load(rank.rows_loaded, placement.row_bytes / counts.slices, hardware, placement),
        exchange_features=_exchange_features(rank, counts, shape, pace) if 0 in levels else 0.0,
        shuffle=shuffle,
        forward=forward + fixed / 3,
        backward=backward + shuffle + _gradients(shape, pace) + fixed * 2 / 3,
        optimizer=_OPTIMIZER_PASSES * _FLOAT_BYTES * shape.num_parameters / hardware.row_bytes_per_s
        + hardware.optimizer_s,
    )


def _compute(rank: RankCounts, counts: StrategyCounts, shape: PlannedModel, pace: _Pace) -> tuple[float, float]:
    """Forward and backward through all layers."""
    forward = backward = 0.0
    for layer in range(shape.num_layers):
        slices = counts.slices if layer == 0 else 1
        amounts = (rank.edges[layer], rank.destinations[layer], rank.sources[layer])
        there, back = layer_work(shape, layer, *amounts, slices=slices)
        forward, backward = forward + pace.compute(there), backward + pace.compute(back)
    return forward, backward


def _exchange_features(rank: RankCounts, counts: StrategyCounts, shape: PlannedModel, pace: _Pace) -> float:
    """Input rows. A split loads own rows to their place; those of a micro-batch are copied from what was loaded."""
    if counts.spec.split_layers == 0:
        return _shuffle(rank, 0, shape, pace)
    return pace.exchange(rank.rows_sent[0], rank.rows_received[0], _FLOAT_BYTES * shape.num_features)


def _shuffle(rank: RankCounts, level: int, shape: PlannedModel, pace: _Pace) -> float:
    """Rows of one layer, one way. Own rows are copied into the mixed tensor too."""
    if pace.num_ranks == 1:
        return 0.0
    row_bytes = _FLOAT_BYTES * shape.widths[level]
    own = max(0.0, rank.sources[level] - rank.rows_received[level])
    return (
        pace.exchange(rank.rows_sent[level], rank.rows_received[level], row_bytes)
        + 2 * own * row_bytes / pace.hardware.row_bytes_per_s
    )


def _load(rows: float, row_bytes: float, hardware: Hardware, placement: Placement) -> float:
    """Rows from the cache, and the others from memory; those of a disk are copied out of the kernel's page cache."""
    cost, missed = row_bytes + hardware.row_overhead_bytes, 1.0 - placement.hit_rate
    memory = hardware.load_bytes_per_s * hardware.reach(rows * row_bytes)
    near = placement.hit_rate / hardware.cache_bytes_per_s
    return rows * cost * (near + missed / memory) + hardware.load_s * missed


def _disk_wait(hardware: Hardware, placement: Placement) -> float:
    """What all ranks wait for the one disk, which brings every page that they need once."""
    if placement.disk is None:
        return 0.0
    disk = placement.disk.reads / hardware.disk_reads_per_s + placement.disk.num_bytes / hardware.disk_bytes_per_s
    return disk * (1.0 - placement.hit_rate)


def _gradients(shape: PlannedModel, pace: _Pace) -> float:
    """The all-reduce; a ring sends every byte twice, but for one rank's share."""
    if pace.num_ranks == 1:
        return 0.0
    moved = 2 * (pace.num_ranks - 1) / pace.num_ranks * _FLOAT_BYTES * shape.num_parameters
    return moved / pace.hardware.reduce_bytes_per_s


def _bytes_sent(
    rank: RankCounts, counts: StrategyCounts, shape: PlannedModel, placement: Placement, num_ranks: int
) -> float:
    """Ids, rows and their gradients, and the weights' gradients."""
    rows = rank.rows_sent[0] * _FLOAT_BYTES * shape.num_features
    for level in range(1, shape.num_layers):
        rows += (rank.rows_sent[level] + rank.rows_received[level]) * _FLOAT_BYTES * shape.widths[level]
    gradients = 2 * (num_ranks - 1) / num_ranks * _FLOAT_BYTES * shape.num_parameters
    return rows + rank.ids_sent * _ID_BYTES + gradients
