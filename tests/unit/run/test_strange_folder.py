"""A run folder from a stranger: going on with it changes no file outside, and never waits."""

import json
import os
from pathlib import Path

import pytest

from gsplit.checkpoints.durable import write_whole
from gsplit.checkpoints.files import checkpoint_path
from gsplit.checkpoints.manifest import Manifest
from gsplit.checkpoints.writer import CheckpointWriter
from gsplit.errors import InputError
from gsplit.run.config import TrainSettings
from gsplit.run.folder import begin_run, continue_run, finish_run, telemetry_path, write_settings
from gsplit.run.layout import checkpoint_folder, training_folder
from gsplit.run.results import ModelShape
from gsplit.train_state import History

SHAPE = ModelShape(num_features=4, num_classes=2)
LINE = json.dumps({"epoch": 0, "step": 0}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a checkpoint, its settings and a line of telemetry."""
    run = tmp_path / "run"
    begin_run(run)
    telemetry_path(run, 0).write_text(LINE)
    writer = CheckpointWriter(checkpoint_folder(training_folder(run)), 2)
    writer.save(1, {}, Manifest({}))
    writer.finish()
    write_settings(run, TrainSettings(), SHAPE)
    return run


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine")
    return path


def test_a_link_at_the_place_of_a_temporary_file_is_not_followed(run: Path, victim: Path) -> None:
    names = ("1/settings.json", "1/steps-rank-0.jsonl", "1/weights.npz", "1/history.json", "current")
    for name in names:
        (run / f"{name}.tmp").symlink_to(victim)
    continue_run(run, (0, 1))
    finish_run(run, TrainSettings(), SHAPE, {}, History([1.0]))
    assert victim.read_text() == "mine"
    assert all((run / name).is_file() and not (run / name).is_symlink() for name in names)
    assert telemetry_path(run, 0).read_text() == LINE


def test_nothing_is_left_of_a_file_whose_pieces_cannot_be_made(victim: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_whole(victim, (bytes(1 // number) for number in (1, 0)))
    assert victim.read_text() == "mine" and [path.name for path in victim.parent.iterdir()] == ["victim"]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("kind, got", [("pipe", "a named pipe"), ("device", "symbolic links"), ("link", "symbolic")])
def test_telemetry_that_is_no_file_is_refused(run: Path, victim: Path, finished: bool, kind: str, got: str) -> None:
    if finished:
        finish_run(run, TrainSettings(), SHAPE, {}, History([1.0]))
    path = run / "1" / "steps-rank-5.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else victim)
    with pytest.raises(InputError, match=f"steps-rank-5.jsonl: expected a regular file .got .*{got}.*remove it"):
        continue_run(run, (0, 1))
    assert victim.read_text() == "mine"


def test_lines_that_are_no_telemetry_are_dropped(run: Path) -> None:
    strange = ["[" * 100_000 + "\n", "x" * (3 << 20) + "\n", json.dumps({"epoch": 0, "step": 0})]
    telemetry_path(run, 0).write_text(LINE + "".join(strange))
    continue_run(run, (0, 1))
    assert telemetry_path(run, 0).read_text() == LINE


@pytest.mark.parametrize("links", [True, False])
def test_a_finished_run_goes_on_with_its_own_files_only(
    run: Path, victim: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    finish_run(run, TrainSettings(), SHAPE, {}, History([1.0]))
    saved = checkpoint_path(run / "1" / "checkpoints", 1)
    if not links:
        monkeypatch.setattr(os, "link", _refuse_to_link)
    continue_run(run, (0, 1))
    going_on = checkpoint_path(run / "2" / "checkpoints", 1)
    assert going_on.read_bytes() == saved.read_bytes() and going_on.samefile(saved) == links
    assert not telemetry_path(run, 0).samefile(run / "1" / "steps-rank-0.jsonl")  # it is written behind
    finish_run(run, TrainSettings(), SHAPE, {}, History([1.0]))
    checkpoint_path(run / "2" / "checkpoints", 2).symlink_to(victim)
    with pytest.raises(InputError, match="step-00000002.safetensors: expected a regular file"):
        continue_run(run, (0, 1))


def _refuse_to_link(*names: object, **options: object) -> None:
    raise PermissionError
