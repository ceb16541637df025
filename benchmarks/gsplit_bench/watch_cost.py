"""What watching every collective costs: CPU time of writing down, comparing and stages, over that of a step.

    python -m gsplit_bench watch-cost [RANKS]

Every call of the watch in the measured steps is timed by the CPU clock of its thread, less what timing an empty call takes (the clock is a system
call), and set against the CPU time of the steps. The same for the sums of weights, which travel with some backwards.
"""

import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

from gsplit.distributed.comm.mesh import Mesh
from gsplit.distributed.watch.collective_watch import CollectiveWatch
from gsplit.distributed.watch.status_page import StatusPage
from gsplit.loading.loader import NeighborLoader
from gsplit.nn import gradients
from gsplit.nn.parallelize import parallelize
from gsplit.nn.runtime import ModelStatus
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import open_store
from gsplit_bench.ranks import run_ranks

__all__ = ["main"]

STEPS, WARM_UP = 30, 18  # three backwards with sums of weights


def _timed(spent: list[float], method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*args, **options)
        finally:
            spent.append(time.thread_time() - start)

    return run


def measure(mesh: Mesh, path: str) -> dict[str, float]:
    """Train; seconds of CPU of a step and of the watch in it, medians, and the calls of the watch in a step."""
    torch.manual_seed(0)
    store = open_store(path)
    model = parallelize(GraphSAGE(store.num_features, 64, 3, store.num_classes), mesh)
    loader = NeighborLoader(store, [10, 10, 10], "train", batch_size=512, mesh=mesh)
    spent: list[float] = []
    for owner, name in (
        (CollectiveWatch, "begin"),
        (StatusPage, "wait"),
        (StatusPage, "write_line"),
        (ModelStatus, "describe"),
    ):
        setattr(owner, name, _timed(spent, getattr(owner, name)))
    summed: list[float] = []
    gradients._Buffer._sum_of_weights = _timed(summed, gradients._Buffer._sum_of_weights)  # type: ignore[method-assign]
    empty: list[float] = []
    for _ in range(2000):
        _timed(empty, lambda: None)()
    steps, watched, calls = [], [], []
    for number in range(WARM_UP + STEPS):
        spent.clear()
        start = time.process_time()
        batch = loader.make_batch(0, number % len(loader))
        loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        model.zero_grad()
        if number >= WARM_UP:
            steps.append(time.process_time() - start)
            watched.append(sum(spent) - len(spent) * median(empty))
            calls.append(len(spent))
    return {
        "step_cpu_s": median(steps),
        "watch_cpu_s": median(watched),
        "calls": median(calls),
        "clock_s": median(empty),
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "weights_cpu_s": (sum(summed) - len(summed) * median(empty)) / (WARM_UP + STEPS),
    }


def main(arguments: Sequence[str]) -> None:
    import tempfile

    ranks = int(arguments[0]) if arguments else 2

    with tempfile.TemporaryDirectory() as folder:
        graph = PlantedGraph(20_000, 400_000, num_features=64)
        store = build_store(synthetic_source(graph), f"{folder}/demo.gsplit")
        found = run_ranks(measure, ranks, str(store.path), timeout_s=300.0)[0]
    shares = {
        "share": found["watch_cpu_s"] / found["step_cpu_s"],
        "weights_share": found["weights_cpu_s"] / found["step_cpu_s"],
    }
    print(json.dumps(found | {"ranks": ranks} | shares, indent=1))
