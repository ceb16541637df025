"""The study that trains from several partitions reads what ``gsplit train`` writes."""

from pathlib import Path

import pytest

from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench import partition_studies


@pytest.mark.timeout(600)
def test_steps_of_a_training_from_a_partition_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = PlantedGraph(num_vertices=2000, num_edges=20_000, num_features=8, num_classes=4, seed=1)
    build_store(synthetic_source(graph), tmp_path / "concentrated.gsplit")
    monkeypatch.setattr(partition_studies, "STORES", {"random": "concentrated-random.gsplit"})
    monkeypatch.setattr(partition_studies, "TRAIN_REPEATS", 1)
    (row,) = partition_studies.train(tmp_path)
    assert 0 < row["rows_shuffled_per_input"] < row["rows_shuffled_per_step"]
    assert row["slowest_rank_cpu_seconds"] * 4 >= row["cpu_seconds_per_step"] > 0
