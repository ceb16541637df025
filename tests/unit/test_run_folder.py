"""A run on disk: round trip, refusals, and nothing overwritten by accident."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gsplit.config import TrainSettings
from gsplit.errors import InputError
from gsplit.run_folder import check_new_run, load_run, load_weights, save_run, telemetry_path
from gsplit.trainer import History

SHAPE = {"num_features": 4, "num_classes": 2}


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))


def _save(run: Path) -> torch.nn.Module:
    check_new_run(run, overwrite=False)
    model = _model()
    save_run(run, TrainSettings(model="gin", hidden=7), SHAPE, model.state_dict(), History([1.0], [2.0]))
    telemetry_path(run, 0).write_text("{}\n")
    return model


def test_a_run_comes_back(tmp_path: Path) -> None:
    saved, loaded = _save(tmp_path / "run"), _model()
    settings, shape = load_run(tmp_path / "run")
    assert (settings.model, settings.hidden, shape) == ("gin", 7, SHAPE)
    load_weights(tmp_path / "run", loaded)
    assert all(
        torch.equal(a, b) for a, b in zip(saved.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    assert not list((tmp_path / "run").glob("*partial*"))


def test_nothing_is_overwritten_by_accident(tmp_path: Path) -> None:
    _save(tmp_path / "run")
    with pytest.raises(InputError, match="run: expected an empty or new folder .*pass --overwrite"):
        check_new_run(tmp_path / "run", overwrite=False)
    check_new_run(tmp_path / "run", overwrite=True)
    assert not list((tmp_path / "run").iterdir())
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(InputError, match=r"expected an empty or new folder .got other files.*choose another --out\."):
        check_new_run(tmp_path, overwrite=True)
    with pytest.raises(InputError, match="other files"):
        check_new_run(tmp_path / "thesis.tex", overwrite=True)


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="settings.json: expected the settings of a run"):
        load_run(tmp_path)
    _save(tmp_path / "run")
    with pytest.raises(InputError, match="weights.npz: expected weights of this model"):
        load_weights(tmp_path / "run", torch.nn.Linear(4, 3))
    (tmp_path / "run" / "weights.npz").write_bytes(b"no zip")
    with pytest.raises(InputError, match="weights.npz: expected weights of this model"):
        load_weights(tmp_path / "run", _model())
    (tmp_path / "run" / "weights.npz").unlink()
    with pytest.raises(InputError, match="weights.npz: expected the weights of a run"):
        load_weights(tmp_path / "run", _model())
    np.savez(tmp_path / "run" / "weights.npz", a=np.array([{}], object))
    with pytest.raises(InputError, match="weights.npz: expected weights of this model"):
        load_weights(tmp_path / "run", _model())  # pickles are not read
    (tmp_path / "run" / "settings.json").write_text("{}")
    with pytest.raises(InputError, match=r"settings.json: expected the settings of a run .got others .KeyError"):
        load_run(tmp_path / "run")
