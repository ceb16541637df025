"""The trainer: a step is what one writes by hand; clipping, schedule, reports and history."""

import json
from pathlib import Path

import pytest
import torch
from torch_geometric.nn import GraphSAGE

from gsplit import InputError, NeighborLoader, Trainer, parallelize
from gsplit.bench.exactness import CLASSES, WIDTH, small_store
from gsplit.distributed.mesh import solo_mesh
from gsplit.trainer import StepReport, per_target_cross_entropy


def _model() -> GraphSAGE:
    torch.manual_seed(0)
    return parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES, dropout=0.5).double(), solo_mesh())


def _loader(telemetry: Path | None = None) -> NeighborLoader:
    return NeighborLoader(small_store("random", 1)[0], [3, 3], "train", 12, telemetry=telemetry, quiet=True)


def test_epochs_are_steps_by_hand(tmp_path: Path) -> None:
    by_hand, loader = _model(), _loader()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = batch.mean(per_target_cross_entropy(by_hand(batch.x, batch.edge_index), batch.y))
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
        mesh=solo_mesh(),
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9),
        clip_norm=0.3,
        observer=reports.append,
    )
    with watched.telemetry:
        assert trainer.train_epoch() + trainer.train_epoch() == losses == trainer.history.losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert [(r.epoch, r.step) for r in reports] == [(e, s) for e in range(2) for s in range(5)]
    assert {"sample", "forward", "backward", "optimizer"} <= reports[0].stages.keys()
    records = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [record["values"]["loss"] for record in records] == losses
    assert records[1]["values"]["learning_rate"] == pytest.approx(0.09)
    assert all(record["values"]["gradient_norm"] > 0 for record in records)


def test_some_steps_only_and_evaluations_are_kept() -> None:
    model = _model()
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), _loader(), mesh=solo_mesh())
    assert len(trainer.train_epoch(max_steps=2)) == 2
    scores = trainer.evaluate(small_store("random", 1)[0], ["train"])
    assert trainer.history.evaluations == [{"epoch": 1, **scores}]
    assert model.training


def test_a_loss_that_is_no_number_stops_training() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e300)
    trainer = Trainer(model, optimizer, _loader(), mesh=solo_mesh())
    with pytest.raises(InputError, match="the loss of epoch 0, step 1: expected a number"):
        trainer.train_epoch()


def test_a_clip_norm_of_nothing_is_refused() -> None:
    model = _model()
    with pytest.raises(InputError, match="clip_norm: expected a positive number"):
        Trainer(model, torch.optim.Adam(model.parameters()), _loader(), mesh=solo_mesh(), clip_norm=0.0)
