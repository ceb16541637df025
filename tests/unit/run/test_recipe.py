"""From settings to a run: what is refused before training, and the hint at partitioning."""

from pathlib import Path

import pytest
import torch

from gsplit import InputError
from gsplit.distributed.comm.comm import SoloComm
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.run.choices import hint_at_partitioning
from gsplit.run.config import TrainSettings
from gsplit.run.recipe import build_model, shape_of
from gsplit.run.results import RunView
from gsplit.run.training import train_run
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return build_store(synthetic_source(PlantedGraph(200, 900, num_features=4)), tmp_path / "demo.gsplit")


class Notes(RunView):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def _ranks(size: int, replicas: int = 1) -> Mesh:
    world, inner = SoloComm(), SoloComm()
    world.size, inner.size = size, size // replicas
    return Mesh(torch.device("cpu"), inner, inner, inner, world, world, world, 0, replicas)


def test_the_hint_is_a_command_for_this_store_and_comes_only_where_it_helps(store: Store) -> None:
    def said(mesh: Mesh, **settings: object) -> list[str]:
        view = Notes()
        hint_at_partitioning(store, TrainSettings(**settings), mesh, view)
        return view.texts

    made = store.path.with_name("demo-4.gsplit")
    options = "--parts 4 --targets train --fanout 5,3 --batch-size 64"
    (text,) = said(_ranks(4), fanout=[5, 3], batch_size=64)
    assert text.endswith(f"gsplit partition {store.path} {made} {options}")
    assert said(solo_mesh()) == said(_ranks(4), strategy="data") == said(_ranks(2, replicas=2)) == []


def test_edge_weights_need_a_model_that_takes_them(store: Store) -> None:
    settings = TrainSettings(model="sage", edge_weight="w")
    with pytest.raises(
        InputError, match=r"edge_weight: expected a model that takes weights, gcn or graphconv .got sage"
    ):
        build_model(settings, shape_of(store, settings), store)


def test_evaluations_need_targets_to_evaluate_on(tmp_path: Path) -> None:
    whole = build_store(synthetic_source(PlantedGraph(200, 900, num_features=4)), tmp_path / "w.gsplit")
    arrays = {name: array for name, array in whole.arrays.items() if name not in ("targets/val", "targets/test")}
    bare = Store(whole.path, whole.manifest, arrays)
    with pytest.raises(
        InputError,
        match=r"evaluate_every: expected val targets .*with neither val nor test",
    ):
        train_run(TrainSettings(fanout=[2], hidden=4, evaluate_every=1), bare, solo_mesh(), None)
