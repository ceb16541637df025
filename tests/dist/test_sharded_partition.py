"""Ranks that partition the shards they hold: counts, weights and stores are those of one process on the whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import sample_store
from sharded_programs import (
    BATCH_SIZE,
    EPOCHS,
    FANOUTS,
    OBJECTIVES,
    OPTIONS,
    PARTS,
    SEED,
    TOLERANCE,
    Found,
    idle_vertices,
    partition_here,
)

from gsplit.distributed.comm.comm import SoloComm
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.partitioning.plan import spread_unreached
from gsplit.partitioning.presample import Counts, Workload, held_out_epochs, presample
from gsplit.partitioning.quotient import count_links
from gsplit.partitioning.relabel import write_renumbered
from gsplit.partitioning.solvers import restream
from gsplit.partitioning.weighted_graph import WeightedGraph, open_weighted
from gsplit.partitioning.weights import vertex_work, weigh
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import write_shard
from gsplit.store.verify import verify_store
from gsplit.store.writer import StoreWriter
from gsplit_bench.ranks import run_ranks

CUTS = {1: [0, 600], 2: [0, 350, 600], 3: [0, 400, 400, 600]}  # uneven, and one without vertices


def _check_counts(found: list[Counts], want: Counts) -> None:
    assert {counts.num_batches for counts in found} == {want.num_batches}
    for name in ("computed", "edges_drawn", "loaded", "edges"):
        assert np.array_equal(np.concatenate([getattr(counts, name) for counts in found]), getattr(want, name)), name


def _check_weights(found: list[Found], store: Store, counts: Counts, targets: Any, folder: Path) -> None:
    for objective in OBJECTIVES:
        want = weigh(objective, store.graph, counts, targets, folder / objective, 8.0, 1.0)
        arrays = (np.diff(want.xadj), want.adjncy, want.edge_weights, want.vertex_weights)
        for number, array in enumerate(arrays):
            ours = np.concatenate([one.weighted[objective][number] for one in found])
            assert np.array_equal(ours, array), (objective, number)


def _check_parts(found: list[Found], store: Store, counts: Counts, weighted: WeightedGraph) -> None:
    """Every rank knows all parts; they are as even as those of one process, and cut hardly more."""
    assert all(np.array_equal(one.parts, found[0].parts) for one in found)
    alone = restream.solve(weighted, PARTS, TOLERANCE, SEED)
    kept = [np.trace(count_links(store.graph, counts.edges, parts, PARTS)) for parts in (found[0].parts, alone)]
    loads = np.bincount(found[0].parts, vertex_work(counts, 8.0, 1.0))
    assert kept[0] > 0.95 * kept[1]
    assert loads.max() <= TOLERANCE * loads.mean()


def _manifest(path: Path) -> Any:
    document = json.loads((path / "manifest.json").read_text())
    for step in document["provenance"]:
        step.pop("time")
    return document


def _check_shards(made: list[Store], store: Store, hotness: Any, held_out: Counts, folder: Path) -> None:
    """Against one process that renumbers the whole store by the same parts, and cuts that."""
    for shard in made:
        verify_store(shard)
    manifest = made[0].manifest
    assert manifest.part_statistics is not None
    order = np.concatenate([shard.stored_array("original_ids") for shard in made])
    parts = np.empty(order.size, np.int32)
    parts[order] = np.repeat(np.arange(PARTS), np.diff(manifest.part_boundaries))
    assert manifest.part_statistics.num_batches == held_out.num_batches
    assert manifest.part_statistics.links == count_links(store.graph, held_out.edges, parts, PARTS).tolist()
    assert manifest.part_statistics.loads == np.bincount(parts, vertex_work(held_out, 8.0, 1.0), PARTS).tolist()
    step = manifest.provenance[-2]
    for number, shard in enumerate(made):
        with StoreWriter(folder / f"w{number}.gsplit") as writer:
            write_renumbered(writer, store, parts, hotness, manifest.part_statistics, shard.manifest.provenance[-2])
        whole = open_store(folder / f"w{number}.gsplit")
        cut = write_shard(whole, folder / f"c{number}.gsplit", *shard.vertex_range)
        files = sorted(str(file.relative_to(cut.path)) for file in cut.path.rglob("*.npy"))
        assert files == sorted(str(file.relative_to(shard.path)) for file in shard.path.rglob("*.npy"))
        for file in files:
            assert (cut.path / file).read_bytes() == (shard.path / file).read_bytes(), file
        assert _manifest(cut.path) == _manifest(shard.path)
    assert step.settings["ranks"] == len(made)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_do_what_one_process_does(num_ranks: int, tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit", 600, 5000)
    shards = [
        str(write_shard(store, tmp_path / f"in-{rank}.gsplit", *CUTS[num_ranks][rank : rank + 2]).path)
        for rank in range(num_ranks)
    ]
    arguments = (shards, str(tmp_path / "out.gsplit"))
    found = (
        [partition_here(solo_mesh(), *arguments)]
        if num_ranks == 1
        else run_ranks(partition_here, num_ranks, *arguments)
    )
    workload = Workload.of_store(store, "train", FANOUTS, BATCH_SIZE, SEED)
    want = presample(workload, epochs=EPOCHS)
    _check_counts([one.counts for one in found], want)
    every = presample(Workload.of_store(store, None, FANOUTS, BATCH_SIZE, SEED, OPTIONS), epochs=1)
    _check_counts([one.counts_of_all for one in found], every)
    _check_weights(found, store, want, workload.targets, tmp_path)
    _check_parts(found, store, want, open_weighted(tmp_path / "gsplit"))
    alone = spread_unreached(*idle_vertices(600), PARTS, TOLERANCE, SoloComm())
    assert np.array_equal(np.concatenate([one.spread for one in found]), alone)
    made = [open_store(tmp_path / f"out-{rank}-of-{num_ranks}.gsplit") for rank in range(num_ranks)]
    held_out = presample(workload, epochs=held_out_epochs(workload.steps_per_epoch), first_epoch=EPOCHS)
    _check_shards(made, store, want.loaded, held_out, tmp_path)
    assert not list(tmp_path.glob(".out*"))
