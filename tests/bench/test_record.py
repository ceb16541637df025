"""``python -m gsplit_bench record``: its table names what exists; a folder is one commit, continued and not mixed."""

import json
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from gsplit_bench import measured, record
from gsplit_bench.commands import app
from gsplit_bench.measurements import GRAPHS, MEASUREMENTS, Measurement, split_field
from gsplit_bench.train_study import PRESETS

ROOT = Path(__file__).parents[2]
PRINTS = "python -c 'print(1)' > {out}.json#runs[]"


def test_stores_and_records_of_the_table_exist() -> None:
    names = [measurement.name for measurement in MEASUREMENTS]
    assert len(set(names)) == len(names) > 20
    for number, measurement in enumerate(MEASUREMENTS):
        assert {split_field(field)[0] for field in measurement.stores} <= set(GRAPHS)
        assert set(measurement.needs) <= set(names[:number])
        assert not measurement.quick or "{quick}" in " ".join(measurement.commands)


def test_the_record_without_a_date_counts_and_then_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    for name in ("one", "2026-11-19-one", "2026-11-16-two", "2026-11-18-two", "2026-11-20-other-two"):
        (tmp_path / f"{name}.json").write_text("{}")
    assert [measured.find_record(name).stem for name in ("one", "two")] == ["one", "2026-11-18-two"]


def _options(program: str, path: list[str]) -> list[str] | None:
    """The options of a command, or None if its script reads its own arguments."""
    if program == "gsplit":
        found = json.loads((ROOT / "tests" / "assets" / "command_line.json").read_text())
        for word in path:
            found = found[word] if isinstance(found, dict) else found
        return list(found)
    known = vars(typer.main.get_command(app))["commands"][path[0]]
    return [option for parameter in known.params for option in parameter.opts] or None


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda measurement: measurement.name)
def test_commands_and_options_of_the_table_exist(measurement: Measurement) -> None:
    for line in measurement.commands:
        python, module, *words = shlex.split(line.format_map(defaultdict(str, quick=measurement.quick or "")))
        assert python == "python"
        if module != "-m":
            assert (ROOT / module).is_file()
            continue
        options = _options(words[0], words[1:3])
        assert options is None or {word for word in words if word.startswith("--")} <= set(options), line
        assert "--preset" not in words or words[words.index("--preset") + 1] in PRESETS


def test_what_fits_is_chosen_by_value() -> None:
    table = [Measurement(name, minutes, (), quick) for name, minutes, quick in _TABLE]
    choices: list[tuple[dict[str, Any], float | None, bool, list[str]]] = [
        ({}, None, False, ["a", "b", "c", "d"]),
        ({"a": {}}, None, False, ["b", "c", "d"]),
        ({}, 12, False, ["a", "d"]),
        ({}, 4, False, ["d"]),
        ({}, 1, True, ["a", "b"]),
    ]
    for done, minutes, quick, expected in choices:
        assert [each.name for each in record.choose(table, done, minutes, quick=quick)] == expected


_TABLE: list[tuple[str, float | None, str | None]] = [("a", 10, ""), ("b", 5, "--x"), ("c", None, None), ("d", 2, None)]


@pytest.mark.parametrize(
    "target, document",
    [
        ("", [7]),
        ("#rows", {"commit": "abc", "rows": [7]}),
        ("#quality/a graph", {"commit": "abc", "quality": {"a graph": [7]}}),
        ("#runs[]", {"commit": "abc", "runs": [[7]]}),
    ],
)
def test_what_a_command_prints_has_a_place(
    target: str, document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "current_commit", lambda: "abc")
    record._place([7], f"{tmp_path / 'x.json'}{target}")
    assert json.loads((tmp_path / "x.json").read_text()) == document


def _record(tmp_path: Path, *words: str) -> tuple[int, str]:
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(app, ["record", *folders, *words], catch_exceptions=False)
    return result.exit_code, result.output


def test_a_folder_is_continued_and_belongs_to_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = "python -c 'print(2)' > {out}.json  # {folder}/fails.json"
    table = (
        Measurement("fails", 1, ("python -c 'raise SystemExit(3)'",)),
        Measurement("needs", 1, (reads,)),
        Measurement("runs", 1, (PRINTS, PRINTS)),
    )
    monkeypatch.setattr(record, "MEASUREMENTS", table)
    monkeypatch.setattr(record, "current_commit", lambda: "abc-changed")
    code, said = _record(tmp_path)
    assert code == 2 and "expected a checkout without changes (got abc-changed)" in said
    monkeypatch.setattr(record, "current_commit", lambda: "abc")
    code, said = _record(tmp_path)
    assert code == 1 and "needs: left out, needs fails" in said and said.endswith("failed: fails\n")
    index = json.loads((tmp_path / "out" / record.INDEX).read_text())
    entry = index["measurements"]["runs"]
    assert index["commit"] == "abc" and list(index["measurements"]) == ["runs"] and entry["files"] == ["runs.json"]
    assert entry["started"] <= entry["ended"] and len(entry["load_before"]) == 3
    assert entry["machine"]["cores"] > 0 and entry["versions"]["torch"]
    assert json.loads((tmp_path / "out" / "runs.json").read_text()) == {"commit": "abc", "runs": [1, 1]}
    code, said = _record(tmp_path, "--only", "runs")
    assert (code, said) == (0, "")  # it is there
    monkeypatch.setattr(record, "current_commit", lambda: "def")
    code, said = _record(tmp_path)
    assert code == 2 and "choose another --out" in said
    code, said = _record(tmp_path, "--only", "dreams")
    assert code == 2 and "--only: expected some of fails, needs, runs (got dreams)" in said


def test_the_list_has_minutes_and_stores(tmp_path: Path) -> None:
    code, said = _record(tmp_path, "--list", "--only", "bare-loop,quality")
    assert code == 0 and "bare-loop: 2 minutes; stores: arxiv; 1 rows of docs/measured.md" in said
    assert "quality: ? minutes" in said and said.endswith("2 minutes, and 1 measurements of unknown length\n")


def test_stores_are_made_once(tmp_path: Path) -> None:
    store = record._make_store("planted1m_2", tmp_path, quick=True)
    raw = record._make_store("planted1m_raw", tmp_path, quick=True)
    assert store == tmp_path / "planted1m_2.gsplit" and raw == tmp_path / "graphs" / "planted1m.gsplit"
    before = store.stat().st_mtime_ns
    assert record._make_store("planted1m_2", tmp_path, quick=True).stat().st_mtime_ns == before


def test_commands_keep_compiled_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert record._run(f"python -c 'import sys; print(int(sys.dont_write_bytecode))' > {tmp_path}/x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == 0
