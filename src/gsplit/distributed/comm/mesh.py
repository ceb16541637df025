"""The ranks that train together, and how they reach each other: what ``gsplit.init`` returns.

Ranks form a mesh of replicas x splits. The ranks of one replica share one mini-batch (or one replica's cut of it): they
split it, shuffle and load together. Gradients and losses are over all ranks of all replicas. There are several groups,
because work on one must never pair with work on another: shuffles (inside forward and backward), the loader's exchanges
of ids and of input rows, gradients (started by backward), sums over the whole world (losses), and settings. A loader
that makes batches ahead, in a thread, borrows a group from a pool (``borrow_loading_groups``). On devices all but the
exchanges of ids and settings share one group: one stream orders them, and every NCCL communicator takes gigabytes.
"""

import json
import logging
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Protocol

import torch

from gsplit.device.devices import resolve_device
from gsplit.device.environment import prepare_environment
from gsplit.distributed.comm.comm import Call, Comm, Levels, SoloComm
from gsplit.distributed.comm.group_comm import GroupComm
from gsplit.distributed.comm.process_groups import Connection, Groups, connect, is_connected, num_connected_ranks
from gsplit.distributed.comm.shared_memory import SharedComm, gather_hosts, share_memory
from gsplit.distributed.launch.allocator import tune_allocator
from gsplit.distributed.watch.collective_watch import CollectiveWatch
from gsplit.distributed.watch.status_page import in_loader_thread
from gsplit.errors import InputError, explain
from gsplit.kernels.triton.availability import find_obstacle, is_available

__all__ = ["GradientAverages", "LoadingGroups", "Mesh", "init", "resolve_mesh", "solo_mesh"]

_LOG = logging.getLogger(__name__)
_DEFAULT_TIMEOUT_S = 60.0
_HOST = torch.device("cpu")


class _LoadingPool:
    """The groups of loaders that prefetch, numbered in the order in which all ranks made them.

    Making and destroying process groups is a collective and garbage collection is not, so no group is destroyed before
    the mesh: a group whose loader is gone on every rank is reused by the next loader.
    """

    def __init__(self) -> None:
        self.comms: list[Comm] = []
        self._watches: list[tuple[CollectiveWatch, ...]] = []
        self._returned: list[int] = []  # finalizers, which may run at any moment and in any thread, append to it

    def add(self, comm: Comm, watches: tuple[CollectiveWatch, ...]) -> int:
        """Add a group that was made and return its number."""
        self.comms.append(comm)
        self._watches.append(watches)
        return len(self.comms) - 1

    def free(self) -> dict[str, int]:
        """The groups that this rank could reuse, and the number of collectives that it has begun in each.

        A group in which a collective has failed or is still under way is not free.
        """
        returned = {str(number): self._watches[number] for number in self._returned}
        return {
            number: sum(watch.num_begun for watch in watches)
            for number, watches in returned.items()
            if all(watch.is_idle for watch in watches)
        }

    def lend(self, number: int, owner: object) -> Comm:
        """A group, in use until ``owner`` is garbage collected."""
        if number in self._returned:
            self._returned.remove(number)
        weakref.finalize(owner, self._returned.append, number).atexit = False
        return self.comms[number]


class GradientAverages(Protocol):
    """Averages gradients over the ranks of a mesh after a backward."""

    factor: int
    """Of gradients in backward, by which their sums over the ranks are divided."""

    def before_loss(self) -> None:
        """Called by every loss of all ranks, on every rank."""

    def begin(self) -> None:
        """Called in backward wherever it reaches a loss of all ranks."""


@dataclass(frozen=True, repr=False)
class Mesh:
    """A rank's place among the others, its devices and its groups.

    - ``device``: where the model computes. ``sample_device``: where mini-batches are sampled.
    - ``rank`` of ``size``: this rank among all.
    - ``replica`` of ``num_replicas``: the group of ranks that this one splits mini-batches with.
    - ``split_rank`` of ``num_splits``: this rank within its replica.
    - ``shuffles``, ``loading``, ``inputs``: the process groups of the replica, for hidden features and their gradients,
      for the ids and counts that the loader exchanges, and for input rows. ``loading`` is on the host, also if a device
      samples: a loader's thread must not issue collectives of the device. The others are on ``device``; if that is the
      CPU, ``inputs`` is ``loading``, otherwise ``shuffles``.
    - ``gradients``, ``world``: the process groups of all ranks on ``device``, for averaging gradients, and for losses,
      norms and the first weights. On a device they are one group, and with one replica it is ``shuffles`` as well.
    - ``control``: the process group of all ranks on the host, for settings, texts and votes, and for waiting while a
      rank works alone: NCCL would end the ranks that wait longer than the timeout.

    It closes itself when the program ends; ``close()`` does it earlier, and so does ``with gsplit.init() as mesh:``.
    """

    device: torch.device
    shuffles: Comm
    loading: Comm
    inputs: Comm
    gradients: Comm
    world: Comm
    control: Comm
    replica: int = 0
    num_replicas: int = 1
    sample_device: torch.device = _HOST
    averages: list[GradientAverages] = field(default_factory=list, compare=False)
    """What averages the gradients of all that is wrapped on this mesh, once something is (``nn.gradients``)."""
    loader_numbers: Iterator[int] = field(default_factory=count, compare=False)
    """A number for every loader; the same on every rank, as all make them in the same order."""
    connection: Connection | None = field(default=None, compare=False)
    """The process groups, which closing the mesh leaves; None for one process."""
    loading_pool: _LoadingPool = field(default_factory=_LoadingPool, compare=False)
    """The groups that ``borrow_loading_groups`` has made."""
    world_loading: list[Comm] = field(default_factory=list, compare=False)
    """The process group of ``loading_of_all_ranks``, once it was needed."""

    def __repr__(self) -> str:
        devices = f"device {self.device}"
        if self.sample_device != self.device:
            devices += f", samples on {self.sample_device}"
        return f"Mesh(rank {self.rank} of {self.size}, replica {self.replica} of {self.num_replicas}, {devices})"

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._close(error)

    def close(self) -> None:
        """Leave the process group; later collectives of this mesh are refused. Closing twice is fine.

        A process group that the program had joined before ``gsplit.init`` is left to the program. While an exception is
        unwinding nothing is waited for: this rank's collectives under way may be ones that no peer will join.
        """
        self._close(sys.exception())

    def _close(self, error: BaseException | None) -> None:
        if self.world.closed:
            return
        for comm in self._groups:
            comm.close()
        if self.connection is None:
            return
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.connection.leave()
        else:
            self.connection.abandon()

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited in collectives, over all groups and threads."""
        return sum(group.waited_s for group in dict.fromkeys(self._groups))

    @property
    def _groups(self) -> tuple[Comm, ...]:
        """All process groups of this rank; some may be the same object."""
        first = (self.shuffles, self.loading, self.inputs, self.gradients, self.world, self.control)
        return (*first, *self.loading_pool.comms, *self.world_loading)

    def record_stage(self, text: str) -> None:
        """Publish the current stage for error messages of peers; a loader's thread has a line of its own."""
        if self.connection is not None:
            self.connection.peers.page.write_line("loader" if in_loader_thread() else "stage", text)

    def record_model(self, text: str) -> None:
        """Publish the train/eval state of the model for error messages of peers."""
        if self.connection is not None:
            self.connection.peers.page.write_line("model", text)

    @property
    def host_samples(self) -> bool:
        """Whether mini-batches are sampled on the host for a model on a device."""
        return self.sample_device.type == "cpu" and self.device.type != "cpu"

    @property
    def loading_groups(self) -> "LoadingGroups":
        """The groups of a loader that makes batches in the thread of training."""
        return LoadingGroups(self.loading, self.inputs)

    def borrow_loading_groups(self, owner: object) -> "LoadingGroups":
        """The groups of a loader whose collectives on the host run in a thread of their own. A collective.

        They are the loader's until ``owner`` is garbage collected: an object that lives as long as the loader uses
        them. The next loader then reuses them, if all ranks have returned them in the same state.
        """
        pool = self.loading_pool
        free = [pool.free()]
        if self.connection is not None:  # all ranks: each of them makes this loader
            texts = self.control.gather_text(Call("choose loading groups"), json.dumps(free[0]))
            free = [json.loads(text) for text in texts]
        common = [int(number) for number, begun in free[0].items() if all(each.get(number) == begun for each in free)]
        number = min(common) if common else self._add_loading_group()
        comm = pool.lend(number, owner)
        return LoadingGroups(comm, comm if self.device.type == "cpu" else self.inputs)

    def _add_loading_group(self) -> int:
        """Make one more group for loaders and return its number. A collective."""
        if self.connection is None:
            return self.loading_pool.add(SoloComm(), ())
        group = self.connection.new_comm(_HOST, self.num_splits)
        if self.loading.levels is None:
            return self.loading_pool.add(self._share(group), (group.calls,))
        near, far = _connect_levels(self.connection, group, self.loading.levels.near.size)
        return self.loading_pool.add(group, (group.calls, near.calls, far.calls))

    def _share(self, group: GroupComm) -> Comm:
        """The group, with shared memory where the ranks of this mesh exchange through it."""
        return share_memory([group])[0] if isinstance(self.loading, SharedComm) else group

    def loading_of_all_ranks(self) -> Comm:
        """A process group of all ranks on the host. A collective where one must be made, once per mesh."""
        if self.world.device == _HOST:
            return self.world
        if not self.world_loading:
            if self.connection is None:
                self.world_loading.append(SoloComm())
            else:
                self.world_loading.append(self._share(self.connection.new_comm(_HOST)))
        return self.world_loading[0]

    @property
    def replica_shares_host(self) -> bool:
        """Whether the ranks of the replica are on one host for certain: they exchange through shared memory."""
        return self.num_splits == 1 or isinstance(self.loading, SharedComm)

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def split_rank(self) -> int:
        """This rank's number within its replica."""
        return self.shuffles.rank

    @property
    def num_splits(self) -> int:
        """Ranks that share a mini-batch, of each replica."""
        return self.shuffles.size


@dataclass(frozen=True)
class LoadingGroups:
    """What a loader exchanges over: ids on the host, input rows on the model's device."""

    ids: Comm
    inputs: Comm


def solo_mesh(device: torch.device | str = "cpu", sample_device: torch.device | str | None = None) -> Mesh:
    """One process, no process group."""
    device = torch.device(device)
    loading = SoloComm()
    inputs = loading if device.type == "cpu" else SoloComm(device)
    shuffles, gradients, world = (SoloComm(device) for _ in range(3))
    samples_on = device if sample_device is None else torch.device(sample_device)
    return Mesh(device, shuffles, loading, inputs, gradients, world, SoloComm(), sample_device=samples_on)


def _num_launched_ranks() -> int:
    """Ranks that a launcher has started, of which this process is one; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def resolve_mesh(mesh: Mesh | None, caller: str) -> Mesh:
    """The mesh given, or one of this process alone; refused where there are other ranks, which would be ignored."""
    if mesh is not None:
        return mesh
    num_ranks = max(_num_launched_ranks(), num_connected_ranks())
    if num_ranks > 1:
        fix = f"make one with mesh = gsplit.init() and pass mesh=mesh to {caller}"
        raise InputError(explain(caller, f"the mesh of the {num_ranks} ranks", "mesh=None", fix))
    return solo_mesh()


def _warn_of_slow_kernels(device: torch.device) -> None:
    """Log, once per host, why an installed Triton is not used."""
    obstacle = find_obstacle(device)
    if obstacle is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        _LOG.warning("%s", obstacle)


def _choose_sample_device(device: torch.device) -> torch.device:
    """The device, if Triton kernels run there; with torch operations the host would wait for it too often."""
    runs = device.type != "cpu" and is_available(device)
    reason = "Triton kernels run on it" if runs else "Triton kernels do not run on the device"
    chosen = device if runs else _HOST
    _LOG.info("mini-batches are sampled on %s: %s", chosen, reason)
    return chosen


def _resolve_timeout_s(timeout_s: float | None) -> float:
    """How long a rank waits for the others: the argument, GSPLIT_TIMEOUT_S, or a minute."""
    given = os.environ.get("GSPLIT_TIMEOUT_S", str(_DEFAULT_TIMEOUT_S)) if timeout_s is None else timeout_s
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not found > 0:
        where = "GSPLIT_TIMEOUT_S" if timeout_s is None else "timeout_s"
        raise InputError(explain(where, "seconds above 0", given, "pass how long a rank may keep others waiting"))
    return found


def _count_per_host(hosts: Sequence[str], num_splits: int) -> int | None:
    """How many consecutive ranks every host has, if these are several ranks, and replicas are on several hosts.

    >>> _count_per_host(["a", "a", "b", "b"], 4), _count_per_host(["a", "a", "b", "b"], 2)
    (2, None)
    >>> _count_per_host(["a", "a", "b"], 3), _count_per_host(["a", "b", "a", "b"], 4)
    (None, None)
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    per_host = runs[0][1]
    is_even = len(set(runs)) == len(runs) and all(count == per_host for _, count in runs)
    return per_host if is_even and 1 < per_host < num_splits and num_splits % per_host == 0 else None


def _connect_levels(connection: Connection, group: GroupComm, per_host: int) -> tuple[GroupComm, GroupComm]:
    """Make the two groups over which mini-batches of a group on several hosts are exchanged. A collective."""
    near = connection.new_comm(group.device, per_host)
    far = connection.new_comm(group.device, group.size // per_host, stride=per_host)
    group.levels = Levels(near=share_memory([near])[0], far=far)
    return near, far


def _connect_hosts(groups: Groups) -> tuple[Comm, Comm]:
    """How ``shuffles`` and ``loading`` exchange: in two levels over hosts, or within one through shared memory."""
    per_host = _count_per_host(gather_hosts(groups.control), groups.shuffles.size)
    if per_host is None:
        shuffles, loading = share_memory([groups.shuffles, groups.loading])
        return shuffles, loading
    for group in dict.fromkeys((groups.shuffles, groups.loading, groups.inputs)):
        _connect_levels(groups.connection, group, per_host)
    return groups.shuffles, groups.loading


def _open_communicators(groups: Groups) -> None:
    """Have NCCL take its memory, so that what is free afterwards can be filled. A collective."""
    if groups.world.device == _HOST:
        return
    for group in dict.fromkeys((groups.world, groups.shuffles)):
        levels = group.levels
        group.open_communicator(exchanges=levels is None, sums=group is groups.world)
        for part in (levels.near, levels.far) if levels is not None else ():
            assert isinstance(part, GroupComm)
            part.open_communicator(exchanges=True, sums=False)


def init(
    device: torch.device | str | None = None,
    sample_device: torch.device | str | None = None,
    *,
    replicas: int = 1,
    timeout_s: float | None = None,
    shared_memory: bool = True,
    tuned_allocator: bool = False,
) -> Mesh:
    """Join the ranks that torchrun started, or be the only one. The mesh closes itself when the program ends.

    ``replicas`` groups of ranks each take a cut of every mini-batch and split it among themselves; ranks r * S to
    (r + 1) * S - 1 are replica r, so give every host its own.

    Without ``device``: GPUs where there are any, the CPU otherwise; "cuda" alone means the rank's own, by LOCAL_RANK.
    Mini-batches are sampled on ``sample_device``, the CPU unless told otherwise. The other choices are ``device``, and
    "auto": ``device`` if Triton kernels can sample there. A rank that waits longer than ``timeout_s`` in a collective
    gives up with an error that names the missing rank; by default that is what GSPLIT_TIMEOUT_S says, or a minute. In
    one of GPUs, torch ends the process after ten minutes, or ``timeout_s`` if that is longer. CPU ranks of one host
    exchange rows through shared memory unless told not to. ``tuned_allocator`` has glibc keep the memory of a step for
    the next, from now on and in the whole process: up to half of a step's CPU seconds for up to 1.6 times the memory.
    """
    if tuned_allocator:
        tune_allocator()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = resolve_device(device)
    if sample_device == "auto":
        sample_device = _choose_sample_device(device)
    sample_device = resolve_device("cpu" if sample_device is None else sample_device)
    if sample_device.type != "cpu" and sample_device != device:
        fix = "leave sample_device out"
        raise InputError(explain("sample_device", f"the CPU or the model's device, {device}", sample_device, fix))
    if device.type != "cpu":
        prepare_environment()
        torch.get_device_module(device).set_device(device)
        _warn_of_slow_kernels(device)
    if _num_launched_ranks() == 1 and not is_connected():
        if replicas != 1:
            raise InputError(explain("replicas", "1 for one process", replicas, "start more ranks with torchrun"))
        return solo_mesh(device, sample_device)
    if "RANK" not in os.environ and not is_connected():
        fix = "start the ranks with torchrun, which sets RANK, WORLD_SIZE and MASTER_ADDR"
        got = f"WORLD_SIZE={os.environ['WORLD_SIZE']} alone"
        raise InputError(explain("environment", "RANK beside WORLD_SIZE", got, fix))
    groups = connect(device, sample_device, replicas, _resolve_timeout_s(timeout_s), shared_memory=shared_memory)
    shuffles, loading = _connect_hosts(groups) if shared_memory else (groups.shuffles, groups.loading)
    _open_communicators(groups)
    inputs: Comm = loading if groups.inputs is groups.loading else groups.inputs
    return Mesh(
        device,
        shuffles,
        loading,
        inputs,
        groups.gradients,
        groups.world,
        groups.control,
        groups.replica,
        groups.num_replicas,
        sample_device,
        connection=groups.connection,
    )
