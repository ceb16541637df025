"""A run on disk: round trip, refusals, and nothing overwritten by accident."""

from pathlib import Path

import pytest
import torch

from gsplit.errors import InputError
from gsplit.run.config import TrainSettings
from gsplit.run.folder import begin_run, check_new_run, finish_run, load_run, load_weights, telemetry_path
from gsplit.run.results import ModelShape
from gsplit.train_state import History

SHAPE = ModelShape(num_features=4, num_classes=2)


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))


def _save(run: Path) -> torch.nn.Module:
    check_new_run(run, overwrite=False)
    begin_run(run)
    telemetry_path(run, 0).write_text("{}\n")
    model = _model()
    finish_run(run, TrainSettings(model="gin", hidden=7), SHAPE, model.state_dict(), History([1.0], [2.0]))
    return model


def test_a_run_comes_back(tmp_path: Path) -> None:
    saved, loaded = _save(tmp_path / "run"), _model()
    settings, shape = load_run(tmp_path / "run")
    assert (settings.model, settings.hidden, shape) == ("gin", 7, SHAPE)
    load_weights(tmp_path / "run", loaded)
    assert all(
        torch.equal(a, b) for a, b in zip(saved.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run" / "steps-rank-0.jsonl").exists()


def test_nothing_is_overwritten_by_accident(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _save(run)
    with pytest.raises(InputError, match="run: expected an empty or new folder .*pass --overwrite"):
        check_new_run(run, overwrite=False)
    check_new_run(run, overwrite=True)
    begin_run(run)
    load_run(run)  # still there while the next one is being made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.partial"]
    begin_run(run)  # what was cut off is swept away
    finish_run(run, TrainSettings(model="sage"), SHAPE, _model().state_dict(), History())
    assert load_run(run)[0].model == "sage"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(InputError, match=r"expected an empty or new folder .got other files.*choose another --out\."):
        check_new_run(tmp_path, overwrite=True)
    with pytest.raises(InputError, match="got a file"):
        check_new_run(tmp_path / "thesis.tex", overwrite=True)
    (tmp_path / "book.partial").mkdir()
    (tmp_path / "book.partial" / "chapter.tex").write_text("text")
    with pytest.raises(InputError, match="book.partial: expected nothing, or what a run left"):
        begin_run(tmp_path / "book")
