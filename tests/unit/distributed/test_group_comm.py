"""Waiting for a collective in looks: what ends around a look, or while this process did not run, has not failed."""

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gsplit.distributed.comm import Call
from gsplit.distributed.group_comm import _GroupWork


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
    calls = SimpleNamespace(compare=lambda *_: None, late=lambda *_: ValueError("late"))
    comm: Any = SimpleNamespace(calls=calls)
    _GroupWork(comm, Call("sum"), 1, work, torch.empty(0))._wait_for_peers(deadline)


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_the_end_may_come_around_a_look(looks: int) -> None:
    _wait(_Work(looks), time.monotonic() + 300)
    with pytest.raises(RuntimeError, match="connection closed"):
        _wait(_Work(looks, "connection closed"), time.monotonic() + 300)


def test_a_process_that_was_stopped_past_the_limit_looks_once_more() -> None:
    _wait(_Work(1), time.monotonic() - 1)
    with pytest.raises(ValueError, match="late"):
        _wait(_Work(9), time.monotonic() - 1)
