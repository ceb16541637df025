"""A process group of torch.distributed behind ``Comm``.

A collective is written down, compared with what the peers do, started, and waited for with patience
(``collective_watch``). On a device it runs on the current stream, and the host goes on at once: if it never ends, torch
ends the process after the timeout of the group.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsplit.distributed.comm.comm import Call, CompletedWork, Levels, Work, explain_closed
from gsplit.distributed.watch.collective_watch import Collective, CollectiveWatch
from gsplit.errors import CommError, InputError
from gsplit.kernels.buffers import BufferPool

__all__ = ["GroupComm"]

_POLL = timedelta(seconds=1)  # how often a waiting rank checks whether the others do the same
_LENGTHS = (1, 1 << 22)  # of sums: NCCL has other algorithms for long tensors, each with memory of its own


class _GroupWork:
    """An asynchronous collective on the host and the tensor it writes."""

    def __init__(self, comm: "GroupComm", collective: Collective, work: Any, out: Tensor) -> None:
        self._comm = comm
        self._collective = collective
        self._work = work
        self._out = out

    def wait(self) -> None:
        """Wait, then tell autograd that the tensor has changed."""
        comm, collective = self._comm, self._collective
        with collective, comm.explained(collective):
            self._wait_for_peers(time.monotonic() + comm.calls.timeout_s(collective.call))
        torch.autograd.graph.increment_version(self._out)

    def _wait_for_peers(self, deadline: float) -> None:
        calls = self._comm.calls
        while True:
            try:
                self._work.wait(_POLL)
                return
            except RuntimeError:  # it failed, or only this poll is over
                if self._work.is_completed():
                    self._work.wait()  # raises if it failed; it may also have ended since the poll
                    return
            calls.compare(self._collective)
            if time.monotonic() > deadline and not self._work.is_completed():  # this process may have been stopped
                raise calls.timeout_error(self._collective)


class GroupComm:
    """A process group of torch.distributed."""

    def __init__(self, group: Any, device: torch.device, calls: CollectiveWatch) -> None:
        self._group, self.device, self.calls = group, device, calls
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.levels: Levels | None = None
        self._pool = BufferPool(device)

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._pool.empty(shape, dtype)

    @property
    def waited_s(self) -> float:
        own_s = self.calls.waited_s
        return own_s if self.levels is None else own_s + self.levels.near.waited_s + self.levels.far.waited_s

    @contextmanager
    def explained(self, collective: Collective) -> Iterator[None]:
        """Raise errors of torch as errors that name the rank at fault."""
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            raise self.calls.failure_error(collective, error) from error

    def check_open(self, call: Call) -> None:
        if self.closed:
            raise InputError(explain_closed(call))

    def open_communicator(self, *, exchanges: bool, sums: bool) -> None:
        """Have NCCL connect the ranks and allocate its memory, outside of torch's; it would do so when first used.

        Its errors come here instead of in the first step. ``exchanges``, ``sums``: what the group is used for, as each
        takes memory. A collective.
        """
        call = Call("open a communicator")
        if exchanges:
            self.all_to_all_counts(call, (0,) * self.size)
        for length in _LENGTHS if sums else ():
            total = torch.zeros(length, device=self.device)
            self.broadcast(call, total)
            self.all_reduce(call, total)
            total[0].item()  # device sync: NCCL has started by then

    def _issue(self, call: Call, what: str, out: Tensor, issue: Callable[..., Any]) -> Work:
        """Write a collective down, compare it with the peers', and start it. All ranks: every method here does."""
        self.check_open(call)
        on_host = self.device.type == "cpu"
        assert not call.long_wait or on_host  # NCCL ends the ranks that wait longer than its timeout
        collective = self.calls.begin(call, what)
        try:
            with self.explained(collective):
                if on_host:
                    return _GroupWork(self, collective, issue(async_op=True), out)
                with collective:
                    issue(async_op=False)  # on the current stream, as all collectives of the device, which orders them
                torch.autograd.graph.increment_version(out)
                return CompletedWork()
        except BaseException:
            collective.close()  # the traceback may keep it
            raise

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        ours = torch.tensor(counts, dtype=torch.int64, device=self.device)
        theirs = torch.empty_like(ours)
        start = partial(dist.all_to_all_single, theirs, ours, group=self._group)
        self._issue(call, "counts", theirs, start).wait()  # all ranks: once per layer of every step
        return tuple(theirs.tolist())  # device sync: sizes of what comes next

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        assert out.is_contiguous() and rows.is_contiguous()
        counts = list(out_counts), list(row_counts)  # all ranks: empty tensors where there is nothing to say
        start = partial(dist.all_to_all_single, out, rows, *counts, group=self._group)
        return self._issue(call, f"all-to-all of {rows.dtype} {list(rows.shape[1:])}", out, start)

    def all_to_all_views(
        self, call: Call, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        out = self._pool.empty((sum(out_counts), *rows.shape[1:]), rows.dtype)
        self.all_to_all(call, out, rows, out_counts, row_counts).wait()
        return tuple(out.split(out_counts))

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        start = partial(dist.all_reduce, tensor, group=self._group)
        return self._issue(call, f"all-reduce of {tensor.dtype} {list(tensor.shape)}", tensor, start)

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        start = partial(dist.broadcast, tensor, group=self._group, group_src=0)
        what = f"broadcast of {tensor.dtype} {list(tensor.shape)}"
        self._issue(call, what, tensor, start).wait()  # all ranks: at start, parameter after parameter

    def gather_text(self, call: Call, text: str) -> list[str]:
        assert self.device.type == "cpu"  # texts go through mesh.control
        data = text.encode()
        sizes = self.all_to_all_counts(call, (len(data),) * self.size)
        ours = torch.zeros(max(sizes), dtype=torch.uint8)
        if data:
            ours[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        theirs = [torch.empty_like(ours) for _ in range(self.size)]
        start = partial(dist.all_gather, theirs, ours, group=self._group)
        self._issue(call, "texts", theirs[0], start).wait()  # all ranks: at start only
        return [bytes(t[:n].tolist()).decode() for t, n in zip(theirs, sizes, strict=True)]

    @property
    def closed(self) -> bool:
        return self._group is None

    def close(self) -> None:
        """See ``Comm``. The process group itself goes with the one of all ranks."""
        self._group = None
        if self.levels is not None:
            self.levels.near.close()
            self.levels.far.close()
