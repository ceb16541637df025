"""The commands of ``python -m gsplit_bench``: what they print and refuse."""

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from gsplit.cli import main
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
