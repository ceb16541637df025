"""What a user sees of training and inference: what is started, a live line with loss, rate and stage times, the result.

The announcement appears at once: torch, which takes seconds to import, is not imported here.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from gsplit.cli.console import human
from gsplit.files.objects import shown_place
from gsplit.inference.prediction_table import TABLES
from gsplit.run.config import TrainSettings
from gsplit.run.results import RunView
from gsplit.store.reader import Store

if TYPE_CHECKING:
    from gsplit.inference.infer import Predictions
    from gsplit.run.results import EpochReport, InferenceResult, TrainResult
    from gsplit.training.callbacks import StepReport

__all__ = ["TrainingView", "announce_training", "describe_predictions", "show_result"]

_MOST_COLUMNS = 4

_RECENT = 20
_STAGES = (("sample", "split", "exchange_ids"), ("load_features", "exchange_features"), ("forward",), ("backward",))
_NAMES = ("samp", "load", "fwd", "bwd")


def announce_training(store: Store, settings: TrainSettings, num_ranks: int, console: Console) -> None:
    """Print the store, the model, the ranks and the number of steps of a training that starts."""
    per_epoch = settings.steps_per_epoch(settings.count_targets(store))
    size = f"{store.num_vertices:,} vertices, {store.num_edges:,} edges"
    layers = f"{settings.num_layers} layers of width {settings.hidden}"
    shared = f", {settings.batch_size / num_ranks:.1f} per rank on average" if num_ranks > 1 else ""
    shared += f", {settings.accumulate} of them per step" if settings.accumulate > 1 else ""
    ranks = f"{num_ranks} rank(s), strategy {settings.strategy}"
    for line in (
        f"train {settings.model}, {layers}, on {store.where}: {size}",
        f"{ranks}; global mini-batch of {settings.batch_size} {'pairs' if settings.of_pairs else 'targets'}{shared}",
        f"{settings.num_steps(store)} steps, {per_epoch} per epoch; starting ...",
    ):
        console.print(line, highlight=False, markup=False)


class TrainingView(RunView):
    """Draws on stderr, on rank 0 only."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._console = Console(stderr=True, soft_wrap=True)
        self._bars = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=6),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._recent: deque[StepReport] = deque(maxlen=_RECENT)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, total_steps: int, done_steps: int) -> None:
        """Draw the line of a run whose ranks are up."""
        self.note(f"{self._num_ranks} rank(s) started; compiling kernels in the first step ...")
        self._task = self._bars.add_task("train", total=total_steps, completed=done_steps, epoch=1, shown="")

    def on_step(self, report: "StepReport") -> None:
        """Draw a step."""
        assert self._task is not None
        self._recent.append(report)
        self._bars.update(self._task, advance=1, epoch=report.epoch + 1, shown=self._describe())

    def _describe(self) -> str:
        seconds = sum(report.seconds for report in self._recent)
        rate = human(sum(report.num_targets for report in self._recent) / max(seconds, 1e-9))
        times = [
            sum(report.stages.get(stage, 0.0) for report in self._recent for stage in stages) / len(self._recent)
            for stages in _STAGES
        ]
        shown = " ".join(f"{name} {1000 * time:.0f}" for name, time in zip(_NAMES, times, strict=True))
        return f"loss {self._recent[-1].loss:.4f} {rate.replace(' ', '')}/s {shown} ms"

    def epoch(self, report: "EpochReport") -> None:
        """A line that stays."""
        scores = "".join(f"  {text}" for text in _describe_scores(report.scores or {}, report.metric))
        self.note(f"epoch {report.epoch:3d}  mean loss {report.mean_loss:.4f}{scores}  {report.seconds:.1f} s")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False)


def _describe_scores(scores: dict[str, float], first: str) -> Iterator[str]:
    """Scores as people write them: shares in percent, the rest as numbers."""
    for key, value in scores.items():
        name, _, metric = key.partition(" ")
        metric = metric or first
        shown = f"{100 * value:.2f}%" if metric == "accuracy" or metric.startswith("f1") else f"{value:.4f}"
        yield f"{name} {shown}" if metric == "accuracy" else f"{name} {metric} {shown}"


def show_result(result: "TrainResult", store: Path, console: Console) -> None:
    """The table at the end of a run, or how to continue it."""
    if not result.finished:
        steps = len(result.history.losses)
        ranks = f" --nproc {result.ranks}" if result.ranks > 1 else ""
        again = f"gsplit train {shown_place(store)}{ranks} --resume {result.out}"
        text = f"stopped after {steps} steps, all kept; to continue: {again}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    history = result.history
    table.add_row("steps", f"{len(history.losses)} on {result.ranks} rank(s), {result.strategy}")
    first, rest = history.step_seconds[0], history.step_seconds[1:]
    if rest:
        mean = sum(rest) / len(rest)
        table.add_row("seconds per step", f"{mean:.3f} (without the first, which compiles: {first:.1f} s)")
    else:
        table.add_row("seconds per step", f"{first:.1f} (the first, which compiles)")
    table.add_row("last loss", f"{history.losses[-1]:.4f}")
    if result.best:
        scores = ", ".join(_describe_scores(result.best.scores, result.metric))
        table.add_row("best epoch", f"{result.best.epoch}: {scores} (exact, all neighbours)")
    if result.straggler:
        table.add_row("straggler", result.straggler)
    kept = "not kept (--out RUN keeps them)" if result.out is None else f"{result.out}, for gsplit infer"
    table.add_row("weights", kept)
    console.print(table, highlight=False)


def describe_predictions(result: "InferenceResult", store: Store) -> str:
    """A line about the file, with a hint how to get more, and a warning where outputs are not finite."""
    lost = result.predictions.num_without_class
    warning = f"\nno class in {lost:,} rows: the model's outputs there are NaN or infinite" if lost else ""
    return _describe_file(result.predictions, store) + warning


def _describe_file(made: "Predictions", store: Store) -> str:
    columns = list(made.columns)
    if len(columns) > _MOST_COLUMNS:
        columns = [*columns[: _MOST_COLUMNS - 1], "...", columns[-1]]
    if made.path.suffix in TABLES:
        text = f"{shown_place(made.path)}: {made.num_rows:,} rows, columns id, {', '.join(columns)}"
        return text + ("; outputs too: --what both" if made.what == "classes" else "")
    shape = f"{made.num_rows:,} x {len(made.columns):,}" if made.what == "outputs" else f"{made.num_rows:,}"
    text = f"{shown_place(made.path)}: {shape}, {made.what}; row v is original vertex v"
    named = {"name_offsets": "strings", "vertex_ids": "mapped numbers"}
    found = [kind for array, kind in named.items() if array in store.names]
    return f"{text}; ids are {found[0]}: a .parquet or .csv table holds them" if found else text
