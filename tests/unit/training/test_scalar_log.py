"""A log of scalars: every step once, also after resuming; TensorBoard's files; and the example for another tracker."""

import csv
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gsplit import InputError, MissingDependencyError
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.training.callbacks import EvaluationReport, StepReport
from gsplit.training.scalar_log import ScalarLog

EXAMPLE = Path(__file__).parents[3] / "examples" / "wandb_callback.py"


def _step(number: int) -> StepReport:
    return StepReport(0, number - 1, 9, 1 / number, 8, 0.5, {}, number, 0.1, 100)


def _evaluation(number: int) -> EvaluationReport:
    return EvaluationReport(1, number, ("rmse", "mae"), {"val": 0.5, "val mae": 0.25})


def _rows(folder: Path) -> list[tuple[int, str, float]]:
    with (folder / "scalars.csv").open() as stream:
        head, *rows = csv.reader(stream)
    assert head == ["step", "epoch", "name", "value"]
    return [(int(step), name, float(value)) for step, _, name, value in rows]


def test_a_log_has_the_numbers_of_steps_and_evaluations(tmp_path: Path) -> None:
    with ScalarLog(tmp_path / "log", every=2) as log:
        log.on_start(0)
        for number in range(1, 4):
            log.on_step(_step(number))
        log.on_evaluation(_evaluation(3))
    with (tmp_path / "log" / "scalars.csv").open() as stream:
        assert {row["epoch"] for row in csv.DictReader(stream)} == {"1"}  # steps and evaluations of the first epoch
    assert _rows(tmp_path / "log") == [
        (2, "loss", 0.5),
        (2, "learning_rate", 0.1),
        (2, "seconds", 0.5),
        (2, "edges_per_s", 200.0),
        (3, "val/rmse", 0.5),
        (3, "val/mae", 0.25),
    ]


def test_a_resumed_log_has_every_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with ScalarLog(tmp_path, tensorboard=True) as log:
        log.on_start(0)
        for number in range(1, 6):
            log.on_step(_step(number))
        log.on_evaluation(_evaluation(5))
    with (tmp_path / "scalars.csv").open("a") as stream:
        stream.write("6,0,lo")  # cut off by a kill
    for kept in (5, 3):  # the evaluation of step 5 is made again; then two steps are
        with ScalarLog(tmp_path, tensorboard=True) as log:
            log.on_start(kept)
            for number in range(kept + 1, 6):
                log.on_step(_step(number))
            log.on_evaluation(_evaluation(5))
        rows = _rows(tmp_path)
        assert [(step, value) for step, name, value in rows if name == "loss"] == [(n, 1 / n) for n in range(1, 6)]
        assert [step for step, name, _ in rows if name == "val/mae"] == [5]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("val/rmse")] == [5]


def test_the_log_of_another_training_stays(tmp_path: Path) -> None:
    for _ in range(3):
        with ScalarLog(tmp_path) as log:
            log.on_start(0)
            log.on_step(_step(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scalars-1.csv", "scalars-2.csv", "scalars.csv"]
    assert len(_rows(tmp_path)) == 4


def test_what_it_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="every: expected at least 1 step .got 0"):
        ScalarLog(tmp_path, every=0)
    (tmp_path / "scalars.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"scalars.csv: expected a log of scalars .got 'a,b' in line 1"):
        ScalarLog(tmp_path).on_start(0)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'gsplit\[log\]'"):
        ScalarLog(tmp_path, tensorboard=True)


def test_the_example_for_wandb_logs_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a module in the place of wandb, of which the example uses ``init`` and ``log``."""
    logged: list[tuple[int, dict[str, float]]] = []
    started: list[dict[str, Any]] = []

    def init(**options: Any) -> SimpleNamespace:
        started.append(options)
        return SimpleNamespace(log=lambda values, step: logged.append((step, values)))

    wandb = ModuleType("wandb")
    wandb.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    store = build_store(synthetic_source(PlantedGraph(300, 2000, num_features=4)), tmp_path / "demo.gsplit")
    runpy.run_path(str(EXAMPLE))["main"](str(store.path))
    assert started == [{"project": "gsplit", "id": "demo", "resume": "allow"}]
    steps = [step for step, values in logged if "loss" in values]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2
    assert [sorted(values) for _, values in logged if "loss" not in values] == [["val/accuracy", "val/f1_macro"]] * 2
