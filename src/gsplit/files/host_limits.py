"""The memory and the cores of the machine, or of its container or job if that has less.

Docker, Kubernetes and Slurm limit processes by control groups, of version 1 or 2. The limits of all groups around this
process count, as far as it can see them.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["free_bytes", "total_bytes", "usable_cores"]

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MEMORY_FILES = [  # limit, use, and what is before the names in memory.stat
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
]


def free_bytes() -> int:
    """Bytes that can be allocated before memory is swapped out or a process is killed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return max(0, min([free, *(limit - used for limit, used in _memory_limits())]))


def total_bytes() -> int:
    """Bytes of memory that this process could have if it were alone."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(limit for limit, _ in _memory_limits())])


def usable_cores() -> int:
    """Cores that this process may keep busy: those that it may run on, or the quota of its time if that is less."""
    return max(1, min([len(os.sched_getaffinity(0)), *_core_limits()]))


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Limits and what is used of them. Pages that cache files are not: they are given back when memory is short."""
    for folder in _control_groups("memory"):
        for limit_file, used_file, prefix in _MEMORY_FILES:
            with suppress(OSError, ValueError):  # another version, or no limit ("max")
                limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
                with suppress(OSError, ValueError):
                    counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    used -= sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield limit, max(0, used)


def _core_limits() -> Iterator[int]:
    for folder in _control_groups("cpu"):
        with suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            yield -(-quota // period)
        with suppress(OSError, ValueError):
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                yield -(-quota // period)


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of the groups around this process, of version 2 and of a controller of version 1."""
    of_version_1 = _CGROUP / controller
    yield from (_CGROUP, of_version_1)  # in a container these are its own
    with suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _CGROUP if not controllers else of_version_1
            if ".." not in path and (not controllers or controller in controllers.split(",")):
                folders = [root / path.lstrip("/"), *(root / path.lstrip("/")).parents]
                yield from folders[: folders.index(root)]
