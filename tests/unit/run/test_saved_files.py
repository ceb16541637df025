"""Run folders from strangers: what is read is bounded by the model, and every refusal has the usual form."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gsplit.errors import InputError
from gsplit.run import models
from gsplit.run.config import TrainSettings
from gsplit.run.folder import read_settings, read_weights
from gsplit.run.models import make_model
from gsplit.training.checkpoints.tensor_file import write_tensor_file

USUAL = r"^[^\n]+: expected [^\n]+ \(got [^\n]*\)\. Fix: [^\n]+\.$"
SETTINGS: dict[str, Any] = {
    "settings": TrainSettings(model="gin", hidden=7).model_dump(),
    "shape": {"num_features": 4, "num_classes": 2, "num_edge_features": None},
}


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))


def _refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        act()
    assert raised.match(USUAL)
    assert len(str(raised.value)) < 2000 and str(raised.value).isprintable()


def _changed(*path: str, value: object) -> str:
    document = json.loads(json.dumps(SETTINGS))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(document)


def test_what_is_sound_comes_back(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
    settings, shape = read_settings(tmp_path / "settings.json")
    assert (settings.hidden, shape.num_classes, shape.num_edge_features) == (7, 2, None)
    saved, loaded = _model(), _model()
    write_tensor_file(tmp_path / "w.safetensors", saved.state_dict(), {})
    read_weights(tmp_path / "w.safetensors", loaded)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in saved.state_dict().items())


@pytest.mark.parametrize(
    "text, message",
    [
        ("{}", "settings: Field required"),
        ("[1]", "got a JSON list"),
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 900 + "1" + "}" * 900, "nested deeper than 64"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"a": ' + "9" * 50 + "}", "a number beyond 64 bits in a"),
        ('{"a": Infinity}', "inf in a"),
        ('{"a": 1e999}', "inf in a"),
        ('{"a": NaN}', "nan in a"),
        ("\x00", "Expecting value"),
        (_changed("shape", value=[]), "shape: Input should be"),
        (_changed("shape", "num_classes", value=10**15), "shape.num_classes: Input should be less than"),
        (_changed("shape", "num_classes", value=-1), "shape.num_classes"),
        (_changed("shape", "num_features", value="4"), "shape.num_features"),
        (_changed("settings", "lr", value=1e300), "settings.lr: expected less than or equal to"),
        (_changed("settings", "hidden", value=10**15), "settings.hidden: expected less than or equal to"),
        (_changed("settings", "fanout", value=[1] * 3000), "settings.fanout: expected List should have at most 64"),
        (_changed("settings", "targets", value="x" * 10**5), "settings.targets: expected String should have at most"),
        (_changed("settings", "\x1b[2J", value=1), r"settings.\\x1b\[2J: expected a setting that exists"),
        (_changed("settings", value=7), "settings: Input should be a valid dict"),
    ],
)
def test_hostile_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    _refused(lambda: read_settings(tmp_path / "settings.json"), message)


def test_only_regular_files_of_a_run_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "outside").write_text(json.dumps(SETTINGS))
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    for name in ("pipe", "zeros", "folder", "link", "large", "none"):
        _refused(lambda name=name: read_settings(tmp_path / name), f"{name}: expected")  # type: ignore[misc]
        _refused(lambda name=name: read_weights(tmp_path / name, _model()), f"{name}: expected")  # type: ignore[misc]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"0.bias": None}, "expected weights of this model .got no 0.bias"),
        ({"more": torch.zeros(3)}, "got 'more', which the model does not have"),
        ({"0.bias": torch.zeros(3)}, r"0.bias: expected float32 \[2\], .*got float32 \[3\]"),
        ({"0.bias": torch.zeros(2).double()}, r"0.bias: expected float32 \[2\], .*got float64 \[2\]"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    weights = {name: value for name, value in (_model().state_dict() | change).items() if value is not None}
    write_tensor_file(tmp_path / "w.safetensors", weights, {})
    _refused(lambda: read_weights(tmp_path / "w.safetensors", _model()), message)


def test_weights_larger_than_the_model_are_not_read(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "w.safetensors", {"0.bias": torch.zeros(1 << 23)}, {})
    _refused(lambda: read_weights(tmp_path / "w.safetensors", _model()), "expected at most 167.* bytes .got 335")


def test_pickles_and_damaged_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    torch.save(_model().state_dict(), path)
    _refused(lambda: read_weights(path, _model()), "expected tensors as they were written")
    write_tensor_file(path, _model().state_dict(), {})
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    _refused(lambda: read_weights(path, _model()), "the checksum differs")


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"in_channels": 4, "hidden_channels": 8, "num_layers": 2}
    _refused(lambda: make_model("sage", **sizes, out_channels=10**15), "the model: expected at most .* bytes")
    _refused(lambda: make_model("gin", **sizes, out_channels=10**18), "the model: expected weights that fit")
    monkeypatch.setattr(models, "free_bytes", lambda: 100)
    _refused(lambda: make_model("sage", **sizes, out_channels=3), "the model: expected at most 100 bytes of weights")


def test_checking_the_size_does_not_change_the_weights() -> None:
    sizes: dict[str, Any] = {"in_channels": 4, "hidden_channels": 8, "num_layers": 2, "out_channels": 3}
    torch.manual_seed(0)
    made = make_model("sage", **sizes).state_dict()
    torch.manual_seed(0)
    from torch_geometric.nn import GraphSAGE

    plain = GraphSAGE(**sizes).state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in made.items())
