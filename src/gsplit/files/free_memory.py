"""The free memory of the machine, or of its container if that is less."""

from contextlib import suppress
from pathlib import Path

__all__ = ["free_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Bytes that can be allocated before memory is swapped out or a process is killed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    with suppress(OSError, ValueError):  # the container has no limit
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        free = min(free, limit - used)
    return free
