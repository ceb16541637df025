"""A rank that keeps the others waiting, found by who waits least.

Ranks meet in every collective, so the slowest waits hardly at all and the others wait for it. What every rank has
waited, over a stretch of training that took all ranks equally long, tells which one that is and what it costs.
"""

from collections.abc import Sequence

from gsplit.distributed.comm import Call, Comm

__all__ = ["LEAST_SHARE", "compare_waits", "name_straggler"]

LEAST_SHARE = 0.2
"""Of the time: where the others wait that much longer than one rank, it is named."""


def compare_waits(comm: Comm, waited_s: float) -> list[float]:
    """What every rank has waited. A collective."""
    return [float(text) for text in comm.gather_text(Call("compare waits"), repr(waited_s))]


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
