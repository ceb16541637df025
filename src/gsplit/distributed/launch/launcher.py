"""Starting ranks on this host and waiting for them: what ``--nproc`` does.

Ranks on the CPU get one share of the cores each and an allocator that keeps its memory (``allocator``). Under torchrun,
and with one process, nothing is started.

A launcher of our own, not TorchElastic's, whose rendezvous unpickles what any user of the machine can write into it
(docs/decisions/0011). If one rank fails, the others are ended, and the error names the one that was the cause. The
ranks may then be started again, in the end with fewer of them: a step is a function of its number and a checkpoint does
not depend on the number of ranks that wrote it.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

from gsplit.distributed.launch.allocator import ALLOCATOR
from gsplit.distributed.launch.failures import Cause, find_cause
from gsplit.distributed.launch.rank_processes import RankProcesses, start_command, start_copy
from gsplit.errors import CommError, Terminated
from gsplit.files.host_limits import usable_cores

__all__ = ["DIFFERS", "REQUEUE", "GroupFailedError", "Restart", "launch", "restart_on_failure"]

_LOG = logging.getLogger("gsplit")

DIFFERS = 3
"""Exit code of ranks that did their work and found that results differ."""
REQUEUE = os.EX_TEMPFAIL
"""Exit code (75) of ranks that saved their work after SIGTERM; schedulers can start them again."""

_POLL_S = 0.1
_NOTICE_S = 1.5  # for the others to notice that a rank has failed, and to report where
_FAILED_GRACE_S = 1.0  # there is nothing to save: a rank is missing
_WARN_STOPPED_S, _FAIL_STOPPED_S = 3.0, 30.0


class GroupFailedError(CommError):
    """A rank failed, and with it the group; ``cause`` names it."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


class _Signals:
    """SIGTERM and SIGINT, kept for the loop that watches the ranks; in the main thread, where they can be caught."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)

    def __enter__(self) -> "_Signals":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._record) for each in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)


def launch(
    program: Sequence[str] | Callable[[], int],
    nproc: int,
    *,
    tuned_allocator: bool = True,
    threads: int | None = None,
    variables: Mapping[str, str] | None = None,
    grace_s: float = 5.0,
) -> int:
    """Run a program as ``nproc`` ranks of this host and wait; if one fails, the others are ended.

    The program is a command whose process is the rank itself (not a shell's child), or a function for copies of this
    process, which start faster, if ``can_fork``. It calls ``gsplit.init``. ``variables`` are added to its environment.
    ``threads`` per rank overrides the environment. Without ``tuned_allocator`` the allocator is left as it is. SIGTERM
    and Ctrl-C go on to the ranks, which have ``grace_s`` before they are killed.

    Returns 0, or what all ranks ended with if that is DIFFERS or REQUEUE. What a rank could not do is this call's
    error, ``GroupFailedError``.
    """
    environment = _environment_of_ranks(nproc, tuned_allocator=tuned_allocator, threads=threads)
    with _Signals() as signals:
        start = start_copy(program) if callable(program) else start_command(program)
        ranks = RankProcesses(start, nproc, {**environment, **(variables or {})})
        try:
            return _wait(ranks, signals, grace_s)
        finally:
            ranks.end(0.0)
            ranks.close()


def _environment_of_ranks(nproc: int, *, tuned_allocator: bool, threads: int | None) -> dict[str, str]:
    """The environment that ranks start with. What the user has set stays."""
    share = max(1, usable_cores() // nproc)
    settings = {
        "OMP_NUM_THREADS": str(share),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **ALLOCATOR,
        **os.environ,
    }
    first = settings["OMP_NUM_THREADS"].partition(",")[0].strip()  # OpenMP takes a number for every level of nesting
    if threads is not None or not (first.isdecimal() and int(first)):  # empty where a job has no number of cores
        settings["OMP_NUM_THREADS"] = str(threads or share)
    return {name: value for name, value in settings.items() if tuned_allocator or name not in ALLOCATOR}


def _wait(ranks: RankProcesses, signals: _Signals, grace_s: float) -> int:
    """Wait until all ranks have ended, one fails, or a signal arrives; the exit code."""
    stopped = _Stopped(ranks)
    while not ranks.wait(0.0) and not signals.received:
        if any(end.code for end in ranks.ends) or ranks.find_absent() or stopped.check():
            break
        time.sleep(_POLL_S)
    verdict = next((end.code for end in ranks.ends if end.code), 0)
    if verdict and not signals.received:  # let the rest come to the same verdict, or notice what has happened
        ranks.wait(grace_s if verdict in (DIFFERS, REQUEUE) else _NOTICE_S)
    if signals.received:
        return _pass_on(ranks, signals, grace_s)
    if not ranks.running and verdict in (0, DIFFERS, REQUEUE) and all(end.code in (0, verdict) for end in ranks.ends):
        return verdict
    stopped_ranks = ranks.find_stopped()
    ranks.end(_FAILED_GRACE_S)
    raise GroupFailedError(find_cause(ranks.ends, stopped_ranks))


def _pass_on(ranks: RankProcesses, signals: _Signals, grace_s: float) -> int:
    """Pass a signal of the user or a scheduler on to the ranks; a second signal ends the grace."""
    ranks.ask_to_end()
    deadline = time.monotonic() + grace_s
    while not ranks.wait(_POLL_S) and time.monotonic() < deadline and len(signals.received) == 1:
        pass
    ranks.end(0.0)
    codes = {end.code for end in ranks.ends}
    if codes in ({0}, {REQUEUE}):  # they were done anyway, or have saved
        return codes.pop()
    raise KeyboardInterrupt if signals.received[0] == signal.SIGINT else Terminated


class _Stopped:
    """How long ranks have been stopped (by SIGSTOP, not together with this process as by Ctrl-Z)."""

    def __init__(self, ranks: RankProcesses) -> None:
        self._ranks, self._seconds, self._checked_s = ranks, dict[int, float](), time.monotonic()

    def check(self) -> bool:
        """Whether a rank has been stopped for too long."""
        before, self._checked_s = self._checked_s, time.monotonic()
        passed_s = min(self._checked_s - before, 1.0)  # longer: this process was stopped too
        for rank in (found := self._ranks.find_stopped()):
            seconds = self._seconds.get(rank, 0.0)
            if seconds < _WARN_STOPPED_S <= seconds + passed_s:
                pid, limit = self._ranks.pid(rank), _FAIL_STOPPED_S
                _LOG.warning("rank %d is stopped; kill -CONT %d lets it go on, or all end in %.0f s", rank, pid, limit)
        self._seconds = {rank: self._seconds.get(rank, 0.0) + passed_s for rank in found}
        return any(seconds > _FAIL_STOPPED_S for seconds in self._seconds.values())


@dataclass(frozen=True)
class Restart:
    """What comes after a failure: which restart it is, of how many at most, and on how many ranks."""

    cause: Cause
    number: int
    max_number: int
    num_ranks: int


def restart_on_failure(
    run: Callable[[int], int],
    rank_numbers: Sequence[int],
    max_restarts: int,
    on_restart: Callable[[Restart], None] = lambda restart: None,
) -> int:
    """Run a group of ranks until it does not fail; what it returned.

    ``run(num_ranks)`` calls ``launch``. Each of ``rank_numbers`` is tried once and then ``max_restarts`` times more;
    after that comes the next one. What would fail in the same way again, as a refused input does, is not repeated.
    """
    attempts = [num_ranks for num_ranks in rank_numbers for _ in range(max_restarts + 1)]
    for number, num_ranks in enumerate(attempts, start=1):
        try:
            return run(num_ranks)
        except GroupFailedError as error:
            if error.cause.lasting or number == len(attempts):
                raise
            on_restart(Restart(error.cause, number, len(attempts) - 1, attempts[number]))
    raise AssertionError("no number of ranks was given")
