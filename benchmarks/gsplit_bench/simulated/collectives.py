"""NCCL's rules, held over gloo: what would hang or crash between GPUs fails here with its reason.

- tensors lie on the device and are contiguous;
- one thread at a time issues collectives, over ALL groups: otherwise their order on the device is left to chance;
- every rank issues the same collectives in the same order over all groups (``CollectiveRules.compare_ranks``);
- a collective runs on a stream of its group: it comes after the stream that issues it, and only ``wait()`` makes that
  stream come after it. A forgotten wait is a race (``streams``).
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call, Comm, Work
from gsplit.distributed.comm.mesh import Mesh
from gsplit_bench.simulated.backend import SimTensor
from gsplit_bench.simulated.execution import host_tensors
from gsplit_bench.simulated.streams import StreamTracker

__all__ = ["CheckedComm", "CollectiveRules", "RuleError", "checked_mesh"]


class RuleError(AssertionError):
    """A collective that NCCL would not survive."""


class CollectiveRules:
    """The rules of one rank over all its groups, and the order of its collectives."""

    def __init__(self, tracker: StreamTracker) -> None:
        self.tracker = tracker
        self.order: list[str] = []
        """Every collective on the device, with its group and what it is for."""
        self._busy = threading.Lock()

    @contextmanager
    def issue(self, group: str, kind: str, call: Call, *tensors: Tensor) -> Iterator[None]:
        """Check one collective and put it down."""
        if not self._busy.acquire(blocking=False):
            raise RuleError(f"{call}: two threads issue collectives at once, so their order is left to chance")
        try:
            for tensor in tensors:
                if not isinstance(tensor, SimTensor):
                    raise RuleError(
                        f"{call}: a tensor of the host, {list(tensor.shape)}, in a collective of the device"
                    )
                if not tensor.is_contiguous():
                    raise RuleError(f"{call}: a tensor that is not contiguous, {list(tensor.shape)}")
            self.order.append(f"{group}: {kind} {call}")
            yield
        finally:
            self._busy.release()

    def launch(self, group: str, call: Call, reads: list[Tensor], writes: list[Tensor]) -> str:
        """Put a collective on its group's stream, after the stream that issues it; returns the group's stream."""
        tracker, name = self.tracker, f"nccl {group}"
        tracker.order_after(name, tracker.snapshot(tracker.current()))
        tracker.launch(name, host_tensors(reads), host_tensors(writes), str(call))
        return name

    def compare_ranks(self, comm: Comm) -> None:
        """Raise on every rank if the ranks' collectives differ in kind or order. A collective."""
        orders = [json.loads(text) for text in comm.gather_text(Call("compare orders"), json.dumps(self.order))]
        for place, entries in enumerate(zip_longest(*orders, fillvalue="nothing")):
            if len(set(entries)) > 1:
                said = "; ".join(f"rank {rank}: {entry}" for rank, entry in enumerate(entries))
                raise RuleError(f"collective {place} is not the same on all ranks. {said}")


class _CheckedWork:
    def __init__(self, work: Work, tracker: StreamTracker, stream: str) -> None:
        self._work, self._tracker, self._stream = work, tracker, stream

    def wait(self) -> None:
        """As on NCCL: the current stream comes after the collective; the host goes on."""
        self._work.wait()
        self._tracker.order_after(self._tracker.current(), self._tracker.snapshot(self._stream))


class CheckedComm:
    """A ``Comm`` of the device that keeps the rules."""

    def __init__(self, comm: Comm, group: str, rules: CollectiveRules) -> None:
        self._comm, self._group, self._rules = comm, group, rules
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device

    @property
    def waited_s(self) -> float:
        return self._comm.waited_s

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._comm.send_buffer(shape, dtype)

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        with self._rules.issue(self._group, "counts", call):
            return self._comm.all_to_all_counts(call, counts)

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        with self._rules.issue(self._group, "all_to_all", call, out, rows):
            work = self._comm.all_to_all(call, out, rows, out_counts, row_counts)
            return _CheckedWork(work, self._rules.tracker, self._rules.launch(self._group, call, [rows], [out]))

    def all_to_all_views(
        self, call: Call, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        out = rows.new_empty(sum(out_counts), *rows.shape[1:])
        self.all_to_all(call, out, rows, out_counts, row_counts).wait()
        return tuple(out.split(out_counts))

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        with self._rules.issue(self._group, "all_reduce", call, tensor):
            work = self._comm.all_reduce(call, tensor)
            return _CheckedWork(work, self._rules.tracker, self._rules.launch(self._group, call, [], [tensor]))

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        with self._rules.issue(self._group, "broadcast", call, tensor):
            self._comm.broadcast(call, tensor)
            stream = self._rules.launch(self._group, call, [], [tensor])
            self._rules.tracker.order_after(self._rules.tracker.current(), self._rules.tracker.snapshot(stream))

    def gather_text(self, call: Call, text: str) -> list[str]:
        with self._rules.issue(self._group, "gather_text", call):
            return self._comm.gather_text(call, text)

    @property
    def closed(self) -> bool:
        return self._comm.closed

    def close(self) -> None:
        self._comm.close()


def checked_mesh(mesh: Mesh, rules: CollectiveRules) -> Mesh:
    """The mesh with the rules on every group that lies on the device."""
    names = ("shuffles", "loading", "inputs", "gradients", "world")
    on_device = {name: comm for name in names if (comm := getattr(mesh, name)).device.type != "cpu"}
    checked: dict[str, Any] = {name: CheckedComm(comm, name, rules) for name, comm in on_device.items()}
    if mesh.inputs is mesh.loading and "loading" in checked:
        checked["inputs"] = checked["loading"]
    return replace(mesh, **checked)
