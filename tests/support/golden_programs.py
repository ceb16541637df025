"""The golden record: what training computed before the code was rebuilt, and the programs that compute it again.

Losses of five steps of Adam and a digest of their gradients, in float64, for models x strategies x ranks x
partitioned or not x dropout x BatchNorm. ``python tests/support/golden_programs.py`` writes the record anew;
that is done only where a result is meant to change, and the commit says why.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch_geometric.data import Data

from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.loading.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize
from gsplit_bench.exactness import CLASSES, WIDTH, make_model
from gsplit_bench.exactness import Case as ModelCase
from gsplit_bench.ranks import run_ranks

MODELS = ("sage", "sage_max", "gat", "gatv2", "gin", "pna", "transformer", "graphconv", "edgecnn", "gcn")
RECORD = Path(__file__).resolve().parents[1] / "assets" / "golden" / "training.json"
VERTICES, BATCH, STEPS = 120, 16, 5


@dataclass(frozen=True)
class GoldenCase:
    model: str
    strategy: str
    ranks: int
    partitioned: bool
    dropout: float
    norm: str | None


def golden_cases() -> list[GoldenCase]:
    """Four for every model."""
    cases = []
    for model in MODELS:
        cases += [
            GoldenCase(model, "split", 1, False, 0.0, None),
            GoldenCase(model, "data", 2, False, 0.5, None),
            GoldenCase(model, "split", 2, True, 0.5, None),
            GoldenCase(model, "split", 3, True, 0.5, "batch_norm"),
        ]
    return cases


def _graph() -> tuple[Data, torch.Tensor]:
    """Hubs, self-loops, duplicates and isolated vertices; and a part for every vertex."""
    rng = np.random.default_rng(2026)
    n, edges = VERTICES, 7 * VERTICES
    src, dst = (n * rng.random(edges) ** 2).astype(np.int64), (n * rng.random(edges) ** 1.5).astype(np.int64)
    src[: n // 8] = dst[: n // 8]
    data = Data(
        x=torch.from_numpy(rng.normal(size=(n, WIDTH))),
        y=torch.from_numpy(rng.integers(0, CLASSES, n)),
        edge_index=torch.from_numpy(np.stack([src, dst])),
        train_mask=torch.from_numpy(rng.random(n) < 0.6),
    )
    return data, torch.from_numpy(rng.integers(0, 3, n))


def _digest(model: torch.nn.Module) -> list[float]:
    """Norm of the whole gradient, and its product with a fixed vector: rounding moves them by rounding."""
    flat = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )
    weights = torch.cos(torch.arange(flat.numel(), dtype=torch.float64))
    return [float(flat.norm()), float(flat @ weights)]


def train_golden(mesh: Mesh, cases: list[GoldenCase]) -> list[dict[str, Any]]:
    """Losses and gradient digests of every case on this mesh; the same on every rank."""
    data, parts = _graph()
    results = []
    for case in cases:
        partition = parts if case.partitioned else None
        model = parallelize(make_model(ModelCase(case.model, case.strategy, "", case.dropout, None, case.norm)), mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = NeighborLoader(
            data,
            [4, 3, 3],
            "train",
            batch_size=BATCH,
            strategy=case.strategy,
            partition=partition,
            mesh=mesh,
            seed=11,
        )
        losses, gradients = [], []
        for step in range(STEPS):
            batch = loader.make_batch(*divmod(step, len(loader)))
            out = model(batch.x, batch.edge_index)
            loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
            loss.backward()
            losses.append(float(loss.detach()))
            gradients.append(_digest(model))
            optimizer.step()
            optimizer.zero_grad()
        results.append({**asdict(case), "losses": losses, "gradients": gradients})
    return results


def run_golden(ranks: int) -> list[list[dict[str, Any]]]:
    """All cases of a number of ranks, as every rank computed them."""
    cases = [case for case in golden_cases() if case.ranks == ranks]
    if ranks == 1:
        return [train_golden(solo_mesh(), cases)]
    return run_ranks(train_golden, ranks, cases)


if __name__ == "__main__":
    rows = [row for ranks in (1, 2, 3) for row in run_golden(ranks)[0]]
    RECORD.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
