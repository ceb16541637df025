"""Collectives between the ranks: the only place where tensors leave a process.

Everybody always joins (law 5): every method here is called by all ranks of the group in the same order, with
tensors that may be empty. One process runs the same code through ``SoloComm``. Each call is written into a ledger
with its name, step, layer and sizes, so that a hang or a mismatch can be named. What a collective writes is marked
as modified for autograd, which cannot see it otherwise.
"""

import atexit
import hashlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gsplit.errors import CommError, GSplitError, InputError, explain
from gsplit.kernels.buffers import BufferPool

__all__ = [
    "Call",
    "Comm",
    "CompletedWork",
    "GroupComm",
    "Groups",
    "LedgerEntry",
    "Work",
    "SoloComm",
    "assert_same_on_all_ranks",
    "connect",
    "disconnect",
    "run_on_rank_zero",
    "is_connected",
]

LEDGER_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Call:
    """What a collective is for; the same on every rank."""

    name: str
    step: int = -1
    layer: int = -1

    def __str__(self) -> str:
        return f"{self.name} of step {self.step}, layer {self.layer}"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One collective as this rank saw it."""

    call: Call
    bytes_sent: int
    bytes_received: int


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is there."""


class Comm(Protocol):
    """The ranks of one group, seen from one of them."""

    rank: int
    size: int
    ledger: deque[LedgerEntry]

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Tell every peer a number and hear one from each."""

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        """Send ``rows``, peer after peer, and receive into ``out``, peer after peer. Neither may change until the
        wait.
        """

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor to write the rows of the next exchange into; no one may keep it beyond that exchange."""

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        """Sum a tensor over the ranks, in place. It may not be touched until the wait."""

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        """Give every rank what rank 0 has, in place."""

    def gather_text(self, call: Call, text: str) -> list[str]:
        """A short text from every rank, in rank order."""


class CompletedWork:
    """A collective that is over when it returns."""

    def wait(self) -> None:
        """Nothing is under way."""


class SoloComm:
    """One process: nothing to send, the same calls."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.ledger: deque[LedgerEntry] = deque(maxlen=LEDGER_ENTRIES)

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See ``Comm``."""
        return torch.empty(shape, dtype=dtype)

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Comm``."""
        self.ledger.append(LedgerEntry(call, 0, 0))
        return counts

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        """See ``Comm``."""
        assert out_counts == row_counts == (out.size(0),) == (rows.size(0),)
        out.copy_(rows)
        self.ledger.append(LedgerEntry(call, 0, 0))
        return CompletedWork()

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        """See ``Comm``."""
        self.ledger.append(LedgerEntry(call, 0, 0))
        return CompletedWork()

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        """See ``Comm``."""
        self.ledger.append(LedgerEntry(call, 0, 0))

    def gather_text(self, call: Call, text: str) -> list[str]:
        """See ``Comm``."""
        self.ledger.append(LedgerEntry(call, 0, 0))
        return [text]


class _GroupWork:
    """An asynchronous collective and the tensor it writes."""

    def __init__(self, comm: "GroupComm", call: Call, work: Any, out: Tensor) -> None:
        self._comm, self._call, self._work, self._out = comm, call, work, out

    def wait(self) -> None:
        """Wait, then tell autograd that the tensor has changed."""
        with self._comm._explained(self._call):
            self._work.wait()
        torch.autograd.graph.increment_version(self._out)


class GroupComm:
    """A process group of torch.distributed: gloo on the host, NCCL on GPUs."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ledger: deque[LedgerEntry] = deque(maxlen=LEDGER_ENTRIES)
        self._pool = BufferPool(device)

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See ``Comm``."""
        return self._pool.empty(shape, dtype)

    @contextmanager
    def _explained(self, call: Call) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            got = str(error).splitlines()[0]
            fix = "look at the other ranks' errors: one of them ended, or did not call the same collective"
            raise CommError(explain(f"rank {self.rank}: {call}", "all ranks to join", got, fix)) from error

    def _note(self, call: Call, sent: Tensor, received: Tensor) -> None:
        self.ledger.append(LedgerEntry(call, sent.nbytes, received.nbytes))

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Comm``."""
        ours = torch.tensor(counts, dtype=torch.int64, device=self._device)
        theirs = torch.empty_like(ours)
        self._note(call, ours, theirs)
        with self._explained(call):
            dist.all_to_all_single(theirs, ours, group=self._group)  # all ranks: once per layer of every step
        return tuple(theirs.tolist())  # device sync: sizes of what comes next

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        """See ``Comm``."""
        self._note(call, rows, out)
        return self.start_all_to_all(call, out, rows, out_counts, row_counts)

    def start_all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        """The bare collective of ``exchange``, without an entry in the ledger."""
        assert out.is_contiguous() and rows.is_contiguous()
        with self._explained(call):
            work = dist.all_to_all_single(
                out, rows, list(out_counts), list(row_counts), group=self._group, async_op=True
            )  # all ranks: empty tensors where there is nothing to say
        return _GroupWork(self, call, work, out)

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        """See ``Comm``."""
        self._note(call, tensor, tensor)
        with self._explained(call):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)  # all ranks: callers are collectives
        return _GroupWork(self, call, work, tensor)

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        """See ``Comm``."""
        self._note(call, tensor, tensor)
        with self._explained(call):
            dist.broadcast(tensor, group=self._group, group_src=0)  # all ranks: at start, parameter after parameter
        torch.autograd.graph.increment_version(tensor)

    def gather_text(self, call: Call, text: str) -> list[str]:
        """See ``Comm``."""
        data = text.encode()
        sizes = self.all_to_all_counts(call, (len(data),) * self.size)
        ours = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        if data:
            ours[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        theirs = [torch.empty_like(ours) for _ in range(self.size)]
        with self._explained(call):
            dist.all_gather(theirs, ours, group=self._group)  # all ranks: at start only
        return [bytes(t[:n].tolist()).decode() for t, n in zip(theirs, sizes, strict=True)]


@dataclass(frozen=True)
class Groups:
    """A rank's process groups: two of the ranks that split a mini-batch with it, two of all ranks."""

    replica: int
    num_replicas: int
    shuffles: GroupComm
    loading: GroupComm
    gradients: GroupComm
    world: GroupComm


def connect(device: torch.device, num_replicas: int, timeout_s: float) -> Groups:
    """Join the process group that the environment describes and make this rank's groups.

    The ranks form a mesh of replicas x splits, row after row. Groups are made by hand, because DeviceMesh hands out
    the world group itself where a dimension spans it, and no two uses may share a group.
    """
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        atexit.register(_leave_at_exit)
    size = dist.get_world_size()
    if num_replicas < 1 or size % num_replicas:
        fix = "choose a number of replicas that divides the ranks"
        raise InputError(explain("replicas", f"a divisor of {size} ranks", num_replicas, fix))
    layout = init_device_mesh(device.type, (num_replicas, size // num_replicas), mesh_dim_names=("replica", "split"))
    split: list[GroupComm] = []
    for row in layout.mesh.tolist():  # all ranks make all groups, in the same order
        groups = [dist.new_group(row, timeout=timeout) for _ in range(2)]
        if dist.get_rank() in row:
            split = [GroupComm(group, device) for group in groups]
    world = [GroupComm(dist.new_group(timeout=timeout), device) for _ in range(2)]
    return Groups(layout.get_local_rank("replica"), num_replicas, *split, *world)


def is_connected() -> bool:
    """Whether this process is in a process group already."""
    return bool(dist.is_initialized())


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_at_exit() -> None:
    """A process that just ends with gloo's threads alive may be aborted. One that failed leaves at once, as it would:
    others may be in a collective with it, and leaving politely would wait for them.
    """
    if not hasattr(sys, "last_type"):  # set where an exception ended the program
        disconnect()


def assert_same_on_all_ranks(comm: Comm, what: str, settings: Mapping[str, object]) -> None:
    """Compare settings across the ranks before anything depends on them; all ranks raise if they differ."""
    ours = {key: _short(value) for key, value in settings.items()}
    all_ranks = [json.loads(text) for text in comm.gather_text(Call(f"compare {what}"), json.dumps(ours))]
    for key in sorted({key for theirs in all_ranks for key in theirs}):
        values = [theirs.get(key, "not set") for theirs in all_ranks]
        if len(set(values)) > 1:
            got = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise InputError(explain(f"{what}: {key}", "the same on every rank", got, "start every rank alike"))


def run_on_rank_zero(comm: Comm, what: str, act: Callable[[], None]) -> None:
    """Let rank 0 do something for all; if it cannot, all ranks raise its error. A collective."""
    said = ""
    if comm.rank == 0:
        try:
            act()
        except (GSplitError, OSError) as error:
            said = str(error) or type(error).__name__
    if said := comm.gather_text(Call(what), said)[0]:
        raise InputError(said)


def _short(value: object) -> str:
    text = json.dumps(value, default=str, sort_keys=True)
    return text if len(text) <= 200 else "sha256 " + hashlib.sha256(text.encode()).hexdigest()
