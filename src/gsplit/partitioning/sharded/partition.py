"""The whole offline path by ranks: presample, weigh, restream, forecast, renumber; shards in and out, or nothing."""

import time
from pathlib import Path

import numpy as np

from gsplit.distributed.comm.comm import assert_same_on_all_ranks
from gsplit.distributed.comm.mesh import Mesh
from gsplit.partitioning.plan import count_parts
from gsplit.partitioning.presample import held_out_epochs
from gsplit.partitioning.settings import PartitionSettings
from gsplit.partitioning.sharded.held_shard import HeldShard
from gsplit.partitioning.sharded.plan import ShardWorkload, check_shard_plan, find_parts_by_ranks, presample_shard
from gsplit.partitioning.sharded.relabel import find_new_order, new_shards, write_new_shard
from gsplit.progress import Progress, silent
from gsplit.sampling.draw_options import DrawOptions
from gsplit.store.manifest import new_step
from gsplit.store.reader import Store, open_store
from gsplit.store.sharded_import import shard_paths
from gsplit.store.verify import verify_store

__all__ = ["partition_shards"]


def partition_shards(
    shard: Store,
    path: str | Path,
    settings: PartitionSettings,
    *,
    mesh: Mesh,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Partition a store of which every rank holds a shard; write the new shards and open this rank's. A collective.

    Ranks hold consecutive ranges of vertices in their order. ``path``, ``NAME.gsplit``, is a name on a file system that
    all of them see: rank r of N writes ``NAME-r-of-N.gsplit``. Any number of ranks up to ``parts`` could run from the
    result; its shards are for these. The only solver is "restream".
    """
    path = Path(path)
    settings = settings.with_solver("restream")
    held = HeldShard.join(shard, mesh)
    check_shard_plan(held, settings)
    workload = ShardWorkload.of_shard(
        held,
        settings.targets,
        list(settings.fanout),
        settings.batch_size,
        settings.seed,
        DrawOptions(**settings.sampler_options),
    )
    record = settings.as_dict() | {"num_neighbors": workload.num_neighbors}
    assert_same_on_all_ranks(mesh.control, "partition", {**record, "name": path.name, "overwrite": overwrite})
    with new_shards(held, path, overwrite=overwrite, progress=progress) as writer:
        began = time.perf_counter()
        verify_store(shard, progress)  # damage would get new checksums
        start = time.perf_counter()
        counts = presample_shard(workload, epochs=settings.epochs, progress=progress)
        counted = time.perf_counter()
        parts = find_parts_by_ranks(workload, counts, settings, writer.spill_directory, progress)
        solved = time.perf_counter()
        hotness, presampled = counts.loaded, counts.num_batches
        del counts  # 4 bytes per edge, which the held-out mini-batches need now
        held_out = presample_shard(
            workload,
            epochs=held_out_epochs(workload.steps_per_epoch),
            first_epoch=settings.epochs,
            progress=progress,
        )
        statistics = count_parts(held.graph, held_out, parts, settings, held.comm)
        forecast = time.perf_counter()
        step = new_step(
            "partition",
            {**record, "ranks": mesh.size},
            {
                "mini_batches": presampled,
                "verify_ms": round(1000 * (start - began)),
                "presample_ms": round(1000 * (counted - start)),
                "solve_ms": round(1000 * (solved - counted)),
                "held_out_ms": round(1000 * (forecast - solved)),
            },
        )
        mine = parts[held.first : held.first + held.num_held].astype(np.int32)
        order = find_new_order(held, mine, hotness, statistics.loads)
        write_new_shard(writer, order, statistics, step, progress)
    return open_store(shard_paths(path, mesh.size)[mesh.rank])
