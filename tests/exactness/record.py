"""The golden record: losses and digests of gradients of the harness's cases, as ranks computed them when it was made.

``python -m tests.exactness record`` writes it; that is done only where a result is meant to change, and the commit says
why. Two records that one machine has written, before and after a change, are compared bit by bit: numbers are in full.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from gsplit_bench.ranks import run_ranks
from tests.exactness.case import Case
from tests.exactness.cover import covering_cases, more_cases
from tests.exactness.training import Run, train_cases

__all__ = ["EQUAL", "RECORD", "digest", "read_record", "train_on_mesh", "write_record"]

RECORD = Path(__file__).resolve().parents[1] / "assets" / "golden" / "training.json"
EQUAL = (*covering_cases(), *more_cases())
"""The cases whose results are those of one process."""


def train_on_mesh(mesh: str, cases: list[Case], folder: Path) -> dict[Case, list[Run | str]]:
    """Some cases, of every rank, in one start of ranks; 3 ranks exchange rows over the network and not in memory."""
    replicas, splits = map(int, mesh.split(" x "))
    ranks = run_ranks(
        train_cases,
        replicas * splits,
        cases,
        folder,
        replicas=replicas,
        device="sim:0",
        shared_memory=splits != 3,
        timeout_s=6000.0,
    )
    return dict(zip(cases, map(list, zip(*ranks, strict=True)), strict=True))


def digest(run: Run) -> dict[str, Any]:
    """Losses, and of every step's gradient the norm and the product with a fixed vector."""
    products = []
    for gradients in run.gradients:
        flat = np.concatenate([np.zeros(0) if g is None else g.reshape(-1) for g in gradients.values()])
        products.append([float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size)))])
    return {"losses": run.losses, "gradients": products}


def read_record() -> dict[str, dict[str, Any]]:
    """Digests by case."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return found


def write_record(path: Path, folder: Path) -> None:
    """Train all cases and write their digests, those of rank 0."""
    lines = []
    for mesh in dict.fromkeys(case.mesh for case in EQUAL):
        runs = train_on_mesh(mesh, [case for case in EQUAL if case.mesh == mesh], folder)
        for case, (first, *_) in runs.items():
            assert not isinstance(first, str), first
            lines.append(f"{json.dumps(str(case))}: {json.dumps(digest(first))}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
