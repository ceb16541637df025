"""Collectives and bytes of a whole training step, for every strategy: ids, rows, gradients of rows, loss, weights."""

from pathlib import Path

import pytest
from count_programs import HIDDEN, LAYERS, count_batch_norm, count_steps

from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.ranks import run_ranks

COLLECTIVES = {
    "split": 4 * LAYERS,  # numbers of ids, ids, hidden rows there and back, the loss, weights
    "hybrid(1)": 2 * 2 + 2 + 2,
    "data_cached": 2 + 2,
    "data": 2,
}


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_everything_that_is_sent_is_counted(ranks: int, shared_memory: bool, tmp_path: Path) -> None:
    """Features are one more exchange, unless ranks read them in place, on one host."""
    planted = PlantedGraph(600, 5000, num_communities=4, num_features=6, num_classes=4)
    path = str(build_store(synthetic_source(planted), tmp_path / "g.gsplit").path)
    for found in run_ranks(count_steps, ranks, path, list(COLLECTIVES), shared_memory=shared_memory):
        for (strategy, collectives), (counts, sent) in zip(COLLECTIVES.items(), found, strict=True):
            exchanges_inputs = not shared_memory and strategy != "data"
            assert counts["collectives"] == collectives + exchanges_inputs, strategy
            assert counts["bytes_sent"] == sent > 0, strategy


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_reductions_of_batch_norm_are_counted(ranks: int, tmp_path: Path) -> None:
    planted = PlantedGraph(600, 5000, num_communities=4, num_features=6, num_classes=4)
    path = str(build_store(synthetic_source(planted), tmp_path / "g.gsplit").path)
    statistics = 8 * ranks * (2 * HIDDEN + 1)  # float64, one row per rank: count, means and squared deviations
    gradients = 4 * 2 * HIDDEN
    sent = sum(2 * (ranks - 1) * size // ranks for size in (statistics, gradients))
    for plain, normed in run_ranks(count_batch_norm, ranks, path):
        assert normed["collectives"] - plain["collectives"] == 2 * (LAYERS - 1)
        assert normed["bytes_sent"] - plain["bytes_sent"] == sent * (LAYERS - 1)
