"""Pictures of records: seconds, amounts, accuracy, and the planner's predictions against measurements."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gsplit.report.figures import STAGES, STRATEGIES, make_panels, stage_colour, tidy
from gsplit_bench.report.comparison import (
    Redundancy,
    Rivalry,
    Scenario,
    Speedup,
    describe,
    geometric_mean,
    group,
    varying,
)
from gsplit_bench.report.documents import Count, PlannerPoint, TrainRecord

__all__ = [
    "draw_ablation",
    "draw_accuracy",
    "draw_crossover",
    "draw_loads",
    "draw_objectives",
    "draw_planner",
    "draw_redundancy",
    "draw_rivalry",
    "draw_scaling",
    "draw_speedups",
    "draw_stages",
]

_OBJECTIVES = {"gsplit": "#1b6ca8", "node": "#e09f3e", "edge": "#9e2a2b", "random": "#8d99ae"}  # as of bench partition
_MARKERS = ("o", "s", "^", "D", "v", "P")
_PEERS = {"push_pull": "#7b4ea3", "p3": "#7b4ea3", "dgl": "#6c757d", "pyg": "#212529", "pyg_our_sampler": "#a5a58d"}
_OTHERS = ("#b5838d", "#bc6c25", "#606c38", "#4361ee", "#c9184a")
_GRAPHS = ("#1b6ca8", "#e09f3e", "#2a9d8f", "#9e2a2b", "#7b4ea3", "#495057", "#b5838d", "#606c38")


def _system_colour(label: str) -> str:
    """The colour of a system: that of our strategy, of the peer, or any that depends on the name alone."""
    name = label.split(", ")[0]
    return STRATEGIES.get(name) or _PEERS.get(name) or _OTHERS[sum(map(ord, name)) % len(_OTHERS)]


def _graph_colours(names: Iterable[str]) -> dict[str, str]:
    return {name: _GRAPHS[number % len(_GRAPHS)] for number, name in enumerate(dict.fromkeys(names))}


def draw_redundancy(found: Sequence[Redundancy]) -> Any:
    """What data parallelism computes and loads, over split parallelism, by ranks: a line per graph and batch."""
    figure, panels = make_panels(1, 2, (10, 4.2))
    colours = _graph_colours(each.graph for each in found)
    lines = sorted({(each.graph, each.batch_size, each.fanout) for each in found})
    several = len({line[1:] for line in lines}) > 1
    for axes, what in zip(panels[0], ("edges", "rows"), strict=True):
        for number, (graph, batch_size, fanout) in enumerate(lines):
            points = [
                each for each in found if (each.graph, each.batch_size, each.fanout) == (graph, batch_size, fanout)
            ]
            label = f"{graph}, batch {batch_size}, fanout {','.join(map(str, fanout))}" if several else graph
            values = [each.edges if what == "edges" else each.rows for each in points]
            style = _MARKERS[number % len(_MARKERS)] + "-"
            axes.plot([each.ranks for each in points], values, style, color=colours[graph], label=label, markersize=5)
        _log_axis(axes, sorted({each.ranks for each in found}))
        axes.axhline(1.0, color="black", linewidth=0.8)
        title = "edges computed" if what == "edges" else "rows loaded"
        tidy(axes, f"Redundancy: {title} per step, data / split", x="ranks", y="data / split (1: no redundancy)")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    return figure


def _log_axis(axes: Any, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def draw_objectives(records: Sequence[TrainRecord]) -> Any:
    """``split`` on partitions by several objectives: rows and bytes sent, imbalance, seconds."""
    panels_of: tuple[tuple[str, Callable[[TrainRecord], float]], ...] = (
        ("rows sent / input rows", lambda r: r.rows_sent / r.input_rows if r.input_rows else 0.0),
        ("MB sent per step", lambda r: r.bytes_sent / 1e6),
        ("CPU seconds, largest rank / mean", lambda r: _imbalance(r.cpu_s_per_rank)),
        ("seconds per step (wall)", lambda r: r.wall_s.median),
    )
    chosen = [record for record in records if record.system == "split" and record.partition]
    groups = list(dict.fromkeys((r.graph, r.model, r.ranks) for r in chosen))
    objectives = list(dict.fromkeys(r.partition or "" for r in chosen))
    colours = _graph_colours(objectives) | _OBJECTIVES
    figure, panels = make_panels(2, 2, (max(9.0, 3 + 1.4 * len(groups)), 7))
    for axes, (title, value) in zip(panels.flat, panels_of, strict=True):
        for number, objective in enumerate(objectives):
            bars = {(r.graph, r.model, r.ranks): value(r) for r in chosen if r.partition == objective}
            places = [groups.index(key) + (number - (len(objectives) - 1) / 2) * 0.8 / len(objectives) for key in bars]
            axes.bar(places, bars.values(), 0.74 / len(objectives), color=colours[objective], label=objective)
        axes.set_xticks(range(len(groups)), [f"{graph}\n{model}, {ranks} ranks" for graph, model, ranks in groups])
        tidy(axes, title)
        if "mean" in title:
            axes.set_ylim(bottom=1.0)
    handles = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8, title="partition objective")
    return figure


def _imbalance(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0


def draw_scaling(counts: Sequence[Count]) -> Any:
    """What the busiest rank does, by the number of ranks: a column per graph, a line per strategy."""
    rows: tuple[tuple[str, Callable[[Count], float], bool], ...] = (
        ("edges, busiest rank", lambda c: max(c.edges_per_rank), True),
        ("rows loaded, busiest rank", lambda c: max(c.rows_loaded_per_rank), True),
        ("MB sent, busiest rank", lambda c: max(c.bytes_sent_per_rank, default=0.0) / 1e6, True),
        ("work, max / mean", lambda c: c.imbalance, False),
    )
    columns = list(dict.fromkeys((c.graph, c.batch_size) for c in counts))
    several = len({batch_size for _, batch_size in columns}) > 1
    strategies = list(dict.fromkeys(c.strategy for c in counts))
    figure, panels = make_panels(len(rows), len(columns), (1 + 3.6 * len(columns), 2.6 * len(rows)))
    for number_of_row, (line, (title, value, is_log)) in enumerate(zip(panels, rows, strict=True)):
        for axes, (graph, batch_size) in zip(line, columns, strict=True):
            mine = [c for c in counts if (c.graph, c.batch_size) == (graph, batch_size)]
            for number, strategy in enumerate(strategies):
                points = sorted((c.ranks, value(c)) for c in mine if c.strategy == strategy)
                points = [point for point in points if point[1] > 0 or not is_log]
                style = _MARKERS[number % len(_MARKERS)] + "-"
                x, y = [ranks for ranks, _ in points], [amount for _, amount in points]
                axes.plot(x, y, style, color=_system_colour(strategy), label=strategy, markersize=4, linewidth=1.3)
            if is_log and any(len(drawn.get_xdata()) for drawn in axes.lines):
                axes.set_yscale("log")
            _log_axis(axes, sorted({c.ranks for c in mine}))
            where = f"{graph}, batch {batch_size}" if several else graph
            tidy(axes, where if number_of_row == 0 else "", x="ranks" if number_of_row == len(rows) - 1 else "")
            if axes is line[0]:
                axes.set_ylabel(title)
            axes.tick_params(axis="y", which="minor", labelsize=7)
    handles, labels = panels[0][0].get_legend_handles_labels()
    ncols = min(5, 3 * len(columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=8)
    return figure


def draw_rivalry(found: Sequence[Rivalry]) -> Any:
    """A rival's seconds over split's, against redundancy: colours are graphs, markers ranks, hollow: from disk."""
    rivals = list(dict.fromkeys(each.rival for each in found))
    colours = _graph_colours(each.scenario.graph for each in found)
    ranks = sorted({each.scenario.ranks for each in found})
    figure, panels = make_panels(len(rivals), 2, (10, 0.8 + 3.7 * len(rivals)), sharex=True)
    for row, rival in zip(panels, rivals, strict=True):
        for axes, clock in zip(row, ("wall", "cpu"), strict=True):
            for each in (each for each in found if each.rival == rival):
                scenario, colour = each.scenario, colours[each.scenario.graph]
                face = "white" if scenario.features == "disk" else colour
                marker = _MARKERS[ranks.index(scenario.ranks) % len(_MARKERS)]
                y = each.wall if clock == "wall" else each.cpu
                axes.plot(each.redundancy, y, marker, color=colour, markerfacecolor=face, markersize=6)
            axes.axhline(1.0, color="black", linewidth=0.8)
            what = "wall time" if clock == "wall" else "CPU time"
            x = "redundancy: edges of data / edges of split" if rival == rivals[-1] else ""
            tidy(axes, f"{what}: {rival} / split", x=x, y="above 1: split is faster", grid="both")
    figure.legend(
        handles=_rivalry_legend(colours, ranks, found), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    return figure


def draw_crossover(found: Sequence[Rivalry]) -> Any:
    """Seconds of our systems over split's, by batch size: a column per graph and model, a row per clock and ranks."""
    names = [name for name in varying([each.scenario for each in found]) if name != "batch_size"]

    def column_of(each: Rivalry) -> str:
        where = describe(each.scenario, names, ranks=False)
        return ", ".join(filter(None, (each.scenario.graph, each.scenario.model, where)))

    columns = list(dict.fromkeys(map(column_of, found)))
    rows = [(clock, ranks) for clock in ("cpu", "wall") for ranks in sorted({each.scenario.ranks for each in found})]
    rivals = list(dict.fromkeys(each.rival for each in found))
    sizes = sorted({each.scenario.batch_size for each in found})
    figure, panels = make_panels(len(rows), len(columns), (1 + 3.4 * len(columns), 2.5 * len(rows)), sharex=True)
    for line, (clock, ranks) in zip(panels, rows, strict=True):
        for axes, column in zip(line, columns, strict=True):
            for number, rival in enumerate(rivals):
                points = sorted(
                    (each.scenario.batch_size, each.cpu if clock == "cpu" else each.wall)
                    for each in found
                    if (column_of(each), each.rival, each.scenario.ranks) == (column, rival, ranks)
                )
                x, y = [size for size, _ in points], [ratio for _, ratio in points]
                style = _MARKERS[number % len(_MARKERS)] + "-"
                axes.plot(x, y, style, color=_system_colour(rival), label=rival, markersize=4, linewidth=1.3)
            axes.axhline(1.0, color="black", linewidth=0.8)
            _log_axis(axes, sizes)
            what = "wall time" if clock == "wall" else "CPU time"
            last = (clock, ranks) == rows[-1]
            tidy(axes, f"{column}, {ranks} ranks: {what} / split's", x="batch size" if last else "")
    panels[0][0].set_ylabel("below 1: faster than split", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _rivalry_legend(colours: dict[str, str], ranks: Sequence[int], found: Sequence[Rivalry]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, marker="o", linestyle="", label=graph) for graph, colour in colours.items()]
    for number, count in enumerate(ranks):
        marker = _MARKERS[number % len(_MARKERS)]
        handles.append(Line2D([], [], color="#495057", marker=marker, linestyle="", label=f"{count} ranks"))
    if any(each.scenario.features == "disk" for each in found):
        disk = Line2D([], [], color="#495057", marker="o", linestyle="", label="hollow: features on disk")
        disk.set_markerfacecolor("white")
        handles.append(disk)
    return handles


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


def draw_ablation(records: Sequence[TrainRecord], label_of: Callable[[str], str]) -> Any:
    """CPU seconds of the other systems over those of ``split``, by what varies: a panel per graph and model."""
    scenarios = group(records)
    graphs, models = (sorted({getattr(found, name) for found in scenarios}) for name in ("graph", "model"))
    names, vary_ranks = varying(list(scenarios)), len({found.ranks for found in scenarios}) > 1
    systems = [name for name in dict.fromkeys(record.system for record in records) if name != "split"]
    figure, panels = make_panels(len(graphs), len(models), (1 + 3.6 * len(models), 0.7 + 2.7 * len(graphs)))
    for row, graph in zip(panels, graphs, strict=True):
        for axes, model in zip(row, models, strict=True):
            mine = [(key, found) for key, found in scenarios.items() if (key.graph, key.model) == (graph, model)]
            for number, system in enumerate(systems):
                ratios = [
                    (place, found[system].cpu_s.median / found["split"].cpu_s.median)
                    for place, (_, found) in enumerate(mine)
                    if {system, "split"} <= found.keys()
                ]
                style = _MARKERS[number % len(_MARKERS)] + "-"
                x, y = [place for place, _ in ratios], [ratio for _, ratio in ratios]
                axes.plot(
                    x, y, style, color=_system_colour(system), label=label_of(system), markersize=4, linewidth=1.3
                )
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set_xticks(range(len(mine)), [describe(key, names, ranks=vary_ranks) for key, _ in mine])
            axes.set_ylim(0, 1.06 * axes.dataLim.y1)
            tidy(axes, f"{graph}, {model}")
        row[0].set_ylabel("CPU seconds / those of GSplit", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(systems), frameon=False, fontsize=8)
    return figure


def _peer_patch(peer: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=_system_colour(peer), hatch=_hatch(peer), edgecolor="white", label=f"over {peer}")


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
            axes.bar(
                x, ratio, bar_width, color=_system_colour(peer), hatch=_hatch(peer), edgecolor="white", linewidth=0
            )
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
        axes.bar(places, values, 0.85, color=_system_colour(label))
        mean = sum(values) / len(values)
        if mean > 0:
            text = f"{max(values) / mean:.2f}"
            axes.text(sum(places) / len(places), max(values), text, ha="center", va="bottom", fontsize=8)
        ticks.append((sum(places) / len(places), label.replace(", ", ",\n")))
        place += len(values) + 1
    axes.set_xticks([at for at, _ in ticks], [label for _, label in ticks], rotation=25, ha="right")
    axes.margins(y=0.12)


def draw_planner(points: Sequence[PlannerPoint]) -> Any:
    """Seconds per step, and seconds per stage where there are any; the band is 20 % to either side."""
    totals = [(point.system, point.measured_s, point.predicted_s) for point in points]
    stages = [(name, pair[1], pair[0]) for point in points for name, pair in point.stages.items() if min(pair) > 0]
    figure, panels = make_panels(1, 2 if stages else 1, (11 if stages else 5.8, 5.2))
    systems = list(dict.fromkeys(name for name, _, _ in totals))
    _scatter(panels[0][0], totals, {name: _system_colour(name) for name in systems})
    tidy(panels[0][0], "Seconds per step: predicted against measured", x="measured (s)", y="predicted (s)", grid="both")
    if stages:
        used = {name for name, _, _ in stages}
        names = [name for name in STAGES if name in used] + sorted(used - STAGES.keys())
        _scatter(panels[0][1], stages, {name: stage_colour(name) for name in names})
        title = "Seconds per stage: predicted against measured"
        tidy(panels[0][1], title, x="measured (s)", y="predicted (s)", grid="both")
    return figure


def _scatter(axes: Any, values: Sequence[tuple[str, float, float]], colours: dict[str, str]) -> None:
    ends = [min(min(x, y) for _, x, y in values) / 1.3, max(max(x, y) for _, x, y in values) * 1.3]
    axes.fill_between(ends, [0.8 * end for end in ends], [1.2 * end for end in ends], color="#e9ecef", zorder=0)
    axes.plot(ends, ends, color="black", linewidth=0.8, zorder=1)
    for name, colour in colours.items():
        mine = [(x, y) for label, x, y in values if label == name]
        style = {"color": colour, "edgecolors": "#495057", "linewidths": 0.4, "zorder": 2}
        axes.scatter([x for x, _ in mine], [y for _, y in mine], 24, label=name, **style)
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    axes.set_aspect("equal")
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def draw_accuracy(records: Sequence[TrainRecord]) -> Any:
    """Loss and accuracy by epoch, a line per system; lines of equal results lie on each other, the first widest."""
    scenarios = group(record for record in records if record.epochs)
    names = varying(list(scenarios))
    figure, panels = make_panels(len(scenarios), 2, (10, 0.6 + 3.3 * len(scenarios)))
    for row, (scenario, systems) in zip(panels, scenarios.items(), strict=True):
        where = f"{scenario.graph}, {scenario.model}, {describe(scenario, names)}"
        for number, (label, record) in enumerate(systems.items()):
            epochs, colour = [each.epoch + 1 for each in record.epochs], _system_colour(label)
            width = 1.2 + 1.6 * (len(systems) - 1 - number)
            row[0].plot(epochs, [each.loss for each in record.epochs], color=colour, linewidth=width, label=label)
            score = next((name for name in ("test", "val") if name in record.epochs[0].accuracies), None)
            if score is not None:
                values = [each.accuracies.get(score, float("nan")) for each in record.epochs]
                row[1].plot(epochs, values, color=colour, linewidth=width, label=label)
                tidy(row[1], f"{where}: accuracy on {score}", x="epoch", y="accuracy")
        tidy(row[0], f"{where}: mean loss of the epoch", x="epoch", y="cross-entropy")
        row[0].legend(fontsize=8, frameon=False)
    return figure
