"""The trace of a run and the picture of one step: from the spans of made-up telemetry and of real steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from report_samples import save_run
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.report.figures import typical_window
from gsplit.report.reading import Run, StepLine, read_run
from gsplit.report.trace import trace_events, write_trace
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source


def _check_lanes(events: list[dict[str, Any]]) -> None:
    """Durations are not negative; in every lane, spans are nested or apart."""
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)


def test_a_rank_is_a_process_and_a_thread_a_lane(tmp_path: Path) -> None:
    run = read_run(save_run(tmp_path / "run", ranks=3, steps=2))
    assert write_trace([run], tmp_path / "t.json") == 3 * 2 * 6
    document = json.loads((tmp_path / "t.json").read_text())
    events = document["traceEvents"]
    _check_lanes(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads.values()) == {"gsplit-loader", "MainThread"}
    for event in events:
        if event["ph"] == "X":
            is_loading = event["name"] in ("sample", "load_features")
            assert threads[event["pid"], event["tid"]] == ("gsplit-loader" if is_loading else "MainThread")
    starts = {event["pid"]: event["ts"] for event in reversed(events) if event["name"] == "sample"}
    assert starts == {0: 0.0, 1: 2000.0, 2: 4000.0}  # ranks share a clock


def test_ranks_of_several_runs_are_processes_of_their_own(tmp_path: Path) -> None:
    runs = [read_run(save_run(tmp_path / name)) for name in ("one", "two")]
    events = trace_events(runs)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["one: rank 0", "one: rank 1", "two: rank 0", "two: rank 1"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


def test_a_step_is_drawn_with_what_the_loader_did_meanwhile(tmp_path: Path) -> None:
    run = read_run(save_run(tmp_path / "run", steps=5))
    window = typical_window(run)
    assert window is not None and (window.epoch, window.step) != (0, 0)
    assert window.milliseconds == pytest.approx(57)  # 35 to 90 of rank 0, 2 later on rank 1
    lanes = {(bar.rank, bar.lane) for bar in window.bars}
    assert lanes == {(rank, lane) for rank in (0, 1) for lane in ("training", "loader")}
    assert {bar.stage for bar in window.bars if bar.lane == "loader"} == {"load_features"}  # of the step after
    assert [(bar.start_ms, bar.end_ms) for bar in window.bars if bar.stage == "backward"] == [(25, 50), (27, 52)]
    assert {bar.stage: bar.depth for bar in window.bars}["shuffle"] == 1
    assert all(0 <= bar.start_ms <= bar.end_ms <= window.milliseconds for bar in window.bars)


@pytest.mark.parametrize("prefetch, threads", [(0, 1), (2, 1), (2, 2)])
def test_spans_of_real_steps_make_a_valid_trace(prefetch: int, threads: int, tmp_path: Path) -> None:
    store = build_store(synthetic_source(PlantedGraph(500, 4000, num_features=8, num_classes=4)), tmp_path / "g.gsplit")
    mesh = gsplit.init()
    telemetry = tmp_path / "rank0.jsonl"
    loader = gsplit.NeighborLoader(
        store,
        [3, 3],
        "train",
        batch_size=50,
        mesh=mesh,
        prefetch=prefetch,
        sampling_threads=threads,
        telemetry=telemetry,
    )
    model = gsplit.parallelize(GraphSAGE(8, 8, 2, 4), mesh)
    gsplit.Trainer(model, torch.optim.Adam(model.parameters()), loader).train_epoch(3)
    loader.telemetry.close()
    lines = [StepLine.model_validate_json(line) for line in telemetry.read_text().splitlines()]
    sample = read_run(save_run(tmp_path / "run"))
    run = Run("real", sample.settings, sample.history, {0: lines})
    events = [dict(event) for event in trace_events([run])]
    _check_lanes(events)
    stages = {event["name"] for event in events if event["ph"] == "X"}
    assert {"sample", "load_features", "shuffle", "forward", "backward", "optimizer"} <= stages
    assert len({event["tid"] for event in events}) == (1 + threads if prefetch else 1)
    window = typical_window(run)
    assert window is not None and {"forward", "backward"} <= {bar.stage for bar in window.bars}
