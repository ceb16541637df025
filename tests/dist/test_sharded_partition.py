"""Ranks that partition the shards they hold: counts, weights and stores of one process on the whole."""

from pathlib import Path

import numpy as np
import pytest
from graphs import sample_store
from sharded_programs import BATCH_SIZE, EPOCHS, FANOUTS, SEED, count_here

from gsplit.partitioning.presample import Workload, presample
from gsplit.store.reader import Store
from gsplit.store.shard import host_range, write_shard
from gsplit.testing import run_ranks


def _cut(store: Store, num_ranks: int) -> list[str]:
    folder = store.path.parent
    made = [
        write_shard(store, folder / f"{num_ranks}-{rank}.gsplit", *host_range(store, rank, num_ranks))
        for rank in range(num_ranks)
    ]
    return [str(shard.path) for shard in made]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks(num_ranks: int, tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit", 2000, 15_000)
    shards = _cut(store, num_ranks)
    for targets in ("train", None):
        want = presample(Workload.of_store(store, targets, FANOUTS, BATCH_SIZE, SEED), epochs=EPOCHS)
        found = run_ranks(count_here, num_ranks, shards, targets)
        assert {counts.num_batches for counts in found} == {want.num_batches}
        for name in ("computed", "edges_drawn", "loaded", "edges"):
            assert np.array_equal(np.concatenate([getattr(counts, name) for counts in found]), getattr(want, name))
