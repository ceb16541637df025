"""The tables of a report, as text in cells: for the page, and as Markdown for a README."""

import json
from collections.abc import Mapping, Sequence
from statistics import median

from pydantic import JsonValue

from gsplit.report.page import Table
from gsplit_bench.report.comparison import Advice, Speedup, advise, describe, geometric_mean, group, varying
from gsplit_bench.report.documents import BenchTrain, PlannerCheck, TrainRecord

__all__ = [
    "as_markdown",
    "planner_errors",
    "tabulate_advice",
    "tabulate_records",
    "tabulate_sources",
    "tabulate_speedups",
]


def as_markdown(table: Table) -> str:
    """A table as Markdown.

    >>> print(as_markdown(Table("", ["graph", "ranks"], [["arxiv", "4"]])))
    | graph | ranks |
    |---|---|
    | arxiv | 4 |
    """
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    rows[1] = "|" + "---|" * len(table.columns)
    return "\n".join(rows)


def tabulate_sources(benches: Sequence[BenchTrain]) -> Table:
    """What was measured, where, when, and how to repeat it."""
    rows = [
        [
            bench.preset or "",
            bench.date,
            bench.commit or "",
            _words(bench.machine),
            _words(bench.versions),
            bench.command,
        ]
        for bench in benches
    ]
    return Table("Measurements", ["preset", "date", "commit", "machine", "versions", "command"], rows)


def _words(values: Mapping[str, JsonValue]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str | int | float) else json.dumps(value)}"
        for name, value in values.items()
        if value is not None
    )


def tabulate_records(records: Sequence[TrainRecord]) -> Table:
    """Every record: median seconds with the lowest and the highest, and amounts."""
    scenarios = group(records)
    names = varying(list(scenarios))
    rows = [
        [
            scenario.graph,
            scenario.model,
            describe(scenario, names),
            label,
            f"{r.wall_s.median:.3f} ({r.wall_s.low:.3f} to {r.wall_s.high:.3f})",
            f"{r.cpu_s.median:.3f} ({r.cpu_s.low:.3f} to {r.cpu_s.high:.3f})",
            f"{r.edges / 1e6:.2f}",
            f"{r.rows_loaded / 1e3:.1f}",
            f"{r.bytes_sent / 1e6:.1f}",
            f"{max(r.peak_bytes_per_rank, default=0.0) / 1e6:.0f}",
            f"{r.steps} x {r.repeats}",
        ]
        for scenario, systems in scenarios.items()
        for label, r in systems.items()
    ]
    columns = ["graph", "model", "scenario", "system", "wall s per step", "CPU s per step, all ranks", "M edges"]
    return Table("Records", [*columns, "k rows loaded", "MB sent", "MB peak, largest rank", "steps"], rows)


def tabulate_speedups(found: Sequence[Speedup]) -> Table:
    """Geometric means over the graphs, by peer, model and ranks, and over all with more than one rank."""
    peers = list(dict.fromkeys(each.peer for each in found))
    groups: dict[str, list[Speedup]] = {}
    for each in found:
        ranks = each.scenario.ranks
        groups.setdefault(f"{each.scenario.model}, {ranks} rank{'s' if ranks > 1 else ''}", []).append(each)
    for model in dict.fromkeys(each.scenario.model for each in found):
        several = [each for each in found if each.scenario.model == model and each.scenario.ranks > 1]
        if len({each.scenario.ranks for each in several}) > 1:
            groups[f"{model}, all with several ranks"] = several
    rows = []
    for name, members in groups.items():
        for peer in peers:
            wall, cpu = ([e.ratio for e in members if e.peer == peer and e.clock == clock] for clock in ("wall", "cpu"))
            if wall and cpu:
                rows.append([name, peer, f"{geometric_mean(wall):.2f}", f"{geometric_mean(cpu):.2f}", str(len(wall))])
    columns = ["model and ranks", "peer", "wall time, times faster", "CPU time, times faster", "scenarios"]
    return Table("Geometric means of the speed-ups of the best of our strategies", columns, rows)


def tabulate_advice(records: Sequence[TrainRecord]) -> Table:
    """The fastest strategy of every scenario and by how much."""
    found = advise(records)
    names = varying([each.scenario for each in found])
    rows = [
        [
            each.scenario.graph,
            each.scenario.model,
            describe(each.scenario, names),
            each.system if each.scenario.ranks > 1 else "one process",
            f"{each.seconds:.3f}",
            "" if each.lead is None or each.scenario.ranks == 1 else f"{each.lead:.2f}x {each.next_system}",
            _against_one_process(each),
            each.thriftiest,
            f"{each.cpu_seconds:.3f}",
        ]
        for each in found
    ]
    columns = ["graph", "model", "scenario", "fastest", "s per step", "ahead of the next", "against one process"]
    columns += ["least CPU time", "CPU s per step"]
    return Table("When to use what", columns, rows)


def _against_one_process(advice: Advice) -> str:
    if advice.over_one_process is None:
        return ""
    if advice.prefers_one_process:
        return f"one process is {1 / advice.over_one_process:.2f}x faster"
    return f"{advice.over_one_process:.2f}x faster"


def planner_errors(checks: Mapping[str, PlannerCheck]) -> Table:
    """How right the planner was."""
    rows = []
    for name, check in checks.items():
        errors = [abs(point.predicted_s / point.measured_s - 1) for point in check.points]
        stages = [abs(p / m - 1) for point in check.points for p, m in point.stages.values() if m > 0]
        rows.append(
            [
                name,
                str(len(check.points)),
                f"{check.within_5_percent:.0%}",
                f"{check.worst_regret:.1%}",
                f"{median(errors):.1%}",
                f"{median(stages):.1%}" if stages else "",
            ]
        )
    columns = ["check", "points", "choices within 5 % of the best", "worst choice, slower by"]
    return Table("The planner", [*columns, "median error per step", "median error per stage"], rows)
