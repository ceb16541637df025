"""``gsplit bench loading`` on real ranks: what it counts without them is what they read, and rates are kept."""

import json
import time

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import gsplit
from gsplit.bench.loading_runs import LoadingRun, run_loading
from gsplit.bench.throttled import ThrottledRows
from gsplit.cli.main import app
from gsplit.features.protocol import take_rows
from gsplit.features.sources import MappedRows
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("loading")
    planted = PlantedGraph(2000, 24_000, num_communities=8, num_features=16, num_classes=4)
    plain = build_store(synthetic_source(planted), folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 4, [4, 4], batch_size=128, solver="restream", epochs=4)


def test_ranks_read_what_was_counted(store: Store) -> None:
    small = ["--ranks", "2", "--fanout", "4,4", "--batch-size", "128", "--steps", "3", "--run-steps", "3"]
    sources = ["--source", "memory", "--source", "warm", "--source", "cold", "--source", "indexed"]
    result = CliRunner().invoke(app, ["bench", "loading", str(store.path), *small, *sources, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (counted,) = document["redundancy"]
    runs = {(run["source"], run["strategy"]): run for run in document["runs"]}
    assert len(runs) == 8
    for (_, strategy), run in runs.items():
        assert run["rows_loaded"] == counted["rows"][strategy]
        assert run["edges"] == counted["edges"][strategy]
        assert run["bytes_loaded"] == run["rows_loaded"] * 16 * 4
        assert run["cache_hits"] == round(run["hits_measured"] * run["rows_loaded"])
        assert run["source"] == "indexed" or abs(run["hits_measured"] - run["hits_predicted"]) < 0.05
        assert run["seconds"] > 0 and run["cpu_seconds"] > 0 and len(run["spans_by_rank"]) == 2
    assert (
        len({run["cache_hits"] for (_, strategy), run in runs.items() if strategy == "split"}) == 2
    )  # the same; none indexed
    assert runs["warm", "split"]["hits_measured"] > 1.3 * runs["warm", "data"]["hits_measured"]  # of two ranks


def test_an_unknown_source_is_refused(store: Store) -> None:
    run = LoadingRun(str(store.path), "train", [4], 8, 1, 0, "tape", "split", 0.1)
    with pytest.raises(
        gsplit.InputError, match="--source: expected one of memory, map, warm, cold, bus, network, indexed"
    ):
        run_loading([run], 2)


def test_the_screen_has_every_table(store: Store) -> None:
    small = ["--ranks", "2", "--fanout", "4,4", "--batch-size", "128", "--steps", "1", "--run-steps", "0"]
    result = CliRunner().invoke(app, ["bench", "loading", str(store.path), *small])
    assert result.exit_code == 0, result.output
    for title in ("edges computed and rows loaded", "cache hits", "rows exchanged at layer 0"):
        assert title in result.stdout
    assert "real ranks" not in result.stdout


def test_a_throttled_source_takes_its_time_and_changes_no_row() -> None:
    rows = np.random.default_rng(0).random((1000, 25), np.float32)
    source = MappedRows("x", rows, torch.float32, 0)
    slow = ThrottledRows(source, 1e6)
    ids = torch.arange(0, 1000, 2)
    start = time.perf_counter()
    found = take_rows(slow, ids, torch.device("cpu"))
    assert 0.05 <= time.perf_counter() - start < 50  # 50 kB at 1 MB/s
    assert torch.equal(found, torch.from_numpy(rows)[ids])
    assert (slow.row_shape, slow.dtype) == ((25,), torch.float32)


def test_one_rank_without_a_cache_has_no_hits(store: Store) -> None:
    run = LoadingRun(str(store.path), "train", [4, 4], 128, 1, 1, "cold", "split", 0.0)
    (found,) = run_loading([run], 1)
    assert found["cache_hits"] == 0 < found["rows_loaded"]
