"""Checkpoints that are no files of ours: links, and files that the disk or the memory cannot hold."""

from pathlib import Path

import torch

from gsplit.checkpoints.files import checkpoint_path, read_latest
from gsplit.checkpoints.manifest import Manifest
from gsplit.checkpoints.writer import CheckpointWriter


def _save(folder: Path, *steps: int) -> None:
    writer = CheckpointWriter(folder, len(steps))
    for step in steps:
        writer.save(step, {"w": torch.full((3,), step)}, Manifest({}))
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
