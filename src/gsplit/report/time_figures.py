"""Pictures of seconds: stages stacked, speed-ups over peers, the load of every rank."""

from collections.abc import Sequence
from typing import Any

from gsplit.report.comparison import Speedup, geometric_mean
from gsplit.report.documents import TrainRecord
from gsplit.report.drawing import STAGES, make_panels, stage_colour, system_colour, tidy
from gsplit.report.scenarios import Scenario, describe, group, varying

__all__ = ["draw_loads", "draw_speedups", "draw_stages"]


def draw_stages(graph: str, records: Sequence[TrainRecord]) -> Any:
    """Stacked seconds of every system on one graph: a panel per model, a group of bars per number of ranks."""
    scenarios = group(record for record in records if record.graph == graph and record.stages_s)
    models = list(dict.fromkeys(scenario.model for scenario in scenarios))
    names = varying(list(scenarios))
    bars = max(sum(len(s) + 1 for k, s in scenarios.items() if k.model == model) for model in models)
    figure, panels = make_panels(1, len(models), (1.5 + 5.5 * len(models), 1.6 + 0.24 * bars))
    for axes, model in zip(panels[0], models, strict=True):
        _draw_stage_bars(axes, {k: systems for k, systems in scenarios.items() if k.model == model}, names)
        tidy(axes, f"{graph}, {model}: seconds per step by stage", x="seconds per step (mean of the ranks)", grid="x")
    used = {stage for systems in scenarios.values() for record in systems.values() for stage in record.stages_s}
    handles = [_patch(stage_colour(stage), stage) for stage in STAGES if stage in used]
    handles.append(_wall_mark())
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _draw_stage_bars(axes: Any, scenarios: dict[Scenario, dict[str, TrainRecord]], names: Sequence[str]) -> None:
    place, ticks = 0.0, []
    for scenario, systems in scenarios.items():
        axes.text(0, place, describe(scenario, names), fontsize=8, fontweight="bold", va="center")
        place += 1
        for label, record in systems.items():
            left = 0.0
            for stage in sorted(record.stages_s, key=lambda s: list(STAGES).index(s) if s in STAGES else len(STAGES)):
                axes.barh(place, max(0.0, record.stages_s[stage]), 0.8, left=left, color=stage_colour(stage))
                left += max(0.0, record.stages_s[stage])  # forward is a difference
            axes.plot([record.wall_s.median] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.5)
            ticks.append((place, label))
            place += 1
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(place - 0.3, -0.7)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _wall_mark() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color="black", marker="|", markersize=10, linestyle="", label="wall time, slowest rank")


def draw_speedups(speedups: Sequence[Speedup]) -> Any:
    """How many times faster the best of our strategies is than each peer: a panel per clock, model and ranks."""
    rows = sorted({(found.scenario.model, found.scenario.ranks) for found in speedups})
    peers = list(dict.fromkeys(found.peer for found in speedups))
    names = varying([found.scenario for found in speedups])
    groups = {(found.scenario.graph, describe(found.scenario, names, ranks=False)) for found in speedups}
    bars = (len(groups) + 1) * (len(peers) + 0.6)
    size = (1 + 2 * min(12.0, max(3.6, 0.24 * bars + 0.8)), 0.6 + 2.7 * len(rows))
    figure, panels = make_panels(len(rows), 2, size)
    for row, (model, ranks) in zip(panels, rows, strict=True):
        for axes, clock in zip(row, ("wall", "cpu"), strict=True):
            shown = [f for f in speedups if (f.clock, f.scenario.model, f.scenario.ranks) == (clock, model, ranks)]
            _draw_speedup_bars(axes, shown, peers, names)
            what = "wall time" if clock == "wall" else "CPU time"
            tidy(axes, f"{model}, {ranks} rank{'s' if ranks > 1 else ''}: {what}, times faster than the peer")
        row[0].set_ylabel("peer's seconds / ours", fontsize=9)
    handles = [_peer_patch(peer) for peer in peers]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _peer_patch(peer: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=system_colour(peer), hatch=_hatch(peer), edgecolor="white", label=f"over {peer}")


def _hatch(peer: str) -> str:
    return "///" if "allocator" in peer else ""


def _draw_speedup_bars(axes: Any, shown: Sequence[Speedup], peers: Sequence[str], names: Sequence[str]) -> None:
    labels = list(dict.fromkeys(_speedup_label(found, names) for found in shown))
    for place, label in enumerate([*labels, "geom. mean"]):
        for number, peer in enumerate(peers):
            mine = [f.ratio for f in shown if f.peer == peer and label in (_speedup_label(f, names), "geom. mean")]
            if not mine:
                continue
            ratio, x = geometric_mean(mine), place + (number - (len(peers) - 1) / 2) * 0.8 / len(peers)
            bar_width = 0.74 / len(peers)
            axes.bar(x, ratio, bar_width, color=system_colour(peer), hatch=_hatch(peer), edgecolor="white", linewidth=0)
            axes.text(x, ratio, f"{ratio:.1f}", ha="center", va="bottom", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axvline(len(labels) - 0.5, color="#adb5bd", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(labels) + 1), [*labels, "geom.\nmean"])


def _speedup_label(found: Speedup, names: Sequence[str]) -> str:
    return "\n".join(filter(None, (found.scenario.graph, describe(found.scenario, names, ranks=False))))


def draw_loads(records: Sequence[TrainRecord]) -> Any:
    """CPU seconds of every rank, on the most ranks of each graph and model; above a system: largest over mean."""
    scenarios = group(record for record in records if len(record.cpu_s_per_rank) > 1)
    names = varying(list(scenarios))
    most: dict[tuple[str, str], tuple[Scenario, dict[str, TrainRecord]]] = {}
    for scenario, systems in scenarios.items():
        key = (scenario.graph, scenario.model)
        if key not in most or scenario.ranks > most[key][0].ranks:
            most[key] = (scenario, systems)
    columns = min(2, len(most))
    rows = -(-len(most) // columns)
    bars = max(sum(len(r.cpu_s_per_rank) + 1 for r in systems.values()) for _, systems in most.values())
    size = (1 + columns * max(4.0, 0.17 * bars + 1), 0.4 + 2.9 * rows)
    figure, panels = make_panels(rows, columns, size)
    for axes, (scenario, systems) in zip(panels.flat, most.values(), strict=False):
        _draw_rank_bars(axes, {label: record.cpu_s_per_rank for label, record in systems.items()})
        title = f"{scenario.graph}, {scenario.model}, {describe(scenario, names)}: CPU seconds of each rank"
        tidy(axes, title, y="CPU seconds per step")
    for axes in panels.flat[len(most) :]:
        axes.set_axis_off()
    return figure


def _draw_rank_bars(axes: Any, loads: dict[str, list[float]]) -> None:
    place, ticks = 0.0, []
    for label, values in loads.items():
        places = [place + number for number in range(len(values))]
        axes.bar(places, values, 0.85, color=system_colour(label))
        mean = sum(values) / len(values)
        if mean > 0:
            text = f"{max(values) / mean:.2f}"
            axes.text(sum(places) / len(places), max(values), text, ha="center", va="bottom", fontsize=8)
        ticks.append((sum(places) / len(places), label.replace(", ", ",\n")))
        place += len(values) + 1
    axes.set_xticks([at for at, _ in ticks], [label for _, label in ticks], rotation=25, ha="right")
    axes.margins(y=0.12)
