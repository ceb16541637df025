"""The processes of other ranks on this host: running, stopped or ended, and their Python stacks.

A rank that receives a signal writes the Python stacks of all its threads into an anonymous file of its own, from
where the other rank reads them. The handler is faulthandler's: it works while the rank computes, waits in a collective
or holds the interpreter's lock. A rank that is stopped (SIGSTOP, a debugger) does not answer; its state is in /proc.

The signal is a real-time one that is not in use otherwise. A process is identified by its number and start time, so
that a process that has got the number of an ended rank is never signalled.
"""

import faulthandler
import fcntl
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

__all__ = ["RankProcess", "StackFile", "describe_host", "own_process", "read_stack", "shorten_stack"]

_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2  # below 0 where there are none: not Linux
_MOST_BYTES = 1 << 18
_SETTLED_S = 0.05  # without more bytes: the stacks are whole
_MOST_FRAMES = 8
_MOST_THREADS = 4

State = Literal["running", "stopped", "ended"]


def describe_host() -> str:
    """The host: its start, and its network, so that namespaces that imitate hosts are told apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


@dataclass(frozen=True)
class RankProcess:
    """A process of this host; ``stacks`` is the descriptor of its file of stacks, -1 if it has none."""

    number: int
    started: str
    stacks: int

    def state(self) -> State:
        """Whether it runs, is stopped, or has ended."""
        found = _stat(self.number)
        if found is None or found[1] != self.started or found[0] in "ZX":
            return "ended"
        return "stopped" if found[0] in "Tt" else "running"


def _stat(process: int) -> tuple[str, str] | None:
    """State and starting time of a process, from /proc."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[0], words[19]


class StackFile:
    """Where this process writes its stacks when it is asked to; ``descriptor`` is -1 if another has the signal.

    Never closed: a peer may ask until the process has ended, and an unhandled signal would end it early.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        if _SIGNAL < 0:
            return
        handler = signal.getsignal(_SIGNAL)
        if handler is None or handler == signal.SIG_DFL:  # None: faulthandler has it, for an earlier mesh
            self.descriptor = os.memfd_create("gsplit-stacks", os.MFD_CLOEXEC)
            faulthandler.register(_SIGNAL, file=self.descriptor, all_threads=True)


def own_process(stacks: StackFile) -> RankProcess:
    """This process, as others will see it."""
    found = _stat(os.getpid())
    return RankProcess(os.getpid(), "" if found is None else found[1], stacks.descriptor)


def read_stack(process: RankProcess, timeout_s: float = 3.0) -> str | None:
    """The stacks of a running process, which it writes itself; None if it does not answer."""
    if process.stacks < 0 or process.state() != "running":
        return None
    try:
        file = os.open(f"/proc/{process.number}/fd/{process.stacks}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # one asks at a time, or answers would run into each other
        before, deadline = os.fstat(file).st_size, time.monotonic() + timeout_s
        os.kill(process.number, _SIGNAL)
        size, since = before, time.monotonic()
        while time.monotonic() < deadline and (size == before or time.monotonic() - since < _SETTLED_S):
            time.sleep(0.01)
            now = os.fstat(file).st_size
            if now != size:
                size, since = now, time.monotonic()
        text = os.pread(file, min(size - before, _MOST_BYTES), before).decode(errors="replace")
    except OSError:
        return None
    finally:
        os.close(file)
    return shorten_stack(text) or None


def shorten_stack(text: str) -> str:
    """The innermost frames of some threads, the main one first, the newest after it; files by their last two names.

    >>> print(shorten_stack('''Thread 0x01 (most recent call first):
    ...   File "/usr/lib/threading.py", line 3 in wait
    ...
    ... Current thread 0x02 (most recent call first):
    ...   File "/home/me/project/src/train.py", line 10 in step
    ...   File "/home/me/project/src/train.py", line 20 in main
    ... '''))
    main thread, innermost call first:
      src/train.py:10 in step
      src/train.py:20 in main
    another thread:
      lib/threading.py:3 in wait
    """
    threads: list[list[str]] = []
    for line in text.splitlines():
        if "hread 0x" in line:
            threads.append([])
        elif line.startswith('  File "') and threads:
            file, _, rest = line[8:].partition('", line ')
            if not threads[-1] and ("/gsplit/distributed/" in file or "/torch/distributed/" in file):
                continue  # frames of the waiting itself
            number, _, function = rest.partition(" in ")
            threads[-1].append(f"  {'/'.join(PurePath(file).parts[-2:])}:{number} in {function}")
    threads = [frames for frames in (*threads[-1:], *threads[:-1]) if frames]  # the main one is written last
    shown = []
    for place, frames in enumerate(threads[:_MOST_THREADS]):
        shown.append("another thread:" if place else "main thread, innermost call first:")
        shown += frames[:_MOST_FRAMES] + [f"  and {len(frames) - _MOST_FRAMES} more"] * (len(frames) > _MOST_FRAMES)
    if len(threads) > _MOST_THREADS:
        shown.append(f"and {len(threads) - _MOST_THREADS} more threads")
    return "\n".join(shown)
