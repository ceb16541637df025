"""Short messages between ranks of one host, through pipes: a barrier in which every rank sends every other a message.

Every rank has one pipe from each peer. Why pipes, and not flags in shared memory:

- the kernel orders memory: what a rank wrote to shared memory before its message is visible to a rank that has read the
  message, and a peer's reads before its message are over when that message arrives, on every processor;
- a rank that waits sleeps, which matters where ranks outnumber cores;
- only the peer holds the writing end, so the end of a process closes its pipes and is detected at once.

A message is written in one piece (it is shorter than PIPE_BUF), and a peer is at most one message ahead, so no write
waits. Ends are opened through /proc, as segments of shared memory are, and leave no name behind.
"""

import functools
import os
import select
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from gsplit.distributed.comm.comm import explain_closed
from gsplit.distributed.watch.collective_watch import Collective, refuse_two_threads
from gsplit.errors import InputError

__all__ = ["Inbox", "Pipes", "open_inbox", "open_outbox"]

_END = "rank {}, which has ended or closed its mesh"
_POLL_S = 1.0  # how often a waiting rank checks whether its mesh was closed meanwhile


@dataclass(frozen=True)
class Inbox:
    """A pipe of this process; ``writing`` is closed once the peer has opened that end for itself."""

    reading: int
    writing: int


def open_inbox() -> Inbox:
    """A new pipe, for one peer to write into."""
    return Inbox(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))


def open_outbox(process: int, writing: int) -> int:
    """The writing end of another process's inbox."""
    return os.open(f"/proc/{process}/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _close_in_child(pipes: "weakref.ref[Pipes]") -> None:
    found = pipes()
    if found is not None:
        found.close_in_child()


class Pipes:
    """The pipes between this rank and its peers: ends to read from and to write into, by rank.

    One exchange at a time; another thread may ``close`` them meanwhile.
    """

    def __init__(self, rank: int, inboxes: dict[int, int], outboxes: dict[int, int]) -> None:
        self._rank = rank
        self._inboxes = inboxes
        self._outboxes = outboxes
        self._in_use = threading.Lock()
        self._closed = False
        closing = functools.partial(_close_in_child, weakref.ref(self))
        os.register_at_fork(after_in_child=closing)  # or a child that outlives this rank would hide its end

    def exchange(self, collective: Collective, messages: Sequence[bytes]) -> list[bytes]:
        """Send ``messages[p]`` to rank p and return what each rank sent; all messages have the same length.

        The caller has entered ``collective``: this rank waits in it.
        """
        call = collective.call
        if not self._in_use.acquire(blocking=False):
            raise InputError(explain_closed(call)) if self._closed else refuse_two_threads(call)
        try:
            if self._closed:
                raise InputError(explain_closed(call))
            for peer, outbox in self._outboxes.items():
                self._send(collective, peer, outbox, messages[peer])
            return self._receive(collective, messages[self._rank])
        finally:
            self._close_if_asked()
            self._in_use.release()

    def _send(self, collective: Collective, peer: int, outbox: int, message: bytes) -> None:
        try:
            os.write(outbox, message)
        except BrokenPipeError:
            raise collective.watch.failure_error(collective, _END.format(peer)) from None

    def _receive(self, collective: Collective, own: bytes) -> list[bytes]:
        """One message of every peer, in whatever order they come."""
        watch = collective.watch
        timeout_s = watch.timeout_s(collective.call)
        deadline = time.monotonic() + timeout_s
        received = [own] * (1 + len(self._inboxes))
        waiting = {inbox: peer for peer, inbox in self._inboxes.items()}
        poll = select.poll()
        for inbox in waiting:
            poll.register(inbox, select.POLLIN)
        while waiting:
            ready = poll.poll(1000 * min(_POLL_S, timeout_s))
            for inbox, _ in ready:
                poll.unregister(inbox)
                peer = waiting.pop(inbox)
                received[peer] = os.read(inbox, len(own))
                if not received[peer]:
                    raise watch.failure_error(collective, _END.format(peer))
            if not ready and self._closed:
                raise InputError(explain_closed(collective.call))
            if not ready:
                watch.compare(collective)
            if not ready and time.monotonic() > deadline and not poll.poll(0):  # this process may have been stopped
                raise watch.timeout_error(collective)
        return received

    def close(self) -> None:
        """Refuse every later exchange; peers that wait for this rank see closed pipes. Does not wait."""
        self._closed = True
        if self._in_use.acquire(blocking=False):  # or the exchange under way closes them
            self._close_if_asked()
            self._in_use.release()

    def close_in_child(self) -> None:
        """Close this process's ends, in a child that was forked from the rank; the rank's own stay open."""
        self._closed = True
        self._close_if_asked()

    def _close_if_asked(self) -> None:
        if self._closed:
            for end in (*self._inboxes.values(), *self._outboxes.values()):
                os.close(end)
            self._inboxes, self._outboxes = {}, {}
