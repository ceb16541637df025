"""Pictures of amounts: redundancy, partitions, scaling to many ranks, and what redundancy is worth."""

from collections.abc import Callable, Sequence
from typing import Any

from gsplit.report.comparison import Redundancy, Rivalry
from gsplit.report.documents import Count, TrainRecord
from gsplit.report.drawing import graph_colours, make_panels, system_colour, tidy

__all__ = ["draw_objectives", "draw_redundancy", "draw_rivalry", "draw_scaling"]

_OBJECTIVES = {"gsplit": "#1b6ca8", "node": "#e09f3e", "edge": "#9e2a2b", "random": "#8d99ae"}  # as of bench partition
_MARKERS = ("o", "s", "^", "D", "v", "P")


def draw_redundancy(found: Sequence[Redundancy]) -> Any:
    """What data parallelism computes and loads, over split parallelism, by ranks: a line per graph and batch."""
    figure, panels = make_panels(1, 2, (10, 4.2))
    colours = graph_colours(each.graph for each in found)
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
        _rank_axis(axes, sorted({each.ranks for each in found}))
        axes.axhline(1.0, color="black", linewidth=0.8)
        title = "edges computed" if what == "edges" else "rows loaded"
        tidy(axes, f"Redundancy: {title} per step, data / split", x="ranks", y="data / split (1: no redundancy)")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    return figure


def _rank_axis(axes: Any, ranks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, list(map(str, ranks)))
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
    colours = graph_colours(objectives) | _OBJECTIVES
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
                axes.plot(x, y, style, color=system_colour(strategy), label=strategy, markersize=4, linewidth=1.3)
            if is_log and any(len(drawn.get_xdata()) for drawn in axes.lines):
                axes.set_yscale("log")
            _rank_axis(axes, sorted({c.ranks for c in mine}))
            where = f"{graph}, batch {batch_size}" if several else graph
            tidy(axes, where if number_of_row == 0 else "", x="ranks" if number_of_row == len(rows) - 1 else "")
            if axes is line[0]:
                axes.set_ylabel(title)
            axes.tick_params(axis="y", which="minor", labelsize=7)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def draw_rivalry(found: Sequence[Rivalry]) -> Any:
    """A rival's seconds over split's, against redundancy: colours are graphs, markers ranks, hollow: from disk."""
    rivals = list(dict.fromkeys(each.rival for each in found))
    colours = graph_colours(each.scenario.graph for each in found)
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
