"""The new ids of all vertices, found by ranks of which none knows more than its own.

Parts are dealt out to the ranks in runs. Every vertex is told to the rank that will own it, with its part and how often
it was loaded; that rank sorts its vertices as ``relabel`` does, hottest first inside a part, and tells the old owners
the new ids. Who needs the new id of a foreign vertex asks its old owner.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.distributed.comm.comm import Call
from gsplit.graph.ownership import Ownership, lightest_runs, own_parts
from gsplit.partitioning.relabel import order_vertices
from gsplit.partitioning.sharded.exchange import add_up, owners_of, send_rows
from gsplit.partitioning.sharded.held_shard import HeldShard

__all__ = ["NewOrder", "find_new_order"]


@dataclass(frozen=True)
class NewOrder:
    """The new ids of the vertices a rank holds, and the vertices it will own: their old ids and hotness, in order."""

    held: HeldShard
    new_ids: Ids
    ownership: Ownership
    part_boundaries: list[int]
    old_ids: Ids
    hotness: Ids

    @property
    def first(self) -> int:
        """The first new id of this rank."""
        return self.ownership.range_of(self.held.comm.rank)[0]

    def owners(self) -> Ids:
        """The new owner of every vertex held."""
        return owners_of(self.ownership, self.new_ids)

    def give_back(self, call: Call, values: Array) -> Array:
        """Tell the old owners a value of each new vertex; returns those of the vertices held. A collective."""
        old_owner = owners_of(self.held.ownership, self.old_ids)
        rows = np.stack([self.old_ids, values], axis=1)
        found = np.concatenate(send_rows(self.held.comm, call, rows, old_owner))
        mine = np.empty(self.held.num_held, values.dtype)
        mine[found[:, 0] - self.held.first] = found[:, 1]
        return mine

    def look_up(self, call: Call, ids: Ids) -> Ids:
        """The new ids of vertices of any rank. A collective."""
        wanted, places = np.unique(ids, return_inverse=True)
        comm, owners = self.held.comm, owners_of(self.held.ownership, wanted)
        asked = send_rows(comm, call, wanted, owners)
        answers = self.new_ids[np.concatenate(asked) - self.held.first]
        askers = np.repeat(np.arange(comm.size), [ids.size for ids in asked])
        return np.concatenate(send_rows(comm, call, answers, askers))[places]  # owners' ranges ascend, as ``wanted``


def find_new_order(
    held: HeldShard, parts: npt.NDArray[np.int32], hotness: npt.NDArray[np.uint32], loads: list[int]
) -> NewOrder:
    """Renumber by parts. A collective; ``parts`` and ``hotness`` are of the vertices held, ``loads`` of all parts."""
    comm, num_parts = held.comm, len(loads)
    sizes = add_up(comm, Call("sizes of parts"), np.bincount(parts, minlength=num_parts))
    boundaries = [0, *np.cumsum(sizes).tolist()]
    ownership = own_parts(boundaries, comm.size, loads)
    owner_of_part = np.searchsorted(lightest_runs(loads, comm.size), np.arange(num_parts), side="right") - 1
    ids = np.arange(held.first, held.first + held.num_held)
    rows = np.stack([parts.astype(np.int64), hotness.astype(np.int64), ids], axis=1)
    arrived = np.concatenate(send_rows(comm, Call("vertices"), rows, owner_of_part[parts]))
    mine = arrived[order_vertices(arrived[:, 0], arrived[:, 1])]
    order = NewOrder(held, np.empty(0, np.int64), ownership, boundaries, mine[:, 2].copy(), mine[:, 1].copy())
    new_ids = order.give_back(Call("new ids"), order.first + np.arange(mine.shape[0]))
    return NewOrder(held, new_ids, ownership, boundaries, order.old_ids, order.hotness)
