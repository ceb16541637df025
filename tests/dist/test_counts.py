"""Collectives and bytes of a whole training step, for every strategy: ids, rows, gradients of rows, loss, weights."""

from pathlib import Path

import pytest
from count_programs import LAYERS, count_steps

from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.ranks import run_ranks

COLLECTIVES = {
    "split": 4 * LAYERS + 1,  # numbers of ids, ids, features, hidden rows there and back, the loss, weights
    "hybrid(1)": 2 * 2 + 1 + 2 + 2,
    "data_cached": 2 + 1 + 2,
    "data": 2,
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_everything_that_is_sent_is_counted(ranks: int, tmp_path: Path) -> None:
    planted = PlantedGraph(600, 5000, num_communities=4, num_features=6, num_classes=4)
    path = str(build_store(synthetic_source(planted), tmp_path / "g.gsplit").path)
    for found in run_ranks(count_steps, ranks, path, list(COLLECTIVES)):
        for (strategy, collectives), (counts, sent) in zip(COLLECTIVES.items(), found, strict=True):
            assert counts["collectives"] == collectives, strategy
            assert counts["bytes_sent"] == sent > 0, strategy
