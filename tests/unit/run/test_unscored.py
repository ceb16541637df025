"""Scores that cannot be: refused before training where the labels tell, left out where only the outputs do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch_geometric.data import Data

from gsplit import InputError, from_pyg
from gsplit.distributed.comm.comm import Call, SoloComm
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.run.config import TrainSettings
from gsplit.run.folder import finished_folder, history_path, load_run
from gsplit.run.results import RunView
from gsplit.run.training import train_run
from gsplit.store.reader import Store

NUM = 80
RNG = np.random.default_rng(0)
X = RNG.normal(size=(NUM, 4)).astype(np.float32)
SPLIT = np.arange(NUM) % 4  # 0 and 1: train, 2: val, 3: test
EDGES = RNG.integers(0, NUM, (2, 300))
SETTINGS = TrainSettings(hidden=8, fanout=[3, 3], batch_size=16, epochs=3, evaluate_every=1, patience=1)


def _store(folder: Path, y: Any, x: Any = X, edges: Any = EDGES) -> Store:
    data = Data(x=torch.from_numpy(x), edge_index=torch.from_numpy(edges), y=torch.from_numpy(y))
    data.train_mask, data.val_mask, data.test_mask = (
        torch.from_numpy(part) for part in (SPLIT < 2, SPLIT == 2, SPLIT == 3)
    )
    return from_pyg(data, folder / "demo.gsplit")


class _Notes(RunView):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_scores_that_are_no_number_lose_no_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = X.copy()
    x[2] = np.nan  # a val vertex that no other vertex reads
    store = _store(tmp_path, X[:, 0].copy(), x, EDGES[:, EDGES[0] != 2])
    view = _Notes()
    found = train_run(SETTINGS, store, solo_mesh(), tmp_path / "run", view=view)
    assert sum("rmse of val is not a finite number" in text for text in view.texts) == 3
    assert "targets/val: rmse is nan and left out of the scores" in caplog.text
    assert found.best is None and len(found.history.losses) == 9  # patience counts scores, of which there are none
    assert [sorted(evaluation.scores) for evaluation in found.history.evaluations] == [["test"]] * 3
    written = json.loads(history_path(tmp_path / "run").read_text())
    assert [sorted(evaluation) for evaluation in written["evaluations"]] == [["epoch", "test"]] * 3
    assert load_run(tmp_path / "run")[0].metric == "rmse"
    weights = load_file(finished_folder(tmp_path / "run") / "weights.safetensors")
    assert all(np.isfinite(value).all() for value in weights.values())


def test_an_area_that_later_lists_do_not_have_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    y = np.where(SPLIT == 3, 0, RNG.integers(0, 2, NUM))
    settings = SETTINGS.model_copy(update={"metric": "accuracy,roc_auc", "epochs": 1})
    found = train_run(settings, _store(tmp_path, y), solo_mesh(), None)
    assert found.best is not None and sorted(found.best.scores) == ["test", "val", "val roc_auc"]
    assert "targets/test: left out of the scores: roc_auc: expected targets of both kinds" in caplog.text


@pytest.mark.parametrize(
    "y, metric, match",
    [
        (RNG.integers(0, 3, NUM), "accuracy,rmse", "metric rmse: expected float labels .got int64"),
        (X[:, 0], "rmse,accuracy", "metric accuracy: expected labels of 0 and 1 .got .* other labels in targets/val"),
        (X[:, 0], "roc_auc", "metric roc_auc: expected labels of 0 and 1 .got .* other labels in targets/val"),
        (np.where(SPLIT == 2, 1, RNG.integers(0, 3, NUM)), "roc_auc", "roc_auc: expected targets/val of both kinds"),
        (np.where(SPLIT == 2, 1, RNG.integers(0, 2, (3, NUM))).T.copy(), "roc_auc", "targets/val of both kinds"),
        (np.where(SPLIT == 2, np.nan, X[:, 0]), "mae", "targets/val: expected at least one label .got 0 labels"),
    ],
)
def test_metrics_that_do_not_fit_are_refused_before_training(tmp_path: Path, y: Any, metric: str, match: str) -> None:
    store, out = _store(tmp_path, y), tmp_path / "run"
    with pytest.raises(InputError, match=match):
        train_run(SETTINGS.model_copy(update={"metric": metric}), store, solo_mesh(), out)
    assert not out.exists()


def test_labels_of_another_ranks_shard_are_checked(tmp_path: Path) -> None:
    class Two(SoloComm):
        """Rank 0 of two, whose peer has a bad shard."""

        def gather_text(self, call: Call, text: str) -> list[str]:
            return [text, "targets/train: 3 without" if call.name == "check labels" else text]

    mesh = replace(solo_mesh(), control=Two())
    with pytest.raises(InputError, match="targets/train: 3 without"):
        train_run(SETTINGS, _store(tmp_path, X[:, 0].copy()), mesh, tmp_path / "run")
    y = np.where(np.arange(NUM) < 9, np.nan, X[:, 0])
    (tmp_path / "own").mkdir()
    with pytest.raises(InputError, match="targets/train: expected a label of every target .got 5 without"):
        train_run(SETTINGS, _store(tmp_path / "own", y), mesh, tmp_path / "run")
