"""The trainer: a step is what one writes by hand; clipping, scheduler, reports, history, and going on from a state."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_graph import CLASSES, WIDTH, Case, make_model, small_store
from torch_geometric.nn import GraphSAGE
from trainer_programs import EachStep

from gsplit import InputError, NeighborLoader, Trainer, evaluate, infer, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.inference.metrics import METRICS
from gsplit.store.in_memory import MemoryStore
from gsplit.training.callbacks import StepReport
from gsplit.training.losses import cross_entropy
from gsplit.training.train_state import Evaluation, History, history_of


def _model() -> GraphSAGE:
    torch.manual_seed(0)
    return parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES, dropout=0.5).double(), solo_mesh())


def _loader(telemetry: Path | None = None) -> NeighborLoader:
    return NeighborLoader(small_store("random", 1)[0], [3, 3], "train", batch_size=12, telemetry=telemetry)


def test_epochs_are_steps_by_hand(tmp_path: Path) -> None:
    by_hand, loader = _model(), _loader()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = batch.mean(*cross_entropy(by_hand(batch.x, batch.edge_index), batch.y))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(float(loss.detach()))

    reports: list[StepReport] = []
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = _loader(tmp_path / "steps.jsonl")
    trainer = Trainer(
        model,
        optimizer,
        watched,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9),
        max_grad_norm=0.3,
        callbacks=[EachStep(reports.append)],
    )
    with watched.telemetry:
        assert trainer.train_epoch() + trainer.train_epoch() == losses == trainer.state.history.losses.tolist()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert [(r.epoch, r.step) for r in reports] == [(e, s) for e in range(2) for s in range(5)]
    assert {"sample", "forward", "backward", "optimizer"} <= reports[0].stages.keys()
    records = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [record["values"]["loss"] for record in records] == losses
    assert records[1]["values"]["learning_rate"] == pytest.approx(0.09)
    assert all(record["values"]["gradient_norm"] > 0 for record in records)


def test_some_steps_only_and_evaluations_are_kept() -> None:
    model = _model()
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), _loader())
    assert len(trainer.train_epoch(max_steps=2)) == 2
    scores = trainer.evaluate(small_store("random", 1)[0], ["train"])
    assert trainer.state.history.evaluations == [Evaluation(1, trainer.state.num_steps, scores)]
    assert trainer.state.best is None
    assert model.training
    assert len(trainer.train_epoch()) == 3  # the rest of the epoch, not the next one
    assert (trainer.state.num_steps, trainer.state.epoch) == (5, 1)
    with pytest.raises(InputError, match="keep_best: expected one of train .got val"):
        trainer.evaluate(small_store("random", 1)[0], ["train"], keep_best="val")


def test_single_steps_are_steps_of_the_training(tmp_path: Path) -> None:
    trainers: list[Trainer] = []
    reports: list[list[StepReport]] = [[], []]
    for number in range(2):
        optimizer = torch.optim.Adam((model := _model()).parameters())
        callbacks = [EachStep(reports[number].append)]
        trainers.append(Trainer(model, optimizer, _loader(), callbacks=callbacks, save_to=tmp_path / str(number)))
    for number, batch in enumerate(trainers[0].state.loader):
        assert trainers[0].train_step(batch) == trainers[0].state.history.losses[-1]
        if number == 2:
            break
    trainers[1].train_epoch(3)
    for trainer in trainers:
        trainer.save()
    assert [report.loss for report in reports[0]] == [report.loss for report in reports[1]]
    states = [trainer.state for trainer in trainers]
    assert states[0].num_steps == 3 and states[0].train_edges == states[1].train_edges > 0
    assert {path.name for path in (tmp_path / "0").glob("step-*")} == {"step-00000003.safetensors"}


def test_one_name_is_a_list_of_one() -> None:
    trainer = Trainer(model := _model(), torch.optim.SGD(model.parameters(), lr=0.1), _loader())
    graph = small_store("random", 1)[0]
    assert trainer.evaluate(graph, "train", keep_best="train") == trainer.evaluate(graph, ["train"])
    assert evaluate(model, graph, "train") == evaluate(model, graph, ["train"])
    with pytest.raises(InputError, match="names: expected at least one name"):
        evaluate(model, graph, [])
    with pytest.raises(InputError, match="keep_best: expected one of train .got tra"):
        trainer.evaluate(graph, "train", keep_best="tra")


def test_no_steps_are_no_steps() -> None:
    trainer = Trainer(model := _model(), torch.optim.SGD(model.parameters(), lr=0.1), _loader())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert trainer.train_epoch(0) == []
    assert (trainer.state.num_steps, trainer.state.train_edges) == (0, 0)
    assert trainer.state.loader.state_dict() == {"epoch": 0, "step": 0}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind, value", [("gat", "edge_attr"), ("graphconv", "edge_weight")])
def test_evaluations_read_the_arrays_of_the_loader(kind: str, value: str) -> None:
    """Under other names than the default ones; labels are what the model says, so that all answers are right."""
    store, _ = small_store("random", 1)
    kept = {name: array for name, array in store.arrays.items() if not name.startswith("edges/")}
    kept |= {"features/z": -store.arrays["features/x"], "edges/own": -4 * store.arrays[f"edges/{value}"]}
    kept["targets/all"] = np.argsort(store.original_ids())
    dtypes = store.dtypes | {"features/z": "float64", "edges/own": "float64", "targets/all": "int64"}
    unlabelled = MemoryStore(store.graph, store.part_boundaries, kept, dtypes)
    names: Any = {"features": "z", value: "own"}
    model = parallelize(make_model(Case(kind, "split", "random", 0.0, None, None, edge_values=True)), solo_mesh())
    labels = infer(model, unlabelled, **names).argmax(1)[store.original_ids()]
    graph = MemoryStore(store.graph, store.part_boundaries, kept | {"y": labels}, dtypes)
    loader = NeighborLoader(graph, [3, 3, 3], "all", batch_size=12, **names)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert trainer.evaluate(graph, ["all"]) == {"all": 1.0}
    for name in names:  # each of them matters
        others = {"features": "x"} if name == "features" else {name: None}
        assert trainer.evaluate(graph, ["all"], **others)["all"] < 1.0


def test_a_loss_that_is_no_number_stops_training() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e300)
    trainer = Trainer(model, optimizer, _loader())
    with pytest.raises(InputError, match="the loss of epoch 0, step 1: expected a number"):
        trainer.train_epoch()
    assert trainer.state.num_steps == trainer.state.loader.state_dict()["step"] == 2  # as many as are in the weights


def test_a_scheduler_that_needs_a_score_is_refused() -> None:
    optimizer = torch.optim.SGD((model := _model()).parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(InputError, match="lr_scheduler: expected one that steps without a score"):
        Trainer(model, optimizer, _loader(), lr_scheduler=schedule)


def test_steps_that_cannot_be_are_refused() -> None:
    model = _model()
    with pytest.raises(InputError, match="max_grad_norm: expected a positive number"):
        Trainer(model, torch.optim.Adam(model.parameters()), _loader(), max_grad_norm=0.0)
    with pytest.raises(InputError, match="accumulate: expected at least 1 mini-batch per step .got 0"):
        Trainer(model, torch.optim.Adam(model.parameters()), _loader(), accumulate=0)
    with pytest.raises(InputError, match="precision: expected float32 or bf16 .got fp16"):
        Trainer(model, torch.optim.Adam(model.parameters()), _loader(), precision="fp16")


def _fresh(norm: str | None = "batch_norm") -> Trainer:
    torch.manual_seed(1)
    model = parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES, dropout=0.5, norm=norm).double(), solo_mesh())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return Trainer(model, optimizer, _loader(), lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7))


def _train(trainer: Trainer, steps: int) -> list[float]:
    """So many steps over as many epochs as that takes, with an evaluation at the end of each."""
    stop, losses = trainer.state.num_steps + steps, list[float]()
    while trainer.state.num_steps < stop:
        losses += trainer.train_epoch(stop - trainer.state.num_steps)
        if trainer.state.loader.state_dict()["step"] == len(trainer.state.loader):
            trainer.evaluate(small_store("random", 1)[0], ["train"], keep_best="train")
    return losses


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file that takes no pickled objects, as a checkpoint would go."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("steps", [3, 5, 7], ids=["inside an epoch", "at its end", "inside the second"])
def test_training_goes_on_from_a_state_bit_for_bit(steps: int) -> None:
    whole, begun, resumed = _fresh(), _fresh(), _fresh()
    losses = _train(whole, 2 * steps)
    first = _train(begun, steps)
    resumed.state.load_state_dict(_saved(begun.state.state_dict()))
    assert first + _train(resumed, steps) == losses == resumed.state.history.losses.tolist()
    assert (resumed.state.num_steps, resumed.state.epoch) == (whole.state.num_steps, whole.state.epoch)
    assert resumed.state.train_edges == whole.state.train_edges > 0
    assert resumed.state.history.evaluations == whole.state.history.evaluations
    for ours, theirs in ((resumed.state.model.state_dict(), whole.state.model.state_dict()), _bests(resumed, whole)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", ["states of another type", "a learning rate in a tensor"])
def test_optimizers_go_on_exactly(kind: str, tmp_path: Path) -> None:
    def make() -> Trainer:
        model = _model()
        if kind == "a learning rate in a tensor":
            optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05))
        else:
            optimizer = torch.optim.NAdam(model.parameters(), lr=0.05)  # mu_product is float32, weights are float64
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return Trainer(model, optimizer, _loader(), lr_scheduler=schedule)

    whole, resumed = make(), make()
    whole.train_epoch(3)
    whole.save(tmp_path)
    resumed.load(tmp_path)
    for ours, theirs in zip(resumed.state.optimizer.state.values(), whole.state.optimizer.state.values(), strict=True):
        assert {name: value.dtype for name, value in ours.items()} == {name: v.dtype for name, v in theirs.items()}
    assert resumed.train_epoch() + resumed.train_epoch() == whole.train_epoch() + whole.train_epoch()


def test_a_step_takes_sixteen_bytes_of_the_history() -> None:
    state = _fresh().state
    state.history = History([1 / 3] * 10, [0.1] * 10)
    assert state.history.losses.itemsize + state.history.step_seconds.itemsize == 16
    state.record_evaluation({"val": 0.5}, None, METRICS["accuracy"])
    packed = state.state_dict()["history"]
    view = np.asarray(state.history.losses)  # with which an array cannot grow
    state.history.add(0.5, 0.2)
    assert state.history.losses.tolist() == [1 / 3] * 10 + [0.5] and view.tolist() == [1 / 3] * 10
    assert state.history.step_seconds.tolist() == [0.1] * 10 + [0.2]
    assert state.history == History([1 / 3] * 10 + [0.5], [0.1] * 10 + [0.2], state.history.evaluations)
    assert packed["losses"].tolist() == [1 / 3] * 10 and history_of({"history": packed}).step_seconds[9] == 0.1
    assert packed["evaluations"] == [{"epoch": 0, "num_steps": 10, "scores": {"val": 0.5}}]


def _bests(*trainers: Trainer) -> tuple[dict[str, torch.Tensor], ...]:
    bests = [trainer.state.best for trainer in trainers]
    assert None not in bests
    assert len({(best.epoch, best.scores["train"]) for best in bests if best is not None}) == 1
    return tuple(best.weights for best in bests if best is not None)


def test_the_best_weights_are_a_copy() -> None:
    trainer = _fresh(norm=None)
    _train(trainer, 5)
    best = trainer.state.best
    assert best is not None
    before = {name: value.clone() for name, value in best.weights.items()}
    trainer.train_epoch(1)
    assert all(torch.equal(best.weights[name], before[name]) for name in before)
    assert not all(torch.equal(value, before[name]) for name, value in trainer.state.model.state_dict().items())


def test_a_state_of_something_else_is_refused() -> None:
    trainer = _fresh()
    state = trainer.state.state_dict()
    with pytest.raises(InputError, match="state: expected the keys model, optimizer, .*got epoch, step"):
        trainer.state.load_state_dict({"epoch": 0, "step": 0})
    with pytest.raises(
        InputError, match="state: lr_scheduler: expected the state of a StepLR, as the trainer has .got None"
    ):
        trainer.state.load_state_dict(state | {"lr_scheduler": None})
    without = Trainer(trainer.state.model, trainer.state.optimizer, trainer.state.loader)
    with pytest.raises(
        InputError, match="state: lr_scheduler: expected None, as the trainer has .got the state of a scheduler"
    ):
        without.state.load_state_dict(state)
