"""Faults that a soak inflicts on a run: what is done, and what the run must do then.

A run goes on by itself: a newer checkpoint shows it. Or it ends: all of its processes gone within a bound, with a
message, to be resumed from its last checkpoint. Bounds are generous, since a machine without free cores is not a fault;
how long it took is in the record.
"""

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from gsplit_bench.host_network import HostNetwork
from gsplit_bench.small_disk import SmallDisk
from gsplit_bench.soak_watch import find_ranks
from gsplit_bench.wall_clock import WallClock

__all__ = ["FAULTS", "HOST_FAULTS", "OF_CLOCK", "OF_DISK", "Fault", "Run"]

_STALL_S = 5.0
_STUCK_S = 20.0
_SLOW_S, _SLOW_BYTES_PER_S = 60.0, 20_000
_SHORT_OF_MEMORY_S = 30.0
_LOSS_S, _LOSS_PERCENT = 30.0, 5.0
_JUMP_S = 3600


@dataclass(frozen=True, slots=True)
class Run:
    """What a fault can reach: the launchers' process ids, one per host, and what the faults of the soak need."""

    launchers: list[int]
    network: HostNetwork | None = None
    disk: SmallDisk | None = None
    clock: WallClock | None = None

    def any_rank(self, rng: random.Random) -> tuple[int, int]:
        """A rank and its process id."""
        ranks = {rank: pid for launcher in self.launchers for rank, pid in find_ranks(launcher).items()}
        return rng.choice(sorted(ranks.items()))


@dataclass(frozen=True, slots=True)
class Fault:
    """``inflict`` says what it did. ``within_s``: until every process is gone, or training has gone on."""

    name: str
    inflict: Callable[[Run, random.Random], str]
    within_s: float
    then: Literal["ends", "goes on", "either"] = "ends"


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


def _lose_packets(run: Run, rng: random.Random) -> str:
    assert run.network is not None
    run.network.set_loss(_LOSS_PERCENT)
    time.sleep(_LOSS_S)
    run.network.set_loss(0.0)
    return f"{_LOSS_PERCENT:g} % of packets lost for {_LOSS_S:.0f} s"


def _fill_disk(run: Run, rng: random.Random) -> str:
    assert run.disk is not None
    run.disk.fill()
    return "disk full"


def _slow_disk(run: Run, rng: random.Random) -> str:
    assert run.disk is not None
    run.disk.set_rate(_SLOW_BYTES_PER_S)
    time.sleep(_SLOW_S)
    run.disk.repair()
    return f"disk that writes {_SLOW_BYTES_PER_S / 1000:g} kB/s for {_SLOW_S:.0f} s"


def _stop_disk(run: Run, rng: random.Random) -> str:
    assert run.disk is not None
    run.disk.freeze()
    time.sleep(_STUCK_S)
    run.disk.repair()
    return f"disk that writes nothing for {_STUCK_S:.0f} s"


def _limit_memory(run: Run, rng: random.Random) -> str:
    """No more address space than it has; a rank that has all it needs goes on."""
    rank, pid = run.any_rank(rng)
    held = psutil.Process(pid).memory_info().vms
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (held, hard))
    time.sleep(_SHORT_OF_MEMORY_S)
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))
    return f"no more memory for rank {rank} for {_SHORT_OF_MEMORY_S:.0f} s"


def _jump_clock(run: Run, rng: random.Random) -> str:
    assert run.clock is not None
    seconds = rng.choice((-_JUMP_S, _JUMP_S))
    run.clock.jump(seconds)
    return f"wall clock {seconds:+d} s"


_GOES_ON_S = 600.0

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", _signal_rank(signal.SIGKILL), within_s=60),
        Fault("stall", _stall, _GOES_ON_S, "goes on"),
        Fault("freeze", _signal_rank(signal.SIGSTOP), within_s=180),
        Fault("terminate", _signal_launcher(signal.SIGTERM), within_s=120),
        Fault("orphan", _signal_launcher(signal.SIGKILL), within_s=60),
        Fault("full-disk", _fill_disk, _GOES_ON_S),
        Fault("slow-disk", _slow_disk, _GOES_ON_S, "goes on"),
        Fault("stuck-disk", _stop_disk, _GOES_ON_S, "goes on"),
        Fault("memory", _limit_memory, _GOES_ON_S, "either"),
        Fault("clock", _jump_clock, _GOES_ON_S, "goes on"),
    )
}
"""On one host. A frozen rank is waited for as long as the patience of collectives, a minute; a full disk ends a run when
it saves the next time."""

OF_DISK, OF_CLOCK = {"full-disk", "slow-disk", "stuck-disk"}, {"clock"}

HOST_FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", _signal_rank(signal.SIGKILL), within_s=180),
        Fault("drop", _drop_link, _GOES_ON_S, "goes on"),
        Fault("loss", _lose_packets, _GOES_ON_S, "goes on"),
        Fault("cut", _cut_link, within_s=240),
    )
}
"""On two. A rank of another host that has gone is known by the patience of collectives."""
