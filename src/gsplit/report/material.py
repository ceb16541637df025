"""Reading what a report is made from: documents of measurements and folders of runs, in any mix.

A file is told by its ``kind``, a folder by its settings. Nothing is guessed: what is not known, is damaged or too large
is refused with its name. Telemetry is read line by line, and only the newest steps are kept.
"""

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from gsplit.errors import InputError, explain
from gsplit.report.documents import BenchPartition, BenchTrain, PlannerCheck, RunHistory, StepLine
from gsplit.run.config import TrainSettings
from gsplit.run.folder import history_path, load_run, telemetry_files
from gsplit.untrusted import Expected, open_regular, parse_json, read_bounded

__all__ = ["Material", "Run", "read_material"]

_MAX_BYTES = 32 << 20  # of a document
_MAX_LINE_BYTES = 1 << 20  # of telemetry
_KEPT_STEPS = 1024  # of every rank
_KINDS = "a document of gsplit bench train, gsplit bench partition or the planner's check, or a folder of gsplit train"

_DOCUMENT = Expected(f"JSON: {_KINDS}", "check the path, or leave it out")

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Run:
    """A folder of ``gsplit train --out``. ``steps``: of every rank, the newest ones."""

    name: str
    settings: TrainSettings
    history: RunHistory
    steps: dict[int, list[StepLine]]

    @property
    def num_ranks(self) -> int:
        return max(1, len(self.steps))


@dataclass(frozen=True)
class Material:
    """Everything that was given, in the order given; partitions and checks by the names of their files."""

    benches: list[BenchTrain] = field(default_factory=list)
    partitions: dict[str, BenchPartition] = field(default_factory=dict)
    checks: dict[str, PlannerCheck] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)


def read_material(paths: Sequence[Path]) -> Material:
    """Read files and folders."""
    material = Material()
    for path in paths:
        if path.is_dir():
            material.runs.append(_read_run(path))
            continue
        text = _read_text(path)
        kind = _kind(path, text)
        if kind == "bench train":
            material.benches.append(_parse(BenchTrain, text, path))
        elif kind == "planner check":
            material.checks[path.stem] = _parse(PlannerCheck, text, path)
        elif kind == "bench partition":
            material.partitions[path.stem] = _parse(BenchPartition, text, path)
        else:
            raise InputError(explain(path, _KINDS, f"the kind {kind!r}", "leave it out"))
    return material


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path, _MAX_BYTES, _DOCUMENT).decode()
    except UnicodeDecodeError:
        raise _DOCUMENT.refuse(path, "bytes that are no text") from None


def _kind(path: Path, text: str) -> str:
    document = parse_json(text, path, _DOCUMENT)
    if not isinstance(document, dict):
        raise InputError(explain(path, _KINDS, f"a JSON {type(document).__name__}", "leave it out"))
    if "held_out_batches" in document:  # its documents are older than kinds
        return "bench partition"
    return str(document.get("kind", "none"))[:80]


def _parse(model: type[Model], text: str, where: object) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        fix = "make it again with this version of gsplit"
        raise InputError(explain(f"{where}: {place}", first["msg"], repr(first["input"])[:80], fix)) from error


def _read_run(folder: Path) -> Run:
    settings, _ = load_run(folder)
    history = history_path(folder)
    steps = {}
    for path in telemetry_files(folder):
        lines = _read_steps(path)
        if lines:
            steps[lines[-1].rank] = lines
    name = folder.resolve().name
    return Run(name, settings, _parse(RunHistory, _read_text(history), history), dict(sorted(steps.items())))


def _read_steps(path: Path) -> list[StepLine]:
    """The newest steps of a rank. A line that is cut off, such as the last of a killed run, is refused."""
    newest: deque[tuple[int, str]] = deque(maxlen=_KEPT_STEPS)
    try:
        file = open_regular(path, follow=False)
    except OSError as error:
        raise InputError(explain(path, "telemetry of a run", error.strerror, "remove the file")) from None
    with os.fdopen(file, errors="replace") as stream:
        number = 0
        while line := stream.readline(_MAX_LINE_BYTES):
            number += 1
            newest.append((number, line))
    return [_parse(StepLine, line, f"{path}, line {number}") for number, line in newest]
