"""Count everything, cheaply (law 7): seconds per stage, amounts and high-water marks, per rank and step.

A ``Telemetry`` collects while a step runs and closes it into one frozen record; records go to a JSONL file if one
is given and the last of them stay at hand. Names are stable, because advice and results are computed from them.
Rows, bytes and collectives are those of loading and forward; backward returns the same rows of the hidden layers.
``forward`` contains ``shuffle``.
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

__all__ = ["Counter", "Gauge", "Span", "StepRecord", "Telemetry", "Value"]

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


class Telemetry:
    """Collects one rank's numbers. Use as a context manager if it writes to a file."""

    def __init__(self, rank: int = 0, path: str | Path | None = None) -> None:
        self._rank = rank
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._values: dict[str, float] = {}
        self._cpu_start = time.process_time()
        self._stream = Path(path).open("a", buffering=1) if path is not None else None  # noqa: SIM115
        self.records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per stage of the step under way."""
        return dict(self._seconds)

    @contextmanager
    def span(self, name: Span) -> Iterator[None]:
        """Add the time of a block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def count(self, name: Counter, amount: int) -> None:
        """Add to an amount."""
        self._counts[name] = self._counts.get(name, 0) + amount

    def peak(self, name: Gauge, value: int) -> None:
        """Raise a high-water mark."""
        self._peaks[name] = max(self._peaks.get(name, 0), value)

    def note(self, name: Value, value: float) -> None:
        """Keep a value of this step."""
        self._values[name] = value

    def begin_step(self) -> None:
        """Whatever this process did before is not part of the step."""
        self._cpu_start = time.process_time()

    def end_step(self, epoch: int, step: int) -> StepRecord:
        """Close the step: hand out its record and start anew."""
        cpu_seconds = time.process_time() - self._cpu_start
        record = StepRecord(
            self._rank, epoch, step, cpu_seconds, self._seconds, self._counts, self._peaks, self._values
        )
        self._seconds, self._counts, self._peaks, self._values = {}, {}, {}, {}
        self.begin_step()
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
