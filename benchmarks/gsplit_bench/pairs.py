"""Steps of link prediction: what data parallelism repeats, and CPU seconds of ``split`` and ``data``.

Real ranks train GraphSAGE on the edges of a partitioned store as pairs, with binary negatives. Strategies take single
steps in turn, so that whatever the machine does meanwhile falls on all of them. Reported are medians over the steps of
CPU seconds, input rows and edges, each summed over the ranks, relative to ``split``.
"""

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit_bench.ranks import run_ranks

__all__ = ["STRATEGIES", "PairCost", "bench_pairs", "train_pairs"]

STRATEGIES = ("split", "data", "data(owner)")
_WARM_UP = 2


@dataclass(frozen=True)
class PairCost:
    """Medians over the steps, summed over the ranks; ratios are to ``split``."""

    strategy: str
    ranks: int
    steps: int
    cpu_s: float
    rows: float
    edges: float
    cpu_ratio: float
    rows_ratio: float
    edges_ratio: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def train_pairs(
    mesh: Mesh, path: str, num_neighbors: list[int], batch_size: int, amount: int, steps: int
) -> dict[str, list[tuple[float, int, int]]]:
    """CPU seconds, input rows and edges of this rank for every step and strategy."""
    store = gsplit.open(path)
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(store.num_edges, generator=generator)[: (steps + _WARM_UP) * batch_size].sort().values
    dst = torch.searchsorted(torch.from_numpy(store.graph.indptr.copy()), places, right=True) - 1
    src = torch.from_numpy(store.graph.indices[places.numpy()].astype("int64"))
    original = torch.from_numpy(store.original_ids().copy())
    pairs = torch.stack([original[src], original[dst]])
    sides = {}
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        model = gsplit.parallelize(GraphSAGE(store.num_features, 256, len(num_neighbors), 256), mesh)
        loader = gsplit.LinkNeighborLoader(
            store,
            num_neighbors,
            pairs,
            neg_sampling={"mode": "binary", "amount": amount},
            batch_size=batch_size,
            strategy=strategy,
            mesh=mesh,
        )
        sides[strategy] = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-3), loader)
    found: dict[str, list[tuple[float, int, int]]] = {strategy: [] for strategy in STRATEGIES}
    for step in range(steps + _WARM_UP):
        for strategy, trainer in sides.items():
            start = time.process_time()
            batch = trainer.state.loader.make_batch(0, step)
            trainer.train_step(batch)
            spent = time.process_time() - start
            if step >= _WARM_UP:
                counts = batch.telemetry.counts
                found[strategy].append((spent, counts["input_rows"], counts["edges"]))
    return found


def bench_pairs(
    path: str, ranks: int, num_neighbors: list[int], *, batch_size: int = 1024, amount: int = 1, steps: int = 10
) -> list[PairCost]:
    """Train on ``ranks`` ranks and add up their costs."""
    each = run_ranks(train_pairs, ranks, path, num_neighbors, batch_size, amount, steps, timeout_s=3000.0)
    costs: dict[str, tuple[float, float, float]] = {}
    for strategy in STRATEGIES:
        sums = [[sum(rank[strategy][step][k] for rank in each) for k in range(3)] for step in range(steps)]
        cpu_s, rows, edges = (float(median(step[k] for step in sums)) for k in range(3))
        costs[strategy] = (cpu_s, rows, edges)
    return [
        PairCost(strategy, ranks, steps, *costs[strategy], *(costs[strategy][k] / costs["split"][k] for k in range(3)))
        for strategy in STRATEGIES
    ]
