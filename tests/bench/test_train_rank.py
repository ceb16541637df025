"""One rank's part of a scenario: turns, epochs, and what is refused; and what is left of a launch that failed."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import CommError
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit.telemetry import StepTelemetry
from gsplit_bench import train as bench_train
from gsplit_bench.train import run_study
from gsplit_bench.train_rank import RankResult, Turn, run_scenario
from gsplit_bench.train_study import DEFAULT, Launch, Scenario, Study
from gsplit_bench.train_systems import StrategySystem


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    planted = PlantedGraph(600, 5000, num_communities=4, num_features=8, num_classes=4)
    return build_store(synthetic_source(planted), tmp_path_factory.mktemp("rank") / "g.gsplit")


SMALL = replace(DEFAULT, models=("sage",), hidden=(8,), fanouts=((3, 3),), batch_sizes=(32,), steps=1, repeats=2)


def _scenario(store: Store, study: Study) -> Scenario:
    return study.scenarios([str(store.path)], Launch(1, "tuned"))[0]


def _run(store: Store, study: Study) -> tuple[dict[str, RankResult], list[int]]:
    told: list[int] = []
    found = run_scenario(0, _scenario(store, study), store, solo_mesh(), told.append)
    return {result.system: result for result in found}, told


def test_every_system_has_its_turns_and_goes_on_where_it_was(store: Store) -> None:
    results, told = _run(store, replace(SMALL, systems=("split", "data", "pyg_our_sampler")))
    assert told == list(range(1, 3 * 3 + 1))  # a warm-up and two turns each
    for result in results.values():
        assert len(result.turns) == 2 and len(result.losses) == 3 and result.peak_bytes > 1 << 20
        assert all(turn.wall_s > 0 and turn.counts["targets"] == 32 for turn in result.turns)
    assert results["split"].losses == pytest.approx(results["data"].losses, rel=1e-5)
    assert len(set(results["split"].losses)) == 3


def test_another_sampler_draws_fewer_vertices_and_threads_are_noted(store: Store) -> None:
    results, _ = _run(store, replace(SMALL, systems=("split", "split+labor", "split+nothing")))
    plain, labor = results["split"], results["split+labor"]
    assert len(labor.turns) == 2 and plain.losses != labor.losses
    assert sum(t.counts["input_rows"] for t in labor.turns) < sum(t.counts["input_rows"] for t in plain.turns)
    assert "sampler: expected" in results["split+nothing"].note and not results["split+nothing"].turns
    scenario = replace(_scenario(store, SMALL), threads=2)
    assert plain.note == "" and "kernels use one thread" in StrategySystem("split", scenario, store, solo_mesh()).note


def test_epochs_are_trained_and_evaluated_for_our_strategies_only(store: Store) -> None:
    results, told = _run(store, replace(SMALL, systems=("split", "p3", "data"), epochs=2))
    assert "--epochs: expected strategies of ours (got p3)" in results["p3"].note and not results["p3"].epochs
    for name in ("split", "data"):
        epochs = results[name].epochs
        assert [epoch.epoch for epoch in epochs] == [0, 1] and epochs[1].loss < epochs[0].loss
        assert epochs[0].accuracies.keys() == {"val", "test"} and len(epochs[0].losses) > 1
    assert results["split"].epochs[1].loss == pytest.approx(results["data"].epochs[1].loss, rel=1e-5)
    assert told == [1, 2, 3, 4]


def test_what_refuses_its_first_step_is_a_note(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StrategySystem, epoch: int, step: int) -> StepTelemetry:
        raise gsplit.InputError("not this model")

    monkeypatch.setattr(StrategySystem, "train_step", refuse)
    results, _ = _run(store, replace(SMALL, systems=("split", "p3")))
    assert results["split"].note == "not this model" and not results["split"].turns
    assert len(results["p3"].turns) == 2


def test_a_launch_that_fails_keeps_what_all_ranks_have_done(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks write a line per system; the launcher is replaced by what a launch that dies half-way leaves behind."""

    def die(command: list[str], nproc: int, *, tuned_allocator: bool, threads: int) -> int:
        folder, turn = Path(command[-1]), Turn(1.0, 1.0, 0.0, {"forward": 1.0}, {"forward": 1.0}, {"edges": 5.0})
        scenarios = json.loads((folder / "scenarios.json").read_text())
        assert (nproc, tuned_allocator, threads, len(scenarios)) == (2, False, 1, 1)
        done = [json.dumps(asdict(RankResult(0, name, "", [turn], [0.5]))) + "\n" for name in ("split", "data")]
        (folder / "rank-0.jsonl").write_text("".join(done))
        (folder / "rank-1.jsonl").write_text(done[0] + done[1][:20])
        raise CommError("rank 1: out of memory")

    monkeypatch.setattr(bench_train, "launch", die)
    kept: list[int] = []
    study = replace(SMALL, systems=("split", "data"), allocators=("default",))
    report = run_study(study, [store.path], keep=lambda so_far: kept.append(len(so_far.records)))
    assert [record.system for record in report.records] == ["split"] and report.records[0].edges == 10.0
    assert report.failures == ["g, 2 ranks, default allocator: rank 1: out of memory"]
    assert kept[0] == 1


def test_two_stores_of_one_name_are_refused(store: Store) -> None:
    with pytest.raises(gsplit.InputError, match="stores with different names"):
        run_study(SMALL, [store.path, store.path])
