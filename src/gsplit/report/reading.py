"""Reading the history and telemetry of a run folder, which may come from an untrusted source.

A damaged or too large file is refused with its name. Telemetry is read line by line, and only the newest steps are
kept.
"""

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gsplit.errors import InputError, explain
from gsplit.files.rotated import older_file
from gsplit.files.untrusted import Expected, open_regular, read_bounded
from gsplit.run.config import TrainSettings
from gsplit.run.folder import MAX_LINE_BYTES, history_path, load_run, telemetry_files

if TYPE_CHECKING:
    from gsplit.inference.metrics import Metric

__all__ = [
    "Amount",
    "Document",
    "Number",
    "Run",
    "RunHistory",
    "StepLine",
    "Whole",
    "parse_document",
    "read_run",
    "read_text",
]

_MAX_BYTES = 32 << 20  # of a document
_MAX_HISTORY_BYTES = 1 << 30  # 24 million steps
_KEPT_STEPS = 1024  # of every rank
_LAST_STEPS = 3  # a full disk may have cost a rank its last line

Amount = Annotated[float, Field(ge=0.0, le=1e30)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Whole = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]


class Document(BaseModel):
    """A JSON document. Unknown fields are ignored; known fields are required and must have their type."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class RunHistory(Document):
    """``history.json`` of a run: every step, and every evaluation with its epoch."""

    losses: list[Number]
    step_seconds: list[Amount]
    evaluations: list[dict[str, Number]]


class StepLine(Document):
    """A line of telemetry: one step of one rank. A span is (stage, thread, start, end) in nanoseconds."""

    rank: Annotated[int, Field(ge=0, le=1 << 20)]
    epoch: Whole
    step: Whole
    cpu_seconds: Amount
    seconds: dict[str, Amount]
    counts: dict[str, Whole]
    spans: list[tuple[str, str, Whole, Whole]] = []

    @property
    def rows_read(self) -> int:
        """Input rows that the rank has copied or read in place."""
        return self.counts.get("rows_loaded", 0) + self.counts.get("rows_in_place", 0)


Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Run:
    """A folder of ``gsplit train --out``. ``steps``: the newest steps that its last ranks computed together."""

    name: str
    settings: TrainSettings
    history: RunHistory
    steps: dict[int, list[StepLine]]

    @property
    def num_ranks(self) -> int:
        return max(1, len(self.steps))

    @property
    def metric(self) -> "Metric":
        """The metric that decides which weights are best; runs of older versions have accuracy."""
        from gsplit.inference.metrics import check_metrics  # torch, only when used

        settings = self.settings
        return check_metrics((settings.metric or "accuracy").split(","), of_pairs=settings.of_pairs)[0]

    @property
    def best_score(self) -> float | None:
        """The best score on val; None if val was not evaluated."""
        val = self.settings.list_named("val")
        scores = [each[val] for each in self.history.evaluations if val in each]
        best = max if self.metric.higher_is_better else min
        return best(scores, default=None)


def read_text(path: Path, expected: Expected, max_bytes: int = _MAX_BYTES) -> str:
    """The text of a file of bounded size."""
    data = read_bounded(path, max_bytes, expected)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise expected.refuse(path, "bytes that are not UTF-8") from None
    except MemoryError:
        raise expected.refuse(path, f"{len(data):,} bytes, more than the memory left") from None


def parse_document(model: type[Model], text: str, where: object) -> Model:
    """Parse a document; the error names the first wrong field."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        fix = "make it again with this version of gsplit"
        raise InputError(explain(f"{where}: {place}", first["msg"], repr(first["input"])[:80], fix)) from error


def read_run(folder: Path) -> Run:
    """Read a folder of ``gsplit train --out``."""
    settings, _ = load_run(folder)
    history = history_path(folder)
    steps = {}
    for path in telemetry_files(folder):
        lines = _read_steps(path)
        if lines:
            steps[lines[-1].rank] = lines
    expected = Expected("the history of a run", "train again with gsplit train --out")
    text = read_text(history, expected, _MAX_HISTORY_BYTES)
    losses = parse_document(RunHistory, text, history)
    return Run(name=folder.resolve().name, settings=settings, history=losses, steps=_of_last_ranks(steps))


def _of_last_ranks(steps: dict[int, list[StepLine]]) -> dict[int, list[StepLine]]:
    """Without the steps before a run was continued on another number of ranks."""
    places = {rank: {(line.epoch, line.step) for line in lines} for rank, lines in steps.items()}
    newest = sorted(set().union(*places.values()))[-_LAST_STEPS:]
    last = sorted(rank for rank in places if not places[rank].isdisjoint(newest))
    together = set(newest).union(*places.values())
    for rank, own in places.items():
        together = together & own if rank in last else together - own
    kept = {rank: [line for line in steps[rank] if (line.epoch, line.step) in together] for rank in last}
    return kept if together else {rank: steps[rank] for rank in last}


def _read_steps(path: Path) -> list[StepLine]:
    """The newest steps of a rank. A last line without an end, as a full disk leaves it, is left out."""
    newest: deque[tuple[str, str]] = deque(maxlen=_KEPT_STEPS)
    for each in (older_file(path), path):
        try:
            file = open_regular(each, follow=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(explain(each, "telemetry of a run", error.strerror, "remove the file")) from None
        with os.fdopen(file, errors="replace") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES):
                number += 1
                if line[-1] != "\n" and len(line) < MAX_LINE_BYTES:
                    break
                newest.append((f"{each}, line {number}", line))
    return [parse_document(StepLine, line, where) for where, line in newest]
