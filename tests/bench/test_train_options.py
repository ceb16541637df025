"""Options of ``python -m gsplit_bench train``: refused before anything is started, and counting without ranks."""

import json
from pathlib import Path

import pytest
from graphs import sample_store
from typer.testing import CliRunner

from gsplit_bench.commands import app


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(sample_store(tmp_path_factory.mktemp("bench") / "little.gsplit").path)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--ranks", "two"], "--ranks: expected positive numbers like 1,2,4 (got two)"),
        (["--threads", "1,none"], "--threads: expected positive numbers like 1,2,4 (got 1,none)"),
        (["--batch-size", "0"], "--batch-size: expected positive numbers"),
        (["--fanout", "a"], "--fanout: expected numbers like 15,10,5"),
        (["--preset", "figure9"], "--preset: expected one of redundancy"),
        (["--out", "/nowhere/at/all.json"], "expected a file in a folder that exists"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(store: str, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["train", store, *options, "--json"])
    assert result.exit_code == 2
    assert message in json.loads(result.stdout)["error"]


def test_results_are_not_written_over(store: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["train", store, "--out", str(path), "--json"])
    assert result.exit_code == 2 and "expected a new file" in result.stdout and path.read_text() == "{}"


def test_a_study_without_systems_counts_only(store: str, tmp_path: Path) -> None:
    options = ["--preset", "redundancy", "--count", "1,3", "--batch-size", "50", "--layers", "2"]
    result = CliRunner().invoke(app, ["train", store, *options, "--out", str(tmp_path / "o.json"), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["preset"] == "redundancy" and document["records"] == []
    counted = [(count["ranks"], count["strategy"], count["fanout"]) for count in document["counts"]]
    assert counted == [(ranks, name, [15, 15]) for ranks in (1, 3) for name in ("split", "data", "data(owner)")]
    written = json.loads((tmp_path / "o.json").read_text())
    assert written["counts"] == document["counts"]
