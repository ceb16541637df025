"""The shard that a rank holds, and where it stands among those of the other ranks.

Rank r holds the r-th range of vertices. What the ranks hold must be shards of one store that lie side by side; that is
checked once, before anything depends on it.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from gsplit.distributed.comm.comm import Call, Comm, assert_same_on_all_ranks
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.sampling.targets import LocalTargets
from gsplit.store.reader import Store

__all__ = ["HeldShard"]


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
        assert_same_on_all_ranks(mesh.world, "shards", _said_of(store))
        texts = mesh.world.gather_text(Call("ranges of shards"), json.dumps(store.vertex_range))
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
        """The group that the ranks exchange over."""
        return self.mesh.loading

    @property
    def graph(self) -> Graph:
        """The in-edges of the vertices held."""
        return self.store.graph

    @property
    def first(self) -> int:
        """The first vertex held."""
        return self.store.vertex_range[0]

    @property
    def num_held(self) -> int:
        """Vertices held."""
        return self.store.vertex_range[1] - self.first

    def targets(self, input_nodes: str | None) -> LocalTargets:
        """The targets held: of a stored list by name, or every vertex."""
        return LocalGraph(self.store, self.mesh, self.ownership).targets(input_nodes)


def _said_of(store: Store) -> dict[str, object]:
    """What shards of one store have in common."""
    manifest = store.manifest
    targets = {name: store.stored_targets(name)[2] for name in manifest.names("targets")}
    return {
        "vertices": store.num_vertices,
        "fingerprint of the whole": store.fingerprint,
        "arrays": {name: (entry.dtype, entry.shape[1:]) for name, entry in sorted(manifest.arrays.items())},
        "targets": targets,
        "meanings": manifest.label_metadata,
    }
