"""What ranks run in tests of peers."""

from pathlib import Path

import torch

from gsplit.distributed.comm.mesh import Mesh
from gsplit.store.reader import open_store
from gsplit_bench.peers.p3 import P3System
from gsplit_bench.train_study import Scenario
from gsplit_bench.train_systems import make_system

__all__ = ["cached_steps", "p3_losses"]


def p3_losses(mesh: Mesh, path: str, scenario: Scenario) -> tuple[list[float], dict[str, int]]:
    """Losses of the first steps of four epochs, in float64, and the counts of the first."""
    system = P3System(scenario, open_store(Path(path)), mesh, torch.float64)
    steps = [system.train_step(epoch, 0) for epoch in range(4)]
    return [float(step.values["loss"]) for step in steps], dict(steps[0].counts)


def cached_steps(mesh: Mesh, path: str, scenario: Scenario, name: str) -> tuple[list[float], int]:
    """Losses of the first three steps of a system, and the rows that its cache did not have on this rank."""
    system = make_system(name, scenario, open_store(Path(path)), mesh)
    steps = [system.train_step(0, step) for step in range(3)]
    missed = sum(step.counts["rows_loaded"] - step.counts["cache_hits"] for step in steps)
    return [float(step.values["loss"]) for step in steps], missed
