"""Every collective of a group, watched: written down before it begins, compared with the peers', and named if it hangs.

- Before a rank joins a collective it writes down what it is about to do (``status_page``), then looks whether the peers
  that are there already do the same: gloo would end the process (SIGABRT) on a mismatch. Whoever comes last sees all.
- Two threads that use one group at once are refused: the order of their collectives is left to chance.
- A group in which a collective has failed is of no use any more: its ranks no longer count alike.
- A rank that waits longer than the patience gives up with an error that says which rank is missing, what that one does
  instead, and where in the code it is.

Where rank 0 works alone while the others wait (``Call.long_wait``), the long patience of the process group holds.
"""

import threading
import time

from gsplit.distributed.comm import Call
from gsplit.distributed.peers import Peers, join_differences
from gsplit.distributed.status_page import MOST_GROUPS
from gsplit.errors import CommError, InputError, RankFaultError, explain

__all__ = ["DO_THE_SAME", "CollectiveWatch", "describe_call", "refuse_two_threads"]

_ENDING_S = 0.5  # a process whose connections are closed may take this long to be gone
DO_THE_SAME = "make all ranks call the same collectives with the same types, in the same order, from one thread"
_MORE_TIME = "if it is only slow, give it more time: gsplit.init(timeout_s=...) or GSPLIT_TIMEOUT_S"


def describe_call(call: Call, what: str) -> str:
    """A collective with everything about it that must be the same on every rank."""
    return f"{call} ({what}; {call.detail})" if call.detail else f"{call} ({what})"


def refuse_two_threads(call: Call) -> InputError:
    """What a thread is told that uses a group while another does."""
    got = f"{threading.current_thread().name}, while another is in a collective"
    fix = "use a mesh from one thread at a time; only a loader's prefetch has groups of its own"
    return InputError(explain(call, "one thread that uses the mesh", got, fix))


class _Waiting:
    """See ``CollectiveWatch.waiting``; a class, because a generator would cost more than what it does."""

    __slots__ = ("_call", "_number", "_start_s", "_watch")

    def __init__(self, watch: "CollectiveWatch", call: Call, number: int) -> None:
        self._watch, self._call, self._number = watch, call, number

    def __enter__(self) -> None:
        self._start_s = time.monotonic()
        self._watch.begin_wait(self._number)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._watch.end_wait(self._call, time.monotonic() - self._start_s, failed=kind is not None)


class CollectiveWatch:
    """The collectives of one group on one rank. ``slot``: the group's place in the status page."""

    def __init__(self, peers: Peers, slot: int, timeout_s: float, long_timeout_s: float) -> None:
        self._peers, self._slot = peers, slot
        self._timeout_s, self._long_timeout_s = timeout_s, max(timeout_s, long_timeout_s)
        self._is_kept = slot < MOST_GROUPS
        self._number = 0
        self._lock = threading.Lock()
        self._thread, self._num_open = 0, 0  # who has collectives under way, and how many
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
        return not self._num_open and not self._broken

    def begin(self, call: Call, what: str, *, compare: bool = True) -> int:
        """Note that this rank is about to join a collective; its number. Refused if the peers do another one."""
        with self._lock:
            if self._broken:
                fix = "start the ranks again"
                raise CommError(explain(self._where(call), "ranks that have not lost each other", self._broken, fix))
            if self._num_open and self._thread != threading.get_ident():
                self._broken = f"two threads in a collective, one of them in: {call}"
                raise refuse_two_threads(call)
            self._thread, self._num_open, self._number = threading.get_ident(), self._num_open + 1, self._number + 1
            number = self._number
        if self._is_kept:
            self._peers.page.begin(self._slot, number, describe_call(call, what))
            if compare:
                self.compare(call, number)
        return number

    def compare(self, call: Call, number: int) -> None:
        """Raise if a collective is another one at a peer that has begun it."""
        found = self._peers.differences(self._slot, number) if self._is_kept else {}
        if not found:
            return
        got = join_differences(found)
        models = self._peers.models(list(found))
        if any(model not in got for model in models.values()):
            got += f"; their models: {join_differences(models)}"
        self._broken = f"a collective that was not the same: {call}"
        raise RankFaultError(explain(self._where(call), "the same collective on every rank", got, DO_THE_SAME))

    def patience_s(self, call: Call) -> float:
        """How long to wait for the others in a collective."""
        return self._long_timeout_s if call.long_wait else self._timeout_s

    def waiting(self, call: Call, number: int) -> "_Waiting":
        """While this rank waits in a collective: a context."""
        return _Waiting(self, call, number)

    def begin_wait(self, number: int) -> None:
        """What ``waiting`` does at its beginning."""
        if self._is_kept:
            self._peers.page.wait(self._slot, number)

    def end_wait(self, call: Call, seconds: float, *, failed: bool) -> None:
        """What ``waiting`` does at its end."""
        self._num_open -= 1
        self.waited_s += seconds
        if failed:
            self._broken = f"a collective that did not end: {call}"
        elif self._is_kept:
            self._peers.page.wait(self._slot, 0)  # not after an error: then peers see what it failed in

    def late(self, call: Call, number: int) -> CommError:
        """What to raise where the patience is over: who is missing, what it does instead, and its stack."""
        expected = f"all ranks to join within {self.patience_s(call):.0f} s"
        causes = self._peers.causes(self._slot, number) if self._is_kept else []
        if not causes:
            return self._late_elsewhere(call, number, expected)
        got = "; ".join(self._peers.describe(rank, self._slot) for rank in causes)
        if models := self._peers.models([self._peers.rank, *causes]):
            got += f"; their models: {join_differences(models)}"
        stopped = [rank for rank in causes if self._peers.stopped(rank)]
        fix = f"see what rank {causes[0]} does; {_MORE_TIME}"
        if stopped:
            fix = f"let rank {stopped[0]} go on (kill -CONT), or start again; {_MORE_TIME}"
        stacks = [(rank, self._peers.stack(rank)) for rank in causes]
        shown = "".join(f"\nrank {rank}, {text}" for rank, text in stacks if text)
        return RankFaultError(explain(self._where(call), expected, got, fix) + shown)

    def _late_elsewhere(self, call: Call, number: int, expected: str) -> CommError:
        """No rank of this host is missing."""
        causes = self._peers.remote_causes(self._slot, number) if self._is_kept else {}
        fix = f"look at the other ranks' errors, and at the network between the hosts; {_MORE_TIME}"
        if causes:
            return RankFaultError(explain(self._where(call), expected, "; ".join(causes.values()), fix))
        return CommError(explain(self._where(call), expected, "all of them, and no end of it", fix))

    def failed(self, call: Call, number: int, error: Exception | str) -> CommError:
        """What to raise where a collective fails: which rank has ended, or does another one."""
        deadline = time.monotonic() + _ENDING_S
        while self._is_kept:
            self.compare(call, number)
            if ended := self._peers.ended(self._slot):
                got = "; ".join(self._peers.describe(rank, self._slot) for rank in ended)
                return CommError(explain(self._where(call), "all ranks to join", got, f"see why rank {ended[0]} ended"))
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        fix = "look at the other ranks' errors: one of them ended, or did not call the same collective"
        return CommError(explain(self._where(call), "all ranks to join", str(error).splitlines()[0], fix))

    def _where(self, call: Call) -> str:
        return f"rank {self._peers.rank}: {call}"
