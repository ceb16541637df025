"""Streams and events of the simulated device, and a check for races between them.

Every launch is put down with the byte ranges it reads and writes. A launch on stream s is ordered after a launch on
stream t if s has waited for it: by an event, or because the host waited and launched later. Two accesses of the same
bytes, one of them a write, that are not ordered are a race: on a GPU the result would depend on luck. Memory that is
freed while another stream may still use it is one as well, unless ``record_stream`` told the allocator.

What one host thread has waited for counts as known to all: hand-overs between threads cannot be seen.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gsplit_bench.simulated.log import DeviceLog, calling_line

__all__ = ["Clock", "ContextError", "Event", "RaceError", "Stream", "StreamTracker", "parts_of"]

_OWN, _OTHER = 0, 1  # devices: that of this rank, and that of another one
_CAUGHT_UP_S = 30.0  # an idle device is through with everything
Kind = Literal["read", "write"]
Clock = dict[str, int]
"""For every stream the number of its newest launch that is known to be over."""


class RaceError(AssertionError):
    """Two launches touch the same memory and nothing orders them."""


class ContextError(AssertionError):
    """A thread works on the device of another rank, which costs memory there."""


@dataclass(frozen=True, slots=True)
class _Access:
    kind: Kind
    start: int
    stop: int
    stream: str
    number: int
    operation: str


class StreamTracker:
    """Which stream knows what, and who touched which bytes."""

    def __init__(self, log: DeviceLog, *, check: bool, launches_behind: int) -> None:
        self.log, self.check, self.launches_behind = log, check, launches_behind
        self.errors: list[str] = []
        """Races found where nothing can be raised: when memory is freed."""
        self.num_launches = 0
        self.when_host_waits: Callable[[], None] = lambda: None
        self._last = 0
        self._known: dict[str, Clock] = {}
        self._newest: Clock = {}
        self._host: Clock = {}
        self._accesses: dict[int, list[_Access]] = {}
        self._recorded: set[tuple[int, str]] = set()
        self._lock = threading.RLock()
        self._local = threading.local()

    def current(self) -> str:
        """The stream on which this thread launches."""
        name: str = getattr(self._local, "stream", "default")
        return name

    def current_device(self) -> int:
        """The device of this thread. It starts on the first that the process sees, which is another rank's; threads of
        backward start on that of their tensors.
        """
        is_of_torch = isinstance(threading.current_thread(), threading._DummyThread)
        device: int = getattr(self._local, "device", _OWN if is_of_torch else _OTHER)
        return device

    def set_device(self, device: int) -> None:
        """Make a device the current one of this thread; refused if it is another rank's."""
        if device != _OWN:
            raise ContextError(f"a context on sim:{device}, the device of another rank; at {calling_line()}")
        self._local.device = device

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make this rank's device the current one; at the end, torch makes no context on the one before."""
        before = self.current_device()
        self.set_device(_OWN)
        try:
            yield
        finally:
            self._local.device = before

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Launch on another stream. At the end torch sets the stream before, and with it the device before."""
        device, before = self.current_device(), self.current()
        self.set_device(_OWN)
        self._local.stream = name
        try:
            yield
        finally:
            self._local.stream = before
            self.set_device(device)

    def snapshot(self, name: str) -> Clock:
        """What is over once everything launched on a stream up to now is."""
        with self._lock:
            return {**self._known.get(name, {}), name: self._newest.get(name, 0)}

    def order_after(self, name: str, clock: Clock) -> None:
        """Whatever a stream does from now on comes after all of this."""
        with self._lock:
            _merge(self._known.setdefault(name, {}), clock)

    def host_waited(self, clock: Clock) -> None:
        """Whatever is launched from now on, on any stream, comes after all of this."""
        with self._lock:
            _merge(self._host, clock)
        self.when_host_waits()

    def launch(self, name: str, reads: list[Tensor], writes: list[Tensor], operation: str) -> int:
        """Put a launch down and return its number, 0 if nothing is checked; raises if it races with an earlier one."""
        with self._lock:
            self._last += 1
            number = self._newest[name] = self._last
            if not self.check:
                return 0
            self.num_launches += 1
            known = self._known.setdefault(name, {})
            _merge(known, self._host)
            for kind, tensors in (("read", reads), ("write", writes)):
                for tensor in tensors:
                    for storage, start, stop in self._ranges(tensor):
                        self._touch(storage, _Access(kind, start, stop, name, number, operation), known)  # type: ignore[arg-type]
            return number

    def is_ordered(self, name: str, other: str, number: int) -> bool:
        """Whether the newest launch of a stream comes after a launch of another one."""
        with self._lock:
            return self._known.get(name, {}).get(other, 0) >= number

    def host_knows(self, clock: Clock) -> bool:
        """Whether the host has waited for all of this."""
        with self._lock:
            return all(self._host.get(name, 0) >= number for name, number in clock.items())

    def num_later(self, clock: Clock) -> int:
        """Launches on any stream after all of this."""
        with self._lock:
            return self._last - max(clock.values(), default=0)

    def record(self, tensor: Tensor, name: str) -> None:
        """The allocator is told that a stream uses this memory."""
        with self._lock:
            self._recorded.update((storage, name) for storage, _, _ in self._ranges(tensor))

    def _touch(self, storage: int, access: _Access, known: Clock) -> None:
        held = self._accesses[storage]
        for other in held:
            overlap = other.start < access.stop and access.start < other.stop
            clash = "write" in (other.kind, access.kind)
            if overlap and clash and not _is_over(other, access.stream, known):
                raise RaceError(
                    f"{access.operation} on stream {access.stream} {access.kind}s what {other.operation} on stream "
                    f"{other.stream} {other.kind}s, and nothing orders them; at {calling_line()}"
                )
        if access.kind == "write":  # what it covers needs no memory of its own: it is ordered after all of it
            held[:] = [other for other in held if not (access.start <= other.start and other.stop <= access.stop)]
        held.append(access)

    def _ranges(self, tensor: Tensor) -> list[tuple[int, int, int]]:
        """Storages a host tensor lies in, with the first byte and one past the last."""
        if tensor.layout is not torch.strided:
            return [found for part in parts_of(tensor) for found in self._ranges(part)]
        if tensor.numel() == 0:
            return []
        storage = tensor.untyped_storage()
        key, size = storage._cdata, tensor.element_size()
        if key not in self._accesses:
            self._accesses[key] = []
            weakref.finalize(storage, self._freed, key, self.current())
        start = int(tensor.storage_offset()) * size
        extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return [(key, start, start + extent * size)]

    def _freed(self, storage: int, home: str) -> None:
        with self._lock:
            known = {**self._known.get(home, {})}
            _merge(known, self._host)
            for access in self._accesses.pop(storage, []):
                if not _is_over(access, home, known) and (storage, access.stream) not in self._recorded:
                    self.errors.append(
                        f"memory of stream {home} was freed while {access.operation} on stream {access.stream} may "
                        f"still {access.kind} it: wait for that stream, or call record_stream"
                    )
            self._recorded = {entry for entry in self._recorded if entry[0] != storage}


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors of a host tensor: its indices and values if it is a sparse matrix."""
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout is torch.sparse_csc:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _merge(into: Clock, clock: Clock) -> None:
    for name, number in clock.items():
        into[name] = max(into.get(name, 0), number)


def _is_over(access: _Access, name: str, known: Clock) -> bool:
    return access.stream == name or known.get(access.stream, 0) >= access.number


class Stream:
    """A queue of launches, as ``torch.cuda.Stream``."""

    _count = itertools.count(1)

    def __init__(self, tracker: StreamTracker, name: str | None = None, priority: int = 0) -> None:
        self._tracker = tracker
        self.priority = priority
        self.name = f"stream {next(self._count)}" if name is None else name

    def __enter__(self) -> "Stream":
        self._context = self._tracker.on(self.name)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)

    def wait_stream(self, other: "Stream") -> None:
        """Later launches here come after all launches there up to now."""
        self._tracker.order_after(self.name, self._tracker.snapshot(other.name))

    def wait_event(self, event: "Event") -> None:
        """Later launches here come after the event."""
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """An event that is over when all launches here up to now are."""
        event = Event(self._tracker) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for everything launched here."""
        self._tracker.log.wait("stream.synchronize")
        self._tracker.host_waited(self._tracker.snapshot(self.name))


class Event:
    """A mark in a stream, as ``torch.cuda.Event``; times are the host's."""

    def __init__(self, tracker: StreamTracker, enable_timing: bool = False) -> None:
        self._tracker = tracker
        self._clock: Clock = {}
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Put the mark after all launches of a stream up to now."""
        self._clock = self._tracker.snapshot(self._tracker.current() if stream is None else stream.name)
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Later launches of a stream come after the mark."""
        self._tracker.order_after(self._tracker.current() if stream is None else stream.name, self._clock)

    def query(self) -> bool:
        """Whether the mark was reached: the host has waited for it, or the device is so far; then the host knows it."""
        tracker = self._tracker
        is_old = self._time is None or time.perf_counter() - self._time > _CAUGHT_UP_S
        is_reached = is_old or tracker.num_later(self._clock) >= tracker.launches_behind
        if not (is_reached or tracker.host_knows(self._clock)):
            return False
        tracker.host_waited(self._clock)
        return True

    def synchronize(self) -> None:
        """The host waits for the mark; if nothing was launched after it, the device then has nothing to do."""
        last = self._tracker.num_later(self._clock) == 0
        self._tracker.log.wait("event.synchronize of the last launch" if last else "event.synchronize")
        self._tracker.host_waited(self._clock)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two marks."""
        if self._time is None or end._time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000.0 * (end._time - self._time)
