"""Losses, rates and scores of a training in a folder: ``scalars.csv`` always, and event files for TensorBoard.

A row per number: ``step,epoch,name,value``. Steps are those of the optimizer; both count from 1. A training that is
resumed goes on in the same folder: rows of steps that it will make again are taken out, so that every step is there
once. One that begins anew leaves an older log there as ``scalars-1.csv``, and so on. Made on rank 0 alone:
``edges_per_s`` and ``seconds`` are those of rank 0.
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
    """Writes every ``every``-th step and all evaluations. Use as a context manager, or call ``close``."""

    def __init__(self, folder: str | Path, *, every: int = 1, tensorboard: bool = False) -> None:
        """``tensorboard``: also event files, which need the package of that name."""
        if every < 1:
            raise InputError(explain("every", "at least 1 step", every, "leave it out to log every step"))
        self._folder, self._every = Path(folder), every
        self._writer_class = _summary_writer() if tensorboard else None
        self._writer: Any = None
        self._stream: io.TextIOWrapper | None = None
        self._known: set[tuple[int, str]] = set()  # of the step from which training goes on

    def on_start(self, num_steps: int) -> None:
        """Open the files where training goes on; what they say of later steps goes."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "scalars.csv"
        rows = [row for row in _read_rows(path) if int(row[0]) <= num_steps]
        if num_steps == 0:
            _set_aside(path)
        self._known = {(int(step), name) for step, _, name, _ in rows if int(step) == num_steps}
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([_HEAD, *rows])
        write_atomic(path, [text.getvalue().encode()])
        self._stream = path.open("a", buffering=1, newline="")
        if self._writer_class is not None:
            self._writer = self._writer_class(str(self._folder), purge_step=num_steps + 1)

    def on_step(self, report: StepReport) -> None:
        """Write a step."""
        if report.number % self._every == 0:
            values = {
                "loss": report.loss,
                "learning_rate": report.learning_rate,
                "seconds": report.seconds,
                "edges_per_s": report.num_edges / max(report.seconds, 1e-9),
            }
            self._write(report.number, report.epoch + 1, values)  # reports of steps count epochs from 0

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Write the scores."""
        self._write(report.number, report.epoch, report.named_scores)

    def _write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        assert self._stream is not None
        new = {name: value for name, value in values.items() if (step, name) not in self._known}
        csv.writer(self._stream, lineterminator="\n").writerows((step, epoch, *item) for item in new.items())
        if self._writer is not None:
            for name, value in new.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the files."""
        if self._stream is not None:
            self._stream.close()
        if self._writer is not None:
            self._writer.close()
        self._stream = self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_log_folder(folder: Path) -> None:
    """Refuse a place where no log can be written, or where another file has its name."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        got = f"{there}, which cannot be written" if there.is_dir() else f"{there}, a file"
        raise InputError(explain(folder, "a folder for the log, or a place for one", got, "choose another folder"))
    _read_rows(folder / "scalars.csv")


def _set_aside(path: Path) -> None:
    """Rename the log of another training, which is over, or was cut off before its first checkpoint."""
    if path.exists():
        number = next(n for n in count(1) if not path.with_name(f"scalars-{n}.csv").exists())
        path.rename(path.with_name(f"scalars-{number}.csv"))


def _read_rows(path: Path) -> list[list[str]]:
    """Whole rows of a log that is there; a last one that was cut off by a kill is none."""
    if not path.exists():
        return []
    with os.fdopen(open_regular(path, follow=False), encoding="utf-8") as stream:
        lines = stream.read().splitlines(keepends=True)
    rows = list(csv.reader(line for line in lines if line.endswith("\n")))
    if rows and (rows[0] != list(_HEAD) or not all(len(row) == 4 and row[0].isdigit() for row in rows[1:])):
        raise InputError(explain(path, "a log of scalars", "another file", "choose another folder"))
    return rows[1:]


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        fix = "pip install 'gsplit[log]', or log without tensorboard: scalars.csv is always written"
        raise MissingDependencyError(explain("tensorboard", "the package of that name", "none", fix)) from None
    return SummaryWriter
