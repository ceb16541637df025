"""Process groups of torch.distributed: how they are made and left.

Each group has its own device and with it its backend: gloo on the CPU, NCCL on GPUs. This and ``group_comm`` are the
only files that import torch.distributed. Collectives on objects are never used: they unpickle what comes over the
network.
"""

import atexit
import ctypes
import itertools
import os
import resource
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gsplit.device.devices import identify
from gsplit.distributed.comm.comm import Call, assert_same_on_all_ranks
from gsplit.distributed.comm.group_comm import GroupComm
from gsplit.distributed.launch.launched_rank import STORE, Status, end_with_launcher, set_status
from gsplit.distributed.watch.collective_watch import CollectiveWatch
from gsplit.distributed.watch.peers import Peers
from gsplit.errors import InputError, explain

__all__ = ["Connection", "Groups", "available_backends", "connect", "is_connected", "num_connected_ranks"]

_SOCKETS_PER_PEER = 12
"""Seven were counted after ``gsplit.init`` on the CPU (``gsplit_bench start-ranks``); loaders may add groups."""
_FILES_PER_PEER = 32
"""Sockets, pipes and mapped segments, with those of two loaders that prefetch."""
_OTHER_FILES = 512
_connections = itertools.count()
"""Of this process: what ranks tell each other through the store is of one connection, not of an earlier one."""


class Connection:
    """This process's membership of the process groups that ``connect`` made; it ends when the program does.

    A process that just ends while gloo's threads run may be aborted, so it leaves its groups first. A rank that failed
    must not: destroying a process group waits for the collectives under way in it, which its peers may never join.
    """

    def __init__(self, joined_here: bool, timeout_s: float) -> None:
        self._joined_here = joined_here  # or the program had joined before, and leaves by itself
        self._timeout_s = timeout_s
        self.peers = Peers(dist.get_rank())
        self._groups: list[Any] = []
        atexit.register(self._end)

    def new_comm(self, device: torch.device, size: int | None = None, stride: int = 1) -> GroupComm:
        """A new process group of all ranks, or of ``size`` ranks, ``stride`` apart. A collective of all ranks."""
        size = dist.get_world_size() if size is None else size
        slot = len(self._groups)  # the same on every rank: all make all groups
        self.peers.groups.append((size, stride))
        own = None
        backend = _backend(device)
        timeout = timedelta(seconds=_long(self._timeout_s))
        for first in range(dist.get_world_size()):  # all ranks make all groups, in one order
            ranks = self.peers.members(slot, first)
            if ranks[0] == first:
                group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
                own = group if dist.get_rank() in ranks else own
        self._groups.append(own)
        return GroupComm(own, device, CollectiveWatch(self.peers, slot, self._timeout_s, _long(self._timeout_s)))

    def leave(self) -> None:
        """Leave the process groups in good order, once all of this rank's collectives are done."""
        atexit.unregister(self._end)
        self.peers.close()
        if dist.is_initialized():
            for group in self._groups if not self._joined_here else [None]:  # None: all groups, and the default one
                dist.destroy_process_group(group)
        self._groups.clear()

    def abandon(self) -> None:
        """Keep the groups until the process ends; peers then see that it is gone."""
        atexit.unregister(self._end)
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # or the interpreter would destroy it at its end
        atexit.register(_wait_for_gloo)

    def _end(self) -> None:
        if hasattr(sys, "last_type"):  # set where an exception ended the program
            self.abandon()
            _wait_for_gloo()
        else:
            self.leave()


def _wait_for_gloo(timeout_s: float = 1.0) -> None:
    """Wait until gloo's threads have released the tensors of the collectives that are done.

    Releasing a tensor takes the interpreter lock. A thread that waits for the lock when the interpreter ends is ended
    inside C++ code, and that aborts the process.
    """
    give_up = time.monotonic() + timeout_s
    idle = 0
    while idle < 2 and time.monotonic() < give_up:
        time.sleep(0.01)  # without the interpreter lock
        idle = 0 if _gloo_runs() else idle + 1


def _gloo_runs() -> bool:
    """Whether a thread of gloo runs or waits for a core; False where /proc does not tell."""
    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            _, _, rest = path.read_text().partition("(pt_gloo_runloop) ")
        except OSError:  # the thread has ended
            continue
        if rest.startswith("R"):
            return True
    return False


@dataclass(frozen=True)
class Groups:
    """A rank's process groups: of the ranks that split a mini-batch with it, and of all ranks; some may be the same."""

    replica: int
    num_replicas: int
    shuffles: GroupComm
    loading: GroupComm
    inputs: GroupComm
    gradients: GroupComm
    world: GroupComm
    control: GroupComm
    connection: Connection


def _long(timeout_s: float) -> float:
    """How long a process group waits by itself: while rank 0 works alone, for ranks that start later, and on devices,
    where torch then ends the process.
    """
    return max(600.0, timeout_s)


def _backend(device: torch.device) -> str:
    """The backend that sends tensors of a device. A simulated device has tensors of the host."""
    backends = {"cpu": "gloo", "cuda": "nccl", "sim": "gloo"}
    if device.type not in backends:
        fix = "train on the CPU, or add the device to this function and test it"
        raise InputError(explain("device", "cpu or cuda for several ranks", device.type, fix))
    return backends[device.type]


def _allow_sockets(num_ranks: int) -> None:
    """Raise the limit of open files to what the groups of this many ranks need: gloo connects all ranks of a group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, wanted = (_OTHER_FILES + each * num_ranks for each in (_SOCKETS_PER_PEER, _FILES_PER_PEER))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY:
        if hard < needed:
            fix = "raise it: ulimit -Hn as root, LimitNOFILE= of systemd, --ulimit nofile= of Docker"
            raise InputError(explain("open files", f"a limit of at least {needed} for {num_ranks} ranks", hard, fix))
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connect(
    device: torch.device,
    sample_device: torch.device,
    num_replicas: int,
    timeout_s: float,
    *,
    shared_memory: bool = True,
) -> Groups:
    """Join the process group that the environment describes and make this rank's groups.

    The ranks form a mesh of replicas x splits, row after row. ``loading`` and ``control`` are on the host, the others
    on ``device``. On the CPU no two uses share a group, so that work on one can never pair with work on another; only
    ``inputs`` is ``loading``. On a device one thread at a time issues all of it, and its stream keeps the order: one
    group serves all uses, or one of all ranks and one of the replica. ``shared_memory``: what the mesh will ask for,
    equal on all ranks.
    """
    _backend(device)  # refuses kinds of devices before ranks wait for each other
    _prefer_loopback()
    joined_here, name = not dist.is_initialized(), f"gsplit {next(_connections)}"
    if joined_here:
        _join(name, timedelta(seconds=_long(timeout_s)))
    connection = Connection(joined_here, timeout_s)
    size = dist.get_world_size()
    _allow_sockets(size)
    control = connection.new_comm(torch.device("cpu"))
    connection.peers.connect(control.gather_text(Call("connect"), connection.peers.describe_self()))
    connection.peers.follow_remote(lambda: _open_store(name), size)
    _check_devices(control, device, sample_device)
    settings = {"replicas": num_replicas, "shared_memory": shared_memory}
    assert_same_on_all_ranks(control, "gsplit.init", settings)  # which groups are made
    if num_replicas < 1 or size % num_replicas:
        fix = "choose a number of replicas that divides the ranks"
        raise InputError(explain("replicas", f"a divisor of {size} ranks", num_replicas, fix))
    num_splits = size // num_replicas
    loading, world = connection.new_comm(torch.device("cpu"), num_splits), connection.new_comm(device)
    if device.type == "cpu":
        shuffles, inputs, gradients = connection.new_comm(device, num_splits), loading, connection.new_comm(device)
    else:
        shuffles = inputs = world if num_replicas == 1 else connection.new_comm(device, num_splits)
        gradients = world
    set_status(Status.JOINED)
    replica = dist.get_rank() // num_splits
    return Groups(replica, num_replicas, shuffles, loading, inputs, gradients, world, control, connection)


def _join(name: str, timeout: timedelta) -> None:
    """Join the ranks of ``launch``, through a file that only they can open, or those that torchrun's variables name."""
    end_with_launcher()
    set_status(Status.JOINING)
    if STORE in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store: Any = dist.FileStore(os.environ[STORE], -1)  # type: ignore[attr-defined]  # -1: not removed by its users
        store.set_timeout(timeout)
    else:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
        # torchrun's static rendezvous keeps one store over all restarts, with the addresses of ranks that have ended
        name += f", restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _prefer_loopback() -> None:
    """Let gloo listen on the loopback interface if torchrun has all its ranks on this host."""
    num_here = os.environ.get("LOCAL_WORLD_SIZE")
    if STORE not in os.environ and num_here is not None and num_here == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _open_store(name: str) -> Any:
    """The rendezvous store, over a connection of its own where torch can: other threads may block in theirs."""
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(name, store.clone() if hasattr(store, "clone") else store)  # type: ignore[attr-defined]


def _check_devices(host: GroupComm, device: torch.device, sample_device: torch.device) -> None:
    """Refuse ranks on different kinds of devices, and a device that two ranks share. A collective, on the host."""
    if device.type == "cuda" and not dist.is_nccl_available():
        fix = "install a CUDA build of torch"
        raise InputError(explain("device", "a torch built with NCCL", torch.__version__, fix))
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


def available_backends() -> list[str]:
    """What the installed torch can send over."""
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, is_there in found.items() if is_there]


def is_connected() -> bool:
    """Whether this process is in a process group already."""
    return bool(dist.is_initialized())


def num_connected_ranks() -> int:
    """Ranks of the process group that this process is in; 1 if it is in none."""
    return dist.get_world_size() if dist.is_initialized() else 1
