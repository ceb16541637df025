"""How right is the planner? Predict every point that ``python -m gsplit_bench train`` measured, and compare.

python -m gsplit_bench planner-check RECORDS.json [RECORDS.json ...] --stores FOLDER [--hardware this|FILE] [--json]

A point is (graph, model, ranks, replicas, batch size, hidden, fanout, memory or disk): the strategies measured there,
and no peers. Reported: the share of points whose chosen strategy is within 5 % of the best measured one, the worst
regret, and the median error of stage seconds. FOLDER has GRAPH.gsplit for every graph of the records. ``cpu`` in the
schema is CPU seconds: with ``--by cpu`` strategies are compared by those, which other programs on the machine disturb
less than wall time.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from gsplit.features.cache import stored_row_bytes
from gsplit.partitioning.presample import Workload
from gsplit.planner.calibration import measure_sampling, this_machine
from gsplit.planner.estimate import StepEstimate
from gsplit.planner.hardware import PRESETS, Hardware, read_hardware
from gsplit.planner.placement import Loading
from gsplit.planner.plan import make_plan
from gsplit.planner.shapes import PlannedModel
from gsplit.store.reader import Store, open_store
from gsplit_bench.train_study import PEERS

__all__ = ["main"]

CLOSE = 0.05
LEAST_STAGE_S = 1e-3  # stages below that are noise
Record = dict[str, Any]
Predictor = Callable[[list[Record]], dict[str, StepEstimate]]
"""From the records of one point to the estimates of their strategies."""


@dataclass(frozen=True)
class SystemCheck:
    """One strategy at one point, as ``gsplit report`` draws it; ``stages``: predicted and measured seconds."""

    graph: str
    model: str
    ranks: int
    batch_size: int
    features: str
    system: str
    predicted_s: float
    measured_s: float
    stages: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class PointCheck:
    """One point: what was chosen, what was best, and the choice's time over the best's, less one."""

    point: str
    chosen: str
    best: str
    regret: float
    stage_errors: dict[str, float]
    total_errors: dict[str, float]
    systems: tuple[SystemCheck, ...]


@dataclass(frozen=True)
class Summary:
    """Over all points."""

    num_points: int
    share_close: float
    worst_regret: float
    median_stage_error: float
    median_total_error: float


def point_of(record: Record) -> tuple[Any, ...]:
    """What makes records comparable."""
    names = ("graph", "model", "ranks", "replicas", "batch_size", "hidden", "features", "allocator")
    return (*(record.get(name) for name in names), tuple(record["fanout"]))


def check_points(records: Iterable[Record], predict: Predictor, by: str = "wall_s") -> list[PointCheck]:
    """Every point at which at least two of our strategies were measured."""
    points: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record["system"] not in PEERS:
            points[point_of(record)].append(record)
    found = []
    for point, measured in points.items():
        if len({record["system"] for record in measured}) < 2:
            continue
        estimates = predict(measured)
        seconds = {record["system"]: float(record[by]["median"]) for record in measured}
        predicted = {name: step.wall_s if by == "wall_s" else step.cpu_s for name, step in estimates.items()}
        chosen, best = (min(times, key=lambda name: times[name]) for times in (predicted, seconds))
        systems = tuple(_check_system(record, estimates, predicted, seconds) for record in measured)
        errors = {
            f"{check.system} {stage}": own / taken - 1
            for check in systems
            for stage, (own, taken) in check.stages.items()
            if taken >= LEAST_STAGE_S
        }
        totals = {name: predicted[name] / taken - 1 for name, taken in seconds.items()}
        name = ", ".join(str(part) for part in point)
        found.append(PointCheck(name, chosen, best, seconds[chosen] / seconds[best] - 1, errors, totals, systems))
    return found


def _check_system(
    record: Record, estimates: dict[str, StepEstimate], predicted: dict[str, float], seconds: dict[str, float]
) -> SystemCheck:
    name, step = record["system"], estimates[record["system"]]
    stages = {
        stage: (sum(rank.by_name().get(stage, 0.0) for rank in step.ranks) / len(step.ranks), taken)
        for stage, taken in _stages_of(record).items()
    }
    if record["features"] == "disk":  # all ranks wait for it
        stages["load"] = (step.stages.load, stages["load"][1])
    where = (record["graph"], record["model"], record["ranks"], record["batch_size"], record["features"])
    return SystemCheck(*where, name, predicted[name], seconds[name], stages)


def _stages_of(record: Record) -> dict[str, float]:
    """What the ranks' stages took on their cores, which is what is predicted; what the disk took is waited for."""
    stages: dict[str, float] = {**record["stages_s"], **record.get("stages_cpu_s", {})}
    if record["features"] == "disk":
        stages["load"] = record["stages_s"]["load"]
    return stages


def summarise(checks: list[PointCheck]) -> Summary:
    """The figures that the planner is judged by."""
    stages = [abs(error) for check in checks for error in check.stage_errors.values()]
    totals = [abs(error) for check in checks for error in check.total_errors.values()]
    return Summary(
        len(checks),
        sum(check.regret <= CLOSE for check in checks) / len(checks),
        max(check.regret for check in checks),
        median(stages) if stages else 0.0,
        median(totals) if totals else 0.0,
    )


def document(checks: list[PointCheck], summary: Summary, by: str) -> Record:
    """What ``gsplit report`` reads."""
    return {
        "kind": "planner check",
        "by": by,
        "points": [asdict(system) for check in checks for system in check.systems],
        "choices": [{"point": c.point, "chosen": c.chosen, "best": c.best, "regret": c.regret} for c in checks],
        "within_5_percent": summary.share_close,
        "worst_regret": summary.worst_regret,
        "median_stage_error": summary.median_stage_error,
        "median_total_error": summary.median_total_error,
    }


class StorePredictor:
    """Predicts from the stores; counts of a workload are made anew for every point."""

    def __init__(self, folder: Path, hardware: Hardware, threads: int) -> None:
        self._folder, self._hardware, self._threads = folder, hardware, threads
        self._stores: dict[str, Store] = {}

    def __call__(self, records: list[Record]) -> dict[str, StepEstimate]:
        first = records[0]
        store = self._stores.setdefault(first["graph"], open_store(self._folder / f"{first['graph']}.gsplit"))
        workload = Workload.of_store(store, "train", list(first["fanout"]), int(first["batch_size"]))
        shape = PlannedModel(
            first["model"],
            store.num_features,
            int(first["hidden"]),
            max(2, store.num_classes),
            len(first["fanout"]),
        )
        hardware = self._hardware
        if hardware.name == "this":
            rate = measure_sampling(workload)
            hardware = replace(hardware, sample_edges_per_s=rate, far_sample_edges_per_s=rate)
        plan = make_plan(
            store,
            workload,
            shape,
            hardware,
            int(first["ranks"]),
            loading=Loading(
                on_disk=first["features"] == "disk",
                cache_bytes=int(first.get("cache", 0.0) * store.num_vertices * stored_row_bytes(store, ["x"])),
            ),
            threads=self._threads,
            replicas=int(first.get("replicas") or 1),
            strategies=tuple(record["system"] for record in records),
        )
        return {c.setup.strategy: c.step for c in reversed(plan.candidates) if c.setup.ranks == first["ranks"]}


def main(arguments: Sequence[str]) -> int:
    """Read records, predict, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--hardware", default="this")
    parser.add_argument("--threads", type=int, default=1, help="of each rank, as the records were made with")
    parser.add_argument("--by", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    known = PRESETS.get(given.hardware)
    hardware = known or (this_machine() if given.hardware == "this" else read_hardware(Path(given.hardware)))
    records = [record for path in given.records for record in json.loads(path.read_text())["records"]]
    predict = StorePredictor(given.stores, hardware, given.threads)
    checks = check_points(records, predict, f"{given.by}_s")
    if not checks:
        print("no point has two of our strategies", file=sys.stderr)
        return 1
    summary = summarise(checks)
    if given.json:
        print(json.dumps(document(checks, summary, given.by), indent=1))
        return 0
    for check in sorted(checks, key=lambda check: -check.regret):
        print(f"{check.regret:+6.1%}  chosen {check.chosen:22s} best {check.best:22s} {check.point}")
    print(
        f"\n{summary.num_points} points: {summary.share_close:.0%} within {CLOSE:.0%} of the best, worst "
        f"{summary.worst_regret:.0%}; median error of stages {summary.median_stage_error:.0%}, of totals "
        f"{summary.median_total_error:.0%}"
    )
    return 0
