"""Process groups of torch.distributed behind ``Comm``: how they are made, used and left.

Each group has its own device and with it its backend: gloo on the CPU, NCCL on GPUs. This is the only file that imports
torch.distributed. Collectives on objects are never used: they unpickle what comes over the network.
"""

import atexit
import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsplit.devices import QueueMark, identify
from gsplit.distributed.comm import Call, LedgerEntry, Work, explain_closed, new_ledger
from gsplit.distributed.hang_watch import HangWatch, record_flight
from gsplit.distributed.launched_rank import STORE, Status, end_with_launcher, set_status
from gsplit.errors import CommError, InputError, explain
from gsplit.kernels.buffers import BufferPool

__all__ = ["Connection", "GroupComm", "Groups", "connect", "is_connected", "num_connected_ranks"]


class _GroupWork:
    """An asynchronous collective and the tensor it writes."""

    def __init__(self, comm: "GroupComm", call: Call, work: Any, out: Tensor) -> None:
        self._comm, self._call, self._work, self._out = comm, call, work, out

    def wait(self) -> None:
        """Wait, then tell autograd that the tensor has changed."""
        with self._comm._explained(self._call):
            self._work.wait()
        torch.autograd.graph.increment_version(self._out)
        if self._comm.watch is not None:
            self._comm.watch.add(self._call, QueueMark(self._comm.device).is_over)


class GroupComm:
    """A process group of torch.distributed."""

    def __init__(self, group: Any, device: torch.device, timeout_s: float) -> None:
        self._group, self.device, self.timeout_s = group, device, timeout_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ledger = new_ledger()
        self.watch: HangWatch | None = None
        self._pool = BufferPool(device)

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._pool.empty(shape, dtype)

    @contextmanager
    def _explained(self, call: Call) -> Iterator[None]:
        if self.closed:
            raise InputError(explain_closed(call))
        try:
            yield
        except RuntimeError as error:
            got = str(error).splitlines()[0]
            fix = "look at the other ranks' errors: one of them ended, or did not call the same collective"
            raise CommError(explain(f"rank {self.rank}: {call}", "all ranks to join", got, fix)) from error

    def _note(self, call: Call, sent: Tensor, received: Tensor) -> None:
        self.ledger.append(LedgerEntry(call, sent.nbytes, received.nbytes))

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        ours = torch.tensor(counts, dtype=torch.int64, device=self.device)
        theirs = torch.empty_like(ours)
        self._note(call, ours, theirs)
        with self._explained(call):  # all ranks: once per layer of every step
            work = dist.all_to_all_single(theirs, ours, group=self._group, async_op=True)
        _GroupWork(self, call, work, theirs).wait()
        return tuple(theirs.tolist())  # device sync: sizes of what comes next

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        self._note(call, rows, out)
        assert out.is_contiguous() and rows.is_contiguous()
        with self._explained(call):
            work = dist.all_to_all_single(
                out, rows, list(out_counts), list(row_counts), group=self._group, async_op=True
            )  # all ranks: empty tensors where there is nothing to say
        return _GroupWork(self, call, work, out)

    def all_to_all_views(
        self, call: Call, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        out = self._pool.empty((sum(out_counts), *rows.shape[1:]), rows.dtype)
        self.all_to_all(call, out, rows, out_counts, row_counts).wait()
        return tuple(out.split(out_counts))

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        self._note(call, tensor, tensor)
        with self._explained(call):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)  # all ranks: callers are collectives
        return _GroupWork(self, call, work, tensor)

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        self._note(call, tensor, tensor)
        with self._explained(call):  # all ranks: at start, parameter after parameter
            work = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
        _GroupWork(self, call, work, tensor).wait()

    def gather_text(self, call: Call, text: str) -> list[str]:
        data = text.encode()
        sizes = self.all_to_all_counts(call, (len(data),) * self.size)
        ours = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        if data:
            ours[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        theirs = [torch.empty_like(ours) for _ in range(self.size)]
        with self._explained(call):
            dist.all_gather(theirs, ours, group=self._group)  # all ranks: at start only
        return [bytes(t[:n].tolist()).decode() for t, n in zip(theirs, sizes, strict=True)]

    @property
    def closed(self) -> bool:
        return self._group is None

    def close(self) -> None:
        """See ``Comm``. The process group itself goes with the one of all ranks."""
        self._group = None


class Connection:
    """This process's membership of the process groups that ``connect`` made; it ends when the program does.

    A process that just ends while gloo's threads run may be aborted, so it leaves its groups first. A rank that failed
    must not: destroying a process group waits for the collectives under way in it, which its peers may never join.
    """

    def __init__(self, joined_here: bool, timeout: timedelta) -> None:
        self._joined_here = joined_here  # or the program had joined before, and leaves by itself
        self._timeout = timeout
        self._groups: list[Any] = []
        self._watch: HangWatch | None = None
        atexit.register(self._end)

    def new_comm(self, device: torch.device, num_replicas: int = 1) -> GroupComm:
        """A new process group of all ranks, or of the ranks of this one's replica. A collective of all ranks."""
        size, own = dist.get_world_size() // num_replicas, None
        for first in range(0, dist.get_world_size(), size):  # all ranks make all groups, in one order
            ranks = list(range(first, first + size))
            group = dist.new_group(ranks, timeout=self._timeout, backend=_backend(device))
            own = group if dist.get_rank() in ranks else own
        self._groups.append(own)
        return GroupComm(own, device, self._timeout.total_seconds())

    def watch(self, comms: list[GroupComm], timeout_s: float) -> None:
        """Have collectives on devices that never end named before torch ends the process."""
        if comms:
            self._watch = HangWatch(dist.get_rank(), timeout_s, comms[0].device)
        for comm in comms:
            comm.watch = self._watch

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def leave(self) -> None:
        """Leave the process groups in good order, once all of this rank's collectives are done."""
        atexit.unregister(self._end)
        self._stop_watching()
        self._groups.clear()
        if self._joined_here and dist.is_initialized():
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Never leave: the process ends with its groups as they are, and peers see that it is gone."""
        atexit.unregister(self._end)
        self._stop_watching()
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # or the interpreter would destroy it at its end

    def _end(self) -> None:
        if hasattr(sys, "last_type"):  # set where an exception ended the program
            self.abandon()
        else:
            self.leave()


@dataclass(frozen=True)
class Groups:
    """A rank's process groups: of the ranks that split a mini-batch with it, and two of all ranks."""

    replica: int
    num_replicas: int
    shuffles: GroupComm
    loading: GroupComm
    inputs: GroupComm
    gradients: GroupComm
    world: GroupComm
    connection: Connection


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def connect(device: torch.device, sample_device: torch.device, num_replicas: int, timeout_s: float) -> Groups:
    """Join the process group that the environment describes and make this rank's groups.

    The ranks form a mesh of replicas x splits, row after row. ``loading`` is on ``sample_device``, the others are on
    ``device``; on one device ``inputs`` is ``loading``. No two other uses share a group, so that work on one can never
    pair with work on another.
    """
    timeout = timedelta(seconds=timeout_s)
    joined_here = not dist.is_initialized()
    if joined_here:
        _join(timeout)
    connection = Connection(joined_here, timeout)
    size = dist.get_world_size()
    _check_devices(connection, device, sample_device)
    if num_replicas < 1 or size % num_replicas:
        fix = "choose a number of replicas that divides the ranks"
        raise InputError(explain("replicas", f"a divisor of {size} ranks", num_replicas, fix))
    shuffles, loading = (connection.new_comm(place, num_replicas) for place in (device, sample_device))
    inputs = loading if sample_device == device else connection.new_comm(device, num_replicas)
    gradients, world = connection.new_comm(device), connection.new_comm(device)
    comms = (shuffles, loading, inputs, gradients, world)
    connection.watch([comm for comm in dict.fromkeys(comms) if comm.device.type != "cpu"], timeout_s)
    set_status(Status.JOINED)
    return Groups(dist.get_rank() // (size // num_replicas), num_replicas, *comms, connection)


def _join(timeout: timedelta) -> None:
    """Join the ranks of ``launch``, through a file that only they can open, or those that torchrun's variables name."""
    end_with_launcher()
    set_status(Status.JOINING)
    if STORE not in os.environ:
        dist.init_process_group("gloo", timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ[STORE], size)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _check_devices(connection: Connection, device: torch.device, sample_device: torch.device) -> None:
    """Refuse ranks on different kinds of devices, and a device that two ranks share. A collective, on the host."""
    if device.type == "cuda":
        if not dist.is_nccl_available():
            fix = "install a CUDA build of torch"
            raise InputError(explain("device", "a torch built with NCCL", torch.__version__, fix))
        record_flight()
    host = connection.new_comm(torch.device("cpu"))
    kind = device.type if sample_device.type == "cpu" else f"{device.type}, also for sampling"
    all_kinds = host.gather_text(Call("compare kinds of devices"), kind)
    if len(set(all_kinds)) > 1:
        got = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(all_kinds))
        raise InputError(explain("device", "the same kind on every rank", got, "say which: gsplit.init(device=...)"))
    own = "" if device.type == "cpu" else f"{socket.gethostname()} {identify(device)}"
    seen: dict[str, int] = {}
    for rank, name in enumerate(host.gather_text(Call("compare devices"), own)):
        if name and seen.setdefault(name, rank) != rank:
            got = f"ranks {seen[name]} and {rank} both on {name}"
            fix = "start at most one rank per device, or show each rank a device of its own (CUDA_VISIBLE_DEVICES)"
            raise InputError(explain("device", "a device of its own for every rank", got, fix))


def is_connected() -> bool:
    """Whether this process is in a process group already."""
    return bool(dist.is_initialized())


def num_connected_ranks() -> int:
    """Ranks of the process group that this process is in; 1 if it is in none."""
    return dist.get_world_size() if dist.is_initialized() else 1
