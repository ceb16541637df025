"""Pictures of the planner's check: what it foresaw against what was measured."""

from collections.abc import Sequence
from typing import Any

from gsplit.report.documents import PlannerPoint
from gsplit.report.drawing import STAGES, make_panels, stage_colour, system_colour, tidy

__all__ = ["draw_planner"]


def draw_planner(points: Sequence[PlannerPoint]) -> Any:
    """Seconds per step, and seconds per stage where there are any; the band is 20 % to either side."""
    totals = [(point.system, point.measured_s, point.predicted_s) for point in points]
    stages = [(name, pair[1], pair[0]) for point in points for name, pair in point.stages.items() if min(pair) > 0]
    figure, panels = make_panels(1, 2 if stages else 1, (11 if stages else 5.8, 5.2))
    systems = list(dict.fromkeys(name for name, _, _ in totals))
    _scatter(panels[0][0], totals, {name: system_colour(name) for name in systems})
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
