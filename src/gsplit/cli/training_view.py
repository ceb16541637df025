"""What a user sees while training: one live line with loss, rate, stage times and remaining time, and one per epoch."""

from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from gsplit.cli.console import human
from gsplit.trainer import StepReport

__all__ = ["TrainingView"]

_RECENT = 20
_STAGES = (("sample", "split", "exchange_ids"), ("load_features", "exchange_features"), ("forward",), ("backward",))
_NAMES = ("samp", "load", "fwd", "bwd")


class TrainingView:
    """Draws on stderr, on rank 0 only; hears every step and every evaluation."""

    def __init__(self, num_steps: int | None, epochs: int) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=6),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._num_steps, self._epochs = num_steps, epochs
        self._task: TaskID | None = None
        self._recent: deque[StepReport] = deque(maxlen=_RECENT)
        self._epoch_losses: list[float] = []
        self._epoch_seconds = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def step(self, report: StepReport) -> None:
        """Draw a step."""
        if self._task is None:
            total = self._num_steps or self._epochs * report.num_steps
            self._task = self._bars.add_task("train", total=total, epoch=1, shown="")
        if report.step == 0:
            self._epoch_losses, self._epoch_seconds = [], 0.0
        self._recent.append(report)
        self._epoch_losses.append(report.loss)
        self._epoch_seconds += report.seconds
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

    def evaluation(self, epoch: int, scores: dict[str, float]) -> None:
        """A line that stays."""
        loss = sum(self._epoch_losses) / max(1, len(self._epoch_losses))
        shown = "  ".join(f"{name} {100 * value:.2f}%" for name, value in scores.items())
        self._console.print(
            f"epoch {epoch:3d}  mean loss {loss:.4f}  {shown}  {self._epoch_seconds:.1f} s", highlight=False
        )
