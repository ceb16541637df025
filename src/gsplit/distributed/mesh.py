"""The ranks that train together, and how they reach each other: what ``gsplit.init`` returns.

Ranks form a mesh of replicas x splits. The ranks of one replica share one mini-batch (or one replica's cut of it): they
split it, shuffle and load together. Gradients and losses are over all ranks of all replicas. Four groups, because work
on one must never pair with work on another: shuffles (inside forward and backward), the loader's own exchanges (which
may one day run in a thread of their own), gradients (started by backward), and sums over the whole world (losses).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch

from gsplit.distributed.comm import Comm, SoloComm, connect, is_connected
from gsplit.distributed.shared_memory import share_memory
from gsplit.errors import InputError, explain

__all__ = ["Mesh", "init", "solo_mesh"]


@dataclass(frozen=True)
class Mesh:
    """A rank's place among the others, its device and its groups.

    ``shuffles`` and ``loading`` are the ranks of this rank's replica; ``gradients`` and ``world`` are all ranks.
    """

    device: torch.device
    shuffles: Comm
    loading: Comm
    gradients: Comm
    world: Comm
    replica: int = 0
    num_replicas: int = 1
    numbers: Iterator[int] = field(default_factory=count, compare=False, repr=False)
    """Names for what ranks make in the same order, to tell one from another."""

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


def solo_mesh(device: torch.device | str = "cpu") -> Mesh:
    """One process, no process group."""
    return Mesh(torch.device(device), SoloComm(), SoloComm(), SoloComm(), SoloComm())


def init(
    device: torch.device | str | None = None,
    *,
    replicas: int = 1,
    timeout_s: float = 600.0,
    shared_memory: bool = True,
) -> Mesh:
    """Join the ranks that torchrun started, or be the only one.

    ``replicas`` groups of ranks each take a cut of every mini-batch and split it among themselves; ranks r * S to
    (r + 1) * S - 1 are replica r, so give every host its own.

    Without ``device``: GPUs where there are any (one per rank, by LOCAL_RANK), the CPU otherwise. A rank that waits
    longer than ``timeout_s`` in a collective gives up with an error. CPU ranks of one host exchange rows through
    shared memory unless told not to.
    """
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not is_connected():
        if replicas != 1:
            raise InputError(explain("replicas", "1 for one process", replicas, "start more ranks with torchrun"))
        return solo_mesh(device)
    if "RANK" not in os.environ and not is_connected():
        fix = "start the ranks with torchrun, which sets RANK, WORLD_SIZE and MASTER_ADDR"
        raise InputError(explain("environment", "RANK beside WORLD_SIZE", "none", fix))
    groups = connect(device, replicas, timeout_s)
    shuffles: Comm = groups.shuffles
    loading: Comm = groups.loading
    if device.type == "cpu" and shared_memory:
        shuffles, loading = share_memory([groups.shuffles, groups.loading])
    place = (groups.replica, groups.num_replicas)
    return Mesh(device, shuffles, loading, groups.gradients, groups.world, *place)
