"""Counting is exact and costs next to nothing."""

import json
import time
from pathlib import Path

import pytest

from gsplit.telemetry import Telemetry


def test_steps_are_closed_into_records(tmp_path: Path) -> None:
    with Telemetry(3, tmp_path / "t.jsonl") as telemetry:
        for step in range(2):
            with telemetry.span("sample"):
                time.sleep(0.01)
            with telemetry.span("sample"):
                telemetry.count("edges", 5)
            telemetry.count("edges", step)
            telemetry.peak("batch_bytes", 7)
            telemetry.peak("batch_bytes", 3)
            telemetry.end_step(1, step)
    assert [record.counts for record in telemetry.records] == [{"edges": 5}, {"edges": 6}]
    assert all(0.01 <= record.seconds["sample"] < 0.1 for record in telemetry.records)
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [(line["rank"], line["epoch"], line["step"], line["peaks"]) for line in lines] == [
        (3, 1, 0, {"batch_bytes": 7}),
        (3, 1, 1, {"batch_bytes": 7}),
    ]


def test_a_failing_span_is_still_timed() -> None:
    telemetry = Telemetry()
    try:
        with telemetry.span("split"):
            raise RuntimeError
    except RuntimeError:
        pass
    assert "split" in telemetry.end_step(0, 0).seconds


def test_a_step_of_counting_costs_less_than_a_hundredth_of_a_small_step(tmp_path: Path) -> None:
    """A 3-layer step makes about 15 spans, 15 counts and 5 peaks; a small one takes 20 ms (benchmarks/results)."""
    with Telemetry(0, tmp_path / "t.jsonl") as telemetry:
        best = min(_count_one_step(telemetry, step) for step in range(200))
    assert best < 0.01 * 0.020


def _count_one_step(telemetry: Telemetry, step: int) -> float:
    start = time.perf_counter()
    for _ in range(15):
        with telemetry.span("sample"):
            telemetry.count("edges", 1)
    for _ in range(5):
        telemetry.peak("batch_bytes", 1)
    telemetry.end_step(0, step)
    return time.perf_counter() - start


def test_cpu_seconds_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 7.0, 7.5, 9.0, 9.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    telemetry = Telemetry()  # at 0
    telemetry.begin_step()  # at 5: what came before is not part of it
    assert telemetry.end_step(0, 0).cpu_seconds == 2.0  # ended at 7, and begun anew at 7.5
    assert telemetry.end_step(0, 1).cpu_seconds == 1.5
