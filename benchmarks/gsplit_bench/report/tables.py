"""The tables of a report, as text in cells: for the page, and as Markdown for a README."""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from statistics import median

from pydantic import JsonValue

from gsplit.report.page import Table
from gsplit_bench.report.comparison import (
    Advice,
    Clock,
    Speedup,
    advise,
    compare_with_peers,
    describe,
    geometric_mean,
    group,
    is_strategy,
    seconds,
    varying,
)
from gsplit_bench.report.documents import BenchTrain, PlannerCheck, Spread, TrainRecord

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
    """Every record: median seconds with the quartiles, and over those of our strategies; amounts."""
    scenarios = group(records)
    names = varying(list(scenarios))
    rows = [
        [
            scenario.graph,
            scenario.model,
            describe(scenario, names),
            label,
            _spread(r.cpu_s),
            _spread(r.wall_s),
            *_over_ours(r, systems.values(), "cpu"),
            *_over_ours(r, systems.values(), "wall"),
            f"{r.edges / 1e6:.2f}",
            f"{r.rows_loaded / 1e3:.1f}",
            f"{r.bytes_sent / 1e6:.1f}",
            f"{max(r.peak_bytes_per_rank, default=0.0) / 1e6:.0f}",
            f"{r.steps} x {r.repeats}",
        ]
        for scenario, systems in scenarios.items()
        for label, r in systems.items()
    ]
    columns = ["graph", "model", "scenario", "system", "CPU s per step, all ranks", "wall s per step"]
    columns += [f"{clock} / {ours}" for clock in ("CPU", "wall") for ours in ("best of ours", "split")]
    columns += ["M edges", "k rows loaded", "MB sent", "MB peak, largest rank", "steps"]
    return Table("Records", columns, rows)


def _spread(found: Spread) -> str:
    if found.first_quartile is None or found.third_quartile is None:
        return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f}, all)"
    return f"{found.median:.3f} ({found.first_quartile:.3f} to {found.third_quartile:.3f})"


def _over_ours(record: TrainRecord, systems: Collection[TrainRecord], clock: Clock) -> tuple[str, str]:
    """Seconds of a record over those of the best of our strategies, and over those of split."""
    best = [seconds(each, clock) for each in systems if is_strategy(each)]
    split = [seconds(each, clock) for each in systems if each.system == "split"]
    over_best, over_split = (
        f"{seconds(record, clock) / min(ours):.2f}" if ours and min(ours) > 0 else "" for ours in (best, split)
    )
    return over_best, over_split


def tabulate_speedups(records: Sequence[TrainRecord]) -> Table:
    """Geometric means over the graphs, by peer, model, ranks and what else varies, and over all with several ranks."""
    best, split = compare_with_peers(records), compare_with_peers(records, "split")
    names = varying([each.scenario for each in best])
    groups = dict.fromkeys(_group(each, names, ranks=True) for each in best)
    several = {each.scenario.ranks for each in best} - {1}
    if len(several) > 1:
        groups |= dict.fromkeys(_group(each, names, ranks=False) for each in best if each.scenario.ranks in several)
    rows = []
    for name in groups:
        for peer in dict.fromkeys(each.peer for each in best):
            cells, scenarios = [], 0
            for ours, clock in product((best, split), ("cpu", "wall")):
                ratios = [
                    each.ratio
                    for each in ours
                    if (each.peer, each.clock) == (peer, clock)
                    if _group(each, names, ranks=True) == name
                    or (each.scenario.ranks > 1 and _group(each, names, ranks=False) == name)
                ]
                cells.append(f"{geometric_mean(ratios):.2f}" if ratios else "")
                scenarios = max(scenarios, len(ratios))
            if scenarios:
                rows.append([name, peer, *cells, str(scenarios)])
    columns = [f"{ours}: {clock} time" for ours in ("best of ours", "split") for clock in ("CPU", "wall")]
    title = "Times faster than the peers, geometric means over the graphs"
    return Table(title, ["model and ranks", "peer", *columns, "scenarios"], rows)


def _group(found: Speedup, names: Sequence[str], *, ranks: bool) -> str:
    where = describe(found.scenario, names, ranks=ranks)
    parts = [found.scenario.model, where] if ranks else [found.scenario.model, "all with several ranks", where]
    return ", ".join(part for part in parts if part)


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
