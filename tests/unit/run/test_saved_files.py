"""Run folders from strangers: what is read is bounded by the model, and every refusal has the usual form."""

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gsplit.errors import InputError
from gsplit.run import models
from gsplit.run.config import TrainSettings
from gsplit.run.models import make_model
from gsplit.run.saved_files import read_settings, read_weights
from gsplit.store.importers import npz_file

USUAL = r"^[^\n]+: expected [^\n]+ \(got [^\n]*\)\. Fix: [^\n]+\.$"
SETTINGS: dict[str, Any] = {
    "settings": TrainSettings(model="gin", hidden=7).model_dump(),
    "shape": {"num_features": 4, "num_classes": 2, "num_edge_features": None},
}


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))


def _arrays() -> dict[str, Any]:
    return {name: value.numpy() for name, value in _model().state_dict().items()}


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
    np.savez_compressed(tmp_path / "w.npz", **{name: value.numpy() for name, value in saved.state_dict().items()})
    read_weights(tmp_path / "w.npz", loaded)
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
    "arrays, message",
    [
        ({"0.weight": np.zeros((2, 4), np.float32)}, "got none for 0.bias"),
        (_arrays() | {"more": np.zeros(3)}, "got 'more', which it has not"),
        (_arrays() | {"0.bias": np.zeros(3, np.float32)}, r"0.bias: expected float32 \[2\], .*got float32 \[3\]"),
        (_arrays() | {"0.bias": np.zeros(2)}, r"0.bias: expected float32 \[2\], .*got float64 \[2\]"),
        (_arrays() | {"0.bias": np.array([{}, {}], object)}, "pickled objects, which are not opened"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "w.npz", **arrays)
    _refused(lambda: read_weights(tmp_path / "w.npz", _model()), message)


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = _arrays() | {"0.bias": np.zeros(1 << 26, np.float32)}
    np.savez_compressed(tmp_path / "w.npz", **bomb)
    assert (tmp_path / "w.npz").stat().st_size < 1 << 20
    with monkeypatch.context() as unread:
        unread.delattr(npz_file.NpzMember, "read")
        _refused(lambda: read_weights(tmp_path / "w.npz", _model()), r"0.bias: expected float32 \[2\]")
    member = npz_file.npz_members(tmp_path / "w.npz")["0.bias"]
    monkeypatch.setattr(npz_file, "free_bytes", lambda: 1 << 20)
    _refused(member.read, "at most half of the 1048576 bytes of memory free .got 268435456 bytes")


def test_an_archive_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("a.npy", stream.getvalue())
    _refused(lambda: read_weights(tmp_path / "w.npz", _model()), "a: expected 4398046511232 bytes, .*got 128, packed")
    data = bytearray((tmp_path / "w.npz").read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFF0)  # the directory says so, too
    (tmp_path / "w.npz").write_bytes(data)
    _refused(lambda: read_weights(tmp_path / "w.npz", _model()), "a: expected")
    with zipfile.ZipFile(tmp_path / "w.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", stream.getvalue())
    _refused(lambda: read_weights(tmp_path / "w.npz", _model()), "a: expected")


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
