"""Counters and times of every step, on every rank (law 7): seconds per stage, amounts, and peak sizes.

A ``StepTelemetry`` collects the numbers of one step and belongs to its batch, so that stages which run ahead of
training are counted in their own step. ``Telemetry`` is the log of a rank: it makes a frozen ``StepRecord`` of each
step, keeps the newest records, and writes them to a JSONL file if one is given. Names are stable, because reports are
computed from them. Bytes and collectives are those of the whole step: ids, input rows, hidden rows and their gradients,
batch norms, losses and averaged gradients. Rows are counted once, in the forward pass. ``forward`` contains
``shuffle``.

The start and end of each span are recorded with its thread, for ``gsplit report``. They are times of the monotonic
clock of the host, which all its processes share. They cannot be compared between hosts.

On a device, times come from events on its stream. They and values such as the loss are available when the device has
reached that point. The host does not wait for them: the record of a step is made one step later. Device spans are
placed at their launch time. Events cost the host time, so they are recorded only if somebody reads the times:
if there is a file or a trainer with callbacks (``Telemetry.times_devices``).
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
from gsplit.files.rotated import RotatedFile

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
    "rows_in_place",
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
KEPT_SPANS = 256  # per step; further spans are counted in its seconds only. A step of three layers has about 20
_MAX_FILE_BYTES = 32 << 20  # about 20,000 steps; a run of weeks fills no disk


class TimedSpan(NamedTuple):
    """A span of a step, in times of ``time.perf_counter_ns``."""

    name: str
    thread: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class StepRecord:
    """The numbers of one rank in one step. ``cpu_seconds``: CPU time of all threads of the process."""

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
    """A context manager that adds the time of a block to a stage. A generator would cost more than reading clocks."""

    __slots__ = ("_clock", "_mark", "_name", "_start_cpu_s", "_start_ns", "_step")

    def __init__(self, step: "StepTelemetry", name: Span, clock: StageClock | None) -> None:
        self._step = step
        self._name = name
        self._clock = clock

    def __enter__(self) -> None:
        self._step.begin_stage(self._name)
        self._start_ns = time.perf_counter_ns()
        self._start_cpu_s = time.thread_time() if self._clock is None else 0.0
        self._mark = None if self._clock is None else self._clock.mark()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._step.end_stage(self._name, self._start_ns, self._start_cpu_s, self._clock, self._mark)


class StepTelemetry:
    """Collects the numbers of one rank in one step.

    ``device``: that of the model. ``sample_device``: that of the loader. ``on_stage``: called with the name of every
    stage that starts. ``times_devices``: whether to measure the times of stages on devices.
    """

    def __init__(
        self,
        epoch: int = 0,
        step: int = 0,
        device: torch.device = _CPU,
        sample_device: torch.device = _CPU,
        on_stage: Callable[[str], None] | None = None,
        times_devices: bool = True,
    ) -> None:
        self.epoch = epoch
        self.step = step
        self._on_stage = on_stage
        self._device = device
        self._sample_device = sample_device
        self._times_devices = times_devices
        self._clocks: dict[torch.device, StageClock] = {}
        self._pending_spans: list[tuple[Span, StageClock, Any, Any]] = []
        self._pending_values: dict[Value, AsyncHostCopy] = {}
        self._pending_counts: list[tuple[Counter, AsyncHostCopy]] = []
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        """CPU time of the thread that ran a stage on the host, without other threads."""
        self.counts: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        self.values: dict[str, float] = {}
        self.spans: list[TimedSpan] = []

    def span(self, name: Span, device: torch.device | None = None) -> "_Stage":
        """Add the time of a block to a stage, on the clock of a device; by default, on that of the stage."""
        if device is None:
            device = self._sample_device if name in _LOADING else self._device
        return _Stage(self, name, self._clock(device))

    def begin_stage(self, name: Span) -> None:
        """Called by ``span`` at the start of a block."""
        if self._on_stage is not None:
            self._on_stage(f"{name} of epoch {self.epoch}, step {self.step}")

    def end_stage(self, name: Span, start_ns: int, start_cpu_s: float, clock: StageClock | None, mark: Any) -> None:
        """Called by ``span`` at the end of a block."""
        if clock is None:
            self.add_span(name, start_ns)
            self.cpu_seconds[name] = self.cpu_seconds.get(name, 0.0) + time.thread_time() - start_cpu_s
        else:
            if clock.is_read:
                self._pending_spans.append((name, clock, mark, clock.mark()))
            self._keep_span(name, start_ns, time.perf_counter_ns())

    def add_span(self, name: Span, start_ns: int) -> None:
        """Add the time since ``start_ns``, of ``time.perf_counter_ns``, to a stage."""
        end_ns = time.perf_counter_ns()
        self.add_seconds(name, (end_ns - start_ns) * 1e-9)
        self._keep_span(name, start_ns, end_ns)

    def _keep_span(self, name: Span, start_ns: int, end_ns: int) -> None:
        if len(self.spans) < KEPT_SPANS:
            self.spans.append(TimedSpan(name, threading.current_thread().name, start_ns, end_ns))

    def add_seconds(self, name: Span, seconds: float) -> None:
        """Add seconds to a stage."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _clock(self, device: torch.device) -> StageClock | None:
        if device.type == "cpu":
            return None
        if device not in self._clocks:
            self._clocks[device] = StageClock(device, is_read=self._times_devices)
        return self._clocks[device]

    def count(self, name: Counter, amount: int | Tensor) -> None:
        """Add to a counter. An amount on a device is read by ``synchronize``."""
        if isinstance(amount, Tensor):
            self._pending_counts.append((name, AsyncHostCopy(amount)))
        else:
            self.counts[name] = self.counts.get(name, 0) + amount

    def record_max(self, name: Gauge, value: int) -> None:
        """Record a size; the largest of a step is kept."""
        self.peaks[name] = max(self.peaks.get(name, 0), value)

    def record(self, name: Value, value: float | Tensor | AsyncHostCopy) -> None:
        """Record a value of this step. A value on a device, or on its way from it, is read by ``synchronize``."""
        if isinstance(value, AsyncHostCopy) and value.is_pending:
            self._pending_values[name] = value
        elif isinstance(value, Tensor) and value.device.type != "cpu":
            self._pending_values[name] = AsyncHostCopy(value)
        else:
            self.values[name] = float(value)

    @property
    def is_pending(self) -> bool:
        """Whether times or values of this step have not been read from a device yet."""
        return bool(self._pending_spans or self._pending_values or self._pending_counts)

    def synchronize(self) -> None:
        """Wait for the device to reach the end of this step, and read its times and values."""
        for name, clock, start, stop in self._pending_spans:
            self.add_seconds(name, clock.seconds(start, stop))
        self.values.update({name: float(value) for name, value in self._pending_values.items()})
        for counter, amount in self._pending_counts:
            self.count(counter, int(amount.read()))
        self._pending_spans = []
        self._pending_values = {}
        self._pending_counts = []


class Telemetry:
    """The log of the steps of one rank. Use it as a context manager if it writes to a file.

    When the file has 32 MB, it is renamed to PATH.1, which replaces the previous PATH.1.
    """

    def __init__(self, rank: int = 0, path: str | Path | None = None) -> None:
        self._rank = rank
        self.times_devices = path is not None
        """Whether times of stages on devices are read; a trainer with callbacks sets it."""
        self._cpu_mark = time.process_time()
        self._stream = RotatedFile(Path(path), _MAX_FILE_BYTES) if path is not None else None
        self._records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self._open: deque[tuple[StepTelemetry, float]] = deque()  # steps without a record, with their CPU time

    @property
    def records(self) -> deque[StepRecord]:
        """The newest records, of steps that have ended."""
        self._close_steps(0)
        return self._records

    def start_clock(self) -> None:
        """Start counting CPU time, so that earlier work of the process is not counted in a step."""
        self._cpu_mark = time.process_time()

    def end_step(self, step: StepTelemetry) -> None:
        """Make the record of a step, or, if it is pending, of the step before it.

        The CPU time of a step is that since the end of the step before it.
        """
        now = time.process_time()
        self._open.append((step, now - self._cpu_mark))
        self._cpu_mark = now
        self._close_steps(1 if step.is_pending else 0)

    def _close_steps(self, num_left: int) -> None:
        while len(self._open) > num_left:
            step, cpu_seconds = self._open.popleft()
            self._close_step(step, cpu_seconds)

    def _close_step(self, step: StepTelemetry, cpu_seconds: float) -> None:
        step.synchronize()
        record = StepRecord(
            rank=self._rank,
            epoch=step.epoch,
            step=step.step,
            cpu_seconds=cpu_seconds,
            seconds=dict(step.seconds),
            counts=dict(step.counts),
            peaks=dict(step.peaks),
            values=dict(step.values),
            spans=tuple(step.spans),
        )
        self._records.append(record)
        if self._stream is not None:
            self._write(json.dumps(vars(record)) + "\n")

    def _write(self, line: str) -> None:
        """Write a line to the file. If the disk is full, the file ends and training continues."""
        assert self._stream is not None
        try:
            self._stream.write(line)
        except OSError as error:
            fix = "free space; the steps so far are kept, later ones are not written"
            _LOG.warning(explain(self._stream.path, "room for telemetry", error.strerror, fix))
            self._drop_file()

    def _drop_file(self) -> None:
        stream = self._stream
        self._stream = None
        with suppress(OSError):  # buffered text cannot be written to a full disk either
            if stream is not None:
                stream.close()

    def close(self) -> None:
        """Write the records of all steps and close the file."""
        self._close_steps(0)
        self._drop_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
