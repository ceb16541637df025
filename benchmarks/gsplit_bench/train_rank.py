"""One rank of ``python -m gsplit_bench train``, started by ``train.run_study`` with the folder of the launch.

The systems of a scenario take turns; in a study of accuracy each trains whole epochs instead.
"""

import functools
import gc
import json
import logging
import os
import resource
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh, init
from gsplit.distributed.launch.launched_rank import fail
from gsplit.errors import GSplitError, InputError, MissingDependencyError, explain
from gsplit.store.reader import Store, open_store
from gsplit.telemetry import StepTelemetry
from gsplit_bench.machine import forget_features, read_clocks
from gsplit_bench.peers.ddp import System
from gsplit_bench.train_study import Scenario
from gsplit_bench.train_systems import StrategySystem, check_store, is_ours, make_system, touch_pages

__all__ = ["EpochResult", "RankResult", "Turn", "run_scenario"]


@dataclass(frozen=True)
class EpochResult:
    """What one epoch came to: the mean loss of its steps, exact accuracies after it, and seconds per step."""

    epoch: int
    loss: float
    losses: list[float]
    accuracies: dict[str, float]
    wall_s: float
    cpu_s: float
    blocked_s: float


def train_epochs(
    systems: Mapping[str, System], scenario: Scenario, store: Store, mesh: Mesh, done: Callable[[int], None]
) -> dict[str, list[EpochResult]]:
    """Train our strategies for the scenario's epochs, one after the other, and evaluate after each. A collective."""
    names = [name for name in ("val", "test") if f"targets/{name}" in store.names]
    if not names:
        raise InputError(explain(store.path, "val or test targets", "none", "import the graph with them"))
    found: dict[str, list[EpochResult]] = {}
    for system_name, system in systems.items():
        assert isinstance(system, StrategySystem)  # peers were refused: evaluation is ours
        trainer, found[system_name] = system.trainer, []
        for epoch in range(scenario.epochs):
            start = read_clocks()
            losses = trainer.train_epoch()
            passed, steps = read_clocks().since(start), len(losses)
            times = (passed.wall_s / steps, passed.cpu_s / steps, passed.blocked_s / steps)
            scores = trainer.evaluate(store, names)
            found[system_name].append(EpochResult(epoch, fmean(losses), losses, scores, *times))
            done(sum(map(len, found.values())))
    return found


@dataclass(frozen=True)
class Turn:
    """What one turn of a system took on this rank, per step; ``seconds`` and ``cpu_seconds`` by stage."""

    wall_s: float
    cpu_s: float
    blocked_s: float
    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    counts: dict[str, float]


@dataclass(frozen=True)
class RankResult:
    """A system of a scenario as one rank saw it; without turns if it could not be run, for the reason in ``note``.

    ``losses``: of every step, warm-up included. ``epochs``: in studies of accuracy, what came of each.
    """

    scenario: int
    system: str
    note: str
    turns: list[Turn] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    batch_bytes: int = 0
    peak_bytes: int = 0
    epochs: list[EpochResult] = field(default_factory=list)


def run_scenario(
    number: int, scenario: Scenario, store: Store, mesh: Mesh, done: Callable[[int], None]
) -> list[RankResult]:
    """Run all systems of a scenario. A collective. ``done`` is told how many turns are over."""
    systems: dict[str, System] = {}
    refused: list[RankResult] = []
    for name in scenario.systems:
        try:
            check_store(store, scenario)
            if scenario.epochs and not is_ours(name):
                raise InputError(explain("--epochs", "strategies of ours", name, "leave it out, or measure turns"))
            systems[name] = make_system(name, scenario, store, mesh)
        except (InputError, MissingDependencyError) as error:  # the same on every rank: it is about settings
            refused.append(RankResult(number, name, str(error)))
    if systems and scenario.features == "memory":
        touch_pages(store)
    if scenario.epochs:
        found = train_epochs(systems, scenario, store, mesh, done)
        return [*(RankResult(number, name, systems[name].note, epochs=found[name]) for name in found), *refused]
    turns = _Turns(scenario, store, mesh)
    for repeat in range(-1, scenario.repeats):
        for place, name in enumerate(list(systems)):
            try:
                turns.run(name, systems[name], warm_up=repeat < 0)
            except InputError as error:  # of a step: the model or the batch cannot be what the system needs
                if repeat >= 0:
                    raise
                del systems[name]
                refused.append(RankResult(number, name, str(error)))
            done((repeat + 1) * len(scenario.systems) + place + 1)
    return [*(turns.result(number, name, system) for name, system in systems.items()), *refused]


class _Turns:
    """The steps of all systems of a scenario; each goes on where its last turn ended."""

    def __init__(self, scenario: Scenario, store: Store, mesh: Mesh) -> None:
        self._scenario, self._store, self._mesh = scenario, store, mesh
        size = int(store.stored_array(f"targets/{scenario.targets}").size)
        self._steps_per_epoch = size // scenario.batch_size  # whole mini-batches only
        self._steps: dict[str, list[StepTelemetry]] = defaultdict(list)
        self._turns: dict[str, list[Turn]] = defaultdict(list)

    def run(self, name: str, system: System, *, warm_up: bool) -> None:
        """One turn of a system. A collective."""
        steps, num_steps = self._steps[name], self._scenario.warm_up if warm_up else self._scenario.steps
        first = len(steps)
        if self._scenario.features == "disk":
            forget_features(self._store, ["x"])
        self._mesh.control.gather_text(
            Call("start together", first, long_wait=True), ""
        )  # all ranks: before every turn
        start = read_clocks()
        for step in range(first, first + num_steps):
            steps.append(system.train_step(*divmod(step, self._steps_per_epoch)))
        for done in steps[first:]:
            done.synchronize()
        passed = read_clocks().since(start)
        if not warm_up:
            times = (passed.wall_s / num_steps, passed.cpu_s / num_steps, passed.blocked_s / num_steps)
            self._turns[name].append(Turn(*times, *_means(steps[first:])))

    def result(self, number: int, name: str, system: System) -> RankResult:
        """What came of a system."""
        steps = self._steps[name]
        return RankResult(
            number,
            name,
            system.note,
            self._turns[name],
            [step.values["loss"] for step in steps],
            max(step.peaks.get("batch_bytes", 0) for step in steps),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def _means(steps: list[StepTelemetry]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Seconds and CPU seconds by stage, and amounts, per step."""

    def mean(found: list[dict[str, float]]) -> dict[str, float]:
        names = sorted({name for step in found for name in step})
        return {name: fmean(step.get(name, 0.0) for step in found) for name in names}

    counts = [{name: float(count) for name, count in step.counts.items()} for step in steps]
    return mean([step.seconds for step in steps]), mean([step.cpu_seconds for step in steps]), mean(counts)


def _run_all(folder: Path, rank: int) -> None:
    scenarios = TypeAdapter(list[Scenario]).validate_json((folder / "scenarios.json").read_bytes())
    if any(scenario.device == "sim" for scenario in scenarios):
        from gsplit_bench.simulated import simulated_device

        with simulated_device():
            _run_scenarios(scenarios, folder, rank)
    else:
        _run_scenarios(scenarios, folder, rank)


def _run_scenarios(scenarios: list[Scenario], folder: Path, rank: int) -> None:
    meshes: dict[int, Mesh] = {}
    with (folder / f"rank-{rank}.jsonl").open("w", buffering=1) as results:
        for number, scenario in enumerate(scenarios):
            if scenario.replicas not in meshes:  # all ranks: they have the same scenarios
                meshes[scenario.replicas] = init(scenario.device, replicas=scenario.replicas)
            store, mesh = open_store(Path(scenario.graph)), meshes[scenario.replicas]
            done = functools.partial(_tell, folder / "progress" if rank == 0 else None, number)
            for found in run_scenario(number, scenario, store, mesh, done):
                results.write(json.dumps(asdict(found)) + "\n")
            gc.collect()  # models and loaders, before the next ones are made
    for mesh in reversed(meshes.values()):  # the first one has joined the ranks, and leaves them
        mesh.close()


def _tell(path: Path | None, scenario: int, turns: int) -> None:
    """Let the launcher know how far the ranks are."""
    if path is not None:
        path.write_text(f"{scenario} {turns}")


def _main(folder: Path, rank: int) -> None:
    logging.getLogger("gsplit").setLevel(logging.ERROR)
    try:
        _run_all(folder, rank)
    except Exception as error:
        if not isinstance(error, GSplitError):
            traceback.print_exc()
        fail(error, 2)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(os.environ["RANK"]))
