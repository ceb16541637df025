"""The file of a checkpoint: safetensors as anybody reads it, whole or refused, and never a pickle."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gsplit.errors import InputError
from gsplit.training.checkpoints.tensor_file import TensorFile, parse_tensor_file, read_tensor_bytes, write_tensor_file

TENSORS = {
    "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "number": torch.tensor(7),
    "nothing": torch.empty(0, 4, dtype=torch.float64),
}


def _write(path: Path) -> bytes:
    write_tensor_file(path, TENSORS, {"note": "é"})
    return path.read_bytes()


def _read(path: Path) -> TensorFile:
    return parse_tensor_file(read_tensor_bytes(path), path)


def test_tensors_and_texts_come_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    _write(tmp_path / "a")
    found = _read(tmp_path / "a")
    assert found.texts == {"note": "é"}
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor)
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_it_is_the_safetensors_format(tmp_path: Path) -> None:
    """Read as its specification says, without our reader: length, JSON, tensors without gaps and aligned."""
    data = _write(tmp_path / "a")
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and all(isinstance(text, str) for text in header.pop("__metadata__").values())
    start, stop = header["weight"]["data_offsets"]
    values = np.frombuffer(data[8 + length :][start:stop], "<f4").reshape(header["weight"]["shape"])
    assert header["weight"]["dtype"] == "F32" and (values == TENSORS["weight"].numpy()).all()
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert [0, *(end for _, end in spans)] == [*(begin for begin, _ in spans), len(data) - 8 - length]
    assert header["number"]["data_offsets"][0] % 8 == 0 == start % 4


def test_every_changed_byte_and_every_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    data = _write(path)
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(InputError, match="a: expected tensors as they were written .*damaged"):
            _read(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(InputError, match="a: expected tensors as they were written"):
            _read(path)
    path.write_bytes(data + b"x")
    with pytest.raises(InputError, match="expected tensors as they were written"):
        _read(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**15], "data_offsets": [0, 4 * 10**15]},
        {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]},
        {"dtype": "O", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        [],
    ],
)
def test_headers_from_strangers_ask_for_nothing(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"a": entry, "__metadata__": {"sha256": ""}}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match="a: expected tensors as they were written"):
        _read(tmp_path / "a")


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: expected a regular file"):
        _read(tmp_path / "pipe")
    with pytest.raises(InputError, match="none: expected a regular file .got No such file"):
        _read(tmp_path / "none")
    deep = b"[" * 100_000
    (tmp_path / "deep").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(InputError, match="deep: expected tensors as they were written"):
        _read(tmp_path / "deep")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = _write(tmp_path / "a")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError):
        write_tensor_file(tmp_path / "a", {}, {})
    assert (tmp_path / "a").read_bytes() == before


def test_a_header_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsplit.training.checkpoints.tensor_file.MAX_HEADER_BYTES", 256)
    with pytest.raises(InputError, match="a: expected at most 256 bytes beside the tensors"):
        write_tensor_file(tmp_path / "a", {}, {"text": "x" * 256})
    assert not list(tmp_path.iterdir())
