"""From counts to parts by ranks: weigh, restream, and put the parts in an order in which neighbours are close."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.distributed.comm.comm import Call
from gsplit.errors import InputError, explain
from gsplit.partitioning.plan import check_settings, renumber_parts
from gsplit.partitioning.presample import Counts
from gsplit.partitioning.quotient import bisection_order, count_links
from gsplit.partitioning.settings import PartitionSettings
from gsplit.partitioning.sharded.exchange import add_up
from gsplit.partitioning.sharded.held_shard import HeldShard
from gsplit.partitioning.sharded.presample import ShardWorkload
from gsplit.partitioning.sharded.restream import restream_shards
from gsplit.partitioning.sharded.weigh import weigh_shard
from gsplit.partitioning.spread import spread_unreached
from gsplit.partitioning.weights import check_total_work, vertex_work
from gsplit.progress import Progress, silent
from gsplit.store.manifest import PartStatistics

__all__ = ["ShardPlan", "check_shard_plan", "find_parts_by_ranks"]


@dataclass(frozen=True)
class ShardPlan:
    """The part of every vertex that a rank holds, and what was counted of the parts of all ranks."""

    parts: npt.NDArray[np.int32]
    statistics: PartStatistics


def check_shard_plan(held: HeldShard, settings: PartitionSettings) -> None:
    """Refuse what ranks cannot solve together, before anything long begins."""
    settings = settings.with_solver("restream")
    check_settings(settings, held.store.num_vertices, is_renumbered=held.store.is_renumbered)
    if settings.solver != "restream":
        fix = "leave the solver out, or partition the whole store in one process"
        raise InputError(explain("solver", "restream, the one that ranks can run together", settings.solver, fix))
    if settings.parts < held.ownership.num_ranks:
        expected = f"at least one for each of {held.ownership.num_ranks} ranks"
        raise InputError(explain("parts", expected, settings.parts, "choose more parts"))


def find_parts_by_ranks(
    workload: ShardWorkload,
    counts: Counts,
    settings: PartitionSettings,
    folder: Path,
    progress: Progress = silent,
) -> ShardPlan:
    """Weigh the vertices held into ``folder``, restream and order the parts. A collective."""
    held, parts = workload.held, settings.parts
    check_shard_plan(held, settings)
    costs = (settings.c_v, settings.c_e)
    work = vertex_work(counts, *costs)
    check_total_work(float(add_up(held.comm, Call("work"), work.sum()[None] >> 10)[0]) * 1024, *costs)
    weighted = weigh_shard(settings.objective, held, counts, workload.targets.ids, folder, *costs)
    everywhere = restream_shards(held, weighted, parts, settings.tolerance, settings.seed, progress)
    links = add_up(held.comm, Call("links"), count_links(held.graph, counts.edges, everywhere, parts))
    mine = everywhere[held.first : held.first + held.num_held].astype(np.int32)
    mine = spread_unreached(mine, counts.loaded == 0, parts, settings.tolerance, held.comm)
    mine, links = renumber_parts(mine, links, bisection_order(links, settings.seed))  # the same on all ranks
    loads = np.zeros(parts, np.int64)
    np.add.at(loads, mine, work)
    loads = add_up(held.comm, Call("loads"), loads)
    return ShardPlan(mine, PartStatistics(num_batches=counts.num_batches, loads=loads.tolist(), links=links.tolist()))
