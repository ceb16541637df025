"""What ranks run in tests of peers."""

from pathlib import Path

import torch

from gsplit.distributed.comm.mesh import Mesh
from gsplit.store.reader import open_store
from gsplit_bench.peers.p3 import P3System
from gsplit_bench.train_study import Scenario

__all__ = ["p3_losses"]


def p3_losses(mesh: Mesh, path: str, scenario: Scenario) -> tuple[list[float], dict[str, int]]:
    """Losses of the first steps of four epochs, in float64, and the counts of the first."""
    system = P3System(scenario, open_store(Path(path)), mesh, torch.float64)
    steps = [system.train_step(epoch, 0) for epoch in range(4)]
    return [float(step.values["loss"]) for step in steps], dict(steps[0].counts)
