"""How right is the choice by trial steps? The points of a planner check again, with what ``gsplit plan`` does now.

python -m gsplit_bench planner-choice POINTS.json --stores FOLDER --out RECORD.json [--minutes 60]

POINTS.json is a document of ``planner-check``: its graphs, models, ranks, batch sizes and places of features are the
points, and the strategies measured there the candidates. At every point all of them train in turn (``run.trial``). The
first ``TRIAL`` steps of the best three by the estimate are the trial, which chooses as ``gsplit plan`` does. The steps
after them, of all strategies, say which one is best: the choice has not seen them. The estimate's own choice is judged
by the same steps.

Every point is written as soon as it is measured, and a second call continues. Points are in a random order that is
always the same, so those of a call that was bounded by ``--minutes`` are a sample of all.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gsplit.features.cache import stored_row_bytes
from gsplit.partitioning.presample import Workload
from gsplit.planner.auto import fit_to_graph
from gsplit.planner.calibration import this_machine
from gsplit.planner.hardware import Hardware
from gsplit.planner.placement import Loading
from gsplit.planner.plan import Setup, find_fastest, make_plan, shortlist
from gsplit.planner.shapes import PlannedModel
from gsplit.run.config import TrainSettings
from gsplit.run.trial import TimedSteps, medians, time_on_ranks
from gsplit.store.reader import Store, open_store
from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.planner_check import CLOSE

__all__ = ["main"]

TRIAL = TrainSettings.model_fields["trial_steps"].default
"""Steps of the trial, as many as ``gsplit plan`` takes."""
HELD_OUT = 5
"""Steps after the trial, which judge the choice."""
HIDDEN = 256
FANOUT = [15, 15, 15]
CACHED = 0.1
"""Share of all rows that a rank caches if features are on disk."""

By = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Point:
    """What the candidates are compared at."""

    graph: str
    model: str
    ranks: int
    batch_size: int
    features: str


@dataclass(frozen=True)
class Judged:
    """The regret of a choice at a point: the time of the chosen strategy over that of the best, less one."""

    chosen: str
    best: str
    regret: float


def read_points(path: Path) -> dict[Point, list[str]]:
    """The points of a planner check and their strategies, in a random order."""
    found: dict[Point, list[str]] = {}
    for entry in json.loads(path.read_text())["points"]:
        point = Point(*(entry[name] for name in ("graph", "model", "ranks", "batch_size", "features")))
        found.setdefault(point, [])
        if entry["system"] not in found[point] and entry["system"] != "push_pull":  # it was removed
            found[point].append(entry["system"])
    points = list(found)
    random.Random(0).shuffle(points)
    return {point: found[point] for point in points}


def measure_point(point: Point, strategies: list[str], store: Store, machine: Hardware) -> dict[str, Any]:
    """The times of all steps of every strategy, and the strategies in the order of the estimate."""
    on_disk = point.features == "disk"
    cache_bytes = int(CACHED * store.num_vertices * stored_row_bytes(store, ["x"])) if on_disk else 0
    workload = Workload.of_store(store, "train", FANOUT, point.batch_size)
    hardware = fit_to_graph(machine, workload)
    plan = make_plan(
        store,
        workload,
        PlannedModel(point.model, store.num_features, HIDDEN, store.num_classes, len(FANOUT)),
        hardware,
        point.ranks,
        loading=Loading(on_disk=on_disk, cache_bytes=cache_bytes),
        replicas=1,
        strategies=tuple(strategies),
    )
    ranked = [candidate for candidate in plan.candidates if candidate.setup.ranks == point.ranks]
    settings = TrainSettings(
        model=point.model,
        hidden=HIDDEN,
        fanout=FANOUT,
        batch_size=point.batch_size,
        features_on_disk=on_disk,
        cache=str(cache_bytes),
        trial_steps=TRIAL + HELD_OUT,
    )
    setups = [candidate.setup for candidate in ranked]
    start_s = time.perf_counter()
    times = time_on_ranks(setups, settings, store.path, point.ranks, limit_s=float("inf"))
    return {
        **asdict(point),
        "estimated_s": {candidate.setup.strategy: candidate.step.wall_s for candidate in ranked},
        "shortlist": [candidate.setup.strategy for candidate in shortlist(ranked, hardware)],
        "steps_s": {setup.strategy: steps for setup, steps in times.items()},
        "seconds": time.perf_counter() - start_s,
    }


def judge(record: dict[str, Any], by: By, *, chosen_by: By | None = None) -> tuple[Judged, Judged]:
    """The choice by the trial and that by the estimate, judged by the steps after the trial.

    The trial chooses by the same clock, or by another one: ``gsplit plan`` chooses by wall time.
    """
    trial: TimedSteps = {}
    held_out: TimedSteps = {}
    for name, steps in record["steps_s"].items():
        setup = Setup(name, record["ranks"], 1)
        held_out[setup] = _seconds(steps[TRIAL:], by)
        if name in record["shortlist"]:
            trial[setup] = _seconds(steps[:TRIAL], chosen_by or by)
    truth = {setup.strategy: time.wall_s for setup, time in medians(held_out).items()}
    best = min(truth, key=lambda name: truth[name])
    estimated = next(iter(record["steps_s"]))

    def judged(chosen: str) -> Judged:
        return Judged(chosen, best, truth[chosen] / truth[best] - 1)

    return judged(find_fastest(medians(trial)).strategy), judged(estimated)


def _seconds(steps: list[list[float]], by: By) -> list[tuple[float, float]]:
    return [(step[0], step[0]) if by == "wall" else (step[1], step[1]) for step in steps]


def summarise(records: list[dict[str, Any]], by: By, *, chosen_by: By | None = None) -> dict[str, Any]:
    """Share of the points whose choice is within 5 % of the best, and the worst regret."""
    found: dict[str, Any] = {}
    for name, judged in zip(
        ("trial", "estimate"),
        zip(*(judge(record, by, chosen_by=chosen_by) for record in records), strict=True),
        strict=True,
    ):
        regrets = [each.regret for each in judged]
        found[name] = {
            "within_5_percent": sum(regret <= CLOSE for regret in regrets) / len(regrets),
            "worst_regret": max(regrets),
        }
    return found


def describe(records: list[dict[str, Any]], num_points: int) -> Iterator[str]:
    """A table of choices by CPU seconds, and the summary of both clocks."""
    yield "| point | by trial | regret | by estimate | regret | best |"
    yield "|---|---|---|---|---|---|"
    for record in sorted(records, key=lambda record: -judge(record, "cpu")[0].regret):
        trial, estimate = judge(record, "cpu")
        point = ", ".join(str(record[name]) for name in ("graph", "model", "ranks", "batch_size", "features"))
        regrets = f"{trial.chosen} | {trial.regret:.1%} | {estimate.chosen} | {estimate.regret:.1%}"
        yield f"| {point} | {regrets} | {trial.best} |"
    yield ""
    for by in ("cpu", "wall"):
        for name, summary in summarise(records, by).items():
            share = summary["within_5_percent"]
            yield (
                f"by {by} seconds, choice by {name}: {share:.0%} of {len(records)} of {num_points} points within "
                f"{CLOSE:.0%} of the best, worst {summary['worst_regret']:.0%}"
            )


def main(arguments: Sequence[str]) -> None:
    """Measure the points that are missing, write them, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("--stores", type=Path, required=True, help="folder with GRAPH.gsplit")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further point after this time")
    given = parser.parse_args(arguments)
    points = read_points(given.points)
    document: dict[str, Any] = {
        "kind": "planner choice",
        "commit": current_commit(),
        "versions": installed_versions(),
        "machine": describe_machine(),
        "trial_steps": TRIAL,
        "held_out_steps": HELD_OUT,
        "num_points": len(points),
        "records": [],
    }
    if given.out.exists():
        document = json.loads(given.out.read_text())
    records = document["records"]
    done = {Point(*(record[name] for name in Point.__dataclass_fields__)) for record in records}
    end_s = time.monotonic() + 60 * given.minutes
    machine = this_machine()
    for point, strategies in points.items():
        if point in done or time.monotonic() > end_s:
            continue
        store = open_store(given.stores / f"{point.graph}.gsplit")
        records.append(measure_point(point, strategies, store, machine))
        document["summary"] = {by: summarise(records, by) for by in ("cpu", "wall")}
        given.out.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{len(records)} of {len(points)} points, {records[-1]['seconds']:.0f} s: {point}", flush=True)
    for line in describe(records, len(points)):
        print(line)
