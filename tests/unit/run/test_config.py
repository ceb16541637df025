"""Settings from a file and from flags; what is wrong is named by its key."""

from pathlib import Path
from typing import Any

import pytest

from gsplit.errors import InputError
from gsplit.run.config import TrainSettings, load_settings


def test_flags_come_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "gat"\nlr = 0.01\nfanout = [10, 5]\n')
    settings = load_settings(path, {"lr": 0.5})
    assert (settings.model, settings.lr, settings.num_layers) == ("gat", 0.5, 2)
    assert load_settings(None, {}) == TrainSettings()


def test_new_epochs_replace_the_steps_of_a_resumed_run(tmp_path: Path) -> None:
    path, run = tmp_path / "more.toml", TrainSettings(steps=100)
    path.write_text("epochs = 20\n")
    assert load_settings(path, {}, run).steps is None and load_settings(None, {"epochs": 20}, run).steps is None
    assert load_settings(path, {"steps": 300}, run).steps == 300 and load_settings(None, {}, run).steps == 100


@pytest.mark.parametrize(
    "text, given, message",
    [
        (
            "layers = 3",
            {},
            r"run.toml: layers: expected a setting that exists .got 3.*use one of task, model",
        ),
        ("lr = -1", {}, r"run.toml: lr: expected greater than 0 .got -1"),
        ("", {"dropout": 1.0}, r"^dropout: expected less than 1 .got 1"),
        ("fanout = []", {}, r"run.toml: fanout: expected List should have at least 1 item"),
        ("lr_scheduler = 'linear'", {}, r"run.toml: lr_scheduler: expected 'constant' or 'cosine' .got linear"),
        ("lr = inf", {}, r"run.toml: expected settings in TOML .got inf in lr"),
        ("lr = = 1", {}, r"run.toml: expected settings in TOML .got Invalid value"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, given: dict[str, Any], message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_settings(path, given)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere.toml: expected settings in TOML .got No such file"):
        load_settings(tmp_path / "nowhere.toml", {})
