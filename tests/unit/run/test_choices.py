"""Which loss and metric a run takes from its labels, class weights, and what does not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from gsplit import InputError, from_pyg
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.run.choices import check_labels, choose_loss, fitting_loss, make_loss
from gsplit.run.config import TrainSettings
from gsplit.run.recipe import shape_of
from gsplit.run.results import RunView
from gsplit.run.training import train_run
from gsplit.store.reader import Store

NUM = 120
RNG = np.random.default_rng(0)
X = RNG.normal(size=(NUM, 4)).astype(np.float32)
BITS = (X[:, :3] > 0).astype(np.float32)
LABELS: dict[str, Any] = {
    "classes": (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 1),
    "column": X[:, 0] * 2 + 1.5,
    "columns": X[:, :2] * 2 + 1.5,
    "gaps": np.where(RNG.random((NUM, 3)) < 0.1, np.nan, BITS).astype(np.float32),
    "integers": RNG.integers(0, 5, (NUM, 2)),
}
FITTING = {"classes": "cross_entropy", "column": "mse", "gaps": "bce"}
SETTINGS = TrainSettings(hidden=8, fanout=[3, 3], batch_size=16, epochs=2, lr=0.02, dropout=0.0, evaluate_every=1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    folder, masks = tmp_path_factory.mktemp("stores"), np.arange(NUM) % 4
    edges, found = torch.from_numpy(RNG.integers(0, NUM, (2, 500))), {}
    for name, y in LABELS.items():
        data = Data(x=torch.from_numpy(X), edge_index=edges, y=torch.from_numpy(y))
        data.train_mask, data.val_mask = torch.from_numpy(masks < 3), torch.from_numpy(masks == 3)
        found[name] = from_pyg(data, folder / f"{name}.gsplit")
    return found


class _Notes(RunView):
    def __init__(self) -> None:
        self.text = ""

    def note(self, text: str) -> None:
        self.text += text


@pytest.mark.parametrize("name", FITTING)
def test_a_run_takes_the_loss_that_fits_and_goes_on_with_it(
    stores: dict[str, Store], tmp_path: Path, name: str
) -> None:
    view, store = _Notes(), stores[name]
    whole = train_run(SETTINGS, store, solo_mesh(), None, view=view)
    assert f"loss {FITTING[name]}, metric {whole.metric}: y holds" in view.text
    assert whole.history.losses[-1] < whole.history.losses[0]
    scores = [found.scores["val"] for found in whole.history.evaluations]
    assert whole.best is not None
    assert whole.best.scores["val"] == (min(scores) if FITTING[name] == "mse" else max(scores))
    train_run(SETTINGS.model_copy(update={"epochs": 1}), store, solo_mesh(), tmp_path / "run")
    settings = SETTINGS.model_copy(update={"loss": FITTING[name]})  # as the run has it in its settings
    resumed = train_run(settings, store, solo_mesh(), tmp_path / "run", resume=True)
    assert resumed.history.losses == whole.history.losses and resumed.best == whole.best


def test_errors_that_grow_use_up_patience(stores: dict[str, Store]) -> None:
    settings = SETTINGS.model_copy(update={"epochs": 30, "patience": 2, "lr": 0.3, "metric": "mae,rmse"})
    found = train_run(settings, stores["column"], solo_mesh(), None)
    scores = [evaluation.scores["val"] for evaluation in found.history.evaluations]
    assert 2 < len(scores) < 30 and min(scores[:-2]) <= min(scores[-2:])
    assert all(
        0 < evaluation.scores["val"] <= evaluation.scores["val rmse"] for evaluation in found.history.evaluations
    )


def test_another_metric_is_another_training(stores: dict[str, Store], tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"epochs": 1, "loss": "mse"})
    train_run(settings, stores["column"], solo_mesh(), tmp_path / "run")
    more = settings.model_copy(update={"epochs": 2, "metric": "rmse,mae"})  # the same one first
    assert len(train_run(more, stores["column"], solo_mesh(), tmp_path / "run", resume=True).history.losses) == 12
    other = settings.model_copy(update={"epochs": 3, "metric": "mae"})
    with pytest.raises(InputError, match="the same training .got metric mae instead of rmse"):
        train_run(other, stores["column"], solo_mesh(), tmp_path / "run", resume=True)


def test_what_does_not_fit_is_refused(stores: dict[str, Store]) -> None:
    def refuse(name: str, loss: str, match: str) -> None:
        with pytest.raises(InputError, match=match):
            check_labels(stores[name], "train", loss)

    refuse(
        "column", "cross_entropy", r"one class per vertex, as integers, for --loss cross_entropy .got float32 \[120\]"
    )
    refuse("classes", "mse", r"y: expected columns of floats for --loss mse .got int64 \[120\]")
    refuse("columns", "bce", "y: expected 0, 1 or no label everywhere for --loss bce")
    with pytest.raises(InputError, match="y: expected classes, columns of 0 and 1, or floats .got int64"):
        fitting_loss(stores["integers"], "train")
    whole = stores["columns"]
    for y, match in (
        (np.full((NUM, 2), np.nan), "targets/train: expected a label of every target .got 90 without"),
        (np.full((NUM, 2), np.inf), "y: expected finite values .got inf"),
        (np.zeros((NUM, 2, 2)), "y: expected columns of floats for --loss l1"),
    ):
        with pytest.raises(InputError, match=match):
            check_labels(Store(whole.path, whole.manifest, {**whole.arrays, "y": y}), "train", "l1")
    classes = stores["classes"]
    none = Store(classes.path, classes.manifest.model_copy(update={"num_classes": 0}), dict(classes.arrays))
    with pytest.raises(InputError, match="y: expected at least one class .got 0 classes"):
        shape_of(none, TrainSettings())
    bare = Store(whole.path, whole.manifest, {name: array for name, array in whole.arrays.items() if name != "y"})
    for loss in (None, "mse"):
        with pytest.raises(InputError, match="the store: expected labels to train on .got .*indptr"):
            shape_of(bare, TrainSettings(loss=loss))


@pytest.mark.parametrize("given", ["balanced", "1,2.5,4"])
def test_class_weights_are_those_of_pytorch(stores: dict[str, Store], given: str) -> None:
    store, mesh = stores["classes"], solo_mesh()
    settings = choose_loss(TrainSettings(class_weights=given), store, mesh)
    found: Any = make_loss(settings, store, mesh)
    out, y = torch.randn(50, 3, dtype=torch.float64), torch.arange(50) % 3
    labels = LABELS["classes"][np.arange(NUM) % 4 < 3]
    each = torch.tensor([1, 2.5, 4] if given != "balanced" else labels.size / (3 * np.bincount(labels)))
    values, weight = found(out, y)
    want = torch.nn.functional.cross_entropy(out, y, weight=each.double())
    assert weight is not None
    torch.testing.assert_close((weight * values).sum() / weight.sum(), want, rtol=0, atol=1e-14)


def test_class_weights_that_do_not_fit_are_refused(stores: dict[str, Store]) -> None:
    def refuse(given: str, match: str, **settings: Any) -> None:
        with pytest.raises(InputError, match=match):
            make_loss(TrainSettings(class_weights=given, **settings), stores["classes"], solo_mesh())

    refuse("1,2", "class_weights: expected balanced, or 3 numbers, one per class .got 1,2.", loss="cross_entropy")
    refuse("a,b,c", "class_weights: expected balanced, or 3 numbers", loss="cross_entropy")
    refuse("1,0,2", "class_weights: expected a positive number for every class", loss="cross_entropy")
    refuse("balanced", "class_weights: expected --loss cross_entropy .got mse", loss="mse")
    found: Any = make_loss(TrainSettings(class_weights="1,2,3", loss="cross_entropy"), stores["classes"], solo_mesh())
    with pytest.raises(InputError, match="class_weights: expected 4 numbers .got 3"):
        found(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
