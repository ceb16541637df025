"""Checkpoints that are no files of ours: links, and files that the disk or the memory cannot hold."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

import gsplit.training.checkpoints.files
import gsplit.training.checkpoints.tensor_file
from gsplit.errors import InputError
from gsplit.training.checkpoints.files import CheckpointManifest, CheckpointWriter, read_latest
from gsplit.training.checkpoints.names import checkpoint_path, list_checkpoints, remove_unused, set_newer_aside
from gsplit.training.checkpoints.tensor_file import read_tensor_bytes


def _save(folder: Path, *steps: int) -> None:
    writer = CheckpointWriter(folder, len(steps))
    for step in steps:
        writer.save(step, {"w": torch.full((3,), step)}, CheckpointManifest({}))
    writer.finish()


def test_a_link_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    _save(tmp_path / "other", 9)
    _save(tmp_path / "mine", 5)
    link = checkpoint_path(tmp_path / "mine", 9)
    link.symlink_to(checkpoint_path(tmp_path / "other", 9))
    found = read_latest(tmp_path / "mine")
    assert found.path.name == "step-00000005.safetensors"
    assert len(found.damaged) == 1 and "step-00000009.safetensors: expected a regular file" in found.damaged[0]
    assert read_latest(link).state["w"].tolist() == [9] * 3  # who names it means it


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_a_checkpoint_that_cannot_be_opened_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _save(tmp_path, 5, 10)

    def refuse(path: Path, **options: object) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(gsplit.training.checkpoints.tensor_file, "open_regular", refuse)
    with pytest.raises(
        InputError, match="^.*step-00000010.safetensors: expected a file that can be opened .*try again"
    ):
        read_latest(tmp_path)


def test_only_newer_checkpoints_are_set_aside_also_if_the_one_loaded_has_gone(tmp_path: Path) -> None:
    _save(tmp_path, 90, 100, 110, 120)
    checkpoint_path(tmp_path, 100).unlink()
    set_newer_aside(tmp_path, 100)
    assert list_checkpoints(tmp_path) == [checkpoint_path(tmp_path, 90)]
    aside = sorted(tmp_path.glob("*.unused"))
    assert [path.name[:13] for path in aside] == ["step-00000110", "step-00000120"]
    aside[0].rename(checkpoint_path(tmp_path, 110))
    assert read_latest(tmp_path).state["w"].tolist() == [110] * 3  # nothing of it was lost
    remove_unused(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"lock", *(path.name for path in list_checkpoints(tmp_path))}
    remove_unused(tmp_path / "none")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError()])
def test_a_checkpoint_that_the_disk_or_memory_refuses_costs_the_steps_since_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    _save(tmp_path, 5, 10)

    def read_failing(path: Path, *, follow: bool) -> bytes:
        if path == checkpoint_path(tmp_path, 10):
            raise error
        return read_tensor_bytes(path, follow=follow)

    monkeypatch.setattr(gsplit.training.checkpoints.files, "read_tensor_bytes", read_failing)
    found = read_latest(tmp_path)
    assert found.path == checkpoint_path(tmp_path, 5) and len(found.damaged) == 1
    assert "step-00000010.safetensors: expected a file that can be read (got " in found.damaged[0]
    assert type(error).__name__ in found.damaged[0]


def test_a_file_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    _save(tmp_path, 5)
    num_bytes = 1 << 40
    tensors = {"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    header = json.dumps({"__metadata__": {"sha256": ""}, **tensors}).encode()
    for step, head in ((99_999_998, header), (99_999_999, b"")):  # sparse: nothing of it is on the disk
        path = checkpoint_path(tmp_path, step)
        path.write_bytes(len(head).to_bytes(8, "little") + head)
        os.truncate(path, 8 + len(head) + num_bytes)
    found = read_latest(tmp_path)
    assert found.path == checkpoint_path(tmp_path, 5)
    for step, text in zip((99_999_999, 99_999_998), found.damaged, strict=True):
        assert f"{step}.safetensors: expected a file to read in " in text and "one that takes 2199" in text
