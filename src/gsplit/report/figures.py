"""Figures of a run: losses and scores, the work of the ranks, and the timeline of one step.

matplotlib is imported when the first figure is made. Only its object interface is used: no global state, no window. All
figures use the same colour for a strategy or a stage.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gsplit.errors import MissingDependencyError, explain
from gsplit.report.reading import Run, StepLine

__all__ = [
    "STAGES",
    "STRATEGIES",
    "Bar",
    "Window",
    "as_png",
    "draw_run",
    "draw_run_loads",
    "draw_timeline",
    "load_figure",
    "make_panels",
    "stage_colour",
    "tidy",
    "typical_window",
]

STRATEGIES = {
    "split": "#1b6ca8",
    "data": "#e09f3e",
    "data(owner)": "#f4d58d",
    "data_cached": "#9e2a2b",
    "data_cached(strided)": "#e5989b",
    "hybrid(1)": "#2a9d8f",
    "hybrid(2)": "#84c7b5",
    "hybrid(3)": "#17645b",
    "auto": "#59a14f",
}
"""Colours of the strategies."""
STAGES = {
    "sample": "#1b6ca8",
    "split": "#7fb7dd",
    "exchange_ids": "#c6dbef",
    "load": "#2a9d8f",
    "copy": "#b7e4c7",
    "gather_features": "#52b788",
    "exchange_features": "#a3d9c9",
    "shuffle": "#9e2a2b",
    "forward": "#e09f3e",
    "backward": "#7b4ea3",
    "optimizer": "#495057",
    "wait_for_batch": "#dee2e6",
}
"""Colours of the stages in the order of a step."""
_SCORES = {"val": "#1b6ca8", "test": "#e09f3e", "train": "#2a9d8f"}
_LOADER = "gsplit-loader"


def load_figure() -> Any:
    """The figure class of matplotlib; called before a long measurement, too, to fail early."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "pip install 'gsplit[report]'"
        raise MissingDependencyError(explain("the figure", "the package matplotlib", str(error), fix)) from error
    return Figure


def stage_colour(name: str) -> str:
    """The colour of a stage."""
    return STAGES.get(_stage(name), "#adb5bd")


def _stage(name: str) -> str:
    return "load" if name == "load_features" else name


def make_panels(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Any, Any]:
    """A figure of ``size`` inches and its panels, ``panels[row][column]``."""
    figure = load_figure()(figsize=size, layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def tidy(axes: Any, title: str = "", *, x: str = "", y: str = "", grid: str = "y") -> None:
    """Set titles and labels, and remove frames that are not needed."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis=grid, linewidth=0.4, color="#ced4da")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def as_png(figure: Any) -> bytes:
    """The figure as the bytes of a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def draw_run(run: Run) -> Any:
    """The loss of every step of a run, and its evaluations."""
    history = run.history
    figure, panels = make_panels(1, 2 if history.evaluations else 1, (10 if history.evaluations else 6, 3.4))
    axes = panels[0][0]
    axes.plot(range(1, len(history.losses) + 1), history.losses, color="#1b6ca8", linewidth=1)
    tidy(axes, f"{run.name}: loss of every step", x="step", y=run.settings.loss or "loss")
    if history.evaluations:
        axes = panels[0][1]
        for name in (name for name in history.evaluations[0] if name != "epoch"):
            points = [(each["epoch"], each[name]) for each in history.evaluations if name in each]
            epochs = [epoch for epoch, _ in points]
            scores = [score for _, score in points]
            axes.plot(
                epochs, scores, "o-", color=_SCORES.get(name.rpartition("/")[2], "#495057"), label=name, markersize=4
            )
        axes.xaxis.get_major_locator().set_params(integer=True)
        tidy(axes, f"{run.name}: exact {run.metric.name} after epochs", x="epoch", y=run.metric.name)
        axes.legend(fontsize=8, frameon=False)
    return figure


def draw_run_loads(run: Run) -> Any:
    """Mean CPU seconds, edges and input rows that were read, of every rank in a step."""
    figure, panels = make_panels(1, 3, (11, 2.8))
    ranks = [lines[1:] or lines for lines in run.steps.values()]  # the first step compiles
    loads = {
        "CPU seconds per step": [_mean([line.cpu_seconds for line in lines]) for lines in ranks],
        "edges per step": [_mean([line.counts.get("edges", 0) for line in lines]) for lines in ranks],
        "input rows read per step": [_mean([line.rows_read for line in lines]) for lines in ranks],
    }
    for axes, (title, values) in zip(panels[0], loads.items(), strict=True):
        axes.bar(list(map(str, run.steps)), values, 0.7, color=STRATEGIES.get(run.settings.strategy))
        mean = _mean(values)
        ratio = f", max / mean {max(values) / mean:.2f}" if mean else ""
        tidy(axes, f"{title}{ratio}", x="rank")
    figure.suptitle(f"{run.name}: load of the ranks, {run.settings.strategy}", fontsize=10, x=0.01, ha="left")
    return figure


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Bar:
    """A span in the window, in milliseconds from its start. ``depth``: spans of the same thread that contain it."""

    rank: int
    lane: str
    stage: str
    start_ms: float
    end_ms: float
    depth: int


@dataclass(frozen=True)
class Window:
    """The spans of all ranks during one step of training, also those of loader threads for later steps."""

    epoch: int
    step: int
    milliseconds: float
    bars: list[Bar]


def typical_window(run: Run) -> Window | None:
    """The step of median length, of those that every rank has spans of; None if there is none.

    The window is from the first span of the training threads on any rank to the last. The first step, which compiles,
    and the last step, during which nothing is loaded, are left out if there are others.
    """
    by_step: dict[tuple[int, int], list[StepLine]] = {}
    for lines in run.steps.values():
        for line in lines:
            if _training_times(line):
                by_step.setdefault((line.epoch, line.step), []).append(line)
    lengths = []
    for place, lines in by_step.items():
        if len(lines) == len(run.steps):
            starts, ends = zip(*(times for line in lines for times in _training_times(line)), strict=True)
            lengths.append((max(ends) - min(starts), place, min(starts), max(ends)))
    outermost = (min(by_step, default=None), max(by_step, default=None))
    usable = [length for length in lengths if length[1] not in outermost] or lengths
    if not usable:
        return None
    _, place, start_ns, end_ns = sorted(usable)[len(usable) // 2]
    epoch, step = place
    return Window(epoch=epoch, step=step, milliseconds=(end_ns - start_ns) / 1e6, bars=_bars(run, start_ns, end_ns))


def _training_times(line: StepLine) -> list[tuple[int, int]]:
    return [(start, end) for _, thread, start, end in line.spans if not thread.startswith(_LOADER)]


def _bars(run: Run, start_ns: int, end_ns: int) -> list[Bar]:
    bars = []
    for rank, lines in run.steps.items():
        spans = [span for line in lines for span in line.spans if span[2] < end_ns and span[3] > start_ns]
        for stage, thread, start, end in spans:
            around = sum(t == thread and s <= start and end <= e and (s, e) != (start, end) for _, t, s, e in spans)
            bars.append(
                Bar(
                    rank=rank,
                    lane=thread.removeprefix("gsplit-") if thread.startswith(_LOADER) else "training",
                    stage=stage,
                    start_ms=(max(start, start_ns) - start_ns) / 1e6,
                    end_ms=(min(end, end_ns) - start_ns) / 1e6,
                    depth=around,
                )
            )
    return sorted(bars, key=lambda bar: bar.depth)


def draw_timeline(run: Run, window: Window) -> Any:
    """The window: a lane per rank and thread, stages as colours."""
    lanes = sorted({(bar.rank, bar.lane) for bar in window.bars}, key=lambda lane: (lane[0], lane[1] != "training"))
    figure, panels = make_panels(1, 1, (11, 1.7 + 0.55 * len(lanes)))
    axes = panels[0][0]
    for bar in window.bars:
        height = 0.8 if bar.depth == 0 else 0.45
        place = (lanes.index((bar.rank, bar.lane)) - height / 2, height)
        axes.broken_barh([(bar.start_ms, bar.end_ms - bar.start_ms)], place, color=stage_colour(bar.stage), linewidth=0)
    for number, (rank, _) in enumerate(lanes):
        if number and lanes[number - 1][0] != rank:
            axes.axhline(number - 0.5, color="#adb5bd", linewidth=0.6)
    axes.set_yticks(range(len(lanes)), [f"rank {rank}, {lane}" for rank, lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, window.milliseconds)
    step = f"epoch {window.epoch}, step {window.step}"
    title = f"{run.name}: one step ({step}), {run.num_ranks} ranks, {run.settings.strategy}"
    tidy(axes, title, x="milliseconds", grid="x")
    used = {_stage(bar.stage) for bar in window.bars}
    figure.legend(handles=_legend(used), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def _legend(used: set[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=stage_colour(stage), label=stage) for stage in STAGES if stage in used]
