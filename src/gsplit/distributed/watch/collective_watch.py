"""Checks every collective of a group: recorded before it begins, compared with the peers', and reported if it hangs.

- Before a rank joins a collective it records what it is about to do (``status_page``), then checks whether the peers
  that have begun it do the same: gloo would end the process (SIGABRT) on a mismatch. The last rank sees all others.
- Two threads that use one group at once are refused: the order of their collectives would be undefined.
- A group in which a collective has failed refuses all later ones: its ranks no longer count alike.
- A rank that waits longer than the timeout raises an error that names the missing rank, what it does instead, and where
  in the code it is.

Where rank 0 works alone while the others wait (``Call.long_wait``), the long timeout of the process group applies.
"""

import threading
import time
from typing import Self

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.watch.peers import Peers, join_differences
from gsplit.distributed.watch.status_page import MOST_GROUPS
from gsplit.errors import CommError, InputError, RankFaultError, explain

__all__ = ["DO_THE_SAME", "Collective", "CollectiveWatch", "describe_call", "refuse_two_threads"]

_ENDING_S = 0.5  # a process whose connections are closed may take this long to be gone
DO_THE_SAME = "make all ranks call the same collectives with the same types, in the same order, from one thread"
_MORE_TIME = "if it is only slow, give it more time: gsplit.init(timeout_s=...) or GSPLIT_TIMEOUT_S"


def describe_call(call: Call, what: str) -> str:
    """A collective with everything about it that must be the same on every rank."""
    return f"{call} ({what}; {call.detail})" if call.detail else f"{call} ({what})"


def refuse_two_threads(call: Call) -> InputError:
    """The error for a thread that uses a group while another does."""
    got = f"{threading.current_thread().name}, while another is in a collective"
    fix = "use a mesh from one thread at a time; only a loader's prefetch has groups of its own"
    return InputError(explain(call, "one thread that uses the mesh", got, fix))


class Collective:
    """A collective that this rank has begun; ``with`` it, the rank waits for its peers.

    It is open, and keeps other threads out of the group, until the wait ends, ``close`` is called or it is dropped.
    """

    __slots__ = ("_start_s", "call", "number", "watch")

    def __init__(self, watch: "CollectiveWatch", call: Call, number: int) -> None:
        self.watch = watch
        self.call = call
        self.number = number

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()
        self.watch.begin_wait(self.number)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.watch.end_wait(self, time.monotonic() - self._start_s, failed=kind is not None)
        self.close()

    def close(self) -> None:
        """Let other threads use the group. Closing twice is fine."""
        self.watch.end(self.number)

    def __del__(self) -> None:
        self.close()


class CollectiveWatch:
    """The collectives of one group on one rank. ``slot``: the group's place in the status page."""

    def __init__(self, peers: Peers, slot: int, timeout_s: float, long_timeout_s: float) -> None:
        self._peers, self._slot = peers, slot
        self._timeout_s, self._long_timeout_s = timeout_s, max(timeout_s, long_timeout_s)
        self._is_kept = slot < MOST_GROUPS
        self._number = 0
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}  # the threads of the collectives under way, by number
        self._broken = ""  # what the first failure was
        self.waited_s = 0.0
        """Seconds that this rank has waited in the group's collectives, all in all."""

    @property
    def num_begun(self) -> int:
        """Collectives that this rank has begun; the same on every rank that has done the same work."""
        return self._number

    @property
    def is_idle(self) -> bool:
        """Whether no collective is under way and none has failed."""
        return not self._open and not self._broken

    def begin(self, call: Call, what: str, *, compare: bool = True) -> Collective:
        """Record that this rank is about to join a collective. Refused if the peers do another one."""
        thread = threading.get_ident()
        with self._lock:
            if self._broken:
                fix = "start the ranks again"
                raise CommError(explain(self._where(call), "ranks that have not lost each other", self._broken, fix))
            if set(self._open.values()) - {thread}:
                self._broken = f"two threads in a collective, one of them in: {call}"
                raise refuse_two_threads(call)
            self._number += 1
            self._open[self._number] = thread
            collective = Collective(self, call, self._number)
        if self._is_kept:
            self._peers.page.begin(self._slot, collective.number, describe_call(call, what))
            if compare:
                self._compare_or_close(collective)
        return collective

    def _compare_or_close(self, collective: Collective) -> None:
        try:
            self.compare(collective)
        except RankFaultError:
            collective.close()  # the traceback may keep it
            raise

    def end(self, number: int) -> None:
        """The collective with this number is not under way any more. May run at any moment, in any thread."""
        self._open.pop(number, None)

    def compare(self, collective: Collective) -> None:
        """Raise if a collective is another one at a peer that has begun it."""
        call = collective.call
        found = self._peers.differences(self._slot, collective.number) if self._is_kept else {}
        if not found:
            return
        got = join_differences(found)
        models = self._peers.models(list(found))
        if any(model not in got for model in models.values()):
            got += f"; their models: {join_differences(models)}"
        self._broken = f"a collective that was not the same: {call}"
        raise RankFaultError(explain(self._where(call), "the same collective on every rank", got, DO_THE_SAME))

    def timeout_s(self, call: Call) -> float:
        """How long to wait for the peers in a collective."""
        return self._long_timeout_s if call.long_wait else self._timeout_s

    def begin_wait(self, number: int) -> None:
        """This rank waits in a collective."""
        if self._is_kept:
            self._peers.page.wait(self._slot, number)

    def end_wait(self, collective: Collective, seconds: float, *, failed: bool) -> None:
        """This rank has waited in a collective, which has ended or failed."""
        self.waited_s += seconds
        if failed:
            self._broken = f"a collective that did not end: {collective.call}"
        elif self._is_kept:
            self._peers.page.wait(self._slot, 0)  # not after an error: then peers see what it failed in

    def timeout_error(self, collective: Collective) -> CommError:
        """The error of a collective that takes too long: who is missing, what it does instead, and its stack.

        Ranks of other hosts are told of it.
        """
        call, number = collective.call, collective.number
        expected = f"all ranks to join within {self.timeout_s(call):.0f} s"
        causes = self._peers.causes(self._slot, number) if self._is_kept else []
        if not causes:
            return self._remote_timeout_error(call, number, expected)
        got = self._tell({rank: self._peers.describe(rank, self._slot) for rank in causes})
        if models := self._peers.models([self._peers.rank, *causes]):
            got += f"; their models: {join_differences(models)}"
        stopped = [rank for rank in causes if self._peers.stopped(rank)]
        fix = f"see what rank {causes[0]} does; {_MORE_TIME}"
        if stopped:
            fix = f"let rank {stopped[0]} go on (kill -CONT), or start again; {_MORE_TIME}"
        stacks = [(rank, self._peers.stack(rank)) for rank in causes]
        shown = "".join(f"\nrank {rank}, {text}" for rank, text in stacks if text)
        return RankFaultError(explain(self._where(call), expected, got, fix) + shown)

    def _remote_timeout_error(self, call: Call, number: int, expected: str) -> CommError:
        """No rank of this host is missing."""
        causes = self._peers.remote_causes(self._slot, number) if self._is_kept else {}
        fix = f"look at the other ranks' errors, and at the network between the hosts; {_MORE_TIME}"
        if causes:
            return RankFaultError(explain(self._where(call), expected, self._tell(causes), fix))
        return CommError(explain(self._where(call), expected, "nobody missing, and no end of it", fix))

    def failure_error(self, collective: Collective, error: Exception | str) -> CommError:
        """The error of a collective that fails: which rank has ended, or does another one."""
        call, expected = collective.call, "all ranks to join"
        deadline = time.monotonic() + _ENDING_S
        while self._is_kept:
            self.compare(collective)
            if ended := self._peers.ended(self._slot):
                fix = f"see what became of rank {min(ended)}"
                return CommError(explain(self._where(call), expected, self._tell(ended), fix))
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if causes := self._peers.remote_ended(self._slot) if self._is_kept else {}:
            fix = f"see, on its host, what became of rank {min(causes)}"
            return CommError(explain(self._where(call), expected, self._tell(causes), fix))
        fix = "look at the other ranks' errors: one of them ended, or did not call the same collective"
        return CommError(explain(self._where(call), expected, str(error).splitlines()[0], fix))

    def _tell(self, missed: dict[int, str]) -> str:
        """Whom this rank misses, in words; ranks of other hosts are told, too."""
        self._peers.tell_missed(missed)
        return "; ".join(missed.values())

    def _where(self, call: Call) -> str:
        return f"rank {self._peers.rank}: {call}"
