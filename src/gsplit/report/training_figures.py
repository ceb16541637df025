"""Pictures of learning: losses and accuracies, of studies of accuracy and of single runs; the ranks' work in a run."""

from collections.abc import Sequence
from typing import Any

from gsplit.report.documents import TrainRecord
from gsplit.report.drawing import make_panels, system_colour, tidy
from gsplit.report.material import Run
from gsplit.report.scenarios import describe, group, varying

__all__ = ["draw_accuracy", "draw_run", "draw_run_loads"]

_SCORES = {"val": "#1b6ca8", "test": "#e09f3e", "train": "#2a9d8f"}


def draw_accuracy(records: Sequence[TrainRecord]) -> Any:
    """Loss and accuracy by epoch, a line per system; lines of equal results lie on each other, the first widest."""
    scenarios = group(record for record in records if record.epochs)
    names = varying(list(scenarios))
    figure, panels = make_panels(len(scenarios), 2, (10, 0.6 + 3.3 * len(scenarios)))
    for row, (scenario, systems) in zip(panels, scenarios.items(), strict=True):
        where = f"{scenario.graph}, {scenario.model}, {describe(scenario, names)}"
        for number, (label, record) in enumerate(systems.items()):
            epochs, colour = [each.epoch + 1 for each in record.epochs], system_colour(label)
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
