"""Which strategy to use: enumerate what can be run, estimate each, rank them, say why the first is first.

Candidates are every strategy with every number of replicas that divides the ranks, and one process alone. Their steps
are counted on the store's own mini-batches; seconds come from ``estimate`` for a machine's constants.
"""

from dataclasses import dataclass, replace

from gsplit.errors import InputError, explain
from gsplit.feature_tiers import cached_order, hotness_of, stored_row_bytes
from gsplit.features.cache import expected_hit_rate
from gsplit.ownership import Ownership, own_equally, own_parts
from gsplit.partitioning.presample import Workload
from gsplit.planner.counts import StrategyCounts, count_strategies
from gsplit.planner.disk_reads import DiskReads, count_reads
from gsplit.planner.estimate import Placement, StepEstimate, estimate_step
from gsplit.planner.hardware import Hardware
from gsplit.planner.memory import GraphSize, RankBytes, rank_bytes
from gsplit.planner.reasons import explain_choice
from gsplit.planner.shapes import PlannedModel
from gsplit.progress import Progress, silent
from gsplit.store.reader import Store
from gsplit.strategies.spec import StrategySpec, all_strategies

__all__ = ["Candidate", "Choice", "Plan", "choose", "make_plan"]

_NEAR_GRAPH_SHARE = 0.25
"""Of a device's memory, for the edges; the rest is for rows and activations."""


_FOR_ANY_MODEL = ("split", "data_cached", "data_cached(strided)", "data", "data(owner)")
"""Strategies that refuse no model but one with BatchNorm; that one is refused by all but split."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the step: a strategy on so many ranks in so many replicas."""

    strategy: str
    ranks: int
    replicas: int
    step: StepEstimate
    memory: RankBytes
    fits: bool

    @property
    def name(self) -> str:
        """As a person reads it; x 2: in two replicas."""
        if self.ranks == 1:
            return "one process"
        return self.strategy + (f" x {self.replicas}" if self.replicas > 1 else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """All candidates, the fastest that fits first. ``notes`` are what a reader should know of the figures."""

    hardware: Hardware
    shape: PlannedModel
    candidates: tuple[Candidate, ...]
    reason: str
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        """The first."""
        return self.candidates[0]


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``strategy="auto"`` stands for, and why."""

    strategy: str
    reason: str


def make_plan(
    store: Store,
    workload: Workload,
    shape: PlannedModel,
    hardware: Hardware,
    num_ranks: int,
    *,
    features: tuple[str, ...] = ("x",),
    on_disk: bool = False,
    cache_bytes: int = 0,
    steps: int = 3,
    threads: int | None = None,
    replicas: int | None = None,
    strategies: tuple[str, ...] | None = None,
    progress: Progress = silent,
) -> Plan:
    """``replicas``: only so many; by default every number that divides the ranks. ``strategies``: only these."""
    if len(workload.num_neighbors) != shape.num_layers:
        got = f"{len(workload.num_neighbors)} fanouts and {shape.num_layers} layers"
        raise InputError(explain("plan", "one fanout per layer", got, "give as many"))
    counted = _count_all(store, workload, num_ranks, steps, replicas, strategies, progress)
    size = GraphSize(
        store.num_vertices, store.num_edges, store.graph.indices.itemsize, stored_row_bytes(store, features)
    )
    reads = count_reads(workload, size.row_bytes, steps=min(steps, workload.steps_per_epoch)) if on_disk else None
    candidates = []
    for counts, ownership in counted:
        placement = _place(store, counts.spec, ownership, size, hardware, features, reads, cache_bytes)
        step = estimate_step(counts, shape, hardware, placement, threads=threads)
        memory = rank_bytes(counts, shape, size, ownership, cache_bytes=cache_bytes)
        candidates.append(_candidate(counts, step, memory, hardware))
    ranked = sorted(candidates, key=lambda candidate: (not candidate.fits, candidate.step.wall_s))
    notes = _notes(store, shape, hardware, num_ranks, ranked)
    return Plan(hardware, shape, tuple(ranked), explain_choice([(c.name, c.step) for c in ranked]), notes)


def choose(
    store: Store,
    workload: Workload,
    num_ranks: int,
    hardware: Hardware,
    *,
    replicas: int = 1,
    shape: PlannedModel | None = None,
    features: tuple[str, ...] = ("x",),
    on_disk: bool = False,
    cache_bytes: int = 0,
    strategies: tuple[str, ...] | None = None,
) -> Choice:
    """The strategy for these ranks; call it on one rank and tell the others.

    Without a model: the strategies that run any, for GraphSAGE with 256 hidden features.
    The number of ranks is settled when this is asked, so one process is no candidate; the reason says if it would win.
    """
    if shape is None and strategies is None:
        strategies = _FOR_ANY_MODEL
    given = shape or PlannedModel(
        num_features=max(1, store.num_features), num_classes=max(2, store.num_classes), num_layers=0
    )
    shape = replace(given, num_layers=len(workload.num_neighbors))
    plan = make_plan(
        store,
        workload,
        shape,
        hardware,
        num_ranks,
        features=features,
        on_disk=on_disk,
        cache_bytes=cache_bytes,
        steps=min(2, workload.steps_per_epoch),
        replicas=replicas,
        strategies=strategies,
    )
    best = next(candidate for candidate in plan.candidates if candidate.ranks == num_ranks)
    return Choice(best.strategy, plan.reason)


def _count_all(
    store: Store,
    workload: Workload,
    num_ranks: int,
    steps: int,
    replicas: int | None,
    strategies: tuple[str, ...] | None,
    progress: Progress,
) -> list[tuple[StrategyCounts, Ownership]]:
    """Every candidate's counts, with the ownership of one replica."""
    specs = [
        spec for spec in all_strategies(len(workload.num_neighbors)) if strategies is None or spec.name in strategies
    ]
    steps = min(steps, workload.steps_per_epoch)
    found = []
    numbers = [r for r in range(1, num_ranks + 1) if num_ranks % r == 0] if replicas is None else [replicas]
    for number in numbers:
        ownership = own_parts(store.part_boundaries, num_ranks // number, store.part_loads)
        chosen = [spec.name for spec in specs if number == 1 or spec.split_layers or replicas is not None]
        if ownership.num_ranks == 1 and replicas is None:
            continue  # every rank alone: data parallelism, which is there already
        counts = count_strategies(workload, ownership, chosen, replicas=number, steps=steps, progress=progress)
        found += [(count, ownership) for count in counts]
    alone = own_equally(store.num_vertices, 1)
    found += [(count_strategies(workload, alone, ["split"], steps=steps)[0], alone)]
    return found


def _place(
    store: Store,
    spec: StrategySpec,
    ownership: Ownership,
    size: GraphSize,
    hardware: Hardware,
    features: tuple[str, ...],
    disk: DiskReads | None,
    cache_bytes: int,
) -> Placement:
    """Where rows come from; a cache holds the hottest of the rows that the rank reads."""
    near = hardware.cores is None and size.graph_bytes < _NEAR_GRAPH_SHARE * hardware.memory_bytes
    if not cache_bytes:
        return Placement(size.row_bytes, disk, 0.0, near)
    ranges = [(0, store.num_vertices)]
    if spec.reads_own_rows:
        ranges = [ownership.range_of(rank) for rank in range(ownership.num_ranks)]
    hits = total = 0.0
    for first, stop in ranges:
        heat = hotness_of(store, first, stop)
        reads = float(heat.sum())
        hits += reads * expected_hit_rate(heat, cached_order(store, first, stop, features, cache_bytes))
        total += reads
    return Placement(size.row_bytes, disk, hits / total if total else 0.0, near)


def _candidate(counts: StrategyCounts, step: StepEstimate, memory: RankBytes, hardware: Hardware) -> Candidate:
    """What ranks hold of their own must fit; ranks of a host share its memory."""
    ranks = len(counts.ranks)
    taken = memory.own * (1 if hardware.cores is None else ranks)
    return Candidate(counts.spec.name, ranks, counts.replicas, step, memory, taken <= hardware.memory_bytes)


def _notes(
    store: Store, shape: PlannedModel, hardware: Hardware, num_ranks: int, ranked: list[Candidate]
) -> tuple[str, ...]:
    notes = [shape.note] if shape.note else []
    if hardware.cores is not None and num_ranks > hardware.cores:
        notes.append(
            f"{num_ranks} ranks share {hardware.cores} cores: a step takes their CPU seconds over the cores, not the "
            "slowest rank's"
        )
    if len(store.part_boundaries) == 2 and num_ranks > 1:
        notes.append("the store is not partitioned: ranks own equal ranges and exchange most rows (gsplit partition)")
    if not ranked[0].fits:
        notes.append("nothing fits into memory: take a smaller mini-batch")
    return tuple(notes)
