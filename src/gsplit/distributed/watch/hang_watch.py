"""Reports collectives on devices that never end.

On gloo the host waits in a collective and gives up with an error that names it. On NCCL the host goes on: a collective
that some rank never joins is not visible until torch's watchdog ends the process after the timeout. This thread polls
the collectives under way and reports the oldest one before that happens, with the one before it. torch's flight
recorder, which ``prepare_nccl`` switches on, then writes what all ranks had under way.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from gsplit.distributed.watch.collective_watch import Collective
from gsplit.errors import explain

__all__ = ["HangWatch", "prepare_nccl"]

_LOG = logging.getLogger("gsplit")
_REPORTED_AT = 0.8  # of the timeout: before torch ends the process
_NCCL_SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its name in older versions of torch
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # communicators run in the order in which they were launched, from NCCL 2.26 on
}


def prepare_nccl() -> None:
    """Have NCCL groups made from now on keep their order, and their last collectives, to be written on a timeout."""
    for name, value in _NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)


class _Issued(NamedTuple):
    collective: Collective
    is_over: Callable[[], bool]
    since: float


class HangWatch:
    """Polls the collectives of one rank, over all its groups on a device."""

    def __init__(self, rank: int, timeout_s: float, device: torch.device) -> None:
        self._rank, self._limit_s, self._device = rank, _REPORTED_AT * timeout_s, device
        self._under_way: deque[_Issued] = deque()
        self._last_ended, self._reported = "none", False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(min(1.0, timeout_s / 20),), daemon=True)
        self._thread.start()

    def add(self, collective: Collective, is_over: Callable[[], bool]) -> None:
        """A collective has been issued.

        ``is_over`` queries an event behind it on the stream, never torch's handle, which would keep its tensors.
        """
        self._under_way.append(_Issued(collective, is_over, time.monotonic()))

    def close(self) -> None:
        """Stop polling."""
        self._stop.set()
        self._thread.join(2.0)
        self._under_way.clear()

    def _run(self, interval_s: float) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_device(self._device)  # or the query would use the first device
        while not self._stop.wait(interval_s):
            try:
                while self._under_way and self._under_way[0].is_over():
                    self._last_ended, self._reported = str(self._under_way.popleft().collective.call), False
            except RuntimeError as error:  # the device has failed: every later query would fail too
                _LOG.error("rank %d: %s: %s", self._rank, self._under_way[0].collective.call, error)
                return
            if self._under_way and not self._reported and time.monotonic() - self._under_way[0].since > self._limit_s:
                self._reported = True
                self._report()

    def _report(self) -> None:
        oldest = self._under_way[0]
        num_later = len(self._under_way) - 1
        call, watch = oldest.collective.call, oldest.collective.watch
        got = (
            f"no end for {time.monotonic() - oldest.since:.0f} s; {num_later} later ones wait behind it, the last that "
            f"ended is: {self._last_ended}"
        )
        fix = (
            "look at the other ranks' errors: one of them ended, or did not call the same collective; on GPUs torch's "
            "flight recorder writes what every rank had under way (~/.cache/torch/comm_lib_trace_rank_*, in older "
            "versions /tmp/nccl_trace_rank_*)"
        )
        _LOG.error(explain(f"rank {self._rank}: {call}", "all ranks to join", got, fix))
        _LOG.error("%s", watch.timeout_error(oldest.collective, is_final=False))
