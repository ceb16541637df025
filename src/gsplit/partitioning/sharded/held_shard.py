"""The shard that a rank holds, its place among those of the other ranks, and exchanges of rows between the ranks.

Rank r holds the r-th range of vertices. What the ranks hold must be shards of one store that lie side by side; that is
checked once, before anything depends on it.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch

from gsplit.array_types import Array, Ids
from gsplit.distributed.comm.comm import Call, Comm, assert_same_on_all_ranks
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.progress import Progress, silent
from gsplit.sampling.targets import LocalTargets
from gsplit.store.manifest import role_of
from gsplit.store.reader import Store
from gsplit.store.source import row_slices

__all__ = ["HeldShard", "add_up", "gather_all", "largest_of", "owners_of", "send_rows", "send_to_all"]


@dataclass(frozen=True)
class HeldShard:
    """A rank's shard; ``ownership`` are the ranges of all ranks' shards."""

    store: Store
    mesh: Mesh
    ownership: Ownership

    @classmethod
    def join(cls, store: Store, mesh: Mesh) -> Self:
        """Compare this rank's shard with those of the others. A collective; all ranks raise if they do not fit."""
        if mesh.num_replicas != 1 or mesh.sample_device.type != "cpu":
            got = f"{mesh.num_replicas} replica(s), samples on {mesh.sample_device}"
            raise InputError(explain("mesh", "ranks of one replica on the host", got, 'use gsplit.init("cpu")'))
        assert_same_on_all_ranks(mesh.control, "shards", _describe(store))
        texts = mesh.control.gather_text(Call("ranges of shards"), json.dumps(store.vertex_range))
        ranges = [tuple(json.loads(text)) for text in texts]
        ends = [(0, 0), *ranges, (store.num_vertices, store.num_vertices)]
        if any(before[1] != after[0] for before, after in pairwise(ends)):
            got = ", ".join(f"rank {rank}: {first}..{stop}" for rank, (first, stop) in enumerate(ranges))
            expected = f"ranges side by side from 0 to {store.num_vertices}"
            fix = "give every rank a shard of its own, in the order of their vertices, and as many ranks as shards"
            raise InputError(explain("shards", expected, got, fix))
        return cls(store, mesh, Ownership((0, *(stop for _, stop in ranges))))

    @property
    def comm(self) -> Comm:
        return self.mesh.loading

    @property
    def graph(self) -> Graph:
        return self.store.graph

    @property
    def first(self) -> int:
        return self.store.vertex_range[0]

    @property
    def num_held(self) -> int:
        return self.store.vertex_range[1] - self.first

    def targets(self, input_nodes: str | None) -> LocalTargets:
        """The targets among the vertices held: those of a stored list, or every vertex."""
        return LocalGraph(self.store, self.mesh, self.ownership).targets(input_nodes)


def _describe(store: Store) -> dict[str, object]:
    """What shards of one store have in common."""
    manifest = store.manifest
    targets = {name: store.stored_targets(name)[2] for name in manifest.names("targets")}
    return {
        "vertices": store.num_vertices,
        "fingerprint of the whole": store.fingerprint,
        "arrays": {name: (entry.dtype, entry.shape[1:]) for name, entry in sorted(manifest.arrays.items())},
        "targets": targets,
        "whole arrays": {name: entry.sha256 for name, entry in manifest.arrays.items() if role_of(name).is_whole},
        "meanings": manifest.label_metadata,
    }


def owners_of(ownership: Ownership, ids: Ids) -> Ids:
    """The rank of each vertex."""
    found: Ids = ownership.owners(torch.from_numpy(np.ascontiguousarray(ids))).numpy()
    return found


def send_rows(comm: Comm, call: Call, rows: Array, owners: Ids) -> list[Array]:
    """Send row i to rank ``owners[i]``; return what arrived from each rank, in that rank's order."""
    order = np.argsort(owners, kind="stable")
    counts = tuple(np.bincount(owners, minlength=comm.size).tolist())
    theirs = comm.all_to_all_counts(call, counts)
    return _exchange(comm, call, rows[order], counts, theirs)


def send_to_all(comm: Comm, call: Call, rows: Array, theirs: tuple[int, ...]) -> list[Array]:
    """Send the same rows to every rank; return what arrived from each: ``theirs[p]`` rows of rank p."""
    return _exchange(comm, call, np.concatenate([rows] * comm.size), (rows.shape[0],) * comm.size, theirs)


def gather_all(held: HeldShard, what: str, mine: Array, placed: Array, progress: Progress = silent) -> None:
    """Fill ``placed`` with a value of every vertex; ``mine`` are those of the vertices held. A collective.

    All ranks know the ranges, so they cut them into pieces alike; a rank without more pieces sends none.
    """
    ranges = [held.ownership.range_of(rank) for rank in range(held.comm.size)]
    pieces = [list(row_slices(stop - first, held.comm.size * mine.itemsize)) for first, stop in ranges]
    for turn in range(max(map(len, pieces))):
        turns = [cut[turn] if turn < len(cut) else slice(0, 0) for cut in pieces]
        sizes = tuple(piece.stop - piece.start for piece in turns)
        found = send_to_all(held.comm, Call(f"gather {what}", turn), mine[turns[held.comm.rank]], sizes)
        for (first, _), piece, values in zip(ranges, turns, found, strict=True):
            placed[first + piece.start : first + piece.stop] = values
        progress(f"gather {what}", turn, len(pieces[held.comm.rank]))


def largest_of(comm: Comm, call: Call, number: int) -> int:
    """The largest of the ranks' numbers."""
    return max(comm.all_to_all_counts(call, (number,) * comm.size))


def add_up(comm: Comm, call: Call, numbers: Ids) -> Ids:
    """The sum over the ranks, element by element."""
    total = torch.from_numpy(numbers.copy())
    comm.all_reduce(call, total).wait()
    found: Ids = total.numpy()
    return found


def _exchange(comm: Comm, call: Call, rows: Array, counts: tuple[int, ...], theirs: tuple[int, ...]) -> list[Array]:
    """Rows of any type are sent as bytes."""
    row_bytes = rows.dtype.itemsize * int(np.prod(rows.shape[1:]))
    sent = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(-1, row_bytes))
    received = torch.empty((sum(theirs), row_bytes), dtype=torch.uint8)
    comm.all_to_all(call, received, sent, theirs, counts).wait()
    typed = received.numpy().reshape(-1).view(rows.dtype).reshape(-1, *rows.shape[1:])
    return np.split(typed, np.cumsum(theirs)[:-1])
