"""Restreaming by ranks that each hold a shard, against one process: what is cut, and how even the parts are.

    python -m gsplit_bench sharded-partition STORE.gsplit --ranks 2,4 --parts 4,8,64 --epochs 2

STORE has not been partitioned. Shards are cut into a temporary folder, ranks are processes of this machine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.partitioning.forecast import imbalance
from gsplit.partitioning.presample import Counts, Workload, presample
from gsplit.partitioning.quotient import count_links
from gsplit.partitioning.settings import C_E, C_V, TOLERANCE
from gsplit.partitioning.sharded.held_shard import HeldShard
from gsplit.partitioning.sharded.plan import ShardWorkload, presample_shard, restream_shards
from gsplit.partitioning.sharded.weigh import weigh_shard
from gsplit.partitioning.solvers import restream
from gsplit.partitioning.weights import vertex_work, weigh
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import host_range, write_shard
from gsplit_bench.ranks import run_ranks

__all__ = ["main"]

FANOUTS, BATCH_SIZE, SEED = [15, 15, 15], 1024, 0


def parts_here(mesh: Mesh, paths: list[str], parts: list[int], epochs: int) -> dict[int, Any]:
    """The part of every vertex for each number of parts, found with the other ranks."""
    held = HeldShard.join(gsplit.open(paths[mesh.rank]), mesh)
    workload = ShardWorkload.of_shard(held, "train", FANOUTS, BATCH_SIZE, SEED)
    counts = presample_shard(workload, epochs=epochs)
    with TemporaryDirectory() as folder:
        graph = weigh_shard("gsplit", held, counts, workload.targets.ids, Path(folder), C_V, C_E)
        return {number: restream_shards(held, graph, number, TOLERANCE, SEED) for number in parts}


def parts_alone(workload: Workload, counts: Counts, parts: list[int]) -> dict[int, Any]:
    """The same by one process on the whole store."""
    with TemporaryDirectory() as folder:
        graph = weigh("gsplit", workload.graph, counts, workload.targets, Path(folder), C_V, C_E)
        return {number: restream.solve(graph, number, TOLERANCE, SEED) for number in parts}


def print_rows(who: str, store: Store, counts: Counts, found: dict[int, Any]) -> None:
    """A line per number of parts: the share of drawn edges that are cut, and the largest part's work over the mean."""
    for number, parts in found.items():
        links = count_links(store.graph, counts.edges, parts, number)
        loads = np.bincount(parts, vertex_work(counts, C_V, C_E), number)
        print(f"| {who} | {number} | {1 - links.trace() / links.sum():.1%} | {imbalance(loads):.3f} |", flush=True)


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    for name, default in (("--ranks", "2,4"), ("--parts", "4,8,64")):
        parser.add_argument(name, default=default, type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--epochs", type=int, default=2)
    asked = parser.parse_args(arguments)
    store = open_store(asked.store)
    workload = Workload.of_store(store, "train", FANOUTS, BATCH_SIZE, SEED)
    counts = presample(workload, epochs=asked.epochs)
    print("| by | parts | edges cut | largest part |\n|---|---|---|---|")
    print_rows("one process", store, counts, parts_alone(workload, counts, asked.parts))
    for ranks in asked.ranks:
        with TemporaryDirectory() as folder:
            ranges = [host_range(store, rank, ranks) for rank in range(ranks)]
            shards = [write_shard(store, Path(folder) / f"{rank}.gsplit", *ranges[rank]) for rank in range(ranks)]
            found = run_ranks(
                parts_here, ranks, [str(shard.path) for shard in shards], asked.parts, asked.epochs, timeout_s=3600
            )
        print_rows(f"{ranks} ranks", store, counts, found[0])
