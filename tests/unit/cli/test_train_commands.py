"""``gsplit train`` and its relatives in this process: options, what is said and when, what is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from rich.console import Console
from small_disk import small_disk
from typer.testing import CliRunner

from gsplit.cli.main import app
from gsplit.cli.options import Flags
from gsplit.cli.tasks import InferTask, Task, TrainTask, VerifyTask, parse_task
from gsplit.cli.train_commands import _Kept, _settings
from gsplit.cli.training_view import announce_training, show_result
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.inference.evaluate import count_evaluation_edges
from gsplit.run import recipe
from gsplit.run.config import TrainSettings, applies_to_verify
from gsplit.run.folder import begin_run, training_folder
from gsplit.run.models import MODELS
from gsplit.run.results import TrainResult
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit.training.train_state import Evaluation, History
from gsplit.training.verification import Verification

SMALL = ["--hidden", "8", "--fanout", "3,3", "--batch-size", "200"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    graph = PlantedGraph(1000, 8000, num_features=8)
    return build_store(synthetic_source(graph), tmp_path_factory.mktemp("graph") / "demo.gsplit")


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def _run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def _options(name: str) -> list[str]:
    group: Any = typer.main.get_command(app)
    return [str(parameter.name) for parameter in group.commands[name].params]


def test_every_setting_is_an_option() -> None:
    train, verify = _options("train"), _options("verify")
    assert [name for name in train if name in TrainSettings.model_fields] == list(TrainSettings.model_fields)
    assert {name for name in TrainSettings.model_fields if name in verify} - {"steps"} == {
        name for name in TrainSettings.model_fields if applies_to_verify(name)
    }
    assert all(field.description for field in TrainSettings.model_fields.values())
    described = TrainSettings.model_fields["model"].description
    assert described is not None and described.replace(" or ", ", ").split(", ") == list(MODELS)


def test_flags_override_the_file(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("hidden = 8\nlr = 0.5\nevaluate_every = 2\n")
    flags = Flags(TrainSettings, {"lr": 0.25, "fanout": "7,5", "norm": "batch_norm"})
    settings = _settings(config, flags)
    assert (settings.hidden, settings.lr, settings.fanout, settings.norm) == (8, 0.25, [7, 5], "batch_norm")
    assert settings.evaluate_every == 2
    with pytest.raises(InputError, match="--fanout: expected numbers like 15,10,5 .got 5;5"):
        _settings(None, Flags(TrainSettings, {"fanout": "5;5"}))


def test_ranks_read_exactly_the_settings_that_were_resolved() -> None:
    settings = TrainSettings(lr=0.1 + 0.2, seed=(1 << 63) - 1, fanout=[4, -1], norm="layer_norm", evaluate_every=None)
    tasks: list[Task] = [
        TrainTask(
            store=Path("a b.gsplit"), as_json=True, device=None, settings=settings, out=Path("run"), overwrite=True
        ),
        InferTask(
            store=Path("s"), as_json=False, device="cpu", weights=Path("run"), out=Path("o.npy"), overwrite=False
        ),
        VerifyTask(store=Path("s"), as_json=False, device=None, settings=settings, steps=5),
    ]
    for task in tasks:
        assert parse_task(task.model_dump_json()) == task


def test_what_is_started_is_said_before_torch_is_imported(store: Store) -> None:
    code = "import sys; sys.modules['torch'] = None; from gsplit.cli.main import main; main()"  # importing it fails
    command = [sys.executable, "-c", code, "train", str(store.path), *SMALL, "--nproc", "2", "--epochs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "train sage, 2 layers of width 8, on " in done.stderr
    assert "1,000 vertices, 8,000 edges" in done.stderr
    assert "2 rank(s), strategy split; global mini-batch of 200 targets, 100.0 per rank" in done.stderr
    steps = -(-store.stored_targets("train")[2] // 200)
    assert f"{3 * steps} steps, {steps} per epoch; starting" in done.stderr
    assert "import of torch halted" in done.stderr.splitlines()[-1]  # the test has shown what it claims


def test_the_number_of_steps_is_said(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    announce_training(store, TrainSettings(steps=7), 1, Console(width=400))
    assert "7 steps" in capsys.readouterr().out


def test_people_see_every_epoch_and_a_summary(store: Store) -> None:
    done = _run("train", str(store.path), *SMALL, "--epochs", "3", "--evaluate-every", "2", "--lr", "0.01")
    assert done.exit_code == 0, done.stderr
    assert "1 rank(s) started; compiling kernels in the first step" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("epoch   ")]
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    assert ["val" in line for line in lines] == [False, True, True]  # every second, and the last
    assert "without the first, which compiles" in done.stdout
    assert "not kept (--out RUN keeps them)" in done.stdout


def test_a_run_is_kept_and_the_default_evaluation_costs_no_more_than_training(store: Store, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "o.npy"
    words = [str(store.path), *SMALL, "--epochs", "4", "--json"]
    document = json.loads(_run("train", *words, "--out", str(run)).stdout)
    assert len(document["step_seconds"]) == len(document["losses"]) == document["steps"]
    assert document["run"] == str(run) and document["best"] in document["evaluations"]
    edges = sum(
        json.loads(line)["counts"]["edges"] for line in (run / "1" / "steps-rank-0.jsonl").read_text().splitlines()
    )
    assert 1 <= len(document["evaluations"]) < 4
    cost = count_evaluation_edges(store, ["val", "test"], solo_mesh(), 2)
    assert 0 < (len(document["evaluations"]) - 1) * cost <= edges  # all but the last
    assert document["evaluations"][-1]["epoch"] == 4
    inferred = _run("infer", str(store.path), "--weights", str(run), "--out", str(out))
    assert inferred.stdout == f"{out}: 1,000 x 16, outputs; row v is original vertex v\n"
    assert inferred.stderr.startswith(f"infer with {run} on {store.path}, 1 rank(s); starting ...\n")
    table = tmp_path / "o.csv"
    words = ["infer", str(store.path), "--weights", str(run), "--out", str(table)]
    assert _run(*words).stdout == f"{table}: 1,000 rows, columns id, class; outputs too: --what both\n"
    classes = [int(line.split(",")[1]) for line in table.read_text().splitlines()[1:]]
    assert classes == np.load(out).argmax(axis=1).tolist()
    words += ["--overwrite", "--what", "both", "--only", "test"]
    tested = store.array("targets/test").size
    assert _run(*words).stdout == f"{table}: {tested} rows, columns id, class, output_0, output_1, ..., output_15\n"
    document = json.loads(_run(*words, "--json").stdout)
    assert (document["rows"], document["what"], document["columns"][:2]) == (tested, "both", ["class", "output_0"])
    again = _run("infer", str(store.path), "--weights", str(run), "--out", str(out), "--json")
    assert again.exit_code == 2 and "expected a new file" in json.loads(again.stdout)["error"]


def test_a_small_temporary_folder_is_an_error_that_names_the_option(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", 16 << 10) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        done = _run("train", str(store.path), *SMALL, "--epochs", "1")
        assert done.exit_code == 2
        assert f"workspace {disk}: expected" in done.stderr and "--workspace FOLDER" in done.stderr
        done = _run("train", str(store.path), *SMALL, "--epochs", "1", "--workspace", str(tmp_path))
        assert done.exit_code == 0, done.stderr


def test_an_interrupted_run_says_what_is_kept_and_how_to_keep_it(tmp_path: Path) -> None:
    assert str(_Kept(None)) == "no weights were kept; --out RUN keeps them, also of a run that is interrupted"
    assert str(_Kept(tmp_path)) == "no weights were kept: there was no checkpoint yet"
    (tmp_path / "1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "1" / "checkpoints" / "step-00000001.safetensors").touch()
    assert str(_Kept(tmp_path)) == f"the latest checkpoint of {tmp_path} is kept; to continue: --resume {tmp_path}"
    replacing = _Kept(tmp_path, replaces=True)
    assert (str(replacing), replacing.exit_code) == ("no weights were kept: there was no checkpoint yet", 143)
    (tmp_path / "2" / "checkpoints").mkdir(parents=True)
    (tmp_path / "2" / "checkpoints" / "step-00000001.safetensors").touch()
    assert replacing.exit_code == 75


def test_the_table_of_a_single_step_and_of_kept_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    history = History([1.5], [3.0], [Evaluation(1, 1, {"val": 0.5})])
    run = tmp_path / "run"
    show_result(TrainResult(2, 1, "split", history, history.evaluations[0], run), tmp_path, Console(width=400))
    said = capsys.readouterr().out
    assert "3.0 (the first, which compiles)" in said
    assert "1: val 50.00%" in said
    assert f"{run}, for gsplit infer" in said
    show_result(TrainResult(2, 1, "split", history, None, run, finished=False), tmp_path, Console(width=400))
    said = capsys.readouterr().out
    assert f"stopped after 1 steps, all kept; to continue: gsplit train {tmp_path} --nproc 2 --resume {run}\n" in said
    show_result(TrainResult(1, 1, "split", history, None, run, finished=False), tmp_path, Console(width=400))
    assert f"to continue: gsplit train {tmp_path} --resume {run}\n" in capsys.readouterr().out


def test_verify_says_how_far_apart_and_exits_with_three_if_too_far(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["verify", str(store.path), *SMALL, "--nproc", "1", "--steps", "2"]
    done = _run(*words)
    assert done.exit_code == 0, done.stderr
    assert "sage, split: 1 rank(s) equal one process over 2 steps" in done.stdout
    assert "largest difference: loss 0.00e+00, gradients 0.00e+00" in done.stdout
    far = Verification(1e-3, 0.0, 0.0, 1.0, 1e-9, 2, 1, "split")
    monkeypatch.setattr(recipe, "verify_run", lambda *args: far)
    done = _run(*words)
    assert done.exit_code == 3
    assert "1 rank(s) DIFFER from one process" in done.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (["train", "nowhere.gsplit"], "nowhere.gsplit"),
        (["train", "STORE", "--model", "resnet", "--nproc", "2"], "model: expected one of sage"),
        (["train", "STORE", "--strategy", "magic", "--nproc", "2"], "strategy: expected split, data"),
        (["train", "STORE", "--fanout", "5;5"], "--fanout: expected numbers like 15,10,5 (got 5;5)"),
        (["train", "STORE", "--hidden", "10", "--model", "gat"], "hidden: expected a multiple of 4 heads (got 10)"),
        (["train", "STORE", "--replicas", "2", "--nproc", "3"], "--replicas: expected a divisor of 3 ranks (got 2)"),
        (["train", "STORE", "--replicas", "2"], "replicas: expected a divisor of 1 ranks (got 2)"),
        (["train", "STORE", "--lr", "-1"], "lr: expected greater than 0"),
        (["train", "STORE", "--norm", "none"], "norm: expected 'batch_norm' or 'layer_norm' (got none)"),
        (["train", "STORE", "--targets", "holdout", "--nproc", "2"], "targets/holdout"),
        (["infer", "STORE", "--weights", "absent", "--out", "o.npy", "--nproc", "2"], "expected the settings of a run"),
        (["infer", "STORE", "--weights", "absent", "--out", "o.txt"], "a name that ends in .parquet, .csv or .npy"),
        (
            ["infer", "STORE", "--weights", "absent", "--out", "o.csv", "--workspace", "no"],
            "workspace no: expected a fol",
        ),
        (["train", "STORE", "--workspace", "no", "--nproc", "2"], "workspace no: expected a folder to write in"),
        (["verify", "STORE", "--model", "resnet"], "model: expected one of sage"),
        (
            ["verify", "STORE", "--own-model", "net"],
            "--own-model: expected FILE.py:FUNCTION or MODULE:FUNCTION (got net)",
        ),
        (["verify", "STORE", "--own-model", "absent.py:net"], "absent.py:net: expected a model (got FileNotFoundError"),
        (["verify", "STORE", "--own-model", "math:net"], "math:net: expected a model (got AttributeError"),
        (["verify", "STORE", "--own-model", "math:gcd"], "math:gcd: expected a torch.nn.Module (got int)"),
        (["verify", "STORE", "--own-model", "a.py:b", "--strategy", "auto"], "a strategy by name with --own-model"),
        (["train", "STORE", "--device", "gpu"], "device: expected cpu or cuda (got gpu)"),
        (["train", "STORE", "--sample-device", "gpu"], "device: expected cpu or cuda (got gpu)"),
    ],
)
def test_mistakes_are_said_once_before_ranks_start(store: Store, args: list[str], message: str) -> None:
    done = _run(*[str(store.path) if arg == "STORE" else arg for arg in args], "--json")
    assert done.exit_code == 2
    assert message in json.loads(done.stdout)["error"]
    assert done.stderr.count("error:") == 1


@pytest.mark.parametrize(
    "args, message",
    [
        (["train", "--model", "resnet"], "model: expected one of sage, sage_max, .* .got resnet"),
        (["verify", "--model", "resnet"], "model: expected one of sage, sage_max, .* .got resnet"),
        (["train", "--strategy", "magic"], "strategy: expected split, data, .*got 'magic'"),
        (["verify", "--strategy", "hybrid(9)"], r"strategy: expected hybrid\(k\), .*got 'hybrid\(9\)'"),
        (["train", "--device", "gpu"], "device: expected cpu or cuda .got gpu"),
        (["train", "--sample-device", "gpu"], "device: expected cpu or cuda .got gpu"),
        (["train", "--precision", "tf32"], "precision: expected GPUs for tf32 .got device cpu"),
        (
            ["train", "--sampling-threads", "2"],
            "--sampling-threads: expected at least as many .* .got 2 threads, --prefetch 0.*add --prefetch 4",
        ),
        (["train", "--nproc", "3", "--replicas", "2"], "--replicas: expected a divisor of 3 ranks .got 2"),
        (["train", "--nproc", "2", "--min-ranks", "3"], "--min-ranks: expected at most the 2 of --nproc .got 3"),
        (
            ["train", "--nproc", "2", "--strategy", "data", "--norm", "batch_norm"],
            "--norm batch_norm: expected each vertex computed on one rank .got --strategy data on 2 ranks",
        ),
        (
            ["train", "--patience", "3", "--evaluate-every", "0"],
            "--patience: expected evaluations .got --evaluate-every",
        ),
        (["train", "--cache", "much"], "cache: expected a size in bytes .got 'much'"),
        (["train", "--copies", "much"], "copies: expected a size in bytes .got 'much'"),
        (["train", "--device-cache", "much"], "device_cache: expected a size in bytes .got 'much'"),
        (
            ["train", "--cache", "1GB"],
            "expected a partitioned store, .* .got no hotness among features/x, .*gsplit part",
        ),
        (["train", "--features", "z"], "expected one of the features it has, features/x .got features/z"),
        (["train", "--edge-attr", "w"], "expected per-edge values .got no edges/w among "),
        (["train", "--sampler", "walk"], "sampler: expected 'uniform' or 'labor', .* .got 'walk'"),
        (["verify", "--sampler", "labor", "--replace"], "replace: expected the uniform sampler without weights "),
        (["plan", "--sampler", "walk"], "sampler: expected 'uniform' or 'labor', .* .got 'walk'"),
        (
            ["partition", "absent.gsplit", "--parts", "2", "--sampler", "walk"],
            "sampler: expected 'uniform' or 'labor', .* .got 'walk'",
        ),
        (["train", "--model", "gat", "--hidden", "10"], "hidden: expected a multiple of 4 heads .got 10"),
        (["train", "--class-weights", "1,2"], "class_weights: expected balanced, or 16 numbers, .* .got 1,2"),
        (["train", "--loss", "mse"], "y: expected columns of floats for --loss mse .got int64 "),
        (["train", "--loss", "bpr"], "loss: expected a setting of --task node .got bpr"),
        (["train", "--metric", "f1"], "metric: expected one of accuracy, .* .got f1"),
        (["train", "--metric", "rmse"], "metric rmse: expected float labels .got int64"),
        (["train", "--task", "link", "--metric", "rmse"], "metric: expected mrr or hits@K for pairs .got rmse"),
        (["infer", "--weights", "absent", "--out", "o.npy"], "absent/settings.json: expected the settings of a run"),
        (["report"], "settings.json: expected the settings of a run .got No such file"),
    ],
)
def test_wrong_settings_are_refused_before_torch_is_imported(store: Store, args: list[str], message: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from gsplit.cli.main import main; main()"  # importing it fails
    words = [sys.executable, "-c", code, args[0], str(store.path), *args[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert re.search(f"^error: .*{message}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1  # and nothing was announced


def test_a_table_that_is_missing_is_told_before_numba_is_imported(tmp_path: Path) -> None:
    code = "import sys; sys.modules['numba'] = sys.modules['torch'] = None; from gsplit.cli.main import main; main()"
    words = [sys.executable, "-c", code, "import", "tables", str(tmp_path / "absent.csv"), str(tmp_path / "g.gsplit")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "absent.csv: expected a table, or a folder of them (got no such file)" in done.stderr


def test_a_run_that_exists_is_refused_before_torch_is_imported(store: Store, tmp_path: Path) -> None:
    (tmp_path / "1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "1" / "checkpoints" / "step-00000007.safetensors").touch()
    code = "import sys; sys.modules['torch'] = None; from gsplit.cli.main import main; main()"
    words = [sys.executable, "-c", code, "train", str(store.path), "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and "starting" not in done.stderr
    assert "expected an empty or new folder (got an unfinished run with checkpoints)" in done.stderr


def test_cuda_is_refused_at_once_with_a_torch_that_is_built_without_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('not to be imported')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    for cuda, code, shown in (("None", 2, "built for GPUs (got torch 9.9+cpu)"), ("'13.0'", 1, "not to be imported")):
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '9.9+cpu'\ncuda = {cuda}\nhip = None\n")
        words = [sys.executable, "-m", "gsplit", "train", str(store.path), "--device", "cuda"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == code and shown in done.stderr, done.stderr


def test_more_ranks_than_parts_are_refused_before_they_start(store: Store, tmp_path: Path) -> None:
    parts = tmp_path / "two.gsplit"
    assert _run("partition", str(store.path), str(parts), "--parts", "2", "--fanout", "2,2").exit_code == 0
    done = _run("train", str(parts), "--nproc", "3", "--fanout", "2,2", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"].startswith("ranks: expected at most one per part, 2 (got 3)")


def test_another_number_of_ranks_than_torchruns_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from gsplit.cli import ranks

    monkeypatch.setattr(ranks, "rank_of_environment", lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", "1")
    task = TrainTask(store=store.path, as_json=True, device=None, settings=TrainSettings(), out=None, overwrite=False)
    with pytest.raises(InputError, match="--nproc: expected the launcher's 1 .got 4"):
        ranks.run_task(task, 4)


def test_resuming_takes_the_runs_own_settings_and_says_what_it_needs(store: Store, tmp_path: Path) -> None:
    run, path = tmp_path / "run", str(store.path)
    first = json.loads(_run("train", path, *SMALL, "--steps", "3", "--out", str(run), "--json").stdout)
    assert first["finished"] is True
    longer = json.loads(_run("train", path, "--resume", str(run), "--steps", "5", "--json").stdout)
    assert longer["losses"][:3] == first["losses"] and longer["steps"] == 5
    epochs = json.loads(_run("train", path, "--resume", str(run), "--epochs", "3", "--json").stdout)
    assert epochs["losses"][:5] == longer["losses"] and epochs["steps"] > 5  # epochs, not the five steps
    cut_off = tmp_path / "cut off"
    shutil.copytree(run, cut_off)
    begin_run(cut_off)
    for words, message in (
        (["--resume", str(run), "--out", str(tmp_path / "b")], "--out: expected .*run, the run that is resumed"),
        (["--resume", str(tmp_path / "c")], "--resume .*c: expected a run with a checkpoint .got no such folder"),
        (["--resume", str(run), "--steps", "2"], "--steps or --epochs: expected at least the .* steps .* .got 2 steps"),
        (["--resume", str(tmp_path)], "expected a run with a checkpoint .got no checkpoint"),
        (["--resume", str(cut_off)], "got no checkpoint of .*, which was to replace .*remove .* to continue"),
        (["--save-every", "5"], "--save-every: expected a run to save .got no --out"),
        (["--resume", str(training_folder(run))], "expected a run .got one training of the run .*pass --resume .*run"),
        (["--resume", str(run), "--seed", "1"], "expected the same training .got seed 1 instead of 0"),
    ):
        done = _run("train", path, *words, "--json")
        assert done.exit_code == 2 and re.search(message, json.loads(done.stdout)["error"]), done.stdout
