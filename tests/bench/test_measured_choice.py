"""A choice by trial steps is judged by the steps after the trial, on made-up records."""

import json
from pathlib import Path
from typing import Any

import pytest

from gsplit_bench.measured_choice import HELD_OUT, TRIAL, Point, describe, judge, read_points, summarise


def _record(trial: dict[str, float], after: dict[str, float], shortlist: list[str]) -> dict[str, Any]:
    """Every strategy takes the same time in all steps of the trial, and another after it; CPU time is twice as long."""
    steps = {
        name: [(seconds, 2 * seconds)] * TRIAL + [(after[name], 2 * after[name])] * HELD_OUT
        for name, seconds in trial.items()
    }
    point = {"graph": "a", "model": "sage", "ranks": 2, "batch_size": 32, "features": "memory"}
    return {**point, "shortlist": shortlist, "steps_s": steps}


def test_the_fastest_of_the_shortlist_is_judged_by_other_steps() -> None:
    trial = {"split": 1.0, "data": 0.9, "data(owner)": 0.8}
    after = {"split": 1.0, "data": 1.1, "data(owner)": 0.5}
    by_trial, by_estimate = judge(_record(trial, after, ["split", "data"]), "wall")
    assert (by_trial.chosen, by_trial.best) == ("data", "data(owner)") and by_trial.regret == pytest.approx(1.2)
    assert by_estimate.chosen == "split" and by_estimate.regret == pytest.approx(1.0)
    right = _record(trial, after, ["split", "data(owner)"])
    assert judge(right, "cpu")[0].regret == 0
    found = summarise([right, _record(trial, after, ["split", "data"])], "cpu")
    assert found["trial"] == {"within_5_percent": 0.5, "worst_regret": pytest.approx(1.2)}
    assert "by cpu seconds, choice by trial: 100% of 1 of 60 points" in "\n".join(describe([right], 60))


def test_points_and_their_strategies_are_those_of_a_planner_check(tmp_path: Path) -> None:
    entry = {"graph": "a", "model": "gat", "ranks": 4, "batch_size": 8, "features": "disk", "predicted_s": 1.0}
    systems = ["split", "push_pull", "data", "split"]
    path = tmp_path / "check.json"
    path.write_text(json.dumps({"points": [{**entry, "system": name} for name in systems]}))
    assert read_points(path) == {Point("a", "gat", 4, 8, "disk"): ["split", "data"]}
