"""What follows from the records: speed-ups over peers, redundancy, and which strategy to use. Numbers only.

Records of one scenario may be compared: they differ in the system alone. Everything that decides how much work a step
is belongs to the scenario: graph, model, ranks, batch, width, fanout, and the threads of each rank. The allocator
belongs to the system: it is a way to run it. Another sampler makes another step, which is less work: such a system is
compared with split, but is not the best of our strategies.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from gsplit_bench.report.documents import Count, TrainRecord
from gsplit_bench.train_study import PEERS, parse_system

__all__ = [
    "Advice",
    "Clock",
    "Redundancy",
    "Rivalry",
    "Scenario",
    "Speedup",
    "advise",
    "compare_with_peers",
    "describe",
    "find_redundancy",
    "geometric_mean",
    "group",
    "is_peer",
    "is_strategy",
    "seconds",
    "split_against",
    "system_label",
    "varying",
]

Clock = Literal["wall", "cpu"]


@dataclass(frozen=True, order=True)
class Scenario:
    """What systems are compared on."""

    graph: str
    model: str
    ranks: int
    replicas: int
    batch_size: int
    hidden: int
    fanout: tuple[int, ...]
    features: str
    partition: str
    threads: int = 1


def _scenario_of(record: TrainRecord) -> Scenario:
    return Scenario(
        record.graph,
        record.model,
        record.ranks,
        record.replicas,
        record.batch_size,
        record.hidden,
        tuple(record.fanout),
        record.features,
        record.partition or "",
        record.threads,
    )


def is_peer(record: TrainRecord) -> bool:
    """Whether a record is of somebody else's system."""
    return record.system in PEERS


def is_strategy(record: TrainRecord) -> bool:
    """Whether a record is of one of our strategies on the sample that all of them draw."""
    return not is_peer(record) and parse_system(record.system)[1] == "uniform"


def system_label(record: TrainRecord) -> str:
    """The system as pictures and tables name it."""
    return record.system if record.allocator == "tuned" else f"{record.system}, {record.allocator} allocator"


def group(records: Iterable[TrainRecord]) -> dict[Scenario, dict[str, TrainRecord]]:
    """Records by scenario, few layers first, and system; of two of the same, the later one counts."""
    found: dict[Scenario, dict[str, TrainRecord]] = {}
    for record in records:
        found.setdefault(_scenario_of(record), {})[system_label(record)] = record
    in_order = sorted(found, key=lambda each: (each.graph, each.model, each.ranks, len(each.fanout), each))
    return {scenario: found[scenario] for scenario in in_order}


def varying(scenarios: Sequence[Scenario]) -> list[str]:
    """Names of what is not the same in all scenarios, besides graph, model and ranks."""
    names = [field.name for field in fields(Scenario)[3:]]
    return [name for name in names if len({getattr(scenario, name) for scenario in scenarios}) > 1]


def describe(scenario: Scenario, names: Sequence[str], *, ranks: bool = True) -> str:
    """A scenario within its graph and model: its ranks, and what varies.

    >>> describe(Scenario("arxiv", "sage", 4, 1, 1024, 256, (15, 15), "disk", "gsplit"), ["batch_size", "features"])
    '4 ranks, batch 1024, disk'
    """
    parts = [f"{scenario.ranks} rank{'s' if scenario.ranks > 1 else ''}"] if ranks else []
    words = {name: f"{name} " for name in ("threads", "replicas", "hidden", "fanout")} | {"batch_size": "batch "}
    for name in names:
        value = getattr(scenario, name)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if text:
            parts.append(f"{words.get(name, '')}{text}")
    return ", ".join(parts)


def seconds(record: TrainRecord, clock: Clock) -> float:
    """The median of a record: wall time of the slowest rank, or CPU time of all ranks."""
    return record.wall_s.median if clock == "wall" else record.cpu_s.median


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios.

    >>> geometric_mean([2.0, 8.0])
    4.0
    """
    return math.exp(math.fsum(map(math.log, values)) / len(values))


@dataclass(frozen=True)
class Speedup:
    """A peer's seconds over those of one of our strategies, which is ``system``."""

    scenario: Scenario
    peer: str
    clock: Clock
    system: str
    ratio: float


def compare_with_peers(records: Iterable[TrainRecord], strategy: str | None = None) -> list[Speedup]:
    """The best of our strategies, or a certain one, against every peer, wherever both were measured, by either clock."""
    clocks: tuple[Clock, ...] = ("wall", "cpu")
    found = []
    for scenario, systems in group(records).items():
        ours = [each for each in systems.values() if is_strategy(each) and strategy in (None, each.system)]
        for label, peer in systems.items():
            if not ours or not is_peer(peer):
                continue
            for clock in clocks:
                best = min(ours, key=lambda record: seconds(record, clock))
                if seconds(best, clock) > 0:
                    ratio = seconds(peer, clock) / seconds(best, clock)
                    found.append(Speedup(scenario, label, clock, system_label(best), ratio))
    return found


@dataclass(frozen=True, order=True)
class Redundancy:
    """What data parallelism computes and loads in a step, over what split parallelism does."""

    graph: str
    batch_size: int
    fanout: tuple[int, ...]
    ranks: int
    edges: float
    rows: float


def find_redundancy(records: Iterable[TrainRecord], counts: Iterable[Count]) -> list[Redundancy]:
    """From counts, and from measured steps where nothing was counted."""
    amounts: dict[tuple[str, int, tuple[int, ...], int], dict[str, tuple[float, float]]] = {}
    for record in records:
        key = (record.graph, record.batch_size, tuple(record.fanout), record.ranks)
        if record.replicas == 1:
            amounts.setdefault(key, {})[record.system] = (record.edges, record.rows_loaded)
    for count in counts:
        key = (count.graph, count.batch_size, tuple(count.fanout), count.ranks)
        amounts.setdefault(key, {})[count.strategy] = (sum(count.edges_per_rank), sum(count.rows_loaded_per_rank))
    found = []
    for key, systems in amounts.items():
        if "data" in systems and "split" in systems and min(systems["split"]) > 0:
            (edges, rows), (split_edges, split_rows) = systems["data"], systems["split"]
            found.append(Redundancy(*key, edges / split_edges, rows / split_rows))
    return sorted(found)


@dataclass(frozen=True)
class Rivalry:
    """A rival's seconds over those of ``split``, and the redundancy that split avoids there, if ``data`` was measured."""

    scenario: Scenario
    rival: str
    redundancy: float | None
    wall: float
    cpu: float


def split_against(records: Iterable[TrainRecord]) -> list[Rivalry]:
    """``split`` against our other strategies and samplers, on the same kernels and several ranks."""
    found = []
    for scenario, systems in group(records).items():
        split, data = systems.get("split"), systems.get("data")
        if scenario.ranks == 1 or split is None or min(seconds(split, "wall"), seconds(split, "cpu")) == 0:
            continue
        redundancy = data.edges / split.edges if data is not None and split.edges else None
        for rival, other in systems.items():
            if other is not split and not is_peer(other):
                wall, cpu = (seconds(other, clock) / seconds(split, clock) for clock in ("wall", "cpu"))
                found.append(Rivalry(scenario, rival, redundancy, wall, cpu))
    return found


@dataclass(frozen=True)
class Advice:
    """The fastest of our strategies in a scenario; ``lead``: how much faster than the next, ``over_one_process``.

    Both are ratios of seconds per step, None where there is nothing to compare with. ``thriftiest`` takes the least CPU
    time, which is what counts where ranks share cores; ``cpu_seconds`` are its.
    """

    scenario: Scenario
    system: str
    seconds: float
    next_system: str | None
    lead: float | None
    over_one_process: float | None
    thriftiest: str
    cpu_seconds: float

    @property
    def prefers_one_process(self) -> bool:
        """Whether one process is faster than the ranks."""
        return self.over_one_process is not None and self.over_one_process < 1


def advise(records: Iterable[TrainRecord]) -> list[Advice]:
    """The fastest strategy of every scenario, by wall time, with one process beside it."""
    scenarios = {
        scenario: sorted((r for r in systems.values() if is_strategy(r)), key=lambda r: r.wall_s.median)
        for scenario, systems in group(records).items()
    }
    alone: dict[tuple[object, ...], float] = {}
    for scenario, ours in scenarios.items():
        if scenario.ranks == 1 and ours:
            key = _workload(scenario)
            alone[key] = min(alone.get(key, math.inf), ours[0].wall_s.median)
    found = []
    for scenario, ours in scenarios.items():
        if not ours or ours[0].wall_s.median == 0:
            continue
        best = ours[0].wall_s.median
        other = next((record for record in ours if record.system != ours[0].system), None)
        one = alone.get(_workload(scenario)) if scenario.ranks > 1 else None
        thriftiest = min(ours, key=lambda record: record.cpu_s.median)
        found.append(
            Advice(
                scenario,
                system_label(ours[0]),
                best,
                None if other is None else system_label(other),
                None if other is None else other.wall_s.median / best,
                None if one is None else one / best,
                system_label(thriftiest),
                thriftiest.cpu_s.median,
            )
        )
    return found


def _workload(scenario: Scenario) -> tuple[object, ...]:
    """What is the same on one process and on ranks; a partition means nothing to one."""
    return (
        scenario.graph,
        scenario.model,
        scenario.batch_size,
        scenario.hidden,
        scenario.fanout,
        scenario.features,
    )
