"""``strategy="auto"``: what it becomes, and what it needs to know."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import sample_store
from link_programs import store_with_pairs
from small_graph import small_store

from gsplit import InputError, NeighborLoader
from gsplit.distributed.comm.comm import SoloComm
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.planner import auto, calibration, plan
from gsplit.planner.auto import PlannedSteps, resolve_strategy
from gsplit.planner.hardware import PRESETS, write_hardware
from gsplit.planner.shapes import PlannedModel
from gsplit.run.choices import plan_strategy
from gsplit.run.config import TrainSettings
from gsplit.run.results import ModelShape
from gsplit.sampling.pairs import StoredPairs
from gsplit.store.reader import Store

HOST = replace(PRESETS["v100-nvlink"], name="host", cores=2)
STEPS = PlannedSteps("train", [3, 2], 20)
LINKS = {"zero-copy gather, 64 MB": 20.0, "all-to-all, 64 MB per rank": 50.0}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return sample_store(tmp_path / "g.gsplit")


def _two_ranks(device: str = "cpu") -> Mesh:
    """Rank 0 of two, which hears itself."""
    world, inner = SoloComm(), SoloComm()
    world.size = inner.size = 2
    return Mesh(torch.device(device), inner, inner, inner, world, world, world)


def test_other_names_stay_and_one_process_needs_no_choice() -> None:
    graph = small_store("random", 1)[0]
    assert resolve_strategy("hybrid(1)", graph, _two_ranks(), STEPS).strategy == "hybrid(1)"
    assert resolve_strategy("auto", graph, solo_mesh(), STEPS).strategy == "split"
    assert (
        NeighborLoader(graph, [3, 2], "train", batch_size=20, strategy="auto").make_batch(0, 0).context.strategy
        == "split"
    )


def test_a_machine_that_was_not_measured_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InputError, match="strategy='auto': expected this machine's constants.*gsplit plan STORE once"):
        resolve_strategy("auto", store, _two_ranks(), STEPS)
    write_hardware(HOST, calibration.cache_file(), {"host": "another"})
    assert calibration.known_machine() is None
    write_hardware(HOST, calibration.cache_file(), calibration._identity())
    assert calibration.known_machine() == HOST


@pytest.mark.parametrize("targets, got", [("train", "a graph in memory"), (torch.arange(3), "a graph in memory")])
def test_a_graph_in_memory_is_refused(targets: str | torch.Tensor, got: str) -> None:
    with pytest.raises(InputError, match=f"expected a store on disk and the name of stored targets .got {got}"):
        resolve_strategy("auto", small_store("random", 1)[0], _two_ranks(), replace(STEPS, input_nodes=targets))


def test_pairs_are_planned_by_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored pairs of a loader, and the settings of a run; two ranks would start from this choice."""
    monkeypatch.setattr(auto, "known_machine", lambda: HOST)
    pairs = store_with_pairs(tmp_path / "links.gsplit")
    planned = replace(STEPS, input_nodes=None, pairs=StoredPairs("train"))
    assert resolve_strategy("auto", pairs, _two_ranks(), planned).strategy in plan._FOR_ANY_MODEL
    settings = TrainSettings(task="link", neg_sampling="joint", fanout=[3, 2], hidden=16, strategy="auto")
    chosen = plan_strategy(settings, ModelShape(5, 64), pairs, _two_ranks())
    assert chosen.strategy != "auto"
    with pytest.raises(InputError, match="pairs/val .got pairs/nothing"):
        resolve_strategy("auto", pairs, _two_ranks(), replace(planned, pairs=StoredPairs("nothing")))


def test_a_device_nobody_knows_must_be_measured(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = "expected a GPU that is known or was measured .got meta.*gsplit doctor --device cuda --out .*device.json"
    with pytest.raises(InputError, match=message):
        resolve_strategy("auto", store, _two_ranks("meta"), STEPS)
    report = {"findings": [{"check": "versions", "found": "GPU meta"}, {"check": "links", "figures": LINKS}]}
    calibration.device_file().parent.mkdir()
    calibration.device_file().write_text(json.dumps(report))
    assert resolve_strategy("auto", store, _two_ranks("meta"), STEPS).strategy in plan._FOR_ANY_MODEL


def test_an_unknown_model_gets_a_strategy_that_runs_any(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "known_machine", lambda: HOST)
    choice = resolve_strategy("auto", store, _two_ranks(), STEPS)
    assert choice.strategy in ("split", "data_cached", "data_cached(strided)", "data", "data(owner)")
    assert "s per step" in choice.reason
    known = resolve_strategy(
        "auto", store, _two_ranks(), replace(STEPS, shape=PlannedModel("gat"), strategies=("hybrid(1)",))
    )
    assert known.strategy == "hybrid(1)"


def test_a_run_with_batch_norm_splits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "known_machine", lambda: HOST)
    settings = TrainSettings(strategy="auto", fanout=[3, 2], batch_size=20, norm="batch_norm")
    assert plan_strategy(settings, ModelShape(8, 4), store, _two_ranks()).strategy == "split"
    assert plan_strategy(replace_strategy(settings, "data"), ModelShape(8, 4), store, _two_ranks()).strategy == "data"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...] | None]:
    """The strategies that the planner was given to choose from, call after call."""
    monkeypatch.setattr(auto, "known_machine", lambda: HOST)
    found: list[tuple[str, ...] | None] = []
    choose = plan.choose

    def note(*args: Any, **options: Any) -> Any:
        found.append(options["strategies"])
        return choose(*args, **options)

    monkeypatch.setattr(auto, "choose", note)
    return found


def test_copies_leave_strategies_that_shuffle_input_rows(store: Store, asked: list[tuple[str, ...] | None]) -> None:
    """The others would be refused by the loader afterwards."""
    settings = TrainSettings(strategy="auto", fanout=[3, 2], batch_size=20, copies="1KB")
    found = plan_strategy(settings, ModelShape(8, 4), store, _two_ranks()).strategy
    assert asked == [("split", "hybrid(1)")] and found in ("split", "hybrid(1)")


@pytest.mark.parametrize("nothing", ["0", "0MB", 0])
def test_no_copies_leave_all_strategies(nothing: int | str, store: Store, asked: list[tuple[str, ...] | None]) -> None:
    NeighborLoader(store, [3, 2], "train", batch_size=20, strategy="auto", copies=nothing, mesh=_two_ranks())
    assert asked == [None]


@pytest.mark.parametrize("local, hosts", [("1", 2), ("2", 1), ("3", 1), ("0", 1), ("", 1)])
def test_hosts_follow_from_what_the_launcher_set(local: str, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert auto._count_hosts(_two_ranks()) == hosts


def replace_strategy(settings: TrainSettings, strategy: str) -> TrainSettings:
    return settings.model_copy(update={"strategy": strategy})
