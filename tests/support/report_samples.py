"""Small documents of measurements and a small run, made up: what a report is tested with."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

from gsplit.run.config import TrainSettings
from gsplit.run.folder import begin_run, finish_run, telemetry_path
from gsplit.run.results import ModelShape
from gsplit.telemetry import StepRecord, TimedSpan
from gsplit.training.train_state import Evaluation, History

__all__ = [
    "PageLinks",
    "bench_document",
    "count",
    "partition_document",
    "planner_document",
    "record",
    "save_run",
    "write",
]

_STAGES = {
    "sample": 0.12,
    "split": 0.05,
    "exchange_ids": 0.03,
    "load": 0.1,
    "exchange_features": 0.04,
    "shuffle": 0.06,
    "forward": 0.3,
    "backward": 0.28,
    "optimizer": 0.02,
}
_COSTS = {
    "split": 1.0,
    "split+labor": 0.8,
    "data": 1.35,
    "data_cached": 1.1,
    "push_pull": 1.2,
    "hybrid(1)": 1.05,
    "dgl": 2.4,
    "quiver": 1.2,
    "pyg": 4.1,
}


class PageLinks(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [(name, value or "") for name, value in attrs if name in ("src", "href", "srcset", "data")]


def record(graph: str, model: str, system: str, ranks: int, **more: Any) -> dict[str, Any]:
    """A record of ``gsplit_bench train``: a system has its cost, of which every rank does a part."""
    cost = more.pop("cost", _COSTS[system]) * (2.5 if model == "gat" else 1.0) / ranks**0.7
    stages = {name: share * cost for name, share in _STAGES.items()}
    redundancy = 1.0 + 0.3 * (ranks - 1) if system.startswith("data") else 1.0
    per_rank = [cost * (0.9 + 0.2 * rank / max(1, ranks - 1)) for rank in range(ranks)]
    return {
        "graph": graph,
        "model": model,
        "system": system,
        "ranks": ranks,
        "replicas": 1,
        "allocator": "tuned",
        "features": "memory",
        "batch_size": 1024,
        "hidden": 256,
        "num_layers": 3,
        "fanout": [15, 15, 15],
        "partition": "gsplit",
        "steps": 2,
        "repeats": 3,
        "wall_s": {"median": cost * 1.1, "low": cost, "high": cost * 1.3},
        "cpu_s": {"median": sum(per_rank), "low": 0.9 * sum(per_rank), "high": 1.2 * sum(per_rank)},
        "cpu_s_per_rank": per_rank,
        "stages_s": stages,
        "stages_s_per_rank": [stages] * ranks,
        "edges": 900_000 * redundancy,
        "input_rows": 150_000 * redundancy,
        "rows_loaded": 150_000 * redundancy,
        "rows_sent": 40_000 * (ranks > 1),
        "bytes_sent": 20_000_000 * (ranks > 1),
        "peak_bytes_per_rank": [3e8] * ranks,
        "losses": [2.0, 1.5],
        "loss": 1.5,
    } | more


def count(graph: str, strategy: str, ranks: int) -> dict[str, Any]:
    """What each of so many ranks would do."""
    edges = 1e6 * (1 + 0.25 * ranks**0.6 if strategy != "split" else 1.0) / ranks
    return {
        "graph": graph,
        "strategy": strategy,
        "ranks": ranks,
        "batch_size": 1024,
        "fanout": [15, 15, 15],
        "edges": edges * ranks,
        "edges_per_rank": [edges * (1 + 0.1 * (rank % 2)) for rank in range(ranks)],
        "input_rows_per_rank": [edges / 6] * ranks,
        "rows_loaded_per_rank": [edges / 6] * ranks,
        "rows_sent_per_rank": [edges / 20 if strategy == "split" else 0.0] * ranks,
        "bytes_sent_per_rank": [edges * 50 if strategy == "split" and ranks > 1 else 0.0] * ranks,
        "imbalance": 1.0 + 0.02 * ranks**0.5,
    }


def bench_document(records: list[dict[str, Any]], counts: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A document of ``gsplit_bench train``."""
    return {
        "kind": "bench train",
        "preset": "main",
        "command": "python -m gsplit_bench train arxiv.gsplit --preset main",
        "commit": "0123abc",
        "date": "2026-11-16",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "dgl": None},
        "machine": {"cpu": "two cores <of something>", "cores": 2, "memory_bytes": 8e9},
        "records": records,
        "counts": counts or [],
    }


def planner_document() -> dict[str, Any]:
    """A planner's check."""
    points = [
        {
            "graph": graph,
            "model": "sage",
            "ranks": ranks,
            "batch_size": 1024,
            "features": "memory",
            "system": system,
            "predicted_s": _COSTS[system] / ranks * (1.1 if graph == "arxiv" else 0.95),
            "measured_s": _COSTS[system] / ranks,
            "stages": {name: [0.9 * share, share] for name, share in _STAGES.items()},
        }
        for graph in ("arxiv", "debian")
        for ranks in (2, 4)
        for system in ("split", "data", "data_cached")
    ]
    return {"kind": "planner check", "points": points, "within_5_percent": 0.93, "worst_regret": 0.08}


def partition_document() -> dict[str, Any]:
    """A document of ``gsplit_bench partition``."""
    shares = {"gsplit": 0.08, "node": 0.1, "edge": 0.12, "random": 0.75}
    rows = [
        {
            "parts": 4,
            "objective": objective,
            "solver": "random" if objective == "random" else "metis",
            "cross_edge_share": share,
            "rows_shuffled_per_input": 2 * share,
            "edge_imbalance": 1.1,
            "vertex_imbalance": 1.2,
        }
        for objective, share in shares.items()
    ]
    failed = {"parts": 4, "objective": "gsplit", "solver": "mtkahypar", "error": "not installed"}
    numbers = {"num_vertices": 100, "num_edges": 900, "batch_size": 10, "held_out_batches": 3}
    return numbers | {"rows": [*rows, failed]}


def write(path: Path, document: object) -> Path:
    """A document as a file."""
    path.write_text(json.dumps(document))
    return path


def save_run(folder: Path, *, ranks: int = 2, steps: int = 4, prefetch: bool = True, spans: bool = True) -> Path:
    """A folder as ``gsplit train --out`` leaves it, with a step every 100 ms and a rank that is late by 2."""
    begin_run(folder)
    for rank in range(ranks):
        lines = [_step(rank, number, prefetch, spans) for number in range(steps)]
        telemetry_path(folder, rank).write_text("".join(json.dumps(vars(line)) + "\n" for line in lines))
    history = History(
        [2.0 / (1 + n) for n in range(steps)], [0.1] * steps, [Evaluation(1, steps, {"val": 0.5, "test": 0.4})]
    )
    settings = TrainSettings(hidden=8, fanout=[3, 3], batch_size=32)
    weights = {"w": torch.zeros(1)}
    finish_run(folder, settings, ModelShape(num_features=4, num_classes=2), weights, history)
    return folder


def _step(rank: int, number: int, prefetch: bool, spans: bool) -> StepRecord:
    start = 10**12 + 100_000_000 * number + 2_000_000 * rank
    loader, early = ("gsplit-loader", 90) if prefetch else ("MainThread", 0)
    times = [
        ("sample", loader, 0 - early, 20 - early),
        ("load_features", loader, 20 - early, 30 - early),
        ("shuffle", "MainThread", 40, 45),
        ("forward", "MainThread", 35, 60),
        ("backward", "MainThread", 60, 85),
        ("optimizer", "MainThread", 85, 90),
    ]
    kept = [
        TimedSpan(name, thread, start + begin * 1_000_000, start + end * 1_000_000)
        for name, thread, begin, end in times
    ]
    seconds = {name: (end - begin) / 1e3 for name, _, begin, end in times}
    counts = {"edges": 100 + 10 * rank, "rows_loaded": 50}
    return StepRecord(rank, 0, number, 0.1, seconds, counts, {}, {}, tuple(kept) if spans else ())
