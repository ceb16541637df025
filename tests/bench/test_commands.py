"""The commands of ``python -m gsplit_bench``: what they print and refuse."""

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from gsplit.cli import main
from gsplit_bench import exactness, exactness_tasks
from gsplit_bench.commands import _SCRIPTS, app


def _run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    return subprocess.CompletedProcess(words, result.exit_code, result.stdout, result.stderr)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "g.gsplit"
    words = ["import", "synthetic", str(path), "--vertices", "500", "--edges", "4000", "--seed", "7"]
    assert CliRunner().invoke(main.app, words).exit_code == 0
    return path


def test_the_package_is_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "gsplit_bench", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "python -m gsplit_bench" in done.stdout
    listed = set(re.findall(r"^  ([a-z0-9-]+)", done.stdout.partition("Commands:")[2], re.M))
    assert listed == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_partition_compares(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--fanout", "3,3", "--batch-size", "64", "--epochs", "3", "--parts", "2", "--parts", "4"]
    cases = ["--case", "gsplit:metis", "--case", "random:random", "--case", "edge:mtkahypar"]
    figure = tmp_path / "f.png"
    done = _run("partition", store, *small, *cases, "--json", "--figure", figure)
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 10_000
    rows = json.loads(done.stdout)["rows"]
    assert [(row["parts"], row["objective"]) for row in rows] == [
        (parts, objective) for parts in (2, 4) for objective in ("gsplit", "random", "edge")
    ]
    assert "expected one balance constraint" in rows[2]["error"]
    for good, random in ((rows[0], rows[1]), (rows[3], rows[4])):
        assert good["cross_edge_share"] < random["cross_edge_share"]
        assert good["expected"]["cross_edge_share"] == pytest.approx(good["cross_edge_share"], rel=0.1)
        assert {"rows_shuffled_per_input", "edge_imbalance", "vertex_imbalance", "target_imbalance"} <= set(good)
        assert len(good["layers"]) == 2 and good["seconds"] > 0 and good["peak_bytes"] > 0
    one = _run(
        "partition",
        store,
        "--parts",
        "1",
        "--epochs",
        "1",
        "--batch-size",
        "4096",
        "--fanout",
        "2",
        *cases[:2],
        "--json",
    )
    row = json.loads(one.stdout)["rows"][0]  # a single mini-batch has no interval, one part no cross edges
    assert row["measured"]["cross_edges_95"] is None and row["cross_edges_off"] == 0.0
    screen = _run("partition", store, *small[:-2], "--case", "gsplit:metis", "--case", "random")
    assert screen.returncode == 2 and "--case: expected objective:solver" in screen.stderr
    screen = _run("partition", store, *small[:-2], "--case", "gsplit:metis")
    assert screen.returncode == 0 and "2 gsplit metis" in screen.stdout
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = _run("partition", store, "--parts", "2", "--figure", figure)
    assert refused.returncode != 0 and "gsplit[report]" in refused.stderr


def test_commands_print_their_keys() -> None:
    small = ["--vertices", "3000", "--edges", "30000", "--steps", "2", "--batch-size", "50"]
    sampling = json.loads(_run("sampling", *small, "--json").stdout)
    assert {"edges_per_s", "peer_edges_per_s", "ratio", "split_to_plain"} <= sampling.keys()
    assert sampling["edges_per_s"] > 0
    draws = {draw["name"]: draw for draw in sampling["draws"]}
    assert set(draws) == {"labor", "weighted", "labor, weighted", "replace"}
    assert all(draw["time_per_edge"] > 0 for draw in draws.values()) and draws["labor"]["rows"] < 1
    assert (sampling["peer"] is None) == (sampling["ratio"] is None)
    assert "gsplit, split path" in _run("sampling", *small).stdout
    shuffle = json.loads(_run("shuffle", "--ranks", "2", "--rows", "200", "--repeats", "2", "--json").stdout)
    assert {"bytes_per_s", "composed_bytes_per_s", "bare_bytes_per_s", "ratio"} <= shuffle.keys()
    assert [row["ranks"] for row in shuffle["rows"]] == [2]


@pytest.mark.parametrize("weights, ok", [(1e-10, True), (1e-8, False)])
def test_exactness_says_how_far_apart_and_exits_with_one_if_too_far(
    weights: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = exactness.Case("gine", "split", "random", 0.5, None, None, edge_values=True)
    rows = [
        exactness.ExactnessRow(1, 2, case, exactness.Differences(1e-12, 2e-12, 3e-12, weights)),
        exactness.ExactnessRow(2, 2, case, exactness.Differences(output=4e-12)),
    ]
    monkeypatch.setattr(exactness, "run_exactness", lambda *args, **kwargs: exactness.ExactnessReport(rows))
    done = _run("exactness")
    assert done.returncode == (0 if ok else 1)
    assert f"2 cases, {'all' if ok else 'NOT all'} within 1e-09" in done.stdout
    document = json.loads(_run("exactness", "--json").stdout)
    assert document["worst"] == {"output": 4e-12, "loss": 2e-12, "gradient": 3e-12, "weights": weights}
    assert (document["cases"], document["ok"], document["tolerance"]) == (2, ok, 1e-9)
    assert document["rows"][1] | {"model": "gine", "replicas": 2, "splits": 2, "output": 4e-12} == document["rows"][1]
    assert not exactness.ExactnessReport([]).ok


@pytest.mark.parametrize(
    "asked, meshes",
    [
        ([], exactness.MESHES),
        (["--ranks", "2"], ((1, 2),)),
        (["--ranks", "1", "--ranks", "4"], ((1, 1), (1, 4), (2, 2))),
    ],
)
def test_exactness_runs_on_the_ranks_asked_for(
    asked: list[str], meshes: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def record(given: list[tuple[int, int]], *_: Any, **__: Any) -> exactness.ExactnessReport:
        seen.extend(given)
        return exactness.ExactnessReport([])

    monkeypatch.setattr(exactness, "run_exactness", record)
    _run("exactness", *asked)
    assert tuple(seen) == meshes
    assert _run("exactness", "--ranks", "5").returncode == 2


def test_tasks_are_chosen_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = exactness_tasks.TaskCase("pairs", "joint", "sage", "split", True, 2)
    found = [exactness_tasks.TaskDifferences(output=2e-12), exactness_tasks.TaskDifferences(draws=1)]
    seen: list[Any] = []

    def run(meshes: Any, tasks: Any, *_: Any, **__: Any) -> exactness.ExactnessReport:
        seen.append((meshes, tasks))
        return exactness.ExactnessReport([exactness.ExactnessRow(1, 2, case, each) for each in found])

    monkeypatch.setattr(exactness_tasks, "run_tasks", run)
    out = tmp_path / "2026-11-17-tasks"
    done = _run("exactness-tasks", "--ranks", "2", "--task", "pairs", "--out", str(out))
    assert done.returncode == 1 and "2 cases, NOT all within 1e-09" in done.stdout  # an edge was drawn that should not
    assert seen == [([(1, 2)], ["pairs"])]
    document = json.loads(out.with_suffix(".json").read_text())
    assert not document["ok"] and [row["draws"] for row in document["rows"]] == [0, 1]
    page = out.with_suffix(".md").read_text()
    assert "| pairs | joint | sage | 2 | 2.0e-12 |" in page and "differ from those of one process: 1." in page
    found.pop()
    assert _run("exactness-tasks").returncode == 0 and seen[-1] == (list(exactness.MESHES), list(exactness_tasks.TASKS))
    monkeypatch.undo()
    assert "task: expected one of samplers" in _run("exactness-tasks", "--task", "dreams").stderr


def test_every_command_that_reads_its_own_arguments_can_be_called(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (place, _) in _SCRIPTS.items():
        module_name, function = place.split(":")
        module = import_module(f"gsplit_bench.{module_name}")
        main_function = getattr(module, function)
        inspect.signature(main_function).bind([])
        if hasattr(module, "argparse"):
            with pytest.raises(SystemExit, match="0"):
                main_function(["--help"])
            assert "usage: " in capsys.readouterr().out, name
    assert "predicted / measured seconds per epoch" in _run("planner-paper").stdout
