"""``python -m gsplit_bench train`` as a user runs it: real ranks, several systems in turn, one document."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import run_forked

import gsplit
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit_bench.simulated import why_not_supported

RECORD = {
    "graph", "model", "system", "ranks", "replicas", "allocator", "features", "batch_size", "hidden", "num_layers",
    "fanout", "partition", "steps", "repeats", "wall_s", "cpu_s", "cpu_s_per_rank", "stages_s", "stages_s_per_rank",
    "stages_cpu_s", "cache",
    "edges", "input_rows", "rows_loaded", "bytes_loaded", "rows_sent", "bytes_sent", "collectives", "wait_s",
    "peak_bytes_per_rank", "batch_bytes_per_rank", "losses", "loss", "loss_difference", "losses_equal",
    "note", "epochs", "device", "threads",
}  # fmt: skip
COUNT = {
    "graph", "strategy", "ranks", "batch_size", "fanout", "hidden", "steps", "edges", "edges_per_rank",
    "input_rows_per_rank", "rows_loaded_per_rank", "rows_sent_per_rank", "bytes_sent_per_rank", "imbalance",
}  # fmt: skip
DOCUMENT = {
    "kind", "preset", "command", "commit", "date", "versions", "machine", "study", "losses_equal", "notes", "failures",
    "records", "counts",
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("bench")
    planted = PlantedGraph(2000, 24_000, num_communities=8, num_features=16, num_classes=4)
    plain = build_store(synthetic_source(planted), folder / "plain.gsplit")
    return gsplit.partition(plain, folder / "g.gsplit", 4, [4, 4], batch_size=128, solver="restream", epochs=2)


def test_systems_take_turns_on_the_same_ranks(store: Store, tmp_path: Path) -> None:
    small = ["--models", "sage", "--hidden", "16", "--fanout", "4,4", "--batch-size", "128", "--count", "2,8"]
    systems = [
        "--systems",
        "split,data,pyg_our_sampler,dgl,nothing",
        "--steps",
        "2",
        "--repeats",
        "2",
        "--features",
        "both",
    ]
    command = ["-m", "gsplit_bench", "train", str(store.path), *small, *systems, "--out", str(tmp_path / "o.json")]
    done = run_forked(command, tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "o.json").read_text())
    assert document.keys() == DOCUMENT and document["kind"] == "bench train" and document["failures"] == []
    records = {(record["features"], record["system"]): record for record in document["records"]}
    measured = ["split", "data", "pyg_our_sampler", *(["dgl"] if find_spec("dgl") else [])]
    assert list(records) == [(where, system) for where in ("memory", "disk") for system in measured]
    for (where, system), record in records.items():
        _check_record(record, where, system)
    split, data, pyg = (records["memory", system] for system in ("split", "data", "pyg_our_sampler"))
    assert split["losses"] == pytest.approx(data["losses"], rel=1e-5)  # the same steps
    assert split["losses"] == pytest.approx(records["disk", "split"]["losses"], rel=1e-5)
    assert document["losses_equal"] and pyg["loss"] < 2 * split["loss"]
    assert data["input_rows"] > 1.2 * split["input_rows"] and split["bytes_sent"] > data["bytes_sent"] > 0
    assert records["disk", "split"]["rows_loaded"] == split["input_rows"] < split["rows_loaded"]  # by owners; in place
    assert pyg["rows_loaded"] == pytest.approx(data["rows_loaded"], rel=0.1)  # other targets
    notes = document["notes"]
    assert any(note.startswith("nothing, sage: strategy: expected") for note in notes)
    assert any("pip install --no-deps dgl==1.1.3" in note for note in notes) == (find_spec("dgl") is None)
    assert any("8 ranks counted: ranks: expected at most one per part, 4" in note for note in notes)
    assert any(note.startswith("nothing is not counted: strategy: expected") for note in notes)
    assert [count["strategy"] for count in document["counts"]] == ["split", "data"]
    assert all(count.keys() == COUNT and len(count["edges_per_rank"]) == 2 for count in document["counts"])
    assert (
        "losses of all 4 runs of our strategies equal" in done.stdout
        and "2 ranks, disk, tuned allocator" in done.stdout
    )


@pytest.mark.weekly
def test_the_whole_command_runs_on_devices(store: Store, tmp_path: Path) -> None:
    if why := why_not_supported():
        pytest.skip(why)
    small = ["--models", "sage", "--hidden", "16", "--fanout", "4,4", "--batch-size", "128", "--warm-up", "2"]
    systems = [
        "--systems",
        "split,data,pyg_our_sampler,p3",
        "--steps",
        "2",
        "--repeats",
        "1",
        "--ranks",
        "1,2",
        "--device",
        "sim",
    ]
    command = ["-m", "gsplit_bench", "train", str(store.path), *small, *systems, "--out", str(tmp_path / "o.json")]
    done = run_forked(command, tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "o.json").read_text())
    records = {(record["ranks"], record["system"]): record for record in document["records"]}
    assert list(records) == [(ranks, name) for ranks in (1, 2) for name in ("split", "data", "pyg_our_sampler")]
    assert document["losses_equal"] and document["failures"] == []
    for record in records.values():
        assert record["device"] == "sim" and len(record["losses"]) == 4 and len(set(record["losses"])) == 4
        assert record["stages_s"].keys() >= {"sample", "load", "forward", "backward", "optimizer"}
    assert [note for note in document["notes"] if "p3, sage: system p3: expected ranks on the CPU" in note]


def _check_record(record: dict[str, Any], where: str, system: str) -> None:
    assert record.keys() == RECORD
    assert (record["graph"], record["ranks"], record["partition"], record["features"]) == ("g", 2, "gsplit", where)
    assert 0 < record["wall_s"]["low"] <= record["wall_s"]["median"] <= record["wall_s"]["high"]
    assert record["cpu_s"]["median"] > 0 and len(record["cpu_s_per_rank"]) == len(record["stages_s_per_rank"]) == 2
    assert record["stages_s"].keys() >= {"sample", "load", "forward", "backward", "optimizer"}
    assert sum(record["stages_s"].values()) < 2 * record["wall_s"]["high"]
    assert len(record["losses"]) == 1 + 2 * 2 and record["losses"][-1] == record["loss"]
    assert record["edges"] > record["input_rows"] > 128 and min(record["peak_bytes_per_rank"]) > 1 << 26
    assert record["losses_equal"] is (True if system in ("split", "data") else None)
