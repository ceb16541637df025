"""What a run holds while it trains: memory, threads and descriptors of all its processes, and whether they grow."""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

from gsplit.distributed.launch.launched_rank import PROCESS_NAME

__all__ = ["Slope", "Usage", "find_ranks", "fit_slope", "lives", "processes_of", "slopes_of", "usage_of"]

_WARM_UP_S, _WARM_UP_SHARE = 20.0, 0.3  # at least, and of a run: imports, first steps, buffers that reach their size


@dataclass(frozen=True, slots=True)
class Usage:
    """Everything that a run holds at one moment, over all its processes; ``at_s`` since it was started."""

    at_s: float
    processes: int
    memory_bytes: int
    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour, its standard error, and the mean it grows from."""

    per_hour: float
    error: float
    mean: float

    @property
    def is_flat(self) -> bool:
        """No growth that three standard errors would show, or less than a hundredth of the mean per hour."""
        return self.per_hour <= max(3 * self.error, 0.01 * self.mean)


def processes_of(launcher: int) -> list[psutil.Process]:
    """A launcher and everything it has started, as far as it lives."""
    try:
        top = psutil.Process(launcher)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def lives(pid: int) -> bool:
    """Whether a process is there and does more than wait to be buried."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def find_ranks(launcher: int) -> dict[int, int]:
    """The ranks under a launcher and their process ids: ours have their number as a name, torchrun's as a variable."""
    found: dict[int, int] = {}
    for process in processes_of(launcher)[1:]:
        with suppress(psutil.Error):
            rank = process.name().removeprefix(PROCESS_NAME)
            rank = rank if rank.isdigit() else process.environ().get("RANK", "")
            if rank.isdigit():
                found.setdefault(int(rank), process.pid)  # what a rank has started has its environment too
    return found


def usage_of(launchers: list[int], started: float) -> Usage:
    """Read now; processes that end meanwhile are left out."""
    count = memory = threads = descriptors = 0
    for process in (process for launcher in launchers for process in processes_of(launcher)):
        with suppress(psutil.Error):
            held = process.memory_info().rss, process.num_threads(), process.num_fds()
            count, memory, threads, descriptors = (
                count + 1,
                memory + held[0],
                threads + held[1],
                descriptors + held[2],
            )
    return Usage(time.monotonic() - started, count, memory, threads, descriptors)


def fit_slope(times: list[float], values: list[float]) -> Slope:
    """Least squares.

    >>> fit_slope([0.0, 1800.0, 3600.0], [1.0, 2.0, 3.0])
    Slope(per_hour=2.0, error=0.0, mean=2.0)
    """
    count = len(times)
    mean_time, mean = sum(times) / count, sum(values) / count
    spread = sum((t - mean_time) ** 2 for t in times)
    slope = sum((t - mean_time) * (v - mean) for t, v in zip(times, values, strict=True)) / spread
    rest = sum((v - mean - slope * (t - mean_time)) ** 2 for t, v in zip(times, values, strict=True))
    error = math.sqrt(rest / max(1, count - 2) / spread)
    return Slope(3600 * slope, 3600 * error, mean)


def slopes_of(usages: list[Usage]) -> dict[str, Slope]:
    """Of an uninterrupted run; empty if it was too short to say. The moments of starting and ending are left out."""
    full = max((usage.processes for usage in usages), default=0)
    begin = max(_WARM_UP_S, _WARM_UP_SHARE * usages[-1].at_s) if usages else 0.0
    steady = [usage for usage in usages if usage.at_s >= begin and usage.processes == full]
    if len(steady) < 5:
        return {}
    times = [usage.at_s for usage in steady]
    return {name: fit_slope(times, values) for name, values in _columns(steady)}


def _columns(usages: list[Usage]) -> Iterator[tuple[str, list[float]]]:
    for name in ("memory_bytes", "threads", "descriptors"):
        yield name, [float(getattr(usage, name)) for usage in usages]
