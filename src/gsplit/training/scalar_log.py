"""Logs losses, learning rates and scores into a folder: ``scalars.csv``, and optionally TensorBoard event files.

One row per number: ``step,epoch,name,value``. Steps are optimizer steps; both count from 1. A resumed training goes on
in the same files: rows of steps that will be repeated are removed first, so every step is there once. A new training
renames an older log to ``scalars-1.csv`` and so on. Use it on rank 0 only: ``edges_per_s`` and ``seconds`` are those of
rank 0.
"""

import csv
import io
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gsplit.errors import InputError, MissingDependencyError, explain
from gsplit.files.atomic import write_atomic
from gsplit.files.untrusted import open_regular
from gsplit.training.callbacks import Callback, EvaluationReport, StepReport

__all__ = ["ScalarLog", "check_log_folder"]

_HEAD = ("step", "epoch", "name", "value")


class ScalarLog(Callback):
    """Writes every ``every``-th step and all evaluations. Use it as a context manager, or call ``close``."""

    def __init__(self, folder: str | Path, *, every: int = 1, tensorboard: bool = False) -> None:
        """``tensorboard``: also write event files, which needs the package ``tensorboard``."""
        if every < 1:
            raise InputError(explain("every", "at least 1 step", every, "leave it out to log every step"))
        self._folder = Path(folder)
        self._every = every
        self._writer_class = _summary_writer() if tensorboard else None
        self._writer: Any = None
        self._stream: io.TextIOWrapper | None = None
        self._logged: set[tuple[int, str]] = set()  # rows of the step that training continues from

    def on_start(self, num_steps: int) -> None:
        """Open the files and remove the rows of steps after ``num_steps``, which will be repeated."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "scalars.csv"
        rows = [row for row in _read_rows(path) if int(row[0]) <= num_steps]
        if num_steps == 0:
            _set_aside(path)
        self._logged = {(int(step), name) for step, _, name, _ in rows if int(step) == num_steps}
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([_HEAD, *rows])
        write_atomic(path, [text.getvalue().encode()])
        self._stream = path.open("a", buffering=1, newline="")
        if self._writer_class is not None:
            self._writer = self._writer_class(str(self._folder), purge_step=num_steps + 1)

    def on_step(self, report: StepReport) -> None:
        if report.number % self._every == 0:
            values = {
                "loss": report.loss,
                "learning_rate": report.learning_rate,
                "seconds": report.seconds,
                "edges_per_s": report.num_edges / max(report.seconds, 1e-9),
            }
            self._write(report.number, report.epoch + 1, values)  # reports of steps count epochs from 0

    def on_evaluation(self, report: EvaluationReport) -> None:
        self._write(report.number, report.epoch, report.named_scores)

    def _write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        assert self._stream is not None
        new = {name: value for name, value in values.items() if (step, name) not in self._logged}
        csv.writer(self._stream, lineterminator="\n").writerows((step, epoch, *item) for item in new.items())
        if self._writer is not None:
            for name, value in new.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        if self._stream is not None:
            self._stream.close()
        if self._writer is not None:
            self._writer.close()
        self._stream = None
        self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_log_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, or whose ``scalars.csv`` is not a log."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        got = f"{there}, which cannot be written" if there.is_dir() else f"{there}, a file"
        raise InputError(explain(folder, "a folder for the log, or a place for one", got, "choose another folder"))
    _read_rows(folder / "scalars.csv")


def _set_aside(path: Path) -> None:
    """Rename the log of another training, which has ended or was killed before its first checkpoint."""
    if path.exists():
        number = next(n for n in count(1) if not path.with_name(f"scalars-{n}.csv").exists())
        path.rename(path.with_name(f"scalars-{number}.csv"))


def _read_rows(path: Path) -> list[list[str]]:
    """The complete rows of a log, if there is one; the last row may have been cut off by a kill."""
    if not path.exists():
        return []
    with os.fdopen(open_regular(path, follow=False), encoding="utf-8") as stream:
        lines = stream.read().splitlines(keepends=True)
    rows = list(csv.reader(line for line in lines if line.endswith("\n")))
    for number, row in enumerate(rows):
        is_right = row == list(_HEAD) if number == 0 else len(row) == len(_HEAD) and row[0].isdigit()
        if not is_right:
            got = f"{','.join(row)[:80]!r} in line {number + 1}"
            raise InputError(explain(path, "a log of scalars", got, "choose another folder"))
    return rows[1:]


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        fix = "pip install 'gsplit[log]', or log without tensorboard: scalars.csv is always written"
        raise MissingDependencyError(explain("tensorboard", "the package of that name", "not installed", fix)) from None
    return SummaryWriter
