"""docs/paper.md: every module, function, command, strategy, peer and preset that it names exists."""

import inspect
import json
import re
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import typer.main

import gsplit
from gsplit.minibatch.strategy_names import parse_strategy
from gsplit_bench.commands import app
from gsplit_bench.paper import EXPERIMENTS
from gsplit_bench.paper_table import GRAPHS, MEASURED, MODELS
from gsplit_bench.train_study import PRESETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text()
TEXT = " ".join(PAGE.split())
ARXIV = ROOT / "benchmarks" / "results" / "2026-11-19-paper-arxiv"
_SYSTEMS = (("`data`", "data"), ("DGL", "dgl"), ("P3*", "p3"))
COMMANDS = json.loads((ROOT / "tests" / "assets" / "command_line.json").read_text())
QUOTED = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))


def _find(name: str) -> Any:
    """What a dotted name stands for: a module, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_every_name_in_the_code_exists() -> None:
    names = [re.fullmatch(r"(gsplit(?:_bench)?\.[\w.]+)(?:\((\w+)=\))?", quoted) for quoted in QUOTED]
    found = [match for match in names if match]
    assert len(found) > 25
    for match in found:
        named = _find(match[1])
        assert match[2] is None or match[2] in inspect.signature(named).parameters, match[0]


def test_every_command_and_option_exists() -> None:
    commands = [quoted.split() for quoted in QUOTED if quoted.startswith("gsplit ")]
    assert len(commands) > 5
    for words in commands:
        options: Any = COMMANDS
        rest = words[1:]
        while isinstance(options, dict):
            options, rest = options[rest[0]], rest[1:]
        assert [word for word in rest if word.startswith("--") and word not in options] == [], words


def test_every_measurement_and_preset_exists() -> None:
    benches: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = [quoted.split()[3:] for quoted in QUOTED if quoted.startswith("python -m gsplit_bench ")]
    assert len(found) > 10
    for name, *words in found:
        options = {option for parameter in benches[name].params for option in parameter.opts}
        assert [word for word in words if word.startswith("--") and word not in options] == [], words
    experiments = [quoted for quoted in QUOTED if re.fullmatch(r"(table|figure)\d\w?", quoted)]
    assert set(experiments) == set(EXPERIMENTS)
    presets = re.findall(r"--preset (\w+)", PAGE)
    assert len(presets) > 5
    assert [preset for preset in presets if preset not in PRESETS] == []


def test_every_strategy_exists() -> None:
    for name in ("split", "data", "data_cached"):
        assert f"`{name}`" in PAGE
        assert parse_strategy(name, 3).name == name
    assert parse_strategy("hybrid(2)", 3).split_layers == 2


def test_numbers_are_those_of_the_records() -> None:
    rows = (ROOT / "docs" / "measured.md").read_text().splitlines()
    row = next(line for line in rows if "instead of a random" in line)
    with_gsplit, with_edge = re.search(r"took ([\d.]+) CPU seconds with `gsplit` and ([\d.]+)", TEXT).groups()  # type: ignore[union-attr]
    assert f"CPU seconds per step {with_gsplit} instead" in row and f"`edge` partition: {with_edge}" in row
    ratios = [
        sum(MEASURED["Edge", model][graph]) / sum(MEASURED["GSplit", model][graph])
        for model, graph in product(MODELS, GRAPHS)
    ]
    assert f"Edge takes {min(ratios):.1f} to {max(ratios):.1f} times" in TEXT


def test_the_targets_of_one_class_are_those_of_the_record() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "2026-11-18-classes.json").read_text())["rows"]

    def medians(what: str, objective: str) -> list[float]:
        sizes = sorted({row["num_targets"] for row in rows}, reverse=True)
        return [
            median(row[what] for row in rows if (row["num_targets"], row["objective"]) == (size, objective))
            for size in sizes
        ]

    most, median_size = medians("work_imbalance", "edge")
    assert f"busiest part has {most:.2f} (16,284 targets) and {median_size:.2f} (1,350 targets) times" in TEXT
    assert {f"{work:.2f}" for work in medians("work_imbalance", "gsplit")} == {"1.09"} and "with `gsplit` 1.09" in TEXT
    cuts = zip(medians("cross_edge_share", "gsplit"), medians("cross_edge_share", "edge"), strict=True)
    fewer = [round(100 * (1 - ours / other)) for ours, other in cuts]
    assert f"{fewer[0]} and {fewer[1]} % fewer edges cross" in TEXT


def test_a_name_that_does_not_exist_is_found() -> None:
    with pytest.raises(AttributeError):
        _find("gsplit.minibatch.split.sp_sample")
    assert _find("gsplit.NeighborLoader") is gsplit.NeighborLoader


def _cpu_seconds(name: str, **wanted: Any) -> dict[tuple[str, str], float]:
    """CPU seconds of a step by model and system, on the page of arxiv."""
    records = json.loads((ARXIV / f"{name}.json").read_text())["records"]
    chosen = [record for record in records if all(record[key] == value for key, value in wanted.items())]
    found = {(record["model"], record["system"]): record["cpu_s"]["median"] for record in chosen}
    assert len(found) == len(chosen)
    return found


def _over_split(model: str, system: str, *found: dict[tuple[str, str], float]) -> list[str]:
    return [f"{each[model, system] / each[model, 'split']:.2f}" for each in found if (model, system) in each]


def test_the_page_of_arxiv_says_what_its_documents_have() -> None:
    step = {"ranks": 4, "replicas": 1, "batch_size": 1024, "hidden": 256, "fanout": [15] * 3, "partition": "gsplit"}
    experiments = ("table3", "table3-edge", "figure6a", "figure6b", "figure6c")
    same = [_cpu_seconds(name, **step) for name in experiments]
    alone = _cpu_seconds("figure6a", **(step | {"ranks": 1}))
    sage, gat = (_over_split(model, "p3", alone)[0] for model in ("sage", "gat"))
    assert f"On one rank, where it exchanges nothing, our P3* already takes {sage} (SAGE) and {gat} (GAT)" in TEXT
    on_disk, two_layers = _cpu_seconds("table3-cache"), _cpu_seconds("figure6e", fanout=[15, 15])
    targets = [_cpu_seconds("figure6d", batch_size=size, hidden=128) for size in (256, 1024, 4096)]
    for model, name in (("sage", "SAGE"), ("gat", "GAT")):
        ranges = [(words, _over_split(model, system, *same)) for words, system in _SYSTEMS]
        said = ", ".join(f"{words} {min(ratios)} to {max(ratios)}" for words, ratios in ranges)
        assert f"{name}: {said}." in TEXT
        assert f"{name} {', '.join(_over_split(model, 'data', *targets))}" in TEXT
        split = [each[model, "split"] for each in same]
        assert f"{min(split):.2f} to {max(split):.2f} {'' if model == 'sage' else 's '}({name})" in TEXT
    sage, gat = (_over_split(model, "quiver", on_disk)[0] for model in ("sage", "gat"))
    assert f"Quiver's cache takes {sage} (SAGE) and {gat} (GAT)" in TEXT
    sage, gat = (_over_split(model, "data", two_layers)[0] for model in ("sage", "gat"))
    assert f"With two layers {sage} and {gat}." in TEXT
    edge, own = (_cpu_seconds("table3-edge", partition=objective) for objective in ("edge", "gsplit"))
    sage, gat = (f"{edge[model, 'split'] / own[model, 'split']:.2f}" for model in ("sage", "gat"))
    assert f"a step takes {sage} (SAGE) and {gat} (GAT) times the CPU seconds" in TEXT
    page = (ARXIV / "paper.md").read_text()
    assert "| arxiv | 4 | gsplit | 7.5% |" in page and "| arxiv | 4 | edge | 12.5% |" in page
    assert all((ARXIV / picture).is_file() for picture in re.findall(r"\]\((.*?\.png)\)", page))
    assert "- Not run: figure7." in page and "the package torch-sparse" in page
