"""Three clocks of a rank: wall time, CPU time of the process, and how long the training thread was blocked.

Blocked means neither on a core nor in the queue for one: it waits for other ranks, or for a disk. Linux keeps both in
``/proc/thread-self/schedstat``, so the same is measured for every system, whatever it communicates with. Where
there is no such file, time in the queue for a core counts as blocked.
"""

import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Clocks", "read_clocks"]

_SCHEDULED = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Clocks:
    """Readings in seconds, or the difference of two."""

    wall_s: float
    cpu_s: float
    blocked_s: float

    def since(self, start: "Clocks") -> "Clocks":
        """What has passed."""
        return Clocks(self.wall_s - start.wall_s, self.cpu_s - start.cpu_s, self.blocked_s - start.blocked_s)


def read_clocks() -> Clocks:
    """The readings of the calling thread and its process."""
    wall = time.perf_counter()
    try:
        on_core_ns, queued_ns, _ = _SCHEDULED.read_text().split()
        runnable_s = (int(on_core_ns) + int(queued_ns)) / 1e9
    except (OSError, ValueError):
        runnable_s = time.thread_time()
    return Clocks(wall, time.process_time(), wall - runnable_s)
