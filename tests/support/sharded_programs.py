"""What ranks run in the tests of partitioning by shards."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.partitioning.plan import spread_unreached
from gsplit.partitioning.presample import Counts
from gsplit.partitioning.settings import PartitionSettings
from gsplit.partitioning.sharded.held_shard import HeldShard
from gsplit.partitioning.sharded.partition import partition_shards
from gsplit.partitioning.sharded.plan import ShardWorkload, presample_shard, restream_shards
from gsplit.partitioning.sharded.weigh import weigh_shard
from gsplit.sampling.draw_options import DrawOptions
from gsplit.store import source

FANOUTS, BATCH_SIZE, EPOCHS, SEED, PARTS, TOLERANCE = [4, 3], 64, 2, 5, 6, 1.05
OPTIONS = DrawOptions(sampler="labor", weight_attr="weight", layer_dependency=True)
OBJECTIVES = ("gsplit", "node", "edge")


@dataclass(frozen=True)
class Found:
    """What a rank found for its shard; ``weighted`` are neighbours, degrees and weights by objective."""

    counts: Counts
    counts_of_all: Counts
    weighted: dict[str, tuple[Any, ...]]
    parts: Any
    spread: Any


def idle_vertices(num_vertices: int) -> tuple[Any, Any]:
    """Parts of very unequal size, and which vertices may leave them."""
    rng = np.random.default_rng(0)
    parts = np.minimum(rng.integers(0, 4 * PARTS, num_vertices), PARTS - 1).astype(np.int32)
    return parts, rng.random(num_vertices) < 0.6


def partition_here(mesh: Mesh, paths: list[str], out: str) -> Found:
    """Every step on this rank's shard, then all of it into new shards."""
    shard = gsplit.open(paths[mesh.rank])
    held = HeldShard.join(shard, mesh)
    workload = ShardWorkload.of_shard(held, "train", FANOUTS, BATCH_SIZE, SEED)
    counts = presample_shard(workload, epochs=EPOCHS)
    of_all = presample_shard(ShardWorkload.of_shard(held, None, FANOUTS, BATCH_SIZE, SEED, OPTIONS), epochs=1)
    weighted = {}
    with TemporaryDirectory() as folder:
        for objective in OBJECTIVES:
            here = Path(folder) / objective
            graph = weigh_shard(objective, held, counts, workload.targets.ids, here, 8.0, 1.0)
            arrays = (np.diff(graph.xadj), graph.adjncy, graph.edge_weights, graph.vertex_weights)
            weighted[objective] = tuple(map(np.array, arrays))
            if objective == "gsplit":
                parts = restream_shards(held, graph, PARTS, TOLERANCE, SEED)
    own = slice(held.first, held.first + held.num_held)
    unequal, idle = idle_vertices(shard.num_vertices)
    spread = spread_unreached(unequal[own], idle[own], PARTS, TOLERANCE, held.comm)
    settings = PartitionSettings(PARTS, fanout=tuple(FANOUTS), batch_size=BATCH_SIZE, epochs=EPOCHS, seed=SEED)
    with patch.object(source, "CHUNK_BYTES", 2000):  # rows are sent in many pieces, and other ranks have fewer
        partition_shards(shard, out, settings, mesh=mesh)
    return Found(counts, of_all, weighted, parts, spread)
