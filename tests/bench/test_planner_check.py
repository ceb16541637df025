"""The check of the planner counts regret and errors right, on made-up records."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gsplit.planner.estimate import StageSeconds
from gsplit.planner.hardware import PRESETS, write_hardware
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench import planner_check as check
from gsplit_bench.report.documents import PlannerCheck


def _record(graph: str, system: str, wall: float, **more: Any) -> dict[str, Any]:
    spread = {"median": wall, "low": wall, "high": wall}
    return {
        "graph": graph,
        "model": "sage",
        "system": system,
        "ranks": 2,
        "replicas": 1,
        "allocator": "tuned",
        "features": "memory",
        "batch_size": 32,
        "hidden": 8,
        "fanout": [2, 2],
        "wall_s": spread,
        "cpu_s": spread,
        "stages_s": {"sample": 0.2, "load": 1e-6},
    } | more


def _step(wall: float, sample: float) -> Any:
    stages = StageSeconds(sample, 0, 0, 0, 0, 0, 0, 0, 0)
    return SimpleNamespace(wall_s=wall, cpu_s=2 * wall, ranks=(stages, stages))


def test_regret_is_the_chosen_strategy_over_the_best_measured() -> None:
    records = [
        _record("a", "split", 1.0),
        _record("a", "data", 1.2),
        _record("a", "dgl", 0.1),  # a peer is no choice
        _record("b", "split", 2.0),
        _record("b", "data", 1.0),
        _record("c", "split", 1.0),  # nothing to choose from
    ]
    checks = check.check_points(records, lambda found: {"split": _step(0.9, 0.25), "data": _step(1.0, 0.2)})
    assert [(c.chosen, c.best, round(c.regret, 6)) for c in checks] == [("split", "split", 0.0), ("split", "data", 1.0)]
    assert checks[0].stage_errors == pytest.approx({"split sample": 0.25, "data sample": 0.0})
    assert checks[0].total_errors == pytest.approx({"split": -0.1, "data": 1 / 1.2 - 1})
    summary = check.summarise(checks)
    assert (summary.num_points, summary.share_close, summary.worst_regret) == (2, 0.5, 1.0)
    assert summary.median_stage_error == pytest.approx(0.125)
    by_cpu = check.check_points(records, lambda found: {"split": _step(3, 0), "data": _step(1, 0)}, "cpu_s")
    assert [c.chosen for c in by_cpu] == ["data", "data"]


def test_the_script_predicts_from_stores(tmp_path: Path) -> None:
    build_store(synthetic_source(PlantedGraph(400, 4000, num_features=4, num_classes=2)), tmp_path / "a.gsplit")
    records = tmp_path / "records.json"
    records.write_text(json.dumps({"records": [_record("a", "split", 0.2), _record("a", "data", 0.3)]}))
    machine = tmp_path / "machine.json"
    write_hardware(PRESETS["v100-nvlink"], machine, {})
    options = ["--stores", str(tmp_path), "--hardware", str(machine), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "gsplit_bench", "planner-check", str(records), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    document = json.loads(done.stdout)
    assert len(document["choices"]) == 1 and document["choices"][0]["best"] == "split"
    assert {point["system"] for point in document["points"]} == {"split", "data"}
    assert PlannerCheck.model_validate(document).worst_regret == document["worst_regret"]
