"""A run folder from a stranger: going on with it changes no file outside, and never waits."""

import json
import os
from pathlib import Path

import pytest

import gsplit.run.folder
from gsplit.errors import InputError
from gsplit.files.atomic import write_atomic
from gsplit.run.config import TrainSettings
from gsplit.run.folder import (
    begin_run,
    check_new_run,
    checkpoint_folder,
    continue_run,
    finish_run,
    latest_checkpoint,
    load_run,
    lock_run,
    telemetry_path,
    training_folder,
    write_settings,
)
from gsplit.run.results import ModelShape
from gsplit.training.checkpoints.files import CheckpointManifest, CheckpointWriter
from gsplit.training.checkpoints.names import checkpoint_path
from gsplit.training.train_state import History

SHAPE = ModelShape(num_features=4, num_classes=2)
LINE = json.dumps({"epoch": 0, "step": 0}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a checkpoint, its settings and a line of telemetry."""
    run = tmp_path / "run"
    begin_run(run)
    telemetry_path(run, 0).write_text(LINE)
    writer = CheckpointWriter(checkpoint_folder(training_folder(run)), 2)
    writer.save(1, {}, CheckpointManifest({}))
    writer.finish()
    write_settings(run, TrainSettings(), SHAPE)
    return run


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine")
    return path


def test_a_link_at_the_place_of_a_temporary_file_is_not_followed(run: Path, victim: Path) -> None:
    names = ("1/settings.json", "1/steps-rank-0.jsonl", "1/weights.safetensors", "1/history.json", "current")
    for name in names:
        (run / f"{name}.0123abcd.tmp").symlink_to(victim)
    continue_run(run, (0, 1))
    finish_run(run, TrainSettings(), SHAPE, {}, History([1.0]))
    assert victim.read_text() == "mine"
    assert all((run / name).is_file() and not (run / name).is_symlink() for name in names)
    assert telemetry_path(run, 0).read_text() == LINE


def test_nothing_is_left_of_a_file_whose_pieces_cannot_be_made(victim: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_atomic(victim, (bytes(1 // number) for number in (1, 0)))
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


def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "lock").symlink_to(victim)
    refused = pytest.raises(InputError, match="lock: expected a file to lock .got .*remove it")
    with refused, lock_run(tmp_path):
        pytest.fail("it is locked")


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
        monkeypatch.setattr(os, "link", _refuse)
    continue_run(run, (0, 1))
    going_on = checkpoint_path(run / "2" / "checkpoints", 1)
    assert going_on.read_bytes() == saved.read_bytes() and going_on.samefile(saved) == links
    assert not telemetry_path(run, 0).samefile(run / "1" / "steps-rank-0.jsonl")  # it is written behind
    finish_run(run, TrainSettings(), SHAPE, {}, History([1.0]))
    checkpoint_path(run / "2" / "checkpoints", 2).symlink_to(victim)
    with pytest.raises(InputError, match="step-00000002.safetensors: expected a regular file"):
        continue_run(run, (0, 1))


def _refuse(*names: object, **options: object) -> None:
    raise PermissionError


def test_a_kill_while_a_finished_run_is_made_longer_leaves_it_able_to_go_on(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_run(run, TrainSettings(hidden=7), SHAPE, {}, History([1.0]))
    monkeypatch.setattr(gsplit.run.folder, "write_atomic", _refuse)  # the first thing in its new folder
    with pytest.raises(PermissionError):
        continue_run(run, (0, 1))
    assert training_folder(run) == run / "2" and latest_checkpoint(run) is not None
    assert load_run(run / "2")[0].hidden == 7


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_training_that_is_no_folder_is_refused(tmp_path: Path, victim: Path, kind: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if kind == "file":
        (run / "1").write_text("")
    else:
        (run / "1").symlink_to(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(InputError, match="run: expected an empty or new folder .got other files"):
            check_new_run(run, overwrite=overwrite)
    assert latest_checkpoint(run) is None and victim.exists()


def test_going_on_does_not_leave_the_folder(run: Path, tmp_path: Path) -> None:
    (run / "2").symlink_to(tmp_path)
    (run / "3").write_text("")
    assert training_folder(run) == run / "1"
    finish_run(run, TrainSettings(), SHAPE, {}, History([1.0]))
    continue_run(run, (0, 1))
    assert training_folder(run) == run / "4"
    (run / "4" / "checkpoints").rename(tmp_path / "other")
    (run / "4" / "checkpoints").symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match="4/checkpoints: expected a folder .got a link"):
        continue_run(run, (0, 1))
