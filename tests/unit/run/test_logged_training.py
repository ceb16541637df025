"""A run that accumulates mini-batches and logs: stopped and resumed it has the same steps, each once in the log."""

import csv
import signal
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gsplit.cli.main import app
from gsplit.cli.tasks import TrainTask
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.run.config import TrainSettings
from gsplit.run.results import RunView
from gsplit.run.training import train_run
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit.training.callbacks import StepReport
from gsplit.training.scalar_log import check_log_folder

SETTINGS = TrainSettings(
    hidden=8, fanout=[3, 3], batch_size=16, accumulate=3, epochs=2, lr=0.02, evaluate_every=1, log_every=1, save_every=2
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    graph = PlantedGraph(300, 2000, num_features=4, target_share=0.4)  # 99 targets: 7 mini-batches, 3 steps
    return build_store(synthetic_source(graph), tmp_path_factory.mktemp("graph") / "demo.gsplit")


class _Stopping(RunView):
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        if len(self.reports) == 3:
            signal.raise_signal(signal.SIGTERM)


def _log(folder: Path) -> list[tuple[str, str, str]]:
    with (folder / "scalars.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    return [(row["step"], row["name"], row["value"]) for row in rows if row["name"] in ("loss", "val/accuracy")]


def test_a_stopped_run_goes_on_at_a_step_of_the_optimizer(store: Store, tmp_path: Path) -> None:
    whole_log, log, view = tmp_path / "whole", tmp_path / "log", _Stopping()
    whole = train_run(SETTINGS.model_copy(update={"log_dir": str(whole_log)}), store, solo_mesh(), None)
    assert len(whole.history.losses) == 6 and len(_log(whole_log)) == 8
    settings = SETTINGS.model_copy(update={"log_dir": str(log)})
    stopped = train_run(settings, store, solo_mesh(), tmp_path / "run", view=view)
    assert not stopped.finished and len(stopped.history.losses) == 4
    assert [(report.step, report.num_targets) for report in view.reports[:3]] == [(0, 48), (1, 48), (2, 3)]
    with (log / "scalars.csv").open("a") as stream:
        stream.write("5,1,loss,0.5\n")  # of a step that no checkpoint has
    resumed = train_run(settings, store, solo_mesh(), tmp_path / "run", resume=True)
    assert resumed.history.losses == whole.history.losses and resumed.best == whole.best
    assert _log(log) == _log(whole_log)
    other = settings.model_copy(update={"accumulate": 2, "epochs": 3})
    with pytest.raises(InputError, match="the same training .got accumulate 2 instead of 3"):
        train_run(other, store, solo_mesh(), tmp_path / "run", resume=True)


def test_one_seed_decides_everything(store: Store) -> None:
    """Weights, mini-batches and dropout; not what torch's own generator has drawn before."""
    first = train_run(SETTINGS, store, solo_mesh(), None)
    torch.manual_seed(99)
    torch.rand(7)
    assert train_run(SETTINGS, store, solo_mesh(), None).history.losses == first.history.losses
    other = train_run(SETTINGS.model_copy(update={"seed": 1}), store, solo_mesh(), None)
    assert not set(other.history.losses) & set(first.history.losses)


def test_places_for_a_log_are_checked_before_ranks_start(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[TrainTask] = []
    monkeypatch.setattr("gsplit.cli.train_commands.run_task", lambda task, *_, **__: tasks.append(task))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "scalars.csv").write_text("a,b\n")
    for given, message in (
        ("run", "--log-dir: expected a folder outside of the run run"),
        ("run/1/log", "--log-dir: expected a folder outside of the run run"),
        ("file", "file: expected a folder for the log, or a place for one"),
        ("file/log", "file, a file"),
        ("other", "scalars.csv: expected a log of scalars (got 'a,b' in line 1)"),
    ):
        found = CliRunner().invoke(app, ["train", str(store.path), "--out", "run", "--log-dir", given])
        assert found.exit_code == 2 and message in found.stderr.replace("\n", " "), found.stderr
    assert not tasks
    assert CliRunner().invoke(app, ["train", str(store.path), "--log-dir", "new/log"]).exit_code == 0
    assert tasks[0].settings.log_dir == str(tmp_path / "new" / "log")  # a resumed run may be started elsewhere
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(InputError, match="or a place for one .got .*, which cannot be written"):
        check_log_folder(tmp_path / "new" / "log")


def test_events_need_a_folder(store: Store) -> None:
    found = CliRunner().invoke(app, ["train", str(store.path), "--tensorboard"])
    assert found.exit_code == 2 and "--tensorboard: expected a folder for it (got no --log-dir)" in found.stderr
