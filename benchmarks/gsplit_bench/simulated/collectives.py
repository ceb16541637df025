"""NCCL's rules, held over gloo: what would hang or crash between GPUs fails here with its reason.

- tensors lie on the device and are contiguous;
- one thread at a time issues collectives, over ALL groups: otherwise their order on the device is left to chance;
- every rank issues the same collectives in the same order over all groups (``CollectiveRules.compare_ranks``);
- a collective comes, on the device, after all earlier ones, of whatever group: two in flight at once may each hold what
  the other waits for;
- a rank that comes later than ten minutes finds the others ended by torch's watchdog; on the host a minute is too late
  where nobody works alone. Clocks are simulated: a test says
  how long a rank has worked alone (``CollectiveRules.work_alone``);
- a collective runs on the current stream: other streams have to wait for it (``streams``).
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call, Comm, CompletedWork, Levels, Work
from gsplit.distributed.comm.mesh import Mesh
from gsplit_bench.simulated.backend import SimTensor
from gsplit_bench.simulated.execution import host_tensors
from gsplit_bench.simulated.streams import StreamTracker

__all__ = ["CheckedComm", "CollectiveRules", "RuleError", "checked_mesh"]


class RuleError(AssertionError):
    """A collective that NCCL would not survive."""


class CollectiveRules:
    """The rules of one rank over all its groups, and the order of its collectives."""

    def __init__(self, tracker: StreamTracker, timeout_s: float = 60.0, long_timeout_s: float = 600.0) -> None:
        self.tracker = tracker
        self._timeout_s = timeout_s
        self._long_timeout_s = long_timeout_s
        self._clock_s: int | None = None  # None until a rank has worked alone
        self._newest: dict[str, int] = {}
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

    def launch(self, call: Call, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Put a collective on the current stream."""
        tracker, name = self.tracker, self.tracker.current()
        number = tracker.launch(name, host_tensors(reads), host_tensors(writes), str(call))
        for other, newest in self._newest.items():
            if other != name and not tracker.is_ordered(name, other, newest):
                raise RuleError(f"{call}: collectives on stream {name} and on stream {other} are in flight at once")
        self._newest[name] = number

    def start_clocks(self) -> None:
        """Compare the ranks' clocks in every collective from now on. All ranks do."""
        self._clock_s = 0

    def work_alone(self, seconds: int) -> None:
        """This rank's host works for so long before it goes on; the others do not."""
        assert self._clock_s is not None
        self._clock_s += seconds

    def meet(self, comm: Comm, call: Call) -> None:
        """All ranks of a group have come to a collective: refused if the first had to wait too long for the last."""
        if self._clock_s is None:
            return
        clocks = comm.all_to_all_counts(Call("compare clocks"), (self._clock_s,) * comm.size)
        limit = self._timeout_s if comm.device.type == "cpu" and not call.long_wait else self._long_timeout_s
        if max(clocks) - min(clocks) > limit:
            late = clocks.index(max(clocks))
            raise RuleError(f"{call}: rank {late} comes {max(clocks) - min(clocks)} s late, the limit is {limit:g} s")
        self._clock_s = max(clocks)

    def compare_ranks(self, comm: Comm) -> None:
        """Raise on every rank if the ranks' collectives differ in kind or order. A collective."""
        orders = [json.loads(text) for text in comm.gather_text(Call("compare orders"), json.dumps(self.order))]
        for place, entries in enumerate(zip_longest(*orders, fillvalue="nothing")):
            if len(set(entries)) > 1:
                said = "; ".join(f"rank {rank}: {entry}" for rank, entry in enumerate(entries))
                raise RuleError(f"collective {place} is not the same on all ranks. {said}")


class CheckedComm:
    """A ``Comm`` that keeps the rules: of the device all of them, of the host that no rank comes too late."""

    def __init__(self, comm: Comm, group: str, rules: CollectiveRules) -> None:
        self._comm, self._group, self.rules = comm, group, rules
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self._on_device = comm.device.type != "cpu"
        self.levels: Levels | None = None
        if comm.levels is not None:
            near, far = comm.levels.near, comm.levels.far
            self.levels = Levels(CheckedComm(near, f"{group} near", rules), CheckedComm(far, f"{group} far", rules))

    @contextmanager
    def _issue(self, kind: str, call: Call, *tensors: Tensor) -> Iterator[None]:
        self.rules.meet(self._comm, call)
        with self.rules.issue(self._group, kind, call, *tensors) if self._on_device else nullcontext():
            yield

    def _launched(self, work: Work, call: Call, reads: list[Tensor], writes: list[Tensor]) -> Work:
        if self._on_device:
            self.rules.launch(call, reads, writes)
        return work

    @property
    def waited_s(self) -> float:
        return self._comm.waited_s

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._comm.send_buffer(shape, dtype)

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        with self._issue("counts", call):
            found = self._comm.all_to_all_counts(call, counts)
            if self._on_device:
                tracker = self.rules.tracker
                self.rules.launch(call, [], [])
                tracker.host_waited(tracker.snapshot(tracker.current()))
            return found

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        with self._issue("all_to_all", call, out, rows):
            work = self._comm.all_to_all(call, out, rows, out_counts, row_counts)
            return self._launched(work, call, [rows], [out])

    def all_to_all_views(
        self, call: Call, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        out = rows.new_empty(sum(out_counts), *rows.shape[1:])
        self.all_to_all(call, out, rows, out_counts, row_counts).wait()
        return tuple(out.split(out_counts))

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        with self._issue("all_reduce", call, tensor):
            return self._launched(self._comm.all_reduce(call, tensor), call, [], [tensor])

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        with self._issue("broadcast", call, tensor):
            self._comm.broadcast(call, tensor)
            self._launched(CompletedWork(), call, [], [tensor]).wait()

    def gather_text(self, call: Call, text: str) -> list[str]:
        with self._issue("gather_text", call):
            return self._comm.gather_text(call, text)

    @property
    def closed(self) -> bool:
        return self._comm.closed

    def close(self) -> None:
        self._comm.close()


def checked_mesh(mesh: Mesh, rules: CollectiveRules) -> Mesh:
    """The mesh with the rules on every group that lies on the device, and on ``control``."""
    made: dict[int, CheckedComm] = {}
    checked: dict[str, Any] = {}
    for name in ("shuffles", "inputs", "gradients", "world"):
        comm = getattr(mesh, name)
        if comm.device.type != "cpu":
            checked[name] = made.setdefault(id(comm), CheckedComm(comm, name, rules))
    checked["control"] = CheckedComm(mesh.control, "control", rules)
    return replace(mesh, **checked)
