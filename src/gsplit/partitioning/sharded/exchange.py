"""What the ranks of a partitioning send each other: rows to their owners, rows to everybody, sums.

All but ``owners_of`` are collectives.
"""

import numpy as np
import numpy.typing as npt
import torch

from gsplit.array_types import Array
from gsplit.distributed.comm.comm import Call, Comm
from gsplit.graph.ownership import Ownership

__all__ = ["add_up", "give_everybody", "largest_of", "owners_of", "send_rows"]


def owners_of(ownership: Ownership, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rank of each vertex."""
    found: npt.NDArray[np.int64] = ownership.owners(torch.from_numpy(np.ascontiguousarray(ids))).numpy()
    return found


def send_rows(comm: Comm, call: Call, rows: Array, owners: npt.NDArray[np.int64]) -> list[Array]:
    """Send row i to rank ``owners[i]``; what came from each rank, in the order in which it has the rows."""
    order = np.argsort(owners, kind="stable")
    counts = tuple(np.bincount(owners, minlength=comm.size).tolist())
    theirs = comm.all_to_all_counts(call, counts)
    return _exchange(comm, call, rows[order], counts, theirs)


def give_everybody(comm: Comm, call: Call, rows: Array, theirs: tuple[int, ...]) -> list[Array]:
    """Send the same rows to every rank; what came from each, ``theirs[p]`` rows of rank p, which everybody knows."""
    return _exchange(comm, call, np.concatenate([rows] * comm.size), (rows.shape[0],) * comm.size, theirs)


def largest_of(comm: Comm, call: Call, number: int) -> int:
    """The largest of the ranks' numbers."""
    return max(comm.all_to_all_counts(call, (number,) * comm.size))


def add_up(comm: Comm, call: Call, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sum over the ranks, element by element."""
    total = torch.from_numpy(numbers.copy())
    comm.all_reduce(call, total).wait()
    found: npt.NDArray[np.int64] = total.numpy()
    return found


def _exchange(comm: Comm, call: Call, rows: Array, counts: tuple[int, ...], theirs: tuple[int, ...]) -> list[Array]:
    """Rows travel as bytes, whatever they are made of."""
    row_bytes = rows.dtype.itemsize * int(np.prod(rows.shape[1:]))
    sent = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(-1, row_bytes))
    received = torch.empty((sum(theirs), row_bytes), dtype=torch.uint8)
    comm.all_to_all(call, received, sent, theirs, counts).wait()
    typed = received.numpy().reshape(-1).view(rows.dtype).reshape(-1, *rows.shape[1:])
    return np.split(typed, np.cumsum(theirs)[:-1])
