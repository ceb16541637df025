"""A collective that a peer does not join, or joins as another one, is named: the rank, what it does, where it is."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from watched import connect_peers, watch_pair

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.watch.collective_watch import CollectiveWatch
from gsplit.distributed.watch.peers import Peers
from gsplit.distributed.watch.processes import RankProcess, StackFile, own_process, read_stack
from gsplit.distributed.watch.remote_status import RemoteStatus
from gsplit.distributed.watch.status_page import MOST_GROUPS, StatusPage, new_page
from gsplit.errors import CommError, InputError, RankFaultError

MEAN, SUM = Call("mean", 3), Call("sum", 3)


def test_the_last_one_sees_that_another_does_something_else() -> None:
    one, two = watch_pair()
    assert [watch.begin(MEAN, "sum of float32 []").number for watch in (one, two)] == [1, 1]
    second = one.begin(MEAN, "sum of float32 []")
    message = "rank 1: sum of step 3: expected the same collective on every rank .got rank 0: mean.*; rank 1: sum"
    with pytest.raises(RankFaultError, match=message):
        two.begin(SUM, "sum of float32 []")
    with pytest.raises(RankFaultError, match="rank 0: mean of step 3 .sum of float32 ...; rank 1: sum of step 3"):
        one.compare(second)  # who waits sees it too, a second later


def test_the_odd_one_out_is_named() -> None:
    watches = watch_pair(num_ranks=4)
    for watch in watches[:3]:
        watch.begin(MEAN, "of float32")
    with pytest.raises(
        RankFaultError, match="got rank 3: mean of step 3 .of float64.; the others: mean of step 3 .of f"
    ):
        watches[3].begin(MEAN, "of float64")


def test_what_must_be_the_same_besides_is_compared() -> None:
    peers = connect_peers()
    one, two = (CollectiveWatch(rank, 0, 1.0, 1.0) for rank in peers)
    peers[0].page.write_line("model", "training")
    peers[1].page.write_line("model", "evaluating")
    one.begin(Call("mean", 3, detail="epoch 0"), "")
    with pytest.raises(RankFaultError, match=r"epoch 0.*epoch 1.*their models: rank 0: training; rank 1: evaluating"):
        two.begin(Call("mean", 3, detail="epoch 1"), "")


class _Interrupted(bytearray):
    """Memory that is looked at after every write to it."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.seen: list[str | None] = []
        self.look: Callable[[], str | None] = lambda: None

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, value)
        self.seen.append(self.look())


def test_a_description_is_read_whole_or_not_at_all() -> None:
    """A rank may wait for a core between two of its writes, for longer than any reader is willing to."""
    memory = _Interrupted(1 << 20)
    page = StatusPage(memory)  # type: ignore[arg-type]
    page.begin(0, 1, "an older one in the same place")
    memory.look = lambda: page.description(0, 65)
    memory.seen.clear()
    page.begin(0, 65, "mean of step 3")
    assert memory.seen == [None, None, "mean of step 3"]


def test_only_the_last_collectives_are_kept_and_more_groups_are_not() -> None:
    peers = connect_peers()
    for number in range(1, 101):
        peers[0].page.begin(0, number, str(number))
    assert [peers[0].page.description(0, number) for number in (36, 37, 100, 101)] == [None, "37", "100", None]
    beyond = CollectiveWatch(peers[0], MOST_GROUPS, 0.1, 0.1)
    with beyond.begin(MEAN, "") as collective:
        assert peers[0].page.waits() == []
    assert "nobody missing, and no end of it" in str(beyond.timeout_error(collective))


def test_the_missing_rank_is_the_one_at_the_end_of_the_waits() -> None:
    """Rank 0 waits for rank 1, which waits in another group for rank 2, which computes; and for rank 2 itself."""
    ranks = connect_peers(3)
    for rank in ranks:
        rank.groups.append((3, 1))
    shuffles, gradients = ([CollectiveWatch(rank, slot, 1.0, 1.0) for rank in ranks] for slot in range(2))
    shuffle = shuffles[0].begin(Call("shuffle", 5, 1), "")
    with gradients[1].begin(MEAN, ""):
        ranks[2].page.write_line("stage", "sample of epoch 0, step 5")
        said = str(shuffles[0].timeout_error(shuffle))
    assert said.startswith("rank 0: shuffle of step 5, layer 1: expected all ranks to join within 1 s (got rank 2 (")
    assert "its last collective here: none; its last stage: sample of epoch 0, step 5, 0 s ago" in said
    assert "rank 1" not in said.partition("\n")[0]
    assert "rank 2, main thread, innermost call first:" in said and "in test_the_missing_rank_is" in said


def test_two_threads_in_one_group_are_refused() -> None:
    watch = watch_pair()[0]
    with watch.begin(MEAN, ""):
        refused: list[str] = []

        def use() -> None:
            with pytest.raises(InputError, match="one thread that uses the mesh .got second, while another is in") as e:
                watch.begin(SUM, "")
            refused.append(str(e.value))

        thread = threading.Thread(target=use, name="second")
        thread.start()
        thread.join()
    assert refused
    assert watch.waited_s > 0
    with pytest.raises(
        CommError, match="expected ranks that have not lost each other .got two threads in a collective"
    ):
        watch.begin(MEAN, "")


def _use_in_another_thread(watch: CollectiveWatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(watch.begin, MEAN, "").result().close()


def test_a_collective_that_is_dropped_lets_other_threads_in() -> None:
    watch = watch_pair()[0]
    abandoned = watch.begin(MEAN, "")
    idle_before = watch.is_idle
    del abandoned  # by an exception between its start and its wait
    assert (idle_before, watch.is_idle) == (False, True)
    _use_in_another_thread(watch)


def test_a_refused_collective_lets_no_thread_wait() -> None:
    one, two = watch_pair()
    held = one.begin(MEAN, "")
    with pytest.raises(RankFaultError):
        two.begin(SUM, "")
    assert not two._open
    held.close()
    _use_in_another_thread(one)


def test_a_stopped_process_is_told_from_one_that_runs_and_one_that_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        seen = RankProcess(child.pid, stat[19], -1)
        assert seen.state() == "running"
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 300
        while seen.state() != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen.state() == "stopped"
        assert RankProcess(child.pid, "0", -1).state() == "ended"  # another process has got its number
    finally:
        child.kill()
        child.wait()
    assert seen.state() == "ended"


def test_a_process_writes_its_own_stack_and_those_of_its_newest_threads() -> None:
    release, waiting = threading.Event(), []
    for _ in range(6):
        begun = threading.Event()
        waiting.append(threading.Thread(target=_wait_here, args=(begun, release)))
        waiting[-1].start()
        assert begun.wait(300)
    said = read_stack(own_process(StackFile()))
    release.set()
    for thread in waiting:
        thread.join()
    assert said is not None and said.startswith("main thread, innermost call first:\n")
    assert "in test_a_process_writes_its_own_stack" in said.partition("another thread:")[0]
    assert said.count("in _wait_here") == 3 and said.splitlines()[-1].endswith("more threads")
    assert read_stack(RankProcess(own_process(StackFile()).number, "0", 3)) is None


def _wait_here(begun: threading.Event, release: threading.Event) -> None:
    begun.set()
    release.wait(300)


class _Store:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_ranks_of_other_hosts_are_known_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsplit.distributed.watch.remote_status._BEAT_S", 0.3)
    store, here = _Store(), Peers(0)
    here.groups.append((3, 1))
    here.follow_remote(lambda: store, 3)
    page = new_page()[0]
    page.write_line("stage", "forward of epoch 0, step 7")
    page.begin(0, 4, "shuffle of step 7, layer 1")
    there = RemoteStatus(store, 1, page, [3])
    slow = CollectiveWatch(here, 0, 1.0, 1.0)
    for _ in range(5):
        collective = slow.begin(MEAN, "")
    said = str(slow.timeout_error(collective))
    assert "(got rank 2 is silent: it has ended or is stopped, or its host or link is down)" in said
    store.values["gsplit/status/2"] = store.values["gsplit/status/1"]
    there.close()
    assert here.remote_causes(0, 4).keys() == {1, 2}  # neither tells any more
    again = [RemoteStatus(store, rank, page, [3]) for rank in (1, 2)]
    known = here.remote_causes(0, 5)
    assert known[1] == (
        "rank 1 has not come; its last collective here: shuffle of step 7, layer 1; "
        "its last stage: forward of epoch 0, step 7"
    )
    assert here.remote_causes(0, 4) == here.remote_ended(0) == {}
    again[1].tell_missed({1: "rank 1 (process 7) has ended"})
    assert here.remote_causes(0, 5) == here.remote_ended(0) == {1: "rank 1 (process 7) has ended"}
    again[1].tell_missed({0: "rank 0 (process 8) has not come"})
    assert here.remote_ended(0) == {2: "rank 2 has given up waiting for rank 0"}
    for rank in again:
        rank.close()
    here.close()


def test_a_circle_of_waits_does_not_leave_its_host() -> None:
    """Ranks 0 and 1 of one host wait for each other in two groups, in which ranks of another host are, too."""
    ranks = connect_peers(2)
    for rank in ranks:
        rank.groups[:] = [(3, 1), (3, 1)]
    control, gradients = ([CollectiveWatch(rank, slot, 1.0, 1.0) for rank in ranks] for slot in range(2))
    one, two = control[0].begin(MEAN, ""), gradients[1].begin(SUM, "")
    with one, two:
        assert "(got rank 1 (process " in str(control[0].timeout_error(one))
        assert "(got rank 0 (process " in str(gradients[1].timeout_error(two))
