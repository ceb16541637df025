"""Count everything, cheaply (law 7): seconds per stage, amounts and high-water marks, per rank and step.

A ``StepTelemetry`` collects the numbers of one step and travels with its batch, so that stages which run ahead of
training are recorded in the step they belong to. ``Telemetry`` is the log of a rank: it closes steps into frozen
records, keeps the newest at hand and writes them to a JSONL file if one is given. Names are stable, because advice and
results are computed from them. Bytes and collectives are those of the whole step: ids, input rows, hidden rows forward
and their gradients backward, losses and averaged gradients. Rows are counted once, when they travel forward.
``forward`` contains ``shuffle``.

When each span began and ended is kept, too, with its thread, so that a step can be drawn (``gsplit report``). These are
times of the host's monotonic clock, which all processes of one host share; between hosts they cannot be compared.

On a device times are the device's own, taken by events in its queue, and values such as the loss come from there: both
are available only when the device has reached that point. The host does not wait for them: a step's record is closed a
step later. Device spans are placed at their launch time.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from gsplit.device.devices import AsyncHostCopy, StageClock
from gsplit.errors import explain

__all__ = ["Counter", "Gauge", "KEPT_SPANS", "Span", "StepRecord", "StepTelemetry", "Telemetry", "TimedSpan", "Value"]

_LOG = logging.getLogger(__name__)

Span = Literal[
    "sample",
    "split",
    "exchange_ids",
    "load_features",
    "copy",
    "gather_features",
    "exchange_features",
    "wait_for_batch",
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
    "cache_hits",
    "rows_sent",
    "rows_received",
    "rows_copied",
    "bytes_sent",
    "bytes_received",
    "collectives",
]
Gauge = Literal[
    "sampler_bytes", "targets_bytes", "batch_bytes", "largest_range_array_bytes", "largest_batch_array_bytes"
]

Value = Literal["loss", "learning_rate", "gradient_norm"]

_LOADING: frozenset[Span] = frozenset({"sample", "split", "exchange_ids", "load_features"})
_CPU = torch.device("cpu")

KEPT_RECORDS = 1024
KEPT_SPANS = 256  # of a step; later ones are in its seconds only. A step of three layers has about 20


class TimedSpan(NamedTuple):
    """A span of a step, on the host's clock: ``time.perf_counter_ns``."""

    name: str
    thread: str
    start_ns: int
    end_ns: int


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
    spans: tuple[TimedSpan, ...] = ()


class _Stage:
    """A block whose time is added to a stage; a class, because a generator would cost more than the clocks."""

    __slots__ = ("_clock", "_mark", "_name", "_start_cpu_s", "_start_ns", "_step")

    def __init__(self, step: "StepTelemetry", name: Span, clock: StageClock | None) -> None:
        self._step, self._name, self._clock = step, name, clock

    def __enter__(self) -> None:
        self._step.begin_stage(self._name)
        self._start_ns, self._start_cpu_s = time.perf_counter_ns(), time.thread_time()
        self._mark = None if self._clock is None else self._clock.mark()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._step.end_stage(self._name, self._start_ns, self._start_cpu_s, self._clock, self._mark)


class StepTelemetry:
    """Collects one rank's numbers of one step. ``device`` is the model's, ``sample_device`` the loader's.

    ``on_stage`` is called with every stage that begins.
    """

    def __init__(
        self,
        epoch: int = 0,
        step: int = 0,
        device: torch.device = _CPU,
        sample_device: torch.device = _CPU,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        self.epoch, self.step, self._on_stage = epoch, step, on_stage
        self._device, self._sample_device = device, sample_device
        self._clocks: dict[torch.device, StageClock] = {}
        self._pending_spans: list[tuple[Span, StageClock, Any, Any]] = []
        self._pending_values: dict[Value, AsyncHostCopy] = {}
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        """Of the thread that ran a stage on the host; what its helper threads did is not in it."""
        self.counts: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        self.values: dict[str, float] = {}
        self.spans: list[TimedSpan] = []

    def span(self, name: Span, device: torch.device | None = None) -> "_Stage":
        """Add the time of a block to a stage, on the clock of a device: by default the one the stage belongs to."""
        return _Stage(self, name, self._clock(device or (self._sample_device if name in _LOADING else self._device)))

    def begin_stage(self, name: Span) -> None:
        """What ``span`` does at the beginning of a block."""
        if self._on_stage is not None:
            self._on_stage(f"{name} of epoch {self.epoch}, step {self.step}")

    def end_stage(self, name: Span, start_ns: int, start_cpu_s: float, clock: StageClock | None, mark: Any) -> None:
        """What ``span`` does at the end of a block."""
        if clock is None:
            self.add_span(name, start_ns)
            self.cpu_seconds[name] = self.cpu_seconds.get(name, 0.0) + time.thread_time() - start_cpu_s
        else:
            self._pending_spans.append((name, clock, mark, clock.mark()))
            self._keep_span(name, start_ns, time.perf_counter_ns())

    def add_span(self, name: Span, start_ns: int) -> None:
        """Add to a stage what has passed in this thread since a moment of ``time.perf_counter_ns``."""
        end_ns = time.perf_counter_ns()
        self.add_seconds(name, (end_ns - start_ns) * 1e-9)
        self._keep_span(name, start_ns, end_ns)

    def _keep_span(self, name: Span, start_ns: int, end_ns: int) -> None:
        if len(self.spans) < KEPT_SPANS:
            self.spans.append(TimedSpan(name, threading.current_thread().name, start_ns, end_ns))

    def add_seconds(self, name: Span, seconds: float) -> None:
        """Add to the time of a stage."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _clock(self, device: torch.device) -> StageClock | None:
        if device.type == "cpu":
            return None
        return self._clocks.setdefault(device, StageClock(device))

    def count(self, name: Counter, amount: int) -> None:
        """Add to an amount."""
        self.counts[name] = self.counts.get(name, 0) + amount

    def record_max(self, name: Gauge, value: int) -> None:
        """Raise a high-water mark."""
        self.peaks[name] = max(self.peaks.get(name, 0), value)

    def record(self, name: Value, value: float | Tensor) -> None:
        """Keep a value of this step; one on a device is read by ``synchronize``."""
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self._pending_values[name] = AsyncHostCopy(value)
        else:
            self.values[name] = float(value)

    @property
    def is_pending(self) -> bool:
        """Whether something of this step is still on its way from a device."""
        return bool(self._pending_spans or self._pending_values)

    def synchronize(self) -> None:
        """Wait for the device to reach the end of this step, and add its times and values."""
        for name, clock, start, stop in self._pending_spans:
            self.add_seconds(name, clock.seconds(start, stop))
        self.values.update({name: float(value) for name, value in self._pending_values.items()})
        self._pending_spans, self._pending_values = [], {}


class Telemetry:
    """The log of one rank's steps. Use as a context manager if it writes to a file."""

    def __init__(self, rank: int = 0, path: str | Path | None = None) -> None:
        self._rank = rank
        self._cpu_mark = time.process_time()
        self._stream = Path(path).open("a", buffering=1) if path is not None else None  # noqa: SIM115
        self._records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self._open: deque[tuple[StepTelemetry, float]] = deque()  # with their CPU time

    @property
    def records(self) -> deque[StepRecord]:
        """The newest records, of all steps that have ended."""
        self._close_steps(0)
        return self._records

    def start_clock(self) -> None:
        """Count CPU time from now on: what this process did before belongs to no step."""
        self._cpu_mark = time.process_time()

    def end_step(self, step: StepTelemetry) -> None:
        """Close a step into its record, or, if it is pending, the one before.

        Its CPU time is what has passed since the step before ended.
        """
        now = time.process_time()
        self._open.append((step, now - self._cpu_mark))
        self._cpu_mark = now
        self._close_steps(1 if step.is_pending else 0)

    def _close_steps(self, num_left: int) -> None:
        while len(self._open) > num_left:
            self._close_step(*self._open.popleft())

    def _close_step(self, step: StepTelemetry, cpu_seconds: float) -> None:
        step.synchronize()
        record = StepRecord(
            self._rank,
            step.epoch,
            step.step,
            cpu_seconds,
            dict(step.seconds),
            dict(step.counts),
            dict(step.peaks),
            dict(step.values),
            tuple(step.spans),
        )
        self._records.append(record)
        if self._stream is not None:
            self._write(json.dumps(vars(record)) + "\n")

    def _write(self, line: str) -> None:
        """Add a line to the file. A disk that is full ends the file, not the training."""
        assert self._stream is not None
        try:
            self._stream.write(line)
        except OSError as error:
            fix = "free space; the steps so far are kept, later ones are not written"
            _LOG.warning(explain(self._stream.name, "room for telemetry", error.strerror, fix))
            self._drop_file()

    def _drop_file(self) -> None:
        stream, self._stream = self._stream, None
        with suppress(OSError):  # what it still holds cannot be written, either
            if stream is not None:
                stream.close()

    def close(self) -> None:
        """Finish the file."""
        self._close_steps(0)
        self._drop_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
