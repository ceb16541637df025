"""The state of ranks on other hosts: each rank publishes its own through the rendezvous store, every two seconds.

A key and a few hundred bytes per rank. The thread runs only if the status page of some rank cannot be read directly
(``peers``). A rank whose collective fails or times out publishes at once whom it misses on its own host, or reads the
keys of the others twice: a key that does not change belongs to a rank that has ended or is stopped, or whose host or
link is down. If the store itself does not answer, the error reports that.
"""

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gsplit.distributed.watch.status_page import MOST_GROUPS, StatusPage

__all__ = ["RemoteRank", "RemoteStatus", "KeyValueStore"]

_BEAT_S = 2.0
_READ_S = 10.0  # for all keys, twice
_TELL_S = 1.0


class KeyValueStore(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Replace a value."""

    def get(self, key: str) -> bytes:
        """A value."""

    def check(self, keys: list[str]) -> bool:
        """Whether there are values."""


@dataclass(frozen=True)
class RemoteRank:
    """A rank of another host. ``begun`` and ``last``: by group, how many collectives it has begun, and the last one.

    ``missed``: the ranks that have ended or do not come, where it is in a collective that failed because of them.
    """

    is_silent: bool
    stage: str
    begun: dict[int, int]
    last: dict[int, str]
    missed: dict[int, str]


class RemoteStatus:
    """Publishes this rank's state until it is closed, and reads that of the others."""

    def __init__(self, store: KeyValueStore, rank: int, page: StatusPage, groups: Sequence[object]) -> None:
        self._store, self._rank, self._page, self._groups = store, rank, page, groups
        self._stop, self._hurry, self._is_told = threading.Event(), threading.Event(), threading.Event()
        self._missed: dict[int, str] = {}
        self._thread = threading.Thread(target=self._publish, name="gsplit-status", daemon=True)
        self._thread.start()

    def _publish(self) -> None:
        beat = 0
        while not self._stop.is_set():
            beat += 1
            missed = self._missed
            begun = {group: self._page.begun(group) for group in range(min(len(self._groups), MOST_GROUPS))}
            last = {group: self._page.description(group, number) or "" for group, number in begun.items()}
            state = {"beat": beat, "stage": self._page.line("stage")[0], "begun": begun, "last": last}
            try:
                self._store.set(_key(self._rank), json.dumps(state | {"missed": missed}))
            except RuntimeError:  # the store has gone, and with it the run
                return
            if missed and missed is self._missed:
                self._is_told.set()
            self._hurry.wait(_BEAT_S)
            self._hurry.clear()

    def tell_missed(self, missed: dict[int, str]) -> None:
        """Publish at once which ranks this one misses: its process may be about to end. Takes a second at most."""
        self._missed = missed
        self._is_told.clear()
        self._hurry.set()
        self._is_told.wait(_TELL_S)

    def read(self, ranks: Sequence[int]) -> dict[int, RemoteRank]:
        """The state that ranks have published; ranks without one are left out. Takes a few seconds, and 10 at most,
        unless one of them tells whom it misses.
        """
        found: dict[int, RemoteRank] = {}
        reader = threading.Thread(target=self._read, args=(ranks, found), daemon=True)
        reader.start()
        reader.join(_READ_S)  # a store that does not answer would keep it for minutes
        return dict(found)

    def _read(self, ranks: Sequence[int], found: dict[int, RemoteRank]) -> None:
        try:
            first = self._read_keys(ranks)
        except RuntimeError:
            return
        found |= {rank: _parse(said) for rank, said in first.items()}
        if any(known.missed for known in found.values()):  # they know more than silence tells
            return
        self._stop.wait(2 * _BEAT_S)
        with suppress(RuntimeError):  # the store has gone meanwhile, with the process that had it
            for rank, said in self._read_keys(ranks).items():
                is_silent = rank in first and first[rank]["beat"] == said["beat"]
                found[rank] = replace(_parse(said), is_silent=is_silent)

    def _read_keys(self, ranks: Sequence[int]) -> dict[int, Any]:
        return {rank: json.loads(self._store.get(_key(rank))) for rank in ranks if self._store.check([_key(rank)])}

    def close(self) -> None:
        """Stop publishing."""
        self._stop.set()
        self._hurry.set()
        self._thread.join(2.0)


def _parse(said: dict[str, Any]) -> RemoteRank:
    begun, last, missed = (
        {int(key): value for key, value in said[name].items()} for name in ("begun", "last", "missed")
    )
    return RemoteRank(is_silent=False, stage=str(said["stage"]), begun=begun, last=last, missed=missed)


def _key(rank: int) -> str:
    return f"gsplit/status/{rank}"
