"""The command line as a user meets it: words and options, one JSON document, errors, interruptions."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import typer.main
from rich.console import Console
from typer.testing import CliRunner

from gsplit.cli import console as console_module
from gsplit.cli.main import app
from gsplit.cli.store_view import describe, show
from gsplit.store.reader import open_store

SNAPSHOT = Path(__file__).parents[2] / "assets" / "command_line.json"


def _gsplit(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "gsplit", *map(str, words)]


def _run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in this process: starting another takes seconds."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(words, result.exit_code, result.stdout, result.stderr)


def _words(command: Any) -> Any:
    if isinstance(command, click.Group) or hasattr(command, "commands"):
        return {name: _words(sub) for name, sub in sorted(command.commands.items())}
    return [max(p.opts, key=len) if p.param_type_name == "option" else p.name for p in command.params]


def test_words_and_options_are_as_recorded() -> None:
    """A change here is a change for users: record it in the snapshot and in CHANGELOG.md."""
    assert _words(typer.main.get_command(app)) == json.loads(SNAPSHOT.read_text())


def _commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        return [(path, command)]
    return [(path, command), *(found for n, sub in command.commands.items() for found in _commands(sub, (*path, n)))]


def test_help_is_plain_whole_and_fits_80_columns() -> None:
    for path, command in _commands(typer.main.get_command(app)):
        result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
        screen = result.stdout
        assert result.exit_code == 0
        assert max(map(len, screen.splitlines())) <= 80
        plain = re.sub(r"COMMAND \[ARGS\]\.\.\.|N,N,\.\.\.|(RUN|GRAPH)\}\.\.\.", "", screen)
        assert "╭" not in screen and "..." not in plain
        flat = re.sub(r"\s+", "", screen)  # words may be broken at a hyphen
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            assert re.sub(r"\s+", "", text) in flat, (path, parameter.name)
            assert text or parameter.param_type_name == "argument", (path, parameter.name)


def test_help_of_training_begins_with_the_main_options_and_has_all_in_groups() -> None:
    for verb in ("train", "verify"):
        screen = CliRunner().invoke(app, [verb, "--help"]).stdout
        titles = re.findall(r"^(\w.*):$", screen, re.MULTILINE)
        assert titles[:3] == ["Arguments", "Main options", "Model"] and "Other options" not in titles
    main = CliRunner().invoke(app, ["train", "--help"]).stdout.split("\nModel:")[0]
    assert len(re.findall(r"^  --", main, re.MULTILINE)) == 13


@pytest.mark.parametrize(
    "words, use",
    [
        (["train", "--layers", "3"], "--fanout 15,10,5, with a number of neighbours for each layer"),
        (["verify", "--learning-rate=0.1"], "--lr"),
        (["train", "--num-workers", "4"], "--prefetch 2N --sampling-threads N"),
        (["infer", "--ranks", "2"], "--nproc"),
    ],
)
def test_names_of_options_elsewhere_lead_to_ours(words: list[str], use: str) -> None:
    done = _run(words[0], "g.gsplit", *words[1:])
    given = words[1].partition("=")[0]
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"Error: No such option: {given}. Fix: use {use}.")


def test_an_option_that_a_command_has_is_not_taken_for_another() -> None:
    assert "Invalid value for '--layers'" in _run("plan", "g.gsplit", "--layers", "many").stderr
    assert "Fix" not in _run("partition", "g.gsplit", "o.gsplit", "--parts", "2", "--lr", "3").stderr


def test_commands_are_listed_as_a_user_comes_to_need_them() -> None:
    said = CliRunner().invoke(app, ["--help"]).stdout
    listed = [line.split()[0] for line in said.partition("Commands:")[2].splitlines() if line[2:3].strip()]
    assert listed[:3] == ["import", "inspect", "convert"]
    assert "--cache SIZE" in CliRunner().invoke(app, ["train", "--help"]).stdout


def test_every_summary_starts_with_a_verb() -> None:
    verbs = {"Check", "Compare", "Generate", "Import", "Make", "Measure", "Partition", "Show", "Train", "Write"}
    assert {command.help.split()[0] for _, command in _commands(typer.main.get_command(app))} <= verbs


def test_the_module_is_the_command_and_knows_its_version() -> None:
    done = subprocess.run(_gsplit("--version"), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, version("gsplit"), "")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("freeze", ["", "import gc; gc.freeze(); "])  # as the launcher of ranks does
def test_a_command_that_imports_triton_ends_without_a_report_of_leaks(freeze: str) -> None:
    code = f"import triton; {freeze}import sys; sys.argv[1:] = ['--version']; from gsplit.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cli") / "g.gsplit"
    done = _run("import", "synthetic", path, "--vertices", "500", "--edges", "4000", "--seed", "7", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert (document["num_vertices"], document["num_edges"]) == (500, 4000)
    assert document["edges_per_s"] == pytest.approx(4000 / document["seconds"])
    return path


def test_inspect_says_the_same_to_people_and_programs(store: Path) -> None:
    done = _run("inspect", store, "--json", "--verify")
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert document["verified"] is True
    assert document | {"verified": None} == describe(open_store(store)) | {"verified": None}
    assert sum(document["in_degree_histogram"]) == 500
    screen = _run("inspect", store).stdout
    for text in ("vertices           500", "edges              4,000", "self-loops         0", "classes            16"):
        assert text in screen
    assert f"targets train      {document['targets']['train']}" in screen
    assert "in-degrees" in screen
    assert "import synthetic" in screen


def test_a_wide_path_is_not_broken_on_a_narrow_screen(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(describe(open_store(store)), Console(width=40))
    assert str(store) in capsys.readouterr().out


def test_partition_inspect_and_shard(store: Path, tmp_path: Path) -> None:
    made, half = tmp_path / "p.gsplit", tmp_path / "half.gsplit"
    small = ["--fanout", "3,3", "--batch-size", "64", "--epochs", "2"]
    document = json.loads(_run("partition", store, made, "--parts", "4", *small, "--json").stdout)
    assert document["num_parts"] == 4 and sum(document["partition"]["part_sizes"]) == 500
    assert [line["ranks"] for line in document["partition"]["ranks"]] == [2, 3, 4]
    assert document["partition"]["settings"]["objective"] == "gsplit"
    screen = _run("inspect", made, "--verify")
    assert screen.returncode == 0, screen.stderr
    assert "4 parts by gsplit with metis, for train targets, fanout [3, 3], batch 64" in screen.stdout
    assert "or partition with --parts 3" in screen.stdout
    again = _run("partition", store, made, "--parts", "2", *small, "--overwrite", "--objective", "random")
    assert again.returncode == 0, again.stderr
    assert "2 parts by random with random" in again.stdout and "presampled" in again.stdout
    shard = json.loads(_run("shard", made, half, "--host", "1", "--hosts", "2", "--json").stdout)
    assert shard["vertex_range"] == [_first_cut(made), 500]
    assert json.loads(_run("inspect", half, "--verify", "--json").stdout)["verified"] is True


def test_convert_and_foresee_memory(store: Path, tmp_path: Path) -> None:
    made, small = tmp_path / "p.gsplit", tmp_path / "c.gsplit"
    settings = ["--fanout", "3,3", "--batch-size", "64", "--epochs", "1", "--objective", "random"]
    assert _run("partition", store, made, "--parts", "3", *settings).returncode == 0
    converted = _run("convert", made, small, "--features", "int8")
    assert converted.returncode == 0, converted.stderr
    assert "with a scale per row" in converted.stdout
    document = json.loads(_run("convert", made, small, "--features", "float16", "--overwrite", "--json").stdout)
    assert document["features"]["x"]["dtype"] == "float16"
    assert "expected one of float32" in _run("convert", made, tmp_path / "d.gsplit", "--features", "int4").stderr
    asked = ["inspect", str(small), "--memory", "--ranks", "2", "--cache", "2kB"]
    ranks = json.loads(_run(*asked, "--json").stdout)["memory"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["num_bytes"] == sum(rank["anonymous"].values()) and 0 < rank["expected_hit_rate"] < 1
    screen = _run(*asked).stdout
    assert "expected cache hits" in screen and "counted over" in screen and "rank 1" in screen
    bounded = _run("inspect", small, "--memory", "--fanout", "2", "--batch-size", "10").stdout
    assert "bounded by fanouts 2 and batch size 10" in bounded and "expected cache hits" not in bounded
    assert "cache: expected a size in bytes" in _run("inspect", small, "--memory", "--cache", "much").stderr


def _first_cut(path: Path) -> int:
    return open_store(path).part_boundaries[1]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "words, message",
    [
        (("inspect", "absent.gsplit"), "absent.gsplit: expected the directory of a store"),
        (("import", "npz", "absent.npz", "OUT"), "absent.npz: expected a .npz file"),
        (("import", "ogb", "absent", "OUT"), "absent: expected raw/edge.csv.gz"),
        (("import", "tables", "absent.csv", "OUT"), "absent.csv: expected a table"),
        (("import", "synthetic", "OUT", "--vertices", "1", "--edges", "1"), "num_vertices: expected 2 to"),
        (("partition", "absent.gsplit", "OUT", "--parts", "2"), "absent.gsplit: expected the directory of a store"),
        (("shard", "absent.gsplit", "OUT", "--host", "0", "--hosts", "2"), "expected the directory of a store"),
        (("import", "synthetic", "x.store", "--vertices", "9", "--edges", "1"), "expected NAME.gsplit"),
    ],
)
def test_errors_are_one_line_and_exit_with_two(
    tmp_path: Path, words: tuple[str, ...], message: str, as_json: bool
) -> None:
    out = str(tmp_path / "g.gsplit")
    done = _run(*(out if w == "OUT" else w for w in words), *(["--json"] if as_json else []))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    if as_json:
        assert message in json.loads(done.stdout)["error"]
    else:
        assert done.stdout == ""


def test_wrong_options_are_refused() -> None:
    for words in (("import", "tables", "a.csv", "b.gsplit", "--ids", "magic"), ("inspect", "x", "--wat"), ("train",)):
        done = _run(*words)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_import_says_so_and_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    out = tmp_path / "g.gsplit"
    command = _gsplit("import", "synthetic", out, "--vertices", "100000", "--edges", "200000000")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob(".g.gsplit.tmp-*/spill/*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=300)
    assert process.returncode == code
    assert "nothing was written" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_progress_shows_rate_and_remaining_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        console_module, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=100, no_color=True)
    )
    said, deadline = "", time.monotonic() + 300
    with console_module.progress_bars(as_json=False) as progress:
        for done in (0, 2_000_000, 4_000_000):
            progress("read edges", done, 8_000_000)
            while f"{done / 1e6:.2f} M / 8.00 M" not in said and done and time.monotonic() < deadline:
                time.sleep(0.02)
                said += capsys.readouterr().err
        progress("flush", 0, None)
    capsys.readouterr()
    assert "4.00 M / 8.00 M" in said
    assert "M/s" in said
    with console_module.progress_bars(as_json=True) as progress:
        progress("read edges", 1, 2)
    assert capsys.readouterr().err == ""


def test_numpy_table_and_ogb_commands_work(tmp_path: Path) -> None:
    edges = np.array([[0, 1, 2, 2], [1, 2, 2, 0]])
    np.savez(tmp_path / "g.npz", edge_index=edges, extra=np.zeros(3))
    (tmp_path / "e.csv").write_text("a;b;w\n" + "".join(f"n{s};n{d};{s}.5\n" for s, d in edges.T))
    npz = _run("import", "npz", tmp_path / "g.npz", tmp_path / "n.gsplit", "--drop-self-loops")
    assert npz.returncode == 0, npz.stderr
    assert re.search(r"self loops dropped +1\b", npz.stdout)
    assert "note: not imported: extra" in npz.stdout
    options = ["--src", "a", "--dst", "b", "--delimiter", ";", "--edge-column", "w", "--symmetrise", "--json"]
    tables = _run("import", "tables", tmp_path / "e.csv", tmp_path / "t.gsplit", *options)
    document = json.loads(tables.stdout)
    assert document["ids"] == "names"
    assert document["edge_arrays"] == {"w": {"dtype": "float64", "shape": [7]}}
    assert document["provenance"][0]["counts"]["reverse_edges_added"] == 3


def test_odd_graphs_and_odd_names_are_shown_as_they_are(tmp_path: Path) -> None:
    members: dict[str, Any] = {"edge_index": np.empty((2, 0), np.int64), "[/x]": np.zeros(1)}
    np.savez(tmp_path / "e.npz", **members)
    done = _run("import", "npz", tmp_path / "e.npz", tmp_path / "e.gsplit")
    assert done.returncode == 0, done.stderr
    assert "note: not imported: [/x]" in done.stdout
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    plain = subprocess.run(_gsplit("inspect", tmp_path / "e.gsplit"), capture_output=True, env=environment, check=False)
    assert plain.returncode == 0, plain.stderr


def test_an_existing_output_is_refused_before_the_input_is_read(store: Path) -> None:
    done = _run("import", "npz", "absent.npz", store)
    assert "expected no file or directory of this name" in done.stderr


def test_a_closed_pipe_is_not_an_error(store: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m gsplit inspect {store} --json | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr
