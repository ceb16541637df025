"""``gsplit train``, ``infer`` and ``verify`` on a heterogeneous store, as a user runs them on ranks."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_scripts import run_forked, run_ranks_forked
from safetensors.numpy import load_file
from typed_models import COUNTS, make_data

import gsplit
from gsplit.run.folder import finished_folder

SMALL = ["--targets", "paper/train", "--hidden", "8", "--fanout", "3,2", "--batch-size", "12", "--lr", "0.02"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    data = make_data()
    for name in COUNTS:
        data[name].x = data[name].x.float()
    place = torch.arange(COUNTS["paper"]) % 3
    for number, name in enumerate(("train", "val", "test")):
        data["paper"][f"{name}_mask"] = place == number
    folder = tmp_path_factory.mktemp("graph")
    plain = gsplit.from_pyg(data, folder / "g.gsplit")
    options: dict[str, Any] = {"batch_size": 12, "solver": "random", "objective": "random", "epochs": 1}
    return str(gsplit.partition(plain, folder / "p.gsplit", 4, [3, 2], "paper/train", **options).path)


def _json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_losses_scores_and_predictions_do_not_depend_on_the_ranks(store: str, tmp_path: Path) -> None:
    """And a run of two ranks that is resumed has the bits of one that was not."""

    def train(*words: str) -> Any:
        return _json(run_forked(["-m", "gsplit", "train", store, *words, "--json"], tmp_path))

    once = [*SMALL, "--evaluate-every", "1"]
    one = train(*once, "--epochs", "3", "--out", str(tmp_path / "one"))
    two = train(*once, "--epochs", "3", "--nproc", "2", "--out", str(tmp_path / "two"))
    part = ["--nproc", "2", "--out", str(tmp_path / "part"), "--max-restarts", "1"]
    begun = train(*once, "--epochs", "1", *part)
    again = train("--resume", str(tmp_path / "part"), "--epochs", "3", "--nproc", "2")
    assert (one["ranks"], two["ranks"], one["steps"], begun["steps"]) == (1, 2, 15, 5)
    assert one["losses"] == pytest.approx(two["losses"], abs=1e-5)
    assert [found["paper/test"] for found in one["evaluations"]] == pytest.approx(
        [found["paper/test"] for found in two["evaluations"]], abs=0.021
    )
    assert again["losses"] == two["losses"] and again["evaluations"] == two["evaluations"]
    whole, resumed = (load_file(finished_folder(tmp_path / name) / "weights.safetensors") for name in ("two", "part"))
    assert all(np.array_equal(value, resumed[name]) for name, value in whole.items())
    outs = []
    for nproc in ("1", "2"):
        out = tmp_path / f"{nproc}.npy"
        words = ["infer", store, "--weights", str(tmp_path / "two"), "--out", str(out), "--nproc", nproc, "--json"]
        assert _json(run_forked(["-m", "gsplit", *words], tmp_path))["rows"] == COUNTS["paper"]
        outs.append(np.load(out))
    assert np.abs(outs[0] - outs[1]).max() < 1e-5 < np.abs(outs[0]).max()


@pytest.mark.parametrize(
    ("ranks", "more"), [(3, ["--model", "gat"]), (4, ["--replicas", "2", "--strategy", "hybrid(1)"])]
)
def test_ranks_equal_one_process(store: str, ranks: int, more: list[str], tmp_path: Path) -> None:
    first, *_ = run_ranks_forked(["-m", "gsplit", "verify", store, *SMALL, *more, "--json"], ranks, tmp_path)
    found = json.loads(first)
    assert found["ok"] is True and found["ranks"] == ranks
    assert 0 < found["max_grad_error"] < 1e-9 and found["max_loss_error"] < 1e-9
