"""The processes of one group of ranks: starting, polling and ending them.

What launcher and ranks share lies in anonymous files (memfd) that ranks inherit: the store in which they find each
other, a rank's error, each rank's status. No other user can open them, nothing listens on a port, and no name
is left behind however the launcher ends. A rank is killed by the kernel when its launcher ends (``launched_rank``).
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gsplit.distributed.launch.failures import RankEnd, parse_report
from gsplit.distributed.launch.forked_rank import fork_rank
from gsplit.distributed.launch.launched_rank import ERROR_FILE, LAUNCHER, STATUS, STATUS_BYTES, STORE, Status

__all__ = ["RankProcesses", "Start", "start_command", "start_copy"]

_POLL_S = 0.05
_KILLED_S = 5.0  # how long the kernel may take to end a process that it was told to kill


class _Process(Protocol):
    """A process that was started, as ``subprocess`` has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


Start = Callable[[Mapping[str, str], Sequence[int]], _Process]
"""Starts a rank with an environment and files that it inherits."""


def start_command(command: Sequence[str]) -> Start:
    """A rank that is a process of its own."""
    return lambda environment, files: subprocess.Popen(command, env=environment, pass_fds=files)


def start_copy(main: Callable[[], int]) -> Start:
    """A rank that is a copy of this process, with all of its files; ``main`` is what it does."""
    return lambda environment, files: fork_rank(main, environment)


class RankProcesses:
    """A group of ranks. ``ends`` has those that have ended, in the order in which that was seen."""

    def __init__(self, start: Start, num_ranks: int, environment: Mapping[str, str]) -> None:
        self.ends: list[RankEnd] = []
        self._asked_to_end = False
        self._files = [os.memfd_create(f"gsplit-{name}", os.MFD_CLOEXEC) for name in ["store", "status"]]
        store, self._status = self._files
        self._errors: list[int] = []
        self._running: dict[int, _Process] = {}
        shared = {
            **environment,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            STORE: f"/proc/self/fd/{store}",
            STATUS: str(self._status),
            LAUNCHER: str(os.getpid()),
        }
        try:
            for rank in range(num_ranks):
                error = os.memfd_create("gsplit-error", os.MFD_CLOEXEC)
                self._errors.append(error)
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: f"/proc/self/fd/{error}"}
                self._running[rank] = start({**shared, **own}, (store, self._status, error))
        except BaseException:
            self.end(0.0)
            self.close()
            raise

    def close(self) -> None:
        """Close the files shared with ranks, once all have ended."""
        for file in (*self._files, *self._errors):
            os.close(file)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return list(self._running)

    def poll(self) -> None:
        """Collect the ranks that have ended."""
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[rank]
                report = parse_report(_read(self._errors[rank]))
                joined = self._read_status(rank) == Status.JOINED
                self.ends.append(RankEnd(rank, code, report, self._asked_to_end, joined))

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended, but not longer; whether they have."""
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if not self._running or time.monotonic() > deadline:
                return not self._running
            time.sleep(_POLL_S)

    def find_absent(self) -> RankEnd | None:
        """A rank that has ended without having joined those that now wait for it."""
        if not any(self._read_status(rank) == Status.JOINING for rank in self._running):
            return None
        return next((end for end in self.ends if not end.joined), None)

    def find_stopped(self) -> list[int]:
        """Ranks that a signal has stopped."""
        return [rank for rank, process in self._running.items() if _is_stopped(process.pid)]

    def pid(self, rank: int) -> int:
        """The process of a rank that runs."""
        return self._running[rank].pid

    def ask_to_end(self) -> None:
        """SIGTERM for those that run; for those that are stopped, too."""
        self._asked_to_end = True
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)

    def end(self, grace_s: float) -> None:
        """End all ranks: by SIGTERM, and after the grace by SIGKILL."""
        self.ask_to_end()
        if not self.wait(grace_s):
            self._send(signal.SIGKILL)
            self.wait(_KILLED_S)

    def _send(self, signum: signal.Signals) -> None:
        for process in self._running.values():
            process.send_signal(signum)

    def _read_status(self, rank: int) -> str:
        return os.pread(self._status, STATUS_BYTES, STATUS_BYTES * rank).rstrip(b" \0").decode()


def _read(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has just ended
        return False
