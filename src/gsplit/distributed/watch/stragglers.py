"""Finds a rank that keeps the others waiting: the one that waits least.

Every collective synchronizes the ranks, so the slowest hardly waits and the others wait for it. The time that each rank
has waited, over a stretch of training that took all ranks equally long, identifies the slowest and its cost.
"""

import time
from collections.abc import Sequence

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh

__all__ = ["LEAST_SHARE", "WaitClock", "name_straggler"]

LEAST_SHARE = 0.2
"""Of the time: where the others wait that much longer than one rank, it is named."""


class WaitClock:
    """Measures the time that this rank waits, from now on."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._waited_s, self._start = mesh, mesh.waited_s, time.monotonic()

    def name_straggler(self) -> str | None:
        """The rank that the others have waited for since, or None; the same on all ranks. A collective."""
        seconds, waited_s = time.monotonic() - self._start, self._mesh.waited_s - self._waited_s
        texts = self._mesh.control.gather_text(Call("compare waits"), f"{waited_s!r} {seconds!r}")
        waits, lengths = zip(*(map(float, text.split()) for text in texts), strict=True)
        return name_straggler(waits, max(lengths))


def name_straggler(waited_s: Sequence[float], seconds: float) -> str | None:
    """In one line, the rank that the others wait for; None if there is none.

    >>> name_straggler([3.2, 0.1, 2.9], 10.0)
    'rank 1 keeps the others waiting: they wait 30% of the time, it 1%'
    >>> name_straggler([1.2, 0.8], 10.0), name_straggler([5.0], 10.0)
    (None, None)
    """
    if len(waited_s) < 2 or seconds <= 0:
        return None
    slowest = min(range(len(waited_s)), key=waited_s.__getitem__)
    others = [waited for rank, waited in enumerate(waited_s) if rank != slowest]
    share, own = sum(others) / len(others) / seconds, waited_s[slowest] / seconds
    if share - own < LEAST_SHARE:
        return None
    return f"rank {slowest} keeps the others waiting: they wait {share:.0%} of the time, it {own:.0%}"
