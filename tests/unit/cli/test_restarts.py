"""``gsplit train --max-restarts --min-ranks``: which ranks may go on, from where, and what is refused."""

from pathlib import Path

import pytest

from gsplit.cli.ranks import _rank_numbers, run_task
from gsplit.cli.tasks import InferTask, TrainTask
from gsplit.errors import InputError
from gsplit.run.config import TrainSettings
from gsplit.run.folder import checkpoint_folder
from gsplit.training.checkpoints.names import checkpoint_path


def _task(out: Path | None, **more: object) -> TrainTask:
    settings = TrainSettings(replicas=2)
    given = {"store": Path("a.gsplit"), "as_json": True, "device": None, "settings": settings, "overwrite": False}
    return TrainTask.model_validate({**given, "out": out, **more})


def _save(run: Path, training: str, num_steps: int) -> Path:
    path = checkpoint_path(checkpoint_folder(run / training), num_steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_fewer_ranks_make_whole_replicas() -> None:
    assert _rank_numbers(_task(None), 8, 3) == [8, 6, 4]
    assert _rank_numbers(_task(None), 8, None) == [8]
    with pytest.raises(InputError, match="--min-ranks: expected at most the 2 of --nproc"):
        _rank_numbers(_task(None), 2, 3)


def test_a_run_goes_on_from_its_own_checkpoint_only(tmp_path: Path) -> None:
    assert _task(None).resumed(None).origin == "the start"
    task = _task(tmp_path, overwrite=True)
    assert task.resumed(task.latest()) == task
    old = _save(tmp_path, "1", 30)
    before = task.latest()
    assert before == old
    assert task.resumed(before).origin == "the start"  # the run that is to be replaced
    new = _save(tmp_path, "2", 10)
    assert task.resumed(before).resume
    assert task.resumed(before).origin == str(new)


def test_a_resumed_run_is_resumed_again(tmp_path: Path) -> None:
    kept = _save(tmp_path, "1", 30)
    task = _task(tmp_path, resume=True)
    assert task.resumed(kept).resume


def test_what_torchrun_has_started_again_goes_on_unless_that_might_be_another_run(tmp_path: Path) -> None:
    for overwrite in (False, True):
        task = _task(tmp_path / str(overwrite), overwrite=overwrite)
        assert not task.goes_on(0.0)
        saved_s = _save(tmp_path / str(overwrite), "1", 30).stat().st_mtime
        assert task.goes_on(saved_s - 1) and not task.goes_on(saved_s + 1)  # it began before, or after
        assert task.goes_on(None) != overwrite  # nobody knows when


def test_ranks_have_time_to_save_where_there_is_something_to_save_into(tmp_path: Path) -> None:
    assert _task(tmp_path).grace_s > _task(None).grace_s


def test_a_task_without_checkpoints_starts_again(tmp_path: Path) -> None:
    given = {"store": Path("a.gsplit"), "as_json": True, "device": None, "overwrite": False}
    task = InferTask.model_validate({**given, "weights": tmp_path, "out": tmp_path / "out.npy"})
    assert (task.resumed(task.latest()), task.origin) == (task, "the start")


def test_ranks_of_a_launcher_are_restarted_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="torchrun's --max-restarts"):
        run_task(_task(None), 1, max_restarts=1)
