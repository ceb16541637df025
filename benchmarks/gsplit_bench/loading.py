"""Loading, measured: what ranks load, counted for many of them, and how long real ranks take from several sources.

The counts need no ranks (``loading_counts``) and say what split parallelism saves. Real ranks (``loading_runs``) make
the same mini-batches from memory, from disk and from sources throttled to the speed of a bus or of a network disk.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gsplit.ownership import own_parts
from gsplit.partitioning.presample import Workload
from gsplit.progress import Progress, silent
from gsplit.store.reader import Store
from gsplit_bench.loading_counts import count_data, count_split
from gsplit_bench.loading_runs import LoadingRun, run_loading
from gsplit_bench.loading_tables import Orders, copies_table, hits_table, redundancy_row

__all__ = ["STRATEGIES", "count_loading", "time_loading"]

STRATEGIES = ("split", "data")


def count_loading(
    store: Store,
    workload: Workload,
    ranks: Sequence[int],
    *,
    steps: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The tables of a partitioned store for some numbers of ranks, over one epoch or its first ``steps``.

    The workload's seed should not be that of the partition: hits are predicted from what was presampled.
    """
    hotness, orders = np.asarray(store.stored_array("hotness")), Orders.of_store(store)
    steps = min(steps or workload.steps_per_epoch, workload.steps_per_epoch)
    mini = count_data(workload, 1, steps=steps, progress=progress)
    redundancy, hits, copies = [], [], []
    for number in ranks:
        ownership = own_parts(store.part_boundaries, number, store.part_loads)
        split = count_split(workload, ownership, steps=steps, progress=progress)
        data = count_data(workload, number, steps=steps, progress=progress)
        redundancy.append({"ranks": number, **redundancy_row(mini, data, split)})
        hits += hits_table(orders, hotness, ownership, split)
        copies += copies_table(hotness, store.part_boundaries, ownership, split)
    return {
        "num_vertices": store.num_vertices,
        "num_edges": store.num_edges,
        "num_targets": int(workload.targets.size),
        "num_parts": len(store.part_boundaries) - 1,
        "num_neighbors": workload.num_neighbors,
        "batch_size": workload.batch_size,
        "seed": workload.seed,
        "num_batches": steps,
        "redundancy": redundancy,
        "hits": hits,
        "copies": copies,
    }


def time_loading(
    store: Store,
    targets: str | None,
    workload: Workload,
    ranks: Sequence[int],
    sources: Sequence[str],
    *,
    steps: int,
    cache_share: float,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Real ranks of both strategies, from every source, on the first ``steps`` mini-batches of an epoch."""
    steps = min(steps, workload.steps_per_epoch)
    runs = [
        LoadingRun(
            store=str(store.path),
            targets=targets,
            num_neighbors=workload.num_neighbors,
            batch_size=workload.batch_size,
            steps=steps,
            seed=workload.seed,
            source=source,
            strategy=strategy,
            cache_share=cache_share,
        )
        for source in sources
        for strategy in STRATEGIES
    ]
    rows: list[dict[str, Any]] = []
    for done, number in enumerate(ranks):
        rows += run_loading(runs, number)
        progress("load on ranks", done + 1, len(ranks))
    return rows
