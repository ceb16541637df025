"""What ranks run in the tests of partitioning by shards."""

from typing import Any

import gsplit
from gsplit.distributed.mesh import Mesh
from gsplit.partitioning.sharded.held_shard import HeldShard
from gsplit.partitioning.sharded.presample import ShardWorkload, presample_shard

FANOUTS, BATCH_SIZE, EPOCHS, SEED = [4, 3], 64, 2, 5


def count_here(mesh: Mesh, paths: list[str], input_nodes: str | None) -> Any:
    """The counts of this rank's shard."""
    held = HeldShard.join(gsplit.open(paths[mesh.rank]), mesh)
    workload = ShardWorkload.of_shard(held, input_nodes, FANOUTS, BATCH_SIZE, SEED)
    return presample_shard(workload, epochs=EPOCHS)
