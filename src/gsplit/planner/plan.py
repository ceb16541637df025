"""The plan: enumerate the ways to run a step, estimate the time of each, rank them, and explain the choice.

A candidate is a strategy with a number of replicas that divides the number of ranks, or a single process. Its step is
counted on mini-batches of the store (``counts``), and its time is computed from the counts and the constants of a
machine (``estimate``). The best candidates can be timed by training steps (``run.trial``), which decide then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from gsplit.errors import InputError, explain
from gsplit.graph.ownership import Ownership, own_equally, own_parts
from gsplit.minibatch.strategy_names import all_strategies
from gsplit.partitioning.forecast import forecast
from gsplit.partitioning.presample import Workload
from gsplit.planner.counts import StrategyCounts, count_strategies
from gsplit.planner.disk import count_reads
from gsplit.planner.estimate import StepEstimate, estimate_step
from gsplit.planner.hardware import Hardware
from gsplit.planner.memory import RankBytes, rank_bytes
from gsplit.planner.placement import DEFAULT_LOADING, GraphSize, Loading, StoredRows, place_rank, rows_by_type
from gsplit.planner.shapes import PlannedModel, PlannedTypes
from gsplit.progress import Progress, silent
from gsplit.store.reader import Store

__all__ = [
    "Candidate",
    "Choice",
    "Plan",
    "Setup",
    "StepTime",
    "choose",
    "explain_choice",
    "explain_times",
    "find_fastest",
    "make_plan",
    "planned_types",
    "rank_timed",
    "shortlist",
]

_FOR_ANY_MODEL = ("split", "data_cached", "data_cached(strided)", "data", "data(owner)")
"""Strategies that run any model without BatchNorm. A model with BatchNorm needs ``split``."""
_LEVEL = 0.05
"""Relative differences below this are not explained."""
_TIE = 0.02
"""Timed candidates that differ by less are equally fast: the planner's order decides, not the noise of the times."""
_NUM_TIMED = 3
"""Candidates of a shortlist."""
_STAGE_WORDS = {
    "sample": "sampling",
    "split": "splitting",
    "exchange_ids": "exchanging ids",
    "load": "loading rows",
    "exchange_features": "exchanging input rows",
    "shuffle": "shuffling hidden rows",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run the step: a strategy on a number of ranks, divided into replicas."""

    strategy: str
    ranks: int
    replicas: int

    @property
    def name(self) -> str:
        """The name for people, such as "split x 2" for two replicas."""
        if self.ranks == 1:
            return "one process"
        return self.strategy + (f" x {self.replicas}" if self.replicas > 1 else "")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Medians over some steps that were timed: wall time of the slowest rank, and CPU time of all ranks together."""

    wall_s: float
    cpu_s: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setup with the estimate of its step, and its time if it was timed."""

    setup: Setup
    step: StepEstimate
    memory: RankBytes
    needed_bytes: float
    """Memory that must be free: of a rank's device, or of the host for all ranks together."""
    fits: bool
    timed: StepTime | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All candidates, the fastest that fits into memory first; timed ones before others.

    ``notes`` are warnings about the numbers.
    """

    hardware: Hardware
    shape: PlannedModel
    candidates: tuple[Candidate, ...]
    reason: str
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        """The fastest candidate that fits, or the fastest if none fits."""
        return self.candidates[0]


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy that ``strategy="auto"`` resolves to, and the reason.

    ``shortlist``: the strategies to time before one is chosen, the best by the planner first.
    """

    strategy: str
    reason: str
    shortlist: tuple[str, ...] = ()


def make_plan(
    store: Store,
    workload: Workload,
    shape: PlannedModel,
    hardware: Hardware,
    num_ranks: int,
    *,
    features: tuple[str, ...] = ("x",),
    loading: Loading = DEFAULT_LOADING,
    hosts: int = 1,
    steps: int = 3,
    threads: int | None = None,
    replicas: int | None = None,
    strategies: tuple[str, ...] | None = None,
    progress: Progress = silent,
) -> Plan:
    """Estimate and rank the candidates.

    ``replicas``: the only number of replicas to consider; by default every number that divides the ranks.
    ``strategies``: the only strategies to consider; by default all. ``features`` of a heterogeneous graph have their
    vertex type before them: "paper/x". ``hosts``: machines that the ranks are on, as many on each.
    """
    if num_ranks % hosts:
        raise InputError(explain("hosts", f"a divisor of {num_ranks} ranks", hosts, "change one of them"))
    if len(workload.num_neighbors) != shape.num_layers:
        got = f"{len(workload.num_neighbors)} fanouts and {shape.num_layers} layers"
        raise InputError(explain("plan", "one fanout per layer", got, "give as many"))
    steps = min(steps, workload.steps_per_epoch)
    rows = StoredRows(store, features)
    counted = _count_all(store, workload, num_ranks, steps, replicas, strategies, rows, progress)
    size = GraphSize(
        num_vertices=store.num_vertices,
        num_edges=store.num_edges,
        edge_bytes=store.graph.indices.itemsize,
        feature_bytes=rows.num_bytes,
    )
    reads = count_reads(workload, rows.row_bytes, steps=steps) if loading.on_disk else None
    candidates = []
    for counts, ownership in counted:
        placement = place_rank(rows, counts.spec, ownership, size, hardware, loading, reads)
        alone = len(counts.ranks) == 1
        near = ownership.num_ranks <= num_ranks // hosts  # the ranks of a replica are on one host
        if near and rows.read_in_place(hardware, loading):
            counts = counts.in_place()
        step = estimate_step(
            counts,
            shape,
            hardware,
            placement,
            threads=threads,
            hosts=1 if alone else hosts,
            share_between=_share_between(store, ownership.num_ranks, num_ranks // hosts),
        )
        memory = rank_bytes(counts, shape, size, ownership, placement)
        candidates.append(_candidate(counts, step, memory, hardware, 1 if alone else hosts))
    ranked = sorted(candidates, key=lambda candidate: (not candidate.fits, candidate.step.wall_s))
    return Plan(
        hardware=hardware,
        shape=shape,
        candidates=tuple(ranked),
        reason=_explain(ranked),
        notes=_notes(store, shape, hardware, num_ranks, ranked),
    )


def choose(
    store: Store,
    workload: Workload,
    num_ranks: int,
    hardware: Hardware,
    *,
    replicas: int = 1,
    shape: PlannedModel | None = None,
    features: tuple[str, ...] = ("x",),
    loading: Loading = DEFAULT_LOADING,
    hosts: int = 1,
    strategies: tuple[str, ...] | None = None,
) -> Choice:
    """Choose the fastest strategy for a given number of ranks. Call it on one rank and send the result to the others.

    Without ``shape``, only strategies that run any model are considered, and the model is GraphSAGE with 256 hidden
    features. The number of ranks is fixed, so a single process is not chosen; the reason mentions it if it is faster.
    """
    if shape is None and strategies is None:
        strategies = _FOR_ANY_MODEL
    given = shape or PlannedModel(
        num_features=max(1, store.num_features),
        num_classes=max(2, store.num_classes),
        num_layers=0,
        types=planned_types(store, features),
    )
    plan = make_plan(
        store,
        workload,
        replace(given, num_layers=len(workload.num_neighbors)),
        hardware,
        num_ranks,
        features=features,
        loading=loading,
        hosts=hosts,
        steps=2,
        replicas=replicas,
        strategies=strategies,
    )
    on_all_ranks = [candidate for candidate in plan.candidates if candidate.setup.ranks == num_ranks]
    timed = shortlist(on_all_ranks, hardware)
    return Choice(on_all_ranks[0].setup.strategy, plan.reason, tuple(candidate.setup.strategy for candidate in timed))


def shortlist(ranked: Sequence[Candidate], hardware: Hardware) -> list[Candidate]:
    """The best candidates that fit into memory at the same time: they are timed in turn."""
    found: list[Candidate] = []
    for candidate in ranked[:_NUM_TIMED]:
        if sum(each.needed_bytes for each in (*found, candidate)) <= hardware.memory_bytes:
            found.append(candidate)
    return found


def find_fastest(times: Mapping[Setup, StepTime]) -> Setup:
    """The first of the setups that are as fast as the fastest, in the order of the planner."""
    least = min(time.wall_s for time in times.values())
    return next(setup for setup, time in times.items() if time.wall_s <= least * (1 + _TIE))


def rank_timed(plan: Plan, times: Mapping[Setup, StepTime]) -> Plan:
    """A plan with the times of some candidates, the fastest of which is the best."""
    fastest = find_fastest(times)
    timed = [replace(candidate, timed=times.get(candidate.setup)) for candidate in plan.candidates]

    def order(candidate: Candidate) -> tuple[bool, float]:
        time = candidate.timed
        return (candidate.setup != fastest, float("inf") if time is None else time.wall_s)

    return replace(
        plan, candidates=tuple(sorted(timed, key=order)), reason=f"{explain_times(times)} Estimated: {plan.reason}"
    )


def explain_times(times: Mapping[Setup, StepTime]) -> str:
    """The fastest setup, and how long the others took."""
    fastest = find_fastest(times)
    found = times[fastest]
    others = [f"{setup.name} {time.wall_s:.3g} s" for setup, time in times.items() if setup != fastest]
    timed = "one timed step" if found.num_steps == 1 else f"the median of {found.num_steps} timed steps"
    text = f"{fastest.name} is fastest: {found.wall_s:.3g} s per step, {timed}"
    return f"{text} ({', '.join(others)})." if others else f"{text}."


def planned_types(store: Store, features: Sequence[str]) -> PlannedTypes | None:
    """The types of a heterogeneous graph, with the widths of features such as "paper/x"; None without types."""
    if store.types is None:
        return None
    widths = [
        sum(prod(store.shape(f"features/{found}")[1:]) for found in names)
        for names in rows_by_type(store.types, features).values()
    ]
    ends = [(int(src), int(dst)) for src, dst in store.types.ends().T]
    return PlannedTypes(tuple(widths), tuple(ends))


def _count_all(
    store: Store,
    workload: Workload,
    num_ranks: int,
    steps: int,
    replicas: int | None,
    strategies: tuple[str, ...] | None,
    rows: StoredRows,
    progress: Progress,
) -> list[tuple[StrategyCounts, Ownership]]:
    """The counts of every candidate, with the ownership within one replica."""
    specs = all_strategies(len(workload.num_neighbors))
    if strategies is not None:
        specs = [spec for spec in specs if spec.name in strategies]
    found = []
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    for number in divisors if replicas is None else [replicas]:
        ownership = own_parts(store.part_boundaries, num_ranks // number, store.part_loads)
        chosen = [spec.name for spec in specs if number == 1 or spec.split_layers or replicas is not None]
        if ownership.num_ranks == 1 and replicas is None:
            continue  # one rank per replica is data parallelism, which is a candidate already
        counts = count_strategies(
            workload, ownership, chosen, replicas=number, steps=steps, featured=rows.featured, progress=progress
        )
        found += [(count, ownership) for count in counts]
    alone = own_equally(store.num_vertices, 1)
    found += [(count_strategies(workload, alone, ["split"], steps=steps, featured=rows.featured)[0], alone)]
    return found


def _share_between(store: Store, num_splits: int, per_host: int) -> float | None:
    """The share of the edges between the ranks of a replica that are between hosts; None if it was not counted.

    Ranks own consecutive parts, ordered so that those of a host have more edges between each other.
    """
    statistics = store.manifest.part_statistics
    if statistics is None or num_splits <= per_host or num_splits % per_host:
        return None
    ranks, hosts = (
        forecast(statistics, store.part_boundaries, number).cross_edge_share
        for number in (num_splits, num_splits // per_host)
    )
    return min(1.0, hosts / ranks) if ranks else 0.0


def _candidate(
    counts: StrategyCounts, step: StepEstimate, memory: RankBytes, hardware: Hardware, hosts: int
) -> Candidate:
    """The ranks' own memory must fit. The ranks of a host share its memory."""
    num_ranks = len(counts.ranks)
    needed_bytes = memory.own * (1 if hardware.cores is None else num_ranks // hosts)
    return Candidate(
        setup=Setup(counts.spec.name, num_ranks, counts.replicas),
        step=step,
        memory=memory,
        needed_bytes=needed_bytes,
        fits=needed_bytes <= hardware.memory_bytes,
    )


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


def _explain(ranked: Sequence[Candidate]) -> str:
    """Compare the candidates that fit into memory, and name the others."""
    fitting = [candidate for candidate in ranked if candidate.fits]
    text = explain_choice([(candidate.setup.name, candidate.step) for candidate in fitting or ranked])
    others = [candidate.setup.name for candidate in ranked if not candidate.fits]
    return f"{text} Not enough memory for {', '.join(others)}." if fitting and others else text


def explain_choice(ranked: Sequence[tuple[str, StepEstimate]]) -> str:
    """Compare the fastest candidate with the next one and with the usual alternatives, in two or three sentences."""
    name, best = ranked[0]
    others = ranked[1:]
    text = f"{name} is fastest: {best.wall_s:.3g} s per step."
    if not others:
        return text
    second_name, second = others[0]
    if second.wall_s < best.wall_s * (1 + _LEVEL):
        text += f" {second_name} is level with it ({second.wall_s:.3g} s)."
    rivals = [found for found in others if found[0] in ("data", "split", "one process") and found[0] != name]
    for rival_name, rival in rivals[:2] or [(second_name, second)]:
        text += " " + _compare(name, best, rival_name, rival)
    if name == "one process":
        text += " More ranks do not pay here: use one process."
    return text


def _compare(name: str, best: StepEstimate, rival_name: str, rival: StepEstimate) -> str:
    """The stages in which two candidates differ most: what the faster one saves, then what it pays."""
    ours = best.stages.by_name()
    theirs = rival.stages.by_name()
    saved = {stage: theirs[stage] - ours[stage] for stage in ours}
    gains = sorted((stage for stage in saved if saved[stage] > 0), key=lambda stage: -saved[stage])[:2]
    costs = sorted((stage for stage in saved if saved[stage] < 0), key=lambda stage: saved[stage])[:1]
    text = f"{rival_name} takes {rival.wall_s:.3g} s ({rival.wall_s / best.wall_s:.2f} times as long)"
    if gains:
        text += ": " + " and ".join(f"{saved[stage]:.2g} s more for {_STAGE_WORDS[stage]}" for stage in gains)
    row_ratio = rival.counts.rows_loaded / max(best.counts.rows_loaded, 1)
    edge_ratio = rival.counts.num_edges / max(best.counts.num_edges, 1)
    if row_ratio > 1 + _LEVEL or edge_ratio > 1 + _LEVEL:
        text += f" ({row_ratio:.2f} times the input rows, {edge_ratio:.2f} the edges)"
    if costs and -saved[costs[0]] > _LEVEL * best.wall_s:
        text += f", though {name} pays {-saved[costs[0]]:.2g} s for {_STAGE_WORDS[costs[0]]}"
    return text + "."
