"""Waiting for a collective in looks: what ends around a look, or while this process did not run, has not failed."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from watched import watch_pair

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.group_comm import GroupComm, _GroupWork
from gsplit.distributed.watch.collective_watch import CollectiveWatch


class _Work:
    """Ends after some looks; ``said``: what it has to say then, if it failed."""

    def __init__(self, looks: int, said: str = "") -> None:
        self._looks, self._said = looks, said

    def is_completed(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def wait(self, limit: timedelta | None = None) -> None:
        if self._looks >= 0:
            assert limit is not None
            raise RuntimeError("Operation timed out!")
        if self._said:
            raise RuntimeError(self._said)


def _wait(work: _Work, deadline: float) -> None:
    calls = SimpleNamespace(compare=lambda *_: None, timeout_error=lambda *_: ValueError("late"))
    comm: Any = SimpleNamespace(calls=calls)
    _GroupWork(comm, watch_pair()[0].begin(Call("sum"), ""), work, torch.empty(0))._wait_for_peers(deadline)


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_the_end_may_come_around_a_look(looks: int) -> None:
    _wait(_Work(looks), time.monotonic() + 300)
    with pytest.raises(RuntimeError, match="connection closed"):
        _wait(_Work(looks, "connection closed"), time.monotonic() + 300)


def test_a_process_that_was_stopped_past_the_limit_looks_once_more() -> None:
    _wait(_Work(1), time.monotonic() - 1)
    with pytest.raises(ValueError, match="late"):
        _wait(_Work(9), time.monotonic() - 1)


def _group(watch: CollectiveWatch) -> GroupComm:
    """A group of which only the watch is used."""
    comm = GroupComm.__new__(GroupComm)
    comm._group = object()
    comm.device = torch.device("cpu")
    comm.calls = watch
    return comm


@pytest.mark.parametrize("device, is_async", [("cpu", True), ("cuda:0", False)])
def test_on_a_device_the_current_stream_orders_collectives(
    device: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_pair()[0]
    comm = _group(watch)
    comm.device = torch.device(device)
    asked: list[bool] = []

    def all_reduce(tensor: torch.Tensor, *, group: object, async_op: bool) -> _Work:
        asked.append(async_op)
        return _Work(0)

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    work = comm.all_reduce(Call("sum"), torch.empty(0))
    assert asked == [is_async] and watch.is_idle == (not is_async)  # another thread may go on at once
    work.wait()
    assert watch.is_idle


def test_a_collective_that_cannot_start_or_is_abandoned_keeps_no_thread_out() -> None:
    watch = watch_pair()[0]
    comm = _group(watch)
    tensor = torch.empty(0)

    def fail(*, async_op: bool) -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose") as kept:  # the traceback holds the frames
        comm._issue(Call("sum"), "", tensor, fail)
    work = comm._issue(Call("sum"), "", tensor, lambda async_op: _Work(0))
    assert not watch.is_idle
    del work  # by an error before its wait
    with ThreadPoolExecutor(1) as pool:
        pool.submit(comm._issue, Call("sum"), "", tensor, lambda async_op: _Work(0)).result().wait()
    assert kept.value is not None
