"""A run that is stopped, killed or finished goes on as if nothing had been; what would change it is refused."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.run.config import TrainSettings
from gsplit.run.folder import (
    checkpoint_folder,
    finished_folder,
    latest_checkpoint,
    load_run,
    lock_run,
    telemetry_files,
    telemetry_path,
    training_folder,
)
from gsplit.run.results import EpochReport, RunView, TrainResult
from gsplit.run.training import _stop_on_signals, train_run
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit.training.callbacks import StepReport
from gsplit.training.checkpoints.files import read_checkpoint
from gsplit.training.checkpoints.state_tree import take_snapshot
from gsplit.training.train_state import history_of
from gsplit.training.trainer import Trainer

SETTINGS = TrainSettings(
    hidden=8,
    fanout=[3, 3],
    batch_size=32,
    norm="batch_norm",
    dropout=0.4,
    epochs=4,
    lr=0.02,
    lr_scheduler="cosine",
    warmup_steps=2,
    max_grad_norm=1.0,
    evaluate_every=1,
    save_every=3,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    graph = PlantedGraph(300, 2000, num_features=4, target_share=0.4)
    return build_store(synthetic_source(graph), tmp_path_factory.mktemp("graph") / "demo.gsplit")


@pytest.fixture(scope="module")
def whole(store: Store, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return _train(store, tmp_path_factory.mktemp("whole") / "run")


def _train(store: Store, out: Path | None, view: RunView | None = None, **options: Any) -> TrainResult:
    resume, overwrite = options.pop("resume", False), options.pop("overwrite", False)
    settings = SETTINGS.model_copy(update=options)
    return train_run(settings, store, solo_mesh(), out, resume=resume, overwrite=overwrite, view=view)


def _state(run: Path) -> dict[str, bytes]:
    """The weights of a finished run and all tensors of its last checkpoint, but for the seconds; bit by bit."""
    latest = latest_checkpoint(run)
    assert latest is not None
    tensors = take_snapshot(read_checkpoint(latest).state).tensors
    weights = load_file(finished_folder(run) / "weights.safetensors")
    found = {name: value.tobytes() for name, value in weights.items()}
    return found | {name: value.numpy().tobytes() for name, value in tensors.items() if "seconds" not in name}


class _Stopping(RunView):
    """Tells its own process to end after some steps, or raises."""

    def __init__(self, after: int, how: signal.Signals | None) -> None:
        self._left, self._how = after, how

    def on_step(self, report: StepReport) -> None:
        self._left -= 1
        if self._left == 0:
            if self._how is None:
                raise RuntimeError("killed")
            signal.raise_signal(self._how)


def _same(one: TrainResult, two: TrainResult) -> bool:
    same = one.history.losses == two.history.losses and one.history.evaluations == two.history.evaluations
    return same and one.best == two.best and two.finished


@pytest.mark.parametrize("after", [1, 4, 8])  # in the first epoch, and at an end of one before its evaluation
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_bit_for_bit(
    store: Store, whole: TrainResult, tmp_path: Path, after: int, how: signal.Signals
) -> None:
    run = tmp_path / "run"
    stopped = _train(store, run, _Stopping(after, how))
    assert not stopped.finished and stopped.history.losses == whole.history.losses[: after + 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert training_folder(run) != finished_folder(run)
    resumed = _train(store, run, resume=True, prefetch=2, strategy="data")
    assert _same(whole, resumed)
    assert whole.out is not None
    assert telemetry_files(run)[0].read_text().count("\n") == len(whole.history.losses)


def test_a_run_that_was_cut_off_loses_the_steps_since_it_was_saved(
    store: Store, whole: TrainResult, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for _ in range(3):  # each attempt gets some steps further
        with pytest.raises(RuntimeError, match="killed"):
            _train(store, run, _Stopping(5, None), resume=latest_checkpoint(run) is not None)
    latest = latest_checkpoint(run)
    assert (
        latest is not None and latest.name == "step-00000012.safetensors"
    )  # saved every 3 steps, and after epochs of 4
    lines = [json.loads(line) for line in telemetry_path(run, 0).read_text().splitlines()]
    assert len(lines) == 13  # one behind the checkpoint, which the next attempt will do again
    assert _same(whole, _train(store, run, resume=True))
    assert whole.out is not None and _state(run) == _state(whole.out)
    lines = [json.loads(line) for line in telemetry_files(run)[0].read_text().splitlines()]
    assert [(line["epoch"], line["step"]) for line in lines] == sorted(
        {(line["epoch"], line["step"]) for line in lines}
    )
    kept = sorted(path.name for path in checkpoint_folder(finished_folder(run)).glob("step-*"))
    assert 2 <= len(kept) <= 3  # the newest two, and the best


@pytest.mark.parametrize("epoch", [1, 4])
def test_a_kill_during_an_evaluation_costs_only_that(
    store: Store, whole: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    run, evaluate = tmp_path / "run", Trainer.evaluate

    def end(trainer: Trainer, *args: Any, **options: Any) -> dict[str, float]:
        if trainer.state.epoch < epoch:
            return evaluate(trainer, *args, **options)
        assert trainer._saver is not None
        trainer._saver.finish()
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", end)
        with pytest.raises(RuntimeError, match="killed"):
            _train(store, run, save_every=None)
    latest = latest_checkpoint(run)
    assert latest is not None and latest.name == f"step-{4 * epoch:08d}.safetensors"
    assert len(history_of(read_checkpoint(latest).state).evaluations) == epoch - 1
    assert _same(whole, _train(store, run, resume=True))
    assert whole.out is not None and _state(run) == _state(whole.out)


@pytest.mark.parametrize("drawn, other", [("labor", "uniform"), ("uniform", "labor")])
def test_another_sampler_is_refused_before_the_run_is_changed(
    store: Store, tmp_path: Path, drawn: str, other: str
) -> None:
    run = tmp_path / "run"
    _train(store, run, _Stopping(2, signal.SIGTERM), sampler=drawn)
    with pytest.raises(InputError, match="expected the same training .got sampler"):
        _train(store, run, sampler=other, resume=True)
    assert load_run(training_folder(run))[0].sampler == drawn  # what --resume without options reads
    assert _train(store, run, sampler=drawn, resume=True).finished


def test_a_setting_that_is_refused_is_not_tried_again(store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _train(store, run, _Stopping(2, signal.SIGTERM))
    with pytest.raises(InputError, match="device_cache: expected a model on a device"):
        _train(store, run, device_cache="1GB", resume=True)
    assert load_run(training_folder(run))[0].device_cache == SETTINGS.device_cache
    assert _train(store, run, resume=True).finished


def test_a_rank_ignores_signals_while_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    asked = []
    try:
        with _stop_on_signals(lambda: asked.append(1)):
            signal.raise_signal(signal.SIGINT)
        assert asked and all(signal.getsignal(each) is signal.SIG_IGN for each in before)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    with _stop_on_signals(lambda: None):
        pass
    assert {each: signal.getsignal(each) for each in before} == before


def test_a_finished_run_is_finished_and_can_be_made_longer(store: Store, tmp_path: Path) -> None:
    run, longer = tmp_path / "run", tmp_path / "longer"
    first = _train(store, run, lr_scheduler="constant", epochs=2)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = _train(store, run, lr_scheduler="constant", epochs=2, resume=True)
    assert _same(first, again) and {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    with pytest.raises(RuntimeError):
        _train(store, run, _Stopping(1, None), lr_scheduler="constant", epochs=3, resume=True)
    assert load_run(run)[0].epochs == 2  # still the finished one
    want = _train(store, longer, lr_scheduler="constant", epochs=3)
    assert _same(want, _train(store, run, lr_scheduler="constant", epochs=3, resume=True))
    assert load_run(run)[0].epochs == 3 and _state(run) == _state(longer)
    with pytest.raises(InputError, match="run: expected an empty or new folder .got a run"):
        _train(store, run)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    store: Store, whole: TrainResult, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    _train(store, run, _Stopping(7, signal.SIGTERM))
    latest = latest_checkpoint(run)
    assert latest is not None and latest.name == "step-00000008.safetensors"
    latest.write_bytes(latest.read_bytes()[:-9])
    assert _same(whole, _train(store, run, resume=True))
    assert not list(run.rglob("*.unused"))


@pytest.mark.parametrize(
    "change, difference",
    [
        ({"batch_size": 16}, "batch_size 16 instead of 32"),
        ({"seed": 1}, "seed 1 instead of 0"),
        ({"fanout": [3, 2]}, r"fanout \[3, 2\] instead of \[3, 3\]"),
        ({"hidden": 4}, "hidden 4 instead of 8"),
        ({"dropout": 0.5}, "dropout 0.5 instead of 0.4"),
        ({"lr": 0.1}, "lr 0.1 instead of 0.02"),
        ({"epochs": 5}, "steps of the schedule 20 instead of 16"),
    ],
)
def test_what_would_be_another_training_is_refused(
    store: Store, whole: TrainResult, change: dict[str, Any], difference: str
) -> None:
    with pytest.raises(InputError, match=f"safetensors: expected the same training .got .*{difference}"):
        _train(store, whole.out, resume=True, **change)
    assert whole.out is not None and training_folder(whole.out) == finished_folder(whole.out)  # nothing was touched


def test_another_graph_is_refused(whole: TrainResult, tmp_path: Path) -> None:
    graph = PlantedGraph(300, 2000, num_features=4, target_share=0.4, seed=5)
    other = build_store(synthetic_source(graph), tmp_path / "other.gsplit")
    with pytest.raises(InputError, match="expected the same training .got .*store features/x .*store indptr "):
        _train(other, whole.out, resume=True)


class _Epochs(RunView):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def epoch(self, report: EpochReport) -> None:
        self.seen.append(report.epoch)


def test_patience_ends_a_run_and_survives_resuming(store: Store, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 50, "patience": 2, "lr": 0.2, "lr_scheduler": "constant"}
    whole = _train(store, None, **options)
    scores = [found.scores["val"] for found in whole.history.evaluations]
    assert 2 < len(scores) < 50 and max(scores[:-2]) >= max(scores[-2:])
    steps_of_last = len(whole.history.losses) // len(scores)
    run, view = tmp_path / "run", _Epochs()
    _train(store, run, _Stopping(len(whole.history.losses) - steps_of_last, signal.SIGTERM), **options)
    assert _same(whole, _train(store, run, view, resume=True, **options))
    assert len(view.seen) <= 2
    with pytest.raises(InputError, match="a checkpoint that can be read .got no file step"):
        _train(store, tmp_path / "none", resume=True)


def test_two_trainings_do_not_write_into_one_folder(store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lock_run(run), pytest.raises(InputError, match="expected a folder that no other training writes to"):
        _train(store, run)
    _train(store, run, save_every=0)
    assert latest_checkpoint(run) is None


def test_nothing_is_read_of_a_run_that_another_training_writes(store: Store, tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "1")
    folder.mkdir(parents=True)
    (folder / "step-00000001.safetensors").touch()  # reading it would be refused
    with lock_run(tmp_path), pytest.raises(InputError, match="expected a folder that no other training writes to"):
        _train(store, tmp_path, resume=True)
