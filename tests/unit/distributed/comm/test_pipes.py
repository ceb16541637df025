"""Messages between ranks in one process arrive whole and in order; a peer that is gone or silent is named."""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from watched import watch_pair

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.pipes import Pipes, open_inbox, open_outbox
from gsplit.distributed.watch.collective_watch import Collective, CollectiveWatch
from gsplit.errors import CommError, InputError, RankFaultError

CALL = Call("exchange ids", 3, 1)


class _End(Pipes):
    """The pipes of one rank, with the watch of its group."""

    def __init__(self, rank: int, inbox: int, outbox: int, watch: CollectiveWatch) -> None:
        super().__init__(rank, {1 - rank: inbox}, {1 - rank: outbox})
        self.watch = watch
        self.num_sent = 0

    def send(self, messages: list[bytes]) -> list[bytes]:
        self.num_sent += 1
        return self.exchange(Collective(self.watch, CALL, self.num_sent), messages)


def _pair(timeout_s: float = 30.0) -> list[_End]:
    """Both ranks' ends, opened as another process would open them."""
    watches = watch_pair(timeout_s)
    inboxes = [open_inbox(), open_inbox()]
    outboxes = [open_outbox(os.getpid(), inboxes[1 - rank].writing) for rank in range(2)]
    for inbox in inboxes:
        os.close(inbox.writing)
    return [_End(r, inboxes[r].reading, outboxes[r], watches[r]) for r in range(2)]


def test_messages_arrive_in_order_at_any_pace() -> None:
    ends = _pair()

    def run(rank: int) -> list[list[bytes]]:
        return [ends[rank].send([b"%d to %d, %04d" % (rank, p, t) for p in range(2)]) for t in range(500)]

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(run, range(2)))
    for rank, got in enumerate(both):
        assert got == [[b"%d to %d, %04d" % (p, rank, t) for p in range(2)] for t in range(500)]
    for end in ends:
        end.close()


def test_a_peer_that_is_gone_is_named_at_once_and_its_last_message_still_counts() -> None:
    ends = _pair()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ends[1].send, [b"last", b"last"])
        assert ends[0].send([b"mine", b"mine"]) == [b"mine", b"last"]
        other.result()
        waiting = pool.submit(ends[0].send, [b"mine", b"mine"])
        threading.Event().wait(0.05)
        ends[1].close()
        with pytest.raises(CommError, match=r"rank 0: exchange ids of step 3, layer 1.*got rank 1, which has ended"):
            waiting.result(timeout=100)
    with pytest.raises(CommError, match="got rank 1, which has ended or closed its mesh"):
        ends[0].send([b"more", b"more"])
    ends[0].close()


def test_a_message_that_came_while_this_process_was_stopped_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _pair(timeout_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        others: list[Future[list[bytes]]] = []

        def be_stopped(*_: object) -> None:
            if not others:
                others.append(pool.submit(ends[1].send, [b"last", b"last"]))
                time.sleep(0.5)  # past the limit

        monkeypatch.setattr(ends[0].watch, "compare", be_stopped)
        assert ends[0].send([b"mine", b"mine"]) == [b"mine", b"last"]
        assert others[0].result() == [b"mine", b"last"]
    for end in ends:
        end.close()


def test_a_silent_peer_is_named_when_the_time_is_up() -> None:
    ends = _pair(timeout_s=0.1)
    message = r"all ranks to join within 0 s \(got rank 1 \(process \d+\) has not come; its last collective here: none"
    with pytest.raises(RankFaultError, match=message):
        ends[0].send([b"mine", b"mine"])
    for end in ends:
        end.close()


def test_closing_ends_an_exchange_that_waits_and_refuses_later_ones() -> None:
    ends = _pair()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ends[0].send, [b"mine", b"mine"])
        threading.Event().wait(0.05)
        ends[0].close()
        with pytest.raises(InputError, match="an open mesh"):
            waiting.result(timeout=100)
    with pytest.raises(InputError, match="an open mesh"):
        ends[0].send([b"mine", b"mine"])
    ends[0].close()  # closing twice is fine
    ends[1].close()


def test_a_second_thread_is_refused_while_one_waits() -> None:
    ends = _pair()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ends[0].send, [b"mine", b"mine"])
        threading.Event().wait(0.1)
        with pytest.raises(InputError, match="expected one thread that uses the mesh .got MainThread, while another"):
            ends[0].send([b"more", b"more"])
        ends[1].close()
        with pytest.raises(CommError, match="rank 1, which has ended or closed its mesh"):
            waiting.result(timeout=100)
    ends[0].close()
