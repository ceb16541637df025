"""Loading counted without ranks: split parallelism reads every row of the mini-batch exactly once."""

from pathlib import Path

import numpy as np
import pytest

import gsplit
from gsplit.graph.ownership import own_parts
from gsplit.partitioning.presample import Workload, presample
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit_bench.loading import BUDGETS, COPY_BUDGETS, count_data, count_loading, count_split

RANKS = [2, 3, 8]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("loading")
    planted = PlantedGraph(3000, 40_000, num_communities=12, num_features=4, num_classes=4)
    plain = build_store(synthetic_source(planted), folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 8, [4, 4], batch_size=128, solver="restream", epochs=4)


def _workload(store: Store) -> Workload:
    return Workload.of_store(store, "train", [4, 4], 128, seed=1)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_split_loads_and_computes_what_one_process_does(num_ranks: int, store: Store) -> None:
    workload = _workload(store)
    mini = count_data(workload, 1)
    split = count_split(workload, own_parts(store.part_boundaries, num_ranks, store.part_loads))
    assert split.edges == mini.edges
    assert np.array_equal(split.loaded, mini.loaded)
    assert split.rows_received > 0 == mini.rows_received
    data = count_data(workload, num_ranks)
    assert data.rows > 1.2 * mini.rows and data.edges > 1.02 * mini.edges
    assert np.all(data.loaded >= mini.loaded) and np.all(data.loaded <= num_ranks * mini.loaded)


def test_one_process_counts_what_presampling_counts(store: Store) -> None:
    workload = _workload(store)
    mini, counts = count_data(workload, 1), presample(workload, epochs=1)
    assert np.array_equal(mini.loaded, counts.loaded) and mini.edges == int(counts.edges.sum())
    assert mini.num_batches == counts.num_batches


def test_the_tables_say_what_was_counted(store: Store) -> None:
    document = count_loading(store, _workload(store), RANKS)
    assert [row["ranks"] for row in document["redundancy"]] == RANKS
    for row in document["redundancy"]:
        assert row["edges_split_to_mini"] == row["rows_split_to_mini"] == 1.0
        assert row["rows_data_to_mini"] == row["rows"]["data"] / row["rows"]["mini"] > 1.2
    hits = {(row["ranks"], row["order"], row["budget"]): row for row in document["hits"]}
    assert len(hits) == len(RANKS) * 4 * len(BUDGETS)
    for (ranks, order, budget), row in hits.items():
        assert len(row["measured_by_rank"]) == ranks
        assert abs(row["measured"] - row["predicted"]) < 0.05  # a dozen small mini-batches
        assert hits[ranks, "hot", budget]["predicted"] >= row["predicted"]
        if order == "hot":
            assert row["measured"] > max(budget, hits[ranks, "random", budget]["measured"])
    for ranks in RANKS:
        curve = [row for row in document["copies"] if row["ranks"] == ranks]
        assert [row["budget"] for row in curve] == list(COPY_BUDGETS)
        exchanged = [row["rows_received"] for row in curve]
        assert exchanged == sorted(exchanged, reverse=True) and exchanged[0] > exchanged[1] > exchanged[-1]
        assert curve[0]["of_no_copies"] == 1.0 and curve[0]["rows_per_rank"] == 0
        assert all(row["rows_per_rank"] <= row["budget"] * store.num_vertices for row in curve)


def test_fewer_steps_are_the_first_ones(store: Store) -> None:
    workload = _workload(store)
    first, both, rest = (count_data(workload, 2, steps=n) for n in (1, 2, workload.steps_per_epoch))
    assert first.num_batches == 1 and first.rows < both.rows < rest.rows
    assert np.all(first.loaded <= both.loaded)


def test_a_store_that_was_not_partitioned_is_refused(tmp_path: Path) -> None:
    plain = build_store(synthetic_source(PlantedGraph(50, 200, num_features=2)), tmp_path / "plain.gsplit")
    with pytest.raises(gsplit.InputError, match="partitioned store"):
        count_loading(plain, Workload.of_store(plain, "train", [2], 8), [2])
