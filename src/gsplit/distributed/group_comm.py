"""A process group of torch.distributed behind ``Comm``.

A collective is written down, compared with what the peers do, started, and waited for with patience
(``collective_watch``). On GPUs the host does not wait at all: there ``hang_watch`` looks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsplit.devices import QueueMark
from gsplit.distributed.collective_watch import CollectiveWatch
from gsplit.distributed.comm import Call, LedgerEntry, Work, explain_closed, new_ledger
from gsplit.distributed.hang_watch import HangWatch
from gsplit.errors import CommError, InputError
from gsplit.kernels.buffers import BufferPool

__all__ = ["GroupComm"]

_LOOK = timedelta(seconds=1)  # how often a waiting rank looks whether the others do the same


class _GroupWork:
    """An asynchronous collective, its number in the group, and the tensor it writes."""

    def __init__(self, comm: "GroupComm", call: Call, number: int, work: Any, out: Tensor) -> None:
        self._comm, self._call, self._number, self._work, self._out = comm, call, number, work, out

    def wait(self) -> None:
        """Wait, then tell autograd that the tensor has changed."""
        calls = self._comm.calls
        with calls.waiting(self._call, self._number), self._comm._explained(self._call, self._number):
            if self._comm.device.type == "cuda":
                self._work.wait()  # the host goes on; with a limit it would stay until the device has got there
            else:
                self._wait_for_peers(time.monotonic() + calls.patience_s(self._call))
        torch.autograd.graph.increment_version(self._out)
        if self._comm.watch is not None:
            self._comm.watch.add(self._call, self._number, QueueMark(self._comm.device).is_over, calls)

    def _wait_for_peers(self, deadline: float) -> None:
        while True:
            try:
                self._work.wait(_LOOK)
                return
            except RuntimeError:  # it failed, or only this look is over
                if self._work.is_completed():
                    self._work.wait()  # raises if it failed; it may also have ended since the look
                    return
            self._comm.calls.compare(self._call, self._number)
            if time.monotonic() > deadline and not self._work.is_completed():  # this process may have been stopped
                raise self._comm.calls.late(self._call, self._number)


class GroupComm:
    """A process group of torch.distributed."""

    def __init__(self, group: Any, device: torch.device, calls: CollectiveWatch) -> None:
        self._group, self.device, self.calls = group, device, calls
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ledger = new_ledger()
        self.watch: HangWatch | None = None
        self._pool = BufferPool(device)

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._pool.empty(shape, dtype)

    @property
    def waited_s(self) -> float:
        return self.calls.waited_s

    @contextmanager
    def _explained(self, call: Call, number: int) -> Iterator[None]:
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            raise self.calls.failed(call, number, error) from error

    def _issue(self, call: Call, what: str, sent: Tensor, out: Tensor, issue: Callable[[], Any]) -> _GroupWork:
        """Write a collective down, compare it with the peers', and start it. All ranks: every method here does."""
        if self.closed:
            raise InputError(explain_closed(call))
        self.ledger.append(LedgerEntry(call, sent.nbytes, out.nbytes))
        number = self.calls.begin(call, what)
        with self._explained(call, number):
            return _GroupWork(self, call, number, issue(), out)

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        ours = torch.tensor(counts, dtype=torch.int64, device=self.device)
        theirs = torch.empty_like(ours)
        start = lambda: dist.all_to_all_single(theirs, ours, group=self._group, async_op=True)  # noqa: E731
        self._issue(call, "counts", ours, theirs, start).wait()  # all ranks: once per layer of every step
        return tuple(theirs.tolist())  # device sync: sizes of what comes next

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        assert out.is_contiguous() and rows.is_contiguous()
        counts = list(out_counts), list(row_counts)  # all ranks: empty tensors where there is nothing to say
        start = lambda: dist.all_to_all_single(out, rows, *counts, group=self._group, async_op=True)  # noqa: E731
        return self._issue(call, f"all-to-all of {rows.dtype} {list(rows.shape[1:])}", rows, out, start)

    def all_to_all_views(
        self, call: Call, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        out = self._pool.empty((sum(out_counts), *rows.shape[1:]), rows.dtype)
        self.all_to_all(call, out, rows, out_counts, row_counts).wait()
        return tuple(out.split(out_counts))

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        start = lambda: dist.all_reduce(tensor, group=self._group, async_op=True)  # noqa: E731
        return self._issue(call, f"all-reduce of {tensor.dtype} {list(tensor.shape)}", tensor, tensor, start)

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        start = lambda: dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)  # noqa: E731
        what = f"broadcast of {tensor.dtype} {list(tensor.shape)}"
        self._issue(call, what, tensor, tensor, start).wait()  # all ranks: at start, parameter after parameter

    def gather_text(self, call: Call, text: str) -> list[str]:
        data = text.encode()
        sizes = self.all_to_all_counts(call, (len(data),) * self.size)
        ours = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        if data:
            ours[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        theirs = [torch.empty_like(ours) for _ in range(self.size)]
        start = lambda: dist.all_gather(theirs, ours, group=self._group, async_op=True)  # noqa: E731
        self._issue(call, "texts", ours, theirs[0], start).wait()  # all ranks: at start only
        return [bytes(t[:n].tolist()).decode() for t, n in zip(theirs, sizes, strict=True)]

    @property
    def closed(self) -> bool:
        return self._group is None

    def close(self) -> None:
        """See ``Comm``. The process group itself goes with the one of all ranks."""
        self._group = None
