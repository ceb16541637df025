"""Real ranks on partitioned stores and on hosts' shards: losses, weights and scores of one process on the original."""

from pathlib import Path

import numpy as np
import pytest
from partition_programs import train_here

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.shard import host_range, write_shard
from gsplit_bench.ranks import run_ranks


@pytest.mark.parametrize("num_ranks, solver", [(2, "metis"), (3, "metis"), (4, "restream")])
def test_partitions_and_shares_change_nothing(num_ranks: int, solver: str, tmp_path: Path) -> None:
    planted = PlantedGraph(1500, 15_000, num_communities=12, num_features=8, num_classes=4)
    plain = build_store(synthetic_source(planted), tmp_path / "g.gsplit")
    made = gsplit.partition(plain, tmp_path / "p.gsplit", 5, [4, 4], batch_size=128, solver=solver, epochs=2)
    shards = []
    for rank in range(num_ranks):
        path = tmp_path / f"shard-{rank}.gsplit"
        write_shard(made, path, *host_range(made, rank, num_ranks))
        shards.append(str(path))
    want = train_here(solo_mesh(), [str(plain.path)], str(tmp_path / "one.npy"))
    for paths, out in (([str(made.path)] * num_ranks, "parts.npy"), (shards, "shards.npy")):
        found = run_ranks(train_here, num_ranks, paths, str(tmp_path / out))
        for losses, weights, scores in found:
            assert losses == pytest.approx(want[0], abs=1e-12)
            assert weights == pytest.approx(want[1], abs=1e-9)
            assert scores == want[2]
        assert np.abs(np.load(tmp_path / out) - np.load(tmp_path / "one.npy")).max() < 1e-9
