"""A run of link prediction: trained, stopped and resumed bit for bit, inferred, verified, reported; what is refused."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from link_programs import store_with_pairs
from safetensors.numpy import load_file
from typer.testing import CliRunner

import gsplit
from gsplit.cli.main import app
from gsplit.distributed.comm.comm import SoloComm
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.errors import InputError
from gsplit.nn.parallelize import parallelize
from gsplit.report.page import tabulate_runs
from gsplit.report.reading import read_run
from gsplit.run.choices import choose_for_pairs, hint_at_partitioning
from gsplit.run.config import TrainSettings
from gsplit.run.folder import finished_folder, load_run, load_weights, training_folder
from gsplit.run.recipe import build_model, infer_run, verify_run
from gsplit.run.results import RunView, TrainResult
from gsplit.run.training import train_run
from gsplit.store.reader import Store
from gsplit.training.callbacks import StepReport

SETTINGS = TrainSettings(
    task="link",
    hidden=8,
    embedding=6,
    fanout=[3, 3],
    batch_size=64,
    epochs=3,
    lr=0.02,
    ranked_negatives=20,
    evaluate_every=1,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_with_pairs(tmp_path_factory.mktemp("graph") / "links.gsplit")


def _train(store: Store, out: Path | None, view: RunView | None = None, **options: Any) -> TrainResult:
    resume = options.pop("resume", False)
    return train_run(SETTINGS.model_copy(update=options), store, solo_mesh(), out, resume=resume, view=view)


class _Stopping(RunView):
    def __init__(self, after: int) -> None:
        self._left = after

    def on_step(self, report: StepReport) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)


class _Notes(RunView):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_a_run_is_evaluated_kept_inferred_and_reported(store: Store, tmp_path: Path) -> None:
    found = _train(store, tmp_path / "run", loss="bpr")
    assert len(found.history.losses) == 12 and len(found.history.evaluations) == 3
    assert found.best is not None and found.metric == "mrr"
    assert set(found.best.scores) == {"val", "val hits@10", "test", "test hits@10"}
    assert found.best.scores["val"] == max(each.scores["val"] for each in found.history.evaluations)
    settings, shape = load_run(tmp_path / "run")
    assert (settings.loss, settings.neg_sampling, settings.metric) == ("bpr", "triplet", "mrr,hits@10")
    infer_run(tmp_path / "run", store, tmp_path / "z.npy", solo_mesh())
    z = np.load(tmp_path / "z.npy")
    assert z.shape == (300, 6)
    model = build_model(settings, shape, store)
    load_weights(tmp_path / "run", model)  # those of the best epoch
    scores = gsplit.evaluate_links(parallelize(model, solo_mesh()), store, "val", num_negatives=20)
    assert scores["mrr"] == found.best.scores["val"]
    with pytest.raises(InputError, match="--what: expected outputs, for a model trained on pairs .got classes"):
        infer_run(tmp_path / "run", store, tmp_path / "z.csv", solo_mesh(), what="classes")
    run = read_run(tmp_path / "run")
    assert run.best_score == found.best.scores["val"]
    assert tabulate_runs([run]).rows[0][-1] == f"{found.best.scores['val']:.4f}"


@pytest.mark.parametrize("after", [2, 4])  # in an epoch, and at its end before the evaluation
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(store: Store, tmp_path: Path, after: int) -> None:
    whole = _train(store, tmp_path / "whole", neg_sampling="in_batch")
    stopped = _train(store, tmp_path / "run", _Stopping(after), neg_sampling="in_batch")
    assert not stopped.finished and len(stopped.history.losses) == after + 1
    others: list[dict[str, Any]] = [{"pairs": "val"}, {"neg_sampling": "joint"}, {"num_negatives": 2.0}]
    for other in (*others, {"ranked_negatives": 9}):
        with pytest.raises(InputError, match="expected the same training"):
            _train(store, tmp_path / "run", **{"neg_sampling": "in_batch", **other}, resume=True)
    saved = load_run(training_folder(tmp_path / "run"))[0]  # its own settings, whatever was tried
    again = train_run(saved, store, solo_mesh(), tmp_path / "run", resume=True)
    assert again.history.losses == whole.history.losses and again.history.evaluations == whole.history.evaluations
    weights = [load_file(finished_folder(tmp_path / name) / "weights.safetensors") for name in ("run", "whole")]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_a_plan_compares_strategies_for_pairs(store: Store) -> None:
    words = ["--task", "link", "--fanout", "3,3", "--batch-size", "64", "--hardware", "v100-nvlink", "--nproc", "2"]
    done = CliRunner().invoke(app, ["plan", str(store.path), *words, "--json"], catch_exceptions=False)
    found = {each["strategy"]: each for each in json.loads(done.stdout)["candidates"] if each["ranks"] == 2}
    assert found["data"]["rows_loaded"] > found["split"]["rows_loaded"] > 0
    assert found["split"]["rows_sent"] > 0 == found["data"]["rows_sent"]


def test_the_hint_at_partitioning_names_the_pairs(store: Store) -> None:
    world = SoloComm()
    world.size = 2
    view = _Notes()
    settings = choose_for_pairs(SETTINGS.model_copy(update={"loss": "bpr"}), store)
    mesh = Mesh(torch.device("cpu"), world, world, world, world, world, world)
    hint_at_partitioning(store, settings, mesh, view)
    assert "--parts 2 --pairs train --neg-sampling triplet --num-negatives 1 --fanout 3,3" in view.texts[0]


def test_ranks_are_compared_with_one_process(store: Store) -> None:
    for options in ({"pairs": "labelled"}, {"neg_sampling": "joint", "num_negatives": 5.0}):
        found = verify_run(SETTINGS.model_copy(update=options), store, solo_mesh(), steps=2)
        assert found.ok and found.largest_gradient > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "node", "neg_sampling": "binary"}, "neg_sampling: expected a setting of --task node .got binary"),
        ({"task": "node", "loss": "bpr"}, "loss: expected a setting of --task node .got bpr"),
        ({"loss": "mse"}, "loss: expected cross_entropy or bpr for --task link .got mse"),
        ({"loss": "bpr", "neg_sampling": "in_batch"}, "neg_sampling: expected triplet or joint for --loss bpr"),
        ({"neg_sampling": "none"}, "neg_sampling: expected negatives, or pairs with labels .got none"),
        ({"pairs": "labelled", "neg_sampling": "joint"}, "expected none, because the pairs have labels .got joint"),
        ({"pairs": "nothing"}, "pairs/labelled, pairs/test, pairs/train, pairs/val .got pairs/nothing"),
        ({"metric": "accuracy"}, "metric: expected mrr or hits@K for pairs .got accuracy"),
        ({"class_weights": "balanced"}, "class_weights: expected a task with classes"),
        ({"neg_sampling": "triplet", "num_negatives": 0.5}, "expected 1 to 1048576, for triplet .got 0.5"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(store: Store, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _train(store, None, **options)


def test_pairs_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    store = store_with_pairs(tmp_path / "links.gsplit")
    store = gsplit.add_pairs(store, "empty", np.empty((2, 0), np.int64))
    with pytest.raises(InputError, match="pairs/empty: expected at least one pair .got an empty list"):
        _train(store, None, pairs="empty")
    store = gsplit.add_pairs(store, "odd", np.array([[0, 1], [1, 2]]), labels=np.array([1, 7]))
    with pytest.raises(InputError, match="pair_labels/odd: expected labels 0 and 1 .got 7"):
        _train(store, None, pairs="odd")
    only = store_with_pairs(tmp_path / "all.gsplit")
    found = train_run(SETTINGS.model_copy(update={"evaluate_every": None}), only, solo_mesh(), None)
    assert found.best is not None  # evaluated as often as it costs no more than training
