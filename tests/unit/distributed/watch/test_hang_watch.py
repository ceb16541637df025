"""A collective that never ends is named before torch ends the process, once, and nothing is kept."""

import time

import pytest
import torch
from watched import watch_pair

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.watch.hang_watch import HangWatch


def _until(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    deadline = time.monotonic() + 300
    while len(caplog.messages) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    return caplog.messages


def test_the_oldest_is_named_once_and_looking_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    over = {"first": True, "second": False, "third": False}
    watch = HangWatch(3, timeout_s=0.5, device=torch.device("cpu"))
    group = watch_pair()[0]
    watch.add(group.begin(Call("sum"), ""), lambda: over["first"])
    watch.add(group.begin(Call("shuffle", 7, 1), ""), lambda: over["second"])
    watch.add(group.begin(Call("average"), ""), lambda: over["third"])
    said, missing = _until(caplog, 2)
    assert said.startswith("rank 3: shuffle of step 7, layer 1: expected all ranks to join (got no end for ")
    assert "1 later ones wait behind it, the last that ended is: sum" in said
    assert "(got rank 1 (process " in missing and "has not come; its last collective here: none" in missing
    over["second"] = True  # it was only slow
    assert "average" in _until(caplog, 4)[2]
    watch.close()
    assert not watch._under_way and not watch._thread.is_alive()


def test_a_device_that_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    watch = HangWatch(0, timeout_s=0.5, device=torch.device("cpu"))
    group = watch_pair()[0]
    watch.add(group.begin(Call("sum"), ""), fail)
    assert "sum: an illegal memory access" in _until(caplog, 1)[0]
    watch.close()
