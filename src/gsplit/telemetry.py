"""Count everything, cheaply (law 7): seconds per stage, amounts and high-water marks, per rank and step.

A ``StepTelemetry`` collects the numbers of one step and travels with its batch, so that stages which run ahead of
training are recorded in the step they belong to. ``Telemetry`` is the log of a rank: it closes steps into frozen
records, keeps the newest at hand and writes them to a JSONL file if one is given. Names are stable, because advice and
results are computed from them. Rows, bytes and collectives are those of loading and forward; backward returns the same
rows of the hidden layers. ``forward`` contains ``shuffle``.
"""

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

__all__ = ["Counter", "Gauge", "Span", "StepRecord", "StepTelemetry", "Telemetry", "Value"]

Span = Literal[
    "sample",
    "split",
    "exchange_ids",
    "load_features",
    "exchange_features",
    "shuffle",
    "forward",
    "backward",
    "optimizer",
]
Counter = Literal[
    "targets",
    "edges",
    "input_rows",
    "rows_loaded",
    "bytes_loaded",
    "rows_sent",
    "rows_received",
    "bytes_sent",
    "bytes_received",
    "collectives",
]
Gauge = Literal[
    "sampler_bytes", "targets_bytes", "batch_bytes", "largest_range_array_bytes", "largest_batch_array_bytes"
]

Value = Literal["loss", "learning_rate", "gradient_norm"]

KEPT_RECORDS = 1024


@dataclass(frozen=True)
class StepRecord:
    """What one rank did in one step. ``cpu_seconds``: of the whole process, all threads, waiting not counted."""

    rank: int
    epoch: int
    step: int
    cpu_seconds: float
    seconds: dict[str, float]
    counts: dict[str, int]
    peaks: dict[str, int]
    values: dict[str, float]


class StepTelemetry:
    """Collects one rank's numbers of one step."""

    def __init__(self, epoch: int = 0, step: int = 0) -> None:
        self.epoch, self.step = epoch, step
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        self.values: dict[str, float] = {}

    @contextmanager
    def span(self, name: Span) -> Iterator[None]:
        """Add the time of a block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def count(self, name: Counter, amount: int) -> None:
        """Add to an amount."""
        self.counts[name] = self.counts.get(name, 0) + amount

    def peak(self, name: Gauge, value: int) -> None:
        """Raise a high-water mark."""
        self.peaks[name] = max(self.peaks.get(name, 0), value)

    def note(self, name: Value, value: float) -> None:
        """Keep a value of this step."""
        self.values[name] = value


class Telemetry:
    """The log of one rank's steps. Use as a context manager if it writes to a file."""

    def __init__(self, rank: int = 0, path: str | Path | None = None) -> None:
        self._rank = rank
        self._cpu_mark = time.process_time()
        self._stream = Path(path).open("a", buffering=1) if path is not None else None  # noqa: SIM115
        self.records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)

    def start_clock(self) -> None:
        """Count CPU time from now on: what this process did before belongs to no step."""
        self._cpu_mark = time.process_time()

    def end_step(self, step: StepTelemetry) -> StepRecord:
        """Close a step into its record. Its CPU time is what has passed since the step before was closed."""
        now = time.process_time()
        cpu_seconds, self._cpu_mark = now - self._cpu_mark, now
        record = StepRecord(
            self._rank,
            step.epoch,
            step.step,
            cpu_seconds,
            dict(step.seconds),
            dict(step.counts),
            dict(step.peaks),
            dict(step.values),
        )
        self.records.append(record)
        if self._stream is not None:
            self._stream.write(json.dumps(asdict(record)) + "\n")
        return record

    def close(self) -> None:
        """Finish the file."""
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
