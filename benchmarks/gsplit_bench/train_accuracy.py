"""Loss and accuracy against epochs, for every strategy (the paper's Figure 7): all curves must be one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.store.reader import Store
from gsplit_bench.clocks import read_clocks
from gsplit_bench.peers.protocol import System
from gsplit_bench.train_study import Scenario
from gsplit_bench.train_systems import StrategySystem

__all__ = ["EpochResult", "train_epochs"]


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
