"""A run on disk: round trip, refusals, and nothing overwritten by accident."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from gsplit.errors import InputError
from gsplit.files.rotated import older_file
from gsplit.run.config import TrainSettings
from gsplit.run.folder import (
    begin_run,
    check_new_run,
    checkpoint_folder,
    continue_run,
    finish_run,
    latest_checkpoint,
    list_trainings,
    load_run,
    load_weights,
    lock_run,
    run_of_training,
    telemetry_files,
    telemetry_path,
    training_folder,
    trainings_with_checkpoints,
)
from gsplit.run.results import ModelShape
from gsplit.training.checkpoints.files import CheckpointManifest, CheckpointWriter
from gsplit.training.checkpoints.names import checkpoint_path
from gsplit.training.train_state import History

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
    assert [path.name for path in telemetry_files(tmp_path / "run")] == ["steps-rank-0.jsonl"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1", "current"]
    load_run(tmp_path / "run" / "1")  # the folder itself can be handed on


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    check_new_run(tmp_path, overwrite=False)
    begin_run(tmp_path)
    model = _model()
    name, parameter = next(iter(model.named_parameters()))
    parameter.data.view(-1)[0] = float("nan")
    finish_run(tmp_path, TrainSettings(model="gin", hidden=7), SHAPE, model.state_dict(), History([1.0], [2.0]))
    with pytest.raises(InputError, match=f"weights.safetensors: expected weights of this model .got NaN in {name}"):
        load_weights(tmp_path, _model())


def test_nothing_is_overwritten_by_accident(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _save(run)
    with pytest.raises(InputError, match="run: expected an empty or new folder .*pass --overwrite"):
        check_new_run(run, overwrite=False)
    check_new_run(run, overwrite=True)
    begin_run(run)
    load_run(run)  # still there while the next one is being made
    begin_run(run)  # what was cut off is swept away
    assert sorted(path.name for path in run.iterdir()) == ["1", "2", "current"]
    finish_run(run, TrainSettings(model="sage"), SHAPE, _model().state_dict(), History())
    assert load_run(run)[0].model == "sage"
    assert sorted(path.name for path in run.iterdir()) == ["2", "current"]
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(InputError, match=r"expected an empty or new folder .got other files.*choose another --out\."):
        check_new_run(tmp_path, overwrite=True)
    with pytest.raises(InputError, match="got a file"):
        check_new_run(tmp_path / "thesis.tex", overwrite=True)
    (run / "2" / "notes.txt").write_text("text")
    with pytest.raises(InputError, match="got other files"):
        check_new_run(run, overwrite=True)


def test_an_unfinished_run_is_nothing_until_it_has_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin_run(run)
    check_new_run(run, overwrite=False)
    assert latest_checkpoint(run) is None
    checkpoint = _add_checkpoint(run, 3)
    assert latest_checkpoint(run) == checkpoint
    with pytest.raises(InputError, match="got an unfinished run with checkpoints.*--resume .*run, choose another"):
        check_new_run(run, overwrite=False)
    check_new_run(run, overwrite=True)


def test_an_unfinished_run_stays_until_the_one_that_replaces_it_is_finished(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (1, 2):
        begin_run(run)
        _add_checkpoint(run, number)
    begin_run(run)
    assert [training.name for training in list_trainings(run)] == ["3", "2"]
    assert latest_checkpoint(run) is None and trainings_with_checkpoints(run) == [run / "2"]
    with pytest.raises(InputError, match="got an unfinished run with checkpoints"):
        check_new_run(run, overwrite=False)
    begin_run(run)  # the third has left nothing
    assert [training.name for training in list_trainings(run)] == ["3", "2"]
    finish_run(run, TrainSettings(), SHAPE, {}, History([1.0]))
    assert list_trainings(run) == [run / "3"]


def test_a_training_is_told_from_a_run(tmp_path: Path) -> None:
    _save(tmp_path / "run")
    _save(tmp_path / "7")
    assert run_of_training(tmp_path / "run" / "1") == tmp_path / "run"
    assert run_of_training(tmp_path / "run") is None and run_of_training(tmp_path / "7") is None
    assert run_of_training(tmp_path / "run" / "2") is None


def _add_checkpoint(run: Path, step: int) -> Path:
    writer = CheckpointWriter(checkpoint_folder(training_folder(run)), 2)
    writer.save(step, {}, CheckpointManifest({}))
    writer.finish()
    return checkpoint_path(checkpoint_folder(training_folder(run)), step)


def _telemetry(path: Path) -> tuple[list[str], list[str]]:
    """The lines of the older file and of this one."""
    return older_file(path).read_text().splitlines(keepends=True), path.read_text().splitlines(keepends=True)


def test_going_on_keeps_the_telemetry_before_the_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin_run(run)
    lines = [json.dumps({"epoch": epoch, "step": step}) + "\n" for epoch in (0, 1) for step in range(4)]
    telemetry_path(run, 0).write_text("".join(lines[5:]) + '{"epoch": 2, "st')
    older_file(telemetry_path(run, 0)).write_text("".join(lines[:5]))
    checkpoint = _add_checkpoint(run, 6)
    continue_run(run, (1, 2))
    assert _telemetry(telemetry_path(run, 0)) == (lines[:5], lines[5:6])
    finish_run(run, TrainSettings(), SHAPE, {}, History([1.0]))
    continue_run(run, (1, 0))  # once more: the finished one stays until this is finished, too
    assert latest_checkpoint(run) == run / "2" / "checkpoints" / checkpoint.name
    assert _telemetry(telemetry_path(run, 0)) == (lines[:4], [])
    assert _telemetry(telemetry_files(run)[0]) == (lines[:5], lines[5:6])
    finish_run(run, TrainSettings(), SHAPE, {}, History([1.0, 2.0]))
    assert sorted(path.name for path in run.iterdir()) == ["2", "current"]


def test_a_kill_at_any_call_of_the_system_leaves_a_whole_run(tmp_path: Path) -> None:
    """A process that finishes a second run ends at its n-th change of the disk, for every n until it gets through."""
    for number in range(1, 100):
        run = tmp_path / str(number) / "run"
        _save(run)
        child = os.fork()
        if child == 0:
            _finish_until(run, number)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        settings, _ = load_run(run)
        load_weights(run, _model())
        check_new_run(run, overwrite=True)
        begin_run(run)  # and the next one finds its way
        finish_run(run, TrainSettings(model="gat"), SHAPE, _model().state_dict(), History())
        assert load_run(run)[0].model == "gat"
        assert len(list_trainings(run)) == 1
        if ended == 0:
            assert settings.model == "sage" and number > 8
            return
        assert settings.model in ("gin", "sage")
    pytest.fail("it never got through")


def _finish_until(run: Path, number: int) -> None:
    """In a process of its own: count what changes the disk, and end before the n-th."""
    left = number

    def watch(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(args[2], int) and bool(args[2] & os.O_CREAT)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"):
            left -= 1
            if left == 0:
                os._exit(1)

    try:
        sys.addaudithook(watch)
        begin_run(run)
        finish_run(run, TrainSettings(model="sage"), SHAPE, _model().state_dict(), History())
    except BaseException:
        os._exit(2)
    os._exit(0)


def test_one_training_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(
        InputError, match="expected a folder that no other training writes to .got one locked by process"
    )
    with lock_run(tmp_path), refused, lock_run(tmp_path):
        pytest.fail("it is locked twice")
    with lock_run(tmp_path):
        pass
