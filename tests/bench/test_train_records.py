"""Records are put together from ranks as they say, and losses that differ are noticed; the screen shows it."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from graphs import sample_store
from rich.console import Console

import gsplit
from gsplit.partitioning.presample import Workload
from gsplit.store.reader import Store
from gsplit_bench.counted_ranks import count_ranks
from gsplit_bench.train import TrainReport
from gsplit_bench.train_command import show_report
from gsplit_bench.train_rank import RankResult, Turn
from gsplit_bench.train_records import LOSS_TOLERANCE, Spread, TrainRecord, check_losses, combine_ranks, objective_of
from gsplit_bench.train_study import DEFAULT, Launch, Scenario


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return sample_store(tmp_path_factory.mktemp("records") / "little.gsplit")


def _scenario(store: Store) -> Scenario:
    return DEFAULT.scenarios([str(store.path)], Launch(2, "tuned"))[0]


def _result(system: str, walls: list[float], cpus: list[float], losses: list[float]) -> RankResult:
    counts = {"edges": 10.0, "rows_loaded": 4.0, "collectives": 6.0}
    seconds = {"sample": 0.1, "load_features": 0.2, "forward": 0.5, "shuffle": 0.125, "backward": 0.3}
    turns = [Turn(wall, cpu, 0.25, seconds, seconds, counts) for wall, cpu in zip(walls, cpus, strict=True)]
    return RankResult(0, system, "", turns, losses, 100, 1000)


def _record(
    store: Store, system: str, losses: tuple[list[float], list[float]] = ([1.0, 0.5], [1.0, 0.5])
) -> TrainRecord:
    ranks = [
        _result(system, [1.0, 2.0, 1.5], [0.5, 0.25, 1.0], losses[0]),
        _result(system, [1.25, 1.0, 1.0], [0.5, 0.5, 0.5], losses[1]),
    ]
    return combine_ranks(_scenario(store), ranks)


def test_a_record_takes_the_slowest_rank_and_the_cpu_time_of_all(store: Store) -> None:
    record = _record(store, "split")
    assert record.wall_s == Spread(1.5, 1.25, 2.0, 1.375, 1.75)
    assert record.cpu_s == Spread(1.0, 0.75, 1.5, 0.875, 1.25) and record.cpu_s_per_rank == [0.5, 0.5]
    assert (record.edges, record.rows_loaded, record.collectives, record.rows_sent) == (20.0, 8.0, 6.0, 0.0)
    assert record.stages_s == {"sample": 0.1, "load": 0.2, "forward": 0.375, "shuffle": 0.125, "backward": 0.3}
    assert record.wait_s == 0.25 and record.peak_bytes_per_rank == [1000, 1000] and record.repeats == 3
    assert (record.graph, record.partition, record.ranks, record.num_layers) == ("little", "none", 2, 3)


def test_losses_of_peers_are_means_over_the_ranks(store: Store) -> None:
    assert _record(store, "dgl", ([1.0, 0.5], [2.0, 0.25])).losses == [1.5, 0.375]


def test_strategies_that_train_other_steps_are_noticed(store: Store) -> None:
    far = 1.0 + 3 * LOSS_TOLERANCE
    records = [
        _record(store, "pyg", ([9.0, 9.0], [9.0, 9.0])),
        _record(store, "split"),
        _record(store, "data", ([1.0, 0.5 * (1 + LOSS_TOLERANCE / 2)],) * 2),
        _record(store, "data_cached", ([far, 0.5],) * 2),
    ]
    peer, first, near, other = check_losses(records)
    assert (peer.losses_equal, peer.loss_difference) == (None, None)
    assert (first.losses_equal, first.loss_difference) == (True, 0.0)
    assert near.losses_equal is True and other.losses_equal is False
    assert other.loss_difference == pytest.approx(3 * LOSS_TOLERANCE)
    labor = replace(other, system="split+labor")  # another sample
    assert check_losses([first, labor])[1].losses_equal is True
    assert check_losses([labor, replace(first, system="data+labor")])[1].losses_equal is False
    wider = replace(other, hidden=512)  # another model: nothing to compare it with
    assert check_losses([first, wider])[1].losses_equal is True
    assert check_losses([first, replace(other, ranks=4, features="disk")])[1].losses_equal is False
    report = TrainReport(None, "", DEFAULT, [peer, first, near])
    assert report.losses_equal and report.as_dict()["losses_equal"]
    assert not replace(report, records=[first, other]).losses_equal


def test_the_screen_fits_eighty_columns_and_says_what_is_wrong(store: Store) -> None:
    records = check_losses([_record(store, "split"), _record(store, "data_cached", ([2.0, 0.5],) * 2)])
    workload = Workload.of_store(store, "train", [3, 3], 50)
    counts = count_ranks(store, workload, 2, ["split", "data"], hidden=8, steps=2)
    notes, failures = ["dgl, sage: not there"], ["4 ranks, tuned allocator: rank 1: out of luck"]
    report = TrainReport("main", "python -m gsplit_bench train", DEFAULT, records, counts, notes, failures)
    stream = io.StringIO()
    show_report(report, Console(file=stream, width=80))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    (line,) = [line for line in lines if line.startswith("split ")]
    assert line.split() == ["split", "1500", "33%", "1000", "250", "100", "200", "500", "300", "20", "8", "0"]
    assert "losses of all 2 runs of our strategies DIFFER, to 1e+00" in lines
    assert "little: sage 256, fanout 15,15,15, batch 1024; 2 ranks, memory, tuned allocator" in lines
    assert sum(line.split()[:2] == ["little", "50"] for line in lines) == 2
    assert notes[0] in lines and f"failed: {failures[0]}" in lines
    assert not any("…" in line for line in lines)


def test_counted_ranks_cover_the_mini_batch(store: Store) -> None:
    workload = Workload.of_store(store, "train", [3, 3], 50)
    one, four = (
        {count.strategy: count for count in count_ranks(store, workload, ranks, ["split", "data"], hidden=8, steps=2)}
        for ranks in (1, 4)
    )
    assert one["split"].edges == one["data"].edges == four["split"].edges < four["data"].edges
    assert sum(four["split"].rows_loaded_per_rank) == one["split"].rows_loaded_per_rank[0]
    assert sum(one["split"].bytes_sent_per_rank) == sum(four["data"].bytes_sent_per_rank) == 0
    assert all(found > 0 for found in four["split"].bytes_sent_per_rank)
    assert one["split"].imbalance == 1.0 < four["split"].imbalance < 4
    assert len(four["data"].edges_per_rank) == len(four["data"].input_rows_per_rank) == 4


def test_the_objective_of_a_partition_is_read_from_the_store(store: Store, tmp_path: Path) -> None:
    made = gsplit.partition(
        store, tmp_path / "p.gsplit", 2, [3], batch_size=50, objective="node", solver="restream", epochs=1
    )
    assert objective_of(made.path) == "node"
