"""What a run holds while it trains, over all its processes, and whether it grows."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from gsplit.distributed.launch.launched_rank import PROCESS_NAME

__all__ = ["Slope", "Usage", "find_ranks", "fit_slope", "lives", "processes_of", "slopes_of", "usage_of"]

_WARM_UP_SHARE = 0.3  # of the time in which a start trains: buffers reach their size


@dataclass(frozen=True, slots=True)
class Usage:
    """Everything that a run holds at one moment, over all its processes; ``at_s`` since it was started.

    ``num_steps``: of the newest checkpoint. ``memory_bytes``: anonymous, so without the pages of mapped files, which
    are touched one after the other. ``segments``: of shared memory, each counted once.
    """

    at_s: float
    num_steps: int
    processes: int
    memory_bytes: int
    threads: int
    descriptors: int
    segments: int
    temporary_files: int


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


def usage_of(launchers: list[int], started: float, *, num_steps: int, temporary_files: int) -> Usage:
    """Read now; processes that end meanwhile are left out."""
    count = memory = threads = descriptors = 0
    segments: set[str] = set()
    for process in (process for launcher in launchers for process in processes_of(launcher)):
        with suppress(psutil.Error, OSError):
            pages = process.memory_info()
            held = pages.rss - pages.shared, process.num_threads(), process.num_fds()
            segments |= _segments_of(process.pid)
            count += 1
            memory += held[0]
            threads += held[1]
            descriptors += held[2]
    now_s = time.monotonic() - started
    return Usage(now_s, num_steps, count, memory, threads, descriptors, len(segments), temporary_files)


def _segments_of(pid: int) -> set[str]:
    """The inodes of shared memory that a process has mapped, with or without a name."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {words[4] for words in lines if len(words) == 6 and words[5].startswith(("/dev/shm/", "/memfd:", "/SYSV"))}


def fit_slope(series: Sequence[tuple[list[float], list[float]]]) -> Slope:
    """One slope of several series that each begin where they like: least squares about the mean of each.

    >>> fit_slope([([0.0, 1800.0], [1.0, 2.0]), ([0.0, 1800.0, 3600.0], [7.0, 8.0, 9.0])])
    Slope(per_hour=2.0, error=0.0, mean=5.4)
    """
    about = [(_about_mean(times), _about_mean(values)) for times, values in series]
    pairs = [pair for times, values in about for pair in zip(times, values, strict=True)]
    spread = sum(t * t for t, _ in pairs)
    slope = sum(t * v for t, v in pairs) / spread
    rest = sum((v - slope * t) ** 2 for t, v in pairs)
    error = math.sqrt(rest / max(1, len(pairs) - len(series) - 1) / spread)
    return Slope(3600 * slope, 3600 * error, sum(sum(values) for _, values in series) / len(pairs))


def _about_mean(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def slopes_of(lives_usages: Sequence[Sequence[Usage]]) -> dict[str, Slope]:
    """Growth within processes, over one or several starts; empty if they were too short to say.

    Starting, which takes minutes on a busy machine, is left out: everything before the first checkpoint of a start and
    some time after it. So is ending: everything after the last checkpoint.
    """
    steady = [usages for usages in map(_steady, lives_usages) if len(usages) >= 5]
    names = [field.name for field in fields(Usage) if field.name not in ("at_s", "num_steps", "processes")]
    return {name: fit_slope([_column(usages, name) for usages in steady]) for name in names if steady}


def _steady(usages: Sequence[Usage]) -> list[Usage]:
    training = [usage for usage in usages if usages[0].num_steps < usage.num_steps < usages[-1].num_steps]
    if not training:
        return []
    full = max(usage.processes for usage in training)
    begin = (1 - _WARM_UP_SHARE) * training[0].at_s + _WARM_UP_SHARE * training[-1].at_s
    return [usage for usage in training if usage.at_s >= begin and usage.processes == full]


def _column(usages: Sequence[Usage], name: str) -> tuple[list[float], list[float]]:
    return [usage.at_s for usage in usages], [float(getattr(usage, name)) for usage in usages]
