"""The ranks that train together, and how they reach each other: what ``gsplit.init`` returns.

Three groups of the same ranks, because work on one must never pair with work on another: shuffles (inside forward and
backward), gradients, and the loader's own exchanges (which may one day run in a thread of their own).
"""

import os
from dataclasses import dataclass

import torch

from gsplit.comm import Comm, SoloComm, connect, is_connected
from gsplit.errors import InputError, explain
from gsplit.shared_memory import share_memory

__all__ = ["Mesh", "init", "solo_mesh"]


@dataclass(frozen=True)
class Mesh:
    """A rank's place among the others, its device and its groups."""

    device: torch.device
    shuffles: Comm
    gradients: Comm
    loading: Comm

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.shuffles.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.shuffles.size


def solo_mesh(device: torch.device | str = "cpu") -> Mesh:
    """One process, no process group."""
    return Mesh(torch.device(device), SoloComm(), SoloComm(), SoloComm())


def init(device: torch.device | str | None = None, *, timeout_s: float = 600.0, shared_memory: bool = True) -> Mesh:
    """Join the ranks that torchrun started, or be the only one.

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
        return solo_mesh(device)
    if "RANK" not in os.environ and not is_connected():
        fix = "start the ranks with torchrun, which sets RANK, WORLD_SIZE and MASTER_ADDR"
        raise InputError(explain("environment", "RANK beside WORLD_SIZE", "none", fix))
    groups = connect(device, 3, timeout_s)
    if device.type == "cpu" and shared_memory:
        return Mesh(device, *share_memory(groups))
    return Mesh(device, *groups)
