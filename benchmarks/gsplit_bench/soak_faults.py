"""Faults that a soak inflicts on a run: what is done, and what the run must do then.

A run either goes on by itself (``survives``), or it must end: all of its processes gone within a bound, with a message,
to be resumed from its last checkpoint.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gsplit_bench.host_network import HostNetwork
from gsplit_bench.soak_watch import find_ranks

__all__ = ["FAULTS", "HOST_FAULTS", "Fault", "Run"]

_STALL_S = 5.0


@dataclass(frozen=True, slots=True)
class Run:
    """What a fault can reach: the launchers' process ids, one per host, and the hosts' network if there are two."""

    launchers: list[int]
    network: HostNetwork | None = None

    def any_rank(self, rng: random.Random) -> tuple[int, int]:
        """A rank and its process id."""
        ranks = {rank: pid for launcher in self.launchers for rank, pid in find_ranks(launcher).items()}
        return rng.choice(sorted(ranks.items()))


@dataclass(frozen=True, slots=True)
class Fault:
    """``inflict`` says what it did. ``within_s``: until every process must be gone, unless the run survives."""

    name: str
    inflict: Callable[[Run, random.Random], str]
    within_s: float
    survives: bool = False


def _signal_rank(number: signal.Signals) -> Callable[[Run, random.Random], str]:
    def inflict(run: Run, rng: random.Random) -> str:
        rank, pid = run.any_rank(rng)
        os.kill(pid, number)
        return f"{number.name} to rank {rank}"

    return inflict


def _stall(run: Run, rng: random.Random) -> str:
    rank, pid = run.any_rank(rng)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_STALL_S)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return f"rank {rank} stopped for {_STALL_S:.0f} s"


def _signal_launcher(number: signal.Signals) -> Callable[[Run, random.Random], str]:
    def inflict(run: Run, rng: random.Random) -> str:
        place = rng.randrange(len(run.launchers))
        os.kill(run.launchers[place], number)
        return f"{number.name} to the launcher" + (f" of host {place}" if len(run.launchers) > 1 else "")

    return inflict


def _drop_link(run: Run, rng: random.Random) -> str:
    assert run.network is not None
    seconds = rng.uniform(0.5, 3.0)
    run.network.set_link(up=False)
    time.sleep(seconds)
    run.network.set_link(up=True)
    return f"link down for {seconds:.1f} s"


def _cut_link(run: Run, rng: random.Random) -> str:
    assert run.network is not None
    run.network.set_link(up=False)
    return "link cut"


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", _signal_rank(signal.SIGKILL), within_s=10),
        Fault("stall", _stall, within_s=0, survives=True),
        Fault("freeze", _signal_rank(signal.SIGSTOP), within_s=100),
        Fault("terminate", _signal_launcher(signal.SIGTERM), within_s=30),
        Fault("orphan", _signal_launcher(signal.SIGKILL), within_s=15),
    )
}
"""On one host. A frozen rank is waited for as long as the patience of collectives, a minute."""

HOST_FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", _signal_rank(signal.SIGKILL), within_s=70),
        Fault("drop", _drop_link, within_s=0, survives=True),
        Fault("cut", _cut_link, within_s=110),
    )
}
"""On two. A rank of another host that has gone is known by the patience of collectives."""
