"""Pictures of a run: losses and accuracies, and the work of the ranks."""

from collections.abc import Sequence
from typing import Any

from gsplit.report.drawing import make_panels, system_colour, tidy
from gsplit.report.reading import Run

__all__ = ["draw_run", "draw_run_loads"]

_SCORES = {"val": "#1b6ca8", "test": "#e09f3e", "train": "#2a9d8f"}


def draw_run(run: Run) -> Any:
    """The loss of every step of a run, and its evaluations."""
    history = run.history
    figure, panels = make_panels(1, 2 if history.evaluations else 1, (10 if history.evaluations else 6, 3.4))
    axes = panels[0][0]
    axes.plot(range(1, len(history.losses) + 1), history.losses, color="#1b6ca8", linewidth=1)
    tidy(axes, f"{run.name}: loss of every step", x="step", y="cross-entropy")
    if history.evaluations:
        axes = panels[0][1]
        for name in (name for name in history.evaluations[0] if name != "epoch"):
            points = [(each["epoch"], each[name]) for each in history.evaluations if name in each]
            x, y = [epoch for epoch, _ in points], [score for _, score in points]
            axes.plot(x, y, "o-", color=_SCORES.get(name, "#495057"), label=name, markersize=4)
        axes.xaxis.get_major_locator().set_params(integer=True)
        tidy(axes, f"{run.name}: exact accuracy after epochs", x="epoch", y="accuracy")
        axes.legend(fontsize=8, frameon=False)
    return figure


def draw_run_loads(run: Run) -> Any:
    """What every rank of a run did in a step, on average: CPU seconds, edges, rows."""
    figure, panels = make_panels(1, 3, (11, 2.8))
    ranks = [lines[1:] or lines for lines in run.steps.values()]  # the first step compiles
    loads = {
        "CPU seconds per step": [_mean([line.cpu_seconds for line in lines]) for lines in ranks],
        "edges per step": [_mean([line.counts.get("edges", 0) for line in lines]) for lines in ranks],
        "rows loaded per step": [_mean([line.counts.get("rows_loaded", 0) for line in lines]) for lines in ranks],
    }
    for axes, (title, values) in zip(panels[0], loads.items(), strict=True):
        axes.bar(list(map(str, run.steps)), values, 0.7, color=system_colour(run.settings.strategy))
        mean = _mean(values)
        ratio = f", max / mean {max(values) / mean:.2f}" if mean else ""
        tidy(axes, f"{title}{ratio}", x="rank")
    figure.suptitle(f"{run.name}: load of the ranks, {run.settings.strategy}", fontsize=10, x=0.01, ha="left")
    return figure


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
