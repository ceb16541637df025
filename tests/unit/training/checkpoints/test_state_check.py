"""States with a right checksum that nobody's training made are refused before anything is touched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_graph import CLASSES, WIDTH, small_store
from torch_geometric.nn import GraphSAGE

from gsplit import InputError, NeighborLoader, Trainer, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.inference.metrics import METRICS
from gsplit.training.checkpoints.files import Checkpoint, read_latest, write_checkpoint
from gsplit.training.checkpoints.state_tree import take_snapshot
from gsplit.training.checkpoints.training import read_on_all_ranks

State = dict[str, Any]


def _trainer(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> Trainer:
    loader = NeighborLoader(small_store("random", 1)[0], [3, 3], "train", batch_size=12)
    model = parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES).double(), solo_mesh())
    return Trainer(model, optimizer(model.parameters(), lr=0.05), loader)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    trainer, folder = _trainer(), tmp_path_factory.mktemp("saved")
    trainer.train_epoch(2)
    trainer.state.record_evaluation({"val": 0.5}, "val", METRICS["accuracy"])
    trainer.save(folder)
    return read_latest(folder)


def _first_moment(state: State, value: object) -> None:
    state["optimizer"]["state"][0]["exp_avg"] = value


FORGED: dict[str, tuple[Callable[[State], object], str]] = {
    "keys": (lambda state: state.pop("loader"), "loader: Field required"),
    "position": (lambda state: state["loader"].update(step="1"), "loader.step: Input should be a valid integer"),
    "edges": (lambda state: state.update(train_edges=-1), "train_edges: Input should be greater"),
    "no position": (lambda state: state.update(loader=[1, 2]), "loader: Input should be a valid dict"),
    "history": (lambda state: state["history"].pop("losses"), "history.losses: Field required"),
    "texts": (
        lambda state: state["history"].update(losses=["a", "b"]),
        r"history.losses.list\[float\].0: Input should be a valid number",
    ),
    "lengths": (
        lambda state: state["history"].update(losses=torch.ones(3, dtype=torch.float64)),
        "history: Value error, 3 losses and 2",
    ),
    "single precision": (
        lambda state: state["history"].update(losses=torch.ones(2)),
        "history: Value error, losses of torch.float32",
    ),
    "a matrix": (
        lambda state: state["history"].update(step_seconds=torch.ones(2, 1, dtype=torch.float64)),
        r"history: Value error, step_seconds of torch.float64, \[2, 1\]",
    ),
    "evaluations": (
        lambda state: state["history"].update(evaluations=[{"epoch": 1}]),
        "history.evaluations.0.num_steps",
    ),
    "best": (lambda state: state["best"].update(scores=3), "best.scores: Input should be a valid dict"),
    "weights": (
        lambda state: state["best"].update(weights={"a": 1}),
        "best.weights.a: Input should be an instance",
    ),
    "model": (lambda state: state["model"].update(a=1), "model.a: Input should be an instance of Tensor"),
    "unknown": (lambda state: state.update(more=1), "more: Extra inputs are not permitted"),
    "optimizer": (
        lambda state: state["optimizer"].update(param_groups=[1]),
        "optimizer.param_groups.0: Input",
    ),
}
OTHERS: dict[str, tuple[Callable[[State], object], str]] = {
    "shapes": (lambda state: state["model"].update({"convs.0.lin_l.bias": torch.ones(3)}), "other weights in model"),
    "best shapes": (lambda state: state["best"].update(weights={}), "other weights in best"),
    "step": (lambda state: state["loader"].update(step=100), "step 100 of an epoch of 5"),
    "groups": (lambda state: state["optimizer"]["param_groups"][0]["params"].pop(), "other groups of parameters"),
    "moments": (lambda state: _first_moment(state, torch.ones(7)), r"optimizer exp_avg of shape \[7\] for"),
}


def _forge(saved: Checkpoint, change: Callable[[State], object], folder: Path) -> Path:
    path = folder / saved.path.name
    state = read_latest(saved.path.parent).state
    change(state)
    write_checkpoint(path, take_snapshot(state), saved.manifest)
    return path


@pytest.mark.parametrize("name", FORGED)
def test_what_is_no_state_is_refused_when_it_is_read(name: str, saved: Checkpoint, tmp_path: Path) -> None:
    change, got = FORGED[name]
    path = _forge(saved, change, tmp_path)
    with pytest.raises(InputError, match=f"safetensors: expected the state of this training .got {got}"):
        read_on_all_ranks(solo_mesh().world, path)


def test_the_state_of_something_else_is_refused_and_nothing_touched(saved: Checkpoint, tmp_path: Path) -> None:
    trainer = _trainer()
    before = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}
    for change, got in OTHERS.values():
        path = _forge(saved, change, tmp_path)
        with pytest.raises(InputError, match=f"safetensors: expected the state of this training .got {got}"):
            trainer.load(path)
    assert trainer.state.num_steps == 0 and not trainer.state.optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in trainer.state.model.state_dict().items())


def test_rows_and_columns_of_a_parameter_are_a_state(tmp_path: Path) -> None:
    trainer, again = _trainer(torch.optim.Adafactor), _trainer(torch.optim.Adafactor)
    trainer.train_epoch(1)
    trainer.save(tmp_path)
    again.load(tmp_path)
    assert again.train_epoch() == trainer.train_epoch()
