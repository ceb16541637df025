"""One step as it happened: ranks as rows, threads as lanes, stages as colours.

The window is that of the training threads in a typical step, from the first of its spans on any rank to the last. Drawn
is everything that fell into it, also what a loader thread did for later steps.
"""

from dataclasses import dataclass
from typing import Any

from gsplit.report.drawing import STAGES, make_panels, stage_colour, tidy
from gsplit.report.reading import Run, StepLine

__all__ = ["Bar", "Window", "draw_timeline", "typical_window"]

_LOADER = "gsplit-loader"


@dataclass(frozen=True)
class Bar:
    """A span in the window, in milliseconds from its start; ``depth``: how many spans of its thread contain it."""

    rank: int
    lane: str
    stage: str
    start_ms: float
    end_ms: float
    depth: int


@dataclass(frozen=True)
class Window:
    """What all ranks did while one step was trained."""

    epoch: int
    step: int
    milliseconds: float
    bars: list[Bar]


def typical_window(run: Run) -> Window | None:
    """The step of median length, of those that every rank has spans of.

    The first step, which compiles, and the last, beside which nothing is loaded, are left out if there are others.
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
    return Window(*place, (end_ns - start_ns) / 1e6, _bars(run, start_ns, end_ns))


def _training_times(line: StepLine) -> list[tuple[int, int]]:
    return [(start, end) for _, thread, start, end in line.spans if thread != _LOADER]


def _bars(run: Run, start_ns: int, end_ns: int) -> list[Bar]:
    bars = []
    for rank, lines in run.steps.items():
        spans = [span for line in lines for span in line.spans if span[2] < end_ns and span[3] > start_ns]
        for stage, thread, start, end in spans:
            around = sum(t == thread and s <= start and end <= e and (s, e) != (start, end) for _, t, s, e in spans)
            lane = "loader" if thread == _LOADER else "training"
            times = ((max(start, start_ns) - start_ns) / 1e6, (min(end, end_ns) - start_ns) / 1e6)
            bars.append(Bar(rank, lane, stage, *times, around))
    return sorted(bars, key=lambda bar: bar.depth)


def draw_timeline(run: Run, window: Window) -> Any:
    """The window: two lanes per rank where a loader thread was at work."""
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
    step, how = f"epoch {window.epoch}, step {window.step}", f"{run.num_ranks} ranks, {run.settings.strategy}"
    title = f"{run.name}: one step ({step}), {how}"
    tidy(axes, title, x="milliseconds", grid="x")
    used = {"load" if bar.stage == "load_features" else bar.stage for bar in window.bars}
    figure.legend(handles=_legend(used), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def _legend(used: set[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=stage_colour(stage), label=stage) for stage in STAGES if stage in used]
