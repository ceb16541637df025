"""Diagnosis of a collective that does not end: which rank is missing, and what it does instead.

Ranks of one host read each other's status pages (``status_page``) and request each other's stacks (``processes``).
The state of ranks on other hosts comes from the store (``remote_status``), with whom they themselves miss.

A rank that waits is not the cause if the one it waits for waits for a third: the chain of waits is followed to its end,
or to where it leaves this host.
"""

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from gsplit.distributed.watch import processes
from gsplit.distributed.watch.processes import RankProcess, StackFile, own_process, read_stack
from gsplit.distributed.watch.remote_status import KeyValueStore, RemoteStatus
from gsplit.distributed.watch.status_page import StatusPage, Waiting, in_loader_thread, map_page, new_page

__all__ = ["PeerInfo", "Peers", "join_differences"]

_READ_AGAIN_S = 0.02


@dataclass(frozen=True)
class PeerInfo:
    """What peers need to open this rank's status page and to identify its process."""

    host: str
    page: int
    token: str
    process: RankProcess


class Peers:
    """All ranks, seen from one.

    ``groups``: the size and the stride of the ranks of every group that is written down.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.page, self._descriptor = new_page()
        self.groups: list[tuple[int, int]] = []
        self._stacks = StackFile()
        self._remote: RemoteStatus | None = None
        self._pages: dict[int, StatusPage] = {rank: self.page}
        self._processes: dict[int, RankProcess] = {}

    def describe_self(self) -> str:
        """This rank's ``PeerInfo`` as text, for all other ranks."""
        token = secrets.token_hex(16)
        self.page.write_line("token", token)
        return json.dumps(
            asdict(PeerInfo(processes.describe_host(), self._descriptor, token, own_process(self._stacks)))
        )

    def connect(self, infos: Sequence[str]) -> None:
        """Open the status pages of the other ranks, given all ranks' infos; ranks on other hosts are skipped."""
        for rank, text in enumerate(infos):
            info = json.loads(text)
            process = RankProcess(**info.pop("process"))
            theirs = PeerInfo(**info, process=process)
            if rank == self.rank or theirs.page < 0 or theirs.host != processes.describe_host():
                continue
            try:
                page = map_page(process.number, theirs.page)
            except (OSError, ValueError):
                continue
            if page.line("token")[0] == theirs.token:
                self._pages[rank], self._processes[rank] = page, process

    def follow_remote(self, open_store: Callable[[], KeyValueStore], num_ranks: int) -> None:
        """Publish this rank's state through the store if some ranks are on other hosts."""
        if len(self._pages) < num_ranks:
            self._remote = RemoteStatus(open_store(), self.rank, self.page, self.groups)

    def members(self, group: int, rank: int) -> range:
        """The ranks of a rank's group."""
        size, stride = self.groups[group]
        first = rank // (size * stride) * (size * stride) + rank % stride
        return range(first, first + size * stride, stride)

    def differences(self, group: int, number: int) -> dict[int, str]:
        """What a collective is at the ranks that have begun it, if that is not the same everywhere."""
        own = self.page.record(group, number)
        if not any(self._differs(rank, group, number, own) for rank in self.members(group, self.rank)):
            return {}
        time.sleep(_READ_AGAIN_S)  # a description may have been half written
        found = self._descriptions(group, number)
        return found if len(set(found.values())) > 1 else {}

    def _differs(self, rank: int, group: int, number: int, own: bytes) -> bool:
        """Whether a rank has begun this number as a different collective; fast, since every collective runs it."""
        page = self._pages.get(rank)
        if page is None or (theirs := page.record(group, number)) == own:
            return False
        return theirs[:8] == own[:8]  # the number; or else it has not come, or is far ahead

    def _descriptions(self, group: int, number: int) -> dict[int, str]:
        found = {}
        for rank in self.members(group, self.rank):
            page = self._pages.get(rank)
            text = None if page is None else page.description(group, number)
            if text is not None:
                found[rank] = text
        return found

    def models(self, ranks: Sequence[int]) -> dict[int, str]:
        """The train/eval state of the models of some ranks, if it differs."""
        found = {rank: self._pages[rank].line("model")[0] for rank in ranks if rank in self._pages}
        return found if len(set(found.values())) > 1 else {}

    def causes(self, group: int, number: int) -> list[int]:
        """The ranks of this host that this rank waits for in a collective, as far as they can be determined."""
        return self._follow(group, number)[0]

    def _follow(self, group: int, number: int) -> tuple[list[int], list[tuple[int, Waiting]]]:
        """Who is missing on this host, and which ranks of other hosts are waited for, in which collectives."""
        found: dict[int, bool] = {}
        elsewhere: list[tuple[int, Waiting]] = []
        own = Waiting(group, number, in_loader_thread(), time.monotonic())
        self._trace((self.rank,), own, found, elsewhere)
        return sorted(rank for rank, is_cause in found.items() if is_cause), elsewhere

    def _trace(
        self, path: tuple[int, ...], wait: Waiting, found: dict[int, bool], elsewhere: list[tuple[int, Waiting]]
    ) -> bool:
        """Whether the last rank of a path of waits waits for another one; ``found``: is a missing rank a cause?

        What the thread that trains waits for is its peers' threads that train, whatever their loaders wait for. Where
        nobody is missing on this host, the wait is for the ranks of others, of which nothing is known yet.
        """
        waits_for_another, unseen = False, []
        members = self.members(wait.group, path[-1])
        for rank in members:
            page, process = self._pages.get(rank), self._processes.get(rank)
            if rank not in self._pages:
                unseen.append((rank, wait))
            if rank in path or page is None or process is None:
                continue
            if rank not in found:
                state = process.state()
                if state == "running" and page.begun(wait.group) >= wait.number:
                    continue
                found[rank] = True
                if state == "running":
                    waits = [each for each in page.waits() if wait.in_loader_thread or not each.in_loader_thread]
                    traced = [self._trace((*path, rank), each, found, elsewhere) for each in waits]  # all of them
                    found[rank] = not any(traced)
            waits_for_another = True
        closes = any(self._pages[rank].begun(wait.group) < wait.number for rank in path if rank in members)
        if unseen and not waits_for_another and not closes:  # or it waits for one of those that wait for it
            elsewhere += unseen
            return True
        return waits_for_another

    def remote_causes(self, group: int, number: int) -> dict[int, str]:
        """Ranks of other hosts that this rank waits for and that have not come, and their last known state."""
        return self._ask(self._follow(group, number)[1])

    def remote_ended(self, group: int) -> dict[int, str]:
        """Ranks of this rank's group, on other hosts, that have ended or cannot be reached."""
        none = Waiting(group, 0, in_loader_thread=False, since_s=0.0)
        return self._ask([(rank, none) for rank in self.members(group, self.rank) if rank not in self._pages])

    def _ask(self, waited_for: Sequence[tuple[int, Waiting]]) -> dict[int, str]:
        """Which ranks of other hosts are missing. A rank that misses others is not: they are, in its words."""
        if not waited_for or self._remote is None:
            return {}
        ranks = sorted({rank for rank, _ in waited_for})
        told = self._remote.read(ranks)
        if not told:
            return {rank: f"rank {rank}: nothing, and the store that it tells does not answer" for rank in ranks}
        missed = {rank: text for known in told.values() for rank, text in known.missed.items() if rank != self.rank}
        late = {rank: _gave_up(rank, self.rank) for rank, known in told.items() if self.rank in known.missed}
        if missed or late:
            return missed or late
        found, silent = dict[int, str](), dict[int, str]()
        for rank, wait in waited_for:
            known = told.get(rank)
            what = "" if known is None else f"; its last collective here: {known.last.get(wait.group) or 'none'}"
            what += f"; its last stage: {known.stage}" if known is not None and known.stage else ""
            if known is None or known.is_silent:
                silent[rank] = f"rank {rank} is silent: it has ended or is stopped, or its host or link is down{what}"
            elif known.begun.get(wait.group, 0) < wait.number:
                found[rank] = f"rank {rank} has not come{what}"
        return silent or found

    def tell_missed(self, missed: dict[int, str]) -> None:
        """Let other ranks know which ranks this one misses, and what they do: it is about to fail because of them."""
        for rank, text in sorted(missed.items())[:1]:
            self.page.write_line("missed", f"{rank} {text}")
        if self._remote is not None:
            self._remote.tell_missed(missed)

    def ended(self, group: int) -> dict[int, str]:
        """Ranks of this rank's group whose processes have ended, and what they did last.

        One that ended because it missed another is not the cause: the other is, in its words.
        """
        processes = {rank: self._processes.get(rank) for rank in self.members(group, self.rank)}
        ranks = [rank for rank, process in processes.items() if process is not None and process.state() == "ended"]
        first = {rank: self.describe(rank, group) for rank in ranks if not self._pages[rank].line("missed")[0]}
        if first:
            return first
        found = {}
        for rank in ranks:
            missed, _, text = self._pages[rank].line("missed")[0].partition(" ")
            late = int(missed) == self.rank
            found[rank if late else int(missed)] = _gave_up(rank, self.rank) if late else text
        return found

    def stopped(self, rank: int) -> bool:
        """Whether a rank's process is stopped."""
        return rank in self._processes and self._processes[rank].state() == "stopped"

    def describe(self, rank: int, group: int) -> str:
        """In one line: what a rank does, and the last it did in a group."""
        page, process = self._pages[rank], self._processes[rank]
        state, begun = process.state(), page.begun(group)
        doing = {"stopped": "is stopped (SIGSTOP or a debugger)", "ended": "has ended", "running": "has not come"}[
            state
        ]
        last = page.description(group, begun) if begun else None
        parts = [f"rank {rank} (process {process.number}) {doing}", f"its last collective here: {last or 'none'}"]
        for wait in page.waits():
            if wait.group != group or wait.number != begun or state == "running":
                what = page.description(wait.group, wait.number)
                parts.append(f"waits in: {what}, for {time.monotonic() - wait.since_s:.0f} s")
        for line, where in (("stage", "its last stage"), ("loader", "its loader's")):
            text, since_s = page.line(line)  # type: ignore[arg-type]
            if text:
                parts.append(f"{where}: {text}, {time.monotonic() - since_s:.0f} s ago")
        return "; ".join(parts)

    def stack(self, rank: int) -> str | None:
        """The Python stacks of a rank of this host; None if it does not answer."""
        return read_stack(self._processes[rank]) if rank in self._processes else None

    def close(self) -> None:
        """Stop publishing this rank's state. Peers that have opened its page keep it."""
        if self._remote is not None:
            self._remote.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _gave_up(rank: int, on: int) -> str:
    return f"rank {rank} has given up waiting for rank {on}"


def join_differences(found: dict[int, str], name: Callable[[int], str] = "rank {}".format) -> str:
    """Who differs from the rest; with two ranks, or no majority, what each has.

    >>> join_differences({0: "mean", 1: "sum"})
    'rank 0: mean; rank 1: sum'
    >>> join_differences({0: "mean", 1: "mean", 2: "sum", 3: "mean"})
    'rank 2: sum; the others: mean'
    """
    (common, count), *_ = Counter(found.values()).most_common()
    if count > len(found) / 2:
        odd = [f"{name(rank)}: {text}" for rank, text in found.items() if text != common]
        return "; ".join([*odd, f"the others: {common}"])
    return "; ".join(f"{name(rank)}: {text}" for rank, text in found.items())
